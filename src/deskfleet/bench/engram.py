"""The row store's benchmark as a result file, a page and a plot.

deskfleet_engram measures; this adds where the numbers come from, and says what they mean. Knows nothing of measuring.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from deskfleet.bench.provenance import Provenance
from deskfleet.bench.result import write_new
from deskfleet.errors import ConfigError, DeskfleetError
from deskfleet.units import format_bytes
from deskfleet_engram.bench.figures import RATIOS, Samples, fio_for_native
from deskfleet_engram.bench.measure import Sample
from deskfleet_engram.bench.run import Settings, run
from deskfleet_engram.errors import EngramError

NAME = "engram-reader"
SCHEMA = 1

_METHODS = {
    "native": "deskfleet-engram",
    "fio": "fio, batches",
    "direct96": "96 threads, direct reads",
    "preadv32": "32 Python threads, preadv",
    "memmap": "Python memmap",
}
_COLOURS = ("#1f5fa8", "#444444", "#c0562b", "#7a9a3a", "#9a6fb0")

# What is known about a missed target, by a part of the ratio's name; `_facts` adds what the samples say.
_REASONS = {
    "streaming": "streaming sends the next read with every answer, a lookup waits for its last row",
    "to_direct96": "the disk leaves no more room",
    "to_preadv32": "the disk leaves no more room; repeats within a prompt come from the page cache for preadv",
    "batch_6_cpu": "a lookup is handed to the I/O thread and back, which fio's are not, and only six reads share that; "
    "how much it is was not measured",
    "with_prefetch": "how much of it is the prefetch, the unsteady 99th percentile of this disk does not tell",
    "pack": "packing makes every 64 MiB durable, dd syncs once at the end; its share of the gap was not measured",
}
_UNEXPLAINED = "the cause was not isolated"


class ReaderResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run of the benchmark: `measurement` is what `python -m deskfleet_engram.bench --json` prints."""

    name: str
    provenance: Provenance
    measurement: dict[str, Any]
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA or self.name != NAME:
            raise ConfigError(f"{self.name!r} of schema {self.schema} is no {NAME!r} of schema {SCHEMA}")
        if not self.measurement.get("samples") or not self.measurement.get("ratios"):
            raise ConfigError(f"the measurement {self.name!r} has no samples or no ratios")

    def write(self, path: Path) -> None:
        """Write the file at `path`. Raises ConfigError when there is one already, or it cannot be written."""
        write_new(path, self)

    @classmethod
    def read(cls, path: Path) -> ReaderResult:
        """Return the result in a file. Raises ConfigError when it is none."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"cannot read the result {path}: {error}") from error


def is_reader_result(path: Path) -> bool:
    """Say whether a file of bench/results is one of these, by its name."""
    return f"-{NAME}" in path.name


def measure_reader(settings: Settings, provenance: Provenance, *, say: Callable[[str], None]) -> ReaderResult:
    """Run the benchmark. Raises DeskfleetError when the reader, fio, dd or the disk fail."""
    try:
        measurement = run(settings, say=say)
    except (EngramError, OSError) as error:
        raise DeskfleetError(f"the row store could not be measured: {error}") from error
    return ReaderResult(name=NAME, provenance=provenance, measurement=measurement)


def render_page(path: Path | None, plot_name: str) -> str:
    """Return the latest result's section: circumstances, targets, rates. `plot_name` is the picture beside the page."""
    if path is None:
        return "Nothing has been measured yet.\n"
    result = ReaderResult.read(path)
    samples = [Sample(**sample) for sample in result.measurement["samples"]]
    ratios = [
        f"| `{name}` | {ratio['meaning']} | {ratio['target']} | {_value(ratio)} | {_verdict(name, ratio, samples)} |"
        for name, ratio in result.measurement["ratios"].items()
    ]
    rates = [
        f"| {row['kind']} | {row['batch']:,} | {_METHODS[row['method']]} | {row['rows_per_s']:,} "
        f"| {_us(row['p50_us'])} | {_us(row['p99_us'])} | {row['cpu_us_per_row']:.2f} |"
        for row in result.measurement["rates"]
    ]
    return "\n".join(
        [
            _circumstances(path.name, result),
            "",
            "| ratio | what beside what | target | measured | |",
            "|---|---|---:|---:|---|",
            *ratios,
            "",
            f"![rows per second by rows per lookup, for each way of reading]({plot_name})",
            "",
            "`batch`: lookups with the page cache emptied; `warm`: the same rows asked for again, from the row cache\n"
            "or the page cache; `stream`: fio with the device always full; `alone` and `mixed`: decode of 48 rows\n"
            "without and with a prefetch of a long prompt under way. Medians over rounds.",
            "",
            "| kind | rows per lookup | method | rows/s | p50, us | p99, us | CPU us/row |",
            "|---|---:|---|---:|---:|---:|---:|",
            *rates,
            "",
        ]
    )


def _circumstances(file_name: str, result: ReaderResult) -> str:
    from_, machine, settings = (
        result.provenance,
        result.measurement["machine"],
        result.measurement["settings"],
    )
    commit = "outside a checkout" if from_.commit is None else f"commit `{from_.commit[:12]}`"
    dirty = " with uncommitted changes" if from_.is_dirty else ""
    loads = [
        ", ".join(f"{value:.2f}" for value in machine[key]) for key in ("load_average", "load_average_after")
    ]
    return (
        f"`{from_.command}` on {from_.date[:10]}, {commit}{dirty}. {from_.cpu}, {from_.num_cores} cores, "
        f"{format_bytes(from_.memory_bytes)} of memory, load average {loads[0]} at the start and {loads[1]} at "
        f"the end; {machine['fio'] or 'no fio'}. Reader: {machine['reader'].get('backend')}, "
        f"{machine['reader'].get('backend_detail')}; {machine['reader'].get('cpu')}. A pack of "
        f"{format_bytes(settings['pack_bytes'])}, ids of text: {settings['corpus']}. A prefill of "
        f"{settings['prefill_rows']:,} rows reads {settings['prefill_unique_blocks']:,} blocks. "
        f"{settings['rounds']} rounds, in each of which every method has its turn; a ratio is the median of the "
        f"rounds'. Raw samples: `bench/results/{file_name}`."
    )


def _value(ratio: dict[str, Any]) -> str:
    return "absent" if ratio["value"] is None else f"{ratio['value']:.2f}"


def _verdict(name: str, ratio: dict[str, Any], samples: list[Sample]) -> str:
    if ratio["value"] is None:
        return str(ratio.get("reason", "not measured"))
    if ratio["met"]:
        return "met"
    reasons = [reason for key, reason in _REASONS.items() if key in name]
    return "; ".join([f"missed: {reasons[0] if reasons else _UNEXPLAINED}", *_facts(name, samples)])


def _facts(name: str, samples: list[Sample]) -> list[str]:
    """Say how steady a missed ratio was, and what it would be if fio were the reader."""
    ratio = next((ratio for ratio in RATIOS if ratio.name == name), None)
    if ratio is None:
        return []
    rounds = Samples(samples).values(ratio.value)
    facts = [f"the rounds gave {min(rounds):.2f} to {max(rounds):.2f}"] if len(rounds) > 1 else []
    as_fio = Samples(fio_for_native(samples)).median(ratio.value)
    if as_fio is not None:
        facts.append(f"fio's own reads in our place: {as_fio:.2f}")
    elif "with_prefetch" in name:  # which fio has no like of
        facts += _unsteadiness(samples)
    return facts


def _unsteadiness(samples: list[Sample]) -> list[str]:
    """Say what the disk's 99th percentile does with nothing beside it, and the medians, which are steadier."""
    facts = []
    fio = [s.p99_us for s in samples if (s.kind, s.method, s.batch) == ("batch", "fio", 48) and s.p99_us]
    if fio:
        facts.append(
            f"p99 of fio's own 48, with nothing beside them, was {min(fio):,.0f} to {max(fio):,.0f} us"
        )
    mixed, alone = (
        [s.p50_us for s in samples if s.kind == kind and s.p50_us is not None] for kind in ("mixed", "alone")
    )
    if mixed and alone:
        facts.append(f"of p50 the ratio is {statistics.median(mixed) / statistics.median(alone):.2f}")
    return facts


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def render_plot(path: Path | None) -> str:
    """Return an SVG: rows per second by rows per lookup, both logarithmic, a line for each way of reading."""
    rates = [] if path is None else ReaderResult.read(path).measurement["rates"]
    lines = {
        method: sorted(
            (row["batch"], row["rows_per_s"])
            for row in rates
            if (row["kind"], row["method"]) == ("batch", method)
        )
        for method in _METHODS
    }
    points = [point for line in lines.values() for point in line]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    if points:
        axes = _Axes.around(points)
        parts += _grid(axes, sorted({x for x, _ in points}))
        for number, (method, line) in enumerate(lines.items()):
            parts += _line(axes, line, number, _METHODS[method])
    return "\n".join([*parts, "</svg>", ""])


_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 570, 20, 370  # of the area of the lines


@dataclass(frozen=True, slots=True)
class _Axes:
    """Logarithmic axes: rows per lookup across, whole powers of ten of rows per second upwards."""

    batches: tuple[int, int]
    powers: tuple[int, int]

    @classmethod
    def around(cls, points: list[tuple[int, int]]) -> _Axes:
        batches, rates = zip(*points, strict=True)
        low, high = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))
        return cls((min(batches), max(batches)), (low, max(high, low + 1)))

    def x(self, batch: float) -> float:
        low, high = map(math.log, self.batches)
        return _LEFT + (math.log(batch) - low) / max(high - low, 1e-9) * (_RIGHT - _LEFT)

    def y(self, rate: float) -> float:
        low, high = self.powers
        return _BOTTOM - (math.log10(rate) - low) / (high - low) * (_BOTTOM - _TOP)


def _grid(axes: _Axes, batches: list[int]) -> list[str]:
    low, high = axes.powers
    parts = []
    for rate in [factor * 10**power for power in range(low, high) for factor in (1, 2, 5)] + [10**high]:
        y = axes.y(rate)
        parts.append(f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{rate:,}</text>')
    for batch in batches:
        parts.append(f'<text x="{axes.x(batch):.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{batch}</text>')
    middle = (_TOP + _BOTTOM) / 2
    parts.append(
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">rows per lookup</text>'
    )
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">rows per second</text>'
    )
    return parts


def _line(axes: _Axes, line: list[tuple[int, int]], number: int, name: str) -> list[str]:
    """Return one line with its entry of the legend."""
    colour, y = _COLOURS[number], _TOP + 14 + 18 * number
    places = [(f"{axes.x(batch):.1f}", f"{axes.y(rate):.1f}") for batch, rate in line]
    along = " ".join(",".join(place) for place in places)
    return [
        f'<polyline points="{along}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(f'<circle cx="{at[0]}" cy="{at[1]}" r="3" fill="{colour}"/>' for at in places),
        f'<rect x="{_RIGHT + 12}" y="{y - 9}" width="10" height="10" fill="{colour}"/>',
        f'<text x="{_RIGHT + 28}" y="{y}">{name}</text>',
    ]


def latest(paths: Sequence[Path]) -> Path | None:
    """Return the newest reader result among result files, by name; None when there is none."""
    found = [path for path in paths if is_reader_result(path)]
    return max(found, key=lambda path: (path.name[:10], len(path.name), path.name), default=None)


__all__ = [
    "NAME",
    "ReaderResult",
    "is_reader_result",
    "latest",
    "measure_reader",
    "render_page",
    "render_plot",
]
