"""Residual streams between two sub-layers (spec §5.1, §5.2). Owns their buffers and how they start, and two kernels for
Triton's interpreter, in whose place a GPU runs those of native/.

    mix_kernel     expand a sub-layer's output into the stream, and in the same pass what the next one needs of it:
                   the collapsed row, its mean square, the raw mixes
    start_kernel   the streams at the first layer
    finish_kernel  norm and FP8 quantisation of the collapsed row; beside it, the Sinkhorn iterations in registers

The stream is bf16, so a float32 mix weight taken apart into two bf16 numbers (16 bits of its mantissa) gives products
that are exact, added in float32 by the tensor cores: the mixes differ from the reference's by about 1e-6 relative.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda.native import streams
from deskfleet.engine.cuda.tiles import fp8_codes, fp8_scale, load_parts, to_bf16

BLOCK_ROWS = 16
SLICE = 64  # columns of the model width that one program takes, of every copy
_COPIES = 4
_MIXES = 24
_START_COLUMNS = 1024  # that one program takes
_FINISH_COLUMNS = 1024  # at most, that one program takes


@triton.jit
def start_kernel(
    rows,  # bf16 or float32 [T, M]
    text,  # int32 [T], where HAS_IMAGES: 0 for rows that are taken from `images`
    images,  # bf16 [T, M]
    stream,  # bf16 [T, 4, M] out
    pre,  # float32 [T, 4] out
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_IMAGES: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program: BLOCK columns of one row, which every copy begins as; a pre mix that reads copy 0 alone."""
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < M
    value = tl.load(rows + row * M + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_IMAGES:
        is_image = tl.load(text + row) == 0
        image = tl.load(images + row * M + column, mask=inside & is_image, other=0.0).to(tl.float32)
        value = tl.where(is_image, image, value)
    value = to_bf16(value, BIT_OPS)
    for copy in tl.static_range(4):
        tl.store(stream + (row * 4 + copy) * M + column, value, mask=inside)
    if tl.program_id(0) == 0:
        number = tl.arange(0, 4)
        tl.store(pre + row * 4 + number, tl.where(number == 0, 1.0, 0.0))


@triton.jit(do_not_specialize=["tap_stride", "num_rows"])
def mix_kernel(
    output,  # bf16 [T * PARTS, M]: the sub-layer's output; of experts, one row a pair; SUMS > 1: float32 [SUMS, T, M]
    shared,  # bf16 [T, M]: the shared expert's, where HAS_SHARED
    stream,  # bf16 [T, 4, M], changed in place
    post,  # float32 [T, 4]: of the sub-layer that made `output`
    comb,  # float32 [T, 4, 4]
    pre,  # float32 [T, 4]: how the stream collapses into the next sub-layer
    weight,  # bf16 [M/64, 4, 3, 2, 2, 32, 8] (packing.pack_mixes)
    collapsed,  # bf16 [T, M] out
    collapsed_squares,  # float32 [M/64, T] out
    stream_squares,  # float32 [M/64, T] out
    mixes,  # float32 [M/64, T, 24] out
    taps,  # bf16 [T, tap stride] out, where HAS_TAP: the mean over copies
    tap_stride,
    num_rows,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    SUMS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    EXPAND: tl.constexpr,
    MIX: tl.constexpr,
    HAS_TAP: tl.constexpr,
    BM: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program: 64 columns of all copies of BM rows (oracle: hc_expand, hc_collapse, hc_mixes before its sums)."""
    slice_ = tl.program_id(0)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    live = rows < num_rows
    column = tl.arange(0, 64)
    at = slice_ * 64 + column[:, None]
    if MIX:  # on their way before anything that waits
        w0 = load_mix_weight(weight, slice_, 0)
        w1 = load_mix_weight(weight, slice_, 1)
        w2 = load_mix_weight(weight, slice_, 2)
        w3 = load_mix_weight(weight, slice_, 3)
    stream_at = stream + rows[None, :] * (4 * M) + at
    mask = live[None, :]
    x0 = tl.load(stream_at, mask=mask, other=0.0).to(tl.float32)
    x1 = tl.load(stream_at + M, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(stream_at + 2 * M, mask=mask, other=0.0).to(tl.float32)
    x3 = tl.load(stream_at + 3 * M, mask=mask, other=0.0).to(tl.float32)
    if EXPAND:
        y = tl.zeros((64, BM), tl.float32)
        for part in tl.static_range(PARTS):
            part_at = output + (rows.to(tl.int64) * PARTS + part)[None, :] * M + at
            y += load_parts(part_at, num_rows.to(tl.int64) * M, mask, SUMS, BIT_OPS)
        if HAS_SHARED:
            y += tl.load(shared + rows[None, :] * M + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_SHARED or PARTS > 1:
            y = to_bf16(y, BIT_OPS).to(tl.float32)
        y0 = expanded(y, x0, x1, x2, x3, post, comb, rows, live, 0, BIT_OPS)
        y1 = expanded(y, x0, x1, x2, x3, post, comb, rows, live, 1, BIT_OPS)
        y2 = expanded(y, x0, x1, x2, x3, post, comb, rows, live, 2, BIT_OPS)
        y3 = expanded(y, x0, x1, x2, x3, post, comb, rows, live, 3, BIT_OPS)
        tl.store(stream_at, y0, mask=mask)
        tl.store(stream_at + M, y1, mask=mask)
        tl.store(stream_at + 2 * M, y2, mask=mask)
        tl.store(stream_at + 3 * M, y3, mask=mask)
        x0, x1, x2, x3 = y0.to(tl.float32), y1.to(tl.float32), y2.to(tl.float32), y3.to(tl.float32)
    if HAS_TAP:
        mean = to_bf16((x0 + x1 + x2 + x3) * 0.25, BIT_OPS)
        tl.store(taps + rows[None, :] * tap_stride + at, mean, mask=mask)
    if MIX:
        pre_at = pre + rows * 4
        p0 = tl.load(pre_at, mask=live, other=0.0)[None, :]
        p1 = tl.load(pre_at + 1, mask=live, other=0.0)[None, :]
        p2 = tl.load(pre_at + 2, mask=live, other=0.0)[None, :]
        p3 = tl.load(pre_at + 3, mask=live, other=0.0)[None, :]
        into = to_bf16(p0 * x0 + p1 * x1 + p2 * x2 + p3 * x3, BIT_OPS)
        tl.store(collapsed + rows[None, :] * M + at, into, mask=mask)
        into = into.to(tl.float32)
        tl.store(collapsed_squares + slice_ * num_rows + rows, tl.sum(into * into, 0), mask=live)
        squares = tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, 0)
        tl.store(stream_squares + slice_ * num_rows + rows, squares, mask=live)
        acc = tl.zeros((64, BM), tl.float32)
        acc = mixed(acc, x0, w0, BIT_OPS)
        acc = mixed(acc, x1, w1, BIT_OPS)
        acc = mixed(acc, x2, w2, BIT_OPS)
        acc = mixed(acc, x3, w3, BIT_OPS)
        both = tl.sum(tl.reshape(acc, (2, 32, BM)), 0)  # the two parts of each weight
        number = tl.arange(0, 32)
        mix_at = mixes + (slice_ * num_rows + rows)[None, :] * 24 + number[:, None]
        tl.store(mix_at, both, mask=mask & (number < 24)[:, None])


@triton.jit
def expanded(y, x0, x1, x2, x3, post, comb, rows, live, TARGET: tl.constexpr, BIT_OPS: tl.constexpr):
    """post[TARGET]·y + Σ_j comb[j, TARGET]·x_j -> bf16 [64, BM]."""
    comb_at = comb + rows * 16 + TARGET
    total = tl.load(comb_at, mask=live, other=0.0)[None, :] * x0
    total += tl.load(comb_at + 4, mask=live, other=0.0)[None, :] * x1
    total += tl.load(comb_at + 8, mask=live, other=0.0)[None, :] * x2
    total += tl.load(comb_at + 12, mask=live, other=0.0)[None, :] * x3
    weight = tl.load(post + rows * 4 + TARGET, mask=live, other=0.0)[None, :]
    return to_bf16(weight * y + total, BIT_OPS)


@triton.jit
def load_mix_weight(weight, slice_, COPY: tl.constexpr):
    """bf16 [64, 64]: rows 0-23 the upper parts of the weights of one copy, 32-55 the lower ones, the others zero."""
    number = tl.arange(0, 64)
    kept = (number % 32) < 24
    row = number // 32 * 24 + number % 32
    row_at = row // 16 * 1024 + row % 8 * 32 + row % 16 // 8 * 2
    column = tl.arange(0, 64)
    pair = column % 8 // 2
    column_at = column // 32 * 512 + pair // 2 * 256 + column % 32 // 8 * 8 + pair % 2 * 4 + column % 2
    at = weight + (slice_ * 4 + COPY) * 3072 + row_at[:, None] + column_at[None, :]
    return tl.load(at, mask=kept[:, None] & (column >= 0)[None, :], other=0.0)


@triton.jit
def mixed(acc, x, weight, BIT_OPS: tl.constexpr):
    """acc [64, BM] += mix weights of one copy times x [64, BM], whose values are bf16."""
    if BIT_OPS:
        return acc + tl.dot(weight.to(tl.float32), x)
    return tl.dot(weight, x.to(tl.bfloat16), acc)


@triton.jit(do_not_specialize=["num_rows"])
def finish_kernel(
    collapsed,  # bf16 [T, M]
    collapsed_squares,  # float32 [slices, T]
    stream_squares,
    mixes,  # float32 [slices, T, 24]
    norm,  # float32 [M]
    scale,  # float32 [3]
    base,  # float32 [24]
    x,  # bf16 [T, M] out: the normed row
    codes,  # float8e4nv [T, M] out
    code_scales,  # uint8 [T, M/32] out
    pre,  # float32 [T, 4] out
    post,  # float32 [T, 4] out
    comb,  # float32 [T, 4, 4] out
    num_rows,
    M: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_SLICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    NORM_EPS: tl.constexpr,
    EPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """Programs 0..M/COLUMNS - 1 of a row: its norm and codes (rms_norm, quantize_fp8). The last: hc_split."""
    row = tl.program_id(1)
    part = tl.program_id(0)
    slices = tl.arange(0, BLOCK_SLICES)
    inside = slices < SLICES
    if part < M // COLUMNS:
        squares = tl.load(collapsed_squares + slices * num_rows + row, mask=inside, other=0.0)
        factor = tl.rsqrt(tl.sum(squares, 0) / M + NORM_EPS)
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        value = tl.load(collapsed + row * M + column).to(tl.float32) * factor
        value = to_bf16(tl.load(norm + column) * value, BIT_OPS)
        tl.store(x + row * M + column, value)
        groups = tl.reshape(value.to(tl.float32), (COLUMNS // 32, 32))
        bits = fp8_scale(tl.max(tl.abs(groups), 1))
        tl.store(codes + row * M + column, tl.reshape(fp8_codes(groups, bits[:, None], BIT_OPS), (COLUMNS,)))
        group = part * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
        tl.store(code_scales + row * (M // 32) + group, (bits >> 23).to(tl.uint8))
    else:
        squares = tl.load(stream_squares + slices * num_rows + row, mask=inside, other=0.0)
        factor = tl.rsqrt(tl.sum(squares, 0) / (4 * M) + NORM_EPS)
        number = tl.arange(0, 32)
        mix_at = mixes + (slices * num_rows + row)[:, None] * 24 + number[None, :]
        raw = tl.sum(tl.load(mix_at, mask=inside[:, None] & (number < 24)[None, :], other=0.0), 0) * factor
        kind = tl.where(number < 4, 0, tl.where(number < 8, 1, 2))
        raw = raw * tl.load(scale + kind) + tl.load(base + number, mask=number < 24, other=0.0)
        gate = tl.sigmoid(raw)
        tl.store(pre + row * 4 + number, gate + EPS, mask=number < 4)
        tl.store(post + row * 4 + number - 4, 2.0 * gate, mask=kind == 1)
        # Every thread has all sixteen elements: none of the iterations waits for another thread.
        r0, r1 = comb_row(raw, number, 0, EPS), comb_row(raw, number, 1, EPS)
        r2, r3 = comb_row(raw, number, 2, EPS), comb_row(raw, number, 3, EPS)
        r0, r1, r2, r3 = columns_divided(r0, r1, r2, r3, EPS)
        for _ in range(ITERATIONS - 1):
            r0, r1, r2, r3 = divided(r0, EPS), divided(r1, EPS), divided(r2, EPS), divided(r3, EPS)
            r0, r1, r2, r3 = columns_divided(r0, r1, r2, r3, EPS)
        store_row(comb + row * 16, r0)
        store_row(comb + row * 16 + 4, r1)
        store_row(comb + row * 16 + 8, r2)
        store_row(comb + row * 16 + 12, r3)


@triton.jit
def element(values, number, INDEX: tl.constexpr):
    """Element INDEX of a vector that `number` counts."""
    return tl.sum(tl.where(number == INDEX, values, 0.0), 0)


@triton.jit
def comb_row(raw, number, ROW: tl.constexpr, EPS: tl.constexpr):
    """Row ROW of comb before the iterations, four numbers: a softmax of elements 8.. of raw [32], and EPS."""
    a, b = element(raw, number, 8 + 4 * ROW), element(raw, number, 9 + 4 * ROW)
    c, d = element(raw, number, 10 + 4 * ROW), element(raw, number, 11 + 4 * ROW)
    greatest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = divided(
        (tl.exp(a - greatest), tl.exp(b - greatest), tl.exp(c - greatest), tl.exp(d - greatest)), 0.0
    )
    return a + EPS, b + EPS, c + EPS, d + EPS


@triton.jit
def divided(row, EPS: tl.constexpr):
    """Four numbers over their sum and EPS."""
    a, b, c, d = row
    inverse = 1.0 / (((a + b) + (c + d)) + EPS)
    return a * inverse, b * inverse, c * inverse, d * inverse


@triton.jit
def columns_divided(r0, r1, r2, r3, EPS: tl.constexpr):
    """Four rows of four, every column divided by its sum and EPS."""
    a0, b0, c0, d0 = r0
    a1, b1, c1, d1 = r1
    a2, b2, c2, d2 = r2
    a3, b3, c3, d3 = r3
    a0, a1, a2, a3 = divided((a0, a1, a2, a3), EPS)
    b0, b1, b2, b3 = divided((b0, b1, b2, b3), EPS)
    c0, c1, c2, c3 = divided((c0, c1, c2, c3), EPS)
    d0, d1, d2, d3 = divided((d0, d1, d2, d3), EPS)
    return (a0, b0, c0, d0), (a1, b1, c1, d1), (a2, b2, c2, d2), (a3, b3, c3, d3)


@triton.jit
def store_row(at, row):
    """Four numbers at `at`."""
    a, b, c, d = row
    tl.store(at, a)
    tl.store(at + 1, b)
    tl.store(at + 2, c)
    tl.store(at + 3, d)


class StreamBuffers:
    """The stream of one batch size and what the kernels leave for each other. `mix` reads `pre`, `post` and
    `comb` before `finish` replaces them: a sub-layer's pre mix is used by the one after it."""

    def __init__(self, width: int, num_rows: int, device: torch.device | str) -> None:
        slices = width // SLICE

        def floats(*size: int) -> Tensor:
            return torch.zeros(size, device=device)

        self.width = width
        self.num_rows = num_rows
        self.stream = torch.zeros(num_rows, _COPIES, width, dtype=torch.bfloat16, device=device)
        self.collapsed = torch.zeros(num_rows, width, dtype=torch.bfloat16, device=device)
        self.collapsed_squares = floats(slices, num_rows)
        self.stream_squares = floats(slices, num_rows)
        self.mixes = floats(slices, num_rows, _MIXES)
        self.x = torch.zeros(num_rows, width, dtype=torch.bfloat16, device=device)
        self.codes = torch.zeros(num_rows, width, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        self.scales = torch.zeros(num_rows, width // 128, dtype=torch.int32, device=device)
        self.pre = floats(num_rows, _COPIES)
        self.post = floats(num_rows, _COPIES)
        self.comb = floats(num_rows, _COPIES, _COPIES)


def start(
    buffers: StreamBuffers, rows: Tensor, *, bit_ops: bool, images: tuple[Tensor, Tensor] | None = None
) -> None:
    """The streams of rows [T, M], bf16 or float32. `images`: int32 [T], 0 for rows of images, and bf16 [T, M], which
    these are."""
    text, others = images or (rows, rows)
    block = min(triton.next_power_of_2(buffers.width), _START_COLUMNS)
    start_kernel[(triton.cdiv(buffers.width, block), buffers.num_rows)](
        rows, text, others, buffers.stream, buffers.pre, M=buffers.width, BLOCK=block, HAS_IMAGES=images is not None,
        BIT_OPS=bit_ops, num_warps=4,
    )  # fmt: skip


def mix(
    buffers: StreamBuffers,
    weight: Tensor | None,
    *,
    bit_ops: bool,
    output: Tensor | None = None,
    shared: Tensor | None = None,
    parts: int = 1,
    taps: Tensor | None = None,
) -> None:
    """Expand `output` (`parts` rows a row, and `shared`) into the stream, then mix by `weight`; either may be None.

    `output` is bf16 [T * parts, M], or the parts of a split sum float32 [splits, T, M].
    """
    width, stream = buffers.width, buffers.stream
    if not bit_ops:
        streams.mix(buffers, weight, output, shared, taps, parts=parts)
        return
    mix_kernel[(width // SLICE, triton.cdiv(buffers.num_rows, BLOCK_ROWS))](
        stream if output is None else output,
        stream if shared is None else shared,
        stream,
        buffers.post,
        buffers.comb,
        buffers.pre,
        stream if weight is None else weight,
        buffers.collapsed,
        buffers.collapsed_squares,
        buffers.stream_squares,
        buffers.mixes,
        stream if taps is None else taps,
        0 if taps is None else taps.stride(0),
        buffers.num_rows,
        M=width,
        PARTS=parts,
        SUMS=len(output) if output is not None and output.dim() == 3 else 1,
        HAS_SHARED=shared is not None,
        EXPAND=output is not None,
        MIX=weight is not None,
        HAS_TAP=taps is not None,
        BM=BLOCK_ROWS,
        BIT_OPS=bit_ops,
        num_warps=4,
    )


def finish(
    buffers: StreamBuffers,
    norm: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
    bit_ops: bool,
) -> None:
    """x, codes and scales of the collapsed row; pre (for the sub-layer after this one), post and comb."""
    if not bit_ops:
        streams.finish(buffers, norm, scale, base, iterations=iterations, norm_eps=norm_eps, eps=eps)
        return
    width = buffers.width
    slices = width // SLICE
    columns = min(width & -width, _FINISH_COLUMNS)  # the greatest power of two that divides the width
    finish_kernel[(width // columns + 1, buffers.num_rows)](
        buffers.collapsed,
        buffers.collapsed_squares,
        buffers.stream_squares,
        buffers.mixes,
        norm,
        scale,
        base,
        buffers.x,
        buffers.codes,
        buffers.scales.view(torch.uint8),
        buffers.pre,
        buffers.post,
        buffers.comb,
        buffers.num_rows,
        M=width,
        SLICES=slices,
        BLOCK_SLICES=triton.next_power_of_2(slices),
        COLUMNS=columns,
        ITERATIONS=iterations,
        NORM_EPS=norm_eps,
        EPS=eps,
        BIT_OPS=bit_ops,
        num_warps=1,
    )


__all__ = [
    "BLOCK_ROWS",
    "SLICE",
    "StreamBuffers",
    "finish",
    "finish_kernel",
    "mix",
    "mix_kernel",
    "start",
    "start_kernel",
]
