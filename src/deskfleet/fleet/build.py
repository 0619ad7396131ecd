"""The engine's image on every node, the same one: pulled by digest, copied from a node that has it, or built.

Built is what stock engines lack: our adapter over a base image, as files on Python's path. Nothing of the base is run
and nothing is downloaded for it, so any base will do and the result is what the recipe says. Images are compared by
their layers, never by docker's id, which differs between ways of storing; after everything each node is asked again.
Knows docker's words for images; containers are `commands`'.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shlex
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from deskfleet.errors import ConfigError, DeskfleetError, DoesNotFit
from deskfleet.fleet.engines.contract import PROVIDES_LABEL
from deskfleet.fleet.remote import Remote, RemoteFailed, Remotes
from deskfleet.fleet.spec import LOCAL, FleetSpec, NodeSpec, is_by_digest
from deskfleet.fleet.state import FleetState
from deskfleet.units import format_bytes

ADAPTER_LABEL = "deskfleet.adapter"
BASE_LABEL = "deskfleet.base"
SITE = "/opt/deskfleet/site"
"""Where an image has our adapter; the first entry of its PYTHONPATH."""

_ADAPTERS: Mapping[str, str] = {"vllm": "deskfleet_vllm", "sglang": "deskfleet_sglang"}
_ENGRAM = "deskfleet_engram"
_ID = "sha256:"
_DOCKER_S = 30.0
_BUILD_S = 1800.0
_PULL_S = 7200.0
_COPIES = 2  # docker unpacks an archive beside the layers that it makes of it

_ASK = """\
export LC_ALL=C
if ! found=$(docker image inspect --format '{{json .}}' -- "$1" 2>&1); then
    case $found in *[Nn]o\\ such\\ image*) ;; *) printf '%s\\n' "$found" >&2; exit 1 ;; esac
    found=null
fi
printf '%s\\n' "$found"
root=$(docker info --format '{{.DockerRootDir}}') || exit 1
df --output=avail -B1 -- "$root" | tail -n 1
"""
_PULL = 'exec docker pull --quiet -- "$1"\n'
_SEND = """\
# $1 words that write an image, and then those that read one. Prints how many bytes have passed.
set -o pipefail
exec 3>&1 {never}<> <(:)
words=$1
shift
"${@:1:words}" <&"$never" |
    LC_ALL=C dd bs=1M iflag=fullblock status=progress 2> >(exec stdbuf -oL tr '\\r' '\\n' >&3) |
    "${@:words+1}" >&2
"""
SAVE = (
    "set -m; exec 3<&0; "
    "( docker save --help 2>/dev/null | grep -q -- --platform && set -- --platform linux/$1 || set --; "
    'exec docker save "$@" -- "$0" ) </dev/null & save=$!; '
    "{ cat <&3; kill -- -$save; } >/dev/null 2>&1 & wait $save; code=$?; kill -- -$! 2>/dev/null; exit $code"
)
"""Writes the image $0, of the architecture $1 alone where docker can, for as long as somebody holds its stdin open:
sshd ends nothing when a connection is gone."""

_BUILD = """\
# $1 where there is room, $2 the image's name, $3 the recipe, $4 the base, and an archive of what is copied on stdin.
# Nothing is fetched, for nothing is run.
set -eu
mkdir -p -- "$1"
directory=$(mktemp -d -- "$1/build-XXXXXX")
base=$4
trap 'rm -rf -- "$directory"; [ "$base" = "$4" ] || docker rmi --no-prune "$base" >/dev/null' EXIT
cd -- "$directory"
tar -xf -
printf '%s' "$3" >Dockerfile
case $base in
sha256:*)
    # A recipe names repositories; an image that has none gets a name meanwhile.
    base=deskfleet-build:$(basename "$directory")
    base=$(printf '%s' "$base" | tr '[:upper:]' '[:lower:]')
    docker tag "$4" "$base"
    ;;
esac
docker build --network none --pull=false --quiet --build-arg "base=$base" --tag "$2" . </dev/null
"""

Doing = Literal["kept", "pulled", "copied", "built"]
OnProgress = Callable[[str, str, int, int], None]
"""Told of a node, what is done there, bytes done and in all; 0 in all where nobody knows."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image as one node has it. Sizes as docker counts, layers are digests of their contents."""

    id: str
    digests: tuple[str, ...]
    layers: tuple[str, ...]
    arch: str
    num_bytes: int
    labels: Mapping[str, str]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Asked:
    """A node's answer: its image, None when there is none of that name, and the room that docker has."""

    image: Image | None
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one node gets: `copied` from the node `source`; `kept` is nothing at all."""

    node: str
    doing: Doing
    source: str | None = None


@dataclass(frozen=True, slots=True)
class OnNode:
    """What came of it on one node."""

    node: str
    doing: Doing
    id: str
    digests: tuple[str, ...]
    num_layers: int
    adapter: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values that JSON can hold."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A distribution as its file: `name` with underscores, as in the file's name. `tags` ends with the platform."""

    name: str
    version: str
    tags: str
    data: bytes

    @property
    def sha256(self) -> str:
        """Digest of the file."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is built: `dockerfile` over `base`, with `wheels` unpacked into `SITE`."""

    base: str
    dockerfile: str
    wheels: tuple[Wheel, ...]


class WrongImage(DeskfleetError):
    """Nodes have different images after all."""

    exit_code = 1


# --- what is to be done: pure ---------------------------------------------------------------------


def check_buildable(spec: FleetSpec) -> str:
    """Return the image's name. Raises ConfigError for a fleet without one, or one that nobody can build or trust."""
    image = spec.engine.image
    if image is None:
        raise ConfigError(
            f"{spec.path}: engine.image is missing", hint='[engine] image = "name@sha256:..." says what runs'
        )
    if spec.engine.build:
        if spec.engine.name not in _ADAPTERS or not spec.engine.adapter:
            raise ConfigError(
                f"{spec.path}: engine.build is true, and only the adapters of vllm and sglang are built in",
                hint="leave build out and name the image by digest",
            )
    elif not is_by_digest(image) and not spec.engine.allow_tag:
        raise ConfigError(
            f"{spec.path}: engine.image is {image!r}, a tag, which may be another image tomorrow",
            hint="name@sha256:..., as docker images --digests says, or allow_tag = true",
        )
    return image


def first_step(spec: FleetSpec, asked: Mapping[str, Asked], *, is_asked_to_build: bool = False) -> Step:
    """Return what the head needs; everybody is compared with it.

    A built image that is there is kept, unless there is something to build. Raises DeskfleetError for an id that no
    node has.
    """
    image = check_buildable(spec)
    head = spec.head.name
    is_there = asked[head].image is not None
    if spec.engine.build and (is_asked_to_build or not is_there):
        return Step(head, "built")
    if is_there:
        return Step(head, "kept")
    if not image.startswith(_ID):
        return Step(head, "pulled")
    have = next((name for name, each in asked.items() if each.image is not None), None)
    if have is None:
        raise DeskfleetError(
            f"no node has the image {image}",
            hint="an id names what is there already: load it on one node, or name it by its repository",
        )
    return Step(head, "copied", have)


def worker_steps(
    spec: FleetSpec, asked: Mapping[str, Asked], truth: Image, *, from_head: bool = False
) -> tuple[Step, ...]:
    """Return what each worker needs, now that the head has `truth`.

    A repository's digest is pulled wherever it is missing, unless `from_head`. What no registry is known to have, an
    image by its id, by tag or built, is copied from the head.
    """
    image = check_buildable(spec)
    is_in_registry = is_by_digest(image) and not image.startswith(_ID)
    found = []
    for node in spec.nodes[1:]:
        own = asked[node.name].image
        if own is not None and same_image(own, truth):
            found.append(Step(node.name, "kept"))
        elif is_in_registry and not from_head:
            found.append(Step(node.name, "pulled"))
        else:
            found.append(Step(node.name, "copied", spec.head.name))
    return tuple(found)


def same_image(one: Image, other: Image) -> bool:
    """Whether two nodes' images have the same content: layers, architecture, and what was written on it."""
    return (one.layers, one.arch, one.labels, one.env) == (other.layers, other.arch, other.labels, other.env)


def recipe(spec: FleetSpec, base: str, image: Image, wheels: Sequence[Wheel]) -> Recipe:
    """Return what to build over `base`, which the head has as `image`. Raises ConfigError for wheels that do not do."""
    adapter = _adapter_wheel(spec, wheels)
    for wheel in wheels:
        platform = wheel.tags.rpartition("-")[2]
        if platform != "any" and not platform.endswith(_WHEEL_ARCH.get(image.arch, image.arch)):
            raise ConfigError(
                f"the wheel of {wheel.name} is for {platform}, and {base} is for {image.arch}",
                hint="build it on a node: uv build --wheel",
            )
    has = {each for each in image.labels.get(PROVIDES_LABEL, "").replace(" ", "").split(",") if each}
    path = ":".join(filter(None, (SITE, image.env.get("PYTHONPATH"))))
    labels = {
        PROVIDES_LABEL: ",".join(sorted(has | {"adapter"})),
        ADAPTER_LABEL: adapter.version,
        BASE_LABEL: base,
    }
    lines = [
        f"ARG base={base}",
        "FROM ${base}",
        f"COPY site {SITE}",
        f"ENV PYTHONPATH={_quoted(path)}",
        *(f"LABEL {name}={_quoted(value)}" for name, value in labels.items()),
    ]
    return Recipe(base, "\n".join(lines) + "\n", tuple(wheels))


_WHEEL_ARCH: Mapping[str, str] = {"amd64": "x86_64", "arm64": "aarch64"}


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'


def _adapter_wheel(spec: FleetSpec, wheels: Sequence[Wheel]) -> Wheel:
    wanted = (_ADAPTERS[spec.engine.name], _ENGRAM)
    names = sorted(wheel.name for wheel in wheels)
    if names != sorted(wanted):
        raise ConfigError(
            f"the wheels are {', '.join(names) or 'none'}; one each is needed of {' and '.join(wanted)}",
            hint="uv build --wheel --out-dir wheels, in the directory of each",
        )
    return next(wheel for wheel in wheels if wheel.name == wanted[0])


_WHEEL = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(?:-\d[^-]*)?-(?P<tags>[^-]+-[^-]+-[^-]+)\.whl")


def read_wheels(directory: Path) -> tuple[Wheel, ...]:
    """Read the wheels in a directory. Raises ConfigError for a directory or file that is none."""
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix == ".whl")
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}", hint="--wheels DIR, with two wheels") from error
    found = []
    for path in paths:
        match = _WHEEL.fullmatch(path.name)
        data = path.read_bytes()
        if match is None or not zipfile.is_zipfile(BytesIO(data)):
            raise ConfigError(f"{path} is no wheel", hint="uv build --wheel makes one")
        found.append(Wheel(match["name"], match["version"], match["tags"], data))
    return tuple(found)


# --- doing it -------------------------------------------------------------------------------------


async def ask(remotes: Remotes, image: str) -> Mapping[str, Asked]:
    """Ask every node for an image and for room. Raises NodeUnreachable, RemoteFailed."""

    async def on(remote: Remote) -> Asked:
        return await _ask(remote, image)

    return (await remotes.gather(on)).all()


async def _ask(remote: Remote, image: str) -> Asked:
    ran = await remote.run(_ASK, image, timeout_s=_DOCKER_S)
    if ran.returncode != 0:
        raise RemoteFailed(remote.node.name, "docker does not tell its images", ran.last_line)
    told, free = ran.stdout.splitlines()[:2]
    return Asked(_image(json.loads(told)), int(free))


def _image(told: Mapping[str, Any] | None) -> Image | None:
    if told is None:
        return None
    config = told.get("Config") or {}
    return Image(
        id=told["Id"],
        digests=tuple(told.get("RepoDigests") or ()),
        layers=tuple((told.get("RootFS") or {}).get("Layers") or ()),
        arch=told["Architecture"],
        num_bytes=int(told.get("Size") or 0),
        labels=config.get("Labels") or {},
        env=dict(each.split("=", 1) for each in config.get("Env") or () if "=" in each),
    )


@dataclass(frozen=True, slots=True)
class Build:
    """What `fleet build` was asked: an overlay's `base` and `wheels`, and whether to copy where one could pull."""

    base: str | None = None
    wheels: tuple[Wheel, ...] = ()
    from_head: bool = False


async def build(
    spec: FleetSpec, remotes: Remotes, asked_for: Build, state: FleetState, on_progress: OnProgress
) -> tuple[OnNode, ...]:
    """Put the image on every node, and return what each has. What is the same already is left alone.

    Raises ConfigError; DoesNotFit for a disk that is too small; WrongImage for nodes that still differ; RemoteFailed
    with docker's words; NodeUnreachable.
    """
    image = check_buildable(spec)
    found = dict(await ask(remotes, image))
    first = first_step(spec, found, is_asked_to_build=bool(asked_for.base or asked_for.wheels))
    await _do(first, spec, remotes, found, asked_for, state, on_progress)
    found[spec.head.name] = head = await _ask(remotes[spec.head.name], image)
    if head.image is None:
        raise _not_there(image, first)
    rest = worker_steps(spec, found, head.image, from_head=asked_for.from_head)
    by_node = {step.node: step for step in rest}

    async def on(remote: Remote) -> None:
        if remote.node.name in by_node:
            await _do(by_node[remote.node.name], spec, remotes, found, asked_for, state, on_progress)

    (await remotes.gather(on)).all()
    after = await ask(remotes, image)
    done = []
    for step in (first, *rest):
        own = after[step.node].image
        if own is None:
            raise _not_there(image, step)
        if not same_image(own, head.image):
            raise WrongImage(
                f"{step.node} has another image {image} than {spec.head.name}: {own.id} and {head.image.id}",
                hint="is it for another architecture, or was it changed meanwhile? Run the same command again",
            )
        done.append(
            OnNode(step.node, step.doing, own.id, own.digests, len(own.layers), own.labels.get(ADAPTER_LABEL))
        )
    return tuple(done)


def _not_there(image: str, step: Step) -> DeskfleetError:
    if step.doing == "copied":
        return RemoteFailed(
            step.node,
            "the image was loaded",
            f"and docker does not find it as {image}",
            hint="this docker keeps no repository's digest of what is loaded: pull it there (without --from-head), "
            "or name the image by its id, sha256:...",
        )
    return RemoteFailed(step.node, f"the image was {step.doing}", f"and docker does not find {image}")


async def _do(
    step: Step,
    spec: FleetSpec,
    remotes: Remotes,
    found: Mapping[str, Asked],
    asked_for: Build,
    state: FleetState,
    on_progress: OnProgress,
) -> None:
    image = check_buildable(spec)
    remote = remotes[step.node]
    if step.doing == "pulled":
        on_progress(step.node, "pulling", 0, 0)
        await _pull(remote, image)
    elif step.doing == "built":
        on_progress(step.node, "building", 0, 0)
        await _build(spec, remote, asked_for, state)
    elif step.source is not None:
        held = found[step.source].image
        needed = _COPIES * (held.num_bytes if held is not None else 0)
        if needed > (free := found[step.node].free_bytes):
            raise DoesNotFit(
                f"{step.node}: docker has {format_bytes(free)} of room, and loading the image takes up to "
                f"{format_bytes(needed)}",
                hint="free some: docker system df, docker image prune",
            )
        if held is not None:
            await _copy(remotes[step.source], remote, image, held, on_progress)


async def _pull(remote: Remote, image: str) -> None:
    ran = await remote.run(_PULL, image, timeout_s=_PULL_S)
    if ran.returncode != 0:
        raise RemoteFailed(
            remote.node.name,
            f"cannot pull {image}",
            ran.last_line,
            hint="does it reach the registry, and need docker login? Or --from-head, when the head has the image",
        )


def copy_words(
    source: Remote, target: Remote, image: str, arch: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the command lines of both ends of a copy: what writes the image, and what reads it.

    They run on this machine and reach nodes as all else does. The image passes through here, and nothing is stored.
    """
    save = shlex.join(("exec", "bash", "-c", SAVE, image, arch))
    return (*source.command()[:-1], save), (*target.command()[:-1], "exec docker load --quiet")


async def _copy(source: Remote, target: Remote, image: str, held: Image, on_progress: OnProgress) -> None:
    name = target.node.name
    writes, reads = copy_words(source, target, image, held.arch)
    here = Remote(_this_machine(source.node))
    try:
        lines = here.stream(_SEND, str(len(writes)), *writes, *reads)
        async with aclosing(lines):
            async for line in lines:
                passed = re.match(r"(\d+) bytes", line)
                if passed is not None:
                    on_progress(name, f"from {source.node.name}", int(passed[1]), held.num_bytes)
    except RemoteFailed as error:
        raise RemoteFailed(
            name,
            f"the image did not come over from {source.node.name}",
            error.said,
            hint="nothing of it stays behind; run the same command again",
        ) from error


def _this_machine(node: NodeSpec) -> NodeSpec:
    return replace(node, name="this machine", address=LOCAL, user=None, port=None, identity=None)


async def _build(spec: FleetSpec, remote: Remote, asked_for: Build, state: FleetState) -> None:
    image = check_buildable(spec)
    base = asked_for.base or _recorded_base(state)
    if base is None:
        raise ConfigError(
            f"{image} is to be built, and nobody says over which image",
            hint="--base name@sha256:..., the engine's own image",
        )
    if not is_by_digest(base) and not spec.engine.allow_tag:
        raise ConfigError(
            f"--base is {base!r}, a tag, which may be another image tomorrow",
            hint="name@sha256:..., as docker images --digests says, or allow_tag = true",
        )
    _adapter_wheel(spec, asked_for.wheels)
    under = (await _ask(remote, base)).image
    if under is None:
        await _pull(remote, base)
        under = (await _ask(remote, base)).image
    if under is None:
        raise RemoteFailed(remote.node.name, "the base was pulled", f"and docker does not find {base}")
    made = recipe(spec, base, under, asked_for.wheels)
    ran = await remote.run(
        _BUILD,
        *(remote.node.paths.cache, image, made.dockerfile, base),
        stdin=_site(made.wheels),
        timeout_s=_BUILD_S,
    )
    if ran.returncode != 0:
        raise RemoteFailed(remote.node.name, f"cannot build {image}", ran.last_line)
    built = (await _ask(remote, image)).image
    if built is None:
        raise _not_there(image, Step(remote.node.name, "built"))
    _record(state, image, under, built, made)


def _site(wheels: Sequence[Wheel]) -> bytes:
    """The wheels unpacked into one directory, as an archive; the same wheels give the same bytes."""
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for wheel in wheels:
            with zipfile.ZipFile(BytesIO(wheel.data)) as archive:
                for name in sorted(archive.namelist()):
                    if name.endswith("/"):
                        continue
                    if name.startswith("/") or ".." in name.split("/"):
                        raise ConfigError(f"the wheel of {wheel.name} has a file {name!r} outside of itself")
                    data = archive.read(name)
                    entry = tarfile.TarInfo(f"site/{name}")
                    entry.size, entry.mode = len(data), 0o755 if name.endswith(".so") else 0o644
                    tar.addfile(entry, BytesIO(data))
    return buffer.getvalue()


def provenance_path(state: FleetState) -> Path:
    """Where it is kept how the fleet's image came to be."""
    return state.directory / "image.json"


def _recorded_base(state: FleetState) -> str | None:
    try:
        base = json.loads(provenance_path(state).read_text(encoding="utf-8"))["base"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DeskfleetError(
            f"{provenance_path(state)} cannot be read: {error}", hint="remove it, and give --base"
        ) from error
    return base if isinstance(base, str) else None


def _record(state: FleetState, image: str, under: Image, built: Image, made: Recipe) -> None:
    path = provenance_path(state)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    told = {
        "image": image,
        "id": built.id,
        "layers": built.layers,
        "arch": built.arch,
        "base": made.base,
        "base_id": under.id,
        "base_digests": under.digests,
        "dockerfile": made.dockerfile,
        "dockerfile_sha256": hashlib.sha256(made.dockerfile.encode()).hexdigest(),
        "wheels": [
            {"name": each.name, "version": each.version, "sha256": each.sha256} for each in made.wheels
        ],
        "deskfleet": version("deskfleet"),
        "built_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    beside.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def shown_commands(spec: FleetSpec, remotes: Remotes, asked_for: Build) -> dict[str, dict[str, Any]]:
    """Return what could run on each node; what does depends on what nodes answer. Nothing is reached."""
    image = check_buildable(spec)
    by_registry = is_by_digest(image) and not image.startswith(_ID) and not asked_for.from_head
    shown: dict[str, dict[str, Any]] = {}
    for node in spec.nodes:
        remote = remotes[node.name]
        told: dict[str, Any] = {"argv": list(remote.command()), "ask": _ASK, "arguments": [image]}
        if spec.engine.build and node is spec.head:
            told["build"] = _BUILD
        elif by_registry or (node is spec.head and not image.startswith(_ID)):
            told["pull"] = _PULL
        elif node is not spec.head:
            told["copy"] = [
                list(words) for words in copy_words(remotes[spec.head.name], remote, image, "ARCH")
            ]
        shown[node.name] = told
    return shown


__all__ = [
    "ADAPTER_LABEL",
    "BASE_LABEL",
    "SAVE",
    "SITE",
    "Asked",
    "Build",
    "Image",
    "OnNode",
    "Recipe",
    "Step",
    "Wheel",
    "WrongImage",
    "ask",
    "build",
    "check_buildable",
    "copy_words",
    "first_step",
    "provenance_path",
    "read_wheels",
    "recipe",
    "same_image",
    "shown_commands",
    "worker_steps",
]
