"""The rules a configuration must obey: each value in range, and no two values against each other.

Owns the sentences that say what is wrong. Knows nothing of files. Spec §1, §4.1, §4.6, §7.2, §8.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deskfleet.model.layers import last_source

if TYPE_CHECKING:
    from deskfleet.model.config import ModelConfig, VisionConfig

SUPPORTED_BLOCK_SIZE = 32
"""Side of a scale tile, and length of a scale group, that every quantiser of the architecture uses."""

SUPPORTED_RATIOS = (0, 1, 2)
"""Compression ratios the compressor defines (spec §4.4)."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """One thing wrong with a configuration, and what to do about it."""

    message: str
    hint: str | None = None


def find_contradiction(config: ModelConfig) -> Contradiction | None:
    """Return the first rule that `config` breaks, or None."""
    return next(_contradictions(config), None)


def _contradictions(config: ModelConfig) -> Iterator[Contradiction]:
    # Lazy on purpose: a rule may divide by, or index with, what the rules before it found in range.
    for rules in (
        _ranges,
        _supported_values,
        _attention,
        _weight_blocks,
        _layer_lists,
        _sources,
        _candidates,
        _experts,
        _engram,
        _drafts,
        _token_ids,
    ):
        yield from rules(config)
    if config.vision is not None:
        yield from _vision(config.vision)


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "swiglu_limit",
    "max_position_embeddings",
    "rope_theta",
    "compress_rope_theta",
    "n_routed_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_topk_blocks",
    "candidate_block_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_compressed_vocab_size",
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)
_NOT_NEGATIVE = ("rms_norm_eps", "hc_eps", "num_nextn_predict_layers")


def _ranges(config: ModelConfig) -> Iterator[Contradiction]:
    for name in _POSITIVE:
        if not getattr(config, name) > 0:
            yield Contradiction(f"{name} must be positive, got {getattr(config, name)}")
    for name in _NOT_NEGATIVE:
        if getattr(config, name) < 0:
            yield Contradiction(f"{name} must not be negative, got {getattr(config, name)}")
    if config.engram_max_ngram_size < 2:
        yield Contradiction(f"engram_max_ngram_size must be 2 or more, got {config.engram_max_ngram_size}")
    scaling = config.rope_scaling
    if scaling.factor < 1:
        yield Contradiction(f"rope_scaling.factor must be 1 or more, got {scaling.factor}")
    if scaling.original_max_position_embeddings <= 0:
        yield Contradiction(
            "rope_scaling.original_max_position_embeddings must be positive, "
            f"got {scaling.original_max_position_embeddings}"
        )
    if not 0 < scaling.beta_slow < scaling.beta_fast:
        yield Contradiction(
            f"rope_scaling.beta_slow {scaling.beta_slow} must be positive and below "
            f"rope_scaling.beta_fast {scaling.beta_fast}"
        )


def _supported_values(config: ModelConfig) -> Iterator[Contradiction]:
    supported: tuple[tuple[str, object], ...] = (
        ("num_key_value_heads", 1),
        ("n_shared_experts", 1),
        ("scoring_func", "sqrtsoftplus"),
        ("topk_method", "noaux_tc"),
        ("norm_topk_prob", True),
        ("weight_block_size", SUPPORTED_BLOCK_SIZE),
    )
    for name, only in supported:
        if getattr(config, name) != only:
            yield Contradiction(f"{name} is {getattr(config, name)!r}, and only {only!r} is supported")


def _attention(config: ModelConfig) -> Iterator[Contradiction]:
    if config.qk_rope_head_dim % 2:
        yield Contradiction(f"qk_rope_head_dim must be even, got {config.qk_rope_head_dim}")
    for name in ("head_dim", "index_head_dim"):
        if config.qk_rope_head_dim > getattr(config, name):
            yield Contradiction(
                f"qk_rope_head_dim {config.qk_rope_head_dim} exceeds {name} {getattr(config, name)}"
            )
    if config.num_attention_heads % config.o_groups:
        yield Contradiction(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"o_groups {config.o_groups}"
        )


def _weight_blocks(config: ModelConfig) -> Iterator[Contradiction]:
    """Every side of a quantised matrix, and every vector the activation quantisers cut (spec §2.1, §N.3)."""
    block = config.weight_block_size
    sides = {
        "hidden_size": config.hidden_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "q_lora_rank": config.q_lora_rank,
        "head_dim": config.head_dim,
        "index_head_dim": config.index_head_dim,
        "engram_head_dim": config.engram_head_dim,
        "o_groups * o_lora_rank": config.o_groups * config.o_lora_rank,
    }
    for name, side in sides.items():
        if side % block:
            yield Contradiction(f"{name} {side} is not a multiple of weight_block_size {block}")


def _layer_lists(config: ModelConfig) -> Iterator[Contradiction]:
    layers, drafts = config.num_hidden_layers, config.num_nextn_predict_layers
    ratios = config.compress_ratios
    if len(ratios) != layers + drafts:
        yield Contradiction(
            f"compress_ratios has {len(ratios)} entries, but num_hidden_layers {layers} plus "
            f"num_nextn_predict_layers {drafts} make {layers + drafts}"
        )
        return
    for layer, ratio in enumerate(ratios):
        if ratio not in SUPPORTED_RATIOS:
            yield Contradiction(f"compress_ratios[{layer}] is {ratio}, and only 0, 1 and 2 are supported")
        elif layer >= layers and ratio:
            yield Contradiction(
                f"compress_ratios[{layer}] is {ratio}, but draft stage {layer - layers} can only have 0"
            )
    for name in (
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "engram_layer_ids",
        "dspark_target_layer_ids",
    ):
        ids: tuple[int, ...] = getattr(config, name)
        for layer in ids:
            if not 0 <= layer < layers:
                yield Contradiction(f"{name} holds {layer}, but num_hidden_layers is {layers}")
        if list(ids) != sorted(set(ids)):
            yield Contradiction(f"{name} must ascend without repeats, got {list(ids)}")


def _sources(config: ModelConfig) -> Iterator[Contradiction]:
    ratios, kv_sources = config.compress_ratios, config.kv_source_layer_ids
    index_sources = config.index_source_layer_ids
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        for layer in getattr(config, name):
            if ratios[layer] == 0:
                yield Contradiction(f"{name} holds {layer}, but compress_ratios[{layer}] is 0")
    for layer in index_sources:
        if ratios[layer] and last_source(kv_sources, ratios, layer) is None:
            yield Contradiction(
                f"index_source_layer_ids holds {layer}, but no kv_source_layer_ids at or before it has "
                f"compress_ratios {ratios[layer]}"
            )
    for layer in kv_sources:
        # Its consumers would otherwise attend to positions ranked by the keys of an earlier source.
        if layer not in index_sources:
            yield Contradiction(f"kv_source_layer_ids holds {layer}, but index_source_layer_ids does not")
    for layer in range(config.num_hidden_layers):
        if ratios[layer] and last_source(kv_sources, ratios, layer) is None:
            yield Contradiction(
                f"compress_ratios[{layer}] is {ratios[layer]}, but no kv_source_layer_ids at or before layer "
                f"{layer} has that ratio"
            )


def _candidates(config: ModelConfig) -> Iterator[Contradiction]:
    source, ratios = config.candidate_source_layer_id, config.compress_ratios
    if source is None:
        return
    if source not in config.index_source_layer_ids:
        yield Contradiction(f"candidate_source_layer_id is {source}, but index_source_layer_ids lacks it")
    elif ratios[source] != 1:
        yield Contradiction(
            f"candidate_source_layer_id is {source}, but compress_ratios[{source}] is {ratios[source]}, not 1"
        )
    else:
        own = last_source(config.kv_source_layer_ids, ratios, source)
        for layer in config.index_source_layer_ids:
            if layer > source and last_source(config.kv_source_layer_ids, ratios, layer) != own:
                yield Contradiction(
                    f"index_source_layer_ids holds {layer}, which reads another cache than "
                    f"candidate_source_layer_id {source} whose candidates it should rank"
                )


def _experts(config: ModelConfig) -> Iterator[Contradiction]:
    for chosen, experts in (
        ("num_experts_per_tok", "n_routed_experts"),
        ("dspark_num_experts_per_tok", "dspark_n_routed_experts"),
    ):
        if getattr(config, chosen) > getattr(config, experts):
            yield Contradiction(
                f"{chosen} {getattr(config, chosen)} exceeds {experts} {getattr(config, experts)}"
            )


def _engram(config: ModelConfig) -> Iterator[Contradiction]:
    layers, tables = config.engram_layer_ids, config.engram_num_embeddings
    if len(layers) != len(tables):
        yield Contradiction(
            f"engram_num_embeddings has {len(tables)} entries, but engram_layer_ids has {len(layers)}"
        )
    for rows in tables:
        if rows <= 0:
            yield Contradiction(f"engram_num_embeddings must be positive, got {rows}")
    if config.engram_compressed_vocab_size > config.vocab_size:
        yield Contradiction(
            f"engram_compressed_vocab_size {config.engram_compressed_vocab_size} exceeds vocab_size "
            f"{config.vocab_size}"
        )


def _drafts(config: ModelConfig) -> Iterator[Contradiction]:
    if config.num_nextn_predict_layers and not config.dspark_target_layer_ids:
        yield Contradiction(
            f"num_nextn_predict_layers is {config.num_nextn_predict_layers}, "
            "but dspark_target_layer_ids is empty"
        )


def _token_ids(config: ModelConfig) -> Iterator[Contradiction]:
    for name in (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "image_token_id",
        "engram_pad_token_id",
        "dspark_noise_token_id",
    ):
        token_id = getattr(config, name)
        if not 0 <= token_id < config.vocab_size:
            yield Contradiction(f"{name} {token_id} is outside vocab_size {config.vocab_size}")


def _vision(vision: VisionConfig) -> Iterator[Contradiction]:
    for name in (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "patch_size",
        "rope_theta",
        "downsample_ratio",
    ):
        if not getattr(vision, name) > 0:
            yield Contradiction(f"vision_config.{name} must be positive, got {getattr(vision, name)}")
            return
    if vision.hidden_size % vision.num_attention_heads:
        yield Contradiction(
            f"vision_config.hidden_size {vision.hidden_size} is not a multiple of "
            f"vision_config.num_attention_heads {vision.num_attention_heads}"
        )
    elif vision.head_dim % 4:
        yield Contradiction(
            f"vision_config head size {vision.head_dim} (hidden_size / num_attention_heads) must be a "
            "multiple of 4: half turns with the row, half with the column, in pairs"
        )
    if vision.max_image_tokens < 4:
        yield Contradiction(
            f"vision_config.max_image_tokens must be 4 or more (one cell with its delimiters), "
            f"got {vision.max_image_tokens}"
        )
    if vision.min_pixels < 0:
        yield Contradiction(f"vision_config.min_pixels must not be negative, got {vision.min_pixels}")
    if vision.max_wh_ratio is not None and not vision.max_wh_ratio > 0:
        yield Contradiction(f"vision_config.max_wh_ratio must be positive, got {vision.max_wh_ratio}")


__all__ = [
    "SUPPORTED_BLOCK_SIZE",
    "SUPPORTED_RATIOS",
    "Contradiction",
    "find_contradiction",
]
