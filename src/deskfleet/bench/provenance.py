"""Where a number comes from: command, code, versions, machine. Owns the facts of this process and machine.

Knows nothing of what is measured.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Self

import msgspec

from deskfleet.errors import ConfigError

_PACKAGES = ("deskfleet", "deskfleet-engram", "torch", "numpy", "aiohttp", "deepseek-recipe", "safetensors")


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The circumstances of a measurement.

    `commit` is None when deskfleet does not run from a checkout; `is_dirty` says whether tracked files differed
    from it. `load_average` is the machine's of the last 1, 5 and 15 minutes, at the start: on a shared machine
    it says how much to believe.
    """

    command: str
    argv: tuple[str, ...]
    date: str
    commit: str | None
    is_dirty: bool | None
    python: str
    packages: dict[str, str]
    platform: str
    cpu: str
    num_cores: int
    memory_bytes: int
    load_average: tuple[float, float, float]

    def __post_init__(self) -> None:
        if not self.command or not self.argv or not self.date:
            raise ConfigError("a measurement needs its command, its arguments and its date")

    @classmethod
    def capture(cls, command: str, argv: Sequence[str] | None = None) -> Self:
        """Return the circumstances of now. `command` is what a reader types, `argv` what this process was given.

        By default the process's own arguments, without the directory of the program: that is no part of them.
        """
        commit, is_dirty = _checkout(Path(__file__).parent)
        return cls(
            command=command,
            argv=(Path(sys.argv[0]).name, *sys.argv[1:]) if argv is None else tuple(argv),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=commit,
            is_dirty=is_dirty,
            python=platform.python_version(),
            packages={name: version for name in _PACKAGES if (version := _version(name))},
            platform=platform.platform(),
            cpu=_cpu_model(),
            num_cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            load_average=os.getloadavg(),
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _checkout(directory: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the checkout around `directory` and whether it was changed, or two Nones."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None, None
    return commit, bool(_git(directory, "status", "--porcelain", "--untracked-files=no"))


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ("git", "-C", str(directory), *arguments), capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


__all__ = ["Provenance"]
