"""The picture of a plan: widths against its bytes, and text that is safe in XML."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from deskfleet.planner.budget import BudgetLine, Floor, RankBudget
from deskfleet.planner.cluster import Cluster, parse_nodes
from deskfleet.planner.picture import bar_parts, render_svg
from deskfleet.planner.plan import MemoryPlan, make_plan
from deskfleet.planner.published import published_inventory
from deskfleet.planner.wishes import Wishes

SVG = "{http://www.w3.org/2000/svg}"


def budget(capacity: int, *, peak: int = 30) -> RankBudget:
    lines = (
        BudgetLine("s", "system", 10, "reserved", "f", "r"),
        BudgetLine("w", "weights", 50, "persistent", "f", "r"),
        BudgetLine("k", "kv", 5, "persistent", "f", "r"),
        BudgetLine("p", "workspace", peak, "temporary", "f", "r", phase="prefill"),
    )
    return RankBudget(0, "node", capacity, Floor(20, 4, "why"), lines)


@pytest.mark.parametrize(
    ("case", "rest"),
    [
        (budget(100), {"peak": 30, "floor": 4, "free": 1}),
        (budget(100, peak=3), {"peak": 3, "floor": 17, "free": 15}),
        (budget(97), {"peak": 30, "floor": 2}),
        (budget(90), {"peak": 25, "missing": 5}),
    ],
    ids=["the peak binds", "rest binds", "the floor is cut", "too little"],
)
def test_a_bar_ends_with_what_is_left_above_the_floor_that_binds(
    case: RankBudget, rest: dict[str, int]
) -> None:
    assert bar_parts(case) == [("system", 10), ("weights", 50), ("kv", 5), *rest.items()]
    assert dict(bar_parts(case)).get("free", 0) == max(0, case.margin_bytes)


def test_what_is_missing_reaches_back_into_what_is_held() -> None:
    assert bar_parts(budget(40)) == [("system", 10), ("weights", 30), ("missing", 55)]


def plan(nodes: str) -> MemoryPlan:
    cluster = parse_nodes(nodes)
    named = Cluster(tuple(replace(node, name="<head> & co") for node in cluster.nodes), cluster.origin)
    return make_plan(
        published_inventory("v4.1-flash"),
        named,
        Wishes(max_model_len=131_072),
        engine="vllm",
        tp_size=cluster.num_devices,
    )


@pytest.mark.parametrize("nodes", ["2xspark", "4xspark"])
def test_widths_are_to_scale_and_names_are_escaped(nodes: str) -> None:
    made = plan(nodes)
    picture = ElementTree.fromstring(render_svg(made))
    bars: dict[str, list[ElementTree.Element]] = {}
    for shape in picture.iter(f"{SVG}rect"):
        if shape.find(f"{SVG}title") is not None:
            bars.setdefault(shape.attrib["y"], []).append(shape)
    edges = [float(line.attrib["x1"]) for line in picture.iter(f"{SVG}line")]
    assert len(bars) == len(edges) == made.cluster.num_devices
    for budget, shapes, edge in zip(made.budgets, bars.values(), edges, strict=True):
        scale = (edge - float(shapes[0].attrib["x"])) / budget.capacity_bytes
        for (name, size), shape in zip(bar_parts(budget), shapes, strict=True):
            assert float(shape.attrib["width"]) == pytest.approx(size * scale, abs=0.11)
            assert shape.findtext(f"{SVG}title") == f"<head> & co: {name} {size / 2**30:.2f} GiB"
        right = float(shapes[-1].attrib["x"]) + float(shapes[-1].attrib["width"])
        assert right <= float(picture.attrib["width"])
    assert (picture.findtext(f"{SVG}title") or "").endswith(": fits") is made.fits
