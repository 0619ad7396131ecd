"""Our load generator beside others: the same work, in turns, and how far the numbers are apart.

Owns the order (ours, theirs, ours again; or both at the same time, which a busy machine cannot tell apart) and what is
expected to agree. Times to the first token are not: others count
from the first event, also one without text.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deskfleet.bench.load.driver import Ask, Driven, closed_loop
from deskfleet.bench.load.other_programs import PROGRAMS, Figures, Scenario
from deskfleet.bench.load.prompts import prompt
from deskfleet.bench.load.suite import LoadSuite
from deskfleet.client import Client
from deskfleet.errors import ConfigError, EngineError

OURS = "deskfleet"
TOKENS_APART = 0.05
RATES_APART = 0.10
RUNNING = ("deskfleet_engine_running", "vllm:num_requests_running", "sglang:num_running_reqs")
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Agreement:
    """One program beside ours: theirs over the mean of our runs before and after it, or of the one beside it.

    `rate_apart` is how far its rate is from the nearest of our runs, as a share of that; 0 between our runs, which
    show what server and machine make of the same work.
    """

    figures: Figures
    tokens_ratio: float | None
    rate_ratio: float
    tpot_ratio: float | None
    rate_apart: float

    @property
    def agrees(self) -> bool:
        """Whether tokens are within 5 % of ours, and the rate within 10 % of one of our runs, or between them."""
        tokens_agree = self.tokens_ratio is None or abs(self.tokens_ratio - 1) <= TOKENS_APART
        return tokens_agree and self.rate_apart <= RATES_APART


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """What came of it. `absent` are programs that are not installed here."""

    ours: tuple[Figures, ...]
    others: tuple[Agreement, ...]
    absent: tuple[str, ...]


async def cross_check(
    url: str,
    suite: LoadSuite,
    *,
    kind: str,
    concurrency: int,
    num_requests: int,
    programs: dict[str, Path | None],
    key: str | None = None,
    tokenizer: str | None = None,
    together: bool = False,
    on_figures: Callable[[Figures], None] = lambda figures: None,
) -> CrossCheck:
    """Run ours and each of `programs` (of PROGRAMS, with a path or None for PATH) in turns, or `together`.

    `tokenizer` is a directory, for programs that must count text themselves. `concurrency` is of each.

    Raises ServerGone when nobody answers, EngineError when a program fails, ConfigError for a path that is none.
    """
    found = {name: PROGRAMS[name].find(path) for name, path in programs.items()}
    async with Client(url, key=key) as client:
        model = await client.model_id()
        ours: list[Figures] = []
        others: list[Agreement] = []

        async def run_ours() -> Figures:
            ours.append(await _own(client, suite, model, kind, concurrency, num_requests))
            on_figures(ours[-1])
            return ours[-1]

        if not together:
            await run_ours()
        for name, program in found.items():
            if program is None:
                continue
            scenario = Scenario(
                url=client.url,
                model=model,
                prompts=_prompts(kind, num_requests),
                concurrency=concurrency,
                num_tokens=suite.num_tokens,
                extra=_extra(suite, model),
                tokenizer=tokenizer,
            )
            theirs = asyncio.create_task(asyncio.to_thread(PROGRAMS[name].run, program, scenario))
            if together:
                await _begun(client, theirs)
                beside = [await run_ours()]
                on_figures(await theirs)
            else:
                on_figures(await theirs)
                await run_ours()
                beside = ours[-2:]
            others.append(_agreement(theirs.result(), beside))
    return CrossCheck(
        ours=tuple(ours),
        others=tuple(others),
        absent=tuple(PROGRAMS[name].name for name, program in found.items() if program is None),
    )


async def _begun(client: Client, theirs: asyncio.Task[Figures]) -> None:
    """Wait until the server runs what another program asks. Raises ConfigError when the server does not tell."""
    while not theirs.done():
        counters = await client.counters()
        running = next((counters[name] for name in RUNNING if name in counters), None)
        if running is None:
            raise ConfigError(
                f"{client.url} does not tell how many requests run", hint="leave --together out"
            )
        if running:
            return
        await asyncio.sleep(_LOOK_S)


async def _own(
    client: Client, suite: LoadSuite, model: str, kind: str, concurrency: int, num_requests: int
) -> Figures:
    asks = [
        Ask(kind, suite.body(model, text, sampling="greedy", max_tokens=suite.num_tokens))
        for text in _prompts(kind, num_requests)
    ]
    return figures_of(await closed_loop(client, asks, concurrency=concurrency))


def figures_of(driven: Driven) -> Figures:
    """Return our own samples in the terms of the others. Raises EngineError when nothing was answered."""
    answered = [stream for stream in driven.streams if stream.error is None]
    if not answered:
        raise EngineError(f"no request was answered: {driven.streams[0].error}")
    tokens = sum(stream.num_completion_tokens for stream in answered)
    ttft = [stream.ttft_s for stream in answered if stream.ttft_s is not None]
    tpot = [stream.tpot_s for stream in answered if stream.tpot_s is not None]
    return Figures(
        program=OURS,
        num_completed=len(answered),
        num_failed=len(driven.streams) - len(answered),
        num_output_tokens=tokens,
        output_tok_s=tokens / driven.wall_s,
        mean_ttft_ms=1000 * statistics.mean(ttft) if ttft else None,
        mean_tpot_ms=1000 * statistics.mean(tpot) if tpot else None,
    )


def _prompts(kind: str, num_requests: int) -> tuple[str, ...]:
    """The same tasks for everybody, never the same beginning twice."""
    salt = os.urandom(6).hex()
    return tuple(prompt(kind, salt=salt, place=("cross-check", number)) for number in range(num_requests))


def _extra(suite: LoadSuite, model: str) -> dict[str, object]:
    body = suite.body(model, "", sampling="greedy", max_tokens=suite.num_tokens)
    return {name: value for name, value in body.items() if name not in ("model", "messages", "max_tokens")}


def _agreement(figures: Figures, ours: Sequence[Figures]) -> Agreement:
    tokens = [each.num_output_tokens for each in ours if each.num_output_tokens]
    tpot = [each.mean_tpot_ms for each in ours if each.mean_tpot_ms]
    has_tokens = figures.num_output_tokens is not None and bool(tokens)
    rates = [each.output_tok_s for each in ours]
    nearest = min(max(figures.output_tok_s, min(rates)), max(rates))
    return Agreement(
        figures,
        figures.num_output_tokens / statistics.mean(tokens)
        if has_tokens and figures.num_output_tokens is not None
        else None,
        figures.output_tok_s / statistics.mean(rates),
        figures.mean_tpot_ms / statistics.mean(tpot) if figures.mean_tpot_ms and tpot else None,
        abs(figures.output_tok_s / nearest - 1),
    )


__all__ = ["OURS", "RATES_APART", "TOKENS_APART", "Agreement", "CrossCheck", "cross_check", "figures_of"]
