"""Sums over the ranks of a tensor-parallel group that compute on GPUs. Owns how devices exchange, and which device a
rank has; what is summed, and where in a step, is step.py's.

    alone     one rank: nothing is launched
    host      tensors on the host, through the ranks' own communicator: for Triton's interpreter
    NCCL      GPUs anywhere
    symmetric GPUs of one machine that reach each other's memory: one kernel a sum where it is small enough (`way`),
              NCCL above

Sums are float32, and every rank gets the same bits: the kernels add in the order of ranks, and NCCL adds every element
on one rank, or in one order. Unlike on the CPU, where partial sums are float64, the last bits depend on the number of
ranks. All of it is launched on the current stream and may be captured in a graph; every rank must capture and launch
alike. NVLink multicast stays off: where a virtual machine is not given it, asking for it fails, or worse.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from deskfleet.engine.distributed import TIMEOUT, Communicator
from deskfleet.errors import EngineError

Way = Literal["one-shot", "two-shot", "NCCL"]

_WAYS: tuple[tuple[int, Way], ...] = ((160 << 10, "one-shot"), (4 << 20, "two-shot"))
"""Bytes up to which a way is the fastest, on two H200 joined by NVLink; NCCL above. In one shot every rank reads what
all have, in two each adds up a part and gives it to all."""

_FLOAT_BYTES = 4
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def way(num_bytes: int) -> Way:
    """How GPUs that reach each other's memory add up a tensor of `num_bytes`."""
    return next((name for most, name in _WAYS if num_bytes <= most), "NCCL")


class DeviceGroup:
    """The exchanges of rank `rank` of `size`. This class is a group of one, which has none; others exchange.

    `memory` float32 [n] is where a step puts what is to be summed: what lies there is summed fastest.
    """

    is_alone = True

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.memory = torch.zeros(0)

    def __str__(self) -> str:
        return "none (one rank)"

    def reserve(self, num_floats: int) -> None:
        """Take the memory. Every rank must call this, once and alike."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum of the dense float32 `tensor` over ranks, in place."""

    def all_gather(self, own: Tensor, out: Tensor) -> None:
        """`own` float32 [...] of every rank, of equal shapes, into the dense `out` [size, ...], in rank order."""
        out[0].copy_(own)

    def leave(self) -> None:
        """Leave the group. Graphs that have its exchanges in them must be gone."""


class HostGroup(DeviceGroup):
    """Through `comm`, for kernels that are interpreted on the host."""

    is_alone = False

    def __init__(self, comm: Communicator, device: torch.device | str = "cpu") -> None:
        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._device = device

    def __str__(self) -> str:
        return "host (the ranks' own communicator)"

    def reserve(self, num_floats: int) -> None:
        self.memory = torch.zeros(num_floats, device=self._device)

    def all_reduce(self, tensor: Tensor) -> None:
        self._comm.all_reduce(tensor)

    def all_gather(self, own: Tensor, out: Tensor) -> None:
        for place, part in enumerate(self._comm.all_gather(own)):
            out[place].copy_(part)


class NcclGroup(DeviceGroup):
    """Through NCCL. `why` says why not in a faster way."""

    is_alone = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device, why: str) -> None:
        """Exchanges once, which connects the devices: that cannot be done while a graph is captured.

        Raises EngineError where the sum is wrong.
        """
        super().__init__(group.rank(), group.size())
        self.device = device
        self._group = group
        self._why = why
        check(self, torch.empty(4, device=device))

    def __str__(self) -> str:
        return f"NCCL ({self._why})"

    def reserve(self, num_floats: int) -> None:
        self.memory = torch.zeros(num_floats, device=self.device)

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._group)

    def all_gather(self, own: Tensor, out: Tensor) -> None:
        dist.all_gather_into_tensor(out.view(-1), own.view(-1), group=self._group)

    def leave(self) -> None:
        dist.destroy_process_group(self._group)


class SymmetricGroup(DeviceGroup):
    """Through memory that is mapped into every rank of one machine, as `way` says; NCCL for what is larger."""

    is_alone = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Raises EngineError where a sum is wrong, as `reserve` does."""
        super().__init__(group.rank(), group.size())
        self._nccl = NcclGroup(group, device, "of large sums")
        self._group = group
        # A sum in one shot is taken from here: others still read their terms while its own place is written.
        self._terms = self._mapped(_WAYS[0][0] // _FLOAT_BYTES)

    def __str__(self) -> str:
        ways = ", ".join(f"{name} to {most >> 10} KiB" for most, name in _WAYS)
        return f"symmetric memory ({ways}, NCCL above)"

    def reserve(self, num_floats: int) -> None:
        self.memory = self._mapped(num_floats)
        for most, _ in _WAYS:
            check(self, self.memory[: most // _FLOAT_BYTES])

    def all_reduce(self, tensor: Tensor) -> None:
        chosen, flat = way(tensor.nbytes), tensor.view(-1)
        if chosen == "one-shot":
            terms = self._terms[: len(flat)]
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(terms, flat, "sum", self._group.group_name, flat)
        elif chosen == "two-shot" and _is_part(tensor, self.memory):
            torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", self._group.group_name)
        else:
            self._nccl.all_reduce(tensor)

    def all_gather(self, own: Tensor, out: Tensor) -> None:
        self._nccl.all_gather(own, out)

    def leave(self) -> None:
        self._nccl.leave()

    def _mapped(self, num_floats: int) -> Tensor:
        try:
            memory: Tensor = symmetric_memory.empty(num_floats, dtype=torch.float32, device=self._nccl.device)
            symmetric_memory.rendezvous(memory, self._group)
        except RuntimeError as error:
            raise EngineError(
                f"the GPUs of {self.size} ranks cannot map each other's memory: {str(error).splitlines()[0]}",
                hint="NCCL_P2P_DISABLE=1 has them do without",
            ) from error
        return memory.zero_()


def check(group: DeviceGroup, tensor: Tensor) -> None:
    """Add up what is known, in `tensor`. Every rank must call this. Raises EngineError where the sum is wrong."""
    tensor.fill_(group.rank + 1)
    group.all_reduce(tensor)
    expected = group.size * (group.size + 1) / 2
    if not bool((tensor == expected).all()):
        raise EngineError(
            f"the GPUs of {group.size} ranks add up wrongly, {tensor.nbytes} bytes by {group}: not {expected}",
            hint="look at the machine's links (nvidia-smi topo -m), or serve with fewer ranks",
        )


def _is_part(tensor: Tensor, memory: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


# --- which device, and how ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rank sees: its machine, and the GPUs there that it may use, by their own ids and in its own order.

    `kinds` says of each what it is.
    """

    machine: str
    devices: tuple[str, ...]
    kinds: tuple[str, ...]


def place(ranks: Sequence[Seen]) -> list[int]:
    """Which of its devices each rank has: the first that no rank before it took.

    Raises EngineError without one, and for GPUs of several kinds: each rank computes routes and picks for itself, and a
    last bit that differs would send a row to another expert.
    """
    taken: set[tuple[str, str]] = set()
    chosen = []
    for rank, seen in enumerate(ranks):
        free = [n for n, device in enumerate(seen.devices) if (seen.machine, device) not in taken]
        if not free:
            taken_by = ", which ranks before it have" if seen.devices else ""
            raise EngineError(
                f"rank {rank} has no GPU: its machine shows it {len(seen.devices)}{taken_by}",
                hint="each rank takes a GPU: fewer ranks (--tp), or more GPUs (CUDA_VISIBLE_DEVICES may hide some)",
            )
        chosen.append(free[0])
        taken.add((seen.machine, seen.devices[free[0]]))
    kinds = [seen.kinds[n] for seen, n in zip(ranks, chosen, strict=True)]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise EngineError(
                f"rank {rank} has a {kind}, rank 0 a {kinds[0]}: they would not compute the same bits",
                hint="ranks take GPUs of one kind; CUDA_VISIBLE_DEVICES chooses them",
            )
    return chosen


def meet(comm: Communicator, rendezvous: str | None) -> tuple[torch.device, DeviceGroup]:
    """This rank's device, now the current one, and the group of all devices. Every rank of `comm` must call this.

    `rendezvous` is where ranks meet that have not met through torch. Raises EngineError.
    """
    if comm.size == 1:
        return torch.device("cuda", torch.cuda.current_device()), DeviceGroup()
    ranks = [Seen(machine, tuple(ids), tuple(kinds)) for machine, ids, kinds in _exchanged(comm, _seen())]
    indices = place(ranks)
    device = torch.device("cuda", indices[comm.rank])
    torch.cuda.set_device(device)
    group = join(comm.rank, comm.size, rendezvous)
    why = why_not_symmetric(ranks)
    reached = _exchanged(comm, why is None and _reaches(indices, comm.rank))
    if why is None and not all(reached):
        why = "its GPUs do not reach each other's memory, or must not (NCCL_P2P_DISABLE)"
    if why is not None:
        return device, NcclGroup(group, device, f"asked for symmetric memory, but {why}")
    return device, SymmetricGroup(group, device)


def join(rank: int, size: int, rendezvous: str | None) -> dist.ProcessGroup:
    """A group of NCCL beside the one that ranks have met in; without such a one, they meet at `rendezvous` (a URL), and
    a rank by itself with nobody. Raises EngineError without NCCL."""
    if not dist.is_nccl_available():
        raise EngineError(
            f"GPUs of {size} ranks exchange through NCCL, and torch {torch.__version__} comes without it",
            hint="install a CUDA build of torch for Linux, or serve with one rank",
        )
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    if dist.is_initialized():
        group = dist.new_group(list(range(size)), timeout=TIMEOUT, backend="nccl")
    else:
        where: dict[str, Any] = {"store": HashStore()} if rendezvous is None else {"init_method": rendezvous}
        dist.init_process_group("nccl", rank=rank, world_size=size, timeout=TIMEOUT, **where)
        group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return group


def why_not_symmetric(ranks: Sequence[Seen]) -> str | None:
    """Why ranks cannot map each other's memory, as far as that is seen without trying; None where they may."""
    if len({seen.machine for seen in ranks}) > 1:
        return "its ranks are on several machines"
    if len({seen.devices for seen in ranks}) > 1:
        return "its ranks see different GPUs"
    return None


def _seen() -> tuple[str, list[str], list[str]]:
    """The fields of this rank's Seen."""
    devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    # Containers of one machine have its boot id, and cannot map each other's memory.
    machine = f"{socket.gethostname()} {_BOOT_ID.read_text().strip()}"
    return machine, [str(device.uuid) for device in devices], [device.name for device in devices]


def _reaches(indices: Sequence[int], rank: int) -> bool:
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return False
    own = indices[rank]
    return all(torch.cuda.can_device_access_peer(own, other) for other in indices if other != own)


def _exchanged(comm: Communicator, value: object) -> list[Any]:
    """A JSON value of every rank."""
    payload = json.dumps(value).encode()
    sizes = torch.cat(comm.all_gather(torch.tensor([len(payload)], dtype=torch.int64)))
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    parts = comm.all_gather(padded)
    return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


__all__ = [
    "DeviceGroup",
    "HostGroup",
    "NcclGroup",
    "Seen",
    "SymmetricGroup",
    "check",
    "join",
    "meet",
    "place",
    "way",
    "why_not_symmetric",
]
