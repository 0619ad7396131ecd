"""The real command in real processes. A server is found by the object it prints, and must leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

CHECKPOINT = Path(__file__).parents[1] / "golden" / "v41-tiny" / "model"
COMMAND = (sys.executable, "-c", "import sys; from deskfleet.cli import main; sys.exit(main())")
START_S = 90.0  # generous: other tests may be loading models at the same time
STOP_S = 30.0


def environment(**changes: str) -> dict[str, str]:
    """The environment of a user with an 80-column terminal and no settings of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DESKFLEET_")}
    return kept | {"COLUMNS": "80", "NO_COLOR": "1"} | changes


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def object(self) -> Any:
        """The one JSON object on stdout."""
        return json.loads(self.out)


def deskfleet(*arguments: str | Path, stdin: str | None = None, **changes: str) -> Done:
    """Run `deskfleet ARGUMENTS` to its end."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        env=environment(**changes),
        timeout=START_S,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@dataclass
class Server:
    """`deskfleet serve --json`, ready."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]
    processes: list[psutil.Process] = field(default_factory=list)

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def rank(self, number: int) -> psutil.Process:
        return psutil.Process(self.ready["ranks"][number]["pid"])

    def end(self, number: int | None = None) -> Done:
        """Send a signal if given, wait for the end, and return what was said after the ready object."""
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=STOP_S)
        return Done(self.process.returncode, out, err)

    def survivors(self) -> list[psutil.Process]:
        """Which of the server's processes are still there, a moment after its end."""
        _, alive = psutil.wait_procs(self.processes, timeout=3)
        return alive


@contextmanager
def serving(checkpoint: Path, *flags: str, stderr: IO[str] | int = subprocess.PIPE) -> Iterator[Server]:
    """Start `deskfleet serve` on a free port and wait until it is ready; end it if the test has not."""
    process = subprocess.Popen(
        [*COMMAND, "serve", str(checkpoint), "--port", "0", "--json", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            pytest.fail(f"serve ended with {process.wait()} before it was ready: {process.communicate()[1]}")
        own = psutil.Process(process.pid)
        yield Server(process, json.loads(line), [own, *own.children(recursive=True)])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def wait_until(holds: Callable[[], bool], *, timeout_s: float = START_S) -> None:
    """Wait until `holds()`, or fail."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.05)
