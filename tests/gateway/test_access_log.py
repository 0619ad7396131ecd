"""The access log as an operator reads it: the lines a real server has written, and what is never in one."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from chat_scripts import CHAT, HELLO, MODEL, ask, ask_streaming, ids, says, settings

from deskfleet.endpoint import TokenChunk
from deskfleet.errors import ConfigError, EngineError
from deskfleet.gateway.access_log import AccessLog, accept_request_id, log_fields
from deskfleet.gateway.app import serving
from deskfleet.gateway.key_file import change_key_file, make_secret
from deskfleet.gateway.metrics import GatewayMetrics
from deskfleet.gateway.observation import ObservationSettings
from deskfleet.gateway.policy_file import PolicyStore
from deskfleet.gateway.recent import RequestRecord
from deskfleet.testing.scripted import Script, ScriptedEngine

SECRET = "sk-never-to-be-written"


@asynccontextmanager
async def logged(script: Any, path: Path | str) -> AsyncIterator[tuple[Any, aiohttp.ClientSession, str]]:
    """A client whose key is a secret, and a bare session."""
    observation = ObservationSettings(access_log=str(path))
    async with (
        serving(ScriptedEngine(script), settings(observation=observation)) as endpoint,
        aiohttp.ClientSession() as session,
        openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=SECRET, max_retries=0) as client,
    ):
        yield client, session, endpoint.url


async def lines_of(path: Path, number: int) -> list[dict[str, Any]]:
    """The log's lines, once there are so many."""
    async with asyncio.timeout(5):
        while len(lines := path.read_text().splitlines()) < number:
            await asyncio.sleep(0.01)
    return [json.loads(line) for line in lines]


async def test_one_line_per_request_with_everything_that_is_known(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    script = Script(ids("one two three"), delay_s=0.01)
    async with logged(script, path) as (client, session, url):
        await ask_streaming(client, extra_headers={"x-request-id": "agent-7/turn:3"})
        with pytest.raises(openai.BadRequestError):
            await ask(client, temperature=9, messages=[{"role": "user", "content": "a secret question"}])
        async with session.get(f"{url}/v1/models?api_key={SECRET}"):
            pass
        async with session.get(f"{url}/health"), session.get(f"{url}/metrics"):
            pass
        async with session.get(f"{url}/nowhere"):
            pass
        streamed, refused, models, nowhere = await lines_of(path, 4)
    assert streamed["request_id"] == "agent-7/turn:3"
    assert streamed | {
        "method": "POST", "path": "/v1/chat/completions", "protocol": "chat", "model": MODEL, "status": 200,
        "outcome": "ok", "client": "127.0.0.1", "generated_tokens": len(script.token_ids), "cached_tokens": 0,
        "finish_reason": "stop",
    } == streamed  # fmt: skip
    assert streamed["prompt_tokens"] > 3
    assert 0 < streamed["ttft_s"] < streamed["duration_s"] < 5
    assert streamed["tok_s"] > 1
    assert streamed["time"].endswith("Z")
    assert (refused["status"], refused["outcome"]) == (400, "refused")
    assert "temperature" in refused["error"]
    assert "generated_tokens" not in refused, "it never came to the engine"
    assert (models["path"], models["status"]) == ("/v1/models", 200)
    assert (nowhere["path"], nowhere["status"]) == ("/nowhere", 404)
    text = path.read_text()
    assert SECRET not in text
    assert "secret question" not in text
    assert path.stat().st_mode & 0o007 == 0


def test_what_drafts_were_worth_is_logged() -> None:
    record = RequestRecord(
        request_id="r", method="POST", path="/v1/messages", began_s=1.0, began_at=0.0, protocol="messages"
    )
    meter = GatewayMetrics(MODEL).meter(record, 7, 1.5)
    meter.chunk(TokenChunk((5,), None, 7), 2.0)
    counts = {"num_drafted": 10, "num_accepted": 6, "num_verify_steps": 2, "num_wasted_rows": 4}
    meter.chunk(TokenChunk((6, 7), None, 7, "stop", **counts), 3.0)
    assert not log_fields(record).keys() & {"drafted", "verify_steps"}, "not before it is over"
    meter.end()
    logged = log_fields(record)
    assert {
        f"num_{name}": logged[name] for name in ("drafted", "accepted", "verify_steps", "wasted_rows")
    } == counts


async def test_the_name_of_a_key_is_logged_and_never_the_key(tmp_path: Path) -> None:
    path, keys = tmp_path / "access.jsonl", tmp_path / "keys.toml"
    secret = make_secret()
    change_key_file(keys, lambda file: file.with_key("laptop", secret, datetime.now(UTC)))
    changes = {
        "observation": ObservationSettings(access_log=str(path)),
        "policies": PolicyStore(keys_path=keys),
    }
    body = {"model": MODEL, "messages": HELLO, **CHAT}
    async with (
        serving(ScriptedEngine(says("ok")), settings(**changes)) as endpoint,
        aiohttp.ClientSession() as session,
    ):
        for headers in (
            {"Authorization": f"Bearer {secret}"},
            {"x-api-key": secret},
            {"x-api-key": secret[:-1]},
        ):
            async with session.post(f"{endpoint.url}/v1/chat/completions", json=body, headers=headers):
                pass
        async with session.get(f"{endpoint.url}/metrics", headers={"x-api-key": secret}) as response:
            metrics = await response.text()
    lines = await lines_of(path, 3)
    assert [(line.get("key"), line["status"]) for line in lines] == [
        ("laptop", 200), ("laptop", 200), (None, 401),
    ]  # fmt: skip
    assert 'deskfleet_key_requests_total{key="laptop",outcome="ok"} 2.0' in metrics
    for text in (path.read_text(), metrics):
        assert secret[:-1] not in text


async def test_failures_and_clients_that_leave_have_their_line(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    scripts = [
        Script(ids("a b c"), failure=EngineError("rank 1 said no"), is_deadly=False, fail_after=1),
        Script(ids("abcdef"), delay_s=60.0),
    ]
    async with logged(lambda request: scripts.pop(0), path) as (client, _, _):
        with pytest.raises(openai.APIError):
            await ask_streaming(client)
        stream = await ask(client, stream=True)
        await anext(aiter(stream))
        await stream.close()
        failed, left = await lines_of(path, 2)
    assert (failed["outcome"], failed["status"], failed["error"]) == ("failed", 200, "rank 1 said no")
    assert (left["outcome"], left["status"]) == ("cancelled", 499)


@pytest.mark.parametrize(
    ("asked", "is_kept"),
    [
        ("req_1.2:3/4+5=6@7-8", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("", False),
        ("two words", False),
        ('a","status":200,"x":"', False),
        ("line\nbreak", False),
        ("ümlaut", False),
        (None, False),
    ],
)
def test_only_plain_ids_of_clients_are_kept(asked: str | None, is_kept: bool) -> None:
    assert accept_request_id(asked) == (asked if is_kept else "")


async def test_the_id_comes_back_in_the_header(tmp_path: Path) -> None:
    async with logged(says("ok"), tmp_path / "log") as (_, session, url):
        body = {"model": MODEL, "messages": HELLO, **CHAT}
        for sent, expected in (("mine-1", "mine-1"), ("not mine", None)):
            headers = {"x-request-id": sent}
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                own = response.headers["x-request-id"]
                assert own == expected if expected is not None else own != sent
        line = (await lines_of(tmp_path / "log", 2))[1]
    assert line["request_id"] == own


def record() -> RequestRecord:
    return RequestRecord(
        request_id="r", method="GET", path="/", began_s=0.0, began_at=0.0, status=200, ended_s=1.0, outcome="ok"
    )  # fmt: skip


def test_a_log_that_is_rotated_away_is_begun_anew(tmp_path: Path) -> None:
    now_s = 0.0
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path), clock=lambda: now_s)
    log.write(record())
    path.rename(tmp_path / "access.jsonl.1")
    log.write(record())  # still within the second: nothing is lost, it goes with the old file
    now_s = 1.5
    log.write(record())
    log.close()
    assert len((tmp_path / "access.jsonl.1").read_text().splitlines()) == 2
    assert len(path.read_text().splitlines()) == 1
    assert log.num_dropped == 0


def test_lines_that_cannot_be_written_are_counted_and_hurt_nobody(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    now_s = 0.0
    log = AccessLog("/dev/full", clock=lambda: now_s)
    log.write(record())
    assert log.num_dropped == 1
    # A directory that has gone and come back.
    path = tmp_path / "logs" / "access.jsonl"
    path.parent.mkdir()
    log = AccessLog(str(path), clock=lambda: now_s)
    path.unlink()
    path.parent.rmdir()
    now_s = 2.0
    log.write(record())
    now_s = 4.0
    log.write(record())
    assert log.num_dropped == 2
    path.parent.mkdir()
    now_s = 6.0
    log.write(record())
    assert (log.num_dropped, len(path.read_text().splitlines())) == (2, 1)


def test_a_log_that_cannot_be_opened_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the access log"):
        AccessLog(str(tmp_path / "no" / "such" / "log"))
