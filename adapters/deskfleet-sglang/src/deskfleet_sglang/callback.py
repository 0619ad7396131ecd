"""The store for every CUDA device: a host function between two copies reads the rows, eagerly or inside a graph.

Ids go to pinned memory, `deskfleet_engram`'s library reads the rows without Python, codes and scales come back, and
SGLang's own kernel makes bf16 of them. A row that could not be had arrives as NaN, and `check` raises before the step's
tokens leave the scheduler. All lookups of a layer must be in the order of one stream, as SGLang's forward pass is.

NOT verified on a device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from deskfleet_engram.host import ContractError, HostTable
from deskfleet_engram.host_work import HostWork
from deskfleet_engram.portable import NOT_MINE
from deskfleet_sglang import cuda


class CallbackLookup:
    """Answers for one layer. Buffers are kept by number of ids: a captured graph goes on using its own."""

    def __init__(self, table: HostTable) -> None:
        self._table = table
        self._works: dict[int, _Work] = {}

    def owned_rows(self, original: Callable[..., Any], embedding: Any, indices: Any) -> Any:
        """See Lookup. Raises ContractError for a number of ids that is captured without having run before."""
        torch = importlib.import_module("torch")
        num_ids = indices.numel()
        if num_ids == 0:
            return original(embedding, indices)
        work = self._works.get(num_ids)
        if work is None:
            if torch.cuda.is_current_stream_capturing():
                raise ContractError(f"{num_ids} Engram ids are captured before they ran once")
            work = self._works[num_ids] = _Work(self._table, num_ids, indices.device)
        return work.run(embedding, indices)

    def check(self) -> None:
        """See Lookup."""
        for work in self._works.values():
            work.check()


class _Work:
    """Buffers for one number of ids, on both sides, and the library's work between them."""

    def __init__(self, table: HostTable, num_ids: int, device: Any) -> None:
        torch = importlib.import_module("torch")
        native = table.store.native
        if native is None:
            raise ContractError("the callback store needs the native reader")

        def pair(*shape: int, dtype: Any = torch.uint8) -> tuple[Any, Any]:
            pinned = torch.empty(shape, dtype=dtype, pin_memory=True)
            return pinned, torch.empty(shape, dtype=dtype, device=device)

        self._first_row, self._end_row = table.first_row, table.end_row
        self._ids = pair(num_ids, dtype=torch.int64)
        self._codes = pair(num_ids, table.head_dim)
        self._scales = pair(num_ids, table.num_scales)
        self._places = torch.arange(num_ids, device=device)
        self._host = HostWork(native, self._ids[0].numpy(), (self._codes[0].numpy(), self._scales[0].numpy()))

    def run(self, embedding: Any, indices: Any) -> Any:
        """Enqueue the lookup on the current stream and return where its rows will be."""
        torch = importlib.import_module("torch")
        gather = importlib.import_module("sglang.kernels.ops.embeddings.engram_gather").engram_gather
        stream = torch.cuda.current_stream().cuda_stream
        flat = indices.reshape(-1)
        is_own = (flat >= self._first_row) & (flat < self._end_row)
        self._ids[1].copy_(torch.where(is_own, flat, NOT_MINE))
        _to_host(stream, self._ids)
        cuda.launch_host_function(stream, self._host.run_address, self._host.argument)
        _to_device(stream, self._codes)
        _to_device(stream, self._scales)
        out = embedding.new_rows(indices)
        gather(
            self._codes[1].data_ptr(),
            self._scales[1].data_ptr(),
            torch.where(is_own, self._places, NOT_MINE),
            out.view(-1, embedding.dim),
            embedding.dim,
            embedding.dim // self._scales[1].shape[1],
            row_lo=0,
            row_hi=flat.numel(),
        )
        return out

    def check(self) -> None:
        """Raise RowError if a run left NaN in the place of a row."""
        if self._host.num_failures:
            self._host.check()
            raise ContractError(
                f"{self._host.num_failures} Engram lookups failed and were overtaken by others"
            )


def _to_host(stream: int, pair: tuple[Any, Any]) -> None:
    pinned, device = pair
    cuda.copy(stream, pinned.data_ptr(), device.data_ptr(), pinned.nbytes)


def _to_device(stream: int, pair: tuple[Any, Any]) -> None:
    pinned, device = pair
    cuda.copy(stream, device.data_ptr(), pinned.data_ptr(), pinned.nbytes)


__all__ = ["CallbackLookup"]
