"""Router scores to experts and their work list (spec §6.1). Owns the choice; scores are linear.bf16_kernel's, what is
listed and how is experts.py's."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda import linear
from deskfleet.engine.cuda.experts import ExpertBuffers, list_few, list_items
from deskfleet.engine.cuda.native import choice

FEW_PAIRS = 32
"""As many pairs are compared each with every other in the kernel that chooses; of more, a second kernel makes lists."""


@triton.jit
def score_of(z):
    """float32 logits -> sqrt(softplus). log1p without losing small arguments: the rounding of 1 + e is undone by the
    quotient."""
    e = tl.exp(tl.minimum(z, 20.0))
    u = 1.0 + e
    soft = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.sqrt(tl.where(z > 20.0, z, soft))


@triton.jit(do_not_specialize=["first_expert"])
def choose_kernel(
    logits,  # float32 [T, E]
    bias,  # float32 [E]
    chosen,  # int32 [T, NUM_CHOSEN] out, in descending biased score
    weights,  # float32 [T, NUM_CHOSEN] out
    items,  # the work list of experts.py out; where not LISTS, num_items alone, zero
    item_pairs,
    num_items,
    counter,  # int32 [1]: zero before and after
    scaling,
    first_expert,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    LISTS: tl.constexpr,
    NUM_HELD: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BM: tl.constexpr,
    image_bias=None,  # float32 [E]: of rows within an image, where there may be any
    text=None,  # int32 [T]: 0 within an image
    HAS_IMAGES: tl.constexpr = False,
):
    """One program a row (oracle: reference.route after its logits). Ties go to the lower expert. The last one lists."""
    row = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    inside = expert < E
    score = score_of(tl.load(logits + row * E + expert, mask=inside, other=0.0))
    own_bias = tl.load(bias + expert, mask=inside, other=0.0)
    if HAS_IMAGES:
        in_image = tl.load(text + row) == 0
        own_bias = tl.where(in_image, tl.load(image_bias + expert, mask=inside, other=0.0), own_bias)
    biased = tl.where(inside, score + own_bias, float("-inf"))
    number = tl.arange(0, 8)
    experts = tl.zeros((8,), tl.int32)
    for place in tl.static_range(NUM_CHOSEN):
        best = tl.argmax(biased, 0, tie_break_left=True)
        experts = tl.where(number == place, best, experts)
        biased = tl.where(expert == best, float("-inf"), biased)
    kept = number < NUM_CHOSEN
    tl.store(chosen + row * NUM_CHOSEN + number, experts, mask=kept)
    # The same bits again: cheaper than taking each from the program's registers.
    values = score_of(tl.load(logits + row * E + experts, mask=kept, other=0.0))
    values = tl.where(kept, values, 0.0)
    values = values / (tl.sum(values, 0) + 1e-20) * scaling
    tl.store(weights + row * NUM_CHOSEN + number, values, mask=kept)
    if LISTS:
        last = tl.num_programs(0) - 1
        tl.debug_barrier()  # every thread's choice is out before one of them says so
        arrived = last
        if last > 0:
            arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived == last:
            tl.debug_barrier()
            num_pairs = tl.num_programs(0) * NUM_CHOSEN
            list_few(chosen, items, item_pairs, num_items, num_pairs, first_expert, NUM_HELD, BLOCK_PAIRS, BM)
            tl.store(counter, 0)
    elif row == 0:
        tl.store(num_items, 0)


def choose(
    logits: Tensor,
    bias: Tensor,
    chosen: Tensor,
    weights: Tensor,
    buffers: ExpertBuffers,
    *,
    scaling: float,
    first_expert: int = 0,
    of_images: tuple[Tensor, Tensor] | None = None,
) -> None:
    """logits float32 [T, E] -> chosen int32 [T, K] and weights float32 [T, K], K at
    most 8, and the work list of the experts from `first_expert` on that `buffers` is for.

    `of_images`: the bias float32 [E] of rows within images, and int32 [T] 0 for these."""
    num_rows, num_experts = logits.shape
    num_pairs, num_held, rows = buffers.num_pairs, buffers.shape.num_experts, buffers.tuning.rows
    work = (buffers.items, buffers.item_pairs, buffers.num_items)
    # Tensors of the host are for Triton's interpreter.
    if of_images is None and linear.few(logits, bit_ops=logits.device.type == "cpu"):
        choice.choose(
            logits, bias, chosen, weights, work, buffers.num_listed,
            num_held=num_held, scaling=scaling, first_expert=first_expert,
        )  # fmt: skip
        return
    lists = num_pairs <= FEW_PAIRS
    choose_kernel[(num_rows,)](
        logits,
        bias,
        chosen,
        weights,
        *work,
        buffers.num_listed,
        scaling,
        first_expert,
        E=num_experts,
        BLOCK=triton.next_power_of_2(num_experts),
        NUM_CHOSEN=chosen.shape[1],
        LISTS=lists,
        NUM_HELD=num_held,
        BLOCK_PAIRS=triton.next_power_of_2(num_pairs),
        BM=rows,
        **image_arguments(of_images),
        num_warps=4,
    )
    if not lists:
        list_items(chosen, buffers, first_expert=first_expert)


def image_arguments(of_images: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    """What `choose_kernel` takes of `choose`'s `of_images`."""
    if of_images is None:
        return {}
    return {"image_bias": of_images[0], "text": of_images[1], "HAS_IMAGES": True}


__all__ = ["FEW_PAIRS", "choose", "choose_kernel", "image_arguments", "score_of"]
