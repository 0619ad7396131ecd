"""Collectives of ranks of one machine, through memory that they share: no sockets, one sleep for each.

Owns the step from tensors to addresses; the exchange itself is `deskfleet_ops`' (docs/decisions/0022). The memory is an
open file without a name, which the supervisor makes and every rank inherits: nothing is left of it, however ranks end.
Sums are added in the order of ranks. Importing this module raises ImportError where the library is missing.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

import deskfleet_ops
from deskfleet.engine.distributed import Communicator, PeerLost
from deskfleet.errors import EngineError

_library = deskfleet_ops.library()
_all_reduce = _library.df_group_all_reduce
_all_gather = _library.df_group_all_gather
_broadcast = _library.df_group_broadcast
_receive = _library.df_group_receive

_TYPES = {torch.float64: deskfleet_ops.F64, torch.float32: deskfleet_ops.F32, torch.int32: deskfleet_ops.I32}
_SLOT_BYTES = deskfleet_ops.GROUP_SLOT_BYTES
_OUT_OF_STEP = -1001


class SharedMemoryCommunicator(Communicator):
    """Ranks that have `file`, a descriptor, open. One that waits looks ten times a second whether the others live."""

    def __init__(self, file: int, rank: int, size: int, part: int) -> None:
        """The group of `part` of all `size` ranks that rank `rank` of all is in. Raises EngineError."""
        super().__init__(rank % part, part)
        self._file = file
        self._all = (rank, size)
        self._divided: SharedMemoryCommunicator | None = None
        self._first_slot = ctypes.create_string_buffer(_SLOT_BYTES)
        # Waiting awake takes the core from the rank that is waited for, unless each has one.
        may_spin = size <= len(os.sched_getaffinity(0))
        self._group = _library.df_group_open(file, rank, size, part, may_spin)
        if self._group < 0:
            raise EngineError(f"cannot map the memory that ranks share: {os.strerror(-self._group)}")

    @classmethod
    def join(cls, rank: int, size: int, file: int) -> SharedMemoryCommunicator:
        """Meet the other ranks; blocks until all are there. Raises EngineError."""
        joined = cls(file, rank, size, size)
        joined._done(_all_gather(joined._group, None, 0, None))
        return joined

    def leave(self) -> None:
        """Leave the group; the object is of no use afterwards, nor are what it was split into and the file."""
        for group in (self._divided, self):
            if group is not None:
                _library.df_group_close(group._group)
        os.close(self._file)

    def _split(self, size: int) -> Communicator:
        if self._divided is not None:
            raise EngineError("the memory that ranks share has room for one division of them")
        self._divided = SharedMemoryCommunicator(self._file, *self._all, size)
        return self._divided

    def _all_reduce(self, tensor: Tensor) -> None:
        kind = _TYPES.get(tensor.dtype)
        if kind is None or not tensor.is_contiguous():
            raise EngineError(f"ranks add up dense tensors of {list(_TYPES)}, not {tensor.dtype}")
        self._done(_all_reduce(self._group, tensor.data_ptr(), tensor.numel(), kind))

    def _all_gather(self, own: Tensor) -> list[Tensor]:
        parts = torch.empty(self.size, *own.shape, dtype=own.dtype)
        self._done(_all_gather(self._group, own.data_ptr(), own.nbytes, parts.data_ptr()))
        return list(parts.unbind())

    def _broadcast(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise EngineError("ranks broadcast dense tensors")
        self._done(_broadcast(self._group, tensor.data_ptr(), tensor.nbytes))

    def _broadcast_bytes(self, payload: bytes | None) -> bytes:
        if self.rank == 0:
            payload = payload or b""
            self._done(_broadcast(self._group, payload, len(payload)))
            return payload
        num_bytes = self._done(_receive(self._group, self._first_slot))
        if num_bytes <= _SLOT_BYTES:
            return ctypes.string_at(self._first_slot, num_bytes)
        whole = bytearray(num_bytes)
        whole[:_SLOT_BYTES] = self._first_slot.raw
        rest = (ctypes.c_char * (num_bytes - _SLOT_BYTES)).from_buffer(whole, _SLOT_BYTES)
        self._done(_broadcast(self._group, rest, len(rest)))
        return bytes(whole)

    def _done(self, result: int) -> int:
        """What a collective gave. Raises PeerLost, and EngineError when ranks are at different ones."""
        if result >= 0:
            return result
        if result > _OUT_OF_STEP:
            raise PeerLost(f"rank {-1 - result} ended in the middle of what all do together")
        raise EngineError(
            f"ranks are out of step: rank {_OUT_OF_STEP - result} and rank {self._all[0]} exchange different things"
        )


__all__ = ["SharedMemoryCommunicator"]
