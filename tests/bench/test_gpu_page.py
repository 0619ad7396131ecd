"""A measurement of the GPU step as a section: the same file gives the same text, whatever the order of a set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RESULT = Path(__file__).parents[2] / "bench" / "results" / "2026-12-01-gpu-decode-6.json"
PROGRAM = """
import sys
from pathlib import Path
from deskfleet.bench.gpu_page import read_gpu_result, render_gpu
path = Path(sys.argv[1])
print(render_gpu(path.name, read_gpu_result(path)))
"""


@pytest.fixture
def rendered() -> set[str]:
    """The section as processes that hash strings differently write it."""
    return {
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(RESULT)],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in range(6)
    }


def test_kinds_that_take_as_long_are_in_one_order(rendered: set[str]) -> None:
    """In the last step of this file two kinds of kernels have no time at all, which left their order to chance."""
    assert len(rendered) == 1
    (text,) = rendered
    assert "| decode, 16 rows" in text
    kinds = text[text.index("| step |") :].splitlines()[0]
    assert kinds.index(" projections |") < kinds.index(" router, compressor, head |")
