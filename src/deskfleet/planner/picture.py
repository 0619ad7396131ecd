"""A plan as a picture: one stacked bar for each rank. Owns the drawing, as SVG text; knows the plan's numbers only."""

from __future__ import annotations

from html import escape

from deskfleet.planner.budget import RankBudget
from deskfleet.planner.plan import MemoryPlan

GROUPS = ("system", "runtime", "weights", "engram", "kv")
"""The order of a bar, from what is always there to what a plan decides."""

_COLOURS = {
    "system": "#8d99a6",
    "runtime": "#b9a44c",
    "weights": "#3b6ea5",
    "engram": "#7a4fa3",
    "kv": "#3f9b6b",
    "peak": "#d9822b",
    "floor": "#d5c3c3",
    "free": "#eef1f4",
    "missing": "#c23030",
}
_WIDTH, _LEFT, _BAR, _GAP, _TOP = 760, 90, 26, 14, 64
_GIB = 1 << 30


def bar_parts(budget: RankBudget) -> list[tuple[str, int]]:
    """The parts of a rank's bar in order: groups held, the worst phase's "peak", then "floor" and "free", or "missing".

    They add up to the capacity; with "missing", to what the worst moment needs. "free" is what is left above the floor
    that binds.
    """
    peak_bytes = budget.peak_bytes - budget.held_bytes
    parts = [(group, budget.group_bytes(group)) for group in GROUPS]
    parts.append(("peak", peak_bytes))
    left = budget.capacity_bytes - budget.peak_bytes
    if left < 0:
        # The last part that does not fit is shown as missing, not twice.
        parts = [*_without_end(parts, -left), ("missing", -left)]
    else:
        floor = min(left, max(budget.floor.peak_bytes, budget.floor.rest_bytes - peak_bytes))
        parts += [("floor", floor), ("free", left - floor)]
    return [(name, size) for name, size in parts if size > 0]


def _without_end(parts: list[tuple[str, int]], num_bytes: int) -> list[tuple[str, int]]:
    """Take `num_bytes` off the parts, from the end."""
    kept, over = [], num_bytes
    for name, size in reversed(parts):
        cut = min(size, over)
        over -= cut
        kept.append((name, size - cut))
    return kept[::-1]


def render_svg(plan: MemoryPlan) -> str:
    """Return an SVG picture of the plan: ranks down, bytes across, the capacity marked."""
    widest = max(max(budget.capacity_bytes, budget.peak_bytes) for budget in plan.budgets)
    scale = (_WIDTH - _LEFT - 20) / widest
    height = _TOP + len(plan.budgets) * (_BAR + _GAP) + 70
    verdict = "fits" if plan.fits else "does not fit"
    title = f"{plan.inventory.name} on {plan.cluster.origin}, {plan.layout.engine}: {verdict}"
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="16" fill="#1c2733">{escape(title)}</text>',
        f'<text x="16" y="46" fill="#5a6672">context {plan.layout.max_model_len:,}, KV pool {plan.layout.kv_tokens:,} '
        f"tokens; largest context {plan.largest_context:,}</text>",
    ]
    for index, budget in enumerate(plan.budgets):
        shapes += _bar(budget, _TOP + index * (_BAR + _GAP), scale)
    shapes += _legend(_TOP + len(plan.budgets) * (_BAR + _GAP) + 24)
    return "\n".join([*shapes, "</svg>\n"])


def _bar(budget: RankBudget, top: float, scale: float) -> list[str]:
    shapes = [f'<text x="16" y="{top + 18}" fill="#1c2733">rank {budget.rank}</text>']
    left = float(_LEFT)
    for name, size in bar_parts(budget):
        width = size * scale
        label = f"{budget.node}: {name} {size / _GIB:.2f} GiB"
        shapes.append(
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{_COLOURS[name]}">'
            f"<title>{escape(label)}</title></rect>"
        )
        # Of what reaches beyond the memory only the part inside is drawn here, and its size would mislead.
        is_whole = name not in GROUPS or size == budget.group_bytes(name)
        if width > 60 and is_whole:
            ink = "#1c2733" if name in ("floor", "free") else "#ffffff"
            shapes.append(f'<text x="{left + 6:.1f}" y="{top + 18}" fill="{ink}">{size / _GIB:.1f}</text>')
        left += width
    edge = _LEFT + budget.capacity_bytes * scale
    shapes.append(
        f'<line x1="{edge:.1f}" x2="{edge:.1f}" y1="{top - 4}" y2="{top + _BAR + 4}" stroke="#1c2733"/>'
    )
    return shapes


def _legend(top: float) -> list[str]:
    shapes, left = [], 16.0
    for name, colour in _COLOURS.items():
        shapes.append(
            f'<rect x="{left:.0f}" y="{top}" width="12" height="12" fill="{colour}" stroke="#c5ccd3"/>'
        )
        shapes.append(f'<text x="{left + 17:.0f}" y="{top + 11}" fill="#1c2733">{name}</text>')
        left += 30 + 8 * len(name)
    shapes.append(
        f'<text x="16" y="{top + 32}" fill="#5a6672">GiB; the black line is what there is; floor: what must stay '
        "free</text>"
    )
    return shapes


__all__ = ["GROUPS", "bar_parts", "render_svg"]
