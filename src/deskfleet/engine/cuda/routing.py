"""Router scores to experts (spec §6.1). Owns the choice; scores are linear.bf16_kernel's, lists experts.py's."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def choose_kernel(
    logits,  # float32 [T, E]
    bias,  # float32 [E]
    chosen,  # int32 [T, NUM_CHOSEN] out, in descending biased score
    weights,  # float32 [T, NUM_CHOSEN] out
    num_items,  # int32 [1]: set to zero for experts.list_items_kernel
    scaling,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
):
    """One program a row (oracle: reference.route after its logits). Ties go to the lower expert."""
    row = tl.program_id(0)
    if row == 0:
        tl.store(num_items, 0)
    expert = tl.arange(0, BLOCK)
    inside = expert < E
    z = tl.load(logits + row * E + expert, mask=inside, other=0.0)
    # log1p without losing small arguments: the rounding of 1 + e is undone by the quotient.
    e = tl.exp(tl.minimum(z, 20.0))
    u = 1.0 + e
    soft = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    score = tl.sqrt(tl.where(z > 20.0, z, soft))
    biased = tl.where(inside, score + tl.load(bias + expert, mask=inside, other=0.0), float("-inf"))
    number = tl.arange(0, 8)
    values = tl.zeros((8,), tl.float32)
    experts = tl.zeros((8,), tl.int32)
    for place in tl.static_range(NUM_CHOSEN):
        best = tl.argmax(biased, 0, tie_break_left=True)
        raw = tl.sum(tl.where(expert == best, score, 0.0), 0)
        values = tl.where(number == place, raw, values)
        experts = tl.where(number == place, best, experts)
        biased = tl.where(expert == best, float("-inf"), biased)
    kept = number < NUM_CHOSEN
    tl.store(chosen + row * NUM_CHOSEN + number, experts, mask=kept)
    values = values / (tl.sum(values, 0) + 1e-20) * scaling
    tl.store(weights + row * NUM_CHOSEN + number, values, mask=kept)


def choose(
    logits: Tensor, bias: Tensor, chosen: Tensor, weights: Tensor, num_items: Tensor, *, scaling: float
) -> None:
    """logits float32 [T, E] -> chosen int32 [T, K] and weights float32 [T, K], K at most 8; clears `num_items`."""
    num_rows, num_experts = logits.shape
    choose_kernel[(num_rows,)](
        logits,
        bias,
        chosen,
        weights,
        num_items,
        scaling,
        E=num_experts,
        BLOCK=triton.next_power_of_2(num_experts),
        NUM_CHOSEN=chosen.shape[1],
        num_warps=4,
    )


__all__ = ["choose", "choose_kernel"]
