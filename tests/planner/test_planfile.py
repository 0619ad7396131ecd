"""Plans as JSON: what a program reads first, and the same bytes from what was written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deskfleet.errors import ConfigError
from deskfleet.planner.cluster import parse_nodes
from deskfleet.planner.planfile import Asked, find, plan_from_dict, search_from_dict, search_to_dict
from deskfleet.planner.published import published_inventory
from deskfleet.planner.wishes import Wishes


def document_of(asked: Asked, nodes: str) -> dict[str, Any]:
    found = find(published_inventory("v4.1-flash"), parse_nodes(nodes), asked, ())
    return search_to_dict(found, asked)


@pytest.fixture(scope="module")
def refused() -> dict[str, Any]:
    """Full context on two machines."""
    return document_of(Asked(Wishes(max_model_len=1 << 20)), "2xspark")


@pytest.mark.parametrize(
    ("asked", "nodes"),
    [
        (Asked(Wishes(engine="sglang", margin_bytes=1 << 30)), "3xspark"),
        (Asked(Wishes(engine="vllm", tp_size=3), "max-concurrency"), "3xspark"),
        (Asked(Wishes(engram="host", tp_size=4)), "4xh200"),
    ],
)
def test_what_was_written_gives_the_same_bytes_again(asked: Asked, nodes: str) -> None:
    assert_reproduces(document_of(asked, nodes))


def test_so_does_what_does_not_fit_with_its_ways_out(refused: dict[str, Any]) -> None:
    assert refused["changes"]
    assert_reproduces(refused)


def assert_reproduces(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    found, read = search_from_dict(json.loads(text))
    assert json.dumps(search_to_dict(found, read)) == text
    assert plan_from_dict(json.loads(text)) == found.best


def test_what_a_program_reads_first(refused: dict[str, Any]) -> None:
    document = refused
    assert document["fits"] is False
    assert document["margin_bytes"] == min(rank["margin_bytes"] for rank in document["ranks"]) < 0
    for rank in document["ranks"]:
        held = sum(line["num_bytes"] for line in rank["lines"] if line["kind"] != "temporary")
        assert rank["held_bytes"] == held
        assert rank["capacity_bytes"] - rank["floor"]["rest_bytes"] - held >= rank["margin_bytes"]
    assert all(change["margin_bytes"] >= 0 for change in document["changes"])
    assert {each["engine"] for each in document["losers"]} == {"native", "vllm", "sglang", "exl3"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "plan of format 2, and this version reads 1"),
        ({"format": None}, "plan of format None"),
        ({"inputs": {}}, "the plan's inputs cannot be read: .* missing required field `inventory`"),
        ({"asked": None}, "what was asked cannot be read"),
        ({"asked": {"wishes": {"engine": "vlm"}}}, "what was asked cannot be read: .*'vlm'"),
        ({"asked": {"wishes": {"max_model_len": -1}}}, "max_model_len is -1"),
        ({"asked": {"wishes": {}, "profile": "fast"}}, "what was asked cannot be read: .*'fast'"),
    ],
)
def test_what_is_no_plan_is_refused(refused: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search_from_dict(refused | changes)
