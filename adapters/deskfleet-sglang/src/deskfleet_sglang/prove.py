"""Proof that the callback store works on this device: captured once in a CUDA graph, replayed with other ids each time.

A decode step, the lookups of all layers, is compared with SGLang's own kernel over rows that were read from the
checkpoint into pinned memory, bit by bit, and timed beside it in the same run. `check_failures` looks rows up through a
reader that fails. Run by `python -m deskfleet_sglang prove`, where SGLang and a device are, or without SGLang
(`standalone`).
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from deskfleet_engram.errors import RowError, SourceError
from deskfleet_engram.host import ContractError, HostRows, HostTable
from deskfleet_engram.portable import NOT_MINE, PortableStore
from deskfleet_engram.source import open_source
from deskfleet_sglang.callback import CallbackLookup
from deskfleet_sglang.standalone import MODULE

NUM_TOKENS = 6
"""A decode step of one request with five drafts."""

_GARBAGE = 7.0


def prove(
    rows: HostRows, checkpoint: Path, num_lookups: int, seconds: dict[str, list[float]] | None = None
) -> Iterator[str]:
    """Yield lines about bytes and times, which are left in `seconds`. Raises ContractError where a value differs.

    Every step runs with ids that no step had before, then again with the same ids, whose rows the reader then has in
    memory, then as SGLang's kernel alone. Times are those of a whole step, launched and waited for.
    """
    step = _Step(rows, checkpoint)
    random = np.random.default_rng(0)
    times: dict[str, list[float]] = {} if seconds is None else seconds
    times |= {"cold": [], "warm": [], "pinned": []}
    for index in range(num_lookups):
        step.draw(random)
        for name in ("cold", "warm"):
            times[name].append(step.time(step.run))
            step.check(f"lookup {index}, {name}")
        times["pinned"].append(step.time(step.run_pinned))
    yield (
        f"{num_lookups} steps of {NUM_TOKENS} x {step.num_columns} rows of layers {'+'.join(map(str, rows.tables))}, "
        f"twice each: all equal by the callback store on {_device_name()}"
    )
    yield f"callback store, rows from disk: {_spread(times['cold'])}"
    yield f"callback store, rows in the reader's cache: {_spread(times['warm'])}"
    yield f"SGLang's kernel, rows in pinned memory: {_spread(times['pinned'])}"
    for name in ("cold", "warm"):
        waits = [took - pinned for took, pinned in zip(times[name], times["pinned"], strict=True)]
        yield f"so a step waits, {name}: {_spread(waits)}"


def check_failures(rows: HostRows, checkpoint: Path, num_lookups: int) -> str:
    """Look rows up through a reader that fails now and then; return what was said when it did.

    Until then every step is right. The step that fails has NaN in the place of rows, never others, and an error is
    raised before its tokens would leave. Raises ContractError otherwise.
    """
    step = _Step(rows, checkpoint)
    random = np.random.default_rng(1)
    for index in range(num_lookups):
        step.draw(random)
        step.time(step.run)
        try:
            step.check_reported()
        except RowError as error:
            num_nan = step.check_poisoned(f"lookup {index}, with faults")
            return f"a read that fails is reported (after {index} good steps), {num_nan} rows are NaN: {error.message}"
        step.check(f"lookup {index}, with faults")
    raise ContractError(f"no failure of {num_lookups} steps was reported although reads fail")


class _Layer:
    """One layer's lookup, and SGLang's kernel over rows that are there already."""

    def __init__(self, table: HostTable, source: PortableStore, num_columns: int) -> None:
        self.table = table
        self.lookup = CallbackLookup(table)
        self._source = source
        shape = (NUM_TOKENS, num_columns)
        num_ids = NUM_TOKENS * num_columns
        is_pinned = _is_cuda()
        self.indices = torch.full(shape, -1, dtype=torch.int64, device=_device())
        self._codes = torch.zeros(num_ids, table.head_dim, dtype=torch.uint8, pin_memory=is_pinned)
        self._scales = torch.zeros(num_ids, table.num_scales, dtype=torch.uint8, pin_memory=is_pinned)
        self._places = torch.arange(num_ids, device=_device())
        self.wanted = torch.empty(*shape, table.head_dim, dtype=torch.bfloat16, device=_device())
        self.found = torch.empty_like(self.wanted)
        self._embedding = SimpleNamespace(
            dim=table.head_dim, new_rows=lambda ids: torch.empty_like(self.wanted)
        )

    def draw(self, random: np.random.Generator) -> None:
        """Take other ids, some of them other ranks', and lay their rows into pinned memory."""
        ids = random.integers(self.table.first_row, self.table.end_row, tuple(self.indices.shape))
        ids[random.random(ids.shape) < 0.02] = self.table.end_row
        self.indices.copy_(torch.from_numpy(ids))
        codes, scales = self._codes.numpy(), self._scales.numpy()
        self._source.gather(self.table.own_ids(ids).reshape(-1), codes, scales)

    def by_store(self) -> None:
        """Look up through the store."""
        self.found.copy_(self.lookup.owned_rows(_never, self._embedding, self.indices))

    def by_stock_kernel(self) -> None:
        """Look up the rows that lie in pinned memory."""
        table, flat = self.table, self.indices.reshape(-1)
        is_own = (flat >= table.first_row) & (flat < table.end_row)
        importlib.import_module(MODULE).engram_gather(
            self._codes.data_ptr(),
            self._scales.data_ptr(),
            torch.where(is_own, self._places, NOT_MINE),
            self.wanted.view(-1, table.head_dim),
            table.head_dim,
            table.head_dim // table.num_scales,
            row_lo=0,
            row_hi=flat.numel(),
        )


class _Step:
    """All layers, each way in one graph."""

    def __init__(self, rows: HostRows, checkpoint: Path) -> None:
        self.num_columns = rows.manifest.identity.geometry.spec.num_columns
        try:
            source = open_source(checkpoint)
            stores = {layer: PortableStore(source.table(layer).row_source()).open() for layer in rows.tables}
        except SourceError as error:
            raise ContractError(f"the proof compares with the checkpoint's own rows: {error}") from error
        self._layers = [
            _Layer(table, stores[layer], self.num_columns) for layer, table in rows.tables.items()
        ]
        self.run, self.run_pinned = _captured(self._by_store), _captured(self._by_stock_kernel)

    def _by_store(self) -> None:
        for layer in self._layers:
            layer.by_store()

    def _by_stock_kernel(self) -> None:
        for layer in self._layers:
            layer.by_stock_kernel()

    def draw(self, random: np.random.Generator) -> None:
        """Take other ids, and have their values from SGLang's kernel."""
        for layer in self._layers:
            layer.draw(random)
        self.time(self.run_pinned)

    def check(self, what: str) -> None:
        """Raise ContractError unless all values are SGLang's, RowError for a lookup that failed; then spoil them."""
        self.check_reported()
        for layer in self._layers:
            if not torch.equal(layer.found.view(torch.int16), layer.wanted.view(torch.int16)):
                raise ContractError(f"layer {layer.table.layer}, {what}: rows differ from SGLang's")
            layer.found.fill_(_GARBAGE)

    def check_reported(self) -> None:
        """Raise RowError for a lookup that failed."""
        for layer in self._layers:
            layer.lookup.check()

    def check_poisoned(self, what: str) -> int:
        """Return how many rows are all NaN. Raises ContractError when there is none, or another row is wrong."""
        num_nan = 0
        for layer in self._layers:
            is_nan = layer.found.isnan().all(dim=-1)
            is_right = (layer.found.view(torch.int16) == layer.wanted.view(torch.int16)).all(dim=-1)
            if not bool((is_nan | is_right).all()):
                raise ContractError(f"layer {layer.table.layer}, {what}: a row is neither right nor NaN")
            num_nan += int(is_nan.sum())
        if not num_nan:
            raise ContractError(f"{what}: a failed read left no NaN")
        return num_nan

    def time(self, work: Callable[[], object]) -> float:
        """Do the work, wait for the device, and return the seconds it took."""
        _wait()
        begin_s = time.perf_counter()
        work()
        _wait()
        return time.perf_counter() - begin_s


def _captured(work: Callable[[], object]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _device() -> torch.device:
    if not torch.cuda.is_available():
        raise ContractError("there is no CUDA device here")
    return torch.device("cuda", torch.cuda.current_device())


def _is_cuda() -> bool:
    return _device().type == "cuda"


def _wait() -> None:
    if _is_cuda():
        torch.cuda.synchronize()


def _device_name() -> str:
    return torch.cuda.get_device_name() if _is_cuda() else "no device"


def _never(*_: Any) -> Any:
    raise ContractError("SGLang's own lookup was asked")


def _spread(seconds: list[float]) -> str:
    low, median, p90, p99 = np.percentile(seconds, [10, 50, 90, 99]) * 1e6
    return f"median {median:.0f} us, p10 {low:.0f}, p90 {p90:.0f}, p99 {p99:.0f}"


__all__ = ["NUM_TOKENS", "check_failures", "prove"]
