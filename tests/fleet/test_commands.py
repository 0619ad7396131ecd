"""Docker's command lines, given to the real docker and to a real shell: what arrives is what was meant."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import pytest
from launch_cases import CASES

from deskfleet.errors import ConfigError
from deskfleet.fleet.commands import (
    dry_run_text,
    fill_secrets,
    list_command,
    logs_command,
    parse_listed,
    remove_command,
    start_command,
    stop_command,
)
from deskfleet.fleet.launch import FORMAT, Container, LaunchSpec, Mount, RankLaunch

AWKWARD = {
    "SPACES": " two  spaces ",
    "QUOTES": """it's "so" `called`""",
    "DOLLAR": "$HOME ${PATH} $(id) $$",
    "BACKSLASH": r"C:\new\table",
    "LINES": "one\ntwo",
    "SIGNS": "a=b;c|d&e>f<g*h?i#j!k~l{m}n[o]",
    "UNICODE": "Größe ☃",
    "EMPTY": "",
}

RANK = RankLaunch(
    rank=1,
    node="spark b",
    container="deskfleet-desk-1",
    image="example.org/engine@sha256:" + "ab" * 32,
    argv=("vllm", "serve", "/model dir", "--json", '{"a":"$b \'c\'"}', "--empty", "", "--last=x y"),
    env={**AWKWARD, "API_KEY": "Bearer ${secret:engine}"},
    box=Container(
        mounts=(
            Mount(source='/srv/with, comma and "quotes"', target="/model dir"),
            Mount(source="/srv/colon:here", target="/cache", read_only=False),
        ),
        devices=("/dev/infiniband",),
        has_gpus=True,
        memory_bytes=8 << 30,
        labels={"deskfleet.fleet": "desk", "deskfleet.rank": "1"},
    ),
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """A Docker Engine that keeps what it is asked to create."""
    created: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            return

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            data = b"OK"
            status = 200
            if self.path.endswith("/start"):
                status, data = 204, b""
            elif "/containers/create" in self.path:
                created.append({"query": self.path.partition("?")[2], **json.loads(body)})
                status, data = 201, b'{"Id":"abc","Warnings":[]}'
            self.send_response(status)
            self.send_header("Api-Version", "1.47")
            self.send_header("Ostype", "linux")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_HEAD = do_POST = answer

        def address_string(self) -> str:
            return "unix"

    path = tmp_path / "docker.sock"
    server = ThreadingUnixStreamServer(str(path), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield path, created
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(shutil.which("docker") is None, reason="the docker command is not installed")
def test_the_real_docker_asks_for_exactly_this(
    engine: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    socket, created = engine
    command = start_command(RANK)
    assert "s3cret" not in command.text
    done = subprocess.run(
        command.argv,
        input=fill_secrets(command.stdin, {"engine": 's3cret $x "y"'}),
        env={"DOCKER_HOST": f"unix://{socket}", "PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "abc\n"), done.stderr
    [asked] = created
    assert asked["query"] == "name=deskfleet-desk-1"
    assert asked["Image"] == RANK.image
    assert [*asked["Entrypoint"], *asked["Cmd"]] == list(RANK.argv)
    assert sorted(asked["Env"]) == sorted(
        [*(f"{name}={value}" for name, value in AWKWARD.items()), 'API_KEY=Bearer s3cret $x "y"']
    )
    assert asked["Labels"] == RANK.box.labels
    host = asked["HostConfig"]
    assert [(m["Source"], m["Target"], m.get("ReadOnly", False)) for m in host["Mounts"]] == [
        (mount.source, mount.target, mount.read_only) for mount in RANK.box.mounts
    ]
    assert (host["NetworkMode"], host["IpcMode"], host["RestartPolicy"]["Name"]) == ("host", "host", "no")
    assert (host["Memory"], host["MemorySwap"], host["OomScoreAdj"]) == (8 << 30, 8 << 30, 500)
    assert {limit["Name"]: limit["Hard"] for limit in host["Ulimits"]}["memlock"] == -1
    assert host["CapAdd"] == ["CAP_IPC_LOCK"]
    assert [request["Capabilities"] for request in host["DeviceRequests"]] == [[["gpu"]]]
    assert [device["PathOnHost"] for device in host["Devices"]] == ["/dev/infiniband"]
    assert host["LogConfig"] == {"Type": "json-file", "Config": {"max-file": "5", "max-size": "100m"}}
    assert asked["StopTimeout"] == 10


def test_a_dry_run_pasted_into_a_shell_starts_the_same(tmp_path: Path) -> None:
    """Each word is quoted once; the shell's own signs do nothing."""
    seen = tmp_path / "seen"
    seen.mkdir()
    fake = tmp_path / "docker"
    fake.write_text(
        '#!/bin/sh\nn=$(ls "$SEEN" | wc -l)\nfor word; do printf "%s\\0" "$word"; done >"$SEEN/$n"\n'
    )
    fake.chmod(0o755)
    launch = LaunchSpec(
        format=FORMAT,
        fleet="desk",
        launch_id="1",
        engine="vllm",
        model="m",
        revision=None,
        max_model_len=1,
        endpoint="",
        ranks=(RANK,),
        milestones=(),
        expected=(),
        warnings=("$(touch pwned) `touch pwned`",),
    )
    for case in (launch, CASES["2-nodes-exl3"].render()):
        for old in seen.iterdir():
            old.unlink()
        subprocess.run(
            ["sh", "-eu"],
            input=dry_run_text(case),
            text=True,
            check=True,
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SEEN": str(seen)},
            timeout=60,
        )
        words = [(seen / str(n)).read_bytes().decode().split("\0")[:-1] for n in range(len(case.ranks))]
        assert words == [list(start_command(rank).argv[1:]) for rank in case.start_order]
    assert not (tmp_path / "pwned").exists()
    assert "# on standard input" in dry_run_text(launch)
    assert "#   API_KEY=Bearer ${secret:engine}" in dry_run_text(launch)


def test_secrets_are_filled_in_or_refused_without_being_shown() -> None:
    assert fill_secrets("A=${secret:a}${secret:a}\n", {"a": "$1\\g<0>"}) == "A=$1\\g<0>$1\\g<0>\n"
    assert fill_secrets("A=1\n", {}) == "A=1\n"
    with pytest.raises(ConfigError, match="the secret a has no value"):
        fill_secrets("A=${secret:a}", {"b": "x"})
    with pytest.raises(ConfigError, match="several lines") as refused:
        fill_secrets("A=${secret:a}", {"a": "hidden\nB=2"})
    assert "hidden" not in str(refused.value)


def test_a_secret_beside_a_second_line_is_refused() -> None:
    """In a file of variables that line would be a variable of its own."""
    rank = RankLaunch(
        rank=0,
        node="a",
        container="c",
        image="i",
        argv=("x",),
        env={"KEY": "${secret:a}\nLD_PRELOAD=/x"},
        box=Container(),
    )
    with pytest.raises(ConfigError, match="KEY holds a secret and has several lines"):
        start_command(rank)


def test_only_our_containers_are_listed_and_named() -> None:
    words = list_command("desk").argv
    assert "label=deskfleet.fleet=desk" in words
    found = parse_listed(
        "abc\tdeskfleet-desk-1\trunning\t20261130-1\t1\nabd\tdeskfleet-desk-0\texited\told\t0\n"
    )
    assert [(each.id, each.state, each.launch_id, each.rank) for each in found] == [
        ("abc", "running", "20261130-1", 1),
        ("abd", "exited", "old", 0),
    ]
    with pytest.raises(ConfigError, match="no container of a fleet"):
        parse_listed("permission denied\n")
    assert stop_command(["abc"]).argv[-1] == "abc"
    assert remove_command(["abc", "abd"]).argv[-2:] == ("abc", "abd")
    assert logs_command("c", follow=True, tail=0).argv == (
        *("docker", "logs", "--timestamps", "--follow", "--tail", "0", "c"),
    )
