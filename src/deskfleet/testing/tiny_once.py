"""Makes the tiny checkpoint if it is not there. Owns that two processes asking at once get one checkpoint."""

from __future__ import annotations

import fcntl
from pathlib import Path

from deskfleet.errors import ConfigError
from deskfleet.testing.tiny import make_tiny


def ensure_tiny(directory: str | Path, *, seed: int = 0) -> bool:
    """Make a tiny checkpoint in `directory` unless there is something already; say whether one was made.

    What is there is left as it is, whoever made it. A second process waits for the first instead of writing
    beside it. Raises ConfigError when the directory cannot be written.
    """
    target = Path(directory).absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / f".{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_dir() and any(target.iterdir()):
                return False
            make_tiny(target, seed=seed)
            return True
    except OSError as error:
        raise ConfigError(f"cannot write {target.parent}: {error.strerror or error}") from error


__all__ = ["ensure_tiny"]
