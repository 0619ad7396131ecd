"""A recipe for sparkrun, format 2. Owns what a recipe can say of a launch, and says what it cannot.

sparkrun gives every node its rank, the head's address and what it finds out about the network by itself, so these are
left out. It replaces `{name}` in commands by names of its own, and `$NAME` in variables by its environment's.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from deskfleet.errors import ConfigError
from deskfleet.fleet.export.file import Exported, header, pieces, variable_of
from deskfleet.fleet.export.yaml import to_yaml
from deskfleet.fleet.launch import LaunchSpec, RankLaunch
from deskfleet.fleet.spec import FleetSpec

_RUNTIMES = {"vllm": "vllm-distributed", "exl3": "vllm-distributed", "sglang": "sglang"}
_OWN_FLAGS = {
    "--nnodes": 1,
    "--node-rank": 1,
    "--master-addr": 1,
    "--master-port": 1,
    "--dist-init-addr": 1,
    "--headless": 0,
}
"""Flags that sparkrun adds for each node, with how many words follow."""

_ENDPOINT = {"--host": 1, "--port": 1}
"""Flags in which ranks may differ: workers that are given the head's have nobody who asks them."""

_FOUND = ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Variables that sparkrun finds at every launch. A value of today would hold on a node where it is another tomorrow."""

_REPLACED = ("model", "tensor_parallel")
"""What stands in the recipe, so that sparkrun would put it where a command has its name in braces."""


def export(launch: LaunchSpec, spec: FleetSpec) -> tuple[Exported, ...]:
    """Return the recipe. Raises ConfigError for a fleet whose ranks differ in more than sparkrun sees to."""
    head = launch.ranks[0]
    for rank in launch.ranks[1:]:
        if rank.image != head.image or _without(rank.argv, _ENDPOINT) != _without(head.argv, _ENDPOINT):
            raise ConfigError(
                f"ranks 0 and {rank.rank} differ in image or arguments, and a recipe has one of each",
                hint="export to compose, systemd or k8s",
            )
    shared = {
        name: value
        for name, value in head.env.items()
        if name not in _FOUND and all(rank.env.get(name) == value for rank in launch.ranks)
    }
    _check(head, shared)
    # What has a `$` would be replaced in `env`; in the command it is quoted for the shell that runs it.
    quoted = {name: value for name, value in shared.items() if _would_expand(value)}
    words = [*(f"{name}={value}" for name, value in quoted.items()), *_without(head.argv, {})]
    recipe = {
        "recipe_version": "2",
        "model": _repository(spec),
        **({} if launch.revision is None else {"model_revision": launch.revision}),
        "runtime": _RUNTIMES[launch.engine],
        "min_nodes": len(launch.ranks),
        "max_nodes": len(launch.ranks),
        "container": head.image,
        "metadata": {"description": f"{launch.model}, planned by deskfleet for {len(launch.ranks)} nodes"},
        "defaults": {"tensor_parallel": len(launch.ranks)},
        "env": {name: _value(value) for name, value in shared.items() if name not in quoted},
        "command": " ".join(_word(word, head, spec) for word in (["env", *words] if quoted else words)),
    }
    text = "\n".join(header(launch, spec, *_notes(launch, spec, shared))) + "\n" + to_yaml(recipe)
    return (Exported(f"{launch.fleet}.yaml", text),)


def _notes(launch: LaunchSpec, spec: FleetSpec, shared: Mapping[str, str]) -> Iterator[str]:
    """What to type, and what a recipe cannot say of this launch."""
    yield f"sparkrun run ./{launch.fleet}.yaml --hosts {','.join(node.address for node in spec.nodes)}"
    if "/" not in _repository(spec):
        yield "model: write the repository that sparkrun shall find in its cache, OWNER/NAME."
    own = sorted({name for rank in launch.ranks for name in rank.env} - set(shared))
    if own:
        yield f"Different on nodes, or from launch to launch, and left to what sparkrun finds: {', '.join(own)}."
    head = launch.ranks[0]
    for mount in head.box.mounts:
        if mount.source != spec.head.paths.checkpoint:
            yield f"Not in the container unless the image has it: {mount.target} (of the node: {mount.source})."
    if launch.secrets:
        yield f"Before that, exported: {', '.join(map(variable_of, launch.secrets))}."


def _repository(spec: FleetSpec) -> str:
    """The checkpoint's repository, OWNER/NAME, as its origin says; else the model's name."""
    path = urlsplit(spec.checkpoint.origin or "").path.strip("/").split("/")
    return "/".join(path[-2:]) if len(path) > 1 else spec.checkpoint.model


def _word(word: str, head: RankLaunch, spec: FleetSpec) -> str:
    """A word for the shell. The directory of the checkpoint is sparkrun's to say."""
    places = {mount.target for mount in head.box.mounts if mount.source == spec.head.paths.checkpoint}
    return "{model}" if word in places else shlex.quote(word)


def _without(argv: Sequence[str], more: Mapping[str, int]) -> list[str]:
    """A rank's arguments without those that sparkrun adds, and without `more`."""
    left_out = {**_OWN_FLAGS, **more}
    words, skip = [], 0
    for word in argv:
        name, equals, _ = word.partition("=")
        if skip:
            skip -= 1
        elif name in left_out:
            skip = 0 if equals else left_out[name]
        else:
            words.append(word)
    return words


def _would_expand(value: str) -> bool:
    return any("$" in text for text, is_secret in pieces(value) if not is_secret)


def _value(value: str) -> str:
    return "".join(f"${{{variable_of(text)}}}" if is_secret else text for text, is_secret in pieces(value))


def _check(head: RankLaunch, env: Mapping[str, str]) -> None:
    """Raise ConfigError for text that sparkrun would replace, with no way to say that it must not."""
    for text in (*head.argv, *env.values()):
        found = next((name for name in _REPLACED if f"{{{name}}}" in text), None)
        if found is not None:
            raise ConfigError(f"{text!r} has {{{found}}}, which sparkrun would replace")
    for name, value in env.items():
        if _would_expand(value) and any(is_secret for _, is_secret in pieces(value)):
            raise ConfigError(f"{name} has a secret and a $, and a recipe cannot hold both")


__all__ = ["export"]
