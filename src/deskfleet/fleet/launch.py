"""What will run, as pure data: `LaunchSpec` and its parts, to JSON and back. Made by `render`, turned into commands by
`commands`, kept with every launch.

Owns the shape of that JSON. Knows no engine, no docker and no machine, and never holds a secret's value: where one
belongs there is `${secret:NAME}`, and it is filled in at the moment of starting.
"""

from __future__ import annotations

import re

import msgspec

from deskfleet.errors import ConfigError

FORMAT = 1

SECRET = re.compile(r"\$\{secret:([A-Za-z_][A-Za-z0-9_.-]*)\}")
"""Where a secret belongs. The name is one of `LaunchSpec.secrets`."""

HEAD_RANK = 0


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A path of the node, seen in the container. Both absolute. `source` must exist before the start."""

    source: str
    target: str
    read_only: bool = True


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank is boxed. Every rank uses the host's network and IPC (so its /dev/shm), and docker never restarts it.

    `memory_bytes` is the most that the container may take of the host's memory, swap included; None is no limit.
    `oom_score_adj` says whom the kernel kills first.
    """

    mounts: tuple[Mount, ...] = ()
    devices: tuple[str, ...] = ()
    has_gpus: bool = False
    memory_bytes: int | None = None
    oom_score_adj: int = 500
    labels: dict[str, str] = {}


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: a container called `container`, made of `image`, running `argv` with `env` on the machine `node`."""

    rank: int
    node: str
    container: str
    image: str
    argv: tuple[str, ...]
    env: dict[str, str]
    box: Container


class Milestone(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a rank's log that shows how far its start is.

    `pattern` is a regular expression that is searched in each line. `share` of a usual start's time has passed when it
    comes, 0 to 1. With groups `done` and `total` the line counts: the share then moves on towards that of the next
    milestone by done / total. `ranks` empty means every rank shows it.
    """

    pattern: str
    what: str
    share: float
    ranks: tuple[int, ...] = ()


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks must have logged before any request is let in.

    `pattern` is searched in each line; the last match counts. With `at_least` its group `value` is a number, commas
    left out, that must not be less; with `equals` it must be that text. `ranks` empty means every rank. `reason` says
    what is wrong without it.
    """

    name: str
    pattern: str
    reason: str
    at_least: int | None = None
    equals: str | None = None
    ranks: tuple[int, ...] = ()


class AdapterReceipts(msgspec.Struct, frozen=True, kw_only=True):
    """What our adapter must have logged on every rank, where Engram rows are read through it (`engram_receipts`).

    `columns` has each rank's first and last column, in rank order. `store` is the way of reading that was asked for;
    None is whichever the adapter takes, the same on all ranks.
    """

    columns: tuple[tuple[int, int], ...]
    store: str | None = None


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One launch of one fleet. Ranks in rank order; `endpoint` is the engine's base URL on rank 0, empty for `native`.

    `model` is the name under which the engine serves, `max_model_len` in tokens. `secrets` are the names whose values
    are needed at start. `warnings` are what the user should know and what does not stop the launch.
    """

    format: int
    fleet: str
    launch_id: str
    engine: str
    model: str
    revision: str | None
    max_model_len: int
    endpoint: str
    ranks: tuple[RankLaunch, ...]
    milestones: tuple[Milestone, ...]
    expected: tuple[Receipt, ...]
    adapter: AdapterReceipts | None = None
    secrets: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def start_order(self) -> tuple[RankLaunch, ...]:
        """Workers first, the head last: a head that waits for nobody cannot meet a rank of an older launch."""
        return (*self.ranks[HEAD_RANK + 1 :], self.ranks[HEAD_RANK])

    def on_node(self, node: str) -> tuple[RankLaunch, ...]:
        """The ranks of one machine."""
        return tuple(rank for rank in self.ranks if rank.node == node)


def launch_to_json(launch: LaunchSpec) -> bytes:
    """Return the launch as one line of JSON; the same launch gives the same bytes."""
    return msgspec.json.encode(launch, order="deterministic")


def launch_from_json(data: bytes | str) -> LaunchSpec:
    """Read what `launch_to_json` wrote. Raises ConfigError for another format, unknown keys apart."""
    hint = "it is written by deskfleet fleet serve; remove it and launch again"
    try:
        launch = msgspec.json.decode(data, type=LaunchSpec)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"this is no launch: {error}", hint=hint) from error
    if launch.format != FORMAT:
        raise ConfigError(f"a launch of format {launch.format}, and this deskfleet knows {FORMAT}", hint=hint)
    if [rank.rank for rank in launch.ranks] != list(range(len(launch.ranks))) or not launch.ranks:
        ranks = ", ".join(str(rank.rank) for rank in launch.ranks)
        raise ConfigError(f"a launch with ranks {ranks or 'none'}, not 0 to n - 1 in order", hint=hint)
    return launch


def secret_names(*texts: str) -> tuple[str, ...]:
    """The secrets that these texts ask for, sorted."""
    return tuple(sorted({name for text in texts for name in SECRET.findall(text)}))


__all__ = [
    "FORMAT",
    "HEAD_RANK",
    "SECRET",
    "AdapterReceipts",
    "Container",
    "LaunchSpec",
    "Milestone",
    "Mount",
    "RankLaunch",
    "Receipt",
    "launch_from_json",
    "launch_to_json",
    "secret_names",
]
