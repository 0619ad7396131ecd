"""A thread that says why a step failed, ends the process, and publishes the counters.

A host node cannot raise: the device stops at a failed lookup, and this thread tells the reason. Knows stores only by
their `failure`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from deskfleet_engram.errors import EngramError

POLL_S = 0.05
COUNTERS_S = 10.0
GRACE_S = 10.0
"""How long the engine has to end by itself, so that its own last words are written too."""

EXIT_CODE = 70

_logger = logging.getLogger("vllm.deskfleet_engram")


class _Fallible(Protocol):
    def failure(self) -> EngramError | None: ...


def watch(
    stores: Callable[[], Sequence[_Fallible]],
    publish: Callable[[], None],
    *,
    end: Callable[[int], None] = os._exit,
) -> threading.Thread:
    """Start the thread. It calls `publish` now and then, and `end` after a failure."""

    def run() -> None:
        written_s = 0.0
        while True:
            for store in stores():
                error = store.failure()
                if error is not None:
                    _logger.critical(
                        "deskfleet-engram: %s; the step is not used and this process ends", error
                    )
                    time.sleep(GRACE_S)
                    end(EXIT_CODE)
                    return
            if time.monotonic() - written_s >= COUNTERS_S:
                written_s = time.monotonic()
                try:
                    publish()
                except EngramError as error:
                    _logger.warning("deskfleet-engram: %s", error)
            time.sleep(POLL_S)

    thread = threading.Thread(target=run, name="deskfleet-engram-watch", daemon=True)
    thread.start()
    return thread


__all__ = ["COUNTERS_S", "EXIT_CODE", "GRACE_S", "POLL_S", "watch"]
