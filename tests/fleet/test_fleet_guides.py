"""The guides of the fleet: every command in them exists, with the flags that it is given there."""

from __future__ import annotations

import logging
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from deskfleet.cli import main

GUIDES = sorted((Path(__file__).parents[2] / "docs/guides").glob("fleet*.md"))


def commands(text: str) -> list[list[str]]:
    """What is typed: in code by itself and within a line, up to a pipe or a redirection."""
    typed = re.findall(r"`(deskfleet [^`]+)`", text)
    typed += re.findall(r"^ {4}(?:\$ )?(deskfleet .+)$", text, flags=re.MULTILINE)
    parts = [part.strip() for line in typed for part in re.split(r"&&|>|\|", line)]
    return [shlex.split(part, comments=True) for part in parts if part.startswith("deskfleet ")]


def verb_of(words: list[str]) -> tuple[str, ...]:
    depth = {"bench": 2, "fleet": 3 if words[2:3] == ["config"] else 2}.get(words[1], 1)
    return tuple(words[1 : 1 + depth])


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_commands_and_flags_exist(guide: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handlers = logging.root.handlers[:]

    @cache
    def told(verb: tuple[str, ...]) -> str:
        assert main([*verb, "--help"]) == 0, verb
        return capfd.readouterr().out

    found = commands(guide.read_text(encoding="utf-8"))
    assert len(found) >= 8
    for words in found:
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        text = told(verb_of(words))
        assert [flag for flag in flags if not re.search(rf"{flag}\b", text)] == [], words
    logging.root.handlers[:] = handlers


def test_links_lead_somewhere() -> None:
    for guide in GUIDES:
        for target in re.findall(r"\]\(([^)#:]+)\)", guide.read_text(encoding="utf-8")):
            assert (guide.parent / target).exists(), (guide.name, target)
