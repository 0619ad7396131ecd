"""Row ids of a prompt, known when the scheduler has formed the batch and the step before it still runs.

Hashes the batch's tokens on the host with SGLang's own hasher and windows, for `deskfleet_engram.host_prefetch`. A hint
and nothing more: lookups go by row id, and answer the same without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def hashed(hasher: Any, batch: Any) -> Callable[[], Any] | None:
    """Return what computes the row ids int64 [T, layers, columns] of a batch, None where tokens are not on the host.

    The tokens are copied now; the computation touches neither batch nor requests.
    """
    if not batch.forward_mode.is_extend_without_speculative():
        return None
    stager = importlib.import_module("sglang.srt.layers.engram_staging").EngramRowStager
    windows = stager._windows(SimpleNamespace(hasher=hasher), batch)
    return None if windows is None else lambda: hasher.hash_windows(*windows)[0].numpy()


__all__ = ["hashed"]
