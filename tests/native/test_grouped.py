"""Routed experts of many rows against the operators they compute: experts with no pair, one and many, in items of every
size, matrices whose tiles do not divide by the warpgroups, and a width that 128 does not divide."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deskfleet.engine.cuda import packing
from deskfleet.engine.cuda.native import grouped, products
from deskfleet.engine.cuda.native.grouped import Cut, Items
from deskfleet.engine.ops import quant, reference
from deskfleet.engine.ops.quant import Fp4Matrix

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Numbers are exact and sums float32: what differs is a last place of bf16 now and then, which may be another FP8 code.
BF16 = 4e-3 if DEVICE.type == "cuda" else 5e-4
LIMIT = 10.0
MISSING = 10**8  # whoever follows it is lost

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda" and not grouped.runs_on(DEVICE), reason="sm_90 only")


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """The same numbers in every run, others in every test."""
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


@dataclass(frozen=True)
class Layer:
    """Matrices of some experts: checkpoint and tiles of each."""

    w13: Fp4Matrix
    w2: Fp4Matrix
    up: packing.Fp4Tiles
    down: packing.Fp4Tiles

    @classmethod
    def make(cls, num_experts: int, width: int, expert_width: int, out_width: int) -> Layer:
        w13, w2 = fp4(num_experts, 2 * expert_width, width), fp4(num_experts, out_width, expert_width)
        return cls(w13, w2, on_device(packing.pack_fp4(w13, gated=True)), on_device(packing.pack_fp4(w2)))


def fp4(*shape: int) -> Fp4Matrix:
    *batch, rows, columns = shape
    codes = torch.randint(0, 256, (*batch, rows, columns // 2), dtype=torch.uint8)
    return Fp4Matrix(codes, torch.randint(118, 125, (*batch, rows, columns // 32), dtype=torch.uint8))


def on_device(tiles: packing.Fp4Tiles) -> packing.Fp4Tiles:
    return packing.Fp4Tiles(
        tiles.codes.to(DEVICE), tiles.scales.to(DEVICE), tiles.num_rows, tiles.num_columns
    )


def permuted(x: Tensor) -> Tensor:
    """Of every 32 columns the even ones, then the odd ones."""
    return x.unflatten(-1, (-1, 16, 2)).transpose(-1, -2).flatten(-3)


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)


def listed(chosen: Tensor, num_experts: int, most: int, size: int) -> Items:
    """Items of `size` pairs of the experts that are here, in places for `most`, and some that are nobody's."""
    items, pairs = [], []
    for expert in torch.randperm(num_experts).tolist():
        own = (chosen.flatten() == expert).nonzero().flatten().tolist()
        for first in range(0, len(own), size):
            part = own[first : first + size]
            items.append((expert, len(part)))
            pairs.append(part + [MISSING] * (most - len(part)))
    count = len(items)
    items += [(MISSING, 5)] * 2
    pairs += [[MISSING] * most] * 2
    return Items(
        torch.tensor(items, dtype=torch.int32, device=DEVICE),
        torch.tensor([count], dtype=torch.int32, device=DEVICE),
        torch.tensor(pairs, dtype=torch.int32, device=DEVICE),
    )


def run(
    layer: Layer, x: Tensor, chosen: Tensor, weights: Tensor, work: Items, cut: Cut
) -> tuple[Tensor, Tensor]:
    """What lies between the products, in its own order of columns, and the outputs, by pair."""
    rows, num_chosen = chosen.shape
    activated = poisoned(rows * num_chosen, layer.w2.codes.shape[-1] * 2)
    out = poisoned(rows * num_chosen, layer.down.num_rows)
    x_rows = permuted(quant.fake_quant_fp8(x)).to(DEVICE)
    grouped.grouped_up(
        x_rows, layer.up, work, weights.to(DEVICE), activated, cut, num_chosen=num_chosen, limit=LIMIT
    )
    grouped.grouped_down(activated, layer.down, work, out, cut)
    between = activated.unflatten(-1, (-1, 2, 16)).transpose(-1, -2).flatten(-3)
    return between.cpu(), out.cpu()


@pytest.mark.parametrize(
    ("rows", "width", "expert_width", "num_experts", "num_chosen", "cut", "size"),
    [
        (40, 256, 64, 3, 2, Cut(32, 2, 3), 32),
        (9, 320, 192, 5, 3, Cut(16, 3, 4), 16),
        (70, 128, 64, 1, 1, Cut(96, 3, 5), 64),
        (90, 64, 320, 2, 2, Cut(88, 3, 5), 72),
        (129, 64, 64, 1, 1, Cut(128, 2, 4), 128),
    ],
    ids=["two items an expert", "ragged width", "one expert", "items of any size", "the largest item"],
)
@pytest.mark.parametrize("processors", [1, 132])
def test_grouped_experts(
    rows: int, width: int, expert_width: int, num_experts: int, num_chosen: int, cut: Cut, size: int,
    processors: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One expert more than is here: its pairs are in no item. One processor does all works, of 132 each has one."""
    monkeypatch.setattr(products, "num_processors", lambda device: processors)
    layer = Layer.make(num_experts, width, expert_width, -(-width // 128) * 128)
    x = torch.randn(rows, width).to(torch.bfloat16)
    chosen = torch.stack([torch.randperm(num_experts + 1)[:num_chosen] for _ in range(rows)])
    if num_experts > 2:
        chosen[chosen < 2] = num_experts
        chosen[rows // 2, 0] = 1  # of one pair; the first has none
    weights = torch.rand(rows, num_chosen)
    work = listed(chosen, num_experts, cut.pairs, size)
    between, out = run(layer, x, chosen, weights, work, cut)
    here = chosen.flatten() < num_experts
    assert bool(out[~here].isnan().all())
    assert bool(between[~here].isnan().all())
    middle = torch.zeros(rows * num_chosen, expert_width, dtype=torch.bfloat16)
    expected = torch.zeros(rows * num_chosen, layer.down.num_rows, dtype=torch.float64)
    for pair in here.nonzero().flatten().tolist():
        expert, row = int(chosen.flatten()[pair]), pair // num_chosen
        both = reference.quantized_linear(x[row : row + 1], layer.w13[expert].decode())
        value = reference.expert_activation(*both.chunk(2, -1), LIMIT, weights.flatten()[pair : pair + 1])
        middle[pair] = quant.fake_quant_fp8(value)[0]
        expected[pair] = reference.quantized_linear(value, layer.w2[expert].decode())[0].double()
    assert relative_error(between[here], middle[here]) < 2 * BF16
    assert relative_error(out[here], expected[here]) < 2 * BF16


def relative_error(mine: Tensor, expected: Tensor) -> float:
    return float((mine.double() - expected.double()).norm() / expected.double().norm())


def test_the_list_changes_nothing() -> None:
    """The same bits whatever item a pair is in, whoever is beside it, and however many processors there are."""
    layer = Layer.make(3, 192, 64, 256)
    x = torch.randn(60, 192).to(torch.bfloat16)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(60)])
    weights = torch.rand(60, 2)
    runs = [
        run(layer, x, chosen, weights, listed(chosen, 3, cut.pairs, size), cut)
        for cut, size in ((Cut(32, 2, 3), 7), (Cut(80, 3, 3), 40), (Cut(128, 2, 4), 128))
    ]
    for between, out in runs[1:]:
        assert torch.equal(between, runs[0][0])
        assert torch.equal(out, runs[0][1])


@pytest.mark.parametrize("pairs", grouped.MOST_PAIRS)
@pytest.mark.parametrize("warpgroups", [2, 3])
def test_every_cut_fits_a_block(pairs: int, warpgroups: int) -> None:
    """As many stages as there is room for, and enough to copy ahead."""
    cut = Cut(pairs, warpgroups)
    assert cut.num_stages >= 4
    assert cut.shared_bytes <= 227 << 10
    assert Cut(pairs, warpgroups, cut.num_stages + 1).shared_bytes > 227 << 10
