"""What engines keep beside a checkpoint's own tensors: second copies in another dtype, and hidden states for drafting.

Owns their sizes from shapes. Which engine keeps which copy is the engine's rule.
"""

from __future__ import annotations

from deskfleet.planner.checks import at_least


def wo_a_bytes(
    num_layers: int, groups_per_rank: int, o_lora_rank: int, group_width: int, *, weight_bytes: int
) -> int:
    """Bytes of the grouped output projection on one rank, without scales: layers * groups * rank * width * bytes.

    `group_width` is heads of a group times head size. Published (M-85): an FP8 twin of +688 MiB is 43 layers, draft
    stages included, of four groups, as three ranks hold them after padding 8 groups to 12. The 722 MB that four ranks
    free are the same layers as bf16 with two groups. Raises ConfigError.
    """
    at_least(0, num_layers=num_layers, groups_per_rank=groups_per_rank, weight_bytes=weight_bytes)
    return num_layers * groups_per_rank * o_lora_rank * group_width * weight_bytes


def head_copy_bytes(vocab_rows: int, hidden_size: int, *, weight_bytes: int = 1) -> int:
    """Bytes of a second head for drafting, `vocab_rows` of it on the rank.

    Published (M-86): +210 MiB, which is an FP8 copy of a third of 129,280 rows of 5,120. Raises ConfigError.
    """
    at_least(0, vocab_rows=vocab_rows, hidden_size=hidden_size, weight_bytes=weight_bytes)
    return vocab_rows * hidden_size * weight_bytes


def draft_hidden_bytes(max_num_batched_tokens: int, hidden_size: int, num_streams: int) -> int:
    """Bytes of the bf16 hidden states of one step that drafting reads, of every hyper-connection stream.

    Published (M-87): 256 MiB a rank, which is 8,192 tokens of 4,096 in four streams; that reading is ours. Raises
    ConfigError.
    """
    at_least(
        0, max_num_batched_tokens=max_num_batched_tokens, hidden_size=hidden_size, num_streams=num_streams
    )
    return max_num_batched_tokens * hidden_size * num_streams * 2


__all__ = ["draft_hidden_bytes", "head_copy_bytes", "wo_a_bytes"]
