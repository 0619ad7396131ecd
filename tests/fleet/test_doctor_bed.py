"""The doctor on a whole fleet: real links with real faults, other users and images, nodes that refuse us."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from bed import FABRIC, Bed, EngineImage, NodeSetup, bed

pytestmark = pytest.mark.fleet

OTHER = EngineImage(variant="other")


def see(made: Bed, *words: str) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """The doctor's exit code, and its findings by node and check, as asked for on the desk."""
    made.desk.write("/root/fleet.toml", made.fleet_toml(checkpoint={"model": "pocket"}))
    ran = made.desk.run(
        ["deskfleet", "fleet", "doctor", "--file", "/root/fleet.toml", "--json", *words],
        check=False,
        timeout_s=120,
    )
    told = json.loads(ran.stdout)
    assert told["exit_code"] == ran.returncode, ran.stderr
    return ran.returncode, {(each["node"], each["check"]): each for each in told["findings"]}


def failed(findings: dict[tuple[str, str], dict[str, Any]]) -> set[tuple[str, str]]:
    return {key for key, each in findings.items() if each["verdict"] == "fail"}


def test_links_and_keys(pair: Bed) -> None:
    worker = pair.nodes[1]
    code, sound = see(pair)
    assert (code, failed(sound)) == (0, set())
    assert sound["node1", "topology"]["measured"] == "pair"
    assert sound["node1", "mtu"]["measured"] == "9000 on both ends, and such packets pass whole"
    assert "GB/s to node0 over TCP" in sound["node1", "bandwidth"]["measured"]

    worker.set_mtu(1500, FABRIC)
    code, found = see(pair, "--no-traffic")
    assert (code, failed(found)) == (1, {("node0", "mtu"), ("node1", "mtu")})
    assert found["node0", "mtu"]["measured"] == "node0 has 9000, node1 has 1500 in 10.78.0.0/24"
    worker.set_mtu(9000, FABRIC)

    worker.slow(delay_s=0.02, network=FABRIC)
    code, found = see(pair)
    assert code == 0
    assert found["node0", "latency"]["verdict"] == "warn"
    worker.mend(FABRIC)

    for skew_s in (30, -30):
        worker.skew_clock(skew_s)
        code, found = see(pair, "--no-traffic")
        assert (code, failed(found)) == (1, {("node1", "clock")})
        assert found["node1", "clock"]["measured"].startswith("+" if skew_s > 0 else "-")
    worker.skew_clock(0)

    # The plan puts this small model on the head alone.
    pair.head.show_memory(100 << 20)
    code, found = see(pair, "--no-traffic")
    assert (code, failed(found)) == (1, {("node0", "memory")})
    assert "100.00 MiB available" in found["node0", "memory"]["measured"]
    pair.head.show_true_memory()

    worker.refuse_key()
    code, found = see(pair, "--no-traffic")
    assert (code, failed(found)) == (3, {("node1", "ssh")})
    assert "refused our key" in found["node1", "ssh"]["measured"]
    assert found["node0", "docker"]["verdict"] == "pass"
    worker.accept_key()
    worker.stop_docker()
    code, found = see(pair, "--no-traffic")
    assert (code, failed(found)) == (1, {("node1", "docker")})
    worker.start_docker()
    assert see(pair, "--no-traffic")[0] == 0


def test_another_user_another_image_and_a_node_that_is_silent() -> None:
    """bob lives elsewhere; his node has another image; packets to the third vanish."""
    bob = NodeSetup(user="bob", home="/data/bob", images=(OTHER,))
    with bed(3, setups=(NodeSetup(), bob)) as made:
        code, found = see(made, "--no-traffic")
        assert (code, failed(found)) == (1, {("node1", "image")})
        account = found["node1", "account"]
        assert account["verdict"] == "warn"
        assert "home /data/bob; on node0 root (uid 0), home /root" in account["measured"]
        made.nodes[2].cut()
        begin = time.monotonic()
        code, found = see(made, "--no-traffic")
        assert code == 3
        assert time.monotonic() - begin < 40
        assert found["node2", "ssh"]["verdict"] == "fail"
        assert found["node0", "ssh"]["verdict"] == "pass"
