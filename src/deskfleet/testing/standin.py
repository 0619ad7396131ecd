"""Sparse stand-ins for checkpoints: real names, headers, index and sizes; holes where weights would be.

Owns writing them, for tests of whatever reads headers at the real size. The data reads as zeros and takes no
disk. Real small checkpoints with weights are made elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deskfleet.model.checkpoint import CONFIG_NAME, INDEX_NAME
from deskfleet.model.config import ModelConfig
from deskfleet.model.names import DTYPE_BYTES, TensorSpec, expected_shards
from deskfleet.model.published import published_config_dict


def write_published_standin(directory: str | Path) -> None:
    """Write a stand-in of the published checkpoint: 48 shards of 510 GB together, a few MB on disk.

    `directory` is made when absent. The file system must support sparse files of 102 GB.
    """
    write_standin(directory, published_config_dict())


def write_standin(directory: str | Path, config: Mapping[str, Any]) -> None:
    """Write a stand-in for any configuration in the published layout. Raises ConfigError for a wrong one."""
    directory = Path(directory)
    shards = expected_shards(ModelConfig.from_dict(config))
    directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_sparse_shard(directory / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    total_bytes = sum(spec.nbytes for tensors in shards for spec in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2), encoding="utf-8")


def write_sparse_shard(path: Path, tensors: Mapping[str, TensorSpec]) -> None:
    """Write one safetensors file that holds `tensors`, wider elements first; their data is a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name].dtype], name)):
        spec = tensors[name]
        start, end = end, end + spec.nbytes
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [start, end]}
    write_sparse_file(path, header, end)


def write_sparse_file(path: Path, header: Mapping[str, Any], num_data_bytes: int) -> None:
    """Write a safetensors file with any header, right or wrong, over `num_data_bytes` of hole."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to eight bytes
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + num_data_bytes)


__all__ = ["write_published_standin", "write_sparse_file", "write_sparse_shard", "write_standin"]
