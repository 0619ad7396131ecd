"""Hyper-connections: how the residual stream of C copies collapses into a sub-layer and expands out of it (spec §5).

Owns their parameters and their start near the identity. Knows nothing of the sub-layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deskfleet.model.config import ModelConfig
from pocket.model.numerics import pointwise, pointwise_or

_START_PRE = 0.7  # of the copy that a sub-layer reads at first; the others share the rest
_START_DIAGONAL = 4.0
_START_SCALE = 0.1
_START_SPREAD = 0.02


class _Sinkhorn(torch.autograd.Function):
    """Alternating column and row normalisation of float32 [T, C, C]; keeps one sum per normalisation, not the matrices.

    With c' = c / s and s = Σc + eps along one dim: dc = (dc' - Σ dc'·c') / s, and c = c'·s.
    """

    @staticmethod
    def forward(ctx, comb: Tensor, iterations: int, eps: float) -> Tensor:  # type: ignore[no-untyped-def]
        sums = []
        for step in range(2 * iterations - 1):  # columns, then rows and columns in turn
            total = comb.sum(-1 if step % 2 else -2, keepdim=True) + eps
            comb = comb / total
            sums.append(total)
        ctx.save_for_backward(comb, *sums)
        return comb

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        comb, *sums = ctx.saved_tensors
        for step in reversed(range(len(sums))):
            inner = (grad * comb).sum(-1 if step % 2 else -2, keepdim=True)
            grad = (grad - inner) / sums[step]
            comb = comb * sums[step]
        return grad, None, None


def mixes(stream: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Raw mixes float32 [T, (2+C)·C] of a stream bf16 [T, C, M]."""
    flat = stream.flatten(1).float()
    return torch.nn.functional.linear(flat, weight) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


@pointwise
def split(
    raw: Tensor, scale: Tensor, base: Tensor, copies: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Raw mixes -> pre [T, C], post [T, C], comb [T, C, C], float32; comb[j, k] weighs source j for target k."""
    pre, post, comb = raw.split((copies, copies, copies * copies), -1)
    pre_base, post_base, comb_base = base.split((copies, copies, copies * copies))
    pre = torch.sigmoid(pre * scale[0] + pre_base) + eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = torch.softmax((comb * scale[2] + comb_base).unflatten(-1, (copies, copies)), -1) + eps
    return pre, post, _Sinkhorn.apply(comb, iterations, eps)  # type: ignore[no-untyped-call]


def _collapse_eager(stream: Tensor, pre: Tensor) -> Tensor:
    return torch.bmm(pre[:, None], stream.float())[:, 0].to(torch.bfloat16)


def _expand_eager(output: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.bmm(comb.transpose(1, 2), stream.float())
    return (post[..., None] * output.float()[:, None] + mixed).to(torch.bfloat16)


@pointwise_or(_collapse_eager)
def collapse(stream: Tensor, pre: Tensor) -> Tensor:
    """Σ_j pre[j]·stream[j]: bf16 [T, C, M], float32 [T, C] -> bf16 [T, M]."""
    return (pre[..., None] * stream.float()).sum(1).to(torch.bfloat16)


@pointwise_or(_expand_eager)
def expand(output: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post[k]·output + Σ_j comb[j, k]·stream[j] -> bf16 [T, C, M]."""
    mixed = (comb[..., None] * stream.float()[:, :, None]).sum(1)
    return (post[..., None] * output.float()[:, None] + mixed).to(torch.bfloat16)


class HyperConnection(nn.Module):
    """The mixes of one sub-layer. Parameters carry the published names `fn`, `base` and `scale`."""

    def __init__(self, config: ModelConfig, sublayer: int) -> None:
        """`sublayer` counts attention and experts through the model: each starts by reading another copy."""
        super().__init__()
        self.config = config
        copies = config.hc_mult
        self.fn = nn.Parameter(torch.empty(config.hc_num_mixes, copies * config.hidden_size))
        self.base = nn.Parameter(torch.empty(config.hc_num_mixes))
        self.scale = nn.Parameter(torch.empty(3))
        self.sublayer = sublayer

    def reset(self, generator: torch.Generator) -> None:
        """Start near a plain residual connection: read one copy mostly, add to all, keep each where it is."""
        copies = self.config.hc_mult
        with torch.no_grad():
            self.fn.normal_(0, _START_SPREAD, generator=generator)
            self.scale.fill_(_START_SCALE)
            share = torch.full((copies,), (1 - _START_PRE) / max(copies - 1, 1))
            share[self.sublayer % copies] = _START_PRE
            self.base[:copies] = torch.logit(share.clamp(0.01, 0.99))
            self.base[copies : 2 * copies] = 0.0
            self.base[2 * copies :] = (torch.eye(copies) * _START_DIAGONAL).flatten()

    def forward(self, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """stream bf16 [T, C, M] -> pre, post, comb."""
        config = self.config
        raw = mixes(stream, self.fn, config.rms_norm_eps)
        return split(raw, self.scale, self.base, config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps)


def enter(x: Tensor, copies: int) -> tuple[Tensor, Tensor]:
    """Start a residual stream: bf16 [T, M] on every copy, and a pre mix that reads copy 0 alone."""
    pre = torch.zeros(len(x), copies, device=x.device)
    pre[:, 0] = 1.0
    return x[:, None].expand(-1, copies, -1), pre


__all__ = ["HyperConnection", "collapse", "enter", "expand"]
