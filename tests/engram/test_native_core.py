"""The C++ core under address and undefined-behaviour sanitizers: its own tests, and random bytes into its parsers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "packages" / "deskfleet-engram" / "native"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cmake") is None or shutil.which("g++") is None:
        pytest.skip("needs cmake and g++")
    directory = tmp_path_factory.mktemp("core")
    configure = ["cmake", "-S", str(NATIVE), "-B", str(directory), "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    configure += ["-DENGRAM_TESTS=ON", "-DENGRAM_SANITIZE=address,undefined"]
    run(configure)
    run(["cmake", "--build", str(directory), "--parallel", "4"])
    return directory


def run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-8000:]
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["parts", "fuzz", "store"])
def test_core(build: Path, name: str) -> None:
    assert "ok" in run([str(build / f"engram_{name}")])
