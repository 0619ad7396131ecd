"""Every tensor of a published checkpoint: its name, dtype, shape and class, derived from the configuration.

Owns the naming and shape rules of spec §2.1-2.6 and the order of the published shards (§2.7). Knows nothing
of files or ranks. Names carry no `model.` prefix; every weight is stored (out, in).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from deskfleet.model.config import LayerPlan, ModelConfig, VisionConfig

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1})
"""Bytes of one element of each dtype a checkpoint uses, under the names of the safetensors format."""

DELIMITERS = ("image_start", "image_end", "image_newline")
"""The embeddings around and inside an image span (spec §9.2)."""


class TensorClass(StrEnum):
    """What kind of memory a tensor is, for byte totals and budgets. Every tensor is in exactly one class.

    * `routed_expert`: the routed experts of the backbone (`layers.L.ffn.experts.*`).
    * `dense`: the rest of the backbone's layers: attention, indexers, compressors, shared experts, routers,
      hyper-connections, norms, and the Engram projections (`engram.wkv`, `q_weight`, `k_weight`), which a
      rank keeps in memory whatever happens to the tables.
    * `engram`: the Engram tables only (`layers.L.engram.embed.*`), whose rows may stay on disk.
    * `draft`: everything under `mtp.`, its routed experts included.
    * `vision`: the tower, the aligner and the three image delimiters.
    * `other`: what belongs to no layer: `embed.weight`, `norm.weight` and `head.weight`.
    """

    routed_expert = "routed_expert"
    dense = "dense"
    engram = "engram"
    draft = "draft"
    vision = "vision"
    other = "other"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor must be. `dtype` is spelled as in safetensors; an I8 byte holds two FP4 values."""

    dtype: str
    shape: tuple[int, ...]
    tensor_class: TensorClass

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


_Named = Iterator[tuple[str, TensorSpec]]


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Return every tensor a checkpoint of `config` holds, by name, in the order of the published shards."""
    return {name: spec for shard in expected_shards(config) for name, spec in shard.items()}


def expected_shards(config: ModelConfig) -> tuple[dict[str, TensorSpec], ...]:
    """Return the tensors of each shard as the publisher groups them (spec §2.7).

    Vision and aligner; embedding and delimiters; one shard for each layer without its Engram tensors; final
    norm and head; one for each draft stage; one with all Engram tensors of each Engram layer. A text-only
    checkpoint has no first shard, and no delimiters in the next.
    """
    shards: list[_Named] = []
    if config.vision is not None:
        shards.append(_vision(config, config.vision))
    shards.append(_embedding(config))
    shards.extend(_layer(config, plan) for plan in config.layers)
    shards.append(_head(config))
    shards.extend(_draft(config, plan) for plan in config.draft_layers)
    tables = zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
    shards.extend(_engram(config, f"layers.{layer}.engram", rows) for layer, rows in tables)
    return tuple(dict(shard) for shard in shards)


def _embedding(config: ModelConfig) -> _Named:
    yield "embed.weight", TensorSpec("BF16", (config.vocab_size, config.hidden_size), TensorClass.other)
    if config.vision is not None:
        delimiter = TensorSpec("BF16", (config.hidden_size,), TensorClass.vision)
        yield from ((name, delimiter) for name in DELIMITERS)


def _head(config: ModelConfig) -> _Named:
    yield "norm.weight", TensorSpec("BF16", (config.hidden_size,), TensorClass.other)
    yield "head.weight", TensorSpec("BF16", (config.vocab_size, config.hidden_size), TensorClass.other)


def _layer(config: ModelConfig, plan: LayerPlan) -> _Named:
    """Yield one backbone layer without its Engram tensors (spec §2.3)."""
    yield from _block(config, plan, TensorClass.dense, TensorClass.routed_expert)
    attn, hidden, head_dim = f"{plan.prefix}.attn", config.hidden_size, config.head_dim
    index_heads, index_dim = config.index_n_heads, config.index_head_dim
    if plan.is_kv_source:
        projection = TensorSpec("BF16", (head_dim, hidden), TensorClass.dense)
        yield f"{attn}.compressor.wkv.weight", projection
        if plan.compress_ratio > 1:  # one token to an entry needs no weighing
            yield f"{attn}.compressor.wgate.weight", projection
        yield f"{attn}.compressor.norm.weight", TensorSpec("BF16", (head_dim,), TensorClass.dense)
        yield f"{attn}.indexer.wk.weight", TensorSpec("BF16", (index_dim, head_dim), TensorClass.dense)
        yield f"{attn}.indexer.k_norm.weight", TensorSpec("BF16", (index_dim,), TensorClass.dense)
    if plan.is_index_source:
        rows = index_heads * index_dim
        yield from _fp8(config, f"{attn}.indexer.wq_b", rows, config.q_lora_rank, TensorClass.dense)
        yield (
            f"{attn}.indexer.weights_proj.weight",
            TensorSpec("BF16", (index_heads, hidden), TensorClass.dense),
        )


def _draft(config: ModelConfig, plan: LayerPlan) -> _Named:
    """Yield one draft stage (spec §2.3, §2.5). The first owns the input, the last the output modules."""
    draft, hidden, prefix = TensorClass.draft, config.hidden_size, plan.prefix
    yield from _block(config, plan, draft, draft)
    if plan is config.draft_layers[0]:
        width = len(config.dspark_target_layer_ids) * hidden
        yield from _fp8(config, f"{prefix}.main_proj", hidden, width, draft)
        yield f"{prefix}.main_norm.weight", TensorSpec("BF16", (hidden,), draft)
    if plan is config.draft_layers[-1]:
        rank = config.dspark_markov_rank
        yield f"{prefix}.norm.weight", TensorSpec("BF16", (hidden,), draft)
        yield f"{prefix}.markov_head.embed.weight", TensorSpec("BF16", (config.vocab_size, rank), draft)
        yield f"{prefix}.markov_head.head.weight", TensorSpec("BF16", (config.vocab_size, rank), draft)
        yield f"{prefix}.confidence_head.proj.weight", TensorSpec("BF16", (1, hidden + rank), draft)


def _block(config: ModelConfig, plan: LayerPlan, dense: TensorClass, expert: TensorClass) -> _Named:
    """Yield what every layer and every draft stage has (spec §2.3)."""
    prefix, hidden = plan.prefix, config.hidden_size
    norm = TensorSpec("BF16", (hidden,), dense)
    yield f"{prefix}.attn_norm.weight", norm
    yield f"{prefix}.ffn_norm.weight", norm
    for half in ("attn", "ffn"):
        mixes = config.hc_num_mixes
        yield f"{prefix}.hc_{half}_fn", TensorSpec("F32", (mixes, config.hc_mult * hidden), dense)
        yield f"{prefix}.hc_{half}_base", TensorSpec("F32", (mixes,), dense)
        yield f"{prefix}.hc_{half}_scale", TensorSpec("F32", (3,), dense)
    yield from _attention(config, f"{prefix}.attn", dense)
    yield from _feed_forward(config, f"{prefix}.ffn", plan.num_experts, dense, expert)


def _attention(config: ModelConfig, prefix: str, dense: TensorClass) -> _Named:
    hidden, head_dim, rank = config.hidden_size, config.head_dim, config.q_lora_rank
    out_rank = config.o_groups * config.o_lora_rank
    yield f"{prefix}.attn_sink", TensorSpec("F32", (config.num_attention_heads,), dense)
    yield from _fp8(config, f"{prefix}.wq_a", rank, hidden, dense)
    yield f"{prefix}.q_norm.weight", TensorSpec("BF16", (rank,), dense)
    yield from _fp8(config, f"{prefix}.wq_b", config.num_attention_heads * head_dim, rank, dense)
    yield from _fp8(config, f"{prefix}.wkv", head_dim, hidden, dense)
    yield f"{prefix}.kv_norm.weight", TensorSpec("BF16", (head_dim,), dense)
    yield from _fp8(config, f"{prefix}.wo_a", out_rank, config.heads_per_group * head_dim, dense)
    yield from _fp8(config, f"{prefix}.wo_b", hidden, out_rank, dense)


def _feed_forward(
    config: ModelConfig, prefix: str, num_experts: int, dense: TensorClass, expert: TensorClass
) -> _Named:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    yield f"{prefix}.gate.weight", TensorSpec("BF16", (num_experts, hidden), dense)
    bias = TensorSpec("F32", (num_experts,), dense)
    yield f"{prefix}.gate.bias", bias
    yield f"{prefix}.gate.bias_vl", bias
    sides = (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner))
    # One list serves all experts: a checkpoint has tens of thousands of them.
    parts = [part for name, rows, columns in sides for part in _fp4(config, name, rows, columns, expert)]
    for number in range(num_experts):
        yield from ((f"{prefix}.experts.{number}.{name}", spec) for name, spec in parts)
    for name, rows, columns in sides:
        yield from _fp8(config, f"{prefix}.shared_experts.{name}", rows, columns, dense)


def _engram(config: ModelConfig, prefix: str, rows: int) -> _Named:
    """Yield the table and the projections of one Engram layer (spec §2.4)."""
    hidden, copies = config.hidden_size, config.hc_mult
    row_scales = config.engram_head_dim // config.weight_block_size
    yield f"{prefix}.embed.weight", TensorSpec("F8_E4M3", (rows, config.engram_head_dim), TensorClass.engram)
    yield f"{prefix}.embed.scale", TensorSpec("F8_E8M0", (rows, row_scales), TensorClass.engram)
    keys_and_value = (copies + 1) * hidden
    yield from _fp8(config, f"{prefix}.wkv", keys_and_value, config.engram_width, TensorClass.dense)
    for name in ("q_weight", "k_weight"):
        yield f"{prefix}.{name}", TensorSpec("BF16", (copies, hidden), TensorClass.dense)


def _vision(config: ModelConfig, vision: VisionConfig) -> _Named:
    """Yield the tower and the aligner (spec §2.6)."""

    def bf16(*shape: int) -> TensorSpec:
        return TensorSpec("BF16", shape, TensorClass.vision)

    width, inner, hidden = vision.hidden_size, vision.intermediate_size, config.hidden_size
    yield "vision.patch_embed.proj.weight", bf16(width, 3 * vision.patch_size**2)
    yield "vision.patch_embed.proj.bias", bf16(width)
    for number in range(vision.num_hidden_layers):
        block = f"vision.blocks.{number}"
        yield f"{block}.norm1.weight", bf16(width)
        yield f"{block}.attn.wqkv.weight", bf16(3 * width, width)
        yield f"{block}.attn.wqkv.bias", bf16(3 * width)
        yield f"{block}.attn.wo.weight", bf16(width, width)
        yield f"{block}.attn.wo.bias", bf16(width)
        yield f"{block}.norm2.weight", bf16(width)
        yield f"{block}.mlp.w1.weight", bf16(2 * inner, width)
        yield f"{block}.mlp.w2.weight", bf16(width, inner)
    yield "vision.norm.weight", bf16(width)
    yield "aligner.w1.weight", bf16(hidden, vision.downsample_ratio**2 * width)
    yield "aligner.w1.bias", bf16(hidden)
    yield "aligner.w2.weight", bf16(hidden, hidden)
    yield "aligner.w2.bias", bf16(hidden)


def _fp8(config: ModelConfig, name: str, rows: int, columns: int, tensor_class: TensorClass) -> _Named:
    """Yield an FP8 linear: E4M3 codes, and one E8M0 scale for each square tile."""
    block = config.weight_block_size
    yield f"{name}.weight", TensorSpec("F8_E4M3", (rows, columns), tensor_class)
    yield f"{name}.scale", TensorSpec("F8_E8M0", (-(-rows // block), -(-columns // block)), tensor_class)


def _fp4(config: ModelConfig, name: str, rows: int, columns: int, tensor_class: TensorClass) -> _Named:
    """Yield an FP4 linear: two E2M1 codes to a byte, and one E8M0 scale for each run of a row."""
    yield f"{name}.weight", TensorSpec("I8", (rows, columns // 2), tensor_class)
    yield f"{name}.scale", TensorSpec("F8_E8M0", (rows, columns // config.weight_block_size), tensor_class)


__all__ = [
    "DELIMITERS",
    "DTYPE_BYTES",
    "TensorClass",
    "TensorSpec",
    "expected_shards",
    "expected_tensors",
]
