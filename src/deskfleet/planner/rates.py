"""How fast a layout can be at best: the floor of a decode step, and the ceilings of decoding and prefill.

Owns the step from bytes and operations to seconds and tok/s. Knows no engine. Launches are left out, which in practice
cost as much as the smallest steps. A batch may still beat its figure where its rows agree on experts more than
`routing` says: with even routing, 16 requests were seen above it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from deskfleet.errors import ConfigError
from deskfleet.planner.checks import above_zero, at_least
from deskfleet.planner.cluster import Link
from deskfleet.planner.collectives import (
    all_reduce_bytes,
    all_reduce_s,
    collectives_per_step,
    fastest_all_reduce,
)
from deskfleet.planner.inventory import Cut, Inventory
from deskfleet.planner.reads import EVEN_ROUTING, STOCK_CUTS, draft_reads, step_reads, weight_flops

ACCEPTED_PER_STEP: Mapping[str, float] = MappingProxyType({"prose": 2.0, "mixed": 3.5, "code": 4.5})
"""Tokens that a verified step of five drafts commits, the sampled one included: round figures of published runs, which
range from 1.7 to 5.0. Prompts that count or repeat accept nearly everything and say nothing about others."""


def prefill_ceiling(
    inventory: Inventory,
    tp_size: int,
    chunk_tokens: int,
    *,
    peak_flops: float,
    bytes_per_s: float,
    layer_share: float = 1.0,
    cuts: frozenset[Cut] = STOCK_CUTS,
    wo_a_is_bf16: bool = True,
) -> float:
    """Prompt tokens per second, aggregate: a chunk over the longer of its operations and its weight reads.

    `layer_share` is the part of the layers that prompt tokens run through, 0.5 when the decoder half is skipped. A
    ceiling: attention, indexer and collectives are left out, and reads overlap perfectly. Raises ConfigError.
    """
    above_zero(peak_flops=peak_flops, bytes_per_s=bytes_per_s, layer_share=layer_share)
    at_least(1, chunk_tokens=chunk_tokens)
    reads = step_reads(inventory, tp_size, chunk_tokens, cuts=cuts, wo_a_is_bf16=wo_a_is_bf16)
    compute_s = chunk_tokens * weight_flops(inventory) / (tp_size * peak_flops)
    return chunk_tokens / (layer_share * max(compute_s, reads.total_bytes / bytes_per_s))


def step_collectives_s(inventory: Inventory, tp_size: int, num_rows: int, link: Link) -> float:
    """Seconds of a step's all-reduces, two a layer, each in the way that takes least. Raises ConfigError."""
    message_bytes = all_reduce_bytes(num_rows, inventory.hidden_size)
    way = fastest_all_reduce(message_bytes, tp_size, link)
    return collectives_per_step(inventory.num_layers) * all_reduce_s(message_bytes, tp_size, link, way)


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """The floor of a decode step and what it allows. Rates in tok/s, of all requests together and of one."""

    num_requests: int
    num_rows: int
    read_bytes: int
    read_s: float
    draft_s: float
    collectives_s: float
    aggregate_tokens_per_s: float

    @property
    def step_s(self) -> float:
        """Reads, drafting and collectives one after another."""
        return self.read_s + self.draft_s + self.collectives_s

    @property
    def stream_tokens_per_s(self) -> float:
        """What one request gets."""
        return self.aggregate_tokens_per_s / self.num_requests


def decode_ceiling(
    inventory: Inventory,
    tp_size: int,
    num_requests: int,
    *,
    bytes_per_s: float,
    link: Link,
    num_drafts: int = 0,
    accepted_per_step: float = 1.0,
    row_cache_bytes: int = 0,
    request_cache_bytes: int = 0,
    routing: float = EVEN_ROUTING,
    cuts: frozenset[Cut] = STOCK_CUTS,
    wo_a_is_bf16: bool = True,
) -> DecodePoint:
    """The best a decode step of `num_requests` requests can do: requests * accepted / step.

    The step is what a rank reads over its bandwidth, the draft's reads likewise, and two all-reduces a layer in the
    fastest way. `accepted_per_step` counts the sampled token, so it lies between 1 and `num_drafts` + 1.
    `row_cache_bytes` are read for every row, `request_cache_bytes` for every request. `routing` is the backbone's; only
    with `TEXT_ROUTING` is the rate one that published runs stay below. Raises ConfigError.
    """
    at_least(1, num_requests=num_requests)
    at_least(0, num_drafts=num_drafts)
    above_zero(bytes_per_s=bytes_per_s)
    if not 1 <= accepted_per_step <= num_drafts + 1:
        raise ConfigError(
            f"{accepted_per_step} tokens accepted of a step with {num_drafts} drafts",
            hint=f"give a number from 1 to {num_drafts + 1}; it includes the sampled token",
        )
    rows = num_requests * (num_drafts + 1)
    cache_bytes = rows * row_cache_bytes + num_requests * request_cache_bytes
    reads = step_reads(
        inventory,
        tp_size,
        rows,
        cache_bytes=cache_bytes,
        routing=routing,
        cuts=cuts,
        wo_a_is_bf16=wo_a_is_bf16,
    )
    draft_bytes = 0
    if num_drafts:
        draft_bytes = draft_reads(
            inventory, tp_size, num_requests, num_drafts=num_drafts, cuts=cuts, wo_a_is_bf16=wo_a_is_bf16
        ).total_bytes
    message_bytes = all_reduce_bytes(rows, inventory.hidden_size)
    way = fastest_all_reduce(message_bytes, tp_size, link)
    collectives_s = collectives_per_step(inventory.num_layers) * all_reduce_s(
        message_bytes, tp_size, link, way
    )
    read_s, draft_s = reads.total_bytes / bytes_per_s, draft_bytes / bytes_per_s
    rate = num_requests * accepted_per_step / (read_s + draft_s + collectives_s)
    return DecodePoint(num_requests, rows, reads.total_bytes, read_s, draft_s, collectives_s, rate)


def prompt_s(num_tokens: int, tokens_per_s: float) -> float:
    """Seconds that a prompt takes at a prefill rate. Published (M-97): 899,994 tokens at 874.8 tok/s take 1,029 s."""
    above_zero(tokens_per_s=tokens_per_s)
    return num_tokens / tokens_per_s


def longest_prompt(timeout_s: float, tokens_per_s: float) -> int:
    """Tokens of the longest prompt that ends within a client's timeout. Published (M-97): about 787,000 in 900 s."""
    above_zero(timeout_s=timeout_s, tokens_per_s=tokens_per_s)
    return int(timeout_s * tokens_per_s)


def impossible_rungs(ladder: Sequence[tuple[int, float]]) -> tuple[int, ...]:
    """Prompt lengths of a ladder of (tokens, seconds) that took less time than a shorter prompt did.

    A cache answered part of them, so none of the ladder's rates is one of prefill. Published (M-93): 562,940 tokens in
    314 s after 402,325 in 362 s.
    """
    rungs = sorted(ladder)
    return tuple(
        tokens
        for i, (tokens, seconds) in enumerate(rungs)
        if any(seconds < before for _, before in rungs[:i])
    )


__all__ = [
    "ACCEPTED_PER_STEP",
    "DecodePoint",
    "decode_ceiling",
    "impossible_rungs",
    "longest_prompt",
    "prefill_ceiling",
    "prompt_s",
    "step_collectives_s",
]
