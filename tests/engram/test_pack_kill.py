"""Packing is killed with SIGKILL at random moments, and goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from pack_fixtures import files_of, make_checkpoint
from test_pack import EXTENT, assert_never_opens_wrongly

import deskfleet_engram
from deskfleet_engram.pack import pack
from deskfleet_engram.source import Source

PROGRAM = """
import sys
from pathlib import Path
from deskfleet_engram.pack import pack
from deskfleet_engram.source import open_source
source = open_source(Path(sys.argv[1]))
print("ready", flush=True)
pack(source, Path(sys.argv[2]), extent_bytes=int(sys.argv[3]), max_bytes_per_s=float(sys.argv[4]))
"""
KILLS_PER_CASE = 10
RATE = 12e6  # slow enough that a kill lands in the middle of something


def start(source: Source, target: Path) -> subprocess.Popen[str]:
    """Start packing in a process of its own; return when it is about to begin."""
    environment = {**os.environ, "PYTHONPATH": str(Path(deskfleet_engram.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(source.directory), str(target), str(EXTENT), str(RATE)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


# Where a crash can hit at all, test_pack tries every single place; here the moment is chance, so more is better.
@pytest.mark.parametrize("case", [0, *(pytest.param(case, marks=pytest.mark.slow) for case in range(1, 5))])
def test_kill_and_resume(tmp_path: Path, case: int) -> None:
    source = make_checkpoint(tmp_path / "model", vocab_size=997, layer_ids=(1, 14))
    reference = tmp_path / "reference"
    pack(source, reference, extent_bytes=EXTENT)
    expected = files_of(reference)
    random = np.random.default_rng(case)
    target = tmp_path / "pack"
    duration_s = 0.4
    num_kills = num_midway = num_finished = 0
    while num_kills < KILLS_PER_CASE:
        process = start(source, target)
        begin_s = time.monotonic()
        try:
            process.wait(timeout=float(random.uniform(0, duration_s)))
            duration_s = max(0.05, time.monotonic() - begin_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:
            assert files_of(target) == expected
            shutil.rmtree(target)
            num_finished += 1
            duration_s *= 1.5  # the run was a resumed one, shorter than a whole one
            continue
        assert process.returncode == -signal.SIGKILL
        num_kills += 1
        if target.exists():
            num_midway += any(target.rglob("*.partial"))
            assert_never_opens_wrongly(target, source)
    pack(source, target, extent_bytes=EXTENT)
    assert files_of(target) == expected
    assert num_midway >= KILLS_PER_CASE // 2, (num_midway, num_finished)
