"""What one key may use: requests and tokens per minute, and which models. Owns the counting; knows no clock but one.

Both limits are buckets that a minute fills. A request takes one from the first, and what its prompt and its answer
have in tokens from the second. How long an answer will be is not known before, so a bucket may be overdrawn: the next
request waits for what the last ones took. Each key has its own buckets, over all models; callers without a key share
one. What is used up stays used up when the settings are read again.

How many requests of a key run at once is the queue's affair (admission.py), how long answers are the completion cap's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, Field

from deskfleet.endpoint import TokenChunk
from deskfleet.gateway.policies.contract import Draft, Watcher
from deskfleet.gateway.policies.counting import Counters, CounterSpec, Place
from deskfleet.gateway.policies.section import Section
from deskfleet.gateway.refusals import NotPermitted, TooManyRequests

REFUSED = CounterSpec("key_refused", "Requests refused because of a limit of their key, by limit", ("limit",))
TOKENS = CounterSpec("key_tokens", "Tokens of prompts and answers, by key")
COUNTERS = (REFUSED, TOKENS)

_MINUTE_S = 60.0

Names = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
]


class KeyLimitsSettings(Section):
    """What one key may use."""

    enabled: bool = Field(default=True, description="Whether the limits below hold.")
    requests_per_minute: int | None = Field(default=None, ge=1, description="None: no limit.")
    tokens_per_minute: int | None = Field(
        default=None, ge=1, description="Prompt and answer together. None: no limit."
    )
    models: Names | None = Field(
        default=None, min_length=1, description="Models that may be asked. None: every model."
    )


@dataclass(slots=True)
class _Bucket:
    """`level` is what is left, below 0 where more was taken than there was."""

    level: float
    filled_at_s: float

    def fill(self, per_minute: int, now_s: float) -> None:
        """Let in what has come since the last time."""
        gained = (now_s - self.filled_at_s) * per_minute / _MINUTE_S
        self.level = min(self.level + gained, float(per_minute))
        self.filled_at_s = now_s


class Usage:
    """How much every key has used lately. One for a gateway, and any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[tuple[str, str | None], _Bucket] = {}

    def missing_s(self, kind: str, key: str | None, per_minute: int) -> float:
        """Return in how many seconds one may be taken; 0 when now."""
        with self._lock:
            level = self._filled(kind, key, per_minute).level
        # Rounding must not turn the very second that was promised into another one to wait for.
        return 0.0 if level >= 1 - 1e-6 else (1 - level) * _MINUTE_S / per_minute

    def take(self, kind: str, key: str | None, per_minute: int, amount: float) -> None:
        """Take `amount`, whether there is so much or not."""
        with self._lock:
            self._filled(kind, key, per_minute).level -= amount

    def _filled(self, kind: str, key: str | None, per_minute: int) -> _Bucket:
        now_s = self._clock()
        bucket = self._buckets.get((kind, key))
        if bucket is None:
            bucket = self._buckets[kind, key] = _Bucket(float(per_minute), now_s)
        bucket.fill(per_minute, now_s)
        return bucket


class KeyLimits:
    """The policy. Comes first: a request that may not be made is not looked at any further."""

    name = "key_limits"

    def __init__(self, settings: KeyLimitsSettings, usage: Usage, counters: Counters) -> None:
        self._settings = settings
        self._usage = usage
        self._counters = counters
        self._is_limited = settings.enabled and (
            settings.models is not None
            or settings.requests_per_minute is not None
            or settings.tokens_per_minute is not None
        )
        self._places: dict[tuple[str, str | None], Place] = {}  # where tokens are counted

    def shape(self, draft: Draft) -> Draft:
        """Return the request as it is, and count it. Raises NotPermitted and TooManyRequests."""
        if not self._is_limited:
            return draft
        settings, key = self._settings, draft.caller.key
        if settings.models is not None and draft.model_id not in settings.models:
            self._counters.add(REFUSED, draft.model_id, key, "models")
            raise NotPermitted(
                f"{_subject(key)} may not use the model {draft.model_id!r}",
                hint=f"it may use {', '.join(settings.models)}",
            )
        limits = (("requests", settings.requests_per_minute, 1), ("tokens", settings.tokens_per_minute, 0))
        for kind, per_minute, _ in limits:
            wait_s = 0.0 if per_minute is None else self._usage.missing_s(kind, key, per_minute)
            if wait_s > 0:
                self._counters.add(REFUSED, draft.model_id, key, kind)
                raise TooManyRequests(
                    f"{_subject(key)} has used up its {per_minute} {kind} per minute",
                    retry_after_s=wait_s,
                    hint=f"try again in {wait_s:.1f} s",
                )
        for kind, per_minute, amount in limits:
            if per_minute is not None:
                self._usage.take(kind, key, per_minute, amount)
        return draft

    def watcher(self, draft: Draft) -> Watcher | None:
        """Return what counts the tokens of one answer, and of its prompt once an engine has taken it."""
        key = draft.caller.key
        tokens = self._places.get((draft.model_id, key))
        if tokens is None:
            tokens = self._counters.place(TOKENS, draft.model_id, key)
            self._places[draft.model_id, key] = tokens
        return _TokenCount(self._settings, draft, self._usage, tokens)


class _TokenCount:
    """Counts one answer."""

    def __init__(self, settings: KeyLimitsSettings, draft: Draft, usage: Usage, tokens: Place) -> None:
        self._per_minute = settings.tokens_per_minute if settings.enabled else None
        self._key = draft.caller.key
        self._usage = usage
        self._tokens = tokens
        self._num_uncounted = draft.num_prompt_tokens

    def push(self, chunk: TokenChunk) -> TokenChunk:
        """Return `chunk`; the prompt counts with the first."""
        amount = len(chunk.token_ids) + self._num_uncounted
        self._num_uncounted = 0
        self._tokens.add(amount)
        if self._per_minute is not None:
            self._usage.take("tokens", self._key, self._per_minute, amount)
        return chunk


def _subject(key: str | None) -> str:
    return f"the key {key!r}" if key is not None else "whoever has no key"


__all__ = ["COUNTERS", "KeyLimits", "KeyLimitsSettings", "Usage"]
