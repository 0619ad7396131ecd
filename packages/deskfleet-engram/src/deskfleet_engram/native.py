"""The native reader: rows through io_uring, Linux AIO or a pool of threads, by a library that needs no Python.

A NativeReader owns one I/O thread, the open files of one or more layers and a share of a row cache; a `NativeStore`
is one layer of it, with the contract of PortableStore and, besides, tickets: ask now, wait when the rows are needed.
All calls let other Python threads run. Knows nothing of hashing or ranks.

After a RowError of this module the outputs hold right rows and, in place of each row that could not be had, poison
that no arithmetic survives: bytes 0x7f, or bf16 NaN. Never zeros, never another row. Where the request itself was
refused, they are untouched.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram import _native
from deskfleet_engram.errors import RowError
from deskfleet_engram.native_reader import (
    IoClass,
    NativeCounters,
    NativeOptions,
    NativeReader,
    error_kind,
)
from deskfleet_engram.row_cache import RowCache
from deskfleet_engram.tables import PackPlace

_RAW, _SPLIT, _BF16 = 0, 1, 2

RowIds = NDArray[np.int64] | NDArray[np.int32]


class NativeStore:
    """One layer's table of a NativeReader. Safe to use from several threads."""

    def __init__(self, reader: NativeReader, layer: int) -> None:
        """Look at one layer of `reader`. Raises RowError when it has no such layer."""
        if layer not in reader.places:
            raise RowError(f"there is no table of layer {layer} here; there are {sorted(reader.places)}")
        self.reader = reader
        self.place = reader.places[layer]

    def gather(
        self,
        row_ids: RowIds,
        out_codes: NDArray[np.uint8],
        out_scales: NDArray[np.uint8],
        *,
        io_class: IoClass = IoClass.DECODE,
        deadline_s: float | None = None,
    ) -> None:
        """Fill the outputs with the rows named by `row_ids` int64 or int32 [...], ids of the layer's whole table.

        `out_codes` uint8 [..., weight_bytes] and `out_scales` uint8 [..., scale_bytes] receive the row's two parts.
        NOT_MINE (-1) gives zero codes and scales of one. A row named twice is read once. Raises RowError naming
        file, block, row and kind, also as attributes.
        """
        rows = self.place.rows
        outputs = (
            self._output("out_codes", row_ids, out_codes, rows.weight_bytes, np.uint8),
            self._output("out_scales", row_ids, out_scales, rows.scale_bytes, np.uint8),
        )
        self._gather(row_ids, _SPLIT, outputs, io_class, deadline_s)

    def gather_packed(
        self,
        row_ids: RowIds,
        out: NDArray[np.uint8],
        *,
        io_class: IoClass = IoClass.DECODE,
        deadline_s: float | None = None,
    ) -> None:
        """Fill `out` uint8 [..., row_bytes] with whole rows: weights, then scales. Otherwise as `gather`."""
        output = self._output("out", row_ids, out, self.place.rows.row_bytes, np.uint8)
        self._gather(row_ids, _RAW, (output,), io_class, deadline_s)

    def gather_bf16(
        self,
        row_ids: RowIds,
        out: NDArray[np.uint16],
        *,
        io_class: IoClass = IoClass.DECODE,
        deadline_s: float | None = None,
    ) -> None:
        """Fill `out` uint16 [..., head_dim] with decoded rows, the bits of bf16, ties rounded to even; NOT_MINE
        gives zeros. Otherwise as `gather`."""
        output = self._output("out", row_ids, out, self.place.rows.head_dim, np.uint16)
        self._gather(row_ids, _BF16, (output,), io_class, deadline_s)

    def submit(
        self,
        row_ids: RowIds,
        out_codes: NDArray[np.uint8],
        out_scales: NDArray[np.uint8],
        *,
        io_class: IoClass = IoClass.DECODE,
        deadline_s: float | None = None,
    ) -> Ticket:
        """Ask for what `gather` would give and return at once. Ids may be changed after the call; the outputs belong
        to the ticket until it is finished, and their rows must lie evenly spaced. Raises RowError for ids that cannot
        be answered."""
        return self._submit(row_ids, (out_codes, out_scales), io_class, deadline_s)

    def submit_packed(
        self,
        row_ids: RowIds,
        out: NDArray[np.uint8],
        *,
        io_class: IoClass = IoClass.DECODE,
        deadline_s: float | None = None,
    ) -> Ticket:
        """As `submit`, for what `gather_packed` gives."""
        self._output("out", row_ids, out, self.place.rows.row_bytes, np.uint8)
        return self._submit(row_ids, (out,), io_class, deadline_s)

    def submit_bf16(
        self,
        row_ids: RowIds,
        out: NDArray[np.uint16],
        *,
        io_class: IoClass = IoClass.DECODE,
        deadline_s: float | None = None,
    ) -> Ticket:
        """As `submit`, for what `gather_bf16` gives."""
        self._output("out", row_ids, out, self.place.rows.head_dim, np.uint16)
        return self._submit(row_ids, (out,), io_class, deadline_s)

    def _output(
        self,
        name: str,
        row_ids: RowIds,
        array: NDArray[Any],
        width: int,
        dtype: type[np.uint8] | type[np.uint16],
    ) -> NDArray[Any]:
        """Return `array` when it can take the rows. Raises RowError."""
        if row_ids.dtype not in (np.int64, np.int32):
            raise RowError(f"{self.place.name}: row ids must be int64 or int32, got {row_ids.dtype}")
        expected = (*row_ids.shape, width)
        if array.shape != expected or array.dtype != dtype or not array.flags.writeable:
            raise RowError(
                f"{self.place.name}: {name} must be writeable {np.dtype(dtype)} of shape {expected}, got {array.dtype} "
                f"of shape {array.shape}"
            )
        return array

    def _gather(
        self,
        row_ids: RowIds,
        form: int,
        outputs: tuple[NDArray[Any], ...],
        io_class: IoClass,
        deadline_s: float | None,
    ) -> None:
        ids = np.ascontiguousarray(row_ids)
        even = tuple(_evenly(output) for output in outputs)
        # Rows that do not lie evenly spaced take a detour through arrays that do.
        targets = tuple(
            np.empty(output.shape, output.dtype).reshape(-1, output.shape[-1]) if target is None else target
            for output, target in zip(outputs, even, strict=True)
        )
        request = self._request(ids, form, targets, io_class, deadline_s)
        error = _native.Error()
        with self.reader.running() as handle:
            result = self.reader.library.es_gather(handle, ctypes.byref(request), ctypes.byref(error))
        if result >= 0:
            for output, target, given in zip(outputs, targets, even, strict=True):
                if given is None:
                    output[...] = target.reshape(output.shape)
        if result != _native.OK:
            raise self.row_error(error)

    def _submit(
        self,
        row_ids: RowIds,
        outputs: tuple[NDArray[Any], ...],
        io_class: IoClass,
        deadline_s: float | None,
    ) -> Ticket:
        # Alive until the library has taken the ids, which it does before the call returns.
        dense: Any = np.ascontiguousarray(row_ids).reshape(row_ids.shape)
        request = self.request(dense, outputs, io_class, deadline_s)
        error = _native.Error()
        number = ctypes.c_uint64()
        with self.reader.running() as handle:
            result = self.reader.library.es_submit(
                handle, ctypes.byref(request), ctypes.byref(number), ctypes.byref(error)
            )
        if result != _native.OK:
            raise self.row_error(error)
        return Ticket(self, number.value, outputs)

    def _request(
        self,
        ids: NDArray[Any],
        form: int,
        targets: tuple[NDArray[Any], ...],
        io_class: IoClass,
        deadline_s: float | None,
    ) -> _native.Request:
        scales = targets[1] if len(targets) > 1 else None
        return _native.Request(
            layer=self.place.layer,
            ids=ids.ctypes.data,
            num_ids=ids.size,
            id_bytes=ids.itemsize,
            io_class=int(io_class),
            format=form,
            deadline_ms=0 if deadline_s is None else max(1, round(deadline_s * 1000)),
            out=targets[0].ctypes.data,
            out_scales=None if scales is None else scales.ctypes.data,
            out_stride_bytes=_spacing(targets[0]),
            scales_stride_bytes=0 if scales is None else _spacing(scales),
        )

    def request(
        self,
        row_ids: RowIds,
        outputs: tuple[NDArray[Any], ...],
        io_class: IoClass,
        deadline_s: float | None,
    ) -> _native.Request:
        """Return the library's request for ids and outputs that stay where they are. Raises RowError."""
        rows = self.place.rows
        dtype: type[np.uint8] | type[np.uint16] = np.uint8
        widths: tuple[int, ...]
        if len(outputs) == 2:
            form, widths = _SPLIT, (rows.weight_bytes, rows.scale_bytes)
        elif outputs[0].dtype == np.uint16:
            form, widths, dtype = _BF16, (rows.head_dim,), np.uint16
        else:
            form, widths = _RAW, (rows.row_bytes,)
        targets = []
        for output, width in zip(outputs, widths, strict=True):
            target = _evenly(self._output("output", row_ids, output, width, dtype))
            if target is None:
                raise RowError(f"{self.place.name}: rows of the output do not lie evenly spaced")
            targets.append(target)
        return self._request(row_ids, form, tuple(targets), io_class, deadline_s)

    def row_error(self, error: _native.Error) -> RowError:
        """Return what the library reported about rows."""
        is_pack = isinstance(self.place.first, PackPlace)
        row = error.column_row if is_pack else error.row
        return RowError(
            error.message.decode(errors="replace"),
            path=Path(error.file.decode(errors="surrogateescape")) if error.file else None,
            block=None if error.block == _native.NONE64 else error.block,
            row=None if row == _native.NONE64 or not error.file else row,
            kind=error_kind(error),
        )


class Ticket:
    """A request under way. Keep it, or its rows are given up; the outputs are kept alive with it."""

    def __init__(self, store: NativeStore, number: int, outputs: tuple[NDArray[Any], ...]) -> None:
        """See `NativeStore.submit`."""
        self._store = store
        self._number = number
        self._outputs = outputs

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all rows are there; False when `timeout_s` passed first.

        Raises RowError when a row could not be had; the outputs then hold poison in its place.
        """
        error = _native.Error()
        timeout_us = -1 if timeout_s is None else max(0, round(timeout_s * 1e6))
        with self._store.reader.running() as handle:
            library = self._store.reader.library
            result = library.es_wait(handle, self._number, timeout_us, ctypes.byref(error))
        if result == _native.PENDING:
            return False
        if result != _native.OK:
            raise self._store.row_error(error)
        return True

    def is_done(self) -> bool:
        """Say whether `wait` would return at once, or raise."""
        with self._store.reader.running() as handle:
            return bool(self._store.reader.library.es_poll(handle, self._number, None) != _native.PENDING)

    def release(self) -> None:
        """Give the ticket back, finished or not; nothing is written to the outputs afterwards. Releasing twice is
        allowed."""
        number, self._number = self._number, 0
        if not number:
            return
        try:
            with self._store.reader.running() as handle:
                self._store.reader.library.es_release(handle, number)
        except RowError:  # closed: nothing is under way any more
            pass
        self._outputs = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def _evenly(output: NDArray[Any]) -> NDArray[Any] | None:
    """Return a view [N, width] whose rows are dense inside and evenly spaced, or None."""
    try:
        view = output.reshape((-1, output.shape[-1]), copy=False)
    except ValueError:
        return None
    dense = view.strides[1] == view.itemsize or view.shape[1] == 1
    apart = len(view) <= 1 or view.strides[0] >= view.shape[1] * view.itemsize
    return view if dense and apart else None


def _spacing(view: NDArray[Any]) -> int:
    """Return the bytes from row to row, 0 where there is no next row."""
    return view.strides[0] if len(view) > 1 else 0


__all__ = [
    "IoClass",
    "NativeCounters",
    "NativeOptions",
    "NativeReader",
    "NativeStore",
    "RowCache",
    "RowIds",
    "Ticket",
]
