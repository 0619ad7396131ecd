"""The row cache changes how often the disk is read, never what is read, and never how much memory is taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_fixtures import LAYER, SOURCES, World, check_sums, gathered, make_world, open_reader, outputs

from deskfleet_engram.native import IoClass, NativeReader, NativeStore, RowCache
from deskfleet_engram.row_cache import PROCESS_CACHE_BYTES, process_cache


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("cache"))


@settings(max_examples=12, deadline=None)
@given(
    num_bytes=st.sampled_from([0, 100, 5000, 8000, 50_000, 10**6]),
    source=st.sampled_from(SOURCES),
    seed=st.integers(0, 1000),
)
def test_any_size_gives_the_same_rows(num_bytes: int, source: str, seed: int, world: World) -> None:
    random = np.random.default_rng(seed)
    with open_reader(world.place(source), cache_bytes=num_bytes) as reader:
        store = NativeStore(reader, LAYER)
        for _ in range(12):
            top = int(random.choice([30, 300, len(world.rows)]))
            ids = random.integers(-1, top, int(random.integers(1, 120)))
            out = outputs(world.format, len(ids))
            store.gather(ids, *out, io_class=IoClass(int(random.integers(2))))
            np.testing.assert_array_equal(out[0], world.expected(ids)[0])
            np.testing.assert_array_equal(out[1], world.expected(ids)[1])
        check_sums(reader)
        if num_bytes <= 100:
            assert reader.counters.num_cache_hits == 0
            assert reader.report["cache"] == "off"


@settings(max_examples=20, deadline=None)
@given(num_bytes=st.integers(0, 300_000), row_bytes=st.sampled_from([33, 144, 264]))
def test_memory_is_bounded(num_bytes: int, row_bytes: int) -> None:
    counters = RowCache(num_bytes, row_bytes).counters
    assert counters.memory_bytes <= num_bytes
    # Index and queues cost a few words per row, no more.
    assert (counters.capacity_rows + 16) * (row_bytes + 48) >= num_bytes or counters.capacity_rows == 0
    assert counters.num_rows == 0


def test_queues_stay_within_capacity(world: World) -> None:
    cache = RowCache(60_000)
    with NativeReader([world.place("pack")], cache=cache).open() as reader:
        store = NativeStore(reader, LAYER)
        random = np.random.default_rng(0)
        for _ in range(30):
            ids = random.zipf(1.3, 200) % len(world.rows)
            gathered(store, ids)
            counters = cache.counters
            assert counters.small_rows + counters.main_rows == counters.num_rows <= counters.capacity_rows
            assert counters.inserts - counters.evictions == counters.num_rows
        assert counters.num_rows == counters.capacity_rows
        assert counters.main_rows > 0
        assert reader.counters.num_cache_hits > 500


def test_a_prefill_does_not_drive_out_what_decode_uses(world: World) -> None:
    cache = RowCache(150_000)
    assert 300 < cache.counters.capacity_rows < len(world.rows) // 3
    hot = np.arange(100) * 7
    with NativeReader([world.place("pack")], cache=cache).open() as reader:
        store = NativeStore(reader, LAYER)
        for _ in range(2):
            gathered(store, hot)
        everything = np.arange(len(world.rows))
        for _ in range(3):  # several times: a prefill repeated does not make its rows wanted
            store.gather(everything, *outputs(world.format, len(everything)), io_class=IoClass.PREFETCH)
        before = reader.counters.num_cache_hits
        gathered(store, hot)
        assert reader.counters.num_cache_hits - before == 100


def test_hits_need_no_read(world: World) -> None:
    ids = np.arange(50)
    with open_reader(world.place("shard"), cache_bytes=10**6) as reader:
        store = NativeStore(reader, LAYER)
        gathered(store, ids)
        num_reads = reader.counters.num_reads
        gathered(store, ids)
        assert reader.counters.num_reads == num_reads
        assert reader.counters.num_cache_hits == 50


def test_checked_rows_are_shared_between_readers(world: World) -> None:
    cache = RowCache(10**6)
    ids = np.arange(50)
    for number in range(2):
        with NativeReader([world.place("pack")], cache=cache).open() as reader:
            gathered(NativeStore(reader, LAYER), ids)
            assert (reader.counters.num_reads == 0) == (number == 1)
    cache.clear()
    with NativeReader([world.place("pack")], cache=cache).open() as reader:
        gathered(NativeStore(reader, LAYER), ids)
        assert reader.counters.num_reads > 0


def test_rows_of_different_packs_do_not_mix(world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = make_world(tmp_path_factory.mktemp("other"), seed=1)
    cache = RowCache(10**6)
    ids = np.arange(60)
    for one in (world, other, world):
        for source in SOURCES:
            with NativeReader([one.place(source)], cache=cache).open() as reader:
                np.testing.assert_array_equal(
                    gathered(NativeStore(reader, LAYER), ids)[0], one.expected(ids)[0]
                )


def test_layers_do_not_mix(world: World) -> None:
    places = [world.place("pack"), world.place("pack", layer=3)]
    ids = np.arange(60)
    with NativeReader(places, cache=RowCache(10**6)).open() as reader:
        first = gathered(NativeStore(reader, 1), ids)[0]
        third = gathered(NativeStore(reader, 3), ids)[0]
        assert not (first == third).all()
        np.testing.assert_array_equal(gathered(NativeStore(reader, 1), ids)[0], first)
        np.testing.assert_array_equal(gathered(NativeStore(reader, 3), ids)[0], third)


def test_the_process_has_one_cache() -> None:
    cache = process_cache(264)
    assert process_cache(264) is cache
    assert cache.counters.memory_bytes <= PROCESS_CACHE_BYTES
    assert cache.counters.capacity_rows > 200_000
    assert process_cache(144) is not cache


def test_rows_too_long_for_the_cache_are_read(world: World) -> None:
    with NativeReader([world.place("pack")], cache=RowCache(10**6, 100)).open() as reader:
        store = NativeStore(reader, LAYER)
        ids = np.arange(20)
        for _ in range(2):
            np.testing.assert_array_equal(gathered(store, ids)[0], world.expected(ids)[0])
        assert reader.counters.num_cache_hits == 0
        assert "too long" in reader.report["cache"]
