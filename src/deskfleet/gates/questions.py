"""What gates ask that both families answer: codes hidden in texts, counting, tools, JSON, pictures, open text.

Owns the wordings, which are among those that Pocket was trained with. Values are drawn from the generator that is
given, so that no two runs ask the same and nothing can be in a cache.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from deskfleet.evaluation.judgement import ExpectedCall
from deskfleet.evaluation.questions import StoredNeedle, hide
from deskfleet.gates.family import QuestionSet
from deskfleet.gates.puzzle import Puzzle, anything, counts, is_text, json_object, last_number, makes, says
from deskfleet.gates.ruler import TokenRuler
from deskfleet.model.embedded import POCKET

COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 210),
    "yellow": (240, 210, 40),
}
_HOLDER_COLOURS = ("red", "green", "blue", "yellow", "purple", "grey", "white", "brown", "golden", "pink")
_THINGS = (
    "drum",
    "lamp",
    "boat",
    "chair",
    "bell",
    "book",
    "map",
    "cart",
    "lantern",
    "wheel",
    "basket",
    "clock",
)
_CITIES = (
    "Oslo",
    "Rome",
    "Paris",
    "Berlin",
    "Madrid",
    "Vienna",
    "Prague",
    "Warsaw",
    "Athens",
    "Dublin",
    "Tokyo",
)
_NAMES = ("Nora", "Felix", "Clara", "Hugo", "Mira", "Simon", "Ada", "Leo", "Rosa", "Paul")
_ANIMALS = ("fox", "dog", "horse", "duck", "cat", "bear", "mouse", "owl")
_CODE_TOKENS = 24

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TIMER = {
    "type": "function",
    "function": {
        "name": "set_timer",
        "description": "Start a timer.",
        "parameters": {
            "type": "object",
            "properties": {"minutes": {"type": "integer"}},
            "required": ["minutes"],
        },
    },
}


def user(text: str) -> list[dict[str, Any]]:
    """Return the messages of one question."""
    return [{"role": "user", "content": text}]


def codes(
    ruler: TokenRuler,
    num_tokens: int,
    rng: Random,
    *,
    depths: Sequence[float] = (0.5,),
    ask: int | None = 0,
    spare_tokens: int,
    label: str = "",
) -> Puzzle:
    """Return a question about a secret code in a text that a server counts about `num_tokens` in.

    A code stands at each of `depths` (0 the beginning, 1 the end), number `ask` of them is asked for, or all of them
    with `ask` None. The text begins with six random digits: no server has seen its first tokens before, as few as a
    cache may keep.
    """
    holders = rng.sample(_holders(), len(depths))
    values = rng.sample(range(10000, 99999), len(holders))
    statements = [
        f"The secret code of {holder} is {value}." for holder, value in zip(holders, values, strict=True)
    ]
    asked_tokens = ruler.to_ask(num_tokens)
    asked = tuple(range(len(depths))) if ask is None else (ask,)
    named = ", ".join(holders[number] for number in asked[:-1])
    named = f"{named} and {holders[asked[-1]]}" if named else holders[asked[-1]]
    needle = StoredNeedle(
        thinking=False,
        head=f"Text {rng.randrange(100_000, 999_999)}.",
        statements=tuple(statements),
        question=f"What is the secret code of {named}?"
        if len(asked) == 1
        else f"Tell me the secret codes of {named}.",
        answer="",
        answer_tokens=_CODE_TOKENS * len(asked),
    )
    hidden = hide(needle, asked_tokens, depths, rng)
    wanted = [str(values[number]) for number in asked]
    others = tuple(str(value) for value in values if str(value) not in wanted)
    return Puzzle(
        label or f"a code in {num_tokens:,} tokens",
        hidden.request,
        says(*wanted, but_not=others),
        _CODE_TOKENS * len(asked) + spare_tokens,
        tag=wanted[0],
        asked_tokens=asked_tokens,
    )


@cache
def _holders() -> tuple[str, ...]:
    return tuple(f"the {colour} {thing}" for colour in _HOLDER_COLOURS for thing in _THINGS)


def hundred(questions: QuestionSet) -> Puzzle:
    """Return the question for the numbers from 1 to 100, a long answer that everybody knows beforehand."""
    text = "Count to 100." if questions.name == POCKET else _COUNT_IN_FULL
    return Puzzle("counting to 100", {"messages": user(text)}, counts(1, 100), 420 + questions.spare_tokens)


_COUNT_IN_FULL = "Count from 1 to 100, separated by commas. Write every number in digits and nothing else."


def count_cut(questions: QuestionSet, max_tokens: int) -> Puzzle:
    """Return the same question for the first `max_tokens` of its answer, whatever they are."""
    return replace(hundred(questions), label="a count that is cut", check=anything, max_tokens=max_tokens)


def count_on(first: int, max_tokens: int) -> Puzzle:
    """Return a question for 60 numbers from `first` on, cut at `max_tokens`: another one for each stream."""
    text = f"Count from {first} to {first + 59}."
    return Puzzle(f"counting from {first}", {"messages": user(text)}, anything, max_tokens)


def story(rng: Random, max_tokens: int) -> Puzzle:
    """Return a question for open text. A sound model that goes on until it is cut is right."""
    animal = rng.choice(_ANIMALS)
    return Puzzle(
        f"a story about a {animal}",
        {"messages": user(f"Tell me a story about a {animal}.")},
        is_text,
        max_tokens,
    )


def timer(minutes: int, spare_tokens: int) -> Puzzle:
    """Return a question that one tool call answers."""
    return Puzzle(
        f"a timer of {minutes} minutes",
        {"messages": user(f"Set a timer for {minutes} minutes."), "tools": [WEATHER, TIMER]},
        makes(ExpectedCall("set_timer", {"minutes": minutes})),
        72 + spare_tokens,
    )


def two_calls(rng: Random, spare_tokens: int) -> Puzzle:
    """Return a question that takes two tool calls in one answer."""
    city, minutes = rng.choice(_CITIES), rng.randint(2, 99)
    return Puzzle(
        f"the weather in {city} and a timer of {minutes} minutes",
        {
            "messages": user(f"What is the weather in {city}? Set a timer for {minutes} minutes."),
            "tools": [WEATHER, TIMER],
        },
        makes(ExpectedCall("get_weather", {"city": city}), ExpectedCall("set_timer", {"minutes": minutes})),
        128 + spare_tokens,
    )


def weather_told(rng: Random, spare_tokens: int) -> Puzzle:
    """Return a conversation in which a tool has answered: its result must be in what is said."""
    city, weather = rng.choice(_CITIES), rng.choice(("rain", "snow", "fog", "frost"))
    call = {
        "id": "call_1_0",
        "type": "function",
        "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
    }
    messages = [
        *user(f"What is the weather in {city}?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1_0", "content": json.dumps({"weather": weather})},
    ]
    return Puzzle(
        f"what the tool said of {city}",
        {"messages": messages, "tools": [WEATHER, TIMER]},
        says(weather),
        32 + spare_tokens,
    )


def person(rng: Random, spare_tokens: int, *, enforced: bool) -> Puzzle:
    """Return a question for a JSON object; where `enforced` the schema is the response format, else in the prompt."""
    name, city, age = rng.choice(_NAMES), rng.choice(_CITIES), rng.randint(18, 80)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
        "required": ["name", "age", "city"],
        "additionalProperties": False,
    }
    told = f"The name is {name}. She is {age} years old. She lives in {city}."
    if enforced:
        fields: dict[str, Any] = {
            "messages": user(f"Extract the person from this text as JSON.\n\n{told}"),
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema},
            },
        }
    else:
        text = f"Extract the person as JSON that follows this schema:\n{json.dumps(schema)}\n\n{told}"
        fields = {"messages": user(text)}
    how = "a response format" if enforced else "a schema in the prompt"
    value = {"name": name, "age": age, "city": city}
    return Puzzle(f"JSON by {how}", fields, json_object(value), 48 + spare_tokens)


def square(colour: str, spare_tokens: int) -> Puzzle:
    """Return a question about the colour of a square in a picture."""
    return Puzzle(
        f"a {colour} square",
        {"messages": [{"role": "user", "content": [picture(colour), {"type": "text", "text": ASK_COLOUR}]}]},
        says(colour, but_not=tuple(other for other in COLOURS if other != colour)),
        24 + spare_tokens,
    )


ASK_COLOUR = "What colour is the square?"


def picture(colour: str) -> dict[str, Any]:
    """Return the part of a message that shows a coloured square on white, 126 by 126 pixels."""
    image = Image.new("RGB", (126, 126), (255, 255, 255))
    ImageDraw.Draw(image).rectangle((36, 36, 90, 90), fill=COLOURS[colour])
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def plain(text: str, max_tokens: int) -> Puzzle:
    """Return a question whose answer is not judged."""
    return Puzzle(text[-40:], {"messages": user(text)}, anything, max_tokens)


def number(text: str, value: int, max_tokens: int) -> Puzzle:
    """Return a question whose answer ends with a number."""
    return Puzzle(text, {"messages": user(text)}, last_number(value), max_tokens)


__all__ = [
    "ASK_COLOUR",
    "COLOURS",
    "TIMER",
    "WEATHER",
    "codes",
    "count_cut",
    "count_on",
    "hundred",
    "number",
    "person",
    "picture",
    "plain",
    "square",
    "story",
    "timer",
    "two_calls",
    "user",
    "weather_told",
]
