"""Rows read in place from the golden shards, and every way in which reading can fail."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
from pathlib import Path

import engram_golden
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deskfleet_engram import GeometryError, PortableStore, RowError, RowSource, decode_rows
from deskfleet_engram.format import fp8_rows

SHARDS = {1: "model/model-00017-of-00018.safetensors", 4: "model/model-00018-of-00018.safetensors"}


def source_of(layer: int, path: Path | None = None) -> RowSource:
    file = engram_golden.GOLDEN / SHARDS[layer]
    entries, data = engram_golden.header(file)
    weight = entries[f"layers.{layer}.engram.embed.weight"]
    scale = entries[f"layers.{layer}.engram.embed.scale"]
    return RowSource(
        path=path or file,
        weight_offset_bytes=data + weight["data_offsets"][0],
        scale_offset_bytes=data + scale["data_offsets"][0],
        num_rows=weight["shape"][0],
        rows=fp8_rows(weight["shape"][1]),
        table=f"layers.{layer}.engram.embed",
    )


def table_of(layer: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    names = [f"layers.{layer}.engram.embed.{part}" for part in ("weight", "scale")]
    codes, scales = (engram_golden.read(SHARDS[layer], name) for name in names)
    return codes, scales


def outputs(source: RowSource, *shape: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Buffers full of a pattern that no test expects back."""
    return (
        np.full((*shape, source.rows.weight_bytes), 0xAB, dtype=np.uint8),
        np.full((*shape, source.rows.scale_bytes), 0xCD, dtype=np.uint8),
    )


@pytest.fixture
def store() -> PortableStore:
    with PortableStore(source_of(1)) as opened:
        yield opened


@pytest.mark.parametrize(("layer", "position"), [(1, 0), (4, 1)])
def test_rows_of_the_reference_model(layer: int, position: int) -> None:
    file = "golden/intermediates_prefill40.safetensors"
    ids = engram_golden.read(file, "engram_hash_ids")[:, position].astype(np.int64)
    golden = engram_golden.read(file, f"layers.{layer}.engram_rows")
    source = source_of(layer)
    codes, scales = outputs(source, *ids.shape)
    with PortableStore(source) as store:
        store.gather(ids, codes, scales)
    np.testing.assert_array_equal(decode_rows(codes, scales), golden)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.just(-1) | st.integers(0, 12385) | st.integers(100, 110), max_size=30))
def test_gather_equals_indexing_the_table(ids: list[int]) -> None:
    codes_table, scales_table = table_of(1)
    row_ids = np.array(ids, dtype=np.int64)
    with PortableStore(source_of(1)) as store:
        codes, scales = outputs(store.source, len(ids))
        store.gather(row_ids, codes, scales)
        mine = row_ids >= 0
        np.testing.assert_array_equal(codes[mine], codes_table[row_ids[mine]])
        np.testing.assert_array_equal(scales[mine], scales_table[row_ids[mine]])
        assert (codes[~mine] == 0).all()
        assert (scales[~mine] == 127).all()
        num_unique = len({row for row in ids if row >= 0})
        assert store.counters.num_rows == int(mine.sum())
        assert store.counters.num_unique == num_unique
        assert store.counters.read_bytes == num_unique * 66


def test_neighbours_are_read_together_and_repeats_once(store: PortableStore) -> None:
    ids = np.array([[7, 5, 6], [6, 900, 5]], dtype=np.int64)
    codes, scales = outputs(store.source, 2, 3)
    store.gather(ids, codes, scales)
    np.testing.assert_array_equal(codes, table_of(1)[0][ids])
    assert dataclasses.astuple(store.counters) == (6, 4, 4 * 66, 4)


def test_strided_outputs_are_filled(store: PortableStore) -> None:
    codes, scales = outputs(store.source, 6)
    store.gather(np.array([3, 9, 3], dtype=np.int64), codes[::2], scales[::2])
    np.testing.assert_array_equal(codes[::2], table_of(1)[0][[3, 9, 3]])
    assert (codes[1::2] == 0xAB).all()


def test_threads_read_the_same_rows(store: PortableStore) -> None:
    table, _ = table_of(1)
    failures: list[int] = []

    def work(seed: int) -> None:
        ids = np.random.default_rng(seed).integers(0, store.source.num_rows, size=(20, 12))
        codes, scales = outputs(store.source, 20, 12)
        store.gather(ids, codes, scales)
        if not (codes == table[ids]).all():
            failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.counters.num_rows == 8 * 240


@pytest.mark.parametrize("row", [12386, 10**12, -2])
def test_a_row_outside_the_table_is_refused_and_outputs_stay(store: PortableStore, row: int) -> None:
    codes, scales = outputs(store.source, 2)
    with pytest.raises(RowError, match=rf"layers\.1\.engram\.embed: row {row} is outside 0\.\.12385"):
        store.gather(np.array([3, row], dtype=np.int64), codes, scales)
    assert (codes == 0xAB).all()
    assert (scales == 0xCD).all()
    assert store.counters.num_rows == 0


def test_outputs_of_a_wrong_shape_or_dtype_are_refused(store: PortableStore) -> None:
    ids = np.array([3, 4], dtype=np.int64)
    codes, scales = outputs(store.source, 2)
    with pytest.raises(RowError, match=r"out_scales must be uint8 of shape \(2, 2\), got uint8 of shape"):
        store.gather(ids, codes, scales[:1])
    with pytest.raises(RowError, match=r"out_codes must be uint8 .* got int8"):
        store.gather(ids, codes.view(np.int8), scales)
    with pytest.raises(RowError, match=r"row ids must be int64, got int32"):
        store.gather(ids.astype(np.int32), codes, scales)


def test_a_truncated_file_does_not_open(tmp_path: Path) -> None:
    path = tmp_path / "short.safetensors"
    source = source_of(1, path)
    shutil.copyfile(source_of(1).path, path)
    needed = max(
        source.weight_offset_bytes + source.num_rows * source.rows.weight_bytes,
        source.scale_offset_bytes + source.num_rows * source.rows.scale_bytes,
    )
    os.truncate(path, needed)
    PortableStore(source).open().close()
    os.truncate(path, needed - 1)
    with pytest.raises(RowError, match=rf"short\.safetensors: .* byte {needed}, .* has {needed - 1} bytes"):
        PortableStore(source).open()


def test_a_file_that_shrinks_while_open_gives_an_error_not_zeros(tmp_path: Path) -> None:
    path = tmp_path / "shrinking.safetensors"
    source = source_of(1, path)
    shutil.copyfile(source_of(1).path, path)
    with PortableStore(source) as store:
        codes, scales = outputs(source, 2)
        os.truncate(path, source.weight_offset_bytes + 100 * source.rows.weight_bytes + 10)
        with pytest.raises(
            RowError, match=r"shrinking\.safetensors: the file ends at .* inside row 100 of lay"
        ):
            store.gather(np.array([99, 100], dtype=np.int64), codes, scales)
        assert (codes == 0xAB).all()


def test_a_failing_device_names_file_and_row(store: PortableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, buffers: object, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    codes, scales = outputs(store.source, 1)
    with pytest.raises(RowError, match=r"model-00017-of-00018\.safetensors: reading row 42 .*: Input/output"):
        store.gather(np.array([42], dtype=np.int64), codes, scales)
    assert (codes == 0xAB).all()


def test_a_read_that_comes_in_pieces_is_completed(
    store: PortableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.preadv

    def piece(fd: int, buffers: list[memoryview], offset: int) -> int:
        return whole(fd, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", piece)
    codes, scales = outputs(store.source, 3)
    store.gather(np.array([8, 9, 10], dtype=np.int64), codes, scales)
    np.testing.assert_array_equal(codes, table_of(1)[0][8:11])
    np.testing.assert_array_equal(scales, table_of(1)[1][8:11])


def test_closed_and_missing_files(tmp_path: Path) -> None:
    source = source_of(1)
    store = PortableStore(source)
    codes, scales = outputs(source, 1)
    ids = np.array([1], dtype=np.int64)
    with pytest.raises(RowError, match="is not open"):
        store.gather(ids, codes, scales)
    store.open()
    store.open()
    store.close()
    store.close()
    with pytest.raises(RowError, match="is not open"):
        store.gather(ids, codes, scales)
    with pytest.raises(RowError, match=r"gone\.safetensors: cannot open .*: No such file"):
        PortableStore(source_of(1, tmp_path / "gone.safetensors")).open()


def test_closing_waits_for_a_running_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor closed under a reader could be reused for another file: rows of that file would follow."""
    whole = os.preadv
    reading, go_on = threading.Event(), threading.Event()

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        reading.set()
        assert go_on.wait(10)
        return whole(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    store = PortableStore(source_of(1)).open()
    codes, scales = outputs(store.source, 1)
    reader = threading.Thread(target=store.gather, args=(np.array([5], dtype=np.int64), codes, scales))
    closer = threading.Thread(target=store.close)
    reader.start()
    assert reading.wait(10)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    go_on.set()
    reader.join(10)
    closer.join(10)
    np.testing.assert_array_equal(codes, table_of(1)[0][5:6])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rows": 0}, r"0 rows"),
        ({"scale_offset_bytes": 0, "weight_offset_bytes": 0}, r"must not overlap"),
        ({"weight_offset_bytes": -64}, r"overlap or be negative"),
    ],
)
def test_an_impossible_description_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        PortableStore(dataclasses.replace(source_of(1), **change))


def test_decoding_every_code() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    values = decode_rows(codes, np.full((8, 1), 127, dtype=np.uint8)).reshape(-1)
    assert values[0x7E] == 448
    assert values[0xFE] == -448
    assert values[0x01] == 2.0**-9
    assert values[0x38] == 1
    assert np.flatnonzero(np.isnan(values)).tolist() == [0x7F, 0xFF]
    ones = np.full((1, 64), 0x38, dtype=np.uint8)
    scaled = decode_rows(ones, np.array([[120, 130]], dtype=np.uint8))
    assert scaled[0, [0, 31, 32, 63]].tolist() == [2.0**-7, 2.0**-7, 8, 8]
    assert np.isnan(decode_rows(ones, np.array([[255, 127]], dtype=np.uint8))[0, :32]).all()
