"""Our load generator beside others: the same work, in turns, and how far the numbers are apart.

Owns the order (ours, theirs, ours again) and what is expected to agree. Times to the first token are not: others count
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
from deskfleet.errors import EngineError

OURS = "deskfleet"
TOKENS_APART = 0.05
RATES_APART = 0.10


@dataclass(frozen=True, slots=True)
class Agreement:
    """One program beside ours: theirs over ours, and whether that is within 5 % for tokens and 10 % for rates."""

    figures: Figures
    tokens_ratio: float | None
    rate_ratio: float
    tpot_ratio: float | None

    @property
    def agrees(self) -> bool:
        tokens_agree = self.tokens_ratio is None or abs(self.tokens_ratio - 1) <= TOKENS_APART
        return tokens_agree and abs(self.rate_ratio - 1) <= RATES_APART


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
    on_figures: Callable[[Figures], None] = lambda figures: None,
) -> CrossCheck:
    """Run ours and each of `programs` (of PROGRAMS, with a path or None for PATH) in turns.

    Raises ServerGone when nobody answers, EngineError when a program fails, ConfigError for a path that is none.
    """
    found = {name: PROGRAMS[name].find(path) for name, path in programs.items()}
    async with Client(url, key=key) as client:
        model = await client.model_id()
        ours = [await _own(client, suite, model, kind, concurrency, num_requests)]
        on_figures(ours[-1])
        others = []
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
            )
            others.append(await asyncio.to_thread(PROGRAMS[name].run, program, scenario))
            on_figures(others[-1])
            ours.append(await _own(client, suite, model, kind, concurrency, num_requests))
            on_figures(ours[-1])
    return CrossCheck(
        ours=tuple(ours),
        others=tuple(_agreement(figures, ours) for figures in others),
        absent=tuple(PROGRAMS[name].name for name, program in found.items() if program is None),
    )


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
    return Agreement(
        figures,
        figures.num_output_tokens / statistics.mean(tokens)
        if has_tokens and figures.num_output_tokens is not None
        else None,
        figures.output_tok_s / statistics.mean(each.output_tok_s for each in ours),
        figures.mean_tpot_ms / statistics.mean(tpot) if figures.mean_tpot_ms and tpot else None,
    )


__all__ = ["OURS", "RATES_APART", "TOKENS_APART", "Agreement", "CrossCheck", "cross_check", "figures_of"]
