"""The SGLang plug-in against a stand-in with the same seams, on a CPU: what is read, what is refused, what ends.

`test_sglang_release` runs the same scenarios inside SGLang 0.5.23.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sglang_cases import ADAPTER, MODEL, RANKS, ROOT, check_rows, install_by_hand, run_scenarios, scenario

from deskfleet_engram import _native
from deskfleet_engram.ownership import select_columns
from deskfleet_engram.pack import pack
from deskfleet_engram.source import open_source

SOURCES = [ADAPTER / "src", ROOT / "packages" / "deskfleet-engram" / "src"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every scenario, run once."""
    place = tmp_path_factory.mktemp("sglang")
    packed, torn, torn_too, part = (place / name for name in ("pack", "torn", "torn-too", "part"))
    pack(open_source(MODEL), packed)
    shutil.copytree(packed, torn)
    shutil.copytree(packed, torn_too)
    pack(open_source(MODEL), part, columns=[(layer, 0) for layer in (1, 4)])
    source = open_source(MODEL)
    shares = [place / f"share{rank}" for rank in range(4)]
    for rank, share in enumerate(shares):  # of four ranks each has a pack of its own
        columns = select_columns(source.geometry.spec, rank=rank, world_size=4, split="runs")
        pack(source, share, columns=columns)
    install_by_hand(place / "site")
    receipts = {"DESKFLEET_ENGRAM_RECEIPTS": str(place / "receipts")}
    counted = {"DESKFLEET_ENGRAM_RECEIPTS": str(place / "counted")}
    called = {"DESKFLEET_ENGRAM_RECEIPTS": str(place / "callback")}
    split = {"DESKFLEET_ENGRAM_STORE": "mapped", "DESKFLEET_ENGRAM_SPLIT": str(place / "split")}
    write_split(packed, place / "split")
    readable = "mapped files can be read"
    cases = [
        *(
            scenario(
                f"tp{tp_size}r{rank}",
                shares[rank] if tp_size == 4 else packed,
                tp_size=tp_size,
                rank=rank,
                env=receipts,
            )
            for tp_size, rank in RANKS
        ),
        {"name": "absent", "env": {}, "do": "stock"},
        scenario("mapped", packed, tp_size=2, rank=1, env=split, spoilt=readable),
        scenario("mapped elsewhere", packed, env=split, spoilt=readable),
        scenario("mapped here", packed, env=split),
        scenario(
            "callback", packed, tp_size=2, rank=1, spoilt="device by hand", do="answer again", env=called
        ),
        scenario("callback truncated", torn_too, spoilt="device by hand, truncated"),
        scenario("prefetch", packed, do="prefetch", env=counted),
        scenario("idle", packed, do="idle", env={"DESKFLEET_ENGRAM_RECEIPTS": str(place / "idle")}),
        scenario("dummy", packed, tp_size=2, rank=1, do="dummy"),
        scenario("too early", packed, do="too early"),
        scenario("touch", packed, do="touch"),
        scenario("quiet failure", packed, do="fail quietly"),
        scenario("truncated", torn, spoilt="truncated"),
        scenario("part", part),
        scenario("five ranks", packed, tp_size=5),
        scenario("store", packed, env={"DESKFLEET_ENGRAM_STORE": "cloud"}),
        scenario("device memory", packed, env={"SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE": "0"}),
        scenario("shared", packed, env={"SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT": "shared"}),
        scenario("no pack", place / "nothing"),
        *(
            scenario(what, packed, spoilt=what)
            for what in ("version", "source", "weights", "hashing", "tokenizer", "replaced later")
        ),
        *(
            scenario(f"swallow {what}", packed, spoilt=f"swallow {what}")
            for what in ("_HostTable", "_load_rows", "_owned_rows", "from_model", "process_batch_result")
        ),
    ]
    # Scenarios see no variable of ours but this: the library that these tests have.
    library = {"DESKFLEET_ENGRAM_LIBRARY": _native.library()._name}
    outcomes = run_scenarios(sys.executable, [place / "site", *SOURCES], cases, place / "out", env=library)
    return {"outcomes": outcomes, "out": place / "out", "receipts": place / "receipts", "pack": packed}


def write_split(packed: Path, directory: Path) -> None:
    """By the command that the guide names, for rank 1 of 2."""
    subprocess.run(
        [
            *(sys.executable, "-m", "deskfleet_sglang", "split", str(packed), str(MODEL)),
            *("--to", str(directory), "--rank", "1", "--world-size", "2"),
        ],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))},
    )


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_rows_are_those_of_the_table_in_memory_and_zeros_for_other_ranks(
    world: dict[str, Any], tp_size: int
) -> None:
    num_own = 0
    for rank in range(tp_size):
        name = f"tp{tp_size}r{rank}"
        assert world["outcomes"][name] == {"done": True}, world["outcomes"][name]
        num_own += check_rows(world["out"], name, tp_size, rank)
    assert num_own == 2 * 402  # every id was exactly one rank's


def test_without_its_variable_nothing_is_touched(world: dict[str, Any]) -> None:
    assert world["outcomes"]["absent"] == {"done": True}
    assert np.load(world["out"] / "absent.npz")["hooked"].size == 0


def test_a_device_that_reads_mapped_files_gets_the_file_itself(world: dict[str, Any]) -> None:
    assert world["outcomes"]["mapped"] == {"done": True}, world["outcomes"]["mapped"]
    assert check_rows(world["out"], "mapped", 2, 1) > 300
    # Rank 0 of 1 has no such file, and this machine no such device.
    assert "write it from the pack" in world["outcomes"]["mapped elsewhere"]["message"]
    assert "host's page tables" in world["outcomes"]["mapped here"]["message"]


def test_the_host_function_gives_the_rows_between_two_copies(world: dict[str, Any]) -> None:
    """All of the callback store but the device: its streams and copies are played."""
    assert world["outcomes"]["callback"] == {"done": True}, world["outcomes"]["callback"]
    assert check_rows(world["out"], "callback", 2, 1) > 300
    receipt = json.loads((world["out"].parent / "callback" / "sglang-rank1-receipt.json").read_text())
    assert (receipt["store"], receipt["store_reason"]) == (
        "callback",
        "the device does not read mapped files",
    )


def test_a_row_that_the_host_function_could_not_read_is_nan_and_is_not_answered(
    world: dict[str, Any],
) -> None:
    outcome = world["outcomes"]["callback truncated"]
    assert outcome.get("error") == "RowError", outcome
    stock, found = np.load(world["out"] / "stock.npz"), np.load(world["out"] / "unread.npz")
    for name, rows in found.items():
        is_nan = ((rows & 0x7FFF) > 0x7F80).all(axis=-1)
        assert is_nan.mean() > 0.9
        # What was compared at the load was still in memory, and is right.
        np.testing.assert_array_equal(rows[~is_nan], stock[name][~is_nan])


def test_whoever_reads_the_table_itself_ends_and_takes_no_zeros_for_rows(world: dict[str, Any]) -> None:
    assert world["outcomes"]["touch"] == {"died": signal.SIGSEGV}


def test_rows_of_a_prompt_are_there_before_they_are_looked_up(world: dict[str, Any]) -> None:
    assert world["outcomes"]["prefetch"] == {"done": True}, world["outcomes"]["prefetch"]
    found = np.load(world["out"] / "prefetch.npz")
    before, after = found["reads"]
    assert before > 0
    assert after == before
    source = open_source(MODEL)
    assert found["ids"].shape == (6, 2, 12)
    for position, table in enumerate(source.tables):
        ids = found["ids"][:, position]
        assert ((ids >= 0) & (ids < table.num_rows)).all()
        assert found[f"rows{position}"].any(axis=-1).mean() > 0.99


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("version", "SGLang is 0.5.24, but deskfleet-sglang was tested with 0.5.23"),
        ("source", "the source of sglang.srt.layers.engram.shard_range is"),
        ("store", "DESKFLEET_ENGRAM_STORE is 'cloud'"),
        ("device memory", "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE is False"),
        ("shared", "HOST_TABLE_LAYOUT is 'shared'"),
        ("swallow _HostTable", "did not put REPLACE at sglang.srt.layers.engram._HostTable"),
        ("swallow _load_rows", "did not put AROUND at sglang.srt.layers.engram.EngramEmbedding._load_rows"),
        ("swallow _owned_rows", "did not put AROUND at sglang.srt.layers.engram.EngramEmbedding._owned_rows"),
        ("swallow from_model", "NgramEmbeddingManager.from_model"),
        ("swallow process_batch_result", "Scheduler.process_batch_result"),
    ],
)
def test_the_process_ends_before_it_loads_a_model(world: dict[str, Any], name: str, says: str) -> None:
    outcome = world["outcomes"][name]
    assert outcome.get("exit", "").startswith("deskfleet-sglang refuses to start: "), outcome
    assert says in outcome["exit"]
    assert "\n" not in outcome["exit"]


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("no pack", "FormatError", "engram.json is missing"),
        ("part", "MissingRowsError", "lacks columns 1,2,3,4,5,6,7,8,9,10,11 of layer 1"),
        ("five ranks", "ContractError", "12 Engram columns cannot be shared among 5 ranks"),
        ("weights", "IdentityError", "row 0 of the checkpoint is not the pack's"),
        ("hashing", "IdentityError", "other multipliers"),
        ("tokenizer", "IdentityError", "token map"),
        ("replaced later", "ContractError", "is a _HostTable and holds its rows in memory"),
        ("too early", "ContractError", "before it was shown that they come from disk"),
        ("quiet failure", "OSError", "a row could not be had"),
    ],
)
def test_the_scheduler_ends_with_an_error(world: dict[str, Any], name: str, error: str, says: str) -> None:
    outcome = world["outcomes"][name]
    assert (outcome.get("error"), says in outcome.get("message", "")) == (error, True), outcome


def test_a_file_that_was_cut_off_ends_the_step_and_names_itself(world: dict[str, Any]) -> None:
    outcome = world["outcomes"]["truncated"]
    assert outcome.get("error") == "RowError", outcome
    assert ".egp" in outcome["message"]


def test_weights_that_are_made_up_leave_the_rows_alone(world: dict[str, Any]) -> None:
    assert world["outcomes"]["dummy"] == {"done": True}, world["outcomes"]["dummy"]
    assert check_rows(world["out"], "dummy", 2, 1) > 300


def test_another_checkpoint_is_refused(world: dict[str, Any], tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(MODEL, other)
    span = open_source(other).tables[0].weight
    with open(span.path, "r+b") as file:
        file.seek(span.offset_bytes)
        first = file.read(1)[0]
        file.seek(span.offset_bytes)
        file.write(bytes([first ^ 1]))
    install_by_hand(tmp_path / "site")
    outcomes = run_scenarios(
        sys.executable,
        [tmp_path / "site", *SOURCES],
        [scenario("other", world["pack"])],
        tmp_path / "out",
        model=other,
    )
    assert outcomes["other"].get("error") == "IdentityError", outcomes
    assert "is of another checkpoint than" in outcomes["other"]["message"]


def test_counters_are_written_while_nothing_is_served(world: dict[str, Any]) -> None:
    assert world["outcomes"]["idle"] == {"done": True}, world["outcomes"]["idle"]
    first, later = np.load(world["out"] / "idle.npz")["written"]
    assert later > first


def test_what_was_read_is_counted_in_a_file(world: dict[str, Any]) -> None:
    path = world["out"].parent / "counted" / "sglang-rank0-counters.json"
    document = json.loads(path.read_text())
    assert (document["format"], document["engine"], document["rank"]) == (1, "sglang", 0)
    counters = document["counters"]
    assert counters["num_rows"] >= 4 * 64  # those that were compared at the load
    assert counters["num_reads"] > 0
    assert counters["errors"] == {}
    assert counters["num_lookups"] >= 4
    assert counters["wait_s"] > 0


def test_every_rank_leaves_a_receipt(world: dict[str, Any]) -> None:
    receipt = json.loads((world["receipts"] / "sglang-rank3-receipt.json").read_text())
    assert (receipt["engine"], receipt["engine_version"]) == ("sglang", "0.5.23")
    assert receipt["columns"] == [9, 10, 11]
    assert (receipt["rank"], receipt["world_size"], receipt["store"]) == (3, 4, "staged")
    assert receipt["store_reason"] == "no CUDA device"
    assert receipt["replaced"][0] == "sglang.srt.layers.engram._HostTable"
    assert len(receipt["replaced"]) == 7
    assert receipt["compared_rows"] == {"1 codes": 64, "1 scales": 64, "4 codes": 64, "4 scales": 64}
    assert len(receipt["source_sha256"]) == 16
    assert receipt["checkpoint_proof"] == "sampled rows, headers and token map"
