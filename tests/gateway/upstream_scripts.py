"""Scripted upstreams for these tests: servers, the engines in front of them, and short patience."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from chat_scripts import CHECKPOINT, says

from deskfleet.endpoint import GenerateRequest, SamplingParams, TokenChunk, TokenEngine
from deskfleet.gateway.upstream.http_upstream import HttpUpstream
from deskfleet.gateway.upstream.options import UpstreamOptions
from deskfleet.gateway.upstream.sglang import SglangUpstream
from deskfleet.gateway.upstream.vllm import VllmUpstream
from deskfleet.gateway.upstream.vocabulary import Vocabulary
from deskfleet.testing.upstream_sglang import ScriptedSglang
from deskfleet.testing.upstream_vllm import ScriptedVllm
from deskfleet.testing.upstreams import ScriptedServer

VOCABULARY = Vocabulary.from_checkpoint(CHECKPOINT)
PROMPT = (0, 20, 21, 22)
ANSWER = says("one two three")
HASTY = UpstreamOptions(
    answer_s=4.0,
    silence_s=0.2,
    look_s=0.2,
    stall_s=0.3,
    first_token_s=0.4,
    prefill_tokens_per_s=1e6,
    coalesce=False,
)
"""Waits for tenths of a second where the defaults wait for ten."""
ENGINES = ("vllm", "sglang")


def server_of(engine: str, script: Any = ANSWER, **options: Any) -> ScriptedServer:
    """A server of one of ENGINES, not listening yet."""
    return {"vllm": ScriptedVllm, "sglang": ScriptedSglang}[engine](script, CHECKPOINT, **options)


def upstream_of(server: ScriptedServer, options: UpstreamOptions = HASTY) -> HttpUpstream:
    """What talks to a server, not connected yet."""
    kind: type[HttpUpstream] = VllmUpstream if isinstance(server, ScriptedVllm) else SglangUpstream
    return kind(server.url, VOCABULARY, options)


@asynccontextmanager
async def upstream(
    engine: str, script: Any = ANSWER, options: UpstreamOptions = HASTY, **server_options: Any
) -> AsyncIterator[tuple[HttpUpstream, ScriptedServer]]:
    """One connected upstream and its server."""
    async with server_of(engine, script, **server_options) as server, upstream_of(server, options) as engine_:
        yield engine_, server


def asking(request_id: str = "r", prompt: tuple[int, ...] = PROMPT, **params: Any) -> GenerateRequest:
    """A request; `timeout_s` and `images` are its own, everything else is sampling."""
    own = {name: params.pop(name) for name in ("timeout_s", "images") if name in params}
    return GenerateRequest(request_id, prompt, SamplingParams(**params), **own)


async def answer(engine: TokenEngine, request: GenerateRequest) -> list[TokenChunk]:
    """All chunks."""
    return [chunk async for chunk in engine.generate(request)]


def tokens(chunks: list[TokenChunk]) -> tuple[int, ...]:
    """The ids of all chunks."""
    return tuple(token_id for chunk in chunks for token_id in chunk.token_ids)
