"""Mixture of experts on packed rows (spec §6): router, grouped matrices, shared expert, and what balances the load.

Owns the order of rows by expert. Tokens are sorted by expert into one buffer whose runs start at multiples of 16, so
that no shape depends on where tokens go and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deskfleet.model.config import LayerPlan, ModelConfig
from pocket.model.numerics import Numerics, pointwise, product, wide_product
from pocket.model.parts import FeedForward
from pocket.model.rows import Rows

_RUN = 16  # grouped matrix products want runs aligned to 16 bytes
_OUTPUT_GAIN = 0.2


@dataclass(frozen=True)
class Dispatch:
    """Where each choice went: R buffer rows for T tokens with K choices.

    source int64 [R]: token of a buffer row, T where none; slot int64 [R]: its choice t·K + k, T·K where none;
    place int64 [T, K]: buffer row of a choice; ends int32 [E]: end of each expert's run, the last one R.
    """

    source: Tensor
    slot: Tensor
    place: Tensor
    ends: Tensor


def dispatch(chosen: Tensor, num_experts: int) -> Dispatch:
    """Order int64 [T, K] by expert."""
    tokens, choices = chosen.shape
    flat = chosen.flatten()
    total = tokens * choices
    rows = total + _RUN * num_experts
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add(0, flat, torch.ones_like(flat))
    padded = (counts + _RUN - 1) // _RUN * _RUN
    run_starts, padded_ends = counts.cumsum(0) - counts, padded.cumsum(0)
    expert = flat[order]
    number = torch.arange(total, device=flat.device)
    position = (padded_ends - padded)[expert] + number - run_starts[expert]
    slot = torch.full((rows,), total, device=flat.device).scatter(0, position, order)
    place = torch.empty_like(flat).scatter(0, order, position).view(tokens, choices)
    # The last run takes the unused rows too: they are zero, and no row is left undefined.
    ends = torch.cat((padded_ends[:-1], padded_ends.new_full((1,), rows)))
    return Dispatch(slot // choices, slot, place, ends.to(torch.int32))


class _ToExperts(torch.autograd.Function):
    """Rows [T, M] -> buffer [R, M]; the gradient of a token is the sum over its choices."""

    @staticmethod
    def forward(ctx, x: Tensor, source: Tensor, place: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(place)
        return torch.cat((x, x.new_zeros(1, x.shape[1]))).index_select(0, source)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (place,) = ctx.saved_tensors
        picked = grad.index_select(0, place.flatten()).view(*place.shape, -1)
        return picked.sum(1, dtype=torch.float32).to(grad.dtype), None, None


class _FromExperts(torch.autograd.Function):
    """Buffer [R, M] -> [T·K, M] in order of choices; the gradient goes back by the inverse order."""

    @staticmethod
    def forward(ctx, buffer: Tensor, place: Tensor, slot: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(slot)
        return buffer.index_select(0, place.flatten())

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (slot,) = ctx.saved_tensors
        return torch.cat((grad, grad.new_zeros(1, grad.shape[1]))).index_select(0, slot), None, None


class _ToSlots(torch.autograd.Function):
    """Weights [T·K] -> [R], zero where a buffer row has no choice."""

    @staticmethod
    def forward(ctx, weights: Tensor, slot: Tensor, place: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(place)
        return torch.cat((weights, weights.new_zeros(1))).index_select(0, slot)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place.flatten()), None, None


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x bf16 [R, in], run e of it times weight[e] bf16 [out, in]ᵀ -> bf16 [R, out]."""
    if x.device.type != "cpu":
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    stops = ends.tolist()
    runs = zip(x.split([b - a for a, b in zip([0, *stops[:-1]], stops, strict=True)]), weight, strict=True)
    return torch.cat([product(run, matrix) for run, matrix in runs])


class MoE(nn.Module):
    """Top-k routed experts and a shared one."""

    def __init__(self, config: ModelConfig, layer: LayerPlan) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        hidden, inner, count = config.hidden_size, config.moe_intermediate_size, layer.num_experts
        self.gate = Gate(count, hidden)
        self.experts = FeedForward(hidden, inner, gain=_OUTPUT_GAIN, experts=count)
        self.shared_experts = FeedForward(hidden, inner, gain=_OUTPUT_GAIN)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """x bf16 [T, M] -> bf16 [T, M]; leaves loads and the balance loss in `rows`."""
        scores, chosen, weights = self._route(x, rows.image_mask)
        self._note_load(scores, chosen, rows)
        return self.mix(x, chosen, weights, rows.numerics)

    def mix(self, x: Tensor, chosen: Tensor, weights: Tensor, numerics: Numerics) -> Tensor:
        """x bf16 [T, M] through the experts int64 [T, K] with float32 weights, and the shared one."""
        own, common = self.experts, self.shared_experts
        routes = dispatch(chosen, self.layer.num_experts)
        seen = numerics.activation(x)
        buffer = _ToExperts.apply(seen, routes.source, routes.place)  # type: ignore[no-untyped-call]
        both = grouped_product(
            buffer, numerics.fp4_weight(torch.cat((own.w1.weight, own.w3.weight), 1)), routes.ends
        )
        scale = _ToSlots.apply(weights.flatten(), routes.slot, routes.place)  # type: ignore[no-untyped-call]
        activated = numerics.activation(_activate(both, scale, self.config.swiglu_limit))
        routed = grouped_product(activated, numerics.fp4_weight(own.w2.weight), routes.ends)
        routed = _FromExperts.apply(routed, routes.place, routes.slot)  # type: ignore[no-untyped-call]
        routed = routed.view(*chosen.shape, -1).sum(1, dtype=torch.float32)
        both = product(seen, numerics.fp8_weight(torch.cat((common.w1.weight, common.w3.weight))))
        activated = numerics.activation(_activate(both, None, self.config.swiglu_limit))
        shared = product(activated, numerics.fp8_weight(common.w2.weight))
        result: Tensor = (routed + shared.float()).to(torch.bfloat16)
        return result

    def _route(self, x: Tensor, image_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = self.gate(
            x, image_mask, self.layer.num_chosen, self.config.routed_scaling_factor
        )
        return found

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores float32 [T, E], chosen int64 [T, K] and weights float32 [T, K] with the bias of text."""
        return self._route(x, None)

    def _note_load(self, scores: Tensor, chosen: Tensor, rows: Rows) -> None:
        count, valid, image = self.layer.num_experts, rows.valid, rows.image_mask
        hits = torch.zeros(len(scores), count, device=scores.device).scatter(1, chosen, 1.0)
        kinds = torch.stack((valid & ~image, valid & image)).float()
        rows.loads.append(kinds @ hits)
        # Per row of the batch: the share of tokens an expert gets times the mean of its normalised score.
        weight = valid.float()[:, None]
        share = (hits * weight).unflatten(0, rows.shape).sum(1) * count / self.layer.num_chosen
        tokens = weight.unflatten(0, rows.shape).sum(1).clamp_min(1)
        normal = scores / scores.sum(-1, keepdim=True)
        mean = (normal * weight).unflatten(0, rows.shape).sum(1) / tokens
        rows.balance.append((share / tokens * mean).sum(-1).mean())


class Gate(nn.Module):
    """The router (spec §6.1). Its biases steer loads; no gradient reaches them."""

    bias: Tensor
    bias_vl: Tensor

    def __init__(self, num_experts: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden))
        self.register_buffer("bias", torch.zeros(num_experts))
        self.register_buffer("bias_vl", torch.zeros(num_experts))

    def reset(self, generator: torch.Generator) -> None:
        """Start undecided: scores of all experts alike."""
        with torch.no_grad():
            self.weight.normal_(0, 0.5 * self.weight.shape[-1] ** -0.5, generator=generator)
            self.bias.zero_()
            self.bias_vl.zero_()

    def forward(
        self, x: Tensor, image_mask: Tensor | None, num_chosen: int, scaling: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x bf16 [T, M] -> scores float32 [T, E], chosen int64 [T, K], weights float32 [T, K] of unbiased scores."""
        scores = torch.sqrt(torch.nn.functional.softplus(wide_product(x, self.weight.to(torch.bfloat16))))
        bias = self.bias
        if image_mask is not None:
            bias = torch.where(image_mask[:, None], self.bias_vl, self.bias)
        chosen = (scores.detach() + bias).topk(num_chosen, dim=-1).indices
        raw = scores.gather(1, chosen)
        return scores, chosen, raw / (raw.sum(1, keepdim=True) + 1e-20) * scaling


@pointwise
def _activate(both: Tensor, scale: Tensor | None, limit: float) -> Tensor:
    """Clamped SwiGLU of [gate | up] bf16 [T, 2·F] -> bf16 [T, F]; the route weight [T] acts before w2 (spec §6.2)."""
    gate, up = both.float().chunk(2, -1)
    gate = gate.clamp_max(limit)
    activated = torch.nn.functional.silu(gate) * up.clamp(-limit, limit)
    if scale is not None:
        activated = activated * scale[:, None]
    return activated.to(torch.bfloat16)


__all__ = ["Dispatch", "Gate", "MoE", "dispatch", "grouped_product"]
