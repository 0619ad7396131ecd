"""A trace of some steps of this rank, for `deskfleet profile`: torch's own profiler, and the names it cannot know.

Off unless DESKFLEET_TRACE_DIR names a directory; then costs what torch's profiler costs. Owns when recording begins and
ends: the first steps are warm-up. Writes `rank-N.json.gz` as soon as its steps are over, so that a rank that is killed
afterwards has left its trace.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from deskfleet.engine.core import EngineCore
from deskfleet.engine.distributed import GlooCommunicator
from deskfleet.engine.runner import ModelRunner
from deskfleet.env import TRACE_DIR
from deskfleet_engram.native import Ticket
from deskfleet_engram.store import OpenStore

WAIT_FOR_ROWS = "engram: wait for rows"
_COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "broadcast_bytes")
_WARM_UP_STEPS = 4
_STEPS = 8


def start(rank: int, runner: ModelRunner, core: EngineCore | None) -> None:
    """Record some of this rank's steps, if the environment asks for it. `core` is rank 0's."""
    directory = os.environ.get(TRACE_DIR.name, TRACE_DIR.default)
    if not directory:
        return
    _replace(Ticket, "wait", _named(WAIT_FOR_ROWS, Ticket.wait))
    _replace(OpenStore, "gather", _named(WAIT_FOR_ROWS, OpenStore.gather))
    if runner.comm.size > 1 and not isinstance(runner.comm, GlooCommunicator):  # gloo's have names
        owner = type(runner.comm)
        for name in _COLLECTIVES:
            _replace(owner, f"_{name}", _named(f"shared memory: {name}", getattr(owner, f"_{name}")))
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    recorder = profile(
        activities=activities,
        schedule=schedule(wait=_WARM_UP_STEPS - 1, warmup=1, active=_STEPS, repeat=1),
        on_trace_ready=functools.partial(_write, Path(directory), rank),
    )
    recorder.start()
    if core is None:
        _replace(runner, "follow", _stepping(recorder, runner.follow))
    else:
        _replace(core, "step", _stepping(recorder, core.step))


def _replace(owner: object, name: str, function: Callable[..., Any]) -> None:
    """Put `function` in the place of a method. Only processes that are traced do this."""
    setattr(owner, name, function)


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return named


def _stepping(recorder: profile, step: Callable[[], Any]) -> Callable[[], Any]:
    left = [_WARM_UP_STEPS + _STEPS + 1]

    def stepped() -> Any:
        done = step()
        if left[0]:
            left[0] -= 1
            recorder.step()
            if not left[0]:
                recorder.stop()
        return done

    return stepped


def _write(directory: Path, rank: int, recorder: profile) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    recorder.export_chrome_trace(str(directory / f"rank-{rank}.json.gz"))


__all__ = ["WAIT_FOR_ROWS", "start"]
