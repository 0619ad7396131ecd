"""Lookups run through bare function pointers, as a CUDA host node would: no Python object takes part."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from native_fixtures import BF16_NAN, LAYER, POISON, World, make_world, open_reader, outputs, to_bf16

from deskfleet_engram.errors import RowError
from deskfleet_engram.host_work import HostWork
from deskfleet_engram.native import NativeOptions, NativeStore
from deskfleet_engram.portable import decode_rows

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("host_work"))


def call(address: int, work: HostWork) -> None:
    CALLBACK(address)(work.argument)


def test_runs_with_the_ids_of_the_moment(world: World) -> None:
    ids = np.zeros(20, dtype=np.int32)
    count = np.zeros(1, dtype=np.uint32)
    status = np.full(1, 99, dtype=np.int32)
    values = np.zeros((20, world.format.head_dim), dtype=np.uint16)
    random = np.random.default_rng(0)
    with open_reader(world.place("pack"), cache_bytes=20_000) as reader:
        work = HostWork(NativeStore(reader, LAYER), ids, (values,), num_ids=count, status=status)
        for number in range(20):
            count[0] = random.integers(0, 21)
            ids[:] = random.integers(-1, len(world.rows), 20)
            values[:] = 0x1234
            status[0] = 99
            if number % 2:
                call(work.run_address, work)
            else:
                call(work.submit_address, work)
                call(work.wait_address, work)
            assert status[0] == 0
            work.check()
            expected = to_bf16(decode_rows(*world.expected(ids.astype(np.int64))))
            np.testing.assert_array_equal(values[: count[0]], expected[: count[0]])
            assert (values[count[0] :] == 0x1234).all()
        assert work.num_failures == 0
        work.close()
        work.close()


def test_failures_leave_poison_and_a_number(world: World) -> None:
    ids = np.arange(4, dtype=np.int64)
    status = np.zeros(1, dtype=np.int32)
    codes, scales = outputs(world.format, 4)
    with open_reader(world.place("pack"), options=NativeOptions(faults="eio=1")) as reader:
        work = HostWork(NativeStore(reader, LAYER), ids, (codes, scales), status=status)
        call(work.run_address, work)
        assert status[0] == 2
        assert work.num_failures == 1
        assert (codes == POISON).all()
        assert (scales == POISON).all()
        with pytest.raises(RowError) as caught:
            work.check()
        assert (caught.value.kind, caught.value.block) == ("io", 0)
        codes[:] = 0
        ids[2] = 10**9
        call(work.run_address, work)
        assert status[0] == -2
        assert (codes == POISON).all()
        with pytest.raises(RowError, match="row 1000000000 at position 2"):
            work.check()
        values = np.zeros((4, world.format.head_dim), dtype=np.uint16)
        other = HostWork(NativeStore(reader, LAYER), ids, (values,))
        call(other.run_address, other)
        assert (values == BF16_NAN).all()


def test_what_cannot_be_a_work(world: World) -> None:
    ids = np.arange(4, dtype=np.int64)
    codes, scales = outputs(world.format, 4)
    with open_reader(world.place("pack")) as reader:
        store = NativeStore(reader, LAYER)
        for bad_ids, bad_outputs, options in (
            (ids.reshape(2, 2), (codes, scales), {}),
            (np.arange(8)[::2], (codes, scales), {}),
            (ids, (codes[:3], scales), {}),
            (ids, (codes, scales), {"num_ids": np.zeros(2, np.uint32)}),
            (ids, (codes, scales), {"status": np.zeros(1, np.int64)}),
        ):
            with pytest.raises(RowError):
                HostWork(store, bad_ids, bad_outputs, **options)


def test_closing_the_reader_closes_its_works(world: World) -> None:
    ids = np.arange(4, dtype=np.int64)
    reader = open_reader(world.place("pack"), options=NativeOptions(faults="delay=1:50000"))
    work = HostWork(NativeStore(reader, LAYER), ids, outputs(world.format, 4))
    call(work.submit_address, work)
    reader.close()
    assert work.num_failures == 0
    work.check()
    work.close()
