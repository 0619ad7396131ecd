"""A launch as docker's command lines: exact, and pure. What --dry-run shows and what is started are the same lists.

Owns docker's spelling. Knows no engine, no ssh and no shell: each word is one word, whatever is in it, and is quoted
once, by whoever needs a shell. A secret never stands in a command line: variables that hold one go through a file of
variables on the command's standard input, filled in by `fill_secrets` at the moment of starting.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deskfleet.errors import ConfigError
from deskfleet.fleet.launch import SECRET, LaunchSpec, Mount, RankLaunch
from deskfleet.fleet.render import FLEET_LABEL, LAUNCH_LABEL, RANK_LABEL

STOP_GRACE_S = 10
"""How long a rank may take to end by itself. Longer ones were seen to hang (R-02)."""

_LOG_OPTIONS = ("max-size=100m", "max-file=5")
"""Logs outlive whoever launched, and never fill the disk."""

_Group = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """Words to run as they are. `stdin` is what they read, secrets still as `${secret:NAME}`; empty for nothing."""

    argv: tuple[str, ...]
    stdin: str = ""

    @property
    def text(self) -> str:
        """The words for a shell."""
        return shlex.join(self.argv)


def start_command(rank: RankLaunch) -> Command:
    """Start a rank's container in the background; prints its id.

    The image must be there: it is never fetched while starting. Every mount's source must be there too, else docker
    refuses, where an older way of mounting would make an empty directory.
    """
    groups = tuple(_groups(rank))
    return Command(tuple(word for group in groups for word in group), _secret_file(rank))


def _groups(rank: RankLaunch) -> Iterator[_Group]:
    """The words of `docker run` as a person would break the lines."""
    box = rank.box
    yield ("docker", "run", "--detach")
    yield ("--name", rank.container)
    for name, value in sorted(box.labels.items()):
        yield ("--label", f"{name}={value}")
    yield ("--pull", "never")
    yield ("--restart", "no")
    yield ("--network", "host")
    yield ("--ipc", "host")
    if box.has_gpus or box.devices:
        # Both pin memory. Without them the daemon's own limit does, which it may not be allowed to raise.
        yield ("--ulimit", "memlock=-1")
    yield ("--ulimit", "stack=67108864")
    yield ("--oom-score-adj", str(box.oom_score_adj))
    yield ("--stop-timeout", str(STOP_GRACE_S))
    yield ("--log-driver", "json-file")
    for option in _LOG_OPTIONS:
        yield ("--log-opt", option)
    if box.memory_bytes is not None:
        yield ("--memory", str(box.memory_bytes))
        yield ("--memory-swap", str(box.memory_bytes))
    if box.has_gpus:
        yield ("--gpus", "all")
    if box.devices:
        yield ("--cap-add", "IPC_LOCK")
    for device in box.devices:
        yield ("--device", device)
    for mount in box.mounts:
        yield ("--mount", _mount(mount))
    for name, value in rank.env.items():
        if not SECRET.search(value):
            yield ("--env", f"{name}={value}")
    if _secret_file(rank):
        yield ("--env-file", "/dev/stdin")
    program, *rest = rank.argv
    yield ("--entrypoint", program)
    yield (rank.image,)
    yield from _flags(rest)


def _flags(words: Sequence[str]) -> Iterator[_Group]:
    """Words of a program, each flag with what follows it."""
    group: list[str] = []
    for word in words:
        if word.startswith("-") and group:
            yield tuple(group)
            group = []
        group.append(word)
    if group:
        yield tuple(group)


def _mount(mount: Mount) -> str:
    """A bind mount as docker reads it: comma-separated values, quoted as in CSV where a path needs it."""
    fields = ["type=bind", f"source={mount.source}", f"target={mount.target}"]
    if mount.read_only:
        fields.append("readonly")
    return ",".join(_csv(field) for field in fields)


def _csv(field: str) -> str:
    if any(character in field for character in ',"\n\r'):
        return '"' + field.replace('"', '""') + '"'
    return field


def _secret_file(rank: RankLaunch) -> str:
    """The file of variables that hold secrets. Raises ConfigError for a value of several lines."""
    lines = []
    for name, value in rank.env.items():
        if not SECRET.search(value):
            continue
        if "\n" in value or "\r" in value:
            raise ConfigError(f"{name} holds a secret and has several lines", hint="give it on one line")
        lines.append(f"{name}={value}\n")
    return "".join(lines)


def fill_secrets(text: str, values: Mapping[str, str]) -> str:
    """Put values in place of `${secret:NAME}`. The result goes to a command's standard input and nowhere else.

    Raises ConfigError, never with any of the value, for a secret without one, and for one of several lines, which a
    file of variables cannot hold.
    """
    for name in SECRET.findall(text):
        if name not in values:
            raise ConfigError(
                f"the secret {name} has no value", hint=f'[secrets] {name} = "env:NAME" or "file:/PATH"'
            )
        if "\n" in values[name] or "\r" in values[name] or "\0" in values[name]:
            raise ConfigError(f"the secret {name} has several lines", hint="a secret is one line")
    return SECRET.sub(lambda match: values[match[1]], text)


# --- containers that are there --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listed:
    """A container of ours. `state` is docker's word: created, running, exited, dead, ..."""

    id: str
    name: str
    state: str
    launch_id: str
    rank: int


_LIST_FORMAT = "\t".join(
    (
        "{{.ID}}",
        "{{.Names}}",
        "{{.State}}",
        f'{{{{.Label "{LAUNCH_LABEL}"}}}}',
        f'{{{{.Label "{RANK_LABEL}"}}}}',
    )
)


def list_command(fleet: str) -> Command:
    """All containers of the fleet on one node, running or not, of whatever launch. Read by `parse_listed`."""
    return Command(
        (
            *("docker", "ps", "--all", "--no-trunc"),
            *("--filter", f"label={FLEET_LABEL}={fleet}"),
            *("--format", _LIST_FORMAT),
        )
    )


def parse_listed(text: str) -> tuple[Listed, ...]:
    """Read what `list_command` prints. Raises ConfigError for lines that it would not print."""
    found = []
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) != 5 or not fields[4].isdecimal():
            raise ConfigError(f"docker ps said {line!r}, which is no container of a fleet")
        container, name, state, launch_id, rank = fields
        found.append(Listed(container, name, state, launch_id, int(rank)))
    return tuple(found)


def stop_command(ids: Iterable[str], *, grace_s: int = STOP_GRACE_S) -> Command:
    """End these containers: asked first, killed after `grace_s` seconds."""
    return Command(("docker", "stop", "--time", str(grace_s), *ids))


def remove_command(ids: Iterable[str]) -> Command:
    """Remove these containers with the volumes that are theirs alone; kills what still runs."""
    return Command(("docker", "rm", "--force", "--volumes", *ids))


def inspect_command(ids: Iterable[str]) -> Command:
    """All that docker knows of these containers, as a JSON list."""
    return Command(("docker", "inspect", "--type", "container", *ids))


def logs_command(
    container: str, *, follow: bool = False, tail: int | None = None, since: str | None = None
) -> Command:
    """A container's log with times, its last `tail` lines, or from `since` on (a time as docker writes them)."""
    argv = ["docker", "logs", "--timestamps"]
    if follow:
        argv.append("--follow")
    if tail is not None:
        argv += ["--tail", str(tail)]
    if since is not None:
        argv += ["--since", since]
    return Command((*argv, container))


# --- for people -----------------------------------------------------------------------------------


def dry_run_text(launch: LaunchSpec) -> str:
    """What would be started, in that order: each rank's command, one flag a line, ready to be pasted into a shell."""
    lines = [
        f"# fleet {launch.fleet}, launch {launch.launch_id}: {launch.model} with {launch.engine}, "
        f"{len(launch.ranks)} ranks",
        *(f"# warning: {text}" for text in launch.warnings),
    ]
    order = launch.start_order
    for number, rank in enumerate(order, 1):
        lines += ["", f"# {number} of {len(order)}: rank {rank.rank} on {rank.node}"]
        secrets = _secret_file(rank)
        if secrets:
            lines += ["# on standard input, filled in when it is started:"]
            lines += [f"#   {line}" for line in secrets.splitlines()]
        groups = [" ".join(shlex.quote(word) for word in group) for group in _groups(rank)]
        lines.append(" \\\n    ".join(groups))
    return "\n".join(lines) + "\n"


__all__ = [
    "STOP_GRACE_S",
    "Command",
    "Listed",
    "dry_run_text",
    "fill_secrets",
    "inspect_command",
    "list_command",
    "logs_command",
    "parse_listed",
    "remove_command",
    "start_command",
    "stop_command",
]
