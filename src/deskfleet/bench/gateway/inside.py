"""Our gateway with an engine in its own process that only sends tokens: what it does without HTTP behind it.

    python -m deskfleet.bench.gateway.inside CHECKPOINT

Owns the engine. Takes the pace as `upstream` does, prints its address likewise, and ends with its stdin. Runs on what
`deskfleet serve` runs on: uvloop where it is installed, and a collector that leaves alone what was loaded.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from deskfleet.bench.gateway.clock import Clock
from deskfleet.bench.gateway.upstream import MAX_MODEL_LEN, MODEL
from deskfleet.bench.gateway.words import Words
from deskfleet.endpoint import EngineStats, FinishReason, GenerateRequest, TokenChunk
from deskfleet.gateway.app import serving
from deskfleet.gateway.loop import run_server, settle
from deskfleet.gateway.settings import GatewaySettings


class PacedEngine:
    """A `TokenEngine` that says words, by the clock."""

    def __init__(self, words: Words) -> None:
        self.clock = Clock()
        self._words = words
        self._num_answers = self._num_running = self._num_finished = self._num_tokens = 0

    @property
    def max_model_len(self) -> int:
        return MAX_MODEL_LEN

    @property
    def failure(self) -> str | None:
        return None

    async def stats(self) -> EngineStats:
        """Return what it counts of itself."""
        return EngineStats(
            num_steps=self.clock.num_steps,
            num_running=self._num_running,
            num_finished=self._num_finished,
            num_generated_tokens=self._num_tokens,
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Yield max_tokens tokens, one a chunk."""
        self._num_answers += 1
        self._num_running += 1
        num_prompt = len(request.prompt_token_ids)
        drawn = self._words.draw(self._num_answers, request.sampling.max_tokens)
        try:
            for number, index in enumerate(drawn):
                if number:
                    await self.clock.tick()
                self._num_tokens += 1
                reason: FinishReason | None = "length" if number == len(drawn) - 1 else None
                yield TokenChunk((self._words.ids[index],), None, num_prompt, reason)
            self._num_finished += 1
        finally:
            self._num_running -= 1


async def main(checkpoint: Path) -> None:
    """Serve until stdin ends."""
    engine = PacedEngine(Words.of(checkpoint))

    async def set_step(request: web.Request) -> web.Response:
        engine.clock.step_s = float((await request.json())["step_s"])
        return web.Response()

    settings = GatewaySettings(model_id=MODEL, checkpoint=checkpoint, port=0, default_thinking=False)
    routes = [lambda app: app.router.add_post("/step", set_step)]
    async with serving(engine, settings, extensions=routes) as endpoint:
        settle()
        print(json.dumps({"url": endpoint.url}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    run_server(main(Path(sys.argv[1])))
