"""The plain parameters that modules share: a matrix and a norm, under their published names. Knows no arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Matrix(nn.Module):
    """One `weight` float32 [..., out, in]. `gain` scales its first values; `bias` adds a zero `bias` [out]."""

    def __init__(self, *shape: int, gain: float = 1.0, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))
        self.bias = nn.Parameter(torch.empty(shape[-2])) if bias else None
        self.gain = gain

    def reset(self, generator: torch.Generator) -> None:
        """Draw values that give outputs of spread `gain` for inputs of unit spread."""
        with torch.no_grad():
            self.weight.normal_(0, self.gain * self.weight.shape[-1] ** -0.5, generator=generator)
            if self.bias is not None:
                self.bias.zero_()

    @property
    def bf16(self) -> Tensor:
        """The weight as it is stored when it is not quantised."""
        return self.weight.to(torch.bfloat16)


class Table(nn.Module):
    """One `weight` float32 [rows, D] of looked-up rows, each element of spread `spread` at first."""

    def __init__(self, rows: int, width: int, spread: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.spread = spread

    def reset(self, generator: torch.Generator) -> None:
        """Draw the rows."""
        with torch.no_grad():
            self.weight.normal_(0, self.spread, generator=generator)


class Norm(nn.Module):
    """The `weight` float32 [M] of an RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def reset(self, generator: torch.Generator) -> None:
        """Start at one."""
        with torch.no_grad():
            self.weight.fill_(1.0)


class FeedForward(nn.Module):
    """Three matrices of a gated unit: w1 gates, w3 carries, w2 goes back; `experts` of them stacked, or one."""

    def __init__(self, hidden: int, inner: int, *, gain: float, experts: int | None = None) -> None:
        super().__init__()
        stack = () if experts is None else (experts,)
        self.w1 = Matrix(*stack, inner, hidden)
        self.w2 = Matrix(*stack, hidden, inner, gain=gain)
        self.w3 = Matrix(*stack, inner, hidden)


def reset_all(module: nn.Module, seed: int) -> None:
    """Give every part its first values, in order of their names, from one seed."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        reset = getattr(part, "reset", None)
        if reset is not None:
            reset(generator)


__all__ = ["FeedForward", "Matrix", "Norm", "Table", "reset_all"]
