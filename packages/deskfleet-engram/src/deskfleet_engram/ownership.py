"""Who reads which rows: columns or row ranges of a layer's table per rank, for any number of ranks.

Engines split a table in two ways. By column, each rank looks up its columns and all ranks gather them; by row range,
each rank looks up what it owns, zeros stand for the rest, and the ranks' results are summed. Pure arithmetic over
row ids; what is not a rank's own becomes NOT_MINE, which every store answers with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.errors import GeometryError, SelectionError
from deskfleet_engram.geometry import EngramGeometry, EngramSpec
from deskfleet_engram.portable import NOT_MINE

Split = Literal["strided", "runs", "rows"]
"""How a rank's share is cut: columns dealt out one by one, columns in equal runs, or equal ranges of rows."""

PAD_COLUMN = -1
"""Stands where a rank has no column, because the columns do not divide evenly; its rows are NOT_MINE."""


@dataclass(frozen=True, slots=True, eq=False)
class ColumnOwnership:
    """Columns of every rank. `assignment` int64 [world_size, columns per rank]: a column, or PAD_COLUMN.

    All ranks have equally many places, so that their results can be gathered. A rank's columns ascend, and its
    pads come last.
    """

    num_columns: int
    assignment: NDArray[np.int64]

    @classmethod
    def split(
        cls, num_columns: int, world_size: int, order: Literal["strided", "contiguous"] = "strided"
    ) -> ColumnOwnership:
        """Give every rank ceil(columns / ranks) places.

        Strided, rank r has columns r, r + world_size, ...: every rank gets heads of every n-gram size, whose
        unique rows differ in number by almost two, and so all wait equally long. Contiguous is how some engines
        lay out their own tensors. Raises GeometryError when a number is not positive.
        """
        _check_world(num_columns, world_size, "columns")
        per_rank = -(-num_columns // world_size)
        places = np.arange(world_size * per_rank, dtype=np.int64)
        if order == "strided":
            assignment = places.reshape(per_rank, world_size).T.copy()
        else:
            assignment = places.reshape(world_size, per_rank)
        assignment[assignment >= num_columns] = PAD_COLUMN
        assignment.flags.writeable = False
        return cls(num_columns, assignment)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self.assignment.shape[0])

    @property
    def columns_per_rank(self) -> int:
        """Places of each rank, pads included."""
        return int(self.assignment.shape[1])

    def columns(self, rank: int) -> tuple[int, ...]:
        """Return the columns that the rank reads, ascending, without pads. Raises GeometryError."""
        row = self.assignment[_check_rank(rank, self.world_size)]
        return tuple(row[row != PAD_COLUMN].tolist())

    def rank_of(self, column: int) -> int:
        """Return the rank that reads a column. Raises GeometryError when there is no such column."""
        if not 0 <= column < self.num_columns:
            raise GeometryError(f"column {column} is outside 0..{self.num_columns - 1}")
        return int(np.argwhere(self.assignment == column)[0, 0])

    def local_ids(self, row_ids: NDArray[np.int64], rank: int) -> NDArray[np.int64]:
        """Return int64 [..., columns_per_rank]: of `row_ids` [..., num_columns] those that the rank looks up.

        Pads hold NOT_MINE. Raises GeometryError when the last axis is not one id per column.
        """
        if row_ids.shape[-1:] != (self.num_columns,):
            raise GeometryError(f"row ids of shape {row_ids.shape} do not end in {self.num_columns} columns")
        columns = self.assignment[_check_rank(rank, self.world_size)]
        return np.where(columns == PAD_COLUMN, NOT_MINE, row_ids[..., columns])

    def gather_order(self) -> NDArray[np.int64]:
        """Return int64 [num_columns]: where each column stands after an all-gather along the columns.

        With `gathered` [..., world_size * columns_per_rank, D], rank after rank, `gathered[..., order, :]` is in
        column order, without pads.
        """
        order = np.empty(self.num_columns, dtype=np.int64)
        flat = self.assignment.reshape(-1)
        real = flat != PAD_COLUMN
        order[flat[real]] = np.flatnonzero(real)
        return order


@dataclass(frozen=True, slots=True)
class RowOwnership:
    """Contiguous rows of a table per rank: rank r has [r * part, (r + 1) * part), part = ceil(rows / ranks)."""

    num_rows: int
    world_size: int

    def __post_init__(self) -> None:
        _check_world(self.num_rows, self.world_size, "rows")

    @property
    def rows_per_rank(self) -> int:
        """Rows of each rank's tensor; the last ranks own fewer, or none."""
        return -(-self.num_rows // self.world_size)

    def rows(self, rank: int) -> tuple[int, int]:
        """Return the rank's range [first, last), which may be empty. Raises GeometryError."""
        first = _check_rank(rank, self.world_size) * self.rows_per_rank
        return min(first, self.num_rows), min(first + self.rows_per_rank, self.num_rows)

    def mine(self, row_ids: NDArray[np.int64], rank: int) -> NDArray[np.int64]:
        """Return `row_ids` with NOT_MINE in place of every id that is not the rank's."""
        first, last = self.rows(rank)
        return np.where((row_ids >= first) & (row_ids < last), row_ids, NOT_MINE)

    def columns(self, geometry: EngramGeometry, layer_position: int, rank: int) -> tuple[int, ...]:
        """Return the columns whose files the rank needs, ascending.

        Raises GeometryError when the layer's table does not have `num_rows` rows.
        """
        offsets = geometry.offsets[layer_position]
        ends = offsets + np.asarray(geometry.column_rows(layer_position), dtype=np.int64)
        if int(ends[-1]) != self.num_rows:
            raise GeometryError(f"the table has {int(ends[-1])} rows, not the {self.num_rows} that are split")
        first, last = self.rows(rank)
        return tuple(np.flatnonzero((offsets < last) & (ends > first) & (first < last)).tolist())


def select_columns(
    spec: EngramSpec,
    *,
    layers: Sequence[int] | None = None,
    columns: Sequence[int] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    split: Split = "strided",
) -> list[tuple[int, int]]:
    """Return the (layer id, column) pairs that were asked for: of all layers or `layers`, all columns or `columns`, or
    those that one rank reads.

    By rows, the columns at the ends of a rank's range are another rank's too, and may differ between layers. Raises
    SelectionError for what does not exist, and for a rank without a number of ranks.
    """
    if (rank is None) != (world_size is None):
        raise SelectionError("rank and world size go together", hint="give both, or neither for all columns")
    if not set(columns or ()) <= set(range(spec.num_columns)):
        raise SelectionError(f"columns {spell_numbers(columns or ())}: there are 0 to {spec.num_columns - 1}")
    if not set(layers or ()) <= set(spec.layer_ids):
        raise SelectionError(
            f"layers {spell_numbers(layers or ())}: Engram layers are {spell_numbers(spec.layer_ids)}"
        )
    wanted = tuple(layers or spec.layer_ids)
    if rank is None or world_size is None:
        return [(layer, column) for layer in wanted for column in columns or range(spec.num_columns)]
    if not 0 <= rank < world_size:
        raise SelectionError(f"rank {rank} of {world_size}: ranks count from 0 to one less than there are")
    if split == "rows":
        geometry = EngramGeometry.build(spec)
        shares = {
            layer: RowOwnership(num_rows, world_size).columns(geometry, position, rank)
            for position, (layer, num_rows) in enumerate(
                zip(spec.layer_ids, spec.num_embeddings, strict=True)
            )
        }
    else:
        order: Literal["strided", "contiguous"] = "strided" if split == "strided" else "contiguous"
        own = ColumnOwnership.split(spec.num_columns, world_size, order).columns(rank)
        shares = dict.fromkeys(spec.layer_ids, own)
    if not any(shares[layer] for layer in wanted):
        raise SelectionError(f"rank {rank} of {world_size} reads none of the {spec.num_columns} columns")
    return [(layer, column) for layer in wanted for column in shares[layer]]


def spell_numbers(numbers: Sequence[int]) -> str:
    """Spell (0, 1, 2, 5) as "0-2,5", as flags take it; "none" when empty."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in parts) or "none"


def _check_world(count: int, world_size: int, what: str) -> None:
    if count < 1 or world_size < 1:
        raise GeometryError(f"{count} {what} cannot be split among {world_size} ranks")


def _check_rank(rank: int, world_size: int) -> int:
    if not 0 <= rank < world_size:
        raise GeometryError(f"rank {rank} is outside 0..{world_size - 1}")
    return rank


__all__ = ["PAD_COLUMN", "ColumnOwnership", "RowOwnership", "Split", "select_columns", "spell_numbers"]
