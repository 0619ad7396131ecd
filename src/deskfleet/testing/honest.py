"""An endpoint that speaks Chat Completions and is right about everything it is asked, without a model behind it.

Owns the wire (streamed and whole, usage with cached tokens, log probabilities, tool calls, reasoning, images, models,
health, metrics, scores of a prompt), believable token counts and a pace. What is said comes from `oracle`. Every method
that `saboteurs` overrides is one thing that a real server can get wrong. Knows no gate.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from aiohttp import web

from deskfleet.errors import RequestError
from deskfleet.testing.oracle import EFFORTS, Conversation, Said, answer, text_of

_PIECE = re.compile(r"\s?\w{1,4}|\s?[^\w\s]|\s")
_TEMPLATE_TOKENS, _MESSAGE_TOKENS, _CALL_TOKENS, _IMAGE_TOKENS = 4, 3, 6, 12
_CACHE_BLOCK = 16
_EVENT_SIZES = (1, 2, 3, 2)

TokenKind = Literal["reasoning", "content", "call"]


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer. Of a call `index` says which; the first one of a call is its name, `text` its markup."""

    kind: TokenKind
    text: str
    index: int = 0
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `number` counts requests, `num_running` those under way with this one; `prompt` are its tokens."""

    number: int
    num_running: int
    conversation: Conversation
    prompt: tuple[str, ...]
    max_tokens: int
    stream: bool
    wants_logprobs: bool
    num_top: int
    at_s: float

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt)


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of an answer as far as max_tokens let it come."""

    tokens: tuple[Token, ...]
    finish_reason: str


def tokens_of(text: str) -> list[str]:
    """Return a text in pieces of about four characters, as a tokenizer would cut it; joined they are the text."""
    return _PIECE.findall(text)


class HonestEndpoint:
    """`async with HonestEndpoint() as server: ... server.url`. `known` are right answers by the question's last text.

    `read_tok_s` is how fast prompts are read, `event_s` how long one event of one to three tokens takes.
    """

    def __init__(
        self,
        *,
        model: str = "honest",
        max_model_len: int = 8192,
        known: Mapping[str, Said] | None = None,
        read_tok_s: float = 400_000.0,
        event_s: float = 0.0005,
    ) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.known = dict(known or {})
        self.read_tok_s = read_tok_s
        self.event_s = event_s
        self.url = ""
        self.num_running = 0
        self.num_requests = 0
        self._cache: set[str] = set()
        self._began = time.monotonic()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**26, handler_args={"handler_cancellation": True})
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    # --- what a server can get wrong ------------------------------------------------------------------

    def said(self, asked: Asked) -> Said:
        """Return what is answered."""
        return answer(asked.conversation, self.known)

    def cut(self, asked: Asked, tokens: tuple[Token, ...], max_tokens: int) -> Answer:
        """Return the answer as far as it may go."""
        ended = "tool_calls" if any(token.kind == "call" for token in tokens) else "stop"
        return Answer(tokens[:max_tokens], "length" if len(tokens) > max_tokens else ended)

    def served_model(self, asked: Asked) -> str:
        """Return the name that the answer carries."""
        return self.model

    def longest(self) -> int:
        """Return the most tokens of prompt and answer that are really taken."""
        return self.max_model_len

    def cached_tokens(self, asked: Asked) -> int:
        """Return how much of the prompt is found, in whole blocks, and remember it."""
        found, hits = True, 0
        digest = hashlib.blake2b()
        for start in range(0, len(asked.prompt) - _CACHE_BLOCK, _CACHE_BLOCK):
            digest.update("\0".join(asked.prompt[start : start + _CACHE_BLOCK]).encode())
            key = digest.hexdigest()
            found = found and key in self._cache
            hits += _CACHE_BLOCK if found else 0
            self._cache.add(key)
        return hits

    def usage(self, asked: Asked, reply: Answer, num_events: int, num_cached: int) -> dict[str, Any]:
        """Return the token counts."""
        thought = sum(token.kind == "reasoning" for token in reply.tokens)
        return {
            "prompt_tokens": asked.num_prompt_tokens,
            "completion_tokens": len(reply.tokens),
            "total_tokens": asked.num_prompt_tokens + len(reply.tokens),
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens_details": {"reasoning_tokens": thought},
        }

    def logprob(self, asked: Asked, token: Token, index: int) -> float | None:
        """Return the log probability of a token of an answer; None leaves all of them out."""
        return -((len(token.text) * 7 + index) % 10) / 100

    def pause_s(self, asked: Asked, index: int) -> float:
        """Return how long event `index` of an answer takes."""
        return self.event_s

    async def before(self, asked: Asked, num_cached: int) -> web.StreamResponse | None:
        """Take the time that reading the prompt takes. A response that is returned is the whole answer."""
        await asyncio.sleep((asked.num_prompt_tokens - num_cached) / self.read_tok_s)
        return None

    # --- the wire -------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.num_running += 1
        try:
            asked = self._read(json.loads(await request.read()))
            self._refuse_too_long(asked)
            num_cached = self.cached_tokens(asked)
            instead = await self.before(asked, num_cached)
            if instead is not None:
                return instead
            reply = self.cut(asked, tuple(_tokens(self.said(asked))), asked.max_tokens)
            if asked.stream:
                return await self._stream(request, asked, reply, num_cached)
            return await self._whole(asked, reply, num_cached)
        except RequestError as error:
            return _refusal(error.message)
        finally:
            self.num_running -= 1

    def _read(self, body: Mapping[str, Any]) -> Asked:
        if body.get("model") != self.model:
            raise RequestError(f"there is no model {body.get('model')!r}")
        messages = tuple(body["messages"])
        tools = tuple(body.get("tools") or ())
        prompt = list(itertools.chain(["<begin>"] * _TEMPLATE_TOKENS, *map(_message_tokens, messages)))
        if tools:
            prompt[_TEMPLATE_TOKENS:_TEMPLATE_TOKENS] = tokens_of(json.dumps(tools))
        if body.get("response_format"):
            prompt[_TEMPLATE_TOKENS:_TEMPLATE_TOKENS] = tokens_of(json.dumps(body["response_format"]))
        self.num_requests += 1
        return Asked(
            number=self.num_requests,
            num_running=self.num_running,
            conversation=Conversation(messages, tools, _effort(body)),
            prompt=tuple(prompt),
            max_tokens=int(body.get("max_tokens") or self.max_model_len - len(prompt)),
            stream=bool(body.get("stream")),
            wants_logprobs=bool(body.get("logprobs")),
            num_top=int(body.get("top_logprobs") or 0),
            at_s=time.monotonic() - self._began,
        )

    def _refuse_too_long(self, asked: Asked) -> None:
        if asked.num_prompt_tokens + asked.max_tokens > self.longest():
            raise RequestError(
                f"prompt of {asked.num_prompt_tokens} tokens plus max_tokens {asked.max_tokens} exceeds the context "
                f"of {self.longest()} tokens"
            )

    async def _stream(
        self, request: web.Request, asked: Asked, reply: Answer, num_cached: int
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        num_events, sent = 0, 0
        for group in _groups(reply.tokens):
            await asyncio.sleep(self.pause_s(asked, num_events))
            choice: dict[str, Any] = {"index": 0, "delta": _delta(group)}
            if (logprobs := self._logprobs(asked, group, sent)) is not None:
                choice["logprobs"] = {"content": logprobs}
            await self._event(response, asked, {"choices": [choice]})
            num_events += 1
            sent += len(group)
        last = {"index": 0, "delta": {}, "finish_reason": reply.finish_reason}
        await self._event(response, asked, {"choices": [last]})
        usage = self.usage(asked, reply, num_events, num_cached)
        await self._event(response, asked, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _event(self, response: web.StreamResponse, asked: Asked, value: dict[str, Any]) -> None:
        head = {
            "id": f"chatcmpl-{asked.number}",
            "object": "chat.completion.chunk",
            "model": self.served_model(asked),
        }
        await response.write(b"data: " + json.dumps(head | value).encode() + b"\n\n")

    async def _whole(self, asked: Asked, reply: Answer, num_cached: int) -> web.Response:
        groups = list(_groups(reply.tokens))
        for number in range(len(groups)):
            await asyncio.sleep(self.pause_s(asked, number))
        deltas = [_delta([token]) for token in reply.tokens]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(delta.get("content", "") for delta in deltas),
            "reasoning_content": "".join(delta.get("reasoning_content", "") for delta in deltas),
        }
        calls = _whole_calls(reply.tokens)
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason}
        usage = self.usage(asked, reply, len(groups), num_cached)
        return _json({"model": self.served_model(asked), "choices": [choice], "usage": usage})

    def _logprobs(self, asked: Asked, group: list[Token], start: int) -> list[dict[str, Any]] | None:
        if not asked.wants_logprobs:
            return None
        values = [self.logprob(asked, token, start + number) for number, token in enumerate(group)]
        if any(value is None for value in values):
            return None
        return [
            {
                "token": token.text,
                "logprob": value,
                "top_logprobs": [
                    {"token": token.text, "logprob": (value or 0.0) - rank} for rank in range(asked.num_top)
                ],
            }
            for token, value in zip(group, values, strict=True)
        ]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        """Score a prompt: `echo` with `logprobs`, nothing else."""
        body = json.loads(await request.read())
        if not body.get("echo"):
            return _refusal("only echo is offered here")
        pieces = tokens_of(body["prompt"])
        values = [None, *(self.score(piece, index) for index, piece in enumerate(pieces[1:], 1))]
        logprobs = {"tokens": pieces, "token_logprobs": values}
        choice = {"index": 0, "text": body["prompt"], "logprobs": logprobs, "finish_reason": "length"}
        return _json({"choices": [choice], "usage": {"prompt_tokens": len(pieces), "completion_tokens": 1}})

    def score(self, piece: str, index: int) -> float:
        """Return the log probability of a token of a prompt that is scored."""
        return -((len(piece) * 13 + index * 7) % 40) / 10

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "max_model_len": self.max_model_len}
        return _json({"object": "list", "data": [card]})

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = f"deskfleet_engine_running {self.num_running}\nrequests_total {self.num_requests}\n"
        return web.Response(text=lines)


def _effort(body: Mapping[str, Any]) -> int | None:
    """Return the effort that a body asks for; None without thinking."""
    on = (body.get("thinking") or {}).get("type") == "enabled"
    if not on:
        return None
    effort = body.get("reasoning_effort", "high")
    if isinstance(effort, int):
        return effort
    if effort not in EFFORTS:
        raise RequestError(f"there is no effort {effort!r}")
    return EFFORTS[effort]


def _message_tokens(message: Mapping[str, Any]) -> list[str]:
    parts = message.get("content") if isinstance(message.get("content"), list) else []
    images = [part["image_url"]["url"] for part in parts or () if part.get("type") == "image_url"]
    found = [f"<{message.get('role')}>"] * _MESSAGE_TOKENS
    for url in images:
        found += [f"<image {hashlib.blake2b(url.encode()).hexdigest()}>"] * _IMAGE_TOKENS
    found += tokens_of(text_of(message))
    for call in message.get("tool_calls") or ():
        found += tokens_of(json.dumps(call["function"]))
    return found


def _tokens(said: Said) -> Iterator[Token]:
    for piece in tokens_of(said.reasoning):
        yield Token("reasoning", piece)
    for piece in tokens_of(said.content):
        yield Token("content", piece)
    for index, call in enumerate(said.calls):
        yield Token("call", "", index, call.name)
        for _ in range(_CALL_TOKENS - 1):
            yield Token("call", "", index)
        for piece in tokens_of(json.dumps(call.arguments)):
            yield Token("call", piece, index)


def _groups(tokens: tuple[Token, ...]) -> Iterator[list[Token]]:
    """Yield tokens as they leave, one to three at once, never two kinds or two calls together."""
    sizes = itertools.cycle(_EVENT_SIZES)
    for _, same in itertools.groupby(tokens, key=lambda token: (token.kind, token.index)):
        rest = list(same)
        while rest:
            size = next(sizes)
            yield rest[:size]
            rest = rest[size:]


def _delta(group: list[Token]) -> dict[str, Any]:
    text = "".join(token.text for token in group)
    first = group[0]
    if first.kind == "reasoning":
        return {"reasoning_content": text}
    if first.kind == "content":
        return {"content": text}
    name = next((token.name for token in group if token.name is not None), None)
    function = {"arguments": text} if name is None else {"name": name, "arguments": text}
    return {"tool_calls": [{"index": first.index, "type": "function", "function": function}]}


def _whole_calls(tokens: tuple[Token, ...]) -> list[dict[str, Any]]:
    calls = []
    of_calls = (token for token in tokens if token.kind == "call")
    for index, group in itertools.groupby(of_calls, key=lambda token: token.index):
        own = list(group)
        arguments = "".join(token.text for token in own)
        function = {"name": own[0].name, "arguments": arguments}
        calls.append({"id": f"call_{index}", "type": "function", "function": function})
    return calls


def _refusal(message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error"}
    return web.Response(
        body=json.dumps({"error": error}).encode(), status=400, content_type="application/json"
    )


def _json(value: Mapping[str, Any]) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), content_type="application/json")


__all__ = ["Answer", "Asked", "HonestEndpoint", "Token", "tokens_of"]
