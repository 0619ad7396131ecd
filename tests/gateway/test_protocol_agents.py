"""An agent at work for twenty turns of tools, with the unmodified clients: every prompt holds all that was said.

The model is scripted; what is tested is that nothing is lost or changed on the way out and back: thoughts, words,
calls, arguments of every kind, and results, whether answers stream or not, and also when the client drops thoughts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from chat_scripts import MODEL, call_markup, says, text_of
from protocol_clients import Served, served

from deskfleet.endpoint import GenerateRequest
from deskfleet.testing.scripted import Script, ScriptedEngine

NUM_TURNS = 20
QUESTION = "Fix the bug in ünïcode.py, please."
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "line": {"type": "integer"}, "edits": {"type": "array"}},
}
TEXTS = ["a < b && c", 'say "hi"\n\tor 😀', "</parameter>", "x\\n", "日本語", "{}", "<b>&amp;</b>"]


def arguments(turn: int) -> dict[str, Any]:
    return {
        "path": TEXTS[turn % len(TEXTS)],
        "line": turn,
        "edits": [{"old": TEXTS[turn % 3], "new": None}, turn / 2, True],
    }


def written(turn: int) -> str:
    """What the model writes in one turn: a thought, a word, one call or two."""
    told = arguments(turn)
    call = (
        "edit",
        {
            "path": (told["path"], True),
            "line": (json.dumps(told["line"]), False),
            "edits": (json.dumps(told["edits"], ensure_ascii=False), False),
        },
    )
    calls = [call, ("look", {"path": (f"file {turn}", True)})][: 1 + turn % 2]
    return f"Thought {turn}.</think>Step {turn}.{call_markup(*calls)}"


def result(turn: int, name: str) -> str:
    return f"{name} of {turn}: {TEXTS[turn % len(TEXTS)]}"


class Model:
    """Writes one turn after the other, then an answer. Keeps the prompts."""

    def __init__(self) -> None:
        self.turn = 0

    def __call__(self, request: GenerateRequest) -> Script:
        turn, self.turn = self.turn, self.turn + 1
        text = written(turn) if turn < NUM_TURNS else "Thought.</think>All is well."
        return says(text, chunk_sizes=(1 + turn % 4, 3))


def expected_history(*, with_thoughts: bool) -> str:
    """The part of the last prompt that every turn has left behind."""
    parts = []
    for turn in range(NUM_TURNS):
        thought, _, rest = written(turn).partition("</think>")
        kept = thought if with_thoughts else ""
        names = ["edit", "look"][: 1 + turn % 2]
        results = "\n\n".join(f"<tool_result>{result(turn, name)}</tool_result>" for name in names)
        parts.append(f"<think>{kept}</think>{rest}<｜end▁of▁sentence｜><｜User｜>{results}<｜Assistant｜>")
    return f"<｜User｜>{QUESTION}<｜Assistant｜>{''.join(parts)}<think>"


async def chat_agent(to: Served, *, stream: bool, with_thoughts: bool) -> str:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("edit", "look")
    ]
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    for turn in range(NUM_TURNS + 1):
        fields: dict[str, Any] = {"model": MODEL, "messages": history, "tools": tools}
        if stream:
            async with to.openai.chat.completions.stream(**fields) as events:
                async for _ in events:
                    pass
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await to.openai.chat.completions.create(**fields)).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        said = message.model_dump(exclude_none=True)
        said.pop("parsed", None)
        for call in said["tool_calls"]:
            call["function"].pop("parsed_arguments", None)
        if not with_thoughts:
            said.pop("reasoning_content", None)
        assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == arguments(turn)
        history.append(said)
        history += [
            {"role": "tool", "tool_call_id": call.id, "content": result(turn, call.function.name)}
            for call in message.tool_calls
        ]
    raise AssertionError("the agent never came to an end")


async def responses_agent(to: Served, *, stream: bool, with_thoughts: bool) -> str:
    tools = [
        {"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in ("edit", "look")
    ]
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    for turn in range(NUM_TURNS + 1):
        fields: dict[str, Any] = {"model": MODEL, "input": history, "tools": tools, "store": False}
        if stream:
            async with to.openai.responses.stream(**fields) as events:
                async for _ in events:
                    pass
                answer: Any = await events.get_final_response()
        else:
            answer = await to.openai.responses.create(**fields)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return str(answer.output_text)
        assert json.loads(calls[0].arguments) == arguments(turn)
        for item in answer.output:
            if with_thoughts or item.type != "reasoning":
                said = item.model_dump(exclude_none=True)
                said.pop("parsed_arguments", None)
                history.append(said)
        history += [
            {"type": "function_call_output", "call_id": call.call_id, "output": result(turn, call.name)}
            for call in calls
        ]
    raise AssertionError("the agent never came to an end")


async def messages_agent(to: Served, *, stream: bool, with_thoughts: bool) -> str:
    tools = [{"name": name, "input_schema": SCHEMA} for name in ("edit", "look")]
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    for turn in range(NUM_TURNS + 1):
        fields: dict[str, Any] = {"model": MODEL, "messages": history, "tools": tools, "max_tokens": 2000}
        if stream:
            async with to.anthropic.messages.stream(**fields) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await to.anthropic.messages.create(**fields)
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return str(answer.content[-1].text)
        assert calls[0].input == arguments(turn)
        said = [
            {
                key: value
                for key, value in block.model_dump(exclude_none=True).items()
                if key != "parsed_output"
            }
            for block in answer.content
            if with_thoughts or block.type != "thinking"
        ]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": result(turn, call.name)}
            for call in calls
        ]
        history += [{"role": "assistant", "content": said}, {"role": "user", "content": results}]
    raise AssertionError("the agent never came to an end")


@pytest.mark.parametrize("agent", [chat_agent, responses_agent, messages_agent])
@pytest.mark.parametrize(
    ("stream", "with_thoughts"), [(True, True), (False, False)], ids=["stream", "thoughts dropped"]
)
async def test_twenty_turns(agent: Callable[..., Any], stream: bool, with_thoughts: bool) -> None:
    engine = ScriptedEngine(Model(), max_model_len=100_000)
    async with served(engine) as to:
        assert await agent(to, stream=stream, with_thoughts=with_thoughts) == "All is well."
    assert len(engine.requests) == NUM_TURNS + 1
    prompt = text_of(engine.requests[-1].prompt_token_ids)
    assert prompt.endswith(expected_history(with_thoughts=with_thoughts))
    for earlier, later in zip(engine.requests, engine.requests[1:], strict=False):
        kept = earlier.prompt_token_ids
        assert later.prompt_token_ids[: len(kept)] == kept, (
            "each prompt begins with the one before: it is cached"
        )
