"""The products of a few rows against the operators they compute, with ragged edges everywhere."""

from __future__ import annotations

import zlib

import pytest
import torch
from torch import Tensor

from deskfleet.engine.cuda import packing
from deskfleet.engine.cuda.native import products
from deskfleet.engine.ops import quant, reference
from deskfleet.engine.ops.quant import Fp4Matrix

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Products of codes are exact and sums are float32: what differs is a last place of bf16 now and then.
BF16 = 4e-3 if DEVICE.type == "cuda" else 5e-4
# Hopper's FP8 products keep some 13 bits beside the greatest of a group: now and then an activation gets another code,
# which is a sixteenth of it (docs/decisions/0021).
EXPERTS = 0.02 if DEVICE.type == "cuda" else 5e-4


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """The same numbers in every run, others in every test."""
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


def relative_error(mine: Tensor, expected: Tensor) -> float:
    mine, expected = mine.cpu().double(), expected.double()
    return float((mine - expected).norm() / expected.norm())


def fp4(*shape: int) -> Fp4Matrix:
    *batch, rows, columns = shape
    codes = torch.randint(0, 256, (*batch, rows, columns // 2), dtype=torch.uint8)
    return Fp4Matrix(codes, torch.randint(118, 125, (*batch, rows, columns // 32), dtype=torch.uint8))


def fp8(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    codes -= ((codes & 0x7F) == 0x7F).to(torch.uint8)  # the two codes that are no numbers
    return codes, torch.randint(111, 117, (rows // 32, columns // 32), dtype=torch.uint8)


def on_device(tiles: packing.Fp4Tiles | packing.Fp8Tiles) -> packing.Fp4Tiles | packing.Fp8Tiles:
    return type(tiles)(tiles.codes.to(DEVICE), tiles.scales.to(DEVICE), tiles.num_rows, tiles.num_columns)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = quant.quantize_fp8(x)
    return codes.to(DEVICE), packing.scale_words(scales.view(torch.uint8)).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Output memory in which an element that is not written shows."""
    return torch.full(shape, float("nan"), device=DEVICE).to(dtype)


@pytest.mark.parametrize(
    ("rows", "num_outputs", "width", "head"),
    [
        (1, 192, 320, 0),
        (9, 256, 1280, 128),
        (3, 5120, 2048, 0),
        (33, 256, 128, 256),
        (2, 8192, 256, 512),
        (64, 64, 96, 64),
    ],
)
def test_fp8_linear(rows: int, num_outputs: int, width: int, head: int) -> None:
    x = torch.randn(rows, width).to(torch.bfloat16)
    codes, scales = fp8(num_outputs, width)
    weight = on_device(packing.pack_fp8(codes, scales))
    angle = torch.rand(rows, min(head, 64) // 2 or 1) * 9
    rope = angle.cos(), angle.sin()
    out = poisoned(rows, num_outputs)
    turn = (rope[0].to(DEVICE), rope[1].to(DEVICE))
    products.fp8_linear(*quantized(x), weight, out, rope=turn, rope_head=head)
    expected = reference.quantized_linear(x, quant.dequantize_fp8_weight(codes, scales))
    if head:
        heads = expected.view(rows, -1, head)
        expected = reference.apply_rope(heads, rope[0][:, None], rope[1][:, None]).flatten(1)
    assert relative_error(out, expected) < BF16


def test_fp8_output() -> None:
    x = torch.randn(11, 320).to(torch.bfloat16)
    codes, scales = fp8(192, 320)
    out = torch.full((11, 192), 0x7F, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    out_scales = torch.zeros(11, 2, dtype=torch.int32, device=DEVICE)
    products.fp8_linear(*quantized(x), on_device(packing.pack_fp8(codes, scales)), out, out_scales=out_scales)
    exact = reference.quantized_linear(x, quant.dequantize_fp8_weight(codes, scales))
    scale = torch.exp2(out_scales.cpu().view(torch.uint8)[:, :6].float() - 127).repeat_interleave(32, 1)
    assert relative_error(out.float().cpu() * scale, reference.fake_quant_fp8(exact)) < 0.01


@pytest.mark.parametrize(
    ("rows", "groups", "rank", "width"),
    [(1, 2, 128, 512), (2, 2, 64, 256), (4, 1, 64, 128), (10, 3, 64, 192)],
)
def test_grouped_linear(rows: int, groups: int, rank: int, width: int) -> None:
    x = (torch.randn(rows, groups * width) * 3e-4).to(torch.bfloat16)
    codes, scales = fp8(groups * rank, width)
    codes[::3] &= 0x87  # numbers that E4M3 holds without an exponent of their own
    out = torch.full((rows, groups * rank), 0x7F, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    out_scales = torch.zeros(rows, -(-groups * rank // 128), dtype=torch.int32, device=DEVICE)
    weight = on_device(packing.pack_fp8(codes, scales, paired=True))
    products.grouped_linear(x.to(DEVICE), weight, out, out_scales, groups=groups)
    matrix = quant.dequantize_fp8_weight(codes, scales).unflatten(0, (groups, rank))
    exact = reference.grouped_linear(x.unflatten(1, (groups, -1)), matrix).flatten(1)
    words = out_scales.cpu().view(torch.uint8)[:, : groups * rank // 32]
    mine = out.float().cpu() * torch.exp2(words.float() - 127).repeat_interleave(32, 1)
    assert relative_error(mine, reference.fake_quant_fp8(exact)) < 0.01


@pytest.mark.parametrize(("rows", "num_outputs", "width"), [(1, 384, 1280), (17, 72, 64), (5, 33, 512)])
def test_bf16_linear(rows: int, num_outputs: int, width: int) -> None:
    x, weight = (
        torch.randn(rows, width).to(torch.bfloat16),
        torch.randn(num_outputs, width).to(torch.bfloat16),
    )
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -num_outputs % 64))
    tiles = padded.view(-1, 64, width // 64, 64).transpose(1, 2).contiguous()
    out = poisoned(rows, num_outputs, dtype=torch.float32)
    products.bf16_linear(x.to(DEVICE), tiles.to(DEVICE), out)
    assert relative_error(out, x.double() @ weight.double().T) < 1e-6


@pytest.mark.parametrize(
    ("rows", "width", "gates", "num_experts", "num_chosen", "members"),
    [(1, 384, 64, 8, 6, 8), (3, 640, 192, 8, 3, 8), (21, 128, 96, 3, 2, 8), (40, 128, 64, 2, 2, 16)],
    ids=["one row", "ragged width", "many items of an expert", "16 pairs an item"],
)
def test_experts(rows: int, width: int, gates: int, num_experts: int, num_chosen: int, members: int) -> None:
    limit = 10.0
    w13, w2 = fp4(num_experts, 2 * gates, width), fp4(num_experts, width, gates)
    (codes13, scales13), (codes2, scales2) = fp8(2 * gates, width), fp8(width, gates)
    pad = -gates % 64  # as the loader does: gates and up values of zero fill a tile
    x = torch.randn(rows, width).to(torch.bfloat16)
    chosen = torch.stack([torch.randperm(num_experts)[:num_chosen] for _ in range(rows)])
    weights = torch.rand(rows, num_chosen)
    items, pairs = [], []
    for expert in reversed(range(num_experts)):
        own = (chosen.flatten() == expert).nonzero().flatten().tolist()
        for first in range(0, len(own), members):
            part = own[first : first + members]
            items.append((expert, len(part)))
            pairs.append(part + [10**8] * (members - len(part)))  # whoever follows these is lost
    most = len(items) + 2
    items += [(10**8, -5)] * 2
    pairs += [[10**8] * members] * 2
    work = products.Items(
        torch.tensor(items, dtype=torch.int32, device=DEVICE),
        torch.tensor([most - 2], dtype=torch.int32, device=DEVICE),
        torch.tensor(pairs, dtype=torch.int32, device=DEVICE),
    )

    def wide(tensor: Tensor, unit: int = 1) -> Tensor:
        """Both halves of w1 over w3 padded to whole tiles."""
        half = tensor.shape[-2] // 2
        parts = tensor[..., :half, :], tensor[..., half:, :]
        return torch.cat([torch.nn.functional.pad(p, (0, 0, 0, pad // unit)) for p in parts], -2)

    f = gates + pad
    packed13 = packing.pack_fp4(Fp4Matrix(wide(w13.codes), wide(w13.scales)), gated=True)
    packed2 = packing.pack_fp4(
        Fp4Matrix(
            torch.nn.functional.pad(w2.codes, (0, pad // 2)),
            torch.nn.functional.pad(w2.scales, (0, pad // 32)),
        )
    )
    shared13 = packing.pack_fp8(wide(codes13), wide(scales13, 32), gated=True)
    shared2 = packing.pack_fp8(
        torch.nn.functional.pad(codes2, (0, pad)), torch.nn.functional.pad(scales2, (0, pad // 32))
    )

    def buffers(count: int) -> tuple[Tensor, Tensor]:
        codes = torch.full((count, f), 0x7F, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
        return codes, torch.zeros(count, -(-f // 128), dtype=torch.int32, device=DEVICE)

    activated, shared_activated = buffers(rows * num_chosen), buffers(rows)
    out, shared_out = poisoned(rows * num_chosen, width), poisoned(rows, width)
    products.expert_up(
        *quantized(x), on_device(packed13), on_device(shared13), work, weights.to(DEVICE), activated, shared_activated,
        num_chosen=num_chosen, limit=limit,
    )  # fmt: skip
    products.expert_down(
        activated, on_device(packed2), shared_activated, on_device(shared2), work, out, shared_out
    )

    expected = torch.zeros(rows, num_chosen, width, dtype=torch.float64)
    for expert in range(num_experts):
        gate, up = reference.quantized_linear(x, w13[expert].decode()).chunk(2, -1)
        for row, place in (chosen == expert).nonzero().tolist():
            value = reference.expert_activation(
                gate[row : row + 1], up[row : row + 1], limit, weights[row, place : place + 1]
            )
            expected[row, place] = reference.quantized_linear(value, w2[expert].decode())[0].double()
    assert relative_error(out.view(rows, num_chosen, -1), expected) < EXPERTS
    matrices = quant.dequantize_fp8_weight(codes13, scales13), quant.dequantize_fp8_weight(codes2, scales2)
    assert relative_error(shared_out, reference.shared_expert(x, *matrices, limit=limit)) < EXPERTS
