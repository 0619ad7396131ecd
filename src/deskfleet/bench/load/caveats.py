"""What makes a number misleading. Owns every rule: which set-ups are refused, and what is said beside a number.

A refusal means that the number is not what its name says; who wants it all the same allows its kind, and it becomes a
label. A label means that the number is what it says, under a condition that others would not guess. Pure functions of
what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from deskfleet.bench.load.predictable import Predictability, predictability
from deskfleet.bench.load.record import Batch, Caveat, ServerCount
from deskfleet.errors import ConfigError

REFUSALS: dict[str, str] = {
    "no-max-tokens": "a request says nothing of max_tokens: how long the answer is is the server's choice",
    "shared-prefix": "requests begin alike: the second is served from the prefix cache",
    "repetitive-prompt": "with speculation, text that repeats itself or counts is guessed for free",
    "cached": "a prompt that was to be read cold came from the prefix cache",
    "truncated": "the server read fewer prompt tokens than were sent",
    "token-mismatch": "the server's usage and its own counters disagree",
    "failed-streams": "a stream was refused or failed",
    "overloaded": "requests came faster than they were answered, until too many were open",
    "all-at-once": "an answer was held back and came in one piece: no rate can be told",
}
"""Kinds that keep a number out of every table, unless allowed."""

LABELS: dict[str, str] = {
    "filler": "one word over and over: hot Engram rows and experts inflate prefill by 9 to 42 %",
    "client-on-server": "the load generator ran on the machine it measured, and took CPU and memory from it",
    "busy-machine": "the machine of the load generator was busy before anything began",
    "slow-client": "the load generator used most of a core: it may have measured itself",
    "late": "requests were sent after they were due; their latency counts from when they were due",
    "predictable-answer": "answers repeat themselves or count: with speculation, faster than what people ask for",
    "short-answers": "answers ended before max_tokens, so the streams did not run together to the end",
    "other-traffic": "the server answered others meanwhile",
    "cache-unknown": "the server does not say how many prompt tokens came from its cache",
    "count-unknown": "the server counts no tokens of its own to check usage against",
    "text-reused": "there was not enough text: some of it was read twice, from different places in a prompt",
    "not-monotonic": "a longer prompt took less time than a shorter one: something was cached or warm",
    "few-samples": "percentiles of fewer than 20 values are little more than their extremes",
}
"""Kinds that stay beside a number."""

KINDS = {**REFUSALS, **LABELS}

_TOKEN_TOLERANCE = 0.05
_REACHED, _REACHED_SHORT, _LONG = 0.8, 0.5, 1000
"""How much of the asked length must be counted. How many tokens a short text has is known less well beforehand."""
_SHARED_CHARACTERS = 200
_BUSY = 0.25
_CLIENT_CPU = 0.8
_LATE_S = 0.05
_FEW = 20
_LEAST_TPOT_S = 5e-5
"""No model gives a single stream 20,000 tokens a second."""
_TIMED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Policy:
    """What is allowed that would be refused. Raises ConfigError for a kind that does not exist.

    `strict` refuses labels too.
    """

    allowed: frozenset[str] = frozenset()
    strict: bool = False

    def __post_init__(self) -> None:
        if unknown := sorted(self.allowed - REFUSALS.keys()):
            raise ConfigError(
                f"there is nothing called {unknown[0]!r} to allow", hint=f"known are {', '.join(REFUSALS)}"
            )

    def sort(self, found: Iterable[Caveat]) -> tuple[tuple[Caveat, ...], tuple[Caveat, ...]]:
        """Return (refusals, labels)."""
        refusals: list[Caveat] = []
        labels: list[Caveat] = []
        for caveat in found:
            refused = self.strict or (caveat.kind in REFUSALS and caveat.kind not in self.allowed)
            (refusals if refused else labels).append(caveat)
        return tuple(refusals), tuple(labels)

    def check(self, found: Iterable[Caveat], *, hint: str) -> tuple[Caveat, ...]:
        """Return the labels. Raises ConfigError for the first refusal: before anything was measured."""
        refusals, labels = self.sort(found)
        if refusals:
            kind, text = refusals[0].kind, refusals[0].text
            allow = f"; --allow {kind} measures it all the same, labelled" if kind in REFUSALS else ""
            raise ConfigError(f"{kind}: {text}", hint=hint + allow)
        return labels


def of_requests(bodies: Sequence[Mapping[str, Any]], *, speculates: bool | None) -> list[Caveat]:
    """Judge requests that a user brought. `speculates` None means that the server does not say."""
    found = []
    silent = [
        number
        for number, body in enumerate(bodies, 1)
        if body.get("max_tokens") is None and body.get("max_completion_tokens") is None
    ]
    if silent:
        found.append(Caveat("no-max-tokens", f"request {silent[0]} of {len(bodies)} has no max_tokens"))
    begins = [json.dumps(body.get("messages", body.get("prompt")))[:_SHARED_CHARACTERS] for body in bodies]
    for number, begin in enumerate(begins):
        if begin in begins[:number]:
            first = begins.index(begin) + 1
            found.append(
                Caveat(
                    "shared-prefix",
                    f"requests {first} and {number + 1} begin with the same {len(begin)} characters",
                )
            )
            break
    if speculates is not False:
        for number, body in enumerate(bodies, 1):
            measured = predictability(text_of(body))
            if measured.is_inflating:
                found.append(Caveat("repetitive-prompt", f"request {number}: {measured}"))
                break
    return found


def text_of(body: Mapping[str, Any]) -> str:
    """Return what a request's messages say, as one text."""
    parts: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, str):
            parts.append(value)
        elif isinstance(value, list):
            for each in value:
                collect(each)
        elif isinstance(value, dict):
            collect(value.get("content", value.get("text")))

    collect(body.get("messages", body.get("prompt")))
    return "\n".join(parts)


def of_place(*, is_here: bool, busy_share: float) -> list[Caveat]:
    """Judge where the load generator stands, before anything begins."""
    found = []
    if is_here:
        found.append(Caveat("client-on-server", "the endpoint is on the machine of the load generator"))
    if busy_share > _BUSY:
        found.append(Caveat("busy-machine", f"{busy_share:.0%} of its cores were busy with other work"))
    return found


def of_batch(batch: Batch, *, speculates: bool | None) -> list[Caveat]:
    """Judge what came back, whatever part of a run it belongs to."""
    found = _failures(batch)
    if batch.answered:
        found += _token_counts(batch)
        found += _answers(batch, speculates=speculates)
    if batch.client_cpu > _CLIENT_CPU:
        found.append(Caveat("slow-client", f"it used {batch.client_cpu:.0%} of a core"))
    if batch.setup.rate is not None and batch.late_s > _LATE_S:
        found.append(Caveat("late", f"by up to {1000 * batch.late_s:.0f} ms"))
    return found


def _failures(batch: Batch) -> list[Caveat]:
    failed = [stream for stream in batch.streams if stream.error is not None]
    if not failed:
        return []
    text = f"{len(failed)} of {len(batch.streams)}: {failed[0].error}"
    return [Caveat("failed-streams", text)]


def _token_counts(batch: Batch) -> list[Caveat]:
    """Hold usage against the server's own counter: it is the only other witness."""
    counted, finished = batch.server.num_generated_tokens, batch.server.num_finished
    if counted is None:
        return [Caveat("count-unknown", "no counter of generated tokens on /metrics")]
    used = batch.num_tokens
    if abs(counted - used) <= max(_TOKEN_TOLERANCE * max(counted, used), 2):
        return []
    served_others = finished is not None and finished > len(batch.answered)
    if counted > used and served_others:
        others = f"{finished} requests ended, {len(batch.answered)} of them ours"
        return [Caveat("other-traffic", f"{others}; {counted:,} tokens, {used:,} of them ours")]
    return [
        Caveat("token-mismatch", f"usage says {used:,} generated tokens, the engine's counter {counted:,}")
    ]


def _answers(batch: Batch, *, speculates: bool | None) -> list[Caveat]:
    found = []
    held = [
        stream
        for stream in batch.answered
        if stream.first_s is not None
        and stream.num_completion_tokens >= _TIMED_TOKENS
        and (not stream.gaps_s or (stream.tpot_s or 0.0) < _LEAST_TPOT_S)
    ]
    if held:
        text = f"{len(held)} of {len(batch.answered)}, e.g. {held[0].num_completion_tokens} tokens"
        found.append(Caveat("all-at-once", f"{text}: by a proxy, or by a machine too busy to read them"))
    inflating = [
        measured
        for stream in batch.answered
        if (measured := Predictability(stream.repeated, stream.counted)).is_inflating
    ]
    if inflating and speculates is not False:
        found.append(
            Caveat("predictable-answer", f"{len(inflating)} of {len(batch.answered)}, e.g. {inflating[0]}")
        )
    short = [stream for stream in batch.answered if stream.num_completion_tokens < stream.max_tokens]
    if short and batch.setup.part == "decode":
        lengths = sorted(stream.num_completion_tokens for stream in short)
        found.append(
            Caveat("short-answers", f"{len(short)} of {len(batch.answered)}, from {lengths[0]:,} tokens on")
        )
    return found


def of_cold_prompt(batch: Batch, *, num_allowed: int, count: ServerCount) -> list[Caveat]:
    """Judge a rung of the prefill ladder: read whole, and read cold. `num_allowed` cached tokens may be."""
    found = []
    for stream in batch.answered:
        reached = _REACHED if batch.setup.context >= _LONG else _REACHED_SHORT
        if stream.num_prompt_tokens < reached * batch.setup.context:
            found.append(
                Caveat(
                    "truncated",
                    f"a prompt of about {batch.setup.context:,} tokens was sent, the server counts "
                    f"{stream.num_prompt_tokens:,}",
                )
            )
        cached = stream.num_cached_tokens
        if cached is None:
            cached = count.num_cached_tokens
        if cached is None:
            found.append(Caveat("cache-unknown", "neither usage nor /metrics tells"))
        elif cached > num_allowed:
            found.append(Caveat("cached", f"{cached:,} of {stream.num_prompt_tokens:,} prompt tokens"))
    if batch.setup.case == "filler":
        found.append(Caveat("filler", "asked for with --filler"))
    return found


def of_ladder(batches: Sequence[Batch]) -> list[Caveat]:
    """Judge one climb, shortest prompt first: time must grow with length."""
    climbed = [(batch.setup.context, stream.ttft_s) for batch in batches for stream in batch.answered[:1]]
    for (shorter, short_s), (longer, long_s) in pairwise(climbed):
        if short_s is not None and long_s is not None and longer > shorter and long_s < short_s:
            return [
                Caveat(
                    "not-monotonic",
                    f"{longer:,} tokens took {long_s:.2f} s, {shorter:,} took {short_s:.2f} s",
                )
            ]
    return []


def of_samples(num_values: int) -> list[Caveat]:
    """Judge how many values stand behind percentiles."""
    return [Caveat("few-samples", f"{num_values} in one row")] if num_values < _FEW else []


__all__ = [
    "KINDS",
    "LABELS",
    "REFUSALS",
    "Policy",
    "of_batch",
    "of_cold_prompt",
    "of_ladder",
    "of_place",
    "of_requests",
    "of_samples",
    "text_of",
]
