"""The two calls of the CUDA driver that torch does not offer. Owns no memory and no stream."""

from __future__ import annotations

import ctypes
import functools

from deskfleet_engram.host import ContractError

_USES_HOST_PAGE_TABLES = 100  # CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES


def uses_host_page_tables(device: int) -> bool:
    """Whether kernels of the device may follow a pointer into a file mapping (GB10, Grace). Raises ContractError."""
    handle, value = ctypes.c_int(), ctypes.c_int()
    _check("cuDeviceGet", _driver().cuDeviceGet(ctypes.byref(handle), device))
    result = _driver().cuDeviceGetAttribute(ctypes.byref(value), _USES_HOST_PAGE_TABLES, handle)
    _check("cuDeviceGetAttribute", result)
    return value.value == 1


def launch_host_function(stream: int, function_address: int, argument: int) -> None:
    """Have `void f(void *)` called on a thread of the driver when the stream comes to it, in every replay if the stream
    is being captured. The stream goes on when it returns. It must call neither CUDA nor Python. Raises ContractError.
    """
    _check("cuLaunchHostFunc", _driver().cuLaunchHostFunc(stream, function_address, argument))


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ContractError(f"the CUDA driver cannot be loaded: {error}") from error
    driver.cuDeviceGet.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int]
    driver.cuDeviceGetAttribute.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int]
    driver.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return driver


def _check(name: str, result: int) -> None:
    if result:
        raise ContractError(f"{name} answered CUDA error {result}")


__all__ = ["launch_host_function", "uses_host_page_tables"]
