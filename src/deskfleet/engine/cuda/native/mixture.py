"""Experts of a few rows by the kernels of experts.cu and experts_ring.cu. Owns which takes what, in which blocks.

An item is an expert and some of its rows; its outputs are strips, units, which blocks share out equally. experts.cu
loads weights into the registers of the warps that multiply them, which gets one or two units a block done soonest; of
many rows, gates and up values come by a ring in shared memory, which keeps memory busier (decision 0024).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from deskfleet.engine.cuda.native import products
from deskfleet.engine.cuda.native.arguments import Argument
from deskfleet.engine.cuda.native.where import kernel_for
from deskfleet.engine.cuda.packing import Fp4Tiles, Fp8Tiles

_RESIDENT = 2  # blocks of a processor, of experts.cu
_STAGES, _FEW_STAGES = 5, 4  # blocks of an expert's weights under way, a warp
_FEW_ROWS = 8  # of a step whose experts' units are few
_RING_PAIRS = 2  # of warpgroups, which have all rows of a tile each
_RING_STAGES, _EXACT_RING_STAGES = 8, 4  # of the ring; beside x in bf16
_STAGE_BYTES = 2 * (8192 + 512)  # two blocks of 128 columns of a tile


@dataclass(frozen=True, slots=True)
class Items:
    """A work list of experts.py: items int32 [max, 2], how many int32 [1], pairs int32 [max, 8 * eights]."""

    items: Tensor
    num_items: Tensor
    pairs: Tensor


def _columns_bytes(width: int, members: int, *, exact: bool) -> int:
    """Of Columns of exact.cuh, or of codes.cuh."""
    return -(-width // 128) * 4 * (members * 64 + 16 if exact else members * 32 + 16 + members * 4)


def _divisor(number: int, most: int) -> int:
    """The greatest that is at most `most`."""
    return max(n for n in range(1, most + 1) if number % n == 0)


@functools.cache
def most_shared_bytes(device: torch.device) -> int:
    """Shared memory that a block may have, all of a processor's but 1 KiB: 227 KiB of data-centre GPUs and in the
    emulator, 99 KiB of others."""
    if device.type != "cuda":
        return 227 << 10
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor) - (1 << 10)


def _ring_bytes(width: int, members: int, *, exact: bool) -> int:
    """Stages, gates, x, sums of two units, places and weights of two items."""
    stages = _EXACT_RING_STAGES if exact else _RING_STAGES
    sums = 2 * 4 * _RING_PAIRS * 2 * 64 * (members + 1)
    return (
        stages * (_STAGE_BYTES + 16) + 8 + _columns_bytes(width, members, exact=exact) + sums + 16 * members
    )


def takes_ring(
    width: int, gates: int, num_rows: int, members: int, device: torch.device, *, exact: bool
) -> bool:
    """Whether experts_ring.cu has gates and up values: whole tiles, several of them a processor, and room."""
    fits = _ring_bytes(width, members, exact=exact) <= most_shared_bytes(device)
    return num_rows > _FEW_ROWS and members == 8 and width % 128 == 0 and gates % 64 == 0 and fits


def _up_bytes(width: int, members: int, warpgroups: int, *, exact: bool) -> int:
    """x, sums of two units, places and weights of two items."""
    columns = _columns_bytes(width, members, exact=exact)
    return columns + 2 * 4 * warpgroups * 64 * (members + 1) + 16 * members


def _arithmetic(exact: bool) -> dict[str, int]:
    """Which products the kernels have."""
    return {"EXACT": 1} if exact else {}


def expert_up(
    x: Tensor, x_scales: Tensor, weight: Fp4Tiles, shared: Fp8Tiles, work: Items, route_weights: Tensor,
    out: tuple[Tensor, Tensor], shared_out: tuple[Tensor, Tensor], *, num_chosen: int, limit: float,
) -> None:  # fmt: skip
    """w1 and w3 of the routed experts and of the shared one, SwiGLU and route weight: codes and scales of both."""
    num_rows, width, gates = len(x), weight.num_columns, weight.num_rows // 2
    units, (most_items, members) = gates // 32, work.pairs.shape
    processors = products.num_processors(x.device)
    arguments: list[Argument] = [
        x, x_scales, weight.codes, weight.scales, shared.codes, shared.scales,
        work.items, work.num_items, work.pairs, route_weights, *out, *shared_out, num_rows, float(limit),
    ]  # fmt: skip
    exact = weight.exact
    common = {"K": width, "F": gates, "NUM_CHOSEN": num_chosen, "MEMBERS": members} | _arithmetic(exact)
    if takes_ring(width, gates, num_rows, members, x.device, exact=exact):
        stages = _EXACT_RING_STAGES if exact else _RING_STAGES
        kernel_for(x, "experts_ring.cu", "up", common | {"STAGES": stages}).launch(
            (processors, 1, 1),
            256 * _RING_PAIRS + 32,
            _ring_bytes(width, members, exact=exact),
            arguments,
            dependent=True,
        )
        return
    # Of few units a processor has one at most: more warpgroups, each with fewer blocks.
    alone = most_items * units <= processors
    all_blocks = -(-width // 128)
    blocks = -(-all_blocks // min(5 if alone else 2, all_blocks))
    warpgroups = -(-all_blocks // blocks)
    # Rows of an item of the shared expert: its weights are read once for so many.
    fits = _up_bytes(width, 16, warpgroups, exact=exact) <= most_shared_bytes(x.device)
    shared_members = 16 if num_rows > 8 and fits else 8
    stages, most = _divisor(blocks, _FEW_STAGES), max(members, shared_members)
    defines = common | {
        "UP": 1,
        "SHARED_MEMBERS": shared_members,
        "WARPGROUPS": warpgroups,
        "BLOCKS": blocks,
        "STAGES": stages,
        "SHARED_STAGES": (stages + 1) // 2,
        "ALONE": alone,
        "PER_PROCESSOR": 1 if alone else _RESIDENT,
    }
    items = most_items + -(-num_rows // shared_members)
    kernel_for(x, "experts.cu", "up", defines).launch(
        (units * items if alone else _RESIDENT * processors, 1, 1),
        128 * warpgroups,
        _up_bytes(width, most, warpgroups, exact=exact),
        arguments,
        dependent=True,
    )


def expert_down(
    x: tuple[Tensor, Tensor], weight: Fp4Tiles, shared_x: tuple[Tensor, Tensor], shared: Fp8Tiles, work: Items,
    out: Tensor, shared_out: Tensor,
) -> None:  # fmt: skip
    """w2 of both: bf16 [P, M] by pair, and bf16 [T, M]. Must follow `expert_up` of the same list."""
    num_rows, gates, width = len(shared_out), weight.num_columns, weight.num_rows
    most_items, members = work.pairs.shape
    warpgroups, shared_members = 2, 16 if num_rows > 8 else 8
    units = -(-width // (64 * warpgroups))
    processors = products.num_processors(out.device)
    alone = most_items * units <= _RESIDENT * processors
    all_blocks, most = -(-gates // 128), max(members, shared_members)
    stages = _divisor(all_blocks, _STAGES)
    defines = _arithmetic(weight.exact) | {
        "DOWN": 1,
        "K": width,
        "F": gates,
        "MEMBERS": members,
        "SHARED_MEMBERS": shared_members,
        "WARPGROUPS": warpgroups,
        "STAGES": stages,
        "SHARED_STAGES": (stages + 1) // 2,
        "ALONE": alone,
        "PER_PROCESSOR": _RESIDENT,
    }
    items = most_items + -(-num_rows // shared_members)
    kernel_for(out, "experts.cu", "down", defines).launch(
        (units * items if alone else _RESIDENT * processors, 1, 1),
        128 * warpgroups,
        2 * _columns_bytes(gates, most, exact=weight.exact) + 4 * warpgroups * 64 * (most + 1) + 16 * most,
        [
            *x, weight.codes, weight.scales, *shared_x, shared.codes, shared.scales,
            work.items, work.num_items, work.pairs, out, shared_out, num_rows,
        ],
        dependent=True,
    )  # fmt: skip


__all__ = ["Items", "expert_down", "expert_up", "most_shared_bytes", "takes_ring"]
