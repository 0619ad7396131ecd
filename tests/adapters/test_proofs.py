"""The slow lane: the proofs that are run on a borrowed device, as they are run there, over a device that is played.

Kernels are the engines' own, cut out of their wheels: neither engine is imported. See `proof_driver`.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from adapters_env import PYTHON, ROOT, WHEELS, environment, make_engines

from deskfleet_engram.bench import sample

PROVE_S = 300

KERNELS = {
    "vllm": WHEELS / "vllm" / "vllm" / "models" / "deepseek_v41" / "common" / "engram.py",
    "sglang": WHEELS / "sglang" / "sglang" / "kernels" / "ops" / "embeddings" / "engram_gather.py",
}

pytestmark = [pytest.mark.slow, pytest.mark.adapters]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both published layers, small, made as `python -m deskfleet_engram.bench.sample` makes them."""
    make_engines()
    place = tmp_path_factory.mktemp("proof")
    assert sample.main([str(place), "--size", "0.01"]) == 0
    return place


def prove(engine: str, kernel: Path, place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(str(PYTHON), "-W", "ignore", str(ROOT / "tests" / "adapters" / "proof_driver.py")),
            *(engine, str(kernel), str(place / "pack"), str(place / "model"), "6"),
        ],
        env=environment(ROOT / "adapters" / f"deskfleet-{engine}" / "src", TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=PROVE_S,
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_proof_compares_every_step_and_then_fails_as_it_must(engine: str, place: Path) -> None:
    done = prove(engine, KERNELS[engine], place)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "6 steps of 6 x 24 rows of layers 1+14, twice each: all equal by the callback store" in done.stdout
    assert done.stdout.count("so a step waits") == 2
    assert re.search(
        r"a read that fails .*\(after \d good.*L\d\d/c\d\d\.egp.*Input/output error", done.stdout
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_another_kernel_proves_nothing(engine: str, place: Path, tmp_path: Path) -> None:
    text = KERNELS[engine].read_text()
    assert "<< 23" in text
    (tmp_path / "kernel.py").write_text(text.replace("<< 23", "<< 22"))
    done = prove(engine, tmp_path / "kernel.py", place)
    assert done.returncode == 3
    assert "_kernel is " in done.stderr
