"""Several processes that train one model, each on its own GPU: how they start and end, and what they tell each other.

Owns the processes of `--gpus N`, means and sums over ranks, the one clock that decides for all, and the proof that
parameters are the same everywhere. Two groups: tensors travel over NCCL (gloo on a CPU), decisions over gloo in host
memory, so that no decision waits for a device. A training in one process has the same code path, where all of this does
nothing. Knows nothing of models, losses or schedules.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_HOST = "127.0.0.1"
_TIMEOUT = timedelta(
    minutes=10
)  # others wait while rank 0 evaluates and saves; a dead rank is noticed at once
_POLL_S = 0.1
_ALIGNMENT = 128  # elements: where each gradient begins among all, as if it had its own allocation
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Seat:
    """The place of one process: its rank of `world`, the port where all meet, and the process that watches over it."""

    rank: int
    world: int
    port: int
    parent_pid: int

    @classmethod
    def of(cls, text: str, world: int) -> Seat:
        """The reverse of `text`. Raises ValueError."""
        rank, port, parent_pid = map(int, text.split(":"))
        return cls(rank, world, port, parent_pid)

    @property
    def text(self) -> str:
        """RANK:PORT:PID, for a command line."""
        return f"{self.rank}:{self.port}:{self.parent_pid}"


class Ranks:
    """What rank `rank` of `world` says to the others. Every rank must call the same methods in the same order."""

    def __init__(self, rank: int = 0, world: int = 1, control: dist.ProcessGroup | None = None) -> None:
        self.rank, self.world = rank, world
        self._control = control

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides, logs, evaluates and saves."""
        return self.rank == 0

    def now_s(self) -> float:
        """The monotonic clock of rank 0, the same number on every rank: what follows from it alone needs no vote."""
        if self.world == 1:
            return time.monotonic()
        now = torch.tensor([time.monotonic()], dtype=torch.float64)
        dist.broadcast(now, src=0, group=self._control)
        return float(now)

    def wait(self) -> None:
        """Until every rank is here."""
        if self.world > 1:
            dist.barrier(group=self._control)

    @torch.no_grad()
    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of rank 0."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    @torch.no_grad()
    def combine(self, parameters: Mapping[str, Tensor], counts: Sequence[Tensor]) -> None:
        """Make gradients of `parameters` their mean over ranks, and float32 `counts` their sum, in place.

        A gradient that is missing here but not elsewhere counts as zeros; one that is missing everywhere stays so. All
        of it is one sum on the device, in which every rank has the same layout: what is computed from it later rounds
        alike.
        """
        if self.world == 1:
            return
        names = sorted(parameters)
        live = torch.tensor([parameters[name].grad is not None for name in names], dtype=torch.uint8)
        dist.all_reduce(live, dist.ReduceOp.MAX, group=self._control)
        chosen = [parameters[name] for name, is_live in zip(names, live.tolist(), strict=True) if is_live]
        sizes = [-(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT for tensor in (*chosen, *counts)]
        flat = torch.zeros(sum(sizes), device=(*chosen, *counts)[0].device)
        views = [
            part[: tensor.numel()].view_as(tensor)
            for part, tensor in zip(flat.split(sizes), (*chosen, *counts), strict=True)
        ]
        own = [(view, p.grad) for view, p in zip(views, chosen, strict=False) if p.grad is not None]
        own += zip(views[len(chosen) :], counts, strict=True)
        torch._foreach_copy_([view for view, _ in own], [tensor for _, tensor in own])
        dist.all_reduce(flat)
        flat[: sum(sizes[: len(chosen)])] /= self.world
        for parameter, view in zip(chosen, views, strict=False):
            parameter.grad = view
        for count, view in zip(counts, views[len(chosen) :], strict=True):
            count.copy_(view)

    def agree(self, values: Mapping[str, Tensor | int]) -> None:
        """Raise RuntimeError, on every rank, unless all have the same numbers and, to the bit, float32 tensors."""
        if self.world == 1:
            return
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, _checksums(values), group=self._control)
        for rank, other in enumerate(found):
            different = [name for name, value in found[0].items() if other.get(name) != value]
            if different or other.keys() != found[0].keys():
                raise RuntimeError(
                    f"ranks 0 and {rank} disagree on {len(different)} of {len(found[0])} values, first on"
                    f" {next(iter(different), 'their names')}"
                )


ALONE = Ranks()
"""A training in one process."""


def _checksums(values: Mapping[str, Tensor | int]) -> dict[str, int]:
    """Numbers as they are, and of each tensor the sum of its bits as int32: one wait for the device."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    sums: list[int] = []
    if tensors:
        bits = [value.detach().contiguous().view(torch.int32) for value in tensors.values()]
        sums = torch.stack([each.sum(dtype=torch.int64) for each in bits]).tolist()
    numbers = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    return numbers | dict(zip(tensors, sums, strict=True))


def start(world: int, command: Sequence[str]) -> None:
    """Run `command` in `world` processes, each with its `--seat`, until all have ended.

    When one fails the others are ended at once. Raises SystemExit then. They also end with this process, however that
    happens.
    """
    # The store lives here, so that its port is nobody's guess and it outlasts every rank.
    store = _meeting(0, is_master=True)
    environment = dict(os.environ)
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max((os.cpu_count() or 1) // world, 1)))
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whether or not the host's own name resolves
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            seat = Seat(rank, world, store.port, os.getpid())
            processes.append(subprocess.Popen([*command, "--seat", seat.text], env=environment))
        codes: list[int | None] = [None]
        while None in codes and not any(codes):
            time.sleep(_POLL_S)
            codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()  # what is saved is replaced whole, so there is nothing to finish
        for process in processes:
            process.wait()
    failed = [f"rank {rank} {_ending(code)}" for rank, code in enumerate(codes) if code]
    if failed:
        raise SystemExit(f"{', '.join(failed)}\nhint: what it said is above; the same command again goes on")


def _meeting(port: int, *, is_master: bool) -> Any:
    """Where ranks find each other; the master takes any free port for 0."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        _HOST, port, is_master=is_master, wait_for_workers=False, timeout=_TIMEOUT
    )


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


@contextmanager
def joined(seat: Seat, device: torch.device) -> Iterator[Ranks]:
    """The ranks as seen from `seat`, on `device`.

    Blocks until all are there, and at the end until all are done. An error ends the process here and now: others may
    be waiting for it, and an orderly end could wait for them.
    """
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's; it ends the ranks
        _die_with_parent(seat.parent_pid)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = _meeting(seat.port, is_master=False)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=seat.rank,
            world_size=seat.world,
            timeout=_TIMEOUT,
        )
        ranks = Ranks(seat.rank, seat.world, dist.new_group(backend="gloo", timeout=_TIMEOUT))
        yield ranks
        ranks.wait()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - printed, and told by the exit code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _die_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the request above took hold
        raise SystemExit("the process that started this rank has ended")


__all__ = ["ALONE", "Ranks", "Seat", "joined", "start"]
