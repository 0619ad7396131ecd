"""Runs a plug-in's proof with a played device: streams do everything at once, its memory is the host's. Not a test.

    PYTHON proof_driver.py ENGINE KERNEL_SOURCE PACK CHECKPOINT LOOKUPS

Kernels are the engines' own, cut out of their source files and run by Triton's interpreter; the host function is called
on a thread without Python's lock, as CUDA's driver does. What is left out of a real proof is CUDA alone.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch

ENGINE, KERNEL_SOURCE, PACK, CHECKPOINT, LOOKUPS = sys.argv[1:]


def launch(stream: int, function: int, argument: int) -> None:
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    thread = threading.Thread(target=called, args=(argument,))
    thread.start()
    thread.join()


def be_device(engine: Any, cuda: Any) -> None:
    engine._device = lambda *_: torch.device("cpu")
    engine._captured = lambda work: work
    cuda.launch_host_function = launch
    cuda.copy = lambda stream, target, source, count: ctypes.memmove(target, source, count)
    torch.cuda.current_stream = lambda *_: SimpleNamespace(cuda_stream=0)
    torch.cuda.is_current_stream_capturing = lambda: False
    plain_empty = torch.empty
    torch.empty = lambda *shape, pin_memory=False, **others: plain_empty(*shape, **others)


def interpret_gather(module: Any) -> None:
    """SGLang's wrapper insists on a CUDA tensor; the interpreter on masks as narrow as they were, and it takes the code
    of NaN for 480."""
    from triton.runtime.interpreter import InterpreterBuilder

    masked_load = InterpreterBuilder.create_masked_load

    def load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return masked_load(self, pointers, mask, *others)

    InterpreterBuilder.create_masked_load = load

    def gather(w: int, s: int, ids: Any, out: Any, dim: int, block: int, *, row_lo: int, row_hi: int) -> None:
        module._engram_gather_kernel[(ids.numel(),)](
            *(w, s, ids, ids, out, row_lo, row_hi),
            DIM=dim,
            BLK=block,
            E8M0_ZERO=module._E8M0_ZERO,
            HAS_DST=False,
        )
        poison = b"\x7f" * dim
        for row, place in enumerate(ids.tolist()):
            if place >= row_lo and ctypes.string_at(w + place * dim, dim) == poison:
                out[row] = float("nan")

    module.engram_gather = gather


package = f"deskfleet_{ENGINE}"
be_device(importlib.import_module(f"{package}.prove"), importlib.import_module(f"{package}.cuda"))
if ENGINE == "sglang":
    standalone = importlib.import_module(f"{package}.standalone")
    load = standalone.load

    def load_and_interpret(path: Any) -> None:
        load(path)
        interpret_gather(sys.modules[standalone.MODULE])

    standalone.load = load_and_interpret
os._exit = sys.exit  # type: ignore[assignment]
arguments = ["prove", PACK, CHECKPOINT, "--lookups", LOOKUPS, "--kernel-source", KERNEL_SOURCE]
sys.exit(importlib.import_module(f"{package}.__main__").main(arguments))
