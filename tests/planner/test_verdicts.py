"""The verdicts that published recipes reached by rebooting: each must come out of the arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deskfleet.errors import ConfigError
from deskfleet.planner.cluster import parse_nodes
from deskfleet.planner.plan import MemoryPlan, make_plan
from deskfleet.planner.published import published_inventory
from deskfleet.planner.search import search
from deskfleet.planner.wishes import EngineName, Wishes

GIB = 1 << 30
MILLION = 1_048_576


def planned(
    model: str,
    nodes: str,
    engine: EngineName,
    tp_size: int,
    *,
    available_gib: float | None = None,
    **wishes: object,
) -> MemoryPlan:
    free = None if available_gib is None else int(available_gib * GIB)
    cluster = parse_nodes(nodes, available_bytes=free)
    return make_plan(
        published_inventory(model),
        cluster,
        Wishes(**wishes),  # type: ignore[arg-type]
        engine=engine,
        tp_size=tp_size,
    )


@pytest.mark.parametrize("engram", ["disk", "device"])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_two_ranks_do_not_hold_the_release(engine: EngineName, engram: str) -> None:
    plan = planned("v4.1-flash", "2xspark", engine, 2, engram=engram, max_model_len=8192)
    assert not plan.fits
    assert plan.tightest.group_bytes("weights") / GIB == pytest.approx(145, rel=0.03)


def test_three_ranks_hold_it_only_with_engram_on_disk() -> None:
    on_disk = planned("v4.1-flash", "3xspark", "sglang", 3)
    assert on_disk.fits
    assert on_disk.layout.engram == "disk"
    assert on_disk.layout.expert_width(2304) == 768
    assert on_disk.tightest.group_bytes("weights") / GIB == pytest.approx(101, rel=0.03)
    in_memory = planned("v4.1-flash", "3xspark", "sglang", 3, engram="device", max_model_len=8192)
    assert not in_memory.fits
    assert in_memory.refusals == ()  # memory alone decides
    assert in_memory.tightest.group_bytes("engram") / GIB == pytest.approx(62.94, abs=0.01)


def test_pinned_host_memory_is_no_way_out_where_memory_is_one() -> None:
    plan = planned("v4.1-flash", "3xspark", "sglang", 3, engram="host", max_model_len=8192)
    assert [refusal.rule for refusal in plan.refusals] == ["Engram"]
    assert "frees nothing" in plan.refusals[0].message
    # Nor does the sum leave out what would lie there.
    in_memory = planned("v4.1-flash", "3xspark", "sglang", 3, engram="device", max_model_len=8192)
    assert plan.tightest.group_bytes("engram") == in_memory.tightest.group_bytes("engram")


def test_four_ranks_hold_a_million_tokens() -> None:
    found = search(published_inventory("v4.1-flash"), parse_nodes("4xspark"), Wishes(max_model_len=MILLION))
    assert found.best.fits
    assert found.best.layout.engram == "disk"
    assert found.best.largest_context == MILLION
    # Text alone needs no chunk that holds an image, and so no bounded indexer either.
    assert planned(
        "v4.1-flash", "4xspark", "sglang", 4, max_model_len=MILLION, has_images=False, chunk_tokens=1024
    ).fits


def test_two_ranks_of_exl3_end_near_600000_and_refuse_a_million() -> None:
    longest = planned("v4.1-flash-exl3-2.9", "2xspark", "exl3", 2, max_num_seqs=2, num_drafts=3)
    assert longest.fits
    assert longest.largest_context == pytest.approx(600_000, rel=0.1)
    refused = planned(
        "v4.1-flash-exl3-2.9", "2xspark", "exl3", 2, max_num_seqs=2, num_drafts=3, max_model_len=MILLION
    )
    assert not refused.fits
    assert refused.tightest.line("KV pool").num_bytes / GIB == pytest.approx(4.0, abs=0.05)
    assert refused.tightest.group_bytes("weights") / GIB == pytest.approx(99.5, rel=0.01)


def test_chunks_of_4096_at_a_million_need_a_bounded_indexer() -> None:
    wishes = {"max_model_len": MILLION, "chunk_tokens": 4096}
    unbounded = planned("v4.1-flash", "4xspark", "sglang", 4, **wishes)
    assert not unbounded.fits
    assert (unbounded.tightest.binding, unbounded.tightest.binding_line.name) == ("prefill", "indexer scores")
    assert unbounded.tightest.line("indexer scores").num_bytes == pytest.approx(60.1e9, rel=0.002)
    bounded = planned("v4.1-flash", "4xspark", "sglang", 4, has_bounded_indexer=True, **wishes)
    assert bounded.fits
    assert bounded.tightest.line("indexer scores").num_bytes < 3 * GIB


def test_the_published_four_node_profile_fits() -> None:
    plan = planned(
        "v4.1-flash",
        "4xspark",
        "sglang",
        4,
        max_model_len=MILLION,
        chunk_tokens=4096,
        kv_tokens=8_000_000,
        max_num_seqs=16,
        has_bounded_indexer=True,
        fraction=0.80,
    )
    assert plan.fits
    assert plan.boot is not None
    assert plan.boot.granted_tokens is not None
    assert plan.boot.granted_tokens >= 8_000_000


@pytest.mark.parametrize(("ep_size", "width"), [(1, 288), (2, 576)])
def test_expert_slices_of_288_have_no_kernel(ep_size: int, width: int) -> None:
    plan = planned("v4.1-flash", "8xspark", "sglang", 8, ep_size=ep_size, max_model_len=8192)
    assert plan.layout.expert_width(2304) == width
    refused = [refusal for refusal in plan.refusals if refusal.rule == "expert width"]
    assert bool(refused) == (width == 288)
    if refused:
        assert "288, which is no multiple of 64" in refused[0].message
        assert refused[0].hint == "ep_size 2 gives width 576"


@pytest.mark.parametrize(("fraction", "starts"), [(0.87, False), (0.83, True)])
def test_a_utilisation_beyond_what_is_free_is_refused_before_launch(fraction: float, starts: bool) -> None:
    plan = planned(
        "v4.1-flash", "4xspark", "vllm", 4, available_gib=102, fraction=fraction, max_model_len=131_072
    )
    refused = [refusal.message for refusal in plan.refusals if refusal.rule == "utilisation"]
    assert bool(refused) != starts
    if refused:
        assert "0.87 x 121.69 GiB = 105.87 GiB, and 102.00 GiB are free" in refused[0]


def test_sglang_names_the_fraction_that_grants_the_pool() -> None:
    """Published for three nodes: 0.944 leaves nothing, a little more does; lowering it never helps."""
    plan = planned("v4.1-flash", "3xspark", "sglang", 3, max_model_len=131_072, kv_tokens=200_000)
    assert plan.boot is not None
    assert plan.boot.granted_tokens is not None
    assert plan.boot.granted_tokens >= 199_936  # whole pages of 256
    starved = planned(
        "v4.1-flash", "3xspark", "sglang", 3, max_model_len=131_072, kv_tokens=200_000, fraction=0.85
    )
    assert [refusal.rule for refusal in starved.refusals] == ["static fraction"]
    assert "lowering it frees nothing" in starved.refusals[0].hint


def test_engram_goes_by_the_engines_own_split() -> None:
    """Five ranks: vLLM's last one holds fewer columns, and SGLang's hold ranges of rows, of which a pack has none."""
    tables = published_inventory("v4.1-flash").engram
    assert tables is not None

    def held(engine: EngineName) -> list[int]:
        plan = planned("v4.1-flash", "5xh200", engine, 5, max_model_len=8192, engram="device")
        return [budget.line("Engram tables").num_bytes for budget in plan.budgets]

    runs = [slice(5 * rank, 5 * rank + 5) for rank in range(5)]
    assert held("vllm") == [
        sum(sum(rows[run]) for rows in tables.column_rows) * tables.row_bytes for run in runs
    ]
    assert held("sglang")[0] == sum(-(-rows // 5) for rows in tables.rows) * tables.row_bytes
    assert sum(held("sglang")) == sum(held("vllm")) == tables.num_bytes
    on_disk = planned("v4.1-flash", "5xh200", "sglang", 5, max_model_len=8192, engram="disk")
    assert [each.rule for each in on_disk.refusals if "cuts through" in each.message] == ["Engram"]


def test_heads_that_do_not_divide_are_padded_and_said_to_need_it() -> None:
    plan = planned("v4.1-flash", "3xspark", "sglang", 3)
    assert any("64 -> 96" in need for need in plan.needs)
    assert "heads 64 -> 96" in plan.tightest.line("padding").formula
    assert not any("pad" in need for need in planned("v4.1-flash", "4xspark", "sglang", 4).needs)


def test_two_ranks_that_cannot_get_three_ways_out_with_their_cost() -> None:
    found = search(published_inventory("v4.1-flash"), parse_nodes("2xspark"), Wishes())
    assert not found.best.fits
    assert len(found.changes) == 3
    flags = [change.flags for change in found.changes]
    assert flags[0] == "--nodes 3xspark"
    assert "--model v4.1-flash-exl3-2.9" in flags
    for change in found.changes:
        assert change.plan.fits
        assert change.cost


def test_a_context_too_long_is_answered_by_the_one_that_fits() -> None:
    wishes = Wishes(max_model_len=MILLION)
    found = search(published_inventory("v4.1-flash-exl3-2.9"), parse_nodes("2xspark"), wishes)
    change = found.changes[0]
    assert change.flags == f"--context {found.best.largest_context}"
    tried = search(
        published_inventory("v4.1-flash-exl3-2.9"),
        parse_nodes("2xspark"),
        replace(wishes, max_model_len=found.best.largest_context),
    )
    assert tried.best.fits


def test_moving_tables_to_disk_is_offered_first() -> None:
    wishes = Wishes(engine="sglang", engram="device", max_model_len=65_536)
    found = search(published_inventory("v4.1-flash"), parse_nodes("4xspark"), wishes)
    assert not found.best.fits
    assert found.changes[0].flags == "--engram disk"
    assert "ms" in found.changes[0].cost


def test_v4_flash_on_two_ranks_takes_what_a_boot_measured() -> None:
    plan = planned("v4-flash-dspark", "2xspark", "vllm", 2, max_model_len=MILLION)
    assert plan.fits
    assert plan.layout.engram == "none"
    assert plan.tightest.group_bytes("weights") / GIB == pytest.approx(79.17, rel=0.03)


def test_nvfp4_kv_of_v4_takes_what_fp8_takes() -> None:
    """Published: padded to the same 584 bytes; the pools of M-50 are of that recipe. Nobody has it for V4.1."""
    fp8, nvfp4 = (
        planned("v4-flash-dspark", "2xspark", "vllm", 2, max_model_len=MILLION, kv_format=name)
        for name in ("fp8", "nvfp4")
    )
    assert nvfp4.fits
    assert nvfp4.budgets == fp8.budgets
    assert [need for need in nvfp4.needs if need not in fp8.needs] == [
        "vLLM 0.33 has no nvfp4_ds_mla records: an image of it does, padded to fp8's 584 B; no byte is saved"
    ]
    refused = planned("v4.1-flash", "4xspark", "vllm", 4, max_model_len=8192, kv_format="nvfp4")
    assert [refusal.rule for refusal in refused.refusals] == ["KV format"]


def test_what_binds_is_named_by_its_largest_line() -> None:
    at_rest = planned("v4.1-flash", "2xspark", "sglang", 2, max_model_len=8192)
    assert (at_rest.tightest.binding, at_rest.tightest.binding_line.name) == ("at rest", "routed experts")
    # A phase whose sum is worst, where what is held exceeds the memory already: the phase is not to blame.
    long = planned("v4.1-flash", "2xspark", "vllm", 2, max_model_len=MILLION)
    assert (long.tightest.binding, long.tightest.binding_line.name) == ("prefill", "routed experts")


def test_what_no_engine_serves_is_said() -> None:
    with pytest.raises(ConfigError, match=r"no engine serves v4\.1-flash-exl3-2\.9 on 2xspark"):
        search(published_inventory("v4.1-flash-exl3-2.9"), parse_nodes("2xspark"), Wishes(engine="sglang"))
    with pytest.raises(ConfigError, match="max_model_len is 2,000,000"):
        search(published_inventory("v4.1-flash"), parse_nodes("4xspark"), Wishes(max_model_len=2_000_000))
    with pytest.raises(ConfigError, match="tp_size 5 on 4 devices"):
        search(published_inventory("v4.1-flash"), parse_nodes("4xspark"), Wishes(tp_size=5))


@pytest.mark.parametrize(
    ("fraction", "published", "error"), [(0.90, 16_735_744, 0.04), (0.80, 10_029_056, 0.11)]
)
def test_the_boot_line_of_four_ranks_is_predicted(fraction: float, published: int, error: float) -> None:
    """The logs of two boots, of which no one rule meets both: they lie 10.4 GiB apart, a tenth of what is free 11.2."""
    plan = planned(
        "v4.1-flash", "4xspark", "sglang", 4, fraction=fraction, max_num_seqs=16, max_model_len=131_072
    )
    assert plan.boot is not None
    assert plan.boot.granted_tokens == pytest.approx(published, rel=error)
