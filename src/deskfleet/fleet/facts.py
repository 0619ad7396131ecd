"""What one node is and has: `NodeFacts`, from the texts that scripts/probe.sh prints. Owns how those texts are read.

None means unknown; `NodeFacts.unknown` has the reason under the probe's topic. Nothing is guessed, and nothing is
judged here: that is for `fabric` and the doctor's checks. Knows no ssh.
"""

from __future__ import annotations

import csv
import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from deskfleet.errors import DeskfleetError

FORMAT = "1"

_T = TypeVar("_T")


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What /proc/meminfo says, in bytes. `available_bytes` is MemAvailable: what remains after caches are dropped."""

    total_bytes: int
    free_bytes: int
    available_bytes: int
    shared_bytes: int
    swap_total_bytes: int
    swap_free_bytes: int


class Directory(msgspec.Struct, frozen=True, kw_only=True):
    """One of the node's directories. `files` are name -> bytes, None for a directory that was not listed.

    Where it does not exist yet, the rest is said of the nearest directory above it that does.
    """

    role: str
    kind: str
    is_writable: bool
    file_system: str
    free_bytes: int
    files: dict[str, int] | None = None


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """A container, running or not. `state` as docker says: running, exited, created, ..."""

    name: str
    image: str
    state: str
    status: str
    labels: dict[str, str]


class Docker(msgspec.Struct, frozen=True, kw_only=True):
    """The Docker Engine. `devices` are what its CDI offers, e.g. "nvidia.com/gpu=all"."""

    version: str
    storage_driver: str
    cgroup_version: str
    runtimes: tuple[str, ...]
    default_runtime: str
    devices: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def has_gpu_runtime(self) -> bool:
        """Whether a container can be given a GPU: by NVIDIA's runtime or by CDI."""
        return "nvidia" in self.runtimes or any(
            device.startswith("nvidia.com/gpu") for device in self.devices
        )


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """The image that was looked for. `id` differs between storage drivers for the same image; `layers` do not."""

    id: str
    digests: tuple[str, ...]
    layers: tuple[str, ...]
    arch: str
    labels: dict[str, str]
    env: dict[str, str]


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. Memory is None on unified memory, which the driver does not count.

    `throttle_mask` holds NVML's bits of why clocks are low, clocks in MHz.
    """

    index: int
    name: str
    driver: str
    memory_bytes: int | None
    used_bytes: int | None
    compute_capability: str
    clock_mhz: int | None
    max_clock_mhz: int | None
    throttle_mask: int | None
    temperature_c: int | None
    vbios: str | None


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that has a context on a GPU."""

    pid: int
    name: str
    used_bytes: int | None


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """A systemd unit of the `system` or of the `user`, with its active state."""

    scope: str
    name: str
    state: str


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """An address with its prefix length, e.g. 10.0.22.1/24. Not `is_permanent`: DHCP or the like may take it away."""

    text: str
    is_permanent: bool

    @property
    def interface(self) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
        """The address and its subnet."""
        return ipaddress.ip_interface(self.text)


class NetDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A network device. `mtu` in bytes, `speed_mbps` None when the link is down; PCIe links as lanes and GT/s."""

    name: str
    mtu: int | None
    state: str
    speed_mbps: int | None
    addresses: tuple[Address, ...]
    pci: str | None
    lanes: int | None
    max_lanes: int | None
    lane_speed: str | None

    @property
    def ipv4(self) -> tuple[ipaddress.IPv4Interface, ...]:
        """Its IPv4 addresses, link-local ones left out."""
        found = (address.interface for address in self.addresses)
        return tuple(
            each for each in found if isinstance(each, ipaddress.IPv4Interface) and not each.is_link_local
        )


class Gid(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a port's GID table. `type` as the kernel writes it: "RoCE v2", "IB/RoCE v1"."""

    index: int
    value: str
    type: str | None
    net_device: str | None

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        """The IPv4 address that the entry stands for, if it does."""
        return ipaddress.IPv6Address(self.value).ipv4_mapped

    @property
    def is_link_local(self) -> bool:
        """Whether it is an fe80 address, which no other subnet can answer."""
        return ipaddress.IPv6Address(self.value).is_link_local


class RdmaPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an RDMA device. `state` and `link_layer` as the kernel writes them, without the number."""

    number: int
    state: str
    physical_state: str
    link_layer: str
    rate_gbps: int | None
    gids: tuple[Gid, ...]


class RdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA device: one PCIe function of a card."""

    name: str
    pci: str | None
    firmware: str | None
    board: str | None
    ports: tuple[RdmaPort, ...]


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One node at one moment. None is unknown, and `unknown[topic]` says why.

    `clock_offset_s` is how far the node's clock is ahead of ours, `clock_error_s` how far that may be off.
    `resolves_to` is what the node's own name leads to on it. `memory_limits` are cgroup file -> bytes, limits only.
    """

    node: str
    arch: str | None
    kernel: str | None
    os: str | None
    hostname: str | None
    product: str | None
    bios: str | None
    user: str | None
    uid: int | None
    home: str | None
    groups: tuple[str, ...] | None
    time_ns: int | None
    boot_id: str | None
    uptime_s: float | None
    memory: Memory | None
    min_free_bytes: int | None
    memory_limits: dict[str, int]
    directories: tuple[Directory, ...] | None
    docker: Docker | None
    containers: tuple[Container, ...] | None
    image: Image | None
    image_is_absent: bool
    gpus: tuple[Gpu, ...] | None
    gpu_processes: tuple[GpuProcess, ...] | None
    listening: frozenset[int] | None
    units: tuple[Unit, ...] | None
    processes: tuple[str, ...] | None
    kernel_log: tuple[str, ...] | None
    nccl: tuple[str, ...] | None
    resolves_to: tuple[str, ...] | None
    net: tuple[NetDevice, ...]
    rdma: tuple[RdmaDevice, ...]
    unknown: dict[str, str]
    clock_offset_s: float | None = None
    clock_error_s: float | None = None

    def directory(self, role: str) -> Directory | None:
        """The directory for "checkpoint", "engram" or "cache"; None when nothing is known of it."""
        return next((each for each in self.directories or () if each.role == role), None)

    def net_device(self, name: str | None) -> NetDevice | None:
        """The network device called `name`."""
        return next((device for device in self.net if device.name == name), None)

    def device_of(self, address: str) -> NetDevice | None:
        """The network device that has `address`."""
        return next(
            (each for each in self.net if any(str(a.interface.ip) == address for a in each.addresses)), None
        )


def parse_facts(text: str, node: str) -> NodeFacts:
    """Read what scripts/probe.sh printed on the node called `node`.

    A topic that is there and cannot be understood is unknown, like one that could not be read. Raises DeskfleetError
    when the whole is no such document.
    """
    document = _document(text, node)
    topics = _Topics(document)
    image = topics.read("image", _image)
    absent = "no such image" in topics.unknown.get("image", "").lower()
    directories = topics.read("paths", _directories)
    if directories is not None:
        listed = {role: topics.read(f"{role}_files", _files) for role in ("checkpoint", "engram")}
        directories = tuple(
            msgspec.structs.replace(each, files=listed.get(each.role)) if each.kind == "directory" else each
            for each in directories
        )
    listening = topics.read("tcp", _listening)
    addresses = topics.read("addresses", _addresses)
    return NodeFacts(
        node=node,
        arch=topics.read("arch", str.strip),
        kernel=topics.read("kernel", str.strip),
        os=topics.read("os_release", _os_name),
        hostname=topics.read("hostname", str.strip),
        product=topics.read("product", str.strip),
        bios=topics.read("bios", str.strip),
        user=topics.read("account", str.strip),
        uid=topics.read("uid", int),
        home=topics.read("home", lambda said: said.removesuffix("\n")),
        groups=topics.read("groups", lambda said: tuple(said.split())),
        time_ns=topics.read("time", int),
        boot_id=topics.read("boot_id", str.strip),
        uptime_s=topics.read("uptime", lambda said: float(said.split()[0])),
        memory=topics.read("meminfo", _memory),
        min_free_bytes=topics.read("min_free_kbytes", lambda said: int(said) * 1024),
        memory_limits=topics.read("cgroups", _limits) or {},
        directories=directories,
        docker=topics.read("docker", _docker),
        containers=topics.read("containers", _containers),
        image=image,
        image_is_absent=absent,
        gpus=topics.read("gpus", _gpus),
        gpu_processes=topics.read("gpu_processes", _gpu_processes),
        listening=None if listening is None else listening | (topics.read("tcp6", _listening) or frozenset()),
        units=topics.read("units", _units),
        processes=topics.read("processes", _lines),
        kernel_log=topics.read("kernel_log", _lines),
        nccl=topics.read("nccl", _nccl),
        resolves_to=topics.read("name_resolves_to", _resolved),
        net=_net(topics.read("net", _tree) or {}, addresses or {}),
        rdma=topics.read("infiniband", lambda said: _rdma(_tree(said))) or (),
        unknown=topics.unknown,
    )


def _document(text: str, node: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise DeskfleetError(
            f"node {node}: what the probe printed is no JSON: {error}",
            hint="does the login shell print something of its own? It must be silent for commands",
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DeskfleetError(f"node {node}: what the probe printed is not of format {FORMAT}")
    return document


class _Topics:
    """The document's texts, and the reasons for those that are missing or make no sense."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        reasons = document.get("unknown", {})
        self.unknown: dict[str, str] = {name: _reason(str(reasons[name])) for name in sorted(reasons)}

    def read(self, topic: str, reader: Callable[[str], _T]) -> _T | None:
        said = self._document.get(topic)
        if said is None:
            return None
        try:
            return reader(said)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            self.unknown[topic] = f"makes no sense: {_reason(said)} ({error})"
            return None


def _reason(said: str) -> str:
    """The last line that somebody wrote for people."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith("{")]
    return lines[-1][:300] if lines else "nothing was said"


def _lines(said: str) -> tuple[str, ...]:
    return tuple(line for line in said.splitlines() if line.strip())


def _columns(said: str) -> Iterable[list[str]]:
    return (line.split("\t") for line in _lines(said))


def _objects(said: str) -> Iterable[dict[str, Any]]:
    """Docker's JSON lines; what else it prints are warnings."""
    return (json.loads(line) for line in said.splitlines() if line.startswith("{"))


def _os_name(said: str) -> str:
    values = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    return values["PRETTY_NAME"].strip('"')


def _memory(said: str) -> Memory:
    sizes = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in said.splitlines() if line.endswith("kB")
    }
    return Memory(
        total_bytes=sizes["MemTotal"],
        free_bytes=sizes["MemFree"],
        available_bytes=sizes["MemAvailable"],
        shared_bytes=sizes["Shmem"],
        swap_total_bytes=sizes["SwapTotal"],
        swap_free_bytes=sizes["SwapFree"],
    )


def _limits(said: str) -> dict[str, int]:
    return {name: int(value) for name, value in _columns(said) if value != "max"}


def _directories(said: str) -> tuple[Directory, ...]:
    return tuple(
        Directory(
            role=role,
            kind=kind,
            is_writable=writable == "yes",
            file_system=df.split()[0],
            free_bytes=int(df.split()[1]),
        )
        for role, kind, writable, df in _columns(said)
    )


def _files(said: str) -> dict[str, int]:
    return {name: int(size) for size, name in _columns(said)}


def _docker(said: str) -> Docker:
    info = next(iter(_objects(said)))
    return Docker(
        version=info["ServerVersion"],
        storage_driver=info["Driver"],
        cgroup_version=str(info.get("CgroupVersion", "")),
        runtimes=tuple(sorted(info.get("Runtimes") or {})),
        default_runtime=str(info.get("DefaultRuntime", "")),
        devices=tuple(f"{each.get('ID', '')}" for each in info.get("DiscoveredDevices") or ()),
        warnings=tuple(info.get("Warnings") or ()),
    )


def _containers(said: str) -> tuple[Container, ...]:
    return tuple(
        Container(
            name=each["Names"],
            image=each["Image"],
            state=each["State"],
            status=each["Status"],
            labels=_labels(each.get("Labels") or ""),
        )
        for each in _objects(said)
    )


def _labels(said: str) -> dict[str, str]:
    """`docker ps` writes a=1,b=2; a value with a comma is cut, which ours never have."""
    pairs = (part.partition("=") for part in said.split(",") if part)
    return {name: value for name, _, value in pairs}


def _image(said: str) -> Image:
    found = next(iter(_objects(said)))
    config = found.get("Config") or {}
    return Image(
        id=found["Id"],
        digests=tuple(found.get("RepoDigests") or ()),
        layers=tuple((found.get("RootFS") or {}).get("Layers") or ()),
        arch=found["Architecture"],
        labels=config.get("Labels") or {},
        env=dict(each.split("=", 1) for each in config.get("Env") or () if "=" in each),
    )


def _gpu_fields(said: str, count: int) -> Iterable[list[str]]:
    rows = ([field.strip() for field in row] for row in csv.reader(said.splitlines()))
    return (row for row in rows if len(row) >= count)


def _number(field: str) -> int | None:
    """nvidia-smi writes [N/A] or [Not Supported] for what it does not know."""
    return int(float(field)) if re.fullmatch(r"\d+(\.\d+)?", field) else None


def _mib(field: str) -> int | None:
    number = _number(field)
    return None if number is None else number << 20


def _gpus(said: str) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            index=int(row[0]),
            name=row[1],
            driver=row[2],
            memory_bytes=_mib(row[3]),
            used_bytes=_mib(row[4]),
            compute_capability=row[5],
            clock_mhz=_number(row[6]),
            max_clock_mhz=_number(row[7]),
            throttle_mask=int(row[8], 16) if row[8].startswith("0x") else None,
            temperature_c=_number(row[9]),
            vbios=None if row[10].startswith("[") else row[10],
        )
        for row in _gpu_fields(said, 11)
    )


def _gpu_processes(said: str) -> tuple[GpuProcess, ...]:
    return tuple(
        GpuProcess(pid=int(row[0]), used_bytes=_mib(row[1]), name=", ".join(row[2:]))
        for row in _gpu_fields(said, 3)
        if row[0].isdigit()
    )


def _listening(said: str) -> frozenset[int]:
    """Ports in state 0A of /proc/net/tcp."""
    rows = (line.split() for line in said.splitlines()[1:])
    return frozenset(int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == "0A")


def _units(said: str) -> tuple[Unit, ...]:
    return tuple(Unit(scope=scope, name=name, state=state) for scope, name, state in _columns(said))


def _nccl(said: str) -> tuple[str, ...]:
    return tuple(sorted({path.rpartition("libnccl.so.")[2] for path in _lines(said)}))


def _resolved(said: str) -> tuple[str, ...]:
    return tuple(sorted({line.split()[0] for line in _lines(said)}))


def _addresses(said: str) -> dict[str, list[Address]]:
    """Lines of `ip -o address`: `4: eth0    inet 10.0.0.2/24 brd ... scope global dynamic eth0\\ ...`."""
    found: dict[str, list[Address]] = {}
    for line in _lines(said):
        words = line.split()
        if words[2] not in ("inet", "inet6"):
            continue
        # With a peer, `inet 10.0.0.1 peer 10.0.0.2/32`: the prefix stands at the peer.
        text = words[3] if "/" in words[3] else f"{words[3]}/{words[5].partition('/')[2] or 32}"
        found.setdefault(words[1], []).append(Address(text=text, is_permanent="dynamic" not in words))
    return found


def _tree(said: str) -> dict[str, dict[str, str]]:
    """Lines `DEVICE` and `DEVICE/path<tab>text` as device -> path -> text."""
    tree: dict[str, dict[str, str]] = {}
    for line in _lines(said):
        path, _, text = line.partition("\t")
        device, _, rest = path.partition("/")
        below = tree.setdefault(device, {})
        if rest:
            below[rest] = text
    return tree


def _net(
    tree: Mapping[str, Mapping[str, str]], addresses: Mapping[str, list[Address]]
) -> tuple[NetDevice, ...]:
    return tuple(
        NetDevice(
            name=name,
            mtu=_number(files.get("mtu", "")),
            state=files.get("operstate", "unknown"),
            speed_mbps=_number(files.get("speed", "")) or None,
            addresses=tuple(addresses.get(name, ())),
            pci=files.get("pci"),
            lanes=_number(files.get("current_link_width", "")),
            max_lanes=_number(files.get("max_link_width", "")),
            lane_speed=files.get("current_link_speed"),
        )
        for name, files in tree.items()
    )


def _rdma(tree: Mapping[str, Mapping[str, str]]) -> tuple[RdmaDevice, ...]:
    return tuple(
        RdmaDevice(
            name=name,
            pci=files.get("pci"),
            firmware=files.get("fw_ver"),
            board=files.get("board_id"),
            ports=tuple(
                _rdma_port(number, files) for number in sorted(set(_numbers(files, r"ports/(\d+)/state")))
            ),
        )
        for name, files in tree.items()
    )


def _numbers(files: Iterable[str], pattern: str) -> Iterable[int]:
    return (int(match[1]) for match in (re.fullmatch(pattern, path) for path in files) if match)


def _rdma_port(number: int, files: Mapping[str, str]) -> RdmaPort:
    base = f"ports/{number}"
    return RdmaPort(
        number=number,
        state=_after_number(files[f"{base}/state"]),
        physical_state=_after_number(files.get(f"{base}/phys_state", "")),
        link_layer=files.get(f"{base}/link_layer", ""),
        rate_gbps=_number(files.get(f"{base}/rate", "").split(" ")[0]),
        gids=tuple(
            Gid(
                index=index,
                value=files[f"{base}/gids/{index}"],
                type=files.get(f"{base}/gid_attrs/types/{index}"),
                net_device=files.get(f"{base}/gid_attrs/ndevs/{index}"),
            )
            for index in sorted(_numbers(files, rf"{base}/gids/(\d+)"))
        ),
    )


def _after_number(text: str) -> str:
    """`4: ACTIVE` -> `ACTIVE`."""
    return text.partition(":")[2].strip() or text.strip()


__all__ = [
    "Address",
    "Container",
    "Directory",
    "Docker",
    "Gid",
    "Gpu",
    "GpuProcess",
    "Image",
    "Memory",
    "NetDevice",
    "NodeFacts",
    "RdmaDevice",
    "RdmaPort",
    "Unit",
    "parse_facts",
]
