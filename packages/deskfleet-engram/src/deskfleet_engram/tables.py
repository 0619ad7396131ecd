"""Where one layer's table lies, for whoever reads it: in a published shard, or in packed columns.

Builds and checks descriptions from a RowSource, a checkpoint's SourceTable or a pack's manifest. Opens no data file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deskfleet_engram.errors import IdentityError
from deskfleet_engram.format import RowFormat
from deskfleet_engram.geometry import EngramGeometry
from deskfleet_engram.manifest import (
    Manifest,
    PackIdentity,
    check_model,
    check_same_identity,
    identity_of,
    read_manifest,
)
from deskfleet_engram.portable import RowSource
from deskfleet_engram.source import Source, SourceTable


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Weights and scales as two ranges of files, rows contiguous in both. Nothing in them can be checked."""

    weight_path: Path
    weight_offset_bytes: int
    scale_path: Path
    scale_offset_bytes: int


@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """One hash column: `num_rows` rows from `first_row` of the table on.

    `path` is None for a column that is not held here. Its rows are then another rank's and give what NOT_MINE gives
    if `is_elsewhere`, and cannot be asked for otherwise.
    """

    column: int
    first_row: int
    num_rows: int
    path: Path | None
    is_elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class PackPlace:
    """Packed columns of one pack, ascending and without gaps; each row carries a checksum."""

    identity_sha256: bytes
    columns: tuple[ColumnPlace, ...]

    @property
    def pack_id(self) -> int:
        """The number in every block's header and checksums."""
        return int.from_bytes(self.identity_sha256[:8], "little")


@dataclass(frozen=True, slots=True)
class TablePlace:
    """One layer's table. `second` answers when `first` cannot; `global_scale` matters to NVFP4 rows only."""

    layer: int
    rows: RowFormat
    num_rows: int
    first: ShardPlace | PackPlace
    second: ShardPlace | PackPlace | None = None
    global_scale: float = 1.0
    name: str = "engram table"


def place_of_rows(source: RowSource, *, layer: int = 0) -> TablePlace:
    """Return the place that PortableStore reads; `layer` is only a label."""
    path, scale_path = source.paths
    return TablePlace(
        layer=layer,
        rows=source.rows,
        num_rows=source.num_rows,
        first=ShardPlace(path, source.weight_offset_bytes, scale_path, source.scale_offset_bytes),
        global_scale=source.global_scale,
        name=source.table,
    )


def place_of_table(table: SourceTable) -> TablePlace:
    """Return the place of a checkpoint's table, of either row format, in one shard or in two."""
    return TablePlace(
        layer=table.layer,
        rows=table.rows,
        num_rows=table.num_rows,
        first=_shard(table),
        global_scale=1.0 if table.global_scale is None else float(table.global_scale),
        name=table.weight.name.removesuffix(".weight"),
    )


def place_of_pack(
    pack_dir: Path,
    layer: int,
    *,
    columns: Iterable[int] | None = None,
    geometry: EngramGeometry | None = None,
    token_map_sha256: str | None = None,
    second_source: Source | Path | None = None,
    zero_for_others: bool = False,
) -> TablePlace:
    """Return the place of a layer's packed columns; the parameters are those of PortablePack.

    `second_source` may also be the directory of another copy of the pack. Raises FormatError for a manifest that
    cannot be used and IdentityError when pack, model and second source do not belong together.
    """
    manifest = read_manifest(pack_dir)
    identity = manifest.identity
    if geometry is not None:
        check_model(identity, geometry, token_map_sha256=token_map_sha256)
    if layer not in identity.layers:
        raise IdentityError(f"{pack_dir} has no layer {layer}; it has {', '.join(map(str, identity.layers))}")
    held = manifest.columns(layer)
    wanted = set(held) if columns is None else set(columns)
    missing = sorted(wanted - set(held))
    if missing or not wanted:
        raise IdentityError(
            f"{pack_dir} does not hold columns {missing} of layer {layer}; it holds {list(held)}"
        )
    position = identity.layers.index(layer)
    return TablePlace(
        layer=layer,
        rows=identity.rows,
        num_rows=identity.geometry.spec.num_embeddings[position],
        first=_columns(pack_dir, identity, layer, wanted, zero_for_others),
        second=_second(pack_dir, identity, layer, second_source),
        global_scale=float(identity.global_scales.get(layer, 1.0)),
        name=f"layer {layer} of {pack_dir}",
    )


def _second(
    pack_dir: Path, identity: PackIdentity, layer: int, second_source: Source | Path | None
) -> ShardPlace | PackPlace | None:
    if second_source is None:
        return None
    if isinstance(second_source, Path):
        manifest: Manifest = read_manifest(second_source)
        check_same_identity(
            manifest.identity, identity, found_name=str(second_source), wanted_name=str(pack_dir)
        )
        held = set(manifest.columns(layer))
        return _columns(second_source, manifest.identity, layer, held, zero_for_others=False)
    check_same_identity(
        identity,
        identity_of(second_source),
        found_name=str(pack_dir),
        wanted_name=str(second_source.directory),
    )
    return _shard(second_source.table(layer))


def _shard(table: SourceTable) -> ShardPlace:
    return ShardPlace(
        table.weight.path, table.weight.offset_bytes, table.scale.path, table.scale.offset_bytes
    )


def _columns(
    pack_dir: Path, identity: PackIdentity, layer: int, held: set[int], zero_for_others: bool
) -> PackPlace:
    places = []
    for column in range(identity.geometry.spec.num_columns):
        layout = identity.layout(layer, column)
        places.append(
            ColumnPlace(
                column=column,
                first_row=identity.first_row(layer, column),
                num_rows=layout.num_rows,
                path=pack_dir / layout.file_name if column in held else None,
                is_elsewhere=zero_for_others and column not in held,
            )
        )
    return PackPlace(identity.sha256, tuple(places))


__all__ = [
    "ColumnPlace",
    "PackPlace",
    "ShardPlace",
    "TablePlace",
    "place_of_pack",
    "place_of_rows",
    "place_of_table",
]
