"""What the ranks of this machine counted, in vLLM's own `/metrics`: the API server reads the files that workers write.

With more than one API server vLLM collects the metrics of all its processes from files of prometheus_client; workers
then count there (`deskfleet_engram.host_metrics`), and what is registered here is not asked.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from deskfleet_engram.host_metrics import FileCollector

_exposed: list[FileCollector] = []


def expose(directory: Path) -> None:
    """Add the counters in `directory` to the metrics of this process, once."""
    if not _exposed:
        _exposed.append(FileCollector(directory, "vllm"))
        importlib.import_module("prometheus_client").REGISTRY.register(_exposed[0])


__all__ = ["expose"]
