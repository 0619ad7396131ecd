"""One optimiser for all parameters: orthogonalised momentum (Muon) for hidden matrices, AdamW for the rest.

Owns which parameter takes which rule at which pace, the update of router biases, and gradient clipping. Nothing here
waits for the device. Learning rates of both rules are on one scale: Muon's update is scaled to the size of AdamW's.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_MOMENTUM = 0.95
_BETAS = (0.9, 0.98)
_EPS = 1e-10
_MUON_SIZE = 0.2  # root mean square of an AdamW update, nearly
_NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5

_PACES: tuple[tuple[str, float, float], ...] = (
    # (pattern of names, learning rate over the common one, weight decay); the first match decides
    (r".*\.engram\.embed\.weight", 2.0, 0.0),
    (r"embed\.weight|image_(start|end|newline)|.*\.markov_head\.embed\.weight", 1.0, 0.0),
    (r".*\.hc_(attn|ffn)\.fn", 0.1, 0.0),
    (r".*\.hc_(attn|ffn)\.(base|scale)", 0.3, 0.0),
    (r"head\.weight|.*\.markov_head\.head\.weight|.*\.gate\.weight|.*confidence_head.*", 0.3, 0.0),
    (r".*\.attn_sink", 1.0, 0.0),
    (r".*norm\d?\.weight|.*\.[qk]_weight|.*\.bias", 0.3, 0.0),
    (r".*\.indexer\..*", 0.5, 0.0),
    (r".*", 1.0, 0.1),
)
_ADAM = re.compile(
    r"(.*\.)?(embed|head|gate|[qk]_weight|attn_sink|.*norm\d?|hc_(attn|ffn)|indexer|confidence_head|patch_embed"
    r"|image_(start|end|newline))(\..*)?|.*\.bias"
)


def is_muon(name: str) -> bool:
    """Whether a parameter is a hidden matrix."""
    return _ADAM.fullmatch(name) is None


def pace(name: str) -> tuple[float, float]:
    """Learning rate of a parameter over the common one, and its weight decay."""
    return next((rate, decay) for pattern, rate, decay in _PACES if re.fullmatch(pattern, name))


@dataclass
class Optimiser:
    """State of every parameter that is trained: `first` for both rules, `second` for AdamW."""

    parameters: Mapping[str, Tensor]
    steps: int = 0
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, parameter in self.parameters.items():
            self.first.setdefault(name, torch.zeros_like(parameter))
            if not is_muon(name):
                self.second.setdefault(name, torch.zeros_like(parameter))

    @torch.no_grad()
    def step(self, rate: float, *, max_norm: float = 1.0) -> Tensor:
        """Update with the common learning rate `rate`; return the norm of the gradients before clipping."""
        live = {name: p for name, p in self.parameters.items() if p.grad is not None}
        grads = {name: p.grad for name, p in live.items() if p.grad is not None}
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads.values()))))
        # A gradient that is not finite becomes zero: one bad batch must not end the training.
        factor = torch.nan_to_num((max_norm / norm.clamp_min(1e-6)).clamp_max(1.0), 0.0)
        torch._foreach_mul_(list(grads.values()), factor)
        self.steps += 1
        by_pace: dict[tuple[bool, float, float], list[str]] = defaultdict(list)
        for name in live:
            by_pace[(is_muon(name), *pace(name))].append(name)
        for (muon, scale, decay), names in by_pace.items():
            group = [live[name] for name in names]
            if decay:
                torch._foreach_mul_(group, 1 - rate * scale * decay)
            update = self._muon if muon else self._adam
            torch._foreach_add_(group, update(names, grads), alpha=-rate * scale)
        for parameter in live.values():
            parameter.grad = None
        return norm

    def _adam(self, names: list[str], grads: Mapping[str, Tensor]) -> list[Tensor]:
        first, second = [self.first[name] for name in names], [self.second[name] for name in names]
        own = [torch.nan_to_num(grads[name]) for name in names]
        torch._foreach_lerp_(first, own, 1 - _BETAS[0])
        torch._foreach_mul_(second, _BETAS[1])
        torch._foreach_addcmul_(second, own, own, 1 - _BETAS[1])
        size = torch._foreach_sqrt(second)
        torch._foreach_mul_(size, 1 / math.sqrt(1 - _BETAS[1] ** self.steps))
        torch._foreach_add_(size, _EPS)
        updates = torch._foreach_div(first, size)
        torch._foreach_mul_(updates, 1 / (1 - _BETAS[0] ** self.steps))
        return list(updates)

    def _muon(self, names: list[str], grads: Mapping[str, Tensor]) -> list[Tensor]:
        first = [self.first[name] for name in names]
        own = [torch.nan_to_num(grads[name]) for name in names]
        torch._foreach_lerp_(first, own, 1 - _MOMENTUM)
        ahead = torch._foreach_lerp(own, first, _MOMENTUM)
        updates: dict[str, Tensor] = {}
        by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, tensor in enumerate(ahead):
            by_shape[tuple(tensor.shape[-2:])].append(number)
        for shape, numbers in by_shape.items():
            # All matrices of one shape at once, experts included.
            counts = [ahead[number].numel() // (shape[0] * shape[1]) for number in numbers]
            stacked = torch.cat([ahead[number].reshape(-1, *shape) for number in numbers])
            size = _MUON_SIZE * max(shape) ** 0.5
            for number, part in zip(numbers, (orthogonalise(stacked) * size).split(counts), strict=True):
                updates[names[number]] = part.reshape(ahead[number].shape)
        return [updates[name] for name in names]


def orthogonalise(matrices: Tensor) -> Tensor:
    """float32 [N, out, in] -> matrices with about the same singular vectors and singular values near one."""
    x = matrices.to(torch.bfloat16 if matrices.device.type != "cpu" else torch.float32)
    transposed = x.shape[-2] > x.shape[-1]
    if transposed:
        x = x.transpose(-2, -1)
    x = x / (torch.linalg.matrix_norm(x.float()).to(x.dtype)[:, None, None] + 1e-7)
    for a, b, c in _NEWTON_SCHULZ:
        gram = x @ x.transpose(-2, -1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.transpose(-2, -1) if transposed else x).float()
    return result


@torch.no_grad()
def steer_router(biases: Iterable[tuple[Tensor, Tensor]], loads: Iterable[Tensor], rate: float) -> None:
    """Move each expert's (bias, bias_vl) against its load float32 [2, E] of text and image tokens."""
    for pair, load in zip(biases, loads, strict=True):
        for bias, own in zip(pair, load, strict=True):
            bias.add_(torch.sign(own.mean() - own) * rate)


__all__ = ["Optimiser", "is_muon", "orthogonalise", "pace", "steer_router"]
