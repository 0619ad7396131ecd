"""Residual streams by the kernels of hyper.cu, of many rows by those of chunks.cu. Owns which rows are many, and how
rows become warps. hyper.py says what they do."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from deskfleet.engine.cuda.native.where import kernel_for

_SLICE = 64
_WARPS = 4
_COLUMNS = 1024  # of a block that norms
_SHARED_ROWS = 128  # from here on blocks keep their rows over several slices
_MANY_ROWS = 1024  # from here on bytes take the time, not latencies
_CHUNK_ROWS, _CHUNK_WARPS = 64, 8  # of a block of many rows
_CHUNK_BLOCKS = 256  # that an H200 holds at a time, about


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
    if buffers.num_rows >= _SHARED_ROWS:
        mix_rows(buffers, weight, output, shared, taps, parts=parts)
        return
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
    if buffers.num_rows >= _MANY_ROWS:
        finish_rows(buffers, norm, scale, base, iterations=iterations, norm_eps=norm_eps, eps=eps)
        return
    width, num_rows = buffers.width, buffers.num_rows
    defines: dict[str, int | float] = {
        "FINISH": 1,
        "M": width,
        "SLICES": num_shares(width, num_rows),
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


def num_shares(width: int, num_rows: int) -> int:
    """Blocks that share the columns of some rows; each leaves its part of the mixes."""
    if num_rows < _SHARED_ROWS:
        return width // _SLICE
    row_blocks = -(-num_rows // _CHUNK_ROWS)
    return min(max(-(-_CHUNK_BLOCKS // row_blocks), 4), width // _SLICE)


def mix_rows(
    buffers: Streams, weight: Tensor | None, output: Tensor | None, shared: Tensor | None, taps: Tensor | None,
    *, parts: int, shares: int | None = None,
) -> None:  # fmt: skip
    """As hyper.mix. `finish_rows` is told the same `shares`, or none."""
    width, num_rows, stream = buffers.width, buffers.num_rows, buffers.stream
    floats = output is not None and output.dim() == 3
    defines = {
        "MIX": 1,
        "M": width,
        "NUM_PARTS": parts,
        "SUMS": len(output) if floats and output is not None else 1,
        "FLOATS": floats,
        "HAS_SHARED": shared is not None,
        "EXPANDS": output is not None,
        "MIXES": weight is not None,
        "HAS_TAP": taps is not None,
    }
    kernel_for(stream, "chunks.cu", "mix_rows", defines).launch(
        (shares or num_shares(width, num_rows), -(-num_rows // _CHUNK_ROWS)),
        32 * _CHUNK_WARPS,
        (0 if weight is None else 2 * 4 * 48 * 128) + _CHUNK_ROWS * 7 * 16,
        [
            output, shared, stream, buffers.post, buffers.comb, buffers.pre, weight, buffers.collapsed,
            buffers.collapsed_squares, buffers.stream_squares, buffers.mixes, taps,
            0 if taps is None else taps.stride(0), num_rows,
        ],
    )  # fmt: skip


def finish_rows(
    buffers: Streams,
    norm: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
    shares: int | None = None,
) -> None:
    """As hyper.finish, after `mix_rows`."""
    width, num_rows = buffers.width, buffers.num_rows
    each = 1 if num_rows <= 2048 else 2 if num_rows <= 4096 else 4
    defines: dict[str, int | float] = {
        "FINISH": 1,
        "M": width,
        "SLICES": shares or num_shares(width, num_rows),
        "ROWS_EACH": each,
        "ITERATIONS": iterations,
        "NORM_EPS": norm_eps,
        "MIX_EPS": eps,
    }
    kernel_for(norm, "chunks.cu", "finish_rows", defines).launch(
        -(-num_rows // (each * _CHUNK_WARPS)),
        32 * (_CHUNK_WARPS + 1),
        0,
        [
            buffers.collapsed, buffers.collapsed_squares, buffers.stream_squares, buffers.mixes, norm, scale, base,
            buffers.x, buffers.codes, buffers.scales, buffers.pre, buffers.post, buffers.comb, num_rows,
        ],
    )  # fmt: skip


__all__ = ["Streams", "finish", "finish_rows", "mix", "mix_rows", "num_shares"]
