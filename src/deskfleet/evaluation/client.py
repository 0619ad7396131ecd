"""Asks one question over HTTP and takes the answer as it streams in, tool calls and times included.

Owns the wire as an examiner sees it, and one distinction: a server that is gone ends the examination (`ServerGone`),
a question that is refused or answered with something unreadable is only that question's failure. Knows no tasks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from deskfleet.errors import EngineError, RequestError

_SILENCE_S = 900.0  # of a server that is still reading a long prompt, or hangs
_LINE_BYTES = 2**24


class ServerGone(EngineError):
    """Nobody listens at the address, or the engine behind it says that it has ended."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer. `first_token_s` and `total_s` count from sending the request.

    `tool_calls` have the protocol's form. `num_reasoning_tokens` is None where the server does not count them.
    """

    content: str
    reasoning: str
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    num_completion_tokens: int
    num_reasoning_tokens: int | None
    first_token_s: float
    total_s: float

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
    tool_calls: list[_CallDelta] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int
    completion_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str
    type: str | None = None
    code: str | int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Client:
    """One server. `async with Client("http://127.0.0.1:8000") as client: ...`; `/v1` may be left out."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
        self._session = aiohttp.ClientSession(timeout=timeout, read_bufsize=_LINE_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def model_id(self) -> str:
        """Return the name of the first model served. Raises ServerGone or, when that is no list, EngineError."""
        async with self._request("GET", "/v1/models") as response:
            try:
                return msgspec.json.decode(await response.read(), type=_Models).data[0].id
            except (msgspec.MsgspecError, IndexError) as error:
                raise EngineError(f"{self.url} answers, but not with a list of models") from error

    async def counters(self) -> dict[str, float]:
        """Return the unlabelled values of GET /metrics by name; none of a server that has no such page."""
        try:
            async with self._request("GET", "/metrics") as response:
                text = await response.text(errors="replace")
        except (RequestError, EngineError):
            return {}
        values = {}
        for line in text.splitlines():
            name, _, number = line.partition(" ")
            if name.isidentifier():
                try:
                    values[name] = float(number.split()[0])
                except (ValueError, IndexError):
                    continue
        return values

    async def ask(self, body: Mapping[str, Any]) -> Reply:
        """Return the whole answer to a Chat Completions body.

        Raises ServerGone when there is no use in asking again, RequestError when the server refuses the question,
        EngineError when the answer fails, ends early or cannot be read.
        """
        begin = time.monotonic()
        answer = _Answer()
        stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._request("POST", "/v1/chat/completions", json=stream) as response:
            async for event in _events(response):
                if event.error is not None:
                    raise _as_error(event.error, status=200)
                answer.add(event, time.monotonic() - begin)
        return answer.reply(time.monotonic() - begin)

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
            raise EngineError(f"the server sent something that is no event: {error}") from error


@dataclass(slots=True)
class _Answer:
    """An answer as far as it has come."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish_reason: str | None = None
    usage: _Usage | None = None
    first_token_s: float | None = None

    def add(self, event: _Event, elapsed_s: float) -> None:
        self.usage = event.usage or self.usage
        for choice in event.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            delta = choice.delta
            if self.first_token_s is None and (delta.content or delta.reasoning_content or delta.tool_calls):
                self.first_token_s = elapsed_s
            self.content.append(delta.content or "")
            self.reasoning.append(delta.reasoning_content or "")
            for call in delta.tool_calls or ():
                function = self.calls.setdefault(call.index, {"name": "", "arguments": ""})
                if call.function is not None:
                    function["name"] += call.function.name or ""
                    function["arguments"] += call.function.arguments or ""

    def reply(self, total_s: float) -> Reply:
        """Raises EngineError when the answer has not come to its end."""
        if self.finish_reason is None or self.usage is None:
            raise EngineError("the answer ended before its end")
        reasoning = "".join(self.reasoning)
        details = self.usage.completion_tokens_details
        counted = None if details is None else details.reasoning_tokens
        return Reply(
            content="".join(self.content),
            reasoning=reasoning,
            tool_calls=tuple(
                {"type": "function", "function": self.calls[index]} for index in sorted(self.calls)
            ),
            finish_reason=self.finish_reason,
            num_completion_tokens=self.usage.completion_tokens,
            num_reasoning_tokens=counted if counted is not None or reasoning else 0,
            first_token_s=total_s if self.first_token_s is None else self.first_token_s,
            total_s=total_s,
        )


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
        return RequestError(error.message)
    return EngineError(error.message)


__all__ = ["Client", "Reply", "ServerGone"]
