"""OpenAI Responses through the unmodified `openai` client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from chat_scripts import EOS, IMAGE_ID, MODEL, call_markup, ids, says, text_of
from protocol_clients import png, served

from deskfleet.errors import RankDied
from deskfleet.testing.scripted import Script, ScriptedEngine, every_chunking, invented_logprob

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Say how warm it is.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ADD = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
OSLO = call_markup(("weather", {"city": ("Oslo", True)}))
REASONED = f"Where is it?</think>Let me look.{OSLO}"
OFF = {"effort": "none"}


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hello", **fields}


async def test_an_answer_with_a_thought_and_a_call() -> None:
    async with served(says(REASONED)) as to:
        answer = await to.openai.responses.create(**ask(tools=[WEATHER]))
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    thought, message, call = answer.output
    assert thought.content[0].text == "Where is it?"
    assert (answer.output_text, message.content[0].text) == ("Let me look.", "Let me look.")
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Oslo"}, "completed")
    assert (answer.status, answer.model, answer.object) == ("completed", MODEL, "response")
    assert answer.id == to.engine.requests[0].request_id
    assert answer.id.startswith("resp_")
    assert answer.usage.input_tokens == len(to.engine.requests[0].prompt_token_ids)
    assert answer.usage.output_tokens == len(ids(REASONED + EOS))
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


async def test_streams_say_the_same_for_every_chunking() -> None:
    answer = says(REASONED)
    chunkings = every_chunking(len(answer.token_ids))[::7]
    queue = iter(chunkings)
    async with served(lambda request: Script(answer.token_ids, chunk_sizes=next(queue))) as to:
        for sizes in chunkings:
            async with to.openai.responses.stream(**ask(tools=[WEATHER])) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_response()
            assert [event.sequence_number for event in events] == list(range(len(events))), sizes
            assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
            assert events[-1].type == "response.completed"
            deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert deltas == final.output_text == "Let me look."
            thought = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
            assert thought == final.output[0].content[0].text == "Where is it?"
            assert json.loads(final.output[2].arguments) == {"city": "Oslo"}
            assert final.status == "completed"


async def test_the_response_says_the_settings_again() -> None:
    fields = ask(
        instructions="Be brief.",
        metadata={"a": "b"},
        user="someone",
        temperature=0.3,
        top_p=0.4,
        max_output_tokens=77,
        reasoning={"effort": "minimal", "summary": "auto"},
        tools=[WEATHER],
        tool_choice="auto",
        parallel_tool_calls=False,
        prompt_cache_key="key",
        safety_identifier="id",
        store=False,
        text={"format": {"type": "text"}},
    )
    async with served(says("a</think>b")) as to:
        whole = await to.openai.responses.create(**fields)
        stream = await to.openai.responses.create(**fields, stream=True)
        events = [event async for event in stream]
    for answer in (whole, events[0].response, events[1].response, events[-1].response):
        assert answer.instructions == "Be brief."
        assert answer.metadata == {"a": "b"}
        assert answer.user == "someone"
        assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.3, 0.4, 77)
        assert answer.reasoning.effort == "minimal"
        assert answer.tools[0].name == "weather"
        assert (answer.tool_choice, answer.parallel_tool_calls) == ("auto", False)
        assert (answer.prompt_cache_key, answer.safety_identifier) == ("key", "id")
        assert (answer.store, answer.previous_response_id) == (False, None)
    sampling = to.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.3, 0.4, 77)


async def test_the_output_is_the_next_input() -> None:
    markup = call_markup(
        ("weather", {"city": ("Oslo", True)}), ("add", {"a": ("1", False), "b": ("2", False)})
    )
    queue = iter([says("Both.</think>" + markup), says("Fine.</think>Done.")])
    async with served(lambda request: next(queue)) as to:
        first = await to.openai.responses.create(**ask(tools=[WEATHER, ADD]))
        calls = [item for item in first.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"result of {call.name}"}
            for call in reversed(calls)
        ]
        history = [
            {"role": "user", "content": "hello"},
            *[item.model_dump(exclude_none=True) for item in first.output],
            *results,
        ]
        answer = await to.openai.responses.create(**ask(input=history, tools=[WEATHER, ADD]))
    assert answer.output_text == "Done."
    prompt = text_of(to.engine.requests[1].prompt_token_ids)
    assert f"<think>Both.</think>{markup}" in prompt
    assert (
        "<tool_result>result of weather</tool_result>\n\n<tool_result>result of add</tool_result>" in prompt
    )


CALLED = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "warm"}
USER = {"role": "user", "content": [{"type": "input_text", "text": "hello"}]}


@pytest.mark.parametrize(
    ("items", "thought"),
    [
        ([], ""),
        ([{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "sealed"}], ""),
        ([{"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "S"}]}], ""),
        (
            [
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "T"}],
                }
            ],
            "T",
        ),
    ],
    ids=["dropped", "sealed", "summary", "ours"],
)
async def test_thoughts_in_the_history(items: list[Any], thought: str) -> None:
    async with served(says("a</think>b")) as to:
        await to.openai.responses.create(**ask(input=[USER, *items, CALLED, RESULT], tools=[WEATHER]))
    assert f"<think>{thought}</think>" in text_of(to.engine.requests[0].prompt_token_ids)


async def test_items_of_other_servers_are_accepted() -> None:
    history = [
        {"role": "developer", "content": "Rules."},
        USER,
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "One.", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "Not that."},
            ],
        },
        {"role": "user", "content": "And?"},
    ]
    async with served(says("a</think>b")) as to:
        await to.openai.responses.create(**ask(input=history, tools=[{"type": "web_search"}]))
    prompt = text_of(to.engine.requests[0].prompt_token_ids)
    assert "Rules.<｜User｜>hello<｜Assistant｜></think>One.\n\nNot that." in prompt
    assert "web_search" not in prompt


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "add"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
    ],
)
async def test_a_call_that_must_come_is_begun_or_held_to_its_grammar(choice: Any) -> None:
    begun = "<｜DSML｜ calls>\n"
    rest = call_markup(("add", {"a": ("2", False)})).partition(begun)[2]
    queue = iter([says(rest), says(f"Why not.</think>\n\n{begun}{rest}")])
    async with served(lambda request: next(queue)) as to:
        plain = await to.openai.responses.create(
            **ask(tools=[WEATHER, ADD], tool_choice=choice, reasoning=OFF)
        )
        thinking = await to.openai.responses.create(**ask(tools=[WEATHER, ADD], tool_choice=choice))
    for answer in (plain, thinking):
        call = answer.output[-1]
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2})
        assert answer.model_dump(exclude_none=True)["tool_choice"] == choice
    off, on = to.engine.requests
    assert text_of(off.prompt_token_ids).endswith(begun)
    assert text_of(on.prompt_token_ids).endswith("<think>")
    assert off.sampling.constraint.kind == on.sampling.constraint.kind == "grammar"
    assert ("weather" in text_of(on.prompt_token_ids)) == (choice == "required")


async def test_allowed_tools_leave_the_choice_to_the_model() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    async with served(says("a</think>b")) as to:
        await to.openai.responses.create(**ask(tools=[WEATHER, ADD], tool_choice=choice))
    prompt = text_of(to.engine.requests[0].prompt_token_ids)
    assert '"name": "add"' in prompt
    assert "weather" not in prompt


async def test_one_call_at_a_time() -> None:
    markup = call_markup(("weather", {"city": ("Oslo", True)}), ("weather", {"city": ("Rome", True)}))
    async with served(says(markup)) as to:
        answer = await to.openai.responses.create(
            **ask(tools=[WEATHER], parallel_tool_calls=False, reasoning=OFF)
        )
    assert [json.loads(item.arguments) for item in answer.output] == [{"city": "Oslo"}]
    assert to.engine.num_cancelled == 1


async def test_the_patch_tool_speaks_text() -> None:
    markup = call_markup(("apply_patch", {"input": ("*** Begin Patch\n+a < b\n", True)}))
    tool = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
    queue = iter([says("a</think>" + markup), says("b</think>c")])
    async with served(lambda request: next(queue)) as to:
        first = await to.openai.responses.create(**ask(tools=[tool]))
        call = first.output[-1]
        assert (call.type, call.input) == ("custom_tool_call", "*** Begin Patch\n+a < b\n")
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
        items = [item.model_dump(exclude_none=True) for item in first.output]
        await to.openai.responses.create(**ask(input=[USER, *items, result], tools=[tool]))
    assert markup in text_of(to.engine.requests[1].prompt_token_ids)


async def test_images_reach_the_engine_unchanged() -> None:
    url = f"data:image/png;base64,{png()}"
    parts = [
        {"type": "input_text", "text": "Look."},
        {"type": "input_image", "image_url": url, "detail": "auto"},
    ]
    output = {"type": "function_call_output", "call_id": "c1", "output": parts}
    async with served(says("a</think>red")) as to:
        await to.openai.responses.create(
            **ask(input=[{"role": "user", "content": parts}, CALLED, output], tools=[WEATHER])
        )
        status, body, _ = await to.post(
            "/v1/responses",
            ask(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]),
        )
    (request,) = to.engine.requests
    assert len(request.images) == request.prompt_token_ids.count(IMAGE_ID) == 2
    assert (status, body["error"]["param"]) == (400, "input[0].content[0].image_url")


async def test_an_answer_of_a_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    async with served(says('{"a": 1}')) as to:
        answer = await to.openai.responses.create(**ask(text=text, reasoning=OFF))
    assert json.loads(answer.output_text) == {"a": 1}
    assert answer.text.format.name == "answer"
    request = to.engine.requests[0]
    assert "## Response Format:" in text_of(request.prompt_token_ids)
    assert request.sampling.constraint.kind == "json_schema"


async def test_log_probabilities() -> None:
    async with served(says("log")) as to:
        answer = await to.openai.responses.create(
            **ask(include=["message.output_text.logprobs"], top_logprobs=2, reasoning=OFF)
        )
    entries = answer.output[0].content[0].logprobs
    expected = [invented_logprob(token_id, 2) for token_id in ids("log")]
    assert [entry.logprob for entry in entries] == [entry.logprob for entry in expected]
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(expected)


async def test_length_is_told_as_incomplete() -> None:
    async with served(says("Look." + OSLO)) as to:
        cut = await to.openai.responses.create(
            **ask(tools=[WEATHER], max_output_tokens=len(ids("Look." + OSLO)) - 40, reasoning=OFF)
        )
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output_text == "Look."
    assert [item.status for item in cut.output if item.type == "function_call"] in ([], ["incomplete"])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"store": True}, "store"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"max_tokens": 3}, "max_tokens"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
        "input[0].content[0].type",
    ),
    ({"input": [USER, CALLED]}, "input"),
    ({"input": [USER, RESULT]}, "input"),
    ({"include": ["everything"]}, "include[0]"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "other"}]}, "tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "gone"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "ebnf"}}}, "text.format.type"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ({"reasoning": {"effort": "hardest"}}, "reasoning.effort"),
    ({"reasoning": {"efort": "low"}}, "reasoning.efort"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_token": 5}, "max_output_token"),
    ({"instruction": "x"}, "instruction"),
    ({"n": 2}, "n"),
]


async def test_errors_name_the_field() -> None:
    async with served(says("never")) as to:
        for fields, param in BAD:
            status, body, _ = await to.post("/v1/responses", ask(**fields))
            assert (status, body["error"]["param"]) == (400, param), (fields, body)
            assert param in body["error"]["message"], fields
        with pytest.raises(openai.NotFoundError) as raised:
            await to.openai.responses.create(**ask(model="gpt-5"))
        assert raised.value.code == "model_not_found"
    assert to.engine.requests == []


async def test_too_long_is_said_with_the_field() -> None:
    async with served(ScriptedEngine(says("never"), max_model_len=300)) as to:
        with pytest.raises(openai.BadRequestError) as raised:
            await to.openai.responses.create(**ask(input="and on " * 400))
        assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "input")
        with pytest.raises(openai.BadRequestError) as raised:
            await to.openai.responses.create(**ask(max_output_tokens=290))
        assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "max_output_tokens")


async def test_a_stream_that_fails_ends_with_a_failed_response() -> None:
    script = Script(ids("and so it went on"), failure=RankDied(1, "was killed by signal 9"), fail_after=3)
    async with served(script) as to:
        stream = await to.openai.responses.create(**ask(reasoning=OFF, metadata={"a": "b"}), stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    failed = events[-1].response
    assert (failed.status, failed.metadata) == ("failed", {"a": "b"})
    assert failed.error.message == "rank 1 was killed by signal 9; the group was stopped"
