"""What must hold for every plan: lines add up, nothing is negative, more is never less, equal inputs give equals."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from deskfleet.planner.budget import BudgetLine, Floor, RankBudget
from deskfleet.planner.cluster import KINDS, Cluster, make_cluster
from deskfleet.planner.picture import bar_parts
from deskfleet.planner.plan import MemoryPlan, make_plan
from deskfleet.planner.planfile import plan_from_dict, plan_to_dict
from deskfleet.planner.published import published_inventory
from deskfleet.planner.wishes import EngineName, Wishes

CASES: tuple[tuple[str, EngineName], ...] = (
    ("v4.1-flash", "sglang"),
    ("v4.1-flash", "vllm"),
    ("v4.1-flash-nvfp4", "vllm"),
    ("v4.1-flash-exl3-2.9", "exl3"),
    ("v4-flash-dspark", "vllm"),
    ("v4-flash", "sglang"),
)

contexts = st.integers(1, 1 << 20)
clusters = st.builds(
    lambda kind, count: make_cluster(kind, count, origin=f"{count}x{kind.name}"),
    st.sampled_from(list(KINDS.values())),
    st.integers(1, 8),
)
wishes_of = st.builds(
    Wishes,
    max_model_len=contexts,
    max_num_seqs=st.integers(1, 64),
    num_drafts=st.sampled_from([None, 0, 1]),
    has_images=st.booleans(),
    margin_bytes=st.integers(0, 1 << 33),
    chunk_tokens=st.sampled_from([None, 256, 1280, 4096]),
    has_bounded_indexer=st.sampled_from([None, True]),
)


def plan_of(case: tuple[str, EngineName], cluster: Cluster, wishes: Wishes) -> MemoryPlan:
    model, engine = case
    return make_plan(published_inventory(model), cluster, wishes, engine=engine, tp_size=cluster.num_devices)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CASES), clusters, wishes_of)
def test_lines_add_up_and_a_plan_reproduces_from_its_json(
    case: tuple[str, EngineName], cluster: Cluster, wishes: Wishes
) -> None:
    plan = plan_of(case, cluster, wishes)
    assert [budget.rank for budget in plan.budgets] == list(range(cluster.num_devices))
    for budget in plan.budgets:
        held = sum(line.num_bytes for line in budget.lines if line.kind != "temporary")
        assert budget.held_bytes == held
        assert budget.peak_bytes == held + max(budget.phase_bytes.values(), default=0)
        assert all(line.num_bytes >= 0 and line.formula and line.reason for line in budget.lines)
        parts = dict(bar_parts(budget))
        assert sum(parts.values()) == max(budget.capacity_bytes, budget.peak_bytes)
        assert budget.fits == (budget.rest_margin_bytes >= 0 and budget.peak_margin_bytes >= 0)
    assert plan.margin_bytes == min(budget.margin_bytes for budget in plan.budgets)
    document = plan_to_dict(plan)
    assert document["fits"] is plan.fits
    again = plan_from_dict(document)
    assert again == plan
    assert plan_to_dict(again) == document


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(CASES), clusters, wishes_of, contexts)
def test_more_context_never_takes_less(
    case: tuple[str, EngineName], cluster: Cluster, wishes: Wishes, context: int
) -> None:
    wishes = replace(wishes, chunk_tokens=wishes.chunk_tokens or 1280)
    low, high = sorted((wishes.max_model_len or 1, context))
    short = plan_of(case, cluster, replace(wishes, max_model_len=low, engram=None))
    long = plan_of(case, cluster, replace(wishes, max_model_len=high, engram=short.layout.engram))
    for before, after in zip(short.budgets, long.budgets, strict=True):
        assert after.held_bytes >= before.held_bytes
        assert after.phase_bytes.get("prefill", 0) >= before.phase_bytes.get("prefill", 0)
    assert long.largest_context == short.largest_context


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(CASES), st.integers(1, 7), wishes_of)
def test_more_requests_more_margin_and_fewer_ranks_never_take_less(
    case: tuple[str, EngineName], count: int, wishes: Wishes
) -> None:
    kind = KINDS["spark"]
    wishes = replace(wishes, engram="none" if case[0].startswith("v4-") else "disk", chunk_tokens=1280)
    plan = plan_of(case, make_cluster(kind, count, origin="few"), wishes)
    wider = plan_of(case, make_cluster(kind, count + 1, origin="more"), wishes)
    busier = plan_of(
        case, make_cluster(kind, count, origin="few"), replace(wishes, max_num_seqs=wishes.max_num_seqs + 1)
    )
    assert busier.budgets[0].held_bytes >= plan.budgets[0].held_bytes
    more_margin = replace(wishes, margin_bytes=wishes.margin_bytes + 1)
    assert (
        plan_of(case, make_cluster(kind, count, origin="few"), more_margin).margin_bytes
        == plan.margin_bytes - 1
    )
    # Padding may eat what one more rank saves of one group, never of all of them together.
    assert wider.budgets[0].group_bytes("engram") <= plan.budgets[0].group_bytes("engram")


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(CASES), clusters, wishes_of)
def test_the_largest_context_fits_and_a_step_more_does_not(
    case: tuple[str, EngineName], cluster: Cluster, wishes: Wishes
) -> None:
    plan = plan_of(case, cluster, replace(wishes, max_model_len=None))
    if not plan.largest_context:
        assert not plan.fits
        return
    assert plan.fits
    assert plan.layout.max_model_len == plan.largest_context
    if plan.largest_context < plan.inventory.max_position_embeddings:
        longer = replace(wishes, max_model_len=plan.largest_context + 1024, engram=plan.layout.engram)
        assert not plan_of(case, cluster, longer).fits


def test_temporaries_of_one_phase_add_and_of_two_phases_exclude_each_other() -> None:
    def temporary(name: str, num_bytes: int, phase: str) -> BudgetLine:
        return BudgetLine(name, "workspace", num_bytes, "temporary", "f", "r", phase=phase)

    lines = (
        BudgetLine("a", "weights", 50, "persistent", "f", "r"),
        BudgetLine("b", "system", 10, "reserved", "f", "r"),
        temporary("c", 7, "prefill"),
        temporary("d", 5, "prefill"),
        temporary("e", 11, "decode"),
    )
    budget = RankBudget(0, "node", 100, Floor(25, 10, "why"), lines)
    assert (budget.held_bytes, budget.peak_bytes, budget.worst_phase) == (60, 72, "prefill")
    assert (budget.rest_margin_bytes, budget.peak_margin_bytes, budget.binding) == (15, 18, "at rest")
