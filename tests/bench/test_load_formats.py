"""Results as tables, as vLLM's JSON, as files; percentiles and rates by their definitions. About 3 s."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from bench_endpoint import Behaviour
from load_runs import PROVENANCE, measure

from deskfleet.bench.load.counters import parse_counters
from deskfleet.bench.load.machine import LOCAL, nodes_in
from deskfleet.bench.load.record import Batch, LoadResult, Setup, Stream, is_load_result
from deskfleet.bench.load.summary import summarise
from deskfleet.bench.load.tables import BENCHY_HEAD, benchy_table
from deskfleet.bench.load.vllm_json import vllm_object
from deskfleet.bench.result import result_path
from deskfleet.errors import ConfigError


def stream(first_s: float, finish_s: float, tokens: int, *, gaps_s: tuple[float, ...] = ()) -> Stream:
    return Stream(
        case="prose",
        due_s=0.0,
        sent_s=0.0,
        first_s=first_s,
        finish_s=finish_s,
        num_prompt_tokens=10,
        num_completion_tokens=tokens,
        max_tokens=tokens,
        finish_reason="length",
        gaps_s=gaps_s,
    )


def batch(*streams: Stream, number: int = 1, wall_s: float = 4.0) -> Batch:
    setup = Setup(part="decode", case="prose", concurrency=len(streams))
    return Batch(setup=setup, round=number, wall_s=wall_s, streams=streams)


def result(*batches: Batch) -> LoadResult:
    return LoadResult(
        provenance=PROVENANCE,
        conditions={"model": "m", "num_tokens": 100},
        settings={"rounds": len(batches)},
        warm_up=(),
        batches=batches,
    )


def test_per_stream_is_not_aggregate_by_streams() -> None:
    """101 and 51 tokens, one starting later: 100 in 2 s and 50 in 1 s are 50 tok/s each, and 150 in 3 s together."""
    both = batch(stream(1.0, 3.0, 101), stream(3.0, 4.0, 51))
    assert [each.tok_s for each in both.streams] == [50.0, 50.0]
    assert both.aggregate_tok_s == 50.0
    assert [each.tpot_s for each in both.streams] == [0.02, 0.02]


def test_percentiles_are_of_all_streams_and_gaps() -> None:
    streams = [stream(0.1 * n, 0.1 * n + 1, 11, gaps_s=(0.01 * n, 0.02 * n)) for n in range(1, 11)]
    (row,) = summarise(result(*(batch(each, number=n) for n, each in enumerate(streams, 1))))
    assert row.ttft is not None
    assert row.itl is not None
    expected = np.percentile([100.0 * n for n in range(1, 11)], (50, 90, 99))
    assert (row.ttft.p50_ms, row.ttft.p90_ms, row.ttft.p99_ms) == pytest.approx(tuple(expected))
    assert row.itl.num_samples == 20
    assert row.itl.mean_ms == pytest.approx(15 * 5.5)


def test_a_file_is_read_back_and_never_overwritten(tmp_path: Path) -> None:
    from datetime import date

    measured, _ = measure()
    path = result_path(tmp_path, measured.name, date(2026, 1, 31))
    measured.write(path)
    assert LoadResult.read(path) == measured
    assert is_load_result(path)
    assert not is_load_result(Path("2026-01-31-cpu-decode.json"))
    with pytest.raises(ConfigError, match="never overwritten"):
        measured.write(path)
    second = result_path(tmp_path, measured.name, date(2026, 1, 31))
    assert (second.name, is_load_result(second)) == ("2026-01-31-load-2.json", True)
    with pytest.raises(ConfigError, match="no batches"):
        msgspec.structs.replace(measured, batches=())


def test_the_markdown_table_has_llama_benchys_columns() -> None:
    measured, _ = measure(
        Behaviour(step_s=0.002),
        parts=("decode", "prefill"),
        concurrency=(1, 2),
        context=(0, 100),
        ladder=(200,),
    )
    lines = benchy_table(measured).splitlines()
    assert lines[0] == f"| {' | '.join(BENCHY_HEAD)} |"
    tests = [line.split(" | ")[1] for line in lines if line.startswith("| scripted")]
    assert tests == [
        "tg48 prose",
        "tg48 (c2) prose",
        "tg48 @ d100 prose",
        "tg48 @ d100 (c2) prose",
        "pp200",
    ]
    assert all(line.count("|") == len(BENCHY_HEAD) + 1 for line in lines if line.startswith("|"))
    assert "±" in lines[2]


VLLM_FIELDS = {
    *("date", "label", "backend", "endpoint_type", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens"),
    *("total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
    *(
        "total_token_throughput",
        "max_concurrent_requests",
        "input_lens",
        "output_lens",
        "ttfts",
        "itls",
        "latencies",
        "start_times",
        "errors",
    ),
    *(
        f"{part}_{time}_ms"
        for part in ("mean", "median", "std", "p99")
        for time in ("ttft", "tpot", "itl", "e2el")
    ),
}
"""What vLLM 0.33 writes with --save-result --save-detailed and all four times asked for."""


def test_the_json_has_vllms_fields_with_vllms_meaning() -> None:
    measured = result(batch(stream(1.0, 3.0, 101, gaps_s=(0.5, 1.5)), stream(2.0, 4.0, 51, gaps_s=(2.0,))))
    row = vllm_object(measured, measured.setups()[0])
    assert row.keys() >= VLLM_FIELDS
    assert (row["completed"], row["total_output_tokens"], row["total_input_tokens"]) == (2, 152, 20)
    assert row["output_throughput"] == 152 / 4.0
    assert row["request_throughput"] == 0.5
    assert row["ttfts"] == [1.0, 2.0]
    assert row["itls"] == [[0.5, 1.5], [2.0]]
    assert row["mean_tpot_ms"] == pytest.approx((20 + 40) / 2)
    assert row["median_itl_ms"] == 1500
    assert row["max_concurrent_requests"] == 2


def test_memory_of_every_node_that_tells() -> None:
    detail = {
        "state": "ready",
        "ranks": [{"rank": r, "host_available_bytes": 10**9 * (r + 1)} for r in range(2)],
    }
    assert nodes_in(detail) == {"rank 0": 10**9, "rank 1": 2 * 10**9}
    measured, _ = measure(Behaviour(detail=detail))
    low = measured.batches[0].low_water_bytes
    assert low["rank 1"] == 2 * 10**9
    assert low[LOCAL] > 0
    (row,) = summarise(measured)
    assert row.low_water_bytes == low


@pytest.mark.parametrize(
    ("page", "engine", "generated"),
    [
        (
            'vllm:generation_tokens_total{engine="0"} 5.0\nvllm:generation_tokens_total{engine="1"} 7.0\n',
            "vLLM",
            12,
        ),
        ('sglang:generation_tokens_total{model_name="m"} 9.0\n', "SGLang", 9),
        ("deskfleet_engine_generated_tokens_total 3.0\nvllm:generation_tokens_total 8.0\n", "deskfleet", 3),
        ("python_info 1.0\n", None, None),
    ],
)
def test_counters_by_every_engines_names(page: str, engine: str | None, generated: int | None) -> None:
    found = parse_counters(page)
    assert (found.engine, found.count.num_generated_tokens) == (engine, generated)
