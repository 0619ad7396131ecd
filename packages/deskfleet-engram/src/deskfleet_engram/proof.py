"""What a proof measured, as a file: how it was run, what it said, and every sample. Knows nothing of engines."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

_PACKAGES = ("deskfleet-engram", "torch", "triton", "vllm", "sglang")


def write_proof(path: Path, said: Sequence[str], seconds: Mapping[str, Sequence[float]]) -> None:
    """Write the lines that were said and the seconds of every step by what was timed. Raises OSError."""
    document = {
        "name": "engram-proof",
        "command": [Path(sys.argv[0]).parent.name, *(Path(given).name for given in sys.argv[1:])],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "said": list(said),
        "samples": {name: list(values) for name, values in seconds.items()},
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


__all__ = ["write_proof"]
