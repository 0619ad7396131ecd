"""A body is read in one pass where everything in it is known, and in two where not: what comes of it is the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deskfleet.errors import RequestError
from deskfleet.gateway.fields import Decisions, read_fields
from deskfleet.gateway.protocols import chat_fields, completions

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 1.0, -1, 0.5, 75, 75.0, 1e300, 2**63, 2**64, 2**70),
    *("", "x", "high", [], [1, 2], ["a"], {}, {"5": 1, "7": 0.5}, {"a": 1}),
    *({"type": "enabled"}, {"effort": 75.0}, {"include_usage": True}, {"type": "json_object"}),
    [{"type": "function", "function": {"name": "f", "parameters": {"x": 2**70, "y": 1.0}}}],
)


def outcome(body: bytes | dict[str, Any], decisions: Decisions[Any]) -> list[tuple[str, str]]:
    try:
        fields = read_fields(body, decisions)
    except RequestError as error:
        return [("refused", f"{error.message} {error.param} {error.hint}")]
    names = decisions.fields.__struct_fields__
    return [(name, f"{type(getattr(fields, name)).__name__} {getattr(fields, name)!r}") for name in names]


@pytest.mark.parametrize(
    ("decisions", "required"),
    [
        (chat_fields.DECISIONS, {"messages": [{"role": "user", "content": "2 < 3"}]}),
        (completions.DECISIONS, {"prompt": "2 < 3"}),
    ],
)
def test_bytes_and_their_object_are_read_alike(decisions: Decisions[Any], required: dict[str, Any]) -> None:
    found = set()
    for name in (*decisions.known, "unheard_of", "temprature"):
        for value in VALUES:
            body = json.dumps({"model": "m", **required, name: value}).encode()
            told = outcome(body, decisions)
            assert told == outcome(json.loads(body), decisions), body
            found.add(told[0][0])
    assert found == {"refused", "stream"}  # the first field of those that were read
