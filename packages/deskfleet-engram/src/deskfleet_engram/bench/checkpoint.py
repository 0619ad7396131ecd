"""A checkpoint of a wanted size to measure on: Engram layers of random rows under the published names.

Same columns, n-grams and row format as the published tables, fewer rows per column. Knows nothing of measuring.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from deskfleet_engram.fileio import ALIGNMENT, ExtentWriter, aligned_buffer
from deskfleet_engram.format import BLOCK_BYTES, fp8_rows
from deskfleet_engram.geometry import EngramSpec, table_rows
from deskfleet_engram.source import Source, open_source

LAYER = 1
COMPRESSED_VOCAB_SIZE = 99_092
_HEADS, _MAX_NGRAM, _HEAD_DIM, _PAD_ID = 8, 4, 256, 2
_PIECE_BYTES = 8 << 20
_FINITE = 0xBF  # all but the highest bit of e4m3's exponent: no code is a NaN then
_SMALL_SCALES, _SMALLEST_SCALE = 0x07, 0x78  # 2^-7 to 1


def make_checkpoint(
    directory: Path,
    pack_bytes: int,
    seed: int = 0,
    *,
    layer_ids: tuple[int, ...] = (LAYER,),
    is_finite: bool = False,
) -> Source:
    """Write a checkpoint whose pack takes about `pack_bytes`, a shard per layer, and return its description.

    `is_finite`: no row has a NaN, as published ones have none, so that a NaN can only be a reader's; and all values are
    below 2. Raises OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rows = fp8_rows(_HEAD_DIM)
    num_columns = (_MAX_NGRAM - 1) * _HEADS * len(layer_ids)
    vocab_size = max(1000, pack_bytes // BLOCK_BYTES * rows.rows_per_block // num_columns)
    unsized = (0,) * len(layer_ids)
    spec = EngramSpec(
        layer_ids, unsized, _MAX_NGRAM, vocab_size, _HEADS, _HEAD_DIM, _PAD_ID, COMPRESSED_VOCAB_SIZE
    )
    sizes = table_rows(spec)
    config = {
        "engram_layer_ids": list(layer_ids),
        "engram_num_embeddings": list(sizes),
        "engram_max_ngram_size": _MAX_NGRAM,
        "engram_vocab_size": vocab_size,
        "engram_n_heads": _HEADS,
        "engram_head_dim": _HEAD_DIM,
        "engram_pad_token_id": _PAD_ID,
        "engram_compressed_vocab_size": COMPRESSED_VOCAB_SIZE,
    }
    (directory / "config.json").write_text(json.dumps({"text_config": config}))
    shards = {}
    for layer, num_rows in zip(layer_ids, sizes, strict=True):
        prefix, shard = f"layers.{layer}.engram.embed.", f"model-{layer:05d}.safetensors"
        header, end = {}, 0
        for name, dtype, width in (
            ("weight", "F8_E4M3", rows.weight_bytes),
            ("scale", "F8_E8M0", rows.scale_bytes),
        ):
            header[prefix + name] = {
                "dtype": dtype,
                "shape": [num_rows, width],
                "data_offsets": [end, end + num_rows * width],
            }
            end += num_rows * width
        border = num_rows * rows.weight_bytes if is_finite else None
        _write_shard(directory / shard, json.dumps(header).encode(), end, seed + layer, border)
        shards.update(dict.fromkeys(header, shard))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return open_source(directory, repo="deskfleet-engram-bench")


def _write_shard(path: Path, header: bytes, data_bytes: int, seed: int, border: int | None) -> None:
    """Write header and random bytes, past the page cache. Every piece differs, as deduplicating disks would notice.

    With a `border`, bytes before it are codes that are numbers, bytes from there on small scales.
    """
    header += b" " * (-(8 + len(header)) % 8)
    total = 8 + len(header) + data_bytes
    random = np.random.default_rng(seed)
    piece = aligned_buffer(_PIECE_BYTES)
    writer = ExtentWriter(path, -(-total // ALIGNMENT) * ALIGNMENT)
    try:
        for offset in range(0, total, _PIECE_BYTES):
            piece[:] = np.frombuffer(random.bytes(_PIECE_BYTES), dtype=np.uint8)
            if border is not None:
                num_codes = max(0, 8 + len(header) + border - offset)
                piece[:num_codes] &= _FINITE
                piece[num_codes:] = (piece[num_codes:] & _SMALL_SCALES) + _SMALLEST_SCALE
            if offset == 0:
                head = len(header).to_bytes(8, "little") + header
                piece[: len(head)] = np.frombuffer(head, dtype=np.uint8)
            count = -(-min(_PIECE_BYTES, total - offset) // ALIGNMENT) * ALIGNMENT
            writer.write(piece[:count], offset)
        writer.sync()
    finally:
        writer.close()
    os.truncate(path, total)


__all__ = ["COMPRESSED_VOCAB_SIZE", "LAYER", "make_checkpoint"]
