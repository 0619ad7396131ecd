"""The sizes of Pocket, as a configuration in the published layout.

Owns the numbers and what they add up to on disk. The layout itself, and the token ids that follow from the
tokenizer, are those of tiny checkpoints (`deskfleet.testing.tiny_config`). Knows nothing of weights.

`python -m pocket.sizes` prints where the bytes are.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deskfleet.model.config import ModelConfig
from deskfleet.model.names import expected_tensors
from deskfleet.testing.tiny_config import TinySizes, published_config

MAX_CHECKPOINT_BYTES = 40_000_000
"""What all tensors together may take in the published formats."""

POCKET = TinySizes(
    vocab_size=4096,
    hidden_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=12,
    num_attention_heads=8,
    head_dim=64,
    qk_rope_head_dim=16,
    q_lora_rank=128,
    o_lora_rank=64,
    o_groups=4,
    max_position_embeddings=8192,
    n_routed_experts=16,
    num_experts_per_tok=2,
    sliding_window=64,
    compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1),
    kv_source_layer_ids=(2, 3, 4, 6),
    index_source_layer_ids=(2, 3, 4, 6, 8, 10),
    index_n_heads=4,
    index_head_dim=32,
    index_topk=64,
    candidate_source_layer_id=6,
    candidate_topk_blocks=32,
    candidate_block_size=8,
    hc_mult=4,
    engram_layer_ids=(1, 4),
    engram_max_ngram_size=4,
    engram_vocab_size=4001,
    engram_n_heads=4,
    engram_head_dim=64,
    num_nextn_predict_layers=3,
    dspark_block_size=5,
    dspark_target_layer_ids=(9, 10, 11),
    dspark_markov_rank=64,
    dspark_n_routed_experts=8,
    dspark_num_experts_per_tok=2,
    vision_num_hidden_layers=3,
    vision_hidden_size=96,
    vision_num_attention_heads=4,
    vision_intermediate_size=192,
    vision_patch_size=14,
    vision_downsample_ratio=3,
    vision_max_image_tokens=64,
    vision_min_pixels=84 * 84,
)
"""Pocket: every block type of the published schedule, selection at work from 64 (ratio 1) and 128 (ratio 2) tokens."""

SMOKE = TinySizes(
    vocab_size=4096,
    hidden_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=8,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=16,
    q_lora_rank=32,
    o_lora_rank=32,
    o_groups=2,
    max_position_embeddings=2048,
    n_routed_experts=4,
    num_experts_per_tok=2,
    sliding_window=32,
    index_n_heads=2,
    index_topk=16,
    candidate_topk_blocks=4,
    engram_vocab_size=499,
    engram_n_heads=2,
    engram_head_dim=32,
    dspark_markov_rank=32,
    dspark_n_routed_experts=4,
    vision_hidden_size=32,
    vision_num_attention_heads=2,
    vision_intermediate_size=64,
)
"""The same roles at a size that learns something in a minute of one CPU core."""


def pocket_config(tokenizer: Tokenizer | str | Path, sizes: TinySizes = POCKET) -> dict[str, Any]:
    """Return config.json of `sizes`, in the published (nested) layout; the tokenizer may be a tokenizer.json."""
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.from_file(str(tokenizer))
    return dict(published_config(sizes, tokenizer))


def checkpoint_bytes(config: ModelConfig) -> dict[str, int]:
    """Return the bytes of each class of tensors in the published formats, and their `total`."""
    by_class: Counter[str] = Counter()
    for spec in expected_tensors(config).values():
        by_class[spec.tensor_class.value] += spec.nbytes
    return dict(by_class) | {"total": by_class.total()}


def main() -> None:
    """Print where the bytes are."""
    from pocket.tokenizer import DIRECTORY

    config = ModelConfig.from_dict(pocket_config(DIRECTORY / "tokenizer.json"))
    for name, count in checkpoint_bytes(config).items():
        print(f"{name:15} {count / 1e6:6.2f} MB")


if __name__ == "__main__":
    main()


__all__ = ["MAX_CHECKPOINT_BYTES", "POCKET", "SMOKE", "checkpoint_bytes", "pocket_config"]
