"""Products of a few rows by the kernels of linear.cu. Owns how each is cut into blocks and warps.

A block has a strip of outputs, its warps share the columns, and their sums meet in shared memory in the order of the
warps: no sum waits for another block, and a result does not depend on who was last. On a device they are
launched so that they may begin, and read weights, while the kernel before them still runs. On the CPU the
same source runs in the emulator.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deskfleet.engine.cuda import native
from deskfleet.engine.cuda.packing import Fp8Tiles

Form = Literal["FP8", "WIDE", "BF16"]

MOST_ROWS = 64
"""Rows of a step that the kernels of this package are for."""
MOST_PRODUCT_ROWS = 16
"""Rows of a product: of more, every block would read too many rows of x, and the tensor cores' FP8 instructions, which
Triton issues, need fewer conversions."""

_EMULATED_PROCESSORS = 3
_STEP = 256  # columns that a warp loads at a time
_REGISTERS = {"FP8": 34, "WIDE": 34, "BF16": 64}  # of a lane, for a step of 16 rows
_HELD_REGISTERS = 72  # of weights under way
_MOST_WARPS, _MOST_OF_FEW = 16, 20  # of a block; of one of few blocks
_FEWER_WARPS, _FEWER_OF_FEW = 10, 16  # the same of more than 8 rows, whose sums take registers
_LOOPING_WARPS = 8  # where two tiles of those are in a loop
_STRIPS, _FEW_STRIPS = 160, 80  # at most so many blocks, if strips can be wider; so few leave processors idle


@dataclass(frozen=True, slots=True)
class Cut:
    """How one matrix is shared out: `tiles` of 16 outputs a warp, rows padded to 1, 2, 4, 8 or 16, warps along columns
    and along outputs, steps of 256 columns a warp, and how many of those are under way."""

    tiles: int
    padded: int
    column_warps: int
    output_warps: int
    steps: int
    stages: int

    @property
    def outputs(self) -> int:
        """Of a block."""
        return 16 * self.tiles * self.output_warps

    @property
    def threads(self) -> int:
        return 32 * self.column_warps * self.output_warps

    @property
    def shared_bytes(self) -> int:
        """Sums of every warp."""
        return 4 * self.column_warps * self.outputs * (self.padded | 1)

    def defines(self) -> dict[str, int]:
        return {
            "TILES": self.tiles,
            "PADDED": self.padded,
            "COLUMN_WARPS": self.column_warps,
            "OUTPUT_WARPS": self.output_warps,
            "STEPS": self.steps,
            "STAGES": self.stages,
        }


def padded(num_rows: int) -> int:
    """1, 2, 4, 8 or 16: fewer than 8, and more scale groups share a product."""
    return next((n for n in (1, 2, 4, 8) if num_rows <= n), MOST_PRODUCT_ROWS)


def cut(form: Form, num_outputs: int, num_columns: int, num_rows: int, *, least_outputs: int = 16) -> Cut:
    """Strips so narrow that most processors have one, then as many warps along the columns as leave each the fewest."""
    outputs = least_outputs
    while outputs < 64 and num_outputs > _STRIPS * outputs:
        outputs *= 2
    tiles = 1 if form == "BF16" else min(outputs // 16, 2)
    output_warps = outputs // (16 * tiles)
    few = output_warps == tiles == 1 and num_outputs <= _FEW_STRIPS * outputs
    all_steps = -(-num_columns // _STEP)
    own = padded(num_rows)
    warps, warps_of_few = (_MOST_WARPS, _MOST_OF_FEW) if own <= 8 else (_FEWER_WARPS, _FEWER_OF_FEW)
    if own > 8 and tiles == 2 and all_steps * output_warps > warps:
        warps = _LOOPING_WARPS
    most = min(warps_of_few if few else warps // output_warps, all_steps)
    steps = -(-all_steps // most)
    stages = max(1, min(steps, _HELD_REGISTERS // (tiles * _REGISTERS[form])))
    return Cut(tiles, own, -(-all_steps // steps), output_warps, steps, stages)


def fp8_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Fp8Tiles,
    out: Tensor,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_head: int = 0,
    out_scales: Tensor | None = None,
) -> None:
    """As linear.fp8_linear with every sum taken."""
    rotates = rope is not None and rope_head > 0
    cos, sin = rope if rope is not None and rotates else (x, x)
    _linear(
        "FP8", x, x_scales, weight.codes, weight.scales, out, out_scales, (cos, sin),
        num_outputs=weight.num_rows, num_columns=weight.num_columns, groups=1,
        head=rope_head if rotates else 0, rope=2 * cos.shape[1] if rotates else 1,
    )  # fmt: skip


def grouped_linear(x: Tensor, weight: Fp8Tiles, out: Tensor, out_scales: Tensor, *, groups: int) -> None:
    """As linear.grouped_linear."""
    _linear(
        "WIDE", x, x, weight.codes, weight.scales, out, out_scales, (x, x),
        num_outputs=weight.num_rows, num_columns=weight.num_columns, groups=groups, head=0, rope=1,
    )  # fmt: skip


def bf16_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """As linear.bf16_linear."""
    _linear(
        "BF16", x, x, weight, x, out, None, (x, x),
        num_outputs=out.shape[1], num_columns=x.shape[1], groups=1, head=0, rope=1,
    )  # fmt: skip


def _linear(
    form: Form, x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, out: Tensor, out_scales: Tensor | None,
    turn: tuple[Tensor, Tensor], *, num_outputs: int, num_columns: int, groups: int, head: int, rope: int,
) -> None:  # fmt: skip
    num_rows = len(x)
    own = cut(form, num_outputs, num_columns, num_rows, least_outputs=16 if out_scales is None else 32)
    defines = own.defines() | {
        "FORM_": form,
        "K": num_columns,
        "N": num_outputs,
        "STRIDE": groups * num_columns,
        "GROUP_OUTPUTS": num_outputs // groups,
        "OUTPUT": 1 if out_scales is not None else 2 if form == "BF16" else 0,
        "HEAD": head,
        "ROPE": rope,
        "PER_PROCESSOR": 1,
    }
    _kernel(x, "linear.cu", "linear", defines).launch(
        (-(-num_outputs // own.outputs), -(-num_rows // own.padded), 1),
        own.threads,
        own.shared_bytes,
        [x, x_scales, codes, scales, out, out if out_scales is None else out_scales, *turn, num_rows],
        dependent=True,
    )


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; in the emulator a few."""
    if device.type != "cuda":
        return _EMULATED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _kernel(
    like: Tensor, file: str, entry: str, defines: Mapping[str, int | str]
) -> native.Kernel | native.EmulatedKernel:
    """The kernel for the device of a tensor."""
    return (native.kernel if like.is_cuda else native.emulated)(file, entry, defines)


__all__ = [
    "MOST_ROWS",
    "Cut",
    "bf16_linear",
    "cut",
    "fp8_linear",
    "grouped_linear",
]
