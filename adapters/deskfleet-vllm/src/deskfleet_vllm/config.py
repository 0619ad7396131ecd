"""What `--additional-config` says to this plug-in."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from deskfleet_engram.host import ContractError

KEY = "deskfleet_engram"
RECEIPTS_VARIABLE = "DESKFLEET_ENGRAM_RECEIPTS"

StoreName = Literal["mapped", "callback", "staged"]
STORES: tuple[StoreName, ...] = get_args(StoreName)


@dataclass(frozen=True, slots=True)
class Settings:
    """The value of our key.

    `pack`: directory of packed columns. `store`: None chooses (see `choice`). `checkpoint`: the checkpoint to compare
    with, by default the model's directory. `split`: where mapped rows lie, by default below the pack. `receipts`: where
    each rank says what it did, by default what DESKFLEET_ENGRAM_RECEIPTS says, else below vLLM's cache. `prefetch`:
    rows of prompts are put on their way before they are looked up. `allow_untested`: a release or a source that
    differs from what the plug-in was made for is logged instead of refused; for developers.
    """

    pack: Path
    store: StoreName | None = None
    checkpoint: Path | None = None
    split: Path | None = None
    receipts: Path | None = None
    prefetch: bool = True
    allow_untested: bool = False

    @classmethod
    def read(cls, additional: Any) -> Settings | None:
        """Return the settings, or None when our key is absent. Raises ContractError for a key or value that is none."""
        if not isinstance(additional, Mapping) or KEY not in additional:
            return None
        given = additional[KEY]
        if not isinstance(given, Mapping) or not isinstance(given.get("pack"), str):
            raise ContractError(
                f'additional config {KEY} is {given!r}, not an object with "pack"',
                hint=f'give {{"{KEY}": {{"pack": "/engram"}}}}',
            )
        unknown = sorted(map(str, set(given) - set(cls.__dataclass_fields__)))
        if unknown:
            raise ContractError(f"additional config {KEY} has unknown keys: {', '.join(unknown)}")
        return cls(
            pack=Path(given["pack"]),
            store=_store(given.get("store", "auto")),
            checkpoint=_path(given, "checkpoint"),
            split=_path(given, "split"),
            receipts=_path(given, "receipts"),
            prefetch=_flag(given, "prefetch", default=True),
            allow_untested=_flag(given, "allow_untested", default=False),
        )

    def receipts_dir(self) -> Path:
        """Where receipts and counters belong."""
        return self.receipts or default_receipts()


def default_receipts() -> Path:
    """Return where receipts belong that no setting has a place for. vLLM must be imported."""
    told = os.environ.get(RECEIPTS_VARIABLE)
    return Path(told) if told else Path(sys.modules["vllm.envs"].VLLM_CACHE_ROOT) / "deskfleet-engram"


def _store(value: Any) -> StoreName | None:
    if value == "auto":
        return None
    for name in STORES:
        if value == name:
            return name
    raise ContractError(f"{KEY}.store is {value!r}, not auto, {', '.join(STORES)}")


def _path(given: Mapping[str, Any], key: str) -> Path | None:
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise ContractError(f"{KEY}.{key} is {value!r}, not a path")
    return None if value is None else Path(value)


def _flag(given: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise ContractError(f"{KEY}.{key} is {value!r}, not true or false")
    return value


__all__ = ["KEY", "RECEIPTS_VARIABLE", "STORES", "Settings", "StoreName", "default_receipts"]
