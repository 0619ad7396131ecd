"""Published figures as reference rows, each with its source and conditions. Owns reading `published.toml` beside it.

A reference row has no samples: nothing can be said about noise, only what was claimed, under what, and what is unlike
ours. Knows nothing of measuring.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from deskfleet.bench.load.record import Condition, LoadResult, Setup
from deskfleet.bench.load.summary import RowSummary, summarise
from deskfleet.errors import ConfigError

_FILE = Path(__file__).with_name("published.toml")

QUANTITIES: dict[str, str] = {
    "decode_aggregate_tok_s": "tok/s aggregate",
    "decode_stream_tok_s": "tok/s per stream",
    "prefill_tok_s": "prefill tok/s",
    "ttft_ms": "TTFT ms",
}


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """One value. `at` is the number of streams, or of prompt tokens for prefill; 0 where it was not said."""

    source: str
    quantity: str
    case: str
    at: int
    value: float
    conditions: dict[str, Condition] = field(default_factory=dict)
    flaw: str | None = None


@dataclass(frozen=True, slots=True)
class Beside:
    """A published figure beside ours. `differences` are what is unlike, or unknown here; with any, the ratio is no
    verdict."""

    published: PublishedFigure
    ours: float
    differences: tuple[str, ...]

    @property
    def ratio(self) -> float:
        return self.ours / self.published.value


@cache
def published_figures() -> tuple[PublishedFigure, ...]:
    """Return every published figure, in the order of the file."""
    return parse_figures(_FILE.read_text(encoding="utf-8"))


def parse_figures(text: str) -> tuple[PublishedFigure, ...]:
    """Return the figures in TOML `text`. Raises ConfigError naming the source of one that cannot be read."""
    try:
        groups: list[dict[str, Any]] = tomllib.loads(text).get("figures", [])
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the published figures are no TOML: {error}") from error
    found = []
    for number, group in enumerate(groups, 1):
        source = group.get("source", f"figures {number}")
        try:
            quantity, over = group["quantity"], group["over"]
            if quantity not in QUANTITIES:
                raise ConfigError(f"{source}: there is no quantity {quantity!r}")
            for case, values in group["values"].items():
                for at, value in zip(over, values, strict=True):
                    found.append(
                        PublishedFigure(
                            source, quantity, case, at, float(value), group["conditions"], group.get("flaw")
                        )
                    )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{source}: {type(error).__name__}: {error}") from error
    return tuple(found)


def beside_published(result: LoadResult) -> list[Beside]:
    """Return each published figure for which `result` has a row of the same quantity, case and size."""
    rows = summarise(result)
    found = []
    for figure in published_figures():
        for row in rows:
            ours = _value(row, figure)
            if ours is not None:
                found.append(Beside(figure, ours, _differences(result, row.setup, figure)))
    return found


def _value(row: RowSummary, figure: PublishedFigure) -> float | None:
    setup = row.setup
    if setup.case != figure.case or not row.num_batches:
        return None
    if figure.quantity == "prefill_tok_s":
        spread = row.prefill_tok_s if setup.part == "prefill" and setup.context == figure.at else None
    elif setup.part != "decode" or setup.concurrency != figure.at or setup.context:
        return None
    elif figure.quantity == "ttft_ms":
        return None if row.ttft is None else row.ttft.p50_ms
    else:
        spread = row.stream_tok_s if figure.quantity == "decode_stream_tok_s" else row.aggregate_tok_s
    return None if spread is None else spread.median


def _differences(result: LoadResult, setup: Setup, figure: PublishedFigure) -> tuple[str, ...]:
    ours: dict[str, Condition] = {**result.conditions, "sampling": setup.sampling}
    found = []
    for name, theirs in figure.conditions.items():
        if name not in ours or ours[name] is None:
            found.append(f"{name}: {theirs}, not recorded here")
        elif str(ours[name]) != str(theirs):
            found.append(f"{name}: {theirs}, here {ours[name]}")
    return tuple(found)


__all__ = [
    "QUANTITIES",
    "Beside",
    "PublishedFigure",
    "beside_published",
    "parse_figures",
    "published_figures",
]
