"""Hours of mixed work on small pools: every answer is its own request's, nothing is left, memory stays flat.

Sixteen clients at once ask a running group of ranks: short and long prompts, sessions that share prefixes, greedy,
sampled and constrained answers, scores; one answer in ten is given up in mid-stream. The pools hold about half of what
is under way, so that requests wait, are pushed out and find their prefixes gone.

Whose answer it is can be told from every one of them. A greedy answer and a score are those of the same request alone,
on an engine without drafts and prefix cache. A sampled answer may only have the tokens that its request left. JSON
holds a tag that its schema demands.

    python -m tests.engine.test_soak --minutes 30 --out soak.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from deskfleet.endpoint import Constraint, EngineStats, GenerateRequest, SamplingParams, TokenChunk
from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.errors import DeskfleetError
from deskfleet.model.tokenizer import load_tokenizer
from tests.engine.engines import greedy, idle, random_ids, stats_when, tokens_of
from tests.engine.golden import checkpoint

MINUTES = 5.0  # in the slow lane; a release is soaked for longer, by hand
NUM_CLIENTS = 16
SHARE_GIVEN_UP = 0.1
GROWTH_LIMIT = 1.05  # of the last third's mean resident memory, over the first third's
WARM_UP = 0.2  # of the time, before the first third begins
SAMPLE_S = 1.0
_JSON = r'\s*\{\s*"tag"\s*:\s*%s\s*,\s*"mood"\s*:\s*("good"|"bad"|null)\s*\}\s*'

ALONE = EngineOptions(max_model_len=320, max_num_seqs=1, prefix_cache=False, threads_per_rank=1)


def small_pools(tp_size: int) -> EngineOptions:
    """Room for 512 tokens, where up to 8 requests of up to 290 run. An exact replay gives the bits of a cold start."""
    return EngineOptions(
        tp_size=tp_size,
        max_model_len=320,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        kv_cache_tokens=512,
        num_window_tails=0,
        prefix_replay="exact",
        speculation="k=3,cap=conf:0.6",
        threads_per_rank=1,
    )


@dataclass(frozen=True)
class Known:
    """A greedy request and what it gets alone."""

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Scored:
    """A prompt and its logits alone, float32 [n, V]."""

    prompt: tuple[int, ...]
    logits: np.ndarray


def greedy_prompts() -> list[tuple[str, tuple[int, ...], int]]:
    """Kind, prompt and tokens to generate."""
    short = [("short", random_ids(3 + 2 * i, seed=i), 4 + 7 * i % 37) for i in range(10)]
    long = [("long", random_ids(110 + 9 * i, seed=100 + i), 3 + 11 * i % 41) for i in range(8)]
    sessions = []
    for number in range(3):
        turns = random_ids(180, seed=200 + number)
        for turn in range(4):
            sessions.append(("session", turns, 12))
            turns += random_ids(23, seed=300 + 10 * number + turn)
    return [*short, *long, *sessions]


async def alone() -> tuple[list[Known], list[Scored]]:
    """What each request gets when nobody else asks."""
    async with EngineClient(checkpoint(), ALONE) as engine:
        known = [
            Known(kind, prompt, await tokens_of(engine, GenerateRequest(f"alone {i}", prompt, greedy(count))))
            for i, (kind, prompt, count) in enumerate(greedy_prompts())
        ]
        prompts = [random_ids(20 + 25 * i, seed=400 + i) for i in range(4)]
        return known, [Scored(prompt, await engine.score(prompt)) for prompt in prompts]


@dataclass
class Soak:
    """Clients of one engine, and what they saw."""

    engine: EngineClient
    known: Sequence[Known]
    scored: Sequence[Scored]
    tokenizer: Tokenizer
    blanks: Sequence[int]  # tokens of nothing but white space
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    num_asked: Counter[str] = field(default_factory=Counter)
    num_given_up: int = 0
    faults: list[str] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def client(self, until_s: float) -> None:
        """One request after another, until the time is over or the engine has ended."""
        asks = (self.ask_known, self.ask_sampled, self.ask_json, self.ask_score)
        while time.monotonic() < until_s:
            ask = asks[int(self.random.choice(len(asks), p=(0.5, 0.2, 0.15, 0.15)))]
            name = f"r{next(self.numbers)}"
            try:
                await ask(name)
            except (DeskfleetError, ValueError) as error:
                if self.engine.failure is not None:
                    raise
                self.faults.append(f"{name}, {ask.__name__}: {error}")

    async def ask_known(self, name: str) -> None:
        known = self.known[int(self.random.integers(len(self.known)))]
        tokens, is_whole = await self.generate(known.kind, name, known.prompt, greedy(len(known.answer)))
        wanted = known.answer if is_whole else known.answer[: len(tokens)]
        self.check(tokens == wanted, f"{name}, {known.kind}: {tokens} instead of {wanted}")

    async def ask_sampled(self, name: str) -> None:
        left = self.random.choice(np.arange(3, 500), 3, replace=False).tolist()
        count = int(self.random.integers(4, 25))
        sampling = SamplingParams(
            top_k=3, max_tokens=count, ignore_eos=True, logit_bias=tuple((token, 100.0) for token in left)
        )
        prompt = random_ids(int(self.random.integers(3, 60)), seed=int(self.random.integers(2**32)))
        tokens, is_whole = await self.generate("sampled", name, prompt, sampling)
        self.check(set(tokens) <= set(left), f"{name}, sampled: {tokens} of {left}")
        self.check(not is_whole or len(tokens) == count, f"{name}, sampled: {len(tokens)} of {count} tokens")

    async def ask_json(self, name: str) -> None:
        schema = {
            "type": "object",
            "properties": {"tag": {"const": name}, "mood": {"enum": ["good", "bad", None]}},
            "required": ["tag", "mood"],
            "additionalProperties": False,
        }
        sampling = SamplingParams(
            max_tokens=200,
            constraint=Constraint("json_schema", json.dumps(schema)),
            logit_bias=tuple((token_id, -100.0) for token_id in self.blanks),
        )
        prompt = random_ids(int(self.random.integers(3, 40)), seed=int(self.random.integers(2**32)))
        tokens, is_whole = await self.generate("json", name, prompt, sampling)
        text = self.tokenizer.decode(list(tokens))
        tag = json.dumps(name)
        if is_whole:
            self.check(re.fullmatch(_JSON % tag, text) is not None, f"{name}, json: {text!r}")
        else:
            values = re.findall(r'"tag"\s*:\s*("\w*"?)', text)
            self.check(all(tag.startswith(value) for value in values), f"{name}, json, given up: {text!r}")

    async def ask_score(self, name: str) -> None:
        scored = self.scored[int(self.random.integers(len(self.scored)))]
        self.num_asked["score"] += 1
        logits = await self.engine.score(scored.prompt)
        self.check(
            np.array_equal(logits, scored.logits), f"{name}: other logits for {len(scored.prompt)} tokens"
        )

    async def generate(
        self, kind: str, name: str, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> tuple[tuple[int, ...], bool]:
        """The tokens of a request, and whether it came to its end or was given up on the way."""
        self.num_asked[kind] += 1
        patience = int(self.random.integers(1, 6)) if self.random.random() < SHARE_GIVEN_UP else None
        tokens, num_chunks = (), 0
        request = GenerateRequest(name, prompt, sampling)
        async with contextlib.aclosing(self.engine.generate(request)) as stream:
            async for chunk in stream:
                tokens += chunk.token_ids
                num_chunks += 1
                if chunk.finish_reason is not None:
                    return tokens, True
                if num_chunks == patience:
                    break
        self.num_given_up += 1
        return tokens, False

    def check(self, is_right: bool, fault: str) -> None:
        if not is_right:
            self.faults.append(fault)


class Memory:
    """Resident memory of processes, sampled while they work."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._samples: list[dict[str, int]] = []

    async def watch(self) -> None:
        while True:
            self._samples.append({name: p.memory_info().rss for name, p in self._processes.items()})
            await asyncio.sleep(SAMPLE_S)

    def thirds(self) -> dict[str, tuple[float, float]]:
        """Mean bytes of each process in the first and in the last third of the time after warm-up."""
        samples = self._samples[int(len(self._samples) * WARM_UP) :]
        size = len(samples) // 3
        return {
            name: tuple(statistics.fmean(s[name] for s in part) for part in (samples[:size], samples[-size:]))
            for name in self._processes
        }


@dataclass(frozen=True)
class Outcome:
    """What a soak found. `thirds_bytes`: mean resident memory of each process early and late."""

    minutes: float
    tp_size: int
    num_asked: dict[str, int]
    num_given_up: int
    faults: list[str]
    thirds_bytes: dict[str, tuple[float, float]]
    stats: EngineStats

    def shortcomings(self) -> list[str]:
        """Everything that must not be; empty when all is well."""
        stats = self.stats
        found = [f"{len(self.faults)} wrong answers, e.g. {self.faults[0]}"] if self.faults else []
        for name, is_good in {
            "requests that failed": stats.num_not_finite == stats.num_expired == 0,
            "requests unaccounted for": stats.num_finished + stats.num_cancelled
            == sum(self.num_asked.values()),
            "requests left over": idle(stats),
            "blocks leaked": stats.num_free_blocks == stats.num_blocks,
            "window blocks leaked": stats.num_free_window_blocks == stats.num_window_blocks,
            # Without these it was no soak.
            "nobody given up": self.num_given_up > 0 and stats.num_cancelled > 0,
            "nobody preempted": stats.num_preempted > 0,
            "no prefix found": stats.num_prefix_hits > 0,
            "no draft accepted": stats.num_accepted > 0,
        }.items():
            if not is_good:
                found.append(name)
        for name, (early, late) in self.thirds_bytes.items():
            if late > GROWTH_LIMIT * early:
                found.append(f"{name} grew from {early / 2**20:.1f} to {late / 2**20:.1f} MiB")
        return found


async def soak(minutes: float, tp_size: int) -> Outcome:
    """Keep a group of `tp_size` ranks busy for so long, then wait until it is idle."""
    known, scored = await alone()
    tokenizer = load_tokenizer(checkpoint().directory)
    blanks = [i for i in range(tokenizer.get_vocab_size()) if tokenizer.decode([i]).isspace()]
    async with EngineClient(checkpoint(), small_pools(tp_size)) as engine:
        work = Soak(engine, known, scored, tokenizer, blanks)
        memory = Memory({"supervisor": os.getpid()} | {f"rank {r.rank}": r.pid for r in engine.ranks})
        watcher = asyncio.create_task(memory.watch())
        until_s = time.monotonic() + 60 * minutes
        async with asyncio.TaskGroup() as clients:
            for _ in range(NUM_CLIENTS):
                clients.create_task(work.client(until_s))
        watcher.cancel()
        stats = await stats_when(engine, idle, within_s=120)
    return Outcome(
        minutes=minutes,
        tp_size=tp_size,
        num_asked=dict(work.num_asked),
        num_given_up=work.num_given_up,
        faults=work.faults,
        thirds_bytes=memory.thirds(),
        stats=stats,
    )


class Confused:
    """An engine that gives everybody the same answer."""

    failure = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        yield TokenChunk((7, 8, 9), None, len(request.prompt_token_ids), "stop")

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        return np.zeros((len(token_ids), 2), np.float32)


async def test_answers_of_others_are_seen() -> None:
    scored = Scored((3, 4), np.ones((2, 2), np.float32))
    tokenizer = load_tokenizer(checkpoint().directory)
    work = Soak(Confused(), [Known("short", (3,), (7, 8))], [scored], tokenizer, ())  # type: ignore[arg-type]
    for ask in (work.ask_known, work.ask_sampled, work.ask_json, work.ask_score):
        work.faults.clear()
        await ask("r1")
        assert work.faults
    assert work.num_asked == Counter(short=1, sampled=1, json=1, score=1)


def test_what_is_left_over_is_seen() -> None:
    good = EngineStats(
        num_finished=9, num_cancelled=1, num_preempted=1, num_prefix_hits=1, num_accepted=1, num_blocks=5,
        num_free_blocks=5, num_window_blocks=6, num_free_window_blocks=6,
    )  # fmt: skip
    outcome = Outcome(1.0, 1, {"short": 10}, 1, [], {"rank 0": (100.0, 105.0)}, good)
    assert outcome.shortcomings() == []
    for changes, words in (
        ({"stats": replace(good, num_free_blocks=4)}, "blocks leaked"),
        ({"stats": replace(good, num_free_window_blocks=5)}, "window blocks leaked"),
        ({"stats": replace(good, num_finished=8)}, "requests unaccounted for"),
        ({"stats": replace(good, num_waiting=1)}, "requests left over"),
        ({"faults": ["r1: no"]}, "1 wrong answers, e.g. r1: no"),
        ({"thirds_bytes": {"rank 0": (100 * 2**20, 106 * 2**20)}}, "rank 0 grew from 100.0 to 106.0 MiB"),
    ):
        assert replace(outcome, **changes).shortcomings() == [words]  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
async def test_soak(tp_size: int) -> None:
    assert (await soak(MINUTES, tp_size)).shortcomings() == []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--tp", type=int, default=1, help="number of ranks")
    parser.add_argument("--out", type=Path, help="keep the summary in this file")
    flags = parser.parse_args()
    outcome = asyncio.run(soak(flags.minutes, flags.tp))
    summary = json.dumps(asdict(outcome) | {"shortcomings": outcome.shortcomings()}, indent=1)
    print(summary)
    if flags.out is not None:
        flags.out.write_text(summary + "\n")
    sys.exit(bool(outcome.shortcomings()))


if __name__ == "__main__":
    main()
