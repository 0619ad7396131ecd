"""The unmodified `openai` and `anthropic` clients in front of one gateway and a scripted engine."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from anthropic import AsyncAnthropic
from chat_scripts import settings
from openai import AsyncOpenAI
from PIL import Image

from deskfleet.endpoint import GenerateRequest
from deskfleet.testing.scripted import Script, ScriptedEngine, running_gateway


@dataclass(frozen=True)
class Served:
    """One gateway, the engine behind it, and three ways to talk to it."""

    engine: ScriptedEngine
    openai: AsyncOpenAI
    anthropic: AsyncAnthropic
    http: aiohttp.ClientSession
    url: str

    async def post(self, path: str, body: Any) -> tuple[int, dict[str, Any], Any]:
        async with self.http.post(f"{self.url}{path}", json=body) as response:
            return response.status, await response.json(), response.headers


@asynccontextmanager
async def served(
    script: Script | Callable[[GenerateRequest], Script] | ScriptedEngine, **changes: Any
) -> AsyncIterator[Served]:
    engine = script if isinstance(script, ScriptedEngine) else ScriptedEngine(script)
    async with (
        running_gateway(engine, settings(**changes)) as base_url,
        AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as openai,
        AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key="unused", max_retries=0) as anthropic,
        aiohttp.ClientSession() as http,
    ):
        yield Served(engine, openai, anthropic, http, base_url.removesuffix("/v1"))


def png(width: int = 64, height: int = 48) -> str:
    """A small image as base64."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (90, 10, 10)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
