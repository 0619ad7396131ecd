"""What counts as right, and above all what does not."""

from __future__ import annotations

from typing import Any

import pytest

from deskfleet.evaluation.judgement import Expected, ExpectedCall, is_right


def call(name: Any, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ADD = ExpectedCall("add", {"a": 1, "on": True})
CALLS = Expected("calls", calls=(ADD, ExpectedCall("now", {})))
NOW = call("now", "{}")


@pytest.mark.parametrize(
    ("content", "right"),
    [
        ("19 + 23 = 42", True),
        (" 19 + 23 = 42\n", True),
        ("19 + 23 = 43", False),
        ("19 + 23 = 42.", False),
        ("19  + 23 = 42", False),
        ("", False),
        (None, False),
    ],
)
def test_exact(content: str | None, right: bool) -> None:
    assert is_right(Expected("exact", "19 + 23 = 42"), content) is right


def test_an_answer_beside_a_call_is_no_answer() -> None:
    assert not is_right(Expected("exact", "42"), "42", [NOW])
    assert not is_right(Expected("contains", "42"), "42", [NOW])
    assert not is_right(Expected("json", value={"a": 1}), '{"a": 1}', [NOW])
    assert is_right(Expected("contains", "42"), "It is 42.")
    assert not is_right(Expected("contains", "42"), "It is 24.")


@pytest.mark.parametrize(
    ("content", "right"),
    [
        ('{"a": 1, "b": [true, null, {"c": "x"}]}', True),
        ('\n{"b":[true,null,{"c":"x"}],"a":1.0}\n', True),
        ('{"a": 1, "b": [true, null, {"c": "x"}]} and so on', False),
        ('```json\n{"a": 1, "b": [true, null, {"c": "x"}]}\n```', False),
        ('{"a": true, "b": [true, null, {"c": "x"}]}', False),
        ('{"a": 1, "b": [1, null, {"c": "x"}]}', False),
        ('{"a": "1", "b": [true, null, {"c": "x"}]}', False),
        ('{"a": 1, "b": [null, true, {"c": "x"}]}', False),
        ('{"a": 1, "b": [true, null]}', False),
        ('{"a": 2, "a": 1, "b": [true, null, {"c": "x"}]}', False),
        ('{"a": 1, "b": [true, null, {"c": "x"}], "d": 0}', False),
        ('{"a": NaN, "b": [true, null, {"c": "x"}]}', False),
        ('{"a": 1', False),
        ("[" * 100_000, False),
        ("null", False),
        (None, False),
    ],
)
def test_json(content: str | None, right: bool) -> None:
    assert is_right(Expected("json", value={"a": 1, "b": [True, None, {"c": "x"}]}), content) is right


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([call("add", '{"on": true, "a": 1}'), NOW], True),
        ([NOW, call("add", '{"a": 1, "on": true}')], False),
        ([call("add", '{"a": 1, "on": true}')], False),
        ([call("add", '{"a": 1, "on": true}'), NOW, NOW], False),
        ([call("add", '{"a": 1, "on": 1}'), NOW], False),
        ([call("add", '{"a": 1}'), NOW], False),
        ([call("Add", '{"a": 1, "on": true}'), NOW], False),
        ([call("add", '{"a": 1, "on": true'), NOW], False),
        ([call("add", {"a": 1, "on": True}), NOW], False),
        ([call(None, None), NOW], False),
        ([{}, {}], False),
        ([{"function": "add"}, NOW], False),
        ([], False),
        (None, False),
    ],
)
def test_calls(calls: list[dict[str, Any]] | None, right: bool) -> None:
    assert is_right(CALLS, "", calls) is right


def test_where_nothing_is_right_everything_is() -> None:
    assert is_right(Expected("none"), None)
