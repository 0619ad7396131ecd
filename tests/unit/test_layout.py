"""ShardPlan: at every tp_size the ranks' slices tile each tensor exactly, or every rank holds a replica."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskfleet.errors import ConfigError
from deskfleet.model.config import ModelConfig
from deskfleet.model.layout import Layout, ShardPlan, TensorShard, engram_column_rows_of
from deskfleet.model.names import DTYPE_BYTES, TensorClass
from deskfleet.model.published import published_config_dict

TINY = Path(__file__).parents[1] / "golden" / "v41-tiny" / "model"
BLOCK = 32


@pytest.fixture(scope="module")
def tiny() -> ModelConfig:
    return ModelConfig.from_file(TINY / "config.json")


@pytest.fixture(scope="module")
def published() -> ModelConfig:
    return ModelConfig.from_dict(published_config_dict())


# The property


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelConfig, list[list[int]]]:
    """A small valid configuration, and made-up rows for the columns of its Engram tables."""
    data: dict[str, Any] = json.loads((TINY / "config.json").read_text())
    groups = draw(st.integers(1, 9))
    num_columns, heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rows = st.lists(st.integers(1, 50), min_size=num_columns * heads, max_size=num_columns * heads)
    tables = draw(st.lists(rows, min_size=0, max_size=2))
    drafts = draw(st.integers(0, 2))
    experts, draft_experts = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    data["text_config"] |= {
        "hidden_size": 32 * draw(st.integers(1, 2)),
        "vocab_size": draw(st.integers(512, 560)),
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": drafts,
        "compress_ratios": [0, 2, 1] + [0] * drafts,
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": 2,
        "dspark_target_layer_ids": [0, 2],
        "num_attention_heads": groups * draw(st.integers(1, 3)),
        "o_groups": groups,
        # Also ranks that are half a weight block, where some cuts must be refused.
        "o_lora_rank": draw(st.sampled_from([32, 64] if groups % 2 else [16, 32, 48])),
        "n_routed_experts": experts,
        "num_experts_per_tok": 1,
        "dspark_n_routed_experts": draft_experts,
        "dspark_num_experts_per_tok": 1,
        "engram_layer_ids": list(range(len(tables))),
        "engram_num_embeddings": [sum(table) for table in tables],
        "engram_max_ngram_size": num_columns + 1,
        "engram_n_heads": heads,
    }
    if draw(st.booleans()):
        data["vision_config"] = None
    return ModelConfig.from_dict(data), tables


def held_positions(shard: TensorShard) -> list[int]:
    return [position for start, stop in shard.ranges for position in range(start, stop)]


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 9))
def test_slices_tile_or_replicate(model: tuple[ModelConfig, list[list[int]]], tp_size: int) -> None:
    config, column_rows = model
    groups_per_rank = -(-config.o_groups // tp_size)
    cuts_a_block = groups_per_rank < config.o_groups and groups_per_rank * config.o_lora_rank % BLOCK
    if cuts_a_block:
        with pytest.raises(ConfigError, match="inside a 32-element weight block"):
            ShardPlan(config, Layout(tp_size), column_rows)
        return
    plan = ShardPlan(config, Layout(tp_size), column_rows)
    held_bytes = [dict.fromkeys(TensorClass, 0) for _ in range(tp_size)]
    padding_bytes = [0] * tp_size
    for name, spec in plan.tensors.items():
        shards = [plan.shard(name, rank) for rank in range(tp_size)]
        _check_tensor(name, spec.shape, shards)
        for rank, shard in enumerate(shards):
            local = math.prod(shard.local_shape) * DTYPE_BYTES[spec.dtype]
            line = spec.nbytes if shard.dim is None else spec.nbytes // spec.shape[shard.dim]
            held_bytes[rank][spec.tensor_class] += local - shard.num_padding * line
            padding_bytes[rank] += shard.num_padding * line
            if name.endswith(".scale") and "experts." not in name and "engram.embed" not in name:
                _check_scale(shard, plan.shard(name.removesuffix("scale") + "weight", rank))
    for rank in range(tp_size):
        assert plan.rank_bytes(rank) == held_bytes[rank]
        assert plan.padding_bytes(rank) == padding_bytes[rank]
    replicated = {name for name in plan.tensors if plan.shard(name, 0).is_replicated}
    copies = sum(spec.nbytes * (tp_size if name in replicated else 1) for name, spec in plan.tensors.items())
    assert sum(sum(by_class.values()) for by_class in held_bytes) == copies
    _check_ranges(plan)


def _check_tensor(name: str, shape: tuple[int, ...], shards: list[TensorShard]) -> None:
    assert {shard.full_shape for shard in shards} == {shape}
    assert len({shard.dim for shard in shards}) == 1
    dim = shards[0].dim
    if dim is None:
        assert all(shard.is_replicated and shard.is_held and shard.local_shape == shape for shard in shards)
        assert not any(shard.ranges or shard.num_padding for shard in shards)
        return
    held = [position for shard in shards for position in held_positions(shard)]
    assert sorted(held) == list(range(shape[dim])), name  # every element once
    for shard in shards:
        positions = held_positions(shard)
        assert positions == sorted(positions)
        assert shard.num_held == len(positions)
        assert shard.num_padding >= 0
        assert shard.local_shape[dim] == len(positions) + shard.num_padding
        assert shard.local_shape[:dim] + shard.local_shape[dim + 1 :] == shape[:dim] + shape[dim + 1 :]
        assert shard.is_held == (shard.local_shape[dim] > 0)
    if ".experts." in name:
        assert sorted(shard.is_held for shard in shards) == [False] * (len(shards) - 1) + [True]
    elif "engram.embed" not in name:
        assert held == sorted(held)  # contiguous, in rank order
        assert len({shard.local_shape for shard in shards}) == 1
        # Padding only at the end: once a rank is padded, later ranks hold nothing.
        first_padded = next((rank for rank, shard in enumerate(shards) if shard.num_padding), len(shards))
        assert not any(shard.ranges for shard in shards[first_padded + 1 :])


def _check_scale(scale: TensorShard, weight: TensorShard) -> None:
    assert scale.dim == weight.dim
    assert tuple((start * BLOCK, stop * BLOCK) for start, stop in scale.ranges) == weight.ranges
    assert tuple(size * BLOCK for size in scale.local_shape) == weight.local_shape


def _check_ranges(plan: ShardPlan) -> None:
    config, ranks = plan.config, range(plan.layout.tp_size)
    for of_rank, per_rank, count in (
        (plan.group_range, plan.groups_per_rank, config.o_groups),
        (plan.vocab_range, plan.vocab_per_rank, config.vocab_size),
        (plan.expert_range, plan.experts_per_rank, config.n_routed_experts),
        (plan.draft_expert_range, plan.draft_experts_per_rank, config.dspark_n_routed_experts),
    ):
        assert [item for rank in ranks for item in of_rank(rank)] == list(range(count))
        assert max(len(of_rank(rank)) for rank in ranks) == per_rank
    columns = [plan.engram_columns(rank) for rank in ranks]
    assert sorted(column for of_rank in columns for column in of_rank) == list(
        range(config.engram_num_columns)
    )
    assert all(column % len(ranks) == rank for rank in ranks for column in columns[rank])
    assert max(map(len, columns)) == plan.engram_columns_per_rank
    assert plan.heads_per_rank == plan.groups_per_rank * config.heads_per_group


# Numbers


def test_padded_attention_at_tp_3(tiny: ModelConfig) -> None:
    """Eight groups of two heads on three ranks: three groups, three, and two with one of padding."""
    plan = ShardPlan(tiny, Layout(3))
    assert (plan.groups_per_rank, plan.heads_per_rank) == (3, 6)
    assert [list(plan.group_range(rank)) for rank in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    rows = plan.shard("layers.5.attn.wq_b.weight", 2)
    assert rows == TensorShard("layers.5.attn.wq_b.weight", (1024, 64), 0, ((768, 1024),), 384)
    assert (rows.local_shape, rows.num_padding) == ((384, 64), 128)
    assert plan.shard("layers.5.attn.wq_b.scale", 2).ranges == ((24, 32),)
    assert plan.shard("mtp.1.attn.attn_sink", 2) == TensorShard(
        "mtp.1.attn.attn_sink", (16,), 0, ((12, 16),), 6
    )
    assert plan.shard("layers.5.attn.wo_a.weight", 1).ranges == ((96, 192),)
    columns = plan.shard("layers.5.attn.wo_b.weight", 2)
    assert (columns.dim, columns.ranges, columns.local_shape) == (1, ((192, 256),), (128, 96))
    assert plan.shard("layers.5.attn.wo_b.scale", 2).local_shape == (4, 3)


def test_padded_vocabulary_and_experts_at_tp_3(tiny: ModelConfig) -> None:
    plan = ShardPlan(tiny, Layout(3))
    assert (plan.vocab_per_rank, plan.vocab_range(2)) == (171, range(342, 512))
    for name in ("embed.weight", "head.weight", "mtp.2.markov_head.embed.weight"):
        shard = plan.shard(name, 2)
        assert (shard.ranges, shard.local_shape[0], shard.num_padding) == (((342, 512),), 171, 1)
    assert [plan.expert_range(rank) for rank in range(3)] == [range(6), range(6, 12), range(12, 16)]
    assert [plan.draft_expert_range(rank) for rank in range(3)] == [range(3), range(3, 6), range(6, 8)]
    own, other = (plan.shard("layers.0.ffn.experts.7.w2.scale", rank) for rank in (1, 0))
    assert (own.is_held, own.is_replicated, own.local_shape) == (True, False, (128, 2))
    assert (other.is_held, other.is_replicated, other.local_shape) == (False, False, (0, 2))
    assert plan.shard("mtp.0.ffn.experts.7.w1.weight", 2).is_held


def test_rank_of_padding_only_still_has_tensors(tiny: ModelConfig) -> None:
    plan = ShardPlan(tiny, Layout(9))
    shard = plan.shard("layers.0.attn.wo_a.scale", 8)
    assert (shard.ranges, shard.is_held, shard.local_shape, shard.num_padding) == ((), True, (1, 4), 1)
    assert list(plan.group_range(8)) == []
    assert list(plan.expert_range(8)) == []


def test_replicated_tensors(tiny: ModelConfig) -> None:
    plan = ShardPlan(tiny, Layout(4))
    for name in (
        "layers.2.attn.indexer.wq_b.weight",
        "layers.2.attn.indexer.weights_proj.weight",
        "layers.2.ffn.shared_experts.w1.scale",
        "layers.2.ffn.gate.bias_vl",
        "layers.1.engram.wkv.weight",
        "layers.1.engram.q_weight",
        "mtp.0.main_proj.weight",
        "mtp.2.norm.weight",
        "mtp.2.confidence_head.proj.weight",
        "vision.blocks.0.attn.wo.weight",
        "norm.weight",
        "image_start",
    ):
        assert plan.shard(name, 3) == TensorShard(name, plan.tensors[name].shape, None)


def test_engram_columns_of_the_published_model(published: ModelConfig) -> None:
    plan = ShardPlan(published, Layout(8))
    assert plan.engram_columns(3) == (3, 11, 19)
    name = "layers.14.engram.embed.scale"
    offsets = {3: (48001463, 64001970), 11: (176006319, 192007016), 19: (304012377, 320013196)}
    assert plan.shard(name, 3) == TensorShard(name, (384016682, 8), 0, tuple(offsets.values()))
    assert ShardPlan(published, Layout(5)).engram_columns(4) == (4, 9, 14, 19)
    assert ShardPlan(published, Layout(5)).engram_columns_per_rank == 5


@pytest.mark.parametrize(("tp_size", "gib"), [(1, 475.2), (2, 239.3), (4, 121.4), (8, 62.4)])
def test_published_bytes_per_rank(published: ModelConfig, tp_size: int, gib: float) -> None:
    """The specification's table, whose scheme cuts the indexers too (42.5 MiB) and Engram by rows."""
    plan = ShardPlan(published, Layout(tp_size))
    for rank in {0, tp_size - 1}:
        total = sum(plan.rank_bytes(rank).values())
        assert abs(total / 2**30 - gib) < 0.1
        assert plan.padding_bytes(rank) == 0


def test_published_model_on_three_ranks(published: ModelConfig) -> None:
    plan = ShardPlan(published, Layout(3))
    assert (plan.heads_per_rank, plan.vocab_per_rank, plan.experts_per_rank) == (24, 43094, 128)
    assert plan.draft_experts_per_rank == 43
    assert plan.padding_bytes(0) == 0
    # One group of eight heads in each layer and draft stage, and two tokens of four vocabulary matrices.
    weights = 4096 * 1280 + 1024 * 4096 + 5120 * 1024
    group_bytes = weights + weights // 32**2 + 8 * 4
    assert plan.padding_bytes(2) == 43 * group_bytes + 2 * 2 * (5120 * 2 + 256 * 2)


def test_column_rows_are_derived_from_the_configuration(tiny: ModelConfig) -> None:
    rows = engram_column_rows_of(tiny)
    assert [sum(table) for table in rows] == [12386, 13322]
    assert {len(table) for table in rows} == {tiny.engram_num_columns}


# Refusing


@pytest.mark.parametrize("tp_size", [0, -1, 2.0, True, "2"])
def test_layout_refuses(tp_size: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Layout(tp_size)
    assert caught.value.message == f"tp_size must be an integer of 1 or more, got {tp_size!r}"


def test_rank_outside(tiny: ModelConfig) -> None:
    plan = ShardPlan(tiny, Layout(2))
    for call in (plan.rank_bytes, plan.vocab_range, plan.engram_columns):
        with pytest.raises(ConfigError, match="rank 2 is outside tp_size 2"):
            call(2)
    with pytest.raises(ConfigError, match="rank -1 is outside"):
        plan.shard("norm.weight", -1)


def test_unknown_tensor(tiny: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"no tensor 'layers\.10\.attn_norm\.weight' in this model"):
        ShardPlan(tiny, Layout(2)).shard("layers.10.attn_norm.weight", 0)


def test_cut_inside_a_weight_block() -> None:
    data = json.loads((TINY / "config.json").read_text())
    data["text_config"]["o_lora_rank"] = 16
    config = ModelConfig.from_dict(data)
    for tp_size in (1, 2, 4):
        ShardPlan(config, Layout(tp_size))
    with pytest.raises(ConfigError) as caught:
        ShardPlan(config, Layout(3))
    assert caught.value.message == (
        "tp_size 3 cuts attn.wo_a.scale every 48 elements, which is inside a 32-element weight block"
    )
    assert caught.value.hint == "choose a tp_size that leaves a multiple of 32 to each rank"


def test_column_rows_that_contradict_the_tables(tiny: ModelConfig) -> None:
    rows = [list(table) for table in engram_column_rows_of(tiny)]
    rows[1][0] += 1
    with pytest.raises(ConfigError, match="engram table of layer 4 has 12 columns and 13322 rows"):
        ShardPlan(tiny, Layout(2), rows)
    with pytest.raises(ConfigError, match="engram column rows of 1 tables given, config has 2"):
        ShardPlan(tiny, Layout(2), rows[:1])
    data = tiny.to_published_dict()
    data["text_config"]["engram_num_embeddings"][0] += 1
    with pytest.raises(ConfigError, match="engram layer 1: its 12 columns have 12386 rows together"):
        ShardPlan(ModelConfig.from_dict(data), Layout(2))
