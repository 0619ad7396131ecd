"""Floors and ceilings of decoding and prefill, against published tables and hand arithmetic.

The inventory is made by hand from the shapes of the published tensors, so that nothing is measured by its own ruler.
"""

from __future__ import annotations

import pytest

from deskfleet.errors import ConfigError
from deskfleet.model.names import TensorClass
from deskfleet.planner.cluster import Link
from deskfleet.planner.copies import draft_hidden_bytes, head_copy_bytes, wo_a_bytes
from deskfleet.planner.inventory import Inventory, KvShape, WeightGroup
from deskfleet.planner.published import published_inventory
from deskfleet.planner.rates import (
    ACCEPTED_PER_STEP,
    decode_ceiling,
    impossible_rungs,
    longest_prompt,
    prefill_ceiling,
    prompt_s,
)
from deskfleet.planner.reads import (
    EVEN_ROUTING,
    LEAN_CUTS,
    TEXT_ROUTING,
    StepReads,
    attended_bytes,
    distinct_experts,
    draft_reads,
    index_key_bytes,
    step_reads,
    weight_flops,
)

H200_BYTES_PER_S = 4.3e12
SPARK_BYTES_PER_S = 273e9
NVLINK = Link("NVLink", bytes_per_s=450e9, latency_s=5e-6)
MIB = 1 << 20


def fp8(rows: int, columns: int) -> tuple[int, int]:
    """Bytes with one scale byte for each tile of 32 by 32, and weights."""
    return rows * columns + rows * columns // 1024, rows * columns


def times(count: int, *sizes: tuple[int, int]) -> tuple[int, int]:
    return count * sum(size[0] for size in sizes), count * sum(size[1] for size in sizes)


WQ_B, WO_A, WO_B = fp8(32_768, 1280), fp8(8192, 4096), fp8(5120, 8192)
SHARED = times(3, fp8(2304, 5120))
LATENTS = times(1, fp8(1280, 5120), fp8(512, 5120))
EXPERT = (18_800_640, 35_389_440)
HEAD = (129_280 * 5120 * 2, 129_280 * 5120)
HYPER = (2 * 24 * 20_480 * 4, 2 * 24 * 20_480)
DENSE, DRAFT, OTHER = TensorClass.dense, TensorClass.draft, TensorClass.other

KV = KvShape(
    ratios=(2, 2, 2, 1),
    indexed=(True,) * 4,
    head_dim=512,
    rope_dim=64,
    index_head_dim=128,
    window=128,
    num_window_layers=40,
    num_draft_layers=3,
    state_bytes=12_288,
)

V41 = Inventory(
    name="v4.1 by hand",
    architecture="v4.1",
    weight_format="mxfp4",
    expert_bits=4.25,
    origin="shapes of the published tensors",
    derived=(),
    file_bytes=0,
    num_files=0,
    hidden_size=5120,
    num_layers=40,
    num_heads=64,
    num_groups=8,
    head_dim=512,
    o_lora_rank=1024,
    q_lora_rank=1280,
    vocab_size=129_280,
    max_position_embeddings=1_048_576,
    num_experts=384,
    num_chosen_experts=6,
    num_draft_experts=128,
    num_chosen_draft_experts=3,
    expert_width=2304,
    num_draft_stages=3,
    draft_block=5,
    index_heads=32,
    max_image_tokens=1024,
    groups=(
        WeightGroup("experts", TensorClass.routed_expert, "expert", *times(40 * 384, EXPERT)),
        WeightGroup("shared", DENSE, "shared_expert", *times(40, SHARED)),
        WeightGroup("wq_b and wo_b", DENSE, "group", *times(40, WQ_B, WO_B)),
        WeightGroup("wo_a", DENSE, "group", *times(40, WO_A), is_wo_a=True),
        WeightGroup("latents", DENSE, "replicated", *times(40, LATENTS)),
        WeightGroup("index heads", DENSE, "index_head", 44_605_440, 8 * (4096 * 1280 + 32 * 5120)),
        WeightGroup("compressors", DENSE, "replicated", 37_229_568, 37_229_568 // 2),
        WeightGroup("routers", DENSE, "replicated", 157_409_280, 40 * 384 * 5120),
        WeightGroup("hyper-connections", DENSE, "replicated", *times(40, HYPER)),
        WeightGroup("engram wkv", DENSE, "engram_projection", *times(2, fp8(25_600, 6144))),
        WeightGroup("embedding", OTHER, "vocab", *HEAD),
        WeightGroup("head", OTHER, "vocab", *HEAD, is_head=True),
        WeightGroup("vision", TensorClass.vision, "replicated", 970_536_960, 485_268_480),
        WeightGroup("draft experts", DRAFT, "expert", *times(3 * 128, EXPERT)),
        WeightGroup("draft shared", DRAFT, "shared_expert", *times(3, SHARED)),
        WeightGroup("draft wq_b and wo_b", DRAFT, "group", *times(3, WQ_B, WO_B)),
        WeightGroup("draft wo_a", DRAFT, "group", *times(3, WO_A), is_wo_a=True),
        WeightGroup(
            "draft rest", DRAFT, "replicated", *times(3, LATENTS, HYPER, (128 * 5120 * 2, 128 * 5120))
        ),
        WeightGroup("draft input", DRAFT, "replicated", *fp8(5120, 15_360)),
        WeightGroup("markov table", DRAFT, "vocab", 129_280 * 512, 129_280 * 256),
        WeightGroup("markov head", DRAFT, "vocab", 129_280 * 512, 129_280 * 256, is_head=True),
    ),
    engram=None,
    kv=KV,
)


def row_cache_bytes() -> int:
    """Cache that one row attends to at a few thousand tokens: records of 584 B, 38 layers with chosen entries."""
    return attended_bytes(KV, 1, num_sparse_layers=38, top_k=512, entry_bytes=584, window_entry_bytes=584)


def reads(tp_size: int, rows: int, *, is_lean: bool = False) -> StepReads:
    cache_bytes = rows * row_cache_bytes()
    if is_lean:
        return step_reads(V41, tp_size, rows, cache_bytes=cache_bytes, cuts=LEAN_CUTS, wo_a_is_bf16=False)
    return step_reads(V41, tp_size, rows, cache_bytes=cache_bytes)


@pytest.mark.parametrize(
    ("rows", "published"),
    [
        (1, 6.0),
        (2, 11.9),
        (4, 23.4),
        (6, 34.6),
        (8, 45.5),
        (16, 85.5),
        (32, 152),
        (64, 244),
        (96, 299),
        (384, 383),
    ],
)
def test_distinct_experts(rows: int, published: float) -> None:
    assert distinct_experts(384, 6, rows) == pytest.approx(published, rel=0.006)


def test_distinct_experts_by_enumeration() -> None:
    # Two rows choose one of three experts each: nine pairs, three with one expert, six with two.
    assert distinct_experts(3, 1, 2) == pytest.approx((3 * 1 + 6 * 2) / 9)
    with pytest.raises(ConfigError, match="6 experts chosen of 4"):
        distinct_experts(4, 6, 1)


def test_one_row_at_four_ranks_class_by_class() -> None:
    one = reads(4, 1)
    assert one.expert_bytes == 40 * 6 * 18_800_640 // 4
    # Published: 1,194 MB of wq_b, wo_b and shared experts, 671 of wo_a as bf16, 331 of the head.
    assert one.divided_bytes / 1e6 == pytest.approx(1194 + 671 + 331, rel=0.002)
    # 409 MB of latents and index heads, 315 of Engram's projections, 315 of routers and hyper-connections; the
    # published model leaves out the compressors, which are 37.
    assert one.whole_bytes / 1e6 == pytest.approx(409 + 315 + 315 + 37, rel=0.005)
    assert one.cache_bytes / 1e6 == pytest.approx(15, rel=0.05)


@pytest.mark.parametrize(
    ("rows", "gigabytes", "tp4_ms", "tp2_ms", "tp1_ms", "expert_share"),
    [
        (1, 4.38, 1.02, 1.79, 3.34, 0.26),
        (6, 9.83, 2.29, 4.31, 8.36, 0.66),
        (16, 19.6, 4.55, 8.80, 17.3, 0.82),
        (64, 50.1, 11.7, 22.8, 45.2, 0.91),
        (96, 60.9, 14.2, 27.8, 55.0, 0.92),
        (384, 80.9, 18.8, 36.1, 70.6, 0.89),
    ],
)
def test_floors_on_h200(
    rows: int, gigabytes: float, tp4_ms: float, tp2_ms: float, tp1_ms: float, expert_share: float
) -> None:
    four = reads(4, rows)
    assert four.total_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert four.expert_bytes / four.total_bytes == pytest.approx(expert_share, abs=0.01)
    for tp_size, milliseconds in ((4, tp4_ms), (2, tp2_ms), (1, tp1_ms)):
        ours = 1000 * reads(tp_size, rows).total_bytes / H200_BYTES_PER_S
        assert ours == pytest.approx(milliseconds, rel=0.03)


@pytest.mark.parametrize(("rows", "published_ms"), [(1, 0.89), (6, 2.15), (16, 4.41), (64, 11.5)])
def test_lean_floors_on_h200(rows: int, published_ms: float) -> None:
    ours = 1000 * reads(4, rows, is_lean=True).total_bytes / H200_BYTES_PER_S
    assert ours == pytest.approx(published_ms, rel=0.01)


@pytest.mark.parametrize(
    ("tp_size", "one_ms", "six_ms", "ninety_six_ms", "draft_ms", "lean_six_ms"),
    [
        (2, 28.2, 67.9, 437, 5.6, 64.9),
        (3, 20.1, 46.6, 295, 3.9, 44.2),
        (4, 16.0, 36.0, 223, 3.0, 33.9),
    ],
)
def test_floors_on_dgx_spark(
    tp_size: int, one_ms: float, six_ms: float, ninety_six_ms: float, draft_ms: float, lean_six_ms: float
) -> None:
    def milliseconds(step: StepReads) -> float:
        return 1000 * step.total_bytes / SPARK_BYTES_PER_S

    assert milliseconds(reads(tp_size, 1)) == pytest.approx(one_ms, rel=0.015)
    assert milliseconds(reads(tp_size, 6)) == pytest.approx(six_ms, rel=0.01)
    assert milliseconds(reads(tp_size, 96)) == pytest.approx(ninety_six_ms, rel=0.01)
    assert milliseconds(draft_reads(V41, tp_size, 1)) == pytest.approx(draft_ms, rel=0.03)
    assert milliseconds(reads(tp_size, 6, is_lean=True)) == pytest.approx(lean_six_ms, rel=0.01)


@pytest.mark.parametrize(("num_requests", "published_gb"), [(1, 0.83), (16, 2.2)])
def test_draft_reads_at_four_ranks(num_requests: int, published_gb: float) -> None:
    assert draft_reads(V41, 4, num_requests).total_bytes / 1e9 == pytest.approx(published_gb, rel=0.03)


def test_the_published_inventory_reads_the_same() -> None:
    published = published_inventory("v4.1-flash")
    for rows in (1, 96):
        ours, theirs = step_reads(V41, 4, rows), step_reads(published, 4, rows)
        assert theirs.expert_bytes == ours.expert_bytes
        assert theirs.total_bytes == pytest.approx(ours.total_bytes, rel=0.001)
    assert draft_reads(published, 4, 1).total_bytes == pytest.approx(
        draft_reads(V41, 4, 1).total_bytes, rel=0.001
    )
    assert weight_flops(published) == pytest.approx(weight_flops(V41), rel=0.001)


def test_index_keys_of_a_long_request() -> None:
    # Three sources of ratio 2 and one of ratio 1 keep 2.5 keys a token, 68 B each.
    assert index_key_bytes(KV, 2, 1000, key_bytes=68) == 2 * 2500 * 68


def test_operations_of_a_token() -> None:
    # 126.6 M weights of attention and 7 experts in each of 40 layers, the head, Engram's projections.
    published = 2 * (40 * (126_615_552 + 7 * 35_389_440) + 661_913_600 + 2 * 157_286_400)
    assert published == pytest.approx(31.9e9, rel=0.001)
    routers_and_hyper = 2 * 40 * (384 * 5120 + 2 * 24 * 20_480)
    indexers = 2 * (8 * (4096 * 1280 + 32 * 5120) + 37_229_568 // 2)
    assert weight_flops(V41) == pytest.approx(published + routers_and_hyper + indexers, rel=1e-6)
    assert weight_flops(V41) == pytest.approx(31.9e9, rel=0.03)


@pytest.mark.parametrize(("layer_share", "published"), [(1.0, 99_000), (0.5, 200_000)])
def test_prefill_ceiling_on_four_h200(layer_share: float, published: float) -> None:
    ceiling = prefill_ceiling(
        V41, 4, 4096, peak_flops=788e12, bytes_per_s=H200_BYTES_PER_S, layer_share=layer_share
    )
    assert ceiling == pytest.approx(
        published, rel=0.03
    )  # published without routers, hyper-connections and indexers
    assert 4096 / ceiling * 1000 == pytest.approx(41 * layer_share, rel=0.03)


def test_small_chunks_are_bound_by_reads() -> None:
    slow = prefill_ceiling(V41, 4, 256, peak_flops=788e12, bytes_per_s=H200_BYTES_PER_S)
    assert slow == pytest.approx(256 / (step_reads(V41, 4, 256).total_bytes / H200_BYTES_PER_S))


@pytest.mark.parametrize(
    ("num_requests", "num_drafts", "accepted", "step_ms", "published"),
    [
        (1, 0, 1.0, 1.4, 700),
        (1, 5, 3.51, 3.0, 1_175),
        (1, 5, 2.0, 3.0, 670),
        (16, 0, 1.0, 5.0, 3_175),
        (64, 0, 1.0, 12.4, 5_160),
        (16, 5, 3.51, 15.7, 3_570),
        (64, 5, 3.51, 21.3, 10_500),
    ],
)
def test_decode_ceilings_on_four_h200(
    num_requests: int, num_drafts: int, accepted: float, step_ms: float, published: float
) -> None:
    point = decode_ceiling(
        V41,
        4,
        num_requests,
        bytes_per_s=H200_BYTES_PER_S,
        link=NVLINK,
        num_drafts=num_drafts,
        accepted_per_step=accepted,
        row_cache_bytes=row_cache_bytes(),
    )
    assert 1000 * point.step_s == pytest.approx(step_ms, rel=0.03)
    assert point.aggregate_tokens_per_s == pytest.approx(published, rel=0.03)
    assert point.stream_tokens_per_s == point.aggregate_tokens_per_s / num_requests


def test_real_text_agrees_on_experts_more_than_even_routing() -> None:
    """Four DGX Sparks were seen at 341 tok/s with 16 requests of prose, 2 to 3.5 tokens a step each."""
    no_link = Link("ideal", bytes_per_s=1e18, latency_s=0)

    def rate(accepted: float, routing: float) -> float:
        return decode_ceiling(
            V41,
            4,
            16,
            bytes_per_s=SPARK_BYTES_PER_S,
            link=no_link,
            num_drafts=5,
            accepted_per_step=accepted,
            row_cache_bytes=row_cache_bytes(),
            routing=routing,
            cuts=LEAN_CUTS,
            wo_a_is_bf16=False,
        ).aggregate_tokens_per_s

    assert rate(4.9, EVEN_ROUTING) == pytest.approx(
        341, rel=0.03
    )  # as published: what even routing would take
    assert rate(3.5, EVEN_ROUTING) < 341 < rate(3.5, TEXT_ROUTING)
    assert distinct_experts(384, 6, 1, routing=TEXT_ROUTING) == pytest.approx(6)


def test_more_cannot_be_accepted_than_was_proposed() -> None:
    with pytest.raises(ConfigError, match="with 1 drafts"):
        decode_ceiling(
            V41,
            4,
            1,
            bytes_per_s=1e12,
            link=NVLINK,
            num_drafts=1,
            accepted_per_step=ACCEPTED_PER_STEP["code"],
        )


def test_m85_copies_of_wo_a() -> None:
    assert wo_a_bytes(43, 4, 1024, 4096, weight_bytes=1) == 688 * MIB  # three ranks: 12 groups after padding
    freed = wo_a_bytes(40, 4, 1024, 4096, weight_bytes=2)
    assert wo_a_bytes(40, 4, 1024, 4096, weight_bytes=1) - freed == -640 * MIB
    assert wo_a_bytes(43, 2, 1024, 4096, weight_bytes=2) / 1e6 == pytest.approx(722, rel=0.001)


def test_m86_fp8_head_for_drafting() -> None:
    assert head_copy_bytes(129_280 // 3, 5120) / MIB == pytest.approx(210, rel=0.003)


def test_m87_hidden_states_for_drafting() -> None:
    assert draft_hidden_bytes(8192, 4096, 4) == 256 * MIB


def test_m93_a_ladder_that_a_cache_polluted() -> None:
    assert impossible_rungs([(92_617, 151), (200_686, 179), (402_325, 362), (562_940, 314)]) == (562_940,)
    assert impossible_rungs([(200, 3.0), (100, 2.0)]) == ()


def test_m94_m97_prompt_times() -> None:
    assert prompt_s(1_011_084, 3_118) == pytest.approx(324.3, rel=0.001)
    assert prompt_s(899_994, 874.8) == pytest.approx(1029, abs=0.5)
    assert longest_prompt(900, 874.8) == pytest.approx(787_000, rel=0.001)
