"""What policies see of a request and may do to it, in every protocol: shape it, and end its answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler
from chat_scripts import HELLO, MODEL, call_markup, says, settings
from protocol_parsers import PROTOCOLS, READERS, WHOLE_READERS, protocol, request_body

from deskfleet.endpoint import TokenChunk
from deskfleet.errors import PromptTooLong, RequestError
from deskfleet.gateway.app import CALLER, serving
from deskfleet.gateway.policies.contract import Caller, Draft, Watcher, with_generate, with_sampling
from deskfleet.gateway.protocol import apply_policies, watchers_of
from deskfleet.testing.scripted import ScriptedEngine

ROUTES = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "completions": "/v1/completions",
}
LIMITS = {"chat": "max_completion_tokens", "responses": "max_output_tokens"}


def body(name: str, **fields: Any) -> dict[str, Any]:
    if name == "completions":
        return {"model": MODEL, "prompt": "hello", **fields}
    return request_body(name, tools=name != "completions", thinking=False, **fields)


@dataclass
class Watching:
    """A policy that shapes with a function, and ends answers after `most` chunks."""

    shaping: Callable[[Draft], Draft] = field(default=lambda draft: draft)
    most: int | None = None
    name: str = "watching"
    drafts: list[Draft] = field(default_factory=list)
    num_chunks: int = 0

    def shape(self, draft: Draft) -> Draft:
        self.drafts.append(draft)
        return self.shaping(draft)

    def watcher(self, draft: Draft) -> Watcher | None:
        self.num_chunks = 0
        return None if self.most is None else self

    def push(self, chunk: TokenChunk) -> TokenChunk:
        self.num_chunks += 1
        if self.num_chunks == self.most:
            return replace(chunk, finish_reason="stop", stop_reason="repetition")
        return chunk


@asynccontextmanager
async def posting(
    engine: ScriptedEngine, *policies: Any, **more: Any
) -> AsyncIterator[Callable[[str, dict[str, Any]], Any]]:
    async with (
        serving(engine, settings(), policies=policies, **more) as endpoint,
        aiohttp.ClientSession() as session,
    ):

        async def post(path: str, asked: dict[str, Any]) -> tuple[int, str]:
            async with session.post(f"{endpoint.url}{path}", json=asked) as response:
                return response.status, await response.text()

        yield post


@pytest.mark.parametrize("name", ROUTES)
async def test_a_policy_sees_what_the_client_said_and_who_it_is(name: str) -> None:
    policy = Watching()

    async with posting(ScriptedEngine(says("ok")), policy) as post:
        await post(ROUTES[name], body(name))
        await post(
            ROUTES[name],
            body(
                name,
                **{LIMITS.get(name, "max_tokens"): 77},
                temperature=0.5,
                top_p=0.6,
                top_k=3,
                min_p=0.1,
                repetition_penalty=1.1,
                presence_penalty=0.2,
                frequency_penalty=0.3,
                stream=True,
            ),
        )
    silent, said = policy.drafts
    assert silent.caller.key is None
    assert silent.caller.address == "127.0.0.1"
    assert silent.wishes.thinking is False
    assert silent.wishes.max_tokens is None
    assert silent.wishes.temperature is silent.wishes.top_p is silent.wishes.top_k is None
    assert (silent.model_id, silent.max_model_len, silent.is_stream) == (MODEL, 4096, False)
    assert silent.num_prompt_tokens == len(silent.generate.prompt_token_ids)
    assert said.is_stream is True
    wishes = said.wishes
    assert (wishes.max_tokens, wishes.temperature, wishes.top_p, wishes.top_k) == (77, 0.5, 0.6, 3)
    assert (wishes.min_p, wishes.repetition_penalty) == (0.1, 1.1)
    assert (wishes.presence_penalty, wishes.frequency_penalty) == (0.2, 0.3)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_whether_an_answer_fits_is_asked_when_policies_have_spoken(name: str) -> None:
    def at_most(most: int) -> Watching:
        def shape(draft: Draft) -> Draft:
            return with_sampling(draft, replace(draft.sampling, max_tokens=most))

        return Watching(shape)

    param = LIMITS.get(name, "max_tokens")
    huge = request_body(name, tools=False, thinking=False, **{param: 10**9})
    prepared = protocol(name).prepare(json.dumps(huge).encode(), "id")
    assert prepared.generate.sampling.max_tokens == 10**9, "the wish as it is"
    shaped = apply_policies(prepared, [at_most(9)])
    assert (shaped.generate.sampling.max_tokens, watchers_of(shaped, [at_most(9)])) == (9, ())
    for policies in ([], [at_most(9), at_most(9000)]):
        with pytest.raises(PromptTooLong) as raised:
            apply_policies(prepared, policies)
        assert raised.value.param == param


@pytest.mark.parametrize("name", ROUTES)
async def test_policies_run_in_their_order_and_the_engine_gets_the_last_word(name: str) -> None:
    order = []

    def step(label: int) -> Callable[[Draft], Draft]:
        def shape(draft: Draft) -> Draft:
            order.append((label, draft.sampling.top_k))
            return with_sampling(draft, replace(draft.sampling, top_k=label))

        return shape

    engine = ScriptedEngine(says("ok"))

    def hurry(draft: Draft) -> Draft:
        return with_generate(draft, replace(draft.generate, timeout_s=5.0))

    async with posting(engine, Watching(step(1)), Watching(step(2)), Watching(hurry)) as post:
        await post(ROUTES[name], body(name))
    assert order == [(1, 0), (2, 1)]
    assert engine.requests[0].sampling.top_k == 2
    assert engine.requests[0].timeout_s == 5.0


@pytest.mark.parametrize("name", ROUTES)
async def test_a_policy_may_refuse(name: str) -> None:
    def refuse(draft: Draft) -> Draft:
        raise RequestError("not on Sundays", param="weekday")

    engine = ScriptedEngine(says("never"))
    async with posting(engine, Watching(refuse)) as post:
        status, text = await post(ROUTES[name], body(name))
    assert status == 400
    assert "weekday: not on Sundays" in json.loads(text)["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_watcher_may_end_an_answer_and_says_why(name: str, stream: bool) -> None:
    engine = ScriptedEngine(says("abcdefgh"))
    async with posting(engine, Watching(most=3)) as post:
        status, text = await post(ROUTES[name], body(name, stream=stream))
    assert status == 200
    assert engine.num_cancelled == 1, "the engine does not go on"
    assert texts(name, text, stream) == "abc"
    place = {"chat": "choice", "completions": "choice"}.get(name, name)
    last = final(name, text, stream)
    match place:
        case "choice":
            assert (last["finish_reason"], last["stop_reason"]) == ("stop", "repetition")
        case "responses":
            assert (last["status"], last["stop_reason"]) == ("completed", "repetition")
        case "messages":
            assert (last["stop_reason"], last["stop_detail"]) == ("end_turn", "repetition")


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
async def test_an_answer_that_is_ended_within_a_call_is_no_finished_call(name: str) -> None:
    markup = call_markup(("weather", {"city": ("Oslo and then some", True)}))
    engine = ScriptedEngine(says(markup))
    async with posting(engine, Watching(most=70)) as post:
        _, text = await post(ROUTES[name], body(name))
    last = final(name, text, stream=False)
    told = {"chat": "length", "responses": "incomplete", "messages": "max_tokens"}[name]
    assert told in (last.get("finish_reason"), last.get("status"), last.get("stop_reason"))
    assert "repetition" in (last.get("stop_reason"), last.get("stop_detail"))


def events(text: str) -> list[dict[str, Any]]:
    blocks = [block.rpartition("data: ")[2] for block in text.strip().split("\n\n")]
    return [json.loads(block) for block in blocks if block != "[DONE]"]


def final(name: str, text: str, stream: bool) -> dict[str, Any]:
    """Where an answer says how it ended."""
    if not stream:
        answer = json.loads(text)
        last: dict[str, Any] = answer["choices"][0] if "choices" in answer else answer
        return last
    told = events(text)
    match name:
        case "messages":
            delta: dict[str, Any] = next(e["delta"] for e in told if e["type"] == "message_delta")
            return delta
        case "responses":
            response: dict[str, Any] = told[-1]["response"]
            return response
        case _:
            choice: dict[str, Any] = next(
                e["choices"][0] for e in told if e["choices"] and e["choices"][0]["finish_reason"]
            )
            return choice


def texts(name: str, text: str, stream: bool) -> str:
    """What an answer says, whatever the protocol."""
    if name == "completions":
        told = events(text) if stream else [json.loads(text)]
        return "".join(choice["text"] for event in told for choice in event["choices"])
    result = READERS[name](events(text)) if stream else WHOLE_READERS[name](json.loads(text))
    return result.text


async def test_the_caller_is_whoever_a_middleware_says() -> None:
    policy = Watching()

    async def knows(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        assert request[CALLER].address
        return response

    async with posting(ScriptedEngine(says("ok")), policy, middlewares=[knows]) as post:
        status, _ = await post("/v1/chat/completions", {"model": MODEL, "messages": HELLO})
    assert status == 200
    assert policy.drafts[0].caller == Caller(None, "127.0.0.1")
