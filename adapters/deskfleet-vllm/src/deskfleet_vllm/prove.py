"""Proof that a store gives the right rows, on the machine that is to serve: for people, and for tests.

The callback store is captured into one CUDA graph and replayed with ids that change every time, beside the stock kernel
over rows that were read independently. Needs vLLM's own kernel, so it runs where the engine runs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from deskfleet_engram.errors import EngramError
from deskfleet_engram.host import ContractError, HostRows, HostTable
from deskfleet_vllm.config import StoreName
from deskfleet_vllm.stores import CallbackStore, Kernel, Place, StagedStore, Store, Window

NUM_TOKENS = 6
"""A decode step of one request with five drafts."""


def prove(engram: ModuleType, rows: HostRows, *, store: StoreName, num_lookups: int) -> Iterator[str]:
    """Compare `num_lookups` lookups of every layer with rows read independently, twice, and yield a line for each.

    The second time the ids are those of the first, so that their rows may be in the reader's cache. Times are those of
    a whole lookup, waited for; beside them those of the stock kernel over rows that are in pinned memory already.
    Raises ContractError at the first value that differs.
    """
    for table in rows.tables.values():
        bench = _Bench(engram, rows, table, store)
        for name in ("first", "again"):
            random = np.random.default_rng(table.layer)
            took, stock = [], []
            for index in range(num_lookups):
                bench.ids.copy_(torch.from_numpy(_draw(random, table, tuple(bench.ids.shape))))
                took.append(bench.time(bench.run))
                wanted, stock_s = bench.independent()
                stock.append(stock_s)
                if not torch.equal(bench.found.view(torch.int16), wanted.view(torch.int16)):
                    raise ContractError(
                        f"layer {table.layer}, lookup {index}: the {store} store gave other values"
                    )
            yield (
                f"layer {table.layer}, {name}: {num_lookups} lookups of {NUM_TOKENS} x {len(rows.columns)} rows by "
                f"the {store} store on {bench.device.type} equal; median {_micros(took, 50)}, p99 {_micros(took, 99)}; "
                f"rows in pinned memory: median {_micros(stock, 50)}, p99 {_micros(stock, 99)}"
            )


def prove_failure(engram: ModuleType, rows: HostRows, *, store: StoreName) -> str:
    """Look up rows through a reader that was opened with faults, and return what was said.

    The last thing to be done with a device: what ends a step ends the process's use of it. Raises ContractError when
    the lookup does not fail.
    """
    table = next(iter(rows.tables.values()))
    random = np.random.default_rng(0)
    bench = _Bench(engram, rows, table, store)
    bench.ids.copy_(torch.from_numpy(_draw(random, table, tuple(bench.ids.shape))))
    try:
        bench.time(bench.run)
    except (EngramError, RuntimeError) as error:
        reason = bench.store.failure() or error
        return f"a read that fails ends the step: {type(error).__name__}; {reason}"
    raise ContractError(f"the {store} store answered a lookup although every read failed")


class _Bench:
    """One store of one layer, its inputs at fixed places, and a window to compare with."""

    def __init__(self, engram: ModuleType, rows: HostRows, table: HostTable, store: StoreName) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        kernel = Kernel(engram._engram_lookup_kernel, engram.get_accelerator_view_from_cpu_tensor)
        num_columns = rows.manifest.identity.geometry.spec.num_columns
        place = Place(rows.columns[0], len(rows.columns), num_columns, NUM_TOKENS, 8)
        window = Window(table, place, kernel, self.device)
        self.table = table
        self.store: Store = CallbackStore(window) if store == "callback" else StagedStore(window)
        self.ids = torch.full((NUM_TOKENS, num_columns), -1, dtype=torch.int32, device=self.device)
        self.found = torch.empty(
            NUM_TOKENS, len(rows.columns), table.head_dim, dtype=torch.bfloat16, device=self.device
        )
        self._window = Window(table, place, kernel, self.device)
        self._wanted = torch.empty_like(self.found)
        if store == "callback":
            self.run = _captured(self.store, self.ids, self.found)
        else:
            self.run = functools.partial(self.store.lookup, self.ids, self.found)

    def time(self, work: Callable[[], object]) -> float:
        """Do the work, wait for the device, and return the seconds it took."""
        begin_s = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin_s

    def independent(self) -> tuple[torch.Tensor, float]:
        """Return the values of the ids, read apart from the store, and the seconds of the stock kernel over them."""
        window = self._window
        own = window.own_ids(self.ids)
        rows = torch.from_numpy(self.table.rows(own.reshape(-1).cpu().numpy()))
        window.codes[: len(rows)].copy_(rows[:, : self.table.head_dim])
        window.scales[: len(rows)].copy_(rows[:, self.table.head_dim :])
        took_s = self.time(lambda: window.emit(own, self._wanted, background=False))
        return self._wanted, took_s


def _captured(store: Store, ids: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        store.lookup(ids, out)  # Triton compiles here, which it must not do while a graph is captured
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store.lookup(ids, out)
    return graph.replay


def _draw(random: np.random.Generator, table: HostTable, shape: tuple[int, ...]) -> NDArray[np.int32]:
    """Ids of this rank's rows, some of other ranks, some -1."""
    drawn = random.integers(table.first_row, table.end_row, shape)
    drawn[random.random(shape) < 0.05] = -1
    drawn[random.random(shape) < 0.05] = table.end_row
    return drawn.astype(np.int32)


def _micros(seconds: list[float], percentile: int) -> str:
    return f"{np.percentile(seconds, percentile) * 1e6:.0f} us"


__all__ = ["NUM_TOKENS", "prove", "prove_failure"]
