"""Where a rank computes, and in steps of how many rows. Pure numbers and names, for engine and planner alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Device = Literal["cpu", "cuda"]
"""What may be asked for."""

DEFAULT_MAX_NUM_BATCHED_TOKENS: Mapping[Device, int] = {"cpu": 512, "cuda": 2048}
"""Tokens of a step where nobody says. Prompts fill a GPU's tensor cores from FILLED_ROWS on, and larger steps read more
of them a second (decision 0021), but streams wait for a step: one of so many rows leaves them three times the
scheduler's decode floor there."""

MOST_DECODE_ROWS = 64
"""Up to so many rows a step that decodes has exactly as many as there are, drafts included."""

MOST_DRAFTED = 32
"""Requests that are drafted for at a time; more take turns."""

_PREFILL_SIZES = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Rows of the steps that prompts run in. Few, because each is compiled and captured for itself."""

FILLED_ROWS = 1024
"""From here on a prompt's rows fill the tensor cores, and a step of them keeps scores of a part of them at a time."""

REPLAYED_ROWS = 256
"""Rows that go through the decoder at a time where it is replayed."""

_EXACT_BYTES = 64 << 20  # of a layer's routed experts

_SCORE_BYTES = 2  # of one row's score of one entry
_MOST_SCORES_BYTES = 2 << 30  # of one step


def exact_products(num_experts: int, width: int, expert_width: int) -> bool:
    """Whether steps that decode sum products of FP8 codes in float32, as prompts' large steps always do, rather than by
    the tensor cores' FP8 instructions, which keep some 13 bits: where a layer's experts are so small that a product
    waits for its launch and not for memory, so that nothing is lost by it."""
    return num_experts * 3 * width * expert_width // 2 <= _EXACT_BYTES


def default_max_num_batched_tokens(device: Device, *, max_num_seqs: int, max_model_len: int) -> int:
    """Tokens of a step where nobody says: the device's default, or all that requests can have at once if fewer."""
    return min(DEFAULT_MAX_NUM_BATCHED_TOKENS[device], max_num_seqs * max_model_len)


def decode_sizes(max_num_seqs: int, num_drafts: int = 0) -> range:
    """Rows of steps that decode, each request's with up to `num_drafts` drafts; more go through steps of prompts."""
    return range(1, min(max_num_seqs * (1 + num_drafts), MOST_DECODE_ROWS) + 1)


def draft_sizes(max_num_seqs: int) -> range:
    """Requests that are drafted for at a time."""
    return range(1, min(max_num_seqs, MOST_DRAFTED) + 1)


def passage_blocks(max_step_tokens: int, max_num_seqs: int, block_size: int, draft_length: int = 0) -> int:
    """Window blocks for rows that only their own step sees, or only the block of `draft_length` drafts they are of."""
    drafted = draft_sizes(max_num_seqs)[-1] * draft_length
    return max(-(-max_step_tokens // block_size) + max_num_seqs, -(-drafted // block_size))


def prefill_sizes(max_step_tokens: int, max_model_len: int) -> tuple[int, ...]:
    """Rows of steps of prompts, ascending: up to the first that takes a whole step. Those that are not filled keep a
    score of every entry, so that they may be fewer. A step that is larger is cut."""
    most = max(_MOST_SCORES_BYTES // (_SCORE_BYTES * max_model_len), _PREFILL_SIZES[0])
    sizes = [n for n in _PREFILL_SIZES if n <= most or n >= FILLED_ROWS]
    needed = [n for n in sizes if n < max_step_tokens]
    return tuple(sizes[: len(needed) + 1])


def summed_rows(
    max_num_seqs: int, largest_step: int, num_drafts: int = 0, *, decoder_replay: bool = False
) -> int:
    """Rows of the largest step of any kind: as many are added up over ranks at a time."""
    return max(
        largest_step, draft_sizes(max_num_seqs)[-1] * num_drafts, REPLAYED_ROWS if decoder_replay else 0
    )


__all__ = [
    "DEFAULT_MAX_NUM_BATCHED_TOKENS",
    "FILLED_ROWS",
    "MOST_DECODE_ROWS",
    "MOST_DRAFTED",
    "REPLAYED_ROWS",
    "Device",
    "decode_sizes",
    "default_max_num_batched_tokens",
    "draft_sizes",
    "exact_products",
    "passage_blocks",
    "prefill_sizes",
    "summed_rows",
]
