"""What all engines behind HTTP have in common: a `TokenEngine` over one connection.

Owns checks before a request, its parts, its life from the first byte to the last, and counting. An engine's own
module says what is sent, how events are read, and what it can do.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import ClassVar, Protocol, Self

import msgspec

from deskfleet.endpoint import EngineStats, GenerateRequest, SamplingParams, TokenChunk, TokenLogprob
from deskfleet.errors import ConfigError, DeskfleetError, EngineError, PromptTooLong, RequestError
from deskfleet.gateway.engram_rows import RankRows
from deskfleet.gateway.upstream.connection import Connection
from deskfleet.gateway.upstream.failures import (
    ERROR_SIGN,
    MAX_ERROR_SIGN_BYTES,
    UpstreamFailed,
    failure_in_stream,
    shorten,
)
from deskfleet.gateway.upstream.introduction import check_tokenizer
from deskfleet.gateway.upstream.options import UpstreamOptions
from deskfleet.gateway.upstream.silence import Pulse, SilenceWatch
from deskfleet.gateway.upstream.thoughts import Answer, needs_parts
from deskfleet.gateway.upstream.vocabulary import Vocabulary

_DONE = b"[DONE]"
_KEPT_SINGLE = 3
_AFTER_END_S = 1.0  # from the end of an answer to that of its stream


class WireRequest(msgspec.Struct, frozen=True):
    """What is sent for one part: where, and the JSON body."""

    path: str
    body: bytes


class EventReader(Protocol):
    """Reads the events of one part."""

    def push(self, payload: bytes) -> TokenChunk | None:
        """Return what an event says, None when it brings no tokens. Raises EngineError or RequestError."""

    def finish(self, last: TokenChunk) -> TokenChunk:
        """Return the last chunk, complete with what came after it."""


class HttpUpstream(ABC):
    """One engine at one address. `async with` connects, or raises.

    After connecting, `exact_tokens` says whether ids come from the engine itself rather than from its text, and
    `detail` what was found out.
    """

    engine: ClassVar[str]

    def __init__(self, url: str, vocabulary: Vocabulary, options: UpstreamOptions | None = None) -> None:
        self.options = options or UpstreamOptions()
        self.vocabulary = vocabulary
        self.connection = Connection(url, self.options)
        self.exact_tokens = True
        self.model = ""
        self.rows: tuple[RankRows, ...] = ()  # as its counters had them when they were last asked for
        self._engine_max_model_len = 0
        self._pulse = Pulse(self._marker)
        self._whole: dict[int, bool] = {}  # ids looked at so far: whether they are text by themselves
        self._reading: dict[object, int] = {}  # prompts under way of which no token has come: their lengths
        self._num_chunks = self._num_finished = self._num_cancelled = self._num_running = 0
        self._num_prompt_tokens = self._num_generated_tokens = self._num_probes = 0

    # --- what an engine's module says -----------------------------------------------------------------

    @abstractmethod
    async def _ask(self) -> int:
        """Find out what the engine offers; return its context in tokens. Raises EngineError or ConfigError."""

    @abstractmethod
    def _check(self, request: GenerateRequest) -> None:
        """Raise RequestError for what this engine cannot do."""

    @abstractmethod
    def _wire(self, request: GenerateRequest) -> WireRequest:
        """Return what is sent for `request`."""

    @abstractmethod
    def _reader(self, request: GenerateRequest) -> EventReader:
        """Return what reads the answer."""

    @abstractmethod
    async def _marker(self) -> Hashable | None:
        """Return what changes with every step of the engine. Raises EngineError when it does not answer."""

    @abstractmethod
    async def _engine_stats(self) -> EngineStats | None:
        """Return the engine's own counters, None when it keeps none. Raises EngineError when it does not answer."""

    def _cancel(self, request: GenerateRequest) -> None:  # noqa: B027  most engines notice by themselves
        """Tell the engine that nobody listens any more; the connection is closed already. Waits for nothing."""

    # --- contract -------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The engine's root URL."""
        return self.connection.url

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self.options.max_model_len or self._engine_max_model_len

    @property
    def failure(self) -> str | None:
        """Always None: an engine behind HTTP may come back at any time. The Router says when to give up."""
        return None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the tokens of one request as they come (see TokenEngine.generate)."""
        self._check_prompt(request)
        self._check(request)
        params = request.sampling
        answer = None
        if params.constraint is not None or params.thinking_budget is not None:  # of few
            answer = Answer(request, self.vocabulary) if needs_parts(request, self.vocabulary) else None
        deadline_s = None
        if request.timeout_s is not None:
            deadline_s = asyncio.get_running_loop().time() + request.timeout_s
        self._num_running += 1
        self._num_prompt_tokens += len(request.prompt_token_ids)
        ended = False
        try:
            if answer is None:
                chunks = self._stream(request, deadline_s)
            else:
                chunks = self._stream_parts(answer, deadline_s)
            try:
                async for chunk in chunks:
                    self._num_chunks += 1
                    self._num_generated_tokens += len(chunk.token_ids)
                    ended = chunk.finish_reason is not None
                    yield chunk
            finally:
                await chunks.aclose()
        except (EngineError, RequestError):
            ended = True
            raise
        finally:
            self._num_running -= 1
            self._num_finished += ended
            self._num_cancelled += not ended

    async def stats(self) -> EngineStats:
        """Return the engine's counters, ours where it has none. Raises EngineError when it does not answer."""
        own = EngineStats(
            num_steps=self._num_chunks,
            num_running=self._num_running,
            num_finished=self._num_finished,
            num_cancelled=self._num_cancelled,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
        )
        theirs = await self._engine_stats()
        if theirs is None:
            return own
        names = [name for name in own.__dataclass_fields__ if name != "engram"]
        return replace(own, **{name: getattr(theirs, name) for name in names if getattr(theirs, name)})

    # --- life -----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Ask the engine what it is, and check that it fits. May be called again.

        Raises UpstreamUnreachable or UpstreamFailed when it does not answer; ConfigError when its context is
        smaller than configured, it does not serve the model asked for, or it cuts text into other tokens.
        """
        await self.connection.open()
        found = await self._ask()
        wanted = self.options.max_model_len
        if wanted is not None and found < wanted:
            raise ConfigError(
                f"{self.url} serves a context of {found} tokens, less than max_model_len {wanted}",
                hint="lower --max-model-len, or start the engine with more",
            )
        self._engine_max_model_len = found
        await check_tokenizer(self.connection, self.model, self.vocabulary, self.options)

    async def close(self) -> None:
        """Cancel nothing, close every connection: streams under way fail. Safe to call twice."""
        await self._pulse.close()
        await self.connection.close()

    async def probe(self) -> None:
        """Generate one greedy token. Raises EngineError unless it comes, with a finite log probability.

        An engine that answers HTTP has `first_token_s` for it, whatever its counters do: what it compiles for its first
        token, and for log probabilities, would else be taken for a stall in the middle of somebody's request.
        """
        self._num_probes += 1
        request = GenerateRequest(
            request_id=f"probe-{id(self):x}-{self._num_probes}",
            prompt_token_ids=(self.vocabulary.bos_token_id,),
            sampling=SamplingParams(
                temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0 if self.exact_tokens else None
            ),
        )
        patient = replace(self.options, stall_s=max(self.options.stall_s, self.options.first_token_s))
        # Behind all that the watch may need to see a stall, which says more.
        limit_s = patient.stall_s + patient.silence_s + 2 * patient.look_s
        deadline_s = asyncio.get_running_loop().time() + limit_s
        try:
            async with aclosing(self._stream(request, deadline_s, patient)) as chunks:
                count = sum([len(chunk.token_ids) async for chunk in chunks])
        except RequestError as error:
            raise UpstreamFailed(f"{self.url} refused a request for one token: {error.message}") from error
        if count != 1 and self.exact_tokens:
            raise UpstreamFailed(f"{self.url} was asked for one token and sent {count}")

    # --- streams --------------------------------------------------------------------------------------

    async def _stream_parts(
        self, answer: Answer, deadline_s: float | None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield one answer out of several requests. What the first says of the prompt holds for all: the others find
        it in the cache. Drafts are added up.
        """
        num_prompt_tokens: int | None = None
        num_cached = num_drafted = num_accepted = 0  # drafts of earlier parts
        is_first, ended = True, False
        while not ended:
            part = answer.next_part()
            said: TokenChunk | None = None
            async with aclosing(self._stream(part.request, deadline_s)) as chunks:
                async for chunk in chunks:
                    said = answer.add(part, chunk)
                    if num_prompt_tokens is None:
                        num_prompt_tokens = said.num_prompt_tokens
                    if is_first:
                        num_cached = min(max(num_cached, said.num_cached_tokens), num_prompt_tokens)
                    ended = said.finish_reason is not None
                    if said.token_ids or ended:
                        yield replace(
                            said,
                            num_prompt_tokens=num_prompt_tokens,
                            num_cached_tokens=num_cached,
                            num_drafted=num_drafted + said.num_drafted,
                            num_accepted=num_accepted + said.num_accepted,
                        )
            is_first = False
            if said is not None:
                num_drafted, num_accepted = num_drafted + said.num_drafted, num_accepted + said.num_accepted

    async def _stream(
        self, request: GenerateRequest, deadline_s: float | None, options: UpstreamOptions | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield what the engine says to one request, its last chunk once the stream has ended.

        `options` in place of the upstream's own say how long it may be silent.
        """
        wire, reader = self._wire(request), self._reader(request)
        watch = SilenceWatch(self.url, self._pulse, options or self.options, self._longest_prompt, deadline_s)
        last: TokenChunk | None = None
        key, num_events, num_tokens = object(), 0, 0
        self._reading[key] = len(request.prompt_token_ids)
        finished = False
        try:
            events = await self.connection.events(wire.path, wire.body, request, watch)
            try:
                while payloads := await events.next():
                    num_events += len(payloads)
                    chunks, failure = self._read(payloads, reader, request)
                    if chunks and num_tokens == 0:
                        self._reading.pop(key, None)
                    for chunk in chunks:
                        num_tokens += len(chunk.token_ids)
                        if last is not None:
                            raise UpstreamFailed(f"{self.url} went on after the end of an answer")
                        if chunk.finish_reason is None:
                            yield chunk
                        else:
                            last = chunk
                            if not events.is_whole:
                                watch.limit(_AFTER_END_S)
                    if failure is not None:
                        raise failure
            finally:
                events.close()
            if last is None:
                raise self._broken_off(num_events, num_tokens)
        except RequestError:
            finished = True
            raise
        except EngineError:
            if last is None:
                raise
            finished = True  # the answer is whole: what is missing is only the end of the stream
        else:
            finished = True
        finally:
            self._reading.pop(key, None)
            if not finished:
                self._cancel(request)
        yield reader.finish(last)

    def _read(
        self, payloads: Sequence[bytes], reader: EventReader, request: GenerateRequest
    ) -> tuple[list[TokenChunk], DeskfleetError | None]:
        """Return what events say up to the first that is an error, and that error."""
        chunks: list[TokenChunk] = []
        failure: DeskfleetError | None = None
        for payload in payloads:
            if payload == _DONE:
                continue
            try:
                if ERROR_SIGN in payload[:MAX_ERROR_SIGN_BYTES]:
                    failure = failure_in_stream(payload, self.url, request)
                    if failure is not None:
                        break
                chunk = reader.push(payload)
                if chunk is not None:
                    self._check_ids(chunk)
                    chunks.append(chunk)
            except msgspec.MsgspecError as error:
                shown = shorten(payload[:80].decode(errors="replace"))
                failure = UpstreamFailed(f"{self.url} sent an event that cannot be read ({error}): {shown}")
                break
            except (EngineError, RequestError) as error:
                failure = error
                break
        if len(chunks) > 1 and self.options.coalesce:
            chunks = coalesced(chunks, self._ends_whole)
        return chunks, failure

    def _check_ids(self, chunk: TokenChunk) -> None:
        ids = chunk.token_ids
        if ids and not (min(ids) >= 0 and max(ids) < self.vocabulary.size):
            raise UpstreamFailed(
                f"{self.url} sent token id {max(ids)}, outside the vocabulary of {self.vocabulary.size}",
                hint="it serves another model than the checkpoint of this gateway",
            )

    def _ends_whole(self, token_id: int) -> bool:
        """Whether a token is text by itself, so that no character reaches beyond it."""
        known = self._whole.get(token_id)
        if known is None:
            known = self._whole[token_id] = "\ufffd" not in self.vocabulary.decode([token_id])
        return known

    def _broken_off(self, num_events: int, num_tokens: int) -> UpstreamFailed:
        if num_events == 0:
            return UpstreamFailed(f"{self.url} answered 200 with an empty body")
        return UpstreamFailed(
            f"{self.url} ended its answer after {num_tokens} tokens without a finish reason"
        )

    # --- checks ---------------------------------------------------------------------------------------

    def _check_prompt(self, request: GenerateRequest) -> None:
        """Refuse what no engine can answer. Engines refuse the rest themselves, with a sentence that is passed on."""
        ids = request.prompt_token_ids
        if not ids:
            raise RequestError("the prompt is empty", param="messages")
        if not (min(ids) >= 0 and max(ids) < self.vocabulary.size):
            raise RequestError(
                f"the prompt holds token id {max(ids)}, outside the vocabulary of {self.vocabulary.size}",
                param="messages",
            )
        if len(ids) + 1 > self.max_model_len:
            raise PromptTooLong(len(ids), None, self.max_model_len)
        num_placeholders = ids.count(self.vocabulary.image_token_id)
        if num_placeholders != len(request.images):
            raise RequestError(
                f"prompt has {num_placeholders} image placeholders but {len(request.images)} images",
                param="messages",
            )
        if request.sampling.prompt_logprobs is not None:
            raise RequestError(
                "an engine behind HTTP is not asked for the log probabilities of a prompt",
                param="echo",
                hint="leave out echo or logprobs, or serve with the native engine",
            )
        if not self.exact_tokens and request.sampling.logprobs is not None:
            raise RequestError(
                "this engine answers in text, not in tokens, so log probabilities cannot be given",
                param="logprobs",
            )

    def _longest_prompt(self) -> int:
        return max(self._reading.values(), default=0)


def merge_logprobs(chunks: Sequence[TokenChunk]) -> tuple[TokenLogprob, ...] | None:
    """Return the log probabilities of several chunks in order, None when they have none."""
    if any(chunk.logprobs is None for chunk in chunks):
        return None
    return tuple(entry for chunk in chunks for entry in chunk.logprobs or ())


def coalesced(chunks: list[TokenChunk], ends_whole: Callable[[int], bool]) -> list[TokenChunk]:
    """The same tokens in as few chunks as can be, the end of the answer by itself: it waits for what follows it.

    `ends_whole` says of an id whether text ends with a whole character where it ends with this token. Where it does
    not, the latest stay single: they may be bytes of a character that never ends, and whoever decodes a chunk as a
    whole would hold back all of it.
    """
    if len(chunks) < 2:
        return chunks
    has_end = chunks[-1].finish_reason is not None
    num_merged = len(chunks) - has_end
    last_ids = chunks[num_merged - 1].token_ids
    if not (last_ids and ends_whole(last_ids[-1])):
        num_merged = len(chunks) - _KEPT_SINGLE
    if num_merged < 2:
        return chunks
    merged = chunks[:num_merged]
    first = replace(
        merged[-1],
        token_ids=tuple([token_id for chunk in merged for token_id in chunk.token_ids]),
        logprobs=merge_logprobs(merged),
    )
    return [first, *chunks[num_merged:]]


__all__ = ["EventReader", "HttpUpstream", "WireRequest", "coalesced", "merge_logprobs"]
