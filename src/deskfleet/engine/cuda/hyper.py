"""Residual streams between two sub-layers (spec §5.1, §5.2). Owns two kernels and the splitting of their weights.

    mix_kernel     expand a sub-layer's output into the stream, and in the same pass what the next one needs of it:
                   the collapsed row, its mean square, the raw mixes
    finish_kernel  norm and FP8 quantisation of the collapsed row; beside it, the Sinkhorn iterations in registers

The stream is bf16, so a float32 mix weight taken apart into two bf16 numbers (16 bits of its mantissa) gives products
that are exact, added in float32 by the tensor cores: the mixes differ from the reference's by about 1e-6 relative.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda.tiles import fp8_codes, fp8_scale, to_bf16

BLOCK_ROWS = 16
SLICE = 64  # columns of the model width that one program takes, of every copy
_COPIES = 4
_MIXES = 24
_FINISH_COLUMNS = 1024


@triton.jit(do_not_specialize=["tap_stride", "num_rows"])
def mix_kernel(
    output,  # bf16 [T * PARTS, M]: the sub-layer's output; of experts, one row a pair
    shared,  # bf16 [T, M]: the shared expert's, where HAS_SHARED
    stream,  # bf16 [T, 4, M], changed in place
    post,  # float32 [T, 4]: of the sub-layer that made `output`
    comb,  # float32 [T, 4, 4]
    pre,  # float32 [T, 4]: how the stream collapses into the next sub-layer
    weight,  # bf16 [M/64, 4, 48, 64] (split_mix_weight)
    collapsed,  # bf16 [T, M] out
    collapsed_squares,  # float32 [M/64, T] out
    stream_squares,  # float32 [M/64, T] out
    mixes,  # float32 [M/64, T, 24] out
    taps,  # bf16 [T, tap stride] out, where HAS_TAP: the mean over copies
    tap_stride,
    num_rows,
    M: tl.constexpr,
    PARTS: tl.constexpr,
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
            y += tl.load(part_at, mask=mask, other=0.0).to(tl.float32)
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
        acc = mixed(acc, x0, weight, slice_, 0, BIT_OPS)
        acc = mixed(acc, x1, weight, slice_, 1, BIT_OPS)
        acc = mixed(acc, x2, weight, slice_, 2, BIT_OPS)
        acc = mixed(acc, x3, weight, slice_, 3, BIT_OPS)
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
def mixed(acc, x, weight, slice_, COPY: tl.constexpr, BIT_OPS: tl.constexpr):
    """acc [64, BM] += both parts of the mix weights of one copy times x [64, BM], whose values are bf16."""
    number = tl.arange(0, 64)
    kept = (number % 32) < 24
    at = weight + (slice_ * 4 + COPY) * 3072 + (number // 32 * 24 + number % 32)[:, None] * 64
    part = tl.load(at + tl.arange(0, 64)[None, :], mask=kept[:, None] & (number >= 0)[None, :], other=0.0)
    if BIT_OPS:
        return acc + tl.dot(part.to(tl.float32), x)
    return tl.dot(part, x.to(tl.bfloat16), acc)


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
    ITERATIONS: tl.constexpr,
    NORM_EPS: tl.constexpr,
    EPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """Programs 0..M/1024 - 1 of a row: its norm and codes (rms_norm, quantize_fp8). The last: hc_split."""
    row = tl.program_id(1)
    part = tl.program_id(0)
    slices = tl.arange(0, BLOCK_SLICES)
    inside = slices < SLICES
    if part < M // 1024:
        squares = tl.load(collapsed_squares + slices * num_rows + row, mask=inside, other=0.0)
        factor = tl.rsqrt(tl.sum(squares, 0) / M + NORM_EPS)
        column = part * 1024 + tl.arange(0, 1024)
        value = tl.load(collapsed + row * M + column).to(tl.float32) * factor
        value = to_bf16(tl.load(norm + column) * value, BIT_OPS)
        tl.store(x + row * M + column, value)
        groups = tl.reshape(value.to(tl.float32), (32, 32))
        bits = fp8_scale(tl.max(tl.abs(groups), 1))
        tl.store(codes + row * M + column, tl.reshape(fp8_codes(groups, bits[:, None], BIT_OPS), (1024,)))
        tl.store(code_scales + row * (M // 32) + part * 32 + tl.arange(0, 32), (bits >> 23).to(tl.uint8))
    else:
        squares = tl.load(stream_squares + slices * num_rows + row, mask=inside, other=0.0)
        factor = tl.rsqrt(tl.sum(squares, 0) / (4 * M) + NORM_EPS)
        mix_at = mixes + (slices * num_rows + row)[:, None] * 24
        four = tl.arange(0, 4)
        pre_mix = tl.sum(tl.load(mix_at + four[None, :], mask=inside[:, None], other=0.0), 0) * factor
        post_mix = tl.sum(tl.load(mix_at + 4 + four[None, :], mask=inside[:, None], other=0.0), 0) * factor
        sixteen = tl.arange(0, 16)
        comb_mix = tl.sum(tl.load(mix_at + 8 + sixteen[None, :], mask=inside[:, None], other=0.0), 0) * factor
        pre_value = tl.sigmoid(pre_mix * tl.load(scale) + tl.load(base + four)) + EPS
        post_value = 2.0 * tl.sigmoid(post_mix * tl.load(scale + 1) + tl.load(base + 4 + four))
        tl.store(pre + row * 4 + four, pre_value)
        tl.store(post + row * 4 + four, post_value)
        c = tl.reshape(comb_mix * tl.load(scale + 2) + tl.load(base + 8 + sixteen), (4, 4))
        c = tl.exp(c - tl.max(c, 1)[:, None])
        c = c / tl.sum(c, 1)[:, None] + EPS
        c = c / (tl.sum(c, 0) + EPS)[None, :]
        for _ in range(ITERATIONS - 1):
            c = c / (tl.sum(c, 1) + EPS)[:, None]
            c = c / (tl.sum(c, 0) + EPS)[None, :]
        tl.store(comb + row * 16 + four[:, None] * 4 + four[None, :], c)


def split_mix_weight(weight: Tensor) -> Tensor:
    """float32 [24, 4·M] -> bf16 [M/64, 4, 48, 64]: the upper parts of all weights, then what they leave."""
    upper = weight.to(torch.bfloat16)
    lower = (weight - upper.to(torch.float32)).to(torch.bfloat16)
    both = torch.cat((upper, lower)).unflatten(1, (_COPIES, -1, SLICE))  # (48, 4, M/64, 64)
    packed: Tensor = both.permute(2, 1, 0, 3).contiguous()
    return packed


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
    """Expand `output` (`parts` rows a row, and `shared`) into the stream, then mix by `weight`; either may be None."""
    width, stream = buffers.width, buffers.stream
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
    width = buffers.width
    slices = width // SLICE
    finish_kernel[(width // _FINISH_COLUMNS + 1, buffers.num_rows)](
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
        ITERATIONS=iterations,
        NORM_EPS=norm_eps,
        EPS=eps,
        BIT_OPS=bit_ops,
        num_warps=4,
    )


__all__ = [
    "BLOCK_ROWS",
    "SLICE",
    "StreamBuffers",
    "finish",
    "finish_kernel",
    "mix",
    "mix_kernel",
    "split_mix_weight",
]
