"""One memory for the buffers of steps of every size. Owns how `torch.zeros` is answered while a step is made.

Steps run one after another, so a buffer of a step of 4 rows may lie where the same one of 64 rows does: the same is
what the same line of code asks for. That is sound because a buffer is one of four things: written before it is read in
every run; zero before and after every run (counters); the beginning of what every size has there (numbers of places,
frequencies); or, where bytes stay zero for ever (scales beyond a width), laid out in rows of a length that does not
depend on the step. Knows nothing of what a buffer is for.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_HERE = Path(__file__).parent
_ASKING = {str(path) for path in _HERE.glob("*.py") if path.stem not in ("workspace", "model")}


class Site(NamedTuple):
    """Which buffer: the lines of this package that asked for it, the how manieth of them, and whether it is pinned."""

    lines: tuple[tuple[str, int], ...]
    number: int
    pinned: bool


class Workspace:
    """Memory for whatever the makers ask `torch.zeros` for, as much as the greatest of them asks at each site."""

    def __init__(
        self, makers: Sequence[Callable[[str | torch.device], object]], device: torch.device
    ) -> None:
        """Each maker makes a step on the device it is given; here they are tried without memory."""
        self._arenas = {
            site: torch.zeros(
                num_bytes,
                dtype=torch.uint8,
                device="cpu" if site.pinned else device,
                pin_memory=site.pinned and device.type == "cuda",
            )
            for site, num_bytes in measure(makers).items()
        }

    @property
    def device_arenas(self) -> list[Tensor]:
        """The memory that is not the host's, in the interpreter too."""
        return [arena for site, arena in self._arenas.items() if not site.pinned]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, `torch.zeros` gives parts of this memory: for one step."""
        with _Handing(self._arenas):
            yield


def measure(makers: Sequence[Callable[[str | torch.device], object]]) -> dict[Site, int]:
    """The greatest bytes that each site asks for."""
    sizes: dict[Site, int] = {}
    for make in makers:
        with _Measuring(sizes):
            make("meta")
    return sizes


class _Answering(TorchFunctionMode):
    """Answers calls of torch.zeros; all others pass."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[tuple[tuple[tuple[str, int], ...], bool]] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is not torch.zeros:
            return func(*args, **kwargs)
        shape = tuple(args[0]) if args and not isinstance(args[0], int) else tuple(args)
        lines, pinned = _lines(), "device" not in kwargs
        site = Site(lines, self._counts[lines, pinned], pinned)
        self._counts[lines, pinned] += 1
        return self.answer(site, shape, kwargs.get("dtype") or torch.get_default_dtype())

    def answer(self, site: Site, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raise NotImplementedError


class _Measuring(_Answering):
    """Notes the greatest size of each site."""

    def __init__(self, sizes: dict[Site, int]) -> None:
        super().__init__()
        self._sizes = sizes

    def answer(self, site: Site, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._sizes[site] = max(self._sizes.get(site, 0), prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype, device="meta")


class _Handing(_Answering):
    """Gives the beginning of a site's arena. An arena is zero at first, and left so where it must be."""

    def __init__(self, arenas: Mapping[Site, Tensor]) -> None:
        super().__init__()
        self._arenas = arenas

    def answer(self, site: Site, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._arenas[site][: prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _lines() -> tuple[tuple[str, int], ...]:
    """The lines of this package that are being executed, innermost first."""
    found = []
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename in _ASKING:
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


__all__ = ["Site", "Workspace", "measure"]
