"""What a DeepSeek-V4.1 configuration alone says of memory: `v41_inventory`.

Owns the way from `ModelConfig` to `Inventory`. Knows no files: what a checkpoint really holds is `headers`' business,
what was published under which name is `published`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from deskfleet.errors import ConfigError
from deskfleet.model.config import ModelConfig
from deskfleet.model.layout import engram_column_rows_of
from deskfleet.model.names import TensorClass, TensorSpec, expected_tensors
from deskfleet.planner.inventory import EngramTables, Inventory, KvShape, TensorSize, group_tensors
from deskfleet_engram.errors import FormatError
from deskfleet_engram.format import fp8_rows, nvfp4_rows

RowFormatName = Literal["fp8", "nvfp4"]

_FLOAT32_BYTES = 4


def v41_inventory(
    config: ModelConfig,
    *,
    name: str,
    origin: str,
    row_format: RowFormatName = "fp8",
    tensors: Mapping[str, TensorSpec] | None = None,
) -> Inventory:
    """Return the inventory of a checkpoint of `config` in the published layout, exact but for `file_bytes`.

    `file_bytes` counts tensors without the files' headers. `tensors` saves time when `expected_tensors(config)` is at
    hand. Raises ConfigError when Engram tables and their columns contradict each other, or rows do not fill scales.
    """
    if tensors is None:
        tensors = expected_tensors(config)
    groups = group_tensors(sizes_of(config, tensors))
    engram = engram_tables(config, row_format)
    weight_bytes = sum(group.num_bytes for group in groups)
    return Inventory(
        name=name,
        architecture="v4.1",
        weight_format="mxfp4",
        expert_bits=4 + 8 / config.weight_block_size,
        origin=origin,
        derived=(),
        file_bytes=weight_bytes + (engram.num_bytes if engram is not None else 0),
        num_files=num_shards(config),
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_groups=config.o_groups,
        head_dim=config.head_dim,
        o_lora_rank=config.o_lora_rank,
        q_lora_rank=config.q_lora_rank,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        num_experts=config.n_routed_experts,
        num_chosen_experts=config.num_experts_per_tok,
        num_draft_experts=config.dspark_n_routed_experts,
        num_chosen_draft_experts=config.dspark_num_experts_per_tok,
        expert_width=config.moe_intermediate_size,
        num_draft_stages=config.num_nextn_predict_layers,
        draft_block=config.dspark_block_size,
        index_heads=config.index_n_heads,
        max_image_tokens=config.vision.max_image_tokens if config.vision is not None else 0,
        groups=groups,
        engram=engram,
        kv=kv_shape(config),
        config=config.to_published_dict(),
    )


def sizes_of(config: ModelConfig, tensors: Mapping[str, TensorSpec]) -> Iterator[TensorSize]:
    """Yield what is counted of `tensors`. A layer's routed experts are alike, so its first stands for all of them."""
    for name, spec in tensors.items():
        copies = 1
        if ".experts." in name:
            if ".experts.0." not in name:
                continue
            is_draft = spec.tensor_class is TensorClass.draft
            copies = config.dspark_n_routed_experts if is_draft else config.n_routed_experts
        yield TensorSize(name, spec.dtype, spec.shape, spec.nbytes, copies)


def num_shards(config: ModelConfig) -> int:
    """Files of the published layout: vision, embedding, one for each layer, head, stage and Engram table."""
    layers = config.num_hidden_layers + config.num_nextn_predict_layers + len(config.engram_layer_ids)
    return layers + 2 + (config.vision is not None)


def engram_tables(config: ModelConfig, row_format: RowFormatName) -> EngramTables | None:
    """Return the tables with rows stored as `row_format`, None for a model without. Raises ConfigError."""
    if not config.engram_layer_ids:
        return None
    try:
        rows = {"fp8": fp8_rows, "nvfp4": nvfp4_rows}[row_format](config.engram_head_dim)
    except FormatError as error:
        raise ConfigError(f"engram_head_dim {config.engram_head_dim}: {error}") from error
    return EngramTables(
        layers=config.engram_layer_ids,
        rows=config.engram_num_embeddings,
        column_rows=engram_column_rows_of(config),
        row_bytes=rows.row_bytes,
        row_dim=config.engram_head_dim,
        format=row_format,
    )


def kv_shape(config: ModelConfig) -> KvShape:
    """Return what a token leaves behind.

    A source of ratio r keeps the tokens of its open group, r - 1 at most, each as two float32 vectors of head_dim.
    """
    ratios = tuple(config.compress_ratios[source] for source in config.kv_source_layer_ids)
    open_rows = sum(ratio - 1 for ratio in ratios)
    return KvShape(
        ratios=ratios,
        indexed=(True,) * len(ratios),
        head_dim=config.head_dim,
        rope_dim=config.qk_rope_head_dim,
        index_head_dim=config.index_head_dim,
        window=config.sliding_window,
        num_window_layers=config.num_hidden_layers,
        num_draft_layers=config.num_nextn_predict_layers,
        state_bytes=open_rows * 2 * config.head_dim * _FLOAT32_BYTES,
    )


__all__ = ["RowFormatName", "engram_tables", "kv_shape", "num_shards", "sizes_of", "v41_inventory"]
