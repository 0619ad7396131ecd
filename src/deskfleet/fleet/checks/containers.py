"""Checks of Docker, the engine's image, and what runs already. Nothing that is not this fleet's is ever touched."""

from __future__ import annotations

import re

from deskfleet.fleet.checks.contract import (
    Check,
    Outcome,
    Subject,
    failed,
    passed,
    skipped,
    warned,
)
from deskfleet.fleet.render import LAUNCH_LABEL
from deskfleet.planner.fleetfile import LOCAL_KIND

_DOCKER_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}
_LABEL_PREFIX = "deskfleet."
_ENGINES = re.compile(r"vllm|sglang|exllama|llama|ollama|tensorrt|trtllm|\bnim\b|deskfleet", re.IGNORECASE)


def _docker(subject: Subject) -> Outcome:
    docker = subject.facts.docker
    if docker is not None:
        return passed(
            f"Docker {docker.version}, {docker.storage_driver}, cgroup v{docker.cgroup_version or '?'}"
        )
    reason = subject.facts.unknown.get("docker", "it was not told")
    if "permission denied" in reason:
        user = subject.facts.user or "$USER"
        return failed(reason, f"let the user in: sudo usermod -aG docker {user}, then log in anew")
    if "no program" in reason:
        return failed(reason, "install Docker Engine: https://docs.docker.com/engine/install/")
    return failed(reason, "start it: sudo systemctl enable --now docker")


def _gpu_runtime(subject: Subject) -> Outcome:
    docker = subject.facts.docker
    if subject.node.kind == LOCAL_KIND:
        return skipped("this kind of node has no GPU")
    if docker is None:
        return subject.unknown("docker")
    if not docker.has_gpu_runtime:
        return failed(
            f"runtimes {', '.join(docker.runtimes) or 'none'}, no CDI device",
            "install the NVIDIA Container Toolkit, then: sudo nvidia-ctk runtime configure --runtime=docker",
        )
    return passed(f"runtimes {', '.join(docker.runtimes)}")


def _image(subject: Subject) -> Outcome:
    wanted, image = subject.spec.engine.image, subject.facts.image
    if wanted is None:
        return skipped("fleet.toml names no image")
    if subject.facts.image_is_absent:
        return failed(f"{wanted} is not here", "bring it to every node: deskfleet fleet build")
    if image is None:
        return subject.unknown("image")
    arch = _DOCKER_ARCH.get(subject.facts.arch or "")
    if arch is not None and image.arch != arch:
        return failed(
            f"it is for {image.arch}, and the node is {arch}", "pull the image of the node's architecture"
        )
    # An image's id differs between storage drivers; its layers are its content.
    other = subject.head.image
    digest = image.digests[0].rpartition("@")[2] if image.digests else image.id
    if not subject.is_head and other is not None and image.layers != other.layers:
        theirs = other.digests[0].rpartition("@")[2] if other.digests else other.id
        return failed(
            f"other content than on {subject.head.node}: {_short(digest)} here, {_short(theirs)} there",
            "name the image by digest in fleet.toml, and run: deskfleet fleet build",
        )
    return passed(f"{_short(digest)}, {len(image.layers)} layers")


def _short(digest: str) -> str:
    return digest[: len("sha256:") + 12]


def _adapter(subject: Subject) -> Outcome:
    image, other = subject.facts.image, subject.head.image
    if image is None:
        return skipped("without an image there is none")
    own = _own_labels(image.labels)
    if subject.spec.engine.adapter and not own:
        return warned("the image does not say which adapter it holds", "build it: deskfleet fleet build")
    if other is not None and own != _own_labels(other.labels):
        return failed(
            f"{_told(own)}; on {subject.head.node} {_told(_own_labels(other.labels))}",
            "build the image anew for all nodes: deskfleet fleet build",
        )
    return passed(_told(own))


def _own_labels(labels: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in sorted(labels.items()) if name.startswith(_LABEL_PREFIX)}


def _told(labels: dict[str, str]) -> str:
    return (
        ", ".join(f"{name.removeprefix(_LABEL_PREFIX)} {value}" for name, value in labels.items()) or "none"
    )


def _leftovers(subject: Subject) -> Outcome:
    if subject.facts.containers is None:
        return subject.unknown("containers")
    ours = subject.our_containers
    if not ours:
        return passed("no container of this fleet")
    told = ", ".join(
        f"{each.name} {each.state} (launch {each.labels.get(LAUNCH_LABEL, '?')})" for each in ours
    )
    return warned(
        told, f"see deskfleet fleet status; deskfleet fleet stop removes what is of {subject.spec.name}"
    )


def _neighbours(subject: Subject) -> Outcome:
    if subject.facts.containers is None:
        return subject.unknown("containers")
    ours = {each.name for each in subject.our_containers}
    running = [each for each in subject.facts.containers if each.state == "running" and each.name not in ours]
    engines = [each for each in running if _ENGINES.search(f"{each.image} {each.name}")]
    if engines:
        return warned(
            ", ".join(f"{each.name} ({each.image})" for each in engines),
            "they take memory that is planned for ranks; stop them yourself: docker stop NAME",
        )
    return passed(f"{len(running)} other containers run" if running else "no other container runs")


CHECKS = (
    Check("docker", "Does Docker answer?", _docker, is_must=True),
    Check("gpu-runtime", "Can a container be given the GPU?", _gpu_runtime, is_must=True),
    Check("image", "Is the image there, and the same as on the head?", _image, is_must=True),
    Check("adapter", "Is what was built into the image the same?", _adapter, is_must=True),
    Check("leftovers", "Are there containers of this fleet?", _leftovers),
    Check("neighbours", "Do other engines run in containers?", _neighbours),
)

__all__ = ["CHECKS"]
