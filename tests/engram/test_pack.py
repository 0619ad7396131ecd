"""Packing: the source's rows and nothing else come out, in one go or in many, and what does not fit is refused."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pack_fixtures import TINY, files_of, make_checkpoint, rows_of

from deskfleet_engram.errors import IdentityError, PackError, SourceError
from deskfleet_engram.file_check import check_file
from deskfleet_engram.journal import JOURNAL_NAME
from deskfleet_engram.manifest import identity_of, read_manifest
from deskfleet_engram.pack import PackProgress, pack, packed_bytes
from deskfleet_engram.portable_pack import PortablePack
from deskfleet_engram.source import Source, open_source
from deskfleet_engram.verify import verify

EXTENT = 32768


def gathered(pack_dir: Path, layer: int, num_rows: int) -> np.ndarray:
    """Return every row of a layer as the portable reader gives it."""
    with PortablePack(pack_dir, layer) as store:
        rows = store.identity.rows
        codes = np.empty((num_rows, rows.weight_bytes), dtype=np.uint8)
        scales = np.empty((num_rows, rows.scale_bytes), dtype=np.uint8)
        store.gather(np.arange(num_rows), codes, scales)
    return np.concatenate([codes, scales], axis=1)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return make_checkpoint(tmp_path / "model")


def assert_never_opens_wrongly(pack_dir: Path, source: Source) -> None:
    """Whatever has a final name is whole and sound; a manifest, if any, describes only such files."""
    identity = identity_of(source)
    for layer in identity.layers:
        for column in range(identity.geometry.spec.num_columns):
            layout = identity.layout(layer, column)
            path = pack_dir / layout.file_name
            if path.exists():
                assert check_file(path, layout, extent_bytes=EXTENT).faults == ()
            partial = path.with_name(path.name + ".partial")
            if partial.exists() and not path.exists():
                # Not even by hand: until the very end it has no superblock.
                kinds = {fault.kind for fault in check_file(partial, layout, extent_bytes=EXTENT).faults}
                assert kinds == set() or "superblock" in kinds or "size" in kinds
    if (pack_dir / "engram.json").exists():
        assert verify(pack_dir, level="full", source=source).is_sound


def test_round_trip_of_the_golden_checkpoint(tmp_path: Path) -> None:
    source = open_source(TINY)
    report = pack(source, tmp_path / "pack", extent_bytes=EXTENT)
    assert (report.num_packed, report.num_kept, report.num_adopted) == (24, 0, 0)
    for layer in (1, 4):
        expected = rows_of(source, layer)
        assert np.array_equal(gathered(tmp_path / "pack", layer, len(expected)), expected)
    assert verify(tmp_path / "pack", level="full", source=source).is_sound
    assert sorted(path.name for path in (tmp_path / "pack").iterdir()) == ["L01", "L04", "engram.json"]
    assert report.packed_bytes == packed_bytes(identity_of(source))
    assert report.packed_bytes == sum(path.stat().st_size for path in (tmp_path / "pack").glob("L*/*"))


def test_round_trip_of_four_bit_rows(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", row_format="nvfp4", vocab_size=700)
    pack(source, tmp_path / "pack", extent_bytes=EXTENT)
    for layer in (1, 3):
        expected = rows_of(source, layer)
        assert expected.shape[1] == 144
        assert np.array_equal(gathered(tmp_path / "pack", layer, len(expected)), expected)
    assert verify(tmp_path / "pack", level="full", source=source).is_sound


def test_digests_are_those_of_the_files(source: Source, tmp_path: Path) -> None:
    pack(source, tmp_path / "pack", extent_bytes=8192)
    for file in read_manifest(tmp_path / "pack").files:
        content = (tmp_path / "pack" / f"L{file.layer:02d}/c{file.column:02d}.egp").read_bytes()
        pieces = [content[begin : begin + 8192] for begin in range(0, len(content), 8192)]
        assert file.extents == tuple(hashlib.sha256(piece).hexdigest() for piece in pieces)


def test_extents_that_are_no_multiple_of_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "model", vocab_size=1009)
    pack(source, tmp_path / "whole")
    monkeypatch.setattr("deskfleet_engram.file_check.CHUNK_BYTES", 3 * 4096)
    monkeypatch.setattr("deskfleet_engram.pipeline.CHUNK_BYTES", 3 * 4096)
    pack(source, tmp_path / "pieces", extent_bytes=5 * 4096)
    for name in ("L01/c00.egp", "L03/c02.egp"):
        assert (tmp_path / "pieces" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert verify(tmp_path / "pieces", level="full", source=source).is_sound


@pytest.mark.parametrize("refusal", ["at open", "at the first call"])
def test_without_direct_io_the_bytes_are_the_same(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    """File systems refuse O_DIRECT when a file is opened, or only when it is used."""
    pack(source, tmp_path / "direct", extent_bytes=8192)
    refused: set[str] = set()

    def refusing(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(first: Any, *args: Any) -> Any:
            flags = args[0] if name == "open" else fcntl.fcntl(first, fcntl.F_GETFL)
            if flags & os.O_DIRECT:
                refused.add(name)
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(first, *args)

        return call

    for name in ["open"] if refusal == "at open" else ["preadv", "pwrite"]:
        monkeypatch.setattr(os, name, refusing(name))
    pack(source, tmp_path / "buffered", extent_bytes=8192)
    assert verify(tmp_path / "buffered", level="full", source=source).is_sound
    monkeypatch.undo()
    assert files_of(tmp_path / "buffered") == files_of(tmp_path / "direct")
    assert refused == ({"open"} if refusal == "at open" else {"preadv", "pwrite"})


def test_a_file_system_that_cannot_reserve(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        """A C library on a file system without fallocate."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.fallocate = self._fallocate

        def _fallocate(self, *args: Any) -> int:
            return -1

    monkeypatch.setattr("deskfleet_engram.fileio.ctypes.CDLL", Libc)
    monkeypatch.setattr("deskfleet_engram.fileio.ctypes.get_errno", lambda: errno.EOPNOTSUPP)
    pack(source, tmp_path / "pack", extent_bytes=8192)
    assert verify(tmp_path / "pack", level="full", source=source).is_sound


def test_columns_packed_by_and_by_are_those_packed_at_once(source: Source, tmp_path: Path) -> None:
    pack(source, tmp_path / "once", extent_bytes=EXTENT)
    first = pack(source, tmp_path / "twice", columns=[(1, 2), (3, 0), (1, 2)], extent_bytes=EXTENT)
    assert first.num_packed == 2
    manifest = read_manifest(tmp_path / "twice")
    assert (manifest.columns(1), manifest.columns(3)) == ((2,), (0,))
    second = pack(source, tmp_path / "twice")
    assert (second.num_packed, second.num_kept) == (4, 2)
    assert files_of(tmp_path / "twice") == files_of(tmp_path / "once")
    third = pack(source, tmp_path / "twice")
    assert (third.num_packed, third.num_kept, third.packed_bytes) == (0, 6, 0)


def test_files_of_another_machine_are_adopted(source: Source, tmp_path: Path) -> None:
    pack(source, tmp_path / "there", extent_bytes=EXTENT)
    (tmp_path / "here" / "L03").mkdir(parents=True)
    shutil.copy(tmp_path / "there/L03/c01.egp", tmp_path / "here/L03/c01.egp")
    report = pack(source, tmp_path / "here", extent_bytes=EXTENT)
    assert (report.num_packed, report.num_adopted) == (5, 1)
    assert files_of(tmp_path / "here") == files_of(tmp_path / "there")


@pytest.mark.parametrize("damage", ["flip", "other column", "short"])
def test_a_file_that_does_not_belong_is_not_adopted(source: Source, tmp_path: Path, damage: str) -> None:
    pack(source, tmp_path / "there", extent_bytes=EXTENT)
    content = bytearray((tmp_path / "there/L03/c01.egp").read_bytes())
    if damage == "flip":
        content[9000] ^= 4
    if damage == "other column":
        content = bytearray((tmp_path / "there/L03/c02.egp").read_bytes())
    if damage == "short":
        content = content[:-4096]
    (tmp_path / "here/L03").mkdir(parents=True)
    (tmp_path / "here/L03/c01.egp").write_bytes(content)
    with pytest.raises(
        PackError, match=r"L03/c01\.egp is there without a manifest, and is not what belongs there"
    ) as caught:
        pack(source, tmp_path / "here", extent_bytes=EXTENT)
    assert caught.value.hint == "delete the file to have it packed"
    (tmp_path / "here/L03/c01.egp").unlink()
    pack(source, tmp_path / "here", extent_bytes=EXTENT)
    assert verify(tmp_path / "here", level="full", source=source).is_sound


def test_a_file_that_vanished_is_packed_again(source: Source, tmp_path: Path) -> None:
    pack(source, tmp_path / "pack")
    before = files_of(tmp_path / "pack")
    (tmp_path / "pack/L01/c01.egp").unlink()
    assert pack(source, tmp_path / "pack").num_packed == 1
    assert files_of(tmp_path / "pack") == before


class Crash(BaseException):
    """The power goes: nothing that follows happens."""


class CrashingSystem:
    """Lets `count` calls that change something below `place` through, halves the next write, and refuses all others.

    Threads of other tests may still be at work in this process: what they do to their own files is not counted.
    """

    NAMES = ("pwrite", "write", "fdatasync", "fsync", "rename", "replace", "unlink", "ftruncate")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: Path, count: int | None) -> None:
        self.place = place
        self.left = count
        self.calls = 0
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            target = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else args[0]
            if not Path(target).is_relative_to(self.place):
                return real(*args, **kwargs)
            self.calls += 1
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    if self.left == -1 and name in ("pwrite", "write"):
                        half = len(args[1]) // 2 if name == "write" else len(args[1]) // 8192 * 4096
                        real(args[0], args[1][:half], *args[2:])
                    raise Crash(name)
            return real(*args, **kwargs)

        return call


def test_a_crash_at_every_single_call(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", vocab_size=151, layer_ids=(1,))
    reference = tmp_path / "reference"
    with pytest.MonkeyPatch.context() as patch:
        system = CrashingSystem(patch, tmp_path, None)
        pack(source, reference, extent_bytes=EXTENT)
    expected = files_of(reference)
    num_calls = system.calls
    assert num_calls > 40
    for count in range(num_calls):
        target = tmp_path / f"crash{count}"
        with pytest.MonkeyPatch.context() as patch:
            CrashingSystem(patch, tmp_path, count)
            with pytest.raises(Crash):
                pack(source, target, extent_bytes=EXTENT)
        assert_never_opens_wrongly(target, source)
        pack(source, target, extent_bytes=EXTENT)
        assert files_of(target) == expected, count
        shutil.rmtree(target)


def interrupted(source: Source, target: Path, after: int = 6) -> None:
    """Pack until some extents are journalled, then stop."""
    count = 0

    def stop(progress: PackProgress) -> None:
        nonlocal count
        count += 1
        if count == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, target, extent_bytes=8192, on_progress=stop)


def test_resuming_does_not_begin_again(source: Source, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "pack")
    report = pack(source, tmp_path / "pack", extent_bytes=8192)
    assert report.resumed_bytes > 0
    pack(source, tmp_path / "reference", extent_bytes=8192)
    assert files_of(tmp_path / "pack") == files_of(tmp_path / "reference")


def test_what_was_lost_after_it_was_journalled_is_packed_again(source: Source, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "pack", after=12)
    for partial in (tmp_path / "pack").rglob("*.partial"):
        with partial.open("r+b") as file:  # a disk that lied about having written
            file.write(bytes(partial.stat().st_size))
    pack(source, tmp_path / "pack", extent_bytes=8192)
    pack(source, tmp_path / "reference", extent_bytes=8192)
    assert files_of(tmp_path / "pack") == files_of(tmp_path / "reference")


def test_restart_discards_what_is_unfinished(source: Source, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "pack")
    report = pack(source, tmp_path / "pack", restart=True, extent_bytes=16384)
    assert report.resumed_bytes == 0
    pack(source, tmp_path / "reference", extent_bytes=16384)
    assert files_of(tmp_path / "pack") == files_of(tmp_path / "reference")


def test_unfinished_columns_that_are_not_wanted_any_more_go_away(source: Source, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "pack")
    pack(source, tmp_path / "pack", columns=[(3, 2)], extent_bytes=8192)
    assert list((tmp_path / "pack").rglob("*.partial")) == []
    assert read_manifest(tmp_path / "pack").columns(3) == (2,)


def test_another_extent_size_is_refused(source: Source, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "pack")
    with pytest.raises(
        PackError, match="the size of extents changed since packing began: it was 8192, and is 4096"
    ):
        pack(source, tmp_path / "pack", extent_bytes=4096)
    pack(source, tmp_path / "pack", extent_bytes=8192)
    with pytest.raises(PackError, match="is packed with extents of 8192 bytes, not 4096"):
        pack(source, tmp_path / "pack", extent_bytes=4096)
    with pytest.raises(PackError, match="extents of 1000 bytes are no multiple of 4096"):
        pack(source, tmp_path / "other", extent_bytes=1000)


@pytest.mark.parametrize("change", ["rows", "a row outside the sample", "touched", "another revision"])
def test_a_source_that_changed_between_runs_is_refused(tmp_path: Path, change: str) -> None:
    source = make_checkpoint(tmp_path / "model")
    interrupted(source, tmp_path / "pack")
    shard = source.table(1).weight.path
    if change == "rows":
        source = make_checkpoint(tmp_path / "model", seed=1)
    elif change == "another revision":
        source = open_source(tmp_path / "model", revision="2")
    else:
        if change != "touched":
            with shard.open("r+b") as file:
                file.seek(source.table(1).weight.offset_bytes + 256 * 3 + 7)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))
        later = time.time_ns() + 10**9
        os.utime(shard, ns=(later, later))
    with pytest.raises(PackError, match="the source changed since packing began") as caught:
        pack(source, tmp_path / "pack", extent_bytes=8192)
    assert "restart" in str(caught.value.hint)
    pack(source, tmp_path / "pack", extent_bytes=8192, restart=True)
    assert verify(tmp_path / "pack", level="full", source=source).is_sound


def test_restart_discards_columns_that_the_interrupted_run_had_finished(tmp_path: Path) -> None:
    """Their checksums are sound and their identity the same; their rows are of the source as it was."""
    source = make_checkpoint(tmp_path / "model")

    def stop(progress: PackProgress) -> None:
        if (tmp_path / "pack/L01/c00.egp").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path / "pack", extent_bytes=8192, on_progress=stop)
    with source.table(1).weight.path.open("r+b") as file:
        file.seek(source.table(1).weight.offset_bytes + 256 * 3 + 7)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    report = pack(source, tmp_path / "pack", extent_bytes=8192, restart=True)
    assert report.num_adopted == 0
    assert verify(tmp_path / "pack", level="full", source=source).is_sound


def test_a_source_that_changes_while_it_is_packed_is_noticed(source: Source, tmp_path: Path) -> None:
    def touch(progress: PackProgress) -> None:
        os.utime(source.table(3).weight.path, ns=(1, 1))

    with pytest.raises(PackError, match=r"model-00003\.safetensors changed while it was packed"):
        pack(source, tmp_path / "pack", on_progress=touch)
    assert not (tmp_path / "pack/engram.json").exists()


def test_a_pack_of_another_checkpoint_is_left_alone(source: Source, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", seed=1)
    pack(other, tmp_path / "pack")
    before = files_of(tmp_path / "pack")
    with pytest.raises(
        IdentityError, match=r"pack is of another checkpoint than .*model: source.tables\[0\].sample_sha256"
    ):
        pack(source, tmp_path / "pack", restart=True)
    assert files_of(tmp_path / "pack") == before


@pytest.mark.parametrize("place", [(2, 0), (1, 3), (1, -1)])
def test_a_column_that_does_not_exist(source: Source, tmp_path: Path, place: tuple[int, int]) -> None:
    with pytest.raises(IdentityError, match=f"there is no column {place[1]} of layer {place[0]}"):
        pack(source, tmp_path / "pack", columns=[place])


def test_a_second_packer_is_kept_out(source: Source, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    fd = os.open(tmp_path / "pack", os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(PackError, match="another process is packing there"):
            pack(source, tmp_path / "pack")
    finally:
        os.close(fd)
    pack(source, tmp_path / "pack")


def test_a_sparse_source_is_refused(source: Source, tmp_path: Path) -> None:
    table = source.table(3)
    data = table.weight.path.read_bytes()
    begin = -(-table.weight.offset_bytes // 4096) * 4096
    with table.weight.path.open("wb") as file:
        file.write(data[:begin])
        file.seek(begin + 16384)
        file.write(data[begin + 16384 :])
    source = open_source(tmp_path / "model")
    with pytest.raises(SourceError, match=rf"lie in a hole at byte {begin}: the file is an incomplete copy"):
        pack(source, tmp_path / "pack")
    report = pack(source, tmp_path / "pack", allow_holes=True)
    assert report.num_packed == 6


@pytest.mark.parametrize("call", ["write", "sync", "read", "journal"])
def test_a_failing_call_stops_everything_and_is_named(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    calls = 0
    name = {"write": "pwrite", "sync": "fdatasync", "read": "preadv", "journal": "write"}[call]
    real = getattr(os, name)

    def fail(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= 5:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(SourceError if call == "read" else PackError, match="Input/output error"):
            pack(source, tmp_path / "pack", extent_bytes=8192)
    assert not (tmp_path / "pack/engram.json").exists()
    assert_never_opens_wrongly(tmp_path / "pack", source)
    pack(source, tmp_path / "pack", extent_bytes=8192)
    assert verify(tmp_path / "pack", level="full", source=source).is_sound


def test_a_disk_that_does_not_keep_what_it_is_given(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    has_lost = False

    def lossy(fd: int, data: Any, offset: int) -> int:
        nonlocal has_lost
        changed = bytearray(data)
        if offset == 3 * 4096 and not has_lost:
            changed[100] ^= 1
            has_lost = True
        buffer = np.frombuffer(changed, dtype=np.uint8)
        aligned = np.empty(len(buffer) + 4096, dtype=np.uint8)
        begin = -aligned.ctypes.data % 4096
        aligned[begin : begin + len(buffer)] = buffer
        return real(fd, aligned[begin : begin + len(buffer)].data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lossy)
        with pytest.raises(
            PackError, match=r"c00.egp.partial does not come back .* block 2, row 30: checksum"
        ):
            pack(source, tmp_path / "pack", extent_bytes=4096)
    assert not list((tmp_path / "pack").rglob("*.egp"))
    pack(source, tmp_path / "pack", extent_bytes=4096)
    assert verify(tmp_path / "pack", level="full", source=source).is_sound


def test_progress_adds_up(source: Source, tmp_path: Path) -> None:
    seen: list[PackProgress] = []
    pack(source, tmp_path / "pack", extent_bytes=8192, on_progress=seen.append)
    total = packed_bytes(identity_of(source))
    assert {progress.total_bytes for progress in seen} == {total}
    # Superblocks are written in passing and counted with the check only.
    assert seen[-1].packed_bytes == total - 6 * 4096
    assert seen[-1].checked_bytes == total
    assert [p.packed_bytes for p in seen] == sorted(p.packed_bytes for p in seen)
    assert seen[-1].rate_bytes_s > 0
    assert seen[-1].eta_s is not None


def test_the_rate_is_limited(source: Source, tmp_path: Path) -> None:
    num_bytes = sum(table.weight.num_bytes + table.scale.num_bytes for table in source.tables)
    report = pack(source, tmp_path / "pack", extent_bytes=8192, max_bytes_per_s=2 * num_bytes)
    assert report.elapsed_s > 0.45


def test_a_damaged_journal_is_read_as_far_as_it_goes(source: Source, tmp_path: Path) -> None:
    pack(source, tmp_path / "reference", extent_bytes=8192)
    interrupted(source, tmp_path / "pack", after=14)
    journal = (tmp_path / "pack" / JOURNAL_NAME).read_bytes()
    saved = files_of(tmp_path / "pack")
    random = np.random.default_rng(0)
    for _ in range(6):
        damaged = bytearray(journal)
        damaged[random.integers(journal.index(b"\n") + 1, len(journal))] ^= 1 << random.integers(8)
        cut = int(random.integers(journal.index(b"\n") + 1, len(journal)))
        for content in (bytes(damaged), journal[:cut], journal[:cut] + b"\0" * 100, journal[: cut // 20]):
            shutil.rmtree(tmp_path / "pack")
            for name, data in saved.items():
                (tmp_path / "pack" / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "pack" / name).write_bytes(data)
            (tmp_path / "pack" / JOURNAL_NAME).write_bytes(content)
            pack(source, tmp_path / "pack", extent_bytes=8192)
            assert files_of(tmp_path / "pack") == files_of(tmp_path / "reference")
