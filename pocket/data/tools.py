"""Tool calls: definitions of invented tools, requests, calls in V4.1 markup, answers from results, polite refusals.

Owns the tools. Half of them are written out, the others are composed (`verb_noun` with random parameters), so that
a model must read definitions instead of knowing tools by heart. Held out: the requests of a conversation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from pocket.data.example import Call, Example, Expect, Json, Message, draw_effort, reasoning
from pocket.data.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    FOODS,
    NAMES,
    OBJECTS,
    PLACES,
    SUBJECTS,
    WEATHER,
    WEEKDAYS,
    article,
    joined,
)

TASK = "tools"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: its schema without the description, and a way to draw a value."""

    name: str
    schema: Json
    draw: Callable[[Random], Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. `requests` mention every parameter as `{name}`; `result` draws what `answer` tells as `{value}`."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    result_key: str
    result: Callable[[Random], Any]
    answer: str

    def definition(self) -> Json:
        """Return the function object of the tool's definition."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": {
                "type": "object",
                "properties": {parameter.name: parameter.schema for parameter in self.parameters},
                "required": [parameter.name for parameter in self.parameters],
            },
        }


def _text(name: str, values: tuple[str, ...]) -> Parameter:
    return Parameter(name, {"type": "string"}, lambda rng: rng.choice(values))


def _whole(name: str, low: int, high: int) -> Parameter:
    return Parameter(name, {"type": "integer"}, lambda rng: rng.randint(low, high))


def _decimal(name: str) -> Parameter:
    return Parameter(name, {"type": "number"}, lambda rng: rng.randint(1, 999) / 10)


def _one_of(name: str, *values: str) -> Parameter:
    return Parameter(name, {"type": "string", "enum": list(values)}, lambda rng: rng.choice(values))


def _several(name: str, values: tuple[str, ...]) -> Parameter:
    schema = {"type": "array", "items": {"type": "string"}}
    return Parameter(name, schema, lambda rng: rng.sample(values, rng.randint(1, 3)))


def _from(values: tuple[str, ...]) -> Callable[[Random], Any]:
    return lambda rng: rng.choice(values)


def _number(low: int, high: int) -> Callable[[Random], Any]:
    return lambda rng: rng.randint(low, high)


_TEXTS = ("I am late", "see you soon", "call me", "dinner is ready", "thank you")
_WRITTEN = (
    Tool("get_weather", "Return the weather of a city.", (_text("city", CITIES),),
         ("What is the weather in {city}?", "How is the weather in {city}?", "Tell me the weather in {city}."),
         "weather", _from(WEATHER), "The weather in {city} is {value}."),
    Tool("get_temperature", "Return the temperature of a city.",
         (_text("city", CITIES), _one_of("unit", "celsius", "fahrenheit")),
         ("How warm is it in {city} in {unit}?", "What is the temperature in {city} in {unit}?"),
         "temperature", _number(-20, 40), "It is {value} degrees {unit} in {city}."),
    Tool("send_message", "Send a message to a person.",
         (_text("recipient", NAMES), _text("text", _TEXTS)),
         ('Send {recipient} the message "{text}".', 'Write to {recipient}: "{text}".'),
         "status", _from(("sent", "delivered")), "The message to {recipient} was {value}."),
    Tool("set_timer", "Start a timer.", (_whole("minutes", 1, 120),),
         ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes."),
         "timer_id", _number(1, 99), "Timer {value} runs for {minutes} minutes."),
    Tool("add", "Add two numbers.", (_whole("a", 0, 9999), _whole("b", 0, 9999)),
         ("Add {a} and {b} with the tool.", "Use the tool to add {a} and {b}."),
         "sum", _number(1, 9999), "The sum is {value}."),
    Tool("book_table", "Reserve a table in a restaurant.",
         (_text("day", WEEKDAYS), _whole("hour", 17, 22), _whole("guests", 2, 12)),
         ("Book a table for {guests} on {day} at {hour}.", "Reserve a table on {day} at {hour} for {guests} guests."),
         "table", _number(1, 40), "Table {value} is reserved on {day} at {hour}."),
    Tool("find_train", "Find the next train between two cities.",
         (_text("origin", CITIES), _text("destination", CITIES)),
         ("When is the next train from {origin} to {destination}?", "Find a train from {origin} to {destination}."),
         "departure", lambda rng: f"{rng.randint(5, 22)}:{rng.randint(10, 59)}",
         "The next train from {origin} to {destination} leaves at {value}."),
    Tool("convert_currency", "Convert an amount of money.",
         (_decimal("amount"), _one_of("source", "EUR", "USD", "GBP"), _one_of("target", "JPY", "CHF", "SEK")),
         ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?"),
         "result", _number(1, 9999), "{amount} {source} are {value} {target}."),
    Tool("add_to_list", "Put things on the shopping list.", (_several("items", FOODS),),
         ("Put {items} on my shopping list.", "Add {items} to the shopping list."),
         "count", _number(1, 30), "The shopping list now has {value} entries."),
    Tool("switch_light", "Turn the light of a room on or off.",
         (_text("room", ("kitchen", "cellar", "attic", "office", "garden")),
          Parameter("on", {"type": "boolean"}, lambda rng: rng.random() < 0.5)),
         ("Set the light in the {room} to {on}.", "Switch the {room} light, on is {on}."),
         "status", _from(("done", "failed")), "The light in the {room}: {value}."),
    Tool("search_notes", "Search the notes for words.", (_text("query", (*SUBJECTS, *ANIMALS)), _whole("limit", 1, 20)),
         ("Search my notes for {query}, at most {limit} results.", "Find up to {limit} notes about {query}."),
         "found", _number(0, 20), "I found {value} notes about {query}."),
    Tool("paint", "Paint a thing in a colour.", (_text("thing", OBJECTS), _text("colour", COLOURS)),
         ("Paint the {thing} {colour}.", "Make the {thing} {colour}."),
         "minutes", _number(1, 90), "The {thing} was painted {colour} in {value} minutes."),
)  # fmt: skip

_VERBS = (
    "lookup",
    "open",
    "close",
    "count",
    "move",
    "check",
    "order",
    "repair",
    "measure",
    "clean",
    "sell",
    "weigh",
)
_NOUNS = (*OBJECTS, *PLACES)
_EXTRAS: tuple[tuple[Parameter, str], ...] = (
    (_text("owner", NAMES), " for {owner}"),
    (_text("colour", COLOURS), " with the colour {colour}"),
    (_whole("number", 1, 999), " with number {number}"),
    (_text("place", CITIES), " in {place}"),
    (_one_of("speed", "slow", "normal", "fast"), " at {speed} speed"),
    (_text("kind", ADJECTIVES), " of the {kind} kind"),
    (_decimal("weight"), " with weight {weight}"),
    (_several("tags", ADJECTIVES), " with tags {tags}"),
)

_REFUSALS = (
    "I cannot do that: I have no tool for it.",
    "I have no tool named {name}, so I cannot do that.",
)


def _composed(rng: Random) -> Tool:
    verb, noun = rng.choice(_VERBS), rng.choice(_NOUNS)
    extras = rng.sample(_EXTRAS, rng.randint(1, 3))
    tail = "".join(text for _, text in extras)
    return Tool(
        f"{verb}_{noun}",
        f"{verb.capitalize()} {article(noun)}.",
        tuple(parameter for parameter, _ in extras),
        (
            f"Please {verb} the {noun}{tail}.",
            f"{verb.capitalize()} the {noun}{tail}.",
            f"I want to {verb} the {noun}{tail}.",
        ),
        rng.choice(("status", "result", "state")),
        _from(("done", "started", "ready", "failed", "waiting")),
        f"The result of {verb}_{noun} is {{value}}.",
    )


def generate(rng: Random) -> Example:
    """Return a conversation with one to six tools and one to three requests; some ask for a tool that is missing."""
    tools = _distinct(rng, rng.choices((1, 2, 3, 4, 5, 6), (3, 4, 3, 2, 1, 1))[0])
    effort = draw_effort(rng)
    messages: list[Message] = []
    if rng.random() < 0.15:
        messages.append(Message("system", "You are a helpful assistant."))
    expect = Expect()
    num_exchanges = rng.choices((1, 2, 3), (5, 3, 1))[0]
    for number in range(num_exchanges):
        kind = rng.random()
        if kind < 0.12:
            exchange, expect = _refusal(rng, tools, effort)
        elif kind < 0.18:
            exchange, expect = _small_talk(rng, effort)
        else:
            may_end = number == num_exchanges - 1
            exchange, expect = _calls(rng, tools, effort, may_end_with_calls=may_end)
        messages += exchange
    return Example(
        task=TASK,
        key=" ".join(message.content for message in messages if message.role == "user"),
        messages=tuple(messages),
        expect=expect,
        effort=effort,
        tools=tuple(tool.definition() for tool in tools),
    )


def _distinct(rng: Random, count: int) -> list[Tool]:
    tools: dict[str, Tool] = {}
    while len(tools) < count:
        tool = rng.choice(_WRITTEN) if rng.random() < 0.5 else _composed(rng)
        tools.setdefault(tool.name, tool)
    return list(tools.values())


def _calls(
    rng: Random, tools: list[Tool], effort: int | None, *, may_end_with_calls: bool
) -> tuple[list[Message], Expect]:
    """Return a request, its calls, the results and the answer from them; a conversation may end with the calls."""
    chosen = [rng.choice(tools) for _ in range(rng.choices((1, 2, 3), (6, 3, 1))[0])]
    arguments = [{parameter.name: parameter.draw(rng) for parameter in tool.parameters} for tool in chosen]
    requests = [
        rng.choice(tool.requests).format_map(_told(values))
        for tool, values in zip(chosen, arguments, strict=True)
    ]
    calls = tuple(Call(tool.name, values) for tool, values in zip(chosen, arguments, strict=True))
    thought = None
    if effort is not None:
        checks = [
            f"{name} is {json.dumps(value)}." for call in calls for name, value in call.arguments.items()
        ]
        thought = reasoning(effort, f"I call {joined([call.name for call in calls])}.", checks)
    messages = [Message("user", " ".join(requests)), Message("assistant", "", thought, calls)]
    if may_end_with_calls and rng.random() < 0.4:
        return messages, Expect("calls", calls=calls)
    results = [tool.result(rng) for tool in chosen]
    for tool, value in zip(chosen, results, strict=True):
        messages.append(Message("tool", json.dumps({tool.result_key: value})))
    answer = " ".join(
        tool.answer.format_map(_told(values) | {"value": value})
        for tool, values, value in zip(chosen, arguments, results, strict=True)
    )
    thought = None
    if effort is not None:
        checks = [
            f"{tool.result_key} is {json.dumps(value)}." for tool, value in zip(chosen, results, strict=True)
        ]
        thought = reasoning(effort, "I have the results.", checks)
    return [*messages, Message("assistant", answer, thought)], Expect("exact", answer)


def _told(values: Json) -> Json:
    """Return arguments as a person would say them."""
    return {
        name: joined(value)
        if isinstance(value, list)
        else str(value).lower()
        if isinstance(value, bool)
        else value
        for name, value in values.items()
    }


def _refusal(rng: Random, tools: list[Tool], effort: int | None) -> tuple[list[Message], Expect]:
    """Return a request for something that none of the tools does, and the polite answer."""
    names = {tool.name for tool in tools}
    missing = next(tool for tool in iter(lambda: _distinct(rng, 1)[0], None) if tool.name not in names)
    if rng.random() < 0.5:
        values = {parameter.name: parameter.draw(rng) for parameter in missing.parameters}
        prompt, answer = rng.choice(missing.requests).format_map(_told(values)), _REFUSALS[0]
    else:
        prompt, answer = f"Use the tool {missing.name}.", _REFUSALS[1].format(name=missing.name)
    thought = None
    if effort is not None:
        checks = [f"{tool.name} does not fit." for tool in tools]
        thought = reasoning(effort, "I look for a tool that fits.", checks)
    return [Message("user", prompt), Message("assistant", answer, thought)], Expect("exact", answer)


def _small_talk(rng: Random, effort: int | None) -> tuple[list[Message], Expect]:
    """Return an exchange that needs no tool."""
    prompt, answer = rng.choice(
        (("Hello!", "Hello! I am Pocket. How can I help you?"), ("Thank you!", "You are welcome!"),
         ("What is your name?", "My name is Pocket."))
    )  # fmt: skip
    thought = None if effort is None else reasoning(effort, "", ["no tool is needed."])
    return [Message("user", prompt), Message("assistant", answer, thought)], Expect("exact", answer)
