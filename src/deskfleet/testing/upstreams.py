"""Engines' HTTP servers that answer from a script, the same as `ScriptedEngine` takes, and that fail as told.

Owns what both engines share: life, faults, streams. How each speaks: `upstream_vllm`, `upstream_sglang`. What a server
is asked, it keeps as `GenerateRequest`, so that a test can compare it with what a native engine gets.
"""

from __future__ import annotations

import asyncio
import base64
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
from aiohttp import web
from tokenizers import Tokenizer

from deskfleet.endpoint import Constraint, FinishReason, GenerateRequest, ImageInput, SamplingParams
from deskfleet.errors import RequestError
from deskfleet.testing.scripted import Script

_SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_PROBE = "probe-"


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one request, once `after` tokens have been sent.

    empty        200, the head of a stream, and nothing
    cut          the stream ends, properly closed, without a finish reason
    vanish       the connection breaks
    freeze       the stream stays open and says no more
    nan          log probabilities that are not finite
    malformed    an event that is no JSON
    not-stream   200 with a page of HTML
    http         an answer of `status` with an error body, and `headers`
    in-stream    an error of `status` as an event of a stream with 200, as both engines do
    """

    kind: Literal["empty", "cut", "vanish", "freeze", "nan", "malformed", "not-stream", "http", "in-stream"]
    after: int = 0
    status: int = 500
    message: str = "scripted trouble"
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One chunk of an answer: its ids, how many came before, and how it ended."""

    token_ids: tuple[int, ...]
    num_before: int
    finish_reason: FinishReason | None


class ScriptedServer(ABC):
    """One engine's HTTP server. `async with` listens; `stop` and `start` end it and bring it back at the same port.

    `faults` are used up by one request each, in order; None is a request without. `requests` holds every request but
    probes. `is_frozen`: nothing is answered any more, look-ups included. `is_stuck`: counters stand still and no
    token comes, but look-ups are answered. An answer that was cut by a stop token or by its length goes on when its
    prompt and what was said come as the next prompt.
    """

    def __init__(
        self,
        script: Script | Callable[[GenerateRequest], Script],
        checkpoint: Path,
        *,
        model: str = "scripted",
        max_model_len: int = 4096,
        key: str | None = None,
        continues: bool = True,
    ) -> None:
        """`continues` False: `script` is asked for every prompt, also one that goes on where another answer was cut."""
        self._continues = continues
        self._script = script if callable(script) else lambda request: script
        self.tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self.model = model
        self.max_model_len = max_model_len
        self._key = key
        self._rest: dict[tuple[int, ...], Script] = {}
        self._unfrozen = asyncio.Event()
        self._unfrozen.set()
        self._runner: web.AppRunner | None = None
        self.port = 0
        self.faults: list[Fault | None] = []
        self.requests: list[GenerateRequest] = []
        self.bodies: list[dict[str, Any]] = []
        self.num_steps = self.num_tokens = self.num_running = self.num_cancelled = self.num_probes = 0
        self.is_stuck = False
        self.has_metrics = True

    # --- life -----------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, at the same port as before."""
        app = web.Application(
            middlewares=[self._gate], handler_args={"handler_cancellation": True}, client_max_size=64 * 2**20
        )
        app.add_routes(
            [*self._routes(), web.get("/v1/models", self._models), web.get("/metrics", self._metrics)]
        )
        app.add_routes([web.post("/tokenize", self._tokenize)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Listen no more; streams break off."""
        self._unfrozen.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def freeze(self) -> None:
        """Answer nothing any more, as a stopped process would."""
        self._unfrozen.clear()

    # --- what an engine's class says ------------------------------------------------------------------

    @abstractmethod
    def _routes(self) -> list[web.RouteDef]:
        """The routes of this engine alone."""

    @abstractmethod
    def _event(
        self, request: GenerateRequest, step: Step, said: tuple[int, ...], is_nan: bool
    ) -> dict[str, Any]:
        """One event. `said` are all ids up to and including the step's."""

    @abstractmethod
    def _after(self, request: GenerateRequest, said: tuple[int, ...]) -> Iterator[dict[str, Any]]:
        """Events after the last step."""

    @abstractmethod
    def _metric_lines(self) -> list[str]:
        """Prometheus samples, each `name{labels} value`."""

    # --- look-ups -------------------------------------------------------------------------------------

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        await self._unfrozen.wait()
        if self._key is not None and request.headers.get("Authorization") != f"Bearer {self._key}":
            return json_response({"error": {"message": "Unauthorized"}}, 401)
        response: web.StreamResponse = await handler(request)
        return response

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "max_model_len": self.max_model_len, "parent": None}
        return json_response({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self.tokenizer.encode(body["prompt"], add_special_tokens=False).ids
        return json_response({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.has_metrics:
            raise web.HTTPNotFound
        return web.Response(text="\n".join(self._metric_lines()) + "\n", content_type="text/plain")

    # --- answers --------------------------------------------------------------------------------------

    async def _answer(self, http: web.Request, request: GenerateRequest) -> web.StreamResponse:
        """Stream the answer to `request`."""
        if request.request_id.startswith(_PROBE):
            self.num_probes += 1
            fault, script = None, Script((7,), finish_reason="length")
        else:
            self.requests.append(request)
            self.bodies.append(await http.json())
            fault = self.faults.pop(0) if self.faults else None
            script = self._rest.pop(request.prompt_token_ids, self._script(request))
        if fault is not None and fault.kind == "http":
            return json_response(
                error_body(fault.message, fault.status, fault.param), fault.status, dict(fault.headers)
            )
        if fault is not None and fault.kind == "not-stream":
            return web.Response(text="<html>welcome</html>", content_type="text/html")
        response = web.StreamResponse(headers=_SSE)
        await response.prepare(http)
        self.num_running += 1
        ended = False
        try:
            ended = await self._stream(http, response, request, script, fault)
        finally:
            self.num_running -= 1
            self.num_cancelled += not ended
        await response.write_eof()
        return response

    async def _stream(
        self,
        http: web.Request,
        response: web.StreamResponse,
        request: GenerateRequest,
        script: Script,
        fault: Fault | None,
    ) -> bool:
        """Write the events. Returns whether the request has come to an end of its own."""
        said: tuple[int, ...] = ()
        for step in self._steps(request, script):
            await asyncio.sleep(script.delay_s if said else script.first_delay_s)
            await self._unfrozen.wait()
            while self.is_stuck:
                await asyncio.sleep(0.01)
            if fault is not None and step.num_before >= fault.after and fault.kind != "nan":
                return await self._break(http, response, fault)
            if script.failure is not None and step.num_before >= script.fail_after:
                status = 400 if isinstance(script.failure, RequestError) else 500
                return await self._break(http, response, Fault("in-stream", 0, status, str(script.failure)))
            if script.cut_after is not None and step.num_before >= script.cut_after:
                return await self._break(http, response, Fault("cut"))
            said += step.token_ids
            self.num_steps += 1
            self.num_tokens += len(step.token_ids)
            is_nan = fault is not None and fault.kind == "nan" and step.num_before >= fault.after
            await response.write(_data(self._event(request, step, said, is_nan)))
        for event in self._after(request, said):
            await response.write(_data(event))
        await response.write(b"data: [DONE]\n\n")
        return True

    async def _break(self, http: web.Request, response: web.StreamResponse, fault: Fault) -> bool:
        match fault.kind:
            case "freeze":
                await asyncio.Event().wait()
            case "malformed":
                await response.write(b'data: {"choices": [{"token_ids": [1, NaN\n\n')
            case "in-stream":
                await response.write(
                    _data(error_body(fault.message, fault.status, fault.param)) + b"data: [DONE]\n\n"
                )
            case "vanish":
                if http.transport is not None:
                    http.transport.abort()
                raise ConnectionResetError("scripted")
        return True

    def _steps(self, request: GenerateRequest, script: Script) -> Iterator[Step]:
        """The chunks of an answer, cut at the first of the request's stop tokens and at its length."""
        ids = script.token_ids
        stops = set(request.sampling.stop_token_ids)
        reason: FinishReason = script.finish_reason
        stop_at = next((index + 1 for index, token_id in enumerate(ids) if token_id in stops), len(ids))
        limit = min(request.sampling.max_tokens, stop_at)
        if limit < len(ids):
            reason = "length" if limit < stop_at else "stop"
        if limit < len(ids) and self._continues:
            self._rest[request.prompt_token_ids + ids[:limit]] = replace(script, token_ids=ids[limit:])
        num_before = 0
        chunks = script.chunks(limit)
        for index, chunk in enumerate(chunks):
            yield Step(chunk, num_before, reason if index == len(chunks) - 1 else None)
            num_before += len(chunk)


def sampling_params(
    fields: dict[str, Any],
    max_tokens: int,
    logprobs: int | None,
    seed: int | None,
    constraint: Constraint | None,
) -> SamplingParams:
    """Return how to sample, out of the fields that both engines name alike."""
    return SamplingParams(
        temperature=fields["temperature"],
        top_p=fields["top_p"],
        top_k=max(fields["top_k"], 0),
        min_p=fields["min_p"],
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=tuple(fields.get("stop_token_ids") or ()),
        stop=tuple(fields.get("stop") or ()),
        ignore_eos=fields["ignore_eos"],
        logprobs=logprobs,
        repetition_penalty=fields["repetition_penalty"],
        presence_penalty=fields["presence_penalty"],
        frequency_penalty=fields["frequency_penalty"],
        logit_bias=tuple((int(i), bias) for i, bias in (fields.get("logit_bias") or {}).items()),
        constraint=constraint,
    )


def image_of(url: str) -> ImageInput:
    """Return the file in a data URL."""
    return ImageInput(base64.b64decode(url.partition(",")[2]))


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """Return an error as both engines write it."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def json_response(data: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return a whole answer."""
    return web.Response(
        body=msgspec.json.encode(data), status=status, headers=headers, content_type="application/json"
    )


@asynccontextmanager
async def all_running(*servers: ScriptedServer) -> AsyncIterator[None]:
    """Every one of `servers` listens while the block runs."""
    try:
        for server in servers:
            await server.start()
        yield
    finally:
        for server in servers:
            await server.stop()


__all__ = [
    "Fault",
    "ScriptedServer",
    "Step",
    "all_running",
    "error_body",
    "image_of",
    "json_response",
    "sampling_params",
]
