"""Rows that are read by the host, laid before the engine's own kernel: `StagedStore` and `CallbackStore`.

Both fill a window of rows in pinned memory and let the stock lookup kernel read it as if it were the table, so codes
and scales become values by the very code that stock vLLM runs. They differ in who reads: this thread, or a host node of
the stream. Knows torch, but no vLLM: kernel and address view are handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deskfleet_engram.errors import EngramError, RowError
from deskfleet_engram.host import ContractError, HostTable
from deskfleet_engram.host_work import HostWork
from deskfleet_vllm import cuda

_BLOCK_ROWS = 16
"""Rows of one program of the stock kernel, as stock launches it."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's part of every lookup: local column i is column `first_column + i` of `num_columns`; past the last there
    is padding. `max_tokens` come at once at most, and `num_programs` of the kernel run side by side."""

    first_column: int
    num_local: int
    num_columns: int
    max_tokens: int
    num_programs: int


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """The stock lookup kernel, and how an accelerator sees pinned memory."""

    launch: Any
    view: Callable[[torch.Tensor], torch.Tensor]


class Window:
    """Rows of one lookup in memory that host and device both see, at addresses that never change."""

    def __init__(self, table: HostTable, place: Place, kernel: Kernel, device: torch.device) -> None:
        """Allocate for the longest lookup."""
        self.table = table
        self.place = place
        self.device = device
        self._launch = kernel.launch
        self.max_rows = place.max_tokens * place.num_local
        is_cuda = device.type == "cuda"

        def shared(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
            host = torch.zeros(*shape, dtype=dtype, device="cpu", pin_memory=is_cuda)
            return host, kernel.view(host) if is_cuda else host

        # The count comes first, so that one buffer says how many ids follow.
        self.ids, self.ids_view = shared(1 + self.max_rows, dtype=torch.int32)
        self.codes, self.codes_view = shared(self.max_rows, table.head_dim, dtype=torch.uint8)
        self.scales, self.scales_view = shared(self.max_rows, table.num_scales, dtype=torch.uint8)
        self.status, self.status_view = shared(1, dtype=torch.int32)
        self._slots = torch.arange(self.max_rows, dtype=torch.int32, device=device)

    def own_ids(self, indices: torch.Tensor) -> torch.Tensor:
        """Return int32 [T, num_local]: of `indices` [T, num_columns] this rank's, -1 for padding and other ranks'."""
        place, table = self.place, self.table
        if indices.shape[0] > place.max_tokens:
            raise ContractError(f"a lookup of {indices.shape[0]} tokens, more than {place.max_tokens}")
        local = indices[:, place.first_column : place.first_column + place.num_local]
        is_own = (local >= table.first_row) & (local < table.end_row)
        own = torch.where(is_own, local, -1).to(torch.int32)
        padding = place.num_local - own.shape[1]
        return torch.nn.functional.pad(own, (0, padding), value=-1) if padding else own

    def emit(self, own: torch.Tensor, out: torch.Tensor, *, background: bool) -> None:
        """Turn the window's rows into what the engine wants, by its own kernel; -1 becomes zeros."""
        num_rows, num_local = own.numel(), self.place.num_local
        slots = torch.where(own >= 0, self._slots[:num_rows].view_as(own), -1)
        tiles = -(-num_rows // _BLOCK_ROWS)
        limit = self.place.num_programs // 2 if background else self.place.num_programs
        grid = max(1, min(tiles, limit))
        self._launch[(grid,)](
            self.codes_view.view(torch.float8_e4m3fn),
            self.scales_view,
            slots,
            slots,
            out,
            0,
            num_rows,
            num_rows,
            slots.stride(0),
            slots.stride(1),
            HEAD_START=0,
            LOCAL_HEADS=num_local,
            TOTAL_HEADS=num_local,
            DIM=self.table.head_dim,
            QUANT_BLOCK=self.table.head_dim // self.table.num_scales,
            BLOCK_R=_BLOCK_ROWS,
            GRID=grid,
            SORTED=False,
            PACKED=out.dtype == torch.uint8,
            OUT_STRIDE=out.stride(0),
            PEER_ROWS=0,
        )


class StagedStore:
    """Reads in the calling thread, after waiting for the ids: right everywhere, and one wait per lookup."""

    name = "staged"

    def __init__(self, window: Window) -> None:
        self.window = window
        self._codes, self._scales = window.codes.numpy(), window.scales.numpy()

    def lookup(self, indices: torch.Tensor, out: torch.Tensor, background: bool = False) -> None:
        """As the stock `lookup`. Raises RowError when the disk does not give a row; `out` is untouched then."""
        if not indices.shape[0]:
            return
        window = self.window
        if window.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ContractError(
                "the staged store waits for the ids of a step and cannot be captured into a CUDA graph",
                hint='use "store": "callback", or cudagraph_mode PIECEWISE',
            )
        own = window.own_ids(indices)
        ids = own.reshape(-1).cpu().numpy()
        # Copying the ids waited for the stream, so no earlier lookup reads the window any more.
        window.table.gather(ids, self._codes[: len(ids)], self._scales[: len(ids)])
        window.emit(own, out, background=background)

    def failure(self) -> EngramError | None:
        """Nothing: what goes wrong is raised where it happens."""
        return None


class CallbackStore:
    """Reads in a host node of the stream, so a lookup can be part of a captured graph. Needs the native reader.

    A lookup that fails leaves NaN in the window and a status that a device-side assertion finds before the rows are
    used, so the step ends with an error; `failure` says why.
    """

    name = "callback"

    def __init__(self, window: Window) -> None:
        native = window.table.store.native
        if native is None:
            raise ContractError("the callback store needs the native reader")
        self.window = window
        ids = window.ids.numpy()
        self._work = HostWork(
            native,
            ids[1:],
            (window.codes.numpy(), window.scales.numpy()),
            num_ids=ids[:1].view(np.uint32),
            status=window.status.numpy(),
        )

    def lookup(self, indices: torch.Tensor, out: torch.Tensor, background: bool = False) -> None:
        """As the stock `lookup`, in the order of the current stream; nothing here waits for the device."""
        if not indices.shape[0]:
            return
        window, work = self.window, self._work
        own = window.own_ids(indices)
        window.ids_view[:1].fill_(own.numel())
        # Written by a kernel: a copy between two device tensors would be one of device memory, which this is not.
        torch.add(own.reshape(-1), 0, out=window.ids_view[1 : 1 + own.numel()])
        stream = torch.cuda.current_stream(window.device).cuda_stream
        cuda.launch_host_function(stream, work.run_address, work.argument)
        torch._assert_async(window.status_view == 0)
        window.emit(own, out, background=background)

    def failure(self) -> EngramError | None:
        """Say what went wrong in a run that failed, if one did."""
        if not self._work.num_failures:
            return None
        try:
            self._work.check()
        except RowError as error:
            return error
        return RowError(f"a lookup of layer {self.window.table.layer} failed")


Store = StagedStore | CallbackStore

__all__ = ["CallbackStore", "Kernel", "Place", "StagedStore", "Store", "Window"]
