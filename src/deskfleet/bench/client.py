"""A client of the Chat Completions protocol: streams one answer, with times. For chat and for load generators.

Owns the wire as a client sees it. Knows nothing of terminals, of conversations, or of what answers.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import msgspec

from deskfleet.errors import EngineError, RequestError

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer as it arrived."""

    kind: Literal["reasoning", "content"]
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. `first_token_s` and `total_s` count from sending the request."""

    content: str
    reasoning: str
    finish_reason: str
    num_prompt_tokens: int
    num_completion_tokens: int
    first_token_s: float
    total_s: float

    @property
    def tok_s(self) -> float | None:
        """Tokens per second of this stream after its first token; None for fewer than two."""
        elapsed_s = self.total_s - self.first_token_s
        return (self.num_completion_tokens - 1) / elapsed_s if elapsed_s > 0 else None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str
    param: str | None = None
    type: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class ChatClient:
    """One server. `async with ChatClient("http://127.0.0.1:8000") as client: ...`; `/v1` may be left out."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def model_id(self) -> str:
        """Return the name of the first model served. Raises EngineError when nobody answers."""
        async with self._request("GET", "/v1/models") as response:
            body = await response.read()
            try:
                return msgspec.json.decode(body, type=_Models).data[0].id
            except (msgspec.MsgspecError, IndexError) as error:
                raise EngineError(f"{self.url} answers, but not with a list of models") from error

    async def stream(
        self, model: str, messages: Sequence[Message], **fields: Any
    ) -> AsyncGenerator[Delta | Answer, None]:
        """Yield the answer's pieces as they come, then the whole Answer. `fields` go into the request as given.

        Raises RequestError when the server refuses the request, EngineError when it fails or is not there.
        """
        body = {"model": model, "messages": list(messages), "stream": True, **fields}
        body["stream_options"] = {"include_usage": True}
        begin = time.monotonic()
        pieces: list[Delta] = []
        finish_reason, usage, first_token_s = None, None, 0.0
        async with self._request("POST", "/v1/chat/completions", json=body) as response:
            async for event in _events(response):
                usage = event.usage or usage
                for choice in event.choices:
                    finish_reason = choice.finish_reason or finish_reason
                    for delta in _deltas(choice.delta):
                        first_token_s = first_token_s or time.monotonic() - begin
                        pieces.append(delta)
                        yield delta
        if finish_reason is None or usage is None:
            raise EngineError(f"{self.url} ended the answer before its end")
        yield Answer(
            content="".join(piece.text for piece in pieces if piece.kind == "content"),
            reasoning="".join(piece.text for piece in pieces if piece.kind == "reasoning"),
            finish_reason=finish_reason,
            num_prompt_tokens=usage.prompt_tokens,
            num_completion_tokens=usage.completion_tokens,
            first_token_s=first_token_s,
            total_s=time.monotonic() - begin,
        )

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
        except (aiohttp.ClientError, ValueError) as error:
            # A refused connection says everything already; aiohttp's own words would say it three times.
            detail = "" if isinstance(error, aiohttp.ClientConnectorError) else f": {error}"
            raise EngineError(
                f"no server answers at {self._url}{detail}", hint="start one with: deskfleet serve CHECKPOINT"
            ) from error
        return response

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._context.__aexit__(kind, error, trace)
        if isinstance(error, aiohttp.ClientError):
            raise EngineError(f"the connection to {self._url} broke: {error}") from error


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[_Event]:
    """Yield the events of a stream. Raises what an error event says."""
    async for line in response.content:
        data = line.strip().removeprefix(b"data: ")
        if not data or data == b"[DONE]" or data.startswith(b":"):
            continue
        try:
            event = msgspec.json.decode(data, type=_Event)
        except msgspec.MsgspecError as error:
            raise EngineError(f"the server sent something that is no event: {error}") from error
        if event.error is not None:
            raise _as_error(event.error)
        yield event


def _deltas(delta: _Delta) -> list[Delta]:
    found = []
    if delta.reasoning_content:
        found.append(Delta("reasoning", delta.reasoning_content))
    if delta.content:
        found.append(Delta("content", delta.content))
    return found


def _refusal(status: int, body: bytes) -> RequestError | EngineError:
    try:
        error = msgspec.json.decode(body, type=_Event).error
    except msgspec.MsgspecError:
        error = None
    if error is None:
        return EngineError(f"the server answered with status {status}")
    return _as_error(error)


def _as_error(error: _Error) -> RequestError | EngineError:
    if error.type == "invalid_request_error":
        return RequestError(error.message, param=error.param)
    return EngineError(error.message)


__all__ = ["Answer", "ChatClient", "Delta", "Message"]
