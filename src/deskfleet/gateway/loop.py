"""What servers run on: uvloop's event loop where it is installed, asyncio's own otherwise.

Owns the choice, the limit of open files, and what the collector leaves alone.

A token through the gateway costs about a twentieth less on uvloop (docs/decisions/0017-event-loop.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_YOUNG_OBJECTS = 10_000  # more than have gone, before those that are left are looked through


def run_server(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end, as `asyncio.run` does, with as many open files as the system allows this process."""
    _raise_open_files()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def _raise_open_files() -> None:
    """Every stream is a socket or two, and the usual soft limit of 1,024 is one client's mishap away."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(
            ValueError, OSError
        ):  # where the kernel holds the real limit lower, it stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def settle() -> None:
    """Tell the collector that what there is now will stay, and to look at what comes less often.

    Called once, when a server is ready: what was imported and loaded is then never looked through again, in which time
    every stream would stand still. Of a burst of requests most objects have gone by themselves before they are looked
    through; by default that would be done for every 700 of them, two or three requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


__all__ = ["run_server", "settle"]
