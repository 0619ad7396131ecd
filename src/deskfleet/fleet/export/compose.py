"""A compose file for each node. Owns how compose spells a rank's box, and where it would replace a `$`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deskfleet.fleet.export.file import Exported, docker_options, header, pieces, variable_of
from deskfleet.fleet.export.yaml import to_yaml
from deskfleet.fleet.launch import LaunchSpec, RankLaunch
from deskfleet.fleet.spec import FleetSpec


def export(launch: LaunchSpec, spec: FleetSpec) -> tuple[Exported, ...]:
    """Return a compose file for each node that has ranks."""
    return tuple(_file(node.name, launch, spec) for node in spec.nodes if launch.on_node(node.name))


def _file(node: str, launch: LaunchSpec, spec: FleetSpec) -> Exported:
    more = [
        "On every node, the head last: docker compose up -d. To stop, the head first: docker compose down."
    ]
    if launch.secrets:
        lines = " ".join(f"{variable_of(name)}='...'" for name in launch.secrets)
        more.append(f"Before that, in a file .env beside this one, of mode 600, in single quotes: {lines}")
    document = {
        "name": f"deskfleet-{launch.fleet}",
        "services": {f"rank-{rank.rank}": _service(rank) for rank in launch.on_node(node)},
    }
    return Exported(f"{node}/compose.yaml", "\n".join(header(launch, spec, *more)) + "\n" + to_yaml(document))


def _service(rank: RankLaunch) -> dict[str, Any]:
    box, options = rank.box, docker_options(rank)
    service: dict[str, Any] = {
        "image": _literal(rank.image),
        "container_name": rank.container,
        "entrypoint": [_literal(word) for word in rank.argv[:1]],
        "command": [_literal(word) for word in rank.argv[1:]],
        "environment": {name: _value(value) for name, value in rank.env.items()},
        "network_mode": "host",
        "ipc": "host",
        "pull_policy": _only(options, "--pull"),
        "restart": _only(options, "--restart"),
        "stop_grace_period": f"{_only(options, '--stop-timeout')}s",
        "oom_score_adj": box.oom_score_adj,
        "ulimits": {name: int(value) for name, value in _pairs(options, "--ulimit")},
        "logging": {"driver": _only(options, "--log-driver"), "options": dict(_pairs(options, "--log-opt"))},
        "labels": {name: _literal(value) for name, value in box.labels.items()},
        "volumes": [
            {
                "type": "bind",
                "source": _literal(mount.source),
                "target": _literal(mount.target),
                "read_only": mount.read_only,
                # A directory that is missing is an error, not an empty one.
                "bind": {"create_host_path": False},
            }
            for mount in box.mounts
        ],
    }
    if box.devices:
        service["devices"] = [_literal(f"{device}:{device}") for device in box.devices]
    if "--cap-add" in options:
        service["cap_add"] = options["--cap-add"]
    if box.memory_bytes is not None:
        service |= {"mem_limit": box.memory_bytes, "memswap_limit": box.memory_bytes}
    if box.has_gpus:
        gpus = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [gpus]}}}
    return service


def _only(options: Mapping[str, list[str]], name: str) -> str:
    (value,) = options[name]
    return value


def _pairs(options: Mapping[str, list[str]], name: str) -> Iterator[tuple[str, str]]:
    for text in options.get(name, ()):
        key, _, value = text.partition("=")
        yield key, value


def _literal(text: str) -> str:
    """Text in which compose replaces nothing."""
    return text.replace("$", "$$")


def _value(value: str) -> str:
    """A variable's value; a secret comes from compose's own environment, and must be there."""
    return "".join(
        f"${{{variable_of(text)}:?a secret of the fleet}}" if is_secret else _literal(text)
        for text, is_secret in pieces(value)
    )


__all__ = ["export"]
