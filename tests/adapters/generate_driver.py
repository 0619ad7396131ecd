"""Runs `python -m deskfleet_vllm generate` with a played device: streams do everything at once. Not a test.

    PYTHON generate_driver.py SOURCE PACK CHECKPOINT TOKENS [spoil]

`spoil`: the store gives one row that is another's, now and then. Kernels run in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

SOURCE, PACK, CHECKPOINT, TOKENS, *SPOIL = sys.argv[1:]


class Nothing:
    """A stream or an event of a device that does everything at once."""

    def __init__(self, **_: Any) -> None:
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def be_device() -> None:
    vars(torch.cuda).update(
        Stream=Nothing,
        Event=Nothing,
        current_stream=lambda *_: Nothing(),
        stream=lambda _: contextlib.nullcontext(),
        get_device_properties=lambda *_: SimpleNamespace(multi_processor_count=4),
    )
    torch.accelerator.current_device_index = lambda: 0
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[assignment]
    plain_empty = torch.empty
    torch.empty = lambda *shape, pin_memory=False, **others: plain_empty(*shape, **others)
    importlib.import_module("deskfleet_vllm.standalone").device_view = lambda host: host


def narrow_masks() -> None:
    """The interpreter insists on masks as narrow as they were written."""
    builder: Any = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def narrowed(mask: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return mask

    builder.create_masked_load = lambda self, at, mask, *rest: load(self, at, narrowed(mask), *rest)
    builder.create_masked_store = lambda self, at, value, mask, *rest: store(
        self, at, value, narrowed(mask), *rest
    )


def spoil() -> None:
    table = importlib.import_module("deskfleet_engram.host").HostTable
    gather = table.gather

    def wrong(self: Any, ids: Any, codes: Any, scales: Any) -> None:
        moved = ids.copy()
        if (ids > self.first_row).sum() > 20 and self.layer == 14:
            moved[np.argmax(ids)] -= 1
        gather(self, moved, codes, scales)

    table.gather = wrong


be_device()
narrow_masks()
if SPOIL:
    spoil()
arguments = ["generate", PACK, CHECKPOINT, "--source", SOURCE, "--store", "staged", "--tokens", TOKENS]
sys.exit(importlib.import_module("deskfleet_vllm.__main__").main(arguments))
