"""Encoding and checking of blocks by the native library, for `deskfleet_engram.blocks.use_accelerator`.

A thin layer over two functions of its C interface; ctypes lets go of the interpreter while they run.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram import _native
from deskfleet_engram.blocks import use_accelerator
from deskfleet_engram.errors import FormatError, NativeError
from deskfleet_engram.format import ColumnLayout


class _Identity(ctypes.Structure):
    """`es_identity` of the C interface."""

    _fields_ = (
        ("pack_id", ctypes.c_uint64),
        ("layer", ctypes.c_uint32),
        ("column", ctypes.c_uint32),
        ("row_format", ctypes.c_uint32),
        ("row_bytes", ctypes.c_uint32),
    )


class NativeBlocks:
    """An `Accelerator` over an open library that exports `es_encode_blocks` and `es_check_blocks`."""

    def __init__(self, library: ctypes.CDLL, name: str = "native") -> None:
        """Raises AttributeError when the library lacks one of the functions."""
        self.name = name
        u32, u64, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
        self._encode = library.es_encode_blocks
        self._encode.restype = u64
        self._encode.argtypes = (pointer, u64, u64, pointer, u32, pointer, u32, pointer)
        self._check = library.es_check_blocks
        self._check.restype = u64
        self._check.argtypes = (pointer, u64, u64, u64, pointer, pointer, pointer)

    def encode_blocks(
        self,
        layout: ColumnLayout,
        first_block: int,
        weight: NDArray[np.uint8],
        scale: NDArray[np.uint8],
        out: NDArray[np.uint8],
    ) -> None:
        """Fill `out` [B, 4096] with the blocks from `first_block` on."""
        rows = layout.rows
        identity = _identity(layout)
        num_blocks = self._encode(
            ctypes.byref(identity),
            first_block * rows.rows_per_block,
            len(weight),
            weight.ctypes.data,
            rows.weight_bytes,
            scale.ctypes.data,
            rows.scale_bytes,
            out.ctypes.data,
        )
        if num_blocks != len(out):
            raise FormatError(
                f"{self.name} encoded {num_blocks} blocks of {layout.file_name}, not {len(out)}"
            )

    def blocks_are_sound(self, layout: ColumnLayout, first_block: int, blocks: NDArray[np.uint8]) -> bool:
        """Say whether all of `blocks` [B, 4096] are those from `first_block` on, without a fault."""
        identity = _identity(layout)
        kind, row = ctypes.c_int32(), ctypes.c_uint64()
        num_sound = self._check(
            ctypes.byref(identity),
            first_block,
            len(blocks),
            layout.num_rows,
            blocks.ctypes.data,
            ctypes.byref(kind),
            ctypes.byref(row),
        )
        return bool(num_sound == len(blocks))


def use_native_blocks() -> str | None:
    """Have blocks encoded and checked by native code from now on; return None, or why it has to be numpy.

    Raises FormatError when native code does not give numpy's bytes.
    """
    try:
        use_accelerator(NativeBlocks(_native.library()))
    except NativeError as error:
        return error.message
    return None


def _identity(layout: ColumnLayout) -> _Identity:
    return _Identity(
        layout.pack_id, layout.layer, layout.column, layout.rows.format_id, layout.rows.row_bytes
    )


__all__ = ["NativeBlocks", "use_native_blocks"]
