"""Machines from text: trees of sysfs, proc and what programs said, planted in a directory for the real probe."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from deskfleet.fleet.facts import NodeFacts, parse_facts
from deskfleet.fleet.probe import read_script

TREES = Path(__file__).parent / "trees"
IMAGE = "example/vllm@sha256:" + "a" * 64

Changes = Mapping[str, str | None]
"""Path -> what the file holds instead, None for no such file. A path that ends with /* stands for all below it."""


@cache
def tree(name: str) -> Mapping[str, str]:
    """Read trees/NAME.txt as path -> text; links as `-> target`."""
    files: dict[str, str] = {}
    block = ""
    for line in (TREES / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            files[block] += line.removeprefix("| ") + "\n"
        elif " -> " in line and not line.startswith("#"):
            path, target = line.split(" -> ")
            files[path] = f"-> {target}"
        elif " = " in line and not line.startswith("#"):
            path, text = line.split(" = ", 1)
            files[path] = text + "\n"
        elif line.endswith(":") and not line.startswith("#"):
            block = line.removesuffix(":")
            files[block] = ""
    return files


def plant(root: Path, name: str, number: int, changes: Changes) -> None:
    """Make the tree's files in `root`, for node `number`, with `changes`."""
    files: dict[str, str | None] = dict(tree(name))
    for path, text in changes.items():
        if path.endswith("/*"):
            files = {each: text for each, text in files.items() if not each.startswith(path[:-1])}
        else:
            files[path] = text
    for path, text in files.items():
        if text is None:
            continue
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        text = text.replace("@N@", str(number))
        if text.startswith("-> "):
            target.symlink_to(text.removeprefix("-> "))
            link = os.path.normpath(target.parent / text.removeprefix("-> "))
            Path(link).mkdir(parents=True, exist_ok=True)
        else:
            target.write_text(text, encoding="utf-8")


def facts_of(name: str, number: int, changes: Changes | None = None) -> NodeFacts:
    """What the real probe makes of the tree, for a node called spark-NUMBER. Its clock agrees with ours."""
    with tempfile.TemporaryDirectory() as directory:
        plant(Path(directory), name, number, changes or {})
        ran = subprocess.run(
            [
                "bash",
                "-c",
                read_script("probe.sh"),
                "probe",
                directory,
                IMAGE,
                "/models/v4.1",
                "/rows",
                "/cache",
            ],
            capture_output=True,
            check=True,
            timeout=30,
        )
    return parse_facts(ran.stdout.decode("utf-8", "replace"), f"spark-{number}")
