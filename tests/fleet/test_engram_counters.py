"""Counters of adapters on several nodes, brought to one machine: nodes here are directories of this one."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from launch_cases import CASES

from deskfleet.fleet import engram_counters
from deskfleet.fleet.engram_counters import attend_counters, places_of, read_documents
from deskfleet.fleet.remote import Remotes
from deskfleet.fleet.spec import LOCAL, NodePaths, NodeSpec
from deskfleet_engram.host import write_receipt
from deskfleet_engram.host_metrics import counters_name, read_counters


def write(directory: Path, rank: int, num_rows: int, **other: Any) -> Path:
    """What a rank of vLLM writes."""
    document = {
        "engine": "vllm",
        "rank": rank,
        "world_size": 3,
        "counters": {"num_rows": num_rows, "errors": {}},
    }
    return write_receipt(directory, counters_name("vllm", rank), document | other)


def node(name: str) -> NodeSpec:
    return NodeSpec(name, LOCAL, None, None, None, (), "local", None, NodePaths("/a", "/b", "/c"))


async def test_counters_of_all_nodes_come_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engram_counters, "LOOK_S", 0.05)
    here = tmp_path / "here"
    names = ("a", "b c", "gone")
    places = {name: str(tmp_path / name) for name in names}
    write(tmp_path / "a", 0, 10)
    write(tmp_path / "b c", 1, 11, written_unix_s=time.time() - 7200)  # a clock two hours slow
    old = write(tmp_path / "b c", 2, 12)
    os.utime(old, (time.time() - 600, time.time() - 600))  # of a rank that has ended
    (tmp_path / "a" / "other-counters.json").write_text(
        json.dumps({"engine": "../x", "rank": 0, "counters": {}})
    )

    def found() -> dict[int, int]:
        return {each["rank"]: each["counters"]["num_rows"] for each in read_counters(here, "vllm")}

    async with Remotes([node(name) for name in names]) as remotes, asyncio.timeout(60):
        attending = asyncio.ensure_future(attend_counters(remotes, places, here))
        try:
            while found() != {0: 10, 1: 11}:
                await asyncio.sleep(0.05)
                assert not attending.done()
            write(tmp_path / "a", 0, 20)
            while found() != {0: 20, 1: 11}:
                await asyncio.sleep(0.05)
        finally:
            attending.cancel()
    assert {path.name for path in here.iterdir()} == {counters_name("vllm", rank) for rank in (0, 1)}


def test_where_a_launch_has_its_counters() -> None:
    assert places_of(CASES["4-nodes-sglang"].render()) == {
        f"spark-{number}": "/var/cache/deskfleet/engram-receipts/desk" for number in range(4)
    }
    assert places_of(CASES["2-nodes-exl3"].render()) == {}


def test_what_is_cut_off_is_left_out() -> None:
    whole = json.dumps({"engine": "vllm", "rank": 0, "counters": {}}, indent=2)
    assert [each["rank"] for each in read_documents(f"{whole}\n[]\n{whole}\n{whole[:-4]}")] == [0, 0]
    assert list(read_documents("bash: no")) == []
