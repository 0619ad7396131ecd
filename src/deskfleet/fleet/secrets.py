"""What secrets are, from the references that a fleet.toml gives: read when they are used, and never shown.

No message here repeats any of a value, nor of a file's text.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from deskfleet.errors import ConfigError

MAX_SECRET_BYTES = 16 * 1024
"""More than any token; a file that is longer is another file than was meant."""


def read_secret(name: str, reference: str, environ: Mapping[str, str]) -> str:
    """Return the value of the secret `name`. Raises ConfigError when it is not there, or others can read its file.

    A file holds one line; the end of that line is no part of the value.
    """
    kind, _, place = reference.partition(":")
    if kind == "env":
        value = environ.get(place)
        if not value:
            raise ConfigError(
                f"secret {name}: the variable {place} is not set", hint=f"export {place} before the command"
            )
    else:
        value = _read_file(name, Path(place))
    if any(unicodedata.category(c) == "Cc" for c in value):
        raise ConfigError(
            f"secret {name}: {reference} has several lines, or control characters",
            hint="a secret is one line",
        )
    return value


def read_secrets(references: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return every secret by its name. Raises ConfigError as `read_secret` does."""
    return {name: read_secret(name, reference, environ) for name, reference in references.items()}


def state_of(name: str, reference: str, environ: Mapping[str, str]) -> str:
    """Say of a secret whether it can be read, and nothing else: `(set, from env:HF_TOKEN)`."""
    try:
        read_secret(name, reference, environ)
    except ConfigError as error:
        return f"(not usable, from {reference}: {error.message.partition(': ')[2]})"
    return f"(set, from {reference})"


def _read_file(name: str, path: Path) -> str:
    try:
        # Opened first: what is judged is what is read.
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"secret {name}: {path} is no file")
            if status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise ConfigError(
                    f"secret {name}: {path} has mode {mode:04o}, so that others can read or change it",
                    hint=f"chmod 600 {path}",
                )
            data = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"secret {name}: cannot read {path}: {error.strerror or error}") from error
    if len(data) > MAX_SECRET_BYTES:
        raise ConfigError(f"secret {name}: {path} is longer than {MAX_SECRET_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ConfigError(f"secret {name}: {path} is not UTF-8") from None
    if not text:
        raise ConfigError(f"secret {name}: {path} is empty")
    return text


__all__ = ["MAX_SECRET_BYTES", "read_secret", "read_secrets", "state_of"]
