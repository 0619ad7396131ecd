"""Packing of Engram rows as a node runs it: a job in, events out. deskfleet_engram, which the node has, does the work.

Owns which columns a rank's node packs, and what is said of those that it does not need. Travels as text like
`deskfleet.fleet.fetch`; of other packages it uses deskfleet_engram alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import deskfleet_engram.errors as engram_errors
from deskfleet.errors import (
    CheckpointError,
    ConfigError,
    DeskfleetError,
    DoesNotFit,
    PackError,
    WrongPack,
)
from deskfleet.fleet.fetch import error_event
from deskfleet.fleet.transfer import Rate
from deskfleet_engram.manifest import MANIFEST_NAME, open_source_as, read_manifest
from deskfleet_engram.native_blocks import use_native_blocks
from deskfleet_engram.ownership import Split as Rule
from deskfleet_engram.ownership import select_columns, spell_numbers
from deskfleet_engram.pack import PackProgress, pack, packed_bytes, plan_pack
from deskfleet_engram.source import Source, open_source
from deskfleet_engram.verify import Level, VerifyProgress, verify

Split = Literal["strided", "runs", "runs or rows", "none"]
"""How the engine shares a table out: strided columns; equal runs of columns; these where they divide, else equal ranges
of rows; or every rank reads all."""

Tell = Callable[[dict[str, Any]], None]

_TELL_EVERY_S = 1.0
_OURS: tuple[tuple[type[engram_errors.EngramError], type[DeskfleetError]], ...] = (
    (engram_errors.SelectionError, ConfigError),
    (engram_errors.SpaceError, DoesNotFit),
    (engram_errors.IdentityError, WrongPack),
    (engram_errors.SourceError, CheckpointError),
    (engram_errors.GeometryError, CheckpointError),
)


@dataclass(frozen=True, slots=True)
class PackHere:
    """What one node packs: from `checkpoint` into `pack_dir`, what `ranks` of `world_size` read.

    `model` and `revision` are what the checkpoint is called, kept in a new pack. `max_bytes_per_s` limits reading.
    """

    checkpoint: str
    pack_dir: str
    ranks: tuple[int, ...]
    world_size: int
    split: Split
    model: str | None = None
    revision: str | None = None
    level: Level = "quick"
    max_bytes_per_s: float | None = None


def wanted_columns(source: Source, job: PackHere) -> list[tuple[int, int]]:
    """Return the (layer id, column) pairs that the node's ranks read. Raises EngramError for a rank that reads none."""
    spec = source.geometry.spec
    if job.split == "none":
        return select_columns(spec)
    split: Rule
    if job.split == "runs or rows":
        split = "rows" if spec.num_columns % job.world_size else "runs"
    else:
        split = job.split
    shares = [select_columns(spec, rank=rank, world_size=job.world_size, split=split) for rank in job.ranks]
    return sorted({pair for share in shares for pair in share})


def pack_here(job: PackHere, tell: Tell) -> dict[str, Any]:
    """Pack, verify, and return what is there now. Raises EngramError, and ConfigError for a pack on NFS."""
    pack_dir = Path(job.pack_dir)
    _refuse_nfs(pack_dir)
    source = _open(job, pack_dir)
    columns = wanted_columns(source, job)
    encoder = "native" if use_native_blocks() is None else "numpy"
    plan = plan_pack(source, pack_dir, columns=columns)
    tell({"event": "plan", "needed_bytes": plan.needed_bytes, "free_bytes": plan.free_bytes})
    report = pack(
        source,
        pack_dir,
        columns=columns,
        on_progress=_throttled(_packing, tell),
        max_bytes_per_s=job.max_bytes_per_s,
    )
    checked = verify(
        pack_dir,
        level=job.level,
        source=None if job.level == "quick" else source,
        columns=columns,
        on_progress=_throttled(_Verifying(), tell),
    )
    if not checked.is_sound:
        raise PackError(
            f"{pack_dir}: {checked.num_faults} faults, {checked.faults[0]} first",
            hint="is the disk sound? Pack again",
        )
    return {
        **report.to_dict(),
        "encoder": encoder,
        "num_columns": len(columns),
        "num_bytes": packed_bytes(read_manifest(pack_dir).identity, columns),
        "num_compared": checked.num_compared,
        **_others(pack_dir, columns),
    }


def _open(job: PackHere, pack_dir: Path) -> Source:
    checkpoint = Path(job.checkpoint)
    # A pack that is there keeps its names, so that columns of another fleet can be added to it.
    if (pack_dir / MANIFEST_NAME).exists():
        return open_source_as(read_manifest(pack_dir).identity, checkpoint)
    return open_source(checkpoint, repo=job.model, revision=job.revision)


def _others(pack_dir: Path, columns: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """What the pack holds beside the columns that are needed: of another number of ranks, left alone."""
    manifest = read_manifest(pack_dir)
    others = sorted({(file.layer, file.column) for file in manifest.files} - set(columns))
    by_layer = {
        str(layer): spell_numbers([column for other, column in others if other == layer])
        for layer in sorted({layer for layer, _ in others})
    }
    return {"other_columns": by_layer, "other_bytes": packed_bytes(manifest.identity, others)}


def _refuse_nfs(directory: Path) -> None:
    there = directory.absolute()
    while not there.exists():
        there = there.parent
    there = there.resolve()
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = {fields[1].replace("\\040", " "): (fields[0], fields[2]) for fields in mounts}
    at = next((path for path in (there, *there.parents) if str(path) in found), None)
    source, kind = found[str(at)] if at is not None else ("", "")
    if kind.startswith("nfs"):
        raise ConfigError(
            f"{directory} is on NFS ({source}): every row would cross the network twice",
            hint="let paths.engram be a directory on a local disk of the node",
        )


def _packing(progress: PackProgress) -> dict[str, Any]:
    # A byte counts when it is packed and again when it is read back.
    return {
        "event": "progress",
        "doing": progress.file,
        "done_bytes": (progress.packed_bytes + progress.checked_bytes) // 2,
        "total_bytes": progress.total_bytes,
        "rate_bytes_s": progress.rate_bytes_s,
        "eta_s": progress.eta_s,
    }


class _Verifying:
    """The check at the end, as an event: with the rate of its last seconds."""

    def __init__(self) -> None:
        self._rate: Rate | None = None

    def __call__(self, progress: VerifyProgress) -> dict[str, Any]:
        self._rate = self._rate or Rate(progress.total_bytes, 0)
        per_s, eta_s = self._rate.now(progress.done_bytes)
        return {
            "event": "progress",
            "doing": f"verify {progress.file}",
            "done_bytes": progress.done_bytes,
            "total_bytes": progress.total_bytes,
            "rate_bytes_s": per_s,
            "eta_s": eta_s,
        }


def _throttled(spell: Callable[[Any], dict[str, Any]], tell: Tell) -> Callable[[Any], None]:
    """Tell of progress once a second, and when all is done."""
    told_s = 0.0

    def now_and_then(progress: Any) -> None:
        nonlocal told_s
        event = spell(progress)
        if time.monotonic() - told_s >= _TELL_EVERY_S or event["done_bytes"] >= event["total_bytes"]:
            told_s = time.monotonic()
            tell(event)

    return now_and_then


def main(argv: list[str]) -> int:
    """Run the job in `argv[1]`; print events; return the exit code."""

    def tell(event: dict[str, Any]) -> None:
        print(json.dumps(event), flush=True)

    words = json.loads(argv[1])
    try:
        result = pack_here(PackHere(**{**words, "ranks": tuple(words["ranks"])}), tell)
    except engram_errors.EngramError as error:
        kind = next((ours for theirs, ours in _OURS if isinstance(error, theirs)), PackError)
        ours = kind(error.message, hint=error.hint)
        tell(error_event(ours))
        return ours.exit_code
    except DeskfleetError as error:
        tell(error_event(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    tell({"event": "done", **result})
    return 0


__all__ = ["PackHere", "Split", "main", "pack_here", "wanted_columns"]
