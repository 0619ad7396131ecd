"""Kernels for one kind of GPU: source to machine code by NVRTC, which CUDA builds of torch bring. Needs no GPU.

Owns where NVRTC is found and how it is asked. Machine code is kept on disk (cache.py); its name holds the source, the
options and the compiler's version.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from deskfleet.engine.cuda.native import cache, source
from deskfleet.errors import EngineError

_OPTIONS = ("--std=c++17", "--device-as-default-execution-space")


def architecture(capability: tuple[int, int]) -> str:
    """NVRTC's name of a GPU: sm_90a of (9, 0). From 9.0 on with the instructions that only this kind has."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def candidates() -> list[str]:
    """Where NVRTC may be: beside torch's other libraries, in torch, where the loader looks; torch's own CUDA first."""
    majors = dict.fromkeys((*(torch.version.cuda or "").split(".")[:1], "13", "12"))
    names = [f"libnvrtc.so.{major}" for major in majors if major]
    folders = [Path(torch.__file__).parent / "lib"]
    for entry in sys.path:
        folders += sorted(Path(entry).glob("nvidia/*/lib")) if Path(entry).is_dir() else []
    return [str(folder / name) for name in names for folder in folders if (folder / name).is_file()] + names


class Compiler:
    """One NVRTC library."""

    def __init__(self, library: str | Path | None = None) -> None:
        """`library` is its file; None: the first of `candidates`. Raises EngineError where there is none."""
        tried = candidates() if library is None else [str(library)]
        self._library = self._load(tried)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = f"{major.value}.{minor.value}"

    @staticmethod
    def _load(tried: list[str]) -> ctypes.CDLL:
        for name in tried:
            try:
                # Of this library NVRTC knows the name alone, which the loader finds if it is loaded already.
                for builtins in (
                    sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")) if "/" in name else ()
                ):
                    ctypes.CDLL(str(builtins))
                return ctypes.CDLL(name)
            except OSError as error:
                reason = str(error)
        raise EngineError(
            f"NVRTC, which compiles the GPU's kernels, is not to be found: {reason}",
            hint="install a CUDA build of torch, or nvidia-cuda-nvrtc of torch's CUDA version beside it",
        )

    def _check(self, status: int) -> None:
        if status:
            raise EngineError(f"NVRTC failed: {self._library.nvrtcGetErrorString(status).decode()}")

    def cubin(
        self, file: str | Path, entry: str, constants: source.Constants, capability: tuple[int, int]
    ) -> bytes:
        """Machine code of `entry` for GPUs of this compute capability, from the disk where it lies there.

        A relative `file` is this package's. Raises EngineError with what the compiler says of the source.
        """
        text, headers = source.sources(file)
        unit = source.unit(file, text, constants)
        options = (*_OPTIONS, f"--gpu-architecture={architecture(capability)}")
        parts = (part for header in headers.items() for part in header)
        name = cache.key("nvrtc", self.version, unit, *options, *parts) + ".cubin"
        return cache.stored(name, lambda: self._compile(file, entry, unit, headers, options))

    def _compile(
        self, file: str | Path, entry: str, unit: str, headers: Mapping[str, str], options: tuple[str, ...]
    ) -> bytes:
        nvrtc, program = self._library, ctypes.c_void_p()
        self._check(
            nvrtc.nvrtcCreateProgram(
                ctypes.byref(program), unit.encode(), Path(file).name.encode(), len(headers),
                _strings(headers.values()), _strings(headers),
            )
        )  # fmt: skip
        try:
            status = nvrtc.nvrtcCompileProgram(program, len(options), _strings(options))
            if status == _COMPILATION:
                log = self._result(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
                raise source.failed(file, entry, log.decode(errors="replace").rstrip("\0"))
            self._check(status)
            return self._result(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def _result(self, program: ctypes.c_void_p, size_of: Any, get: Any) -> bytes:
        size = ctypes.c_size_t()
        self._check(size_of(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        self._check(get(program, content))
        return content.raw


_COMPILATION = 6  # NVRTC_ERROR_COMPILATION


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


@functools.cache
def compiler() -> Compiler:
    """The NVRTC that belongs to this torch."""
    return Compiler()


__all__ = ["Compiler", "architecture", "candidates", "compiler"]
