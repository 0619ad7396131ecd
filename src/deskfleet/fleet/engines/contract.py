"""What rendering a launch asks of an engine: `EngineLauncher`. Owns the seam; each engine's file answers.

An engine says which process each rank runs and what its log shows. How a process is boxed is `render`'s, which commands
start it `commands`'. Everything here is pure data and pure functions of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from deskfleet.fleet.fabric import NodeFabric
from deskfleet.fleet.facts import NodeFacts
from deskfleet.fleet.launch import HEAD_RANK, AdapterReceipts, Milestone, Mount, Receipt
from deskfleet.fleet.spec import LOCAL, FleetSpec, NodeSpec
from deskfleet.planner.engines.contract import Refusal
from deskfleet.planner.plan import MemoryPlan
from deskfleet.planner.wishes import EngineName

Capability = Literal["adapter", "head-padding", "engram-disk", "bounded-indexer", "roce-collectives"]
"""What an image may have beyond the engine as it is released.

`adapter`: our plug-in of the engine, which reads Engram rows from packs. `head-padding`: heads, groups and vocabulary
padded so that three ranks divide them. `engram-disk`: rows read from disk by the image itself, set up with
`[engine] env`. `bounded-indexer`: keys chosen in pieces of bounded memory. `roce-collectives`: exchanges of its own
over RoCE.
"""

CHECKPOINT_PATH, ENGRAM_PATH, CACHE_PATH = "/checkpoint", "/engram", "/cache"
"""Where a rank finds them in its container, whatever they are called on its node."""

_ENGINE_PORTS, _RENDEZVOUS_PORTS = 21_000, 22_000
_PORT_STEP = 8
"""Engines take a few ports after the one where ranks meet."""


@dataclass(frozen=True, slots=True)
class Ports:
    """`engine` answers HTTP on the head; ranks meet at `rendezvous`, and may take the seven after it."""

    engine: int
    rendezvous: int


def ports_of(fleet: str) -> Ports:
    """The ports of the fleet of that name: always the same ones, and others for another fleet on the same machines.

    21,000 to 21,999 and 22,000 to 29,999, below what kernels give to clients.
    """
    number = zlib.crc32(fleet.encode()) % 1000
    return Ports(_ENGINE_PORTS + number, _RENDEZVOUS_PORTS + number * _PORT_STEP)


PROVIDES_LABEL = "deskfleet.provides"
"""The label by which an image says its capabilities, separated by commas. Who builds an image writes it."""

PACK_MANIFEST = "engram.json"
"""The file that is written last into a pack of rows."""


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a launch is rendered from. `fabric` and `facts` by the node's name; facts may be missing, as on paper.

    `image` is what ranks run, `connect` is where native ones find the supervisor, `HOST:PORT`.
    """

    plan: MemoryPlan
    spec: FleetSpec
    fabric: Mapping[str, NodeFabric]
    facts: Mapping[str, NodeFacts]
    launch_id: str
    image: str
    connect: str | None = None

    @property
    def tp_size(self) -> int:
        """How many ranks."""
        return self.plan.layout.tp_size

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a machine; 1 unless there are more ranks than machines."""
        return -(-self.tp_size // len(self.spec.nodes))

    @property
    def ports(self) -> Ports:
        """This fleet's ports."""
        return ports_of(self.spec.name)

    @property
    def arch(self) -> str:
        """Of every node: "sm121", "sm90", "cpu"."""
        return self.plan.cluster.kind.arch

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What the image says it has beyond the release, on every node of which the image is known."""
        known = [facts.image for facts in self.facts.values() if facts.image is not None]
        said = [
            frozenset(image.labels.get(PROVIDES_LABEL, "").replace(" ", "").split(",")) for image in known
        ]
        return frozenset(each for each in get_args(Capability) if said and all(each in one for one in said))

    def rows_lack(self, node: str, *files: str) -> bool:
        """Whether a node's `engram` directory is known to be without one of `files`."""
        facts = self.facts.get(node)
        if facts is None or facts.directories is None:
            return False
        directory = facts.directory("engram")
        return directory is None or not set(files) <= set(directory.files or ())

    def has_pack(self, node: str) -> bool:
        """Whether a node's `engram` directory is known to hold a pack of rows."""
        return (
            node in self.facts
            and self.facts[node].directories is not None
            and not self.rows_lack(node, PACK_MANIFEST)
        )

    @property
    def served_name(self) -> str:
        """What the engine calls the model; clients see the gateway's name, not this one."""
        return self.spec.checkpoint.model.rstrip("/").rsplit("/", 1)[-1]

    def node(self, rank: int) -> NodeSpec:
        """The machine of a rank: ranks go to nodes in the order of the file."""
        return self.spec.nodes[rank // self.ranks_per_node]

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """The machines that have ranks, head first."""
        return tuple(dict.fromkeys(self.node(rank) for rank in range(self.tp_size)))

    def fabric_of(self, rank: int) -> NodeFabric:
        """How that machine reaches the others, as found at this launch."""
        return self.fabric[self.node(rank).name]

    def address_of(self, rank: int) -> str:
        """Where the other ranks reach that machine: on the subnet that all share, else as the file says."""
        return self.fabric_of(rank).rendezvous or self.node(rank).fabric[0]

    @property
    def rendezvous_address(self) -> str:
        """Where ranks meet: the head, on the fast network."""
        return self.address_of(HEAD_RANK)

    @property
    def head_is_local(self) -> bool:
        """Whether the head is the machine where deskfleet runs, so that nobody else need reach the engine."""
        return self.spec.head.address == LOCAL

    @property
    def endpoint(self) -> str:
        """The engine's HTTP as this machine reaches it."""
        host = "127.0.0.1" if self.head_is_local else self.spec.head.address
        return f"http://{f'[{host}]' if ':' in host else host}:{self.ports.engine}"


@dataclass(frozen=True, slots=True)
class Process:
    """What one rank runs. `warnings` do not stop the launch; `refusals` do, and none of the rest holds with them."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    mounts: tuple[Mount, ...] = ()
    warnings: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()


class EngineLauncher(Protocol):
    """One engine."""

    @property
    def name(self) -> EngineName:
        """As users select it."""

    def refusals(self, at: Situation) -> list[Refusal]:
        """Why it must not be started so, arguments and variables of the file apart."""

    def process(self, at: Situation, rank: int) -> Process:
        """What that rank runs. Called when `refusals` is empty."""

    def endpoint(self, at: Situation) -> str:
        """Base URL of its HTTP; empty when it has none."""

    def milestones(self, at: Situation) -> tuple[Milestone, ...]:
        """How far a start is, in the order of a usual one."""

    def receipts(self, at: Situation) -> tuple[Receipt, ...]:
        """What must have been logged before it is trusted."""

    def adapter(self, at: Situation) -> AdapterReceipts | None:
        """The same of our adapter; None where none is at work."""


__all__ = [
    "CACHE_PATH",
    "CHECKPOINT_PATH",
    "ENGRAM_PATH",
    "PACK_MANIFEST",
    "PROVIDES_LABEL",
    "Capability",
    "EngineLauncher",
    "Ports",
    "Process",
    "Situation",
    "ports_of",
]
