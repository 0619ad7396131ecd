"""fleet.toml: its keys, read strictly, and what of it is a plan's: machines, wishes, profile. This machine itself too.

Owns every key with what it means (docs/reference/fleet-file.md is made from here) and what a single value may be. What
values mean together for a launch is `fleet.spec`'s; a plan needs no more than machines.
"""

from __future__ import annotations

import os
import re
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from deskfleet.errors import ConfigError
from deskfleet.planner.cluster import KINDS, MAX_NODES, Cluster, Disk, Link, Node, NodeKind
from deskfleet.planner.wishes import EngineName, EngramPlacement, KvFormat
from deskfleet.tomlfile import Key, TomlFile, nearest, overridden, read_toml, validated
from deskfleet.units import parse_bytes

HINT = "deskfleet fleet init writes one; its keys are in docs/reference/fleet-file.md"
HIDDEN: tuple[Key, ...] = (("secrets",), ("engine", "env"))
"""Tables whose values are never repeated: somebody may have put a password there."""

LOCAL_KIND = "local"
"""The kind of a node that is as this machine is: no accelerator, for the native engine on the CPU."""

SECRET = re.compile(r"\$\{secret:([^}]*)\}")
"""How a value of [engine.env] asks for a secret."""

_HOST = re.compile(r"[\w.:%][\w.:%-]*")


def _bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _text(value: str) -> str:
    if any(unicodedata.category(c) in ("Cc", "Zl", "Zp") for c in value):
        raise ValueError("has control characters or several lines")
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("is not absolute\nhint: write it as it is on that node, e.g. /srv/models/v4.1-flash")
    if ".." in value.split("/"):
        raise ValueError("leads back by ..")
    value = "/" + "/".join(part for part in value.split("/") if part not in ("", "."))
    if value == "/":
        raise ValueError("is the root of the file system\nhint: give a directory of its own")
    return value


def _host(value: str) -> str:
    if "@" in value:
        raise ValueError("has an @\nhint: the name of the user goes into the key user")
    if re.fullmatch(r"\[.*\]:\d+|[^:]+:\d+", value):
        raise ValueError("has a port\nhint: the port of ssh goes into the key port")
    if not _HOST.fullmatch(value):
        raise ValueError("is no address\nhint: an IP address, a host's name, or local")
    return value


def _image(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", value):
        raise ValueError("is no name of an image\nhint: e.g. registry/name@sha256:...")
    return value


def _mount(value: str) -> str:
    parts = value.split(":")
    if not 2 <= len(parts) <= 3 or not all(part.startswith("/") for part in parts[:2]):
        raise ValueError("is no mount\nhint: /on/the/node:/in/the/container, and :ro where it is only read")
    if parts[2:] not in ([], ["ro"], ["rw"]):
        raise ValueError(f"ends with {parts[2]!r}\nhint: :ro or :rw")
    return value


def _origin(value: str) -> str:
    match = re.fullmatch(r"https?://([^/\s?#]+)(/[^\s?#]*)?", value)
    if match is None:
        raise ValueError("is no URL\nhint: e.g. https://host/path, under which the repository's files are")
    if "@" in match[1]:
        raise ValueError("has a user's name in it\nhint: a password does not belong into this file")
    return value.rstrip("/")


Text = Annotated[str, Field(min_length=1), AfterValidator(_text)]
_Bytes = Annotated[int, BeforeValidator(_bytes), Field(gt=0)]
_Path = Annotated[Text, AfterValidator(_absolute)]
_Host = Annotated[Text, AfterValidator(_host)]
_Count = Annotated[int, Field(ge=1)]
_Wait = Annotated[float, Field(ge=0, le=7 * 86400)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class PathsTable(_Table):
    """Directories on a node, absolute."""

    checkpoint: _Path | None = Field(default=None, description="The checkpoint. Needed by `deskfleet fleet`.")
    engram: _Path | None = Field(
        default=None,
        description="Rows of the Engram tables that this node reads; a local disk. [default: CACHE/engram]",
    )
    cache: _Path | None = Field(
        default=None,
        description="What can be made again: compiled kernels, logs. Needed by `deskfleet fleet`.",
    )


class NodeTable(_Table):
    """One machine; the first is the head, where rank 0 runs."""

    name: _Name = Field(description="Its name, also in the names of containers.")
    kind: str = Field(description=f"What it is: {', '.join([*KINDS, LOCAL_KIND])}.")
    available: _Bytes | None = Field(
        default=None, description="What is free before anything starts, e.g. 108GiB. [default: the kind's]"
    )
    address: _Host | None = Field(
        default=None,
        description="What ssh is given, or `local` where deskfleet runs. Needed by `deskfleet fleet`.",
    )
    user: Annotated[Text, Field(pattern=r"^[^\s@:/-][^\s@:/]*$")] | None = Field(
        default=None, description="Who logs in. [default: as ssh_config says]"
    )
    port: int | None = Field(
        default=None, ge=1, le=65535, description="Port of ssh. [default: as ssh_config says]"
    )
    identity: Text | None = Field(
        default=None, description="File of the private key, here. [default: as ssh_config says]"
    )
    fabric: list[_Host] | None = Field(
        default=None,
        min_length=1,
        max_length=8,
        description="Addresses on the fast network; ranks meet at the first. [default: address]",
    )
    paths: PathsTable = Field(
        default_factory=PathsTable, description="What differs from [paths] on this node."
    )


class CheckpointTable(_Table):
    """What is served."""

    model: Text = Field(
        description="A name that `deskfleet plan --model` knows, or a directory on this machine."
    )
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] | None = Field(
        default=None, description="Commit of the repository that `pull` downloads."
    )
    origin: Annotated[Text, AfterValidator(_origin)] | None = Field(
        default=None,
        description="Where `pull` downloads it: https://HUB/OWNER/NAME, or a directory with SHA256SUMS.",
    )


class EngineTable(_Table):
    """What serves it."""

    name: EngineName | None = Field(
        default=None, description="native, vllm, sglang or exl3. [default: the profile's, where it is a file]"
    )
    image: Annotated[Text, AfterValidator(_image)] | None = Field(
        default=None,
        description="The container image, by digest: `name@sha256:...`, or `sha256:...` of a local one.",
    )
    build: bool = Field(
        default=False, description="`deskfleet fleet build` makes the image, under this name."
    )
    allow_tag: bool = Field(
        default=False, description="Take an image by tag, which may be another one on each node: a warning."
    )
    adapter: bool = Field(
        default=True, description="Use deskfleet's plug-in of the engine, for Engram rows on disk."
    )
    args: list[Text] = Field(default_factory=list, description="Arguments after those that deskfleet gives.")
    env: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], Annotated[str, AfterValidator(_text)]
    ] = Field(
        default_factory=dict,
        description="Variables beside those that deskfleet sets; `${secret:NAME}` is replaced at the start.",
    )
    mounts: list[Annotated[Text, AfterValidator(_mount)]] = Field(
        default_factory=list, description="Mounts beside those that deskfleet makes: `/there:/inside[:ro]`."
    )


class WishesTable(_Table):
    """What is asked of the planner; what is left out, the plan chooses and says why. Over the profile's values."""

    max_model_len: _Count | None = Field(default=None, description="Longest prompt plus answer, tokens.")
    max_num_seqs: _Count | None = Field(default=None, description="Requests that run at once. [default: 4]")
    kv_tokens: _Count | None = Field(
        default=None, description="Size of the KV pool, tokens. [default: max_model_len]"
    )
    num_drafts: int | None = Field(default=None, ge=0, description="Draft tokens; 0 is no speculation.")
    has_images: bool | None = Field(default=None, description="Whether images can be sent. [default: true]")
    margin: Annotated[int, BeforeValidator(_bytes), Field(ge=0)] | None = Field(
        default=None, description="Left free on every node beyond the floors, e.g. 2GiB. [default: 0]"
    )
    tp_size: _Count | None = Field(default=None, description="Ranks. [default: the plan's choice]")
    ep_size: _Count | None = Field(default=None, description="Ranks that share out whole experts.")
    dcp_size: _Count | None = Field(default=None, description="Ranks that share out the compressed KV.")
    engram: EngramPlacement | None = Field(
        default=None, description="Where the tables lie: device, host, disk, none."
    )
    kv_format: KvFormat | None = Field(default=None, description=f"{', '.join(get_args(KvFormat))}.")
    chunk_tokens: _Count | None = Field(default=None, description="Prompt tokens of a step.")
    fraction: float | None = Field(
        default=None, gt=0, lt=1, description="SGLang's mem-fraction-static, vLLM's gpu-memory-utilization."
    )
    has_bounded_indexer: bool | None = Field(
        default=None,
        description="Whether the engine chooses keys in bounded pieces. [default: as it is released]",
    )


class GatewayTable(_Table):
    """The endpoint, on the machine where deskfleet runs. Files are relative to fleet.toml."""

    host: _Host = Field(default="127.0.0.1", description="Address to listen at; 0.0.0.0 is every one.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen at; 0 is any free one.")
    keys: Text | None = Field(default=None, description="Keys that are let in, a file of `deskfleet keys`.")
    policies: Text | None = Field(default=None, description="Settings of limits and policies, a TOML file.")
    model_id: Text | None = Field(
        default=None, description="The name clients ask for. [default: the model's]"
    )
    thinking: bool = Field(default=True, description="Think where a request does not say.")
    access_log: Text | None = Field(default=None, description="A file of one JSON object per request.")
    traces: Text | None = Field(
        default=None, description="URL of an OpenTelemetry collector (OTLP over HTTP)."
    )
    debug_answers: int = Field(
        default=0, ge=0, le=1000, description="Keep so many answers as the model wrote them."
    )


class RestartTable(_Table):
    """What is done when a fleet that has served fails: its ranks are all started again."""

    backoff_s: list[_Wait] = Field(
        default=[10, 30, 90],
        max_length=10,
        description="Seconds before the first, second, ... restart; one more failure is the last. `[]`: no restarts.",
    )
    steady_s: _Wait = Field(
        default=1800, description="After so many seconds of service without a break, failures count anew."
    )
    absent_s: _Wait = Field(
        default=1800,
        description="Seconds that a restart waits for a node that cannot be reached; then the fleet has failed.",
    )


class FleetTable(_Table):
    """One fleet."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")] | None = Field(
        default=None,
        description="Its name: a-z, 0-9 and -. Fleets of different names share nothing. Needed by `deskfleet fleet`.",
    )
    profile: Text | None = Field(
        default=None,
        description="max-context, max-concurrency or lowest-latency, or a file of `plan --write-profile`.",
    )
    share: Literal["nfs", "copy", "local"] = Field(
        default="local",
        description="How the checkpoint reaches nodes: exported by the head, copied, or there already.",
    )
    paths: PathsTable = Field(
        default_factory=PathsTable, description="Directories, where all nodes have them."
    )
    nodes: list[NodeTable] = Field(min_length=1, max_length=MAX_NODES, description="The machines.")
    checkpoint: CheckpointTable | None = Field(
        default=None, description="What is served. Needed by `deskfleet fleet`."
    )
    engine: EngineTable = Field(default_factory=EngineTable, description="What serves it.")
    wishes: WishesTable = Field(default_factory=WishesTable, description="What is asked of the planner.")
    gateway: GatewayTable = Field(default_factory=GatewayTable, description="The endpoint.")
    restart: RestartTable = Field(default_factory=RestartTable, description="What follows a failure.")
    secrets: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")], Text] = Field(
        default_factory=dict,
        description="References, never values: `env:NAME`, a variable here, or `file:PATH`, a file here.",
    )


class ProfileTable(WishesTable):
    """The layout that `deskfleet plan --write-profile` wrote: wishes, and the engine they are for."""

    engine: EngineName | None = None


class _ProfileFile(_Table):
    profile: ProfileTable


@dataclass(frozen=True, slots=True)
class FleetFile:
    """A fleet.toml that was read: what it says, and where it says it."""

    toml: TomlFile
    table: FleetTable


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """A file of a profile that was read."""

    toml: TomlFile
    table: ProfileTable


def read_fleet_file(path: Path, overrides: tuple[str, ...] = ()) -> FleetFile:
    """Read a fleet.toml, with `KEY=VALUE` in place of what it says. Raises ConfigError with every mistake."""
    toml = overridden(read_toml(path, hint=HINT), overrides)
    file = FleetFile(toml, validated(toml, FleetTable, hidden=HIDDEN, hint=HINT))
    _check_names(file)
    _check_kinds(file)
    return file


def read_profile_file(path: Path) -> ProfileFile:
    """Read a file of `deskfleet plan --write-profile`. Raises ConfigError with every mistake."""
    hint = "deskfleet plan --write-profile writes one"
    toml = read_toml(path, hint=hint)
    return ProfileFile(toml, validated(toml, _ProfileFile, hint=hint).profile)


def read_fleet(path: Path) -> Cluster:
    """The machines of a fleet.toml: each node's `kind` (spark, h200, local) and, where it was measured, `available`.

    `available` is bytes, or text such as "108GiB". Raises ConfigError naming the file, the key and what is wrong; nodes
    of several kinds are refused.
    """
    return cluster_of(read_fleet_file(path))


def cluster_of(file: FleetFile) -> Cluster:
    """The machines of a file that was read, as the planner takes them."""
    tables = file.table.nodes
    kind = _kind(tables[0].kind, len(tables))
    return Cluster(
        tuple(Node(each.name, kind, each.available or kind.available_bytes) for each in tables),
        origin=f"{len(tables)}x{kind.name}",
    )


def _kind(name: str, num_nodes: int) -> NodeKind:
    if name != LOCAL_KIND:
        return KINDS[name]
    kind = this_machine().kind
    # Nodes of this kind may all be this machine, as in a trial: what is free is divided among them.
    return replace(kind, num_devices=1, available_bytes=kind.available_bytes // num_nodes)


def _check_names(file: FleetFile) -> None:
    names = [each.name.casefold() for each in file.table.nodes]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise file.toml.wrong(
                ("nodes", index, "name"),
                f"is {file.table.nodes[index].name!r}: two nodes of one name: "
                f"{', '.join(each.name for each in file.table.nodes)}",
                hint="containers are called by it, whatever the case of letters",
            )


def _check_kinds(file: FleetFile) -> None:
    known = (*KINDS, LOCAL_KIND)
    for index, each in enumerate(file.table.nodes):
        key = ("nodes", index, "kind")
        if each.kind not in known:
            raise file.toml.wrong(
                key, f"is {each.kind!r}: unknown kind of node {each.kind!r}", hint=nearest(each.kind, known)
            )
    kinds = {each.kind for each in file.table.nodes}
    if len(kinds) > 1:
        index = next(i for i, each in enumerate(file.table.nodes) if each.kind != file.table.nodes[0].kind)
        raise file.toml.wrong(
            ("nodes", index, "kind"),
            f"is {file.table.nodes[index].kind!r}: nodes of several kinds: {', '.join(sorted(kinds))}",
            hint="ranks are alike, so a fleet is planned on nodes of one kind",
        )
    total = _kind(file.table.nodes[0].kind, len(file.table.nodes)).total_bytes
    for index, each in enumerate(file.table.nodes):
        if each.available is not None and each.available > total:
            raise file.toml.wrong(
                ("nodes", index, "available"),
                f"is too much: {each.name} has {each.available} bytes available of {total}",
                hint="give what is free before anything is started",
            )


def with_available(cluster: Cluster, available_bytes: int) -> Cluster:
    """The same machines with so much free on each. Raises ConfigError when more is free than there is."""
    total = cluster.kind.total_bytes
    if not 0 < available_bytes <= total:
        raise ConfigError(
            f"{available_bytes} bytes available on a {cluster.kind.name} of {total} bytes",
            hint="give what is free on each node before anything is started",
        )
    return replace(
        cluster, nodes=tuple(replace(node, available_bytes=available_bytes) for node in cluster.nodes)
    )


def this_machine(meminfo: Path = Path("/proc/meminfo")) -> Cluster:
    """This machine as a cluster that any number of ranks may share: total and available memory as the kernel says.

    Bandwidths and disk are unknown; what is given for them is marked so in the kind's source. Raises ConfigError where
    there is no such file.
    """
    try:
        text = meminfo.read_text(encoding="ascii")
        sizes = {
            line.split(":")[0]: int(line.split()[1]) * 1024
            for line in text.splitlines()
            if line.endswith("kB")
        }
        total, available = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise ConfigError(f"cannot tell this machine's memory from {meminfo}: {error}") from error
    kind = NodeKind(
        name="local",
        title="this machine",
        arch="cpu",
        is_unified=True,
        num_devices=max(8, os.cpu_count() or 1),
        total_bytes=total,
        available_bytes=available,
        host_bytes=total,
        bytes_per_s=20e9,
        peak_flops=5e11,
        link=Link("memory", bytes_per_s=10e9, latency_s=50e-6),
        disk=Disk(bytes_per_s=1e9, iops=50e3, qd1_iops=5e3),
        source="memory as the kernel says; speeds are round numbers",
    )
    return Cluster((Node("local", kind, available),), origin="local")


__all__ = [
    "HIDDEN",
    "HINT",
    "LOCAL_KIND",
    "SECRET",
    "CheckpointTable",
    "EngineTable",
    "FleetFile",
    "FleetTable",
    "GatewayTable",
    "NodeTable",
    "PathsTable",
    "ProfileFile",
    "ProfileTable",
    "WishesTable",
    "cluster_of",
    "read_fleet",
    "read_fleet_file",
    "read_profile_file",
    "this_machine",
    "with_available",
]
