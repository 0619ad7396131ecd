"""What a rank has of a sum over ranks, in one dense buffer. Owns one kernel; how ranks exchange is collectives.py's.

A step of one rank needs none of it: hyper.py's `mix` adds up the parts of a product, or the experts' pairs, as it reads
them. Over ranks what travels is their sum, float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024  # that one program takes, at most


@triton.jit
def sum_kernel(
    parts,  # bf16 or float32: part p of row t begins at p * part_stride + t * row_stride
    out,  # float32 [T, M] out
    part_stride,
    row_stride,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: up to COLUMNS columns of a row, its parts added in their order."""
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < M
    at = parts + row.to(tl.int64) * row_stride + column
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * part_stride, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * M + column, total, mask=inside)


def add_up(output: Tensor, out: Tensor, *, parts: int = 1) -> None:
    """`output` in a form that `mix` takes, bf16 [T * parts, M] or float32 [splits, T, M], into `out` float32 [T, M]."""
    num_rows, width = out.shape
    if output.dim() == 3:
        parts, part_stride, row_stride = len(output), num_rows * width, width
    else:
        part_stride, row_stride = width, parts * width
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    sum_kernel[(num_rows, triton.cdiv(width, columns))](
        output, out, part_stride, row_stride, M=width, PARTS=parts, COLUMNS=columns, num_warps=4
    )


__all__ = ["add_up", "sum_kernel"]
