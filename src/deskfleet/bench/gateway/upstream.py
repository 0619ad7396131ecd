"""An engine's HTTP server that only sends tokens, as fast as it is told: what stands behind the gateways.

    python -m deskfleet.bench.gateway.upstream CHECKPOINT

In a process of its own. Speaks vLLM's `/inference/v1/generate` (ids) and OpenAI's `/v1/chat/completions` (text), so
that the same tokens can be had with and without a gateway. Owns the shapes; every event is made once, before it is
needed. Prints one line of JSON with its address, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from deskfleet.bench.gateway.clock import Clock
from deskfleet.bench.gateway.words import Words

MODEL = "bench"
MAX_MODEL_LEN = 65536
_SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class Upstream:
    """The server's handlers and counters."""

    def __init__(self, words: Words) -> None:
        self.clock = Clock()
        self._words = words
        self._num_answers = self._num_tokens = self._num_running = 0
        self._ids = [_event(_generate_chunk(token_id)) for token_id in words.ids]
        self._texts = [_event(_chat_chunk({"content": text})) for text in words.texts]

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/step", self._set_step)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "max_model_len": MAX_MODEL_LEN}
        return web.json_response({"object": "list", "data": [card]})

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.json_response({"openapi": "3.1.0", "paths": {"/inference/v1/generate": {}}})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        label = f'{{engine="0",model_name="{MODEL}"}}'
        lines = [
            f"vllm:num_requests_running{label} {self._num_running}",
            f"vllm:num_requests_waiting{label} 0",
            f"vllm:generation_tokens_total{label} {self._num_tokens}",
            f"vllm:iteration_tokens_total_count{label} {self.clock.num_steps}",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _set_step(self, request: web.Request) -> web.Response:
        self.clock.step_s = float((await request.json())["step_s"])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling = body["sampling_params"]
        num_prompt, num_tokens = len(body["token_ids"]), int(sampling["max_tokens"])
        events, logprobs = self._ids, None
        if sampling.get("logprobs") is not None:  # a gateway's question whether the numbers are finite
            events, logprobs = [self._with_logprob(i) for i in self._words.ids], True

        def last(index: int) -> bytes:
            token_id = self._words.ids[index]
            if logprobs:
                return self._with_logprob(token_id, "length")
            return _event(_generate_chunk(token_id, "length"))

        usage = {"request_id": "r", "choices": [], "usage": _usage(num_prompt, num_tokens)}
        return await self._answer(request, events, num_tokens, last, usage)

    def _with_logprob(self, token_id: int, finish_reason: str | None = None) -> bytes:
        entry = {"token_id": token_id, "logprob": -0.5, "rank": 1}
        chunk = _generate_chunk(token_id, finish_reason)
        chunk["choices"][0]["logprobs"] = {"content": [{**entry, "top_logprobs": [entry]}]}
        return _event(chunk)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        num_tokens = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)

        def last(index: int) -> bytes:
            return _event(_chat_chunk({"content": self._words.texts[index]}, "length"))

        usage = {**_chat_chunk({}), "choices": [], "usage": _usage(8, num_tokens)}
        return await self._answer(request, self._texts, num_tokens, last, usage)

    async def _answer(
        self,
        request: web.Request,
        events: Sequence[bytes],
        num_tokens: int,
        last: Callable[[int], bytes],
        usage: dict[str, Any],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_SSE)
        await response.prepare(request)
        self._num_answers += 1
        self._num_running += 1
        drawn = self._words.draw(self._num_answers, num_tokens)
        try:
            for number, index in enumerate(drawn):
                if number:
                    await self.clock.tick()
                is_last = number == len(drawn) - 1
                await response.write(last(index) if is_last else events[index])
                self._num_tokens += 1
            await response.write(_event(usage) + b"data: [DONE]\n\n")
        except ConnectionResetError:
            pass  # a gateway that took too long was cut
        finally:
            self._num_running -= 1
        return response


def _generate_chunk(token_id: int, finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": [token_id], "finish_reason": finish_reason}
    return {"request_id": "r", "choices": [choice]}


def _chat_chunk(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
    }


def _usage(num_prompt: int, num_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def serve_until_stdin_ends(app: web.Application) -> None:
    """Serve on a free local port; print the address as JSON, and end when whoever started us closes our stdin."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve_until_stdin_ends(Upstream(Words.of(Path(sys.argv[1]))).app()))
