"""Plans of the layouts that figures were published for. Owns their wishes; everything else is `make_plan`'s."""

from __future__ import annotations

from functools import cache

from deskfleet.planner.budget import RankBudget
from deskfleet.planner.cluster import GIB, parse_nodes
from deskfleet.planner.inventory import EngramTables
from deskfleet.planner.plan import MemoryPlan, make_plan
from deskfleet.planner.published import published_inventory
from deskfleet.planner.wishes import EngineName, Wishes

MODEL, NVFP4_MODEL = "v4.1-flash", "v4.1-flash-nvfp4"
EXL3_MODEL = "v4.1-flash-exl3-2.9"
V4_MODEL = "v4-flash-dspark"

USUAL = Wishes(max_model_len=32_768)
"""Weights do not depend on the context; this one is short enough for every layout."""


@cache
def plan_of(engine: EngineName, tp_size: int, model: str = MODEL, wishes: Wishes = USUAL) -> MemoryPlan:
    """The plan of `model` on that many Sparks, one rank to each."""
    cluster = parse_nodes(f"{tp_size}xspark")
    return make_plan(published_inventory(model), cluster, wishes, engine=engine, tp_size=tp_size)


def budget_of(engine: EngineName, tp_size: int, model: str = MODEL, wishes: Wishes = USUAL) -> RankBudget:
    """The first rank of that plan."""
    return plan_of(engine, tp_size, model, wishes).budgets[0]


def weights_gib(engine: EngineName, tp_size: int, model: str = MODEL, wishes: Wishes = USUAL) -> float:
    """GiB of weights that its first rank holds: drafts and vision as wished, padding and wider copies included."""
    return budget_of(engine, tp_size, model, wishes).group_bytes("weights") / GIB


def tables_of(model: str) -> EngramTables:
    """The Engram tables of a published model. Raises ValueError for one without."""
    tables = published_inventory(model).engram
    if tables is None:
        raise ValueError(f"{model} has no Engram tables")
    return tables


__all__ = [
    "EXL3_MODEL",
    "MODEL",
    "NVFP4_MODEL",
    "USUAL",
    "V4_MODEL",
    "budget_of",
    "plan_of",
    "tables_of",
    "weights_gib",
]
