"""A step's time by category adds up to the step, and each part is what the trace was made of. About 4 s.

Made traces have known totals; the recorded one is of two ranks of the native engine (traces/README.md).
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deskfleet.engine
from deskfleet.bench.load.server_process import running_server
from deskfleet.bench.trace.budget import flatten, kernel_table, mean_budget, step_budgets
from deskfleet.bench.trace.categories import CATEGORIES, category_of
from deskfleet.bench.trace.page import Profile, as_json, as_svg
from deskfleet.bench.trace.ranks import collective_rows, rank_waits
from deskfleet.bench.trace.read import Event, read_trace, read_traces
from deskfleet.client import Client
from deskfleet.errors import ConfigError

COMMAND = (sys.executable, "-c", "import sys; from deskfleet.cli import main; sys.exit(main())")
TRACES = Path(__file__).parent / "traces"
RECORDED = sorted(TRACES.glob("tiny-rank-*.json.gz"))
H200 = TRACES / "h200-decode.json.gz"


def event(
    name: str, begin_us: float, length_us: float, *, cat: str = "kernel", tid: int = 7
) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "ts": 1e6 + begin_us, "dur": length_us}


def step(number: int, begin_us: float, length_us: float) -> dict[str, Any]:
    return event(f"ProfilerStep#{number}", begin_us, length_us, cat="user_annotation", tid=1)


def write(path: Path, events: list[dict[str, Any]], **more: Any) -> Path:
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events], **more}))
    return path


def device_trace(path: Path) -> Path:
    """Two steps of 1000 us: 300 experts, 200 products, a reduce of 250, of which 100 under products, and a copy."""
    events = []
    for number in range(2):
        at = 1000.0 * number
        events += [
            step(number, at, 1000),
            event("fused_moe_kernel", at + 0, 300),
            event("nvjet_gemm_128", at + 300, 200),
            event("ncclDevKernel_AllReduce_Sum_bf16", at + 400, 250, tid=8),
            event("Memcpy DtoH", at + 640, 60, cat="gpu_memcpy", tid=9),
            event("cudaLaunchKernel", at + 0, 900, cat="cuda_runtime", tid=1),
            event("aten::mm", at + 5, 40, cat="cpu_op", tid=1),
        ]
    return write(path, events, distributedInfo={"rank": 3})


def test_a_device_step_is_counted_moment_by_moment(tmp_path: Path) -> None:
    trace = read_trace(device_trace(tmp_path / "trace.json"))
    assert (trace.rank, trace.is_of_device, len(trace.steps)) == (3, True, 2)
    for budget in step_budgets(trace):
        assert {name: round(1e6 * value) for name, value in budget.by_category.items()} == {
            "experts": 300,
            "matrix products": 200,
            "collectives": 150,  # 250, of which 100 lie under a product: they cost nothing
            "copies": 50,  # 60, of which 10 lie under the collective
            "idle": 300,
        }
        assert sum(budget.by_category.values()) == pytest.approx(budget.wall_s, rel=1e-9)
        assert [round(1e6 * gap) for gap in budget.gaps_s] == [300]
    rows = {row.name: row for row in kernel_table(trace)}
    assert rows["ncclDevKernel_AllReduce_Sum_bf16"].count == 2
    assert rows["ncclDevKernel_AllReduce_Sum_bf16"].total_s == pytest.approx(
        500e-6
    )  # a kernel's time is its own
    assert "aten::mm" not in rows
    assert list(mean_budget(step_budgets(trace))) == [
        n for n in CATEGORIES if n in mean_budget(step_budgets(trace))
    ]


def test_a_cpu_step_is_of_the_innermost_operator_and_pythons_time_is_idle(tmp_path: Path) -> None:
    events = [
        step(0, 0, 1000),
        event("aten::linear", 100, 400, cat="cpu_op", tid=1),
        event("aten::mm", 150, 300, cat="cpu_op", tid=1),
        event("aten::copy_", 200, 50, cat="cpu_op", tid=1),
        event("c10d::allreduce_", 600, 20, cat="cpu_op", tid=1),
        event("gloo:all_reduce", 610, 190, cat="user_annotation", tid=2),
        event("aten::add", 790, 30, cat="cpu_op", tid=1),
        event("aten::copy_", 700, 20, cat="cpu_op", tid=1),
    ]
    trace = read_trace(write(tmp_path / "rank-1.json", events))
    assert (trace.rank, trace.is_of_device, trace.main_lane) == (1, False, "1")
    (budget,) = step_budgets(trace)
    assert {name: round(1e6 * value) for name, value in budget.by_category.items()} == {
        "matrix products": 350,
        "copies": 70,
        "collectives": 170,  # 600 to 790: until the next operator runs beside it, and but for a copy meanwhile
        "norms and elementwise": 30,
        "idle": 380,
    }
    assert {row.name: round(1e6 * row.total_s) for row in kernel_table(trace)}["aten::mm"] == 250


def test_operators_that_outlast_their_callers_by_rounding_are_cut() -> None:
    pieces = flatten(
        [Event("outer", "1", 0.0, 1.0), Event("inner", "1", 0.5, 1.1), Event("next", "1", 1.0, 2.0)]
    )
    assert [(p.name, p.begin_s, p.end_s) for p in pieces] == [
        ("outer", 0.0, 0.5),
        ("inner", 0.5, 1.0),
        ("next", 1.0, 2.0),
    ]


def two_ranks(tmp_path: Path) -> list[Path]:
    """Rank 1 reads its rows 300 us late: rank 0 waits for it in the all-reduce after them, and in no other."""
    paths = []
    for rank, late in ((0, 0.0), (1, 300.0)):
        events = []
        for number in range(3):
            at = 5000.0 * number + 70.0 * rank  # clocks of machines differ
            events += [
                step(number, at, 4000),
                event("aten::mm", at + 0, 500, cat="cpu_op", tid=1),
                event("engram: wait for rows", at + 500, 40 + late, cat="user_annotation", tid=1),
                event("gloo:all_reduce", at + 540 + late, 400 - late, cat="user_annotation", tid=2),
                event("aten::mm", at + 940, 500, cat="cpu_op", tid=1),
                event("gloo:all_reduce", at + 1440, 100, cat="user_annotation", tid=2),
            ]
        paths.append(write(tmp_path / f"rank-{rank}.json", events))
    return paths


def test_who_waits_for_whom_and_for_rows(tmp_path: Path) -> None:
    traces = read_traces(two_ranks(tmp_path))
    first, second = rank_waits(traces)
    assert (first.peers_s, second.peers_s) == pytest.approx((300e-6, 0.0), abs=1e-9)
    assert (first.engram_s, second.engram_s) == pytest.approx((40e-6, 340e-6))
    assert (first.after_engram_s, second.after_engram_s) == pytest.approx((300e-6, 0.0), abs=1e-9)
    (row,) = [row for row in collective_rows(traces) if row.rank == 0]
    assert (row.num_per_step, row.p50_s, row.longest_s) == pytest.approx((2, 250e-6, 400e-6))
    assert row.total_per_step_s == pytest.approx(500e-6)
    (alone,) = rank_waits(traces[:1])
    assert (alone.peers_s, alone.engram_s) == (None, pytest.approx(40e-6))


def test_two_traces_of_a_rank_are_refused_and_what_is_no_trace(tmp_path: Path) -> None:
    paths = two_ranks(tmp_path)
    with pytest.raises(ConfigError, match="both of rank 0"):
        read_traces([paths[0], write(tmp_path / "again-rank0.json", [event("k", 0, 1)])])
    for data in (
        b"",
        b"not json",
        gzip.compress(b"{}")[:12],
        b'{"traceEvents": []}',
        b'{"traceEvents": [{"ph":"M"}]}',
    ):
        (tmp_path / "x.json").write_bytes(data)
        with pytest.raises(ConfigError):
            read_trace(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "collectives"),
        ("gloo:broadcast", "collectives"),
        ("void flash_fwd_splitkv_mla_kernel", "attention"),
        ("fused_moe_kernel", "experts"),
        ("engram_gather", "Engram rows"),
        ("engram: wait for rows", "Engram rows"),
        ("per_token_group_quant_fp8", "quantisation"),
        ("nvjet_tst_128x8_64x12", "matrix products"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel", "norms and elementwise"),
        ("up_kernel", "experts"),
        ("triton_up_kernel_7", "norms and elementwise"),
        ("something_else", "other"),
    ],
)
def test_categories_by_name(name: str, category: str) -> None:
    assert category_of(name) == category


def test_the_recorded_trace_of_two_ranks_adds_up() -> None:
    profile = Profile.of(read_traces(RECORDED))
    found = as_json(profile, num_kernels=5)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        for each in rank["steps"]:
            assert each["sum_ms"] == pytest.approx(each["wall_ms"], rel=0.01)
            assert each["wall_ms"] > 10
        assert rank["by_category_ms"]["collectives"] > 0
        assert rank["by_category_ms"]["Engram rows"] > 0
        assert rank["by_category_ms"].get("other", 0) < 0.02 * rank["step_ms"]
    # A step of ten layers reduces twice in each, and once for the vocabulary.
    reduces = [row for row in found["collectives"] if row["name"] == "gloo:all_reduce"]
    assert [row["num_per_step"] for row in reduces] == [21, 21]
    # One of the two waits at a time: both waiting for each other all the time is impossible.
    assert all(0 <= row["peers_ms"] <= max(r["step_ms"] for r in found["ranks"]) for row in found["waits"])
    svg = as_svg(profile)
    widths = [float(w) for w in re.findall(r'<rect x="[\d.]+" y="36" width="([\d.]+)"', svg)]
    assert sum(widths) == pytest.approx(550, rel=0.2)


def test_the_recorded_trace_of_an_h200_adds_up() -> None:
    """Six steps of one row at the size of a rank of four, each a replay of one graph and a wait for its end."""
    profile = Profile.of(read_traces([H200]))
    (rank,) = as_json(profile, num_kernels=40)["ranks"]
    assert len(rank["steps"]) == 6
    for each in rank["steps"]:
        assert each["sum_ms"] == pytest.approx(each["wall_ms"], rel=0.01)
    # The same graph every time: what the device did differs by little, however long the host took to begin.
    busy = [each["wall_ms"] - each["by_category_ms"]["idle"] for each in rank["steps"]]
    assert max(busy) < 1.03 * min(busy)
    by_category = rank["by_category_ms"]
    assert by_category.get("other", 0) < 0.02 * rank["step_ms"]
    for name in ("attention", "experts", "hyper-connections", "matrix products"):
        assert by_category[name] > 0.05 * rank["step_ms"], name


def test_every_kernel_of_ours_has_a_category() -> None:
    sources = Path(deskfleet.engine.__file__).parent / "cuda"
    names = re.findall(
        r"^def (\w+_kernel)\(", "".join(p.read_text() for p in sources.glob("*.py")), re.MULTILINE
    )
    assert len(names) > 15
    native = "".join(p.read_text() for p in sources.glob("native/*.cu"))
    names += (own := re.findall(r"^KERNEL\(.*\)\s+(\w+)\(", native, re.MULTILINE))
    assert len(own) == native.count("\nKERNEL(")
    assert not [name for name in names if category_of(name) == "other"]


def test_the_command(tmp_path: Path) -> None:
    plot = tmp_path / "steps.svg"
    argv = [*COMMAND, "profile", *map(str, RECORDED), "--plot", str(plot), "--kernels", "3"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 1: 1 steps of" in done.stdout
    assert "waits, ms a step" in done.stdout
    assert plot.read_text().startswith("<svg")
    empty = subprocess.run(
        [*COMMAND, "profile", str(tmp_path / "none")], capture_output=True, text=True, timeout=60, check=False
    )
    assert empty.returncode == 2
    assert "cannot read the trace" in empty.stderr


@pytest.mark.slow  # two ranks load a model and run twenty-odd steps, to see that a trace is left
def test_the_engine_leaves_a_trace_of_every_rank(tmp_path: Path) -> None:
    checkpoint = Path(__file__).parents[1] / "golden" / "v41-tiny" / "model"
    flags = ("--tp", "2", "--batch", "1", "--tokens", "10", "--rounds", "1", "--threads-per-rank", "1")
    argv = [*COMMAND, "bench", "engine", str(checkpoint), *flags, "--trace", str(tmp_path / "traces")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    traces = read_traces(sorted((tmp_path / "traces").iterdir()))
    assert [trace.rank for trace in traces] == [0, 1]
    for trace in traces:
        for budget in step_budgets(trace):
            assert sum(budget.by_category.values()) == pytest.approx(budget.wall_s, rel=0.01)
    assert all(wait.peers_s is not None and wait.engram_s > 0 for wait in rank_waits(traces))


def moments(path: Path, name: str, num_moments: int) -> Counter[str]:
    """Whose each of many moments of a step is, read off the file itself: no events are joined, cut or added up."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    events = [
        e for e in document["traceEvents"] if e.get("cat") in ("cpu_op", "user_annotation") and "dur" in e
    ]
    (own,) = [e for e in events if e["name"] == name]
    events = [e for e in events if not e["name"].startswith("ProfilerStep")]
    begins, ends = (
        np.array(values) for values in zip(*((e["ts"], e["ts"] + e["dur"]) for e in events), strict=True)
    )
    found: Counter[str] = Counter()
    for number in range(num_moments):
        at_us = own["ts"] + own["dur"] * (number + 0.5) / num_moments
        running = [events[index] for index in np.flatnonzero((begins <= at_us) & (at_us < ends))]
        main = [e for e in running if e["tid"] == own["tid"]]
        beside = [e for e in running if category_of(e["name"]) == "collectives"]
        if main:
            found[category_of(max(main, key=lambda e: (e["ts"], -e["dur"]))["name"])] += 1
        else:
            found["collectives" if beside else "idle"] += 1
    return found


@pytest.mark.slow  # three ranks load a model; their traces are read a second time, moment by moment
def test_three_ranks_of_a_server_leave_traces_that_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Path(__file__).parents[1] / "golden" / "v41-tiny" / "model"
    monkeypatch.setenv("DESKFLEET_TRACE_DIR", str(tmp_path))
    paths = [tmp_path / f"rank-{rank}.json.gz" for rank in range(3)]
    argv = [
        *COMMAND,
        "serve",
        str(checkpoint),
        "--tp",
        "3",
        "--threads-per-rank",
        "1",
        "--port",
        "0",
        "--json",
    ]
    with running_server(argv) as server:
        asyncio.run(write_on(server["url"], until=lambda: all(path.exists() for path in paths)))
    done = subprocess.run(
        [*COMMAND, "profile", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks = json.loads(done.stdout)["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    whole_ms = [sum(step["wall_ms"] for step in rank["steps"]) for rank in ranks]
    assert whole_ms == pytest.approx([whole_ms[0]] * 3, rel=0.05), "they go in step, each by its own clock"
    for path, rank in zip(paths, ranks, strict=True):
        assert len(rank["steps"]) == 8
        for step in rank["steps"]:
            assert step["sum_ms"] == pytest.approx(step["wall_ms"], rel=0.01)
        assert rank["by_category_ms"]["collectives"] > 0
        assert rank["by_category_ms"]["Engram rows"] > 0
        last = rank["steps"][-1]
        counted = moments(path, last["name"], 4000)
        assert sum(counted.values()) == 4000
        for category in {*counted, *last["by_category_ms"]}:
            share = last["by_category_ms"].get(category, 0.0) / last["wall_ms"]
            assert share == pytest.approx(counted[category] / 4000, abs=0.01), category


async def write_on(url: str, *, until: Callable[[], bool]) -> None:
    """Have answers written, one after the other, until `until`; a trace is left while the server runs."""
    async with Client(url) as client:
        model = await client.model_id()
        for number in range(20):
            message = {"role": "user", "content": f"Go on from {number}."}
            await client.ask({"model": model, "messages": [message], "max_tokens": 24, "ignore_eos": True})
            if until():
                return
    pytest.fail("no trace was left")
