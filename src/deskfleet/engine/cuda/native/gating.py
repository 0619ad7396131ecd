"""Engram's gate of a few rows by the kernel of engram.cu. engram.py says what it does."""

from __future__ import annotations

from torch import Tensor

from deskfleet.engine.cuda.native.where import kernel_for

_MOST_COLUMNS = 8192  # of a block


def is_taken(stream: Tensor) -> bool:
    """Whether the kernel is written for this width."""
    return stream.shape[2] <= _MOST_COLUMNS


def gate(stream: Tensor, projected: Tensor, weight: Tensor, alive: Tensor, *, eps: float) -> None:
    """As engram.gate; of what is read, only `projected` may come from the kernel before this one."""
    num_rows, copies, width = stream.shape
    warps = -(-width // 256)
    kernel_for(stream, "engram.cu", "gate", {"M": width, "WARPS": warps, "EPS": eps}).launch(
        (copies, num_rows), 32 * warps, 4 * 3 * 32, [stream, projected, weight, alive], dependent=True
    )


__all__ = ["gate", "is_taken"]
