"""The load generator: streams that ask again and again, in a process of its own.

    python -m deskfleet.bench.gateway.generator

One job a line on stdin, one result a line on stdout, both JSON. Owns the clock of the client. It looks at bytes only:
parsing would cost as much as what is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import sys
import time
from typing import Any

import aiohttp
import msgspec

_CONTENT = re.compile(rb'"content":\s*"[^"]')
_EVENT = b"data: "
_TIMEOUT = aiohttp.ClientTimeout(total=120)


class Job(msgspec.Struct, kw_only=True):
    """`streams` ask `url` `requests` times each, for `tokens` tokens. They begin within `spread_s` seconds.

    With `period_s` 0 each asks again as soon as it has its answer. Else each asks every so many seconds, and their
    turns are spread evenly over that time; who has not got its answer by then asks when it has.

    After `limit_s` whatever is under way is cut: tokens that came count, requests that did not end are no failures.
    """

    url: str
    model: str
    streams: int
    requests: int
    tokens: int
    spread_s: float
    period_s: float = 0.0
    limit_s: float = 60.0
    key: str = "none"


class Outcome(msgspec.Struct, kw_only=True):
    """`ttft_s` of every request but a stream's first, which opens its connection. Tokens by `usage`, events counted.

    `num_late` requests were sent after their turn, because the answer before them was not complete.
    """

    ttft_s: list[float]
    num_tokens: int
    num_events: int
    num_failed: int
    num_late: int
    wall_s: float
    cpu_s: float
    is_cut: bool = False
    failure: str | None = None


class _Tally:
    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.num_tokens = self.num_events = self.num_failed = self.num_late = 0
        self.failure: str | None = None


_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_numbers = itertools.count()


async def run_job(job: Job) -> Outcome:
    """Run one job. A request that fails is counted, and its stream goes on."""
    tally = _Tally()
    connector = aiohttp.TCPConnector(limit=0)
    offsets = random.Random(job.streams)
    headers = {"Authorization": f"Bearer {job.key}"}
    async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT, headers=headers) as session:
        cpu_s, begin = time.process_time(), time.monotonic()
        is_cut = False
        try:
            async with asyncio.timeout(job.limit_s), asyncio.TaskGroup() as group:
                for place in range(job.streams):
                    if job.period_s:
                        offset_s = job.period_s * place / job.streams
                    else:
                        offset_s = offsets.random() * job.spread_s
                    group.create_task(_stream(session, job, begin + offset_s, tally))
        except TimeoutError:
            is_cut = True
        wall_s = time.monotonic() - begin
    return Outcome(
        ttft_s=tally.ttft_s,
        num_tokens=tally.num_tokens,
        num_events=tally.num_events,
        num_failed=tally.num_failed,
        num_late=tally.num_late,
        wall_s=wall_s,
        cpu_s=time.process_time() - cpu_s,
        is_cut=is_cut,
        failure=tally.failure,
    )


async def _stream(session: aiohttp.ClientSession, job: Job, begin_s: float, tally: _Tally) -> None:
    """One stream. `begin_s`, of this process's monotonic clock, is when it asks first."""
    for number in range(job.requests):
        if number == 0 or job.period_s:
            rest_s = begin_s + number * job.period_s - time.monotonic()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            else:
                tally.num_late += number > 0
        try:
            ttft_s = await _request(session, job, tally)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            tally.num_failed += 1
            tally.failure = tally.failure or f"{type(error).__name__}: {error}"
            continue
        if number:
            tally.ttft_s.append(ttft_s)


async def _request(session: aiohttp.ClientSession, job: Job, tally: _Tally) -> float:
    body: dict[str, Any] = {
        "model": job.model,
        "messages": [{"role": "user", "content": f"Question {next(_numbers)}: say some words, any words."}],
        "max_tokens": job.tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.monotonic()
    first: float | None = None
    tail = b""
    num_events = 0
    try:
        async with session.post(f"{job.url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {(await response.read())[:200]!r}")
            async for data in response.content.iter_any():
                if first is None and (_CONTENT.search(data) or b'"reasoning' in data):
                    first = time.monotonic()
                num_events += data.count(_EVENT)
                tail = (tail + data)[-2000:]
    except asyncio.CancelledError:
        tally.num_tokens += min(num_events, job.tokens)  # its events are all that is known of what came
        raise
    finally:
        tally.num_events += num_events
    told = _COMPLETION_TOKENS.findall(tail)
    if first is None or not told or int(told[-1]) != job.tokens:
        raise ValueError(f"asked for {job.tokens} tokens, got {told[-1:]}: ...{tail[-200:]!r}")
    tally.num_tokens += int(told[-1])
    return first - began


async def main() -> None:
    """Take jobs until stdin ends."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        outcome = await run_job(msgspec.json.decode(line, type=Job))
        print(msgspec.json.encode(outcome).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main())


__all__ = ["Job", "Outcome", "run_job"]
