"""Each kind of fault is found, named and placed, at the level that should find it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pack_fixtures import make_checkpoint, rows_of

from deskfleet_engram import pipeline
from deskfleet_engram.errors import EngramError, FormatError, IdentityError
from deskfleet_engram.manifest import canonical_json, identity_of
from deskfleet_engram.pack import pack
from deskfleet_engram.source import Source
from deskfleet_engram.unpack import unpack
from deskfleet_engram.verify import Fault, Level, VerifyProgress, verify

FILE = "L03/c01.egp"  # 113 rows in 8 blocks, the last one short
SIZE = 9 * 4096


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Path]:
    directory = tmp_path_factory.mktemp("packed")
    source = make_checkpoint(directory / "model")
    pack(source, directory / "pack", extent_bytes=16384)
    return source, directory / "pack"


@pytest.fixture
def copy(packed: tuple[Source, Path], tmp_path: Path) -> Path:
    shutil.copytree(packed[1], tmp_path / "pack")
    return tmp_path / "pack"


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    overwrite(path, offset, bytes([path.read_bytes()[offset] ^ 0x20]))


def short(faults: tuple[Fault, ...]) -> list[tuple[str, int | None, int | None, str]]:
    return [(fault.file, fault.block, fault.row, fault.kind) for fault in faults]


def test_a_sound_pack(packed: tuple[Source, Path]) -> None:
    source, pack_dir = packed
    quick = verify(pack_dir, num_blocks=12, seed=1)
    assert (quick.is_sound, quick.num_files, quick.num_blocks, quick.num_compared) == (True, 6, 12, 0)
    sample = verify(pack_dir, level="sample", source=source, num_blocks=12, seed=1)
    assert (sample.is_sound, sample.num_blocks) == (True, 12)
    assert 6 * 15 < sample.num_compared < 12 * 15
    full = verify(pack_dir, level="full", source=source)
    num_rows = sum(table.num_rows for table in source.tables)
    assert (full.is_sound, full.num_compared) == (True, num_rows)
    assert full.num_bytes == sum(path.stat().st_size for path in pack_dir.glob("L*/*"))
    assert verify(pack_dir, level="full").num_compared == 0


def test_progress_reaches_the_end(packed: tuple[Source, Path]) -> None:
    for level in ("quick", "full"):
        seen: list[VerifyProgress] = []
        report = verify(packed[1], level=level, on_progress=seen.append)  # type: ignore[arg-type]
        assert seen[-1].done_bytes == seen[-1].total_bytes == report.num_bytes


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_flipped_bit_in_a_row(copy: Path, level: Level) -> None:
    flip(copy / FILE, 4096 * (1 + 2) + 264 * 4 + 9)
    assert short(verify(copy, level=level).faults) == [(FILE, 2, 34, "checksum")]


def test_a_flipped_bit_between_checksums_and_header(copy: Path) -> None:
    flip(copy / FILE, 4096 * 3 + 4025)
    assert short(verify(copy, level="full").faults) == [(FILE, 2, None, "fill")]


@pytest.mark.parametrize("level", ["quick", "full"])
def test_swapped_blocks_of_a_file_and_of_two_files(copy: Path, level: Level) -> None:
    other = copy / "L03/c02.egp"
    first, second = ((copy / FILE).read_bytes(), other.read_bytes())
    overwrite(copy / FILE, 4096, first[8192:12288] + first[4096:8192])
    overwrite(copy / FILE, 12288, second[12288:16384])
    overwrite(other, 12288, first[12288:16384])
    report = verify(copy, level=level)
    assert short(report.faults) == [
        (FILE, 0, None, "misplaced"),
        (FILE, 1, None, "misplaced"),
        (FILE, 2, None, "misplaced"),
        ("L03/c02.egp", 2, None, "misplaced"),
    ]
    assert "a sound block 2 of layer 3 column 2" in report.faults[2].detail


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_hole(copy: Path, level: Level) -> None:
    content = (copy / FILE).read_bytes()
    with (copy / FILE).open("wb") as file:
        file.write(content[:8192])
        file.seek(16384)
        file.write(content[16384:])
    assert (copy / FILE).stat().st_blocks * 512 < len(content)
    kinds = {(fault.block, fault.kind) for fault in verify(copy, level=level).faults}
    assert kinds == {(1, "hole"), (2, "hole")}


@pytest.mark.parametrize("level", ["quick", "full"])
@pytest.mark.parametrize("size", [0, 100, 4096, 20000, 4096 * 8, SIZE - 1])
def test_a_file_cut_off(copy: Path, level: Level, size: int) -> None:
    os.truncate(copy / FILE, size)
    faults = verify(copy, level=level).faults
    assert (FILE, None, None, "size") in short(faults)
    assert next(f for f in faults if f.kind == "size").detail == f"has {size} bytes, not {SIZE}"


def test_a_file_too_long(copy: Path) -> None:
    with (copy / FILE).open("ab") as file:
        file.write(b"\1" * 4096)
    assert short(verify(copy).faults) == [(FILE, None, None, "size")]


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_missing_file(copy: Path, level: Level) -> None:
    (copy / FILE).unlink()
    assert short(verify(copy, level=level).faults) == [(FILE, None, None, "missing")]


def test_a_wrong_file_under_the_right_name(copy: Path, tmp_path: Path) -> None:
    shutil.copy(copy / "L03/c00.egp", copy / FILE)
    faults = verify(copy).faults
    assert ("identity", None) in {(fault.kind, fault.block) for fault in faults}
    assert faults[0].detail == "holds layer 3 column 0; wanted is layer 3 column 1"
    other = make_checkpoint(tmp_path / "other", seed=1)
    pack(other, tmp_path / "other pack")
    shutil.copy(tmp_path / "other pack" / FILE, copy / FILE)
    report = verify(copy, level="full")
    assert "belongs to pack" in report.faults[0].detail
    assert [fault.kind for fault in report.faults] == ["identity", *["misplaced"] * 8]


def test_a_damaged_superblock(copy: Path) -> None:
    flip(copy / FILE, 30)
    assert short(verify(copy).faults) == [(FILE, None, None, "superblock")]


def test_a_file_of_another_packing_run_is_told_by_its_digest(copy: Path) -> None:
    """All checksums fit, and yet the file is not the listed one; here it is the list that was changed."""
    document = json.loads((copy / "engram.json").read_bytes())
    document["files"][0]["extents"][1] = "0" * 64
    del document["manifest_sha256"]
    document["manifest_sha256"] = hashlib.sha256(canonical_json(document)).hexdigest()
    (copy / "engram.json").write_bytes(canonical_json(document))
    assert verify(copy).is_sound
    assert short(verify(copy, level="full").faults) == [("L01/c00.egp", 3, None, "digest")]


def test_rows_that_were_wrong_when_they_were_packed(
    packed: tuple[Source, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = packed
    real = pipeline.encode_blocks

    def wrong(layout: Any, first_block: int, weight: Any, scale: Any, out: Any) -> None:
        if (layout.layer, layout.column, first_block) == (3, 1, 0):
            weight = weight.copy()
            weight[20, 5] ^= 1
        real(layout, first_block, weight, scale, out)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "encode_blocks", wrong)
        pack(source, tmp_path / "pack")
    assert verify(tmp_path / "pack", level="full").is_sound
    expected = [(FILE, 1, 20, "source")]
    report = verify(tmp_path / "pack", level="full", source=source)
    assert short(report.faults) == expected
    row = identity_of(source).first_row(3, 1) + 20
    assert report.faults[0].detail == f"row {row} of the table is not the checkpoint's"
    assert short(verify(tmp_path / "pack", level="sample", source=source).faults) == expected


def test_a_block_that_cannot_be_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def fail(fd: int, buffers: Any, offset: int) -> int:
        covered = range(offset, offset + len(buffers[0]))
        if 12288 in covered and os.readlink(f"/proc/self/fd/{fd}").endswith(FILE):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    for level in ("quick", "full"):
        assert short(verify(copy, level=level).faults) == [(FILE, 2, None, "io")]  # type: ignore[arg-type]


def test_columns_chosen(copy: Path) -> None:
    flip(copy / FILE, 5000)
    assert verify(copy, level="full", columns=[(3, 0), (1, 1)]).num_files == 2
    assert not verify(copy, level="full", columns=[(3, 1)]).is_sound
    with pytest.raises(IdentityError, match="the pack does not hold column 5 of layer 1"):
        verify(copy, columns=[(1, 5)])


def test_what_cannot_be_verified(packed: tuple[Source, Path], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="none was given"):
        verify(packed[1], level="sample")
    with pytest.raises(FormatError, match="no pack, or one that is not finished"):
        verify(tmp_path)
    other = make_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(IdentityError, match="is of another checkpoint than"):
        verify(packed[1], level="full", source=other)


def test_many_faults_are_counted_and_the_first_ones_listed(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", vocab_size=1009)
    pack(source, tmp_path / "pack")
    for path in (tmp_path / "pack").glob("L*/*.egp"):
        content = np.frombuffer(path.read_bytes(), dtype=np.uint8).reshape(-1, 4096).copy()
        content[1:, : 15 * 264] ^= 1
        path.write_bytes(content.tobytes())
    report = verify(tmp_path / "pack", level="full")
    num_rows = sum(table.num_rows for table in source.tables)
    assert report.num_faults == num_rows + 6  # a short last block has unused bytes as well
    assert len(report.faults) == 1000


def test_unpack_shows_rows_where_they_lie(packed: tuple[Source, Path]) -> None:
    source, pack_dir = packed
    rows = rows_of(source, 3)
    first = identity_of(source).first_row(3, 1)
    shown = unpack(pack_dir, 3, [first + 34, 0])
    assert [(r.row, r.column, r.column_row, r.file, r.block, r.slot) for r in shown] == [
        (first + 34, 1, 34, FILE, 2, 4),
        (0, 0, 0, "L03/c00.egp", 0, 0),
    ]
    assert shown[0].codes + shown[0].scales == rows[first + 34].tobytes()
    assert shown[1].values.shape == (256,)
    for bad in ([-1], [10**6]):
        with pytest.raises(EngramError):
            unpack(pack_dir, 3, bad)
