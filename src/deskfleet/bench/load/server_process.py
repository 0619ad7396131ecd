"""A server of our own for as long as it is measured, in a process of its own: what measures must not share its time.

Owns the process's life. Is told the command, and knows what `deskfleet serve --json` prints when the port is open.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deskfleet.errors import EngineError

_STOP_S = 30.0


@contextmanager
def running_server(command: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run `command` until the block is left; yields the object it prints once its port is open.

    What it says on stderr goes where ours does. Raises EngineError when it ends before that.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    stdout = process.stdout
    try:
        line = "" if stdout is None else stdout.readline()
        ready = _ready(line)
        if ready is None:
            raise EngineError(
                f"the server ended with exit code {process.wait(_STOP_S)} before it was ready",
                hint="its own error stands above",
            )
        yield ready
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if stdout is not None:
            stdout.close()


def _ready(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("url"), str) else None


__all__ = ["running_server"]
