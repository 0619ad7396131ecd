"""Anthropic Messages through the unmodified `anthropic` client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from chat_scripts import CHAT, EOS, HELLO, IMAGE_ID, MODEL, call_markup, ids, says, text_of
from protocol_clients import png, served

from deskfleet.errors import RankDied
from deskfleet.testing.scripted import Script, ScriptedEngine, every_chunking

WEATHER = {
    "name": "weather",
    "description": "Say how warm it is.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ADD = {
    "name": "add",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
OSLO = call_markup(("weather", {"city": ("Oslo", True)}))
REASONED = f"Where is it?</think>Let me look.{OSLO}"
OFF = {"type": "disabled"}


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 500, "messages": HELLO, **fields}


async def test_an_answer_with_a_thought_and_a_call() -> None:
    async with served(says(REASONED)) as to:
        answer = await to.anthropic.messages.create(**ask(tools=[WEATHER]))
    kinds = [block.type for block in answer.content]
    assert kinds == ["thinking", "text", "tool_use"]
    thought, text, call = answer.content
    assert (thought.thinking, text.text) == ("Where is it?", "Let me look.")
    assert thought.signature, "clients refuse a thought without one"
    assert (call.name, call.input) == ("weather", {"city": "Oslo"})
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", MODEL, "tool_use")
    assert answer.id == to.engine.requests[0].request_id
    assert answer._request_id == answer.id
    assert answer.usage.input_tokens == len(to.engine.requests[0].prompt_token_ids)
    assert answer.usage.output_tokens == len(ids(REASONED + EOS))


async def test_streams_say_the_same_for_every_chunking() -> None:
    answer = says(REASONED)
    chunkings = every_chunking(len(answer.token_ids))[::7]
    queue = iter(chunkings)
    async with served(lambda request: Script(answer.token_ids, chunk_sizes=next(queue))) as to:
        for sizes in chunkings:
            async with to.anthropic.messages.stream(**ask(tools=[WEATHER])) as stream:
                events = [event.type async for event in stream]
                final = await stream.get_final_message()
            assert [block.type for block in final.content] == ["thinking", "text", "tool_use"], sizes
            assert final.content[0].thinking == "Where is it?"
            assert final.content[1].text == "Let me look."
            assert final.content[2].input == {"city": "Oslo"}
            assert final.stop_reason == "tool_use"
            assert (events[0], events[-1]) == ("message_start", "message_stop")


async def test_the_events_are_those_of_the_protocol_in_their_order() -> None:
    async with (
        served(says(REASONED)) as to,
        to.http.post(f"{to.url}/v1/messages", json=ask(tools=[WEATHER], stream=True)) as response,
    ):
        blocks = (await response.text()).strip().split("\n\n")
    named = [block.partition("\n")[0].removeprefix("event: ") for block in blocks]
    data = [json.loads(block.partition("data: ")[2]) for block in blocks]
    assert [each["type"] for each in data] == named
    assert named[0] == "message_start"
    assert named[-2:] == ["message_delta", "message_stop"]
    assert named.count("content_block_start") == named.count("content_block_stop") == 3
    assert "ping" in named
    open_blocks: list[int] = []
    for event in data:
        if event["type"] == "content_block_start":
            assert not open_blocks
            open_blocks.append(event["index"])
        elif event["type"] == "content_block_delta":
            assert open_blocks == [event["index"]]
        elif event["type"] == "content_block_stop":
            open_blocks.remove(event["index"])
    deltas = [event["delta"]["type"] for event in data if event["type"] == "content_block_delta"]
    assert set(deltas) == {"thinking_delta", "signature_delta", "text_delta", "input_json_delta"}


async def test_a_tool_result_goes_back_in_the_order_of_the_calls() -> None:
    markup = call_markup(
        ("weather", {"city": ("Oslo", True)}), ("add", {"a": ("1", False), "b": ("2", False)})
    )
    queue = iter([says("Both.</think>" + markup), says("Fine.</think>Done.")])
    async with served(lambda request: next(queue)) as to:
        first = await to.anthropic.messages.create(**ask(tools=[WEATHER, ADD]))
        calls = [block for block in first.content if block.type == "tool_use"]
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": call.id, "content": f"result of {call.name}"}
            for call in reversed(calls)
        ]
        history = [
            *HELLO,
            {"role": "assistant", "content": first.model_dump(exclude_none=True)["content"]},
            {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
        ]
        answer = await to.anthropic.messages.create(**ask(messages=history, tools=[WEATHER, ADD]))
    assert answer.content[-1].text == "Done."
    prompt = text_of(to.engine.requests[1].prompt_token_ids)
    assert f"<think>Both.</think>{markup}" in prompt
    results_in_order = (
        "<tool_result>result of weather</tool_result>\n\n<tool_result>result of add</tool_result>\n\nGo on."
    )
    assert results_in_order in prompt


CALLED = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "warm"}]}


@pytest.mark.parametrize(
    ("content", "thought"),
    [
        ([CALLED], ""),
        ([{"type": "thinking", "thinking": "T", "signature": "of/another+server=="}, CALLED], "T"),
        ([{"type": "thinking", "thinking": "T", "signature": ""}, CALLED], "T"),
        ([{"type": "redacted_thinking", "data": "sealed"}, CALLED], ""),
        (
            [
                {"type": "text", "text": "Hm.", "citations": None, "cache_control": {"type": "ephemeral"}},
                CALLED,
            ],
            "",
        ),
    ],
    ids=["dropped", "foreign signature", "no signature", "redacted", "cached"],
)
async def test_history_of_other_servers_is_accepted(content: list[Any], thought: str) -> None:
    history = [*HELLO, {"role": "assistant", "content": content}, RESULT]
    async with served(says("a</think>b")) as to:
        await to.anthropic.messages.create(**ask(messages=history, tools=[WEATHER]))
    assert f"<think>{thought}</think>" in text_of(to.engine.requests[0].prompt_token_ids)


async def test_a_last_message_of_the_assistant_is_the_beginning_of_the_answer() -> None:
    history = [*HELLO, {"role": "assistant", "content": "The answer is ("}]
    async with served(says("42)")) as to:
        for thinking, prompt in ((OFF, "</think>"), ({"type": "adaptive"}, "<think></think>")):
            answer = await to.anthropic.messages.create(**ask(messages=history, thinking=thinking))
            assert [block.type for block in answer.content] == ["text"]
            assert answer.content[0].text == "42)"
            async with to.anthropic.messages.stream(**ask(messages=history, thinking=thinking)) as stream:
                assert (await stream.get_final_text()) == "42)"
            asked = text_of(to.engine.requests[-1].prompt_token_ids)
            assert asked.endswith(f"<｜Assistant｜>{prompt}The answer is (")


@pytest.mark.parametrize("kind", ["any", "tool"])
async def test_a_call_that_must_come_is_begun_or_held_to_its_grammar(kind: str) -> None:
    choice = {"type": kind} | ({"name": "add"} if kind == "tool" else {})
    begun = "<｜DSML｜ calls>\n"
    rest = call_markup(("add", {"a": ("2", False)})).partition(begun)[2]
    queue = iter([says(rest), says(f"Why not.</think>\n\n{begun}{rest}")])
    async with served(lambda request: next(queue)) as to:
        plain = await to.anthropic.messages.create(
            **ask(tools=[WEATHER, ADD], tool_choice=choice, thinking=OFF)
        )
        thinking = await to.anthropic.messages.create(**ask(tools=[WEATHER, ADD], tool_choice=choice))
    for answer in (plain, thinking):
        assert answer.stop_reason == "tool_use"
        assert (answer.content[-1].name, answer.content[-1].input) == ("add", {"a": 2})
    off, on = to.engine.requests
    assert text_of(off.prompt_token_ids).endswith(begun)
    assert text_of(on.prompt_token_ids).endswith("<think>")
    for request in (off, on):
        assert request.sampling.constraint is not None
        assert request.sampling.constraint.kind == "grammar"
        assert ("weather" in text_of(request.prompt_token_ids)) == (kind == "any")
    assert r'start: "\n\n" opening calls' in on.sampling.constraint.text


async def test_tool_choice_none_hides_the_tools() -> None:
    async with served(says("a</think>b" + OSLO)) as to:
        answer = await to.anthropic.messages.create(**ask(tools=[WEATHER], tool_choice={"type": "none"}))
    assert "weather" not in text_of(to.engine.requests[0].prompt_token_ids)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[-1].text == "b"
    assert answer.stop_detail == "unwanted_call"


async def test_one_call_at_a_time() -> None:
    markup = call_markup(("weather", {"city": ("Oslo", True)}), ("weather", {"city": ("Rome", True)}))
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    async with served(says(markup)) as to:
        answer = await to.anthropic.messages.create(**ask(tools=[WEATHER], tool_choice=choice, thinking=OFF))
        async with to.anthropic.messages.stream(
            **ask(tools=[WEATHER], tool_choice=choice, thinking=OFF)
        ) as stream:
            streamed = await stream.get_final_message()
    for each in (answer, streamed):
        assert [block.input for block in each.content] == [{"city": "Oslo"}]
        assert each.stop_reason == "tool_use"
    assert to.engine.num_cancelled == 2, "the second call is not waited for"


async def test_images_reach_the_engine_unchanged() -> None:
    data = png()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image", "source": source}]}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Look."}, {"type": "image", "source": source}]},
        {"role": "assistant", "content": [CALLED]},
        {"role": "user", "content": [result]},
    ]
    async with served(says("a</think>red")) as to:
        await to.anthropic.messages.create(**ask(messages=history, tools=[WEATHER]))
        counted = await to.anthropic.messages.count_tokens(model=MODEL, messages=history, tools=[WEATHER])
    (request,) = to.engine.requests
    assert len(request.images) == 2
    assert request.prompt_token_ids.count(IMAGE_ID) == 2
    assert counted.input_tokens > len(request.prompt_token_ids), "images count at their full span"


async def test_count_tokens_counts_what_would_be_asked() -> None:
    fields = {"system": [{"type": "text", "text": "Be brief."}], "tools": [WEATHER]}
    async with served(says("a</think>b")) as to:
        counted = await to.anthropic.messages.count_tokens(model=MODEL, messages=HELLO, **fields)
        answer = await to.anthropic.messages.create(**ask(**fields))
    assert counted.input_tokens == answer.usage.input_tokens
    assert len(to.engine.requests) == 1


async def test_stop_sequences_are_told() -> None:
    async with served(says("one STOP two")) as to:
        answer = await to.anthropic.messages.create(**ask(stop_sequences=["never", "STOP"], thinking=OFF))
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")
    assert answer.content[0].text == "one "


async def test_length_is_told_and_a_cut_call_is_no_call() -> None:
    cut = call_markup(("weather", {"city": ("Oslo", True)}), ("add", {"a": ("1", False), "b": ("2", False)}))
    num_tokens = len(ids("Look." + cut)) - 40
    async with served(says("Look." + cut)) as to:
        answer = await to.anthropic.messages.create(
            **ask(tools=[WEATHER, ADD], thinking=OFF, max_tokens=num_tokens)
        )
    assert answer.stop_reason == "max_tokens"
    assert [(block.name, block.input) for block in answer.content[1:]] == [("weather", {"city": "Oslo"})]


async def test_an_answer_of_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with served(says('{"a": 1}')) as to:
        answer = await to.anthropic.messages.create(
            **ask(thinking=OFF, output_config={"format": {"type": "json_schema", "schema": schema}})
        )
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
            await to.anthropic.messages.create(**ask(output_config={"format": {"type": "regex"}}))
    assert json.loads(answer.content[0].text) == {"a": 1}
    request = to.engine.requests[0]
    assert "## Response Format:" in text_of(request.prompt_token_ids)
    assert request.sampling.constraint.kind == "json_schema"
    assert json.loads(request.sampling.constraint.text)["additionalProperties"] is False


async def test_documents_of_text_are_told() -> None:
    document = {
        "type": "document",
        "title": "Notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "The sky is green."},
    }
    async with served(says("a</think>b")) as to:
        await to.anthropic.messages.create(**ask(messages=[{"role": "user", "content": [document]}]))
    assert "<｜User｜>Notes\n\nThe sky is green.<" in text_of(to.engine.requests[0].prompt_token_ids)


async def test_sampling_reaches_the_engine() -> None:
    async with served(says("a</think>b")) as to:
        await to.anthropic.messages.create(
            **ask(extra_body={"temperature": 0.3, "top_p": 0.4, "top_k": 7, "seed": 5, "min_p": 0.1})
        )
    sampling = to.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.3, 0.4, 7)
    assert (sampling.seed, sampling.min_p, sampling.max_tokens) == (5, 0.1, 500)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
        "messages[0].content[0].source.type",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "document",
                            "source": {"type": "base64", "media_type": "application/pdf", "data": ""},
                        }
                    ],
                }
            ]
        },
        "messages[0].content[0].source.type",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": "!"},
                        }
                    ],
                }
            ]
        },
        "messages[0].content[0].source",
    ),
    ({"messages": [*HELLO, {"role": "assistant", "content": [CALLED]}, *HELLO]}, "messages[2]"),
    ({"messages": [RESULT]}, "messages[0].content[0]"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "no spaces", "input_schema": {"type": "object"}}]}, "tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "gone"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"output_config": {"effort": "hardest"}}, "output_config.effort"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
    ({"stop": ["x"]}, "stop"),
    ({"n": 2}, "n"),
    ({"temprature": 0.1}, "temprature"),
    ({"max_token": 5}, "max_token"),
    ({"logprobs": True}, "logprobs"),
]


async def test_errors_have_the_vendor_s_shape_and_name_the_field() -> None:
    async with served(says("never")) as to:
        for fields, param in BAD:
            status, body, headers = await to.post("/v1/messages", ask(**fields))
            assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error"), (
                fields
            )
            assert param in body["error"]["message"], fields
            assert body["request_id"] == headers["request-id"]
        with pytest.raises(anthropic.NotFoundError) as raised:
            await to.anthropic.messages.create(**ask(model="claude"))
        assert raised.value.body["error"]["type"] == "not_found_error"
        async with to.http.post(f"{to.url}/v1/messages/nothing") as response:
            assert (response.status, (await response.json())["error"]["type"]) == (404, "not_found_error")
    assert to.engine.requests == []


async def test_too_long_is_said_in_the_words_that_clients_look_for() -> None:
    long = [{"role": "user", "content": "and on " * 400}]
    async with served(ScriptedEngine(says("never"), max_model_len=300)) as to:
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 300 maximum"):
            await to.anthropic.messages.create(**ask(messages=long))


async def test_a_stream_that_fails_raises_in_the_client() -> None:
    script = Script(ids("and so it went on"), failure=RankDied(1, "was killed by signal 9"), fail_after=3)
    async with served(script) as to:
        async with to.anthropic.messages.stream(**ask(thinking=OFF)) as stream:
            with pytest.raises(anthropic.APIStatusError, match="rank 1 was killed by signal 9"):
                await stream.get_final_message()
        with pytest.raises(anthropic.APIStatusError) as raised:
            await to.anthropic.messages.create(**ask())
    assert raised.value.status_code == 503
    assert raised.value.body["error"]["type"] == "overloaded_error"


async def test_models_as_the_vendor_s_clients_read_them() -> None:
    async with served(says("never")) as to:
        (model,) = (await to.anthropic.models.list()).data
        same = await to.anthropic.models.retrieve(MODEL)
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert same == model
    assert model.created_at.year > 2020


async def test_what_changes_nothing_is_ignored() -> None:
    extra = {
        "metadata": {"user_id": "someone"},
        "service_tier": "auto",
        "context_management": {"edits": []},
        "mcp_servers": [],
        "a_field_of_the_future": 1,
        **CHAT,
    }
    async with served(says("ok")) as to:
        status, body, _ = await to.post("/v1/messages?beta=true", ask(**extra))
    assert (status, body["content"][0]["text"]) == (200, "ok")
