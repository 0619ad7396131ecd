"""What a rung of the ladder says. Owns the words found, clear and unknown, and how they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deskfleet.diagnose.situation import Situation

Symptom = Literal["garbled", "slow", "hanging", "memory"]
Verdict = Literal["found", "clear", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rung came to. `next_command` is what to run now, for a verdict of found or unknown."""

    rung: str
    verdict: Verdict
    text: str
    next_command: str | None = None


def found(name: str, text: str, command: str) -> Finding:
    """The rung explains it."""
    return Finding(name, "found", text, command)


def clear(name: str, text: str) -> Finding:
    """The rung was looked at, and it is not this."""
    return Finding(name, "clear", text)


def unknown(name: str, text: str, command: str) -> Finding:
    """The rung cannot know; `command` would make it known."""
    return Finding(name, "unknown", text, command)


def logs_of(situation: Situation) -> str:
    """Return all logs as one text."""
    return "\n".join(text for _, text in situation.logs)


def url_of(situation: Situation) -> str:
    """Return the server's address, for commands."""
    return situation.url or "URL"


def shown(text: str) -> str:
    """Return an answer as it is quoted in a line."""
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else line[:57] + "...")


__all__ = ["Finding", "Symptom", "Verdict", "clear", "found", "logs_of", "shown", "unknown", "url_of"]
