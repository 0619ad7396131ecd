"""The machines: `NodeKind`, `Node`, `Cluster`. Owns the built-in kinds and what a user may write for them.

Facts of a kind carry where they come from. Knows nothing of models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from deskfleet.errors import ConfigError

GIB = 1 << 30

MAX_NODES = 64


@dataclass(frozen=True, slots=True)
class Link:
    """How ranks reach each other. `bytes_per_s` in one direction of one rank, `latency_s` of a small message."""

    name: str
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Disk:
    """Where Engram rows lie. `iops` of 4 KiB reads at depth, `qd1_iops` one at a time."""

    bytes_per_s: float
    iops: float
    qd1_iops: float


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A kind of machine, for each of its `num_devices` accelerators.

    `total_bytes` is what the system reports. `available_bytes` is what is free before anything is started, after caches
    are dropped: MemAvailable where memory `is_unified`, free device memory otherwise. `host_bytes` is the host's memory
    where it is apart. `peak_flops` of bf16. `arch`: "sm121", "sm90", "cpu"; kernels differ by it. `source` says where
    these facts come from.
    """

    name: str
    title: str
    arch: str
    is_unified: bool
    num_devices: int
    total_bytes: int
    available_bytes: int
    host_bytes: int
    bytes_per_s: float
    peak_flops: float
    link: Link
    disk: Disk
    source: str


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. `available_bytes` overrides its kind's, when it was measured."""

    name: str
    kind: NodeKind
    available_bytes: int

    @property
    def total_bytes(self) -> int:
        """What the system reports for each device."""
        return self.kind.total_bytes


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines of one kind in order; ranks go to devices in that order. The first one is the head."""

    nodes: tuple[Node, ...]
    origin: str

    @property
    def kind(self) -> NodeKind:
        """The kind that all of them are."""
        return self.nodes[0].kind

    @property
    def num_devices(self) -> int:
        """Ranks at most."""
        return sum(node.kind.num_devices for node in self.nodes)

    def node_of(self, rank: int) -> Node:
        """The node that a rank runs on, one rank to a device."""
        return self.nodes[rank // self.kind.num_devices]


SPARK = NodeKind(
    name="spark",
    title="DGX Spark (GB10)",
    arch="sm121",
    is_unified=True,
    num_devices=1,
    total_bytes=int(121.69 * GIB),
    available_bytes=int(111.5 * GIB),
    host_bytes=int(121.69 * GIB),
    bytes_per_s=273e9,
    peak_flops=125e12,
    link=Link("RoCE, one ConnectX-7 port of 200 Gb/s", bytes_per_s=22e9, latency_s=20e-6),
    disk=Disk(bytes_per_s=6e9, iops=112e3, qd1_iops=3.5e3),
    source="total, free memory and disk as published recipes report them; bandwidth from the data sheet; bf16 rate and "
    "link latency are assumptions",
)

H200 = NodeKind(
    name="h200",
    title="NVIDIA H200",
    arch="sm90",
    is_unified=False,
    num_devices=1,
    total_bytes=int(139.8 * GIB),
    available_bytes=int(139.1 * GIB),
    host_bytes=128 * GIB,
    bytes_per_s=4.3e12,
    peak_flops=788e12,
    link=Link("NVLink", bytes_per_s=450e9, latency_s=5e-6),
    disk=Disk(bytes_per_s=3e9, iops=400e3, qd1_iops=10e3),
    source="memory, bandwidth and bf16 rate measured on the card; link as planned for a one-shot exchange; "
    "disk assumed",
)

KINDS = {kind.name: kind for kind in (SPARK, H200)}


def parse_nodes(text: str, *, available_bytes: int | None = None) -> Cluster:
    """Read `4xspark`, `spark` or `h200`: so many machines of a built-in kind.

    `available_bytes` replaces what the kind has free on each. Raises ConfigError.
    """
    match = re.fullmatch(r"(?:(\d+)\s*[xX]\s*)?([A-Za-z][\w.-]*)", text.strip())
    if match is None:
        raise ConfigError(f"nodes {text!r} is not a number of machines", hint="write e.g. 4xspark")
    count, name = int(match[1] or 1), match[2].lower()
    kind = KINDS.get(name)
    if kind is None:
        raise ConfigError(f"unknown kind of node {name!r}", hint=f"known: {', '.join([*KINDS, 'local'])}")
    if not 1 <= count <= MAX_NODES:
        raise ConfigError(f"{count} nodes", hint=f"give 1 to {MAX_NODES}")
    return make_cluster(kind, count, available_bytes=available_bytes, origin=f"{count}x{name}")


def make_cluster(kind: NodeKind, count: int, *, available_bytes: int | None = None, origin: str) -> Cluster:
    """Return `count` machines of `kind`. Raises ConfigError when more is free than there is."""
    available = kind.available_bytes if available_bytes is None else available_bytes
    if not 0 < available <= kind.total_bytes:
        raise ConfigError(
            f"{available} bytes available on a {kind.name} of {kind.total_bytes} bytes",
            hint="give what is free on each node before anything is started",
        )
    return Cluster(tuple(Node(f"{kind.name}-{i}", kind, available) for i in range(count)), origin)


__all__ = [
    "GIB",
    "H200",
    "KINDS",
    "MAX_NODES",
    "SPARK",
    "Cluster",
    "Disk",
    "Link",
    "Node",
    "NodeKind",
    "make_cluster",
    "parse_nodes",
]
