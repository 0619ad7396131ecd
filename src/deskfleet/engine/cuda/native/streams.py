"""Residual streams of a few rows by the kernels of hyper.cu. Owns how rows become warps. hyper.py says what they do."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from deskfleet.engine.cuda.native.where import kernel_for

_SLICE = 64
_WARPS = 4
_COLUMNS = 1024  # of a block that norms


class Streams(Protocol):
    """hyper.StreamBuffers."""

    width: int
    num_rows: int
    stream: Tensor
    collapsed: Tensor
    collapsed_squares: Tensor
    stream_squares: Tensor
    mixes: Tensor
    x: Tensor
    codes: Tensor
    scales: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor


def mix(
    buffers: Streams, weight: Tensor | None, output: Tensor | None, shared: Tensor | None, taps: Tensor | None,
    *, parts: int,
) -> None:  # fmt: skip
    """As hyper.mix. With an `output`, nothing else that is read may come from the kernel before this one."""
    width, num_rows, stream = buffers.width, buffers.num_rows, buffers.stream
    turns = 1 if num_rows <= _WARPS else 2 if num_rows <= 2 * _WARPS else 4
    rows = 16 if turns == 4 else 8
    floats = output is not None and output.dim() == 3
    defines = {
        "MIX": 1,
        "M": width,
        "SLICES": width // _SLICE,
        "NUM_PARTS": parts,
        "SUMS": len(output) if floats and output is not None else 1,
        "FLOATS": floats,
        "HAS_SHARED": shared is not None,
        "EXPANDS": output is not None,
        "MIXES": weight is not None,
        "HAS_TAP": taps is not None,
        "TURNS": turns,
    }
    kernel_for(stream, "hyper.cu", "mix", defines).launch(
        (width // _SLICE, -(-num_rows // rows)),
        32 * _WARPS,
        4 * rows * (4 * 48 + 4 * 25),
        [
            output, shared, stream, buffers.post, buffers.comb, buffers.pre, weight, buffers.collapsed,
            buffers.collapsed_squares, buffers.stream_squares, buffers.mixes, taps,
            0 if taps is None else taps.stride(0), num_rows,
        ],
        dependent=True,
    )  # fmt: skip


def finish(
    buffers: Streams,
    norm: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
) -> None:
    """As hyper.finish."""
    width, num_rows = buffers.width, buffers.num_rows
    defines: dict[str, int | float] = {
        "FINISH": 1,
        "M": width,
        "SLICES": width // _SLICE,
        "ITERATIONS": iterations,
        "NORM_EPS": norm_eps,
        "MIX_EPS": eps,
    }
    kernel_for(norm, "hyper.cu", "finish", defines).launch(
        (-(-width // _COLUMNS) + 1, num_rows),
        32 * _WARPS,
        16 * 32,
        [
            buffers.collapsed, buffers.collapsed_squares, buffers.stream_squares, buffers.mixes, norm, scale, base,
            buffers.x, buffers.codes, buffers.scales, buffers.pre, buffers.post, buffers.comb, num_rows,
        ],
        dependent=True,
    )  # fmt: skip


__all__ = ["Streams", "finish", "mix"]
