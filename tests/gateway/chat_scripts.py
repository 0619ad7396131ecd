"""What the scripted engine says in these tests, and how the tests talk to it.

Text is encoded with the tokenizer of the tiny checkpoint, so that ids mean something to the gateway.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from deskfleet.endpoint import GenerateRequest
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.testing.scripted import Script, ScriptedEngine, running_gateway

CHECKPOINT = Path(__file__).parents[1] / "golden" / "v41-tiny" / "model"
MODEL = "deepseek-v4.1-tiny"
EOS = "<｜end▁of▁sentence｜>"
EOS_ID, IMAGE_ID = 1, 511
HELLO = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"thinking": {"type": "disabled"}}
THINK: dict[str, Any] = {"thinking": {"type": "enabled"}}

TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Say how warm it is.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    },
]


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


def text_of(token_ids: tuple[int, ...]) -> str:
    return TOKENIZER.decode(list(token_ids), skip_special_tokens=False)


def says(text: str, **script: Any) -> Script:
    """The script of an answer that ends with the end-of-sentence token, as a real engine's would."""
    return Script(ids(text + EOS), **script)


def call_markup(*calls: tuple[str, dict[str, tuple[str, bool]]]) -> str:
    """Tool calls as the model writes them; each argument is (text, whether it is a string)."""
    invokes = []
    for name, arguments in calls:
        lines = [f'<｜DSML｜ invoke name="{name}">']
        for key, (value, is_string) in arguments.items():
            kind = "true" if is_string else "false"
            lines.append(f'<｜DSML｜ parameter name="{key}" string="{kind}">{value}</｜DSML｜ parameter>')
        invokes.append("\n".join([*lines, "</｜DSML｜ invoke>"]))
    return "\n\n" + "\n".join(["<｜DSML｜ calls>", *invokes, "</｜DSML｜ calls>"])


def strict_format(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """A response_format that promises a schema."""
    schema = {"type": "object", "properties": properties, "required": required}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def strict_tool(properties: dict[str, Any], required: list[str], name: str = "strictly") -> dict[str, Any]:
    """A tool whose calls are promised to have the form of its schema."""
    schema = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


def settings(**changes: Any) -> GatewaySettings:
    return GatewaySettings(**{"model_id": MODEL, "checkpoint": CHECKPOINT, "port": 0, **changes})


@asynccontextmanager
async def chatting(
    script: Script | Callable[[GenerateRequest], Script] | ScriptedEngine, **changes: Any
) -> AsyncIterator[tuple[AsyncOpenAI, ScriptedEngine]]:
    """An unmodified OpenAI client in front of a gateway, and the engine behind it."""
    engine = script if isinstance(script, ScriptedEngine) else ScriptedEngine(script)
    async with (
        running_gateway(engine, settings(**changes)) as base_url,
        AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as client,
    ):
        yield client, engine


@asynccontextmanager
async def requesting(
    engine: ScriptedEngine, **changes: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A bare HTTP client and the server's root URL, for what no OpenAI client would send."""
    async with (
        running_gateway(engine, settings(**changes)) as base_url,
        aiohttp.ClientSession() as session,
    ):
        yield session, base_url.removesuffix("/v1")


async def ask(client: AsyncOpenAI, **fields: Any) -> Any:
    """One answer, not streamed, thinking off unless told otherwise."""
    return await client.chat.completions.create(
        **{"model": MODEL, "messages": HELLO, "extra_body": CHAT, **fields}
    )


async def ask_streaming(client: AsyncOpenAI, **fields: Any) -> list[Any]:
    """The chunks of one streamed answer."""
    stream = await ask(client, stream=True, **fields)
    return [chunk async for chunk in stream]


def joined(chunks: list[Any], field: str) -> str:
    """What the deltas of `field` say together."""
    deltas = [getattr(choice.delta, field, None) for chunk in chunks for choice in chunk.choices]
    return "".join(delta for delta in deltas if delta)


def finish_reasons(chunks: list[Any]) -> list[str]:
    return [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
