"""`deskfleet serve --policies FILE`: keys, SIGHUP, and an end that lets streams finish. Takes about 20 seconds."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from cli_process import CHECKPOINT, Done, deskfleet, serving, wait_until

from deskfleet.cli.serving import is_loopback, open_policies, warn_if_open

MODEL = CHECKPOINT.name


def make_key(directory: Path, name: str) -> str:
    done = deskfleet("keys", "new", name, "--file", directory / "keys.toml")
    assert done.code == 0
    return done.out.strip()


def client_of(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], **{"max_tokens": 2, **fields}
    )


def test_keys_reload_and_end(tmp_path: Path) -> None:
    alice, bob = make_key(tmp_path, "alice"), make_key(tmp_path, "bob")
    path, log = tmp_path / "policies.toml", tmp_path / "log"
    path.write_text('keys_file = "keys.toml"\n[completion_cap]\nmax_tokens = 3\n')
    with (
        log.open("w") as stderr,
        serving(CHECKPOINT, "--policies", str(path), "--no-thinking", stderr=stderr) as server,
    ):
        with client_of(server.url, alice) as first, client_of(server.url, bob) as second:
            assert ask(first, max_tokens=900, extra_body={"ignore_eos": True}).usage.completion_tokens == 3
            with client_of(server.url, "wrong") as wrong, pytest.raises(openai.AuthenticationError):
                ask(wrong)

            assert deskfleet("keys", "revoke", "alice", "--file", tmp_path / "keys.toml").code == 0
            path.write_text(
                'keys_file = "keys.toml"\n[completion_cap]\nmax_tokens = 800\n[admission]\ndrain_s = 60\n'
            )
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "settings and keys were read again" in log.read_text())
            with pytest.raises(openai.AuthenticationError):
                ask(first)
            path.write_text("[completion_cap]\nmax_tokns = 1\n")
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "settings are as they were" in log.read_text())
            assert (
                "policies.toml:2: completion_cap.max_tokns: there is no such setting (did you mean"
                in log.read_text()
            )

            stream = ask(second, max_tokens=60, stream=True, extra_body={"ignore_eos": True})
            chunks = [next(stream)]
            refusals: list[Exception] = []

            def ask_while_stopping() -> None:
                time.sleep(0.3)
                try:
                    ask(second)
                except openai.APIError as error:
                    refusals.append(error)

            asking = threading.Thread(target=ask_while_stopping)
            server.process.send_signal(signal.SIGTERM)
            asking.start()
            chunks += list(stream)
            asking.join()
            assert chunks[-1].choices[0].finish_reason == "length", "the stream was served to its end"
        done = server.end()
        assert done.code == 0
        assert server.survivors() == []
    # The stream may have been over before the second request came.
    assert all(
        "the server is stopping" in str(error) or isinstance(error, openai.APIConnectionError)
        for error in refusals
    )
    for secret in (alice, bob):
        assert secret not in log.read_text()


def test_a_second_signal_ends_what_runs(tmp_path: Path) -> None:
    with serving(CHECKPOINT, "--no-thinking") as server, client_of(server.url, "none") as client:
        stream = ask(client, max_tokens=1000, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        start = time.monotonic()
        done = server.end(signal.SIGINT)
        assert time.monotonic() - start < 15
        assert (done.code, server.survivors()) == (0, [])


def test_wrong_files_are_refused_before_anything_is_loaded(tmp_path: Path, call: Callable[..., Done]) -> None:
    path = tmp_path / "policies.toml"
    path.write_text('[loop_abort]\nsame_line = 9\n[keys."alice".share]\nweight = 2\n')
    done = call("serve", CHECKPOINT, "--port", "0", "--policies", path, "--json")
    assert done.code == 2
    assert done.err == (
        f"error: {path}:2: loop_abort.same_line: there is no such setting\nhint: did you mean 'same_lines'?\n"
    )
    assert json.loads(done.out)["error"]["type"] == "ConfigError"
    path.write_text('[keys."alice".share]\nweight = 2\n')
    done = call("serve", CHECKPOINT, "--port", "0", "--policies", path)
    assert (done.code, done.err) == (
        2,
        f"error: {path}:1: keys.alice: there is no key 'alice'\nhint: there are none\n",
    )
    done = call("serve", CHECKPOINT, "--port", "0", "--keys", tmp_path / "none.toml")
    assert done.code == 2
    assert "deskfleet keys new NAME --file" in done.err


def test_a_server_that_is_open_to_others_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_key(tmp_path, "alice")
    keys = open_policies(None, tmp_path / "keys.toml", model_id="m")
    warn_if_open("0.0.0.0", keys)
    warn_if_open("127.0.0.1", None)
    assert capsys.readouterr().err == ""
    warn_if_open("0.0.0.0", open_policies(None, None, model_id="m"))
    assert "whoever reaches 0.0.0.0 may use this server" in capsys.readouterr().err
    hosts = {
        "127.0.0.1": True,
        "localhost": True,
        "::1": True,
        "0.0.0.0": False,
        "::": False,
        "spark-1": False,
    }
    assert {host: is_loopback(host) for host in hosts} == hosts
