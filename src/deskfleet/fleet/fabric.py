"""The fast network of a fleet, from facts: which RDMA ports ranks use, with which GID index, and what joins the nodes.

Pure: it decides nothing twice and talks to nobody. Answers hold for the moment in which the facts were taken, because
GID tables move; so they are made anew at every launch, for each node and device. Never one literal for all nodes, and
never an empty string, which NCCL reads as index 0, a link-local address.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from deskfleet.errors import ConfigError
from deskfleet.fleet.facts import NetDevice, NodeFacts, RdmaDevice, RdmaPort
from deskfleet.fleet.spec import NodeSpec

Topology = Literal["single", "pair", "triangle", "switch", "ring", "none"]

ROCE_V2 = "RoCE v2"

RDMA_KINDS = ("spark",)
"""Kinds of nodes that are too slow together without RDMA: there it is a fault when none can be used."""

_MAX_SELECTED = 32
_MAX_NAME_BYTES = 63


@dataclass(frozen=True, slots=True)
class Selector:
    """What NCCL_IB_HCA asks for, as NCCL reads it: `[^][=]name[:port[:rail[:plane]]],...`.

    Without `=` a name stands for all that begin with it; `^` leaves out what matches. Empty is everything.
    """

    is_exclusion: bool
    is_exact: bool
    entries: tuple[tuple[str, int | None], ...]

    def takes(self, device: str, port: int) -> bool:
        """Whether NCCL would use this port."""
        if not self.entries:
            return True
        found = any(
            (device == name if self.is_exact else device.startswith(name)) and number in (None, port)
            for name, number in self.entries
        )
        return found != self.is_exclusion


def parse_selector(text: str) -> Selector:
    """Read an NCCL_IB_HCA. Raises ConfigError for what NCCL would cut or misread without a word."""
    rest = text
    is_exclusion, rest = rest.startswith("^"), rest.removeprefix("^")
    is_exact, rest = rest.startswith("="), rest.removeprefix("=")
    parts = [part for part in rest.split(",") if part]
    if len(parts) > _MAX_SELECTED:
        raise ConfigError(f"NCCL_IB_HCA names {len(parts)} devices, and NCCL reads {_MAX_SELECTED}")
    entries: list[tuple[str, int | None]] = []
    for part in parts:
        name, *numbers = part.split(":")
        if not name or len(name.encode()) > _MAX_NAME_BYTES or name != name.strip():
            raise ConfigError(f"NCCL_IB_HCA is {text!r}: {name!r} is no device name")
        if len(numbers) > 3 or not all(number.isdigit() for number in numbers):
            raise ConfigError(f"NCCL_IB_HCA is {text!r}: {part!r} is not name[:port[:rail[:plane]]]")
        entries.append((name, int(numbers[0]) if numbers else None))
    return Selector(is_exclusion, is_exact, tuple(entries))


@dataclass(frozen=True, slots=True)
class FabricPort:
    """An RDMA port that can carry traffic. `gid_indices` are those of its RoCE v2 entries for `address`."""

    device: str
    number: int
    net: NetDevice
    address: ipaddress.IPv4Interface
    gid_indices: tuple[int, ...]
    rate_gbps: int | None
    pci: str | None

    @property
    def selector(self) -> str:
        """The port as NCCL_IB_HCA names it."""
        return f"{self.device}:{self.number}"


@dataclass(frozen=True, slots=True)
class NodeFabric:
    """What ranks on one node are told of the network, and why.

    `hca` and `gid_index` are None together: without RDMA traffic goes over sockets. `refusal` says why that is a fault;
    None when it is none, as on a lone node or a kind that does without. `socket_interface` is the device whose subnet
    all nodes share, `rendezvous` its address; None when there is none. `ports` are those that are used, `idle` those
    that could be and are not, `unusable` port -> why.
    """

    node: str
    hca: str | None
    gid_index: int | None
    socket_interface: str | None
    rendezvous: str | None
    ports: tuple[FabricPort, ...]
    idle: tuple[FabricPort, ...]
    unusable: Mapping[str, str]
    refusal: str | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """Two nodes that have a subnet in common on their fast network."""

    subnet: ipaddress.IPv4Network
    nodes: tuple[str, str]
    addresses: tuple[str, str]
    mtus: tuple[int | None, int | None]

    @property
    def has_equal_mtu(self) -> bool:
        """Whether both ends send packets of one size at most; unknown ones are not unequal."""
        return None in self.mtus or self.mtus[0] == self.mtus[1]


@dataclass(frozen=True, slots=True)
class Fabric:
    """The network of a fleet. `missing` are pairs of nodes that no link joins."""

    topology: Topology
    nodes: Mapping[str, NodeFabric]
    links: tuple[Link, ...]
    missing: tuple[tuple[str, str], ...]

    def links_of(self, node: str) -> tuple[Link, ...]:
        """The links that end at `node`."""
        return tuple(link for link in self.links if node in link.nodes)


def resolve_fabric(nodes: Sequence[NodeSpec], facts: Mapping[str, NodeFacts], *, hca: str = "") -> Fabric:
    """Say what every node of which there are facts uses. `hca` is an NCCL_IB_HCA that the user asked for.

    Raises ConfigError for an `hca` that NCCL would misread.
    """
    selector = parse_selector(hca)
    known = [node for node in nodes if node.name in facts]
    links = tuple(_links(known, facts))
    shared = _shared_devices(known, facts)
    found = {
        node.name: _node_fabric(
            node, facts[node.name], selector, shared.get(node.name), is_alone=len(nodes) == 1
        )
        for node in known
    }
    names = [node.name for node in known]
    joined = {frozenset(link.nodes) for link in links}
    pairs = tuple(itertools.combinations(names, 2))
    missing = tuple(pair for pair in pairs if frozenset(pair) not in joined)
    return Fabric(_topology(names, links), found, links, missing)


def usable_ports(facts: NodeFacts) -> tuple[tuple[FabricPort, ...], dict[str, str]]:
    """Return the RDMA ports that can carry RoCE v2 over IPv4, and for the others, as `device:port`, why not."""
    usable: list[FabricPort] = []
    unusable: dict[str, str] = {}
    for device in facts.rdma:
        for port in device.ports:
            found = _usable(device, port, facts)
            if isinstance(found, str):
                unusable[f"{device.name}:{port.number}"] = found
            else:
                usable.append(found)
    return tuple(usable), unusable


def _usable(device: RdmaDevice, port: RdmaPort, facts: NodeFacts) -> FabricPort | str:
    if port.state != "ACTIVE":
        return f"its state is {port.state} ({port.physical_state or 'link unknown'})"
    if port.link_layer != "Ethernet":
        return f"its link layer is {port.link_layer or 'unknown'}, not Ethernet"
    candidates = [gid for gid in port.gids if gid.type == ROCE_V2 and gid.ipv4 and not gid.ipv4.is_link_local]
    if not candidates:
        local = [gid.index for gid in port.gids if gid.type == ROCE_V2]
        has = f"only link-local ones, at {_listed(local)}" if local else "none at all"
        return f"its GID table has no RoCE v2 entry for an IPv4 address: {has}"
    # An address that the network device no longer has leaves its entry behind for a while.
    for gid in candidates:
        net = facts.net_device(gid.net_device)
        own = next((each for each in net.ipv4 if each.ip == gid.ipv4), None) if net else None
        if net is not None and own is not None:
            indices = tuple(each.index for each in candidates if each.ipv4 == gid.ipv4)
            return FabricPort(device.name, port.number, net, own, indices, port.rate_gbps, device.pci)
    stale = ", ".join(f"{gid.ipv4} at {gid.index}" for gid in candidates)
    return f"no network device has the addresses of its GID table: {stale}"


def _node_fabric(
    node: NodeSpec,
    facts: NodeFacts,
    selector: Selector,
    shared: tuple[str, str] | None,
    *,
    is_alone: bool,
) -> NodeFabric:
    usable, unusable = usable_ports(facts)
    wanted = sorted(
        (port for port in usable if str(port.address.ip) in node.fabric),
        key=lambda port: node.fabric.index(str(port.address.ip)),
    )
    reasons = [
        f"{port.selector} has {port.address.ip}, RoCE v2 at {_listed(port.gid_indices)}" for port in usable
    ]
    reasons += [f"{name} is not used: {why}" for name, why in unusable.items()]
    if selector.entries:
        wanted = [port for port in (wanted or usable) if selector.takes(port.device, port.number)]
    index, refusal = _gid_index(node, wanted, usable, unusable, selector)
    if index is not None:
        reasons.append(f"index {index} is RoCE v2 over IPv4 on {', '.join(port.selector for port in wanted)}")
    return NodeFabric(
        node=node.name,
        hca="=" + ",".join(port.selector for port in wanted) if index is not None else None,
        gid_index=index,
        socket_interface=None if shared is None else shared[0],
        rendezvous=None if shared is None else shared[1],
        ports=tuple(wanted),
        idle=tuple(port for port in usable if port not in wanted),
        unusable=unusable,
        refusal=None if is_alone else refusal,
        reasons=tuple(reasons),
    )


def _gid_index(
    node: NodeSpec,
    wanted: Sequence[FabricPort],
    usable: Sequence[FabricPort],
    unusable: Mapping[str, str],
    selector: Selector,
) -> tuple[int | None, str | None]:
    """Return the index that all `wanted` ports share, or None with the reason why that is a fault, if it is one.

    One process has one NCCL_IB_GID_INDEX, so it must be right on every device that it uses.
    """
    if not wanted:
        if selector.entries and usable:
            return None, f"NCCL_IB_HCA takes none of {', '.join(port.selector for port in usable)}"
        if node.kind not in RDMA_KINDS:
            return None, None
        if usable:
            has = ", ".join(f"{port.address.ip} on {port.selector}" for port in usable)
            return None, f"no RDMA port has {_listed(node.fabric) or 'a fabric address'}; there are {has}"
        if unusable:
            return None, "; ".join(f"{name}: {why}" for name, why in unusable.items())
        return None, None
    common = set(wanted[0].gid_indices).intersection(*(port.gid_indices for port in wanted[1:]))
    if common:
        return min(common), None
    sets = "; ".join(f"{port.selector} has {_listed(port.gid_indices)}" for port in wanted)
    return None, f"no GID index is right on all devices: {sets}"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def is_address(text: str) -> bool:
    """Whether `text` is an IP address, and not a name that is yet to be resolved."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# --- what joins the nodes


def _links(nodes: Sequence[NodeSpec], facts: Mapping[str, NodeFacts]) -> Iterable[Link]:
    """Every pair of nodes with every subnet that both have a fabric address in."""
    for one, other in itertools.combinations(nodes, 2):
        for first, second in itertools.product(
            _fabric_addresses(one, facts[one.name]), _fabric_addresses(other, facts[other.name])
        ):
            if first[1].network == second[1].network and first[1].ip != second[1].ip:
                yield Link(
                    subnet=first[1].network,
                    nodes=(one.name, other.name),
                    addresses=(str(first[1].ip), str(second[1].ip)),
                    mtus=(first[0].mtu, second[0].mtu),
                )


def _fabric_addresses(
    node: NodeSpec, facts: NodeFacts
) -> Iterable[tuple[NetDevice, ipaddress.IPv4Interface]]:
    return [(device, own) for device in facts.net for own in device.ipv4 if str(own.ip) in node.fabric]


def _topology(names: Sequence[str], links: Sequence[Link]) -> Topology:
    """Name the shape. More than two nodes in one subnet need something between them: a switch."""
    if len(names) < 2:
        return "single"
    members: dict[ipaddress.IPv4Network, set[str]] = {}
    for link in links:
        members.setdefault(link.subnet, set()).update(link.nodes)
    if any(len(nodes) == len(names) for nodes in members.values()):
        return "pair" if len(names) == 2 else "switch"
    joined = {frozenset(link.nodes) for link in links}
    if any(len(nodes) > 2 for nodes in members.values()):
        return "none"
    if len(names) == 3 and len(joined) == 3:
        return "triangle"
    degrees = [sum(name in pair for pair in joined) for name in names]
    if len(names) > 3 and all(degree == 2 for degree in degrees) and _is_connected(names, joined):
        return "ring"
    return "none"


def _is_connected(names: Sequence[str], joined: Iterable[frozenset[str]]) -> bool:
    pairs = list(joined)
    reached = {names[0]}
    while True:
        more = {name for pair in pairs if pair & reached for name in pair} - reached
        if not more:
            return len(reached) == len(names)
        reached |= more


def _shared_devices(nodes: Sequence[NodeSpec], facts: Mapping[str, NodeFacts]) -> dict[str, tuple[str, str]]:
    """Return each node's device and address in a subnet that all nodes share, for what every rank must reach.

    The subnet of the first fabric addresses comes first. Three nodes in a triangle share none there, and use the slow
    network. A bridge such as docker0 has one address everywhere and joins nothing.
    """
    subnets: dict[ipaddress.IPv4Network, dict[str, tuple[str, str]]] = {}
    for node in nodes:
        for device in facts[node.name].net:
            for own in device.ipv4:
                if not own.is_loopback:
                    subnets.setdefault(own.network, {}).setdefault(node.name, (device.name, str(own.ip)))
    whole = [
        found
        for found in subnets.values()
        if len(found) == len(nodes) and len({address for _, address in found.values()}) == len(nodes)
    ]

    def rank(found: dict[str, tuple[str, str]]) -> tuple[int, int]:
        first = sum(found[node.name][1] == node.fabric[0] for node in nodes if node.fabric)
        any_of = sum(found[node.name][1] in node.fabric for node in nodes)
        return -first, -any_of

    return min(whole, key=rank, default={})


def other_halves(fabric: NodeFabric, facts: NodeFacts) -> tuple[tuple[FabricPort, str], ...]:
    """Return the used ports whose card has a second PCIe function for the same socket that is not used, with its name.

    On a DGX Spark each socket of the ConnectX-7 is two functions with four lanes each, in PCIe domains of their own
    (0000:01:00.1 and 0002:01:00.1): with one of them half the bandwidth is idle.
    """
    used = {port.device for port in fabric.ports}
    halves: list[tuple[FabricPort, str]] = []
    for port in fabric.ports:
        board = next((device.board for device in facts.rdma if device.name == port.device), None)
        for device in facts.rdma:
            is_twin = (
                device.name not in used
                and device.board == board
                and _within_domain(device.pci) == _within_domain(port.pci)
                and device.pci != port.pci
            )
            if is_twin:
                halves.append((port, device.name))
    return tuple(halves)


def _within_domain(pci: str | None) -> str | None:
    """`0002:01:00.1` -> `01:00.1`."""
    return None if pci is None else pci.partition(":")[2]


__all__ = [
    "RDMA_KINDS",
    "Fabric",
    "FabricPort",
    "Link",
    "NodeFabric",
    "Selector",
    "Topology",
    "is_address",
    "other_halves",
    "parse_selector",
    "resolve_fabric",
    "usable_ports",
]
