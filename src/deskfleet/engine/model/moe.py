"""Mixture of experts (spec §6). Owns routing, this rank's experts and their sum; knows nothing of attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deskfleet.engine import ops
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.weights import ShardReader
from deskfleet.model.config import ModelConfig
from deskfleet.model.layers import LayerPlan


class MoE:
    """Top-k routed experts, whole experts per rank, plus one shared expert on every rank."""

    def __init__(
        self, config: ModelConfig, layer: LayerPlan, reader: ShardReader, comm: Communicator
    ) -> None:
        prefix = f"{layer.prefix}.ffn"
        plan, rank = reader.plan, reader.rank
        self.config = config
        self.layer = layer
        self.comm = comm
        self.gate = reader.wide(f"{prefix}.gate.weight")  # (E, M)
        self.bias = reader.f32(f"{prefix}.gate.bias")
        self.bias_vl = reader.f32(f"{prefix}.gate.bias_vl")
        self.expert_ids = plan.draft_expert_range(rank) if layer.is_draft else plan.expert_range(rank)
        if self.expert_ids:
            self.w13 = reader.experts(f"{prefix}.experts", ("w1", "w3"), self.expert_ids)  # (E_local, 2F, M)
            self.w2 = reader.experts(f"{prefix}.experts", ("w2",), self.expert_ids)  # (E_local, M, F)
        shared = f"{prefix}.shared_experts"
        self.shared_w13 = torch.cat((reader.fp8(f"{shared}.w1"), reader.fp8(f"{shared}.w3")))
        self.shared_w2 = reader.fp8(f"{shared}.w2")

    def route(self, x: Tensor, image_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Chosen experts int64 [T, K] and weights float32 [T, K]; rows of an image span use their own bias."""
        bias = self.bias
        if image_mask is not None and bool(image_mask.any()):
            bias = torch.where(image_mask[:, None], self.bias_vl, self.bias)
        return ops.route(
            x,
            self.gate,
            bias,
            num_chosen=self.layer.num_chosen,
            scaling=self.config.routed_scaling_factor,
            temperature=self.config.gate_temp,
        )

    def routed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """This rank's share of the routed sum, float64 [T, M], not yet reduced over ranks."""
        total = torch.zeros(x.shape, dtype=torch.float64)
        quantized = ops.fake_quant_fp8(x).to(torch.float64)  # once: every expert takes the same codes
        for expert, rows, places in _by_expert(chosen):
            if expert not in self.expert_ids:
                continue
            local = expert - self.expert_ids.start
            gate, up = (quantized[rows] @ self.w13[local].T).to(torch.bfloat16).chunk(2, -1)
            output = _down(gate, up, self.w2[local], self.config.swiglu_limit, weights[rows, places])
            total.index_add_(0, rows, output.to(torch.float64))
        return total

    def shared(self, x: Tensor) -> Tensor:
        """The shared expert, bf16 [T, M]."""
        gate, up = ops.quantized_linear(x, self.shared_w13).chunk(2, -1)
        return _down(gate, up, self.shared_w2, self.config.swiglu_limit, None)

    def __call__(self, x: Tensor, image_mask: Tensor | None) -> Tensor:
        """x bf16 [T, M] -> bf16 [T, M]; the shared expert joins after the sum over ranks."""
        total = self.comm.all_reduce(self.routed(x, *self.route(x, image_mask)))
        total = total + self.shared(x).to(torch.float64)
        return total.to(torch.bfloat16)


def _down(gate: Tensor, up: Tensor, w2: Tensor, limit: float, route_weight: Tensor | None) -> Tensor:
    # The route weight acts before w2: it changes the FP8 scale that w2's input takes (spec §6.3).
    return ops.quantized_linear(ops.expert_activation(gate, up, limit, route_weight), w2)


def _by_expert(chosen: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, rows, places) of every expert that int64 [T, K] names, ascending."""
    order = torch.sort(chosen.flatten(), stable=True)
    experts, counts = torch.unique_consecutive(order.values, return_counts=True)
    for expert, where in zip(experts.tolist(), order.indices.split(counts.tolist()), strict=True):
        yield expert, where // chosen.shape[1], where % chosen.shape[1]


__all__ = ["MoE"]
