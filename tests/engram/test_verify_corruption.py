"""Ten thousand planted corruptions of either row format: every one is found, and no reader gives a wrong row."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from pack_fixtures import make_checkpoint, rows_of

from deskfleet_engram.errors import IdentityError, RowError
from deskfleet_engram.file_check import check_file
from deskfleet_engram.format import row_format
from deskfleet_engram.manifest import PackIdentity, identity_of
from deskfleet_engram.native import RowCache
from deskfleet_engram.pack import pack
from deskfleet_engram.source import Source
from deskfleet_engram.store import BackendName, PackedLayer, open_store
from deskfleet_engram.verify import verify

TOTAL = 10_000
BATCHES = [0, 1, *(pytest.param(batch, marks=pytest.mark.slow) for batch in range(2, 10))]
"""Every kind of corruption is in each of them, by turns of FP8 and NVFP4; the slow lane makes up the ten thousand."""
READ_EVERY = 10  # every so many corruptions, all rows are also read through the store

Bytes = bytearray
Corrupt = Callable[[np.random.Generator, Bytes, list[bytes]], Bytes]


def flip_bit(random: np.random.Generator, data: Bytes, others: list[bytes]) -> Bytes:
    data[random.integers(len(data))] ^= 1 << int(random.integers(8))
    return data


def flip_several(random: np.random.Generator, data: Bytes, others: list[bytes]) -> Bytes:
    begin = int(random.integers(len(data) - 8))
    for offset in range(begin, begin + int(random.integers(2, 9))):
        data[offset] ^= int(random.integers(1, 256))
    return data


def swap_within(random: np.random.Generator, data: Bytes, others: list[bytes]) -> Bytes:
    a, b = (int(n) * 4096 for n in random.choice(len(data) // 4096, 2, replace=False))
    data[a : a + 4096], data[b : b + 4096] = data[b : b + 4096], data[a : a + 4096]
    return data


def copy_within(random: np.random.Generator, data: Bytes, others: list[bytes]) -> Bytes:
    """A write that went to the wrong place."""
    a, b = (int(n) * 4096 for n in random.choice(len(data) // 4096, 2, replace=False))
    data[a : a + 4096] = data[b : b + 4096]
    return data


def swap_across(random: np.random.Generator, data: Bytes, others: list[bytes]) -> Bytes:
    """A block of the same number from another column, layer or pack."""
    other = others[random.integers(len(others))]
    block = int(random.integers(min(len(data), len(other)) // 4096)) * 4096
    data[block : block + 4096] = other[block : block + 4096]
    return data


def torn_write(random: np.random.Generator, data: Bytes, others: list[bytes]) -> Bytes:
    """Some 512-byte sectors of a block are another block's."""
    other = others[random.integers(len(others))]
    block = int(random.integers(min(len(data), len(other)) // 4096)) * 4096
    sectors = int(random.integers(1, 8)) * 512
    data[block : block + sectors] = other[block : block + sectors]
    return data


def swap_rows(random: np.random.Generator, data: Bytes, others: list[bytes]) -> Bytes:
    """Two rows of one block change places, their checksums with them."""
    rows = row_format(int.from_bytes(data[4:6], "little"), 256)
    block = 4096 * int(random.integers(1, len(data) // 4096 - 1))
    a, b = random.choice(rows.rows_per_block, 2, replace=False).tolist()
    for begin, width in ((block, rows.row_bytes), (block + rows.rows_per_block * rows.row_bytes, 4)):
        x, y = begin + a * width, begin + b * width
        data[x : x + width], data[y : y + width] = data[y : y + width], data[x : x + width]
    return data


def zero_block(random: np.random.Generator, data: Bytes, others: list[bytes]) -> Bytes:
    block = int(random.integers(len(data) // 4096)) * 4096
    data[block : block + 4096] = bytes(4096)
    return data


def zero_sector(random: np.random.Generator, data: Bytes, others: list[bytes]) -> Bytes:
    sector = int(random.integers(8, len(data) // 512)) * 512
    data[sector : sector + 512] = bytes(512)
    return data


def truncate(random: np.random.Generator, data: Bytes, others: list[bytes]) -> Bytes:
    return data[: int(random.integers(len(data)))]


def truncate_to_blocks(random: np.random.Generator, data: Bytes, others: list[bytes]) -> Bytes:
    return data[: 4096 * int(random.integers(len(data) // 4096))]


def lengthen(random: np.random.Generator, data: Bytes, others: list[bytes]) -> Bytes:
    return data + random.bytes(int(random.integers(1, 9000)))


def another_file(random: np.random.Generator, data: Bytes, others: list[bytes]) -> Bytes:
    return Bytes(others[random.integers(len(others))])


def another_body(random: np.random.Generator, data: Bytes, others: list[bytes]) -> Bytes:
    """The right superblock before another file's blocks."""
    other = others[random.integers(len(others))]
    return data[:4096] + Bytes(other[4096:])


CORRUPTIONS: list[Corrupt] = [
    flip_bit,
    flip_bit,
    flip_bit,
    flip_bit,
    flip_several,
    swap_within,
    copy_within,
    swap_across,
    torn_write,
    swap_rows,
    zero_block,
    zero_sector,
    truncate,
    truncate_to_blocks,
    lengthen,
    another_file,
    another_body,
]


class Ground:
    """Two packs of one shape but different rows, in memory where the machine has a place for that."""

    def __init__(self, directory: Path, rows: str) -> None:
        self.source = make_checkpoint(directory / "model", row_format=rows)
        other = make_checkpoint(directory / "other model", row_format=rows, seed=1)
        self.pack_dir = directory / "pack"
        pack(self.source, self.pack_dir)
        pack(other, directory / "other pack")
        self.identity: PackIdentity = identity_of(self.source)
        self.files = {str(p.relative_to(self.pack_dir)): p.read_bytes() for p in self.pack_dir.glob("L*/*")}
        self.foreign = [path.read_bytes() for path in (directory / "other pack").glob("L*/*")]
        self.rows = {layer: rows_of(self.source, layer) for layer in self.identity.layers}

    def others(self, name: str) -> list[bytes]:
        return [*self.foreign, *(data for key, data in self.files.items() if key != name)]


@pytest.fixture(scope="module")
def grounds() -> Iterator[list[Ground]]:
    memory = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        yield [Ground(directory / rows, rows) for rows in ("fp8", "nvfp4")]
    finally:
        shutil.rmtree(directory)


def read_all(
    ground: Ground, layer: int, backend: BackendName, second_source: Source | None = None
) -> np.ndarray:
    rows = ground.identity.rows
    num_rows = len(ground.rows[layer])
    codes = np.empty((num_rows, rows.weight_bytes), dtype=np.uint8)
    scales = np.empty((num_rows, rows.scale_bytes), dtype=np.uint8)
    place = PackedLayer(ground.pack_dir, layer, second_source=second_source)
    with open_store(place, backend=backend, cache=RowCache(0, rows.row_bytes)) as store:
        store.gather(np.arange(num_rows), codes, scales)
    return np.concatenate([codes, scales], axis=1)


@pytest.mark.parametrize("batch", BATCHES)
def test_all_are_found(grounds: list[Ground], batch: int) -> None:
    ground = grounds[batch % 2]
    random = np.random.default_rng(batch)
    names = sorted(ground.files)
    planted: Counter[str] = Counter()
    caught: Counter[str] = Counter()
    number = 0
    while planted.total() < TOTAL // len(BATCHES):
        number += 1
        corrupt = CORRUPTIONS[number % len(CORRUPTIONS)]
        name = names[random.integers(len(names))]
        layer, column = int(name[1:3]), int(name[5:7])
        good = ground.files[name]
        bad = corrupt(random, Bytes(good), ground.others(name))
        if bad == good:  # such as a sector of zeros where there were zeros
            continue
        planted[corrupt.__name__] += 1
        path = ground.pack_dir / name
        path.write_bytes(bad)
        try:
            faults = check_file(path, ground.identity.layout(layer, column), extent_bytes=1 << 20).faults
            caught[corrupt.__name__] += bool(faults)
            if number % READ_EVERY == 0:
                assert_no_wrong_row(ground, layer)
        finally:
            path.write_bytes(good)
    assert caught == planted
    assert set(planted) == {corrupt.__name__ for corrupt in CORRUPTIONS}
    assert verify(ground.pack_dir, level="full", source=ground.source).is_sound


def assert_no_wrong_row(ground: Ground, layer: int) -> None:
    """A reader refuses, or every row is right; with the checkpoint at hand it never gives a wrong row either."""
    for backend, second_source in itertools.product(get_args(BackendName)[1:], (None, ground.source)):
        try:
            found = read_all(ground, layer, backend, second_source)
        except (RowError, IdentityError):
            continue
        assert np.array_equal(found, ground.rows[layer]), backend


def test_punched_holes_are_found(grounds: list[Ground], tmp_path: Path) -> None:
    """Real holes, on a real file system, as an incomplete copy leaves them."""
    ground = grounds[0]
    name = "L03/c01.egp"
    path = tmp_path / "c01.egp"
    for block in range(8):
        with path.open("wb") as file:
            file.write(ground.files[name][: 4096 * block])
            file.seek(4096 * (block + 1))
            file.write(ground.files[name][4096 * (block + 1) :])
            file.truncate(len(ground.files[name]))
        faults = check_file(path, ground.identity.layout(3, 1), extent_bytes=1 << 20).faults
        assert "hole" in {fault.kind for fault in faults}
        path.unlink()
