"""A trace's findings as text and as a picture: a bar for each rank's mean step, cut by category. Owns the layout."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from deskfleet.bench.trace.budget import StepBudget, kernel_table, mean_budget, step_budgets
from deskfleet.bench.trace.categories import CATEGORIES
from deskfleet.bench.trace.ranks import collective_rows, rank_waits
from deskfleet.bench.trace.read import Trace

_COLOURS = (
    "#9a6fb0", "#c0562b", "#1f5fa8", "#2f8f8b", "#7a9a3a", "#c9a227", "#444b6e", "#b0587a", "#8a8a8a", "#5d8aa8",
    "#b7b7b7", "#eeeeee",
)  # fmt: skip
_WIDTH, _BAR, _LEFT, _RIGHT = 900, 34, 90, 640


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything that is told of some traces, of one rank each."""

    traces: tuple[Trace, ...]
    budgets: tuple[tuple[StepBudget, ...], ...]

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Profile:
        """Analyse traces of different ranks."""
        return cls(tuple(traces), tuple(tuple(step_budgets(trace)) for trace in traces))


def as_json(profile: Profile, *, num_kernels: int) -> dict[str, Any]:
    """Return it for programs: times in milliseconds."""
    return {
        "ranks": [
            {
                "rank": trace.rank,
                "file": str(trace.path),
                "what": "device" if trace.is_of_device else "cpu",
                "num_steps": len(budgets),
                "step_ms": _ms(statistics.fmean(b.wall_s for b in budgets)),
                "by_category_ms": {name: _ms(value) for name, value in mean_budget(budgets).items()},
                "steps": [
                    {
                        "name": b.name,
                        "wall_ms": _ms(b.wall_s),
                        "sum_ms": _ms(sum(b.by_category.values())),
                        "by_category_ms": {name: _ms(value) for name, value in mean_budget([b]).items()},
                    }
                    for b in budgets
                ],
                "largest_gaps_ms": [_ms(gap) for gap in _gaps(budgets)[:10]],
                "kernels": [
                    {
                        "name": row.name,
                        "category": row.category,
                        "count": row.count,
                        "total_ms": _ms(row.total_s),
                        "mean_us": round(1e6 * row.mean_s, 3),
                    }
                    for row in kernel_table(trace)[:num_kernels]
                ],
            }
            for trace, budgets in zip(profile.traces, profile.budgets, strict=True)
        ],
        "collectives": [
            {
                "rank": row.rank,
                "name": row.name,
                "num_per_step": row.num_per_step,
                "p50_us": round(1e6 * row.p50_s, 3),
                "p90_us": round(1e6 * row.p90_s, 3),
                "p99_us": round(1e6 * row.p99_s, 3),
                "longest_us": round(1e6 * row.longest_s, 3),
                "total_per_step_ms": _ms(row.total_per_step_s),
            }
            for row in collective_rows(profile.traces)
        ],
        "waits": [
            {
                "rank": row.rank,
                "peers_ms": None if row.peers_s is None else _ms(row.peers_s),
                "engram_ms": _ms(row.engram_s),
                "after_engram_ms": None if row.after_engram_s is None else _ms(row.after_engram_s),
            }
            for row in rank_waits(profile.traces)
        ],
    }


def as_text(profile: Profile, *, num_kernels: int) -> str:
    """Return it for people."""
    found = as_json(profile, num_kernels=num_kernels)
    lines = []
    for rank in found["ranks"]:
        lines.append(
            f"rank {rank['rank']}: {rank['num_steps']} steps of {rank['step_ms']:,.2f} ms on average ({rank['what']})"
        )
        for name, value in rank["by_category_ms"].items():
            lines.append(f"  {name:24} {value:10,.3f} ms  {value / rank['step_ms']:6.1%}")
        gaps = ", ".join(f"{gap:,.2f}" for gap in rank["largest_gaps_ms"][:5])
        lines += [f"  largest gaps, ms: {gaps or 'none'}", ""]
    lines.append("longest kernels and operators, own time")
    for rank in found["ranks"]:
        for row in rank["kernels"]:
            lines.append(
                f"  rank {rank['rank']}  {row['total_ms']:10,.3f} ms  {row['count']:7,} x {row['mean_us']:10,.1f} us  "
                f"{row['category']:22} {row['name'][:70]}"
            )
    lines += ["", "collectives: a step, p50 / p90 / p99 / longest in us, total in ms a step"]
    for row in found["collectives"]:
        lines.append(
            f"  rank {row['rank']}  {row['num_per_step']:7.1f}  {row['p50_us']:,.0f} / {row['p90_us']:,.0f} / "
            f"{row['p99_us']:,.0f} / {row['longest_us']:,.0f}  {row['total_per_step_ms']:,.3f}  {row['name'][:60]}"
        )
    lines += [
        "",
        "waits, ms a step: for later ranks in collectives; for Engram rows; in the collective after them",
    ]
    for row in found["waits"]:
        values = [row["peers_ms"], row["engram_ms"], row["after_engram_ms"]]
        lines.append(
            f"  rank {row['rank']}  "
            + "  ".join("one rank only" if value is None else f"{value:,.3f}" for value in values)
        )
    return "\n".join(lines) + "\n"


def as_svg(profile: Profile) -> str:
    """Return a picture: a bar for each rank, as long as its mean step, cut by category."""
    means = [mean_budget(budgets) for budgets in profile.budgets]
    longest_s = max(sum(mean.values()) for mean in means)
    num_seen = sum(any(name in mean for mean in means) for name in CATEGORIES)
    height = max(50 + len(means) * (_BAR + 16), 50 + 20 * num_seen)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20">a step by category, mean of {len(profile.budgets[0])}, in ms</text>',
    ]
    for number, (trace, mean) in enumerate(zip(profile.traces, means, strict=True)):
        y = 36 + number * (_BAR + 16)
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 22}" text-anchor="end">rank {trace.rank}</text>')
        x = float(_LEFT)
        for name, seconds in mean.items():
            width = seconds / longest_s * (_RIGHT - _LEFT)
            title = escape(f"{name}: {1000 * seconds:,.3f} ms")
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{_colour(name)}" '
                f'stroke="#888888" stroke-width="0.5"><title>{title}</title></rect>'
            )
            if width > 34:
                colour = "#222222" if name == "idle" else "white"
                parts.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 21}" text-anchor="middle" fill="{colour}">'
                    f"{1000 * seconds:,.1f}</text>"
                )
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 21}">{1000 * sum(mean.values()):,.1f}</text>')
    seen = [name for name in CATEGORIES if any(name in mean for mean in means)]
    for place, name in enumerate(seen):
        y = 40 + 20 * place
        parts.append(f'<rect x="{_RIGHT + 70}" y="{y - 10}" width="11" height="11" fill="{_colour(name)}"/>')
        parts.append(f'<text x="{_RIGHT + 88}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _colour(name: str) -> str:
    return _COLOURS[CATEGORIES.index(name)]


def _gaps(budgets: Sequence[StepBudget]) -> list[float]:
    return sorted((gap for budget in budgets for gap in budget.gaps_s), reverse=True)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 4)


__all__ = ["Profile", "as_json", "as_svg", "as_text"]
