"""Choices of experts of a few rows by the kernel of routing.cu. Owns how rows become blocks. routing.py says what it
does."""

from __future__ import annotations

from torch import Tensor

from deskfleet.engine.cuda.native.where import kernel_for

_ROWS_ALONE = 2
"""Rows that one block takes: it is done with another row sooner than the last of several blocks could list theirs."""


def choose(
    logits: Tensor,
    bias: Tensor,
    chosen: Tensor,
    weights: Tensor,
    work: tuple[Tensor, Tensor, Tensor],
    counter: Tensor,
    *,
    num_held: int,
    scaling: float,
    first_expert: int,
) -> None:
    """As routing.choose. `work`: items int32 [max, 2], pairs int32 [max, members], how many int32 [1]; `counter` int32
    [1] is zero before and after."""
    num_rows, num_experts = logits.shape
    items, pairs, num_items = work
    num_chosen = chosen.shape[1]
    rows = num_rows if num_rows <= _ROWS_ALONE else 1
    warps = -(-num_experts // 32)
    candidates = -(-warps * min(num_chosen, 32) // 4) * 4
    words = -(-num_rows // 32)
    defines: dict[str, int | float] = {
        "E": num_experts,
        "NUM_CHOSEN": num_chosen,
        "NUM_HELD": num_held,
        "MEMBERS": pairs.shape[1],
        "BLOCK_ROWS": rows,
        "ALONE": num_rows == rows,
        "SET_WORDS": words,
    }
    kernel_for(logits, "routing.cu", "choose", defines).launch(
        -(-num_rows // rows),
        32 * warps,
        4 * (32 * warps + 3 * candidates + num_rows * num_chosen + 64 + num_held * (words + 1) + 2),
        [
            logits, bias, chosen, weights, items, pairs, num_items, counter, float(scaling), first_expert, num_rows,
        ],
        dependent=True,
    )  # fmt: skip


__all__ = ["choose"]
