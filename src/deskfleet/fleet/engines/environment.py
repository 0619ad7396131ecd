"""A rank's environment: our variables, and what the user's `[engine] env` may add to them.

Owns what all engines on accelerators share: NCCL and Gloo on the right device of each node, caches that stay on it, and
nothing that reaches out to the network. Knows an engine's own variables only as names that are handed in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from deskfleet.fleet.engines.arguments import nearest_of
from deskfleet.fleet.engines.contract import CACHE_PATH, Capability, Situation
from deskfleet.fleet.fabric import NodeFabric
from deskfleet.planner.collectives import SMALL_BUFFERS
from deskfleet.planner.engines.contract import Refusal
from deskfleet.planner.engines.stock import NCCL_CHANNELS


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable of ours. `reason` says what decided it; a `is_default` may be given anew by the user."""

    name: str
    value: str
    reason: str
    is_default: bool = False


BUILD_JOBS = 2
"""Kernels compiled at once. 22 exhausted the memory of four Sparks and reset them (S1-50)."""

_CACHES = {
    "HF_HOME": "huggingface",
    "XDG_CACHE_HOME": "xdg",
    "TRITON_CACHE_DIR": "triton",
    "TILELANG_CACHE_DIR": "tilelang",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "B12X_CACHE_DIR": "b12x",
    "CUDA_CACHE_PATH": "cuda",
}


def common_variables(at: Situation, rank: int) -> list[Variable]:
    """What every engine on accelerators is given."""
    node = "this node's own disk: two ranks that share a cache write the same files"
    variables = [
        *(Variable(name, f"{CACHE_PATH}/{folder}", node) for name, folder in _CACHES.items()),
        Variable("HF_HUB_OFFLINE", "1", "the checkpoint is there; nothing is fetched at start"),
        Variable("DO_NOT_TRACK", "1", "no reports to anybody"),
        Variable("MAX_JOBS", str(BUILD_JOBS), "more compilers at once freeze the machine"),
        Variable("FLASHINFER_NVCC_THREADS", "1", "the same"),
        *network_variables(at.fabric_of(rank), at.tp_size, is_unified=at.plan.cluster.kind.is_unified),
    ]
    if at.arch.startswith("sm12"):
        target = f"{at.arch.removeprefix('sm')[:-1]}.{at.arch[-1]}a"
        for name in ("TORCH_CUDA_ARCH_LIST", "FLASHINFER_CUDA_ARCH_LIST"):
            variables.append(
                Variable(name, target, "what is compiled is for this accelerator", is_default=True)
            )
    return variables


def network_variables(fabric: NodeFabric, tp_size: int, *, is_unified: bool) -> list[Variable]:
    """Where NCCL and Gloo talk on one node, and how much memory they pin for it. None for a lone rank.

    The GID index is this node's own; where it is not one number for all devices it is left out, never empty: an empty
    one is index 0, a link-local address.
    """
    if tp_size == 1:
        return []
    found = "found on this node"
    planned = "the plan counts buffers of this size"
    variables = [
        Variable("NCCL_BUFFSIZE", str(SMALL_BUFFERS.simple_bytes), planned),
        Variable("NCCL_LL128_BUFFSIZE", str(SMALL_BUFFERS.ll128_bytes), planned),
        Variable("NCCL_MAX_NCHANNELS", str(NCCL_CHANNELS), planned),
        Variable("NCCL_PROTO", "^LL128", "its buffers are smaller than it expects", is_default=True),
        Variable("NCCL_DEBUG", "WARN", "its own words when something breaks", is_default=True),
    ]
    if is_unified:
        variables.append(
            Variable("NCCL_CUMEM_ENABLE", "0", "published recipes for unified memory set it", is_default=True)
        )
    if fabric.socket_interface is not None:
        variables.append(Variable("NCCL_SOCKET_IFNAME", f"={fabric.socket_interface}", found))
        variables.append(Variable("GLOO_SOCKET_IFNAME", fabric.socket_interface, found))
    if fabric.hca is None:
        return [*variables, Variable("NCCL_IB_DISABLE", "1", "no RoCE device that is up was found")]
    variables.append(Variable("NCCL_NET", "IB", "over RoCE or not at all: sockets would only be slow"))
    variables.append(Variable("NCCL_IB_HCA", fabric.hca, found))
    variables.append(Variable("NCCL_IB_ROCE_VERSION_NUM", "2", "RoCE v1 is not routed"))
    if fabric.gid_index is not None:
        variables.append(Variable("NCCL_IB_GID_INDEX", str(fabric.gid_index), found))
    return variables


@dataclass(frozen=True, slots=True)
class NamesOfImages:
    """What an image reads. `prefix` begins the release's own variables, all of them `known`.

    `forks` are beginnings of variables that only patched images read, with the capability that brings them.
    """

    prefix: str
    known: Collection[str]
    forks: Mapping[str, Capability | None]


def merge_environment(
    variables: Sequence[Variable],
    given: Mapping[str, str],
    names: NamesOfImages,
    provides: Collection[Capability],
    *,
    is_release: bool,
) -> tuple[dict[str, str], list[Refusal], list[str]]:
    """Our variables and the user's, sorted by name, with refusals and warnings.

    A variable of ours is refused unless it says the same, or is a default. One that the image will not read is refused
    where that is known (the engine would only warn, or say nothing), else a warning.
    """
    ours = {variable.name: variable for variable in variables}
    env = {variable.name: variable.value for variable in variables}
    refusals: list[Refusal] = []
    warnings: list[str] = []
    for name, value in given.items():
        variable = ours.get(name)
        if variable is not None and value != variable.value and not variable.is_default:
            message = (
                f"[engine] env has {name}={value}, and the launch has {variable.value} ({variable.reason})"
            )
            refusals.append(Refusal("environment", message, "leave it out"))
            continue
        problem = _unread(name, names, provides)
        if problem is not None and is_release:
            refusals.append(
                Refusal("environment", f"[engine] env has {name}: {problem}", nearest_of(name, names.known))
            )
        elif problem is not None:
            warnings.append(f"[engine] env has {name}: {problem}; the image may")
        env[name] = value
    return dict(sorted(env.items())), refusals, warnings


def _unread(name: str, names: NamesOfImages, provides: Collection[Capability]) -> str | None:
    """Why the image will not read a variable; None when it will, or when nobody can tell."""
    if name in names.known:
        return None
    for beginning, capability in names.forks.items():
        if name.startswith(beginning):
            return None if capability in provides else "only patched images read it, and the release does not"
    return "the release does not read it" if name.startswith(names.prefix) else None


__all__ = [
    "BUILD_JOBS",
    "NamesOfImages",
    "Variable",
    "common_variables",
    "merge_environment",
    "network_variables",
]
