"""The slow lane: the plug-in inside SGLang 0.5.23 as released, installed by pip, on a CPU.

The unpacked wheel beside CPU torch is what `tools/adapters_env.sh` makes. `sglang_driver` has what is pretended there:
a CUDA device's number, and torchvision.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters_env import PYTHON, WHEELS, install_plugin, make_engines
from sglang_cases import ADAPTER, MODEL, RANKS, ROOT, check_rows, run_scenarios, scenario

from deskfleet_engram import _native
from deskfleet_engram.hashing import DEAD, hash_ids
from deskfleet_engram.pack import pack
from deskfleet_engram.source import open_source

RUN_S = 900
KINDS = ("engine", "scheduler", "detokenizer", "controller")

pytestmark = [pytest.mark.slow, pytest.mark.adapters]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every scenario, in one SGLang that is imported once: that alone takes half a minute."""
    make_engines()
    place = tmp_path_factory.mktemp("sglang")
    packed, torn, part = place / "pack", place / "torn", place / "part"
    pack(open_source(MODEL), packed)
    shutil.copytree(packed, torn)
    pack(open_source(MODEL), part, columns=[(layer, 0) for layer in (1, 4)])
    site = install_plugin("sglang", place)
    write_split(place, packed)
    split = {"DESKFLEET_ENGRAM_STORE": "mapped", "DESKFLEET_ENGRAM_SPLIT": str(place / "split")}
    receipts = {"DESKFLEET_ENGRAM_RECEIPTS": str(place / "receipts")}
    cases = [
        *(
            scenario(f"tp{tp_size}r{rank}", packed, tp_size=tp_size, rank=rank, env=receipts)
            for tp_size, rank in RANKS
        ),
        {"name": "absent", "env": {}, "do": "stock"},
        *(scenario(f"begin {kind}", packed, do=f"begin {kind}") for kind in KINDS),
        scenario("mapped", packed, tp_size=2, rank=1, env=split, spoilt="mapped files can be read"),
        scenario("callback", packed, tp_size=2, rank=1, spoilt="device by hand"),
        scenario("prefetch", packed, do="prefetch"),
        scenario("dummy", packed, tp_size=2, rank=1, do="dummy"),
        scenario("too early", packed, do="too early"),
        scenario("quiet failure", packed, do="fail quietly"),
        scenario("truncated", torn, spoilt="truncated"),
        scenario("part", part),
        *(
            scenario(what, packed, spoilt=what)
            for what in ("version", "source", "weights", "hashing", "tokenizer", "replaced later")
        ),
        *(
            scenario(f"swallow {what}", packed, spoilt=f"swallow {what}")
            for what in ("_HostTable", "_load_rows", "_owned_rows", "from_model", "process_batch_result")
        ),
    ]
    # The native library is that of the tests' own environment.
    environment = {"DESKFLEET_ENGRAM_LIBRARY": _native.library()._name, "TRITON_INTERPRET": "1"}
    outcomes = run_scenarios(
        str(PYTHON),
        [site, ROOT / "packages" / "deskfleet-engram" / "src"],
        cases,
        place / "out",
        wheels=WHEELS,
        env=environment,
        timeout_s=RUN_S,
    )
    return {"outcomes": outcomes, "out": place / "out", "receipts": place / "receipts"}


def write_split(place: Path, packed: Path) -> None:
    paths = [ADAPTER / "src", ROOT / "packages" / "deskfleet-engram" / "src"]
    subprocess.run(
        [
            *(sys.executable, "-m", "deskfleet_sglang", "split", str(packed), str(MODEL)),
            *("--to", str(place / "split"), "--rank", "1", "--world-size", "2"),
        ],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_rows_are_those_of_sglangs_own_table_in_memory(world: dict[str, Any], tp_size: int) -> None:
    num_own = 0
    for rank in range(tp_size):
        name = f"tp{tp_size}r{rank}"
        assert world["outcomes"][name] == {"done": True}, world["outcomes"][name]
        num_own += check_rows(world["out"], name, tp_size, rank)
    assert num_own == 2 * 402


def test_sglangs_kernel_reads_the_mapped_file(world: dict[str, Any]) -> None:
    """In Triton's interpreter, the kernel of the release; no device."""
    assert world["outcomes"]["mapped"] == {"done": True}, world["outcomes"]["mapped"]
    assert check_rows(world["out"], "mapped", 2, 1) > 300


def test_sglangs_kernel_decodes_what_the_host_function_read(world: dict[str, Any]) -> None:
    """The same; copies and streams are played."""
    assert world["outcomes"]["callback"] == {"done": True}, world["outcomes"]["callback"]
    assert check_rows(world["out"], "callback", 2, 1) > 300


@pytest.mark.parametrize("kind", KINDS)
def test_the_plugin_is_in_every_kind_of_process(world: dict[str, Any], kind: str) -> None:
    assert world["outcomes"][f"begin {kind}"] == {"done": True}
    with np.load(world["out"] / f"begin {kind}.npz") as found:
        assert not found["before"].size
        assert found["hooked"].size >= 5
        assert found["is_ours"]


def test_without_its_variable_nothing_is_touched(world: dict[str, Any]) -> None:
    assert world["outcomes"]["absent"] == {"done": True}
    assert np.load(world["out"] / "absent.npz")["hooked"].size == 0


def test_weights_that_are_made_up_leave_the_rows_alone(world: dict[str, Any]) -> None:
    """`--load-format dummy`, by SGLang's own function."""
    assert world["outcomes"]["dummy"] == {"done": True}, world["outcomes"]["dummy"]
    assert check_rows(world["out"], "dummy", 2, 1) > 300


def test_rows_of_a_prompt_are_there_before_they_are_looked_up(world: dict[str, Any]) -> None:
    assert world["outcomes"]["prefetch"] == {"done": True}, world["outcomes"]["prefetch"]
    found = np.load(world["out"] / "prefetch.npz")
    before, after = found["reads"]
    assert 0 < before == after
    geometry = open_source(MODEL).geometry
    token_map = found["token_map"].astype(np.int64)
    wanted = []
    for tokens, start in (([5, 17, 99, 3, -1, 7, 7, 8], 5), ([11, -1, 13], 0)):  # -1: a position of the image
        compressed = np.where(np.array(tokens) < 0, DEAD, token_map[tokens])
        pad_id = int(token_map[geometry.spec.pad_token_id])
        wanted.append(hash_ids(geometry, compressed, start=0, position=0, pad_id=pad_id)[start:])
    np.testing.assert_array_equal(found["ids"], np.concatenate(wanted))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("version", "SGLang is 0.5.24"),
        ("source", "the source of sglang.srt.layers.engram.shard_range is"),
        ("swallow _HostTable", "did not put REPLACE"),
        ("swallow _load_rows", "did not put AROUND"),
        ("swallow _owned_rows", "did not put AROUND"),
        ("swallow from_model", "did not put AFTER"),
        ("swallow process_batch_result", "did not put BEFORE"),
    ],
)
def test_the_process_ends_before_it_loads_a_model(world: dict[str, Any], name: str, says: str) -> None:
    outcome = world["outcomes"][name]
    assert outcome.get("exit", "").startswith("deskfleet-sglang refuses to start: "), outcome
    assert says in outcome["exit"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("part", "MissingRowsError"),
        ("weights", "IdentityError"),
        ("hashing", "IdentityError"),
        ("tokenizer", "IdentityError"),
        ("replaced later", "ContractError"),
        ("too early", "ContractError"),
        ("quiet failure", "OSError"),
        ("truncated", "RowError"),
    ],
)
def test_the_scheduler_ends_with_an_error(world: dict[str, Any], name: str, error: str) -> None:
    assert world["outcomes"][name].get("error") == error, world["outcomes"][name]


def test_the_receipt_names_what_was_replaced(world: dict[str, Any]) -> None:
    receipt = json.loads((world["receipts"] / "sglang-rank3-receipt.json").read_text())
    assert (receipt["engine_version"], receipt["columns"]) == ("0.5.23", [9, 10, 11])
    assert len(receipt["replaced"]) == 7
    assert len(receipt["source_sha256"]) == 16
