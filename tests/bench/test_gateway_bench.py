"""What the gateway adds is measured on the real gateway, upstream and load generator, each a process. About 40 s."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from aiohttp import web
from load_runs import PROVENANCE
from msgspec.structs import replace

from deskfleet.bench.gateway.clock import Clock
from deskfleet.bench.gateway.generator import Job, run_job
from deskfleet.bench.gateway.page import render_gateway
from deskfleet.bench.gateway.processes import LITELLM_INSTALL, find_litellm
from deskfleet.bench.gateway.record import (
    DIRECT,
    FRONT,
    INSIDE,
    LITELLM,
    WAYS,
    GatewayResult,
    GatewaySample,
    Load,
)
from deskfleet.bench.gateway.run import GatewaySuite
from deskfleet.bench.report import render_report
from deskfleet.errors import ConfigError

COMMAND = (sys.executable, "-c", "import sys; from deskfleet.cli import main; sys.exit(main())")

STUB = """#!{python}
import argparse, asyncio, re, sys
from pathlib import Path
from aiohttp import ClientSession, web

if sys.argv[1:] == ["--version"]:
    print("LiteLLM: Current Version = 0.0.1")
    sys.exit()
parser = argparse.ArgumentParser()
for name in ("config", "host", "port", "num_workers"):
    parser.add_argument("--" + name, required=True)
args = parser.parse_args()
config = Path(args.config).read_text()
base, key = (re.search(name + r": (\\S+)", config)[1] for name in ("api_base", "master_key"))

async def chat(request):
    if request.headers.get("Authorization") != "Bearer " + key:
        raise web.HTTPUnauthorized
    body = await request.json()
    response = web.StreamResponse(headers={{"Content-Type": "text/event-stream"}})
    await response.prepare(request)
    async with ClientSession() as session, session.post(base + "/chat/completions", json=body) as upstream:
        async for line in upstream.content:
            await asyncio.sleep(0.02)
            await response.write(line)
    return response

async def live(request):
    return web.Response()

app = web.Application()
app.router.add_post("/v1/chat/completions", chat)
app.router.add_get("/health/liveliness", live)
web.run_app(app, host=args.host, port=int(args.port), print=None)
"""


def run(*flags: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [
        *COMMAND,
        "bench",
        "gateway",
        "--rounds",
        "1",
        "--seconds",
        "0.3",
        "--streams",
        "1,4",
        *map(str, flags),
    ]
    return subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)


def test_all_ways_are_measured_and_a_slow_one_is_seen(tmp_path: Path) -> None:
    stub = tmp_path / "litellm"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    out = tmp_path / "2026-01-31-gateway.json"
    done = run("--litellm", stub, "--json", "--out", out)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    result = GatewayResult.read(out)
    assert msgspec.convert({k: v for k, v in found.items() if k != "summary"}, GatewayResult) == result
    assert result.ways() == [DIRECT, FRONT, INSIDE, LITELLM]
    assert result.settings["litellm"] == "0.0.1"
    assert not any(sample.num_failed for sample in result.samples), [s.failure for s in result.samples]
    for sample in result.samples:
        all_tokens = sample.load.streams * sample.load.requests * sample.load.tokens
        assert not sample.is_cut
        assert sample.num_tokens == all_tokens
        assert len(sample.ttft_ms) == sample.load.streams * (sample.load.requests - 1)
        assert (sample.cpu_s is None) == (sample.way == DIRECT)
    assert [(load.streams, load.starts, load.step_s > 0) for load in result.loads()] == [
        (1, "at once", True),
        (4, "spread", True),
        (4, "at once", True),
        (4, "at once", False),
    ]
    rows = {
        (row["way"], row["load"]["streams"], row["load"]["step_s"]): row for row in found["summary"]["rows"]
    }
    assert {(row["way"], row["load"]["starts"]) for row in found["summary"]["rows"]} == {
        *((way, starts) for way in (DIRECT, FRONT, INSIDE) for starts in ("spread", "at once")),
        (LITELLM, "at once"),
    }
    # The stub waits 20 ms before every line: its first token is late by that, and its rate a fraction.
    assert rows[LITELLM, 1, 0.005]["added_p50_ms"]["median"] > 15
    assert rows[LITELLM, 1, 0.005]["kept_rate"]["median"] < 0.5
    assert rows[FRONT, 4, 0]["times_litellm"]["median"] > 1
    judged = [each["target"] for each in found["summary"]["verdicts"] if "TTFT" in each["target"]]
    assert [target.partition(":")[0] for target in judged] == [
        "1 stream at 200 tokens/s each",
        "4 streams at 50 tokens/s each, starts spread",
    ]
    text = render_report([out])
    assert "## 2026-01-31-gateway" in text
    assert f"| 1 stream at 200 tokens/s each: {FRONT} |" in text


def test_a_quick_run_leaves_out_only_what_no_target_is_about() -> None:
    suite = GatewaySuite(checkpoint=Path(), front_command=lambda url: (), rounds=2, is_quick=True)
    taking = {
        (load.streams, load.starts, load.step_s > 0, way, number)
        for load in suite.loads()
        for way in WAYS
        for number in (1, 2)
        if suite.takes_part(way, load, number)
    }
    first, second = ({each[:4] for each in taking if each[4] == number} for number in (1, 2))
    judged = {
        (1, "at once", True),
        *((streams, "spread", True) for streams in (32, 256)),
        *((streams, "at once", False) for streams in (32, 256)),
    }
    assert second == {(*load, way) for load in judged for way in (DIRECT, FRONT)}
    crowds = {(streams, "at once", True) for streams in (32, 256)}
    assert first - second == {
        *((*load, way) for load in crowds for way in (DIRECT, FRONT)),
        (1, "at once", True, LITELLM),
        *((streams, "at once", False, LITELLM) for streams in (32, 256)),
    }
    whole = dataclasses.replace(suite, is_quick=False)
    left_out = [
        (way, load.starts)
        for load in whole.loads()
        for way in WAYS
        for number in (1, 2)
        if not whole.takes_part(way, load, number)
    ]
    assert set(left_out) == {(LITELLM, "spread")}


def test_without_litellm_the_result_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert find_litellm(None) is None
    with pytest.raises(ConfigError, match="is no program"):
        find_litellm(tmp_path / "nothing")
    done = run("--streams", "2")
    assert done.returncode == 0, done.stderr
    assert f"absent: LiteLLM: not installed here; {LITELLM_INSTALL}" in done.stdout
    assert "not measured: 2 streams, flat out: times LiteLLM's rate, at least 10" in done.stdout


def sample(way: str, number: int, ttft_ms: float, seconds: float, **more: Any) -> GatewaySample:
    load = Load(streams=4, step_s=0.01, tokens=10, requests=2)
    return GatewaySample(
        way=way,
        load=load,
        round=number,
        ttft_ms=(ttft_ms,) * 4,
        num_tokens=80,
        num_events=80,
        num_failed=0,
        wall_s=seconds,
        cpu_s=None if way == DIRECT else 0.1,
        client_cpu_s=0.1,
        **more,
    )


def test_ratios_are_taken_within_a_round() -> None:
    """The machine was ten times slower in round 2; the gateway added a tenth in both."""
    samples = [sample(DIRECT, n, 10.0**n, 10.0**n) for n in (1, 2)]
    samples += [sample(FRONT, n, 10.0**n + 0.5, 1.1 * 10.0**n) for n in (1, 2)]
    samples.append(replace(sample(LITELLM, 1, 1.0, 9.0), num_tokens=0, ttft_ms=(), is_cut=True))
    result = GatewayResult(
        provenance=PROVENANCE, settings={"rounds": 2}, samples=tuple(samples), absent={LITELLM: "no"}
    )
    row = next(row for row in result.rows() if row.way == FRONT)
    assert row.added_p50_ms is not None
    assert row.kept_rate is not None
    assert (row.added_p50_ms.least, row.added_p50_ms.greatest) == pytest.approx((0.5, 0.5))
    assert row.kept_rate.median == pytest.approx(1 / 1.1)
    assert row.times_litellm is None  # cut: what came is no rate to be a multiple of
    assert [(verdict.met, verdict.target.endswith(("1", "0.95"))) for verdict in result.verdicts()] == [
        (True, True),
        (False, True),
    ]
    assert "LiteLLM was not measured: no." in render_gateway("2026-01-31-gateway.json", result)


def test_streams_step_together_and_on_the_grid() -> None:
    async def steps() -> list[list[float]]:
        clock = Clock()
        clock.step_s = 0.02
        loop = asyncio.get_running_loop()

        async def stream() -> list[float]:
            times = []
            for _ in range(10):
                await clock.tick()
                times.append(loop.time())
            return times

        return await asyncio.gather(stream(), stream(), stream())

    one, *others = asyncio.run(steps())
    for other in others:
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < 0.01
    assert (one[-1] - one[0]) / 9 == pytest.approx(0.02, rel=0.1)


def test_no_step_comes_twice_on_a_loop_that_counts_in_milliseconds() -> None:
    async def steps(count: int) -> float:
        clock = Clock()
        clock.step_s = 0.005
        await clock.tick()
        began_s = time.monotonic()
        for _ in range(count):
            await clock.tick()
        return time.monotonic() - began_s

    assert uvloop.run(steps(60)) > 0.9 * 60 * 0.005


async def test_spread_starts_come_one_by_one_in_their_turn() -> None:
    """Each at the place of its stream in the period; one that has to wait for its answer is late, and counted."""
    begins: list[float] = []

    async def chat(request: web.Request) -> web.Response:
        begins.append(time.monotonic())
        await asyncio.sleep(0.5 if len(begins) == 5 else 0)
        usage = b'data: {"choices":[],"usage":{"completion_tokens": 2}}\n\n'
        return web.Response(body=b'data: {"choices":[{"delta":{"content": "a"}}]}\n\n' + usage)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        began_s = time.monotonic()
        job = Job(url=url, model="m", streams=4, requests=3, tokens=2, spread_s=0.0, period_s=0.4)
        outcome = await run_job(job)
    finally:
        await runner.cleanup()
    assert (outcome.num_failed, outcome.failure, len(outcome.ttft_s)) == (0, None, 8)
    assert outcome.num_late >= 1
    assert all(at_s - began_s >= 0.1 * place for place, at_s in enumerate(sorted(begins)))
