"""What the plug-in is told: variables of the environment, the one channel that SGLang leaves open to plug-ins.

Owns their names and values; knows nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from deskfleet_engram.host import ContractError

PACK_VARIABLE = "DESKFLEET_ENGRAM_PACK"
STORE_VARIABLE = "DESKFLEET_ENGRAM_STORE"
SPLIT_VARIABLE = "DESKFLEET_ENGRAM_SPLIT"
RECEIPTS_VARIABLE = "DESKFLEET_ENGRAM_RECEIPTS"

StoreName = Literal["auto", "mapped", "callback", "staged"]


@dataclass(frozen=True, slots=True)
class Settings:
    """`store` as asked for. `split_dir` holds split files, for mapped only; `receipts_dir` None: only logged."""

    pack_dir: Path
    store: StoreName
    split_dir: Path
    receipts_dir: Path | None


def read_settings(environ: Mapping[str, str]) -> Settings | None:
    """Return the settings, None without DESKFLEET_ENGRAM_PACK. Raises ContractError for a store that is none."""
    pack_dir = environ.get(PACK_VARIABLE)
    if not pack_dir:
        return None
    wanted = environ.get(STORE_VARIABLE) or "auto"
    for name in get_args(StoreName):
        if wanted == name:
            receipts = environ.get(RECEIPTS_VARIABLE)
            return Settings(
                pack_dir=Path(pack_dir),
                store=name,
                split_dir=Path(environ.get(SPLIT_VARIABLE) or Path(pack_dir) / "split"),
                receipts_dir=Path(receipts) if receipts else None,
            )
    raise ContractError(
        f"{STORE_VARIABLE} is {wanted!r}, which is no store",
        hint=f"give one of {', '.join(get_args(StoreName))}",
    )


__all__ = [
    "PACK_VARIABLE",
    "RECEIPTS_VARIABLE",
    "SPLIT_VARIABLE",
    "STORE_VARIABLE",
    "Settings",
    "StoreName",
    "read_settings",
]
