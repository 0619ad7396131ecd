"""What is told of an answer beside its text: cached tokens, what was put right, whose tokens they are, how it was cut.

Takes about five seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from chat_scripts import (
    CHAT,
    HELLO,
    MODEL,
    THINK,
    TOOLS,
    ask,
    call_markup,
    chatting,
    ids,
    requesting,
    says,
    settings,
)
from protocol_clients import Served, served
from protocol_parsers import Outcome, prepared, protocol, streamed, whole
from upstream_scripts import server_of, upstream_of

from deskfleet.endpoint import TokenChunk
from deskfleet.gateway.key_file import change_key_file, make_secret
from deskfleet.gateway.policy_file import PolicySettings, PolicyStore
from deskfleet.gateway.upstream.router import Router
from deskfleet.testing.scripted import ScriptedEngine, running_gateway
from deskfleet.testing.upstream_vllm import ScriptedVllm

# --- cached tokens -----------------------------------------------------------------------------------------

LATE = "Hm.</think>So be it."


async def usages(
    url: str, session: aiohttp.ClientSession, thinking: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """The usage of one answer in every protocol, streamed and not, as the wire has it."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HELLO, **thinking, "stream_options": {"include_usage": True}},
        "/v1/responses": {"input": "hello", "reasoning": {"effort": "high"}},
        "/v1/messages": {"messages": HELLO, "max_tokens": 50, **thinking},
        "/v1/completions": {"prompt": "hello", "stream_options": {"include_usage": True}},
    }
    found = {}
    for (path, body), stream in itertools.product(bodies.items(), (False, True)):
        asked = {"model": MODEL, "stream": stream, **body}
        if not stream:
            asked.pop("stream_options", None)
        async with session.post(f"{url}{path}", json=asked) as response:
            text = await response.text()
            assert response.status == 200, text
        events = [line.removeprefix("data: ") for line in text.splitlines() if line[:1] in ("{", "d")]
        last = [json.loads(event) for event in events if event != "[DONE]"]
        with_usage = [each.get("response", each) for each in last]
        found[f"{path} {stream}"] = next(each["usage"] for each in reversed(with_usage) if each.get("usage"))
    return found


@pytest.mark.parametrize("num_parts", [1, 2])
async def test_cached_tokens_that_come_last_are_in_every_usage(num_parts: int) -> None:
    """vLLM tells them after the answer. Of an answer in parts the first part's count is the prompt's."""
    thinking = {"thinking": {"type": "enabled"}} | ({"thinking_budget": 50} if num_parts == 2 else {})
    async with server_of("vllm", says(LATE)) as server:
        assert isinstance(server, ScriptedVllm)
        server.num_cached, server.drafts = 3, (8, 5)
        async with (
            Router([upstream_of(server)]) as router,
            running_gateway(router, settings()) as base_url,
            aiohttp.ClientSession() as session,
        ):
            url = base_url.removesuffix("/v1")
            found = await usages(url, session, thinking)
            async with session.get(f"{url}/metrics") as response:
                metrics = await response.text()
    for name, usage in found.items():
        if name.startswith("/v1/messages"):
            assert usage["cache_read_input_tokens"] == 3, name
            assert usage["input_tokens"] == len(server.requests[0].prompt_token_ids) - 3
        else:
            details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
            assert details["cached_tokens"] == 3, (name, usage)
        if name.startswith("/v1/chat"):
            assert usage["prompt_cache_hit_tokens"] == 3
            assert usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"] - 3
            assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
    assert f"deskfleet_cached_prompt_tokens_total {3.0 * len(found)}" in metrics


# --- whose tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["generate", "text"])
async def test_tokens_made_of_text_say_so(way: str) -> None:
    async with server_of("vllm", says("Hello."), way=way) as server, server_of("vllm") as dead:
        await dead.stop()
        async with (
            Router([upstream_of(server), upstream_of(dead)]) as router,
            running_gateway(router, settings()) as base_url,
            aiohttp.ClientSession() as session,
        ):
            url = base_url.removesuffix("/v1")
            for stream in (False, True):
                body = {"model": MODEL, "messages": HELLO, **CHAT, "stream": stream}
                async with session.post(f"{base_url}/chat/completions", json=body) as response:
                    assert response.headers.get("x-deskfleet-tokens") == (
                        "retokenised" if way == "text" else None
                    )
                    await response.read()
            async with session.get(f"{url}/health/detail") as response:
                detail = await response.json()
            async with session.get(f"{base_url}/models") as response:
                assert "x-deskfleet-tokens" not in response.headers
    assert detail["exact_tokens"] is (way == "generate")
    first, second = detail["replicas"]
    assert (first["url"], first["state"], first["num_requests"], first["exact_tokens"]) == (
        server.url,
        "closed",
        2,
        way == "generate",
    )
    assert second["state"] == "open"
    assert "nothing answers at" in second["reason"]


async def test_an_engine_in_this_process_has_no_replicas() -> None:
    async with requesting(ScriptedEngine(says("Hello."))) as (session, url):
        async with session.get(f"{url}/health/detail") as response:
            detail = await response.json()
        assert "replicas" not in detail
        assert "exact_tokens" not in detail


# --- cut in a call -----------------------------------------------------------------------------------------

LOOP = "I should look at this again from the start. "
ONE_CALL = call_markup(("weather", {"city": ("Oslo", True)})).removesuffix("\n</｜DSML｜ calls>")
IN_A_VALUE = call_markup(("weather", {"city": (LOOP * 60, True)}))
IN_JSON = call_markup(("add", {"a": (json.dumps([LOOP * 60]), False)}))
SAME_CALLS = call_markup(*[("weather", {"city": ("the capital of Norway", True)})] * 60)
AFTER_A_CALL = f"{ONE_CALL}\n" + IN_A_VALUE.partition("calls>\n")[2]
CUTS = {
    "in a text value": ("", IN_A_VALUE, 0),
    "in a JSON value": ("", IN_JSON, 0),
    "in a second call": ("Let me see.", AFTER_A_CALL, 1),
    "the same call again and again": ("", SAME_CALLS, 0),
}


async def cut_answers(to: Served, thought: bool) -> list[tuple[str, str | None, list[tuple[str, str]]]]:
    """Of every protocol, streamed and not: finish reason, why, and the calls as (name, arguments)."""
    thinking = THINK if thought else CHAT
    found = []
    fields: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "extra_body": thinking}
    one = (await to.openai.chat.completions.create(**fields)).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in one.message.tool_calls or []]
    found.append((one.finish_reason, one.stop_reason, calls))
    parts: dict[int, list[str]] = {}
    async for chunk in await to.openai.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or []:
                part = parts.setdefault(delta.index, ["", ""])
                part[0] += delta.function.name or ""
                part[1] += delta.function.arguments or ""
            if choice.finish_reason is not None:
                last = choice
    found.append((last.finish_reason, last.stop_reason, [(name, text) for name, text in parts.values()]))
    functions = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    asked = {"model": MODEL, "input": "hello", "tools": functions, "extra_body": thinking}
    answers = [await to.openai.responses.create(**asked)]
    async for event in await to.openai.responses.create(**asked, stream=True):
        if event.type in ("response.completed", "response.incomplete"):
            answers.append(event.response)
    for answer in answers:
        assert answer.status == "incomplete"
        done = [item for item in answer.output if item.type == "function_call" and item.status == "completed"]
        reason = {"max_output_tokens": "length"}[answer.incomplete_details.reason]
        found.append((reason, answer.stop_reason, [(item.name, item.arguments) for item in done]))
    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS
    ]
    spoken = {"model": MODEL, "messages": HELLO, "tools": tools, "max_tokens": 3000, "extra_body": thinking}
    message = await to.anthropic.messages.create(**spoken)
    blocks = [(b.name, json.dumps(b.input)) for b in message.content if b.type == "tool_use"]
    found.append(({"max_tokens": "length"}[message.stop_reason], message.stop_detail, blocks))
    reasons = [
        event.delta
        async for event in await to.anthropic.messages.create(**spoken, stream=True)
        if event.type == "message_delta"
    ]
    found.append(({"max_tokens": "length"}[reasons[0].stop_reason], reasons[0].stop_detail, blocks))
    return found


@pytest.mark.parametrize("where", CUTS)
@pytest.mark.parametrize("thought", [False, True], ids=["", "after a thought"])
async def test_a_loop_that_is_cut_in_a_call_is_no_finished_call(where: str, thought: bool) -> None:
    before, markup, num_whole = CUTS[where]
    script = says(f"{'Hm.</think>' if thought else ''}{before}{markup}", chunk_sizes=(3, 1))
    store = PolicyStore(PolicySettings.model_validate({"loop_abort": {"data_tokens": 100}}))
    async with served(script, policies=store) as to:
        found = await cut_answers(to, thought)
        await asyncio.sleep(0.05)
        assert to.engine.num_cancelled == len(found) == 6
    for reason, detail, calls in found:
        assert (reason, (detail or "")[:10]) == ("length", "repetition")
        good = [text for _, text in calls if is_json(text)]
        assert len(good) >= num_whole
        assert len(calls) - len(good) <= 1, "at most the last is cut"


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
@pytest.mark.parametrize("read", [streamed, whole])
def test_wherever_a_policy_cuts_a_block_the_calls_are_not_finished(
    name: str, read: Callable[..., Outcome]
) -> None:
    """At every token, between calls too; only a block that the model has closed itself is one of finished calls."""
    token_ids = ids("Let me see." + call_markup(*[("weather", {"city": ("Oslo", True)})] * 2))
    endings = []
    for end in range(1, len(token_ids) + 1):
        chunks = [TokenChunk((token_id,), None, 3) for token_id in token_ids[:end]]
        chunks[-1] = replace(chunks[-1], finish_reason="stop", stop_reason="repetition")
        told = read(name, protocol(name).parser(prepared(name, True, False)), chunks)
        endings.append(told.ending)
        assert all(is_json(arguments) for _, arguments in told.calls[:-1])
    assert endings[-1] == "calls"
    assert set(endings[:-1]) == {"stop", "length"}
    assert endings[:-1] == sorted(endings[:-1], reverse=True), "text is finished, calls are not"


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# --- what was put right, and what the model wrote ------------------------------------------------------------

BROKEN = "Well.\n\n<｜DSML｜ calls>\nno call\n</｜DSML｜ calls>"


async def test_repairs_are_counted_by_kind() -> None:
    async with requesting(ScriptedEngine(says(BROKEN))) as (session, url):
        for stream in (False, True):
            body = {"model": MODEL, "messages": HELLO, **CHAT, "tools": TOOLS, "stream": stream}
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                await response.read()
        async with session.get(f"{url}/metrics") as response:
            metrics = await response.text()
    assert 'deskfleet_answer_repairs_total{kind="text_in_block",protocol="chat"} 2.0' in metrics


async def test_raw_answers_are_off_unless_asked_for() -> None:
    async with (
        requesting(ScriptedEngine(says("Hello."))) as (session, url),
        session.get(f"{url}/debug/answers") as response,
    ):
        assert response.status == 404


async def test_raw_answers_for_whoever_sits_here() -> None:
    async with chatting(says(BROKEN), debug_answers=2) as (client, _), aiohttp.ClientSession() as session:
        root = str(client.base_url).removesuffix("/v1/")
        for _ in range(3):
            await ask(client, tools=TOOLS)
        async with session.get(f"{root}/debug/answers") as response:
            answers = (await response.json())["answers"]
        assert len(answers) == 2
        told = answers[0]
        assert tuple(told["token_ids"]) == says(BROKEN).token_ids
        assert told["text"] == BROKEN + "<｜end▁of▁sentence｜>"
        assert (told["protocol"], told["finish_reason"], told["outcome"]) == ("chat", "stop", "ok")
        assert "text_in_block" in told["repairs"]
        for headers in (
            {"X-Forwarded-For": "203.0.113.9"},
            {"Forwarded": "for=203.0.113.9"},
            {"Host": "evil.example"},
        ):
            async with session.get(f"{root}/debug/answers", headers=headers) as response:
                assert response.status == 403, headers


async def test_with_keys_everybody_reads_his_own_raw_answers(tmp_path: Path) -> None:
    secrets = {name: make_secret() for name in ("alice", "bob")}
    path = tmp_path / "keys.toml"
    for name, secret in secrets.items():
        change_key_file(path, lambda file, n=name, s=secret: file.with_key(n, s, datetime.now(UTC)))  # type: ignore[misc]
    store = PolicyStore(PolicySettings(), keys_path=path)
    async with (
        requesting(ScriptedEngine(says("Hello.")), policies=store, debug_answers=50) as (session, url),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=secrets["alice"], max_retries=0) as client,
    ):
        await ask(client)
        for name, number in (("alice", 1), ("bob", 0)):
            headers = {"Authorization": f"Bearer {secrets[name]}"}
            async with session.get(f"{url}/debug/answers", headers=headers) as response:
                assert len((await response.json())["answers"]) == number
        async with session.get(f"{url}/debug/answers") as response:
            assert response.status == 401
