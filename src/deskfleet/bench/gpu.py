"""The GPU step's benchmark as a result file.

    python -m deskfleet.bench.gpu FILE decode --rows 1,4,16,32,64

deskfleet.engine.cuda.bench measures and takes the arguments after FILE; this adds where the numbers come from. Knows
nothing of measuring, and imports the kernels only when asked to measure: they need Triton.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from deskfleet.bench.provenance import Provenance
from deskfleet.bench.result import write_new
from deskfleet.errors import ConfigError, DeskfleetError

SCHEMA = 1


class GpuResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run: samples `rank0of4-decode` have `rows` and `median_ms`, samples `kernel ...` `rows` and `median_us`."""

    name: str
    provenance: Provenance
    machine: dict[str, Any]
    settings: dict[str, str | int | float | None]
    samples: tuple[dict[str, Any], ...]
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if not self.samples:
            raise ConfigError(f"the measurement {self.name!r} has no samples")


def measure(path: Path, arguments: Sequence[str]) -> GpuResult:
    """Measure and write the result. What was measured before an error is written too. Raises what measuring raises."""
    if path.exists():
        raise ConfigError(f"{path} exists; results are never overwritten", hint="name another file")
    provenance = Provenance.capture("python -m deskfleet.bench.gpu", (str(path.name), *arguments))
    kernels = importlib.import_module("deskfleet.engine.cuda.bench")
    document: dict[str, Any] = {"samples": []}
    try:
        kernels.measure(arguments, document)
    finally:
        if document["samples"]:
            result = GpuResult(provenance=provenance, **{**document, "samples": tuple(document["samples"])})
            write_new(path, result)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """FILE, then what deskfleet.engine.cuda.bench takes. Errors end as they do in the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        measure(Path(given[0]), given[1:])
    except DeskfleetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())


__all__ = ["SCHEMA", "GpuResult", "main", "measure"]
