"""Figures of a report as SVG: a grid of found and lost, lines over time. Pure text, no script, no outside resource."""

from __future__ import annotations

import math
from html import escape

from deskfleet.gates.contract import Figure, Grid, Series

_CELL_W, _CELL_H, _LEFT = 92, 34, 56
_WIDTH, _HEIGHT, _MARGIN, _TOP, _BOTTOM = 640, 190, 56, 28, 28
_INTERVALS = 4
_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)


def to_svg(figure: Figure) -> str:
    """Return a figure as one SVG element with its title."""
    return _grid(figure) if isinstance(figure, Grid) else _series(figure)


def _grid(grid: Grid) -> str:
    width = _LEFT + _CELL_W * len(grid.columns)
    height = _CELL_H * (len(grid.rows) + 1)
    parts = [_open(grid.title, width, height)]
    for x, column in enumerate(grid.columns):
        parts.append(_text(_LEFT + _CELL_W * (x + 0.5), 20, column, "middle"))
    for y, (name, values) in enumerate(grid.rows, 1):
        middle = _CELL_H * y + _CELL_H / 2 + 4
        parts.append(_text(_LEFT - 8, middle, name, "end"))
        for x, value in enumerate(values):
            kind, sign = _cell(value)
            left, top = _LEFT + _CELL_W * x + 2, _CELL_H * y + 2
            parts.append(
                f'<rect class="{kind}" x="{left}" y="{top}" width="{_CELL_W - 4}" height="{_CELL_H - 4}" rx="4"/>'
            )
            parts.append(_text(left + _CELL_W / 2 - 2, middle, sign, "middle", f"on-{kind}"))
    return "".join([*parts, "</svg>"])


def _cell(value: float | None) -> tuple[str, str]:
    """Return the class and the sign of a cell: colour alone says nothing to everybody."""
    if value is None:
        return "none", "–"
    return ("good", "found") if value >= 1.0 else ("bad", "lost" if value <= 0 else f"{value:.0%}")


def _series(series: Series) -> str:
    points = [point for _, line in series.lines for point in line]
    if not points:
        return ""
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    levels = _levels(min(0.0, *(y for _, y in points)), max(0.0, *(y for _, y in points)))
    y_low, y_high = levels[0], levels[-1]
    x_span, y_span = (x_high - x_low) or 1.0, y_high - y_low

    def place(x: float, y: float) -> tuple[float, float]:
        across = _MARGIN + (x - x_low) / x_span * (_WIDTH - _MARGIN - 12)
        down = _TOP + (y_high - y) / y_span * (_HEIGHT - _BOTTOM - _TOP)
        return round(across, 1), round(down, 1)

    parts = [_open(series.title, _WIDTH, _HEIGHT)]
    for level in levels:
        _, down = place(x_low, level)
        parts.append(f'<line class="rule" x1="{_MARGIN}" x2="{_WIDTH - 12}" y1="{down}" y2="{down}"/>')
        parts.append(_text(_MARGIN - 6, down + 4, _number(level), "end"))
    for number, (_, line) in enumerate(series.lines):
        path = " ".join("{},{}".format(*place(x, y)) for x, y in line)
        parts.append(f'<polyline class="line line-{number % 4}" points="{path}"/>')
        if len(line) <= 24:
            parts += ['<circle class="dot" cx="{}" cy="{}" r="2.5"/>'.format(*place(x, y)) for x, y in line]
    base = _HEIGHT - _BOTTOM + 18
    parts.append(_text(_MARGIN, base, _number(x_low), "start"))
    parts.append(_text(_WIDTH - 12, base, _number(x_high), "end"))
    parts.append(_text((_MARGIN + _WIDTH - 12) / 2, base, series.x_label, "middle"))
    parts.append(_text(_MARGIN, 14, series.y_label, "start"))
    return "".join([*parts, "</svg>"])


def _levels(low: float, high: float) -> list[float]:
    """Return two or more round numbers, equally far apart, the first at most `low` and the last at least `high`."""
    high = high if high > low else low + 1
    least = (high - low) / _INTERVALS
    magnitude = 10.0 ** math.floor(math.log10(least))
    step = next(nice * magnitude for nice in _NICE if nice * magnitude >= least * (1 - 1e-9))
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _open(title: str, width: float, height: float) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>"
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


__all__ = ["to_svg"]
