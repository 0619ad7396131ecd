"""The few calls of CUDA's driver that torch does not offer, through ctypes.

NOT verified on a device: written from the driver's documentation.
"""

from __future__ import annotations

import ctypes
import functools
import importlib

from deskfleet_engram.host import ContractError

_USES_HOST_PAGE_TABLES = 100
"""CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: 1 on GB10 and Grace, 0 beside x86."""


def current_device() -> int | None:
    """Return the number of this process's CUDA device, None when there is none."""
    torch = importlib.import_module("torch")
    return int(torch.cuda.current_device()) if torch.cuda.is_available() else None


def reads_host_page_tables(device: int) -> bool:
    """Say whether kernels may follow any host pointer, mapped files included. Raises ContractError."""
    value = ctypes.c_int()
    _check(
        _driver().cuDeviceGetAttribute(ctypes.byref(value), _USES_HOST_PAGE_TABLES, device), "attribute 100"
    )
    return value.value == 1


def copy(stream: int, target: int, source: int, num_bytes: int) -> None:
    """Copy between addresses of any kind, in the order of `stream`, also under capture. Raises ContractError."""
    result = _driver().cuMemcpyAsync(
        ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream)
    )
    _check(result, "cuMemcpyAsync")


def launch_host_function(stream: int, function: int, argument: int) -> None:
    """Call `void function(void *argument)` on the host in the order of `stream`, also under capture.

    The function may call neither CUDA nor Python. Raises ContractError.
    """
    result = _driver().cuLaunchHostFunc(
        ctypes.c_void_p(stream), ctypes.c_void_p(function), ctypes.c_void_p(argument)
    )
    _check(result, "cuLaunchHostFunc")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ContractError(f"CUDA's driver cannot be loaded: {error}") from error


def _check(result: int, what: str) -> None:
    if result != 0:
        raise ContractError(f"{what} of CUDA's driver failed with error {result}")


__all__ = ["copy", "current_device", "launch_host_function", "reads_host_page_tables"]
