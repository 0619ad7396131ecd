"""Whether an answer is right. Owns what "right" means for each kind of expectation; knows no HTTP and no tasks.

Values are compared as JSON compares them: 1 and 1.0 are the same number, 1 and true are not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["exact", "contains", "calls", "json", "none"]


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """One tool call that must be made."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a right answer is. `kind`:

    exact: the answer is `text`; contains: it contains `text`; json: it is JSON equal to `value`; calls: it makes
    exactly `calls`, in this order; none: there is nothing to judge.
    """

    kind: Kind
    text: str = ""
    calls: tuple[ExpectedCall, ...] = ()
    value: Any = None


def is_right(
    expected: Expected, content: str | None, tool_calls: Sequence[Mapping[str, Any]] | None = None
) -> bool:
    """Return whether an answer is what was expected; white space around it does not count.

    `tool_calls` have the protocol's form, with arguments as JSON text. A malformed call is a wrong one.
    """
    text = (content or "").strip()
    match expected.kind:
        case "exact":
            return text == expected.text.strip() and not tool_calls
        case "contains":
            return expected.text in text and not tool_calls
        case "json":
            return _same(_parsed(text), expected.value) and not tool_calls
        case "calls":
            calls = tool_calls or ()
            return len(calls) == len(expected.calls) and all(map(_is_call, expected.calls, calls))
        case "none":
            return True


def _is_call(expected: ExpectedCall, call: Mapping[str, Any]) -> bool:
    function = call.get("function")
    if not isinstance(function, Mapping) or function.get("name") != expected.name:
        return False
    return _same(_parsed(function.get("arguments")), expected.arguments)


_NOT_JSON = object()


def _parsed(text: object) -> Any:
    """Return the value of JSON text, or something that equals no value. A name given twice is no JSON object."""
    if not isinstance(text, str):
        return _NOT_JSON
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NOT_JSON


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name comes twice")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    # In Python true equals 1.
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


__all__ = ["Expected", "ExpectedCall", "Kind", "is_right"]
