"""Routed experts of many rows by the kernels of grouped.cu, on GPUs of sm_90 and in the emulator. Owns their tuning.

Items, pairs and what lies between the two products are those of prefill_experts.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deskfleet.engine.cuda.native import products
from deskfleet.engine.cuda.native.where import kernel_for
from deskfleet.engine.cuda.packing import TILE_ROWS, Fp4Tiles

MOST_PAIRS = (16, 32, 48, 64, 72, 80, 88, 96, 112, 128)
"""What an item may have at most: columns of a product of the tensor cores."""
PAIRS_UNIT = 8
"""Items of one expert have as many pairs as each other, in eights."""

_CAPABILITY = (9, 0)
_SHARED_BYTES = 227 << 10  # of a block
_SIGNAL_BYTES = 16  # of a stage


@dataclass(frozen=True, slots=True)
class Cut:
    """`pairs` an item at most, of MOST_PAIRS; warpgroups that multiply, 2 or 3, a tile each; stages of the ring, 0 for
    as many as there is room for."""

    pairs: int
    warpgroups: int
    stages: int = 0

    @property
    def stage_bytes(self) -> int:
        """64 columns of x, codes and scale words (grouped.cu)."""
        return 8 * (self.pairs * 16 + 16) + self.warpgroups * (TILE_ROWS * 32 + TILE_ROWS * 4)

    @property
    def result_bytes(self) -> int:
        return self.warpgroups * (-(-self.pairs // 16) * 16 * (TILE_ROWS * 2 + 16) + self.pairs * 4)

    @property
    def num_stages(self) -> int:
        return self.stages or (_SHARED_BYTES - self.result_bytes) // (self.stage_bytes + _SIGNAL_BYTES)

    @property
    def shared_bytes(self) -> int:
        return self.num_stages * (self.stage_bytes + _SIGNAL_BYTES) + self.result_bytes


def runs_on(device: torch.device | str) -> bool:
    """Whether it is a GPU that the kernels are for."""
    return torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) == _CAPABILITY


@dataclass(frozen=True, slots=True)
class Items:
    """A work list: items int32 [max, 2] of expert and number of pairs, how many int32 [1], pairs int32 [max, pairs]."""

    items: Tensor
    num_items: Tensor
    pairs: Tensor


def grouped_up(
    x: Tensor, weight: Fp4Tiles, work: Items, route_weights: Tensor, out: Tensor, cut: Cut,
    *, num_chosen: int, limit: float,
) -> None:  # fmt: skip
    """As prefill_experts.grouped_up: x bf16 [T, K] permuted -> out bf16 [P, F] permuted, of the pairs in the list."""
    _launch("UP", x, weight, work, route_weights, out, cut, num_chosen, limit)


def grouped_down(x: Tensor, weight: Fp4Tiles, work: Items, out: Tensor, cut: Cut) -> None:
    """As prefill_experts.grouped_down: x bf16 [P, F] permuted -> out bf16 [P, N], of the pairs in the list."""
    _launch("DOWN", x, weight, work, None, out, cut, 1, 0.0)


def _launch(
    kind: str, x: Tensor, weight: Fp4Tiles, work: Items, route_weights: Tensor | None, out: Tensor, cut: Cut,
    num_chosen: int, limit: float,
) -> None:  # fmt: skip
    defines = {
        kind: 1,
        "K": weight.num_columns,
        "ROWS": weight.num_rows,
        "NUM_CHOSEN": num_chosen,
        "ITEM": cut.pairs,
        "WARPGROUPS": cut.warpgroups,
        "STAGES": cut.num_stages,
    }
    kernel_for(x, "grouped.cu", f"grouped_{kind.lower()}", defines).launch(
        products.num_processors(x.device),
        128 * (cut.warpgroups + 1),
        cut.shared_bytes,
        [
            x, weight.codes, weight.scales, work.items, work.num_items, work.pairs, route_weights, out, float(limit),
        ],
        dependent=True,
    )  # fmt: skip


__all__ = ["MOST_PAIRS", "PAIRS_UNIT", "Cut", "Items", "grouped_down", "grouped_up", "runs_on"]
