"""Strict reading of one JSON object: every value has its type checked, every complaint says where it stands.

Knows JSON as the standard library decodes it, and nothing of what the values mean.
"""

from __future__ import annotations

import re
from typing import Any

from deskfleet_engram.errors import FormatError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_WHOLE = (1 << 63) - 1


class Fields:
    """A JSON object at `path`. Methods return a value of the type they name or raise FormatError."""

    def __init__(self, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise FormatError(f"{path} is no JSON object")
        self._values = value
        self.path = path

    def value(self, key: str) -> Any:
        """Return whatever stands at `key`, which must be there."""
        if key not in self._values:
            raise FormatError(f"{self.path}.{key} is missing")
        return self._values[key]

    def child(self, key: str) -> Fields:
        """Return the object at `key`."""
        return Fields(self.value(key), f"{self.path}.{key}")

    def items(self, key: str, *, maximum: int) -> list[Fields]:
        """Return the objects of the list at `key`."""
        return [
            Fields(item, f"{self.path}.{key}[{index}]") for index, item in enumerate(self._list(key, maximum))
        ]

    def text(self, key: str) -> str:
        """Return a string."""
        value = self.value(key)
        if not isinstance(value, str):
            raise FormatError(f"{self.path}.{key} is {value!r:.80}, no string")
        return value

    def optional_text(self, key: str) -> str | None:
        """Return a string or None for null."""
        return None if self.value(key) is None else self.text(key)

    def whole(self, key: str, *, maximum: int = _MAX_WHOLE) -> int:
        """Return a whole number of 0 to `maximum`."""
        return self._check_whole(self.value(key), f"{self.path}.{key}", maximum)

    def optional_whole(self, key: str, *, maximum: int = _MAX_WHOLE) -> int | None:
        """Return a whole number or None for null."""
        return None if self.value(key) is None else self.whole(key, maximum=maximum)

    def whole_list(self, key: str, *, maximum: int) -> tuple[int, ...]:
        """Return a list of at most `maximum` whole numbers."""
        return tuple(
            self._check_whole(value, f"{self.path}.{key}[{index}]", _MAX_WHOLE)
            for index, value in enumerate(self._list(key, maximum))
        )

    def sha256(self, key: str) -> str:
        """Return a SHA-256 digest in hexadecimal."""
        return self._check_sha256(self.value(key), f"{self.path}.{key}")

    def optional_sha256(self, key: str) -> str | None:
        """Return a SHA-256 digest or None for null."""
        return None if self.value(key) is None else self.sha256(key)

    def sha256_list(self, key: str, *, count: int) -> tuple[str, ...]:
        """Return a list of exactly `count` SHA-256 digests."""
        values = self._list(key, count)
        if len(values) != count:
            raise FormatError(f"{self.path}.{key} has {len(values)} entries, not {count}")
        return tuple(
            self._check_sha256(value, f"{self.path}.{key}[{index}]") for index, value in enumerate(values)
        )

    def _list(self, key: str, maximum: int) -> list[Any]:
        value = self.value(key)
        if not isinstance(value, list):
            raise FormatError(f"{self.path}.{key} is no list")
        if len(value) > maximum:
            raise FormatError(f"{self.path}.{key} has {len(value)} entries, more than {maximum}")
        return value

    @staticmethod
    def _check_whole(value: Any, path: str, maximum: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
            raise FormatError(f"{path} is {_shown(value)}, no whole number of 0 to {maximum}")
        return value

    @staticmethod
    def _check_sha256(value: Any, path: str) -> str:
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            raise FormatError(f"{path} is {_shown(value)}, no SHA-256 digest")
        return value


def _shown(value: Any) -> str:
    # Python refuses to spell numbers of thousands of digits.
    if isinstance(value, int) and value.bit_length() > 256:
        return "a very large number"
    return f"{value!r:.80}"


__all__ = ["Fields"]
