"""Lines on axes, as SVG text. Owns the drawing; knows nothing of what is drawn. The same lines give the same text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]

_COLOURS = (
    "#1f5fa8", "#c0562b", "#7a9a3a", "#9a6fb0", "#444444", "#c9a227", "#3f9e9e", "#b03a5b", "#6b7fbf", "#8a5a2b",
)  # fmt: skip
_DASHES = ("", "6 3", "2 3")
_WIDTH, _HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 560, 30, 345  # of the area of the lines


@dataclass(frozen=True)
class Axis:
    """One axis: its name, its ends, whether it is logarithmic."""

    name: str
    low: float
    high: float
    is_log: bool = False

    @classmethod
    def around(
        cls, name: str, values: Sequence[float], *, is_log: bool = False, low: float | None = None
    ) -> Axis:
        """The axis that holds `values`; a logarithmic one leaves out what is not positive and ends at powers of ten."""
        if is_log:
            positive = [value for value in values if value > 0] or [1.0]
            first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
            return cls(name, 10.0**first, 10.0 ** max(last, first + 1), True)
        bottom = min(values, default=0.0) if low is None else low
        top = max(values, default=1.0)
        return cls(name, bottom, top if top > bottom else bottom + 1)

    def share(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high one."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return (value - low) / (high - low)

    def marks(self) -> list[float]:
        """Round values along the axis."""
        if self.is_log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1)]
        size = (self.high - self.low) / 5
        step = 10.0 ** math.floor(math.log10(size))
        step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= size)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def plot(
    title: str, lines: Mapping[str, Points], x: Axis, y: Axis, *, marks: Mapping[str, float] | None = None
) -> str:
    """An SVG of the lines with a legend. `marks` are values of x at which something begins, by its name."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(title)}</text>',
        *_grid(x, y),
    ]
    across, upwards = _place(x, _LEFT, _RIGHT), _place(y, _BOTTOM, _TOP)
    for name, value in (marks or {}).items():
        at = across(value)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_BOTTOM}" stroke="#999999" stroke-dasharray="3 3"/>'
        )
        parts.append(
            f'<text x="{at + 3:.1f}" y="{_TOP + 11}" fill="#777777" font-size="11">{escape(name)}</text>'
        )
    for number, (name, points) in enumerate(lines.items()):
        parts += _line(number, name, [(across(a), upwards(b)) for a, b in points])
    return "\n".join([*parts, "</svg>", ""])


def _place(axis: Axis, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + axis.share(value) * (end - start)


def _grid(x: Axis, y: Axis) -> list[str]:
    parts = []
    across, upwards = _place(x, _LEFT, _RIGHT), _place(y, _BOTTOM, _TOP)
    for value in y.marks():
        at = upwards(value)
        parts.append(f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in x.marks():
        parts.append(
            f'<text x="{across(value):.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{value:g}</text>'
        )
    middle = (_TOP + _BOTTOM) / 2
    parts.append(
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">{escape(x.name)}</text>'
    )
    parts.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(y.name)}</text>'
    )
    return parts


def _line(number: int, name: str, places: Points) -> list[str]:
    """One line with its entry of the legend."""
    colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)]
    stroke = f'stroke="{colour}" stroke-width="1.8"' + (f' stroke-dasharray="{dash}"' if dash else "")
    y = _TOP + 10 + 17 * number
    along = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return [
        f'<polyline points="{along}" fill="none" {stroke}/>',
        *(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>'
            for x, y in places
            if len(places) < 40
        ),
        f'<line x1="{_RIGHT + 12}" x2="{_RIGHT + 30}" y1="{y - 4}" y2="{y - 4}" {stroke}/>',
        f'<text x="{_RIGHT + 36}" y="{y}">{escape(name)}</text>',
    ]


__all__ = ["Axis", "Points", "plot"]
