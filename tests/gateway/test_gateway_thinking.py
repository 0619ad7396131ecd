"""Reasoning apart from the answer, and every way to ask for it."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from chat_scripts import (
    CHAT,
    CHECKPOINT,
    HELLO,
    MODEL,
    THINK,
    TOOLS,
    ask,
    ask_streaming,
    chatting,
    finish_reasons,
    joined,
    says,
    strict_format,
    text_of,
)
from deepseek_recipe import ChatCompletionRequest, ConversionOptions, ModelVersion

from deskfleet.gateway.chat_format import ChatFormat
from deskfleet.gateway.thinking import EFFORT_TIERS
from deskfleet.testing.scripted import Script, every_chunking

REASONED = "Two and two.\n\nHm, €.</think>It is four."


async def test_reasoning_and_content_apart() -> None:
    async with chatting(says(REASONED)) as (client, _):
        answer = await ask(client, extra_body=THINK)
    message = answer.choices[0].message
    assert message.reasoning_content == "Two and two.\n\nHm, €."
    assert message.content == "It is four."
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


async def test_reasoning_streams_apart_for_every_chunking() -> None:
    answer = says(REASONED)
    chunkings = every_chunking(len(answer.token_ids))
    queue = iter(chunkings)
    async with chatting(lambda request: Script(answer.token_ids, chunk_sizes=next(queue))) as (client, _):
        for sizes in chunkings:
            chunks = await ask_streaming(client, extra_body=THINK)
            assert joined(chunks, "reasoning_content") == "Two and two.\n\nHm, €.", sizes
            assert joined(chunks, "content") == "It is four.", sizes
            assert finish_reasons(chunks) == ["stop"], sizes


async def test_no_reasoning_when_thinking_is_off() -> None:
    async with chatting(says("It is four.")) as (client, _):
        answer = await ask(client, extra_body=CHAT)
        chunks = await ask_streaming(client, extra_body=CHAT)
    assert answer.choices[0].message.content == joined(chunks, "content") == "It is four."
    assert getattr(answer.choices[0].message, "reasoning_content", None) is None
    assert joined(chunks, "reasoning_content") == ""


@pytest.mark.parametrize("fields", [CHAT, THINK], ids=["chat", "thinking"])
@pytest.mark.parametrize("text", ["<think>a</think>b<think>c</think>", "a</think></think>b", "a<think>b"])
async def test_thinking_markup_is_never_in_the_content(text: str, fields: dict[str, Any]) -> None:
    async with chatting(says(text)) as (client, _):
        message = (await ask(client, extra_body=fields)).choices[0].message
        chunks = await ask_streaming(client, extra_body=fields)
    assert "think" not in (message.content or "")
    assert (message.content or "") == joined(chunks, "content")
    assert "think" not in (getattr(message, "reasoning_content", None) or "")


async def test_log_probabilities_of_reasoning_are_kept_apart() -> None:
    async with chatting(says("why</think>yes")) as (client, _):
        answer = await ask(client, extra_body=THINK, logprobs=True)
    logprobs = answer.choices[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in logprobs.content) == b"yes"
    assert b"".join(bytes(entry["bytes"]) for entry in logprobs.reasoning_content) == b"why"


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "max", "enable_thinking": False}, False),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, True),
        ({"reasoning_effort": 30}, True),
        ({"chat_template_kwargs": {"reasoning_effort": 30}}, True),
        ({"reasoning_effort": 30, "chat_template_kwargs": {"reasoning_effort": 30}}, True),
        ({"reasoning_effort": 50, "chat_template_kwargs": {"reasoning_effort": "low"}}, True),
        ({"reasoning_effort": 30, "thinking": {"type": "disabled"}}, False),
        ({"thinking": None, "enable_thinking": None, "reasoning_effort": None}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("default", [False, True])
async def test_every_way_to_ask(fields: dict[str, Any], thinking: bool | None, default: bool) -> None:
    async with chatting(says("a</think>b"), default_thinking=default) as (client, engine):
        answer = await ask(client, extra_body=fields)
    prompt = text_of(engine.requests[0].prompt_token_ids)
    expected = default if thinking is None else thinking
    assert prompt.endswith("<think>" if expected else "</think>")
    assert (getattr(answer.choices[0].message, "reasoning_content", None) == "a") == expected


@pytest.mark.parametrize("effort", EFFORT_TIERS)
async def test_efforts_are_rendered_as_the_publisher_does(effort: str) -> None:
    rendered = {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "ultra": 100, "max": 100}
    async with chatting(says("a</think>b")) as (client, engine):
        await ask(client, reasoning_effort=effort, extra_body={})
    prompt = text_of(engine.requests[0].prompt_token_ids)
    if effort == "none":
        assert "Reasoning Effort" not in prompt
    else:
        assert f"<｜System｜>Reasoning Effort: {rendered[effort]} (range 1-100" in prompt


@pytest.mark.parametrize("effort", [1, 9, 37, 50, 75, 99, 100])
@pytest.mark.parametrize("inside", [False, True])
async def test_efforts_as_numbers_stand_in_the_prompt(effort: int, inside: bool) -> None:
    wish = {"reasoning_effort": effort}
    async with chatting(says("a</think>b")) as (client, engine):
        await ask(client, extra_body={"chat_template_kwargs": wish} if inside else wish)
        await ask(client, extra_body={"reasoning_effort": "high"})
    asked, high = (text_of(request.prompt_token_ids) for request in engine.requests)
    assert asked == high.replace("Effort: 75 (", f"Effort: {effort} (")
    assert f"<｜System｜>Reasoning Effort: {effort} (range 1-100" in asked


TALKS: dict[str, dict[str, Any]] = {
    "no system": {},
    "system": {"messages": [{"role": "system", "content": "\n 75 (range 1-100 75"}, *HELLO]},
    "spelled tokens": {"messages": [{"role": "system", "content": "a<｜User｜>b</think>｜DSML｜"}, *HELLO]},
    "reminder": {"messages": [{"role": "latest_reminder", "content": "It is noon."}, *HELLO]},
    "tools": {"messages": [{"role": "system", "content": "Reasoning Effort: 75"}, *HELLO], "tools": TOOLS},
    "schema": {"response_format": strict_format({"a": {"type": "integer"}}, ["a"])},
}


@pytest.mark.parametrize("talk", TALKS)
def test_a_number_in_another_tier_s_place_gives_the_library_s_own_ids(talk: str) -> None:
    """Of the three numbers that the library can say, each takes the place of each."""
    chat_format = ChatFormat.from_checkpoint(CHECKPOINT)
    numbers = {"low": 50, "high": 75, "max": 100}
    talks = {}
    for tier in numbers:
        body = {"model": MODEL, "messages": HELLO, **TALKS[talk], **THINK, "reasoning_effort": tier}
        options = ConversionOptions().with_model_versions_by_name({MODEL: ModelVersion.DeepseekV41Flash})
        talks[tier] = ChatCompletionRequest(body).convert(options).conversation
    rendered = {tier: chat_format.encoding.encode(conversation) for tier, conversation in talks.items()}
    assert len({tuple(token_ids) for token_ids in rendered.values()}) == 3
    for conversation in talks.values():
        for tier, number in numbers.items():
            assert chat_format.encode(conversation, number) == rendered[tier]


async def test_an_unknown_effort_is_refused_with_those_that_are_known() -> None:
    async with chatting(says("a</think>b")) as (client, _):
        for effort in ("ludicrous", 0, 101):
            with pytest.raises(openai.BadRequestError) as raised:
                await ask(client, extra_body={"reasoning_effort": effort})
            assert f"unknown effort {effort!r}" in raised.value.message
            assert all(known in raised.value.message for known in ("1 to 100", *EFFORT_TIERS))


async def test_both_spellings_of_reasoning_go_back_into_an_unfinished_turn() -> None:
    async with chatting(says(" on</think>.")) as (client, engine):
        for spelling in ("reasoning_content", "reasoning"):
            begun = {"role": "assistant", "content": "", spelling: "I was going", "prefix": True}
            answer = await ask(client, messages=[*HELLO, begun], extra_body=THINK)
            assert answer.choices[0].message.reasoning_content == " on"
    for request in engine.requests:
        assert text_of(request.prompt_token_ids).endswith("<｜Assistant｜><think>I was going")
