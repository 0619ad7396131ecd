"""Machines from a file: what is read, and how each mistake is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from deskfleet.errors import ConfigError
from deskfleet.planner.cluster import GIB, SPARK
from deskfleet.planner.fleetfile import read_fleet, this_machine, with_available


def fleet(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(text, encoding="utf-8")
    return path


def node(name: str, kind: str = "spark", more: str = "") -> str:
    return f'[[nodes]]\nname = "{name}"\nkind = "{kind}"\n{more}\n'


def test_nodes_in_order_with_what_was_measured(tmp_path: Path) -> None:
    path = fleet(
        tmp_path,
        node("head", more='available = "102 GiB"') + node("two", more="available = 9") + node("three"),
    )
    cluster = read_fleet(path)
    assert [(each.name, each.available_bytes) for each in cluster.nodes] == [
        ("head", 102 * GIB),
        ("two", 9),
        ("three", SPARK.available_bytes),
    ]
    assert (cluster.kind, cluster.origin) == (SPARK, "3xspark")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[nodes]\n", "is not TOML"),
        ("", "nodes: field required"),
        ("nodes = []", "nodes is []: list should have at least 1 item"),
        ('[[nodes]]\nname = "a"', "fleet.toml:1: nodes[0].kind: field required"),
        (node("a", more='colour = "red"'), "fleet.toml:4: nodes[0].colour: unknown key"),
        ("port = 1\n" + node("a"), "fleet.toml:1: port: unknown key"),
        (node("a", "sparc"), "unknown kind of node 'sparc'"),
        (node("a") + node("b", "h200"), "nodes of several kinds: h200, spark"),
        (node("a") + node("a"), "two nodes of one name: a, a"),
        (node("a", more='available = "5G"'), "nodes[0].available is '5G': not a byte quantity: '5G'"),
        (node("a", more="available = 0"), "nodes[0].available is 0: input should be greater than 0"),
        (node("a", more='available = "1TiB"'), "a has 1099511627776 bytes available of"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = fleet(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        read_fleet(path)
    assert str(path) in raised.value.message
    assert message in raised.value.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        read_fleet(tmp_path / "none.toml")


def test_this_machine_is_what_the_kernel_says(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  2000 kB\nMemFree: 7 kB\nMemAvailable:   1500 kB\nHugePages_Total: 0\n")
    cluster = this_machine(meminfo)
    assert (cluster.kind.total_bytes, cluster.nodes[0].available_bytes) == (2000 * 1024, 1500 * 1024)
    assert (cluster.kind.arch, cluster.origin) == ("cpu", "local")
    meminfo.write_text("MemTotal: 2000 kB\n")
    with pytest.raises(ConfigError, match="cannot tell this machine's memory"):
        this_machine(meminfo)


def test_more_cannot_be_free_than_there_is(tmp_path: Path) -> None:
    cluster = read_fleet(fleet(tmp_path, node("a") + node("b")))
    assert [each.available_bytes for each in with_available(cluster, 5).nodes] == [5, 5]
    for wrong in (0, SPARK.total_bytes + 1):
        with pytest.raises(ConfigError, match=f"{wrong} bytes available on a spark"):
            with_available(cluster, wrong)
