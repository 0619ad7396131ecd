"""What a comparison is: `Row` with its verdict, `Fact`, `Contradiction`. Owns tolerances; knows no figure.

What was published is text, because its digits say how far it was rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Literal

Verdict = Literal["exact", "within", "fitted", "outside"]
"""`fitted`: within, but a constant of the planner, or our reading of what was published, was chosen to meet this very
figure, so agreement proves nothing."""

MEASURED_SHARE = 0.03
"""How far the total of a rank may be from what a boot measured."""

Number = float | Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published figure beside ours, both in `unit`. `id` names the published row, in brackets which of its figures.

    `ours` is a number, or a word where an answer was published. `accepted` are the least and the most that ours may be,
    None for words. `deviation_reason` says why ours is outside, and is empty when it should not be.
    """

    id: str
    quantity: str
    published: str
    unit: str
    ours: Number | str
    basis: str
    accepted: tuple[float, float] | None
    tolerance: str
    is_fitted: bool = False
    deviation_reason: str = ""

    @property
    def verdict(self) -> Verdict:
        """What the comparison says."""
        if self.accepted is None or isinstance(self.ours, str):
            return "exact" if self.ours == self.published else "outside"
        low, high = self.accepted
        if not low <= self.ours <= high:
            return "outside"
        if self.is_fitted:
            return "fitted"
        return "exact" if low == high else "within"

    @property
    def deviation(self) -> str:
        """Ours over the middle of what is accepted, less one, in per cent; "0" when equal, empty for words."""
        if self.accepted is None or isinstance(self.ours, str):
            return ""
        middle = sum(self.accepted) / 2
        if self.ours == middle:
            return "0"
        share = 100 * (float(self.ours) / middle - 1)
        return f"{share:+.2f} %" if abs(share) >= 0.005 else "< 0.01 %"


@dataclass(frozen=True, slots=True)
class Fact:
    """A published row, or a part of one, of which nothing can be computed, and what the planner does with it."""

    id: str
    published: str
    use: str


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two statements of sources, the side we take, and why; `where` is what the planner does by it."""

    id: str
    one: str
    other: str
    side: str
    where: str


def exact(
    id: str, quantity: str, published: str, unit: str, ours: Number, basis: str, *, is_fitted: bool = False
) -> Row:
    """A figure that must come out to the last digit."""
    value = float(number_of(published))
    return Row(
        id=id,
        quantity=quantity,
        published=published,
        unit=unit,
        ours=ours,
        basis=basis,
        accepted=(value, value),
        tolerance="0",
        is_fitted=is_fitted,
    )


def rounded(
    id: str, quantity: str, published: str, unit: str, ours: Number, basis: str, *, is_fitted: bool = False
) -> Row:
    """A figure that was rounded when it was published: ours may differ by half a unit of its last digit."""
    value, half = number_of(published), half_unit(published)
    return Row(
        id=id,
        quantity=quantity,
        published=published,
        unit=unit,
        ours=ours,
        basis=basis,
        accepted=(float(value - half), float(value + half)),
        tolerance=f"± {half:f}",
        is_fitted=is_fitted,
    )


def measured(
    id: str,
    quantity: str,
    published: str,
    unit: str,
    ours: Number,
    basis: str,
    *,
    share: float = MEASURED_SHARE,
    is_fitted: bool = False,
    deviation_reason: str = "",
) -> Row:
    """A figure that something measured, or that follows from such: ours may differ by `share` of it."""
    value = float(number_of(published))
    return Row(
        id=id,
        quantity=quantity,
        published=published,
        unit=unit,
        ours=ours,
        basis=basis,
        accepted=(value * (1 - share), value * (1 + share)),
        tolerance=f"{100 * share:g} %",
        is_fitted=is_fitted,
        deviation_reason=deviation_reason,
    )


def ranged(
    id: str,
    quantity: str,
    low: str,
    high: str,
    unit: str,
    ours: Number,
    basis: str,
    *,
    is_fitted: bool = False,
) -> Row:
    """A figure that was published as a range."""
    return Row(
        id=id,
        quantity=quantity,
        published=f"{low} to {high}",
        unit=unit,
        ours=ours,
        basis=basis,
        accepted=(float(number_of(low)), float(number_of(high))),
        tolerance="the range",
        is_fitted=is_fitted,
    )


def answered(id: str, quantity: str, published: str, ours: str, basis: str) -> Row:
    """A question that was answered in a word."""
    return Row(
        id=id,
        quantity=quantity,
        published=published,
        unit="",
        ours=ours,
        basis=basis,
        accepted=None,
        tolerance="0",
    )


def number_of(published: str) -> Decimal:
    """The number in a published figure such as "~101" or "1,670.75"."""
    return Decimal(published.replace(",", "").lstrip("~"))


def half_unit(published: str) -> Decimal:
    """Half a unit of the last digit: 0.05 for "61.2", 0.5 for "~101"."""
    digits = published.partition(".")[2]
    return Decimal(5).scaleb(-len(digits) - 1)


__all__ = [
    "MEASURED_SHARE",
    "Contradiction",
    "Fact",
    "Row",
    "Verdict",
    "answered",
    "exact",
    "half_unit",
    "measured",
    "number_of",
    "ranged",
    "rounded",
]
