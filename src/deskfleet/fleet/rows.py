"""Each rank's Engram rows, packed on its node's own disk: which node packs what, and what came of it.

The packing runs on the node, where rows need not travel: `deskfleet.fleet.pack_here` with the engine image's
deskfleet_engram, or the node's. How an engine shares tables out among ranks is its planner's; knows no files of a pack.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from deskfleet.errors import ConfigError
from deskfleet.fleet.program import Program, follow
from deskfleet.fleet.pull import OnEvent, chosen_nodes
from deskfleet.fleet.remote import Remote, Remotes
from deskfleet.fleet.spec import FleetSpec, NodeSpec
from deskfleet.planner.engines.registry import pack_split

Level = Literal["quick", "sample", "full"]


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How to pack. `has_all`: every column on every node, whatever its ranks read. `level`: of the check at the end."""

    has_all: bool = False
    level: Level = "quick"
    max_bytes_per_s: int | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """What came of packing on one node. `num_bytes` its ranks' columns take; `other_bytes` those they do not read.

    `num_kept` columns were there, `num_adopted` had come from elsewhere and were read through. `other_columns` by
    layer.
    """

    node: str
    ranks: tuple[int, ...]
    world_size: int
    pack_dir: str
    pack_id: str
    encoder: str
    num_columns: int
    num_packed: int
    num_kept: int
    num_adopted: int
    num_compared: int
    num_bytes: int
    packed_bytes: int
    resumed_bytes: int
    other_bytes: int
    other_columns: Mapping[str, str]
    elapsed_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values that JSON can hold."""
        return asdict(self)


async def pack_rows(
    spec: FleetSpec, remotes: Remotes, nodes: Sequence[str], options: PackOptions, on_event: OnEvent
) -> tuple[Packed, ...]:
    """Pack on `nodes`, all at once. What is packed is kept, and what was interrupted goes on.

    Raises ConfigError when ranks do not spread evenly over nodes, or a pack would be on NFS; DoesNotFit; WrongPack
    for a pack of another checkpoint; CheckpointError for a node that does not see the tables; PackError;
    NodeUnreachable.
    """
    chosen = chosen_nodes(spec, nodes)
    programs = {node.name: pack_program(spec, node, options) for node in chosen}

    async def on(remote: Remote) -> Packed | None:
        program = programs.get(remote.node.name)
        if program is None:
            return None
        event = await follow(remote, program, on_event)
        values = {key: value for key, value in event.items() if key != "event"}
        ranks, world_size = ranks_of(spec, remote.node)
        return Packed(node=remote.node.name, ranks=ranks, world_size=world_size, **values)

    gathered = (await remotes.gather(on)).all()
    return tuple(packed for packed in gathered.values() if packed is not None)


def shown_programs(
    spec: FleetSpec, remotes: Remotes, nodes: Sequence[str], options: PackOptions
) -> dict[str, dict[str, Any]]:
    """Return what `pack_rows` would run on each node. Nothing is reached."""
    return {
        node.name: pack_program(spec, node, options).shown(remotes[node.name])
        for node in chosen_nodes(spec, nodes)
    }


def ranks_of(spec: FleetSpec, node: NodeSpec) -> tuple[tuple[int, ...], int]:
    """Return the ranks that run on `node`, and how many there are in all. Raises ConfigError for an uneven spread."""
    num_nodes = len(spec.nodes)
    world_size = spec.wishes.tp_size or num_nodes
    if world_size % num_nodes:
        raise ConfigError(
            f"{spec.path}: wishes.tp_size is {world_size}, which does not spread over {num_nodes} nodes",
            hint="--all-columns packs everything on every node",
        )
    per_node = world_size // num_nodes
    first = spec.nodes.index(node) * per_node
    return tuple(range(first, first + per_node)), world_size


def pack_program(spec: FleetSpec, node: NodeSpec, options: PackOptions) -> Program:
    """Return the program that packs on `node`. Raises ConfigError as `ranks_of`, and for an engine without packs."""
    try:
        split = pack_split(spec.engine.name)
    except ConfigError as error:
        raise ConfigError(f"{spec.path}: {error.message}", hint=error.hint) from None
    ranks, world_size = ((), 1) if options.has_all else ranks_of(spec, node)
    model = spec.checkpoint.model
    words = {
        "checkpoint": node.paths.checkpoint,
        "pack_dir": node.paths.engram,
        "ranks": ranks,
        "world_size": world_size,
        "split": "none" if options.has_all else split,
        "model": None if model.startswith("/") else model,
        "revision": spec.checkpoint.revision,
        "level": options.level,
        "max_bytes_per_s": options.max_bytes_per_s,
    }
    return Program(
        "deskfleet.fleet.pack_here",
        (json.dumps(words),),
        node.paths.engram,
        spec.engine.image,
        spec.engine.mounts,
        package="deskfleet_engram",
        reads=node.paths.checkpoint,
    )


__all__ = ["Level", "PackOptions", "Packed", "pack_program", "pack_rows", "ranks_of", "shown_programs"]
