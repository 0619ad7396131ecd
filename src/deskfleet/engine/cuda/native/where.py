"""The kernel for the memory that it works on: of a GPU, or in the emulator."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from deskfleet.engine.cuda import native


def kernel_for(
    like: Tensor, file: str, entry: str, defines: Mapping[str, int | float | str]
) -> native.Kernel | native.EmulatedKernel:
    """Kernel `entry` of `file` for the device of a tensor."""
    return (native.kernel if like.is_cuda else native.emulated)(file, entry, defines)


__all__ = ["kernel_for"]
