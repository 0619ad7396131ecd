"""Right answers without a model: reads a conversation and works out what is to be said.

Owns the tasks that it can do: sums, counting, codes hidden in a text, tool calls and their results, JSON from
sentences, the colour of a shape in a picture, stories, a few instructions about form. Whatever else must be answered is
given to it as `known`. It knows no wire and no gate: it does the tasks, not the questions of anybody in particular.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

EFFORTS = {"minimal": 10, "low": 25, "medium": 50, "high": 75, "xhigh": 90, "max": 100}
"""Named efforts as numbers; reasoning gets longer with them."""

_COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 210),
    "yellow": (240, 210, 40),
    "purple": (140, 50, 170),
    "orange": (240, 130, 20),
    "black": (15, 15, 15),
}
_STORY = (
    "On Monday the {animal} woke up early because of the sun. It went to the river and met an old friend there. They "
    "had a long talk about the rain, and then they walked home with a basket of bread. In the evening it said "
    "that it had never been so happy, and they all slept by the fire. "
)
_FRUITS = ("apple", "banana", "cherry", "date", "elderberry", "fig", "grape", "honeydew")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Said:
    """What an assistant says."""

    content: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What an assistant is asked. `effort` None means without thinking."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    effort: int | None = None

    @property
    def text(self) -> str:
        """The words of the last message of the user."""
        return text_of(next((m for m in reversed(self.messages) if m.get("role") == "user"), {}))

    @property
    def images(self) -> tuple[str, ...]:
        """The data URLs of the pictures."""
        parts = (part for message in self.messages for part in _parts(message))
        return tuple(part["image_url"]["url"] for part in parts if part.get("type") == "image_url")

    @property
    def tool_names(self) -> frozenset[str]:
        """The tools that may be called."""
        return frozenset(tool["function"]["name"] for tool in self.tools)


def text_of(message: Mapping[str, Any]) -> str:
    """Return the words of a message."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "") for part in _parts(message))


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def answer(conversation: Conversation, known: Mapping[str, Said]) -> Said:
    """Return the right thing to say, with reasoning as long as the effort asks for."""
    said = known.get(conversation.text.strip()) or _work_out(conversation)
    if conversation.effort is None:
        return said
    return Said(said.content, said.calls, _reasoning(conversation.effort, said))


def _reasoning(effort: int, said: Said) -> str:
    subject = said.content or ", ".join(call.name for call in said.calls)
    rounds = 1 + effort // 10
    lines = [
        f"Check {number + 1} of {rounds}: I think that it comes to {subject!r}." for number in range(rounds)
    ]
    return "\n".join(["Let me think about this.", *lines])


def _work_out(conversation: Conversation) -> Said:
    last = conversation.messages[-1] if conversation.messages else {}
    if last.get("role") == "tool":
        return Said(_tell_result(conversation))
    if conversation.tools and (calls := _calls(conversation)):
        return Said(calls=calls)
    if conversation.images and "colour" in conversation.text:
        return Said(f"The square is {colour_of(conversation.images[-1])}.")
    question = conversation.text.rpartition("\n\n")[2]
    for task in _TASKS:
        if (content := task(question, conversation.text)) is not None:
            return Said(content)
    return Said("I do not know that.")


def _calls(conversation: Conversation) -> tuple[Call, ...]:
    found: list[tuple[int, Call]] = []
    for match in re.finditer(r"weather in ([A-Z]\w+)", conversation.text):
        found.append((match.start(), Call("get_weather", {"city": match[1]})))
    for match in re.finditer(r"timer (?:for|of) (\d+) minutes", conversation.text):
        found.append((match.start(), Call("set_timer", {"minutes": int(match[1])})))
    ordered = sorted(found, key=lambda pair: pair[0])
    return tuple(call for _, call in ordered if call.name in conversation.tool_names)


def _tell_result(conversation: Conversation) -> str:
    result = json.loads(text_of(conversation.messages[-1]))
    arguments = json.loads(conversation.messages[-2]["tool_calls"][0]["function"]["arguments"])
    (name, value), place = next(iter(result.items())), next(iter(arguments.values()))
    return f"The {name} in {place} is {value}."


def colour_of(data_url: str) -> str:
    """Return the name of the most frequent colour that is not the ground's."""
    image = Image.open(io.BytesIO(base64.b64decode(data_url.partition(",")[2]))).convert("RGB")
    data = image.tobytes()
    counts = Counter(zip(data[0::3], data[1::3], data[2::3], strict=True))
    shape = next((colour for colour, _ in counts.most_common() if min(colour) < 200), (255, 255, 255))
    return min(
        _COLOURS, key=lambda name: sum((a - b) ** 2 for a, b in zip(_COLOURS[name], shape, strict=True))
    )


def _code(question: str, text: str) -> str | None:
    asked = re.search(r"secret codes? of (.+?)[?.]$", question)
    if asked is None:
        return None
    said = []
    for holder in re.split(r", | and ", asked[1]):
        told = re.search(rf"secret code of {re.escape(holder)} is ([^.]+)\.", text)
        if told is None:
            return "The text does not say that."
        said.append(f"The secret code of {holder} is {told[1]}.")
    return " ".join(said)


def _count(question: str, text: str) -> str | None:
    asked = re.search(r"[Cc]ount (?:from (\d+) )?to (\d+)", question)
    if asked is None:
        return None
    return ", ".join(map(str, range(int(asked[1] or 1), int(asked[2]) + 1)))


def _sum(question: str, text: str) -> str | None:
    asked = re.search(r"(\d+) ([-+*]) (\d+)", question)
    if asked is None:
        return None
    left, right = int(asked[1]), int(asked[3])
    value = {"+": left + right, "-": left - right, "*": left * right}[asked[2]]
    return f"{left} {asked[2]} {right} = {value}"


def _person(question: str, text: str) -> str | None:
    name = re.search(r"The name is (\w+)\.", text)
    age = re.search(r"is (\d+) years old", text)
    city = re.search(r"lives in (\w+)\.", text)
    if "JSON" not in text or not (name and age and city):
        return None
    return json.dumps({"name": name[1], "age": int(age[1]), "city": city[1]})


def _story(question: str, text: str) -> str | None:
    asked = re.search(r"story about an? (\w+)", question)
    return None if asked is None else (_STORY * 4).format(animal=asked[1]).strip()


def _form(question: str, text: str) -> str | None:
    """Answer instructions about the form of an answer."""
    if found := re.search(r"the word (\w+) in capital letters", question):
        return found[1].upper()
    if found := re.search(r"Repeat these words exactly, nothing else: (.+)$", question):
        return found[1]
    if found := re.search(r"List exactly (\d+) fruits", question):
        return "\n".join(_FRUITS[: int(found[1])])
    if found := re.search(r"is (\d+) greater than (\d+)\?", question):
        return "Yes" if int(found[1]) > int(found[2]) else "No"
    if found := re.search(r"Sort these numbers .*: ([\d, ]+)$", question):
        return ", ".join(sorted(found[1].split(", "), key=int))
    if found := re.search(r'Spell the word "(\w+)"', question):
        return "-".join(found[1])
    if found := re.search(r"is the longest\? .*: ([\w, ]+)$", question):
        return max(found[1].split(", "), key=len)
    if "How many stars" in question:
        return str(question.count("*"))
    return None


Task = Callable[[str, str], str | None]
_TASKS: tuple[Task, ...] = (_code, _person, _form, _count, _sum, _story)

__all__ = ["EFFORTS", "Call", "Conversation", "Said", "answer", "colour_of", "text_of"]
