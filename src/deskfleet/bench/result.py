"""A measurement as a file: settings, raw samples, and where they come from. Owns the schema.

A Result cannot be built without provenance and samples, and a file is never overwritten: a number that has been
published stays what it was.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from datetime import date
from pathlib import Path

import msgspec

from deskfleet.bench.provenance import Provenance
from deskfleet.errors import ConfigError

SCHEMA = 1


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run of one configuration.

    `num_tokens` were decoded in `seconds_s`, the time in which all streams decoded; prompts lie outside.
    `aggregate_tok_s` is their rate, `stream_tok_s` each stream's own.
    """

    name: str
    tp_size: int
    batch: int
    round: int
    num_tokens: int
    seconds_s: float
    aggregate_tok_s: float
    stream_tok_s: tuple[float, ...]


class Spread(msgspec.Struct, frozen=True):
    """Median, least and greatest of some samples, and how many there were."""

    median: float
    least: float
    greatest: float
    num_samples: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of `values`, of which there is at least one."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1], len(ordered))


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One measurement. `settings` say what was held fixed; `warm_up` samples are kept but not summarised."""

    name: str
    provenance: Provenance
    settings: dict[str, str | int | float | None]
    warm_up: tuple[Sample, ...]
    samples: tuple[Sample, ...]
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if not self.samples:
            raise ConfigError(f"the measurement {self.name!r} has no samples")
        if self.schema != SCHEMA:
            raise ConfigError(f"result schema {self.schema} is not {SCHEMA}, the one known here")

    def configurations(self) -> list[tuple[int, int]]:
        """Return the (tp_size, batch) pairs measured, in order."""
        return sorted({(sample.tp_size, sample.batch) for sample in self.samples})

    def aggregate(self, tp_size: int, batch: int) -> Spread:
        """Return the spread of the aggregate rate of one configuration."""
        return Spread.of(s.aggregate_tok_s for s in self._of(tp_size, batch))

    def per_stream(self, tp_size: int, batch: int) -> Spread:
        """Return the spread of the streams' own rates in one configuration."""
        return Spread.of(rate for s in self._of(tp_size, batch) for rate in s.stream_tok_s)

    def _of(self, tp_size: int, batch: int) -> list[Sample]:
        return [s for s in self.samples if (s.tp_size, s.batch) == (tp_size, batch)]

    def write(self, path: Path) -> None:
        """Write the file at `path`. Raises ConfigError when there is one already, or it cannot be written."""
        write_new(path, self)

    @classmethod
    def read(cls, path: Path) -> Result:
        """Return the result in a file. Raises ConfigError when it is none."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"cannot read the result {path}: {error}") from error


def write_new(path: Path, document: object) -> None:
    """Write `document` as JSON at `path`. Raises ConfigError when there is a file already, or it cannot be written."""
    data = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(data)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists; results are never overwritten", hint="name another file"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def result_path(directory: Path, name: str, day: date) -> Path:
    """Return a path in `directory` that is not taken: `2026-01-31-name.json`, then `2026-01-31-name-2.json`."""
    path = directory / f"{day.isoformat()}-{name}.json"
    number = 2
    while path.exists():
        path = directory / f"{day.isoformat()}-{name}-{number}.json"
        number += 1
    return path


__all__ = ["SCHEMA", "Provenance", "Result", "Sample", "Spread", "result_path", "write_new"]
