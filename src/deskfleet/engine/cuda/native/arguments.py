"""What a kernel is launched with: addresses and numbers in one buffer, in the order of its parameters.

Owns the step from Python values to bytes. The buffer is a kernel's own and is written anew by every launch, so that a
launch allocates nothing; two threads must not launch the same kernel at once.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch

from deskfleet.errors import EngineError

Argument = torch.Tensor | int | float | tuple[str, int] | None
Shape = int | tuple[int, ...]

_SLOT_BYTES = 8
_CODES = {"p": "Q", "i": "i4x", "f": "f4x", "l": "q"}  # as struct writes them, each in a slot of its own
_BYTES = {"p": 8, "i": 4, "f": 4, "l": 8}


class Arguments:
    """The parameters of one kernel: `pointers` has the address of each, for as long as this object lives."""

    def __init__(self, kernel: str, number: int, device: str) -> None:
        self._kernel, self._device = kernel, device
        self._buffer = ctypes.create_string_buffer(_SLOT_BYTES * max(number, 1))
        begin = ctypes.addressof(self._buffer)
        self.pointers = (ctypes.c_void_p * max(number, 1))(
            *range(begin, begin + _SLOT_BYTES * number, _SLOT_BYTES)
        )

    def pack(self, arguments: Sequence[Argument]) -> str:
        """Write them, and say what they are: a letter each, p(ointer), i(nt32), f(loat32), l(ong, int64).

        A tensor is its address, None the null address, ("i64", n) an int64. Raises EngineError for a tensor of another
        device and for a number that does not fit.
        """
        letters: list[str] = []
        values: list[float] = []
        for position, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                if argument.device.type != self._device:
                    raise EngineError(
                        f"argument {position} of {self._kernel} lies on {argument.device}, not on {self._device}"
                    )
                letters.append("p")
                values.append(argument.data_ptr())
            elif isinstance(argument, int):
                letters.append("i")
                values.append(argument)
            elif isinstance(argument, float):
                letters.append("f")
                values.append(argument)
            elif argument is None:
                letters.append("p")
                values.append(0)
            elif isinstance(argument, tuple) and argument[0] == "i64":
                letters.append("l")
                values.append(argument[1])
            else:
                raise EngineError(f"argument {position} of {self._kernel} is a {type(argument).__name__}")
        if len(values) * _SLOT_BYTES > len(self._buffer):
            raise EngineError(f"{self._kernel} takes fewer arguments than the {len(values)} given")
        try:
            struct.pack_into("=" + "".join(map(_CODES.__getitem__, letters)), self._buffer, 0, *values)
        except (struct.error, OverflowError) as error:
            raise EngineError(
                f"an argument of {self._kernel} does not fit: {error}",
                hint='pass ("i64", n) for a 64-bit parameter',
            ) from error
        return "".join(letters)


def sizes(letters: str) -> list[int]:
    """Bytes of each parameter of these kinds."""
    return [_BYTES[letter] for letter in letters]


def extent(shape: Shape) -> tuple[int, int, int]:
    """A grid or a block of one, two or three dimensions, as three."""
    dimensions = (shape,) if isinstance(shape, int) else shape
    return (*dimensions, 1, 1, 1)[:3]  # type: ignore[return-value]


__all__ = ["Argument", "Arguments", "Shape", "extent", "sizes"]
