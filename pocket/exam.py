"""Serves a checkpoint, soundly or with a fault in it, and asks it: what variants and acceptance are made of.

Owns how a server is run for an examination. The questions and the report are `deskfleet.evaluation`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deskfleet.engine.client import EngineOptions
from deskfleet.evaluation.report import Report
from deskfleet.evaluation.run import EvalSettings, evaluate
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.serve import ServeOptions, ServerThread
from pocket.faults import planted

NAME = "pocket"


@dataclass(frozen=True)
class Way:
    """How a checkpoint is run."""

    tp_size: int = 1
    speculation: str = "off"
    fault: str | None = None

    @property
    def told(self) -> str:
        """The flags of `deskfleet serve` that do the same; a fault has none."""
        return f"--tp {self.tp_size} --speculate {self.speculation}"


@contextmanager
def served(checkpoint: Path, way: Way) -> Iterator[str]:
    """Serve on a free port and yield the address. Raises what `deskfleet serve` raises."""
    options = ServeOptions(
        gateway=GatewaySettings(model_id=NAME, checkpoint=checkpoint, port=0),
        engine=EngineOptions(tp_size=way.tp_size, speculation=way.speculation),
    )
    with planted(way.fault), ServerThread(options) as ready:
        yield ready.endpoint.url


def examine(checkpoint: Path, settings: EvalSettings, way: Way | None = None) -> Report:
    """Serve, ask, and return the report. Raises what `deskfleet eval` raises."""
    with served(checkpoint, way or Way()) as url:
        return asyncio.run(evaluate(url, settings))


__all__ = ["NAME", "Way", "examine", "served"]
