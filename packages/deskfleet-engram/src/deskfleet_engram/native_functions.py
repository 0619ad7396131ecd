"""The native library's pure functions: hashing of whole prompts, decoding to bf16, checksums, encoding of blocks.

Each has a numpy twin elsewhere in this package, which is its oracle.
"""

from __future__ import annotations

import ctypes
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram import _native
from deskfleet_engram.blocks import use_accelerator
from deskfleet_engram.errors import FormatError, NativeError
from deskfleet_engram.format import RowFormat
from deskfleet_engram.geometry import EngramGeometry
from deskfleet_engram.hashing import check_stretch
from deskfleet_engram.native_blocks import NativeBlocks

Isa = Literal["best", "scalar", "avx2", "avx512", "neon"]
_ISAS: tuple[Isa, ...] = ("best", "scalar", "avx2", "avx512", "neon")


def is_available() -> bool:
    """Say whether the library can be loaded."""
    try:
        _native.library()
    except NativeError:
        return False
    return True


def hash_ids(
    geometry: EngramGeometry,
    compressed_ids: NDArray[np.int64],
    *,
    start: int,
    position: int,
    pad_id: int,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Return what `hashing.hash_ids` returns, int64 [T - start, L, num_columns], many times faster.

    `out`, C-contiguous and of that shape, receives the ids if given; it may be int32. Raises HistoryError as the twin
    does.
    """
    total = check_stretch(geometry, compressed_ids, start=start, position=position, pad_id=pad_id)
    spec = geometry.spec
    shape = (total - start, len(spec.layer_ids), spec.num_columns)
    rows = np.empty(shape, dtype=np.int64) if out is None else out
    dense = rows.flags.c_contiguous and rows.flags.writeable
    if rows.shape != shape or rows.dtype not in (np.int64, np.int32) or not dense:
        raise NativeError(
            f"out must be contiguous int64 or int32 of shape {shape}, got {rows.dtype} of {rows.shape}"
        )
    ids = np.ascontiguousarray(compressed_ids)
    arrays = [np.ascontiguousarray(a) for a in (geometry.multipliers, geometry.primes, geometry.offsets)]
    plan = _native.HashPlan(
        num_layers=len(spec.layer_ids),
        max_ngram_size=spec.max_ngram_size,
        num_heads=spec.n_heads,
        id_bytes=rows.itemsize,
        vocab_size=spec.compressed_vocab_size,
        pad_id=pad_id,
        multipliers=arrays[0].ctypes.data,
        primes=arrays[1].ctypes.data,
        offsets=arrays[2].ctypes.data,
    )
    bad = ctypes.c_uint64()
    result = _native.library().es_hash(
        ctypes.byref(plan), ids.ctypes.data, total, start, rows.ctypes.data, ctypes.byref(bad)
    )
    if result != _native.OK:
        raise NativeError(f"the library refused to hash {total} ids from {start} on: result {result}")
    return rows


def decode_bf16(
    rows: RowFormat, packed: NDArray[np.uint8], *, global_scale: float = 1.0, isa: Isa = "best"
) -> NDArray[np.uint16]:
    """Return uint16 [..., head_dim], the bits of bf16, of `packed` rows uint8 [..., row_bytes].

    FP8: bf16(e4m3 * 2**(byte - 127)). NVFP4: bf16(float32(e2m1 * e4m3) * global_scale), in float32. Ties go to even,
    NaN is 0x7fc0. Raises NativeError for an instruction set that this machine lacks, FormatError for other shapes.
    """
    if packed.dtype != np.uint8 or packed.shape[-1:] != (rows.row_bytes,):
        raise FormatError(f"{rows.name} rows have {rows.row_bytes} bytes, got {packed.dtype} {packed.shape}")
    dense = np.ascontiguousarray(packed)
    out = np.empty((*packed.shape[:-1], rows.head_dim), dtype=np.uint16)
    result = _native.library().es_decode_bf16(
        _ISAS.index(isa),
        rows.format_id,
        rows.weight_bytes,
        rows.scale_bytes,
        global_scale,
        dense.ctypes.data,
        dense.size // rows.row_bytes,
        out.ctypes.data,
    )
    if result != _native.OK:
        raise NativeError(f"this machine cannot decode {rows.name} rows with {isa} instructions")
    return out


def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """Return the CRC-32C of `data`, continuing from `crc`."""
    array = np.frombuffer(data, dtype=np.uint8)
    return int(_native.library().es_crc32c(crc, array.ctypes.data, array.size))


def accelerate_blocks() -> bool:
    """Let the packer and verification use the library for blocks; False when there is none."""
    try:
        library = _native.library()
    except NativeError:
        return False
    features = library.es_cpu_features().decode()
    use_accelerator(NativeBlocks(library, f"native ({features})"))
    return True


__all__ = ["Isa", "accelerate_blocks", "crc32c", "decode_bf16", "hash_ids", "is_available"]
