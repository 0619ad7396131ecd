"""Rotary tables (spec §N.7). Owns frequencies and cos/sin rows; knows nothing of layers.

The angle is a float32 product, and cos/sin come from `torch.polar`, because that reproduces the publisher's
tables bit for bit at every position up to the full context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeTable:
    """Frequencies of one rotary variant; rows of cos and sin are computed per step."""

    frequencies: Tensor  # float32 (P,)

    @classmethod
    def local(cls, rotary_dim: int, base: float) -> RopeTable:
        """Plain table: window-only layers and draft stages."""
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return cls(1.0 / (base**exponent))

    @classmethod
    def yarn(
        cls,
        rotary_dim: int,
        base: float,
        *,
        factor: float,
        beta_fast: float,
        beta_slow: float,
        original_max_position: int,
    ) -> RopeTable:
        """YaRN-blended table: every layer with compressed KV. No magnitude correction."""
        plain = cls.local(rotary_dim, base).frequencies

        def correction(rotations: float) -> float:
            span = math.log(original_max_position / (rotations * 2 * math.pi))
            return rotary_dim * span / (2 * math.log(base))

        low = max(math.floor(correction(beta_fast)), 0)
        high: float = min(math.ceil(correction(beta_slow)), rotary_dim - 1)
        if low == high:
            high += 0.001  # the published guard against a zero-width ramp
        ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        keep = 1 - ramp
        return cls(plain / factor * (1 - keep) + plain * keep)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin float32 [T, P] for int positions [T]."""
        angle = torch.outer(positions.to(torch.float32), self.frequencies)
        rotation = torch.polar(torch.ones_like(angle), angle)
        return rotation.real.contiguous(), rotation.imag.contiguous()


__all__ = ["RopeTable"]
