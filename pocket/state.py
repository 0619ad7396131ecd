"""What a training leaves behind, so that it can go on elsewhere: small files with parameters, and how far it came.

Three forms. The *compact* one travels: at most four files of 15 MiB; experts and Engram tables as int8 in groups of 32
(published as FP4 and FP8, they lose less than they will), all else as float16; no optimiser, and no drafter before its
stage, because it is made anew from the seed. Its hashes tell when half of it is missing. The *whole* one stays on the
machine: everything as it was. The third is a checkpoint with `training.json` beside it: what is rounded off there is
lost, but where a checkpoint is at hand nothing else need travel. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from deskfleet.model.checkpoint import CONFIG_NAME, Checkpoint
from pocket.load import parameters_of

MAX_FILE_BYTES = 15 * 2**20
_GROUP = 32
_SHRUNK = re.compile(r".*\.experts\.w[123]\.weight|.*\.engram\.embed\.weight")
_DRAFTER = "mtp."
_PROGRESS, _WHOLE = "progress.json", "whole.pt"
TRAINING_NAME = "training.json"
"""The file of a checkpoint that says how far its training came."""

STAGES = ("base", "long", "book", "draft")
"""In the order in which they are run."""


@dataclass(frozen=True)
class Progress:
    """How far a training came: its stage, and within that stage steps, tokens, and seconds.

    `seconds_s` were spent on steps, `lost_s` on compiling and the like.
    """

    stage: str
    step: int
    tokens: int
    seconds_s: float = 0.0
    lost_s: float = 0.0

    @property
    def order(self) -> tuple[int, int, int]:
        """Later is greater."""
        return STAGES.index(self.stage), self.step, self.tokens


@dataclass(frozen=True)
class State:
    """Parameters by name, config.json, and what optimisers keep (only in the whole form)."""

    progress: Progress
    published: Mapping[str, Any] = field(repr=False)
    parameters: dict[str, Tensor] = field(repr=False)
    optimiser: dict[str, Any] | None = field(default=None, repr=False)


def save_compact(state: State, directory: Path) -> int:
    """Write the compact form to `directory` and return its bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    packed: dict[str, Tensor] = {}
    for name, value in state.parameters.items():
        if name.startswith(_DRAFTER) and state.progress.stage != STAGES[-1]:
            continue
        packed |= _shrunk(name, value) if _SHRUNK.fullmatch(name) else {name: value.to(torch.float16)}
    files: list[dict[str, Tensor]] = []
    room = 0
    for name, value in packed.items():
        size = value.numel() * value.element_size() + 256  # its part of the header
        if size > room:
            files.append({})
            room = MAX_FILE_BYTES
        files[-1][name] = value.contiguous()
        room -= size
    blobs = {f"weights-{number}.safetensors": save(tensors) for number, tensors in enumerate(files)}
    for old in directory.glob("weights-*.safetensors"):
        if old.name not in blobs:
            old.unlink()
    for name, blob in blobs.items():
        _replace(directory / name, blob)
    hashes = {name: hashlib.sha256(blob).hexdigest() for name, blob in blobs.items()}
    record = {"progress": asdict(state.progress), "files": hashes, "config": dict(state.published)}
    _replace(directory / _PROGRESS, (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())
    return sum(len(blob) for blob in blobs.values())


def load_compact(directory: Path) -> State | None:
    """Return what `save_compact` wrote; None when there is nothing, or not all of it."""
    try:
        record = json.loads((directory / _PROGRESS).read_text(encoding="utf-8"))
        blobs = {name: (directory / name).read_bytes() for name in record["files"]}
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if any(hashlib.sha256(blob).hexdigest() != record["files"][name] for name, blob in blobs.items()):
        return None
    packed = {name: value for blob in blobs.values() for name, value in load(blob).items()}
    return State(Progress(**record["progress"]), record["config"], _restored(packed))


def save_whole(state: State, directory: Path) -> None:
    """Write the whole form to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / _WHOLE
    draft = target.with_suffix(".new")
    torch.save(
        {
            "progress": asdict(state.progress),
            "published": dict(state.published),
            "parameters": state.parameters,
            "optimiser": state.optimiser,
        },
        draft,
    )
    os.replace(draft, target)


def load_whole(directory: Path) -> State | None:
    """Return what `save_whole` wrote, on the CPU; None when there is nothing."""
    path = directory / _WHOLE
    if not path.exists():
        return None
    found = torch.load(path, map_location="cpu", weights_only=True)
    return State(Progress(**found["progress"]), found["published"], found["parameters"], found["optimiser"])


def load_published(directory: Path) -> State | None:
    """Return what a checkpoint keeps of its training; None when it is none, or does not say how far it came.

    Raises CheckpointError for a checkpoint that cannot be read.
    """
    try:
        progress = Progress(**json.loads((directory / TRAINING_NAME).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    published = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
    return State(progress, published, parameters_of(Checkpoint.open(directory)))


def load_newest(directories: Iterable[Path]) -> State | None:
    """Return the state that came furthest, of any form; the whole one where they are even."""
    found = [
        (state.progress.order, state.optimiser is not None, number, state)
        for number, directory in enumerate(directories)
        for state in (load_published(directory), load_compact(directory), load_whole(directory))
        if state is not None
    ]
    return max(found, key=lambda entry: entry[:3])[-1] if found else None


def _shrunk(name: str, value: Tensor) -> dict[str, Tensor]:
    """int8 codes and float16 scales of groups of 32."""
    groups = value.float().unflatten(-1, (-1, _GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / 127).to(torch.float16)
    codes = torch.round(groups / scale.float().clamp_min(1e-7)).clamp(-127, 127).to(torch.int8)
    return {f"{name}:codes": codes.flatten(-2), f"{name}:scales": scale.squeeze(-1)}


def _restored(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parameters = {}
    for name, value in packed.items():
        if name.endswith(":codes"):
            plain = name.removesuffix(":codes")
            scales = packed[f"{plain}:scales"].float()
            parameters[plain] = (value.float().unflatten(-1, (-1, _GROUP)) * scales[..., None]).flatten(-2)
        elif not name.endswith(":scales"):
            parameters[name] = value.float()
    return parameters


def _replace(path: Path, blob: bytes) -> None:
    draft = path.with_suffix(".new")
    draft.write_bytes(blob)
    os.replace(draft, path)


__all__ = [
    "MAX_FILE_BYTES",
    "STAGES",
    "TRAINING_NAME",
    "Progress",
    "State",
    "load_compact",
    "load_newest",
    "load_published",
    "load_whole",
    "save_compact",
    "save_whole",
]
