"""Bodies of every kind, made from the gateway's own OpenAPI description: never a 5xx, never a hang.

Schemathesis runs as a user would run it, against a served gateway. Its answers are also held against the description.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import aiohttp
from chat_scripts import MODEL, call_markup, says, settings

from deskfleet.gateway.app import serving
from deskfleet.testing.scripted import ScriptedEngine

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)

ROUTES = {
    "/v1/chat/completions": "post",
    "/v1/responses": "post",
    "/v1/messages": "post",
    "/v1/completions": "post",
    "/v1/messages/count_tokens": "post",
    "/tokenize": "post",
    "/detokenize": "post",
    "/v1/models": "get",
    "/v1/models/{model}": "get",
    "/openapi.json": "get",
    "/health": "get",
    "/metrics": "get",
}


def engine() -> ScriptedEngine:
    markup = call_markup(("weather", {"city": ("Oslo", True)}))
    return ScriptedEngine(says(f"Hm.</think>ok < 3{markup}", chunk_sizes=(7,)))


async def test_the_description_names_every_route_and_the_model() -> None:
    async with (
        serving(engine(), settings()) as endpoint,
        aiohttp.ClientSession() as session,
        session.get(f"{endpoint.url}/openapi.json") as response,
    ):
        described = await response.json()
    assert described["openapi"].startswith("3.1")
    assert {path: next(iter(methods)) for path, methods in described["paths"].items()} == ROUTES
    schemas = described["components"]["schemas"]
    assert schemas["ChatFields"]["properties"]["model"]["enum"] == [MODEL]
    assert "temperature" in schemas["MessagesFields"]["properties"]
    text = json.dumps(described)
    for reference in {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
        assert reference in schemas


async def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    async with serving(engine(), settings()) as endpoint:
        process = await asyncio.create_subprocess_exec(
            str(SCHEMATHESIS),
            "run",
            f"{endpoint.url}/openapi.json",
            f"--checks={','.join(CHECKS)}",
            "--phases=fuzzing",
            "--max-examples=15",
            "--workers=2",
            "--seed=1",
            "--generation-database=none",
            "--request-timeout=10",
            "--suppress-health-check=all",
            "--no-color",
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(55):
                told, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
    assert process.returncode == 0, told.decode()[-6000:]
    assert b"generated" in told
