"""The bed as a whole: switches, nodes and the desk, started together and ended together."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .image import EngineImage, mounts
from .lifetime import bed_directory, missing, own_cgroup
from .machine import PATH, Hub, Machine, ended, reaped
from .network import FABRIC, SWITCHES, lay_switches
from .nfs import install
from .node import Node, NodeSetup, ssh_word

_HUB = """\
set -e
echo 0 >"$2/cgroup.procs"
mount --make-rprivate /
mkdir "$1"
mount -t tmpfs -o mode=755 bed "$1"
echo ready
while :; do sleep 3600 & wait $!; done
"""
_FIRST_NODE = 11


@dataclass(frozen=True, slots=True)
class Bed:
    """Nodes, the head first, and the desk: another machine on their network, where deskfleet is typed."""

    name: str
    nodes: tuple[Node, ...]
    desk: Machine

    @property
    def head(self) -> Node:
        """The node of rank 0."""
        return self.nodes[0]

    def ssh_config(self) -> str:
        """What reaches all nodes by name, from a program of this machine that is on the desk's network."""
        return _ssh_config(self.nodes, self.head.hub.key, self.head.hub.directory / "known_hosts")

    def fleet_toml(
        self, *, head_is_local: bool = False, available: str | int | None = None, **values: Any
    ) -> str:
        """A fleet.toml of these nodes and the native engine in the bed's image; `values` go over it, table by table.

        For example `fleet_toml(checkpoint={"model": "..."}, gateway={"port": 9000}, share="copy")`. `head_is_local` is
        for deskfleet on the head itself, else it is typed on the desk. With `available`, plans do not go by what is
        free of this machine, which changes while others test on it.
        """
        document: dict[str, Any] = {
            "name": "bed",
            "engine": {"name": "native", "image": EngineImage().id, "mounts": list(mounts())},
        }
        for key, value in values.items():
            document[key] = {**document.get(key, {}), **value} if isinstance(value, Mapping) else value
        nodes = [_node_table(node, is_local=head_is_local and node is self.head) for node in self.nodes]
        if available is not None:
            nodes = [{**node, "available": available} for node in nodes]
        return _toml({**document, "nodes": nodes})


@contextmanager
def bed(
    num_nodes: int = 2, *, setups: Sequence[NodeSetup] = (), fabric: bool = True, nfs: bool = False
) -> Iterator[Bed]:
    """Start a fleet of nodes `node0`, `node1`, ... and end it. `setups` are for the first nodes, the rest are plain.

    Every machine knows all others by name and has the key to all nodes. With `nfs` nodes have what `nfs.py` makes of
    NFS. Raises RuntimeError with what is missing here.
    """
    if absent := missing():
        raise RuntimeError("a bed cannot be made here; what is missing: " + "; ".join(absent))
    with ExitStack() as stack:
        hub = stack.enter_context(_hub())
        switches = tuple(switch for switch in SWITCHES.values() if fabric or switch.name != FABRIC)
        lay_switches(hub.pid, switches)
        plain = [NodeSetup()] * (num_nodes - len(setups))
        nodes = tuple(
            Node(hub, f"node{rank}", _FIRST_NODE + rank, switches, setup)
            for rank, setup in enumerate((*setups, *plain))
        )
        desk = Machine(hub, "desk", 1, switches, tools=True)
        machines: list[Machine] = [desk, *nodes]
        _make_keys(hub, nodes)
        for machine in machines:
            stack.callback(machine.power_off)
        for machine in machines:
            # From this thread: the kernel ends a machine with the thread that started it.
            machine.boot()
        with ThreadPoolExecutor(len(machines)) as pool:
            list(pool.map(lambda machine: _furnish(machine, desk, nodes), machines))
        for node in nodes if nfs else ():
            install(node)
        yield Bed(hub.directory.name, nodes, desk)


@contextmanager
def _hub() -> Iterator[Hub]:
    with bed_directory() as directory:
        process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "env", "-i", f"PATH={PATH}"),
                *("unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc", "--"),
                *("bash", "-c", _HUB, "hub", str(directory / "disks"), str(own_cgroup(directory.name))),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        try:
            if (said := process.stdout.readline()) != "ready\n":
                raise RuntimeError(f"the bed did not start: {said}{process.stdout.read()}".strip())
            first = psutil.Process(process.pid).children()[0]
            try:
                yield Hub(directory, first.pid)
            finally:
                first.kill()
                reaped(process)
        finally:
            ended(process)


def _make_keys(hub: Hub, nodes: Sequence[Node]) -> None:
    for path in (hub.key, *(hub.directory / f"host-{node.name}" for node in nodes)):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "bed", "-f", path], check=True)
    (hub.directory / "known_hosts").write_text("".join(node.known_host() for node in nodes))


def _furnish(machine: Machine, desk: Machine, nodes: Sequence[Node]) -> None:
    """What a machine needs beyond its start: its services, and the names and keys of the others."""
    hub = machine.hub
    names = "".join(f"{other.address()} {other.name}\n" for other in (desk, *nodes))
    machine.write("/etc/hosts", f"127.0.0.1 localhost\n::1 localhost\n{names}")
    machine.serve()
    homes = {"root": "/root"}
    if isinstance(machine, Node):
        homes[machine.setup.user] = machine.home
    for user, home in homes.items():
        known = f"{home}/.ssh/known_hosts"
        machine.write(f"{home}/.ssh/id_ed25519", hub.key.read_text(), 0o600)
        machine.write(known, (hub.directory / "known_hosts").read_text())
        machine.write(f"{home}/.ssh/config", _ssh_config(nodes, f"{home}/.ssh/id_ed25519", known), 0o600)
        machine.run(["chown", "-R", f"{user}:", f"{home}/.ssh"])
        machine.run(["chmod", "700", f"{home}/.ssh"])


def _node_table(node: Node, *, is_local: bool) -> dict[str, Any]:
    setup = node.setup
    table: dict[str, Any] = {
        "name": node.name,
        "kind": "local",
        "address": "local" if is_local else node.name,
    }
    if FABRIC in node.cables:
        table["fabric"] = [node.address(FABRIC)]
    table["paths"] = {"checkpoint": setup.checkpoint, "engram": setup.engram, "cache": setup.cache}
    return table


def _toml(document: Mapping[str, Any]) -> str:
    """Tables of plain values, lists of such tables, and inline tables within them."""
    lines = [f"{key} = {_toml_value(value)}" for key, value in document.items() if not _is_table(value)]
    for key, value in document.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{key}]", *(f"{name} = {_toml_value(inner)}" for name, inner in value.items())]
        elif _is_table(value):
            for entry in value:
                lines += [
                    "",
                    f"[[{key}]]",
                    *(f"{name} = {_toml_value(inner)}" for name, inner in entry.items()),
                ]
    return "\n".join(lines) + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    )


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml_value(inner)}" for key, inner in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)  # strings, numbers, booleans and their lists are TOML's too


def _ssh_config(nodes: Sequence[Node], key: str | Path, known_hosts: str | Path) -> str:
    entries = [node.ssh_config(key) for node in nodes]
    return "\n".join([*entries, f"Host *\n    UserKnownHostsFile {ssh_word(known_hosts)}\n"])
