"""`DiskTable`: what SGLang makes instead of its `_HostTable`, with the same surface and no rows in memory.

Its `bytes` are the file itself where the graphics card reads mapped files, else addresses behind which nothing is:
whoever touches them ends the process, and cannot take what he finds for rows. Knows its layer and its rank's rows.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import re
from typing import Any, ClassVar, Protocol

import numpy as np

from deskfleet_engram.host import ContractError, HostTable
from deskfleet_engram.host_split import SplitFile

_NO_ACCESS = 0
_NO_RESERVE = 0x4000  # MAP_NORESERVE on x86-64 and aarch64; Python names it from 3.13 on
_NAME = re.compile(r"sglang_engram_(\d+)")


class Opener(Protocol):
    """Who opens a rank's rows."""

    def open_table(self, layer: int, rank: int, world_size: int) -> HostTable:
        """Return the rows of a layer that the rank reads. Raises EngramError."""

    def map_table(self, table: HostTable) -> SplitFile | None:
        """Return the file that a kernel may read, None where rows come through the reader. Raises EngramError."""


class DiskTable:
    """SGLang's `_HostTable`: `layout`, `nbytes`, `bytes` uint8 [nbytes], `device_ptr`, `dirty`, `finish_load`.

    `rows` are the pack's. A subclass says by `opener` where they come from.
    """

    opener: ClassVar[Opener]

    def __init__(self, layout: str, nbytes: int, name: str, group: Any) -> None:
        """As SGLang calls it. Raises ContractError when its idea of this rank's rows is not the pack's."""
        named = _NAME.fullmatch(name)
        if layout != "per_rank" or named is None:
            raise ContractError(f"SGLang asks for a table {name!r} in layout {layout!r}, not per_rank")
        self.layout = layout
        self.nbytes = nbytes
        self.group = group
        self.dirty = False
        self.fd = None
        self.rows = self.opener.open_table(int(named[1]), group.rank_in_group, group.world_size)
        num_bytes = self.rows.num_rows * (self.rows.head_dim + self.rows.num_scales)
        if nbytes != num_bytes:
            raise ContractError(
                f"rank {group.rank_in_group} of {group.world_size}: SGLang wants {nbytes} bytes of layer {named[1]}, "
                f"but columns {self.rows.columns[0]} to {self.rows.columns[-1]} of the pack have {num_bytes}"
            )
        self.split = self.opener.map_table(self.rows)
        self.mm = _addresses(nbytes) if self.split is None else self.split.mapping
        self.device_ptr = int(np.frombuffer(self.mm, dtype=np.uint8).ctypes.data)
        memory = (ctypes.c_uint8 * nbytes).from_address(self.device_ptr)
        torch = importlib.import_module("torch")
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def finish_load(self, label: str) -> None:
        """Nothing was loaded."""


def _addresses(nbytes: int) -> mmap.mmap:
    """Return addresses that belong to nobody else, and that nobody may touch."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return mmap.mmap(-1, nbytes, flags=flags, prot=_NO_ACCESS)


__all__ = ["DiskTable", "Opener"]
