"""Which models the kernels take. Owns the sentence that refuses the others, before a weight is read."""

from __future__ import annotations

from deskfleet.errors import EngineError
from deskfleet.model.layout import ShardPlan

_MOST_CHOSEN = 8  # experts of a token


def check_model(plan: ShardPlan, *, with_drafts: bool = False) -> None:
    """Raise EngineError for sizes that no kernel has been written for."""
    c = plan.config
    for name, value, is_taken, wanted in (
        ("hc_mult", c.hc_mult, c.hc_mult == 4, "4"),
        ("hidden_size", c.hidden_size, c.hidden_size % 128 == 0, "multiples of 128"),
        ("q_lora_rank", c.q_lora_rank, c.q_lora_rank % 64 == 0, "multiples of 64"),
        ("engram_width", c.engram_width, c.engram_width % 64 == 0, "multiples of 64"),
        ("head_dim", c.head_dim, c.head_dim >= 64 and _is_power(c.head_dim), "powers of two from 64"),
        (
            "index_head_dim",
            c.index_head_dim,
            c.index_head_dim >= 32 and _is_power(c.index_head_dim),
            "powers of two from 32",
        ),
        ("qk_rope_head_dim", c.qk_rope_head_dim, _is_power(c.qk_rope_head_dim), "powers of two"),
        ("index_topk", c.index_topk, _is_power(c.index_topk), "powers of two"),
        (
            "candidate_topk_blocks",
            c.candidate_topk_blocks,
            _is_power(c.candidate_topk_blocks),
            "powers of two",
        ),
        (
            "num_experts_per_tok",
            c.num_experts_per_tok,
            c.num_experts_per_tok <= _MOST_CHOSEN,
            f"at most {_MOST_CHOSEN}",
        ),
        (
            "dspark_num_experts_per_tok",
            c.dspark_num_experts_per_tok,
            not with_drafts or c.dspark_num_experts_per_tok <= _MOST_CHOSEN,
            f"at most {_MOST_CHOSEN}",
        ),
    ):
        if not is_taken:
            raise EngineError(
                f"{name} is {value}, and the GPU's kernels take {wanted}", hint="serve it with --device cpu"
            )


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


__all__ = ["check_model"]
