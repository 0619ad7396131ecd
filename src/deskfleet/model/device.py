"""Where a rank computes, and in steps of how many rows. Pure numbers and names, for engine and planner alike."""

from __future__ import annotations

from typing import Literal

Device = Literal["cpu", "cuda"]
"""What may be asked for."""

MOST_DECODE_ROWS = 64
"""Up to so many rows a step that decodes has exactly as many as there are requests."""

_PREFILL_SIZES = (16, 64, 256, 512, 1024, 2048)
"""Rows of the steps that prompts run in. Few, because each is compiled and captured for itself."""

_SCORE_BYTES = 2  # of one row's score of one entry
_MOST_SCORES_BYTES = 2 << 30  # of one step


def decode_sizes(max_num_seqs: int) -> range:
    """Rows of steps that decode; more requests go through steps of prompts."""
    return range(1, min(max_num_seqs, MOST_DECODE_ROWS) + 1)


def prefill_sizes(max_step_tokens: int, max_model_len: int) -> tuple[int, ...]:
    """Rows of steps of prompts, ascending: up to the first that takes a whole step, or as many as may keep a score of
    every entry. A step that is larger is cut."""
    most = max(_MOST_SCORES_BYTES // (_SCORE_BYTES * max_model_len), _PREFILL_SIZES[0])
    smaller = [n for n in _PREFILL_SIZES if n <= most]
    needed = [n for n in smaller if n < max_step_tokens]
    return tuple(smaller[: len(needed) + 1])


__all__ = ["MOST_DECODE_ROWS", "Device", "decode_sizes", "prefill_sizes"]
