"""Every row has one owner, whatever the number of ranks, and what ranks gather or sum is the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskfleet_engram.errors import GeometryError
from deskfleet_engram.geometry import EngramGeometry, EngramSpec
from deskfleet_engram.ownership import PAD_COLUMN, ColumnOwnership, RowOwnership
from deskfleet_engram.portable import NOT_MINE

REAL = EngramGeometry.build(
    EngramSpec(
        layer_ids=(1, 14),
        num_embeddings=(384006168, 384016682),
        max_ngram_size=4,
        vocab_size=16000000,
        n_heads=8,
        head_dim=256,
        pad_token_id=2,
        compressed_vocab_size=99092,
    )
)
WORLDS = st.integers(1, 9)
ORDERS = st.sampled_from(["strided", "contiguous"])


def fetch(ids: np.ndarray) -> np.ndarray:
    """Stand in for a store: float64 [..., 2] that tells rows apart, zeros for NOT_MINE."""
    return np.where(ids[..., None] == NOT_MINE, 0.0, np.stack([ids + 1, 2 * ids + 3], axis=-1))


@given(num_columns=st.integers(1, 40), world_size=WORLDS, order=ORDERS)
def test_columns_are_split_without_rest_or_overlap(num_columns: int, world_size: int, order: str) -> None:
    ownership = ColumnOwnership.split(num_columns, world_size, order)
    owned = [ownership.columns(rank) for rank in range(world_size)]
    assert sorted(column for columns in owned for column in columns) == list(range(num_columns))
    assert ownership.columns_per_rank == -(-num_columns // world_size)
    assert ownership.assignment.shape == (world_size, ownership.columns_per_rank)
    for rank, columns in enumerate(owned):
        assert list(columns) == sorted(columns)
        assert all(ownership.rank_of(column) == rank for column in columns)
        row = ownership.assignment[rank].tolist()
        assert row == [*columns, *[PAD_COLUMN] * (len(row) - len(columns))]
    if order == "strided":
        assert all(column % world_size == rank for rank, columns in enumerate(owned) for column in columns)
        assert max(map(len, owned)) - min(map(len, owned)) <= 1


@settings(deadline=None)
@given(
    num_columns=st.integers(1, 26),
    world_size=WORLDS,
    order=ORDERS,
    shape=st.lists(st.integers(0, 3), max_size=2),
    seed=st.integers(0, 2**32 - 1),
)
def test_an_all_gather_in_gather_order_is_the_whole_lookup(
    num_columns: int, world_size: int, order: str, shape: list[int], seed: int
) -> None:
    ownership = ColumnOwnership.split(num_columns, world_size, order)
    ids = np.random.default_rng(seed).integers(0, 10**9, (*shape, num_columns))
    parts = [fetch(ownership.local_ids(ids, rank)) for rank in range(world_size)]
    assert all(part.shape == (*shape, ownership.columns_per_rank, 2) for part in parts)
    gathered = np.concatenate(parts, axis=-2)
    assert np.array_equal(gathered[..., ownership.gather_order(), :], fetch(ids))
    # Padded places hold zeros, in case an engine sums or looks at them.
    pads = np.setdiff1d(np.arange(gathered.shape[-2]), ownership.gather_order())
    assert not gathered[..., pads, :].any()


@given(num_rows=st.integers(1, 10**9), world_size=WORLDS)
def test_rows_are_split_without_rest_or_overlap(num_rows: int, world_size: int) -> None:
    ownership = RowOwnership(num_rows, world_size)
    end = 0
    for rank in range(world_size):
        first, last = ownership.rows(rank)
        assert first == end
        assert 0 <= last - first <= ownership.rows_per_rank
        end = last
    assert end == num_rows


@settings(deadline=None)
@given(num_rows=st.integers(1, 50), world_size=WORLDS, seed=st.integers(0, 2**32 - 1))
def test_the_sum_over_ranks_is_the_whole_lookup(num_rows: int, world_size: int, seed: int) -> None:
    ownership = RowOwnership(num_rows, world_size)
    ids = np.random.default_rng(seed).integers(-1, num_rows, (5, 3))
    parts = [fetch(ownership.mine(ids, rank)) for rank in range(world_size)]
    assert np.array_equal(sum(parts), fetch(ids))
    owners = sum((ownership.mine(ids, rank) != NOT_MINE).astype(int) for rank in range(world_size))
    assert np.array_equal(owners, (ids != NOT_MINE).astype(int))


@pytest.mark.parametrize(
    ("world_size", "per_rank", "last"),
    [(1, 384006168, 384006168), (2, 192003084, 192003084), (4, 96001542, 96001542), (8, 48000771, 48000771)],
)
def test_published_row_ranges_of_layer_1(world_size: int, per_rank: int, last: int) -> None:
    ownership = RowOwnership(384006168, world_size)
    assert ownership.rows_per_rank == per_rank
    first, end = ownership.rows(world_size - 1)
    assert (end - first, end) == (last, 384006168)


def test_the_last_rank_of_layer_14_is_short() -> None:
    ownership = RowOwnership(384016682, 8)
    assert ownership.rows_per_rank == 48002086
    first, last = ownership.rows(7)
    assert last - first == 48002080


@pytest.mark.parametrize("world_size", range(1, 10))
@pytest.mark.parametrize("position", [0, 1])
def test_files_that_a_row_range_needs(world_size: int, position: int) -> None:
    num_rows = REAL.spec.num_embeddings[position]
    ownership = RowOwnership(num_rows, world_size)
    offsets = REAL.offsets[position]
    for rank in range(world_size):
        first, last = ownership.rows(rank)
        touched = {int(np.searchsorted(offsets, row, side="right")) - 1 for row in (first, last - 1)}
        columns = ownership.columns(REAL, position, rank)
        assert list(columns) == list(range(min(touched), max(touched) + 1))


def test_a_rank_without_rows_needs_no_files() -> None:
    spec = EngramSpec((1,), (5 + 7 + 11,), 4, 5, 1, 32, 2, 9)
    geometry = EngramGeometry.build(spec)
    ownership = RowOwnership(23, 9)
    assert ownership.rows(8) == (23, 23)
    assert ownership.columns(geometry, 0, 8) == ()
    assert ownership.columns(geometry, 0, 0) == (0,)
    with pytest.raises(GeometryError, match="has 23 rows, not the 24"):
        RowOwnership(24, 9).columns(geometry, 0, 0)


def test_strided_ranks_have_heads_of_every_ngram_size() -> None:
    ownership = ColumnOwnership.split(24, 4)
    for rank in range(4):
        assert np.bincount([column // 8 for column in ownership.columns(rank)]).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda: ColumnOwnership.split(24, 0),
        lambda: ColumnOwnership.split(0, 2),
        lambda: RowOwnership(0, 1),
        lambda: RowOwnership(5, -1),
    ],
)
def test_numbers_that_cannot_be(call: object) -> None:
    with pytest.raises(GeometryError, match="cannot be split among"):
        call()  # type: ignore[operator]


def test_arguments_out_of_range() -> None:
    columns, rows = ColumnOwnership.split(24, 5), RowOwnership(100, 5)
    ids = np.zeros((2, 23), dtype=np.int64)
    for call in (
        lambda: columns.columns(5),
        lambda: columns.columns(-1),
        lambda: columns.rank_of(24),
        lambda: columns.local_ids(ids, 0),
        lambda: rows.rows(5),
        lambda: rows.mine(ids, -1),
    ):
        with pytest.raises(GeometryError):
            call()
    with pytest.raises(ValueError, match="read-only"):
        columns.assignment[0, 0] = 3
