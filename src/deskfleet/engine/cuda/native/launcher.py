"""Kernels on the GPU: machine code loaded into torch's context and launched on torch's current stream.

Owns the calls of the CUDA driver. A launch tells the host nothing and may be captured in a graph. Knows no kernel.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from deskfleet.engine.cuda.native import source
from deskfleet.engine.cuda.native.arguments import Argument, Arguments, Shape, extent, sizes
from deskfleet.engine.cuda.native.compiler import compiler
from deskfleet.errors import EngineError

# Of cuda.h.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_CAPTURE_MODE_RELAXED = 2
_INVALID_VALUE = 1
_STATIC_SHARED_BYTES, _LOCAL_BYTES, _NUM_REGISTERS, _DYNAMIC_SHARED_BYTES = 1, 3, 4, 8  # CUfunction_attribute


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number, and a union of 64 bytes."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", c_uint),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EngineError(
            f"the NVIDIA driver cannot be loaded: {error}", hint="serve with --device cpu"
        ) from error
    driver.cuLaunchKernelEx.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p)
    driver.cuFuncSetAttribute.argtypes = (c_void_p, c_int, c_int)
    driver.cuFuncGetAttribute.argtypes = (c_void_p, c_int, c_void_p)
    driver.cuFuncGetParamInfo.argtypes = (c_void_p, c_size_t, c_void_p, c_void_p)
    driver.cuModuleGetFunction.argtypes = (c_void_p, c_void_p, c_char_p)
    return driver


def _check(status: int, doing: str) -> None:
    if status:
        text = c_char_p()
        _driver().cuGetErrorString(status, byref(text))
        raise EngineError(f"{doing}: {(text.value or b'unknown error').decode()} (CUDA error {status})")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a thread and a block of a kernel take; `local_bytes` of a thread are spilled registers and arrays."""

    registers: int
    local_bytes: int
    static_shared_bytes: int


class Kernel:
    """One entry of one file with its constants on one GPU. Lives as long as the process, as its graphs may."""

    def __init__(self, entry: str, cubin: bytes) -> None:
        """Load it into the current context, which is torch's."""
        self.name, self._driver = entry, _driver()
        module, self._function = c_void_p(), c_void_p()
        self._enter_context()
        # Loading allocates, which a thread that captures a graph may otherwise not.
        mode = c_int(_CAPTURE_MODE_RELAXED)
        self._driver.cuThreadExchangeStreamCaptureMode(byref(mode))
        try:
            _check(self._driver.cuModuleLoadData(byref(module), cubin), f"loading kernel {entry}")
            _check(
                self._driver.cuModuleGetFunction(byref(self._function), module, entry.encode()),
                f"finding kernel {entry} in its module",
            )
        finally:
            self._driver.cuThreadExchangeStreamCaptureMode(byref(mode))
        self._sizes = self._parameter_sizes()
        self._arguments = Arguments(entry, len(self._sizes), "cuda")
        self._granted_bytes = 48 * 1024 - self._attribute(_STATIC_SHARED_BYTES)
        self._serialization = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self._config = _Config(attributes=ctypes.pointer(self._serialization))

    def _enter_context(self) -> None:
        """Make torch's context, the device's primary one, this thread's, which may have called nothing of CUDA yet."""
        context = c_void_p()
        _check(self._driver.cuCtxGetCurrent(byref(context)), "asking for the GPU's context")
        if not context:
            device = torch.cuda.current_device()  # numbered as the driver numbers what it shows
            _check(self._driver.cuDevicePrimaryCtxRetain(byref(context), device), f"taking up GPU {device}")
            _check(self._driver.cuCtxSetCurrent(context), f"taking up GPU {device}")

    def _parameter_sizes(self) -> list[int]:
        found: list[int] = []
        offset, size = c_size_t(), c_size_t()
        while True:
            status = self._driver.cuFuncGetParamInfo(self._function, len(found), byref(offset), byref(size))
            if status == _INVALID_VALUE:  # beyond the last
                return found
            _check(status, f"reading the parameters of kernel {self.name}")
            found.append(size.value)

    def _attribute(self, number: int) -> int:
        value = c_int()
        _check(
            self._driver.cuFuncGetAttribute(byref(value), number, self._function),
            f"reading what kernel {self.name} takes",
        )
        return value.value

    @property
    def usage(self) -> Usage:
        """Registers and memory that the compiler gave it."""
        return Usage(*map(self._attribute, (_NUM_REGISTERS, _LOCAL_BYTES, _STATIC_SHARED_BYTES)))

    def launch(
        self,
        grid: Shape,
        block: Shape,
        shared_bytes: int,
        args: Sequence[Argument],
        *,
        dependent: bool = False,
    ) -> None:
        """Launch blocks of threads with `shared_bytes` of dynamic shared memory on torch's current stream.

        `args` are tensors of this GPU, None (a null address), int (int32), float (float32) and ("i64", n), in the order
        of the kernel's parameters. A `dependent` kernel may start before the one ahead of it in the stream has ended,
        and must wait for it itself (griddepcontrol.wait). Raises EngineError for arguments that are not the kernel's
        parameters, and for what the driver refuses.
        """
        letters = self._arguments.pack(args)
        if sizes(letters) != self._sizes:
            raise EngineError(f"{self.name} takes parameters of {self._sizes} bytes, not ({letters})")
        if shared_bytes > self._granted_bytes:
            _check(
                self._driver.cuFuncSetAttribute(self._function, _DYNAMIC_SHARED_BYTES, shared_bytes),
                f"giving a block of {self.name} {shared_bytes} bytes of shared memory",
            )
            self._granted_bytes = shared_bytes
        config = self._config
        config.grid[:] = extent(grid)
        config.block[:] = extent(block)
        config.shared_bytes = shared_bytes
        config.stream = torch.cuda.current_stream().cuda_stream
        config.num_attributes = int(dependent)
        status = self._driver.cuLaunchKernelEx(byref(config), self._function, self._arguments.pointers, None)
        if status:
            _check(status, f"launching {self.name} with grid {grid}, block {block}, {shared_bytes} bytes")


@functools.cache
def _made(file: str | Path, entry: str, constants: source.Constants, device: int) -> Kernel:
    capability = torch.cuda.get_device_capability(device)
    return Kernel(entry, compiler().cubin(file, entry, constants, capability))


def kernel(file: str | Path, entry: str, defines: Mapping[str, int | float | str] | None = None) -> Kernel:
    """Kernel `entry` of `file` on the current GPU, with these constants; compiled when first asked for, then kept.

    A relative `file` is this package's. Raises EngineError without a driver or NVRTC, and with what NVRTC said.
    """
    return _made(file, entry, source.constants(defines or {}), torch.cuda.current_device())


__all__ = ["Kernel", "Usage", "kernel"]
