"""The server that the tests of a module share, and the command called in this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_process import CHECKPOINT, Done, Server, serving

from deskfleet.cli import main


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Done]]:
    """Run `deskfleet ARGUMENTS` in this process: for the many ways of being called wrongly, which start nothing."""
    for name in [name for name in os.environ if name.startswith("DESKFLEET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(*arguments: str | Path) -> Done:
        code = main([*map(str, arguments)])
        return Done(code, *capfd.readouterr())

    yield run
    root.handlers[:], root.level = handlers, level


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server of two ranks for the tests of a module that only talk to it."""
    with serving(CHECKPOINT, "--tp", "2", "--no-thinking") as running:
        yield running
