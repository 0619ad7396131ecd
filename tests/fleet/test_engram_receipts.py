"""What adapters log on each rank, beside what was launched: every way of not fitting is one sentence that names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from launch_cases import CASES

from deskfleet.fleet.engram_receipts import find_receipt, refusal
from deskfleet.fleet.launch import launch_from_json, launch_to_json
from deskfleet_engram.host import log_receipt

LAUNCH = launch_from_json(launch_to_json(CASES["4-nodes-vllm"].render()))
ASKED = 'env = { DESKFLEET_ENGRAM_STORE = "callback" }'


def said(rank: int, /, **other: Any) -> str:
    """What the adapter itself says, found in a line as docker keeps it; `other` are keys of the receipt's file."""
    document = {
        "engine": "vllm",
        "engine_version": "0.33.0+cu130",
        "plugin_version": "0.1.0",
        "source_sha256": {"Engram": "fd92"},
        "pack_sha256": "1e8c5c6757c97f62aa",
        "store": "callback",
        "warnings": [],
        "rank": rank,
        "world_size": 4,
        "columns": list(range(6 * rank, 6 * rank + 6)),
        **other,
    }
    found = find_receipt(
        f"\x1b[32m(Worker_TP{rank} pid=91)\x1b[0m INFO [rank.py:141] {log_receipt(document)}\x1b[0m"
    )
    assert found is not None
    return found


def receipts(**of_rank_2: Any) -> dict[int, str]:
    """Those of four ranks, of which one may be another."""
    return {rank: said(rank, **(of_rank_2 if rank == 2 else {})) for rank in range(4)}


def test_ranks_that_are_alike_are_let_through() -> None:
    assert LAUNCH.adapter is not None
    assert LAUNCH.adapter.columns == ((0, 5), (6, 11), (12, 17), (18, 23))
    assert refusal(LAUNCH, receipts()) is None


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            {"engine_version": "0.33.1"},
            "has engine=vllm-0.33.1, and rank 0 on spark-0 engine=vllm-0.33.0+cu130",
        ),
        ({"engine": "sglang"}, "reads Engram rows in sglang-0.33.0+cu130, not in vllm"),
        ({"plugin_version": "0.2.0"}, "has plugin=0.2.0, and rank 0 on spark-0 plugin=0.1.0"),
        ({"source_sha256": {"Engram": "0000"}}, "the ranks have different digests of the engine's source"),
        (
            {"pack_sha256": "2e8c5c6757c97f62bb"},
            "has pack=2e8c5c6757c97f62, and rank 0 on spark-0 pack=1e",
        ),
        ({"store": "mapped"}, "has store=mapped, and rank 0 on spark-0 store=callback"),
        ({"warnings": ["another release"]}, "the ranks have different numbers of warnings"),
        ({"columns": [6, 7, 8, 9, 10, 11]}, "reads Engram columns 6-11, not 12-17"),  # twice, and a gap
        ({"columns": [12, 13, 14, 15, 16]}, "reads Engram columns 12-16, not 12-17"),
        ({"rank": 1}, "reads Engram rows as rank 1/4, not 2/4"),
        ({"world_size": 2}, "reads Engram rows as rank 2/2, not 2/4"),
    ],
)
def test_a_rank_that_is_another_is_named(other: dict[str, Any], sentence: str) -> None:
    refused = refusal(LAUNCH, receipts(**other))
    assert refused is not None
    assert refused.startswith("rank 2 on spark-2 ")
    assert sentence in refused
    assert "\n" not in refused


def test_a_rank_without_a_receipt_is_named() -> None:
    shown = receipts()
    del shown[1], shown[3]
    assert refusal(LAUNCH, shown) == (
        "rank 1 on spark-1, rank 3 on spark-3: no receipt of the Engram adapter, so it may not be at work"
    )
    older = {**receipts(), 2: "engine=vllm-0.33.0 plugin=0.0.9 rank=2/4 columns=12-17"}
    refused = refusal(LAUNCH, older)
    assert refused is not None
    assert refused.startswith("rank 2 on spark-2 says nothing of pack, sources, store, warnings")


@pytest.mark.parametrize("name", ["4-nodes-vllm", "4-nodes-sglang"])
def test_the_store_that_was_asked_for_is_the_one_at_work(name: str) -> None:
    launch = replace(CASES[name], extra=ASKED).render()
    engine = {"engine": launch.engine}
    assert refusal(launch, {rank: said(rank, **engine) for rank in range(4)}) is None
    refused = refusal(launch, {rank: said(rank, store="mapped", **engine) for rank in range(4)})
    assert refused is not None
    assert "rank 0 on spark-0 reads Engram rows by mapped, not by callback as asked" in refused
    if launch.engine == "vllm":  # which has no variable for it
        assert (
            '"store":"callback"'
            in launch.ranks[3].argv[launch.ranks[3].argv.index("--additional-config") + 1]
        )
    assert launch.ranks[0].env["DESKFLEET_ENGRAM_RECEIPTS"] == "/cache/engram-receipts/desk"


def test_launches_without_an_adapter_need_no_receipts() -> None:
    for name in ("2-nodes-exl3", "2-nodes-vllm-v4"):
        launch = CASES[name].render()
        assert launch.adapter is None
        assert refusal(launch, {}) is None
        assert all("DESKFLEET_ENGRAM_RECEIPTS" not in rank.env for rank in launch.ranks)
