"""A tensor-parallel group in one process: N runners in N threads, and collectives over a barrier.

For what separate processes hide: every rank's tensors can be walked, every number a rank hands to the others is seen,
and memory can be poisoned before it is used. The main thread is rank 0.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deskfleet.engine.distributed import Communicator
from deskfleet.engine.runner import ModelRunner
from deskfleet.engine.weights import Allocate
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.limits import RunnerLimits
from deskfleet.model.packs import PackedTables


class Exchange:
    """Where the threads of a group hand each other one value per round."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)
        self._parts: dict[tuple[int, int], Exchange] = {}

    def part(self, number: int, size: int) -> Exchange:
        """The exchange of the number-th `size` ranks among themselves."""
        return self._parts.setdefault((number, size), Exchange(size))

    def swap(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        self._values[rank] = value
        self._barrier.wait(timeout=60)
        values = list(self._values)
        self._barrier.wait(timeout=60)  # nobody writes the next round before everyone has read this one
        return values

    def abort(self) -> None:
        """Wake everyone who waits, with BrokenBarrierError."""
        self._barrier.abort()
        for part in self._parts.values():
            part.abort()


class ThreadCommunicator(Communicator):
    """The collectives of one thread. `sent` is called with every tensor that this rank contributes."""

    def __init__(self, rank: int, exchange: Exchange, sent: Callable[[int, Tensor], None]) -> None:
        super().__init__(rank, exchange.size)
        self._exchange = exchange
        self._sent = sent

    def split(self, size: int) -> Communicator:
        if size == self.size:
            return self
        if size == 1:
            return Communicator()
        return ThreadCommunicator(self.rank % size, self._exchange.part(self.rank // size, size), self._sent)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._sent(self.rank, tensor)
        parts = self._exchange.swap(self.rank, tensor.clone())
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return tensor.copy_(total)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._sent(self.rank, tensor)
        return [part.clone() for part in self._exchange.swap(self.rank, tensor.contiguous())]

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self._exchange.swap(self.rank, tensor.clone())[0])

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        first: bytes = self._exchange.swap(self.rank, payload)[0]
        return first


class NaNWatch(TorchDispatchMode):
    """Notes every operator of this thread that returns a NaN. Views and uninitialised memory are no results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.__name__:
            for value in result if isinstance(result, tuple | list) else (result,):
                if isinstance(value, Tensor) and value.is_floating_point() and has_nan(value):
                    self.found.append(func.__name__)
        return result


class Lockstep:
    """Ranks of one checkpoint, driven through `leader` from the thread that entered.

    `not_finite` collects "rank r: what" for every NaN an operator made and every non-finite number a rank sent.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tp_size: int,
        limits: RunnerLimits,
        *,
        pad_compressed_id: int,
        allocate: Allocate | None = None,
        with_drafts: bool = False,
        pack: PackedTables | None = None,
    ) -> None:
        self.plan = ShardPlan(checkpoint.config, Layout(tp_size))
        self.not_finite: list[str] = []
        self._exchange = Exchange(tp_size)
        self.runners = [
            ModelRunner(
                checkpoint,
                self.plan,
                ThreadCommunicator(rank, self._exchange, self._check_sent),
                limits,
                pad_compressed_id=pad_compressed_id,
                allocate=allocate,
                with_drafts=with_drafts,
                pack=pack,
            )
            for rank in range(tp_size)
        ]
        self._watches = [NaNWatch() for _ in self.runners]
        self._threads = [
            threading.Thread(target=self._follow, args=(rank,), daemon=True) for rank in range(1, tp_size)
        ]

    @property
    def leader(self) -> ModelRunner:
        return self.runners[0]

    def __enter__(self) -> Self:
        _resolve_operators()
        for thread in self._threads:
            thread.start()
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)  # the ranks wait for each other hundreds of times a step
        self._watches[0].__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watches[0].__exit__(kind, error, trace)
        sys.setswitchinterval(self._switch_interval_s)
        if error is not None:
            self._exchange.abort()
        else:
            self.leader.stop()
        for thread in self._threads:
            thread.join(timeout=60)
        for runner in self.runners:
            runner.close()
        for rank, watch in enumerate(self._watches):
            self.not_finite += [f"rank {rank}: {name} made a NaN" for name in watch.found]

    def _follow(self, rank: int) -> None:
        finished = False
        try:
            with self._watches[rank]:
                while self.runners[rank].follow():
                    pass
            finished = True
        finally:  # whatever happened is reported by pytest; the others must not wait for this rank
            if not finished:
                self._exchange.abort()

    def _check_sent(self, rank: int, tensor: Tensor) -> None:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.to(torch.float64)).all()):
            self.not_finite.append(f"rank {rank}: sent a non-finite {tuple(tensor.shape)}")


@functools.cache
def _resolve_operators() -> None:
    """Make torch's Python objects of all operators before threads do.

    Two threads that watch an operator at its first use both make one; torch keeps a bare pointer to the loser, and a
    later look at it finds whatever lies there.
    """
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace == "aten":
            packet, _, overload = operator.partition(".")
            getattr(getattr(torch.ops.aten, packet), overload or "default")


def poisoned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """A buffer full of 0xFF: NaN as bf16, float32, E4M3 and E8M0 alike, and -6 as FP4."""
    buffer = np.empty(shape, dtype)
    buffer.reshape(-1).view(np.uint8)[...] = 0xFF
    return buffer


def has_nan(tensor: Tensor) -> bool:
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        tensor = tensor.to(torch.float32)
    return bool(torch.isnan(tensor).any())


def tensors_of(thing: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor reachable from `thing` through attributes, lists, tuples and dicts, with its path."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield path, thing
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield from tensors_of(value, f"{path}[{key!r}]", seen)
    elif isinstance(thing, list | tuple):
        for index, value in enumerate(thing):
            yield from tensors_of(value, f"{path}[{index}]", seen)
    elif type(thing).__module__.startswith("deskfleet."):
        fields = getattr(thing, "__dict__", None) or {
            name: getattr(thing, name) for name in getattr(type(thing), "__slots__", ())
        }
        for name, value in fields.items():
            yield from tensors_of(value, f"{path}.{name}", seen)
