"""Byte quantities as text. Owns parsing and formatting; bytes are ints everywhere else.

GiB is 2**30 and GB is 10**9, and neither is ever written for the other.
"""

from __future__ import annotations

import re

from deskfleet.errors import ConfigError

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(text: str) -> int:
    """Return the number of bytes that `text` says, e.g. `64 MiB`, `2GB`, `512`.

    Raises ConfigError for an unknown unit or a bare `64G`, which could mean either.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match.group(2).lower() if match else ""
    if match is None or (unit and unit not in _UNITS):
        raise ConfigError(f"not a byte quantity: {text!r}", hint="write e.g. 64MiB, 2GiB or 2GB")
    return int(float(match.group(1)) * _UNITS.get(unit, 1))


def format_bytes(num_bytes: int) -> str:
    """Return `num_bytes` in binary units with two decimals, e.g. `94.42 GiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


__all__ = ["format_bytes", "parse_bytes"]
