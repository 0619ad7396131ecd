"""Asks every node what it is, and every check what it thinks of that. Owns who is asked what, and the verdict.

`examine` is pure; `see_doctor` gathers what it needs. Changes nothing on any node.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deskfleet.errors import DeskfleetError
from deskfleet.fleet.checks import CHECKS, Finding, Subject
from deskfleet.fleet.checks.machine import PORTS, taken_hint
from deskfleet.fleet.engines.contract import ports_of
from deskfleet.fleet.fabric import Fabric, resolve_fabric
from deskfleet.fleet.facts import NodeFacts
from deskfleet.fleet.links import LinkMeasure, measure_links
from deskfleet.fleet.probe import probe
from deskfleet.fleet.remote import Remotes
from deskfleet.fleet.render import FLEET_LABEL
from deskfleet.fleet.spec import LOCAL, FleetSpec, NodeSpec
from deskfleet.planner.plan import MemoryPlan

UNREACHABLE = "ssh"
"""The check that fails for a node of which there are no facts."""

HERE = "this machine"
"""Where deskfleet runs, in the one finding about it when it is no node; no node can be called so."""

_HCA = "NCCL_IB_HCA"
_NATIVE = "native"


@dataclass(frozen=True, slots=True)
class Examination:
    """What the doctor found. `unreachable` are nodes of which nothing is known, with the reason."""

    findings: tuple[Finding, ...]
    facts: Mapping[str, NodeFacts]
    fabric: Fabric
    unreachable: Mapping[str, DeskfleetError]

    @property
    def counts(self) -> Counter[str]:
        """How many findings there are of each verdict."""
        return Counter(finding.verdict for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0 when nothing fails, 1 when a check does, 3 when a node cannot be reached."""
        if self.unreachable:
            return 3
        return 1 if self.counts["fail"] else 0

    @property
    def obstacles(self) -> tuple[Finding, ...]:
        """The failures with which nothing can be launched."""
        musts = {check.name for check in CHECKS if check.is_must}
        return tuple(each for each in self.findings if each.verdict == "fail" and each.check in musts)


def examine(
    spec: FleetSpec,
    facts: Mapping[str, NodeFacts],
    plan: MemoryPlan | None = None,
    *,
    links: Sequence[LinkMeasure] = (),
) -> tuple[Finding, ...]:
    """Ask every check of every node of which there are facts, in the order of the fleet and of the table.

    Raises ConfigError for an NCCL_IB_HCA in the fleet's file that NCCL would misread.
    """
    fabric = resolve_fabric(spec.nodes, facts, hca=spec.engine.env.get(_HCA, ""))
    findings = []
    for node in spec.nodes:
        if node.name not in facts:
            continue
        subject = Subject(
            spec=spec,
            node=node,
            facts=facts[node.name],
            everyone=facts,
            fabric=fabric,
            links=tuple(link for link in links if link.source == node.name),
            plan=plan,
            ports=_ports(spec, node),
        )
        for check in CHECKS:
            outcome = check.examine(subject)
            findings.append(Finding(node.name, check.name, outcome.verdict, outcome.measured, outcome.hint))
    return tuple(findings)


async def see_doctor(
    spec: FleetSpec,
    remotes: Remotes,
    plan: MemoryPlan | None = None,
    *,
    with_traffic: bool = True,
) -> Examination:
    """Probe all nodes at once, try their links unless not `with_traffic`, and examine.

    A node that cannot be reached is a finding, and the others are examined all the same. Raises ConfigError as
    `examine` does.
    """
    image = spec.engine.image
    gathered = await remotes.gather(lambda remote: probe(remote, image=image))
    facts = gathered.results
    fabric = resolve_fabric(spec.nodes, facts, hca=spec.engine.env.get(_HCA, ""))
    busy = {name for name, each in facts.items() if _serves(spec, each)}
    links = await measure_links(remotes, fabric, busy=busy) if with_traffic else ()
    unreachable = tuple(
        Finding(name, UNREACHABLE, "fail", error.message, error.hint)
        for name, error in gathered.failures.items()
    )
    findings = examine(spec, facts, plan, links=links)
    return Examination(
        (*unreachable, *findings, *_here(spec, is_busy=bool(busy))), facts, fabric, gathered.failures
    )


def _ports(spec: FleetSpec, node: NodeSpec) -> tuple[int, ...]:
    """Those that must be free on a node."""
    ports = ports_of(spec.name)
    http = () if spec.engine.name == _NATIVE else (ports.engine,)
    of_head = (*http, ports.rendezvous) if node == spec.head else ()
    return (*of_head, *(_own_ports(spec) if node.address == LOCAL else ()))


def _own_ports(spec: FleetSpec) -> tuple[int, ...]:
    """Those that must be free where deskfleet runs: the gateway's, and where ranks of our own engine dial in."""
    dialled = (ports_of(spec.name).engine,) if spec.engine.name == _NATIVE else ()
    return (*dialled, *((spec.gateway.port,) if spec.gateway.port else ()))  # 0 is any that is free


def _here(spec: FleetSpec, *, is_busy: bool) -> tuple[Finding, ...]:
    """The ports of this machine, when it is none of the nodes and so nobody has looked."""
    if any(node.address == LOCAL for node in spec.nodes) or not _own_ports(spec):
        return ()
    taken = [port for port in _own_ports(spec) if not _is_free(port)]
    told = ", ".join(map(str, taken or _own_ports(spec)))
    if not taken:
        return (Finding(HERE, PORTS, "pass", f"{told} free", None),)
    if is_busy:
        return (Finding(HERE, PORTS, "skip", f"{told} taken, and a rank of this fleet runs", None),)
    return (Finding(HERE, PORTS, "fail", f"{told} taken", taken_hint(taken[0])),)


def _is_free(port: int) -> bool:
    """Whether somebody could listen there now. As servers do it: what is closing does not count."""
    with socket.socket() as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind(("", port))
        except OSError:
            return False
    return True


def _serves(spec: FleetSpec, facts: NodeFacts) -> bool:
    return any(
        each.state == "running" and each.labels.get(FLEET_LABEL) == spec.name
        for each in facts.containers or ()
    )


__all__ = ["Examination", "examine", "see_doctor"]
