"""Tickets: ask now, wait later; many threads, both classes, layers apart, and nothing written after a release."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from native_fixtures import (
    BACKENDS,
    LAYER,
    POISON,
    World,
    check_sums,
    failure_of,
    gathered,
    make_world,
    open_reader,
    outputs,
    rows_of,
)

from deskfleet_engram.errors import RowError
from deskfleet_engram.native import IoClass, NativeOptions, NativeStore

SLOW = "seed=1,delay=1:20000"  # every read takes 20 ms more


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("tickets"))


def test_ids_may_change_and_outputs_fill_later(world: World) -> None:
    with open_reader(world.place("pack"), options=NativeOptions(faults=SLOW)) as reader:
        store = NativeStore(reader, LAYER)
        ids = np.array([3, 500, 3, -1])
        expected = world.expected(ids)
        codes, scales = outputs(world.format, 4)
        ticket = store.submit(ids, codes, scales)
        ids[:] = 0
        assert not ticket.is_done()
        assert not ticket.wait(timeout_s=0.001)
        assert ticket.wait()
        assert ticket.is_done()
        assert ticket.wait(0)
        np.testing.assert_array_equal(codes, expected[0])
        np.testing.assert_array_equal(scales, expected[1])
        ticket.release()
        ticket.release()
        with pytest.raises(RowError, match="released"):
            ticket.wait()


def test_a_caller_waits_for_its_layer_only(world: World) -> None:
    options = NativeOptions(faults=SLOW, depth=8)
    other = rows_of(world.source, 3)
    with open_reader(world.place("pack"), world.place("pack", layer=3), options=options) as reader:
        now, later = NativeStore(reader, LAYER), NativeStore(reader, 3)
        soon = outputs(world.format, 4)
        much = np.arange(0, len(other), 7)
        late = outputs(world.format, len(much))
        first = now.submit(np.array([1, 2, 3, 4]), *soon)
        second = later.submit(much, *late)
        assert first.wait()
        assert not second.is_done()  # its hundred and more reads go eight at a time, 20 ms each
        np.testing.assert_array_equal(soon[0], world.expected(np.array([1, 2, 3, 4]))[0])
        assert second.wait()
        np.testing.assert_array_equal(late[0], other[much][:, : world.format.weight_bytes])


def test_decode_overtakes_prefetch(world: World) -> None:
    options = NativeOptions(faults=SLOW, depth=16, prefetch_depth=4, decode_hold_s=60)
    with open_reader(world.place("pack"), options=options) as reader:
        store = NativeStore(reader, LAYER)
        gathered(store, np.array([0]))  # decode is live from here on
        everything = np.arange(len(world.rows))
        bulk = outputs(world.format, len(everything))
        prefetch = store.submit(everything, *bulk, io_class=IoClass.PREFETCH)
        for start in range(0, 90, 30):
            ids = np.arange(start, start + 30) * 20
            np.testing.assert_array_equal(gathered(store, ids)[0], world.expected(ids)[0])
        assert not prefetch.is_done()
        assert reader.counters.max_prefetch_depth == 4
        assert prefetch.wait()
        np.testing.assert_array_equal(bulk[0], world.expected(everything)[0])
        check_sums(reader)


def test_a_prefetch_alone_may_use_more(world: World) -> None:
    options = NativeOptions(faults=SLOW, depth=16, prefetch_depth=1)
    with open_reader(world.place("pack"), options=options) as reader:
        everything = np.arange(len(world.rows))
        out = outputs(world.format, len(everything))
        began = time.monotonic()
        NativeStore(reader, LAYER).gather(everything, *out, io_class=IoClass.PREFETCH)
        # 143 blocks one by one would take 2.9 s and more.
        assert time.monotonic() - began < 2
        assert reader.counters.max_prefetch_depth == 0


def test_requests_share_reads_under_way(world: World) -> None:
    with open_reader(world.place("pack"), options=NativeOptions(faults=SLOW)) as reader:
        store = NativeStore(reader, LAYER)
        ids = np.arange(0, 300, 15)
        many = [outputs(world.format, len(ids)) for _ in range(5)]
        tickets = [
            store.submit(ids, *out, io_class=IoClass.PREFETCH if number == 0 else IoClass.DECODE)
            for number, out in enumerate(many)
        ]
        for ticket, out in zip(tickets, many, strict=True):
            assert ticket.wait()
            np.testing.assert_array_equal(out[0], world.expected(ids)[0])
        counters = reader.counters
        assert counters.num_reads < 2 * len(ids)
        assert counters.num_shared_rows > 2 * len(ids)
        check_sums(reader)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_threads(world: World, backend: str) -> None:
    options = NativeOptions(backend=backend, depth=32, pool_threads=6)
    other = rows_of(world.source, 3)
    places = (world.place("pack"), world.place("shard", layer=3))
    with open_reader(*places, options=options, cache_bytes=100_000) as reader:
        stores = (NativeStore(reader, LAYER), NativeStore(reader, 3))
        tables = (world.rows, other)

        def work(seed: int) -> int:
            random = np.random.default_rng(seed)
            for _ in range(40):
                which = int(random.integers(2))
                io_class = IoClass(int(random.integers(2)))
                count = int(random.integers(1, 400 if io_class else 40))
                ids = random.integers(0, len(tables[which]), count)
                packed = np.full((count, world.format.row_bytes), 0xAB, dtype=np.uint8)
                ticket = stores[which].submit_packed(ids, packed, io_class=io_class)
                if random.integers(6) == 0:
                    ticket.release()
                    packed[:] = 0x55
                    time.sleep(0.002)
                    assert (packed == 0x55).all()
                    continue
                if random.integers(2):
                    ticket.is_done()
                assert ticket.wait(20)
                np.testing.assert_array_equal(packed, tables[which][ids])
            return seed

        with ThreadPoolExecutor(8) as pool:
            assert sorted(pool.map(work, range(8))) == list(range(8))
        check_sums(reader)
        assert set(reader.counters.errors) <= {"cancelled"}


def test_several_threads_wait_for_one_ticket(world: World) -> None:
    with open_reader(world.place("pack"), options=NativeOptions(faults=SLOW)) as reader:
        codes, scales = outputs(world.format, 3)
        ticket = NativeStore(reader, LAYER).submit(np.array([1, 2, 3]), codes, scales)
        with ThreadPoolExecutor(5) as pool:
            assert all(pool.map(lambda _: ticket.wait(10), range(5)))
        np.testing.assert_array_equal(codes, world.expected(np.array([1, 2, 3]))[0])


def test_waiting_lets_other_threads_run(world: World) -> None:
    options = NativeOptions(faults="seed=1,delay=1:300000")
    with open_reader(world.place("pack"), options=options) as reader:
        store = NativeStore(reader, LAYER)
        done = threading.Event()

        def wait() -> None:
            gathered(store, np.array([9]))
            done.set()

        thread = threading.Thread(target=wait)
        thread.start()
        turns = 0
        while not done.is_set():
            turns += 1
            time.sleep(0.001)
        thread.join()
        assert turns > 50


def test_a_released_ticket_writes_nothing(world: World) -> None:
    with open_reader(world.place("pack"), options=NativeOptions(faults="seed=1,delay=1:400000")) as reader:
        store = NativeStore(reader, LAYER)
        ids = np.arange(0, 2000, 11)
        codes, scales = outputs(world.format, len(ids))
        began = time.monotonic()
        store.submit(ids, codes, scales).release()
        assert time.monotonic() - began < 0.3  # not held up by the disk
        codes[:] = 0x55
        time.sleep(0.6)
        assert (codes == 0x55).all()
        again = outputs(world.format, len(ids))
        store.gather(ids, *again)
        np.testing.assert_array_equal(again[0], world.expected(ids)[0])
        assert reader.counters.errors == {"cancelled": 1}
        check_sums(reader)


def test_a_forgotten_ticket_is_released(world: World) -> None:
    with open_reader(world.place("pack"), options=NativeOptions(faults=SLOW)) as reader:
        ticket = NativeStore(reader, LAYER).submit(np.arange(500), *outputs(world.format, 500))
        del ticket
        gc.collect()
        assert reader.counters.errors == {"cancelled": 1}


def test_closing_fails_what_is_unfinished(world: World) -> None:
    reader = open_reader(world.place("pack"), options=NativeOptions(faults=SLOW))
    ids = np.arange(0, 2000, 11)
    codes, scales = outputs(world.format, len(ids))
    ticket = NativeStore(reader, LAYER).submit(ids, codes, scales)
    reader.close()
    reader.close()
    right = (codes == world.expected(ids)[0]).all(axis=1)
    assert (codes[~right] == POISON).all()
    with pytest.raises(RowError, match="not open"):
        ticket.wait()
    ticket.release()
    with reader.open():
        np.testing.assert_array_equal(gathered(NativeStore(reader, LAYER), ids)[0], world.expected(ids)[0])


def test_a_hanging_read_delays_nobody_else(world: World) -> None:
    options = NativeOptions(faults="seed=3,hang=0.3", deadline_s=0.6, depth=64)
    with open_reader(world.place("pack"), options=options) as reader:
        store = NativeStore(reader, LAYER)
        results = []
        quickest = float("inf")
        for row in range(0, 150, 15):
            began = time.monotonic()
            error = failure_of(partial(gathered, store, np.array([row])))
            elapsed = time.monotonic() - began
            results.append(error is None)
            if error is None:
                quickest = min(quickest, elapsed)
            else:
                assert error.kind == "deadline"
                assert "600 ms" in error.message
                assert elapsed > 0.55  # never given up early; how late is the machine's business
        assert quickest < 0.6, "every read waited for one that hung"
        assert any(results)
        assert not all(results)
        codes, scales = outputs(world.format, 1)
        errors = (  # a deadline of the request's own
            failure_of(partial(store.gather, np.array([row]), codes, scales, deadline_s=0.05))
            for row in range(300, 900, 15)
        )
        assert "50 ms" in str(next(filter(None, errors)))
        assert (codes == POISON).all()


def test_submitting_is_refused_when_ids_are_wrong(world: World) -> None:
    with open_reader(world.place("pack")) as reader:
        with pytest.raises(RowError, match="outside"):
            NativeStore(reader, LAYER).submit(np.array([10**6]), *outputs(world.format, 1))
        assert reader.counters.num_tickets == 0
