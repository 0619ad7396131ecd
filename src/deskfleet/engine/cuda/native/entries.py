"""Compressed entries and index keys of a few rows by the kernels of compress.cu. compress.py says what they do."""

from __future__ import annotations

from torch import Tensor

from deskfleet.engine.cuda.native.where import kernel_for

_CHANNELS = 8  # of a thread
_MOST_KEY_CHANNELS = 128


def pool_taken(projected: Tensor) -> bool:
    """Whether `pool` can read these rows, four numbers at a time."""
    return projected.stride(0) % 4 == 0


def keys_taken(projected: Tensor) -> bool:
    """Whether `write_keys` is written for so many channels."""
    return projected.shape[1] <= _MOST_KEY_CHANNELS


def pool(
    projected: Tensor, open_rows: Tensor, norm: Tensor, rope: tuple[Tensor, Tensor],
    where: tuple[Tensor, Tensor, Tensor], pages: Tensor, latents: Tensor,
    *, ratio: int, num_open: int, block_size: int, eps: float, keeps: bool,
) -> None:  # fmt: skip
    """As compress.pool; of what is read, only `projected` may come from the kernel before this one."""
    slots, positions, table = where
    size = latents.shape[1]
    defines = {
        "POOL": 1,
        "D": size,
        "ROPE": 2 * rope[0].shape[1],
        "BYTES": pages.shape[1],
        "RATIO": ratio,
        "NUM_OPEN": num_open,
        "KEEPS": keeps,
        "EPS": eps,
    }
    kernel_for(projected, "compress.cu", "pool", defines).launch(
        len(projected),
        -(-size // (32 * _CHANNELS)) * 32,
        4 * 32,
        [
            projected, projected.stride(0), open_rows, norm, *rope, slots, positions, table, table.stride(0),
            block_size // ratio, pages, latents,
        ],
        dependent=True,
    )  # fmt: skip


def write_keys(
    projected: Tensor, norm: Tensor, rope: tuple[Tensor, Tensor], where: tuple[Tensor, Tensor, Tensor], pages: Tensor,
    *, ratio: int, block_size: int, eps: float,
) -> None:  # fmt: skip
    """As compress.write_keys; of what is read, only `projected` may come from the kernel before this one."""
    slots, positions, table = where
    defines = {
        "KEYS": 1,
        "D": projected.shape[1],
        "ROPE": 2 * rope[0].shape[1],
        "BYTES": pages.shape[1],
        "RATIO": ratio,
        "EPS": eps,
    }
    kernel_for(projected, "compress.cu", "keys", defines).launch(
        len(projected),
        32,
        0,
        [projected, norm, *rope, slots, positions, table, table.stride(0), block_size // ratio, pages],
        dependent=True,
    )


__all__ = ["keys_taken", "pool", "pool_taken", "write_keys"]
