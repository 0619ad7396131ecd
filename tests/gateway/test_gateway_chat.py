"""Plain answers through the real server and the unmodified OpenAI client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from chat_scripts import (
    CHAT,
    EOS,
    EOS_ID,
    HELLO,
    MODEL,
    ask,
    ask_streaming,
    chatting,
    finish_reasons,
    ids,
    joined,
    says,
    settings,
    text_of,
)
from openai import OpenAI

from deskfleet.endpoint import GenerateRequest
from deskfleet.testing.scripted import (
    Script,
    ScriptedEngine,
    every_chunking,
    invented_logprob,
    running_gateway,
)

ANSWER = "héllo wörld, 3 € — fine 🙂"


async def test_plain_answer() -> None:
    async with chatting(says(ANSWER)) as (client, engine):
        answer = await ask(client)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        ANSWER,
        "stop",
    )
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.id == engine.requests[0].request_id
    assert answer._request_id == answer.id
    assert text_of(engine.requests[0].prompt_token_ids) == (
        "<｜begin▁of▁sentence｜><｜User｜>hello<｜Assistant｜></think>"
    )


async def test_streams_say_the_same_for_every_chunking() -> None:
    answer = says(ANSWER)
    chunkings = every_chunking(len(answer.token_ids))
    queue = iter(chunkings)
    async with chatting(lambda request: Script(answer.token_ids, chunk_sizes=next(queue))) as (client, _):
        for sizes in chunkings:
            chunks = await ask_streaming(client)
            assert joined(chunks, "content") == ANSWER, sizes
            assert finish_reasons(chunks) == ["stop"], sizes
            assert [chunk.object for chunk in chunks] == ["chat.completion.chunk"] * len(chunks)
            assert len({chunk.id for chunk in chunks}) == 1
            assert chunks[0].choices[0].delta.role == "assistant"


async def test_one_token_per_chunk_is_sent_as_one_event_per_readable_piece() -> None:
    async with chatting(says("abc abc abc")) as (client, _):
        chunks = await ask_streaming(client)
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert len(pieces) == len(ids("abc abc abc"))


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_the_prompt_and_the_end_of_sentence(stream: bool) -> None:
    script = says(ANSWER)
    async with chatting(script) as (client, engine):
        if stream:
            chunks = await ask_streaming(client, stream_options={"include_usage": True})
            usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
            assert len(usages) == 1
            usage = usages[0]
            assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
            assert chunks[-1].usage == usage
            assert chunks[-2].choices[0].finish_reason == "stop"
        else:
            usage = (await ask(client)).usage
    assert usage.prompt_tokens == len(engine.requests[0].prompt_token_ids)
    assert usage.completion_tokens == len(script.token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_sync_client() -> None:
    async def serve_and_ask() -> tuple[str, str]:
        async with running_gateway(ScriptedEngine(says(ANSWER)), settings()) as base_url:
            return await asyncio.to_thread(ask_in_a_thread, base_url)

    def ask_in_a_thread(base_url: str) -> tuple[str, str]:
        with OpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
            plain = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=CHAT)
            stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, extra_body=CHAT)
            return plain.choices[0].message.content or "", joined(list(stream), "content")

    assert asyncio.run(serve_and_ask()) == (ANSWER, ANSWER)


@pytest.mark.parametrize("sizes", [(1,), (2,), (100,)])
@pytest.mark.parametrize(
    "control", ["<｜begin▁of▁sentence｜>", EOS, "<｜User｜>", "<｜Assistant｜>", "<think>"]
)
async def test_control_tokens_are_counted_and_never_shown(control: str, sizes: tuple[int, ...]) -> None:
    script = Script(ids(f"one{control} two{EOS}"), chunk_sizes=sizes)
    async with chatting(script) as (client, _):
        plain = await ask(client, extra_body={**CHAT, "ignore_eos": True})
        chunks = await ask_streaming(client, extra_body={**CHAT, "ignore_eos": True})
    assert plain.choices[0].message.content == "one two"
    assert joined(chunks, "content") == "one two"
    assert plain.usage.completion_tokens == len(script.token_ids)


async def test_length_is_reported() -> None:
    async with chatting(says("a long answer")) as (client, engine):
        plain = await ask(client, max_tokens=2)
        chunks = await ask_streaming(client, max_completion_tokens=2)
    assert plain.choices[0].finish_reason == "length"
    assert plain.usage.completion_tokens == 2
    assert finish_reasons(chunks) == ["length"]
    assert [request.sampling.max_tokens for request in engine.requests] == [2, 2]


@pytest.mark.parametrize("sizes", [(1,), (3,), (100,)])
@pytest.mark.parametrize("stop", ["STOP", ["never", "STOP"]])
async def test_a_stop_string_ends_the_answer_and_the_engine_s_request(
    stop: str | list[str], sizes: tuple[int, ...]
) -> None:
    script = says("before STOP after and a great deal more", chunk_sizes=sizes)
    async with chatting(script) as (client, engine):
        plain = await ask(client, stop=stop)
        chunks = await ask_streaming(client, stop=stop)
    assert plain.choices[0].message.content == joined(chunks, "content") == "before "
    assert plain.choices[0].finish_reason == "stop"
    assert finish_reasons(chunks) == ["stop"]
    assert engine.requests[0].sampling.stop == (), "the engine is not asked to match text"
    if sizes != (100,):
        assert engine.num_cancelled == 2


async def test_a_stop_token_of_the_client_is_not_shown() -> None:
    script = Script(ids("abc!"))
    async with chatting(script) as (client, engine):
        answer = await ask(client, extra_body={**CHAT, "stop_token_ids": [script.token_ids[-1]]})
    assert answer.choices[0].message.content == text_of(script.token_ids[:-1])
    assert answer.usage.completion_tokens == len(script.token_ids)
    assert engine.requests[0].sampling.stop_token_ids == (script.token_ids[-1],)


async def test_text_that_spells_control_tokens_reaches_the_engine_as_text() -> None:
    spelled = f"a<｜Assistant｜>{EOS}<think>｜DSML｜<｜deepseek_image｜>"
    async with chatting(says("ok")) as (client, engine):
        await ask(client, messages=[{"role": "user", "content": spelled}])
    prompt = engine.requests[0].prompt_token_ids
    assert spelled in text_of(prompt)
    assert [token_id for token_id in prompt if token_id in {EOS_ID, *range(500, 512)}] == list(
        ids("<｜User｜><｜Assistant｜></think>")
    )


async def test_developer_messages_become_system_messages() -> None:
    async with chatting(says("ok")) as (client, engine):
        await ask(client, messages=[{"role": "developer", "content": "Be brief."}, *HELLO])
    assert "<｜System｜>Be brief.<｜User｜>hello" in text_of(engine.requests[0].prompt_token_ids)


async def test_sampling_fields_reach_the_engine_as_given() -> None:
    extra = {"top_k": 7, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [5, 6]}
    async with chatting(says("ok")) as (client, engine):
        for thinking in ({"type": "disabled"}, {"type": "enabled"}):
            await ask(
                client,
                temperature=0.3,
                top_p=0.4,
                seed=11,
                max_tokens=9,
                extra_body={"thinking": thinking, **extra},
            )
        await ask(client)
        await ask(client, extra_body={"top_k": -1, **CHAT})
    chat, thinking_on, silent, top_k_off = (request.sampling for request in engine.requests)
    assert chat == thinking_on, "the library would force temperature 1 and lift top_p in thinking mode"
    assert (chat.temperature, chat.top_p, chat.top_k, chat.min_p, chat.seed) == (0.3, 0.4, 7, 0.1, 11)
    assert (chat.max_tokens, chat.ignore_eos, chat.stop_token_ids) == (9, True, (5, 6))
    assert (silent.temperature, silent.top_p, silent.top_k, silent.min_p, silent.seed) == (
        1.0,
        0.95,  # as the publisher suggests (policies/sampling_defaults.py)
        0,
        0.0,
        None,
    )
    assert (silent.ignore_eos, silent.stop_token_ids, silent.logprobs) == (False, (), None)
    assert top_k_off.top_k == 0


async def test_max_tokens_defaults_to_the_library_s_table_within_the_context() -> None:
    async with chatting(ScriptedEngine(says("ok"), max_model_len=100_000)) as (client, engine):
        await ask(client)
        await ask(client, extra_body={"thinking": {"type": "enabled"}})
        await ask(client, extra_body={"reasoning_effort": "max"})
    chat, thinking, hardest = engine.requests
    assert (chat.sampling.max_tokens, thinking.sampling.max_tokens) == (8192, 65536)
    assert hardest.sampling.max_tokens == 100_000 - len(hardest.prompt_token_ids)


async def test_the_operator_may_set_the_default_max_tokens() -> None:
    async with chatting(says("ok"), default_max_tokens=33) as (client, engine):
        await ask(client)
        await ask(client, max_tokens=44)
    assert [request.sampling.max_tokens for request in engine.requests] == [33, 44]


@pytest.mark.parametrize("num_top", [None, 0, 3])
@pytest.mark.parametrize("sizes", [(1,), (2,), (50,)])
async def test_logprobs(num_top: int | None, sizes: tuple[int, ...]) -> None:
    text = "log €"
    fields: dict[str, Any] = {"logprobs": True} | ({} if num_top is None else {"top_logprobs": num_top})
    async with chatting(says(text, chunk_sizes=sizes)) as (client, engine):
        plain = (await ask(client, **fields)).choices[0].logprobs.content
        chunks = await ask_streaming(client, **fields)
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    expected = [invented_logprob(token_id, num_top or 0) for token_id in ids(text)]
    assert [entry.logprob for entry in plain] == [entry.logprob for entry in expected]
    assert b"".join(bytes(entry.bytes) for entry in plain).decode() == text
    assert [[top.logprob for top in entry.top_logprobs] for entry in plain] == [
        [logprob for _, logprob in entry.top] for entry in expected
    ]
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in plain]
    assert [request.sampling.logprobs for request in engine.requests] == [num_top or 0] * 2


async def test_no_logprobs_unless_asked() -> None:
    async with chatting(says("quiet")) as (client, engine):
        answer = await ask(client)
    assert answer.choices[0].logprobs is None
    assert engine.requests[0].sampling.logprobs is None


async def test_eight_concurrent_streams_are_not_mixed_up() -> None:
    def echo(request: GenerateRequest) -> Script:
        # The question comes back, at a pace that makes every stream overlap with the others.
        question = text_of(request.prompt_token_ids).split("<｜User｜>")[1].split("<｜Assistant｜>")[0]
        return says(question * 4, delay_s=0.001 * (1 + len(question) % 3))

    questions = [f"stream {number} " + "abcdefgh"[number] * (3 + number) for number in range(8)]
    async with chatting(echo) as (client, engine):
        answers = await asyncio.gather(
            *(ask_streaming(client, messages=[{"role": "user", "content": text}]) for text in questions)
        )
    assert [joined(chunks, "content") for chunks in answers] == [text * 4 for text in questions]
    assert len({chunks[0].id for chunks in answers}) == 8
    assert engine.num_cancelled == 0


@pytest.mark.parametrize(
    ("response_format", "shown"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type": "json_object"}'),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "title": "T"}}},
            '{"type": "object", "title": "T"}',
        ),
    ],
)
async def test_response_formats_are_shown_to_the_model(response_format: Any, shown: str | None) -> None:
    question = [{"role": "user", "content": "As json, please."}]
    async with chatting(says('{"a": 1}')) as (client, engine):
        answer = await ask(client, messages=question, response_format=response_format)
    prompt = text_of(engine.requests[0].prompt_token_ids)
    assert answer.choices[0].message.content == '{"a": 1}'
    assert ("## Response Format:" in prompt) == (shown is not None)
    assert shown is None or shown in prompt
