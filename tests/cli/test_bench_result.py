"""Results carry their provenance, are never overwritten, and read back as they were written."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_process import CHECKPOINT, Done, deskfleet

from deskfleet.bench.engine import DecodeSuite
from deskfleet.bench.provenance import Provenance
from deskfleet.bench.report import render_report
from deskfleet.bench.result import Result, Sample, result_path
from deskfleet.errors import ConfigError

FACTS: dict[str, Any] = {
    "command": "deskfleet bench engine tiny",
    "argv": ("python", "-m", "deskfleet"),
    "date": "2026-01-31T12:00:00+00:00",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "is_dirty": True,
    "python": "3.11.7",
    "packages": {"torch": "2.13.0"},
    "platform": "Linux",
    "cpu": "A CPU",
    "num_cores": 2,
    "memory_bytes": 2**33,
    "load_average": (0.5, 0.25, 0.125),
}


def sample(tp_size: int, batch: int, number: int, rate: float) -> Sample:
    return Sample(
        name="cpu-decode",
        tp_size=tp_size,
        batch=batch,
        round=number,
        num_tokens=64 * batch,
        seconds_s=64 * batch / rate,
        aggregate_tok_s=rate,
        stream_tok_s=(rate / batch,) * batch,
    )


def result() -> Result:
    return Result(
        name="cpu-decode",
        provenance=Provenance(**FACTS),
        settings={"checkpoint": "tiny", "rounds": 3, "num_tokens": 64},
        warm_up=(sample(1, 4, 0, 1.0),),
        samples=(sample(1, 4, 1, 30.0), sample(1, 4, 2, 10.0), sample(1, 4, 3, 20.0), sample(2, 1, 1, 7.0)),
    )


def test_a_result_needs_provenance_and_samples() -> None:
    with pytest.raises(TypeError, match="provenance"):
        Result(name="x", settings={}, warm_up=(), samples=(sample(1, 1, 1, 1.0),))  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="no samples"):
        Result(name="x", provenance=Provenance(**FACTS), settings={}, warm_up=(), samples=())
    for name in FACTS:
        with pytest.raises(TypeError, match=name):
            Provenance(**{key: value for key, value in FACTS.items() if key != name})
    with pytest.raises(ConfigError, match="needs its command"):
        Provenance(**{**FACTS, "command": ""})


def test_warm_up_is_kept_but_not_counted() -> None:
    spread = result().aggregate(1, 4)
    assert (spread.median, spread.least, spread.greatest, spread.num_samples) == (20.0, 10.0, 30.0, 3)
    assert result().per_stream(1, 4).num_samples == 12
    assert result().configurations() == [(1, 4), (2, 1)]


def test_a_file_is_read_back_and_never_overwritten(tmp_path: Path) -> None:
    path = result_path(tmp_path / "results", "cpu-decode", date(2026, 1, 31))
    result().write(path)
    before = path.read_bytes()
    assert path.name == "2026-01-31-cpu-decode.json"
    assert Result.read(path) == result()
    with pytest.raises(ConfigError, match="never overwritten"):
        result().write(path)
    assert path.read_bytes() == before
    assert result_path(path.parent, "cpu-decode", date(2026, 1, 31)).name == "2026-01-31-cpu-decode-2.json"
    path.write_bytes(before.replace(b'"schema": 1', b'"schema": 2'))
    with pytest.raises(ConfigError, match="schema 2"):
        Result.read(path)


def test_report(tmp_path: Path) -> None:
    assert render_report([]) == "Nothing has been measured yet.\n"
    path = tmp_path / "2026-01-31-cpu-decode.json"
    result().write(path)
    text = render_report([path])
    assert "| 1 | 4 | 20.0 [10.0-30.0] | 5.0 [2.5-7.5] |\n" in text
    assert "commit `0123456789ab` with uncommitted changes" in text
    assert "load average 0.50, 0.25, 0.12" in text
    assert "`bench/results/2026-01-31-cpu-decode.json`" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp", "1,1"), "tp_sizes (1, 1)"),
        (("--batch", "0"), "batches (0,)"),
        (("--tokens", "1"), "num_tokens 1"),
        (("--rounds", "0"), "rounds 0"),
        (("--tp", "one"), "--tp is 'one'"),
    ],
)
def test_bench_refuses(call: Callable[..., Done], flags: tuple[str, ...], message: str) -> None:
    done = call("bench", "engine", CHECKPOINT, *flags)
    assert done.code == 2
    assert done.err.startswith(f"error: {message}")


def test_bench_engine(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    # So many tokens that two streams overlap also when the bench is preempted between its two requests, while the
    # engine goes on with the first: it refuses to time streams that never decoded together.
    num_tokens = 30
    flags = ("--tp", "1", "--batch", "1,2", "--rounds", "1", "--prompt-tokens", "4")
    done = deskfleet(
        "bench", "engine", CHECKPOINT, *flags, "--tokens", str(num_tokens), "--out", out, "--json"
    )
    assert done.code == 0, done.err
    kept = Result.read(out)
    assert msgspec.convert(done.object, Result) == kept
    assert [(s.batch, s.round) for s in kept.warm_up] == [(1, 0), (2, 0)]
    assert [(s.batch, s.round) for s in kept.samples] == [(1, 1), (2, 1)]
    assert kept.samples[0].num_tokens == num_tokens - 1
    for taken in kept.samples:
        assert taken.aggregate_tok_s == pytest.approx(sum(taken.stream_tok_s))
    assert kept.provenance.command.startswith("deskfleet bench engine ")
    assert kept.provenance.packages["torch"]
    assert kept.settings["num_layers"] == 10


def test_capture_knows_this_checkout() -> None:
    provenance = Provenance.capture("x", ["x"])
    assert provenance.commit is None or len(provenance.commit) == 40
    assert provenance.num_cores >= 1
    assert provenance.packages["deskfleet"]


def test_suite_defaults_are_the_ones_promised() -> None:
    suite = DecodeSuite(CHECKPOINT)
    assert (suite.tp_sizes, suite.batches) == ((1, 2), (1, 4))
