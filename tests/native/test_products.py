"""The products of a few rows against the operators they compute, with ragged edges everywhere."""

from __future__ import annotations

import zlib

import pytest
import torch
from torch import Tensor

from deskfleet.engine.cuda import packing
from deskfleet.engine.cuda.native import products
from deskfleet.engine.ops import quant, reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Products of codes are exact and sums are float32: what differs is a last place of bf16 now and then.
BF16 = 4e-3 if DEVICE.type == "cuda" else 5e-4


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """The same numbers in every run, others in every test."""
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


def relative_error(mine: Tensor, expected: Tensor) -> float:
    mine, expected = mine.cpu().double(), expected.double()
    return float((mine - expected).norm() / expected.norm())


def fp8(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    codes -= ((codes & 0x7F) == 0x7F).to(torch.uint8)  # the two codes that are no numbers
    return codes, torch.randint(111, 117, (rows // 32, columns // 32), dtype=torch.uint8)


def on_device(
    tiles: packing.Fp4Tiles | packing.Fp8Tiles, *, exact: bool = False
) -> packing.Fp4Tiles | packing.Fp8Tiles:
    codes, scales = tiles.codes.to(DEVICE), tiles.scales.to(DEVICE)
    return type(tiles)(codes, scales, tiles.num_rows, tiles.num_columns, exact)


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
