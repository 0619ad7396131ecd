"""What ranks are told of the fast network, on trees of sysfs: each fault of a GID table, and each shape of a fleet."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from recorded import Changes, facts_of

from deskfleet.errors import ConfigError
from deskfleet.fleet.fabric import (
    Fabric,
    NodeFabric,
    is_address,
    other_halves,
    parse_selector,
    resolve_fabric,
    usable_ports,
)
from deskfleet.fleet.facts import Address, NetDevice, NodeFacts
from deskfleet.fleet.spec import NodePaths, NodeSpec

ONE = "sys/class/infiniband/rocep1s0f1/ports/1"
TWO = "sys/class/infiniband/roceP2p1s0f1/ports/1"
BOTH = "=rocep1s0f1:1,roceP2p1s0f1:1"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
FIRST, SECOND = "0000:0000:0000:0000:0000:ffff:0a00:1601", "0000:0000:0000:0000:0000:ffff:0a00:1701"


def node(number: int, *fabric: str) -> NodeSpec:
    name = f"spark-{number}"
    return NodeSpec(name, name, None, None, None, fabric, "spark", None, NodePaths("/a", "/b", "/c"))


def moved(port: str, gid: str, device: str, *indices: int) -> dict[str, str | None]:
    """A GID table whose RoCE v2 entries for `gid` stand at `indices`, with a hole at 3 otherwise."""
    changes: dict[str, str | None] = {f"{port}/gids/3": ZERO, f"{port}/gid_attrs/types/3": None}
    for index in indices:
        changes |= {
            f"{port}/gids/{index}": gid,
            f"{port}/gid_attrs/types/{index}": "RoCE v2",
            f"{port}/gid_attrs/ndevs/{index}": device,
        }
    return changes


def first(*indices: int) -> dict[str, str | None]:
    return moved(ONE, FIRST, "enp1s0f1np1", *indices)


def second(*indices: int) -> dict[str, str | None]:
    return moved(TWO, SECOND, "enP2p1s0f1np1", *indices)


LINK_LOCAL: Changes = {f"{port}/gids/{index}": ZERO for port in (ONE, TWO) for index in (2, 3)}
DOWN = {f"{TWO}/state": "1: DOWN", f"{TWO}/phys_state": "3: Disabled"}


@pytest.mark.parametrize(
    ("changes", "hca", "expected", "index", "told"),
    [
        pytest.param({}, "", BOTH, 3, "index 3 is RoCE v2", id="at 3"),
        pytest.param({**first(4), **second(4)}, "", BOTH, 4, "index 4 is RoCE v2", id="at 4, a hole at 3"),
        pytest.param(LINK_LOCAL, "", None, None, "only link-local ones, at 1", id="only link-local"),
        pytest.param(
            second(4),
            "",
            None,
            None,
            "no GID index is right on all devices: rocep1s0f1:1 has 3; roceP2p1s0f1:1 has 4",
            id="two devices with different indices",
        ),
        pytest.param(
            second(4), "=roceP2p1s0f1", "=roceP2p1s0f1:1", 4, "index 4", id="the user names one of them"
        ),
        pytest.param({**first(3, 5), **second(4, 5)}, "", BOTH, 5, "index 5", id="one index in common"),
        pytest.param(
            DOWN, "", "=rocep1s0f1:1", 3, "roceP2p1s0f1:1 is not used: its state is DOWN", id="port down"
        ),
        pytest.param(
            {f"{ONE}/state": "1: DOWN", **DOWN},
            "",
            None,
            None,
            "rocep1s0f1:1: its state is DOWN",
            id="all ports down",
        ),
        pytest.param(
            {f"{ONE}/link_layer": "InfiniBand"}, "", "=roceP2p1s0f1:1", 3, "not Ethernet", id="InfiniBand"
        ),
        pytest.param(
            {f"{ONE}/gid_attrs/types/3": "IB/RoCE v1"},
            "",
            "=roceP2p1s0f1:1",
            3,
            "no RoCE v2 entry",
            id="only v1",
        ),
        pytest.param(
            {f"{ONE}/gids/3": "0000:0000:0000:0000:0000:ffff:a9fe:0105"},
            "",
            "=roceP2p1s0f1:1",
            3,
            "no RoCE v2 entry for an IPv4 address",
            id="169.254 is link-local too",
        ),
        pytest.param(
            {f"{ONE}/gids/3": "0000:0000:0000:0000:0000:ffff:0a00:1663"},
            "",
            "=roceP2p1s0f1:1",
            3,
            "no network device has the addresses of its GID table: 10.0.22.99 at 3",
            id="an entry that outlived its address",
        ),
        pytest.param({}, "^rocep1s0f1", "=roceP2p1s0f1:1", 3, "index 3", id="left out by name"),
        pytest.param({}, "rocep1", "=rocep1s0f1:1", 3, "index 3", id="by the beginning of its name"),
        pytest.param({}, "=rocep1s0f1:2", None, None, "NCCL_IB_HCA takes none of", id="a port it has not"),
        pytest.param({"sys/class/infiniband/*": None}, "", None, None, "", id="no RDMA device"),
    ],
)
def test_the_index_of_a_node(
    changes: Changes, hca: str, expected: str | None, index: int | None, told: str
) -> None:
    found = one(facts_of("spark", 1, changes), hca)
    assert (found.hca, found.gid_index) == (expected, index)
    assert found.hca != ""
    said = f"{found.refusal or ''} {' '.join(found.reasons)}"
    assert told in said
    if expected is None and told:
        assert found.refusal is not None


def one(facts: NodeFacts, hca: str = "") -> NodeFabric:
    """What is said of the first of two nodes, of which the other could not be asked."""
    nodes = [node(1, "10.0.22.1", "10.0.23.1"), node(2, "10.0.22.2", "10.0.23.2")]
    return resolve_fabric(nodes, {"spark-1": facts}, hca=hca).nodes["spark-1"]


def test_each_node_has_its_own_index() -> None:
    """A table that moved on one node only: one literal for all would be wrong on it."""
    at_four = facts_of("spark", 1, {**first(4), **second(4)})
    facts = {"spark-1": at_four, "spark-2": facts_of("spark", 2)}
    found = resolve_fabric([node(1, "10.0.22.1", "10.0.23.1"), node(2, "10.0.22.2", "10.0.23.2")], facts)
    assert {name: each.gid_index for name, each in found.nodes.items()} == {"spark-1": 4, "spark-2": 3}
    assert found.topology == "pair"


def test_addresses_that_are_on_no_rdma_port_are_told_with_those_that_are() -> None:
    facts = {"spark-1": facts_of("spark", 1)}
    found = resolve_fabric([node(1, "192.168.1.11"), node(2, "192.168.1.12")], facts).nodes["spark-1"]
    assert (found.hca, found.gid_index) == (None, None)
    assert found.refusal == (
        "no RDMA port has 192.168.1.11; there are 10.0.23.1 on roceP2p1s0f1:1, 10.0.22.1 on rocep1s0f1:1"
    )


def test_without_rdma_only_a_kind_that_needs_it_is_refused() -> None:
    facts = {"spark-1": facts_of("spark", 1, {f"{ONE}/state": "1: DOWN", **DOWN})}
    both = node(1, "192.168.1.11"), node(2, "192.168.1.12")
    assert resolve_fabric(both, facts).nodes["spark-1"].refusal is not None
    assert resolve_fabric(both[:1], facts).nodes["spark-1"].refusal is None
    others = [replace(each, kind="local") for each in both]
    assert resolve_fabric(others, facts).nodes["spark-1"].refusal is None


def test_the_idle_half_of_a_socket_is_named() -> None:
    facts = facts_of("spark", 1)
    ports, unusable = usable_ports(facts)
    assert {port.device for port in ports} == {"rocep1s0f1", "roceP2p1s0f1"}
    assert set(unusable) == {"rocep1s0f0:1", "roceP2p1s0f0:1"}
    whole = one(facts)
    assert other_halves(whole, facts) == ()
    half = resolve_fabric([node(1, "10.0.22.1")], {"spark-1": facts}).nodes["spark-1"]
    assert [(port.device, twin) for port, twin in other_halves(half, facts)] == [
        ("rocep1s0f1", "roceP2p1s0f1")
    ]


@pytest.mark.parametrize(
    ("text", "device", "port", "is_taken"),
    [
        ("", "mlx5_0", 1, True),
        ("mlx5_1", "mlx5_10", 1, True),
        ("=mlx5_1", "mlx5_10", 1, False),
        ("=mlx5_1:1", "mlx5_1", 1, True),
        ("=mlx5_1:2", "mlx5_1", 1, False),
        ("=mlx5_1:1:0:1", "mlx5_1", 1, True),
        ("^mlx5_1", "mlx5_10", 1, False),
        ("^=mlx5_1", "mlx5_10", 1, True),
        ("^=mlx5_1,mlx5_2:2", "mlx5_2", 1, True),
        ("mlx5_0,,mlx5_3", "mlx5_3", 1, True),
    ],
)
def test_a_selector_is_read_as_nccl_reads_it(text: str, device: str, port: int, is_taken: bool) -> None:
    assert parse_selector(text).takes(device, port) is is_taken


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (",".join(f"mlx5_{n}" for n in range(33)), "33 devices"),
        ("m" * 64, "no device name"),
        ("mlx5_0, mlx5_1", "' mlx5_1' is no device name"),
        (":1", "'' is no device name"),
        ("mlx5_0:one", "is not name"),
        ("mlx5_0:1:2:3:4", "is not name"),
    ],
)
def test_a_selector_that_nccl_would_misread_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_selector(text)


# --- shapes


def fleet(*nodes: tuple[str, ...], mtus: dict[int, int] | None = None) -> Fabric:
    """Sparks with these fabric addresses, all of /24, and 192.168.1.N on the slow network."""
    template = facts_of("spark", 1)
    specs, facts = [], {}
    for number, addresses in enumerate(nodes, start=1):
        devices = {device.name: device for device in template.net}
        devices["docker0"] = replace_addresses(devices["docker0"], "172.17.0.1/16")
        devices["enP7s7"] = replace_addresses(devices["enP7s7"], f"192.168.1.{number}/24")
        texts = [f"{address}/24" for address in addresses if is_address(address)]
        for name, own in zip(("enp1s0f1np1", "enP2p1s0f1np1"), (texts[:1], texts[1:]), strict=True):
            devices[name] = replace_addresses(devices[name], *own)
        if mtus and number in mtus:
            devices["enp1s0f1np1"] = msgspec.structs.replace(devices["enp1s0f1np1"], mtu=mtus[number])
        specs.append(node(number, *addresses))
        # A bridge that is the same everywhere comes first, as `ip address` may well list it.
        net = (devices.pop("docker0"), *devices.values())
        facts[f"spark-{number}"] = msgspec.structs.replace(template, node=f"spark-{number}", net=net)
    return resolve_fabric(specs, facts)


def replace_addresses(device: NetDevice, *texts: str) -> NetDevice:
    return msgspec.structs.replace(device, addresses=tuple(Address(text=t, is_permanent=True) for t in texts))


TRIANGLE = (("10.0.12.1", "10.0.13.1"), ("10.0.12.2", "10.0.23.2"), ("10.0.13.3", "10.0.23.3"))
OTHER_TRIANGLE = (("10.0.45.4", "10.0.46.4"), ("10.0.45.5", "10.0.56.5"), ("10.0.46.6", "10.0.56.6"))
RING = (
    ("10.0.12.1", "10.0.41.1"),
    ("10.0.12.2", "10.0.23.2"),
    ("10.0.23.3", "10.0.34.3"),
    ("10.0.34.4", "10.0.41.4"),
)


@pytest.mark.parametrize(
    ("nodes", "topology", "missing", "interface"),
    [
        ([("10.0.1.1",)], "single", 0, "enp1s0f1np1"),
        ([("10.0.1.1",), ("10.0.1.2",)], "pair", 0, "enp1s0f1np1"),
        ([("10.0.1.1", "10.0.2.1"), ("10.0.1.2", "10.0.2.2")], "pair", 0, "enp1s0f1np1"),
        ([("10.0.1.1",), ("10.0.2.2",)], "none", 1, "enP7s7"),
        (TRIANGLE, "triangle", 0, "enP7s7"),
        ((*TRIANGLE[:2], ("10.0.13.3",)), "none", 1, "enP7s7"),
        ([(f"10.0.1.{n}",) for n in range(1, 4)], "switch", 0, "enp1s0f1np1"),
        ([(f"10.0.1.{n}", f"10.0.2.{n}") for n in range(1, 9)], "switch", 0, "enp1s0f1np1"),
        (RING, "ring", 2, "enP7s7"),
        ((*RING[:3], ("10.0.34.4",)), "none", 3, "enP7s7"),
        ([*RING[:2], ("10.0.55.3", "10.0.66.3"), ("10.0.55.4", "10.0.66.4")], "none", 4, "enP7s7"),
        ((*TRIANGLE, *OTHER_TRIANGLE), "none", 9, "enP7s7"),
        ([("spark-1.local",), ("spark-2.local",)], "none", 1, "enP7s7"),
    ],
)
def test_what_joins_the_nodes(
    nodes: list[tuple[str, ...]], topology: str, missing: int, interface: str
) -> None:
    found = fleet(*nodes)
    assert found.topology == topology
    assert len(found.missing) == missing
    assert {each.socket_interface for each in found.nodes.values()} == {interface}
    addresses = [each.rendezvous for each in found.nodes.values()]
    assert len(set(addresses)) == len(nodes)


def test_two_ends_with_different_mtus_are_one_link() -> None:
    links = fleet(("10.0.1.1",), ("10.0.1.2",), mtus={2: 1500}).links
    assert [(link.nodes, link.mtus, link.has_equal_mtu) for link in links] == [
        (("spark-1", "spark-2"), (9000, 1500), False)
    ]
    assert replace(links[0], mtus=(9000, None)).has_equal_mtu
