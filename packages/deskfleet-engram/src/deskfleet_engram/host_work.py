"""A lookup that something other than Python repeats: a CUDA host node, or a thread of a C program.

All pointers are fixed and all memory is allocated when the work is made; afterwards whoever holds the addresses below
may run it without the interpreter. Knows nothing of CUDA: `cudaLaunchHostFunc(stream, run_address, argument)` is the
caller's.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram import _native
from deskfleet_engram.errors import RowError
from deskfleet_engram.native import IoClass, NativeStore, RowIds


class HostWork:
    """One repeated request of a NativeStore. It must not run twice at the same time, nor after `close`.

    `argument` goes to the three functions, which have the signature `void f(void *)`: the one at `run_address` looks
    rows up, `submit_address` asks for them and `wait_address` waits until they are there.
    """

    def __init__(
        self,
        store: NativeStore,
        row_ids: RowIds,
        outputs: tuple[NDArray[Any], ...],
        *,
        num_ids: NDArray[np.uint32] | None = None,
        status: NDArray[np.int32] | None = None,
        io_class: IoClass = IoClass.DECODE,
        deadline_s: float | None = None,
    ) -> None:
        """Fix the buffers, which must live as long as the work.

        `row_ids` [N] is read at every run, its first `num_ids[0]` entries if that is given. `outputs` are those of
        `NativeStore.gather`, `gather_packed` or `gather_bf16` for N ids: codes and scales, or one array, uint8 or
        uint16. After every run `status[0]` is 0, or another number; then rows that could not be had, or all of them if
        the ids were refused, hold poison. Raises RowError.
        """
        if row_ids.ndim != 1 or not row_ids.flags.c_contiguous:
            raise RowError(
                f"{store.place.name}: row ids of a host work must be one contiguous row of numbers"
            )
        for name, array, dtype in (("num_ids", num_ids, np.uint32), ("status", status, np.int32)):
            if array is not None and (array.dtype != dtype or array.size != 1):
                raise RowError(f"{store.place.name}: {name} must be one {np.dtype(dtype)}")
        request = store.request(row_ids, outputs, io_class, deadline_s)
        self._store = store
        self._library = store.reader.library
        self._buffers = (row_ids, outputs, num_ids, status)
        handle = ctypes.c_void_p()
        error = _native.Error()
        with store.reader.running() as reader:
            result = self._library.es_work_create(
                reader,
                ctypes.byref(request),
                None if num_ids is None else num_ids.ctypes.data,
                None if status is None else status.ctypes.data,
                ctypes.byref(handle),
                ctypes.byref(error),
            )
        if result != _native.OK:
            raise store.row_error(error)
        self.argument = _native.address(handle)
        self.run_address = _address_of(self._library.es_hostfn)
        self.submit_address = _address_of(self._library.es_hostfn_submit)
        self.wait_address = _address_of(self._library.es_hostfn_wait)
        self._finalizer = weakref.finalize(self, self._library.es_work_destroy, self.argument)
        store.reader.close_with(self)

    @property
    def num_failures(self) -> int:
        """Runs so far that left poison."""
        return int(self._library.es_work_failures(self.argument)) if self._finalizer.alive else 0

    def check(self) -> None:
        """Raise RowError if the last finished run left poison."""
        error = _native.Error()
        if self._finalizer.alive:
            result = self._library.es_work_result(self.argument, ctypes.byref(error))
            if result != _native.OK:
                raise self._store.row_error(error)

    def close(self) -> None:
        """Give it up; nothing is written to the outputs afterwards. Closing twice is allowed. Closing the reader
        closes its works first."""
        self._finalizer()


def _address_of(function: Any) -> int:
    return _native.address(ctypes.cast(function, ctypes.c_void_p))


__all__ = ["HostWork"]
