"""`deskfleet gateway`: the real command in a process of its own, in front of scripted engines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import typer
from chat_scripts import CHAT, CHECKPOINT, HELLO, says
from openai import AsyncOpenAI
from upstream_scripts import server_of

from deskfleet.cli.gateway import register as register_gateway
from deskfleet.cli.serve import register as register_serve
from deskfleet.gateway.key_file import change_key_file, make_secret
from deskfleet.testing.upstreams import ScriptedServer

COMMAND = (sys.executable, "-c", "import sys; from deskfleet.cli import main; sys.exit(main())", "gateway")
START_S = 60.0


@dataclass
class Gateway:
    """A running command, what it said when it was ready, and what it says when it has ended."""

    process: asyncio.subprocess.Process
    ready: dict[str, Any]

    async def stop(self, number: int = signal.SIGINT) -> tuple[int | None, str]:
        self.process.send_signal(number)
        _, err = await asyncio.wait_for(self.process.communicate(), START_S)
        return self.process.returncode, err.decode()


async def start(*flags: str) -> asyncio.subprocess.Process:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DESKFLEET_")}
    return await asyncio.create_subprocess_exec(
        *COMMAND,
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=kept | {"COLUMNS": "80", "NO_COLOR": "1"},
    )


def flags_for(*servers: ScriptedServer, engine: str = "vllm") -> tuple[str, ...]:
    urls = ",".join(server.url for server in servers)
    return ("--upstream", urls, "--engine", engine, "--checkpoint", str(CHECKPOINT), "--port", "0", "--json")


@asynccontextmanager
async def gateway(*flags: str) -> AsyncIterator[Gateway]:
    process = await start(*flags)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        if not line:
            pytest.fail((await process.communicate())[1].decode())
        yield Gateway(process, json.loads(line))
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def run(*flags: str) -> tuple[int | None, dict[str, Any], str]:
    """The command to its end: exit code, the object on stdout, stderr."""
    process = await start(*flags)
    out, err = await asyncio.wait_for(process.communicate(), START_S)
    return process.returncode, json.loads(out) if out else {}, err.decode()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_it_serves_what_runs_elsewhere_and_stops_when_asked(engine: str) -> None:
    """Two replicas, one of them dead: it starts, says so, answers, and ends with 0; the engines go on."""
    async with server_of(engine, says("Hello there.")) as one, server_of(engine) as dead:
        await dead.stop()
        async with gateway(*flags_for(one, dead, engine=engine)) as running:
            ready = running.ready
            assert (ready["event"], ready["model"], ready["engine"]) == ("ready", "model", engine)
            assert (ready["max_model_len"], ready["exact_tokens"]) == (4096, True)
            assert [each["state"] for each in ready["upstreams"]] == ["closed", "open"]
            assert "nothing answers at" in ready["upstreams"][1]["reason"]
            async with AsyncOpenAI(base_url=f"{ready['url']}/v1", api_key="x", max_retries=0) as client:
                reply = await client.chat.completions.create(model="model", messages=HELLO, extra_body=CHAT)
            assert reply.choices[0].message.content == "Hello there."
            code, err = await running.stop(signal.SIGINT if engine == "vllm" else signal.SIGTERM)
            assert (code, err) == (0, "stopped\n")
        assert one.num_cancelled == 0


async def test_people_are_told_where_to_talk_to_and_what_is_missing() -> None:
    """Without --json, and for engines that send text alone."""
    async with server_of("vllm", way="text") as server:
        process = await start(*flags_for(server)[:-1])
        assert process.stderr is not None
        lines = [(await asyncio.wait_for(process.stderr.readline(), START_S)).decode() for _ in range(4)]
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
        assert out == b""
        assert "answers at http://127.0.0.1:" in lines[0]
        assert lines[1].strip() == f"vllm {server.url} answers"
        assert "send text, not tokens" in lines[2]
        assert "chat http://127.0.0.1:" in lines[3]


async def test_engines_that_still_load_are_waited_for() -> None:
    async with server_of("vllm") as server:
        await server.stop()
        process = await start(*flags_for(server), "--wait", "60")
        assert process.stderr is not None
        assert process.stdout is not None
        said = (await asyncio.wait_for(process.stderr.readline(), START_S)).decode()
        assert said.startswith(f"waiting for an engine: nothing answers at {server.url}")
        await server.start()
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), START_S))
        assert [each["state"] for each in ready["upstreams"]] == ["closed"]
        process.send_signal(signal.SIGINT)
        await process.communicate()
        assert process.returncode == 0


async def test_what_is_wrong_ends_it_with_the_code_for_it(tmp_path: Path) -> None:
    """3: no engine answers, 2: it was asked for something wrong; with a sentence and before the port opens."""
    key = tmp_path / "right"
    key.write_text("s3cret\n")
    async with server_of("vllm", key="s3cret") as server:
        good = flags_for(server)
        port = good.index("0")
        for flags, code, sentence in (
            (good, 3, "refused the gateway's key"),
            ((*good, "--upstream-key-file", str(tmp_path / "none")), 2, "cannot read --upstream-key-file"),
            (
                (*good, "--upstream-key-file", str(key), "--max-model-len", "9999"),
                2,
                "less than max_model_len",
            ),
            (("--upstream", "here,", *good[2:]), 2, "holds an empty address"),
            ((*good[:port], str(server.port), "--json"), 3, "is in use"),
        ):
            found, told, err = await run(*flags)
            assert (found, sentence in told["error"]["message"]) == (code, True), (flags, told)
            assert told["error"]["message"] in err
            assert "s3cret" not in err
        async with gateway(*good, "--upstream-key-file", str(key)) as running:
            assert running.ready["upstreams"][0]["state"] == "closed"


async def test_policies_and_keys_hold_in_front_of_other_engines(tmp_path: Path) -> None:
    """As with `deskfleet serve`: keys, a cap, a reload, the log, raw answers; nothing else is open."""
    secret = make_secret()
    change_key_file(tmp_path / "keys.toml", lambda old: old.with_key("alice", secret, datetime.now(UTC)))
    policies, log = tmp_path / "policies.toml", tmp_path / "access.log"
    policies.write_text('keys_file = "keys.toml"\n[completion_cap]\nmax_tokens = 3\n')
    more = ("--policies", str(policies), "--access-log", str(log), "--debug-answers", "5")
    async with (
        server_of("vllm", says("Hello to all of you.")) as server,
        gateway(*flags_for(server), *more) as running,
    ):
        url = running.ready["url"]
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0) as client:
            reply = await client.chat.completions.create(model="model", messages=HELLO, extra_body=CHAT)
            assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("length", 3)
            policies.write_text('keys_file = "keys.toml"\n[completion_cap]\nmax_tokens = 300\n')
            running.process.send_signal(signal.SIGHUP)
            assert running.process.stderr is not None
            line = await asyncio.wait_for(running.process.stderr.readline(), START_S)
            assert line == b"reload: settings and keys were read again\n"
            reply = await client.chat.completions.create(model="model", messages=HELLO, extra_body=CHAT)
            assert reply.choices[0].message.content == "Hello to all of you."
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/v1/models") as response:
                assert response.status == 401
            async with session.get(f"{url}/debug/answers", headers={"x-api-key": secret}) as response:
                answers = (await response.json())["answers"]
        assert [answer["finish_reason"] for answer in answers] == ["stop", "length"]
        assert (await running.stop())[0] == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [each["key"] for each in lines if each["path"] == "/v1/chat/completions"] == ["alice", "alice"]
    assert secret not in log.read_text()


def test_both_verbs_that_serve_take_the_same_flags_for_it() -> None:
    def flags(register: Callable[[typer.Typer], None]) -> dict[str, str]:
        app = typer.Typer()
        register(app)
        found: Any = typer.main.get_command(app)
        return {option: parameter.help for parameter in found.params for option in parameter.opts}

    serve, front = flags(register_serve), flags(register_gateway)
    shared = (
        "--policies",
        "--keys",
        "--access-log",
        "--traces",
        "--debug-answers",
        "--host",
        "--port",
        "--json",
    )
    assert {name: serve[name] for name in shared} == {name: front[name] for name in shared}
