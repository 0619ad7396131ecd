"""Mixture of experts (spec §6). Owns routing, this rank's experts and their sum; knows nothing of attention."""

from __future__ import annotations

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
        self.gate = reader.matrix(f"{prefix}.gate.weight")  # (E, M)
        self.bias = reader.f32(f"{prefix}.gate.bias")
        self.bias_vl = reader.f32(f"{prefix}.gate.bias_vl")
        self.expert_ids = plan.draft_expert_range(rank) if layer.is_draft else plan.expert_range(rank)
        if self.expert_ids:
            self.w13 = reader.experts(f"{prefix}.experts", ("w1", "w3"), self.expert_ids)  # (E_local, 2F, M)
            self.w2 = reader.experts(f"{prefix}.experts", ("w2",), self.expert_ids)  # (E_local, M, F)
        shared = f"{prefix}.shared_experts"
        self.shared_w13 = reader.fp8(f"{shared}.w1", f"{shared}.w3")
        self.shared_w2 = reader.fp8(f"{shared}.w2")

    def route(self, x: Tensor, image_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Chosen experts int64 [T, K] and weights float32 [T, K]; rows of an image span use their own bias."""
        bias = self.bias
        if image_mask is not None:
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
        if not self.expert_ids:
            return torch.zeros(x.shape, dtype=torch.float64)
        first, limit = self.expert_ids.start, self.config.swiglu_limit
        return ops.routed_experts(x, chosen, weights, self.w13, self.w2, first_expert=first, limit=limit)

    def shared(self, x: Tensor) -> Tensor:
        """The shared expert, bf16 [T, M]."""
        return ops.shared_expert(x, self.shared_w13, self.shared_w2, limit=self.config.swiglu_limit)

    def __call__(self, x: Tensor, image_mask: Tensor | None) -> Tensor:
        """x bf16 [T, M] -> bf16 [T, M]; the shared expert joins after the sum over ranks."""
        total = self.comm.all_reduce(self.routed(x, *self.route(x, image_mask)))
        return ops.add_round(total, self.shared(x))


__all__ = ["MoE"]
