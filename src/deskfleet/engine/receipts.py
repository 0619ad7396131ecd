"""What every rank reported of itself before it loaded, and whether they agree. Pure.

Owns which of a receipt's fields must be alike. Ranks that differ would still answer, wrongly or slowly, so the group
is refused before a weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping

from deskfleet.engine.messages import Receipt

_ALIKE = (
    "deskfleet",
    "torch",
    "python",
    "checkpoint",
    "shard_plan",
    "token_map",
    "operators_asked",
    "operators",
    "collectives_asked",
    "collectives",
    "engram_rows",
)
"""Instruction sets may differ (docs/decisions/0016), and so may the share of a pack that a node holds."""


def disagreement(receipts: Mapping[int, Receipt]) -> str | None:
    """Return the first thing in which two ranks differ as a sentence with both values; None when all agree."""
    ranks = sorted(receipts)
    for rank in ranks[1:]:
        first, other = receipts[ranks[0]], receipts[rank]
        for name in _ALIKE:
            mine, theirs = getattr(first, name), getattr(other, name)
            if mine != theirs:
                return (
                    f"the ranks disagree about {name}: rank {first.rank} on {first.node} has {_spell(mine)}, "
                    f"rank {other.rank} on {other.node} has {_spell(theirs)}"
                )
    return None


def _spell(value: str | None) -> str:
    return "none" if value is None else value


__all__ = ["disagreement"]
