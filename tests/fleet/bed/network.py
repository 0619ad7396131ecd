"""Cables and switches of the bed: a management network, a fast one, and what can be wrong with a cable.

Both switches are bridges in the namespace of the hub, which is nobody's machine. Addresses are the same in every bed,
for no bed sees another, nor the machine's own network.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MANAGEMENT, FABRIC = "management", "fabric"
_RELAY = Path(__file__).with_name("relay.py")
_RELAY_S = 10.0


@dataclass(frozen=True, slots=True)
class Switch:
    """One network: `interface` on each machine, `letter` before the number of its port."""

    name: str
    interface: str
    letter: str
    subnet: str
    mtu: int

    def address(self, number: int) -> str:
        """The address of the machine with that number; the desk is 1."""
        return f"{self.subnet}.{number}"


SWITCHES = {
    MANAGEMENT: Switch(MANAGEMENT, "eth0", "m", "10.77.0", 1500),
    FABRIC: Switch(FABRIC, "fab0", "f", "10.78.0", 9000),
}


def inside(pid: int, *kinds: str) -> list[str]:
    """The command line that enters those namespaces of a process; what it starts dies with whoever waits for it."""
    return [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "nsenter",
        f"--target={pid}",
        *(f"--{kind}" for kind in kinds),
        "--",
    ]


def _ip(hub_pid: int, *lines: str, is_forced: bool = False) -> None:
    words = ["ip", *(("-force",) if is_forced else ()), "-batch", "-"]
    done = subprocess.run(
        [*inside(hub_pid, "net"), *words], input="\n".join(lines) + "\n", text=True, capture_output=True
    )
    if done.returncode and not is_forced:
        raise RuntimeError(f"ip -batch failed on {lines}: {done.stderr.strip()}")


def lay_switches(hub_pid: int, switches: tuple[Switch, ...]) -> None:
    """Make the bridges."""
    lines = ["link set lo up"]
    for switch in switches:
        # Without the forwarding delay of a bridge a port is open at once.
        lines.append(f"link add {switch.name} mtu {switch.mtu} type bridge forward_delay 0 mcast_snooping 0")
        lines.append(f"link set {switch.name} up")
    _ip(hub_pid, *lines)


class Cable:
    """From one machine to one switch. It can be cut, slowed and mended, again and again."""

    def __init__(self, hub_pid: int, switch: Switch, number: int) -> None:
        self.switch = switch
        self.address = switch.address(number)
        self._hub_pid = hub_pid
        self._port = f"{switch.letter}{number}"
        self._relay: subprocess.Popen[str] | None = None

    def plug(self, machine_pid: int) -> None:
        """Give the machine its interface, which has the same hardware address after every reboot."""
        switch, port = self.switch, self._port
        mac = "02:00:" + ":".join(f"{int(part):02x}" for part in self.address.split("."))
        _ip(
            self._hub_pid,
            f"link add {port} mtu {switch.mtu} type veth"
            f" peer name {switch.interface} mtu {switch.mtu} address {mac} netns {machine_pid}",
            f"link set {port} master {switch.name} up",
        )
        _ip(
            machine_pid,
            f"addr add {self.address}/24 dev {switch.interface}",
            f"link set {switch.interface} up",
        )

    def cut(self) -> None:
        """No carrier on either end."""
        _ip(self._hub_pid, f"link set {self._port} down")

    def slow(self, delay_s: float = 0.0, loss: float = 0.0, bytes_per_s: float = 0.0) -> None:
        """Hold every packet for `delay_s`, lose a share of them, let so much through; 0 changes nothing of that kind.

        Both directions. A program of ours hands the frames over, for not every kernel has netem.
        """
        self._unplug_relay()
        port, far, near = self._port, f"{self._port}far", f"{self._port}near"
        _ip(
            self._hub_pid,
            f"link set {port} nomaster",
            f"link add {near} mtu {self.switch.mtu} type veth peer name {far} mtu {self.switch.mtu}",
            f"link set {far} master {self.switch.name} up",
            f"link set {near} up",
        )
        words = (f"--delay={delay_s}", f"--loss={loss}", f"--rate={bytes_per_s}")
        self._relay = subprocess.Popen(
            [*inside(self._hub_pid, "net"), sys.executable, str(_RELAY), port, near, *words],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != "ready\n":
            raise RuntimeError(f"the relay on {port} did not start")

    def mend(self) -> None:
        """As new: connected, and as fast as the machine is."""
        self._unplug_relay()
        _ip(self._hub_pid, f"link set {self._port} up")

    def unplug(self) -> None:
        """Take it away. The kernel would do so in its own time after the machine's end."""
        self._unplug_relay()
        _ip(self._hub_pid, f"link del {self._port}", is_forced=True)

    def _unplug_relay(self) -> None:
        if self._relay is None:
            return
        self._relay.kill()
        self._relay.communicate(timeout=_RELAY_S)
        self._relay = None
        _ip(self._hub_pid, f"link del {self._port}near")
        _ip(self._hub_pid, f"link set {self._port} master {self.switch.name}", is_forced=True)
