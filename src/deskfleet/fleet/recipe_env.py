"""The `.env` of a recipe of shell scripts, as a draft of a fleet: which variables say something here, and which do not.

Owns the variables' names and why each that is not taken is not. Values that are secrets are never taken, nor repeated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from deskfleet.errors import ConfigError
from deskfleet.fleet.initial import Draft, NodeDraft, parse_node

_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)$")
_SECRET_NAME = re.compile(r"TOKEN$|SECRET|PASSWORD|API_?KEY")

_WISHES: Mapping[str, tuple[str, Callable[[str], int | float]]] = {
    "CONTEXT_LENGTH": ("max_model_len", int),
    "MAX_MODEL_LEN": ("max_model_len", int),
    "MAX_RUNNING_REQUESTS": ("max_num_seqs", int),
    "MAX_NUM_SEQS": ("max_num_seqs", int),
    "TP_SIZE": ("tp_size", int),
    "TENSOR_PARALLEL_SIZE": ("tp_size", int),
    "DCP_SIZE": ("dcp_size", int),
    "EP_SIZE": ("ep_size", int),
    "CHUNKED_PREFILL_SIZE": ("chunk_tokens", int),
    "MAX_NUM_BATCHED_TOKENS": ("chunk_tokens", int),
    "MTP_NUM_TOKENS": ("num_drafts", int),
    "MEM_FRACTION_STATIC": ("fraction", float),
    "GPU_MEMORY_UTILIZATION": ("fraction", float),
}
_FOUND_AT_LAUNCH = "found on every node at every launch, from its address on the fast network"
_PLANNED = "deskfleet gives it, from the plan"
_IGNORED: tuple[tuple[str, str], ...] = (
    (r"WORKER_NCCL_IB_HCA|(WORKER_)?NCCL_IB_(GID_.*|ROCE_VERSION_NUM)", _FOUND_AT_LAUNCH),
    (r"(WORKER_)?(NCCL|TP|GLOO)_SOCKET_IFNAME", _FOUND_AT_LAUNCH),
    (r"NNODES|NODE_RANK|HEADLESS|MASTER_PORT", _PLANNED),
    (r"WORKER_(SCRIPT_)?DIR", "nothing is copied to nodes"),
    (r"HF_HUB_.*|TRANSFORMERS_OFFLINE", "engines never download; deskfleet fleet pull does"),
    (r"NFS_SERVER_IPS?", 'share = "nfs" exports from the head'),
    (r".*RESTART_POLICY|.*STOP_GRACE", "the supervisor restarts and stops, in order"),
    (r"SKIP_SMOKE|SMOKE_QUICK", "the launch gates are always asked"),
    (
        r"(VLLM|SGLANG|NCCL|DSV41|B12X|DSPARK|TORCH|PYTORCH|FLASHINFER|TILELANG|TRITON|DG_JIT|CUTE_DSL)_.*",
        "of the engine: [engine] env takes it if you still need it",
    ),
)
_HEAD = ("MASTER_ADDR", "HEAD_IP", "VLLM_HOST_IP")
_WORKERS = ("WORKER_HOSTS", "WORKER_HOST")
_WORKER_FABRIC = ("WORKER_IPS", "WORKER_VLLM_HOST_IP")
_NUMBERED = re.compile(r"WORKER([1-9]\d*)_(IP|HOST)")
_IMAGES = ("IMAGE", "DSPARK_VLLM_IMAGE")
_PORTS = ("API_PORT", "SERVE_PORT", "VLLM_PORT")
_OTHERS = ("HF_CACHE", "WORKER_HF_CACHE", "SERVED_MODEL_NAME", "DSPARK_REVISION", "NCCL_IB_HCA", "VLLM_HOST")
_TAKEN = {*_HEAD, *_WORKERS, *_WORKER_FABRIC, *_WISHES, *_IMAGES, *_PORTS, *_OTHERS}


@dataclass(frozen=True, slots=True)
class Imported:
    """A draft, and each variable that is not in it with the reason."""

    draft: Draft
    ignored: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Value:
    """What a variable is set to. `is_made` says that a shell would make something else of the text."""

    text: str
    is_made: bool = False


def _read(path: Path) -> dict[str, _Value]:
    """Return the variables of a file that shells read. Nothing is run. Raises ConfigError with the line."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    values = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            # The line is not repeated: it may be the rest of a secret.
            raise ConfigError(
                f"{path}:{number} is no NAME=VALUE", hint="values of several lines are not read"
            )
        values[match[1]] = _unquoted(match[2].strip())
    return values


def _unquoted(text: str) -> _Value:
    single = re.fullmatch(r"'([^']*)'\s*(?:#.*)?", text)
    if single is not None:
        return _Value(single[1])
    double = re.fullmatch(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?', text)
    bare = re.sub(r"(?:^|\s+)#.*$", "", text) if double is None else double[1]
    is_made = re.search(r"(?<!\\)(?:\$[\w{(]|`)", bare) is not None
    return _Value(re.sub(r'\\(["\\$`])', r"\1", bare), is_made)


def import_env(path: Path, draft: Draft) -> Imported:
    """Return `draft` with what the file says of nodes, paths and wishes. Raises ConfigError for contradictions.

    Nodes of `draft` itself go before those of the file.
    """
    values, ignored = {}, []
    for name, value in _read(path).items():
        reason = _reason_to_ignore(name, value)
        if reason is None:
            values[name] = value.text
        else:
            ignored.append((name, reason))
    wishes: dict[str, int | float] = {}
    for name, (key, kind) in _WISHES.items():
        if values.get(name):
            try:
                number = kind(values[name])
            except ValueError:
                raise ConfigError(f"{path}: {name} is {values[name]!r}, no number") from None
            if wishes.setdefault(key, number) != number:
                raise ConfigError(f"{path}: {name} is {number}, and another variable says {wishes[key]}")
    nodes = draft.nodes or _nodes(path, values)
    cache, worker_cache = values.get("HF_CACHE"), values.get("WORKER_HF_CACHE")
    if worker_cache and worker_cache != (cache or draft.checkpoint):
        nodes = (nodes[0], *(replace(node, checkpoint=worker_cache) for node in nodes[1:]))
    gateway: dict[str, str | int] = {}
    if values.get("SERVED_MODEL_NAME"):
        gateway["model_id"] = values["SERVED_MODEL_NAME"]
    if values.get("VLLM_HOST"):
        gateway["host"] = values["VLLM_HOST"]
    for name in _PORTS:
        if values.get(name):
            gateway["port"] = _port(path, name, values[name])
    notes = [f"Made from {path.name}; not taken from there:", *(f"  {name}: {why}" for name, why in ignored)]
    if cache:
        notes.append("HF_CACHE became paths.checkpoint: make it the directory with config.json in it.")
    secrets = tuple(
        (name.lower(), f"env:{name}") for name, _ in ignored if name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    )
    result = replace(
        draft,
        nodes=nodes,
        checkpoint=cache or draft.checkpoint,
        image=next((values[name] for name in _IMAGES if values.get(name)), draft.image),
        revision=values.get("DSPARK_REVISION") or draft.revision,
        wishes=(*draft.wishes, *wishes.items()),
        gateway=(*draft.gateway, *gateway.items()),
        secrets=(*draft.secrets, *secrets),
        env=(*draft.env, *((name, values[name]) for name in ("NCCL_IB_HCA",) if values.get(name))),
        notes=(*draft.notes, *(notes if ignored else notes[2:])),
    )
    return Imported(result, tuple(ignored))


def _reason_to_ignore(name: str, value: _Value) -> str | None:
    if _SECRET_NAME.search(name):
        return "a secret: refer to it in [secrets]; clients' keys are made by deskfleet keys new"
    if name in _TAKEN or _NUMBERED.fullmatch(name):
        return f"its value, {value.text}, is made by a shell" if value.is_made else None
    return next((why for pattern, why in _IGNORED if re.fullmatch(pattern, name)), "it means nothing here")


def _nodes(path: Path, values: Mapping[str, str]) -> tuple[NodeDraft, ...]:
    hosts = _listed(values, _WORKERS, "HOST")
    fabric = _listed(values, _WORKER_FABRIC, "IP")
    head = next((values[name] for name in _HEAD if values.get(name)), None)
    if hosts and fabric and len(hosts) != len(fabric):
        raise ConfigError(
            f"{path}: {len(hosts)} workers, {' '.join(hosts)}, and {len(fabric)} addresses, {' '.join(fabric)}",
            hint="one address for each host, in the same order",
        )
    if not hosts and not fabric:
        raise ConfigError(
            f"{path} names no worker", hint="WORKER_HOSTS or WORKER_IPS there, or --node for each machine"
        )
    if head is None:
        raise ConfigError(f"{path} does not say the head's address", hint="MASTER_ADDR there, or --node")
    workers = []
    for number, host in enumerate(hosts or fabric, 1):
        node = parse_node(host)
        own = (fabric[number - 1],) if fabric and fabric[number - 1] != node.address else ()
        workers.append(replace(node, name=node.name or f"worker-{number}", fabric=own))
    note = "The recipe ran on the head, so it is this machine. From another one: the head's address, as ssh takes it."
    return (NodeDraft("head", "local", fabric=(head,), notes=(note,)), *workers)


def _listed(values: Mapping[str, str], names: tuple[str, ...], ending: str) -> list[str]:
    """The words of the first of these that says anything, else of WORKER1_IP, WORKER2_IP and so on."""
    for name in names:
        if values.get(name):
            return re.split(r"[\s,]+", values[name].strip("() "))
    found = (
        (int(match[1]), value)
        for name, value in values.items()
        if (match := _NUMBERED.fullmatch(name)) and match[2] == ending
    )
    return [value for _, value in sorted(found) if value]


def _port(path: Path, name: str, text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 65535:
        raise ConfigError(f"{path}: {name} is {text!r}, no port")
    return int(text)


__all__ = ["Imported", "import_env"]
