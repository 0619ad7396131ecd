"""Two results: what differs is named, noise is not a difference, and a real one is found. About 12 s."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_endpoint import Behaviour
from load_runs import PROVENANCE, measure
from msgspec.structs import replace
from test_load_formats import batch, result, stream

from deskfleet.bench.compare import NotComparable, compare
from deskfleet.bench.load.record import Batch, Caveat, LoadResult, Setup
from deskfleet.bench.published import QUANTITIES, beside_published, parse_figures, published_figures
from deskfleet.bench.series import Comparable, read_comparable
from deskfleet.errors import ConfigError

COMMAND = (sys.executable, "-c", "import sys; from deskfleet.cli import main; sys.exit(main())")


def rated(random: np.random.Generator, rate: float, *, rounds: int = 5, noise: float = 0.03) -> LoadResult:
    """Rounds of two streams. Half of the noise is a round's, shared by its streams."""
    batches = []
    for number in range(1, rounds + 1):
        shared = random.normal(1, noise)
        streams = [stream(0.2, 0.2 + 100 / (rate * shared * random.normal(1, noise)), 101) for _ in range(2)]
        batches.append(batch(*streams, number=number))
    return result(*batches)


def comparable(tmp_path: Path, measured: LoadResult, name: str = "a.json", **conditions: Any) -> Comparable:
    path = tmp_path / name
    path.unlink(missing_ok=True)
    replace(measured, conditions={**measured.conditions, **conditions}).write(path)
    return read_comparable(path)


def verdicts(tmp_path: Path, a: LoadResult, b: LoadResult) -> dict[str, str]:
    found = compare(comparable(tmp_path, a), comparable(tmp_path, b, "b.json"))
    return {row.unit: row.verdict for row in found.rows}


def test_the_same_twice_is_noise_nearly_always(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    said = [verdicts(tmp_path, rated(random, 50), rated(random, 50))["tok/s per stream"] for _ in range(25)]
    assert said.count("noise") >= 21  # 95 % of 25, and room for five rounds being few
    assert "too few" not in said


def test_a_tenth_more_is_found_in_both_directions(tmp_path: Path) -> None:
    random = np.random.default_rng(8)
    for _ in range(4):
        slow, fast = rated(random, 50, noise=0.01), rated(random, 55, noise=0.01)
        assert verdicts(tmp_path, slow, fast)["tok/s per stream"] == "better"
        assert verdicts(tmp_path, slow, fast)["TPOT ms"] == "better"  # lower, and better
        assert verdicts(tmp_path, fast, slow)["tok/s per stream"] == "worse"


def test_one_disturbed_round_is_not_many_disturbed_samples(tmp_path: Path) -> None:
    """64 streams of one bad round out of four are one disturbance: streams of a round are not independent."""
    random = np.random.default_rng(9)

    def many(rates: tuple[float, ...]) -> LoadResult:
        batches = []
        for number, rate in enumerate(rates, 1):
            streams = [stream(0.2, 0.2 + 100 / (rate * random.normal(1, 0.002)), 101) for _ in range(64)]
            batches.append(batch(*streams, number=number))
        return result(*batches)

    assert verdicts(tmp_path, many((50, 50, 50, 50)), many((50, 50, 38, 38)))["tok/s per stream"] == "noise"


def test_three_rounds_are_too_few_to_say(tmp_path: Path) -> None:
    random = np.random.default_rng(10)
    a, b = rated(random, 50, rounds=3), rated(random, 90, rounds=3)
    found = compare(comparable(tmp_path, a), comparable(tmp_path, b, "b.json"))
    assert {row.verdict for row in found.rows} == {"too few"}
    assert any("--rounds 5" in note for note in found.notes)


def test_unequal_conditions_are_refused_and_all_of_them_named(tmp_path: Path) -> None:
    measured = rated(np.random.default_rng(1), 50)
    a = comparable(tmp_path, measured, mtu=9000, block=5, profile="dcp2", boot=100)
    b = comparable(tmp_path, measured, "b.json", mtu=1024, block=3, profile="dcp2", boot=200)
    with pytest.raises(NotComparable) as refused:
        compare(a, b)
    assert refused.value.exit_code == 1
    assert "mtu: 9000 against 1024; block: 5 against 3" in refused.value.message
    assert "profile" not in refused.value.message
    assert "boot" not in refused.value.message
    found = compare(a, b, vary=("mtu", "block"))
    assert [str(each) for each in found.varied] == ["mtu: 9000 against 1024", "block: 5 against 3"]
    assert "boot: 100 against 200" in [str(each) for each in found.told]
    with pytest.raises(NotComparable, match="block: 5 against 3"):
        compare(a, b, vary=("mtu",))
    with pytest.raises(ConfigError, match="'profile' does not differ"):
        compare(a, b, vary=("profile",))


def test_a_condition_that_only_one_has_recorded_is_a_difference(tmp_path: Path) -> None:
    measured = rated(np.random.default_rng(1), 50)
    with pytest.raises(NotComparable, match="fabric: switched against not recorded"):
        compare(comparable(tmp_path, measured, fabric="switched"), comparable(tmp_path, measured, "b.json"))
    other = replace(measured, provenance=replace(PROVENANCE, cpu="Another CPU"))
    with pytest.raises(NotComparable, match=r"machine: A CPU, 2 cores, 8\.0 GiB against Another CPU"):
        compare(comparable(tmp_path, measured), comparable(tmp_path, other, "b.json"))


def test_refused_numbers_are_not_compared(tmp_path: Path) -> None:
    good = rated(np.random.default_rng(1), 50)
    bad = replace(
        good,
        batches=tuple(replace(each, refusals=(Caveat("token-mismatch", "half"),)) for each in good.batches),
    )
    found = compare(comparable(tmp_path, good), comparable(tmp_path, bad, "b.json"))
    assert not found.rows
    assert found.only_in_a
    assert "b.json refused decode, prose, 2 streams, greedy: token-mismatch" in found.notes


def test_prefill_across_boots_is_no_evidence(tmp_path: Path) -> None:
    """10 to 24 % between boots of one set-up have been seen: the note says so, where an interval alone would not."""

    def climb(ttft_s: float) -> LoadResult:
        random = np.random.default_rng(4)
        setup = Setup(part="prefill", case="text", context=1000)
        times = [ttft_s * random.normal(1, 0.004) for _ in range(5)]
        return result(
            *(
                Batch(
                    setup=setup,
                    round=n,
                    wall_s=1,
                    streams=(replace(stream(t, t + 1, 2), num_prompt_tokens=1000),),
                )
                for n, t in enumerate(times, 1)
            )
        )

    a = comparable(tmp_path, climb(1.0), boot=1)
    b = comparable(tmp_path, climb(0.85), "b.json", boot=2)
    found = compare(a, b)
    assert {row.verdict for row in found.rows} == {"better"}
    assert any("different boots" in note for note in found.notes)
    same_boot = comparable(tmp_path, climb(0.85), "b.json", boot=1)
    assert not any("different boots" in note for note in compare(a, same_boot).notes)


def test_results_that_were_kept_before_are_compared_too(results_directory: Path) -> None:
    path = results_directory / "2026-11-30-cpu-decode.json"
    found = compare(read_comparable(path), read_comparable(path))
    assert {row.verdict for row in found.rows} == {"noise"}
    assert {row.ratio for row in found.rows} == {1.0}
    with pytest.raises(NotComparable, match="'cpu-decode'"):
        compare(read_comparable(path), read_comparable(results_directory / "2026-11-30-speculation.json"))
    with pytest.raises(ConfigError, match="'engram-reader', which cannot be compared"):
        read_comparable(results_directory / "2026-11-30-engram-reader.json")


@pytest.fixture
def results_directory() -> Path:
    return Path(__file__).parents[2] / "bench" / "results"


def test_published_figures_carry_source_and_conditions() -> None:
    figures = published_figures()
    assert len(figures) > 60
    assert all(figure.source and figure.conditions.get("hardware") for figure in figures)
    assert {figure.quantity for figure in figures} == set(QUANTITIES)
    by_row = {(f.source, f.quantity, f.case, f.at): f for f in figures}
    assert by_row["S2-77", "decode_aggregate_tok_s", "prose", 16].value == 342.7
    assert by_row["S2-77", "decode_stream_tok_s", "prose", 2].value == 61.9
    assert "one repeated token" in (by_row["S2-78", "prefill_tok_s", "filler", 65536].flaw or "")
    with pytest.raises(ConfigError, match="S9: there is no quantity 'speed'"):
        parse_figures('[[figures]]\nsource="S9"\nquantity="speed"\nover=[1]\nvalues.a=[1]\nconditions={}\n')
    with pytest.raises(ConfigError, match="S9: ValueError"):
        parse_figures(
            '[[figures]]\nsource="S9"\nquantity="ttft_ms"\nover=[1]\nvalues.a=[1,2]\nconditions={}\n'
        )


def test_a_published_figure_stands_beside_ours_with_what_is_unlike() -> None:
    measured, _ = measure(Behaviour(), kinds=("prose",), concurrency=(1,))
    rows = [row for row in beside_published(measured) if row.published.source == "S2-77"]
    assert {row.published.quantity for row in rows} == {"decode_aggregate_tok_s", "decode_stream_tok_s"}
    for row in rows:
        assert "hardware: 4x DGX Spark, not recorded here" in row.differences
        assert "engine: SGLang, here vLLM" in row.differences
        assert "num_tokens: 256, here 48" in row.differences
        assert not any(difference.startswith(("sampling", "effort")) for difference in row.differences)
        assert row.ratio == pytest.approx(row.ours / row.published.value)


def test_the_command_refuses_and_names_both(tmp_path: Path, run: Callable[..., Any]) -> None:
    measured = rated(np.random.default_rng(1), 50)
    a = comparable(tmp_path, measured, mtu=9000, block=5)
    b = comparable(tmp_path, measured, "b.json", mtu=1024, block=3)
    refused = run("compare", a.path, b.path)
    assert refused.returncode == 1
    assert "mtu: 9000 against 1024; block: 5 against 3" in refused.stderr
    assert "--vary mtu --vary block" in refused.stderr
    done = run("compare", a.path, b.path, "--vary", "mtu", "--vary", "block")
    assert done.returncode == 0, done.stderr
    assert "within noise" in done.stdout
    assert "under test: mtu: 9000 against 1024" in done.stdout
    shown = run("published", a.path)
    assert "S2-77, tok/s per stream, prose, 2 streams: published 61.9" in shown.stdout
    assert "hardware: 4x DGX Spark, not recorded here" in shown.stdout


@pytest.fixture
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        argv = [*COMMAND, "bench", *map(str, arguments)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)

    return call
