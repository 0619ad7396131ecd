"""Links measured for real over the loopback device, and what is made of what ping and the sender print."""

from __future__ import annotations

import ipaddress
import shutil
from pathlib import Path

import pytest

from deskfleet.fleet.fabric import Fabric, Link, NodeFabric
from deskfleet.fleet.links import measure_links, read_pings, read_rate
from deskfleet.fleet.remote import Ran, Remotes
from deskfleet.fleet.spec import LOCAL, NodePaths, NodeSpec

NAMES = ("a", "b")
NODES = tuple(
    NodeSpec(name, LOCAL, None, None, None, (), "local", None, NodePaths("/a", "/b", "/c")) for name in NAMES
)
NOTHING = {name: NodeFabric(name, None, None, "lo", None, (), (), {}, None, ()) for name in NAMES}


def joined(mtus: tuple[int, int], second: str = "127.0.0.3") -> Fabric:
    link = Link(ipaddress.IPv4Network("127.0.0.0/8"), ("a", "b"), ("127.0.0.2", second), mtus)
    return Fabric("pair", NOTHING, (link,), ())


@pytest.mark.skipif(shutil.which("ping") is None, reason="needs ping: apt-get install iputils-ping")
async def test_both_ways_of_a_link() -> None:
    async with Remotes(NODES) as remotes:
        there, back = await measure_links(remotes, joined((9000, 65536)))
    assert (there.source, there.target, back.source, back.target) == ("a", "b", "b", "a")
    assert (there.source_address, there.target_address) == ("127.0.0.2", "127.0.0.3")
    assert (there.is_reached, there.is_whole, there.how) == (True, True, "TCP"), there
    assert (back.is_reached, back.is_whole) == (True, False), "no IPv4 packet has 65536 bytes"
    for way in (there, back):
        assert way.rtt_s is not None
        assert 0 < way.rtt_s < 1
        assert way.bytes_per_s is not None, way.bandwidth_why
        assert way.bytes_per_s > 1e7


async def test_a_node_that_serves_is_not_disturbed_and_what_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("bash", "head", "cat", "sleep"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tmp_path))
    async with Remotes(NODES) as remotes:
        bare, _ = await measure_links(remotes, joined((1500, 1500)))
        busy, _ = await measure_links(remotes, joined((1500, 1500)), busy=("b",))
    assert (bare.why, bare.is_reached, bare.is_whole) == ("there is no program ping", None, None)
    assert bare.bandwidth_why == "neither ib_write_bw nor python3 is on both nodes"
    assert busy.bandwidth_why == "a rank runs there, and is not disturbed"
    assert (bare.bytes_per_s, busy.bytes_per_s) == (None, None)


def test_pings_and_rates_are_read() -> None:
    small = "5 packets transmitted, 5 received, 0% packet loss\nrtt min/avg/max/mdev = 0.041/0.052/0.066/0.008 ms\n"
    cut = "ping: local error: message too long, mtu=1500\n2 packets transmitted, 0 received, +2 errors\n"
    assert read_pings(Ran(0, f"{small}code 0\n{cut}code 1\n", "")) == {
        "is_reached": True,
        "is_whole": False,
        "rtt_s": 0.052e-3,
    }
    assert read_pings(Ran(1, "", "there is no program ping\n")) == {"why": "there is no program ping"}
    refused = read_pings(Ran(0, "ping: socket: Operation not permitted\ncode 2\nx\ncode 2\n", ""))
    assert refused == {"why": "ping: socket: Operation not permitted"}
    assert read_rate(Ran(0, "tcp 1000000000 0.5\n", "")) == {"how": "TCP", "bytes_per_s": 2e9}
    assert read_rate(Ran(0, "rdma 98.5\n", ""))["bytes_per_s"] == pytest.approx(12.3e9, rel=0.01)
    assert read_rate(Ran(0, "rdma \n", "")) == {"bandwidth_why": "rdma"}
    assert read_rate(Ran(1, "", "no route\n")) == {"bandwidth_why": "no route"}
