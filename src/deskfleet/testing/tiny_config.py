"""The sizes of a tiny checkpoint and the config.json they make.

Owns `TinySizes`, the layout of layer roles, and the values that follow from the tokenizer. Knows nothing of
weights or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from deskfleet.errors import ConfigError
from deskfleet.testing import tiny_tokenizer
from deskfleet_engram import EngramSpec, compressed_token_map, table_rows

_NUM_WINDOW_LAYERS = 2
_MIN_LAYERS = 4  # two window-only ones, one of each ratio
_YARN_FACTOR = 16


@dataclass(frozen=True, slots=True)
class TinySizes:
    """Every size of a tiny checkpoint, under its published name; `vision_` marks those of the tower.

    By default: ten layers with every role, eight output groups, selection at work from 64 (ratio 1) and 128
    (ratio 2) tokens on, a picture of 224 x 224 pixels in 44 tokens.

    An empty layer list (and a `candidate_source_layer_id` of None) is laid out from `num_hidden_layers`: two
    window-only layers; then one half with ratio 2 and two sources; then one half with ratio 1, which has the
    candidate source and a re-indexing layer. Engram is in layer 1 and in the second source, and the last
    three layers feed the drafts. `compress_ratios` covers the backbone only. `vision_num_hidden_layers` 0
    makes a text-only checkpoint, `num_nextn_predict_layers` 0 one without drafts.
    """

    vocab_size: int = 811
    hidden_size: int = 128
    moe_intermediate_size: int = 96
    num_hidden_layers: int = 10
    num_attention_heads: int = 16
    head_dim: int = 64
    qk_rope_head_dim: int = 16
    q_lora_rank: int = 64
    o_lora_rank: int = 32
    o_groups: int = 8
    max_position_embeddings: int = 4096
    n_routed_experts: int = 24
    num_experts_per_tok: int = 3
    sliding_window: int = 64
    compress_ratios: tuple[int, ...] = ()
    kv_source_layer_ids: tuple[int, ...] = ()
    index_source_layer_ids: tuple[int, ...] = ()
    index_n_heads: int = 8
    index_head_dim: int = 32
    index_topk: int = 64
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = 16
    candidate_block_size: int = 8
    hc_mult: int = 4
    engram_layer_ids: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 997
    engram_n_heads: int = 4
    engram_head_dim: int = 64
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 64
    dspark_n_routed_experts: int = 8
    dspark_num_experts_per_tok: int = 2
    vision_num_hidden_layers: int = 2
    vision_hidden_size: int = 64
    vision_num_attention_heads: int = 4
    vision_intermediate_size: int = 96
    vision_patch_size: int = 14
    vision_downsample_ratio: int = 3
    vision_max_image_tokens: int = 64
    vision_min_pixels: int = 7056


def published_config(sizes: TinySizes, tokenizer: Tokenizer) -> dict[str, object]:
    """Return config.json of `sizes` in the published (nested) layout.

    Raises ConfigError when the layers are too few for their roles. Whether the values agree with each other is
    `ModelConfig`'s business.
    """
    published: dict[str, object] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": tiny_tokenizer.token_id(tokenizer, tiny_tokenizer.BOS),
        "eos_token_id": tiny_tokenizer.token_id(tokenizer, tiny_tokenizer.EOS),
        "pad_token_id": tiny_tokenizer.token_id(tokenizer, tiny_tokenizer.PAD),
        "image_token_id": tiny_tokenizer.token_id(tokenizer, tiny_tokenizer.IMAGE),
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": _text_config(sizes, tokenizer),
    }
    if sizes.vision_num_hidden_layers:
        published["vision_config"] = _vision_config(sizes)
    return published


def _text_config(sizes: TinySizes, tokenizer: Tokenizer) -> dict[str, object]:
    roles, candidate_source = _layer_roles(sizes)
    return {
        "model_type": "deepseek_v41_text",
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "moe_intermediate_size": sizes.moe_intermediate_size,
        "num_hidden_layers": sizes.num_hidden_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": 1,
        "head_dim": sizes.head_dim,
        "qk_rope_head_dim": sizes.qk_rope_head_dim,
        "q_lora_rank": sizes.q_lora_rank,
        "o_lora_rank": sizes.o_lora_rank,
        "o_groups": sizes.o_groups,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "max_position_embeddings": sizes.max_position_embeddings,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": _YARN_FACTOR,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": max(sizes.max_position_embeddings // _YARN_FACTOR, 1),
        },
        "n_routed_experts": sizes.n_routed_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": sizes.num_experts_per_tok,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": sizes.sliding_window,
        "compress_rope_theta": 160000.0,
        **roles,
        "candidate_source_layer_id": candidate_source,
        "index_n_heads": sizes.index_n_heads,
        "index_head_dim": sizes.index_head_dim,
        "index_topk": sizes.index_topk,
        "candidate_topk_blocks": sizes.candidate_topk_blocks,
        "candidate_block_size": sizes.candidate_block_size,
        "hc_mult": sizes.hc_mult,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        **_engram(sizes, tokenizer, roles["engram_layer_ids"]),
        "num_nextn_predict_layers": sizes.num_nextn_predict_layers,
        "dspark_block_size": sizes.dspark_block_size,
        "dspark_noise_token_id": tiny_tokenizer.token_id(tokenizer, tiny_tokenizer.SYSTEM),
        "dspark_markov_rank": sizes.dspark_markov_rank,
        "dspark_n_routed_experts": sizes.dspark_n_routed_experts,
        "dspark_num_experts_per_tok": sizes.dspark_num_experts_per_tok,
    }


def _layer_roles(sizes: TinySizes) -> tuple[dict[str, list[int]], int]:
    """Return the lists that give layers their roles, laid out where not given, and the candidate source."""
    layers = sizes.num_hidden_layers
    if layers < _MIN_LAYERS:
        raise ConfigError(
            f"num_hidden_layers {layers} leaves no room for every role", hint=f"use {_MIN_LAYERS} or more"
        )
    first_ratio_1 = layers - (layers - _NUM_WINDOW_LAYERS) // 2
    second_source = (_NUM_WINDOW_LAYERS + first_ratio_1) // 2
    re_index = (first_ratio_1 + layers) // 2
    ratios = [0] * _NUM_WINDOW_LAYERS + [2] * (first_ratio_1 - _NUM_WINDOW_LAYERS)
    ratios += [1] * (layers - first_ratio_1)
    sources = {_NUM_WINDOW_LAYERS, second_source, first_ratio_1}
    drafts = [0] * sizes.num_nextn_predict_layers
    lists = {
        "compress_ratios": [*(sizes.compress_ratios or ratios), *drafts],
        "kv_source_layer_ids": list(sizes.kv_source_layer_ids or sorted(sources)),
        "index_source_layer_ids": list(sizes.index_source_layer_ids or sorted(sources | {re_index})),
        "engram_layer_ids": list(sizes.engram_layer_ids or (1, second_source)),
        "dspark_target_layer_ids": list(sizes.dspark_target_layer_ids or range(layers - 3, layers)),
    }
    candidate_source = sizes.candidate_source_layer_id
    return lists, first_ratio_1 if candidate_source is None else candidate_source


def _engram(sizes: TinySizes, tokenizer: Tokenizer, layer_ids: Sequence[int]) -> dict[str, object]:
    """Return the Engram keys: table rows follow from sizes, the compressed vocabulary from the tokenizer."""
    pad_token_id = tiny_tokenizer.token_id(tokenizer, tiny_tokenizer.PAD)
    compressed_vocab_size = int(compressed_token_map(tokenizer).max()) + 1
    spec = EngramSpec(
        layer_ids=tuple(layer_ids),
        num_embeddings=(0,) * len(layer_ids),
        max_ngram_size=sizes.engram_max_ngram_size,
        vocab_size=sizes.engram_vocab_size,
        n_heads=sizes.engram_n_heads,
        head_dim=sizes.engram_head_dim,
        pad_token_id=pad_token_id,
        compressed_vocab_size=compressed_vocab_size,
    )
    return {
        "engram_num_embeddings": list(table_rows(spec)),
        "engram_max_ngram_size": sizes.engram_max_ngram_size,
        "engram_vocab_size": sizes.engram_vocab_size,
        "engram_n_heads": sizes.engram_n_heads,
        "engram_head_dim": sizes.engram_head_dim,
        "engram_pad_token_id": pad_token_id,
        "engram_compressed_vocab_size": compressed_vocab_size,
    }


def _vision_config(sizes: TinySizes) -> dict[str, object]:
    return {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": sizes.vision_num_hidden_layers,
        "hidden_size": sizes.vision_hidden_size,
        "num_attention_heads": sizes.vision_num_attention_heads,
        "intermediate_size": sizes.vision_intermediate_size,
        "patch_size": sizes.vision_patch_size,
        "rope_theta": 10000.0,
        "downsample_ratio": sizes.vision_downsample_ratio,
        "max_image_tokens": sizes.vision_max_image_tokens,
        "min_pixels": sizes.vision_min_pixels,
        "max_wh_ratio": None,
    }


__all__ = ["TinySizes", "published_config"]
