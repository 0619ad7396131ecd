"""Writes safetensors files: one header, then the tensors, aligned as the format asks.

Owns the byte layout only; takes plain bytes, because numpy has no FP8 and no FP4. Knows nothing of what
tensors mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from deskfleet.model.names import DTYPE_BYTES, TensorSpec

_ALIGNMENT_BYTES = 8  # of the data section


def write_shard(path: Path, specs: Mapping[str, TensorSpec], data: Mapping[str, bytes]) -> int:
    """Write the tensors of `specs` with the bytes of `data`; return the number of tensor bytes.

    Tensors with wider elements come first, so that each one starts at a multiple of its element size.
    """
    names = sorted(specs, key=lambda name: (-DTYPE_BYTES[specs[name].dtype], name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + specs[name].nbytes
        if len(data[name]) != specs[name].nbytes:
            raise ValueError(f"{name} has {len(data[name])} bytes, expected {specs[name].nbytes}")
        entries[name] = {
            "dtype": specs[name].dtype,
            "shape": list(specs[name].shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        file.writelines(data[name] for name in names)
    return end


__all__ = ["write_shard"]
