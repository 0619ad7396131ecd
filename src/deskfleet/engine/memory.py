"""What a rank holds, counted: `census` of its arrays, `process_memory` from the kernel. Decides nothing.

Arrays are found by walking the runner's own objects. A storage counts once, in the first line that reaches it, and as
long as it is, whatever part of it is used: a view that keeps a larger buffer alive shows.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from deskfleet.engine.backends import CpuBackend, CudaBackend
from deskfleet.engine.runner import ModelRunner
from deskfleet.model.memory import DeviceLine, DeviceMemory, ProcessMemory, TensorLine

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_WALKED = ("deskfleet.engine", "deskfleet_engram.geometry", "deskfleet_engram.ownership")
"""Modules whose objects may hold arrays; all others (configurations, process groups, files) are passed by."""


def census(runner: ModelRunner) -> dict[TensorLine, int]:
    """Bytes of every tensor and array that `runner` holds in the host's memory, by line; every line is present."""
    return _counted(dict.fromkeys(TensorLine, 0), _roots(runner), on_device=False)


def device_census(runner: ModelRunner) -> DeviceMemory | None:
    """What a rank holds in the memory of its GPU; None of a rank on the CPU.

    Without a GPU, in Triton's interpreter, whatever would lie there, and None for what the allocator says.
    """
    backend = runner.backend
    if not isinstance(backend, CudaBackend):
        return None
    model = backend.model
    on_gpu = model.device.type == "cuda"
    lines = _counted(dict.fromkeys(DeviceLine, 0), _device_roots(backend), on_device=on_gpu)
    allocated = torch.cuda.memory_allocated(model.device) if on_gpu else None
    return DeviceMemory(lines, allocated)


_Line = TypeVar("_Line")


def _counted(
    counted: dict[_Line, int], roots: Iterator[tuple[_Line, object]], *, on_device: bool
) -> dict[_Line, int]:
    """Add to each line the bytes of its roots, on the GPU or in the host's memory."""
    seen_storages: set[int] = set()
    seen_objects: set[int] = set()
    for line, root in roots:
        for address, num_bytes in _storages(root, seen_objects, on_device=on_device):
            if address not in seen_storages:
                seen_storages.add(address)
                counted[line] += num_bytes
    return counted


def _device_roots(backend: CudaBackend) -> Iterator[tuple[DeviceLine, object]]:
    model = backend.model
    weights, pages = model.weights, model.pages.pages
    yield DeviceLine.windows, pages.windows
    yield DeviceLine.entries, pages.entries
    yield DeviceLine.index_keys, pages.index_keys
    yield DeviceLine.open_groups, pages.open_rows
    yield DeviceLine.block_tables, (pages.window_table, pages.entry_table)
    yield DeviceLine.routed_experts, [(layer.w13, layer.w2) for layer in weights.layers]
    yield DeviceLine.vocabulary, (weights.embedding, weights.head, weights.norm)
    yield DeviceLine.draft, model.draft_weights
    yield DeviceLine.dense, weights.layers
    yield DeviceLine.workspace, (model.workspace.device_arenas, model.group.memory)


def _roots(runner: ModelRunner) -> Iterator[tuple[TensorLine, object]]:
    """Where each line's arrays are, those that lie inside of another line's objects first."""
    if not isinstance(runner.backend, CpuBackend):
        yield TensorLine.block_tables, runner.tables
        yield TensorLine.vision, runner.vision
        yield TensorLine.engram, runner
        return
    model, drafts, cache = runner.model, runner.drafts, runner.cache
    yield TensorLine.windows, cache.windows
    yield TensorLine.entries, cache.entries
    yield TensorLine.index_keys, cache.index_keys
    yield TensorLine.open_groups, (cache.open_values, cache.open_gates)
    yield TensorLine.block_tables, runner.tables
    yield TensorLine.rope, (model.rope, None if drafts is None else drafts.rope)
    yield TensorLine.vocabulary, (model.vocabulary, model.norm)
    yield TensorLine.draft, drafts
    yield TensorLine.vision, runner.vision
    experts = [block.moe for block in model.blocks if block.moe.expert_ids]
    yield TensorLine.routed_experts, [(moe.w13, moe.w2) for moe in experts]
    yield TensorLine.dense, model.blocks
    yield TensorLine.dense, [(engram.wkv, engram.gate_weight) for engram in model.engrams.values()]
    yield TensorLine.engram, runner


def _storages(value: object, seen: set[int], *, on_device: bool) -> Iterator[tuple[int, int]]:
    """Address and bytes of each storage reached from `value`; `seen` are ids of objects that have been walked."""
    if isinstance(value, Tensor):
        if (value.device.type != "cpu") is on_device:
            storage = value.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()
    elif isinstance(value, np.ndarray):
        if on_device:
            return
        owner = value
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        yield owner.ctypes.data, owner.nbytes
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _storages(part, seen, on_device=on_device)
    elif type(value).__module__.startswith(_WALKED) and id(value) not in seen:
        seen.add(id(value))
        for part in _fields(value):
            yield from _storages(part, seen, on_device=on_device)


def _fields(value: object) -> Iterator[object]:
    yield from getattr(value, "__dict__", {}).values()
    names = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    yield from (getattr(value, name) for name in names if hasattr(value, name))


def process_memory() -> ProcessMemory:
    """This process now. Raises OSError where the kernel has no /proc."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())

    def num_bytes(name: str) -> int:
        return int(status[name].split()[0]) * 1024

    return ProcessMemory(
        anon_bytes=num_bytes("RssAnon"),
        file_bytes=num_bytes("RssFile"),
        shared_bytes=num_bytes("RssShmem"),
        peak_bytes=num_bytes("VmHWM"),
    )


def resident_bytes() -> int:
    """Resident bytes of this process now; cheaper than `process_memory`. Raises OSError where there is no /proc."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def host_available_bytes() -> int | None:
    """Bytes that this machine could still give to a program; None where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def give_back_free_heap() -> None:
    """Return what loading left in the allocator's free lists; it would be neither the model's nor anybody else's.

    Does nothing where the C library cannot.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


__all__ = [
    "census",
    "device_census",
    "give_back_free_heap",
    "host_available_bytes",
    "process_memory",
    "resident_bytes",
]
