"""Scores and choices of entries by the kernels of indexer.cu; choices of many rows by that of picks.cu. indexer.py and
topk.py say what they do."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deskfleet.engine.cuda.native.where import kernel_for

_HEADS, _WIDTH = 32, 128  # of the query
_KEYS = 64  # of a block, at a time
_MOST_BLOCKS = 264
_MOST_ENTRIES = 8192  # that one block chooses among


@dataclass(frozen=True, slots=True)
class Allowed:
    """Candidate blocks of `unit` entries: uint8 [T, blocks], 0 for those that do not count, where a row has more than
    `top_blocks`."""

    blocks: Tensor
    unit: int
    top_blocks: int


def scores_taken(query: Tensor, weights: Tensor) -> bool:
    """Whether `score` is written for these heads."""
    return weights.shape[1] == _HEADS and query.shape[1] == _HEADS * _WIDTH


def score(
    query: Tensor, weights: Tensor, pages: Tensor, where: tuple[Tensor, Tensor, Tensor], scores: Tensor,
    among: Allowed | None, *, num_picks: int, weight_scale: float, ratio: int, block_size: int,
) -> None:  # fmt: skip
    """As indexer.score; of what is read, only the query may come from the kernel before this one."""
    slots, positions, table = where
    num_rows, max_entries = scores.shape
    defines = {
        "SCORE": 1,
        "RATIO": ratio,
        "PER_BLOCK": block_size // ratio,
        "BYTES": pages.shape[1],
        "RESTRICTS": among is not None,
        "UNIT": 1 if among is None else among.unit,
        "TOP_BLOCKS": 0 if among is None else among.top_blocks,
    }
    kernel_for(query, "indexer.cu", "score", defines).launch(
        (min(-(-max_entries // _KEYS), max(_MOST_BLOCKS // num_rows, 1)), num_rows),
        128,
        4 * 4 * 32 * 16,
        [
            query, weights, weights.stride(0), pages, slots, positions, table, table.stride(0), scores,
            None if among is None else among.blocks, max_entries, 0 if among is None else among.blocks.shape[1],
            num_picks, float(weight_scale),
        ],
        dependent=True,
    )  # fmt: skip


def selection_taken(scores: Tensor, *, per_block: int) -> bool:
    """Whether `select` is written for so many scores, which it reads up to eight at a time."""
    return scores.shape[1] <= _MOST_ENTRIES and scores.shape[1] % 8 == 0 and per_block % 8 == 0


def select(
    scores: Tensor, where: tuple[Tensor, Tensor, Tensor], picks: Tensor, records: Tensor | None,
    *, ratio: int, block_size: int, unit: int,
) -> None:  # fmt: skip
    """As topk.select; of what is read, only the scores may come from the kernel before this one."""
    slots, positions, table = where
    num_rows, max_entries = scores.shape
    each = 2 if max_entries <= 2048 else 4 if max_entries <= 4096 else 8
    threads = -(-max_entries // (32 * each)) * 32
    defines = {
        "SELECT": 1,
        "RATIO": ratio,
        "PER_BLOCK": block_size // ratio,
        "NUM_PICKS": picks.shape[1],
        "UNIT": unit,
        "PER_THREAD": each,
        "THREADS": threads,
        "LOCATES": records is not None,
    }
    kernel_for(scores, "indexer.cu", "pick", defines).launch(
        num_rows,
        threads,
        4 * (2 * 4 * 257 + 32),
        [
            scores, slots, positions, table, table.stride(0), picks, picks if records is None else records, max_entries
        ],
        dependent=True,
    )  # fmt: skip


def rows_taken(scores: Tensor) -> bool:
    """Whether `select_rows` is written for these scores, which it reads eight at a time."""
    return scores.shape[1] % 8 == 0


def select_rows(scores: Tensor, positions: Tensor, picks: Tensor, *, ratio: int, unit: int) -> None:
    """As topk.select, of many rows, and without where the entries lie."""
    num_rows, max_entries = scores.shape
    defines = {"RATIO": ratio, "UNIT": unit, "NUM_PICKS": picks.shape[1]}
    kernel_for(scores, "picks.cu", "pick_rows", defines).launch(
        num_rows, 256, 4 * (2048 + 32 + 2 * 8 + 4), [scores, positions, picks, max_entries]
    )


__all__ = ["Allowed", "rows_taken", "score", "scores_taken", "select", "select_rows", "selection_taken"]
