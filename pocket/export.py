"""From trained parameters to a checkpoint in the published layout.

Owns the way from parameters to published tensors: names, codes and scales, exactly those of the fake quantisation, so
that what is exported is what was trained. The same parameters give the same bytes. Knows nothing of training.

`python -m pocket.export STATE_DIRECTORY OUTPUT` exports what training left: a state, or the finished checkpoint in
parts that are small enough to travel.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deskfleet.engine.ops.quant import e2m1_codes
from deskfleet.model.checkpoint import CONFIG_NAME, INDEX_NAME
from deskfleet.model.config import ModelConfig
from deskfleet.model.names import TensorSpec, expected_shards
from deskfleet.testing.shard_writer import write_shard
from pocket.model.numerics import TILE, fp4_scale, fp8_scale
from pocket.restore import models
from pocket.state import MAX_FILE_BYTES, TRAINING_NAME, State, load_newest
from pocket.tokenizer import DIRECTORY

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_PART, _HASH_NAME = "checkpoint.tar.", "checkpoint.sha256"
_FP8_MAX, _FP4_MAX = 448.0, 6.0


def export(
    parameters: Mapping[str, Tensor],
    published: Mapping[str, Any],
    tokenizer: Path,
    directory: Path,
    *,
    training: Mapping[str, Any] | None = None,
) -> int:
    """Write a checkpoint to the new directory `directory`; return the bytes of its tensors.

    `parameters` are those of `named_parameters_of`, `published` is config.json, `tokenizer` the directory of the
    tokenizer's files. `training` says how far the training came, so that it can go on from the checkpoint.
    """
    config = ModelConfig.from_dict(published)
    directory.mkdir(parents=True)
    shards = expected_shards(config)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total_bytes += write_shard(directory / name, shard, tensor_bytes(shard, parameters))
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    files: dict[str, Mapping[str, Any]] = {CONFIG_NAME: published, INDEX_NAME: index}
    if training is not None:
        files[TRAINING_NAME] = training
    for file_name, value in files.items():
        text = json.dumps(value, indent=2, ensure_ascii=False)
        (directory / file_name).write_text(text + "\n", encoding="utf-8")
    for file_name in _TOKENIZER_FILES:
        shutil.copyfile(tokenizer / file_name, directory / file_name)
    return total_bytes


def named_parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and load biases of `model` by name, on the CPU, in float32."""
    return {name: value.detach().float().cpu() for name, value in model.state_dict().items()}


def tensor_bytes(shard: Mapping[str, TensorSpec], parameters: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The bytes of each tensor of `shard`, row-major, little-endian. Raises KeyError for one that has no parameter."""
    made: dict[str, bytes] = {}
    for name, spec in shard.items():
        if name.endswith(".scale"):
            continue  # made with its weight
        value = parameter_of(name, parameters)
        rows = spec.shape if spec.dtype != "I8" else (spec.shape[0], spec.shape[1] * 2)
        if value.shape != rows:
            raise ValueError(f"{name} is {tuple(value.shape)}, and its published shape is {rows}")
        scale_name = f"{name.removesuffix('.weight')}.scale"
        if spec.dtype == "F8_E4M3":
            # An Engram row has its own scales, a matrix has tiles.
            tile_rows = 1 if scale_name.endswith(".engram.embed.scale") else TILE
            made[name], made[scale_name] = _fp8(value, tile_rows)
        elif spec.dtype == "I8":
            made[name], made[scale_name] = _fp4(value)
        elif spec.dtype == "BF16":
            made[name] = _raw(value.to(torch.bfloat16))
        else:
            made[name] = _raw(value)
    return made


def parameter_of(name: str, parameters: Mapping[str, Tensor]) -> Tensor:
    """The parameter behind the published tensor `name`: experts are stacked, hyper-connections are modules."""
    name = re.sub(r"\.(hc_attn|hc_ffn)_(fn|base|scale)$", r".\1.\2", name)
    expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(w[123]\.weight)", name)
    if expert:
        return parameters[f"{expert[1]}.{expert[3]}"][int(expert[2])]
    return parameters[name]


def _fp8(value: Tensor, tile_rows: int) -> tuple[bytes, bytes]:
    """E4M3 codes and E8M0 scales of tiles of `tile_rows` x 32."""
    rows, columns = value.shape
    tiles = value.float().view(rows // tile_rows, tile_rows, columns // TILE, TILE)
    scale = fp8_scale(tiles.abs().amax((1, 3), keepdim=True))
    codes = (tiles / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return _raw(codes.view(rows, columns)), _raw(scale[:, 0, :, 0].to(torch.float8_e8m0fnu))


def _fp4(value: Tensor) -> tuple[bytes, bytes]:
    """Packed E2M1 codes, the even column in the low nibble, and E8M0 scales of 32 columns."""
    groups = value.float().unflatten(-1, (-1, TILE))
    scale = fp4_scale(groups.abs().amax(-1, keepdim=True))
    scaled = (groups / scale).clamp(-_FP4_MAX, _FP4_MAX).flatten(-2)
    nibbles = e2m1_codes(scaled) | (torch.signbit(scaled).to(torch.uint8) << 3)
    packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return _raw(packed), _raw(scale[..., 0].to(torch.float8_e8m0fnu))


def _raw(value: Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes()


def write_parts(state: State, directory: Path) -> list[Path]:
    """Export `state` and leave the checkpoint in `directory` as an archive in parts of at most MAX_FILE_BYTES."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, archive = Path(scratch) / "checkpoint", Path(scratch) / "archive"
        training = asdict(state.progress)
        export(state.parameters, state.published, DIRECTORY, checkpoint, training=training)
        with tarfile.open(archive, "w") as tar:
            for path in sorted(checkpoint.iterdir()):
                tar.add(path, path.name)
        data = archive.read_bytes()
    (directory / _HASH_NAME).write_text(hashlib.sha256(data).hexdigest() + "\n")
    paths = []
    for number, start in enumerate(range(0, len(data), MAX_FILE_BYTES)):
        paths.append(directory / f"{_PART}{number}")
        paths[-1].write_bytes(data[start : start + MAX_FILE_BYTES])
    return paths


def join_parts(directory: Path, output: Path) -> None:
    """Put what `write_parts` left back together, as the new directory `output`. Raises SystemExit when some is lost."""
    parts = sorted(directory.glob(f"{_PART}*"), key=lambda path: int(path.name.removeprefix(_PART)))
    data = b"".join(path.read_bytes() for path in parts)
    if hashlib.sha256(data).hexdigest() != (directory / _HASH_NAME).read_text().strip():
        raise SystemExit(f"the parts of the checkpoint in {directory} are not all there, or damaged")
    output.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(output, filter="data")


def main(directory: Path, output: Path) -> None:
    """Export the finished checkpoint in a directory, or its newest state."""
    if (directory / _HASH_NAME).exists():
        join_parts(directory, output)
        print(f"{output}: {(output / TRAINING_NAME).read_text().strip()}")
        return
    state = load_newest([directory])
    if state is None:
        raise SystemExit(f"there is no training state in {directory}")
    backbone, drafter = models(state.published, state.parameters)
    parameters = named_parameters_of(backbone) | named_parameters_of(drafter)
    training = asdict(state.progress)
    total = export(parameters, state.published, DIRECTORY, output, training=training)
    print(f"{output}: {total / 1e6:.1f} MB after {state.progress}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))


__all__ = ["export", "join_parts", "named_parameters_of", "parameter_of", "tensor_bytes", "write_parts"]
