"""Compiled kernels on disk, in the user's cache directory. Owns their names and that a damaged file is never used.

A file is what a compiler made, followed by its SHA-256. Its name is a digest of everything that went in, so a file is
never out of date; ranks that compile the same kernel at once write the same bytes. Knows no compiler.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from deskfleet.errors import EngineError

_DIGEST_BYTES = hashlib.sha256().digest_size


def directory() -> Path:
    """Where compiled kernels lie: $XDG_CACHE_HOME, or ~/.cache, then deskfleet/kernels."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache") / "deskfleet" / "kernels"


def key(*parts: str) -> str:
    """A name for what these parts make, 64 digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def lookup(name: str) -> bytes | None:
    """What was stored as `name`; None when there is nothing, or nothing whole."""
    try:
        content = (directory() / name).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(error) from error
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return body if hashlib.sha256(body).digest() == digest else None


def store(name: str, body: bytes) -> Path:
    """Put `body` there under `name`, whole or not at all, and say where. Raises EngineError where it cannot be kept."""
    try:
        directory().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory(), prefix=f".{name}.", delete=False) as file:
            try:
                file.write(body + hashlib.sha256(body).digest())
                file.close()
                os.replace(file.name, directory() / name)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise _unusable(error) from error
    return directory() / name


def stored(name: str, make: Callable[[], bytes]) -> bytes:
    """What lies there as `name`, made and stored first where it does not."""
    body = lookup(name)
    if body is None:
        body = make()
        store(name, body)
    return body


def _unusable(error: OSError) -> EngineError:
    return EngineError(
        f"compiled kernels cannot be kept in {directory()}: {error}",
        hint="set XDG_CACHE_HOME to a directory that can be written",
    )


__all__ = ["directory", "key", "lookup", "store", "stored"]
