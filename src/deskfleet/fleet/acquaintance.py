"""What nodes say of themselves, put into the draft of a fleet: kind, free memory, addresses on the fast network, homes.

Owns what is concluded from facts for a first file; the doctor judges them. Only asks, and changes nothing on a node.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from deskfleet.errors import DeskfleetError
from deskfleet.fleet.fabric import usable_ports
from deskfleet.fleet.facts import NetDevice, NodeFacts
from deskfleet.fleet.initial import PLACE, Draft, NodeDraft
from deskfleet.fleet.probe import probe
from deskfleet.fleet.remote import Remotes
from deskfleet.fleet.spec import LOCAL, NodePaths, NodeSpec
from deskfleet.planner.fleetfile import LOCAL_KIND

_KINDS = (("GB10", "spark"), ("H200", "h200"))
"""What is in the name of a GPU, and the kind of node it makes."""


async def get_acquainted(draft: Draft) -> Draft:
    """Return `draft` with what its nodes say. Raises DeskfleetError naming every node that could not be asked."""
    async with Remotes([_spec(node, draft) for node in draft.nodes]) as remotes:
        found = await remotes.gather(probe)
    try:
        return concluded(draft, found.all().values())
    except DeskfleetError as error:
        raise DeskfleetError(
            error.message, hint=f"{error.hint or ''}; or --no-probe, from addresses alone"
        ) from None


def _spec(node: NodeDraft, draft: Draft) -> NodeSpec:
    paths = NodePaths(node.checkpoint or draft.checkpoint, f"{draft.cache}/engram", draft.cache)
    return NodeSpec(node.name, node.address, node.user, node.port, None, node.fabric, "", None, paths)


def concluded(draft: Draft, facts: Iterable[NodeFacts]) -> Draft:
    """Return `draft` with what follows from the facts of its nodes, in order. What is said in it already stays."""
    known = list(facts)
    nodes = tuple(
        _node(node, each, known, num_nodes=len(draft.nodes))
        for node, each in zip(draft.nodes, known, strict=True)
    )
    if draft.checkpoint == f"{PLACE}/checkpoint":
        head, *_ = homes = [_place(each) for each in known]
        draft = replace(draft, checkpoint=f"{head}/checkpoint", cache=f"{head}/cache")
        nodes = tuple(
            node
            if home == head
            else replace(node, checkpoint=node.checkpoint or f"{home}/checkpoint", cache=f"{home}/cache")
            for node, home in zip(nodes, homes, strict=True)
        )
    return replace(draft, nodes=nodes)


def _place(facts: NodeFacts) -> str:
    """A directory that whoever logs in there can write: below home, for root below /srv."""
    return PLACE if facts.uid == 0 or not facts.home else f"{facts.home.rstrip('/')}/deskfleet"


def _node(node: NodeDraft, facts: NodeFacts, known: list[NodeFacts], *, num_nodes: int) -> NodeDraft:
    kind = _kind(facts)
    is_unified = kind == "spark"
    fabric = node.fabric or _fabric(node, facts, known, num_nodes)
    title = ", ".join(
        text for text in (facts.product, facts.arch, facts.os, f"kernel {facts.kernel}") if text
    )
    notes = [title]
    if facts.gpus:
        notes.append(f"{facts.gpus[0].name}, driver {facts.gpus[0].driver}")
    if kind is None:
        notes.append("Its GPU is of no kind that the planner knows: nothing can be planned for it yet.")
    if facts.docker is None:
        notes.append(f"No docker there: {facts.unknown.get('docker', 'unknown why')}")
    return replace(
        node,
        kind=node.kind or kind,
        fabric=fabric if fabric != (node.address,) else (),
        available_bytes=facts.memory.available_bytes if is_unified and facts.memory else None,
        notes=(*node.notes, *notes),
    )


def _kind(facts: NodeFacts) -> str | None:
    """The planner's kind; None for a GPU that it does not know."""
    if not facts.gpus:
        return LOCAL_KIND
    return next((kind for part, kind in _KINDS if part in facts.gpus[0].name), None)


def _fabric(node: NodeDraft, facts: NodeFacts, known: list[NodeFacts], num_nodes: int) -> tuple[str, ...]:
    """Addresses that share a subnet with another node: of RDMA ports where there are some, the fastest first."""
    fast = {port.net.name for port in usable_ports(facts)[0]}
    others = {
        interface.network
        for each in known
        if each is not facts
        for device in each.net
        for interface in device.ipv4
    }

    def shared(devices: Iterable[NetDevice]) -> tuple[str, ...]:
        return tuple(
            str(interface.ip)
            for device in sorted(devices, key=lambda device: -(device.speed_mbps or 0))
            for interface in device.ipv4
            if interface.network in others and not interface.is_loopback
        )

    up = [device for device in facts.net if device.state != "down"]
    found = shared(device for device in up if device.name in fast)
    if found or node.address != LOCAL or num_nodes == 1:
        return found
    # Other nodes cannot reach `local`: any address that they share will do until somebody says a better one.
    return shared(up)[:1]


__all__ = ["concluded", "get_acquainted"]
