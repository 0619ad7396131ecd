"""What the command says of itself, and of mistakes in how it is called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields

import pytest
from cli_process import CHECKPOINT, COMMAND, Done, deskfleet, environment

import deskfleet as package
from deskfleet.cli.app import VERBS
from deskfleet.testing.tiny import TinySizes

MODULES_OF_HELP = {"deskfleet", "typer", "annotated_doc", "shellingham"}
"""All that `deskfleet --help` may import from outside the standard library."""

IMPORTED = """
import sys
from deskfleet.cli import main
main(["--help"])
files = {name.partition(".")[0]: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
print(*(name for name, file in files.items() if "site-packages" in file or "deskfleet" in file), file=sys.stderr)
"""


def test_every_verb_is_listed_with_its_own_first_line() -> None:
    listing = deskfleet("--help")
    assert listing.code == 0
    assert listing.err == ""
    for verb, summary in VERBS.items():
        assert f"  {verb} " in listing.out
        assert summary in listing.out


@pytest.mark.parametrize("verb", [*VERBS, "bench engine"])
def test_help_of_a_verb(call: Callable[..., Done], verb: str) -> None:
    done = call(*verb.split(), "--help")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith(f"Usage: deskfleet {verb} ")
    assert lines[2].strip() == VERBS.get(verb, "Decode speed of the engine, by ranks and batch.")
    assert max(map(len, lines)) <= 80
    assert verb in ("bench", "keys") or "--json" in done.out


def test_without_arguments_there_is_help() -> None:
    assert deskfleet().out == deskfleet("--help").out


def test_help_imports_nothing_of_weight() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, env=environment(), check=True
    )
    # How the packages are installed for development is not what a command imports.
    imported = {
        name for name in done.stderr.split() if not name.startswith(("__editable__", "_editable_skbc_"))
    }
    assert imported <= MODULES_OF_HELP | {"_virtualenv", "_distutils_hack", "__main__"}
    assert {"deskfleet", "typer"} <= imported


def test_help_is_fast() -> None:
    times = []
    for _ in range(3):
        before = os.times()
        assert deskfleet("--help").code == 0
        after = os.times()
        times.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
    assert min(times) < 0.5, f"CPU seconds of deskfleet --help: {times}"


def test_version() -> None:
    assert deskfleet("--version").out == f"deskfleet {package.__version__}\n"


def test_make_tiny_has_a_flag_for_every_size(
    call: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = call("make-tiny", "--help").out
    for size in fields(TinySizes):
        assert f"--{size.name.replace('_', '-')} " in text
        if isinstance(size.default, int):
            line = text[text.index(f"--{size.name.replace('_', '-')} ") :].partition("\n  --")[0]
            assert f"[default: {size.default}]" in line


MISTAKES = [
    ((), "serve", "missing argument 'CHECKPOINT'", "see deskfleet serve --help"),
    (("x", "--prt", "1"), "serve", "no such option: --prt", "did you mean --port?"),
    (
        ("x", "--max-model-le", "9"),
        "serve",
        "no such option: --max-model-le",
        "did you mean --max-model-len?",
    ),
    (("x", "--js"), "inspect", "no such option: --js", "did you mean --json?"),
    (("x", "--tp", "two"), "inspect", "invalid value for '--tp'", "see deskfleet inspect --help"),
    (("x",), "serv", "no such command 'serv'", "did you mean 'serve'?"),
    (("--chunk", "3"), "score", "missing argument 'CHECKPOINT'", "see deskfleet score --help"),
]


@pytest.mark.parametrize(("arguments", "verb", "message", "hint"), MISTAKES)
def test_a_mistake_on_the_command_line(
    call: Callable[..., Done], arguments: tuple[str, ...], verb: str, message: str, hint: str
) -> None:
    done = call(verb, *arguments)
    said = done.err.splitlines()
    assert (done.code, done.out) == (2, "")
    assert said[0].startswith(f"error: {message}")
    assert said[1:] == [f"hint: {hint}"]


def test_an_error_is_an_object_with_json() -> None:
    done = deskfleet("serve", "/nowhere/at/all", "--json")
    assert done.code == 3
    assert done.object["error"] == {
        "type": "CheckpointError",
        "message": "no such directory: /nowhere/at/all",
        "hint": "give the directory that holds config.json",
        "exit_code": 3,
    }
    assert done.err.startswith("error: no such directory: /nowhere/at/all\n")


@pytest.mark.parametrize(
    ("name", "value", "message", "hint"),
    [
        ("DESKFLEET_LOG_LEVL", "info", "there is no environment variable DESKFLEET_LOG_LEVL", "LOG_LEVEL?"),
        ("DESKFLEET_LOG_LEVEL", "loud", "DESKFLEET_LOG_LEVEL is 'loud'", "use quiet, error, warning"),
    ],
)
def test_a_mistake_in_the_environment(
    call: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    message: str,
    hint: str,
) -> None:
    monkeypatch.setenv(name, value)
    done = call("inspect", CHECKPOINT)
    said = done.err.splitlines()
    assert done.code == 2
    assert said[0].startswith(f"error: {message}")
    assert said[1].startswith("hint: ")
    assert hint in said[1]


def test_output_that_nobody_reads_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [*COMMAND, "inspect", str(CHECKPOINT), "--json"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_json_output_is_one_line(call: Callable[..., Done]) -> None:
    done = call("inspect", CHECKPOINT, "--json")
    assert len(done.out.splitlines()) == 1
    json.loads(done.out)
