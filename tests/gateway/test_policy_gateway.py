"""Policies as clients meet them: the real server, unmodified clients, a scripted engine. Takes about ten seconds."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from chat_scripts import (
    CHAT,
    CHECKPOINT,
    EOS_ID,
    HELLO,
    MODEL,
    THINK,
    ask,
    ask_streaming,
    chatting,
    finish_reasons,
    ids,
    joined,
    requesting,
    says,
    settings,
    text_of,
)
from openai import AsyncOpenAI
from PIL import Image

from deskfleet.gateway.app import create_app, serving
from deskfleet.gateway.key_file import change_key_file, make_secret
from deskfleet.gateway.policy_file import PolicySettings, PolicyStore
from deskfleet.testing.scripted import Script, ScriptedEngine

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
SLOW = Script(ids("one two three four five six seven eight nine ten ") * 40, delay_s=0.01)
LOOP = "I should look at this again from the start. "


def told(**sections: Any) -> PolicyStore:
    """Settings as a program gives them."""
    return PolicyStore(PolicySettings.model_validate(sections))


def post_chat(session: aiohttp.ClientSession, url: str, key: str | None = None, **fields: Any) -> Any:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": MODEL, "messages": HELLO, **CHAT, **fields}
    return session.post(f"{url}/v1/chat/completions", json=body, headers=headers)


async def metrics(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/metrics") as response:
        return await response.text()


# --- loops --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1,), (5, 2, 6)])
async def test_a_loop_in_the_answer_or_the_thought_ends_it(sizes: tuple[int, ...]) -> None:
    for text, thinking, field in (
        (f"So: {LOOP * 60}", CHAT, "content"),
        (f"So: {LOOP * 60}", THINK, "reasoning_content"),
    ):
        async with chatting(says(text, chunk_sizes=sizes)) as (client, engine):
            whole = await ask(client, extra_body=thinking)
            chunks = await ask_streaming(client, extra_body=thinking)
            await asyncio.sleep(0.05)
            assert engine.num_cancelled == 2, "the engine is told to stop"
        said = getattr(whole.choices[0].message, field)
        assert said.count(LOOP.strip()) == 1, "one copy is kept where nothing has been sent"
        assert whole.choices[0].finish_reason == "stop"
        assert finish_reasons(chunks) == ["stop"]
        assert 2 <= joined(chunks, field).count(LOOP.strip()) <= 8


async def test_loops_are_counted_and_data_comes_through() -> None:
    answers = {"loop": f"So: {LOOP * 60}", "data": f"[{', '.join(['0'] * 200)}]"}
    scripts = iter(answers.values())
    async with requesting(ScriptedEngine(lambda request: says(next(scripts)))) as (session, url):
        async with post_chat(session, url) as response:
            assert (await response.json())["choices"][0]["message"]["content"] != answers["loop"]
        async with post_chat(session, url) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == answers["data"]
        text = await metrics(session, url)
    assert f'deskfleet_policy_loop_aborts_total{{key="",model="{MODEL}",rule="ngram"}} 1.0' in text
    assert f'deskfleet_policy_loop_excused_total{{key="",kind="data",model="{MODEL}"}} 1.0' in text


async def test_a_policy_that_is_off_does_nothing() -> None:
    store = told(loop_abort={"enabled": False}, sampling_defaults={"enabled": False})
    async with chatting(says(LOOP * 60), policies=store) as (client, engine):
        answer = await ask(client)
    assert answer.choices[0].message.content == LOOP * 60
    assert engine.requests[0].sampling.top_p == 1.0


# --- how long an answer is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "capped", "uncapped"),
    [
        ({}, 50, None),
        ({"max_tokens": None}, 50, None),
        ({"max_tokens": 7}, 7, 7),
        ({"max_completion_tokens": 70}, 50, 70),
        ({"max_tokens": 10**9}, 50, 400),
        ({"max_tokens": 0}, 400, 400),
        ({"max_tokens": -1}, 400, 400),
        ({"max_tokens": 9, "max_completion_tokens": 10}, 400, 400),
        ({"max_tokens": 9, "max_completion_tokens": 9}, 9, 9),
    ],
)
async def test_max_tokens_is_decided_and_said(
    fields: dict[str, Any], capped: int, uncapped: int | None
) -> None:
    """What it becomes, or the status 400; with a limit of 50 and without."""
    for expected, store in ((capped, told(completion_cap={"max_tokens": 50})), (uncapped, None)):
        engine = ScriptedEngine(says("ok"))
        async with (
            requesting(engine, policies=store) as (session, url),
            post_chat(session, url, **fields) as response,
        ):
            if expected == 400:
                assert response.status == 400
                assert "max_" in (await response.json())["error"]["param"]
                continue
            assert response.status == 200, await response.text()
            (request,) = engine.requests
            assert response.headers["x-deskfleet-max-tokens"] == str(request.sampling.max_tokens)
            if expected is None:  # all that is left of the context
                assert request.sampling.max_tokens == 4096 - len(request.prompt_token_ids)
            else:
                assert request.sampling.max_tokens == expected


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "stream": True}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 900}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 900}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 900}),
    ],
)
async def test_policies_hold_in_every_protocol(route: str, body: dict[str, Any]) -> None:
    store = told(
        completion_cap={"max_tokens": 40}, deadlines={"timeout_s": 30}, thinking_budget={"default_tokens": 11}
    )
    engine = ScriptedEngine(says("ok</think>ok"))
    async with (
        requesting(engine, policies=store) as (session, url),
        session.post(f"{url}{route}", json={"model": MODEL, **body}) as response,
    ):
        assert response.status == 200, await response.text()
        assert response.headers["x-deskfleet-max-tokens"] == "40"
        await response.read()
    (request,) = engine.requests
    assert (request.sampling.max_tokens, request.sampling.top_p, request.timeout_s) == (40, 0.95, 30.0)
    assert request.sampling.thinking_budget == (None if route == "/v1/completions" else 11)


async def test_stop_strings_stop_the_answer_and_not_the_thought() -> None:
    """They are matched in the answer alone, by the gateway; the engine would match them anywhere."""
    script = says("I must not say STOP here.</think>So: go on STOP and never this.")
    async with chatting(script) as (client, engine):
        thought = await ask(client, stop="STOP", extra_body=THINK)
        assert engine.requests[0].sampling.stop == ()
    message = thought.choices[0].message
    assert message.reasoning_content == "I must not say STOP here."
    assert message.content == "So: go on "
    assert thought.choices[0].finish_reason == "stop"
    async with chatting(says("go on STOP and never this.")) as (client, _):
        plain = await ask(client, stop="STOP", extra_body=CHAT)
    assert plain.choices[0].message.content == "go on "


# --- keys ---------------------------------------------------------------------------------------------------


def key_store(tmp_path: Path, text: str = "", *names: str) -> tuple[PolicyStore, dict[str, str]]:
    """Settings and keys in files, as an operator has them."""
    made = {name: make_secret() for name in names or ("alice", "bob")}
    for name, secret in made.items():
        change_key_file(tmp_path / "keys.toml", lambda old, n=name, s=secret: old.with_key(n, s, NOW))  # type: ignore[misc]
    path = tmp_path / "policies.toml"
    path.write_text(f'keys_file = "keys.toml"\n{text}')
    return PolicyStore(path=path, model_ids=[MODEL]), made


async def test_every_route_asks_for_a_key(tmp_path: Path) -> None:
    """Whatever routes there are, the dashboard's too; nobody has to remember to guard a new one."""
    store, made = key_store(tmp_path)
    app = create_app(ScriptedEngine(says("ok")), settings(policies=store))
    routes = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None
    }
    assert {("GET", "/metrics"), ("GET", "/ui"), ("POST", "/v1/messages"), ("POST", "/tokenize")} <= routes
    async with requesting(ScriptedEngine(says("ok")), policies=store) as (session, url):
        for method, path in sorted(routes):
            if "*" in method:
                continue
            where = f"{url}{path.replace('{model}', MODEL).replace('{name}', 'x')}"
            async with session.request(method, where) as response:
                assert (response.status == 401) == (path != "/health/live"), (method, path)
            if path.endswith("events"):
                continue  # never ends by itself
            headers = {"x-api-key": made["alice"]}
            async with session.request(method, where, headers=headers) as response:
                assert response.status != 401, (method, path)


async def test_official_clients_with_keys(tmp_path: Path) -> None:
    store, made = key_store(tmp_path)
    async with serving(ScriptedEngine(says("ok")), settings(policies=store)) as endpoint:
        async with AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=made["alice"], max_retries=0) as client:
            assert (await ask(client)).choices[0].message.content == "ok"
        async with AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="sk-nothing", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="the key is not valid here"):
                await ask(client)
        async with anthropic.AsyncAnthropic(
            base_url=endpoint.url, api_key=made["bob"], max_retries=0
        ) as client:
            answer = await client.messages.create(
                model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "hello"}]
            )
            assert answer.content
        async with anthropic.AsyncAnthropic(base_url=endpoint.url, api_key="no", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as raised:
                await client.messages.create(
                    model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "hello"}]
                )
            assert raised.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


async def test_keys_appear_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In no log line of any level, metric or answer, whatever is done with them; their names do."""
    store, made = key_store(tmp_path, '[keys."bob".key_limits]\nrequests_per_minute = 1\n')
    wrong = "dfk_" + "wr0ng" * 8
    seen = []
    scripts = iter([says("ok"), says("ok"), says(LOOP * 60), Script(ids("ab"), failure=ValueError("broken"))])
    with caplog.at_level(logging.DEBUG):
        async with requesting(ScriptedEngine(lambda request: next(scripts)), policies=store) as (
            session,
            url,
        ):
            for key, fields in (
                (made["alice"], {}),
                (made["bob"], {}),
                (made["bob"], {}),
                (made["alice"], {}),
                (made["alice"], {}),
                (made["alice"], {"model": "none"}),
                (made["alice"], {"temperature": 99}),
                (wrong, {}),
            ):
                async with post_chat(session, url, key, **fields) as response:
                    seen.append(f"{response.status} {response.headers} {await response.text()}")
            for path in ("/metrics", "/health/detail"):
                async with session.get(f"{url}{path}", headers={"x-api-key": made["alice"]}) as response:
                    seen.append(await response.text())
    assert [line.split(" ")[0] for line in seen[:8]] == [
        "200",
        "200",
        "429",
        "200",
        "500",
        "404",
        "400",
        "401",
    ]
    seen += [logging.Formatter().format(record) for record in caplog.records]
    for secret in (*made.values(), wrong):
        assert not any(secret in text for text in seen)
    assert 'key="alice"' in seen[8]


async def test_limits_of_a_key(tmp_path: Path) -> None:
    text = """
[keys."alice".key_limits]
requests_per_minute = 2
[keys."alice".completion_cap]
max_tokens = 5
[keys."bob".key_limits]
models = ["another"]
"""
    store, made = key_store(tmp_path, text)
    async with requesting(ScriptedEngine(says("ok")), policies=store) as (session, url):
        for status in (200, 200, 429):
            async with post_chat(session, url, made["alice"]) as response:
                assert response.status == status
                if status == 200:
                    assert response.headers["x-deskfleet-max-tokens"] == "5"
                else:
                    assert 1 <= int(response.headers["Retry-After"]) <= 30
                    assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
        async with session.post(
            f"{url}/v1/messages",
            json={"model": MODEL, "messages": HELLO, "max_tokens": 3},
            headers={"x-api-key": made["alice"]},
        ) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (429, "rate_limit_error")
        async with post_chat(session, url, made["bob"]) as response:
            assert response.status == 403
            assert "it may use another" in (await response.json())["error"]["message"]


# --- the queue ------------------------------------------------------------------------------------------


async def test_one_key_does_not_hold_up_another(tmp_path: Path) -> None:
    store, made = key_store(tmp_path, "[admission]\nmax_running = 2\n")
    engine = ScriptedEngine(Script((*ids("abcdefgh"), EOS_ID), delay_s=0.02))
    order: list[str] = []
    async with requesting(engine, policies=store) as (session, url):

        async def send(name: str) -> None:
            async with post_chat(session, url, made[name]) as response:
                assert response.status == 200
                order.append(name)

        tasks = [asyncio.ensure_future(send("alice")) for _ in range(20)]
        while engine.num_running < 2:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert engine.num_running == 2
        num_before = len(order)
        tasks += [asyncio.ensure_future(send("bob")) for _ in range(2)]
        await asyncio.gather(*tasks)
    assert "bob" in order[num_before : num_before + 6], order


async def test_a_full_queue_and_clients_that_leave() -> None:
    store = told(admission={"max_running": 1, "max_waiting": 1})
    async with requesting(ScriptedEngine(SLOW), policies=store) as (session, url):
        running = await post_chat(session, url, stream=True)
        waiting = asyncio.ensure_future(post_chat(session, url))
        await asyncio.sleep(0.1)
        async with post_chat(session, url) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert "1 requests wait already" in (await response.json())["error"]["message"]
        waiting.cancel()  # its client has gone: there is room again
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0.1)
        again = asyncio.ensure_future(post_chat(session, url, max_tokens=2))
        await asyncio.sleep(0.1)
        assert not again.done()
        running.close()  # and its turn comes when the running one's client goes
        async with await asyncio.wait_for(again, 5) as response:
            assert response.status == 200
        text = await metrics(session, url)
    assert f'deskfleet_policy_queue_refused_total{{key="",model="{MODEL}",reason="full"}} 1.0' in text


async def test_deadlines_hold_while_waiting_and_while_running() -> None:
    store = told(admission={"max_running": 1}, deadlines={"timeout_s": 0.5})
    engine = ScriptedEngine(SLOW)
    async with requesting(engine, policies=store) as (session, url):
        async with post_chat(session, url, stream=True) as running, post_chat(session, url) as late:
            assert late.status == 504
            assert "the deadline passed after 0.5 s" in (await late.json())["error"]["message"]
            events = (await running.read()).decode()
        last = [line for line in events.split("\n\n") if line][-1]
        assert (
            "the deadline passed after 0.5 s" in json.loads(last.removeprefix("data: "))["error"]["message"]
        )
        await asyncio.sleep(0.05)
        assert engine.num_running == 0


# --- the end ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stoppable(
    engine: ScriptedEngine, store: PolicyStore
) -> AsyncIterator[tuple[str, asyncio.Event, Any]]:
    """A server that is told when to stop, and its task."""
    stop, ready = asyncio.Event(), asyncio.Event()
    urls: list[str] = []

    async def run() -> None:
        async with serving(engine, settings(policies=store)) as endpoint:
            urls.append(endpoint.url)
            ready.set()
            await stop.wait()

    task = asyncio.ensure_future(run())
    await ready.wait()
    try:
        yield urls[0], stop, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_running_streams_finish_while_new_requests_are_refused() -> None:
    engine = ScriptedEngine(Script((*ids("abcdefghijklmnopqrst"), EOS_ID), delay_s=0.03))
    async with (
        stoppable(engine, told(admission={"drain_s": 20})) as (url, stop, task),
        aiohttp.ClientSession() as session,
    ):
        async with post_chat(session, url, stream=True) as stream:
            await stream.content.readany()
            stop.set()
            await asyncio.sleep(0.1)
            async with post_chat(session, url) as refused:
                assert refused.status == 503
                assert int(refused.headers["Retry-After"]) >= 1
                error = (await refused.json())["error"]
                assert (error["code"], error["message"]) == (
                    "server_stopping",
                    "the server is stopping and takes no new requests",
                )
            async with session.get(f"{url}/health") as health:
                assert health.status == 503
                told_by_health = await health.json()
            assert (told_by_health["status"], told_by_health["reason"]) == ("stopping", error["message"])
            async with session.get(f"{url}/health/live") as live:
                assert (live.status, await live.json()) == (200, {"status": "live"})
            rest = (await stream.read()).decode()
            assert rest.rstrip().endswith("data: [DONE]")
        await asyncio.wait_for(task, 5)


async def test_what_takes_too_long_gets_a_clean_error() -> None:
    engine = ScriptedEngine(SLOW)
    async with (
        stoppable(engine, told(admission={"drain_s": 0.2})) as (url, stop, task),
        aiohttp.ClientSession() as session,
    ):
        whole = asyncio.ensure_future(post_chat(session, url))
        async with post_chat(session, url, stream=True) as stream:
            await stream.content.readany()
            stop.set()
            last = [line for line in (await stream.read()).decode().split("\n\n") if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_stopping"
        async with await whole as response:
            assert response.status == 503
        await asyncio.wait_for(task, 5)
        assert engine.num_running == 0


# --- bodies and images ------------------------------------------------------------------------------------


async def test_bodies_beyond_the_limits_while_others_stream_on() -> None:
    store = told(request_limits={"max_body_bytes": 20_000, "body_timeout_s": 0.5, "max_depth": 10})
    engine = ScriptedEngine(Script((*ids("abcdefghij") * 3, EOS_ID), delay_s=0.05))
    async with requesting(engine, policies=store) as (session, url):
        stream = asyncio.ensure_future(post_chat(session, url, stream=True))
        deep: Any = "x"
        for _ in range(12):
            deep = [deep]
        async with post_chat(session, url, tools=deep) as response:
            assert response.status == 400
            assert "nested 13 levels deep, more than 10" in (await response.json())["error"]["message"]
        async with post_chat(session, url, user="x" * 30_000) as response:
            assert response.status == 413
            assert "more than 20000" in (await response.json())["error"]["message"]

        async def dripping() -> AsyncIterator[bytes]:
            while True:
                yield b" "
                await asyncio.sleep(0.05)

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield b" " * 5000

        async with session.post(f"{url}/v1/chat/completions", data=dripping()) as response:
            assert response.status == 408
            assert "did not arrive within 0.5 s" in (await response.json())["error"]["message"]
        try:
            async with session.post(f"{url}/v1/chat/completions", data=endless()) as response:
                assert response.status == 413
        except aiohttp.ClientError:
            pass  # the connection is closed while we still send
        async with await stream as response:
            assert (await response.read()).decode().rstrip().endswith("data: [DONE]")


def picture(size: int) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (size, size)).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


async def test_image_limits_differ_by_key(tmp_path: Path) -> None:
    text = '[images]\nmax_images = 1\n[keys."alice".images]\nmax_images = 2\nmax_image_pixels = 5000\n'
    store, made = key_store(tmp_path, text)
    async with requesting(ScriptedEngine(says("ok")), policies=store, max_images=64) as (session, url):

        async def status(key: str, *images: dict[str, Any]) -> tuple[int, str]:
            messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, *images]}]
            async with post_chat(session, url, made[key], messages=messages) as response:
                return response.status, await response.text()

        assert (await status("bob", picture(64)))[0] == 200
        assert "2 images exceed the limit of 1" in (await status("bob", picture(64), picture(64)))[1]
        assert (await status("alice", picture(64), picture(64)))[0] == 200
        assert "exceeds 5000 pixels" in (await status("alice", picture(128)))[1]
        assert (await status("bob", picture(128)))[0] == 200
        code, said = await status(
            "bob", {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
        )
        assert (code, "nothing is fetched" in said) == (400, True)


async def test_fetching_is_off_for_whom_it_is_off(tmp_path: Path) -> None:
    store, made = key_store(tmp_path, '[keys."alice".images.fetch]\nenabled = true\n')
    image = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}}
    messages = [{"role": "user", "content": [image]}]
    async with requesting(ScriptedEngine(says("ok")), policies=store) as (session, url):
        for key, said in (("alice", "its host has no public address"), ("bob", "nothing is fetched")):
            async with post_chat(session, url, made[key], messages=messages) as response:
                assert response.status == 400
                error = (await response.json())["error"]
                assert said in error["message"]
                assert error["param"].startswith("messages[0].content[0].image_url")


# --- other settings while serving -------------------------------------------------------------------------


async def test_reloading_drops_no_stream(tmp_path: Path) -> None:
    store, made = key_store(tmp_path, "[completion_cap]\nmax_tokens = 30\n")
    engine = ScriptedEngine(Script(ids("abcdefghij") * 10, delay_s=0.02))
    async with requesting(engine, policies=store) as (session, url):
        async with post_chat(session, url, made["alice"], stream=True) as stream:
            await stream.content.readany()
            (tmp_path / "policies.toml").write_text(
                'keys_file = "keys.toml"\n[completion_cap]\nmax_tokens = 4\n'
            )
            change_key_file(tmp_path / "keys.toml", lambda old: old.without("alice", NOW))
            assert store.reload() == ()
            async with post_chat(session, url, made["alice"]) as response:
                assert response.status == 401
            async with post_chat(session, url, made["bob"]) as response:
                assert response.headers["x-deskfleet-max-tokens"] == "4"
            events = (await stream.read()).decode()
        assert events.rstrip().endswith("data: [DONE]"), "whoever has begun is served to the end"
        assert stream.headers["x-deskfleet-max-tokens"] == "30"
        (tmp_path / "policies.toml").write_text("[completion_cap]\nmax_tokens = 'many'\n")
        assert len(store.reload()) == 1
        async with post_chat(session, url, made["bob"]) as response:
            assert response.headers["x-deskfleet-max-tokens"] == "4"


def test_the_scripts_say_what_they_mean() -> None:
    assert text_of(ids(LOOP)) == LOOP
    assert CHECKPOINT.is_dir()
