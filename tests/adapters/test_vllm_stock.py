"""The slow lane: the plug-in, installed as users install it, over vLLM 0.33's own code on a CPU.

The wheel of vLLM 0.33.0 beside the environment of a CPU vLLM, whose 0.32 is the unknown release that must be refused.
CUDA graphs, host nodes and mapped memory of a device need a device: `python -m deskfleet_vllm prove` is for that.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from adapters_env import PYTHON, ROOT, VENV, WHEELS, environment, install_plugin, make_engines

from deskfleet_engram.pack import pack
from tests.engram.pack_fixtures import make_checkpoint

COMPARE_S, PROVE_S, REFUSE_S = 1800, 600, 300

pytestmark = [pytest.mark.slow, pytest.mark.adapters]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, its pack, and the plug-in installed by pip into a directory of its own."""
    make_engines()
    place = tmp_path_factory.mktemp("vllm")
    pack(make_checkpoint(place / "model", n_heads=8), place / "pack")
    install_plugin("vllm", place)
    return place


def run(place: Path, *arguments: str, timeout_s: float) -> str:
    """Run Python with vLLM 0.33 and return what it prints."""
    paths = (place / "vllm-site", WHEELS / "vllm", WHEELS / "extra")
    done = subprocess.run(
        [str(PYTHON), "-W", "ignore", *arguments],
        env=environment(*paths, TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_rows_from_disk_are_those_of_the_stock_table(place: Path) -> None:
    """Every rank of 1, 2, 3, 4, 5, 8; ids of other ranks, -1, ids past the table, padded columns; 1 to 300 tokens.

    Bit by bit those of vLLM's own table, and its kernel's packed rows those of the portable store. The ids that prompts
    are hashed to ahead of a step are those of vLLM's own kernel in it, over images and in any order.
    """
    work = place / "work"
    work.mkdir()
    script = str(ROOT / "tests" / "adapters" / "vllm_stock.py")
    printed = run(place, script, *map(str, (place / "model", place / "pack", work)), timeout_s=COMPARE_S)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert found["version"] == "0.33.0"
    assert found["is_hooked"], "vLLM did not load the plug-in from its entry point"
    assert found["compared"] == 23 * 2 * 2 * 5
    assert found["parameter_bytes"] == [264]
    assert found["hashes_ahead"] == (9 + 13 + 29 + 22) * 2 * 24
    assert found["states"] == ["PromptState", "DeepseekV41ModelState"]
    assert found["opened_at_load"] == ["other.safetensors"]
    assert found["refused"].startswith("vLLM 0.33.0: the source of engram_head_shard_rank is")
    assert found["is_stock_without_config"]
    receipt = json.loads((work / "receipts-8-mapped" / "vllm-rank7-receipt.json").read_text())
    assert receipt["columns"] == [21, 22, 23]
    assert receipt["warnings"] == []


def test_a_store_is_proved_by_the_command(place: Path) -> None:
    arguments = (str(place / "pack"), str(place / "model"), "--store", "staged", "--lookups", "5")
    printed = run(place, "-m", "deskfleet_vllm", "prove", *arguments, timeout_s=PROVE_S)
    assert "5 steps of 6 x 24 rows of layers 1+3, twice each: all equal by the staged store on cpu" in printed
    assert re.search(
        r"a read that fails ends the step \(after \d good ones\): RowError; .*L0\d/c\d\d\.egp", printed
    )


def test_an_unknown_release_refuses_with_one_sentence(place: Path) -> None:
    """The CPU environment's own 0.32 serves nothing when it is asked for rows from disk."""
    told = json.dumps({"deskfleet_engram": {"pack": str(place / "pack")}})
    done = subprocess.run(
        [str(VENV / "bin" / "vllm"), "serve", str(place / "model"), "--additional-config", told],
        env=environment(place / "vllm-site"),
        capture_output=True,
        text=True,
        check=False,
        timeout=REFUSE_S,
    )
    assert done.returncode != 0
    assert "this plug-in is made for vLLM 0.33, not 0.32.0" in done.stderr
