"""How a checkpoint reaches the nodes, and the proof that it is there: every node reads every file it needs.

Three ways: the head exports it by NFS, the head offers it for copies (`deskfleet.fleet.offer` there,
`deskfleet.fleet.fetch` on the workers: resumable, every byte hashed), or each node has it already. Whatever the
way, the proof is the same. Owns what is done and how what nodes say is judged; knows no HTTP.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from deskfleet.errors import CheckpointError, DeskfleetError
from deskfleet.fleet.fetch import TOKEN_VARIABLE, Job
from deskfleet.fleet.origin import INDEX_NAME, SUMS_NAME, RemoteFile, select
from deskfleet.fleet.program import Program, error_of, follow, parse_event, read_script
from deskfleet.fleet.pull import OnEvent, fetch_program
from deskfleet.fleet.remote import Remote, RemoteFailed, Remotes
from deskfleet.fleet.spec import FleetSpec, NodeSpec

_PROOF_S = 300.0
_MOUNT_S = 60.0
_REACH_S = 20.0
_NFS = ("nfs", "nfs4")
_MIN_READ_BYTES = 1 << 18

_REACH = """\
for place in "$@"; do
  if timeout 3 bash -c 'exec 3<>"/dev/tcp/$1/$2"' - "${place%,*}" "${place##*,}" 2>/dev/null; then
    printf '%s\\n' "$place"
    exit 0
  fi
done
exit 1
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a node saw of one file: its size, digests of its beginning and end; or None and why not."""

    file: str
    size_bytes: int | None = None
    first_sha256: str | None = None
    last_sha256: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a directory lies: `filesystem` such as ext4 or nfs4, what is mounted there, and how."""

    filesystem: str
    source: str
    options: tuple[str, ...]

    @property
    def is_nfs(self) -> bool:
        """Whether the files are another machine's."""
        return self.filesystem in _NFS


@dataclass(frozen=True, slots=True)
class NodeProof:
    """What one node sees. `problems` are sentences about its directories; those about a file are in `files`."""

    node: str
    directory: str
    place: Place | None
    files: tuple[Seen, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether the node has all that it needs."""
        return not self.problems and not any(seen.problem for seen in self.files)

    def to_dict(self) -> dict[str, Any]:
        """Return the proof as values that JSON can hold."""
        return {"is_good": self.is_good, **asdict(self)}


async def share(
    spec: FleetSpec, remotes: Remotes, on_event: OnEvent, *, verify: bool = False
) -> tuple[NodeProof, ...]:
    """Bring the checkpoint to every node as `spec.share` says, then prove it. What is done already is left alone.

    Raises CheckpointError when the head has no complete checkpoint, RemoteFailed when a script could not do its
    work, with what it said, and NodeUnreachable.
    """
    if spec.share == "nfs":
        await _export(spec, remotes)
    elif spec.share == "copy" and len(spec.nodes) > 1:
        await copy(spec, remotes, on_event, verify=verify)
    return await prove(spec, remotes)


async def undo(spec: FleetSpec, remotes: Remotes) -> None:
    """Unmount what `share` mounted, then take the export back. Files are never removed. Raises as `share`."""
    if spec.share != "nfs":
        return
    directory = await _directory(spec, remotes)
    for node, arguments in [*_mounts(spec, directory, "unmount"), *_exports(spec, directory, "unexport")]:
        await _shell(remotes[node.name], arguments)


async def _export(spec: FleetSpec, remotes: Remotes) -> None:
    directory = await _directory(spec, remotes)
    for node, arguments in _exports(spec, directory, "export"):
        await _shell(remotes[node.name], arguments)
    await asyncio.gather(
        *(_shell(remotes[node.name], arguments) for node, arguments in _mounts(spec, directory, "mount"))
    )


async def _directory(spec: FleetSpec, remotes: Remotes) -> str:
    """The head's directory without links: what is exported, and what workers mount, has one name."""
    return (await _shell(remotes[spec.head.name], ("where", spec.head.paths.checkpoint))).strip()


def _exports(spec: FleetSpec, directory: str, verb: str) -> list[tuple[NodeSpec, tuple[str, ...]]]:
    clients = dict.fromkeys(address for node in spec.nodes[1:] for address in node.fabric)
    return [(spec.head, (verb, directory, *clients))] if clients else []


def _mounts(spec: FleetSpec, directory: str, verb: str) -> list[tuple[NodeSpec, tuple[str, ...]]]:
    # In a triangle each worker reaches the head by another cable, so each tries all of its addresses.
    return [(node, (verb, directory, node.paths.checkpoint, *spec.head.fabric)) for node in spec.nodes[1:]]


async def _shell(remote: Remote, arguments: tuple[str, ...]) -> str:
    ran = await remote.run(read_script("share.sh"), *arguments, timeout_s=_MOUNT_S)
    if ran.returncode != 0:
        raise RemoteFailed(
            remote.node.name,
            f"cannot {arguments[0]} the checkpoint",
            ran.last_line,
            hint='deskfleet fleet share --dry-run shows what is run; share = "copy" needs no root',
        )
    return ran.stdout


async def copy(spec: FleetSpec, remotes: Remotes, on_event: OnEvent, *, verify: bool = False) -> None:
    """Copy the head's checkpoint to all workers at once, over the fast network. Raises as `share`.

    With `verify` workers hash again what they have, also what has not changed.
    """
    token = secrets.token_hex(32)
    head = remotes[spec.head.name]
    program = offer_program(spec, token)
    path = program.path()
    await head.put(program.text().encode(), path)
    lines = head.stream(read_script("python.sh"), *program.words(is_local=head.is_local, path=path))
    offered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def listen() -> None:
        async with aclosing(lines):
            async for line in lines:
                event = parse_event(line)
                if event is None:
                    continue
                if event["event"] == "error":
                    raise error_of(event, spec.head.name)
                if event["event"] == "offering":
                    offered.set_result(event)
                else:
                    on_event(spec.head.name, event)
        raise RemoteFailed(
            spec.head.name, "the offer of the checkpoint", "it ended before the copies were done"
        )

    async def fetch(node: NodeSpec, offer: Mapping[str, Any]) -> None:
        remote = remotes[node.name]
        host, port = await _reachable(remote, offer["places"])
        job = _copy_job(
            node, f"http://{f'[{host}]' if ':' in host else host}:{port}", offer["revision"], verify
        )
        await follow(remote, fetch_program(job, spec.engine, token), on_event)

    async def work() -> None:
        offer = await offered
        results = await asyncio.gather(
            *(fetch(node, offer) for node in spec.nodes[1:]), return_exceptions=True
        )
        # All are let finish: what has come to the others stays.
        for result in results:
            if isinstance(result, BaseException):
                raise result

    await _while_listening(listen(), work())


async def _while_listening(listen: Coroutine[Any, Any, None], work: Coroutine[Any, Any, None]) -> None:
    """Do `work` while `listen` goes on; whichever fails first ends both."""
    listening, working = asyncio.ensure_future(listen), asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({listening, working}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (working, listening):
            task.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


def offer_program(spec: FleetSpec, token: str) -> Program:
    """Return the program that offers the head's checkpoint."""
    words = {"directory": spec.head.paths.checkpoint, "hosts": list(spec.head.fabric)}
    return Program(
        "deskfleet.fleet.offer",
        (json.dumps(words),),
        spec.head.paths.checkpoint,
        spec.engine.image,
        spec.engine.mounts,
        (TOKEN_VARIABLE, token),
    )


def _copy_job(node: NodeSpec, origin: str, revision: str, verify: bool = False) -> Job:
    return Job(origin, revision, node.paths.checkpoint, layout="plain", is_ours=True, verify=verify)


async def _reachable(remote: Remote, places: Iterable[tuple[str, int]]) -> tuple[str, int]:
    """Return the first of the head's addresses that a worker can connect to."""
    words = [f"{host},{port}" for host, port in places]
    ran = await remote.run(_REACH, *words, timeout_s=_REACH_S)
    if ran.returncode != 0:
        tried = " or ".join(word.replace(",", ":") for word in words)
        raise DeskfleetError(
            f"{remote.node.name}: the head cannot be reached at {tried}",
            hint="is the head's fabric in fleet.toml right, and does a firewall let its nodes through?",
        )
    host, _, port = ran.stdout.strip().rpartition(",")
    return host, int(port)


async def prove(spec: FleetSpec, remotes: Remotes) -> tuple[NodeProof, ...]:
    """Have every node read the beginning and the end of every file, and compare with the head's. Raises as `share`."""
    head = remotes[spec.head.name]
    names = await _names(head)
    stdin = "".join(f"{name}\n" for name in names).encode()

    async def look(remote: Remote) -> str:
        paths = remote.node.paths
        ran = await remote.run(
            read_script("verify_share.sh"), paths.checkpoint, paths.cache, stdin=stdin, timeout_s=_PROOF_S
        )
        return ran.stdout

    said = (await remotes.gather(look)).all()
    reference, _ = parse_seen(said[spec.head.name])
    return tuple(judge(spec, node, *parse_seen(said[node.name]), reference, names) for node in spec.nodes)


async def _names(head: Remote) -> tuple[str, ...]:
    """Return the files of the head's checkpoint that every node needs. Raises CheckpointError."""
    directory = head.node.paths.checkpoint
    ran = await head.run(read_script("list.sh"), directory)
    if ran.returncode != 0:
        raise CheckpointError(
            f"{head.node.name}: cannot list {directory}: {ran.last_line}",
            hint="pull it first: deskfleet fleet pull",
        )
    index, _, lines = ran.stdout.partition("\n")
    found = {}
    for line in lines.splitlines():
        size, _, name = line.partition(" ")
        is_ours = name.startswith(".") or name.endswith((".part", ".part.done")) or name == SUMS_NAME
        if not is_ours:
            found[name] = RemoteFile(name, int(size), "")
    try:
        files = select(found, bytes.fromhex(index) if INDEX_NAME in found else None, "all").files
    except CheckpointError as error:
        raise CheckpointError(
            f"{head.node.name}: {directory}: {error.message}", hint="pull it first: deskfleet fleet pull"
        ) from error
    return tuple(file.name for file in files)


def parse_seen(text: str) -> tuple[dict[str, Seen], dict[str, Place]]:
    """Understand what `verify_share.sh` printed: files by name, and the places of directories."""
    files: dict[str, Seen] = {}
    places: dict[str, Place] = {}
    for kind, name, *rest in (line.split("\t") for line in text.splitlines() if line.count("\t") >= 2):
        if kind == "file" and len(rest) == 3:
            files[name] = Seen(name, int(rest[0]), rest[1], rest[2])
        elif kind == "bad":
            files[name] = Seen(name, problem=" ".join(rest))
        elif kind == "place" and len(rest) == 3:
            places[name] = Place(rest[0], rest[1], tuple(filter(None, rest[2].split(","))))
    return files, places


def judge(
    spec: FleetSpec,
    node: NodeSpec,
    files: Mapping[str, Seen],
    places: Mapping[str, Place],
    reference: Mapping[str, Seen],
    names: Iterable[str],
) -> NodeProof:
    """Say whether what a node saw is what the head has, and lies where it should."""
    is_head = node == spec.head
    place = places.get("checkpoint")
    seen = tuple(
        _compared(files.get(name, Seen(name, problem="was not looked at")), reference.get(name))
        for name in names
    )
    problems = list(_place_problems(spec, place, is_head))
    cache = places.get("cache")
    if cache is not None and cache.is_nfs:
        problems.append(
            f"{node.paths.cache} is on NFS ({cache.source}): ranks would overwrite each other's caches"
        )
    warnings = () if place is None or not place.is_nfs else tuple(_option_warnings(place))
    return NodeProof(node.name, node.paths.checkpoint, place, seen, tuple(problems), warnings)


def _compared(seen: Seen, head: Seen | None) -> Seen:
    if seen.problem is not None:
        stale = "; unmount it (umount -l) and share again" if "stale" in seen.problem.lower() else ""
        return Seen(seen.file, problem=f"{seen.problem}{stale}")
    if head is None or head.problem is not None:
        return Seen(seen.file, problem="the head cannot read it")
    for what, ours, theirs in (
        ("size", seen.size_bytes, head.size_bytes),
        ("header", seen.first_sha256, head.first_sha256),
        ("end", seen.last_sha256, head.last_sha256),
    ):
        if ours != theirs:
            return Seen(
                seen.file,
                seen.size_bytes,
                seen.first_sha256,
                seen.last_sha256,
                f"its {what} is not the head's ({_short(ours)} instead of {_short(theirs)})",
            )
    return seen


def _short(value: str | int | None) -> str:
    return value[:12] if isinstance(value, str) else f"{value} bytes"


def _place_problems(spec: FleetSpec, place: Place | None, is_head: bool) -> Iterator[str]:
    if place is None:
        yield "the node did not say where its checkpoint lies"
        return
    if spec.share == "nfs" and not is_head and not place.is_nfs:
        yield f"the checkpoint is on {place.filesystem} ({place.source}), not on NFS: it is not mounted"
    if place.is_nfs and "soft" in place.options:
        yield "NFS is mounted soft: a slow moment would end a rank in the middle of loading; mount it hard"


def _option_warnings(place: Place) -> Iterator[str]:
    options = dict(option.partition("=")[::2] for option in place.options)
    if "ro" not in options:
        yield "NFS is mounted for writing; ranks only read"
    if (version := options.get("vers", "4")).startswith(("2", "3")):
        yield f"NFS has version {version}; 4 survives a restart of the server better"
    size = options.get("rsize", "")
    if size.isdigit() and int(size) < _MIN_READ_BYTES:
        yield f"NFS reads {size} bytes at a time (rsize); loading is slow, 1048576 is usual"


def shown_share(
    spec: FleetSpec, remotes: Remotes, *, only_prove: bool = False, is_undo: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield what `share`, `prove` or `undo` would run, in order, one object a node and step. Nothing is reached."""
    directory = spec.head.paths.checkpoint
    if is_undo:
        for node, arguments in [*_mounts(spec, directory, "unmount"), *_exports(spec, directory, "unexport")]:
            yield _shown(remotes[node.name], arguments[0], "share.sh", arguments)
        return
    if only_prove or len(spec.nodes) == 1:
        pass
    elif spec.share == "nfs":
        for node, arguments in [*_exports(spec, directory, "export"), *_mounts(spec, directory, "mount")]:
            yield _shown(remotes[node.name], arguments[0], "share.sh", arguments)
    elif spec.share == "copy":
        yield from _shown_copies(spec, remotes)
    for node in spec.nodes:
        yield _shown(
            remotes[node.name], "prove", "verify_share.sh", (node.paths.checkpoint, node.paths.cache)
        )


def _shown_copies(spec: FleetSpec, remotes: Remotes) -> Iterator[dict[str, Any]]:
    token = "${made:token}"
    yield {
        "node": spec.head.name,
        "step": "offer",
        **offer_program(spec, token).shown(remotes[spec.head.name]),
    }
    for node in spec.nodes[1:]:
        job = _copy_job(node, f"http://{spec.head.fabric[0]}:${{offered:port}}", "${offered:revision}")
        program = fetch_program(job, spec.engine, token)
        yield {"node": node.name, "step": "fetch", **program.shown(remotes[node.name])}


def _shown(remote: Remote, step: str, script: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    return {
        "node": remote.node.name,
        "step": step,
        "argv": list(remote.command()),
        "script": read_script(script),
        "arguments": list(arguments),
    }


__all__ = [
    "NodeProof",
    "Place",
    "Seen",
    "copy",
    "judge",
    "parse_seen",
    "prove",
    "share",
    "shown_share",
    "undo",
]
