"""Native and portable readers give the same bytes for any ids: world sizes, splits, row formats, sources, outputs.

Ids are hashed from random tokens with dead and padded positions, or drawn with repeats and edges; ranks own columns or
row ranges. Nothing here knows what a row holds: the two sides are compared with each other, and a rank's share with
the whole table.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_fixtures import FORMATS, LAYER, World, make_world, outputs, to_bf16
from numpy.typing import NDArray

from deskfleet_engram.errors import RowError
from deskfleet_engram.format import NVFP4_FORMAT
from deskfleet_engram.geometry import EngramGeometry
from deskfleet_engram.hashing import DEAD, hash_ids
from deskfleet_engram.manifest import sample_rows
from deskfleet_engram.native import NativeOptions, RowCache
from deskfleet_engram.ownership import ColumnOwnership, RowOwnership
from deskfleet_engram.portable import NOT_MINE, decode_rows
from deskfleet_engram.portable_pack import decode_nvfp4_rows
from deskfleet_engram.source import open_source, read_rows
from deskfleet_engram.store import BackendName, OpenStore, PackedLayer, open_store, open_stores, sum_counters

WORLD_SIZES = range(1, 9)
PAD_ID = 2


@dataclass(frozen=True)
class Pair:
    """Stores that must agree: native ones by source, and a portable one."""

    world: World
    native: dict[str, OpenStore]
    portable: dict[str, OpenStore]

    @property
    def geometry(self) -> EngramGeometry:
        return self.world.source.geometry

    @property
    def num_rows(self) -> int:
        return len(self.world.rows)


def opened(stack: ExitStack, world: World) -> Pair:
    """Open every way of reading layer 1; the native ones without a cache, so that each answer is read."""
    places = {"pack": PackedLayer(world.pack_dir, LAYER), "shard": world.table}
    native = {
        name: stack.enter_context(
            open_store(place, backend="native", cache=RowCache(0, world.format.row_bytes))
        )
        for name, place in places.items()
    }
    portable = {
        name: stack.enter_context(open_store(place, backend="portable")) for name, place in places.items()
    }
    return Pair(world, native, portable)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    with ExitStack() as stack:
        worlds = {name: make_world(tmp_path_factory.mktemp(name), name, seed=9) for name in FORMATS}
        yield {name: opened(stack, world) for name, world in worlds.items()}


@st.composite
def hashed_ids(draw: st.DrawFn, geometry: EngramGeometry) -> NDArray[np.int64]:
    """Row ids int64 [T, columns] of layer 1: random tokens, some positions dead, some padding, some chunked."""
    vocabulary = geometry.spec.compressed_vocab_size
    token = st.integers(0, vocabulary - 1) | st.sampled_from([DEAD, PAD_ID, 0, vocabulary - 1])
    tokens = draw(st.lists(token, min_size=1, max_size=40))
    start = draw(st.integers(0, len(tokens) - 1))
    ids = np.array(tokens, dtype=np.int64)
    position = 0 if start < geometry.spec.max_ngram_size - 1 else draw(st.integers(0, 1000))
    return hash_ids(geometry, ids, start=start, position=position, pad_id=PAD_ID)[:, 0]


@st.composite
def drawn_ids(draw: st.DrawFn, geometry: EngramGeometry) -> NDArray[np.int64]:
    """Row ids int64 [N, columns], each anywhere in the table or NOT_MINE, with repeats and the edges of columns."""
    num_rows = geometry.spec.num_embeddings[0]
    starts = geometry.offsets[0].tolist()
    edges = sorted(
        {row for start in (*starts, num_rows) for row in (start - 1, start)} & set(range(num_rows))
    )
    one = st.just(NOT_MINE) | st.sampled_from(edges) | st.integers(0, 40) | st.integers(0, num_rows - 1)
    row = st.lists(one, min_size=len(starts), max_size=len(starts))
    rows = draw(st.lists(row, min_size=0, max_size=30))
    return np.array(rows, dtype=np.int64).reshape(-1, len(starts))


def all_answers(pair: Pair, ids: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes and scales of `ids`, after every way of reading gave the same."""
    rows = pair.world.format
    stores = {f"portable {k}": v for k, v in pair.portable.items()} | {
        f"native {k}": v for k, v in pair.native.items()
    }
    answers = {}
    for name, store in stores.items():
        answers[name] = outputs(rows, *ids.shape)
        store.gather(ids, *answers[name])
    codes, scales = answers["portable pack"]
    for name, (other_codes, other_scales) in answers.items():
        np.testing.assert_array_equal(other_codes, codes, err_msg=name)
        np.testing.assert_array_equal(other_scales, scales, err_msg=name)
    for name, store in pair.native.items():
        check_other_outputs(pair, name, store, ids, codes, scales)
    return codes, scales


def check_other_outputs(
    pair: Pair,
    name: str,
    store: OpenStore,
    ids: NDArray[np.int64],
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
) -> None:
    """Whole rows and decoded ones, and both as tickets, against the portable bytes and the portable decoders."""
    rows = pair.world.format
    assert store.native is not None
    whole = np.full((*ids.shape, rows.row_bytes), 0xAB, dtype=np.uint8)
    decoded = np.full((*ids.shape, rows.head_dim), 0xABAB, dtype=np.uint16)
    store.native.gather_packed(ids, whole)
    if ids.size:
        with store.native.submit_bf16(ids, decoded) as ticket:
            assert ticket.wait()
    if rows.format_id == NVFP4_FORMAT:
        factor = pair.world.table.global_scale
        assert factor is not None
        values = decode_nvfp4_rows(codes, scales, factor)
    else:
        values = decode_rows(codes, scales)
    np.testing.assert_array_equal(whole, np.concatenate([codes, scales], axis=-1), err_msg=name)
    np.testing.assert_array_equal(decoded, to_bf16(values), err_msg=name)


def check_against_table(
    pair: Pair, ids: NDArray[np.int64], codes: NDArray[np.uint8], scales: NDArray[np.uint8]
) -> None:
    """The rows are the checkpoint's, by the plainest of readers, one read each."""
    mine = ids != NOT_MINE
    plain = read_rows(pair.world.table, ids[mine])
    np.testing.assert_array_equal(np.concatenate([codes, scales], axis=-1)[mine], plain)
    assert not codes[~mine].any()


IDS = ("hashed", "drawn")
EXAMPLES = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("source_of_ids", IDS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(data=st.data())
def test_columns_of_every_rank(
    pairs: dict[str, Pair], name: str, world_size: int, source_of_ids: str, data: st.DataObject
) -> None:
    pair = pairs[name]
    strategy = hashed_ids if source_of_ids == "hashed" else drawn_ids
    ids = data.draw(strategy(pair.geometry))
    order = data.draw(st.sampled_from(["strided", "contiguous"]))
    ownership = ColumnOwnership.split(ids.shape[-1], world_size, order)
    parts = [all_answers(pair, ownership.local_ids(ids, rank)) for rank in range(world_size)]
    # After an all-gather the ranks hold the whole lookup, pads dropped.
    codes, scales = (
        np.concatenate(part, axis=-2)[..., ownership.gather_order(), :] for part in zip(*parts, strict=True)
    )
    check_against_table(pair, ids, codes, scales)


@pytest.mark.parametrize("source_of_ids", IDS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(data=st.data())
def test_row_ranges_of_every_rank(
    pairs: dict[str, Pair], name: str, world_size: int, source_of_ids: str, data: st.DataObject
) -> None:
    pair = pairs[name]
    strategy = hashed_ids if source_of_ids == "hashed" else drawn_ids
    ids = data.draw(strategy(pair.geometry))
    ownership = RowOwnership(pair.num_rows, world_size)
    width = pair.world.format.row_bytes
    total = np.zeros((*ids.shape, width), dtype=np.uint8)
    for rank in range(world_size):
        mine = ownership.mine(ids, rank)
        codes, scales = all_answers(pair, mine)
        check_against_table(pair, mine, codes, scales)
        is_mine = (mine != NOT_MINE)[..., None]
        total += np.where(is_mine, np.concatenate([codes, scales], axis=-1), 0)
    plain = read_rows(pair.world.table, ids[ids != NOT_MINE])
    np.testing.assert_array_equal(total[ids != NOT_MINE], plain)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_rank_that_opens_only_its_files(pairs: dict[str, Pair], name: str, world_size: int) -> None:
    """Columns of others are answered alike: as not the rank's own, where that was asked for."""
    pair = pairs[name]
    world = pair.world
    ids = np.random.default_rng(world_size).integers(-1, pair.num_rows, (50, 3))
    for rank in range(world_size):
        columns = ColumnOwnership.split(pair.geometry.spec.num_columns, world_size).columns(rank)
        if not columns:
            continue
        place = PackedLayer(world.pack_dir, LAYER, columns=columns, zero_for_others=True)
        found = []
        for backend in ("native", "portable"):
            with open_store(place, backend=backend) as store:  # type: ignore[arg-type]
                found.append(outputs(world.format, *ids.shape))
                store.gather(ids, *found[-1])
        np.testing.assert_array_equal(found[0][0], found[1][0])
        np.testing.assert_array_equal(found[0][1], found[1][1])
        owner = np.searchsorted(pair.geometry.offsets[0], ids, side="right") - 1
        is_mine = (ids != NOT_MINE) & np.isin(owner, columns)
        check_against_table(pair, np.where(is_mine, ids, NOT_MINE), *found[0])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", ["native", "portable"])
def test_an_incomplete_copy_does_not_open(
    pairs: dict[str, Pair], name: str, backend: BackendName, tmp_path: Path
) -> None:
    """A hole of a sparse file reads as zeros, which no row that exists may be answered with; nor as second source."""
    world = pairs[name].world
    shutil.copytree(world.source.directory, tmp_path / "model")
    span = world.table.weight
    path = tmp_path / "model" / span.path.name
    data = path.read_bytes()
    # Where no row of the identity's sample lies: that would be told as another checkpoint.
    sampled = span.offset_bytes + sample_rows(pairs[name].geometry, 0) * world.format.weight_bytes
    begins = range(-(-span.offset_bytes // 4096) * 4096, span.offset_bytes + span.num_bytes - 4096, 4096)
    begin = next(
        b for b in begins if not ((sampled > b - world.format.weight_bytes) & (sampled < b + 4096)).any()
    )
    with path.open("wb") as file:
        file.write(data[:begin])
        file.seek(begin + 4096)
        file.write(data[begin + 4096 :])
    sparse = open_source(tmp_path / "model")
    for place in (sparse.table(LAYER), PackedLayer(world.pack_dir, LAYER, second_source=sparse)):
        with pytest.raises(RowError, match=f"never written from byte {begin} on") as caught:
            open_store(place, backend=backend)
        assert (caught.value.kind, caught.value.path) == ("hole", path)
    open_store(sparse.table(LAYER), backend=backend, options=NativeOptions(allow_holes=True)).close()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", ["native", "portable"])
def test_counters_of_several_layers(pairs: dict[str, Pair], name: str, backend: BackendName) -> None:
    """Whichever backend reads, stores that were opened together count the same rows, none twice."""
    world = pairs[name].world
    places = [PackedLayer(world.pack_dir, layer) for layer in (1, 3)]
    stores = open_stores(places, backend=backend, cache=RowCache(0, world.format.row_bytes))
    ids = np.array([[0, 1, 0], [NOT_MINE, 5, 1]])
    for store in stores:
        store.gather(ids, *outputs(world.format, *ids.shape))
    counters = sum_counters(stores)
    for store in stores:
        store.close()
    assert (counters.num_rows, counters.num_unique) == (2 * 5, 2 * 3)
    assert (counters.num_cache_hits, counters.num_fallback_rows, counters.errors) == (0, 0, {})
    assert counters.num_reads == 2, "rows 0, 1 and 5 lie in one block of each layer"
    assert counters.read_bytes == 2 * 4096


def test_the_fixtures_cover_what_they_say(pairs: dict[str, Pair]) -> None:
    """Two row formats, two sources by either backend, and columns that do not divide among most world sizes."""
    assert {pair.world.format.name for pair in pairs.values()} == {"fp8", "nvfp4"}
    for pair in pairs.values():
        assert sorted(pair.native) == sorted(pair.portable) == ["pack", "shard"]
    assert pairs["fp8"].geometry.spec.num_columns == 3
    for pair in pairs.values():
        assert open_source(pair.world.source.directory).geometry.spec == pair.geometry.spec
        assert all(store.report.backend == "native" for store in pair.native.values())
        assert all(store.report.backend == "portable" for store in pair.portable.values())
