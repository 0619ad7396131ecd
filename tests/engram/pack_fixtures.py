"""Small checkpoints with Engram tables of either row format, and their rows as plain arrays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.geometry import EngramSpec, table_rows
from deskfleet_engram.source import Source, open_source

TINY = Path(__file__).parents[1] / "golden" / "v41-tiny" / "model"


def make_checkpoint(
    directory: Path,
    *,
    row_format: str = "fp8",
    vocab_size: int = 101,
    n_heads: int = 1,
    head_dim: int = 256,
    layer_ids: tuple[int, ...] = (1, 3),
    seed: int = 0,
    global_scale: float = 0.0078125,
) -> Source:
    """Write configuration and shards of random rows, one shard per layer, and return their description."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = EngramSpec(layer_ids, (0,) * len(layer_ids), 4, vocab_size, n_heads, head_dim, 2, 409)
    sizes = table_rows(drawn)
    config = {
        "engram_layer_ids": list(layer_ids),
        "engram_num_embeddings": list(sizes),
        "engram_max_ngram_size": 4,
        "engram_vocab_size": vocab_size,
        "engram_n_heads": n_heads,
        "engram_head_dim": head_dim,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 409,
    }
    (directory / "config.json").write_text(json.dumps({"text_config": config}))
    random = np.random.default_rng(seed)
    names = {}
    for layer, num_rows in zip(layer_ids, sizes, strict=True):
        prefix = f"layers.{layer}.engram.embed."
        if row_format == "fp8":
            parts = [("weight", "F8_E4M3", head_dim), ("scale", "F8_E8M0", head_dim // 32)]
        else:
            parts = [("weight", "U8", head_dim // 2), ("scale", "F8_E4M3", head_dim // 16)]
        tensors = {
            prefix + name: (dtype, random.integers(0, 256, (num_rows, width), dtype=np.uint8))
            for name, dtype, width in parts
        }
        if row_format == "nvfp4":
            tensors[prefix + "scale_2"] = ("F32", np.array([global_scale * layer], dtype="<f4"))
        shard = f"model-{layer:05d}.safetensors"
        write_safetensors(directory / shard, tensors)
        names.update(dict.fromkeys(tensors, shard))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return open_source(directory)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, NDArray[np.generic]]]) -> None:
    header, offset = {}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in tensors.values():
            file.write(array.tobytes())


def rows_of(source: Source, layer: int) -> NDArray[np.uint8]:
    """Return uint8 [rows, row_bytes] of a layer's table, straight from the file."""
    table = source.table(layer)
    parts = []
    for span in (table.weight, table.scale):
        raw = span.path.read_bytes()[span.offset_bytes : span.offset_bytes + span.num_bytes]
        parts.append(np.frombuffer(raw, dtype=np.uint8).reshape(span.shape))
    return np.concatenate(parts, axis=1)


def files_of(pack_dir: Path) -> dict[str, bytes]:
    """Return the content of every file below `pack_dir`, by relative path."""
    return {
        str(path.relative_to(pack_dir)): path.read_bytes()
        for path in sorted(pack_dir.rglob("*"))
        if path.is_file()
    }
