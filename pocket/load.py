"""From a checkpoint in the published layout back to parameters: what `pocket.export` wrote, as training has it.

Owns the way back: codes and scales to float32, experts into stacks, published names to parameter names. Rounded again
by the fake quantisation, what comes out is the same to the bit; what training knew beyond that is not in a checkpoint.
Knows nothing of models.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deskfleet.model.checkpoint import Checkpoint, TensorInfo
from pocket.model.numerics import TILE

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_SIGN = 8
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


def parameters_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every parameter of a checkpoint by its name in training, float32, on the CPU."""
    parameters: dict[str, Tensor] = {}
    experts: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
    bytes_of = _Files()
    for name, info in checkpoint.tensors.items():
        if name.endswith(".scale") and _weight_of(name) in checkpoint.tensors:
            continue  # read with its weight
        value = _value(name, info, checkpoint.tensors, bytes_of)
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(w[123]\.weight)", name)
        if expert:
            experts[f"{expert[1]}.{expert[3]}"][int(expert[2])] = value
        else:
            parameters[re.sub(r"\.(hc_attn|hc_ffn)_(fn|base|scale)$", r".\1.\2", name)] = value
    for name, parts in experts.items():
        parameters[name] = torch.stack([parts[number] for number in range(len(parts))])
    return parameters


class _Files:
    """The bytes of tensors; a file is read once."""

    def __init__(self) -> None:
        self._read: dict[Path, bytes] = {}

    def __call__(self, info: TensorInfo) -> Tensor:
        if info.path not in self._read:
            self._read[info.path] = info.path.read_bytes()
        data = np.frombuffer(self._read[info.path], np.uint8, info.nbytes, info.offset_bytes)
        return torch.from_numpy(data.copy())


def _value(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo], bytes_of: _Files) -> Tensor:
    data = bytes_of(info)
    if info.dtype in ("BF16", "F32"):
        return data.view(_TORCH_DTYPES[info.dtype]).view(info.shape).float()
    scale_info = tensors[f"{name.removesuffix('.weight')}.scale"]
    # E8M0: a power of two, its exponent biased by 127.
    scale = torch.exp2(bytes_of(scale_info).view(scale_info.shape).float() - 127)
    if info.dtype == "I8":
        values = _unpacked(data.view(info.shape))
    else:
        values = data.view(_TORCH_DTYPES[info.dtype]).view(info.shape).float()
    tile_rows = values.shape[0] // scale.shape[0]
    tiles = values.unflatten(1, (-1, TILE)).unflatten(0, (-1, tile_rows))
    scaled: Tensor = tiles * scale[:, None, :, None]
    return scaled.reshape(values.shape)


def _unpacked(packed: Tensor) -> Tensor:
    """E2M1 codes uint8 [out, in / 2], the even column in the low nibble -> float32 [out, in]."""
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
    magnitude = _E2M1[nibbles & (_SIGN - 1)]
    return torch.where(nibbles >= _SIGN, -magnitude, magnitude)


def _weight_of(scale_name: str) -> str:
    return f"{scale_name.removesuffix('.scale')}.weight"


__all__ = ["parameters_of"]
