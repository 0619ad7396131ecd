"""The row store's benchmark: what it asks for, what it makes of samples, and one small run from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from deskfleet.bench.engram import ReaderResult, is_reader_result, latest, render_page, render_plot
from deskfleet.bench.provenance import Provenance
from deskfleet.cli.app import main as deskfleet_command
from deskfleet.errors import ConfigError
from deskfleet_engram.bench import __main__ as command
from deskfleet_engram.bench import fio as fio_module
from deskfleet_engram.bench import run as run_module
from deskfleet_engram.bench.checkpoint import COMPRESSED_VOCAB_SIZE, LAYER, make_checkpoint
from deskfleet_engram.bench.corpus import Corpus, blocks_of, distinct_batches
from deskfleet_engram.bench.figures import RATIOS, rates, ratios
from deskfleet_engram.bench.fio import Fio
from deskfleet_engram.bench.measure import Plan, Sample
from deskfleet_engram.bench.readers import NativeLookup, lookups
from deskfleet_engram.errors import EngramError
from deskfleet_engram.pack import pack
from deskfleet_engram.source import Source
from deskfleet_engram.unpack import unpack

SMALL = 12 << 20
TINY = Plan(2, 0.02, 3, 0.05, 64, 256, 0.05, 2, 1000)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return make_checkpoint(tmp_path_factory.mktemp("bench") / "model", SMALL)


@pytest.fixture(scope="module")
def pack_dir(source: Source) -> Path:
    directory = source.directory.parent / "pack"
    pack(source, directory)
    return directory


def test_a_pack_has_about_the_size_asked_for(pack_dir: Path) -> None:
    size = sum(path.stat().st_size for path in pack_dir.glob("L*/*.egp"))
    assert SMALL * 0.95 < size < SMALL * 1.1


def test_every_way_of_reading_gives_the_rows_of_the_pack(source: Source, pack_dir: Path) -> None:
    ids = Corpus.read(64, COMPRESSED_VOCAB_SIZE).rows(source.geometry, 8, 2).reshape(-1)
    rows = {row.row: row.codes + row.scales for row in unpack(pack_dir, LAYER, ids.tolist())}
    expected = b"".join(rows[row] for row in ids.tolist())
    with lookups(pack_dir, source.geometry, len(ids), cache_bytes=0) as (methods, files):
        assert set(methods) == {"native", "direct96", "preadv32", "memmap"}
        for name, lookup in methods.items():
            files.drop()
            lookup(ids)
            assert lookup.out.tobytes() == expected, name  # type: ignore[attr-defined]
        assert isinstance(methods["native"], NativeLookup)
        assert methods["native"].num_reads == len(np.unique(_blocks(source, ids)))


def _blocks(source: Source, ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> object:
    return blocks_of(source.geometry, source.tables[0].rows, ids)


def test_rows_of_a_corpus_do_not_depend_on_where_they_begin(source: Source) -> None:
    corpus = Corpus.read(100, COMPRESSED_VOCAB_SIZE)
    whole = corpus.rows(source.geometry, 0, 100)
    assert np.array_equal(corpus.rows(source.geometry, 1, 20), whole[1:21])
    assert np.array_equal(corpus.rows(source.geometry, 50, 20), whole[50:70])


def test_batches_keep_the_order_and_never_name_a_block_twice() -> None:
    rows = np.array([1, 2, 3, 1, 4, 5, 6], dtype=np.int64)
    batches = distinct_batches(rows, rows // 2, 2)  # blocks 0 1 1 0 2 2 3
    assert batches.tolist() == [[1, 2], [3, 1], [4, 6]]


def _sample(kind: str, method: str, number: int, batch: int, elapsed_s: float) -> Sample:
    p50 = elapsed_s / 10 * 1e6
    return Sample(
        kind, method, number, batch, 480, 480, elapsed_s, elapsed_s / 2, p50, 2 * p50, (round(p50),)
    )


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    samples = []
    for number, (native, fio) in enumerate([(1.0, 1.0), (10.0, 9.0), (2.0, 1.6)], start=1):
        samples += [_sample("batch", "native", number, 48, native), _sample("batch", "fio", number, 48, fio)]
    found = ratios(samples, None)
    assert found["batch_48_rate_ratio_to_fio"]["value"] == pytest.approx(0.9)
    assert found["batch_48_rate_ratio_to_fio"]["met"] is True
    assert found["batch_48_p50_ratio_to_fio"]["value"] == pytest.approx(1.111)
    cpu = [(s / 960) / (1.2 * f / 960 + 0.5e-6) for s, f in [(1.0, 1.0), (10.0, 9.0), (2.0, 1.6)]]
    assert found["batch_48_cpu_ratio_to_fio_allowance"]["value"] == pytest.approx(sorted(cpu)[1], abs=1e-3)


def test_a_target_that_is_missed_is_said_to_be_missed() -> None:
    samples = [_sample("batch", "native", 1, 48, 2.0), _sample("batch", "fio", 1, 48, 1.0)]
    found = ratios(samples, None)
    assert found["batch_48_rate_ratio_to_fio"]["met"] is False
    assert found["batch_48_p50_ratio_to_fio"] == {
        "value": 2.0,
        "target": "<= 1.5",
        "met": False,
        "meaning": "median latency of 48 rows, beside that of fio's batches",
    }


def test_a_missed_target_is_explained_from_its_samples(tmp_path: Path) -> None:
    """How far the rounds lay apart, and what fio would have reached beside the same."""
    samples = []
    for number, (native, fio) in enumerate([(2.0, 1.0), (1.0, 1.0), (2.0, 2.0)], start=1):
        samples += [_sample("batch", "native", number, 48, native), _sample("batch", "fio", number, 48, fio)]
        samples += [_sample("batch", "direct96", number, 48, 3.0)]
        samples += [_sample("alone", "native", number, 48, 1.0), _sample("mixed", "native", number, 48, 2.0)]
    lines = {line.split("`")[1]: line for line in _page(samples, tmp_path).splitlines() if "missed" in line}
    assert lines["batch_48_p50_ratio_to_direct96"].endswith(
        "| >= 3 | 1.50 | missed: the disk leaves no more room; the rounds gave 1.50 to 3.00; "
        "fio's own reads in our place: 3.00 |"
    )
    assert (
        "fio's own 48, with nothing beside them, was 200,000 to 400,000 us"
        in (lines["decode_p99_ratio_with_prefetch"])
    )
    assert lines["decode_p99_ratio_with_prefetch"].endswith("of p50 the ratio is 2.00 |")


def _page(samples: list[Sample], directory: Path) -> str:
    machine = {"load_average": [0.0], "load_average_after": [0.0], "fio": "fio", "reader": {}}
    measured = {
        "machine": machine,
        "settings": dict.fromkeys(["pack_bytes", "prefill_rows", "prefill_unique_blocks", "rounds"], 1)
        | {"corpus": "text"},
        "ratios": ratios(samples, None),
        "rates": [],
        "samples": [sample.to_json() for sample in samples],
    }
    path = directory / "2026-01-01-engram-reader.json"
    kept = ReaderResult(name="engram-reader", provenance=Provenance.capture("x", ["x"]), measurement=measured)
    kept.write(path)
    return render_page(path, "plot.svg")


def test_without_fio_its_ratios_are_absent_with_the_reason() -> None:
    samples = [_sample("batch", method, 1, 48, 1.0) for method in ("native", "direct96", "preadv32")]
    found = ratios(samples, "fio is not installed")
    assert found["batch_48_rate_ratio_to_fio"]["value"] is None
    assert found["batch_48_rate_ratio_to_fio"]["met"] is None
    assert found["batch_48_rate_ratio_to_fio"]["reason"] == "fio is not installed"
    assert found["batch_48_best_ratio_to_direct96"]["value"] == 1.0


def test_a_fio_that_is_missing_or_fails_is_an_engram_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngramError, match="not installed"):
        Fio([tmp_path / "file"])
    program = tmp_path / "fio"
    program.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(EngramError, match="broken"):
        Fio([tmp_path / "file"])


def test_the_latency_of_a_batch_is_that_of_its_slowest_read(tmp_path: Path) -> None:
    lines = [f"1, {us * 1000}, 0, 4096, 0\n" for us in (10, 30, 20, 5, 6, 7, 99)]
    (tmp_path / "reads_lat.1.log").write_text("".join(lines))
    assert (fio_module._batch_latencies(tmp_path, 3) * 1e6).round().tolist() == [30, 7]


@pytest.fixture
def no_fio(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on machines with fio and without."""

    def refuse(files: object) -> None:
        raise EngramError("fio is not installed")

    monkeypatch.setattr(run_module, "Fio", refuse)


def test_a_run_from_end_to_end(
    no_fio: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Plan, "quick", classmethod(lambda cls: TINY))
    out = tmp_path / "result.json"
    arguments = [
        "--quick",
        "--json",
        "--directory",
        str(tmp_path / "work"),
        "--size",
        "0.012",
        "--out",
        str(out),
    ]
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    result = json.loads(printed)
    assert json.loads(out.read_text()) == result
    assert set(result["ratios"]) == {ratio.name for ratio in RATIOS}
    for name, ratio in result["ratios"].items():
        assert result[name] == ratio["value"], "each ratio's number is found by its name alone"
        assert "ratio" in name
        assert (ratio["value"] is None) == (ratio["met"] is None) == ("reason" in ratio), name
        assert (ratio["value"] is None) == ("fio" in name), name
    assert result["machine"]["no_fio"] == "fio is not installed"
    assert all(sample["elapsed_s"] > 0 for sample in result["samples"])
    assert result["settings"]["prefill_rows"] == 64 * 24
    assert not list((tmp_path / "work").iterdir())  # the pack is gone

    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2

    page_of(result, tmp_path)


def test_a_given_pack_is_measured_where_it_lies(
    no_fio: None, source: Source, pack_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = run_module.Settings(TINY, 0, tmp_path, 5000, pack_dir)
    before = sorted(pack_dir.rglob("*"))
    result = run_module.run(settings)
    assert sorted(pack_dir.rglob("*")) == before
    assert result["ratios"]["pack_ratio_to_dd"]["reason"] == "not measured"
    assert result["ratios"]["decode_p99_ratio_with_prefetch"]["value"] > 0

    part = tmp_path / "part"
    pack(source, part, columns=[(LAYER, 0)])
    assert command.main(["--quick", "--directory", str(tmp_path), "--pack", str(part)]) == 3
    assert "1 of the 24 columns" in capsys.readouterr().err


def page_of(result: dict[str, object], directory: Path) -> None:
    """Result file, page and picture of a measurement."""
    kept = ReaderResult(name="engram-reader", provenance=Provenance.capture("x", ["x"]), measurement=result)
    path = directory / "2026-01-02-engram-reader.json"
    kept.write(path)
    with pytest.raises(ConfigError, match="never overwritten"):
        kept.write(path)
    assert latest([path, directory / "2026-01-03-cpu-decode.json"]) == path
    page = render_page(path, "plot.svg")
    assert page.count("fio is not installed") == sum("fio" in ratio.name for ratio in RATIOS)
    assert "![rows per second by rows per lookup, for each way of reading](plot.svg)" in page
    picture = ElementTree.fromstring(render_plot(path))
    lines = [line.get("points") for line in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len((line or "").split()) for line in lines] == [6, 0, 6, 6, 6]  # fio has no points here


def test_the_latest_result_is_the_one_with_the_highest_number_of_the_last_day() -> None:
    names = [
        "2026-01-02-engram-reader-10.json",
        "2026-01-02-engram-reader-9.json",
        "2026-01-01-engram-reader.json",
    ]
    assert latest([Path(name) for name in names]) == Path(names[0])
    assert latest([]) is None
    assert not is_reader_result(Path("2026-01-02-cpu-decode.json"))


def test_rates_are_medians_over_rounds() -> None:
    samples = [
        replace(_sample("batch", "native", number, 6, value), num_reads=240)
        for number, value in ((1, 1.0), (2, 3.0), (3, 2.0))
    ]
    (row,) = rates(samples)
    assert (row["rows_per_s"], row["reads_per_s"], row["p50_us"], row["p99_us"]) == (240, 120, 2e5, 4e5)
    assert row["cpu_us_per_row"] == pytest.approx(1e6 / 480, abs=0.01)


def test_bad_sizes_kept_files_and_missing_measurements_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["--size", "0"])
    assert stopped.value.code == 2
    kept = tmp_path / "kept.json"
    kept.touch()
    assert deskfleet_command(["bench", "engram", "--out", str(kept)]) == 2
    assert "never overwritten" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no samples"):
        ReaderResult(name="engram-reader", provenance=Provenance.capture("x", ["x"]), measurement={})
