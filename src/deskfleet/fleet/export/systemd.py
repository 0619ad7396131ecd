"""A systemd unit for each rank. Owns how a unit quotes a command line.

A rank is not started again when it ends: it cannot join the others, so all of them are stopped and started.
"""

from __future__ import annotations

from collections.abc import Iterator

from deskfleet.fleet.commands import STOP_GRACE_S, start_command
from deskfleet.fleet.export.file import Exported, header, secret_env
from deskfleet.fleet.launch import LaunchSpec, RankLaunch
from deskfleet.fleet.spec import FleetSpec


def export(launch: LaunchSpec, spec: FleetSpec) -> tuple[Exported, ...]:
    """Return a unit for each rank, in a directory for each node."""
    return tuple(
        Exported(f"{rank.node}/{rank.container}.service", _unit(rank, launch, spec)) for rank in launch.ranks
    )


def _unit(rank: RankLaunch, launch: LaunchSpec, spec: FleetSpec) -> str:
    unit = f"{rank.container}.service"
    secrets = secret_env(rank)
    more = [f"On {rank.node}, the head last: cp {unit} /etc/systemd/system/; systemctl start {unit}."]
    if secrets:
        needed = ", ".join(f"{name}={value}" for name, value in secrets.items())
        more.append(
            f"Before that, in {_secrets_file(launch)}, of mode 600, each secret in its place: {needed}."
        )
    lines = [
        *header(launch, spec, *more),
        "[Unit]",
        f"Description=deskfleet {launch.fleet}, rank {rank.rank} of {len(launch.ranks)}",
        "Requires=docker.service",
        "After=docker.service network-online.target",
        "Wants=network-online.target",
        "",
        "[Service]",
        *([f"EnvironmentFile={_secrets_file(launch)}"] if secrets else []),
        f"ExecStart={' '.join(map(quoted, _docker_run(rank)))}",
        f"ExecStop=docker stop -t {STOP_GRACE_S} {rank.container}",
        "Restart=no",
        f"TimeoutStopSec={STOP_GRACE_S + 15}",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def _secrets_file(launch: LaunchSpec) -> str:
    return f"/etc/deskfleet/{launch.fleet}.env"


def quoted(word: str) -> str:
    """Return a word of a command line that systemd takes for exactly this word."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _docker_run(rank: RankLaunch) -> Iterator[str]:
    """The command of `deskfleet fleet serve`, in the foreground, so that the unit lives as long as the rank."""
    words = iter(start_command(rank).argv)
    for word in words:
        if word == "--detach":
            yield "--rm"
        elif word == "--env-file":
            next(words)
            # Without a value docker takes one from its own environment, which the unit fills.
            for name in secret_env(rank):
                yield from ("--env", name)
        elif word == "--entrypoint":
            yield word
            yield from words
        else:
            yield word


__all__ = ["export", "quoted"]
