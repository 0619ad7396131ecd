"""An engine that is watched: a `TokenEngine` in front of another one, through which every token of every protocol goes.

Owns what is open at this moment. It counts chunks, refuses new requests when told to, and can end those that wait for
the engine with a sentence, so that nobody waits for an engine that answers nothing any more. Knows nothing of why.

A waiting request is ended as `asyncio.timeout` does it: its task is cancelled, and the cancellation becomes the error.
That costs a stream nothing, unlike a race of every token against an alarm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from msgspec import Struct

from deskfleet.endpoint import EngineStats, GenerateRequest, TokenChunk, TokenEngine
from deskfleet.errors import EngineError
from deskfleet.gateway.metrics import GatewayMetrics
from deskfleet.gateway.recent import CURRENT
from deskfleet.gateway.symptoms import Traffic

CUT_SHORT = "the engine stopped answering before the end"


class _Open(Struct, eq=False):
    """One generation that is not over. `task` waits for the engine's next chunk, None while the client has the word."""

    num_prompt_tokens: int
    is_canary: bool
    task: asyncio.Task[object] | None = None
    num_chunks: int = 0
    is_counted: bool = False
    sentence: str | None = None  # why it is being ended


class WatchedEngine:
    """Passes everything on to `engine` and knows what is open. Every chunk is counted in `metrics`."""

    def __init__(
        self, engine: TokenEngine, metrics: GatewayMetrics, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.inner = engine
        self._metrics = metrics
        self._clock = clock
        self._open: set[_Open] = set()
        self._refusal: str | None = None
        self._num_chunks = self._num_answered = self._num_failed = self._num_failed_in_a_row = 0
        self._latest_failure: str | None = None
        self._token_s: float | None = None

    # --- contract -------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self.inner.max_model_len

    @property
    def failure(self) -> str | None:
        """None while the engine lives, else the sentence that says why it ended."""
        return self.inner.failure

    async def stats(self) -> EngineStats:
        """Return current counters. Raises EngineError when the engine is dead."""
        return await self.inner.stats()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the engine's chunks.

        Raises besides what the engine raises: EngineError at once while new requests are refused, when the request is
        ended from here, and when the engine's answer just ends.
        """
        return self._answer(request, is_canary=False)

    def canary(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """The same for a request that only looks whether the engine answers: never refused, ended or counted."""
        return self._answer(request, is_canary=True)

    async def _answer(self, request: GenerateRequest, *, is_canary: bool) -> AsyncGenerator[TokenChunk, None]:
        if self._refusal is not None and not is_canary:
            raise EngineError(self._refusal)
        this = _Open(len(request.prompt_token_ids), is_canary)
        record = None if is_canary else CURRENT.get()
        meter = None if record is None else self._metrics.meter(record, this.num_prompt_tokens, self._clock())
        # Once, not for every chunk: a generation is read by one task, the one that answers its request.
        inner, clock, reader = self.inner.generate(request), self._clock, asyncio.current_task()
        self._open.add(this)
        try:
            while True:
                this.task = reader
                try:
                    chunk = await inner.__anext__()
                except StopAsyncIteration:
                    raise EngineError(CUT_SHORT) from None
                except asyncio.CancelledError:
                    if this.sentence is None or reader is None or reader.uncancel() > 0:
                        raise
                    raise EngineError(this.sentence) from None
                this.task = None
                this.num_chunks += 1
                self._num_chunks += 1
                if meter is not None:
                    self._token_s = clock()
                    meter.chunk(chunk, self._token_s)
                if chunk.finish_reason is not None:
                    self._count(this, "the engine aborted it" if chunk.finish_reason == "abort" else None)
                    yield chunk
                    return
                yield chunk
        except EngineError as error:
            if record is not None:
                record.error = error.message
            self._count(this, error.message)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if this.num_chunks:
                # The client has had enough; what it got, it got from a working engine.
                self._count(this, None)
            raise
        finally:
            this.task = None
            self._open.discard(this)
            if meter is not None:
                meter.end()
            close = getattr(inner, "aclose", None)
            if close is not None:
                await close()

    def _count(self, this: _Open, failure: str | None) -> None:
        """Count how a generation ended, once. One that was ended from here says nothing about the engine."""
        if this.is_canary or this.is_counted or this.sentence is not None:
            return
        this.is_counted = True
        if failure is None:
            self._num_answered += 1
            self._num_failed_in_a_row = 0
        else:
            self._num_failed += 1
            self._num_failed_in_a_row += 1
            self._latest_failure = failure

    # --- for whoever watches --------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        """What is open now and what came of the rest."""
        waiting = [each for each in self._open if each.task is not None]
        return Traffic(
            num_open=sum(not each.is_canary for each in self._open),
            num_waiting=len(waiting),
            num_tokens_ahead=sum(each.num_prompt_tokens for each in waiting if not each.num_chunks),
            num_chunks=self._num_chunks,
            num_answered=self._num_answered,
            num_failed=self._num_failed,
            num_failed_in_a_row=self._num_failed_in_a_row,
            latest_failure=self._latest_failure,
        )

    @property
    def token_age_s(self) -> float | None:
        """Seconds since any request got a chunk, None before the first."""
        return None if self._token_s is None else self._clock() - self._token_s

    def refuse(self, sentence: str | None) -> None:
        """From now on new requests fail with `sentence`; None takes them again."""
        self._refusal = sentence

    def end_all(self, sentence: str) -> int:
        """End every request that waits for the engine. Returns how many those are."""
        return sum([self._end(each, sentence) for each in list(self._open)])

    def end_largest(self, sentence: str) -> bool:
        """End the waiting request with the longest prompt, of those without a chunk if there are any."""
        waiting = [each for each in self._open if each.task is not None and not each.is_canary]
        if not waiting:
            return False
        return self._end(
            max(waiting, key=lambda each: (each.num_chunks == 0, each.num_prompt_tokens)), sentence
        )

    def end_largest_prefill(self, sentence: str) -> bool:
        """End the waiting request with the longest prompt of those without a chunk; whether there was one."""
        waiting = [
            each
            for each in self._open
            if each.task is not None and not (each.is_canary or each.num_chunks or each.sentence)
        ]
        if not waiting:
            return False
        return self._end(max(waiting, key=lambda each: each.num_prompt_tokens), sentence)

    def _end(self, this: _Open, sentence: str) -> bool:
        if this.task is None or this.is_canary or this.sentence is not None:
            return False
        this.sentence = sentence
        this.task.cancel()
        return True


__all__ = ["CUT_SHORT", "WatchedEngine"]
