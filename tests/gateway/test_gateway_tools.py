"""Tool calls through the OpenAI client: out of the model's markup, and back into the next prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_scripts import (
    CHAT,
    EOS,
    HELLO,
    THINK,
    TOOLS,
    ask,
    ask_streaming,
    call_markup,
    chatting,
    finish_reasons,
    ids,
    joined,
    says,
    text_of,
)

from deskfleet.testing.scripted import Script, every_chunking

QUESTION = [{"role": "user", "content": "Is it warm?"}]
WEATHER = call_markup(("weather", {"city": ('Köln "Süd"', True)}))
TWO_CALLS = call_markup(
    ("weather", {"city": ("Oslo", True)}),
    ("add", {"a": ("1", False), "b": ('{"deep": [1, 2, {"x": null}]}', False)}),
)
EXPECTED = {
    WEATHER: [("weather", {"city": 'Köln "Süd"'})],
    TWO_CALLS: [("weather", {"city": "Oslo"}), ("add", {"a": 1, "b": {"deep": [1, 2, {"x": None}]}})],
}


def streamed_calls(chunks: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    """Put the deltas together as a client does: by index, the name once, the arguments in pieces."""
    calls: dict[int, tuple[str, str]] = {}
    ids: dict[int, str] = {}
    for chunk in chunks:
        for delta in chunk.choices[0].delta.tool_calls or []:
            name, arguments = calls.get(delta.index, ("", ""))
            calls[delta.index] = (
                name or delta.function.name or "",
                arguments + (delta.function.arguments or ""),
            )
            if delta.id:
                assert delta.index not in ids, "an id comes once"
                ids[delta.index] = delta.id
    assert sorted(ids) == sorted(calls)
    assert len(set(ids.values())) == len(ids)
    return [(name, json.loads(arguments)) for _, (name, arguments) in sorted(calls.items())]


@pytest.mark.parametrize("markup", [WEATHER, TWO_CALLS], ids=["one", "two"])
async def test_calls(markup: str) -> None:
    async with chatting(says(f"Let me see.{markup}")) as (client, _):
        answer = await ask(client, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == EXPECTED[markup]
    assert len({call.id for call in choice.message.tool_calls}) == len(calls)


@pytest.mark.parametrize("markup", [WEATHER, TWO_CALLS], ids=["one", "two"])
async def test_streamed_deltas_reassemble_for_every_chunking(markup: str) -> None:
    answer = says(f"Let me see.{markup}")
    chunkings = every_chunking(len(answer.token_ids))
    queue = iter(chunkings)
    async with chatting(lambda request: Script(answer.token_ids, chunk_sizes=next(queue))) as (client, _):
        for sizes in chunkings:
            chunks = await ask_streaming(client, tools=TOOLS)
            assert streamed_calls(chunks) == EXPECTED[markup], sizes
            assert joined(chunks, "content") == "Let me see.", sizes
            assert finish_reasons(chunks) == ["tool_calls"], sizes


@pytest.mark.parametrize("fields", [{"extra_body": CHAT}, {"extra_body": THINK}], ids=["chat", "thinking"])
@pytest.mark.parametrize("markup", [WEATHER, TWO_CALLS], ids=["one", "two"])
async def test_round_trip(markup: str, fields: dict[str, Any]) -> None:
    """Question, call, tool result, answer: the second prompt holds the call as the model wrote it."""
    thinking = fields["extra_body"] is THINK
    first = f"I must look.</think>{markup}" if thinking else markup
    queue = iter([says(first), says("Yes.</think>It is warm." if thinking else "It is warm.")])
    async with chatting(lambda request: next(queue)) as (client, engine):
        call = (await ask(client, messages=QUESTION, tools=TOOLS, **fields)).choices[0].message
        results = [
            {"role": "tool", "tool_call_id": each.id, "content": f"result of {each.function.name}"}
            for each in reversed(call.tool_calls)
        ]
        history = [*QUESTION, call.model_dump(exclude_none=True), *results]
        answer = await ask(client, messages=history, tools=TOOLS, **fields)
    assert answer.choices[0].message.content == "It is warm."
    prompt = text_of(engine.requests[1].prompt_token_ids)
    assert markup in prompt
    results_in_call_order = "\n\n".join(
        f"<tool_result>result of {name}</tool_result>" for name, _ in EXPECTED[markup]
    )
    assert results_in_call_order in prompt
    assert ("I must look.</think>" in prompt) == thinking, "reasoning before a call goes back to the model"


async def test_tools_are_shown_to_the_model_unless_choice_is_none() -> None:
    async with chatting(says("no")) as (client, engine):
        await ask(client, tools=TOOLS)
        await ask(client, tools=TOOLS, tool_choice="none")
    shown, hidden = (text_of(request.prompt_token_ids) for request in engine.requests)
    assert '{"name": "weather", "description": "Say how warm it is."' in shown
    assert "weather" not in hidden


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_a_required_call_is_begun_for_the_model(choice: Any) -> None:
    begun = "<｜DSML｜ calls>\n"
    rest = call_markup(("add", {"a": ("2", False)})).partition(begun)[2]
    async with chatting(says(rest)) as (client, engine):
        answer = await ask(client, tools=TOOLS, tool_choice=choice)
        chunks = await ask_streaming(client, tools=TOOLS, tool_choice=choice)
    assert text_of(engine.requests[0].prompt_token_ids).endswith(begun)
    call = answer.choices[0].message.tool_calls[0].function
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2})
    assert streamed_calls(chunks) == [("add", {"a": 2})]


async def test_a_call_cut_by_the_length_limit_says_so() -> None:
    async with chatting(says(WEATHER)) as (client, _):
        answer = await ask(client, tools=TOOLS, max_tokens=60)
    assert answer.choices[0].finish_reason == "length"
    assert "DSML" not in (answer.choices[0].message.content or "")


async def test_broken_markup_never_reaches_the_content() -> None:
    async with chatting(says("Hm.\n\n<｜DSML｜ calls>\n<｜DSML｜ nonsense")) as (client, _):
        answer = await ask(client, tools=TOOLS)
        chunks = await ask_streaming(client, tools=TOOLS)
    assert answer.choices[0].message.content == "Hm."
    assert joined(chunks, "content") == "Hm."


async def test_control_tokens_inside_a_call_do_not_break_it() -> None:
    begin, marker, end = WEATHER.partition("</｜DSML｜ parameter>")
    async with chatting(says(f"{begin}<｜User｜>{marker}{end}")) as (client, _):
        answer = await ask(client, tools=TOOLS, messages=HELLO)
    call = answer.choices[0].message.tool_calls[0].function
    assert json.loads(call.arguments) == {"city": 'Köln "Süd"'}


@pytest.mark.parametrize("sizes", [(1,), (2,), (5,), (100,)])
async def test_log_probabilities_stay_with_the_text_beside_calls(sizes: tuple[int, ...]) -> None:
    """Text that may be the beginning of a tag is held back, and comes with its log probabilities all the same."""
    text = "if a < b </x> € <"
    async with chatting(says(f"{text} is it.{WEATHER}", chunk_sizes=sizes)) as (client, _):
        answer = await ask(client, tools=TOOLS, logprobs=True)
        chunks = await ask_streaming(client, tools=TOOLS, logprobs=True)
    entries = answer.choices[0].logprobs.content
    told = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert told.startswith(f"{text} is it.")
    assert "DSML" not in told
    streamed = [
        e for c in chunks for e in (c.choices[0].logprobs.content if c.choices[0].logprobs else None) or []
    ]
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in entries]
    assert answer.choices[0].message.content == f"{text} is it."
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.completion_tokens == len(ids(f"{text} is it.{WEATHER}{EOS}"))


async def test_one_call_at_a_time() -> None:
    async with chatting(says(TWO_CALLS)) as (client, engine):
        answer = await ask(client, tools=TOOLS, parallel_tool_calls=False)
        chunks = await ask_streaming(client, tools=TOOLS, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert streamed_calls(chunks) == EXPECTED[TWO_CALLS][:1]
    assert finish_reasons(chunks) == [answer.choices[0].finish_reason] == ["tool_calls"]
    assert engine.num_cancelled == 2, "the second call is not waited for"


async def test_an_answer_that_the_model_ends_within_a_call_says_so() -> None:
    async with chatting(says(WEATHER.removesuffix("</｜DSML｜ invoke>\n</｜DSML｜ calls>"))) as (client, _):
        answer = await ask(client, tools=TOOLS)
        chunks = await ask_streaming(client, tools=TOOLS)
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("length", "unfinished_call")
    assert chunks[-1].choices[0].stop_reason == "unfinished_call"
    assert finish_reasons(chunks) == ["length"]
