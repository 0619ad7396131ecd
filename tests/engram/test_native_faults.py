"""Whatever goes wrong with a file or a read is reported with its place; no answer is zeros, another row, or a crash."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from native_fixtures import (
    BACKENDS,
    BF16_NAN,
    FORMATS,
    LAYER,
    POISON,
    SOURCES,
    World,
    check_sums,
    failure_of,
    gathered,
    make_world,
    open_reader,
    outputs,
)

from deskfleet_engram.errors import GeometryError, IdentityError, NativeError, RowError
from deskfleet_engram.native import IoClass, NativeOptions, NativeReader, NativeStore, RowCache
from deskfleet_engram.portable_pack import PortablePack
from deskfleet_engram.tables import PackPlace, ShardPlace, TablePlace, place_of_pack

BLOCK = 4096
FILE = "L01/c01.egp"


@pytest.fixture(scope="module", params=FORMATS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("faults"), request.param)


@pytest.fixture
def copy(world: World, tmp_path: Path) -> World:
    """The same pack and checkpoint, to be damaged."""
    shutil.copytree(world.pack_dir, tmp_path / "pack")
    return World(world.source, tmp_path / "pack", world.rows)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, data, offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def flip(path: Path, block: int) -> None:
    at = (1 + block) * BLOCK + 7
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 16]))


def swap(path: Path, block: int) -> None:
    data = path.read_bytes()
    here, there = (1 + block) * BLOCK, (3 + block) * BLOCK
    overwrite(path, here, data[there : there + BLOCK])
    overwrite(path, there, data[here : here + BLOCK])


def wipe(path: Path, block: int) -> None:
    overwrite(path, (1 + block) * BLOCK, bytes(BLOCK))


def ruin_header(path: Path, block: int) -> None:
    overwrite(path, (1 + block) * BLOCK + 4032 + 20, b"\xff")
    flip(path, block)


def truncate(path: Path, block: int) -> None:
    os.truncate(path, (1 + block) * BLOCK + 1000)


DAMAGE: dict[str, tuple[Callable[[Path, int], None], str]] = {
    "flipped bit": (flip, "checksum"),
    "swapped blocks": (swap, "misplaced"),
    "zeros": (wipe, "hole"),
    "header": (ruin_header, "checksum"),
    "truncated": (truncate, "short"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_damage_after_opening(copy: World, damage: str, backend: str) -> None:
    spoil, kind = DAMAGE[damage]
    per_block = copy.format.rows_per_block
    place = place_of_pack(copy.pack_dir, LAYER)
    assert isinstance(place.first, PackPlace)
    first = place.first.columns[1].first_row
    ids = np.array(
        [first + 2 * per_block, -1, 3, first]
    )  # the first one in the damaged block, the last before it
    with open_reader(place, options=NativeOptions(backend=backend), cache_bytes=10**5) as reader:
        store = NativeStore(reader, LAYER)
        spoil(copy.pack_dir / FILE, 2)
        codes, scales = outputs(copy.format, 4)
        with pytest.raises(RowError) as caught:
            store.gather(ids, codes, scales)
        assert (codes[0] == POISON).all()
        assert (scales[0] == POISON).all()
        expected = copy.expected(ids)
        np.testing.assert_array_equal(codes[1:], expected[0][1:])
        np.testing.assert_array_equal(scales[1:], expected[1][1:])
        decoded = np.zeros((4, copy.format.head_dim), dtype=np.uint16)
        with pytest.raises(RowError):
            store.gather_bf16(ids, decoded)
        assert (decoded[0] == BF16_NAN).all()
        assert (decoded[2:] != BF16_NAN).any(axis=1).all()
        check_sums(reader)
        assert reader.counters.errors == {kind: 6}  # two lookups of three attempts
        assert reader.counters.num_failed_rows == 2
        assert reader.counters.num_retries == 4
    error = caught.value
    assert (error.path, error.block, error.row, error.kind) == (copy.pack_dir / FILE, 2, 2 * per_block, kind)
    for part in (FILE, "block 2", f"row {2 * per_block}", "layer 1", "column 1", kind, "3 attempts"):
        assert part in error.message


@pytest.mark.parametrize("damage", ["flipped bit", "swapped blocks", "zeros"])
def test_reports_as_the_portable_reader_does(copy: World, damage: str) -> None:
    spoil, kind = DAMAGE[damage]
    first = copy.source.geometry.offsets[0, 1]
    ids = np.array([first + 2 * copy.format.rows_per_block + 0])
    found = []
    with open_reader(copy.place("pack")) as reader, PortablePack(copy.pack_dir, LAYER) as portable:
        spoil(copy.pack_dir / FILE, 2)
        for store in (NativeStore(reader, LAYER), portable):
            with pytest.raises(RowError) as caught:
                store.gather(ids, *outputs(copy.format, 1))
            error = caught.value
            found.append((error.path, error.block, error.row, error.kind))
    assert found[0] == found[1]
    assert found[0][3] == kind


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_second_source_answers(copy: World, damage: str) -> None:
    first = copy.source.geometry.offsets[0, 1]
    ids = np.arange(first, first + 4 * copy.format.rows_per_block)
    with open_reader(copy.place("pack", second="shard")) as reader:
        DAMAGE[damage][0](copy.pack_dir / FILE, 2)
        codes, scales = gathered(NativeStore(reader, LAYER), ids)
        check_sums(reader)
        counters = reader.counters
        assert counters.num_fallback_rows >= 1
        assert counters.num_failed_rows == 0
        assert counters.errors
    np.testing.assert_array_equal(codes, copy.expected(ids)[0])
    np.testing.assert_array_equal(scales, copy.expected(ids)[1])


def test_another_copy_of_the_pack_as_second_source(world: World, copy: World) -> None:
    place = place_of_pack(copy.pack_dir, LAYER, second_source=world.pack_dir)
    ids = np.arange(len(world.rows))
    with open_reader(place) as reader:
        for block in range(4):
            flip(copy.pack_dir / FILE, block)
        np.testing.assert_array_equal(gathered(NativeStore(reader, LAYER), ids)[0], world.expected(ids)[0])
        assert reader.counters.num_fallback_rows == 4


def test_a_second_source_with_other_rows_is_not_believed(copy: World, tmp_path: Path) -> None:
    place = copy.place("pack", second="shard")
    assert isinstance(place.second, ShardPlace)
    other = tmp_path / "other.safetensors"
    data = bytearray(place.second.weight_path.read_bytes())
    row = int(copy.source.geometry.offsets[0, 1]) + 2 * copy.format.rows_per_block
    data[place.second.weight_offset_bytes + row * copy.format.weight_bytes + 9] ^= 1
    other.write_bytes(data)
    wrong = ShardPlace(
        other, place.second.weight_offset_bytes, place.second.scale_path, place.second.scale_offset_bytes
    )
    with open_reader(TablePlace(place.layer, place.rows, place.num_rows, place.first, wrong)) as reader:
        flip(copy.pack_dir / FILE, 2)
        codes, scales = outputs(copy.format, 1)
        with pytest.raises(RowError, match="second source") as caught:
            NativeStore(reader, LAYER).gather(np.array([row]), codes, scales)
        assert caught.value.kind == "checksum"
        assert (codes == POISON).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("source", "faults", "kind"),
    [
        ("pack", "eio=1", "io"),
        ("pack", "short=1", "short"),
        ("pack", "flip=1", "checksum"),
        ("pack", "hang=1", "deadline"),
        ("shard", "eio=1", "io"),
        ("shard", "short=1", "short"),
        ("shard", "hang=1", "deadline"),
    ],
)
def test_every_injected_fault_is_reported(
    world: World, source: str, backend: str, faults: str, kind: str
) -> None:
    options = NativeOptions(backend=backend, faults=f"seed=5,{faults}", deadline_s=0.05, retries=0)
    ids = np.arange(world.format.rows_per_block)  # a whole block, so that most flipped bits hit one of them
    with open_reader(world.place(source), options=options) as reader:
        codes, scales = outputs(world.format, len(ids))
        store = NativeStore(reader, LAYER)
        errors = (failure_of(lambda: store.gather(ids, codes, scales)) for _ in range(10))
        error = next(filter(None, errors))
        bad = (codes == POISON).all(axis=1) & (scales == POISON).all(axis=1)
        assert (error.kind, error.row) == (kind, int(ids[bad][0]))
        assert error.path is not None
        assert error.block == 0 or source == "shard"
        assert kind == "checksum" or bad.all()
        np.testing.assert_array_equal(codes[~bad], world.expected(ids)[0][~bad])
        assert "faults injected" in reader.report["backend_detail"]
        check_sums(reader)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("second", [None, "other"])
def test_more_failing_reads_than_buffers_still_end(world: World, backend: str, second: str | None) -> None:
    """Every buffer holds a read that failed, and each wants to be tried again: none may wait for another's buffer."""
    options = NativeOptions(backend=backend, depth=4, retries=2, pool_threads=2, faults="seed=3,eio=1")
    ids = np.arange(0, len(world.rows), world.format.rows_per_block)  # a block each
    assert len(ids) > 4
    errors: list[RowError | None] = []

    def gather() -> None:
        with open_reader(world.place("pack", second=second), options=options) as reader:
            store = NativeStore(reader, LAYER)
            errors.append(failure_of(partial(store.gather, ids, *outputs(world.format, len(ids)))))

    thread = threading.Thread(target=gather, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert len(errors) == 1, "the reads never ended"
    assert errors[0] is not None
    assert errors[0].kind == "io"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("second", [None, "other"])
def test_random_faults_give_right_rows_or_poison(
    world: World, source: str, backend: str, second: str | None
) -> None:
    flips = ",flip=0.2" if source == "pack" and second is None else ""
    options = NativeOptions(
        backend=backend,
        depth=24,
        retries=1,
        deadline_s=0.15,
        pool_threads=4,
        faults=f"seed=11,eio=0.1,short=0.1,delay=0.1:300,hang=0.0005{flips}",
    )
    random = np.random.default_rng(8)
    num_failed = 0
    with open_reader(world.place(source, second=second), options=options, cache_bytes=20_000) as reader:
        store = NativeStore(reader, LAYER)
        for _ in range(40):
            ids = random.integers(-1, len(world.rows), int(random.integers(1, 80)))
            codes, scales = outputs(world.format, len(ids))
            expected = world.expected(ids)
            io_class = IoClass(int(random.integers(2)))
            error = failure_of(partial(store.gather, ids, codes, scales, io_class=io_class))
            bad = np.zeros(len(ids), dtype=np.bool_)
            if error is not None:
                num_failed += 1
                bad = (codes == POISON).all(axis=1) & (scales == POISON).all(axis=1)
                assert bad.any()
                assert error.kind in ("io", "short", "checksum", "deadline")
                assert "row" in error.message
            np.testing.assert_array_equal(codes[~bad], expected[0][~bad])
            np.testing.assert_array_equal(scales[~bad], expected[1][~bad])
            assert not bad[ids == -1].any()
        check_sums(reader)
        counters = reader.counters
        assert counters.num_retries > 0
        assert counters.errors.keys() >= {"io", "short"}
        assert (counters.num_fallback_rows > 0) == (second is not None)
    assert second is not None or num_failed > 0


def test_few_faults_are_repaired_by_retries(world: World) -> None:
    options = NativeOptions(faults="seed=2,eio=0.05,short=0.05,flip=0.1", retries=8)
    ids = np.arange(len(world.rows))
    with open_reader(world.place("pack"), options=options) as reader:
        np.testing.assert_array_equal(gathered(NativeStore(reader, LAYER), ids)[0], world.expected(ids)[0])
        assert reader.counters.num_retries > 5
        assert reader.counters.num_failed_rows == 0


def rename_column(pack_dir: Path) -> None:
    shutil.copy(pack_dir / "L01/c00.egp", pack_dir / FILE)


def cut(pack_dir: Path) -> None:
    os.truncate(pack_dir / FILE, (pack_dir / FILE).stat().st_size - BLOCK)


def lengthen(pack_dir: Path) -> None:
    with (pack_dir / FILE).open("ab") as file:
        file.write(bytes(BLOCK))


def punch(pack_dir: Path) -> None:
    data = (pack_dir / FILE).read_bytes()
    with (pack_dir / FILE).open("wb") as file:
        file.write(data[:BLOCK])
        file.seek(3 * BLOCK)
        file.write(data[3 * BLOCK :])
        os.fsync(file.fileno())


OPENING: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (lambda pack_dir: (pack_dir / FILE).unlink(), "missing"),
    "directory": (lambda pack_dir: ((pack_dir / FILE).unlink(), (pack_dir / FILE).mkdir()), "io"),
    "empty": (lambda pack_dir: os.truncate(pack_dir / FILE, 0), "size"),
    "short": (cut, "size"),
    "long": (lengthen, "size"),
    "superblock": (lambda pack_dir: overwrite(pack_dir / FILE, 50, b"\xee"), "superblock"),
    "magic": (lambda pack_dir: overwrite(pack_dir / FILE, 0, b"x"), "superblock"),
    "no superblock": (lambda pack_dir: overwrite(pack_dir / FILE, 0, bytes(BLOCK)), "hole"),
    "hole": (punch, "hole"),
    "another column": (rename_column, "identity"),
}


@pytest.mark.parametrize("what", OPENING)
def test_files_that_do_not_open(copy: World, what: str) -> None:
    spoil, kind = OPENING[what]
    place = place_of_pack(copy.pack_dir, LAYER)
    spoil(copy.pack_dir)
    with pytest.raises((RowError, IdentityError)) as caught:
        open_reader(place)
    assert FILE.rpartition("/")[2] in str(caught.value) or "c00" in str(caught.value)
    if isinstance(caught.value, RowError):
        assert caught.value.kind == kind
        assert caught.value.path is not None
    else:
        assert kind == "identity"
        assert "wanted" in str(caught.value)


def test_a_pack_of_another_checkpoint_does_not_open(
    world: World, copy: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = world.format.name
    other = make_world(tmp_path_factory.mktemp("foreign"), name, seed=9)
    shutil.copy(other.pack_dir / FILE, copy.pack_dir / FILE)
    with pytest.raises(IdentityError, match="pack id") as caught:
        open_reader(place_of_pack(copy.pack_dir, LAYER))
    assert f"{int.from_bytes(place_id(other), 'little'):016x}" in str(caught.value)


def place_id(world: World) -> bytes:
    place = place_of_pack(world.pack_dir, LAYER).first
    assert isinstance(place, PackPlace)
    return place.identity_sha256[:8]


def test_a_shard_with_a_hole_or_cut_short(world: World, tmp_path: Path) -> None:
    place = world.place("shard")
    assert isinstance(place.first, ShardPlace)
    sparse = tmp_path / "sparse"
    data = place.first.weight_path.read_bytes()
    start = (place.first.weight_offset_bytes + 3 * BLOCK) // BLOCK * BLOCK
    with sparse.open("wb") as file:
        file.write(data[:start])
        file.seek(start + 4 * BLOCK)
        file.write(data[start + 4 * BLOCK :])
    first = ShardPlace(sparse, place.first.weight_offset_bytes, sparse, place.first.scale_offset_bytes)
    sparse_place = TablePlace(place.layer, place.rows, place.num_rows, first)
    with pytest.raises(RowError, match=f"never written from byte {start} on") as caught:
        open_reader(sparse_place)
    assert caught.value.kind == "hole"
    # Someone who knows better may have it so.
    open_reader(sparse_place, options=NativeOptions(allow_holes=True)).close()
    end = place.first.scale_offset_bytes + len(world.rows) * world.format.scale_bytes
    os.truncate(sparse, end - 1)
    with pytest.raises(RowError, match=f"has {end - 1} bytes; the table ends at byte {end}") as caught:
        open_reader(sparse_place, options=NativeOptions(allow_holes=True))
    assert caught.value.kind == "size"


def test_a_shard_cut_short_while_open(world: World, tmp_path: Path) -> None:
    place = world.place("shard")
    assert isinstance(place.first, ShardPlace)
    path = tmp_path / "shard"
    shutil.copy(place.first.weight_path, path)
    first = ShardPlace(path, place.first.weight_offset_bytes, path, place.first.scale_offset_bytes)
    last = len(world.rows) - 1
    with open_reader(TablePlace(place.layer, place.rows, place.num_rows, first)) as reader:
        os.truncate(path, place.first.scale_offset_bytes)
        codes, scales = outputs(world.format, 2)
        with pytest.raises(RowError, match=f"scales of row {last}") as caught:
            NativeStore(reader, LAYER).gather(np.array([last, -1]), codes, scales)
        assert (codes[0] == POISON).all()
        assert (scales[0] == POISON).all()
        assert (caught.value.kind, caught.value.row, caught.value.path) == ("short", last, path)
        check_sums(reader)


def test_a_file_that_vanishes_is_still_open(copy: World) -> None:
    ids = np.arange(50) + int(copy.source.geometry.offsets[0, 1])
    with open_reader(place_of_pack(copy.pack_dir, LAYER)) as reader:
        (copy.pack_dir / FILE).unlink()
        np.testing.assert_array_equal(gathered(NativeStore(reader, LAYER), ids)[0], copy.expected(ids)[0])
    with pytest.raises(RowError) as caught:
        open_reader(place_of_pack(copy.pack_dir, LAYER))
    assert caught.value.kind == "missing"


def test_bad_options_are_refused(world: World) -> None:
    place = world.place("pack")
    for options in (
        NativeOptions(backend="mmap"),  # type: ignore[arg-type]
        NativeOptions(direct="maybe"),  # type: ignore[arg-type]
        NativeOptions(depth=0),
        NativeOptions(depth=5000),
        NativeOptions(faults="eio=2"),
        NativeOptions(faults="gremlins=0.5"),
    ):
        with pytest.raises((NativeError, GeometryError)) as caught:
            open_reader(place, options=options)
        assert str(caught.value)
    with pytest.raises(GeometryError, match="one per layer"):
        NativeReader([place, place], cache=RowCache(0))
