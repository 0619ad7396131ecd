"""What a plug-in of another engine needs: one rank's rows of all layers, proof that they are the right ones, a receipt.

`HostRows.open` compares pack and checkpoint, then opens the rank's columns; `HostTable` reads a layer's rows.
`ContractError`, `check_sources` and `write_receipt` are how a plug-in refuses an engine it was not made for, and says
what it replaced. Knows no engine and no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import platform
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.errors import ContractError, MissingRowsError, SourceError
from deskfleet_engram.geometry import EngramGeometry
from deskfleet_engram.manifest import (
    Manifest,
    PackIdentity,
    check_model,
    check_same_identity,
    identity_of,
    open_source_as,
    read_manifest,
)
from deskfleet_engram.native import NativeOptions
from deskfleet_engram.portable import NOT_MINE, decode_rows
from deskfleet_engram.row_cache import RowCache
from deskfleet_engram.source import read_spec
from deskfleet_engram.store import BackendName, OpenStore, PackedLayer, open_stores, sum_counters

RECEIPT_FORMAT = 1
"""Version of the receipt's keys; a reader ignores keys that it does not know."""


@dataclass(frozen=True, slots=True, eq=False)
class HostTable:
    """One layer's rows of one rank: those from `first_row` to `end_row` of the layer's whole table.

    Ids are int32 or int64 of any shape, numbered over the whole table. An id outside the range, -1 among them, is
    another rank's or padding and gives zero codes and scale bytes of one (127). A row that exists is never answered
    with zeros. Every method raises RowError naming file, block and row when the disk does not give a row.
    """

    layer: int
    columns: tuple[int, ...]
    first_row: int
    end_row: int
    head_dim: int
    store: OpenStore

    @property
    def num_rows(self) -> int:
        """Rows of this rank."""
        return self.end_row - self.first_row

    @property
    def num_scales(self) -> int:
        """Scale bytes of a row, after its `head_dim` code bytes."""
        return self.head_dim // 32

    def own_ids(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        """Return `ids` as int64 with NOT_MINE for what lies outside this rank's rows."""
        wide = ids.astype(np.int64)
        return np.where((wide >= self.first_row) & (wide < self.end_row), wide, NOT_MINE)

    def gather(self, ids: NDArray[Any], out_codes: NDArray[np.uint8], out_scales: NDArray[np.uint8]) -> None:
        """Fill uint8 `out_codes` [..., head_dim] and `out_scales` [..., num_scales] with the rows `ids` [...]."""
        self.store.gather(self.own_ids(ids), out_codes, out_scales)

    def rows(self, ids: NDArray[Any]) -> NDArray[np.uint8]:
        """Return uint8 [..., row bytes]: codes, then scales, 264 bytes in the published tables."""
        rows = np.empty((*ids.shape, self.head_dim + self.num_scales), np.uint8)
        self.gather(ids, rows[..., : self.head_dim], rows[..., self.head_dim :])
        return rows

    def bf16(self, ids: NDArray[Any]) -> NDArray[np.uint16]:
        """Return uint16 [..., head_dim]: the bits of bf16 values, ties rounded to even. Scale byte 0 is 2^-127 here
        (zero in vLLM's kernel), 255 is NaN."""
        codes = np.empty((*ids.shape, self.head_dim), np.uint8)
        scales = np.empty((*ids.shape, self.num_scales), np.uint8)
        own = self.own_ids(ids)
        self.store.gather(own, codes, scales)
        values = _bf16_bits(decode_rows(codes, scales))
        values[own == NOT_MINE] = 0
        return values


class HostRows:
    """One rank's rows of every Engram layer, open. `tables` by layer id; `proof` says how the checkpoint was compared.

    Natively one I/O thread serves all layers. Open it in the process that reads, never before a fork.
    """

    def __init__(
        self, manifest: Manifest, proof: str, rank: int, world_size: int, tables: Mapping[int, HostTable]
    ) -> None:
        self.manifest = manifest
        self.proof = proof
        self.rank = rank
        self.world_size = world_size
        self.tables = dict(tables)

    @classmethod
    def open(
        cls,
        pack_dir: Path,
        checkpoint_dir: Path,
        *,
        rank: int,
        world_size: int,
        columns: Sequence[int],
        backend: BackendName = "auto",
        options: NativeOptions | None = None,
        cache: RowCache | None = None,
    ) -> HostRows:
        """Open `columns`, ascending and without gaps, as the engine shares them out, of every layer.

        Pack and checkpoint are compared first: a digest of sampled rows of every column where the checkpoint's table
        shards are there, else configuration and token map. Raises IdentityError for another checkpoint,
        MissingRowsError for columns that the pack lacks, ContractError for columns that are no run of the table's or
        rows in another form than FP8, FormatError and SourceError for what cannot be read, and RowError or
        NativeError from the reader.
        """
        manifest = read_manifest(pack_dir)
        geometry = manifest.identity.geometry
        wanted = _checked_columns(columns, geometry.spec.num_columns, rank, world_size)
        if manifest.identity.rows.name != "fp8":
            raise ContractError(
                f"{pack_dir} holds {manifest.identity.rows.name} rows, but the engine reads fp8",
                hint="pack the published checkpoint",
            )
        proof = _prove_checkpoint(manifest, pack_dir, checkpoint_dir)
        layers = geometry.spec.layer_ids
        _check_present(manifest, pack_dir, wanted)
        stores = open_stores(
            [PackedLayer(pack_dir, layer, wanted, geometry) for layer in layers],
            backend=backend,
            options=options,
            cache=cache,
        )
        tables = {
            layer: HostTable(
                layer,
                wanted,
                *_row_range(manifest.identity, layer, wanted),
                manifest.identity.rows.head_dim,
                store,
            )
            for layer, store in zip(layers, stores, strict=True)
        }
        return cls(manifest, proof, rank, world_size, tables)

    @property
    def columns(self) -> tuple[int, ...]:
        """The rank's columns."""
        return next(iter(self.tables.values())).columns

    def log_line(self) -> str:
        """What a plug-in logs once on each rank, and the launcher looks for."""
        own, total = self.columns, self.manifest.identity.geometry.spec.num_columns
        return f"deskfleet-engram: columns {own[0]}-{own[-1]} of {total} from disk"

    def rows(self, layer: int, ids: NDArray[Any]) -> NDArray[np.uint8]:
        """Return the rows `ids` of a layer; see HostTable."""
        return self.tables[layer].rows(ids)

    def counters(self) -> dict[str, Any]:
        """What was read since opening: rows, unique rows, cache hits, reads, bytes, errors by kind."""
        return dataclasses.asdict(sum_counters(table.store for table in self.tables.values()))

    def receipt(self) -> dict[str, Any]:
        """Return what is read, from where and how, as JSON values."""
        report = next(iter(self.tables.values())).store.report
        return {
            "pack_sha256": self.manifest.identity.sha256.hex(),
            "checkpoint_proof": self.proof,
            "rank": self.rank,
            "world_size": self.world_size,
            "columns": list(self.columns),
            "num_columns": self.manifest.identity.geometry.spec.num_columns,
            "rows": {str(layer): [table.first_row, table.end_row] for layer, table in self.tables.items()},
            "reader": str(report),
            "is_checked": report.is_checked,
        }

    def close(self) -> None:
        """Close the files, after running lookups ended. Closing twice is allowed."""
        for table in self.tables.values():
            table.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# --- the engine's side ------------------------------------------------------------------------------------


def source_sha256(target: Any) -> str:
    """Return the SHA-256 of a function's or class's source text, as its module spells it, indentation removed.

    Raises ContractError when there is no source to read.
    """
    try:
        text = inspect.getsource(inspect.unwrap(target) if inspect.isfunction(target) else target)
    except (OSError, TypeError) as error:
        raise ContractError(f"the source of {target!r} cannot be read: {error}") from error
    return hashlib.sha256(textwrap.dedent(text).encode()).hexdigest()


def check_sources(found: Mapping[str, Any], wanted: Mapping[str, str], *, engine: str) -> dict[str, str]:
    """Compare functions and classes, by name, with the digests that the plug-in was made against.

    Return the digests found. Raises ContractError naming the first that differs, or is missing on either side.
    """
    digests = {name: source_sha256(target) for name, target in found.items()}
    for name in sorted({*digests, *wanted}):
        if digests.get(name) != wanted.get(name):
            raise ContractError(
                f"{engine}: the source of {name} is {_brief(digests.get(name))}, but the plug-in was made for "
                f"{_brief(wanted.get(name))}",
                hint="take the release that the plug-in was tested with",
            )
    return digests


def write_receipt(directory: Path, name: str, document: Mapping[str, Any]) -> Path:
    """Write a JSON file `name` with `document`, format, process id, host and time; whole, or not at all.

    Raises ContractError when the directory cannot be written.
    """
    path = directory / name
    partial = directory / f".{name}.{os.getpid()}"
    body = {
        "format": RECEIPT_FORMAT,
        "pid": os.getpid(),
        "host": platform.node(),
        "written_unix_s": time.time(),
        **document,
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ContractError(f"{path}: cannot write: {error.strerror or error}") from error
    return path


def log_receipt(document: Mapping[str, Any]) -> str:
    """Return the line of a receipt for the log, where a launcher finds it on every node without reading files.

    `KEY=VALUE` pairs: what must be the same on every rank first, then what is this rank's own. `sources` is the digest
    of all that was compared of the engine.
    """
    sources = hashlib.sha256(json.dumps(document["source_sha256"], sort_keys=True).encode()).hexdigest()
    pairs = {
        "engine": f"{document['engine']}-{document['engine_version']}",
        "plugin": document["plugin_version"],
        "sources": sources[:16],
        "pack": document["pack_sha256"][:16],
        "store": document["store"],
        "warnings": len(document["warnings"]),
        "rank": f"{document['rank']}/{document['world_size']}",
        "columns": f"{document['columns'][0]}-{document['columns'][-1]}",
    }
    return "deskfleet-engram receipt: " + " ".join(f"{key}={value}" for key, value in pairs.items())


# --- checks -----------------------------------------------------------------------------------------------


def _checked_columns(columns: Sequence[int], num_columns: int, rank: int, world_size: int) -> tuple[int, ...]:
    wanted = tuple(columns)
    if not 0 <= rank < world_size:
        raise ContractError(f"rank {rank} is outside the {world_size} ranks of the engine")
    run = tuple(range(wanted[0], wanted[0] + len(wanted))) if wanted else ()
    if not wanted or wanted != run or wanted[0] < 0 or wanted[-1] >= num_columns:
        raise ContractError(
            f"rank {rank} of {world_size} reads columns {wanted}, which are no run of the table's {num_columns}"
        )
    return wanted


def _check_present(manifest: Manifest, pack_dir: Path, wanted: tuple[int, ...]) -> None:
    for layer in manifest.identity.layers:
        missing = sorted(set(wanted) - set(manifest.columns(layer)))
        if missing:
            spelled = ",".join(map(str, missing))
            raise MissingRowsError(
                f"{pack_dir} lacks columns {spelled} of layer {layer}, which this rank reads",
                hint="pack or copy them, then start again",
            )


def _prove_checkpoint(manifest: Manifest, pack_dir: Path, checkpoint_dir: Path) -> str:
    """Say how pack and checkpoint were compared. Raises IdentityError when they differ, and SourceError."""
    absent = _absent_shards(manifest, checkpoint_dir)
    if absent:
        geometry = EngramGeometry.build(read_spec(checkpoint_dir))
        check_model(manifest.identity, geometry)
        return f"configuration only: {absent[0]} is not there"
    found = identity_of(open_source_as(manifest.identity, checkpoint_dir))
    check_same_identity(manifest.identity, found, found_name=str(pack_dir), wanted_name=str(checkpoint_dir))
    return "sampled rows, headers and token map"


def _absent_shards(manifest: Manifest, checkpoint_dir: Path) -> list[str]:
    """Return the shards of this checkpoint's tables that its index names and that are not there."""
    index = checkpoint_dir / "model.safetensors.index.json"
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        tables = manifest.identity.document["source"]["tables"]
        wanted = [names[table[part]["name"]] for table in tables for part in ("weight", "scale")]
    except FileNotFoundError:
        return []
    except KeyError:  # other names: another checkpoint, which comparing will say better
        return []
    except (OSError, ValueError, TypeError) as error:
        raise SourceError(f"{index}: cannot read: {error}") from error
    return sorted({name for name in wanted if not (checkpoint_dir / name).exists()})


def _row_range(identity: PackIdentity, layer: int, columns: tuple[int, ...]) -> tuple[int, int]:
    last = identity.layout(layer, columns[-1])
    return identity.first_row(layer, columns[0]), identity.first_row(layer, columns[-1]) + last.num_rows


def _bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return float32 as bf16, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _brief(digest: str | None) -> str:
    return "not there" if digest is None else digest[:16]


__all__ = [
    "RECEIPT_FORMAT",
    "ContractError",
    "HostRows",
    "HostTable",
    "MissingRowsError",
    "check_sources",
    "log_receipt",
    "source_sha256",
    "write_receipt",
]
