"""`deskfleet bench serve` as users run it: against an address, and serving Pocket itself. About 10 s; one slow test."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_process import COMMAND, Done, deskfleet, environment, serving

from deskfleet.bench.load.record import LoadResult
from deskfleet.model.embedded import locate
from deskfleet.testing.honest import HonestEndpoint

QUICK = (
    "--quick",
    "--prompts",
    "prose",
    "--concurrency",
    "1",
    "--rounds",
    "1",
    "--tokens",
    "8",
    "--ladder",
    "200",
)


class Served:
    """An honest endpoint in a thread, for as long as the block runs."""

    def __enter__(self) -> str:
        self._stop, ready = asyncio.Event(), threading.Event()
        self._loop = asyncio.new_event_loop()
        found: list[str] = []

        async def run() -> None:
            async with HonestEndpoint() as server:
                found.append(server.url)
                ready.set()
                await self._stop.wait()

        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(run()), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return found[0]

    def __exit__(self, *args: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()


def test_a_run_is_printed_kept_and_written_in_other_forms(tmp_path: Path) -> None:
    out, rows = tmp_path / "result.json", tmp_path / "rows"
    with Served() as url:
        done = deskfleet(
            *("bench", "serve", url, *QUICK, "--out", out, "--vllm-json", rows, "--json"),
            *("--condition", "mtu=9000", "--condition", "profile=dcp2"),
        )
        again = deskfleet("bench", "serve", url, *QUICK, "--parts", "decode", "--markdown")
        plain = deskfleet("bench", "serve", url, *QUICK, "--parts", "decode")
    assert done.code == 0, done.err
    kept = LoadResult.read(out)
    shown = {name: value for name, value in done.object.items() if name != "summary"}
    assert msgspec.convert(shown, LoadResult) == kept
    assert (kept.conditions["mtu"], kept.conditions["profile"]) == (9000, "dcp2")
    assert kept.conditions["num_tokens"] == 8  # what was said goes before what --quick says
    assert kept.provenance.command.startswith("deskfleet bench serve ")
    assert {batch.setup.part for batch in kept.batches} == {"decode", "prefill"}
    labels = {row["label"] for row in map(json.loads, (path.read_text() for path in rows.iterdir()))}
    assert labels == {"decode, prose, 1 stream, greedy", "prefill, 200 tokens of text"}
    assert "warm-up: decode, prose" in done.err
    assert "| honest | tg8 prose |" in again.out
    assert "client-on-server" in again.out
    assert "decode, prose, 1 stream, greedy" in plain.out
    assert "p50/p90/p99, ms" in plain.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--parts", "speed"), "parts: there is no 'speed'"),
        (("--prompts", "poems"), "kinds: there is no 'poems'"),
        (("--concurrency", "0"), "concurrency (0,)"),
        (("--tokens", "1"), "num_tokens 1"),
        (("--effort", "0"), "effort 0"),
        (("--extra-body", "[]"), "--extra-body is []"),
        (("--condition", "mtu"), "--condition 'mtu' is not NAME=VALUE"),
        (("--allow", "all"), "there is nothing called 'all' to allow"),
        (("--tp", "2"), "how the model is run is decided by the server"),
    ],
)
def test_bench_serve_refuses(call: Callable[..., Done], flags: tuple[str, ...], message: str) -> None:
    done = call("bench", "serve", "http://127.0.0.1:9", *flags)
    assert done.code == 2
    assert done.err.startswith(f"error: {message}")


def test_nobody_there(call: Callable[..., Done]) -> None:
    done = call("bench", "serve", "http://127.0.0.1:9", *QUICK)
    assert done.code == 3
    assert "no server answers at http://127.0.0.1:9" in done.err


class Watch(threading.Thread):
    """Reads the engine's own counter of generated tokens as often as it can: rates beside the client's."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.readings: list[tuple[float, float]] = []
        self._url, self._stopped = f"{url}/metrics", threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.02):
            with urllib.request.urlopen(self._url, timeout=10) as page:
                lines = page.read().decode().splitlines()
            value = next(
                line for line in lines if line.startswith("deskfleet_engine_generated_tokens_total ")
            )
            self.readings.append((time.monotonic(), float(value.split()[1])))

    def stop(self) -> None:
        self._stopped.set()
        self.join(10)

    def rates(self, tokens: int) -> list[float]:
        """Rates of stretches in which the counter rose by one answer's tokens, from its first to its last rise."""
        rises = [
            (at, value)
            for (at, value), (_, before) in zip(self.readings[1:], self.readings, strict=False)
            if value > before
        ]
        found = []
        begin = self.readings[0][1]
        while begin + tokens <= self.readings[-1][1]:
            inside = [(at, value) for at, value in rises if begin < value <= begin + tokens]
            if len(inside) > 2:
                found.append((inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0]))
            begin += tokens
        return found


@pytest.mark.slow  # loads Pocket and generates some hundred tokens beside a reader of its counters
def test_on_pocket_tokens_and_rates_agree_with_the_engines_own_counters() -> None:
    tokens = 48
    with serving(locate("pocket"), "--no-thinking") as server:
        watch = Watch(server.url)
        watch.start()
        flags = ("--parts", "decode", "--prompts", "prose", "--concurrency", "1", "--tokens", str(tokens))
        argv = [*COMMAND, "bench", "serve", server.url, *flags, "--rounds", "4", "--ignore-eos", "--json"]
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=300, env=environment(), check=False
        )
        watch.stop()
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    batches: list[dict[str, Any]] = [*result["warm_up"], *result["batches"]]
    for batch in batches:
        (stream,) = batch["streams"]
        assert stream["num_completion_tokens"] == tokens
        assert batch["server"]["num_generated_tokens"] == pytest.approx(tokens, rel=0.05)
    client = sorted(
        1 / ((s["finish_s"] - s["first_s"]) / (tokens - 1)) for b in batches for s in b["streams"]
    )
    engine = sorted(watch.rates(tokens))
    assert len(engine) >= 4
    middle = len(client) // 2
    assert client[middle] == pytest.approx(engine[len(engine) // 2], rel=0.1)
