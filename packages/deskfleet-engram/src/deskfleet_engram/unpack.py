"""Packed rows as people look at them: where a row lies, its bytes, its values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.errors import RowError
from deskfleet_engram.format import NVFP4_FORMAT
from deskfleet_engram.portable import decode_rows
from deskfleet_engram.portable_pack import PortablePack, decode_nvfp4_rows


@dataclass(frozen=True, slots=True, eq=False)
class UnpackedRow:
    """One row. `row` is its id in the layer's table, `column_row` counts within the column.

    `codes` and `scales` are the stored bytes, `values` float32 what they stand for.
    """

    layer: int
    row: int
    column: int
    column_row: int
    file: str
    block: int
    slot: int
    codes: bytes
    scales: bytes
    values: NDArray[np.float32]


def unpack(pack_dir: Path, layer: int, rows: Iterable[int]) -> list[UnpackedRow]:
    """Return rows of a layer, checked, in the order asked for.

    Raises what `PortablePack` raises: RowError for a row that is not in the pack or damaged.
    """
    row_ids = np.fromiter(rows, dtype=np.int64)
    if (row_ids < 0).any():
        raise RowError(f"layer {layer}: row {row_ids.min()} is negative")
    with PortablePack(pack_dir, layer) as store:
        identity = store.identity
        codes = np.empty((row_ids.size, identity.rows.weight_bytes), dtype=np.uint8)
        scales = np.empty((row_ids.size, identity.rows.scale_bytes), dtype=np.uint8)
        store.gather(row_ids, codes, scales)
    if identity.rows.format_id == NVFP4_FORMAT:
        values = decode_nvfp4_rows(codes, scales, identity.global_scales[layer])
    else:
        values = decode_rows(codes, scales)
    offsets = identity.geometry.offsets[identity.layers.index(layer)]
    unpacked = []
    for index, row in enumerate(row_ids.tolist()):
        column = int(np.searchsorted(offsets, row, side="right")) - 1
        local = row - int(offsets[column])
        layout = identity.layout(layer, column)
        unpacked.append(
            UnpackedRow(
                layer=layer,
                row=row,
                column=column,
                column_row=local,
                file=layout.file_name,
                block=layout.block_of(local),
                slot=local % layout.rows.rows_per_block,
                codes=codes[index].tobytes(),
                scales=scales[index].tobytes(),
                values=values[index],
            )
        )
    return unpacked


__all__ = ["UnpackedRow", "unpack"]
