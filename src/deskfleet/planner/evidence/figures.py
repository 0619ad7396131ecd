"""All rows in order. Owns nothing but the order."""

from __future__ import annotations

from functools import cache

from deskfleet.planner.evidence import checkpoint, pools, prompts, steps
from deskfleet.planner.evidence.table import Row


@cache
def rows() -> tuple[Row, ...]:
    """Every figure that the planner computes, in the order of the published rows. Some tenths of a second."""
    return (
        *checkpoint.checkpoint_rows(),
        *checkpoint.engram_rows(),
        *checkpoint.weight_rows(),
        *checkpoint.padding_rows(),
        *pools.sglang_pool_rows(),
        *pools.vllm_pool_rows(),
        *pools.admission_rows(),
        *steps.engram_step_rows(),
        *steps.collective_rows(),
        *prompts.indexer_rows(),
        *pools.outside_rows(),
        *steps.copy_rows(),
        *prompts.time_rows(),
    )


__all__ = ["rows"]
