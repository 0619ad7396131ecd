"""The native reader gives the portable readers' bytes: any ids, backend, source, row format, output and rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_fixtures import (
    BACKENDS,
    FORMATS,
    LAYER,
    SOURCES,
    World,
    check_sums,
    gathered,
    make_world,
    open_reader,
    outputs,
    to_bf16,
)
from pack_fixtures import TINY

from deskfleet_engram.errors import RowError
from deskfleet_engram.native import IoClass, NativeOptions, NativeStore
from deskfleet_engram.ownership import ColumnOwnership, RowOwnership
from deskfleet_engram.portable import NOT_MINE, PortableStore, decode_rows
from deskfleet_engram.portable_pack import PortablePack, decode_nvfp4_rows
from deskfleet_engram.source import open_source
from deskfleet_engram.store import PackedLayer, open_store, open_stores
from deskfleet_engram.tables import place_of_pack, place_of_table


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    return {name: make_world(tmp_path_factory.mktemp(name), name) for name in FORMATS}


@pytest.fixture(scope="module")
def stores(worlds: dict[str, World]) -> Iterator[dict[tuple[str, str, str], NativeStore]]:
    """One open store for every backend, source and format; half of them with a small cache."""
    opened = {}
    for number, (backend, source, name) in enumerate(itertools.product(BACKENDS, SOURCES, FORMATS)):
        options = NativeOptions(backend=backend, depth=32, pool_threads=4)
        place = worlds[name].place(source)
        reader = open_reader(place, options=options, cache_bytes=number % 2 * 40_000)
        opened[backend, source, name] = NativeStore(reader, LAYER)
    yield opened
    for store in opened.values():
        check_sums(store.reader)
        store.reader.close()


NUM_ROWS = 2133  # 701 + 709 + 719 rows at least; ids beyond are clipped


@st.composite
def id_lists(draw: st.DrawFn) -> list[int]:
    """Ids with repeats, NOT_MINE, neighbours, and the edges of columns and table."""
    edges = st.sampled_from([0, 1, 14, 15, 26, 27, 700, 701, 702, 1409, 1410, 1411, NUM_ROWS - 1])
    near = st.integers(300, 330)
    return draw(st.lists(st.just(NOT_MINE) | edges | near | st.integers(0, NUM_ROWS - 1), max_size=60))


@settings(max_examples=25, deadline=None)
@given(ids=id_lists(), prefetch=st.booleans())
def test_every_reader_gives_the_same_rows(
    ids: list[int],
    prefetch: bool,
    worlds: dict[str, World],
    stores: dict[tuple[str, str, str], NativeStore],
) -> None:
    io_class = IoClass.PREFETCH if prefetch else IoClass.DECODE
    for name in FORMATS:
        world = worlds[name]
        wanted = np.minimum(np.array(ids, dtype=np.int64), len(world.rows) - 1)
        codes, scales = world.expected(wanted)
        for (backend, source, format_name), store in stores.items():
            if format_name != name:
                continue
            out_codes, out_scales = outputs(world.format, len(ids))
            store.gather(wanted, out_codes, out_scales, io_class=io_class)
            np.testing.assert_array_equal(out_codes, codes, err_msg=f"{backend} {source} {name}")
            np.testing.assert_array_equal(out_scales, scales, err_msg=f"{backend} {source} {name}")


@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_portable_readers(worlds: dict[str, World], name: str) -> None:
    world = worlds[name]
    ids = np.random.default_rng(3).integers(-1, len(world.rows), (40, 7))
    with (
        PortablePack(world.pack_dir, LAYER) as portable,
        open_store(PackedLayer(world.pack_dir, LAYER)) as native,
    ):
        assert native.report.backend == "native"
        assert native.report.is_checked
        expected = outputs(world.format, 40, 7)
        portable.gather(ids, *expected)
        found = outputs(world.format, 40, 7)
        native.gather(ids, *found)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_golden_checkpoint_in_place() -> None:
    source = open_source(TINY)
    stores = open_stores(source.tables, backend="native")
    for table, store in zip(source.tables, stores, strict=True):
        ids = np.random.default_rng(table.layer).integers(-1, table.num_rows, 3000)
        expected, found = outputs(table.rows, 3000), outputs(table.rows, 3000)
        with PortableStore(table.row_source()) as portable:
            portable.gather(ids, *expected)
        store.gather(ids, *found)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        assert not store.report.is_checked
    for store in stores:
        store.close()


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("name", FORMATS)
def test_every_rank_reads_its_share(worlds: dict[str, World], name: str, world_size: int) -> None:
    world = worlds[name]
    num_columns = world.source.geometry.spec.num_columns
    offsets = world.source.geometry.offsets[0]
    primes = world.source.geometry.primes[0].reshape(-1)
    random = np.random.default_rng(world_size)
    ids = offsets + random.integers(0, primes, (5, num_columns))
    split = ColumnOwnership.split(num_columns, world_size)
    parts = []
    for rank in range(world_size):
        mine = split.local_ids(ids, rank)
        if not split.columns(rank):
            codes, _ = world.expected(mine)  # a rank without columns has nothing to open
        else:
            place = place_of_pack(world.pack_dir, LAYER, columns=split.columns(rank))
            with open_reader(place) as reader:
                codes, _ = gathered(NativeStore(reader, LAYER), mine)
                foreign = sorted(set(range(num_columns)) - set(split.columns(rank)))
                if foreign:
                    with pytest.raises(
                        RowError, match=f"column {foreign[0]}, which is not open here"
                    ) as caught:
                        gathered(NativeStore(reader, LAYER), offsets[foreign[:1]])
                    assert caught.value.kind == "missing"
        parts.append(codes)
    together = np.concatenate(parts, axis=1)[:, split.gather_order()]
    np.testing.assert_array_equal(together, world.expected(ids)[0])


@pytest.mark.parametrize("world_size", range(1, 9))
def test_row_ranges_sum_to_the_table(worlds: dict[str, World], world_size: int) -> None:
    world = worlds["fp8"]
    ids = np.random.default_rng(7).integers(0, len(world.rows), 200)
    ownership = RowOwnership(len(world.rows), world_size)
    total = np.zeros((200, world.format.weight_bytes), dtype=np.int64)
    with open_reader(world.place("pack")) as reader:
        for rank in range(world_size):
            codes, scales = gathered(NativeStore(reader, LAYER), ownership.mine(ids, rank))
            total += codes
            first, last = ownership.rows(rank)
            others = (ids < first) | (ids >= last)
            assert not codes[others].any()
            assert (scales[others] == 127).all()
    np.testing.assert_array_equal(total, world.expected(ids)[0])


def test_columns_of_others_give_zeros_only_when_told(worlds: dict[str, World]) -> None:
    world = worlds["nvfp4"]
    ids = np.arange(0, len(world.rows), 13)
    layer = PackedLayer(world.pack_dir, LAYER, columns=(0, 2), zero_for_others=True)
    found = []
    for backend in ("native", "portable"):
        with open_store(layer, backend=backend) as store:
            out = outputs(world.format, len(ids))
            store.gather(ids, *out)
            found.append(out)
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
    middle = (ids >= world.source.geometry.offsets[0, 1]) & (ids < world.source.geometry.offsets[0, 2])
    assert middle.any()
    assert not found[0][0][middle].any()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("source", SOURCES)
def test_packed_and_decoded_outputs(worlds: dict[str, World], name: str, source: str) -> None:
    world = worlds[name]
    ids = np.random.default_rng(1).integers(-1, len(world.rows), (30, 4))
    codes, scales = world.expected(ids)
    if name == "fp8":
        values = decode_rows(codes, scales)
    else:
        assert world.table.global_scale is not None
        values = decode_nvfp4_rows(codes, scales, world.table.global_scale)
    with open_reader(world.place(source)) as reader:
        store = NativeStore(reader, LAYER)
        packed = np.full((30, 4, world.format.row_bytes), 0xAB, dtype=np.uint8)
        store.gather_packed(ids, packed)
        np.testing.assert_array_equal(packed, np.concatenate([codes, scales], axis=-1))
        decoded = np.full((30, 4, world.format.head_dim), 0xABAB, dtype=np.uint16)
        store.gather_bf16(ids, decoded)
        np.testing.assert_array_equal(decoded, to_bf16(values))
        assert not decoded[ids == NOT_MINE].any()


def test_shapes_strides_and_id_types(worlds: dict[str, World]) -> None:
    world = worlds["fp8"]
    rows = world.format
    ids = np.random.default_rng(2).integers(-1, len(world.rows), (6, 4))
    codes, scales = world.expected(ids)
    with open_reader(world.place("pack")) as reader:
        store = NativeStore(reader, LAYER)
        for given in (ids, ids.astype(np.int32), np.asfortranarray(ids), ids[::1]):
            out = outputs(rows, 6, 4)
            store.gather(given, *out)
            np.testing.assert_array_equal(out[0], codes)
        wide_codes, wide_scales = outputs(rows, 6, 9)  # a view that no single stride describes
        store.gather(ids, wide_codes[:, 2:6], wide_scales[:, 2:6])
        np.testing.assert_array_equal(wide_codes[:, 2:6], codes)
        np.testing.assert_array_equal(wide_scales[:, 2:6], scales)
        assert (wide_codes[:, :2] == 0xAB).all()
        assert (wide_codes[:, 6:] == 0xAB).all()
        with pytest.raises(RowError, match="evenly spaced"):
            store.submit(ids, wide_codes[:, 2:6], wide_scales[:, 2:6])
        tall_codes, tall_scales = outputs(rows, 12, 4)  # one that a stride does describe
        with store.submit(ids[:, 0], tall_codes[::2, 0], tall_scales[::2, 0]) as ticket:
            assert ticket.wait()
        np.testing.assert_array_equal(tall_codes[::2, 0], codes[:, 0])
        assert (tall_codes[1::2] == 0xAB).all()
        one = outputs(rows)
        store.gather(np.array(5), *one)  # a single id, without a shape
        np.testing.assert_array_equal(one[0], world.rows[5, : rows.weight_bytes])
        none = outputs(rows, 0)
        store.gather(np.empty(0, dtype=np.int64), *none)


def test_requests_that_cannot_be_answered_leave_the_outputs_alone(worlds: dict[str, World]) -> None:
    world = worlds["fp8"]
    with open_reader(world.place("pack")) as reader:
        store = NativeStore(reader, LAYER)
        for bad in (-2, len(world.rows), 2**40, -(2**62)):
            out = outputs(world.format, 3)
            with pytest.raises(
                RowError, match=f"row {bad} at position 1 is outside 0..{len(world.rows) - 1}"
            ):
                store.gather(np.array([1, bad, 2]), *out)
            assert (out[0] == 0xAB).all()
            assert (out[1] == 0xCD).all()
        codes, scales = outputs(world.format, 3)
        ids = np.array([1, 2, 3])
        for wrong_ids, wrong_codes, wrong_scales in (
            (ids.astype(np.uint64), codes, scales),
            (ids, codes[:2], scales),
            (ids, codes.astype(np.int8), scales),
            (ids, codes, scales[:, :4]),
        ):
            with pytest.raises(RowError):
                store.gather(wrong_ids, wrong_codes, wrong_scales)
        codes.flags.writeable = False
        with pytest.raises(RowError, match="writeable"):
            store.gather(ids, codes, scales)
        with pytest.raises(RowError, match="no table of layer 9"):
            NativeStore(reader, 9)
        assert reader.counters.errors == {"range": 4}
    with pytest.raises(RowError, match="not open"):
        store.gather(ids, *outputs(world.format, 3))


def test_weights_and_scales_in_two_shards(
    worlds: dict[str, World], tmp_path_factory: pytest.TempPathFactory
) -> None:
    world = worlds["nvfp4"]
    place = place_of_table(world.table)
    copy = tmp_path_factory.mktemp("scales") / "scales"
    copy.write_bytes(world.table.scale.path.read_bytes())
    first = place.first
    apart = type(first)(first.weight_path, first.weight_offset_bytes, copy, first.scale_offset_bytes)
    ids = np.random.default_rng(4).integers(-1, len(world.rows), 500)
    with open_reader(type(place)(place.layer, place.rows, place.num_rows, apart)) as reader:
        found = gathered(NativeStore(reader, LAYER), ids)
        assert "of 2 files" in reader.report["direct"]
    np.testing.assert_array_equal(found[0], world.expected(ids)[0])
    np.testing.assert_array_equal(found[1], world.expected(ids)[1])
