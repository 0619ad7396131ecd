"""Checks of the fast network: devices, GID indices, MTU, PCIe halves, what joins the nodes, and how fast it is."""

from __future__ import annotations

from deskfleet.fleet.checks.contract import Check, Outcome, Subject, failed, passed, skipped, warned
from deskfleet.fleet.fabric import RDMA_KINDS, is_address, other_halves
from deskfleet.fleet.facts import NetDevice
from deskfleet.fleet.links import LinkMeasure

_ROCE_FULL_MTU = 4200
"""Below it RoCE sends 1024 or 2048 bytes at a time instead of 4096."""

_RTT_WARN_S = 0.001
_RDMA_SHARE = 0.7
_TCP_SHARE = 0.5
_TCP_ENOUGH_BYTES_S = 1.0e9
"""One TCP stream is bound by one core: with this much nothing is badly wrong with a link, whatever its rate."""


def _addresses(subject: Subject) -> Outcome:
    wanted = [address for address in subject.node.fabric if is_address(address)]
    if not wanted:
        return skipped("fleet.toml names no fabric address of this node")
    if "addresses" in subject.facts.unknown:
        return subject.unknown("addresses")
    devices = {address: subject.facts.device_of(address) for address in wanted}
    missing = [address for address, device in devices.items() if device is None]
    if missing:
        has = ", ".join(f"{own.ip} on {each.name}" for each in subject.facts.net for own in each.ipv4)
        return failed(
            f"{', '.join(missing)} is not on the node, which has {has or 'none'}",
            "an address set by hand is gone after a reboot: write it to netplan; or correct fabric in fleet.toml",
        )
    told = ", ".join(f"{address} on {device.name}" for address, device in devices.items() if device)
    fleeting = [
        own.text
        for device in devices.values()
        if device
        for own in device.addresses
        if str(own.interface.ip) in wanted and not own.is_permanent
    ]
    if fleeting:
        return warned(
            f"{told}; {', '.join(fleeting)} is leased", "it may be another after a reboot: set it in netplan"
        )
    return passed(told)


def _interface(subject: Subject) -> Outcome:
    network = subject.network
    if subject.is_alone:
        return skipped("one node needs no network")
    if "addresses" in subject.facts.unknown:
        return subject.unknown("addresses")
    if network.socket_interface is None:
        return failed(
            "no subnet is shared by all nodes",
            "ranks meet over TCP: give every node an address in one subnet, the slow network will do",
        )
    device = subject.facts.net_device(network.socket_interface)
    if device is not None and device.state == "down":
        return failed(
            f"{network.socket_interface} is down", f"sudo ip link set {network.socket_interface} up"
        )
    note = ""
    if network.rendezvous not in (subject.facts.resolves_to or (network.rendezvous,)):
        # Gloo asks the host's name when it is told nothing, and Debian's answer is 127.0.1.1.
        note = (
            f"; its name leads to {', '.join(subject.facts.resolves_to or ())}, so ranks are told the device"
        )
    return passed(f"{network.socket_interface} with {network.rendezvous}{note}")


def _rdma(subject: Subject) -> Outcome:
    network, is_expected = subject.network, subject.node.kind in RDMA_KINDS
    if subject.is_alone:
        return skipped("one node needs no network")
    if network.ports:
        return passed(", ".join(f"{port.selector} on {port.net.name}" for port in network.ports))
    if not subject.facts.rdma:
        if not is_expected:
            return skipped("there is no RDMA device")
        return failed("there is no RDMA device", "load the driver: sudo modprobe mlx5_ib; see ibv_devinfo")
    if not is_expected:
        return skipped(network.refusal or "no RDMA port is used")
    active = [port for device in subject.facts.rdma for port in device.ports if port.state == "ACTIVE"]
    if active:
        return passed(f"{len(active)} ports are active")  # what else is wrong is the question of gid
    return failed(
        network.refusal or "no port is active", "look to cable and peer; sudo ip link set DEVICE up"
    )


def _gid(subject: Subject) -> Outcome:
    network = subject.network
    if subject.is_alone:
        return skipped("one node needs no network")
    if network.gid_index is not None:
        return passed(f"NCCL_IB_HCA {network.hca}, NCCL_IB_GID_INDEX {network.gid_index}")
    active = [port for device in subject.facts.rdma for port in device.ports if port.state == "ACTIVE"]
    if network.refusal is None or not active:
        return skipped("without an RDMA port there is no index")
    return failed(
        network.refusal or "none could be found",
        "give the port an IPv4 address of its own (netplan), and name it in fabric; show_gids lists what there is. "
        "Where devices differ, name one in fabric",
    )


def _speed(subject: Subject) -> Outcome:
    ports = subject.network.ports
    devices = [port.net for port in ports] or _fabric_devices(subject)
    known = [device for device in devices if device.speed_mbps]
    if not known:
        return skipped("no device tells its speed")
    told = ", ".join(f"{device.name} {device.speed_mbps or 0} Mb/s" for device in known)
    narrow = [d for d in known if d.lanes is not None and d.max_lanes is not None and d.lanes < d.max_lanes]
    if narrow:
        lanes = ", ".join(
            f"{device.name} has {device.lanes} of {device.max_lanes} PCIe lanes" for device in narrow
        )
        return warned(
            f"{told}; {lanes}", "seat the card anew, and look for AER errors: sudo dmesg | grep AER"
        )
    fastest = max(
        (port.net.speed_mbps or 0 for each in subject.fabric.nodes.values() for port in each.ports), default=0
    )
    slow = [device for device in known if (device.speed_mbps or 0) < fastest]
    if slow and ports:
        return warned(
            f"{told}, others {fastest} Mb/s",
            "the slowest link sets the step: compare cables, sudo ethtool DEVICE",
        )
    return passed(told)


def _fabric_devices(subject: Subject) -> list[NetDevice]:
    found = (subject.facts.device_of(address) for address in subject.node.fabric)
    return [device for device in found if device is not None]


def _halves(subject: Subject) -> Outcome:
    if not subject.network.ports:
        return skipped("no RDMA port is used")
    halves = other_halves(subject.network, subject.facts)
    if not halves:
        return passed(f"{len(subject.network.ports)} functions are used, none of the same socket is idle")
    unusable = subject.network.unusable
    told = "; ".join(
        f"{port.device} is used and {twin} of the same socket is not"
        + (f": {unusable[f'{twin}:1']}" if f"{twin}:1" in unusable else "")
        for port, twin in halves
    )
    return warned(
        told, "each carries half of the socket: give the other an IPv4 address too, and add it to fabric"
    )


def _mtu(subject: Subject) -> Outcome:
    links = subject.fabric.links_of(subject.node.name)
    if not links:
        return skipped("no other node is in a subnet with its fabric addresses")
    unequal = [link for link in links if not link.has_equal_mtu]
    if unequal:
        told = "; ".join(
            f"{link.nodes[0]} has {link.mtus[0]}, {link.nodes[1]} has {link.mtus[1]} in {link.subnet}"
            for link in unequal
        )
        return failed(
            told,
            "set one MTU on both ends, 9000 where the switch allows it: sudo ip link set DEVICE mtu 9000",
        )
    stuck = [each for each in subject.links if each.is_reached and each.is_whole is False]
    if stuck:
        told = "; ".join(
            f"{each.mtu} bytes do not pass from {each.source} to {each.target}" for each in stuck
        )
        return failed(told, "something between them has a smaller MTU: look to the switch's ports")
    mtus = sorted({mtu for link in links for mtu in link.mtus if mtu is not None})
    told = f"{', '.join(map(str, mtus))} on both ends"
    if any(each.is_whole for each in subject.links):
        told += ", and such packets pass whole"
    elif subject.links:
        told += f"; not tried: {subject.links[0].why or 'no answer'}"
    if subject.network.ports and mtus and mtus[0] < _ROCE_FULL_MTU:
        return warned(
            f"{told}: RDMA sends small packets", "raise it on all nodes alike: mtu: 9000 in netplan"
        )
    return passed(told)


def _topology(subject: Subject) -> Outcome:
    fabric = subject.fabric
    if fabric.topology == "single":
        return skipped("one node needs no network" if subject.is_alone else "the other nodes told nothing")
    if not any(is_address(address) for node in subject.spec.nodes for address in node.fabric):
        return skipped("fleet.toml names no fabric addresses")
    if fabric.topology == "none":
        lost = [pair for pair in fabric.missing if subject.node.name in pair]
        told = ", ".join(f"{one} and {other}" for one, other in lost)
        return failed(
            f"nothing joins {told}" if told else "nodes are joined in no shape that works",
            "two: a cable; three: a cable between each two; four and more: a switch, or a ring with a patched NCCL",
        )
    if fabric.topology == "ring":
        return warned(
            "ring without a switch: each node reaches two others",
            "stock NCCL cannot use it, whatever its variables say: use an image with the ring's NCCL, or a switch",
        )
    return passed(fabric.topology)


def _latency(subject: Subject) -> Outcome:
    if not subject.links:
        return skipped("no link was tried")
    lost = [each for each in subject.links if each.is_reached is False]
    if lost:
        told = ", ".join(f"{each.source_address} to {each.target_address} on {each.target}" for each in lost)
        return failed(
            f"no answer from {told}", "compare addresses, cables and firewalls: ping -I ADDRESS ADDRESS"
        )
    times = [each.rtt_s for each in subject.links if each.rtt_s is not None]
    if not times:
        return skipped(f"unknown: {subject.links[0].why or 'nothing was told'}")
    told = f"{max(times) * 1e3:.3f} ms there and back at most"
    if max(times) > _RTT_WARN_S:
        return warned(
            told, "a step waits for some hundred exchanges: is this the slow network, or a shared one?"
        )
    return passed(told)


def _bandwidth(subject: Subject) -> Outcome:
    measured = [each for each in subject.links if each.bytes_per_s is not None]
    if not measured:
        why = next(
            (each.bandwidth_why for each in subject.links if each.bandwidth_why), "no link was measured"
        )
        return skipped(why)
    slow = [each for each in measured if (floor := floor_bytes_s(subject, each)) and _rate(each) < floor]
    told = ", ".join(f"{_rate(each) / 1e9:.2f} GB/s to {each.target} over {each.how}" for each in measured)
    if slow:
        floor = max(floor_bytes_s(subject, each) or 0 for each in slow)
        return failed(
            f"{told}; {floor / 1e9:.2f} is the least",
            "compare MTU, PCIe lanes, cable and the card's firmware with the other nodes; is anybody else using it?",
        )
    return passed(told)


def _rate(measure: LinkMeasure) -> float:
    return measure.bytes_per_s or 0.0


def floor_bytes_s(subject: Subject, measure: LinkMeasure) -> float | None:
    """Return the least that a sound link of its rate carries, None where that is unknown, as for virtual devices.

    RDMA: 0.7 of the rate, or of the PCIe lanes where they are fewer. TCP: half of the rate, but no more than one core
    can move.
    """
    device = subject.facts.device_of(measure.source_address)
    if device is None or device.speed_mbps is None or device.pci is None:
        return None
    rate_bytes_s = device.speed_mbps * 1e6 / 8
    if measure.how != "RDMA":
        return min(_TCP_SHARE * rate_bytes_s, _TCP_ENOUGH_BYTES_S)
    return _RDMA_SHARE * min(rate_bytes_s, _pcie_bytes_s(device.lanes, device.lane_speed) or rate_bytes_s)


def _pcie_bytes_s(lanes: int | None, speed: str | None) -> float | None:
    """Bytes a second of `4` lanes at `32.0 GT/s PCIe`: 128 of 130 bits carry data."""
    try:
        return (
            None if lanes is None or speed is None else lanes * float(speed.split()[0]) * 1e9 / 8 * 128 / 130
        )
    except ValueError:
        return None


CHECKS = (
    Check("addresses", "Does it have its fabric addresses?", _addresses, is_must=True),
    Check("interface", "Can all ranks meet?", _interface, is_must=True),
    Check("rdma", "Is there an active RDMA port?", _rdma, is_must=True),
    Check("gid", "Which GID index is right on its devices?", _gid, is_must=True),
    Check("link-speed", "Are links as fast as they can be?", _speed),
    Check("pcie-halves", "Are both functions of a socket used?", _halves),
    Check("mtu", "Is the MTU the same both ways?", _mtu, is_must=True),
    Check("topology", "What joins the nodes?", _topology, is_must=True),
    Check("latency", "How long is a packet under way?", _latency, is_must=True),
    Check("bandwidth", "How much goes through?", _bandwidth),
)

__all__ = ["CHECKS", "floor_bytes_s"]
