"""Checkpoints that come with deskfleet, found by name wherever a checkpoint's directory is asked for.

Owns the names and where their files are: package data, which in a source checkout is a link to `pocket/checkpoint`.
Knows nothing of what is in them.
"""

from __future__ import annotations

from pathlib import Path

from deskfleet.errors import ConfigError
from deskfleet.model.checkpoint import CONFIG_NAME

POCKET = "pocket"
"""A small trained checkpoint of the whole V4.1 architecture."""

_PACKAGE = Path(__file__).parents[1]
_PLACES = {POCKET: _PACKAGE / "pocket_checkpoint"}


def locate(named: str | Path) -> Path:
    """Return the directory that `named` means: an embedded checkpoint's for its bare name, else `named` itself.

    A checkpoint of that name in the working directory goes first; a directory that is none does not count. Raises
    ConfigError when the installation lacks the checkpoint.
    """
    text = str(named)
    if text not in _PLACES or (Path(text) / CONFIG_NAME).exists():
        return Path(named)
    place = _PLACES[text].resolve()
    if not (place / CONFIG_NAME).is_file():
        raise ConfigError(
            f"{text} is not part of this installation: there is no {place / CONFIG_NAME}",
            hint="install deskfleet from its wheel or from a complete checkout",
        )
    return place


def embedded_name(directory: Path) -> str | None:
    """Return the name of the embedded checkpoint in `directory`; None when it is another one."""
    resolved = directory.resolve()
    return next((name for name, place in _PLACES.items() if place.resolve() == resolved), None)


__all__ = ["POCKET", "embedded_name", "locate"]
