"""Kernels on a CPU, without a GPU: a .cu file compiled by the C++ compiler together with emulator.h.

Owns the compiler's command, the library's life and its launches. What a GPU does, to which `emulator.h` keeps, is
there. Test infrastructure: thousands of times slower than a GPU, one block after another.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from deskfleet.engine.cuda.native import cache, source
from deskfleet.engine.cuda.native.arguments import Argument, Arguments, Shape, extent
from deskfleet.errors import EngineError

_OPTIONS = (
    "-O2",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # the same bits on every processor
    "-fno-strict-aliasing",  # shared memory is read as whatever lies there
    "-fno-exceptions",
    "-Wno-unknown-pragmas",
    "-DDESKFLEET_EMULATED=1",
)
_MESSAGE_BYTES = 512


class EmulatedKernel:
    """One entry of one file with its constants; `launch` runs it on tensors of the CPU before it returns."""

    def __init__(self, file: str | Path, entry: str, constants: source.Constants) -> None:
        self.name = entry
        library = ctypes.CDLL(str(_library(file, entry, constants)))
        library.deskfleet_parameters.restype = ctypes.c_char_p
        self._letters = library.deskfleet_parameters().decode()
        self._run = library.deskfleet_run
        self._run.restype = None
        self._run.argtypes = (
            ctypes.c_void_p,
            ctypes.c_uint32,
            ctypes.c_void_p,
            ctypes.c_uint32,
            ctypes.c_char_p,
            ctypes.c_uint32,
        )
        self._arguments = Arguments(entry, len(self._letters), "cpu")
        self._message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._launches = 0

    def launch(
        self,
        grid: Shape,
        block: Shape,
        shared_bytes: int,
        args: Sequence[Argument],
        *,
        dependent: bool = False,
    ) -> None:
        """As `launcher.Kernel.launch`; every launch has ended before the next, so `dependent` changes nothing.

        Raises EngineError for arguments that are not the kernel's parameters, for threads that wait for ever and for a
        write behind shared memory.
        """
        letters = self._arguments.pack(args)
        if letters != self._letters:
            raise EngineError(f"{self.name} takes ({self._letters}), not ({letters})")
        shape = (ctypes.c_uint32 * 6)(*extent(grid), *extent(block))
        self._run(
            shape, shared_bytes, self._arguments.pointers, self._launches & 1, self._message, _MESSAGE_BYTES
        )
        self._launches += 1
        if self._message.value:
            raise EngineError(f"{self.name} on the emulator: {self._message.value.decode()}")


@functools.cache
def _compiler() -> tuple[str, str]:
    """The C++ compiler and what it calls itself."""
    path = shutil.which("g++")
    if path is None:
        raise EngineError("emulated kernels need a C++ compiler, g++", hint="install g++ 9 or later")
    done = subprocess.run((path, "--version"), capture_output=True, text=True, check=True)
    return path, done.stdout


def _library(file: str | Path, entry: str, constants: source.Constants) -> Path:
    """The kernel as a library, compiled first where the cache has none."""
    text, headers = source.sources(file)
    headers["emulator.h"] = (source.HERE / "emulator.h").read_text()
    compiler, version = _compiler()
    unit = f'#include "emulator.h"\n{source.unit(file, text, constants)}DESKFLEET_EMULATE({entry})\n'
    name = cache.key(unit, version, *_OPTIONS, *(part for item in headers.items() for part in item)) + ".so"
    if cache.lookup(name) is None:
        with tempfile.TemporaryDirectory() as folder:
            for header, content in headers.items():
                (Path(folder) / header).write_text(content)
            done = subprocess.run(
                (compiler, *_OPTIONS, "-x", "c++", "-", "-I", folder, "-o", f"{folder}/kernel.so"),
                input=unit, capture_output=True, text=True,
            )  # fmt: skip
            if done.returncode != 0:
                raise source.failed(file, entry, done.stderr)
            cache.store(name, (Path(folder) / "kernel.so").read_bytes())
    return cache.directory() / name


@functools.cache
def _made(file: str | Path, entry: str, constants: source.Constants) -> EmulatedKernel:
    return EmulatedKernel(file, entry, constants)


def emulated(
    file: str | Path, entry: str, defines: Mapping[str, int | float | str] | None = None
) -> EmulatedKernel:
    """Kernel `entry` of `file` on the CPU, with these constants; compiled when first asked for, then kept.

    A relative `file` is this package's. Raises EngineError when there is no g++, or with what it said.
    """
    return _made(file, entry, source.constants(defines or {}))


__all__ = ["EmulatedKernel", "emulated"]
