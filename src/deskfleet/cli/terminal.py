"""What the verbs share on a terminal: data on stdout, talk on stderr, errors, the log.

rich is imported where it is used: most commands print a line or two and do not need it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

from deskfleet.errors import ConfigError, DeskfleetError
from deskfleet.gateway.redaction import KeyRedaction

if TYPE_CHECKING:
    from rich.console import Console


def print_json(value: object) -> None:
    """Print `value` as one line of JSON on stdout, at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def say(text: str = "") -> None:
    """Print a line of talk on stderr, never wrapped or coloured."""
    print(text, file=sys.stderr, flush=True)


def data_console() -> Console:
    """A console for tables on stdout."""
    from rich.console import Console

    return Console(highlight=False, markup=False)


def talk_console() -> Console:
    """A console for progress and dimmed text on stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False)


def own_command() -> str:
    """Return how this program can be called again from where the user is, e.g. `.venv/bin/deskfleet`."""
    path = Path(sys.argv[0])
    found = shutil.which("deskfleet")
    if path.name != "deskfleet" or (found is not None and Path(found).samefile(path)):
        return "deskfleet"
    return os.path.relpath(path)


def report_error(error: DeskfleetError, *, as_json: bool) -> None:
    """Say what went wrong on stderr, the hint on a line of its own; with `as_json` also on stdout."""
    say(f"error: {error.message}")
    if error.hint:
        say(f"hint: {error.hint}")
    if as_json:
        kind = type(error).__name__
        print_json(
            {
                "error": {
                    "type": kind,
                    "message": error.message,
                    "hint": error.hint,
                    "exit_code": error.exit_code,
                }
            }
        )


def configure_log(level: str) -> None:
    """Send the log to stderr. `quiet` lets through only failures that nobody foresaw: those with a trace.

    Foreseen ones are told to whoever asked, and by the command's own last line.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    if level == "quiet":
        handler.addFilter(lambda record: record.levelno >= logging.ERROR and bool(record.exc_info))
    handler.addFilter(KeyRedaction())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel("ERROR" if level == "quiet" else level.upper())


def printable(text: str) -> str:
    """Return `text` without control characters other than line ends and tabs: a model must not steer a terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def parse_counts(text: str, flag: str) -> tuple[int, ...]:
    """Return the whole numbers in `text`, e.g. `1,4`. Raises ConfigError naming the flag."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}, not whole numbers with commas", hint="e.g. 1,4") from error
    return counts


__all__ = [
    "configure_log",
    "data_console",
    "own_command",
    "parse_counts",
    "print_json",
    "printable",
    "report_error",
    "say",
    "talk_console",
]
