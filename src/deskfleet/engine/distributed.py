"""Collectives of one tensor-parallel group. Owns the process group; knows nothing of models.

A group of one does nothing, so the model has a single code path. Partial sums travel as float64: the sums of
quantised products are then the same whatever the number of ranks, and a token does not depend on tp_size.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_TIMEOUT = timedelta(days=30)  # liveness is the supervisor's business: it watches processes, not clocks


class Communicator:
    """The collectives of rank `rank` in a group of `size`."""

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        """`group` None is every rank that has joined."""
        self.rank = rank
        self.size = size
        self._group = group

    @classmethod
    def join(cls, rank: int, size: int, rendezvous: str) -> Communicator:
        """Meet the other ranks over gloo. `rendezvous` is a file:// or tcp:// URL; blocks until all are there."""
        if size > 1:
            dist.init_process_group(
                "gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=_TIMEOUT
            )
        return cls(rank, size)

    def split(self, size: int) -> Communicator:
        """The `size` neighbours of this rank that share `rank // size`. Every rank must call this; `size` divides
        ours."""
        if size == self.size:
            return self
        if size == 1:
            return Communicator()
        groups = [
            dist.new_group(list(range(first, first + size)), timeout=_TIMEOUT)
            for first in range(0, self.size, size)
        ]
        return Communicator(self.rank % size, size, groups[self.rank // size])

    def leave(self) -> None:
        """Leave the group; the object is of no use afterwards."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum of `tensor` over ranks, in place; returned for chaining."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The `tensor` of every rank, in rank order; shapes must be equal."""
        if self.size == 1:
            return [tensor]
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather([_as_bytes(part) for part in parts], _as_bytes(own), group=self._group)
        return parts

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's contiguous `tensor` on every rank, in place."""
        if self.size > 1:
            dist.broadcast(_as_bytes(tensor), src=0)
        return tensor

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes on every rank; other ranks pass None."""
        if self.size == 1:
            return payload or b""
        length = torch.tensor([len(payload) if payload is not None else 0], dtype=torch.int64)
        dist.broadcast(length, src=0)
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if payload is not None and len(payload) > 0:
            buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(buffer, src=0)
        return buffer.numpy().tobytes()


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8: gloo knows few dtypes, and moving bytes needs none."""
    return tensor.view(-1).view(torch.uint8)


__all__ = ["Communicator"]
