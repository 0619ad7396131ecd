"""One run of the benchmark: makes what is measured on, measures, and sums up.

`run` is what the command and `deskfleet bench engram` call. Knows nothing of commits, nor of where results are kept.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np

from deskfleet_engram._native import library
from deskfleet_engram.bench.checkpoint import make_checkpoint
from deskfleet_engram.bench.corpus import CORPUS, Corpus
from deskfleet_engram.bench.figures import rates, ratios
from deskfleet_engram.bench.fio import Fio
from deskfleet_engram.bench.measure import (
    DEPTH,
    Plan,
    Sample,
    measure_hashing,
    measure_mixed,
    measure_packing,
    measure_reading,
)
from deskfleet_engram.bench.readers import native_reader
from deskfleet_engram.errors import EngramError
from deskfleet_engram.geometry import EngramGeometry
from deskfleet_engram.manifest import read_manifest
from deskfleet_engram.native_functions import accelerate_blocks
from deskfleet_engram.pack import pack

SCHEMA = 1
_GIB = 1 << 30
_CORPUS_TOKENS = 1_000_000
_QUICK_CORPUS_TOKENS = 200_000


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure, where, and on how large a pack: one made for it, or the first layer of `pack_dir`."""

    plan: Plan
    pack_bytes: int
    directory: Path
    num_tokens: int
    pack_dir: Path | None = None

    @classmethod
    def of(
        cls,
        *,
        quick: bool,
        directory: Path | None = None,
        size_gib: float | None = None,
        pack_dir: Path | None = None,
    ) -> Self:
        """Return the settings of a full or a quick run."""
        size = size_gib or (0.375 if quick else 8.0)
        return cls(
            Plan.quick() if quick else Plan(),
            int(size * _GIB),
            Path.cwd() if directory is None else directory,
            _QUICK_CORPUS_TOKENS if quick else _CORPUS_TOKENS,
            pack_dir,
        )


def run(settings: Settings, *, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure everything and return one JSON object; `say` is told how far it is. Needs three times the pack's size
    in the directory, unless a pack is given.

    Raises NativeError without the native library, EngramError when fio or dd fail, OSError when the disk does.
    """
    library()
    accelerate_blocks()
    load_average = os.getloadavg()
    samples: list[Sample] = []

    def tell(sample: Sample) -> None:
        samples.append(sample)
        p50 = "" if sample.p50_us is None else f", p50 {sample.p50_us:.0f} us, p99 {sample.p99_us:.0f} us"
        say(
            f"round {sample.round}: {sample.kind} {sample.batch} {sample.method}: {sample.elapsed_s:.2f} s{p50}"
        )

    settings.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="engram-bench-", dir=settings.directory) as name:
        pack_dir = settings.pack_dir
        if pack_dir is None:
            say(
                f"making a checkpoint and its pack of {settings.pack_bytes / _GIB:g} GiB in {settings.directory}"
            )
            source = make_checkpoint(Path(name) / "model", settings.pack_bytes)
            measure_packing(source, Path(name), settings.plan, tell)
            pack_dir = Path(name) / "pack"
            pack(source, pack_dir)
        geometry, files = _first_layer(pack_dir)
        corpus = Corpus.read(settings.num_tokens, geometry.spec.compressed_vocab_size)
        measure_hashing(corpus, settings.plan, tell)
        fio, no_fio = _fio(files)
        with native_reader(
            pack_dir, geometry.spec.layer_ids[0], backend="auto", threads=32, cache_bytes=0
        ) as reader:
            report = reader.report
        measure_reading(pack_dir, geometry, corpus, settings.plan, fio, tell)
        measure_mixed(pack_dir, geometry, corpus, settings.plan, tell)
        pack_bytes = sum(path.stat().st_size for path in files)
    prefill = next(s for s in samples if s.kind == "prefill" and s.method == "native")
    return {
        "schema": SCHEMA,
        "name": "engram-reader",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "platform": platform.platform(),
            "num_cores": len(os.sched_getaffinity(0)),
            "load_average": load_average,
            "load_average_after": os.getloadavg(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "fio": None if fio is None else f"{fio.version}, {fio.engine}",
            "no_fio": no_fio,
            "reader": report,
        },
        "settings": {
            "pack_bytes": pack_bytes,
            "is_pack_given": settings.pack_dir is not None,
            "depth": DEPTH,
            "corpus": CORPUS,
            "num_tokens": settings.num_tokens,
            "prefill_rows": prefill.num_rows,
            "prefill_unique_blocks": prefill.num_reads,
            "rounds": settings.plan.rounds,
        },
        "ratios": ratios(samples, no_fio),
        "rates": rates(samples),
        "samples": [sample.to_json() for sample in samples],
    }


def lines_of(result: dict[str, Any]) -> list[str]:
    """Return the result as lines of text."""
    lines = [f"{'ratio':45} {'measured':>9} {'target':>8}"]
    for name, ratio in result["ratios"].items():
        value = "absent" if ratio["value"] is None else f"{ratio['value']:.2f}"
        verdict = ratio.get("reason") or ("met" if ratio["met"] else "missed")
        lines.append(f"{name:45} {value:>9} {ratio['target']:>8} {verdict}")
    lines += [
        "",
        f"{'':8}{'rows':>7} {'method':9} {'rows/s':>9} {'p50 us':>9} {'p99 us':>9} {'CPU us/row':>10}",
    ]
    for row in result["rates"]:
        p50, p99 = ("" if row[key] is None else f"{row[key]:.0f}" for key in ("p50_us", "p99_us"))
        lines.append(
            f"{row['kind']:8}{row['batch']:>7} {row['method']:9} {row['rows_per_s']:>9,} {p50:>9} {p99:>9} "
            f"{row['cpu_us_per_row']:>10.2f}"
        )
    return lines


def _first_layer(pack_dir: Path) -> tuple[EngramGeometry, list[Path]]:
    """Return the geometry and the files of a pack's first layer, of which every column must be there."""
    manifest = read_manifest(pack_dir)
    geometry, layer = manifest.identity.geometry, manifest.identity.geometry.spec.layer_ids[0]
    columns = manifest.columns(layer)
    if len(columns) != geometry.spec.num_columns:
        raise EngramError(
            f"{pack_dir} holds {len(columns)} of the {geometry.spec.num_columns} columns of layer {layer}; the "
            "benchmark asks for all of them"
        )
    return geometry, [pack_dir / manifest.identity.layout(layer, column).file_name for column in columns]


def _fio(files: list[Path]) -> tuple[Fio | None, str | None]:
    """Return fio, or why there is none."""
    try:
        return Fio(files), None
    except EngramError as error:
        return None, error.message


__all__ = ["SCHEMA", "Settings", "lines_of", "run"]
