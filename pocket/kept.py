"""What was found of a checkpoint, as a file that a later run goes on with: whose it is, where and when it was found.

Owns that findings of another checkpoint are never taken for this one's. Knows nothing of what is found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from deskfleet.bench.provenance import Provenance
from deskfleet.model.checkpoint import CONFIG_NAME, INDEX_NAME


def fingerprint(checkpoint: Path) -> str:
    """A hash of the checkpoint's configuration, index and shards."""
    digest = hashlib.sha256()
    for path in (
        checkpoint / CONFIG_NAME,
        checkpoint / INDEX_NAME,
        *sorted(checkpoint.glob("*.safetensors")),
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kept_in(path: Path | None, checkpoint: Path, command: str, name: str) -> dict[str, Any]:
    """What a file already holds under `name` about this checkpoint, or a new record of nothing."""
    own = fingerprint(checkpoint)
    if path is not None and path.exists():
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if kept.get("sha256") == own and name in kept:
            return kept
    provenance = msgspec.to_builtins(Provenance.capture(command, command.split()))
    return {"sha256": own, "provenance": provenance, name: {}}


def write_kept(path: Path, kept: Mapping[str, Any]) -> None:
    """Replace the file."""
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


__all__ = ["fingerprint", "kept_in", "write_kept"]
