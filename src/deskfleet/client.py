"""Asks an OpenAI-compatible endpoint, deskfleet's or another's, and takes the answer as it streams in, with times.

Owns the wire as a client sees it, and one distinction: a server that is gone (`ServerGone`) ends whatever was asking,
a question that is refused or answered with something unreadable is only that question's failure. Knows no tasks,
no gates and no terminals.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import msgspec

from deskfleet.errors import EngineError, RequestError

SILENCE_S = 900.0
"""How long a server may send nothing: it is still reading a long prompt, or hangs."""

_LINE_BYTES = 2**24
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)")


class ServerGone(EngineError):
    """Nobody listens at the address, or the engine behind it says that it has ended."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the answer's text as it arrived; `at_s` counts from sending the request."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer. `first_token_s` and `total_s` count from sending the request.

    `tool_calls` have the protocol's form. Token counts are the server's own word (`usage`), never a count of events;
    those it does not tell are None. `logprobs` are the entries as they came, None where none did. `arrivals_s` are the
    times of the events that brought text, `finish_s` that of the event that ended it: after it come only counts.
    `headers` have lower-case names. `model` is the name that the answer gives.
    """

    content: str
    reasoning: str
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    num_completion_tokens: int
    num_reasoning_tokens: int | None
    first_token_s: float
    total_s: float
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[dict[str, Any], ...] | None = None
    arrivals_s: tuple[float, ...] = ()
    finish_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str = ""

    @property
    def tok_s(self) -> float | None:
        """Tokens per second of this stream after its first; None for fewer than two."""
        elapsed_s = self.total_s - self.first_token_s
        return (self.num_completion_tokens - 1) / elapsed_s if elapsed_s > 0 else None


class _FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    index: int = 0
    function: _FunctionDelta | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name
    tool_calls: list[_CallDelta] | None = None


class _Logprobs(msgspec.Struct):
    content: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: _Logprobs | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    completion_tokens_details: _CompletionDetails | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    message: str
    type: str | None = None
    code: str | int | None = None
    param: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None
    model: str | None = None


class ServedModel(msgspec.Struct, frozen=True):
    """One entry of the list of models; `max_model_len` where the server tells it."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[ServedModel]


class Client:
    """One server. `async with Client("http://127.0.0.1:8000") as client: ...`; `/v1` may be left out.

    `key` is sent as a bearer token, and appears in no error.
    """

    def __init__(self, url: str, *, key: str | None = None, silence_s: float = SILENCE_S) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._silence_s = silence_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=self._silence_s)
        # A connection for every stream: a load generator must not queue in its own client.
        self._session = aiohttp.ClientSession(
            timeout=timeout,
            read_bufsize=_LINE_BYTES,
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def models(self) -> list[ServedModel]:
        """Return what is served, at least one model. Raises ServerGone or, when that is no list, EngineError."""
        async with self._request("GET", "/v1/models") as response:
            try:
                found = msgspec.json.decode(await response.read(), type=_Models).data
            except msgspec.MsgspecError as error:
                raise EngineError(f"{self.url} answers, but not with a list of models") from error
        if not found:
            raise EngineError(f"{self.url} answers with an empty list of models")
        return found

    async def model_id(self) -> str:
        """Return the name of the first model served. Raises as `models` does."""
        return (await self.models())[0].id

    async def counters(self) -> dict[str, float]:
        """Return the values of GET /metrics by name, labels summed up; none of a server that has no such page."""
        try:
            async with self._request("GET", "/metrics") as response:
                text = await response.text(errors="replace")
        except (RequestError, EngineError):
            return {}
        values: dict[str, float] = {}
        for line in text.splitlines():
            if (sample := _SAMPLE.match(line)) is not None:
                try:
                    values[sample[1]] = values.get(sample[1], 0.0) + float(sample[2])
                except ValueError:
                    continue
        return values

    async def get(self, path: str) -> str:
        """Return the body of GET `path`, e.g. `/metrics`. Raises ServerGone, RequestError for a 4xx, EngineError."""
        async with self._request("GET", path) as response:
            return await response.text(errors="replace")

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON object that answers `body`, whole. Raises as `stream` does."""
        async with self._request("POST", path, json=body) as response:
            data = await response.read()
            try:
                return msgspec.json.decode(data, type=dict[str, Any])
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise _unreadable(data, error) from error

    async def ask(self, body: Mapping[str, Any]) -> Reply:
        """Return the whole answer to a Chat Completions body. Raises as `stream` does."""
        async with aclosing(self.stream(body)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Reply):
                    return piece
        raise EngineError("the answer ended before its end")

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Piece | Reply, None]:
        """Yield the answer's pieces as they come, then the whole Reply.

        Raises ServerGone when there is no use in asking again, RequestError when the server refuses the question,
        EngineError when the answer fails, ends early or cannot be read.
        """
        begin = time.monotonic()
        answer = _Answer()
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._request("POST", "/v1/chat/completions", json=streamed) as response:
            answer.headers = {name.lower(): value for name, value in response.headers.items()}
            async for event in _events(response):
                if event.error is not None:
                    raise _as_error(event.error, status=200)
                for piece in answer.add(event, time.monotonic() - begin):
                    yield piece
            num_bytes = response.content.total_bytes
        yield answer.reply(time.monotonic() - begin, num_bytes)

    def _request(self, method: str, path: str, **options: Any) -> _Exchange:
        if self._session is None:
            raise EngineError("the client is not open")
        return _Exchange(self.url, self._session.request(method, self.url + path, **options))


class _Exchange:
    """A request whose failures are deskfleet's errors: the one seam to aiohttp's."""

    def __init__(self, url: str, context: Any) -> None:
        self._url = url
        self._context = context

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            response: aiohttp.ClientResponse = await self._context.__aenter__()
            if response.status >= 400:
                raise _refusal(response.status, await response.read())
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            raise ServerGone(
                f"no server answers at {self._url}", hint="start one with: deskfleet serve CHECKPOINT"
            ) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"{self._url} gave no answer: {error or type(error).__name__}") from error
        return response

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._context.__aexit__(kind, error, trace)
        if isinstance(error, aiohttp.ClientError | TimeoutError):
            raise EngineError(f"the answer of {self._url} broke off: {error}") from error


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[_Event]:
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        try:
            yield msgspec.json.decode(data, type=_Event)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _unreadable(data, error) from error


def _unreadable(data: bytes, error: Exception) -> EngineError:
    if not data.strip():
        return EngineError("the server answered with status 200 and an empty body")
    if re.search(rb"[:\[,]\s*-?(NaN|Infinity)\b", data):
        return EngineError("the server sent NaN or Infinity as a number, which JSON does not have")
    return EngineError(f"the server sent something that is no event: {error}")


@dataclass(slots=True)
class _Answer:
    """An answer as far as it has come."""

    pieces: list[Piece] = field(default_factory=list)
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    logprobs: list[dict[str, Any]] | None = None
    arrivals_s: list[float] = field(default_factory=list)
    finish_s: float | None = None
    headers: dict[str, str] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: _Usage | None = None
    model: str = ""

    def add(self, event: _Event, at_s: float) -> list[Piece]:
        """Take one event in; return the text it brought."""
        self.usage = event.usage or self.usage
        self.model = event.model or self.model
        new: list[Piece] = []
        for choice in event.choices:
            if choice.finish_reason:
                self.finish_reason, self.finish_s = choice.finish_reason, at_s
            self.stop_reason = choice.stop_reason if choice.stop_reason is not None else self.stop_reason
            if choice.logprobs is not None and choice.logprobs.content is not None:
                self.logprobs = [*(self.logprobs or ()), *choice.logprobs.content]
            if reasoning := choice.delta.reasoning_content or choice.delta.reasoning:
                new.append(Piece("reasoning", reasoning, at_s))
            if choice.delta.content:
                new.append(Piece("content", choice.delta.content, at_s))
            for call in choice.delta.tool_calls or ():
                new.append(Piece("call", self._add_call(call), at_s))
        if new:
            self.arrivals_s.append(at_s)
        self.pieces += new
        return new

    def _add_call(self, call: _CallDelta) -> str:
        function = self.calls.setdefault(call.index, {"name": "", "arguments": ""})
        added = call.function or _FunctionDelta()
        function["name"] += added.name or ""
        function["arguments"] += added.arguments or ""
        return (added.name or "") + (added.arguments or "")

    def reply(self, total_s: float, num_bytes: int) -> Reply:
        """Return the whole answer, told in `num_bytes`. Raises EngineError when it has not come to its end."""
        if not num_bytes:
            raise EngineError("the server answered with status 200 and an empty body")
        if self.finish_reason is None:
            raise EngineError("the answer ended before its end")
        if self.usage is None:
            raise EngineError("the answer does not say how many tokens it has (no usage)")
        reasoning = self._text("reasoning")
        details = self.usage.completion_tokens_details
        counted = None if details is None else details.reasoning_tokens
        prompt = self.usage.prompt_tokens_details
        return Reply(
            content=self._text("content"),
            reasoning=reasoning,
            tool_calls=tuple(
                {"type": "function", "function": self.calls[index]} for index in sorted(self.calls)
            ),
            finish_reason=self.finish_reason,
            num_completion_tokens=self.usage.completion_tokens,
            num_reasoning_tokens=counted if counted is not None or reasoning else 0,
            first_token_s=self.arrivals_s[0] if self.arrivals_s else total_s,
            total_s=total_s,
            num_prompt_tokens=self.usage.prompt_tokens,
            num_cached_tokens=None if prompt is None else prompt.cached_tokens,
            stop_reason=self.stop_reason,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            arrivals_s=tuple(self.arrivals_s),
            finish_s=self.finish_s,
            headers=self.headers,
            model=self.model,
        )

    def _text(self, kind: str) -> str:
        return "".join(piece.text for piece in self.pieces if piece.kind == kind)


def _refusal(status: int, body: bytes) -> RequestError | EngineError:
    try:
        error = msgspec.json.decode(body, type=_Event).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        error = None
    return _as_error(error or _Error(f"the server answered with status {status}"), status)


def _as_error(error: _Error, status: int) -> RequestError | EngineError:
    if error.code == "engine_failed" or status == 503:
        return ServerGone(error.message)
    if 400 <= status < 500 or error.type == "invalid_request_error":
        return RequestError(error.message, param=error.param)
    return EngineError(error.message)


__all__ = ["Client", "Piece", "Reply", "ServedModel", "ServerGone"]
