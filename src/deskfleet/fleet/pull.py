"""The download of a fleet's checkpoint: what to ask of which node, and what came of it.

The download itself runs on the node that keeps the files, so that bytes take the shortest way:
`deskfleet.fleet.fetch`, put there as text, with the node's own Python or the engine image's. Owns how a
fleet.toml becomes a job; knows no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deskfleet.errors import ConfigError
from deskfleet.fleet.fetch import TOKEN_VARIABLE, Job
from deskfleet.fleet.origin import What
from deskfleet.fleet.program import Program, follow
from deskfleet.fleet.remote import Remote, Remotes
from deskfleet.fleet.secrets import read_secret
from deskfleet.fleet.spec import EngineSpec, FleetSpec, NodeSpec
from deskfleet.fleet.transfer import PARALLEL

TOKEN_SECRET = "origin_token"
"""The secret whose value is sent to the origin as a bearer token, where fleet.toml has one of that name."""

OnEvent = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class PullOptions:
    """What of a checkpoint, and how: `parallel` connections a node; `verify` hashes again what is there."""

    what: What = "all"
    parallel: int = PARALLEL
    verify: bool = False


@dataclass(frozen=True, slots=True)
class Pulled:
    """What came of a download on one node. `num_hashed` files were hashed by this run, `left_out` stay at the origin.

    `fetched_bytes` came over the network; `resumed_bytes` earlier runs had left unfinished.
    """

    node: str
    directory: str
    origin: str
    revision: str
    what: str
    num_files: int
    total_bytes: int
    num_fetched: int
    num_kept: int
    num_hashed: int
    fetched_bytes: int
    resumed_bytes: int
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, node: str, event: Mapping[str, Any]) -> Pulled:
        """Understand the last event of a download."""
        values = {key: value for key, value in event.items() if key not in ("event", "left_out")}
        return cls(node=node, left_out=tuple(event["left_out"]), **values)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values that JSON can hold."""
        return asdict(self)


async def pull(
    spec: FleetSpec,
    remotes: Remotes,
    nodes: Sequence[str],
    options: PullOptions,
    on_event: OnEvent,
    environ: Mapping[str, str],
) -> tuple[Pulled, ...]:
    """Download the fleet's checkpoint onto `nodes`, all at once. What is there and right is kept.

    Raises ConfigError for a fleet without origin or revision, a name that is no node, or a secret that cannot be
    read; CheckpointError for files that are missing or wrong; DoesNotFit for a disk without room; NodeUnreachable.
    """
    token = None
    if TOKEN_SECRET in spec.secrets:
        token = read_secret(TOKEN_SECRET, spec.secrets[TOKEN_SECRET], environ)
    programs = {node.name: pull_program(spec, node, options, token) for node in chosen_nodes(spec, nodes)}

    async def on(remote: Remote) -> Pulled | None:
        program = programs.get(remote.node.name)
        if program is None:
            return None
        return Pulled.of(remote.node.name, await follow(remote, program, on_event))

    gathered = (await remotes.gather(on)).all()
    return tuple(pulled for pulled in gathered.values() if pulled is not None)


def shown_programs(
    spec: FleetSpec, remotes: Remotes, nodes: Sequence[str], options: PullOptions
) -> dict[str, dict[str, Any]]:
    """Return what `pull` would run on each node, the token as a placeholder. Nothing is reached."""
    token = f"${{secret:{TOKEN_SECRET}}}" if TOKEN_SECRET in spec.secrets else None
    return {
        node.name: pull_program(spec, node, options, token).shown(remotes[node.name])
        for node in chosen_nodes(spec, nodes)
    }


def pull_program(spec: FleetSpec, node: NodeSpec, options: PullOptions, token: str | None) -> Program:
    """Return the program that downloads onto `node`. Raises ConfigError for a fleet without origin or revision."""
    place = f"{spec.path}: [checkpoint]"
    if spec.checkpoint.origin is None:
        raise ConfigError(
            f"{place} has no origin",
            hint='origin = "https://HUB/OWNER/NAME", or the URL of a directory with SHA256SUMS',
        )
    if spec.checkpoint.revision is None:
        raise ConfigError(
            f"{place} has no revision", hint="revision = the commit to download, 40 digits: a branch may move"
        )
    job = Job(
        origin=spec.checkpoint.origin,
        revision=spec.checkpoint.revision,
        directory=node.paths.checkpoint,
        what=options.what,
        verify=options.verify,
        parallel=options.parallel,
    )
    return fetch_program(job, spec.engine, token)


def fetch_program(job: Job, engine: EngineSpec, token: str | None) -> Program:
    """Return the program that does `job`, in the engine's image where the node has no Python."""
    default = Job(job.origin, job.revision, job.directory)
    given = {key: value for key, value in asdict(job).items() if value != getattr(default, key)}
    words = {"origin": job.origin, "revision": job.revision, "directory": job.directory, **given}
    secret = None if token is None else (TOKEN_VARIABLE, token)
    return Program(
        "deskfleet.fleet.fetch", (json.dumps(words),), job.directory, engine.image, engine.mounts, secret
    )


def chosen_nodes(spec: FleetSpec, names: Sequence[str]) -> tuple[NodeSpec, ...]:
    """Return the nodes of these names, in the fleet's order. Raises ConfigError for a name that is none."""
    known = [node.name for node in spec.nodes]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"there is no node {unknown[0]!r} in {spec.path}", hint=f"there are {', '.join(known)}"
        )
    return tuple(node for node in spec.nodes if node.name in names)


__all__ = [
    "TOKEN_SECRET",
    "OnEvent",
    "PullOptions",
    "Pulled",
    "chosen_nodes",
    "fetch_program",
    "pull",
    "pull_program",
    "shown_programs",
]
