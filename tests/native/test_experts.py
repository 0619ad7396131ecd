"""Routed and shared experts of a few rows against the operators they compute, shared out among few blocks and many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deskfleet.engine.cuda import packing
from deskfleet.engine.cuda.native import mixture, products
from deskfleet.engine.ops import quant, reference
from deskfleet.engine.ops.quant import Fp4Matrix
from tests.native.test_products import DEVICE, fp8, on_device, poisoned, quantized, relative_error, seeded

__all__ = ["seeded"]

# Hopper's FP8 products keep some 13 bits beside the greatest of a group: now and then an activation gets another code,
# which is a sixteenth of it (docs/decisions/0021).
FP8 = 0.02 if DEVICE.type == "cuda" else 5e-4
EXACT = 5e-4


def fp4(*shape: int) -> Fp4Matrix:
    *batch, rows, columns = shape
    codes = torch.randint(0, 256, (*batch, rows, columns // 2), dtype=torch.uint8)
    return Fp4Matrix(codes, torch.randint(118, 125, (*batch, rows, columns // 32), dtype=torch.uint8))


@pytest.mark.parametrize(
    ("rows", "width", "gates", "num_experts", "num_chosen", "members"),
    [
        (1, 384, 64, 8, 6, 8),
        (3, 640, 192, 8, 3, 8),
        (21, 128, 96, 3, 2, 8),
        (9, 640, 192, 8, 3, 8),
        (40, 128, 64, 2, 2, 16),
    ],
    ids=["one row", "ragged width", "many items of an expert", "more rows", "16 pairs an item"],
)
@pytest.mark.parametrize(
    ("processors", "shared_kib", "exact"),
    [(1, 227, False), (3, 227, False), (132, 227, False), (3, 99, False), (3, 227, True), (132, 227, True)],
)
def test_experts(
    rows: int, width: int, gates: int, num_experts: int, num_chosen: int, members: int, processors: int,
    shared_kib: int, exact: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of few processors a block has many units, of several items; of 132 one. Blocks with less memory have no ring."""
    monkeypatch.setattr(products, "num_processors", lambda device: processors)
    monkeypatch.setattr(mixture, "most_shared_bytes", lambda device: shared_kib << 10)
    has_ring = mixture.takes_ring(width, gates + -gates % 64, rows, members, DEVICE, exact=exact)
    assert has_ring == (rows > 8 and members == 8 and shared_kib > 99)
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
    work = mixture.Items(
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
    mixture.expert_up(
        *quantized(x), on_device(packed13, exact=exact), on_device(shared13, exact=exact), work, weights.to(DEVICE),
        activated, shared_activated, num_chosen=num_chosen, limit=limit,
    )  # fmt: skip
    mixture.expert_down(
        activated, on_device(packed2, exact=exact), shared_activated, on_device(shared2, exact=exact), work, out,
        shared_out,
    )  # fmt: skip

    expected = torch.zeros(rows, num_chosen, width, dtype=torch.float64)
    for expert in range(num_experts):
        gate, up = reference.quantized_linear(x, w13[expert].decode()).chunk(2, -1)
        for row, place in (chosen == expert).nonzero().tolist():
            value = reference.expert_activation(
                gate[row : row + 1], up[row : row + 1], limit, weights[row, place : place + 1]
            )
            expected[row, place] = reference.quantized_linear(value, w2[expert].decode())[0].double()
    most = EXACT if exact else FP8
    assert relative_error(out.view(rows, num_chosen, -1), expected) < most
    matrices = quant.dequantize_fp8_weight(codes13, scales13), quant.dequantize_fp8_weight(codes2, scales2)
    assert relative_error(shared_out, reference.shared_expert(x, *matrices, limit=limit)) < most
