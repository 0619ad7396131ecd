"""One run on an endpoint: what it is, then decode, prefill and mixed load, in interleaved rounds of which the first is
warm-up.

Owns the order and the lengths of prompts. Judges nothing itself (`caveats`) and prints nothing: the caller is told of
every batch. A server that is gone ends the run; a batch that fails is refused and the run goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from msgspec.structs import replace

from deskfleet.bench.load import caveats
from deskfleet.bench.load.corpus import Corpus, filler
from deskfleet.bench.load.counters import Counters, read_counters, read_settled
from deskfleet.bench.load.driver import Ask, Driven, arrivals, closed_loop, open_loop
from deskfleet.bench.load.identity import describe
from deskfleet.bench.load.machine import LowWater, OwnCpu, busy_share, is_here
from deskfleet.bench.load.prompts import mark, prompt
from deskfleet.bench.load.record import Batch, Caveat, Condition, LoadResult, Setup
from deskfleet.bench.load.suite import LoadSuite, with_extra
from deskfleet.bench.provenance import Provenance
from deskfleet.client import Client, ServedModel
from deskfleet.errors import ConfigError, EngineError

SILENCE_S = 3600.0
"""How long the server may be silent: a prompt of 900,000 tokens has been seen to take 1,030 s."""

_CALIBRATION_CHARACTERS = (2000, 8000)
_PREFILL_TOKENS = 4
_LONGEST_TEMPLATE = 32.0
_MIXED_WARM_UP = 0.2


def _ignore(batch: Batch) -> None:
    """Take a batch and do nothing."""


async def measure_load(
    url: str,
    suite: LoadSuite,
    provenance: Provenance,
    *,
    key: str | None = None,
    declared: dict[str, Condition] | None = None,
    on_batch: Callable[[Batch], None] = _ignore,
) -> LoadResult:
    """Measure the endpoint at `url`. `declared` are conditions that the caller knows of the server.

    Raises ConfigError for a set-up that is refused before anything was measured, ServerGone or EngineError when nobody
    answers or the engine ends on the way.
    """
    place = caveats.of_place(is_here=is_here(url), busy_share=busy_share())
    labels = suite.policy.check(place, hint="run it from another machine, or when this one is idle")
    async with Client(url, key=key, silence_s=SILENCE_S) as client:
        server = await describe(client)
        run = _Run(client, suite, server.model, server.counters, on_batch)
        if suite.requests:
            found = caveats.of_requests(suite.requests, speculates=run.speculates)
            labels += suite.policy.check(found, hint="change the requests")
        await run.calibrate()
        for number in range(suite.rounds + 1):
            await run.decode(number)
            await run.prefill(number)
        await run.mixed()
        ending = await read_counters(client)
    if not run.batches:
        raise ConfigError("nothing was left to measure", hint="; ".join(run.skipped))
    conditions = {**server.conditions, **suite.as_conditions(), **run.conditions(ending)}
    return LoadResult(
        provenance=provenance,
        conditions={**conditions, **(declared or {}), **suite.conditions},
        settings={"url": url, **suite.as_settings(), **run.settings()},
        warm_up=tuple(run.warm_up),
        batches=tuple(run.batches),
        labels=labels,
        skipped=tuple(run.skipped),
    )


@dataclass
class _Lengths:
    """How many characters make a token of this server, by every prompt so far; and how many it has without text."""

    overhead_tokens: float = 0.0
    num_characters: int = 0
    num_tokens: float = 0.0

    @property
    def characters_per_token(self) -> float:
        return self.num_characters / self.num_tokens if self.num_tokens > 0 else 4.0

    def learn(self, num_characters: int, num_tokens: int) -> None:
        """A prompt of so many characters was of so many tokens."""
        self.num_characters += num_characters
        self.num_tokens += max(1.0, num_tokens - self.overhead_tokens)

    def characters(self, num_tokens: int) -> int:
        return max(1, round((num_tokens - self.overhead_tokens) * self.characters_per_token))


class _Run:
    """A run as far as it has come."""

    def __init__(
        self,
        client: Client,
        suite: LoadSuite,
        model: ServedModel,
        counters: Counters,
        on_batch: Callable[[Batch], None],
    ) -> None:
        self.warm_up: list[Batch] = []
        self.batches: list[Batch] = []
        self.skipped: list[str] = []
        self._client, self._suite, self._model = client, suite, model
        self._begin = counters
        self._on_batch = on_batch
        self._salt = suite.salt or os.urandom(6).hex()
        self._lengths = _Lengths()
        self._corpus: Corpus | None = None

    @property
    def speculates(self) -> bool | None:
        """Whether drafts have been verified since the server started; None where it does not say."""
        if self._begin.count.num_drafted or any(batch.server.num_drafted for batch in self._all()):
            return True
        # A server that has just been started has verified nothing yet, and may still do so.
        return False if self._begin.count.num_drafted == 0 and self._all() else None

    def _all(self) -> list[Batch]:
        return [*self.warm_up, *self.batches]

    def conditions(self, ending: Counters) -> dict[str, Condition]:
        """What is known of server and text only after the run."""
        count = ending.since(self._begin)
        speculation = {None: None, 0: "off"}.get(count.num_drafted, "on")
        found: dict[str, Condition] = {"speculation": speculation}
        if self._corpus is not None:
            found["text"] = f"{self._corpus.name} ({self._corpus.digest})"
        return found

    def settings(self) -> dict[str, Condition]:
        return {"salt": self._salt, "characters_per_token": round(self._lengths.characters_per_token, 3)}

    def _text(self) -> Corpus:
        if self._corpus is None:
            path, seed = self._suite.text, self._suite.seed
            self._corpus = (
                Corpus.of_interpreter(seed=seed) if path is None else Corpus.of_file(path, seed=seed)
            )
        return self._corpus

    async def calibrate(self) -> None:
        """Learn from two short prompts how long text must be to make so many tokens. The server counts them."""
        suite = self._suite
        needs_text = ("prefill" in suite.parts) or any(suite.context if "decode" in suite.parts else ())
        if not needs_text and not ("mixed" in suite.parts and any(suite.mixed_context)):
            return
        sizes = []
        longest = self._model.max_model_len
        for number, characters in enumerate(_CALIBRATION_CHARACTERS):
            if longest is not None:  # a character is at most a token
                characters = min(characters, max(longest // 4 * (number + 1), 16))
            text = f"{mark(self._salt, 'calibration', number)}\n\n{self._text().take(characters)}"
            body = suite.body(self._model.id, text, sampling="greedy", max_tokens=_PREFILL_TOKENS)
            reply = await self._client.ask(body)
            sizes.append((len(text), reply.num_prompt_tokens))
        (short, short_tokens), (long, long_tokens) = sizes
        if long_tokens <= short_tokens:
            raise EngineError(
                f"the server counts {short_tokens} tokens in {short} characters and {long_tokens} in {long}",
                hint="it cuts prompts short, or its usage is no count of tokens",
            )
        per_token = (long - short) / (long_tokens - short_tokens)
        # Text differs more than templates are long: an overhead of many tokens would be an artefact of the text.
        self._lengths = _Lengths(min(max(0.0, short_tokens - short / per_token), _LONGEST_TEMPLATE))
        for characters, tokens in sizes:
            self._lengths.learn(characters, tokens)

    async def decode(self, number: int) -> None:
        """One round of every decode set-up."""
        if "decode" not in self._suite.parts:
            return
        for setup in self._decode_setups():
            if not self._fits(setup.context + self._suite.num_tokens, setup, number):
                continue
            asks = [self._decode_ask(setup, number, stream) for stream in range(setup.concurrency or 1)]
            await self._batch(setup, number, asks)

    def _decode_setups(self) -> Iterator[Setup]:
        suite = self._suite
        kinds = ("requests",) if suite.requests else suite.kinds
        for sampling in suite.samplings:
            for kind in kinds:
                for context in suite.context:
                    for streams in suite.concurrency:
                        yield Setup(
                            part="decode", case=kind, sampling=sampling, concurrency=streams, context=context
                        )

    def _decode_ask(self, setup: Setup, number: int, stream: int) -> Ask:
        suite = self._suite
        if setup.case == "requests":
            own = suite.requests[(number * (setup.concurrency or 1) + stream) % len(suite.requests)]
            return Ask("requests", with_extra({"model": self._model.id, **own}, suite.extra_body))
        place = (setup.sampling, setup.concurrency, setup.context, number, stream)
        context = self._text().take(self._lengths.characters(setup.context)) if setup.context else ""
        text = prompt(setup.case, salt=self._salt, place=place, context=context)
        body = suite.body(self._model.id, text, sampling=setup.sampling, max_tokens=suite.num_tokens)
        if setup.sampling == "sampled":
            body["seed"] = int(mark("seed", *place), 16) % 2**31
        return Ask(setup.case, body)

    async def prefill(self, number: int) -> None:
        """One climb of the ladder; in the warm-up only its first rung."""
        suite = self._suite
        if "prefill" not in suite.parts:
            return
        case = "filler" if suite.filler else "text"
        climbed = []
        for rung in sorted(suite.ladder)[: 1 if number == 0 else None]:
            setup = Setup(part="prefill", case=case, context=rung)
            if not self._fits(rung + _PREFILL_TOKENS, setup, number):
                continue
            length = self._lengths.characters(rung)
            text = filler(length) if suite.filler else self._text().take(length)
            marked = f"{mark(self._salt, 'prefill', rung, number)}\n\n{text}"
            body = suite.body(self._model.id, marked, sampling="greedy", max_tokens=_PREFILL_TOKENS)
            batch = await self._batch(setup, number, [Ask(case, body)])
            if not suite.filler and not batch.refusals:
                for stream in batch.answered:
                    self._lengths.learn(len(marked), stream.num_prompt_tokens)
            climbed.append(batch)
        for caveat in caveats.of_ladder(climbed):
            self._label_last(caveat)

    async def mixed(self) -> None:
        """Requests of all kinds as they come: a short warm-up, then the measurement."""
        suite = self._suite
        if "mixed" not in suite.parts:
            return
        setup = Setup(part="mixed", case="all kinds", concurrency=None, rate=suite.rate)
        for number, duration_s in enumerate((_MIXED_WARM_UP * suite.mixed_s, suite.mixed_s)):
            due_s = arrivals(suite.rate, duration_s, seed=suite.seed + number)
            random = Random(f"mixed/{suite.seed}/{number}")
            fitting = [c for c in suite.mixed_context if self._fits(c + suite.num_tokens, setup, number)]
            if not fitting:
                return
            asks = []
            for stream in range(len(due_s)):
                kind, context = random.choice(suite.kinds), random.choice(fitting)
                drawn = replace(setup, case=kind, context=context)
                asks.append(self._decode_ask(drawn, number, stream))
            await self._batch(setup, number, asks, due_s)

    def _fits(self, num_tokens: int, setup: Setup, number: int) -> bool:
        """Say whether a request fits the served context; if not, remember it once."""
        longest = self._model.max_model_len
        if longest is None or num_tokens <= longest:
            return True
        text = f"{setup.title}: {num_tokens:,} tokens do not fit the served {longest:,}"
        if text not in self.skipped:
            self.skipped.append(text)
        return False

    async def _batch(
        self, setup: Setup, number: int, asks: Sequence[Ask], due_s: Sequence[float] | None = None
    ) -> Batch:
        client, suite = self._client, self._suite
        num_passes = self._corpus.num_passes if self._corpus is not None else 0
        before = await read_counters(client)
        cpu = OwnCpu()
        async with LowWater(client) as low:
            if due_s is None:
                driven = await closed_loop(client, asks, concurrency=setup.concurrency or 1)
            else:
                driven = await open_loop(client, asks, due_s, most_open=suite.most_open)
        cpu_share = cpu.share()
        num_tokens = sum(stream.num_completion_tokens for stream in driven.streams)
        after = await read_settled(client, before, num_tokens=num_tokens)
        batch = Batch(
            setup=setup,
            round=number,
            wall_s=driven.wall_s,
            streams=driven.streams,
            server=after.since(before),
            low_water_bytes=low.bytes,
            client_cpu=round(cpu_share, 3),
        )
        batch = self._judged(batch, driven, text_was_reused=num_passes > 0)
        (self.warm_up if number == 0 else self.batches).append(batch)
        self._on_batch(batch)
        return batch

    def _judged(self, batch: Batch, driven: Driven, *, text_was_reused: bool) -> Batch:
        found = caveats.of_batch(batch, speculates=self.speculates)
        if batch.setup.part == "prefill":
            found += caveats.of_cold_prompt(
                batch, num_allowed=self._suite.num_cached_allowed, count=batch.server
            )
        if text_was_reused and batch.setup.context:
            found.append(Caveat("text-reused", "name a longer text with --text"))
        if driven.is_overloaded:
            found.append(Caveat("overloaded", f"{self._suite.most_open} requests were open"))
        refusals, labels = self._suite.policy.sort(found)
        return replace(batch, refusals=refusals, labels=labels)

    def _label_last(self, caveat: Caveat) -> None:
        kept = self.batches if self.batches else self.warm_up
        refusals, labels = self._suite.policy.sort([caveat])
        last = kept[-1]
        kept[-1] = replace(last, refusals=last.refusals + refusals, labels=last.labels + labels)


__all__ = ["SILENCE_S", "measure_load"]
