"""Where the training forward rounds: quantisers with straight-through gradients, norms, linears, rotary rows.

Owns the correspondence with `deskfleet.engine.ops`: each function rounds to bf16 where the engine does, and sums
in float32 (TF32 on a GPU, which is exact for products of bf16 values). Knows nothing of layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from deskfleet.engine.ops.quant import pow2_ceil

_FP8_MAX, _FP4_MAX = 448.0, 6.0
# As the engine: a product with the float32 reciprocal, where the publisher multiplies.
_INV_FP8_MAX = torch.tensor(1.0 / _FP8_MAX, dtype=torch.float32).item()
_INV_FP4_MAX = torch.tensor(1.0 / _FP4_MAX, dtype=torch.float32).item()
_SMALLEST_FP8_AMAX = 1e-4
TILE = 32
"""Side of an FP8 weight tile, and length of every scale group but that of compressed entries."""

F = TypeVar("F", bound=Callable[..., Any])
_fused: dict[str, bool] = {"on": False}


def fuse_pointwise() -> None:
    """From now on in this process, compile what is `pointwise`: worth it on a GPU, for the same results."""
    torch._dynamo.config.recompile_limit = 256  # one function serves many shapes
    torch._dynamo.config.suppress_errors = True  # what cannot be compiled here runs as it is
    _fused["on"] = True


@contextmanager
def not_fused() -> Iterator[None]:
    """Compile nothing meanwhile: for shapes that are seen once."""
    before, _fused["on"] = _fused["on"], False
    try:
        yield
    finally:
        _fused["on"] = before


def pointwise(function: F) -> F:
    """Mark a function of small operations on large tensors, which gains from being one kernel."""
    return pointwise_or(function)(function)


def pointwise_or(eager: F) -> Callable[[F], F]:
    """The same; `eager` computes it where nothing is compiled, because another way is faster there."""

    def mark(function: F) -> F:
        compiled: list[Callable[..., Any]] = []

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if not _fused["on"]:
                return eager(*args)
            if not compiled:
                compiled.append(torch.compile(function, dynamic=False))
            return compiled[0](*args)

        return cast(F, call)

    return mark


def round_e2m1(x: Tensor) -> Tensor:
    """The nearest E2M1 value of each float32 within ±6, ties to the even code."""
    magnitude = x.abs()
    # Codes are evenly spaced between powers of two, so rounding to even in each range is rounding to even codes.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.round(x / step) * step


@pointwise
def fp8_groups(x: Tensor) -> Tensor:
    """FP8 in groups of 32 along the last dim with power-of-two scales, and back: [..., K] -> bf16 (spec §N.3.2)."""
    groups = x.float().unflatten(-1, (-1, TILE))
    scale = fp8_scale(groups.abs().amax(-1, keepdim=True))
    codes = (groups / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).float()
    result: Tensor = (codes * scale).flatten(-2).to(torch.bfloat16)
    return result


@pointwise
def fp8_tiles(weight: Tensor) -> Tensor:
    """FP8 in tiles of 32 x 32, one power-of-two scale each, and back: [..., out, in] -> bf16."""
    rows, columns = weight.shape[-2:]
    tiles = weight.float().unflatten(-1, (columns // TILE, TILE)).unflatten(-3, (rows // TILE, TILE))
    scale = fp8_scale(tiles.abs().amax((-3, -1), keepdim=True))
    codes = (tiles / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).float()
    result: Tensor = (codes * scale).reshape(weight.shape).to(torch.bfloat16)
    return result


@pointwise
def fp4_groups(x: Tensor) -> Tensor:
    """FP4 in groups of 32 with power-of-two scales, and back: experts, index queries and keys -> bf16."""
    groups = x.float().unflatten(-1, (-1, TILE))
    scale = fp4_scale(groups.abs().amax(-1, keepdim=True))
    return (round_e2m1((groups / scale).clamp(-_FP4_MAX, _FP4_MAX)) * scale).flatten(-2).to(torch.bfloat16)


@pointwise
def fp4_entries(x: Tensor) -> Tensor:
    """FP4 in groups of 16 with E4M3 scales, and back: compressed entries -> bf16 (spec §N.3.3)."""
    groups = x.float().unflatten(-1, (-1, 16))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(_FP4_MAX * 2.0**-9)
    scale = (amax / _FP4_MAX).to(torch.float8_e4m3fn).float()
    result: Tensor = (
        (round_e2m1((groups / scale).clamp(-_FP4_MAX, _FP4_MAX)) * scale).flatten(-2).to(torch.bfloat16)
    )
    return result


def fp8_scale(amax: Tensor) -> Tensor:
    """The power of two for a group whose largest magnitude is float32 `amax`."""
    return pow2_ceil(amax.clamp_min(_SMALLEST_FP8_AMAX) * _INV_FP8_MAX)


def fp4_scale(amax: Tensor) -> Tensor:
    """The power of two for an FP4 group whose largest magnitude is float32 `amax`."""
    return pow2_ceil(amax.clamp_min(_FP4_MAX * 2.0**-126) * _INV_FP4_MAX)


class _StraightThrough(torch.autograd.Function):
    """Applies a rounding; gradients pass as if it were not there."""

    @staticmethod
    def forward(ctx: object, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@dataclass(frozen=True)
class Numerics:
    """Which roundings a forward applies. `quantised` False leaves bf16 alone, for the first part of training.

    `exact` keeps attention scores and their products in float32, as the engine does; without it they are bf16
    products, which is faster and differs by their rounding. `weights_are_rounded` says that the parameters came out of
    a checkpoint: rounding them again would change nothing.
    """

    quantised: bool = True
    exact: bool = False
    weights_are_rounded: bool = False

    def activation(self, x: Tensor) -> Tensor:
        """What an FP8 or FP4 linear sees of x bf16 [..., K]; also window rows."""
        return self._apply(x, fp8_groups)

    def entry(self, x: Tensor) -> Tensor:
        """Compressed entries bf16 [..., D] as they are cached."""
        return self._apply(x, fp4_entries)

    def index(self, x: Tensor) -> Tensor:
        """Index queries and keys bf16 [..., D]."""
        return self._apply(x, fp4_groups)

    def fp8_weight(self, weight: Tensor) -> Tensor:
        """An FP8 matrix float32 [..., out, in] as bf16."""
        return self._weight(weight, fp8_tiles)

    def fp4_weight(self, weight: Tensor) -> Tensor:
        """Expert matrices float32 [E, out, in] as bf16."""
        return self._weight(weight, fp4_groups)

    def engram_rows(self, table: Tensor) -> Tensor:
        """An Engram table float32 [R, D] as bf16. Quantising its rows again for their linear changes nothing."""
        return self._weight(table, fp8_groups)

    def wide(self, x: Tensor) -> Tensor:
        """x as the operand of an attention product."""
        return x.float() if self.exact else x

    def _weight(self, weight: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return weight.to(torch.bfloat16) if self.weights_are_rounded else self._apply(weight, rounding)

    def _apply(self, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        if not self.quantised:
            return x.to(torch.bfloat16)
        rounded: Tensor = _StraightThrough.apply(x, rounding)  # type: ignore[no-untyped-call]
        return rounded


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim: bf16 [..., M], float32 weight [M] -> bf16, one rounding; the weight is bf16 too.

    Never compiled: for what has another shape in every batch, where each shape would be compiled anew.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.to(torch.bfloat16).float() * scaled).to(torch.bfloat16)


rms_norm = pointwise(plain_rms_norm)
"""The same where shapes are few."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x bf16 [..., K] @ weight bf16 [out, K]ᵀ -> bf16, summed in float32."""
    if x.device.type != "cpu":
        return torch.nn.functional.linear(x, weight)
    return torch.nn.functional.linear(x.float(), weight.float()).to(torch.bfloat16)


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] @ weight [out, K]ᵀ -> float32: where the engine keeps more than bf16."""
    return torch.nn.functional.linear(x.float(), weight.float())


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """a [G, m, K] @ b [G, K, n] of one dtype -> the same dtype, summed in float32."""
    if a.device.type != "cpu" or a.dtype == torch.float32:
        return a @ b
    return (a.float() @ b.float()).to(a.dtype)


@pointwise
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last 2·P dims of bf16 [T, ..., D] by adjacent pairs; cos, sin float32 [T, P]. The inverse: -sin."""
    shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[-1],)
    cos, sin = cos.view(shape), sin.view(shape)
    keep = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., keep:].float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :keep], rotated.to(x.dtype)), -1)


class _GatherRows(torch.autograd.Function):
    """pool[index] whose gradient is summed in float32: many rows of a batch read the same pool row."""

    @staticmethod
    def forward(ctx, pool: Tensor, index: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(index)
        ctx.pool_shape = pool.shape
        return pool.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (index,) = ctx.saved_tensors
        total = torch.zeros(ctx.pool_shape, dtype=torch.float32, device=grad.device)
        return total.index_add_(0, index, grad.float()).to(grad.dtype), None


def gather_rows(pool: Tensor, index: Tensor) -> Tensor:
    """Rows [..., D] of pool [R, D] at int64 index [...]."""
    rows: Tensor = _GatherRows.apply(pool, index.flatten())  # type: ignore[no-untyped-call]
    return rows.view(*index.shape, pool.shape[-1])


__all__ = [
    "TILE",
    "Numerics",
    "batched_product",
    "fp4_entries",
    "fp4_groups",
    "fp4_scale",
    "fp8_groups",
    "fp8_scale",
    "fp8_tiles",
    "fuse_pointwise",
    "gather_rows",
    "not_fused",
    "plain_rms_norm",
    "pointwise",
    "pointwise_or",
    "product",
    "rms_norm",
    "rotate",
    "round_e2m1",
    "wide_product",
]
