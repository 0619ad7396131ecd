"""A `TokenEngine` that answers from a script, and a gateway in front of any engine, for tests and benchmarks.

Owns no model and no torch. What it says is decided by whoever writes the script, so that a test of the
protocol fails for reasons of the protocol alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from deskfleet.endpoint import (
    EngineHealth,
    EngineStats,
    FinishReason,
    GenerateRequest,
    TokenChunk,
    TokenEngine,
    TokenLogprob,
)
from deskfleet.errors import DeskfleetError, EngineError
from deskfleet.gateway.app import serving
from deskfleet.gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class Script:
    """One answer.

    `chunk_sizes` says how many ids each chunk carries, its last entry repeated. `first_delay_s` passes before
    the first chunk and `delay_s` before every later one. With `failure`, that exception is raised once
    `fail_after` ids have been sent, and the engine is dead if it is an EngineError and `is_deadly`. With `cut_after`
    the answer just ends once so many ids have been sent, without a finish reason; 0 is an empty answer.
    """

    token_ids: tuple[int, ...]
    chunk_sizes: tuple[int, ...] = (1,)
    finish_reason: FinishReason = "stop"
    first_delay_s: float = 0.0
    delay_s: float = 0.0
    failure: Exception | None = None
    fail_after: int = 0
    is_deadly: bool = True
    cut_after: int | None = None

    def chunks(self, limit: int) -> list[tuple[int, ...]]:
        """Return the first `limit` ids in chunks. Never empty: an answer without ids is one empty chunk."""
        ids = self.token_ids[:limit]
        out: list[tuple[int, ...]] = []
        start = 0
        while start < len(ids) or not out:
            size = self.chunk_sizes[min(len(out), len(self.chunk_sizes) - 1)]
            out.append(ids[start : start + size])
            start += size
        return out


class ScriptedEngine:
    """Answers each request with what `script` returns for it. `requests` holds every request seen, in order.

    `num_tokens_per_image` is what the engine claims an image's span to be, placeholder included. A request's
    max_tokens is obeyed; sampling is not looked at. Log probabilities are invented from the ids.

    `health` returns `rank_health`, None unless a test sets it. A test may also count steps up (`num_steps`) that no
    chunk comes of, as those of a long prompt.
    """

    def __init__(
        self,
        script: Script | Callable[[GenerateRequest], Script],
        *,
        max_model_len: int = 4096,
        num_tokens_per_image: int = 1,
    ) -> None:
        self._script = script if callable(script) else lambda request: script
        self._max_model_len = max_model_len
        self._num_tokens_per_image = num_tokens_per_image
        self._failure: str | None = None
        self._num_running = self._num_finished = self._num_cancelled = 0
        self._num_prompt_tokens = self._num_generated_tokens = 0
        self._answers: list[AsyncIterator[TokenChunk]] = []
        self.num_steps = 0
        self.requests: list[GenerateRequest] = []
        self.rank_health: EngineHealth | None = None

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self._max_model_len

    @property
    def failure(self) -> str | None:
        """None while the engine lives, else the sentence that says why it ended."""
        return self._failure

    @property
    def num_cancelled(self) -> int:
        """Requests whose iterator was closed before its last chunk."""
        return self._num_cancelled

    @property
    def num_running(self) -> int:
        """Requests being answered."""
        return self._num_running

    def fail(self, sentence: str) -> None:
        """Die between requests."""
        self._failure = sentence

    async def health(self) -> EngineHealth | None:
        """Return what the test says of the ranks."""
        return self.rank_health

    async def abandon(self, reason: str) -> None:
        """Die because whoever watches has given up."""
        if self._failure is None:
            self._failure = reason

    async def stats(self) -> EngineStats:
        """Return current counters. Raises EngineError when the engine is dead."""
        if self._failure is not None:
            raise EngineError(self._failure)
        return EngineStats(
            num_steps=self.num_steps,
            num_running=self._num_running,
            num_finished=self._num_finished,
            num_cancelled=self._num_cancelled,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
        )

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Yield the script's chunks. Raises its `failure`, and EngineError when the engine is dead."""
        answer = self._answer(request)
        # Held, because Python would close a forgotten generator and hide that the gateway did not.
        self._answers.append(answer)
        return answer

    async def _answer(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        if self._failure is not None:
            raise EngineError(self._failure)
        self.requests.append(request)
        script = self._script(request)
        ended = False
        num_sent = 0
        self._num_running += 1
        try:
            for chunk in self._chunks(script, request):
                await asyncio.sleep(script.delay_s if num_sent else script.first_delay_s)
                if script.failure is not None and num_sent >= script.fail_after:
                    raise script.failure
                if script.cut_after is not None and num_sent >= script.cut_after:
                    return
                num_sent += len(chunk.token_ids)
                self.num_steps += 1
                self._num_generated_tokens += len(chunk.token_ids)
                ended = chunk.finish_reason is not None
                yield chunk
        except DeskfleetError as error:
            ended = True
            if isinstance(error, EngineError) and script.is_deadly:
                self._failure = error.message
            raise
        finally:
            self._num_running -= 1
            self._num_finished += ended
            self._num_cancelled += not ended

    def _chunks(self, script: Script, request: GenerateRequest) -> Iterator[TokenChunk]:
        num_images = len(request.images)
        num_prompt_tokens = len(request.prompt_token_ids) + num_images * (self._num_tokens_per_image - 1)
        self._num_prompt_tokens += num_prompt_tokens
        limit, num_top = request.sampling.max_tokens, request.sampling.logprobs
        reason: FinishReason = "length" if limit < len(script.token_ids) else script.finish_reason
        chunks = script.chunks(limit)
        for index, ids in enumerate(chunks):
            last = index == len(chunks) - 1
            logprobs = None if num_top is None else tuple(invented_logprob(i, num_top) for i in ids)
            chunk = TokenChunk(ids, logprobs, num_prompt_tokens, reason if last else None)
            num_prompt_top = request.sampling.prompt_logprobs
            if index == 0 and num_prompt_top is not None:
                told = tuple(invented_logprob(i, num_prompt_top) for i in request.prompt_token_ids[1:])
                chunk = replace(chunk, prompt_logprobs=told)
            yield chunk


def invented_logprob(token_id: int, num_top: int) -> TokenLogprob:
    """Return the log probability a ScriptedEngine gives to `token_id`, which is always its own top choice."""
    own = -(token_id % 8) / 8
    return TokenLogprob(token_id, own, tuple((token_id + rank, own - rank) for rank in range(num_top)))


def every_chunking(num_tokens: int) -> Sequence[tuple[int, ...]]:
    """Return chunk sizes 1 to n and two uneven ones, as a speculating engine would send them."""
    return [*((size,) for size in range(1, num_tokens + 1)), (1, 3, 2), (2, 1)]


@asynccontextmanager
async def running_gateway(engine: TokenEngine, settings: GatewaySettings) -> AsyncIterator[str]:
    """Serve `engine` on a free local port; yields the base URL an OpenAI client takes, ending in /v1."""
    async with serving(engine, settings) as endpoint:
        yield f"{endpoint.url}/v1"


__all__ = ["Script", "ScriptedEngine", "every_chunking", "invented_logprob", "running_gateway"]
