"""Latents of a few rows by the kernel of latents.cu. attention.py says what it does."""

from __future__ import annotations

from torch import Tensor

from deskfleet.engine.cuda.native.where import kernel_for

_UNIT = 256  # columns of a warp


def write_latents(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor],
    rope: tuple[Tensor, Tensor],
    codes: Tensor,
    scales: Tensor,
    pages: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    *,
    block_size: int,
    eps: float,
) -> None:
    """As attention.write_latents; of what is read, only qkv may come from the kernel before this one."""
    slots, positions, table = where
    width = codes.shape[1]
    size = qkv.shape[1] - width
    defines: dict[str, int | float] = {
        "Q": width,
        "D": size,
        "ROPE": 2 * rope[0].shape[1],
        "BYTES": pages.shape[1],
        "EPS": eps,
    }
    kernel_for(qkv, "latents.cu", "latents", defines).launch(
        (-(-width // _UNIT) + -(-size // _UNIT), len(qkv)),
        32,
        0,
        [
            qkv, *norms, *rope, codes, scales, pages, slots, positions, table, table.stride(0), block_size,
        ],
        dependent=True,
    )  # fmt: skip


__all__ = ["write_latents"]
