"""Comparisons of ways: ratios are taken within a round, files read back, and each way is what it is called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from cli_process import CHECKPOINT, Done, deskfleet
from test_bench_result import FACTS

from deskfleet.bench.provenance import Provenance
from deskfleet.bench.report import render_report
from deskfleet.bench.result import Result
from deskfleet.bench.serving import (
    PREFIX,
    SPECULATION,
    PrefixSuite,
    SpeculationSuite,
    WaySample,
    WaysResult,
    is_ways_result,
)
from deskfleet.errors import ConfigError


def sample(way: str, number: int, seconds_s: float, *, num_tokens: int = 1, **counts: int) -> WaySample:
    return WaySample(way=way, round=number, num_tokens=num_tokens, seconds_s=seconds_s, counts=counts)


def prefix_result() -> WaysResult:
    """A machine that became three times slower in round 2."""
    cold = {"num_prefix_hits": 0, "num_replayed_tokens": 0}
    found = {"num_prefix_hits": 96, "num_replayed_tokens": 16}
    return WaysResult(
        name=PREFIX,
        provenance=Provenance(**FACTS),
        settings={"checkpoint": "tiny", "rounds": 2},
        warm_up=(sample("cold", 0, 9.0, **cold), sample("warm", 0, 9.0, **found)),
        samples=(
            sample("cold", 1, 1.0, **cold),
            sample("warm", 1, 0.25, **found),
            sample("cold", 2, 3.0, **cold),
            sample("warm", 2, 0.6, **found),
        ),
    )


def speculation_result() -> WaysResult:
    none = {"num_verify_steps": 0, "num_drafted": 0, "num_accepted": 0}
    some = {"num_verify_steps": 20, "num_drafted": 40, "num_accepted": 10}
    return WaysResult(
        name=SPECULATION,
        provenance=Provenance(**FACTS),
        settings={"checkpoint": "tiny", "rounds": 1},
        warm_up=(),
        samples=(
            sample("off", 1, 3.0, num_tokens=30, **none),
            sample("2 drafts", 1, 4.0, num_tokens=30, **some),
        ),
    )


def test_ratios_are_taken_within_a_round() -> None:
    spread = prefix_result().speedup("warm")
    assert (spread.least, spread.greatest) == pytest.approx((4.0, 5.0))
    assert prefix_result().ways() == ["cold", "warm"]


def test_report(tmp_path: Path) -> None:
    for result in (prefix_result(), speculation_result()):
        path = tmp_path / f"2026-01-31-{result.name}.json"
        result.write(path)
        assert is_ways_result(path)
        assert WaysResult.read(path) == result
        with pytest.raises(ConfigError, match="never overwritten"):
            result.write(path)
    text = render_report(sorted(tmp_path.iterdir()))
    assert "| warm | 425 [250-600] | 4.50 [4.00-5.00] | 96 | 16 |\n" in text
    assert "| off | 10.0 [10.0-10.0] | 1.00 [1.00-1.00] | 1.00 | - |\n" in text
    assert "| 2 drafts | 7.5 [7.5-7.5] | 0.75 [0.75-0.75] | 1.50 | 25.0% |\n" in text


def test_a_result_is_one_of_those_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'other' of schema 1"):
        msgspec.structs.replace(prefix_result(), name="other")
    with pytest.raises(ConfigError, match="no samples"):
        msgspec.structs.replace(prefix_result(), samples=())
    path = tmp_path / "2026-01-31-prefix-ttft.json"
    prefix_result().write(path)
    with pytest.raises(ConfigError, match="cannot read"):
        Result.read(path)


@pytest.mark.parametrize(
    ("suite", "flags", "message"),
    [
        ("prefix", ("--turn-tokens", "0"), "num_turn_tokens 0"),
        ("prefix", ("--rounds", "0"), "rounds 0"),
        ("speculation", ("--tokens", "1"), "num_tokens 1"),
        ("speculation", ("--drafts", "1,2"), "num_drafts (1, 2)"),
        ("speculation", ("--drafts", "0,1,1"), "num_drafts (0, 1, 1)"),
        ("speculation", ("--drafts", "0,6"), "speculation: k is 6"),
    ],
)
def test_bench_refuses(call: Callable[..., Done], suite: str, flags: tuple[str, ...], message: str) -> None:
    done = call("bench", suite, CHECKPOINT, *flags)
    assert done.code == 2
    assert done.err.startswith(f"error: {message}")


def test_bench_prefix(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    flags = ("--prompt-tokens", "192", "--turn-tokens", "5", "--rounds", "1", "--threads-per-rank", "1")
    done = deskfleet("bench", "prefix", CHECKPOINT, *flags, "--out", out, "--json")
    assert done.code == 0, done.err
    kept = WaysResult.read(out)
    assert msgspec.convert(done.object, WaysResult) == kept
    found = {s.way: (s.counts["num_prefix_hits"], s.counts["num_replayed_tokens"]) for s in kept.samples}
    # A window of 16 tokens; an exact replay has 15 for each of 10 layers.
    assert found == {
        "cold": (0, 0),
        "window kept": (192, 0),
        "window replayed": (192, 16),
        "replayed exactly": (192, 150),
    }
    assert [s.round for s in kept.warm_up] == [0] * 4


@pytest.mark.slow  # four engines, to see one sentence
def test_bench_prefix_refuses_what_it_would_not_measure() -> None:
    """150 tokens to run again are more than a prompt of 100 has, so nothing of it is used."""
    flags = ("--prompt-tokens", "100", "--rounds", "1", "--threads-per-rank", "1")
    done = deskfleet("bench", "prefix", CHECKPOINT, *flags)
    assert done.code == 3
    assert "0 tokens were found" in done.err
    assert "hint: ask for more prompt tokens" in done.err


def test_bench_speculation(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    flags = ("--drafts", "0,3", "--tokens", "8", "--rounds", "1", "--threads-per-rank", "1")
    done = deskfleet("bench", "speculation", CHECKPOINT, *flags, "--out", out, "--json")
    assert done.code == 0, done.err
    kept = WaysResult.read(out)
    off, on = kept.samples
    assert (off.way, on.way) == ("off", "3 drafts")
    assert off.counts["num_drafted"] == 0 < on.counts["num_drafted"]
    assert off.num_tokens == 7
    assert kept.settings["num_tokens"] == 8


def test_bench_speculation_of_a_trained_checkpoint(tmp_path: Path) -> None:
    """Questions take turns, and end where the answer does; nearly every draft is right."""
    out = tmp_path / "2026-01-31-speculation.json"
    asked = ("--ask", "Count from 1 to 12.", "--ask", "Count from 30 to 45.")
    flags = (*asked, "--drafts", "0,5", "--tokens", "200", "--rounds", "2", "--threads-per-rank", "1")
    done = deskfleet("bench", "speculation", "pocket", *flags, "--out", out, "--json")
    assert done.code == 0, done.err
    kept = WaysResult.read(out)
    second, second_drafted, first, first_drafted = kept.samples  # warm-up has asked the first
    assert first.num_tokens < second.num_tokens < 100, "it has more to count"
    for sample in (first_drafted, second_drafted):
        assert sample.counts["num_accepted"] > 0.5 * sample.counts["num_drafted"] > 0
    text = render_report([out])
    assert "Checkpoint `pocket`" in text
    assert "2 questions in turn" in text


def test_suite_defaults_are_the_ones_promised() -> None:
    assert SpeculationSuite(CHECKPOINT).num_drafts == (0, 1, 2, 3, 4, 5)
    assert PrefixSuite(CHECKPOINT).num_prompt_tokens == 1024
