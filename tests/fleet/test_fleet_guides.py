"""The guides of the fleet: every command in them exists, with the flags that it is given there, and the walk in them
is what happens when it is walked."""

from __future__ import annotations

import json
import logging
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from bed import Bed, EngineImage, Node, bed
from bed.image import VENV, mounts
from faulty_origin import REVISION, FaultyOrigin

from deskfleet.cli import main

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs/guides").glob("fleet*.md"))
WALK = "### The walk\n"
MODEL = "/srv/pocket"


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


def readme_verbs() -> set[str]:
    """The verbs of README's first commands for a fleet."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return set(re.findall(r"^deskfleet fleet ([a-z]+)", text, flags=re.MULTILINE))


def told_walk() -> list[tuple[str, list[str]]]:
    """Each command of the walk in the guide, with the lines below it."""
    text = (
        (ROOT / "docs/guides/fleet.md").read_text(encoding="utf-8").partition(WALK)[2].partition("\n## ")[0]
    )
    told: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("    $ "):
            told.append((line.removeprefix("    $ "), []))
        elif line.startswith("    ") and told and line.strip() != "...":
            told[-1][1].append(line)
    return told


def without_what_varies(line: str) -> str:
    """A line of output without numbers, names of launches, units and the width of columns."""
    for pattern, name in (
        (r"\d{8}-\d{6}-[0-9a-f]{6}", "LAUNCH"),
        (r"\b[0-9a-f]{12,64}\b", "DIGEST"),
        (r"\d[\d.,:TZ-]*", "N"),
        (r"\b[KMG]i?B\b", "B"),
        (r"─+", "─"),
        (r"[━╸╺]+", "━"),
        (r"; a launch spends .*", ""),  # only where the machine is so slow that it had to be cut
        # Which of them it is, depends on how busy the machine is.
        (r"^ *(?:pass|warn)(?= +\S+ +(?:latency|bandwidth) )", "SEEN"),
        (r"\s+", " "),
    ):
        line = re.sub(pattern, name, line)
    return line.strip()


@pytest.mark.fleet
def test_the_walk_is_what_happens(tmp_path: Path) -> None:
    """Typed in a terminal on the head of two nodes, as the guide has it; what it shows comes."""
    told = told_walk()
    verbs = [shlex.split(command)[2] for command, _ in told]
    assert readme_verbs() <= set(verbs)
    assert {"pull", "share", "pack"} <= set(verbs)
    with bed(2) as made:
        files = {path.name: path.read_bytes() for path in sorted((ROOT / "pocket/checkpoint").iterdir())}
        with made.desk.network():
            serving = FaultyOrigin(files).serving(made.desk.address())
            server = serving.__enter__()
        transcript = []
        try:
            for number, (command, lines) in enumerate(told):
                code, said = in_a_terminal(made.head, command)
                transcript += [f"    $ {command}", *(f"    {line}".rstrip() for line in said), ""]
                (tmp_path / "walk.txt").write_text("\n".join(transcript), encoding="utf-8")
                # `down` is no success, but it is what the last command shows.
                assert code == (1 if number == len(told) - 1 else 0), (command, said)
                came = set(map(without_what_varies, said))
                absent = [line for line in lines if without_what_varies(line) not in came]
                assert absent == [], f"{command}: these lines do not come; see {tmp_path}/walk.txt"
                if verbs[number] == "init":
                    fill_in(made, server)
        finally:
            serving.__exit__(None, None, None)


def in_a_terminal(node: Node, command: str) -> tuple[int, list[str]]:
    """Type a command in a terminal of 110 columns that can do nothing but print; return its exit code and lines."""
    env = {"TERM": "dumb", "NO_COLOR": "1", "PATH": f"{VENV}/bin:/usr/bin:/bin"}
    words = ["script", "--quiet", "--return", "--command", f"stty cols 110; {command}", "/dev/null"]
    ran = node.run(words, env=env, check=False, timeout_s=500)
    return ran.returncode, [line.rstrip() for line in ran.stdout.replace("\r\n", "\n").splitlines()]


def fill_in(made: Bed, server: FaultyOrigin) -> None:
    """What the guide says was filled in after `init`."""
    place = "/root/fleet.toml"
    text = made.head.path(place).read_text()
    for old, new in {
        r'# image = ".*"': f'image = "{EngineImage().id}"\nmounts = {json.dumps(mounts())}',
        r'# revision = ".*"': f'revision = "{REVISION}"',
        r'# origin = ".*"': f'origin = "{server.url}"',
        r'# share = "nfs"': 'share = "copy"',
        r'(?m)^checkpoint = ".*"': f'checkpoint = "{MODEL}"',
        rf'fabric = \["{made.head.address()}"\]': f'fabric = ["{made.head.address("fabric")}"]',
        r"# fabric = \[.*\]": f'fabric = ["{made.nodes[1].address("fabric")}"]',
    }.items():
        text, count = re.subn(old, new, text)
        assert count == 1, old
    made.head.write(place, text)
