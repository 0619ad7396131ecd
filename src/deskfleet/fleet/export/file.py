"""What every export is made of: files, their first lines, and the words by which each calls secrets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from deskfleet.fleet.commands import start_command
from deskfleet.fleet.launch import SECRET, LaunchSpec, RankLaunch
from deskfleet.fleet.spec import FleetSpec

Piece = tuple[str, bool]
"""A part of a value: its text, or the name of a secret and True."""


@dataclass(frozen=True, slots=True)
class Exported:
    """One file: where it goes, relative to a directory of the user's choice, and its text."""

    path: str
    text: str


def header(launch: LaunchSpec, spec: FleetSpec, *more: str) -> list[str]:
    """The comment at the top of every file: what it is, what nobody checks any more, how the endpoint is opened."""
    return [
        f"# Fleet {launch.fleet}: {launch.model} with {launch.engine} on {len(launch.ranks)} ranks, made by deskfleet.",
        "# From a plan for these machines, with the network's devices and GID indices as they were: export again",
        "# when any of it changes. Nothing here checks nodes, memory or answers; a rank that is lost is not started",
        "# again, for it cannot join the others. deskfleet fleet serve does all that.",
        f"# The endpoint with deskfleet's protocols, once {launch.endpoint} answers:",
        f"#   deskfleet gateway --upstream {launch.endpoint} --engine {_front(launch.engine)} --checkpoint "
        f"{shlex.quote(spec.head.paths.checkpoint)}",
        *(f"# {line}" for line in more),
    ]


def _front(engine: str) -> str:
    """What the gateway calls the engine: EXL3 checkpoints are served by an image of vLLM."""
    return "vllm" if engine == "exl3" else engine


def variable_of(secret: str) -> str:
    """The variable that holds a secret where a format wants one: `hf-token` is HF_TOKEN."""
    return re.sub(r"[^A-Z0-9_]", "_", secret.upper())


def pieces(value: str) -> tuple[Piece, ...]:
    """A value's parts: text, and secrets by name."""
    parts = SECRET.split(value)
    return tuple((part, index % 2 == 1) for index, part in enumerate(parts) if part or index % 2 == 1)


def secret_env(rank: RankLaunch) -> Mapping[str, str]:
    """The variables of a rank that hold secrets."""
    return {name: value for name, value in rank.env.items() if SECRET.search(value)}


def docker_options(rank: RankLaunch) -> dict[str, list[str]]:
    """Each option of the `docker run` that would start the rank, with its values: what an export has to say as well."""
    options: dict[str, list[str]] = {}
    words = iter(start_command(rank).argv[2:])  # after `docker run`
    for word in words:
        if word in _SWITCHES:
            continue
        options.setdefault(word, []).append(next(words))
        if word == "--entrypoint":  # the last one: the image and the program's own words follow
            return options
    return options


_SWITCHES = ("--detach",)


__all__ = ["Exported", "Piece", "docker_options", "header", "pieces", "secret_env", "variable_of"]
