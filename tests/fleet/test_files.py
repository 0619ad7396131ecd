"""Pull, share and pack on whole fleets: three nodes, the second with a user, a home and paths of its own.

Nodes have no Python but the engine image's. The origin is a plain directory on the desk, whose server knows no ranges.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bed import FABRIC, Bed, Node, NodeSetup, bed
from bed.machine import SHIMS

from deskfleet_engram.ownership import ColumnOwnership
from tests.cli.cli_process import CHECKPOINT

pytestmark = pytest.mark.fleet

ALICE = NodeSetup(
    "alice",
    "/data/people/alice",
    checkpoint="/data/people/alice/my checkpoint",
    engram="/data/people/alice/my rows",
    cache="/data/people/alice/cache",
)
PORT = 8123
NAMES = {path.name for path in CHECKPOINT.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """The fleet, and an origin on its desk."""
    origin = tmp_path_factory.mktemp("origin") / "files"
    shutil.copytree(CHECKPOINT, origin)
    sums = "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(origin.iterdir())
    )
    (origin / "SHA256SUMS").write_text(sums)
    with bed(3, setups=[NodeSetup(), ALICE], nfs=True) as made:
        made.desk.copy_in(origin, "/srv/origin")
        server = made.desk.start(["python3", "-m", "http.server", "-d", "/srv/origin", str(PORT)])
        write_fleet(made, "local")
        yield made
        server.kill()
        server.communicate()


def write_fleet(fleet: Bed, share: str) -> None:
    """Put a fleet.toml on the desk."""
    sums = fleet.desk.path("/srv/origin/SHA256SUMS").read_bytes()
    checkpoint = {
        "model": "v4.1-flash",
        "origin": f"http://{fleet.desk.address(FABRIC)}:{PORT}",
        "revision": hashlib.sha256(sums).hexdigest(),
    }
    fleet.desk.write("/root/fleet.toml", fleet.fleet_toml(checkpoint=checkpoint, share=share))


def command(fleet: Bed, *words: str, code: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Type a verb on the desk; return its objects and what it said."""
    done: subprocess.CompletedProcess[str] = fleet.desk.run(
        ["deskfleet", "fleet", *words, "-f", "/root/fleet.toml", "--json"], check=False, timeout_s=300
    )
    assert done.returncode == code, (words, done.stdout, done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def files_in(directory: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.is_file() and not path.name.startswith(".")
    }


def check_clean(fleet: Bed) -> None:
    """No process, container or half file is left on a node."""
    eventually(lambda: not any(has_containers(node) for node in fleet.nodes))
    for node in fleet.nodes:
        for place in (node.setup.checkpoint, node.setup.engram):
            assert not [
                path for path in node.path(place).rglob("*") if ".part" in path.name or "program" in path.name
            ]


def test_from_an_origin_to_packed_rows(desk: Bed) -> None:
    """Pull onto the head, copies to the others, rows of each rank; every step again changes nothing."""
    write_fleet(desk, "copy")
    told, _ = command(desk, "share", code=3)
    assert "deskfleet fleet pull" in told[0]["error"]["hint"]
    pulled, _ = command(desk, "pull")
    assert (pulled[0]["node"], pulled[0]["num_fetched"]) == ("node0", len(NAMES))
    assert files_in(desk.head.path("/srv/checkpoint")) == files_in(CHECKPOINT)
    assert command(desk, "pull")[0][0]["num_hashed"] == 0

    proofs, _ = command(desk, "share")
    assert [proof["is_good"] for proof in proofs] == [True] * 3
    for node in desk.nodes:
        assert files_in(node.path(node.setup.checkpoint)) == files_in(CHECKPOINT)
    # A bit that flips at an end of a shard on one node is found there.
    shard = desk.nodes[2].path("/srv/checkpoint") / "model-00001-of-00018.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    proofs, said = command(desk, "share", "--only-prove", code=1)
    assert [proof["is_good"] for proof in proofs] == [True, True, False]
    assert f"node2: {shard.name}: its end is not the head's" in said
    assert all(proof["is_good"] for proof in command(desk, "share")[0]), "a changed file is fetched again"

    packed, _ = command(desk, "pack")
    ownership = ColumnOwnership.split(12, 3)
    for rank, (node, result) in enumerate(zip(desk.nodes, packed, strict=True)):
        assert (result["node"], result["ranks"], result["encoder"]) == (node.name, [rank], "native")
        columns = {int(path.stem[1:]) for path in (node.path(node.setup.engram) / "L04").iterdir()}
        assert columns == set(ownership.columns(rank))
    assert [result["num_packed"] for result in command(desk, "pack")[0]] == [0, 0, 0]
    owner = desk.nodes[1].path(ALICE.engram).stat().st_uid
    assert owner == desk.nodes[1].path(ALICE.home).stat().st_uid, "a container's files are the user's"
    check_clean(desk)


def test_killed_while_packing_leaves_no_container(desk: Bed) -> None:
    """SIGKILL of the command: containers end on every node, and the same command goes on."""
    write_fleet(desk, "local")
    for node in desk.nodes:
        if not files_in(node.path(node.setup.checkpoint)):
            node.copy_in(CHECKPOINT, node.setup.checkpoint, node.setup.user)
        node.run(["rm", "-rf", node.setup.engram])
    typed = desk.desk.start(["deskfleet", "fleet", "pack", "--max-rate", "20kB", "-f", "/root/fleet.toml"])
    eventually(lambda: all(list(node.path(node.setup.engram).glob("L*/*.partial")) for node in desk.nodes))
    desk.desk.signal("fleet pack", "KILL")
    typed.communicate(timeout=30)
    eventually(lambda: not any(has_containers(node) for node in desk.nodes))
    eventually(
        lambda: not any("program" in line for node in desk.nodes for line in node.processes().values())
    )
    packed, _ = command(desk, "pack", "--verify", "full")
    assert [result["num_columns"] for result in packed] == [8, 8, 8]
    check_clean(desk)


def test_node_without_python_downloads_in_the_image(desk: Bed) -> None:
    write_fleet(desk, "local")
    node = desk.nodes[1]
    node.run(["rm", "-rf", node.setup.checkpoint])
    for name in ("python3", "python"):
        node.shim(name, "#!/bin/sh\nexit 127\n")
    try:
        pulled, _ = command(desk, "pull", "--on", "node1")
    finally:
        node.run(["rm", f"{SHIMS}/python3", f"{SHIMS}/python"])
    assert pulled[0]["num_fetched"] == len(NAMES)
    assert files_in(node.path(node.setup.checkpoint)) == files_in(CHECKPOINT)
    check_clean(desk)


def has_containers(node: Node) -> bool:
    """Whether any is left, running or not."""
    return bool(node.docker("ps", "--all", "--quiet").stdout.strip())


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.1)


def test_nfs(desk: Bed) -> None:
    """The third node mounts what the head exports; a cut cable and a mount that is gone are said."""
    write_fleet(desk, "nfs")
    for node in desk.nodes[1:]:
        node.run(["rm", "-rf", node.setup.checkpoint])
    _, said = command(desk, "share", code=3)
    assert "node1" in said, "who may not become root is told"
    assert "needs root" in said
    write_fleet_of_two(desk)
    proofs, _ = command(desk, "share")
    assert [(proof["is_good"], proof["place"]["filesystem"]) for proof in proofs][1] == (True, "nfs4")
    assert command(desk, "share")[0] == proofs, "what is mounted stays mounted"
    command(desk, "share", "--undo")
    assert not files_in(desk.nodes[2].path("/srv/checkpoint"))
    _, said = command(desk, "share", "--only-prove", code=1)
    assert "it is not mounted" in said


def write_fleet_of_two(fleet: Bed) -> None:
    """A fleet without the node whose user is not root."""
    rooted = Bed(fleet.name, (fleet.nodes[0], fleet.nodes[2]), fleet.desk)
    fleet.desk.write("/root/fleet.toml", rooted.fleet_toml(checkpoint={"model": "v4.1-flash"}, share="nfs"))


def test_disk_full_while_packing_and_a_node_that_cannot_be_reached(desk: Bed) -> None:
    write_fleet(desk, "local")
    small = desk.head
    small.run(["rm", "-rf", "/srv/engram"])
    small.limit_disk("/srv/engram", 1 << 20)
    _, said = command(desk, "pack", "--on", "node0", code=1)
    assert "node0" in said
    assert "free" in said
    assert not list(small.path("/srv/engram").rglob("*.egp"))
    small.run(["umount", "/srv/engram"])
    desk.nodes[2].stop_sshd()
    _, said = command(desk, "pull", "--on", "node2", code=3)
    assert "node2 cannot be reached" in said
    desk.nodes[2].start_sshd()
    check_clean(desk)
