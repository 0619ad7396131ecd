"""docs/guides/gateway.md: every command and example in it is run, in its order, against the real command.

Paths, addresses and the port are replaced by those of the test; everything else is as it stands there. Takes about ten
seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import typer
from chat_scripts import CHECKPOINT, EOS, HELLO, ids
from test_upstream_cli import COMMAND, START_S
from upstream_scripts import server_of

from deskfleet.cli.serve import register as register_serve
from deskfleet.endpoint import GenerateRequest
from deskfleet.testing.scripted import Script

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "gateway.md"
BLOCK = re.compile(r"^```(\w+) ([\w.-]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = {name: text for _, name, text in BLOCK.findall(GUIDE.read_text(encoding="utf-8"))}

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="the guide's commands use curl")


def model(request: GenerateRequest) -> Script:
    thinks = request.prompt_token_ids[-1] == ids("<think>")[0]
    return Script(ids(f"{'Hm.</think>' if thinks else ''}Hello there.{EOS}"))


class Shell:
    """Runs the guide's blocks in one directory, with `deskfleet` on the PATH."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = 0
        path = directory / "bin" / "deskfleet"
        path.parent.mkdir()
        path.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND[:-1])} "$@"\n')
        path.chmod(0o755)
        kept = {
            name: value
            for name, value in os.environ.items()
            if "API_KEY" not in name and "DESKFLEET" not in name
        }
        self.environment = kept | {"PATH": f"{path.parent}:{os.environ['PATH']}", "COLUMNS": "80"}

    async def run(self, name: str, after: str = "") -> str:
        """The output of one block, every command of which must succeed."""
        script = BLOCKS[name].replace("127.0.0.1:8000", f"127.0.0.1:{self.port}") + after
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-ec",
            script,
            cwd=self.directory,
            env=self.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), START_S)
        assert process.returncode == 0, (name, err.decode())
        return out.decode()


def objects(text: str) -> Iterator[Any]:
    """JSON objects that stand one after the other."""
    decoder, at = json.JSONDecoder(), 0
    while text[at:].strip():
        found, length = decoder.raw_decode(text[at:].lstrip())
        at = len(text) - len(text[at:].lstrip()) + length
        yield found


def test_the_flags_of_serve_exist() -> None:
    app = typer.Typer()
    register_serve(app)
    command: Any = typer.main.get_command(app)
    known = {option for parameter in command.params for option in parameter.opts}
    words = shlex.split(BLOCKS["serve"])
    assert words[:2] == ["deskfleet", "serve"]
    assert {word for word in words if word.startswith("--")} <= known


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", GUIDE.read_text(encoding="utf-8"))
    assert len(links) > 5
    assert [link for link in links if not (GUIDE.parent / link).exists()] == []


async def test_everything_in_the_guide(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    listed = await shell.run("keys")
    assert "alice" in listed
    (tmp_path / "policies.toml").write_text(BLOCKS["policies.toml"])
    async with (
        server_of("vllm", model, max_model_len=8192) as one,
        server_of("vllm", model, max_model_len=8192) as two,
    ):
        words = shlex.split(BLOCKS["gateway"])
        assert words[:2] == ["deskfleet", "gateway"]
        replaced = {
            "http://gpu1:8001,http://gpu2:8001": f"{one.url},{two.url}",
            "/models/DeepSeek-V4.1-Flash": str(CHECKPOINT),
            "8000": "0",
        }
        assert set(replaced) <= set(words)
        process = await asyncio.create_subprocess_exec(
            *COMMAND[:-1],
            *(replaced.get(word, word) for word in words[1:]),
            "--json",
            "--debug-answers",
            "50",
            cwd=tmp_path,
            env=shell.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), START_S)
            assert line, (await process.communicate())[1].decode()
            ready = json.loads(line)
            shell.port = int(ready["url"].rpartition(":")[2])
            await check_requests(shell)
            await check_agents(shell, ready["url"])
        finally:
            process.terminate()
            await asyncio.wait_for(process.communicate(), START_S)
        assert process.returncode == 0


async def check_requests(shell: Shell) -> None:
    reply, models = objects(await shell.run("ask"))
    assert reply["choices"][0]["message"]["content"] == "Hello there."
    assert [each["id"] for each in models["data"]] == ["deepseek-v4.1-flash"]
    headers = (await shell.run("thinking")).splitlines()
    told = [header.partition(": ")[2].strip() for header in headers]
    assert len(told) == 5
    assert told[0].startswith("on")
    assert "37" in told[1]
    assert told[2].startswith("off")
    assert "2000" in told[4]
    health = await shell.run("health")
    live, now, detail = list(objects(health[: health.index("# HELP")]))
    assert live == {"status": "live"}
    assert now["status"] in ("ready", "busy")
    assert [each["state"] for each in detail["replicas"]] == ["closed", "closed"]
    assert "vllm:prompt_tokens_total" in health
    (debug,) = objects(await shell.run("debug"))
    assert debug["answers"][0]["text"].endswith(f"Hello there.{EOS}")


async def check_agents(shell: Shell, url: str) -> None:
    """The variables reach unmodified clients; a provider's file leads to the route it says."""
    show = 'python3 -c "import json, os; print(json.dumps(dict(os.environ)))"'.replace(
        "python3", shlex.quote(sys.executable)
    )
    for_openai = json.loads(await shell.run("openai-environment", show))
    client = openai.OpenAI(
        base_url=for_openai["OPENAI_BASE_URL"], api_key=for_openai["OPENAI_API_KEY"], max_retries=0
    )
    for_anthropic = json.loads(await shell.run("anthropic-environment", show))
    other = anthropic.Anthropic(
        base_url=for_anthropic["ANTHROPIC_BASE_URL"],
        auth_token=for_anthropic["ANTHROPIC_AUTH_TOKEN"],
        max_retries=0,
    )
    provider = tomllib.loads(BLOCKS["provider"])
    settings = provider["model_providers"][provider["model_provider"]]
    assert settings["base_url"].replace(":8000", f":{shell.port}") == f"{url}/v1"
    assert settings["wire_api"] == "responses"
    with client, other:
        reply = await asyncio.to_thread(
            client.responses.create, model=provider["model"], input="Hello", store=False
        )
        assert reply.output_text == "Hello there."
        for name in ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"):
            message = await asyncio.to_thread(
                other.messages.create, model=for_anthropic[name], messages=HELLO, max_tokens=1000
            )
            assert message.content[-1].text == "Hello there."  # type: ignore[union-attr]
        with pytest.raises(anthropic.NotFoundError, match=r"deepseek-v4\.1-flash"):
            await asyncio.to_thread(
                other.messages.create, model="claude-of-some-kind", messages=HELLO, max_tokens=9
            )
