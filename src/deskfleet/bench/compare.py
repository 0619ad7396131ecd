"""Two results side by side: what differs in the conditions, and whether the numbers differ by more than noise.

Owns the verdicts. Results whose conditions differ are refused, with every difference named, unless the caller says that
this is what is under test. The interval of a ratio comes from resampling the raw samples, rounds first and then within
them: samples of one round share its disturbances. Knows no files of its own and no terminal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from deskfleet.bench.load.record import Condition
from deskfleet.bench.provenance import Provenance
from deskfleet.bench.series import Comparable, Series
from deskfleet.errors import ConfigError, DeskfleetError

Verdict = Literal["better", "worse", "noise", "too few"]

FEWEST_CLUSTERS = 4
"""With three rounds a side, chance alone orders them perfectly once in ten times."""

LEVEL = 0.95
_NUM_RESAMPLES = 4000
_AT_ONCE = 2_000_000  # values held at a time
_SEED = 20260131
_MACHINE = "machine"
_TOLD_ONLY = frozenset({"boot", "engine_version"})
_PREFILL_BETWEEN_BOOTS = 0.25


class NotComparable(DeskfleetError):
    """Two results that were not measured under the same conditions."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Difference:
    """A condition that is not the same. None is "not recorded"."""

    name: str
    a: Condition
    b: Condition

    def __str__(self) -> str:
        return f"{self.name}: {_told(self.a)} against {_told(self.b)}"


@dataclass(frozen=True, slots=True)
class Row:
    """One series of both. `ratio` is B over A of the medians, with the interval that noise alone would leave."""

    name: str
    unit: str
    a: float
    b: float
    ratio: float
    low: float
    high: float
    num_clusters: tuple[int, int]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it. `varied` are differences that were asked for, `told` those that never stand in the way."""

    rows: tuple[Row, ...]
    varied: tuple[Difference, ...]
    told: tuple[Difference, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    notes: tuple[str, ...]


def compare(a: Comparable, b: Comparable, *, vary: Collection[str] = ()) -> Comparison:
    """Compare B with A. `vary` names conditions that are meant to differ; `machine` is the machine of the run.

    Raises NotComparable naming every other difference; ConfigError for a name in `vary` that does not differ.
    """
    if a.kind != b.kind:
        raise NotComparable(f"{a.path.name} holds {a.kind!r}, {b.path.name} {b.kind!r}")
    differences = differing(a, b)
    unknown = [name for name in vary if name not in {each.name for each in differences}]
    if unknown:
        names = ", ".join(each.name for each in differences) or "nothing does"
        raise ConfigError(f"{unknown[0]!r} does not differ between the two", hint=f"what differs: {names}")
    standing = [each for each in differences if each.name not in vary and each.name not in _TOLD_ONLY]
    if standing:
        flags = " ".join(f"--vary {each.name}" for each in standing)
        raise NotComparable(
            f"not measured under the same conditions: {'; '.join(map(str, standing))}",
            hint=f"measure again with these equal, or, if they are what is under test: {flags}",
        )
    pairs = _pairs(a.series, b.series)
    rows = tuple(_row(one, other) for one, other in pairs)
    told = [each for each in differences if each.name in _TOLD_ONLY] + _circumstances(
        a.provenance, b.provenance
    )
    return Comparison(
        rows=rows,
        varied=tuple(each for each in differences if each.name in vary),
        told=tuple(told),
        only_in_a=_missing(a.series, b.series),
        only_in_b=_missing(b.series, a.series),
        notes=tuple(_notes(rows, a, b, told)),
    )


def differing(a: Comparable, b: Comparable) -> list[Difference]:
    """Return every condition that differs, also one that only one of the two has recorded."""
    names = dict.fromkeys([*a.conditions, *b.conditions])
    found = [Difference(name, a.conditions.get(name), b.conditions.get(name)) for name in names]
    found.append(Difference(_MACHINE, _machine(a.provenance), _machine(b.provenance)))
    return [each for each in found if each.a != each.b]


def _machine(provenance: Provenance) -> str:
    return f"{provenance.cpu}, {provenance.num_cores} cores, {provenance.memory_bytes / 2**30:.1f} GiB"


def _circumstances(a: Provenance, b: Provenance) -> list[Difference]:
    """What differs and may: code, versions, time."""
    facts = [
        ("commit", a.commit, b.commit),
        ("uncommitted changes", a.is_dirty, b.is_dirty),
        ("python", a.python, b.python),
        ("platform", a.platform, b.platform),
        ("load average", a.load_average[0], b.load_average[0]),
    ]
    packages = sorted(a.packages.keys() | b.packages.keys())
    facts += [(name, a.packages.get(name), b.packages.get(name)) for name in packages]
    return [Difference(name, one, other) for name, one, other in facts if one != other]


def _pairs(a: Sequence[Series], b: Sequence[Series]) -> list[tuple[Series, Series]]:
    others = {(each.name, each.unit): each for each in b}
    return [(each, others[each.name, each.unit]) for each in a if (each.name, each.unit) in others]


def _missing(a: Sequence[Series], b: Sequence[Series]) -> tuple[str, ...]:
    known = {(each.name, each.unit) for each in b}
    return tuple(dict.fromkeys(each.name for each in a if (each.name, each.unit) not in known))


def _row(a: Series, b: Series) -> Row:
    counts = len(a.clusters), len(b.clusters)
    median_a, median_b = float(np.median(a.values)), float(np.median(b.values))
    low, high = ratio_interval(a, b)
    if min(counts) < FEWEST_CLUSTERS:
        verdict: Verdict = "too few"
    elif low <= 1 <= high:
        verdict = "noise"
    else:
        verdict = "better" if (low > 1) == a.higher_is_better else "worse"
    return Row(a.name, a.unit, median_a, median_b, median_b / median_a, low, high, counts, verdict)


def ratio_interval(a: Series, b: Series) -> tuple[float, float]:
    """Return the bounds of B's median over A's that 95 % of resamplings keep."""
    random = np.random.default_rng(_SEED)
    ratios = _medians(b, random) / _medians(a, random)
    low, high = np.quantile(ratios, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(low), float(high)


def _medians(series: Series, random: np.random.Generator) -> np.ndarray:
    """Return the median of each resampling, [resamples]. Clusters of unequal size are padded with NaN."""
    sizes = np.array([len(cluster) for cluster in series.clusters])
    padded = np.full((len(sizes), int(sizes.max())), np.nan)
    for row, cluster in zip(padded, series.clusters, strict=True):
        row[: len(cluster)] = cluster
    median = np.median if sizes.min() == sizes.max() else np.nanmedian
    medians = []
    step = max(1, _AT_ONCE // padded.size)
    for begin in range(0, _NUM_RESAMPLES, step):
        num = min(step, _NUM_RESAMPLES - begin)
        drawn = random.integers(len(sizes), size=(num, len(sizes)))  # [resamples, clusters]
        within = random.random((num, *padded.shape)) * sizes[drawn][..., None]
        values = padded[drawn[..., None], within.astype(int)]
        values[np.arange(padded.shape[1]) >= sizes[drawn][..., None]] = np.nan
        medians.append(median(values.reshape(num, -1), axis=1))
    return np.concatenate(medians)


def _notes(rows: Sequence[Row], a: Comparable, b: Comparable, told: Sequence[Difference]) -> list[str]:
    notes = [f"{each.path.name} refused {title}" for each in (a, b) for title in each.refused]
    if any(row.verdict == "too few" for row in rows):
        notes.append(
            f"fewer than {FEWEST_CLUSTERS} rounds on a side say nothing about noise: measure with --rounds 5"
        )
    judged = sum(row.verdict != "too few" for row in rows)
    if judged >= 10:
        expected = judged * (1 - LEVEL)
        notes.append(
            f"of {judged} rows that are the same, about {expected:.0f} would look different by chance"
        )
    is_across_boots = any(each.name == "boot" for each in told)
    small = [
        row
        for row in rows
        if "prefill" in row.name and abs(row.ratio - 1) < _PREFILL_BETWEEN_BOOTS and row.verdict != "noise"
    ]
    if is_across_boots and small:
        notes.append(
            "the two are of different boots: prefill has been seen to move 10 to 24 % between boots of one set-up; "
            "switch what is under test within one boot"
        )
    return notes


def _told(value: Condition) -> str:
    return "not recorded" if value is None else str(value)


__all__ = [
    "FEWEST_CLUSTERS",
    "LEVEL",
    "Comparison",
    "Difference",
    "NotComparable",
    "Row",
    "compare",
    "differing",
    "ratio_interval",
]
