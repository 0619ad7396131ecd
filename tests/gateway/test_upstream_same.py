"""The same forty requests through the native engine, vLLM and SGLang: the same bytes come out of the gateway."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
from chat_scripts import CHECKPOINT, MODEL, settings
from upstream_cases import CASES, IMAGE, Case, body

from deskfleet.endpoint import GenerateRequest, SamplingParams, TokenEngine
from deskfleet.gateway.upstream.http_upstream import HttpUpstream
from deskfleet.gateway.upstream.options import UpstreamOptions
from deskfleet.gateway.upstream.router import Router
from deskfleet.gateway.upstream.sglang import SglangUpstream
from deskfleet.gateway.upstream.vllm import VllmUpstream
from deskfleet.gateway.upstream.vocabulary import Vocabulary
from deskfleet.testing.scripted import Script, ScriptedEngine, running_gateway
from deskfleet.testing.upstream_sglang import ScriptedSglang
from deskfleet.testing.upstream_vllm import ScriptedVllm
from deskfleet.testing.upstreams import ScriptedServer, all_running

VOCABULARY = Vocabulary.from_checkpoint(CHECKPOINT)
IDS = re.compile(rb'("(?:id|call_id|item_id)":")[^"]*"|("created":)\d+')
KINDS = {
    "vllm, ids": ScriptedVllm,
    "vllm, text with ids": ScriptedVllm,
    "sglang, what is new": ScriptedSglang,
    "sglang, all so far": ScriptedSglang,
}


class Lines:
    """What every engine of a test says: the script of the case at hand."""

    def __init__(self) -> None:
        self.case: Case = CASES[0]

    def __call__(self, request: GenerateRequest) -> Script:
        return self.case.script


@asynccontextmanager
async def engines(lines: Lines) -> AsyncIterator[tuple[dict[str, TokenEngine], dict[str, ScriptedServer]]]:
    """The native engine and one upstream of every kind behind a router, and the servers of the latter."""
    servers: dict[str, ScriptedServer] = {
        "vllm, ids": ScriptedVllm(lines, CHECKPOINT),
        "vllm, text with ids": ScriptedVllm(lines, CHECKPOINT, way="completions"),
        "sglang, what is new": ScriptedSglang(lines, CHECKPOINT, is_incremental=True),
        "sglang, all so far": ScriptedSglang(lines, CHECKPOINT),
    }
    options = UpstreamOptions(coalesce=False)
    async with all_running(*servers.values()):
        routers: dict[str, Router] = {}
        try:
            for name, server in servers.items():
                kind: type[HttpUpstream] = (
                    VllmUpstream if isinstance(server, ScriptedVllm) else SglangUpstream
                )
                routers[name] = await Router([kind(server.url, VOCABULARY, options)]).__aenter__()
            yield {"native": ScriptedEngine(lines, num_tokens_per_image=4), **routers}, servers
        finally:
            for router in routers.values():
                await router.close()


async def answers(engine: TokenEngine, lines: Lines, cases: list[Case]) -> list[tuple[int, bytes]]:
    """Status and body of every case, without ids and times."""
    found = []
    async with running_gateway(engine, settings()) as base_url, aiohttp.ClientSession() as session:
        for case in cases:
            lines.case = case
            async with session.post(f"{base_url}/chat/completions", json=body(case, MODEL)) as response:
                found.append((response.status, IDS.sub(rb"\1\2", await response.read())))
    return found


async def test_forty_requests_get_the_same_bytes_from_every_engine() -> None:
    """Streamed or whole, byte by byte, apart from ids and times; and every engine is asked for the same sampling."""
    assert len(CASES) == 40
    lines = Lines()
    async with engines(lines) as (all_engines, servers):
        expected = await answers(all_engines["native"], lines, CASES)
        native = all_engines["native"]
        assert isinstance(native, ScriptedEngine)
        assert {status for status, _ in expected} == {200}
        for name, server in servers.items():
            found = await answers(all_engines[name], lines, CASES)
            for case, right, answer in zip(CASES, expected, found, strict=True):
                assert answer == right, f"{name}: {case.name}"
            assert len(server.requests) == sum(case.num_parts for case in CASES), name
            check_wishes(name, server, native)


def check_wishes(name: str, server: ScriptedServer, native: ScriptedEngine) -> None:
    """What a server was asked for is what the native engine was, for every request that is not asked in parts."""
    asked = iter(server.requests)
    for case, right in zip(CASES, native.requests, strict=True):
        request = next(asked)
        for _ in range(case.num_parts - 1):
            next(asked)
        if case.num_parts == 1:
            assert request.prompt_token_ids == right.prompt_token_ids, f"{name}: {case.name}"
            assert comparable(request.sampling) == comparable(right.sampling), f"{name}: {case.name}"


def comparable(params: SamplingParams) -> SamplingParams:
    """Without what does not travel: the client's name for a constraint, and two spellings of any JSON object."""
    form = params.constraint
    if form is not None:
        is_any = form.kind == "json_object"
        kind, text = ("json_schema", '{"type": "object"}') if is_any else (form.kind, form.text)
        form = replace(form, kind=kind, text=text, param="")
    return replace(params, constraint=form)


async def test_images_travel_with_their_prompt_and_count_in_full() -> None:
    lines = Lines()
    lines.case = IMAGE
    async with engines(lines) as (all_engines, servers):
        expected = await answers(all_engines["native"], lines, [IMAGE])
        assert b'"prompt_tokens":' in expected[0][1]
        native = all_engines["native"]
        assert isinstance(native, ScriptedEngine)
        for name in ("vllm, ids", "sglang, what is new", "sglang, all so far"):
            assert await answers(all_engines[name], lines, [IMAGE]) == expected, name
            assert servers[name].requests[0].images == native.requests[0].images, name
        [(status, refusal)] = await answers(all_engines["vllm, text with ids"], lines, [IMAGE])
        assert (status, b"--enable-scale-out" in refusal) == (400, True)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_comes_together_is_one_chunk_and_the_same_text(kind: str) -> None:
    """With chunks coalesced, as they are unless a test says otherwise, streams say the same with fewer events."""
    case = next(case for case in CASES if case.name == "characters over tokens")
    lines = Lines()
    lines.case = case
    async with engines(lines) as (all_engines, servers):
        server = servers[kind]
        cls: type[HttpUpstream] = VllmUpstream if isinstance(server, ScriptedVllm) else SglangUpstream
        async with cls(server.url, VOCABULARY) as upstream:
            expected = await answers(all_engines["native"], lines, [case])
            assert await answers(upstream, lines, [case]) == expected
