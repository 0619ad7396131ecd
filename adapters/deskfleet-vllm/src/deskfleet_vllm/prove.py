"""Proof that a store gives the right rows, on the machine that is to serve: for people, and for tests.

A decode step, the lookups of all layers, is captured into one CUDA graph and replayed with ids that change every time.
Beside it, in the same run, the stock kernel over rows that lie in pinned memory already. Needs that kernel: vLLM's
module, or `standalone` where vLLM is not.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from deskfleet_engram.errors import EngramError, SourceError
from deskfleet_engram.host import ContractError, HostRows, HostTable
from deskfleet_engram.portable import PortableStore
from deskfleet_engram.source import open_source
from deskfleet_vllm.config import StoreName
from deskfleet_vllm.stores import CallbackStore, Kernel, Place, StagedStore, Store, Window

NUM_TOKENS = 6
"""A decode step of one request with five drafts."""

_GARBAGE = 7.0


class Module(Protocol):
    """What is taken of vLLM's module of tables."""

    _engram_lookup_kernel: Any
    get_accelerator_view_from_cpu_tensor: Callable[[torch.Tensor], torch.Tensor]


def prove(
    engram: Module,
    rows: HostRows,
    checkpoint: Path,
    *,
    store: StoreName,
    num_lookups: int,
    seconds: dict[str, list[float]] | None = None,
) -> Iterator[str]:
    """Compare `num_lookups` steps with rows read from the checkpoint, and yield lines about bytes and times.

    Every step runs with ids that no step had before, then again with the same ids, whose rows the reader then has in
    memory, then as the stock kernel alone over pinned rows. Outputs hold garbage before each. Times are those of a
    whole step, launched and waited for, and left in `seconds`. Raises ContractError at the first value that differs.
    """
    step = _Step(engram, rows, store, _independent(rows, checkpoint))
    random = np.random.default_rng(0)
    times: dict[str, list[float]] = {} if seconds is None else seconds
    times |= {"cold": [], "warm": [], "pinned": []}
    for index in range(num_lookups):
        step.draw(random)
        for name in ("cold", "warm"):
            times[name].append(step.time(step.run))
            step.check(f"lookup {index}, {name}", store)
        times["pinned"].append(step.time(step.run_pinned))
    layers = "+".join(map(str, rows.tables))
    yield (
        f"{num_lookups} steps of {NUM_TOKENS} x {len(rows.columns)} rows of layers {layers}, twice each: all equal by "
        f"the {store} store on {_device_name(step.device)}"
    )
    for name, said in (
        ("cold", f"{store} store, rows from disk"),
        ("warm", f"{store} store, rows in the reader's cache"),
        ("pinned", "stock kernel, rows in pinned memory"),
    ):
        yield f"{said}: {_spread(times[name])}"
    for name in ("cold", "warm"):
        waits = [took - pinned for took, pinned in zip(times[name], times["pinned"], strict=True)]
        yield f"so a step waits, {name}: {_spread(waits)}"
    counters = rows.counters()
    yield f"reader: {next(iter(rows.tables.values())).store.report}; {counters}"


def prove_failure(
    engram: Module, rows: HostRows, checkpoint: Path, *, store: StoreName, num_lookups: int
) -> str:
    """Look rows up through a reader that fails now and then, and return what was said when it did.

    Steps before the failure are compared. The last thing to be done with a device: what ends a step ends the process's
    use of it. Raises ContractError when no step fails, or when rows that could not be read were answered.
    """
    step = _Step(engram, rows, store, _independent(rows, checkpoint))
    random = np.random.default_rng(1)
    for index in range(num_lookups):
        step.draw(random)
        before = [window.codes.clone() for window in step.windows]
        try:
            step.time(step.run)
        except (EngramError, RuntimeError) as error:
            reasons = [reason for reason in (each.failure() for each in step.stores) if reason is not None]
            if store == "callback" and (not reasons or not step.is_poisoned(before)):
                raise ContractError(f"step {index} failed, but no row of it is poison: {error}") from error
            reason = reasons[0] if reasons else error
            return (
                f"a read that fails ends the step (after {index} good ones): {type(error).__name__}; {reason}"
            )
        step.check(f"lookup {index}, with faults", store)
    raise ContractError(f"the {store} store answered {num_lookups} steps although reads fail")


_Rows = Callable[[HostTable, NDArray[np.int64]], tuple[NDArray[np.uint8], NDArray[np.uint8]]]


def _independent(rows: HostRows, checkpoint: Path) -> _Rows:
    """Return what reads a table's own rows from the checkpoint's shards, past pack and native reader."""
    try:
        source = open_source(checkpoint)
        stores = {layer: PortableStore(source.table(layer).row_source()).open() for layer in rows.tables}
    except SourceError as error:
        raise ContractError(f"the proof compares with the checkpoint's own rows: {error}") from error

    def read(table: HostTable, own: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        codes = np.empty((own.size, table.head_dim), np.uint8)
        scales = np.empty((own.size, table.num_scales), np.uint8)
        stores[table.layer].gather(own, codes, scales)
        return codes, scales

    return read


class _Step:
    """The lookups of all layers: by a store, and by the stock kernel over rows that are there already."""

    def __init__(self, engram: Module, rows: HostRows, store: StoreName, independent: _Rows) -> None:
        self.device = _device(store)
        kernel = Kernel(engram._engram_lookup_kernel, engram.get_accelerator_view_from_cpu_tensor)
        num_columns = rows.manifest.identity.geometry.spec.num_columns
        place = Place(rows.columns[0], len(rows.columns), num_columns, NUM_TOKENS, 8)
        self.tables: Sequence[HostTable] = tuple(rows.tables.values())
        self.windows = [Window(table, place, kernel, self.device) for table in self.tables]
        self.stores: list[Store] = [
            CallbackStore(window) if store == "callback" else StagedStore(window) for window in self.windows
        ]
        self._pinned = [Window(table, place, kernel, self.device) for table in self.tables]
        self._independent = independent
        shape = (NUM_TOKENS, num_columns)
        self._ids = [torch.full(shape, -1, dtype=torch.int32, device=self.device) for _ in self.tables]
        self._found, self._wanted = self._outputs(rows), self._outputs(rows)
        self.run, self.run_pinned = self._by_store, self._by_stock_kernel
        if store == "callback":
            self.run, self.run_pinned = _captured(self._by_store), _captured(self._by_stock_kernel)

    def _outputs(self, rows: HostRows) -> list[torch.Tensor]:
        return [
            torch.full(
                (NUM_TOKENS, len(rows.columns), table.head_dim),
                _GARBAGE,
                dtype=torch.bfloat16,
                device=self.device,
            )
            for table in self.tables
        ]

    def _by_store(self) -> None:
        for store, ids, found in zip(self.stores, self._ids, self._found, strict=True):
            store.lookup(ids, found)

    def _by_stock_kernel(self) -> None:
        for window, ids, wanted in zip(self._pinned, self._ids, self._wanted, strict=True):
            window.emit(window.own_ids(ids), wanted, background=False)

    def draw(self, random: np.random.Generator) -> None:
        """Take other ids, and lay their rows, read apart from the store, into pinned memory."""
        for table, ids, window in zip(self.tables, self._ids, self._pinned, strict=True):
            ids.copy_(torch.from_numpy(_draw(random, table, tuple(ids.shape))))
            own = window.own_ids(ids).reshape(-1).cpu().numpy().astype(np.int64)
            codes, scales = self._independent(table, own)
            window.codes[: len(codes)].copy_(torch.from_numpy(codes))
            window.scales[: len(scales)].copy_(torch.from_numpy(scales))
        self.time(self.run_pinned)

    def check(self, what: str, store: str) -> None:
        """Raise ContractError unless the store's values are the stock kernel's; then spoil them."""
        for table, found, wanted in zip(self.tables, self._found, self._wanted, strict=True):
            if not torch.equal(found.view(torch.int16), wanted.view(torch.int16)):
                raise ContractError(f"layer {table.layer}, {what}: the {store} store gave other values")
            found.fill_(_GARBAGE)

    def is_poisoned(self, before: Sequence[torch.Tensor]) -> bool:
        """Whether a row is poison that was not, in memory that a device which has failed leaves readable."""
        return any(
            bool(((window.codes == 0x7F).all(dim=1) & (window.codes != codes).any(dim=1)).any())
            for window, codes in zip(self.windows, before, strict=True)
        )

    def time(self, work: Callable[[], object]) -> float:
        """Do the work, wait for the device, and return the seconds it took."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        begin_s = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin_s


def _device(store: StoreName) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if store == "callback":
        raise ContractError("there is no CUDA device here")
    return torch.device("cpu")


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # Triton compiles here, which it must not do while a graph is captured
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return functools.partial(_replay, graph)


def _replay(graph: torch.cuda.CUDAGraph) -> None:
    graph.replay()


def _draw(random: np.random.Generator, table: HostTable, shape: tuple[int, ...]) -> NDArray[np.int32]:
    """Ids of this rank's rows, some of other ranks, some -1."""
    drawn = random.integers(table.first_row, table.end_row, shape)
    drawn[random.random(shape) < 0.02] = -1
    drawn[random.random(shape) < 0.02] = table.end_row
    return drawn.astype(np.int32)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


def _spread(seconds: list[float]) -> str:
    low, median, p90, p99 = np.percentile(seconds, [10, 50, 90, 99]) * 1e6
    return f"median {median:.0f} us, p10 {low:.0f}, p90 {p90:.0f}, p99 {p99:.0f}"


__all__ = ["NUM_TOKENS", "Module", "prove", "prove_failure"]
