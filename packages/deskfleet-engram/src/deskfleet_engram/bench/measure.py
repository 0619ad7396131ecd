"""The measurements, all in one run on one pack, in rounds: within a round every method has its turn, so what else
happens on the machine meets all of them alike.

Makes samples; `figures` makes ratios of them. Knows nothing of targets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.bench.checkpoint import LAYER
from deskfleet_engram.bench.corpus import Corpus, blocks_of, distinct_batches
from deskfleet_engram.bench.fio import Fio, FioRun
from deskfleet_engram.bench.programs import output_of
from deskfleet_engram.bench.readers import Lookup, NativeLookup, lookups, native_reader
from deskfleet_engram.errors import EngramError
from deskfleet_engram.file_check import CHUNK_BYTES, check_file
from deskfleet_engram.fileio import ALIGNMENT
from deskfleet_engram.geometry import EngramGeometry, EngramSpec
from deskfleet_engram.manifest import read_manifest
from deskfleet_engram.native import IoClass, NativeStore
from deskfleet_engram.native_functions import hash_ids
from deskfleet_engram.pack import EXTENT_BYTES, pack
from deskfleet_engram.source import Source

BATCHES = (6, 36, 48, 192, 384, 768)
DEPTH = 256  # of the reader, and so of fio
CACHE_BYTES = 64 << 20
_KEPT_LATENCIES = 100
_LEAST_BATCHES = 10
_PUBLISHED = EngramSpec((1, 14), (384006168, 384016682), 4, 16_000_000, 8, 256, 2, 99_092)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure. `batch_s` and `max_batches` bound a sample, whichever comes first."""

    rounds: int = 5
    batch_s: float = 0.6
    max_batches: int = 1500
    fio_s: float = 0.6
    prefill_tokens: int = 8192
    slow_prefill_rows: int = 49_152  # of Python's methods, whose rate does not depend on it
    mixed_s: float = 3.0
    packed_columns: int = 6
    hashed_tokens: int = 1_000_000

    @classmethod
    def quick(cls) -> Plan:
        """Return what takes less than a minute on two busy cores."""
        return cls(2, 0.12, 60, 0.2, slow_prefill_rows=2048, mixed_s=0.7, packed_columns=3)


@dataclass(frozen=True, slots=True)
class Sample:
    """One method's turn.

    `kind`: "batch" and "warm" (lookups of `batch` rows; warm: asked for the second time), "stream" (fio, the device
    always full), "prefill", "alone" and "mixed" (decode without and with a prefetch under way), "hash", and those of
    packing and dd, where `batch` counts bytes. `num_rows` were asked for, `num_reads` sent to the disk (0: not
    counted) in `elapsed_s`, which for lookups is the sum of their latencies. `num_reads` and `cpu_s` of
    warm lookups include the first asking. `latencies_us` are some of them, evenly chosen; p50 and p99 are of all.
    """

    kind: str
    method: str
    round: int
    batch: int
    num_rows: int
    num_reads: int
    elapsed_s: float
    cpu_s: float
    p50_us: float | None = None
    p99_us: float | None = None
    latencies_us: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary of plain values."""
        return asdict(self)


Tell = Callable[[Sample], None]


def measure_reading(
    pack_dir: Path, geometry: EngramGeometry, corpus: Corpus, plan: Plan, fio: Fio | None, tell: Tell
) -> None:
    """Time batches of every size and a prefill, cold, by every method and by fio; then warm, without fio."""
    rows = corpus.rows(geometry, 0, len(corpus.ids))
    identity = read_manifest(pack_dir).identity
    count = plan.rounds * plan.max_batches
    batches = {batch: _batches(geometry, rows, identity.rows, batch, count) for batch in BATCHES}
    chunk = rows[-plan.prefill_tokens :].reshape(-1)
    num_blocks = len(np.unique(blocks_of(geometry, identity.rows, chunk)))
    with lookups(pack_dir, geometry, len(chunk), cache_bytes=0) as (methods, files):

        def preparation(lookup: Lookup) -> Callable[[NDArray[np.int64]], None]:
            """Direct reads do not see the page cache; for the others it is emptied."""
            return _nothing if isinstance(lookup, NativeLookup) else lambda ids: files.drop()

        for lookup in methods.values():
            lookup(batches[BATCHES[0]][-1])  # what the first lookup of a process costs is not measured
        for number in range(1, plan.rounds + 1):
            for batch, ids in batches.items():
                turn = ids[(number - 1) * plan.max_batches :][: plan.max_batches]
                for name, lookup in methods.items():
                    tell(_timed(name, lookup, turn, plan.batch_s, number, preparation(lookup)))
                if fio is not None:
                    tell(_of_fio(fio.batches(batch, DEPTH, plan.fio_s), "batch", batch, number))
                    depth = min(batch, DEPTH)
                    tell(_of_fio(fio.stream(depth, plan.fio_s), "stream", batch, number))
            for name, lookup in methods.items():
                is_native = isinstance(lookup, NativeLookup)
                ids = chunk if is_native else chunk[: plan.slow_prefill_rows]
                sample = _timed(name, lookup, ids[None], float("inf"), number, preparation(lookup))
                tell(replace(sample, kind="prefill", batch=len(chunk)))
            if fio is not None:
                tell(_of_fio(fio.reads(num_blocks, DEPTH), "prefill", len(chunk), number))
        _check(methods)
    with lookups(pack_dir, geometry, max(BATCHES), cache_bytes=CACHE_BYTES) as (methods, _):
        for ids in batches.values():
            for name, lookup in methods.items():
                sample = _timed(name, lookup, ids[: plan.max_batches], plan.batch_s, 1, lookup)
                tell(replace(sample, kind="warm"))
        _check(methods)


def _batches(
    geometry: EngramGeometry, rows: NDArray[np.int64], row_format: Any, batch: int, count: int
) -> NDArray[np.int64]:
    """Return int64 [count, batch]: rows of a TP4 rank's six columns for small batches, of all columns for others."""
    columns = slice(0, None, 4) if batch < 48 else slice(None)
    width = len(range(rows.shape[1])[columns])
    tokens = rows[: 2 * count * -(-batch // width) + 64, columns]
    flat = tokens.reshape(-1)
    found = distinct_batches(flat, blocks_of(geometry, row_format, flat), batch)
    return np.resize(found, (count, batch))  # again from the start of a text that is too short


def _timed(
    name: str,
    lookup: Lookup,
    ids: NDArray[np.int64],
    limit_s: float,
    number: int,
    prepare: Callable[[NDArray[np.int64]], object],
) -> Sample:
    """Look batch after batch up until `limit_s` have passed, each after `prepare`, which is not counted.

    CPU time is the whole process's, as the reader's own thread goes on for a moment after the answer, less what
    `prepare` took in this thread.
    """
    latencies: list[float] = []
    aside = 0.0
    reads_before = lookup.num_reads
    begin_cpu, until = time.process_time(), time.perf_counter() + limit_s
    for batch in ids:
        paused = time.thread_time()
        prepare(batch)
        aside += time.thread_time() - paused
        begin = time.perf_counter()
        lookup(batch)
        end = time.perf_counter()
        latencies.append(end - begin)
        if end > until and len(latencies) >= _LEAST_BATCHES:
            break
    cpu_s = time.process_time() - begin_cpu - aside
    num_reads = lookup.num_reads - reads_before
    taken = np.array(latencies)
    num_rows = len(taken) * ids.shape[1]
    sample = Sample("batch", name, number, ids.shape[1], num_rows, num_reads, float(taken.sum()), cpu_s)
    return _with_latencies(sample, taken)


def _of_fio(run: FioRun, kind: str, batch: int, number: int) -> Sample:
    sample = Sample(kind, "fio", number, batch, run.num_reads, run.num_reads, run.elapsed_s, run.cpu_s)
    return _with_latencies(sample, run.latencies_s)


def _with_latencies(sample: Sample, latencies_s: NDArray[np.float64]) -> Sample:
    if not len(latencies_s):
        return sample
    us = latencies_s * 1e6
    p50, p99 = np.percentile(us, [50, 99]).round(1).tolist()
    chosen = us[:: -(-len(us) // _KEPT_LATENCIES)].round().astype(int).tolist()
    return replace(sample, p50_us=p50, p99_us=p99, latencies_us=tuple(chosen))


def _check(methods: dict[str, Lookup]) -> None:
    for lookup in methods.values():
        if isinstance(lookup, NativeLookup):
            lookup.check()


def measure_mixed(pack_dir: Path, geometry: EngramGeometry, corpus: Corpus, plan: Plan, tell: Tell) -> None:
    """Time decode lookups of 48 rows, alone and while a prefetch of a long prompt runs, in turns."""
    rows = corpus.rows(geometry, 0, len(corpus.ids))
    row_format = read_manifest(pack_dir).identity.rows
    ids = _batches(geometry, rows, row_format, 48, 2000)
    chunk = rows[-plan.prefill_tokens :].reshape(-1)
    reader = native_reader(pack_dir, geometry.spec.layer_ids[0], backend="auto", threads=32, cache_bytes=0)
    with reader:
        store = NativeStore(reader, geometry.spec.layer_ids[0])
        lookup = NativeLookup(store, 48)
        for number in range(1, plan.rounds + 1):
            turn = np.roll(ids, -number * 400, axis=0)
            alone = _timed("native", lookup, turn, plan.mixed_s / 2, number, _nothing)
            tell(replace(alone, kind="alone"))
            with _prefetching(store, chunk):
                mixed = _timed("native", lookup, turn, plan.mixed_s / 2, number, _nothing)
            tell(replace(mixed, kind="mixed"))
        lookup.check()


def _nothing(ids: NDArray[np.int64]) -> None:
    pass


@contextmanager
def _prefetching(store: NativeStore, ids: NDArray[np.int64]) -> Iterator[None]:
    """Have prefetch tickets under way, one after another."""
    out = np.full(
        (len(ids), store.place.rows.row_bytes), 1, dtype=np.uint8
    )  # pages that are there, as an engine has
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            with store.submit_packed(ids, out, io_class=IoClass.PREFETCH) as ticket:
                while not ticket.wait(0.05) and not stop.is_set():
                    pass

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure_hashing(corpus: Corpus, plan: Plan, tell: Tell) -> None:
    """Time the row ids of both published layers, in chunks of a prefill, on one thread."""
    geometry = EngramGeometry.build(_PUBLISHED)
    ids = np.resize(corpus.ids, plan.hashed_tokens)
    history = _PUBLISHED.max_ngram_size - 1
    out = np.empty((plan.prefill_tokens, len(_PUBLISHED.layer_ids), _PUBLISHED.num_columns), dtype=np.int64)
    out[:] = 0  # pages that are there already, as an engine's are
    for number in range(1, plan.rounds + 1):
        cpu, begin = time.thread_time(), time.perf_counter()
        for first in range(0, len(ids), plan.prefill_tokens):
            back = min(first, history)
            stretch = ids[first - back : first + plan.prefill_tokens]
            part = out[: len(stretch) - back]
            hash_ids(geometry, stretch, start=back, position=first - back, pad_id=2, out=part)
        elapsed_s, cpu_s = time.perf_counter() - begin, time.thread_time() - cpu
        tell(Sample("hash", "native", number, 0, len(ids), 0, elapsed_s, cpu_s))


def measure_packing(source: Source, directory: Path, plan: Plan, tell: Tell) -> None:
    """Time packing some columns beside dd, which copies as many bytes past the page cache and makes them durable.

    "pack" is the whole of it, its reading back included; "copy" and "read back" are dd's. One column alone is packed
    before it is read back, so there the two can be told apart: "pack column" less "check column".
    """
    for number in range(1, plan.rounds + 1):
        target = directory / "packed"
        several = range(plan.packed_columns)
        tell(_clocked("pack", number, source, several, partial(_pack, source, target, several)))
        tell(_clocked("copy", number, source, several, partial(_copy, source, target / "copy", several)))
        tell(_clocked("read back", number, source, several, partial(_read, target / "copy")))
        _remove(target)
        one = range(1)
        tell(_clocked("pack column", number, source, one, partial(_pack, source, target, one)))
        tell(_clocked("check column", number, source, one, partial(_check_column, target)))
        tell(_clocked("copy column", number, source, one, partial(_copy, source, target / "copy", one)))
        _remove(target)


def _pack(source: Source, target: Path, columns: range) -> None:
    pack(source, target, columns=[(LAYER, column) for column in columns])


def _check_column(pack_dir: Path) -> None:
    layout = read_manifest(pack_dir).identity.layout(LAYER, 0)
    if check_file(pack_dir / layout.file_name, layout, extent_bytes=EXTENT_BYTES).faults:
        raise EngramError(f"{pack_dir / layout.file_name} was not packed soundly")


def _copy(source: Source, target: Path, columns: range) -> None:
    _dd(
        f"if={source.tables[0].weight.path}",
        f"of={target}",
        f"count={_source_bytes(source, columns)}",
        "iflag=direct,count_bytes",
        "oflag=direct",
        "conv=fsync",
    )


def _read(path: Path) -> None:
    _dd(f"if={path}", "of=/dev/null", "iflag=direct")


def _source_bytes(source: Source, columns: range) -> int:
    """Return the bytes of these columns' rows, in whole pages as direct reads want them."""
    num_rows = sum(source.geometry.column_rows(0)[column] for column in columns)
    return num_rows * source.tables[0].rows.row_bytes // ALIGNMENT * ALIGNMENT


def _clocked(kind: str, number: int, source: Source, columns: range, work: Callable[[], None]) -> Sample:
    cpu, begin = time.process_time(), time.perf_counter()
    work()
    elapsed_s = time.perf_counter() - begin
    method = "dd" if kind.startswith(("copy", "read back")) else "native"
    num_bytes = _source_bytes(source, columns)
    return Sample(kind, method, number, num_bytes, 0, 0, elapsed_s, time.process_time() - cpu)


def _dd(*arguments: str) -> None:
    output_of(["dd", f"bs={CHUNK_BYTES}", *arguments])


def _remove(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()


__all__ = [
    "BATCHES",
    "CACHE_BYTES",
    "DEPTH",
    "Plan",
    "Sample",
    "measure_hashing",
    "measure_mixed",
    "measure_packing",
    "measure_reading",
]
