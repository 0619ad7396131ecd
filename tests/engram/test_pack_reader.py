"""The portable reader of packs: the same bytes as from the shard in place, and every way in which a read can fail."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_fixtures import TINY, make_checkpoint, rows_of

from deskfleet_engram.errors import EngramError, FormatError, IdentityError, RowError
from deskfleet_engram.manifest import identity_of
from deskfleet_engram.ownership import ColumnOwnership
from deskfleet_engram.pack import pack
from deskfleet_engram.portable import NOT_MINE, PortableStore, decode_rows
from deskfleet_engram.portable_pack import PortablePack, decode_nvfp4_rows
from deskfleet_engram.source import Source, open_source

FILE = "L03/c01.egp"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Path]:
    source = open_source(TINY)
    pack_dir = tmp_path_factory.mktemp("tiny") / "pack"
    pack(source, pack_dir)
    return source, pack_dir


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Path]:
    directory = tmp_path_factory.mktemp("small")
    source = make_checkpoint(directory / "model")
    pack(source, directory / "pack")
    return source, directory / "pack"


@pytest.fixture(scope="module")
def four_bit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Path]:
    directory = tmp_path_factory.mktemp("four_bit")
    source = make_checkpoint(directory / "model", row_format="nvfp4", layer_ids=(2, 7))
    pack(source, directory / "pack")
    return source, directory / "pack"


@pytest.fixture
def copy(small: tuple[Source, Path], tmp_path: Path) -> Path:
    shutil.copytree(small[1], tmp_path / "pack")
    return tmp_path / "pack"


def outputs(shape: tuple[int, ...], widths: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    return np.full((*shape, widths[0]), 0xAB, np.uint8), np.full((*shape, widths[1]), 0xCD, np.uint8)


def row_ids(num_rows: int) -> st.SearchStrategy[np.ndarray]:
    """Any shape; repeats, neighbours, both ends and NOT_MINE among them."""
    one = st.integers(-1, num_rows - 1) | st.sampled_from([NOT_MINE, 0, num_rows - 1])
    run = st.integers(0, num_rows - 41).flatmap(lambda first: st.just(list(range(first, first + 40))))
    lists = st.lists(one, max_size=60) | st.tuples(run, st.lists(one, max_size=10)).map(lambda t: t[0] + t[1])
    return lists.map(lambda ids: np.array(ids, dtype=np.int64))


@pytest.mark.parametrize("layer", [1, 4])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_equal_those_read_in_place(tiny: tuple[Source, Path], layer: int, data: st.DataObject) -> None:
    source, pack_dir = tiny
    ids = data.draw(row_ids(source.table(layer).num_rows))
    if ids.size % 2 == 0:
        ids = ids.reshape(2, -1)
    mine, theirs = outputs(ids.shape, (64, 2)), outputs(ids.shape, (64, 2))
    with PortablePack(pack_dir, layer) as store, PortableStore(source.table(layer).row_source()) as oracle:
        store.gather(ids, *mine)
        oracle.gather(ids, *theirs)
        assert (store.counters.num_rows, store.counters.num_unique) == (
            oracle.counters.num_rows,
            oracle.counters.num_unique,
        )
    assert np.array_equal(mine[0], theirs[0])
    assert np.array_equal(mine[1], theirs[1])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_four_bit_rows(four_bit: tuple[Source, Path], data: st.DataObject) -> None:
    source, pack_dir = four_bit
    rows = rows_of(source, 7)
    ids = data.draw(row_ids(len(rows)))
    codes, scales = outputs(ids.shape, (128, 16))
    with PortablePack(pack_dir, 7) as store:
        store.gather(ids, codes, scales)
        factor = store.identity.global_scales[7]
    real = ids != NOT_MINE
    assert np.array_equal(np.concatenate([codes, scales], axis=1)[real], rows[ids[real]])
    assert not decode_nvfp4_rows(codes[~real], scales[~real], factor).any()


def test_four_bit_values() -> None:
    codes = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=np.uint8)
    scales = np.array([[0x38]], dtype=np.uint8)  # E4M3 1
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = decode_nvfp4_rows(codes, scales, np.float32(1))
    assert values.tolist() == [[*magnitudes, *[-m for m in magnitudes]]]
    assert values.dtype == np.float32
    two = np.array([[0x40, 0x30]], dtype=np.uint8)  # 2 and 0.5
    scaled = decode_nvfp4_rows(np.concatenate([codes, codes], axis=1), two, np.float32(0.25))
    assert np.array_equal(scaled[0], np.concatenate([values[0] * 0.5, values[0] * 0.125]))


def test_four_bit_rows_that_are_not_mine_are_zeros(four_bit: tuple[Source, Path]) -> None:
    with PortablePack(four_bit[1], 2) as store:
        codes, scales = outputs((1,), (128, 16))
        store.gather(np.array([NOT_MINE]), codes, scales)
    assert not codes.any()
    assert np.array_equal(decode_rows(scales, np.full((1, 1), 127, np.uint8)), np.ones((1, 16)))


@pytest.mark.parametrize("world_size", range(1, 10))
def test_what_all_ranks_read_together_is_the_table(tiny: tuple[Source, Path], world_size: int) -> None:
    """Every rank opens only its columns; gathered, they are what one reader of everything gives."""
    source, pack_dir = tiny
    ownership = ColumnOwnership.split(12, world_size)
    random = np.random.default_rng(world_size)
    identity = identity_of(source)
    starts = np.array([identity.first_row(4, column) for column in range(12)])
    counts = np.array([identity.layout(4, column).num_rows for column in range(12)])
    ids = starts + (random.random((5, 12)) * counts).astype(np.int64)
    whole = outputs((5, 12), (64, 2))
    with PortablePack(pack_dir, 4) as store:
        store.gather(ids, *whole)
    parts = []
    for rank in range(world_size):
        local = ownership.local_ids(ids, rank)
        part = outputs(local.shape, (64, 2))
        columns = ownership.columns(rank)
        with PortablePack(pack_dir, 4, columns=columns) as store:
            store.gather(local, *part)
        parts.append(np.concatenate(part, axis=-1))
    gathered = np.concatenate(parts, axis=1)[:, ownership.gather_order()]
    assert np.array_equal(gathered, np.concatenate(whole, axis=-1))


def test_columns_of_others(small: tuple[Source, Path]) -> None:
    source, pack_dir = small
    first = identity_of(source).first_row(3, 1)
    ids = np.array([first - 1, first])
    codes, scales = outputs((2,), (256, 8))
    with PortablePack(pack_dir, 3, columns=[1]) as store:
        with pytest.raises(
            RowError, match=r"row .* is in column 0, which is not open here; open are columns \[1\]"
        ):
            store.gather(ids, codes, scales)
        assert (codes == 0xAB).all()
    with PortablePack(pack_dir, 3, columns=[1], zero_for_others=True) as store:
        store.gather(ids, codes, scales)
    assert not codes[0].any()
    assert (scales[0] == 127).all()
    assert np.array_equal(codes[1], rows_of(source, 3)[first, :256])


def test_neighbours_are_read_together(small: tuple[Source, Path]) -> None:
    with PortablePack(small[1], 3) as store:
        codes, scales = outputs((40,), (256, 8))
        store.gather(np.arange(5, 45), codes, scales)
        assert store.counters.num_reads == 1
        assert store.counters.read_bytes == 3 * 4096
        store.gather(np.array([7, 7, 7]), *outputs((3,), (256, 8)))
        assert store.counters.num_reads == 2
        assert (store.counters.num_rows, store.counters.num_unique) == (43, 41)


@pytest.mark.parametrize("row", [-2, 10**9])
def test_rows_outside_the_table(small: tuple[Source, Path], row: int) -> None:
    codes, scales = outputs((2,), (256, 8))
    with PortablePack(small[1], 3) as store, pytest.raises(RowError, match=f"row {row} is outside 0"):
        store.gather(np.array([0, row]), codes, scales)
    assert (codes == 0xAB).all()


def test_outputs_of_another_shape(small: tuple[Source, Path]) -> None:
    codes, scales = outputs((2,), (256, 8))
    with PortablePack(small[1], 3) as store:
        for bad in (
            (np.zeros(2, dtype=np.int32), codes, scales),
            (np.zeros(3, dtype=np.int64), codes, scales),
            (np.zeros(2, dtype=np.int64), codes[:, :255], scales),
            (np.zeros(2, dtype=np.int64), codes, scales.astype(np.int8)),
        ):
            with pytest.raises(RowError, match="must be"):
                store.gather(*bad)  # type: ignore[arg-type]


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 8]))


def test_a_damaged_row_is_named_and_never_zeros(small: tuple[Source, Path], copy: Path) -> None:
    damage(copy / FILE, 4096 * 3 + 264 * 4 + 1)
    first = identity_of(small[0]).first_row(3, 1)
    codes, scales = outputs((2,), (256, 8))
    with PortablePack(copy, 3) as store:
        with pytest.raises(RowError) as caught:
            store.gather(np.array([first + 33, first + 34]), codes, scales)
        assert (caught.value.path, caught.value.block, caught.value.row, caught.value.kind) == (
            copy / FILE,
            2,
            34,
            "checksum",
        )
        assert f"{FILE}: block 2, row 34: checksum: the row's bytes do not match its checksum" in str(
            caught.value
        )
        assert (codes == 0xAB).all()
        assert (scales == 0xCD).all()
        assert store.counters.errors == {"checksum": 3}
        assert store.counters.num_retries == 2
        # Its neighbours in the block are whole, and are given.
        store.gather(np.array([first + 33, first + 35]), codes, scales)
    assert np.array_equal(codes[1], rows_of(small[0], 3)[first + 35, :256])


@pytest.mark.parametrize("fault", ["row", "table", "block of zeros", "swapped"])
def test_the_second_source_answers(small: tuple[Source, Path], copy: Path, fault: str) -> None:
    source, _ = small
    path = copy / FILE
    content = path.read_bytes()
    if fault == "row":
        damage(path, 4096 * 3 + 264 * 4 + 1)
    if fault == "table":
        damage(path, 4096 * 3 + 15 * 264 + 16)
    with path.open("r+b") as file:
        file.seek(4096 * 3)
        if fault == "block of zeros":
            file.write(bytes(4096))
        if fault == "swapped":
            file.write(content[4096 * 4 : 4096 * 5])
    first = identity_of(source).first_row(3, 1)
    ids = np.arange(first + 20, first + 50)
    codes, scales = outputs(ids.shape, (256, 8))
    with PortablePack(copy, 3, second_source=source) as store:
        store.gather(ids, codes, scales)
        assert store.counters.num_fallback == (1 if fault == "row" else 15) or fault == "row"
        assert store.counters.num_fallback >= 1
    assert np.array_equal(np.concatenate([codes, scales], axis=1), rows_of(source, 3)[ids])


def test_a_second_source_that_differs_is_not_believed(
    small: tuple[Source, Path], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(copy / FILE, 4096 * 3 + 264 * 4 + 1)
    first = identity_of(small[0]).first_row(3, 1)
    with PortablePack(copy, 3, second_source=small[0]) as store:
        monkeypatch.setattr(
            "deskfleet_engram.portable_pack.read_rows", lambda table, ids: np.zeros((len(ids), 264), np.uint8)
        )
        with pytest.raises(RowError, match="and the checkpoint's row does not match the checksum either"):
            store.gather(np.array([first + 34]), *outputs((1,), (256, 8)))


def test_another_checkpoint_is_no_second_source(small: tuple[Source, Path], tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(IdentityError, match="is of another checkpoint than"):
        PortablePack(small[1], 3, second_source=other).open()


class Faults:
    """Lets reads of one file fail `count` times."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int, result: Callable[[int, Any], int]) -> None:
        self.left = count
        real = os.preadv

        def preadv(fd: int, buffers: Any, offset: int) -> int:
            if self.left > 0 and os.readlink(f"/proc/self/fd/{fd}").endswith(FILE):
                self.left -= 1
                return result(real(fd, buffers, offset), buffers[0])
            return real(fd, buffers, offset)

        patch.setattr(os, "preadv", preadv)


def eio(count: int, buffer: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def short_read(count: int, buffer: Any) -> int:
    return count - 96


def flipped(count: int, buffer: Any) -> int:
    for block in range(0, count, 4096):
        buffer[block + 5] ^= 1
        buffer[block + 264 * 6 + 5] ^= 1
    return count


@pytest.mark.parametrize(("result", "kind"), [(eio, "io"), (short_read, "short"), (flipped, "checksum")])
def test_a_read_that_fails_now_and_then_is_repeated(
    small: tuple[Source, Path], monkeypatch: pytest.MonkeyPatch, result: Any, kind: str
) -> None:
    source, pack_dir = small
    first = identity_of(source).first_row(3, 1)
    ids = np.array([first, first + 6])
    for count in (1, 2):
        codes, scales = outputs((2,), (256, 8))
        with PortablePack(pack_dir, 3) as store:
            with monkeypatch.context() as patch:
                Faults(patch, count, result)
                store.gather(ids, codes, scales)
            assert np.array_equal(codes, rows_of(source, 3)[ids, :256])
            assert store.counters.errors == {kind: count}
    with PortablePack(pack_dir, 3) as store:
        with monkeypatch.context() as patch:
            Faults(patch, 3, result)
            with pytest.raises(RowError) as caught:
                store.gather(ids, *outputs((2,), (256, 8)))
        assert (caught.value.kind, caught.value.block, caught.value.row) == (kind, 0, 0)
        store.gather(ids, codes, scales)  # the store goes on


def test_one_bad_block_among_neighbours_is_the_only_one_that_fails(
    small: tuple[Source, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, pack_dir = small
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if offset <= 4096 * 4 < offset + len(buffers[0]) and os.readlink(f"/proc/self/fd/{fd}").endswith(
            FILE
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    first = identity_of(source).first_row(3, 1)
    ids = np.arange(first, first + 90)
    codes, scales = outputs((90,), (256, 8))
    with PortablePack(pack_dir, 3, second_source=source) as store:
        monkeypatch.setattr(os, "preadv", preadv)
        store.gather(ids, codes, scales)
        assert store.counters.num_fallback == 15
    assert np.array_equal(codes, rows_of(source, 3)[ids, :256])


@pytest.mark.parametrize("case", ["missing", "short", "long", "superblock", "hole"])
def test_a_file_that_is_not_whole_does_not_open(copy: Path, case: str) -> None:
    path = copy / FILE
    content = path.read_bytes()
    if case == "missing":
        path.unlink()
    if case == "short":
        os.truncate(path, len(content) - 4096)
    if case == "long":
        path.write_bytes(content + b"\1" * 4096)
    if case == "superblock":
        damage(path, 33)
    if case == "hole":
        with path.open("wb") as file:
            file.write(content[:8192])
            file.seek(16384)
            file.write(content[16384:])
    with pytest.raises(RowError) as caught:
        PortablePack(copy, 3).open()
    assert caught.value.kind == {"short": "size", "long": "size"}.get(case, case)
    assert caught.value.path == path
    PortablePack(copy, 1).open().close()
    PortablePack(copy, 3, columns=[0, 2]).open().close()


def test_each_wrong_thing_has_its_own_message(copy: Path, tmp_path: Path) -> None:
    shutil.copy(copy / "L03/c02.egp", copy / FILE)
    with pytest.raises(
        IdentityError, match=r"c01\.egp: identity: holds layer 3 column 2; wanted is layer 3 column 1"
    ):
        PortablePack(copy, 3).open()
    other = make_checkpoint(tmp_path / "other", seed=1)
    pack(other, tmp_path / "other pack")
    shutil.copy(tmp_path / "other pack" / FILE, copy / FILE)
    with pytest.raises(IdentityError, match=r"c01\.egp: identity: belongs to pack .* of another checkpoint"):
        PortablePack(copy, 3).open()
    with pytest.raises(IdentityError, match="does not hold columns"):
        PortablePack(copy, 9).open()
    with pytest.raises(IdentityError, match=r"does not hold columns \[3\] of layer 3; it holds \[0, 1, 2\]"):
        PortablePack(copy, 3, columns=[0, 3]).open()
    bigger = make_checkpoint(tmp_path / "bigger", vocab_size=300)
    with pytest.raises(IdentityError, match="was made for engram num_embeddings"):
        PortablePack(copy, 3, geometry=bigger.geometry).open()
    (copy / "engram.json").unlink()
    with pytest.raises(FormatError, match="is missing: no pack"):
        PortablePack(copy, 3).open()


def test_closed_stores(small: tuple[Source, Path]) -> None:
    store = PortablePack(small[1], 3)
    with pytest.raises(RowError, match="is not open"):
        store.gather(np.array([0]), *outputs((1,), (256, 8)))
    with pytest.raises(RowError, match="is not open"):
        _ = store.identity
    store.open()
    assert store.open() is store
    before = len(os.listdir("/proc/self/fd"))
    store.close()
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before - 3
    with pytest.raises(EngramError):
        store.gather(np.array([0]), *outputs((1,), (256, 8)))


def test_several_threads(tiny: tuple[Source, Path]) -> None:
    source, pack_dir = tiny
    rows = rows_of(source, 1)
    failures: list[str] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(20):
            ids = random.integers(0, len(rows), 50)
            codes, scales = outputs((50,), (64, 2))
            store.gather(ids, codes, scales)
            if not np.array_equal(np.concatenate([codes, scales], axis=1), rows[ids]):
                failures.append(f"seed {seed}")

    with PortablePack(pack_dir, 1) as store:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.counters.num_rows == 4 * 20 * 50
    assert failures == []
