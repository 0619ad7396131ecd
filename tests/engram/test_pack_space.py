"""A disk that is too small, or fills up, on a file system of its own."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pack_fixtures import files_of, make_checkpoint

from deskfleet_engram.errors import PackError, SpaceError
from deskfleet_engram.manifest import identity_of
from deskfleet_engram.pack import pack, packed_bytes
from deskfleet_engram.source import Source
from deskfleet_engram.verify import verify

NEEDED = "packing 6 columns needs 1,[0-9]{3},[0-9]{3} more bytes, and [0-9,]+ are free"


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return make_checkpoint(tmp_path / "model", vocab_size=211)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 384 KiB; the pack needs 466,944 bytes and what journal and manifest take."""
    mount = tmp_path / "disk"
    mount.mkdir()
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=384k", "tmpfs", str(mount)],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        pytest.skip(f"a file system of its own cannot be mounted here: {result.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def grow(mount: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=4m", str(mount)], check=True)


def final_names(pack_dir: Path) -> list[str]:
    return [name for name in files_of(pack_dir) if name.endswith((".egp", "engram.json"))]


def test_too_small_a_disk_is_refused_before_anything_is_written(source: Source, small_disk: Path) -> None:
    with pytest.raises(SpaceError, match=NEEDED) as caught:
        pack(source, small_disk / "pack", extent_bytes=8192)
    assert caught.value.exit_code == 1
    assert list(files_of(small_disk / "pack")) == ["engram.journal"]


def test_the_check_asks_for_what_packing_takes(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = packed_bytes(identity_of(source)) + (1 << 20)
    monkeypatch.setattr("deskfleet_engram.pack._free_bytes", lambda path: needed - 1)
    with pytest.raises(SpaceError, match=f"needs {needed:,} more bytes, and {needed - 1:,} are free"):
        pack(source, tmp_path / "pack")
    monkeypatch.setattr("deskfleet_engram.pack._free_bytes", lambda path: needed)
    pack(source, tmp_path / "pack")


def test_a_disk_that_lies_about_its_space_says_so_when_it_is_reserved(
    source: Source, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("deskfleet_engram.pack._free_bytes", lambda path: 1 << 40)
        with pytest.raises(SpaceError, match=r"\.egp\.partial: the disk is full \(No space left on device\)"):
            pack(source, small_disk / "pack", extent_bytes=8192)
    assert list(files_of(small_disk / "pack")) == ["engram.journal"]
    grow(small_disk)
    pack(source, small_disk / "pack", extent_bytes=8192)
    assert verify(small_disk / "pack", level="full", source=source).is_sound


def test_a_disk_that_fills_up_while_packing(
    source: Source, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_reservation(path: Path, size_bytes: int) -> None:
        with path.open("ab") as file:
            file.truncate(size_bytes)

    with monkeypatch.context() as patch:
        patch.setattr("deskfleet_engram.pack._free_bytes", lambda path: 1 << 40)
        patch.setattr("deskfleet_engram.pack.reserve", without_reservation)
        with pytest.raises(SpaceError, match="the disk is full") as caught:
            pack(source, small_disk / "pack", extent_bytes=8192)
        assert "goes on from where it stopped" in str(caught.value.hint)
    names = final_names(small_disk / "pack")
    assert "engram.json" not in names
    assert len(names) < 6
    for name in names:  # columns that were complete before the disk was full
        assert verify_one(small_disk / "pack" / name, source)
    grow(small_disk)
    report = pack(source, small_disk / "pack", extent_bytes=8192)
    assert report.num_kept + report.num_packed == 6
    assert report.resumed_bytes > 0 or report.num_kept > 0
    assert verify(small_disk / "pack", level="full", source=source).is_sound


def verify_one(path: Path, source: Source) -> bool:
    from deskfleet_engram.file_check import check_file

    layer, column = int(path.parent.name[1:]), int(path.stem[1:])
    return check_file(path, identity_of(source).layout(layer, column), extent_bytes=8192).faults == ()


@pytest.mark.parametrize("at", ["journal", "manifest"])
def test_a_full_disk_at_the_small_files(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if at == "journal":
            patch.setattr(os, "write", full)
        else:
            patch.setattr("deskfleet_engram.pack.replace_file", full)
        with pytest.raises(SpaceError, match="the disk is full"):
            pack(source, tmp_path / "pack")
    assert not (tmp_path / "pack/engram.json").exists()
    report = pack(source, tmp_path / "pack")
    assert (report.num_kept, report.num_packed) == ((6, 0) if at == "manifest" else (0, 6))
    assert verify(tmp_path / "pack", level="full", source=source).is_sound


def test_a_directory_that_cannot_be_made(source: Source, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PackError, match="file: File exists"):
        pack(source, tmp_path / "file")
