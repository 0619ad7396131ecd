"""How packets pass between nodes: small ones, whole ones, and how many bytes a second. Owns the measuring.

It sends a little: some packets over every link both ways, and a second of traffic from each node to the next, one after
another so that no measurement is another's neighbour. A node on which a rank runs is left in peace.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from deskfleet.errors import DeskfleetError
from deskfleet.fleet.fabric import Fabric, FabricPort, Link, NodeFabric
from deskfleet.fleet.probe import read_script
from deskfleet.fleet.remote import Ran, Remote, Remotes

_HEADERS_BYTES = 28  # IPv4 and ICMP, which an MTU counts and ping's -s does not
_PORT = 18515
_RDMA, _TCP = "ib_write_bw", "python3"
_AT_ONCE = 4
_PING_S = 20.0
_BANDWIDTH_S = 20.0


@dataclass(frozen=True, slots=True)
class LinkMeasure:
    """What passed from `source` to `target`. None is unknown, and `why` or `bandwidth_why` say why.

    `is_whole`: whether packets of `mtu` bytes pass without being cut. `how` is what carried the bytes: RDMA or TCP.
    """

    source: str
    target: str
    source_address: str
    target_address: str
    mtu: int | None
    is_reached: bool | None = None
    is_whole: bool | None = None
    rtt_s: float | None = None
    why: str | None = None
    how: str = ""
    bytes_per_s: float | None = None
    bandwidth_why: str | None = None


async def measure_links(
    remotes: Remotes, fabric: Fabric, *, busy: Collection[str] = ()
) -> tuple[LinkMeasure, ...]:
    """Try every link both ways with packets; then send for a second from each node to the next, `busy` ones left out.

    A node that is lost meanwhile makes its links unknown, and raises nothing.
    """
    names = list(fabric.nodes)
    ways = [_Way(link, end) for link in fabric.links for end in (0, 1)]
    # One connection carries ten scripts at once, as sshd comes.
    turns = {name: asyncio.Semaphore(_AT_ONCE) for name in names}
    packets = await asyncio.gather(*(_packets(remotes[way.source], way, turns[way.source]) for way in ways))
    programs = dict(
        zip(names, await asyncio.gather(*(_programs(remotes[name]) for name in names)), strict=True)
    )
    measured = []
    for way, found in zip(ways, packets, strict=True):
        if way.source in busy or way.target in busy:
            rate: dict[str, object] = {"bandwidth_why": "a rank runs there, and is not disturbed"}
        elif found.get("is_reached") is False:
            rate = {"bandwidth_why": "no packet passes"}
        elif names[(names.index(way.source) + 1) % len(names)] != way.target:
            rate = {"bandwidth_why": "each node sends to the next alone"}
        else:
            rate = await _rate(remotes, fabric.nodes, way, programs[way.source] & programs[way.target])
        measured.append(way.measure({**found, **rate}))
    return tuple(measured)


@dataclass(frozen=True, slots=True)
class _Way:
    """A link in one direction: from its end number `end`."""

    link: Link
    end: int

    @property
    def source(self) -> str:
        return self.link.nodes[self.end]

    @property
    def target(self) -> str:
        return self.link.nodes[1 - self.end]

    @property
    def addresses(self) -> tuple[str, str]:
        return self.link.addresses[self.end], self.link.addresses[1 - self.end]

    @property
    def mtu(self) -> int | None:
        return self.link.mtus[self.end]

    def measure(self, found: Mapping[str, object]) -> LinkMeasure:
        return LinkMeasure(self.source, self.target, *self.addresses, self.mtu, **found)  # type: ignore[arg-type]


async def _packets(remote: Remote, way: _Way, turn: asyncio.Semaphore) -> dict[str, object]:
    payload = str((way.mtu or 1500) - _HEADERS_BYTES)
    try:
        async with turn:
            ran = await remote.run(read_script("ping.sh"), *way.addresses, payload, timeout_s=_PING_S)
    except DeskfleetError as error:
        return {"why": error.message}
    return read_pings(ran)


def read_pings(ran: Ran) -> dict[str, object]:
    """Make sense of what scripts/ping.sh printed."""
    codes = [int(code) for code in re.findall(r"^code (\d+)$", ran.stdout, re.MULTILINE)]
    if ran.returncode != 0 or len(codes) != 2:
        return {"why": ran.last_line}
    small = ran.stdout.partition("code ")[0]
    if codes[0] == 2:  # ping itself could not be used, so nothing is known of the way
        return {"why": " ".join(small.split())[-200:]}
    times = re.search(r"= [\d.]+/([\d.]+)/", small)
    return {
        "is_reached": codes[0] == 0,
        "is_whole": codes[1] == 0,
        "rtt_s": float(times[1]) / 1e3 if times else None,
    }


async def _programs(remote: Remote) -> frozenset[str]:
    """Which of the programs that can send are on the node; none when it is lost."""
    try:
        ran = await remote.run(
            "for name; do command -v $name >/dev/null && echo $name; done; true", _RDMA, _TCP
        )
    except DeskfleetError:
        return frozenset()
    return frozenset(ran.stdout.split())


async def _rate(
    remotes: Remotes, nodes: Mapping[str, NodeFabric], way: _Way, programs: Collection[str]
) -> dict[str, object]:
    """Send for a second from one end to the other, over RDMA where both ends have it and its program."""
    here, there = remotes[way.source], remotes[way.target]
    ports = _port_of(nodes[way.source], way.addresses[0]), _port_of(nodes[way.target], way.addresses[1])
    is_rdma = None not in ports and _RDMA in programs
    if not is_rdma and _TCP not in programs:
        return {"bandwidth_why": f"neither {_RDMA} nor {_TCP} is on both nodes"}
    chosen = ports if is_rdma else (None, None)
    try:
        script = read_script("bandwidth.sh")
        own, other = way.addresses
        receiving = asyncio.create_task(
            there.run(
                script, "receive", other, own, str(_PORT), *_rdma_words(chosen[1]), timeout_s=_BANDWIDTH_S
            )
        )
        try:
            sent = await here.run(
                script, "send", own, other, str(_PORT), *_rdma_words(chosen[0]), timeout_s=_BANDWIDTH_S
            )
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
    except DeskfleetError as error:
        return {"bandwidth_why": error.message}
    return read_rate(sent)


def read_rate(ran: Ran) -> dict[str, object]:
    """Make sense of what scripts/bandwidth.sh printed on the sending end."""
    words = ran.stdout.split()
    try:
        if ran.returncode == 0 and words[0] == "tcp":
            return {"how": "TCP", "bytes_per_s": int(words[1]) / float(words[2])}
        if ran.returncode == 0 and words[0] == "rdma":
            return {"how": "RDMA", "bytes_per_s": float(words[1]) * 1e9 / 8}
    except (IndexError, ValueError):
        pass
    return {"bandwidth_why": ran.last_line}


def _port_of(node: NodeFabric, address: str) -> tuple[FabricPort, int] | None:
    """The RDMA port with that address and its GID index, if it is used."""
    return next(((port, port.gid_indices[0]) for port in node.ports if str(port.address.ip) == address), None)


def _rdma_words(port: tuple[FabricPort, int] | None) -> tuple[str, str, str]:
    return ("", "", "") if port is None else (port[0].device, str(port[0].number), str(port[1]))


__all__ = ["LinkMeasure", "measure_links", "read_pings", "read_rate"]
