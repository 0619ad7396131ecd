"""Manifests for Kubernetes: one Pod for each rank, on its node. Owns how they spell a rank's box.

Pods, and not a StatefulSet: that starts a lost rank again, alone, and it cannot join those that go on.
"""

from __future__ import annotations

from typing import Any

from deskfleet.fleet.export.file import Exported, header, pieces, secret_env, variable_of
from deskfleet.fleet.export.yaml import to_yaml
from deskfleet.fleet.launch import LaunchSpec, RankLaunch
from deskfleet.fleet.spec import FleetSpec


def export(launch: LaunchSpec, spec: FleetSpec) -> tuple[Exported, ...]:
    """Return one file with a Pod for each rank, workers first."""
    secret = f"deskfleet-{launch.fleet}"
    more = [
        "Nodes are chosen by the label kubernetes.io/hostname; ranks need the device plugin of the GPUs.",
        f"kubectl apply -f {launch.fleet}.yaml; all of them again, and never one: kubectl delete -f first.",
    ]
    if launch.secrets:
        literals = " ".join(f"--from-file={name}=FILE" for name in launch.secrets)
        more.append(f"Before that: kubectl create secret generic {secret} {literals}")
    documents = [to_yaml(_pod(rank, launch, secret)) for rank in launch.start_order]
    text = "\n".join(header(launch, spec, *more)) + "\n" + "---\n".join(documents)
    return (Exported(f"{launch.fleet}.yaml", text),)


def _pod(rank: RankLaunch, launch: LaunchSpec, secret: str) -> dict[str, Any]:
    box = rank.box
    container: dict[str, Any] = {
        "name": f"rank-{rank.rank}",
        "image": rank.image,
        "command": [_literal(word) for word in rank.argv[:1]],
        "args": [_literal(word) for word in rank.argv[1:]],
        "env": _env(rank, secret),
        "volumeMounts": [
            {"name": f"mount-{i}", "mountPath": mount.target, "readOnly": mount.read_only}
            for i, mount in enumerate(box.mounts)
        ]
        + [{"name": f"device-{i}", "mountPath": device} for i, device in enumerate(box.devices)],
        "securityContext": {"privileged": True} if box.devices else {},
    }
    limits: dict[str, Any] = {}
    if box.has_gpus:
        limits["nvidia.com/gpu"] = 1
    if box.memory_bytes is not None:
        limits["memory"] = box.memory_bytes
    container["resources"] = {"limits": limits} if limits else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": rank.container,
            "labels": {
                "app.kubernetes.io/managed-by": "deskfleet",
                "app.kubernetes.io/instance": launch.fleet,
            },
            "annotations": dict(box.labels),
        },
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": rank.node},
            "restartPolicy": "Never",
            "hostNetwork": True,
            "hostIPC": True,
            "containers": [container],
            "volumes": [
                {"name": f"mount-{i}", "hostPath": {"path": mount.source}}
                for i, mount in enumerate(box.mounts)
            ]
            + [{"name": f"device-{i}", "hostPath": {"path": device}} for i, device in enumerate(box.devices)],
        },
    }


def _env(rank: RankLaunch, secret: str) -> list[dict[str, Any]]:
    """The rank's variables. Those that hold secrets name others, which come from the Secret and go before them."""
    names = {text for value in secret_env(rank).values() for text, is_secret in pieces(value) if is_secret}
    sources = [
        {"name": _source(name), "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}
        for name in sorted(names)
    ]
    return [*sources, *({"name": name, "value": _value(value)} for name, value in rank.env.items())]


def _source(secret: str) -> str:
    return f"DESKFLEET_SECRET_{variable_of(secret)}"


def _literal(text: str) -> str:
    """Text in which Kubernetes replaces nothing: of two `$` it makes one."""
    return text.replace("$", "$$")


def _value(value: str) -> str:
    return "".join(
        f"$({_source(text)})" if is_secret else _literal(text) for text, is_secret in pieces(value)
    )


__all__ = ["export"]
