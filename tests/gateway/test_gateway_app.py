"""The server itself: models, health, metrics, addresses, its end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest
from chat_scripts import (
    CHAT,
    CHECKPOINT,
    HELLO,
    MODEL,
    ask,
    ask_streaming,
    chatting,
    ids,
    requesting,
    says,
    settings,
)

from deskfleet.endpoint import Endpoint, EngineStats, EngramStats
from deskfleet.errors import CheckpointError, ConfigError
from deskfleet.gateway.app import create_app, serve, serving
from deskfleet.gateway.metrics import GatewayMetrics
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.testing.scripted import Script, ScriptedEngine


async def test_model_list() -> None:
    async with chatting(ScriptedEngine(says("ok"), max_model_len=777)) as (client, _):
        (model,) = (await client.models.list()).data
        same = await client.models.retrieve(MODEL)
        with pytest.raises(openai.NotFoundError) as raised:
            await client.models.retrieve("gpt-4o")
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "deskfleet")
    assert model.max_model_len == 777
    assert model.created > 1_600_000_000
    assert same == model
    assert raised.value.code == "model_not_found"


async def test_a_model_id_with_a_slash() -> None:
    name = "deepseek-ai/DeepSeek-V4.1-Flash"
    async with chatting(says("ok"), model_id=name) as (client, _):
        assert (await client.models.retrieve(name)).id == name
        assert (await ask(client, model=name)).model == name


async def test_health_follows_the_engine() -> None:
    engine = ScriptedEngine(says("ok"))
    async with requesting(engine) as (session, url):
        async with session.get(f"{url}/health") as response:
            body = await response.json()
            assert (response.status, body) == (200, {"status": "ready", "model": MODEL, "reason": None})
        engine.fail("rank 1 was killed by signal 9; the group was stopped")
        async with session.get(f"{url}/health") as response:
            assert response.status == 503
            assert (await response.json())["reason"] == "rank 1 was killed by signal 9; the group was stopped"
        async with session.post(
            f"{url}/v1/chat/completions", json={"model": MODEL, "messages": HELLO}
        ) as response:
            assert response.status == 503
            error = (await response.json())["error"]
            assert error["message"] == "rank 1 was killed by signal 9; the group was stopped"
        async with session.post(f"{url}/v1/chat/completions", data=b"not even JSON") as response:
            assert response.status == 503, "that the engine is dead matters more than what was asked"
        async with session.get(f"{url}/v1/models") as response:
            assert response.status == 200


async def test_metrics_count_what_happened() -> None:
    script = says("four words are here")
    async with chatting(script) as (client, engine):
        await ask(client)
        await ask_streaming(client)
        with pytest.raises(openai.BadRequestError):
            await ask(client, temperature=9)
        url = str(client.base_url).removesuffix("v1/")
        text = (await client._client.get(f"{url}metrics")).text
        prompt_tokens = sum(len(request.prompt_token_ids) for request in engine.requests)
        engine.fail("gone")
        dead = await client._client.get(f"{url}metrics")
    for line in (
        'deskfleet_requests_total{outcome="ok",protocol="chat"} 2.0',
        'deskfleet_requests_total{outcome="refused",protocol="chat"} 1.0',
        f'vllm:prompt_tokens_total{{engine="0",model_name="{MODEL}"}} {float(prompt_tokens)}',
        f'vllm:generation_tokens_total{{engine="0",model_name="{MODEL}"}} {2.0 * len(script.token_ids)}',
        "deskfleet_running_requests 0.0",
        "deskfleet_engine_up 1.0",
        "deskfleet_engine_finished_total 2.0",
        "deskfleet_engine_running 0.0",
    ):
        assert line in text.splitlines(), line
    assert dead.status_code == 200
    assert "deskfleet_engine_up 0.0" in dead.text.splitlines()


def test_metrics_of_engram_rows() -> None:
    engram = EngramStats(
        num_rows=96, num_fallback_rows=2, read_bytes=8192, wait_s=0.25, errors={"checksum": 3}
    )
    lines = GatewayMetrics().render(EngineStats(engram=engram)).decode().splitlines()
    for line in (
        "deskfleet_engram_rows_total 96.0",
        "deskfleet_engram_fallback_rows_total 2.0",
        "deskfleet_engram_read_bytes_total 8192.0",
        "deskfleet_engram_wait_seconds_total 0.25",
        'deskfleet_engram_errors_total{kind="checksum"} 3.0',
    ):
        assert line in lines, line


async def test_a_running_request_shows_in_the_gauges() -> None:
    async with chatting(Script(ids("abcdef"), delay_s=0.05)) as (client, engine):
        running = asyncio.ensure_future(ask_streaming(client))
        while engine.num_running == 0:
            await asyncio.sleep(0.001)
        text = (await client._client.get(str(client.base_url).removesuffix("v1/") + "metrics")).text
        await running
    assert "deskfleet_running_requests 1.0" in text
    assert "deskfleet_engine_running 1.0" in text


async def test_streams_are_not_to_be_buffered() -> None:
    body = {"model": MODEL, "messages": HELLO, "stream": True, **CHAT}
    async with (
        requesting(ScriptedEngine(Script(ids("a b c"), delay_s=60.0))) as (session, url),
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        assert response.content_type == "text/event-stream"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["Cache-Control"] == "no-cache"
        async with asyncio.timeout(5):  # the first token does not wait for the second
            first = await response.content.readuntil(b"\n\n")
            second = await response.content.readuntil(b"\n\n")
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"]["role"] == "assistant"
    assert json.loads(second.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == "a"


async def test_a_complete_stream_ends_with_done() -> None:
    body = {"model": MODEL, "messages": HELLO, "stream": True, **CHAT}
    async with (
        requesting(ScriptedEngine(says("abc"))) as (session, url),
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        assert (await response.text()).endswith("\n\ndata: [DONE]\n\n")


async def test_listens_on_the_loopback_only_unless_told_otherwise() -> None:
    default = GatewaySettings(model_id=MODEL, checkpoint=CHECKPOINT)
    assert default.host == "127.0.0.1"
    async with serving(ScriptedEngine(says("ok")), settings()) as endpoint:
        assert endpoint.url.startswith("http://127.0.0.1:")
        assert endpoint.url != "http://127.0.0.1:0", "the real port is reported"
        assert (endpoint.model_id, endpoint.max_model_len) == (MODEL, 4096)


async def test_serve_until_told_to_stop() -> None:
    until, ready = asyncio.Event(), []

    def stop_soon(endpoint: Endpoint) -> None:
        ready.append(endpoint)
        asyncio.get_running_loop().call_later(0.05, until.set)

    async with asyncio.timeout(5):
        await serve(ScriptedEngine(says("ok")), settings(), until=until, on_ready=stop_soon)
    assert len(ready) == 1


async def test_closing_the_server_cancels_what_is_running() -> None:
    engine = ScriptedEngine(Script(ids("abcdef"), delay_s=60.0))
    async with asyncio.timeout(5):
        async with chatting(engine) as (client, _):
            stream = await ask(client, stream=True)
            await anext(aiter(stream))
            leaving = asyncio.ensure_future(_drain(stream))
        with pytest.raises(openai.APIError):
            await leaving
    assert engine.num_cancelled == 1


async def _drain(stream: openai.AsyncStream[object]) -> None:
    async for _ in stream:
        pass


async def test_a_taken_port_is_said_so() -> None:
    engine = ScriptedEngine(says("ok"))
    async with serving(engine, settings()) as endpoint:
        port = int(endpoint.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with serving(engine, settings(port=port)):
                pass


@pytest.mark.parametrize(
    "changes",
    [
        {"model_id": ""},
        {"port": 70000},
        {"default_max_tokens": 0},
        {"max_body_bytes": 0},
        {"max_images": 0},
        {"max_image_bytes": -1},
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        settings(**changes)


def _copy_checkpoint(directory: Path, tokenizer: str | None) -> Path:
    (directory / "config.json").write_bytes((CHECKPOINT / "config.json").read_bytes())
    if tokenizer is not None:
        (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    return directory


TOKENIZER_JSON = (CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("tokenizer", "what"),
    [
        (None, "no such file"),
        ("{", "cannot read"),
        ('{"added_tokens": []}', "cannot read"),
        (TOKENIZER_JSON.replace("｜DSML｜", "｜XSML｜"), "lacks ｜DSML｜"),
        (TOKENIZER_JSON.replace("<｜User｜>", "<｜Human｜>"), "lacks <｜User｜>"),
    ],
    ids=["missing", "not json", "no model", "no tool marker", "no user"],
)
async def test_a_tokenizer_that_cannot_serve_is_refused_at_start(
    tmp_path: Path, tokenizer: str | None, what: str
) -> None:
    checkpoint = _copy_checkpoint(tmp_path, tokenizer)
    with pytest.raises(CheckpointError, match=what):
        create_app(ScriptedEngine(says("never")), settings(checkpoint=checkpoint))


async def test_a_tokenizer_that_disagrees_with_the_config_is_refused_at_start(tmp_path: Path) -> None:
    checkpoint = _copy_checkpoint(tmp_path, TOKENIZER_JSON)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    for changes, what in (
        ({"eos_token_id": 9}, "1 in .* but 9 in config.json"),
        ({"image_token_id": 400}, "no added token 400"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=what):
            create_app(ScriptedEngine(says("never")), settings(checkpoint=checkpoint))


async def test_the_image_placeholder_is_spelled_as_the_tokenizer_does(tmp_path: Path) -> None:
    renamed = TOKENIZER_JSON.replace("<｜deepseek_image｜>", "<｜picture｜>")
    engine = ScriptedEngine(says("ok"))
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{pixel}"}}
    async with chatting(engine, checkpoint=_copy_checkpoint(tmp_path, renamed)) as (client, _):
        await ask(client, messages=[{"role": "user", "content": [part]}])
    assert engine.requests[0].prompt_token_ids.count(511) == 1
