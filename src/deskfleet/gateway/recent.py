"""Requests as seen from outside: `RequestRecord`, and those that run or ran lately.

Owns what is remembered of a request: times, counts and names. Never a word of a prompt or an answer, and of keys only
their names, so that whoever shows or writes records cannot leak either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from deskfleet.endpoint import TokenChunk

Outcome = Literal["ok", "refused", "cancelled", "failed"]
"""`refused` is a 4xx, `cancelled` a client that went away, `failed` a 5xx or an error inside a stream."""

OUTCOMES: tuple[Outcome, ...] = ("ok", "refused", "cancelled", "failed")


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One HTTP request, filled in while it is answered. `..._s` are seconds of one monotonic clock.

    `request_id` is the client's own, or empty until one is chosen; `own_id` is what queue and engine call it.
    `protocol` is None for what generates nothing (models, metrics). `began_at` is the time of day, in seconds since
    1970. The engine's part begins at `given_s`. `num_prompt_tokens` has every image at its full span, the numbers of
    drafts and their rows are of generations that are over. `repairs` are kinds of markup that had to be put right.
    """

    request_id: str
    method: str
    path: str
    began_s: float
    began_at: float
    own_id: str = ""
    protocol: str | None = None
    client: str | None = None
    key: str | None = None
    model: str | None = None
    trace_parent: str | None = None
    given_s: float | None = None
    queued_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_verify_steps: int = 0
    num_wasted_rows: int = 0
    finish_reason: str | None = None
    stop_reason: str | None = None
    ended_s: float | None = None
    status: int | None = None
    outcome: Outcome | None = None
    error: str | None = None
    repairs: frozenset[str] = frozenset()

    def watch(self, chunk: TokenChunk) -> TokenChunk:
        """Note how the answer ends when policies have had their say, which the engine may never hear of."""
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason
        return chunk

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request's arrival to its first token."""
        return None if self.first_token_s is None else self.first_token_s - self.began_s

    @property
    def duration_s(self) -> float | None:
        """Seconds from arrival to end, None while it runs."""
        return None if self.ended_s is None else self.ended_s - self.began_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for fewer than two, or when all came at once."""
        decoding_s = self.decoding_s
        return None if decoding_s is None else decoding_s / (self.num_generated_tokens - 1)

    @property
    def decoding_s(self) -> float | None:
        """Seconds from the first token to the latest; None for fewer than two, or when all came at once."""
        if self.first_token_s is None or self.last_token_s is None or self.num_generated_tokens < 2:
            return None
        return self.last_token_s - self.first_token_s or None

    @property
    def tok_s(self) -> float | None:
        """Tokens per second of this stream after its first token."""
        tpot_s = self.tpot_s
        return None if tpot_s is None else 1.0 / tpot_s


CURRENT: ContextVar[RequestRecord | None] = ContextVar("deskfleet_request_record", default=None)
"""The request that the running task answers: how an engine's wrapper knows whose tokens it sees."""


class RecentRequests:
    """Requests that generate something: those that run, and the latest that have ended."""

    def __init__(self, capacity: int = 200) -> None:
        self._running: dict[int, RequestRecord] = {}  # by identity: clients may choose the same id twice
        self._ended: deque[RequestRecord] = deque(maxlen=capacity)

    def begin(self, record: RequestRecord) -> None:
        """A request has arrived."""
        self._running[id(record)] = record

    def end(self, record: RequestRecord) -> None:
        """It is over."""
        if self._running.pop(id(record), None) is not None:
            self._ended.append(record)

    @property
    def num_running(self) -> int:
        """Requests being answered."""
        return len(self._running)

    def running(self) -> Iterator[RequestRecord]:
        """Those that run, oldest first."""
        yield from self._running.values()

    def ended(self, limit: int | None = None) -> Iterator[RequestRecord]:
        """Those that have ended, the latest first."""
        for place, record in enumerate(reversed(self._ended)):
            if limit is not None and place >= limit:
                return
            yield record


__all__ = ["CURRENT", "OUTCOMES", "Outcome", "RecentRequests", "RequestRecord"]
