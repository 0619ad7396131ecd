"""Reads safetensors files for tests, the golden ones above all: arrays by name, without torch.

BF16 comes as float32; FP8, E8M0 and packed FP4 come as bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

GOLDEN = Path(__file__).parents[1] / "golden" / "v41-tiny"
_DTYPES = {"I64": "<i8", "I32": "<i4", "U8": "u1", "I8": "u1", "F32": "<f4", "F8_E4M3": "u1", "F8_E8M0": "u1"}


def header(path: Path) -> tuple[dict[str, dict[str, object]], int]:
    """Return the tensor entries of a safetensors file and the absolute offset of its data."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(size))
    entries.pop("__metadata__", None)
    return entries, 8 + size


def read(path: str, name: str) -> NDArray[np.generic]:
    """Return one tensor of a golden file."""
    return read_tensor(GOLDEN / path, name)


def read_tensor(file: Path, name: str) -> NDArray[np.generic]:
    """Return one tensor of any safetensors file."""
    entries, data = header(file)
    entry = entries[name]
    begin, end = entry["data_offsets"]
    with file.open("rb") as stream:
        stream.seek(data + begin)
        raw = stream.read(end - begin)
    if entry["dtype"] == "BF16":
        values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(raw, _DTYPES[entry["dtype"]])
    return values.reshape(entry["shape"])


def config() -> dict[str, object]:
    """Return the text part of the golden checkpoint's configuration."""
    return json.loads((GOLDEN / "model" / "config.json").read_text())["text_config"]
