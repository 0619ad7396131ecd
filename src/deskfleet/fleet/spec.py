"""One fleet as its file says: `FleetSpec` and its parts, read by `read_spec`.

Owns what is true of values between tables: paths that nodes share, addresses, images, references to secrets. The keys
themselves and how a file is read are `planner.fleetfile`'s. Knows no machine, no engine's flags, and no secret's value.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from deskfleet.planner.fleetfile import (
    SECRET,
    FleetFile,
    NodeTable,
    ProfileFile,
    read_fleet_file,
    read_profile_file,
)
from deskfleet.planner.wishes import EngineName, Wishes
from deskfleet.tomlfile import nearest

LOCAL = "local"
"""The address of the machine where deskfleet runs."""

SSH_PORT = 22

Share = Literal["nfs", "copy", "local"]
"""How a checkpoint reaches the nodes: exported by the head, copied to each, or there already."""


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Absolute paths on one node: the checkpoint's directory, this node's rows of Engram, and what may be remade."""

    checkpoint: str
    engram: str
    cache: str


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One machine. `address` is what ssh is given, or "local" for the one where deskfleet runs.

    `user`, `port`, `identity` None is what the user's ssh_config says. `fabric` are its addresses on the fast network;
    ranks meet at the first. `kind` is the planner's, `available_bytes` what was measured free before the start.
    """

    name: str
    address: str
    user: str | None
    port: int | None
    identity: str | None
    fabric: tuple[str, ...]
    kind: str
    available_bytes: int | None
    paths: NodePaths


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """What is served: `model` is a name that the planner knows, or a path; `revision` of the repository at `origin`."""

    model: str
    revision: str | None
    origin: str | None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What serves it. `image` is by digest unless `build` (deskfleet makes it) or `allow_tag` say otherwise.

    `args`, `env` and `mounts` (`/there:/in/container[:ro]`) are added to what deskfleet renders.
    """

    name: EngineName
    image: str | None
    args: tuple[str, ...]
    env: Mapping[str, str]
    mounts: tuple[str, ...]
    adapter: bool
    build: bool = False
    allow_tag: bool = False


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """The endpoint, on the machine where deskfleet runs: what `deskfleet serve` takes as flags. Paths are absolute."""

    host: str
    port: int
    keys: str | None
    policies: str | None = None
    model_id: str | None = None
    thinking: bool = True
    access_log: str | None = None
    traces: str | None = None
    debug_answers: int = 0


@dataclass(frozen=True, slots=True)
class RestartSpec:
    """What follows if a fleet that has served fails, in seconds; see `fleet.watch.Policy`. No back-off, no restart."""

    backoff_s: tuple[float, ...]
    steady_s: float
    absent_s: float


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """One fleet. The head is `nodes[0]`; `secrets` are references, `env:NAME` or `file:/PATH`, never values."""

    name: str
    path: Path
    nodes: tuple[NodeSpec, ...]
    checkpoint: CheckpointSpec
    engine: EngineSpec
    profile: str | None
    wishes: Wishes
    share: Share
    gateway: GatewaySpec
    secrets: Mapping[str, str]
    restart: RestartSpec
    warnings: tuple[str, ...] = ()

    @property
    def head(self) -> NodeSpec:
        """The node of rank 0."""
        return self.nodes[0]

    def node(self, name: str) -> NodeSpec:
        """The node called `name`. Raises KeyError."""
        return next(node for node in self.nodes if node.name == name)


@dataclass(frozen=True, slots=True)
class FleetSource:
    """A fleet.toml as read, the file of its profile where it names one, and what both mean."""

    file: FleetFile
    profile: ProfileFile | None
    spec: FleetSpec


def read_spec(path: Path, overrides: Sequence[str] = ()) -> FleetSpec:
    """Read a fleet.toml; `overrides` are `KEY=VALUE` as --set takes them.

    Raises ConfigError with the file, the place, the value (never a secret's) and a hint.
    """
    return read_source(path, overrides).spec


def read_source(path: Path, overrides: Sequence[str] = ()) -> FleetSource:
    """Read a fleet.toml as `read_spec` does, and keep where each value came from."""
    file = read_fleet_file(path, tuple(overrides))
    table, toml, directory = file.table, file.toml, _directory(file)
    if table.name is None:
        raise toml.wrong(("name",), "is missing", hint='name = "desk": containers and state are called by it')
    if table.checkpoint is None:
        raise toml.wrong(("checkpoint",), "is missing", hint='[checkpoint] with model = "v4.1-flash"')
    profile = _profile(file)
    _check_secrets(file)
    checkpoint = CheckpointSpec(
        _model(table.checkpoint.model, directory), table.checkpoint.revision, table.checkpoint.origin
    )
    gateway = table.gateway
    spec = FleetSpec(
        name=table.name,
        path=path.absolute(),
        nodes=_nodes(file),
        checkpoint=checkpoint,
        engine=_engine(file, profile),
        profile=table.profile if profile is None else str(profile.toml.path),
        wishes=_wishes(file, profile),
        share=table.share,
        gateway=GatewaySpec(
            host=gateway.host,
            port=gateway.port,
            keys=_here(gateway.keys, directory),
            policies=_here(gateway.policies, directory),
            model_id=gateway.model_id,
            thinking=gateway.thinking,
            access_log=_here(gateway.access_log, directory),
            traces=gateway.traces,
            debug_answers=gateway.debug_answers,
        ),
        secrets={name: _reference(text, directory) for name, text in table.secrets.items()},
        warnings=_warnings(file),
        restart=RestartSpec(tuple(table.restart.backoff_s), table.restart.steady_s, table.restart.absent_s),
    )
    return FleetSource(file, profile, spec)


def _directory(file: FleetFile) -> Path:
    """Where the file is: what it says of files here is relative to that."""
    return file.toml.path.absolute().parent


def _here(text: str | None, directory: Path) -> str | None:
    """A path on this machine as the file gives it: relative to the file, `~` the user's home."""
    return None if text is None else str(directory / Path(text).expanduser())


def _model(text: str, directory: Path) -> str:
    """A name stays as it is; what is spelled as a path is one, relative to the file."""
    return str(directory / Path(text).expanduser()) if text.startswith((".", "/", "~")) else text


def _nodes(file: FleetFile) -> tuple[NodeSpec, ...]:
    nodes = tuple(_node(file, index, table) for index, table in enumerate(file.table.nodes))
    addresses: dict[tuple[str, int], str] = {}
    fabric: dict[str, str] = {}
    for index, node in enumerate(nodes):
        target = (node.address.casefold(), node.port or SSH_PORT)
        if target in addresses:
            raise file.toml.wrong(
                ("nodes", index, "address"),
                f"is {node.address!r}, where {addresses[target]} is already",
                hint="one node is one machine; machines behind one address differ by port",
            )
        addresses[target] = node.name
        for number, address in enumerate(node.fabric):
            if address in fabric and fabric[address] != node.name:
                raise file.toml.wrong(
                    ("nodes", index, "fabric", number),
                    f"is {address!r}, and {fabric[address]} has it already",
                    hint="each node has addresses of its own on the fast network",
                )
            fabric[address] = node.name
            if len(nodes) > 1 and _is_loopback(address):
                raise file.toml.wrong(
                    ("nodes", index, "fabric", number),
                    f"is {address!r}, which other nodes cannot reach",
                    hint="give the address that this node has on the fast network",
                )
    return nodes


def _node(file: FleetFile, index: int, table: NodeTable) -> NodeSpec:
    key = ("nodes", index)
    if table.address is None:
        raise file.toml.wrong(
            (*key, "address"), "is missing", hint='what ssh is given, or "local" for this machine'
        )
    if table.address == LOCAL:
        for name in ("user", "port", "identity"):
            if getattr(table, name) is not None:
                raise file.toml.wrong(
                    (*key, name),
                    f"is {getattr(table, name)!r}, and the node is local",
                    hint="leave it out: no ssh",
                )
        if table.fabric is None and len(file.table.nodes) > 1:
            raise file.toml.wrong(
                (*key, "fabric"),
                "is missing",
                hint="other nodes must reach this one: give its address to them",
            )
    default = "127.0.0.1" if table.address == LOCAL else table.address
    return NodeSpec(
        name=table.name,
        address=table.address,
        user=table.user,
        port=table.port,
        identity=_here(table.identity, _directory(file)),
        fabric=tuple(table.fabric or (default,)),
        kind=table.kind,
        available_bytes=table.available,
        paths=_paths(file, index, table),
    )


def _paths(file: FleetFile, index: int, table: NodeTable) -> NodePaths:
    shared, own = file.table.paths, table.paths

    def needed(name: str) -> str:
        value: str | None = getattr(own, name) or getattr(shared, name)
        if value is None:
            raise file.toml.wrong(
                ("nodes", index, "paths", name),
                "is missing",
                hint=f"[paths] with {name} where all nodes have it in one place, else [nodes.paths]",
            )
        return value

    cache = needed("cache")
    return NodePaths(needed("checkpoint"), own.engram or shared.engram or f"{cache}/engram", cache)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _profile(file: FleetFile) -> ProfileFile | None:
    """The file of the profile, None for one of the planner's names. Raises ConfigError."""
    named = file.table.profile
    if named is None:
        return None
    from deskfleet.planner.profiles import PROFILES  # it brings numpy, which most verbs do without

    if named in PROFILES:
        if file.table.wishes.max_num_seqs is not None:
            raise file.toml.wrong(
                ("wishes", "max_num_seqs"),
                f"is {file.table.wishes.max_num_seqs}, and profile {named} says how many requests run",
                hint="leave one of them out",
            )
        return None
    if "/" not in named and not named.endswith(".toml"):
        raise file.toml.wrong(
            ("profile",),
            f"is {named!r}, no profile",
            hint=f"{nearest(named, PROFILES)} A file ends with .toml",
        )
    return read_profile_file(_directory(file) / Path(named).expanduser())


def _engine(file: FleetFile, profile: ProfileFile | None) -> EngineSpec:
    table, toml = file.table.engine, file.toml
    planned = None if profile is None else profile.table.engine
    name = table.name or planned
    if name is None:
        raise toml.wrong(("engine", "name"), "is missing", hint="native, vllm, sglang or exl3")
    if planned is not None and name != planned:
        raise toml.wrong(
            ("engine", "name"),
            f"is {name!r}, and the profile is for {planned!r}",
            hint="plan a profile for this engine: deskfleet plan --engine ... --write-profile",
        )
    _check_image(file)
    for index, argument in enumerate(table.args):
        if SECRET.search(argument):
            raise toml.wrong(
                ("engine", "args", index),
                "asks for a secret",
                hint="arguments are seen by all; give it in [engine.env]",
            )
    return EngineSpec(
        name=name,
        image=table.image,
        args=tuple(table.args),
        env=dict(table.env),
        mounts=tuple(table.mounts),
        adapter=table.adapter,
        build=table.build,
        allow_tag=table.allow_tag,
    )


_DIGEST = re.compile(r"(?:[^@]+@)?sha256:[0-9a-f]{64}")


def is_by_digest(image: str) -> bool:
    """Whether an image's name says its content: by the digest of a repository, or the id of a local one."""
    return _DIGEST.fullmatch(image) is not None


def _check_image(file: FleetFile) -> None:
    table, key = file.table.engine, ("engine", "image")
    if table.image is None or table.allow_tag:
        return
    if "@" in table.image and not is_by_digest(table.image):
        raise file.toml.wrong(
            key,
            f"is {table.image!r}: no digest",
            hint="name@sha256: and 64 digits, as docker images --digests says",
        )
    if table.build == is_by_digest(table.image):
        reason = (
            "is a digest, and build is true"
            if table.build
            else "is a tag, which may be another image tomorrow"
        )
        raise file.toml.wrong(
            key,
            f"is {table.image!r}: {reason}",
            hint="give a name that the built image shall have"
            if table.build
            else "name@sha256:..., or build = true, or allow_tag = true",
        )


_SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY)$", re.IGNORECASE)


def _check_secrets(file: FleetFile) -> None:
    """Raise ConfigError for a secret that stands in the file, and for one that is asked for and not there."""
    secrets, toml = file.table.secrets, file.toml
    for name, text in secrets.items():
        kind, colon, value = text.partition(":")
        is_good = bool(colon and value) and (
            re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value) is not None if kind == "env" else kind == "file"
        )
        if not is_good:
            raise toml.wrong(
                ("secrets", name),
                "is no reference; its text is not repeated here",
                hint="env:NAME, a variable of whoever calls deskfleet, or file:PATH; never the secret itself",
            )
    for name, value in file.table.engine.env.items():
        key = ("engine", "env", name)
        for asked in SECRET.findall(value):
            if asked not in secrets:
                raise toml.wrong(key, f"asks for the secret {asked!r}", hint=nearest(asked, secrets))
        if _SECRET_NAME.search(name) and value and not SECRET.search(value):
            raise toml.wrong(
                key,
                "is a secret by its name; its text is not repeated here",
                hint=f'[secrets] with {name.lower()} = "env:{name}", and here "${{secret:{name.lower()}}}"',
            )


def _reference(text: str, directory: Path) -> str:
    kind, _, value = text.partition(":")
    return text if kind == "env" else f"file:{_here(value, directory)}"


LAYOUT_NAMES: Mapping[str, str] = MappingProxyType({"margin_bytes": "margin"})
"""Wishes that the file calls otherwise: there a size may have a unit."""


def _wishes(file: FleetFile, profile: ProfileFile | None) -> Wishes:
    """The file's wishes over its profile's. Raises ConfigError."""
    values: dict[str, Any] = {}
    for field in fields(Wishes):
        name = LAYOUT_NAMES.get(field.name, field.name)
        layers = [file.table.wishes, *([] if profile is None else [profile.table])]
        given = next((value for layer in layers if (value := getattr(layer, name, None)) is not None), None)
        if given is not None:
            values[field.name] = given
    values["engine"] = file.table.engine.name or values.get("engine")
    return Wishes(**values)


def _warnings(file: FleetFile) -> tuple[str, ...]:
    """What is allowed and will be regretted, one sentence each."""
    table, toml = file.table, file.toml
    found = []
    image = table.engine.image
    if image is not None and table.engine.allow_tag and not is_by_digest(image):
        found.append(f"{toml.place(('engine', 'image'))} is a tag, {image}: nodes may run different images")
    checkpoint = table.checkpoint
    if checkpoint is not None and checkpoint.origin is not None and not _is_commit(checkpoint.revision):
        shown = checkpoint.revision or "none"
        found.append(
            f"{toml.place(('checkpoint', 'revision'))} is {shown}, no commit: what is downloaded may change"
        )
    if table.gateway.keys is None and table.gateway.policies is None and not _is_loopback(table.gateway.host):
        found.append(
            f"{toml.place(('gateway', 'host'))} is {table.gateway.host} without keys: whoever reaches it may use it"
        )
    return tuple(found)


def _is_commit(revision: str | None) -> bool:
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", revision) is not None


__all__ = [
    "LOCAL",
    "CheckpointSpec",
    "EngineSpec",
    "FleetSource",
    "FleetSpec",
    "GatewaySpec",
    "NodePaths",
    "NodeSpec",
    "RestartSpec",
    "Share",
    "is_by_digest",
    "read_source",
    "read_spec",
]
