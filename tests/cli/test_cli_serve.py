"""`deskfleet serve` as a process: it answers, it refuses early, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import psutil
import pytest
from cli_process import CHECKPOINT, COMMAND, STOP_S, Done, Server, deskfleet, environment, serving, wait_until

MODEL = CHECKPOINT.name


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


def test_the_ready_object(server: Server) -> None:
    ready = server.ready
    assert ready["event"] == "ready"
    assert ready["model"] == MODEL
    assert ready["max_model_len"] == 1024
    assert ready["tp_size"] == 2
    assert [rank["rank"] for rank in ready["ranks"]] == [0, 1]
    for rank in ready["ranks"]:
        assert psutil.pid_exists(rank["pid"])
        assert 4_000_000 < rank["weight_bytes"] < 9_577_448
        assert rank["cache_bytes"] > 0
        assert rank["load_s"] > 0


def test_it_answers_the_openai_client(client: openai.OpenAI) -> None:
    answers = [
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=6, temperature=0
        )
        for _ in range(2)
    ]
    assert answers[0].usage is not None
    assert answers[0].usage.completion_tokens <= 6
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert not hasattr(answers[0].choices[0].message, "reasoning_content")


def test_chat_once(server: Server) -> None:
    arguments = ("chat", server.url, "--once", "hello", "--max-tokens", "5", "--temperature", "0")
    in_words, as_json = deskfleet(*arguments), deskfleet(*arguments, "--json")
    assert (in_words.code, in_words.err) == (0, "")
    assert as_json.object["content"].strip() == in_words.out.strip()
    assert as_json.object["completion_tokens"] <= 5
    assert as_json.object["prompt_tokens"] > 1


def test_chat_remembers_and_forgets(server: Server) -> None:
    turns = "hello\n\nhello\n/reset\nhello\n/help\n/exit\nnever asked\n"
    done = deskfleet("chat", server.url, "--json", "--max-tokens", "4", "--temperature", "0", stdin=turns)
    answers = [json.loads(line) for line in done.out.splitlines()]
    first, second, afresh = (answer["prompt_tokens"] for answer in answers)
    assert done.code == 0
    assert second > first == afresh
    assert done.err.splitlines() == ["forgotten", "there is no /help; there are /reset and /exit"]


def test_chat_shows_reasoning_apart_from_the_answer(server: Server) -> None:
    done = deskfleet(
        "chat", server.url, "--thinking", "--max-tokens", "8", "--temperature", "0", "--once", "hello"
    )
    assert done.code == 0
    assert done.out.strip() == ""  # eight tokens are not enough to finish thinking
    assert done.err.strip() != ""


def test_chat_reports_a_refused_request(server: Server) -> None:
    done = deskfleet("chat", server.url, stdin="x" * 9000 + "\nnever asked\n")
    assert (done.code, done.out) == (2, "")
    assert re.match(r"error: .*1024", done.err)


def test_chat_without_a_server() -> None:
    done = deskfleet("chat", "http://127.0.0.1:9", "--once", "hello")
    assert done.code == 3
    assert done.err.splitlines() == [
        "error: no server answers at http://127.0.0.1:9",
        "hint: start one with: deskfleet serve CHECKPOINT",
    ]


def test_chat_serves_a_checkpoint_for_itself() -> None:
    done = deskfleet("chat", CHECKPOINT, "--no-thinking", "--max-tokens", "3", "--once", "hello", "--json")
    assert done.code == 0
    assert 1 <= done.object["completion_tokens"] <= 3
    assert re.fullmatch(r"rank 0: \S+ MiB of weights in \S+ s, \S+ MiB of caches, pid \d+\n", done.err)


def test_interrupt_on_a_terminal() -> None:
    """Bars while loading, without colour when NO_COLOR is set; Ctrl-C stops everything, exit code 0."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "serve", str(CHECKPOINT), "--port", "0", "--tp", "2"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment(TERM="xterm-256color"),
    )
    os.close(theirs)
    seen = _Reader(ours)
    wait_until(lambda: "deskfleet chat http" in seen.text or process.poll() is not None)
    own = psutil.Process(process.pid)
    processes = [own, *own.children(recursive=True)]
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=STOP_S)
    seen.join()
    text = seen.text.replace("\r", "")
    assert (process.returncode, out) == (0, b"")
    assert len(processes) >= 3
    assert psutil.wait_procs(processes, timeout=3)[1] == []
    assert re.search(r"rank 1 .* of \S+ MiB .*MiB/s", text)
    assert re.search(r"model answers at http://127.0.0.1:\d+/v1 \(1,024 tokens\)", text)
    assert text.endswith("stopped\n")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)


class _Reader:
    """Everything that comes out of a file descriptor, read beside the test."""

    def __init__(self, descriptor: int) -> None:
        self.text = ""
        self._descriptor = descriptor
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._descriptor, 65536):
                self.text += data.decode()
        except OSError:
            pass  # how a pseudo-terminal says that its other end is closed
        os.close(self._descriptor)

    def join(self) -> None:
        self._thread.join(STOP_S)


def test_a_killed_rank_ends_everything() -> None:
    with serving(CHECKPOINT, "--tp", "2", "--no-thinking") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=900,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(iter(stream))
            server.rank(1).send_signal(signal.SIGKILL)
            with pytest.raises(openai.APIError, match="rank 1 was killed by SIGKILL"):
                list(stream)
        done = server.end()
        assert done.code == 3
        said = [line for line in done.err.splitlines() if not line.startswith("rank ")]
        assert said == ["error: rank 1 was killed by SIGKILL; the group was stopped"]
        assert done.object["error"]["type"] == "RankDied"
        assert server.survivors() == []


def test_terminate_while_loading() -> None:
    process = subprocess.Popen(
        [*COMMAND, "serve", str(CHECKPOINT), "--port", "0", "--tp", "2"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    own = psutil.Process(process.pid)
    wait_until(lambda: len(own.children()) == 2)
    processes = [own, *own.children()]
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=STOP_S)
    assert (process.returncode, out, err) == (0, "", "stopped\n")
    assert psutil.wait_procs(processes, timeout=3)[1] == []


def test_a_taken_port_is_refused_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = deskfleet("serve", CHECKPOINT, "--port", str(port))
    assert (done.code, done.out) == (3, "")
    assert done.err.splitlines() == [
        f"error: port {port} of 127.0.0.1 is in use",
        "hint: choose another port: --port, or port under [gateway] in fleet.toml; 0 takes any free one",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp", "0"), "tp_size"),
        (("--max-model-len", "1025"), "max_model_len 1025"),
        (("--host", "no.such.host.invalid"), "cannot listen on host 'no.such.host.invalid'"),
        (("--port", "70000"), "port 70000"),
        (("--max-num-seqs", "0"), "invalid value for '--max-num-seqs'"),
    ],
)
def test_bad_values_are_refused(call: Callable[..., Done], flags: tuple[str, ...], message: str) -> None:
    done = call("serve", CHECKPOINT, *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {message}")


def test_wrong_answers_never_open_the_port(tmp_path: Path) -> None:
    """A checkpoint that makes NaNs loads perfectly well; the launch check is what stops it."""
    broken = tmp_path / "broken"
    shutil.copytree(CHECKPOINT, broken)
    path = broken / "model-00013-of-00018.safetensors"
    _fill_with_nans(path, "norm.weight")
    done = deskfleet("serve", broken, "--port", "0")
    said = [line for line in done.err.splitlines() if not line.startswith("rank ")]
    assert (done.code, done.out) == (3, "")
    assert len(said) == 1
    assert "not finite" in said[0]


def _fill_with_nans(path: Path, name: str) -> None:
    """Set every bit of one bfloat16 tensor in a safetensors file."""
    with path.open("r+b") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(header_bytes))[name]["data_offsets"]
        file.seek(8 + header_bytes + begin)
        file.write(b"\xff" * (end - begin))
