"""docs/reference/planner.md: how to read a plan, and how it stands against published figures. Owns the page's order."""

from __future__ import annotations

from collections import Counter

from deskfleet.planner.evidence import guide
from deskfleet.planner.evidence.contradictions import contradictions
from deskfleet.planner.evidence.facts import facts
from deskfleet.planner.evidence.figures import rows
from deskfleet.planner.evidence.markdown import table
from deskfleet.planner.evidence.table import Row

TITLE = "# Planner\n"

INTRO = """`deskfleet plan` says what fits before anything starts. This page says how its lines add up, which files it
reads and writes, and how its arithmetic stands against what others measured and published. Flags: [cli.md](cli.md).
"""

UNPROVEN = """## What could not be run here

No DGX Spark and no RoCE fabric was within reach. Every number for Sparks is published by others, computed from shapes
or assumed; we measured none. Bandwidth is the data sheet's; the bf16 rate, the link's latency, activations and the
head's processes are assumptions. H200 memory, bandwidth and bf16 rate were measured on the card, its
links and disk were not.

To verify a plan, boot what it says, write down what each rank measured (above), and run

    deskfleet plan --nodes 4xspark --engine sglang --context N --calibrate FACTS

Lines that are off by more than 3 % are worth a report.
"""


def render_body() -> str:
    """Return the page below its title."""
    parts = [
        INTRO,
        guide.adding_up(),
        guide.engines(),
        guide.boots(),
        _figures(),
        _facts(),
        _contradictions(),
    ]
    return "\n".join([*parts, UNPROVEN])


def _figures() -> str:
    every = rows()
    count = Counter(row.verdict for row in every)
    shown = [_cells(row) for row in every]
    outside = [[row.id, row.deviation_reason] for row in every if row.verdict == "outside"]
    intro = f"""## Published figures and ours

Ids are those of published figures, M-01 to M-97, in brackets which one of them. Ours are computed by the planner's own
functions when this page is made. Of {len(every)}, {count["exact"]} are exact, {count["within"]} within tolerance,
{count["fitted"]} fitted and {count["outside"]} outside.

* Tolerance 0: the same to the last digit, or the same answer.
* ±: published rounded; half a unit of its last digit.
* 3 %: a total that something measured, or that follows from such. 10 % where a time is predicted with another recipe's
  rate; less where the text says why.
* `fitted`: within, but a constant of ours, or our reading, was chosen to meet this figure, so it proves nothing.

Where what was published is a formula with a constant of its own (14 B a pair, 112,000 reads a second), agreement says
that we compute that formula, not that its constant is right.
"""
    head = ["row", "quantity", "published", "ours", "off by", "tolerance", "verdict", "basis"]
    return "\n".join(
        [
            intro,
            table(head, shown, right=(2, 3, 4)),
            "Outside, and why:\n",
            table(["row", "reason"], outside),
        ]
    )


def _cells(row: Row) -> list[str]:
    unit = f" {row.unit}" if row.unit else ""
    return [
        row.id,
        row.quantity,
        row.published + unit,
        spell(row) + unit,
        row.deviation,
        row.tolerance,
        row.verdict,
        row.basis,
    ]


def spell(row: Row) -> str:
    """Ours with a digit more than was published, unless it is exact."""
    if isinstance(row.ours, str):
        return row.ours
    if float(row.ours).is_integer():
        return f"{int(row.ours):,}"
    digits = len(row.published.partition(" ")[0].partition(".")[2])
    return f"{float(row.ours):,.{digits + (row.verdict != 'exact')}f}"


def _facts() -> str:
    intro = """## Published rows that nothing is computed of

Rows, or parts of rows, that are observations, advice or settings.
"""
    shown = [[fact.id, fact.published, fact.use] for fact in facts()]
    return "\n".join([intro, table(["row", "published", "what the planner does"], shown)])


def _contradictions() -> str:
    intro = """## Where sources disagree

Published recipes contradict each other and themselves. G- ids are those of a list of such contradictions.
"""
    shown = [[each.id, each.one, each.other, each.side, each.where] for each in contradictions()]
    head = ["id", "one says", "another says", "our side, and why", "where it counts"]
    return "\n".join([intro, table(head, shown)])


__all__ = ["TITLE", "render_body", "spell"]
