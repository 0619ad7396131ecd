"""Collectives of one tensor-parallel group. Owns what they mean, and gloo, over which ranks of several machines meet.

A group of one does nothing, so the model has a single code path. Partial sums travel as float64: the sums of
quantised products are then the same whatever the number of ranks, and a token does not depend on tp_size. Knows nothing
of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from deskfleet.engine.spec import Transport
from deskfleet.errors import EngineError

TIMEOUT = timedelta(days=30)
"""Of a collective. Liveness is the supervisor's business: it watches processes, not clocks."""


class PeerLost(EngineError):
    """A collective failed because another rank is gone. Why it is gone, others know."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """How ranks exchange: what was asked for, what they do, and in which way or why not as asked."""

    asked: Transport
    got: Transport
    detail: str

    def __str__(self) -> str:
        return f"{self.got} ({self.detail}), asked for {self.asked}"


class Communicator:
    """The collectives of rank `rank` in a group of `size`. This class is a group of one; others exchange."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def split(self, size: int) -> Communicator:
        """The `size` neighbours of this rank that share `rank // size`. Every rank must call this, once; `size`
        divides ours."""
        if size == self.size:
            return self
        return Communicator() if size == 1 else self._split(size)

    def leave(self) -> None:
        """Leave the group; the object is of no use afterwards."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum of the dense `tensor` over ranks, in place; returned for chaining."""
        if self.size > 1:
            self._all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The `tensor` of every rank, in rank order; shapes must be equal."""
        return [tensor] if self.size == 1 else self._all_gather(tensor.contiguous())

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's dense `tensor` on every rank, in place."""
        if self.size > 1:
            self._broadcast(tensor)
        return tensor

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes on every rank; other ranks pass None."""
        return (payload or b"") if self.size == 1 else self._broadcast_bytes(payload)

    # What a group of more than one does. A collective raises PeerLost, or RuntimeError of gloo, when a rank is gone.

    def _split(self, size: int) -> Communicator:
        raise NotImplementedError

    def _all_reduce(self, tensor: Tensor) -> None:
        raise NotImplementedError

    def _all_gather(self, own: Tensor) -> list[Tensor]:
        raise NotImplementedError

    def _broadcast(self, tensor: Tensor) -> None:
        raise NotImplementedError

    def _broadcast_bytes(self, payload: bytes | None) -> bytes:
        raise NotImplementedError


class GlooCommunicator(Communicator):
    """Ranks that reach each other over TCP."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        """`group` None is every rank that has joined."""
        super().__init__(rank, size)
        self._group = group

    @classmethod
    def join(cls, rank: int, size: int, rendezvous: str) -> GlooCommunicator:
        """Meet the other ranks. `rendezvous` is a file:// or tcp:// URL; blocks until all are there."""
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=TIMEOUT)
        return cls(rank, size)

    def leave(self) -> None:
        """Leave the group; the object is of no use afterwards."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _split(self, size: int) -> Communicator:
        groups = [
            dist.new_group(list(range(first, first + size)), timeout=TIMEOUT)
            for first in range(0, self.size, size)
        ]
        return GlooCommunicator(self.rank % size, size, groups[self.rank // size])

    def _all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._group)

    def _all_gather(self, own: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather([_as_bytes(part) for part in parts], _as_bytes(own), group=self._group)
        return parts

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(_as_bytes(tensor), src=0)

    def _broadcast_bytes(self, payload: bytes | None) -> bytes:
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


__all__ = ["TIMEOUT", "Communicator", "GlooCommunicator", "Meeting", "PeerLost"]
