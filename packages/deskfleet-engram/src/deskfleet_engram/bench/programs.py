"""Other programs that are measured beside the reader. The one place of this distribution that starts processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from deskfleet_engram.errors import EngramError

_LIMIT_S = 600.0


def output_of(command: list[str], *, directory: Path | None = None, limit_s: float = _LIMIT_S) -> str:
    """Run a program to its end and return what it printed. Raises EngramError when it fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=limit_s, cwd=directory
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise EngramError(f"{Path(command[0]).name} failed: {said[-300:]}") from error
    return done.stdout


__all__ = ["output_of"]
