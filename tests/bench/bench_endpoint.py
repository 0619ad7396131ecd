"""An OpenAI-compatible endpoint of our own that behaves as a test wants, and keeps its own books.

It runs in a thread, so that the command in a subprocess and the functions in this process meet the same server. `log`
holds, for each answer, when every token left: an account independent of whatever the client makes of it.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

_TEXT = (
    "amber river stone lantern quiet harbour winter copper orchard signal meadow canvas thunder violet ladder "
    "compass garden silver marble whistle timber cotton anchor velvet saddle pepper window feather basket mirror"
)
WORDS = tuple(_TEXT.split(" "))


@dataclass
class Behaviour:
    """How it answers. Times in seconds. `tokens_per_event` makes it look as if drafts were accepted."""

    prefill_s_per_token: float = 0.0
    step_s: float = 0.004
    tokens_per_event: int = 1
    most_tokens: int = 10**9
    answer: Callable[[random.Random, int], str] = lambda generator, index: f"{generator.choice(WORDS)} "
    cached: Callable[[int], int | None] = lambda num_prompt_tokens: 0
    seen_tokens: Callable[[int], int] = lambda num_prompt_tokens: num_prompt_tokens
    told_tokens: Callable[[int], int] = lambda num_tokens: num_tokens
    metrics: str | None = "vllm"
    drafts: bool = False
    max_model_len: int = 1_000_000
    fail: Callable[[int], bool] = lambda number: False
    stall: Callable[[int], float] = lambda number: 0.0
    detail: dict[str, Any] | None = None


@dataclass
class Answer:
    """One answer: its request, when it came, and when each token left (monotonic seconds)."""

    body: dict[str, Any]
    came_s: float
    token_s: list[float] = field(default_factory=list)


class Endpoint:
    """The server. `url` once it runs."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.log: list[Answer] = []
        self.url = ""
        self.num_generated = self.num_prompt = self.num_cached = self.num_finished = 0
        self.num_steps = self.num_drafted = self.num_accepted = self.num_running = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health/detail", self._detail)
        app.router.add_get("/health", self._health)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "scripted", "max_model_len": self.behaviour.max_model_len}
        return web.json_response({"data": [card]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _detail(self, request: web.Request) -> web.Response:
        if self.behaviour.detail is None:
            raise web.HTTPNotFound
        return web.json_response(self.behaviour.detail)

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.behaviour.metrics is None:
            raise web.HTTPNotFound
        label = '{engine="0",model_name="scripted"}'
        counts = {
            "vllm:generation_tokens_total": self.num_generated,
            "vllm:num_requests_running": self.num_running,
            "vllm:prompt_tokens_total": self.num_prompt,
            "vllm:prefix_cache_hits_total": self.num_cached,
            "vllm:request_success_total": self.num_finished,
            "vllm:spec_decode_num_drafts_total": self.num_steps,
            "vllm:spec_decode_num_draft_tokens_total": self.num_drafted,
            "vllm:spec_decode_num_accepted_tokens_total": self.num_accepted,
        }
        lines = [f"# TYPE {name} counter\n{name}{label} {value}" for name, value in counts.items()]
        lines.append('vllm:cache_config_info{block_size="128",cache_dtype="fp8"} 1.0')
        return web.Response(text="\n".join(lines) + "\n")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body, how, number = await request.json(), self.behaviour, len(self.log)
        answer = Answer(body, time.monotonic())
        self.log.append(answer)
        if how.fail(number):
            return web.json_response({"error": {"message": "no such luck"}}, status=400)
        self.num_running += 1
        num_prompt = how.seen_tokens(-(-sum(len(m["content"]) for m in body["messages"]) // 4))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(how.stall(number) + how.prefill_s_per_token * num_prompt)
        generator = random.Random(number)
        asked = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        limit = min(asked, how.most_tokens)
        began = time.monotonic()
        for index in range(0, limit, how.tokens_per_event):
            size = min(how.tokens_per_event, limit - index)
            text = "".join(how.answer(generator, index + i) for i in range(size))
            await self._event(response, {"choices": [{"index": 0, "delta": {"content": text}}]})
            answer.token_s += [time.monotonic()] * size
            self.num_generated += size
            self.num_steps += how.drafts
            self.num_drafted += 5 * how.drafts
            self.num_accepted += (size - 1) * how.drafts
            step = index // how.tokens_per_event + 1
            await asyncio.sleep(max(0.0, began + step * how.step_s - time.monotonic()))
        await self._end(response, how, num_prompt, limit, asked)
        self.num_running -= 1
        return response

    async def _end(
        self, response: web.StreamResponse, how: Behaviour, num_prompt: int, limit: int, asked: int
    ) -> None:
        reason = "length" if limit >= asked else "stop"
        await self._event(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        self.num_prompt += num_prompt
        self.num_finished += 1
        cached = how.cached(num_prompt)
        self.num_cached += cached or 0
        usage: dict[str, Any] = {"prompt_tokens": num_prompt, "completion_tokens": how.told_tokens(limit)}
        if cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    async def _event(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@contextmanager
def serving(behaviour: Behaviour | None = None) -> Iterator[Endpoint]:
    """Serve on a free local port until the block is left."""
    endpoint = Endpoint(behaviour or Behaviour())
    loop = asyncio.new_event_loop()
    ready, stop = threading.Event(), asyncio.Event()

    async def run() -> None:
        runner = web.AppRunner(endpoint.app(), access_log=None, shutdown_timeout=0.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield endpoint
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
