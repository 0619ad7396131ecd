"""Machines as the user lists them: the nodes of a fleet.toml, and this machine itself. Owns the file's keys."""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from deskfleet.errors import ConfigError
from deskfleet.planner.cluster import KINDS, MAX_NODES, Cluster, Disk, Link, Node, NodeKind
from deskfleet.units import parse_bytes

_HINT = "[[nodes]] has name, kind and, where it was measured, available"


def _bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ValueError(error.message) from error


_Bytes = Annotated[int, BeforeValidator(_bytes), Field(gt=0)]


class _NodeEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1)
    kind: str
    available: _Bytes | None = None


class _FleetFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    nodes: list[_NodeEntry] = Field(min_length=1, max_length=MAX_NODES)


def read_fleet(path: Path) -> Cluster:
    """Read `[[nodes]]` of a TOML file: `name`, `kind` (spark, h200) and, where it was measured, `available`.

    `available` is bytes, or text such as "108GiB". Raises ConfigError naming the file, the key and what is wrong; nodes
    of several kinds are refused.
    """
    try:
        entries = _FleetFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).nodes
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint=_HINT) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", hint=_HINT) from error
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_of(error)}", hint=_HINT) from error
    kinds = {entry.kind for entry in entries}
    unknown = sorted(kinds - set(KINDS))
    if unknown:
        raise ConfigError(f"{path}: unknown kind of node {unknown[0]!r}", hint=f"known: {', '.join(KINDS)}")
    if len(kinds) > 1:
        raise ConfigError(
            f"{path}: nodes of several kinds: {', '.join(sorted(kinds))}",
            hint="ranks are alike, so a fleet is planned on nodes of one kind",
        )
    kind = KINDS[kinds.pop()]
    nodes = []
    for entry in entries:
        available = kind.available_bytes if entry.available is None else entry.available
        if available > kind.total_bytes:
            raise ConfigError(
                f"{path}: {entry.name} has {available} bytes available of {kind.total_bytes}",
                hint="give what is free before anything is started",
            )
        nodes.append(Node(entry.name, kind, available))
    names = [node.name for node in nodes]
    if len(set(names)) != len(names):
        raise ConfigError(f"{path}: two nodes of one name: {', '.join(names)}")
    return Cluster(tuple(nodes), origin=f"{len(nodes)}x{kind.name}")


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


def _first_of(error: ValidationError) -> str:
    """The first thing that is wrong, with its place: `nodes.1.kind: field required`."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"unknown key {place}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message[:1].lower()}{message[1:]}"


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


__all__ = ["read_fleet", "this_machine", "with_available"]
