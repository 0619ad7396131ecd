"""The file of keys: names and digests, never a key. Owns its format, how keys are made, and how the file is written.

    salt = "5f0c..."

    [[keys]]
    name = "alice"
    digest = "b1946ac9..."
    created = 2026-11-30T12:00:00Z

A digest is HMAC-SHA-256 of the key under the file's salt. A slow hash would protect keys that can be guessed, and cost
each request what it costs a thief; these keys are 256 random bits, which no hash has to protect from guessing, and a
key that people thought of is refused. So a thousand keys are told apart by one digest and one look into a table.

Revoked keys stay in the file, so that a name is never given to another key, and its settings stay valid.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hmac
import os
import re
import secrets
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deskfleet.errors import ConfigError
from deskfleet.gateway.redaction import KEY_PREFIX

MIN_SECRET_LENGTH = 32
MAX_SECRET_LENGTH = 512

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_SECRET = re.compile(r"[A-Za-z0-9._~+/-][A-Za-z0-9._~+/=-]*")
_NUM_KEY_BYTES = 32
_HEADER = "# Keys of deskfleet, as digests. Written by `deskfleet keys`; comments are not kept.\n"


@dataclass(frozen=True, slots=True)
class Key:
    """One key, as it is kept: its name, its digest (32 bytes), when it was made, and when it was revoked."""

    name: str
    digest: bytes
    created: datetime
    revoked: datetime | None = None


@dataclass(frozen=True, slots=True)
class KeyFile:
    """Every key of one file, revoked ones too."""

    salt: bytes
    keys: tuple[Key, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all keys, revoked ones too."""
        return tuple(key.name for key in self.keys)

    def digest(self, secret: str) -> bytes:
        """Return what is kept of a key, or of whatever else came in a header."""
        return hmac.digest(self.salt, secret.encode(errors="surrogateescape"), "sha256")

    def with_key(self, name: str, secret: str, now: datetime) -> KeyFile:
        """Return the file with another key. Raises ConfigError for a name that is taken or no name."""
        check_name(name)
        if name in self.names:
            raise ConfigError(f"there is a key {name!r} already", hint="revoked names are not used again")
        if any(hmac.compare_digest(self.digest(secret), key.digest) for key in self.keys):
            raise ConfigError("this key is in the file already, under another name")
        return replace(self, keys=(*self.keys, Key(name, self.digest(secret), now)))

    def without(self, name: str, now: datetime) -> KeyFile:
        """Return the file with a key revoked. Raises ConfigError when there is none of that name."""
        if name not in self.names:
            raise ConfigError(
                f"there is no key {name!r}", hint=f"there are {', '.join(self.names) or 'none'}"
            )
        return replace(
            self,
            keys=tuple(
                replace(key, revoked=key.revoked or now) if key.name == name else key for key in self.keys
            ),
        )


def make_secret() -> str:
    """Return a new key: 256 random bits behind a prefix by which it can be found where it should not be."""
    return KEY_PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(_NUM_KEY_BYTES)).decode().rstrip("=")


def check_name(name: str) -> None:
    """Raise ConfigError for what cannot be the name of a key."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} is no name for a key", hint="use up to 64 letters, digits, dots, dashes, @ and _"
        )


def check_secret(text: str) -> str:
    """Return a key that somebody brings, without the end of the line it may stand on.

    Raises ConfigError, which never repeats any of it, for one that HTTP cannot carry or that could be guessed.
    """
    secret = text.removesuffix("\n").removesuffix("\r")
    hint = "leave it out, and one is made"
    if not MIN_SECRET_LENGTH <= len(secret) <= MAX_SECRET_LENGTH:
        raise ConfigError(
            f"the key has {len(secret)} characters, not {MIN_SECRET_LENGTH} to {MAX_SECRET_LENGTH}", hint=hint
        )
    if _SECRET.fullmatch(secret) is None or secret.startswith("-"):
        raise ConfigError(
            "the key has characters that do not belong into a header, or begins with a dash", hint=hint
        )
    if len(set(secret)) < 12:
        raise ConfigError(f"the key is made of {len(set(secret))} different characters only", hint=hint)
    return secret


class _KeyEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    name: str = Field(pattern=rf"^{_NAME.pattern}$")
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    created: datetime
    revoked: datetime | None = None


class _KeyFileEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    salt: str = Field(pattern=r"^[0-9a-f]{32,128}$")
    keys: list[_KeyEntry] = Field(default_factory=list)


def read_key_file(path: Path) -> KeyFile:
    """Read a file of keys. Raises ConfigError saying what is wrong and where; no value of the file is repeated."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o022:
                raise ConfigError(
                    f"{path} can be written by others, who could add a key", hint=f"chmod 600 {path}"
                )
            text = file.read().decode()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}",
            hint=f"deskfleet keys new NAME --file {path} makes it",
        ) from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8") from None
    return _parse(text, path)


def _parse(text: str, path: Path) -> KeyFile:
    # Causes are left out on purpose: their texts and traces may hold a line of the file.
    hint = "keys stand here as digests; make the file with deskfleet keys new"
    try:
        entry = _KeyFileEntry.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at (line \d+, column \d+|end of document)\)", str(error))
        raise ConfigError(f"{path} is not TOML, {place[1] if place else 'somewhere'}", hint=hint) from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place_of = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {place_of}: {_reason(first['type'], first['msg'])}", hint=hint) from None
    file = KeyFile(
        bytes.fromhex(entry.salt),
        tuple(Key(key.name, bytes.fromhex(key.digest), key.created, key.revoked) for key in entry.keys),
    )
    for kind, values in (("name", file.names), ("digest", tuple(key.digest for key in file.keys))):
        if len(set(values)) != len(values):
            raise ConfigError(f"{path}: two keys of one {kind}", hint=hint)
    return file


def _reason(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "there is no such entry"
    return "not as it should be" if kind == "string_pattern_mismatch" else message[:1].lower() + message[1:]


def change_key_file(path: Path, change: Callable[[KeyFile], KeyFile]) -> KeyFile:
    """Apply `change` to the file, or to an empty one where there is none, and return what is in it now.

    Nobody ever sees half a file, nobody else's change is lost, and only the owner can read it. Raises ConfigError as
    `read_key_file` and `change` do, and when the file cannot be written.
    """
    try:
        with _locked(path):
            old = read_key_file(path) if path.stat().st_size else KeyFile(secrets.token_bytes(32))
            new = change(old)
            _replace(path, _render(new))
            return new
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file for oneself; it is made where there is none, and removed again when nothing was written."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Whoever held it before may have put another file in its place.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()) and path.stat().st_size == 0:
                path.unlink()
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}."
    )  # readable by its owner only
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _render(file: KeyFile) -> str:
    parts = [_HEADER, f'salt = "{file.salt.hex()}"\n']
    for key in file.keys:
        lines = [
            "[[keys]]",
            f'name = "{key.name}"',
            f'digest = "{key.digest.hex()}"',
            f"created = {_time(key.created)}",
        ]
        if key.revoked is not None:
            lines.append(f"revoked = {_time(key.revoked)}")
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


__all__ = [
    "MIN_SECRET_LENGTH",
    "Key",
    "KeyFile",
    "change_key_file",
    "check_name",
    "check_secret",
    "make_secret",
    "read_key_file",
]
