"""One question with a known answer, and the checks that decide it. Owns what "wrong" is called; asks nobody.

A check takes a whole reply and returns what is wrong with it, as a sentence that names the fault, or None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deskfleet.client import Reply
from deskfleet.evaluation.judgement import Expected, ExpectedCall, is_right
from deskfleet.gates.garble import fault_in, shown

Check = Callable[[Reply], str | None]
Effort = int | str | None
"""A number or a name, or None: thinking off."""


@dataclass(frozen=True, slots=True)
class Puzzle:
    """One question. `fields` are its own of a Chat Completions body; `check` decides over the reply.

    `tag` is a value that stands in the right answer to this question and in no other's; `asked_tokens` is what the
    ruler was asked for, None for a prompt that is no long text.
    """

    label: str
    fields: Mapping[str, Any]
    check: Check
    max_tokens: int
    effort: Effort = None
    tag: str | None = None
    asked_tokens: int | None = None


def anything(reply: Reply) -> str | None:
    """Accept every answer that came to its end."""
    return None


def is_text(reply: Reply) -> str | None:
    """Accept English text, whatever it says."""
    fault = fault_in(reply.content)
    return None if fault is None else f"the answer is {fault}"


def last_number(value: int) -> Check:
    """Accept an answer whose last number is `value`."""

    def check(reply: Reply) -> str | None:
        numbers = re.findall(r"-?\d+", reply.content.replace(",", ""))
        if numbers and int(numbers[-1]) == value:
            return _calls_nothing(reply)
        return _wrong(reply, str(value))

    return check


def says(*words: str, but_not: tuple[str, ...] = ()) -> Check:
    """Accept an answer that holds all of `words` and none of `but_not`, as whole words, whatever the case."""

    def check(reply: Reply) -> str | None:
        found = [word for word in (*words, *but_not) if _holds(reply.content, word)]
        return _calls_nothing(reply) if found == list(words) else _wrong(reply, " and ".join(words))

    return check


def counts(first: int, last: int) -> Check:
    """Accept the numbers from `first` to `last`, in order and no others."""

    def check(reply: Reply) -> str | None:
        fault = fault_in(reply.content)
        found = [int(number) for number in re.findall(r"\d+", reply.content)]
        wanted = list(range(first, last + 1))
        if found == wanted:
            return None if fault is None else f"the answer is {fault}"
        if not found:
            return f"the answer is {fault or shown(reply.content)}, no numbers"
        at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), len(found))
        if at >= len(wanted):
            return f"after {last} it goes on: {shown(reply.content[-30:])}"
        came = f"comes {found[at]}" if at < len(found) else f"it ends ({reply.finish_reason})"
        return f"counting, after {found[at - 1]} {came}" if at else f"counting begins with {found[0]}"

    return check


def expects(expected: Expected) -> Check:
    """Accept what `deskfleet.evaluation` calls right."""

    def check(reply: Reply) -> str | None:
        if is_right(expected, reply.content, reply.tool_calls):
            return None
        if expected.kind == "calls":
            return _wrong_calls(expected.calls, reply)
        wanted = json.dumps(expected.value, ensure_ascii=False) if expected.kind == "json" else expected.text
        return _wrong(reply, wanted)

    return check


def json_object(value: Mapping[str, Any]) -> Check:
    """Accept a JSON object equal to `value`, with or without a fence around it."""
    expected = Expected("json", value=dict(value))

    def check(reply: Reply) -> str | None:
        text = re.sub(r"^```(?:json)?\s*|\s*```$", "", reply.content.strip())
        if is_right(expected, text, reply.tool_calls):
            return None
        try:
            json.loads(text)
        except ValueError:
            return f"the answer is no JSON: {fault_in(text) or shown(text)}"
        return _wrong(reply, json.dumps(value))

    return check


def makes(*calls: ExpectedCall) -> Check:
    """Accept exactly these tool calls, in this order, a finish that says so, and no markup in the text beside them."""

    def check(reply: Reply) -> str | None:
        if not is_right(Expected("calls", calls=calls), reply.content, reply.tool_calls):
            return _wrong_calls(calls, reply)
        if reply.finish_reason != "tool_calls":
            return f"the calls came, but the answer finished with {reply.finish_reason!r} instead of 'tool_calls'"
        if reply.content.strip() and (fault := fault_in(reply.content)) is not None:
            return f"beside the calls the text is {fault}"
        return None

    return check


def _wrong_calls(calls: tuple[ExpectedCall, ...], reply: Reply) -> str:
    made = [call["function"] for call in reply.tool_calls]
    if not made and reply.content.strip():
        return (
            f"no tool call came, the answer is {fault_in(reply.content) or 'text: ' + shown(reply.content)}"
        )
    if len(made) < len(calls):
        missing = ", ".join(call.name for call in calls[len(made) :])
        return f"a dropped tool call: {len(made)} of {len(calls)} came, without {missing}"
    if len(made) > len(calls):
        return f"{len(made)} tool calls came instead of {len(calls)}"
    for call, found in zip(calls, made, strict=True):
        try:
            arguments = json.loads(found["arguments"])
        except ValueError:
            return f"the arguments of {found['name']} are no JSON: {shown(found['arguments'])}"
        if found["name"] != call.name or arguments != call.arguments:
            wanted = f"{call.name}({json.dumps(call.arguments)})"
            return f"{found['name']}({found['arguments']}) was called instead of {wanted}"
    return "the tool calls differ"


def _holds(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _calls_nothing(reply: Reply) -> str | None:
    return f"a tool was called: {reply.tool_calls[0]['function']['name']}" if reply.tool_calls else None


def _wrong(reply: Reply, wanted: str) -> str:
    fault = fault_in(reply.content)
    if fault is not None:
        return f"the answer is {fault}, not {shown(wanted)}"
    cut = " (cut at max_tokens)" if reply.finish_reason == "length" else ""
    return f"{shown(reply.content)}{cut} instead of {shown(wanted)}"


__all__ = [
    "Check",
    "Effort",
    "Puzzle",
    "anything",
    "counts",
    "expects",
    "is_text",
    "json_object",
    "last_number",
    "makes",
    "says",
]
