"""Sends requests and takes their times: all at once, so many at a time, or when they are due.

Owns the two loops. In the closed loop a request is due when a stream is free; in the open loop when its arrival says
so, whatever the server does: one that stalls is asked on, and the wait is its own. Latency counts from when a request
was due, so a generator that falls behind cannot hide it.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from deskfleet.bench.load.predictable import predictability
from deskfleet.bench.load.record import ErrorKind, Stream
from deskfleet.client import Client, Reply, ServerGone
from deskfleet.errors import EngineError, RequestError


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to send: its body, and what kind it is."""

    case: str
    body: Mapping[str, Any]

    @property
    def max_tokens(self) -> int:
        """0 where it says nothing."""
        return int(self.body.get("max_tokens") or self.body.get("max_completion_tokens") or 0)


@dataclass(frozen=True, slots=True)
class Driven:
    """What came of a batch. `is_overloaded`: it was given up with too many requests open."""

    streams: tuple[Stream, ...]
    wall_s: float
    is_overloaded: bool = False


async def closed_loop(client: Client, asks: Sequence[Ask], *, concurrency: int) -> Driven:
    """Ask all, `concurrency` at a time, the next as soon as one is answered. Raises ServerGone."""
    waiting = iter(enumerate(asks))
    asked: dict[int, _Asked] = {}
    with _undisturbed():
        begin = time.monotonic()

        async def work() -> None:
            for number, ask in waiting:
                asked[number] = await _ask(client, ask, begin, time.monotonic() - begin)

        await _all([work() for _ in range(min(concurrency, len(asks)))])
        wall_s = time.monotonic() - begin
    return Driven(tuple(asked[number].stream() for number in range(len(asks))), wall_s)


async def open_loop(client: Client, asks: Sequence[Ask], due_s: Sequence[float], *, most_open: int) -> Driven:
    """Ask each when it is due: seconds from now, ascending. Stops when `most_open` are open. Raises ServerGone."""
    tasks: list[asyncio.Task[_Asked]] = []
    is_overloaded = False
    with _undisturbed():
        begin = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for ask, due in zip(asks, due_s, strict=True):
                    await asyncio.sleep(max(0.0, begin + due - time.monotonic()))
                    is_overloaded = sum(not task.done() for task in tasks) >= most_open
                    if is_overloaded:
                        break
                    tasks.append(group.create_task(_ask(client, ask, begin, due)))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        wall_s = time.monotonic() - begin
    return Driven(tuple(task.result().stream() for task in tasks), wall_s, is_overloaded)


def arrivals(rate: float, duration_s: float, *, seed: int) -> list[float]:
    """Return when requests of a Poisson process are due: seconds from the beginning, ascending, at least one."""
    random = np.random.default_rng(seed)
    due: list[float] = []
    at_s = float(random.exponential(1 / rate))
    while at_s < duration_s:
        due.append(at_s)
        at_s += float(random.exponential(1 / rate))
    return due or [0.0]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What came back. Made into a Stream when the batch is over: looking at text takes time that others would lose."""

    ask: Ask
    due_s: float
    sent_s: float
    reply: Reply | None = None
    error: RequestError | EngineError | None = None

    def stream(self) -> Stream:
        reply = self.reply
        if reply is None:
            kind: ErrorKind = "refused" if isinstance(self.error, RequestError) else "failed"
            message = "" if self.error is None else self.error.message
            return Stream(
                case=self.ask.case,
                due_s=self.due_s,
                sent_s=self.sent_s,
                max_tokens=self.ask.max_tokens,
                error=message,
                error_kind=kind,
            )
        measured = predictability(reply.reasoning + reply.content)
        finish_s = reply.total_s if reply.finish_s is None else reply.finish_s
        return Stream(
            case=self.ask.case,
            due_s=self.due_s,
            sent_s=self.sent_s,
            max_tokens=self.ask.max_tokens,
            first_s=self.sent_s + reply.first_token_s if reply.arrivals_s else None,
            finish_s=self.sent_s + finish_s,
            num_prompt_tokens=reply.num_prompt_tokens,
            num_completion_tokens=reply.num_completion_tokens,
            num_cached_tokens=reply.num_cached_tokens,
            finish_reason=reply.finish_reason,
            gaps_s=tuple(round(float(gap), 6) for gap in np.diff(reply.arrivals_s)),
            repeated=round(measured.repeated, 4),
            counted=round(measured.counted, 4),
        )


async def _ask(client: Client, ask: Ask, begin: float, due_s: float) -> _Asked:
    sent_s = time.monotonic() - begin
    try:
        return _Asked(ask, due_s, sent_s, reply=await client.ask(ask.body))
    except ServerGone:
        raise
    except (RequestError, EngineError) as error:
        return _Asked(ask, due_s, sent_s, error=error)


async def _all(work: list[Any]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the collector from stopping the clock of every stream at once."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


__all__ = ["Ask", "Driven", "arrivals", "closed_loop", "open_loop"]
