"""LiteLLM as somebody's program would use it; runs in LiteLLM's own environment, which knows nothing of this project.

    PYTHON litellm_client.py ROOT_URL MODEL

Prints one JSON object: what each way of asking has brought. The scripted model answers by the words it is asked.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm
from openai import OpenAIError

ROOT, MODEL = sys.argv[1:]
OPENAI: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{ROOT}/v1", "api_key": "unused"}
VLLM: dict[str, Any] = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{ROOT}/v1", "api_key": "unused"}
DEEPSEEK: dict[str, Any] = {"model": f"deepseek/{MODEL}", "api_base": f"{ROOT}/v1", "api_key": "unused"}
ANTHROPIC: dict[str, Any] = {"model": f"anthropic/{MODEL}", "api_base": ROOT, "api_key": "unused"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how warm it is.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAIAAAD9b0jDAAAAJ0lEQVR42mM4YWBAdcQwauiooaOGjho6auiooaOGjho6auio"
    "oUPPUADm4zwcQ5o6NgAAAABJRU5ErkJggg=="
)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def told(reply: Any) -> dict[str, Any]:
    """The same of a whole answer, however it was asked for."""
    choice = reply.choices[0]
    message = choice.message
    return {
        "text": message.content,
        "thought": getattr(message, "reasoning_content", None),
        "calls": [
            [call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls or []
        ],
        "ending": choice.finish_reason,
        "has_usage": reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens,
    }


async def streamed(**fields: Any) -> dict[str, Any]:
    """A stream, put together by LiteLLM's own builder."""
    chunks = [chunk async for chunk in await litellm.acompletion(stream=True, **fields)]
    return told(litellm.stream_chunk_builder(chunks, messages=fields["messages"])) | {
        "many": len(chunks) > 3,
        "ending": next(c.choices[0].finish_reason for c in reversed(chunks) if c.choices[0].finish_reason),
    }


async def agent(ways: dict[str, Any], num_turns: int, *, stream: bool) -> dict[str, Any]:
    """Calls and results, turn by turn, until the model says it is done."""
    history = user("count")
    for turn in range(num_turns + 1):
        fields = {**ways, "messages": history, "tools": [WEATHER], "max_tokens": 500}
        if stream:
            chunks = [chunk async for chunk in await litellm.acompletion(stream=True, **fields)]
            reply = litellm.stream_chunk_builder(chunks, messages=history)
        else:
            reply = await litellm.acompletion(**fields)
        message = reply.choices[0].message
        if not message.tool_calls:
            return {"num_turns": turn, "text": message.content}
        history.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            history.append({"role": "tool", "tool_call_id": call.id, "content": f"{city}: {turn} degrees"})
    return {"num_turns": -1}


async def failure(**fields: Any) -> str:
    try:
        await litellm.acompletion(**fields)
    except OpenAIError as error:  # all of LiteLLM's are
        return type(error).__name__
    return "none"


async def message(**fields: Any) -> list[Any]:
    """Messages, passed through as they are."""
    reply = await litellm.anthropic.messages.acreate(**ANTHROPIC, max_tokens=100, **fields)
    return [
        [block["type"], block.get("text") or block.get("thinking") or block.get("input")]
        for block in reply["content"]
    ]


async def response() -> list[Any]:
    reply = await litellm.aresponses(**OPENAI, input="say hello", store=False)
    return [
        reply.status,
        [part.text for item in reply.output if item.type == "message" for part in item.content],
    ]


async def main() -> dict[str, Any]:
    litellm.suppress_debug_info = True
    off: dict[str, Any] = {"extra_body": {"thinking": {"type": "disabled"}}}
    picture = [
        {"type": "text", "text": "say hello"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
    ]
    long = user("word " * 30_000)
    return {
        "plain": told(
            await asyncio.to_thread(litellm.completion, **OPENAI, messages=user("say hello"), **off)
        ),
        "stream": await streamed(
            **OPENAI, messages=user("say hello"), stream_options={"include_usage": True}, **off
        ),
        "tools": told(await litellm.acompletion(**OPENAI, messages=user("call"), tools=[WEATHER], **off)),
        "tools, streamed": await streamed(**OPENAI, messages=user("call"), tools=[WEATHER], **off),
        "image": told(
            await litellm.acompletion(**OPENAI, messages=[{"role": "user", "content": picture}], **off)
        ),
        "thought, vllm": told(
            await litellm.acompletion(**VLLM, messages=user("think"), reasoning_effort="high")
        ),
        "thought, deepseek": await streamed(**DEEPSEEK, messages=user("think"), thinking={"type": "enabled"}),
        "anthropic": told(
            await litellm.acompletion(**ANTHROPIC, messages=user("call"), tools=[WEATHER], max_tokens=500)
        ),
        "anthropic, streamed": await streamed(
            **ANTHROPIC,
            messages=user("think"),
            max_tokens=2000,
            thinking={"type": "enabled", "budget_tokens": 1024},
            allowed_openai_params=["thinking"],  # it knows models by their names
        ),
        "messages": await message(
            messages=user("think"), thinking={"type": "enabled", "budget_tokens": 1024}
        ),
        "responses": await response(),
        "agent": await agent(OPENAI, 20, stream=True),
        "agent, vllm": await agent(VLLM, 20, stream=False),
        "agent, anthropic": await agent(ANTHROPIC, 20, stream=True),
        "too long": await failure(**OPENAI, messages=long),
        "too long, anthropic": await failure(**ANTHROPIC, messages=long, max_tokens=10),
        "wrong model": await failure(**{**OPENAI, "model": "openai/other"}, messages=user("say hello")),
        "bad field": await failure(
            **OPENAI, messages=user("say hello"), extra_body={"reasoning_effort": "so so"}
        ),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
