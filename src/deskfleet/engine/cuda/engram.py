"""The gated Engram value (spec §7.5). Owns one kernel; the projection before it is linear.fp8_kernel's.

The rows come from the host as they lie on disk. Their codes and scales are what the activation quantiser would make of
them, but for groups whose stored scale is below 2**-22 (spec §7.5), so they go into the projection as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda import linear
from deskfleet.engine.cuda.native import gating
from deskfleet.engine.cuda.tiles import to_bf16


@triton.jit
def gate_kernel(
    stream,  # bf16 [T, 4, M], changed in place
    projected,  # bf16 [T, 5 * M]: four keys, then the value
    weight,  # float32 [4, M]
    alive,  # int32 [T]: 0 within an image span
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program a copy and row (oracle: reference.engram_gate)."""
    copy = tl.program_id(0)
    row = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    at = stream + (row * 4 + copy) * M
    key_at = projected + row * (5 * M) + copy * M
    squares = tl.zeros((BLOCK,), tl.float32)
    key_squares = tl.zeros((BLOCK,), tl.float32)
    dots = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, M, BLOCK):
        x = tl.load(at + start + column).to(tl.float32)
        key = tl.load(key_at + start + column).to(tl.float32)
        squares += x * x
        key_squares += key * key
        dots += x * tl.load(weight + copy * M + start + column) * key
    factor = tl.rsqrt(tl.sum(squares, 0) / M + EPS) * tl.rsqrt(tl.sum(key_squares, 0) / M + EPS)
    dot = tl.sum(dots, 0) * factor * tl.rsqrt(M * 1.0)
    root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    gate = tl.sigmoid(tl.where(dot < 0, -root, root))
    if tl.load(alive + row) != 0:
        for start in range(0, M, BLOCK):
            x = tl.load(at + start + column).to(tl.float32)
            value = tl.load(projected + row * (5 * M) + 4 * M + start + column).to(tl.float32)
            tl.store(at + start + column, to_bf16(x + gate * value, BIT_OPS))


def gate(
    stream: Tensor, projected: Tensor, weight: Tensor, alive: Tensor, *, eps: float, bit_ops: bool
) -> None:
    """stream bf16 [T, 4, M] += gate times value, where alive; M a multiple of 32 or more."""
    if linear.few(stream, bit_ops=bit_ops) and gating.is_taken(stream):
        gating.gate(stream, projected, weight, alive, eps=eps)
        return
    num_rows, copies, width = stream.shape
    gate_kernel[(copies, num_rows)](
        stream, projected, weight, alive, M=width, BLOCK=min(width & -width, 1024), EPS=eps, BIT_OPS=bit_ops,
        num_warps=4,
    )  # fmt: skip


__all__ = ["gate", "gate_kernel"]
