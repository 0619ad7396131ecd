"""Everything that can go wrong has an answer that says what, and where."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import openai
import pytest
from aiohttp import web
from chat_scripts import (
    CHAT,
    HELLO,
    MODEL,
    THINK,
    TOOLS,
    ask,
    ask_streaming,
    chatting,
    ids,
    requesting,
    says,
    strict_format,
    strict_tool,
)

from deskfleet.errors import EngineError, PromptTooLong, RankDied, RequestError
from deskfleet.gateway.failures import UnknownModel, describe_failure
from deskfleet.gateway.protocols.chat import ChatProtocol
from deskfleet.testing.scripted import Script, ScriptedEngine

REPEATED_EFFORT = "chat_template_kwargs.reasoning_effort"
BEGUN = [*HELLO, {"role": "assistant", "content": "a", "prefix": True}]
BODY = {"model": MODEL, "messages": HELLO, **CHAT}
LONG = "and so it went on and on for a very long time indeed"

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"seed": -1}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"stop": 7}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"continuous": True}}, "stream_options.continuous"),
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": "high"}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"stone": 1}}, "logit_bias"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"thinking_budget": -1}, "thinking_budget"),
    ({"thinking_budget": 5, "thinking_token_budget": 6}, "thinking_token_budget"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"store": True}, "store"),
    ({"temprature": 0.5}, "temprature"),
    ({"max_token": 5}, "max_token"),
    ({"max_output_tokens": 5}, "max_output_tokens"),
    ({"instructions": "x"}, "instructions"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": "99"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
    ({"enable_thinking": True}, "enable_thinking"),
    ({"reasoning_effort": "ludicrous"}, "reasoning_effort"),
    ({"reasoning_effort": 0}, "reasoning_effort"),
    ({"reasoning_effort": 101}, "reasoning_effort"),
    ({"reasoning_effort": -1}, "reasoning_effort"),
    ({"reasoning_effort": 50.5}, "reasoning_effort"),
    ({"reasoning_effort": 1.0}, "reasoning_effort"),
    ({"reasoning": {"effort": "hardest"}}, "reasoning.effort"),
    ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
    ({"output_config": {"effort": 0}}, "output_config.effort"),
    ({"reasoning": True}, "reasoning"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "gone"}}, **THINK},
        "tool_choice",
    ),
    ({"reasoning_effort": True}, "reasoning_effort"),
    ({"reasoning_effort": "60"}, "reasoning_effort"),
    ({"reasoning_effort": 60, "chat_template_kwargs": {"reasoning_effort": 61}}, REPEATED_EFFORT),
    ({"chat_template_kwargs": {"reasoning_effort": 101}}, REPEATED_EFFORT),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
    ({"tools": [*TOOLS, *TOOLS]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice"),
    ({"response_format": {"type": "ebnf"}}, "response_format.type"),
    ({"response_format": {"type": "regex"}}, "response_format.regex"),
    ({"response_format": {"type": "regex", "regex": "a+"}, "tools": TOOLS}, "response_format"),
    ({"response_format": {"type": "regex", "regex": "a+"}, "messages": BEGUN}, "response_format"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": True}}},
        "response_format",
    ),
    ({"response_format": strict_format({"a": {"type": "integer"}}, [])}, "response_format"),
    ({"tools": [strict_tool({"a": {"type": "integer"}}, [])]}, "tools"),
    ({"tools": [strict_tool({"a": {"type": "integer"}}, ["a"]), *TOOLS]}, "tools"),
    ({"tools": [strict_tool({'a"b': {"type": "integer"}}, ['a"b'])]}, "tools"),
    ({"tools": [strict_tool({"a b": {"type": "integer"}}, ["a b"])]}, "tools"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"content": "who?"}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": "robot", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type"),
    ({"messages": [*HELLO, {"role": "assistant", "content": None}, *HELLO]}, "messages[1].content"),
    ({"messages": [*HELLO, {"role": "tool", "content": "42"}]}, "messages[1].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "1", "content": "42"}]}, "messages"),
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
]


async def post(
    engine: ScriptedEngine, body: bytes | dict[str, Any], **changes: Any
) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        requesting(engine, **changes) as (session, url),
        session.post(f"{url}/v1/chat/completions", data=data) as response,
    ):
        assert response.content_type == "application/json"
        assert response.headers["x-request-id"]
        return response.status, (await response.json())["error"]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=[str(fields)[:50] for fields, _ in BAD_FIELDS])
async def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    engine = ScriptedEngine(says("never"))
    status, error = await post(engine, BODY | fields)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"], "many clients show the message and nothing else"
    assert engine.requests == []


async def test_the_client_sees_the_field_and_the_known_values() -> None:
    async with chatting(says("never")) as (client, _):
        with pytest.raises(openai.BadRequestError) as raised:
            await ask(client, extra_body={"reasoning_effort": "ludicrous"})
        assert raised.value.param == "reasoning_effort"
        assert "none, minimal, low, medium, high, xhigh, ultra, max" in raised.value.message
        with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
            await ask(client, extra_body={"temprature": 1})


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "store": False},
        {"user": "someone", "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True},
        {"a_field_of_the_future": {"x": 1}, "cache_salt": "y"},
        {"stop": None, "tools": [], "tool_choice": None, "max_tokens": None, "logprobs": None},
        {"messages": [{"role": "user", "content": "hello", "name": "bob"}]},
    ],
)
async def test_fields_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    async with (
        requesting(ScriptedEngine(says("ok"))) as (session, url),
        session.post(f"{url}/v1/chat/completions", json=BODY | fields) as response,
    ):
        assert response.status == 200, await response.text()


@pytest.mark.parametrize("body", [b"", b"{", b'{"model": "a', b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000])
async def test_invalid_json(body: bytes) -> None:
    status, error = await post(ScriptedEngine(says("never")), body)
    assert status == 400
    assert error["message"].startswith(("the body is not valid JSON: ", "the body is nested "))


async def test_json_that_is_no_object() -> None:
    status, error = await post(ScriptedEngine(says("never")), b"[1, 2]")
    assert (status, error["message"]) == (400, "the body is not a JSON object")


async def test_an_unknown_model_is_not_found() -> None:
    async with chatting(says("never")) as (client, _):
        with pytest.raises(openai.NotFoundError) as raised:
            await ask(client, model="gpt-4o")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
    assert "gpt-4o" in raised.value.message
    assert MODEL in raised.value.message


async def test_an_over_long_prompt_is_refused_with_both_numbers() -> None:
    async with chatting(says("ok")) as (client, engine):
        await ask(client, messages=[{"role": "user", "content": LONG}])
        num_prompt_tokens = len(engine.requests[0].prompt_token_ids)
    for max_model_len in (num_prompt_tokens - 1, num_prompt_tokens):
        engine = ScriptedEngine(says("never"), max_model_len=max_model_len)
        async with chatting(engine) as (client, _):
            with pytest.raises(openai.BadRequestError) as raised:
                await ask(client, messages=[{"role": "user", "content": LONG}])
        assert raised.value.code == "context_length_exceeded"
        assert raised.value.param == "messages"
        assert f"prompt of {num_prompt_tokens} tokens" in raised.value.message
        assert f"context of {max_model_len} tokens" in raised.value.message
        assert engine.requests == []


async def test_prompt_and_max_tokens_must_fit_together() -> None:
    async with chatting(says("ok")) as (client, engine):
        await ask(client)
        num_prompt_tokens = len(engine.requests[0].prompt_token_ids)
    async with chatting(ScriptedEngine(says("ok"), max_model_len=num_prompt_tokens + 5)) as (client, engine):
        await ask(client, max_tokens=5)
        with pytest.raises(openai.BadRequestError) as raised:
            await ask(client, max_tokens=6)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "max_tokens")
    assert f"prompt of {num_prompt_tokens} tokens plus max_tokens 6" in raised.value.message


async def test_a_body_over_the_limit_is_refused() -> None:
    body = BODY | {"messages": [{"role": "user", "content": "a" * 5000}]}
    status, error = await post(ScriptedEngine(says("never")), body, max_body_bytes=4096)
    assert (status, error["code"]) == (413, "request_too_large")
    assert "4096" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_wrong_routes_and_methods(method: str, path: str, status: int, code: str) -> None:
    async with (
        requesting(ScriptedEngine(says("never"))) as (session, url),
        session.request(method, url + path) as response,
    ):
        assert response.status == status
        error = (await response.json())["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", code)
        assert error["message"]
        assert ("Allow" in response.headers) == (status == 405)


DEATHS: list[tuple[Callable[[], Exception], str]] = [
    (lambda: EngineError("the engine ran out of memory"), "the engine ran out of memory"),
    (lambda: RankDied(1, "was killed by signal 9"), "rank 1 was killed by signal 9; the group was stopped"),
]


@pytest.mark.parametrize(("death", "sentence"), DEATHS, ids=["engine", "rank"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_before_the_first_token(
    death: Callable[[], Exception], sentence: str, stream: bool
) -> None:
    script = Script(ids(LONG), failure=death(), fail_after=0)
    async with chatting(script) as (client, engine):
        with pytest.raises(openai.InternalServerError) as raised:
            await (ask_streaming(client) if stream else ask(client))
        assert raised.value.status_code == 503
        assert sentence in raised.value.message
        assert engine.failure == sentence
        with pytest.raises(openai.InternalServerError, match=r"engine|rank") as again:
            await ask(client)
        assert (again.value.status_code, again.value.code) == (503, "engine_failed")


@pytest.mark.parametrize(("death", "sentence"), DEATHS, ids=["engine", "rank"])
async def test_an_engine_that_dies_mid_stream(death: Callable[[], Exception], sentence: str) -> None:
    script = Script(ids(LONG), failure=death(), fail_after=3)
    heard: list[Any] = []

    async def listen(stream: Any) -> None:
        async for chunk in stream:
            heard.append(chunk)

    async with chatting(script) as (client, engine):
        stream = await ask(client, stream=True)
        with pytest.raises(openai.APIError) as raised:
            await listen(stream)
        assert sentence in raised.value.message
        assert len(heard) >= 2, "what was said before stays said"
        assert engine.failure == sentence


async def test_a_stream_that_fails_ends_with_an_error_event_and_no_done() -> None:
    script = Script(ids(LONG), failure=RankDied(0, "raised ValueError"), fail_after=2)
    async with (
        requesting(ScriptedEngine(script)) as (session, url),
        session.post(f"{url}/v1/chat/completions", json=BODY | {"stream": True}) as response,
    ):
        assert response.status == 200
        events = (await response.text()).strip().split("\n\n")
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_failed")
    assert error["message"] == "rank 0 raised ValueError; the group was stopped"
    assert not any("[DONE]" in event for event in events)


async def test_an_engine_that_dies_before_a_plain_answer_is_complete() -> None:
    script = Script(ids(LONG), failure=RankDied(1, "exited with code 1"), fail_after=4)
    async with chatting(script) as (client, _):
        with pytest.raises(openai.InternalServerError, match="rank 1 exited with code 1"):
            await ask(client)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_the_engine_refuses_is_a_bad_request(stream: bool) -> None:
    refusal = RequestError("this engine has no min_p", param="min_p")
    async with chatting(Script(ids(LONG), failure=refusal)) as (client, engine):
        with pytest.raises(openai.BadRequestError, match="no min_p") as raised:
            await (ask_streaming(client) if stream else ask(client))
    assert raised.value.param == "min_p"
    assert engine.failure is None


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_answer_is_an_error_not_a_short_answer(stream: bool) -> None:
    async with chatting(Script(ids("ab"), chunk_sizes=(9,), finish_reason="abort")) as (client, _):
        with pytest.raises(openai.InternalServerError, match="abort"):
            await (ask_streaming(client) if stream else ask(client))


@pytest.mark.parametrize("after", [0, 2])
async def test_a_bug_is_logged_and_answered(after: int, caplog: pytest.LogCaptureFixture) -> None:
    script = Script(ids(LONG), failure=ZeroDivisionError("secret detail"), fail_after=after)
    async with requesting(ScriptedEngine(script)) as (session, url):
        with caplog.at_level(logging.ERROR, logger="deskfleet.gateway.app"):
            async with session.post(f"{url}/v1/chat/completions", json=BODY | {"stream": True}) as response:
                body = await response.text()
                request_id = response.headers["x-request-id"]
    assert response.status == (500 if after == 0 else 200)
    error = json.loads(body.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
    assert error["code"] == "internal_error"
    assert "secret" not in body
    assert request_id in caplog.text
    assert "ZeroDivisionError: secret detail" in caplog.text


async def test_a_bug_in_the_gateway_itself_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(ChatProtocol, "prepare", broken)
    status, error = await post(ScriptedEngine(says("never")), BODY)
    assert (status, error["code"]) == (500, "internal_error")


def test_failures_map_to_statuses() -> None:
    expected = {
        RequestError("a", param="b"): (400, None),
        PromptTooLong(10, None, 5): (400, "context_length_exceeded"),
        UnknownModel("a", "b"): (404, "model_not_found"),
        EngineError("a"): (503, "engine_failed"),
        RankDied(0, "died"): (503, "engine_failed"),
        web.HTTPRequestEntityTooLarge(1, 2): (413, "request_too_large"),
        RuntimeError("a"): (500, "internal_error"),
    }
    for error, (status, code) in expected.items():
        failure = describe_failure(error)
        assert (failure.status, failure.code) == (status, code), error


async def wait_for(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first_delay_s", [0.0, 60.0], ids=["mid-answer", "before the first token"])
async def test_a_client_that_disconnects_cancels_its_request(stream: bool, first_delay_s: float) -> None:
    script = Script(ids(LONG), first_delay_s=first_delay_s, delay_s=0.01 if first_delay_s else 30.0)
    engine = ScriptedEngine(script)
    async with requesting(engine) as (session, url):
        request = session.post(f"{url}/v1/chat/completions", json=BODY | {"stream": stream})
        task = asyncio.ensure_future(_read(request))
        await wait_for(lambda: engine.num_running == 1, "the request reaches the engine")
        await asyncio.sleep(0.05)
        assert engine.num_cancelled == 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_for(lambda: engine.num_cancelled == 1, "the engine's iterator is closed")
        assert engine.num_running == 0
        async with session.get(f"{url}/metrics") as response:
            metrics = await response.text()
    assert 'deskfleet_requests_total{outcome="cancelled",protocol="chat"} 1.0' in metrics
    assert "deskfleet_running_requests 0.0" in metrics


async def _read(request: Any) -> None:
    async with request as response:
        await response.read()


async def test_the_openai_client_closing_its_stream_cancels_the_request() -> None:
    script = Script(ids(LONG * 3), delay_s=0.01)
    async with chatting(script) as (client, engine):
        stream = await ask(client, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await wait_for(lambda: engine.num_cancelled == 1, "the engine's iterator is closed")


async def test_the_other_streams_go_on_when_one_client_leaves() -> None:
    script = Script(ids(LONG), delay_s=0.002)
    async with chatting(script) as (client, engine):
        staying = asyncio.ensure_future(ask_streaming(client))
        leaving = await ask(client, stream=True)
        async for _ in leaving:
            break
        await leaving.close()
        chunks = await staying
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == LONG
    assert engine.num_cancelled == 1
