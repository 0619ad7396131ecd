"""What a forward must read and compute on one rank, in bytes and operations, from shapes alone.

Owns the floors that no kernel can beat. Knows no engine and no machine: what a rank holds whole is given as cuts.
Padding is left out, because a good kernel does not read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deskfleet.errors import ConfigError
from deskfleet.model.names import TensorClass
from deskfleet.planner.checks import above_zero, at_least
from deskfleet.planner.inventory import Cut, Inventory, KvShape, WeightGroup

STOCK_CUTS: frozenset[Cut] = frozenset({"group", "expert", "vocab", "shared_expert"})
"""What the large engines divide; the rest is read whole by every rank."""

LEAN_CUTS: frozenset[Cut] = STOCK_CUTS | {"engram_projection"}
"""Engram's projection divided as well."""

EVEN_ROUTING = 1.0
"""Every row chooses its experts evenly and apart from the others: the most that can be read, and what tables show."""

TEXT_ROUTING = 0.6
"""The lower end of what published runs with 16 requests imply, 0.6 to 0.7 of even routing: rows of one text agree."""


def distinct_experts(
    num_experts: int, num_chosen: int, num_rows: int, *, routing: float = EVEN_ROUTING
) -> float:
    """Experts that `num_rows` rows choose together: `routing` * E (1 - (1 - k / E)^T), but not less than k.

    With even routing an expectation that real text stays below. Raises ConfigError.
    """
    at_least(0, num_rows=num_rows, num_chosen=num_chosen)
    above_zero(routing=routing)
    if num_experts < max(1, num_chosen):
        raise ConfigError(f"{num_chosen} experts chosen of {num_experts}")
    even = num_experts * (1 - (1 - num_chosen / num_experts) ** num_rows)
    return max(routing * even, min(num_chosen, even))


@dataclass(frozen=True, slots=True)
class StepReads:
    """Bytes that one rank reads once for a step: routed experts, its part of what is divided, what is whole, cache."""

    expert_bytes: int
    divided_bytes: int
    whole_bytes: int
    cache_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return self.expert_bytes + self.divided_bytes + self.whole_bytes + self.cache_bytes


def step_reads(
    inventory: Inventory,
    tp_size: int,
    num_rows: int,
    *,
    cache_bytes: int = 0,
    routing: float = EVEN_ROUTING,
    cuts: frozenset[Cut] = STOCK_CUTS,
    wo_a_is_bf16: bool = True,
) -> StepReads:
    """Bytes that one of `tp_size` ranks reads for a decode step of `num_rows` rows, drafting apart.

    Exact from shapes but for the experts, which are the expectation of `distinct_experts`; with expert parallelism that
    is the mean of the ranks. `cache_bytes` are added as given (`attended_bytes`). What is looked up row by row, the
    embedding and Engram, is some kilobytes and left out. Raises ConfigError.
    """
    at_least(1, tp_size=tp_size, num_rows=num_rows)
    at_least(0, cache_bytes=cache_bytes)
    num_experts = inventory.num_experts
    share = (
        distinct_experts(num_experts, inventory.num_chosen_experts, num_rows, routing=routing) / num_experts
    )
    return _reads(_backbone(inventory), tp_size, share, cache_bytes, cuts, wo_a_is_bf16)


def draft_reads(
    inventory: Inventory,
    tp_size: int,
    num_requests: int,
    *,
    num_drafts: int | None = None,
    cache_bytes: int = 0,
    cuts: frozenset[Cut] = STOCK_CUTS,
    wo_a_is_bf16: bool = True,
) -> StepReads:
    """Bytes that one of `tp_size` ranks reads to draft for `num_requests` requests: draft stages, and the model's head.

    `num_drafts` rows a request, by default the checkpoint's block, all in one forward. Published for four ranks: 0.83
    GB for one request, 2.2 GB for 16. Raises ConfigError, also for a checkpoint without draft experts.
    """
    at_least(1, tp_size=tp_size, num_requests=num_requests)
    if not inventory.num_draft_stages or not inventory.num_draft_experts:
        raise ConfigError(f"{inventory.name} has no draft stages", hint="plan without speculation")
    rows = num_requests * (inventory.draft_block if num_drafts is None else num_drafts)
    experts = distinct_experts(inventory.num_draft_experts, inventory.num_chosen_draft_experts, rows)
    groups = [
        group
        for group in inventory.groups
        if (group.tensor_class is TensorClass.draft or group.is_head) and not _is_looked_up(group)
    ]
    return _reads(groups, tp_size, experts / inventory.num_draft_experts, cache_bytes, cuts, wo_a_is_bf16)


def _is_looked_up(group: WeightGroup) -> bool:
    """Whether a token reads one row of it only: embeddings, but no heads."""
    return group.cut == "vocab" and not group.is_head


def _backbone(inventory: Inventory) -> list[WeightGroup]:
    """What every token of a text runs through."""
    apart = (TensorClass.draft, TensorClass.vision)
    return [
        group for group in inventory.groups if group.tensor_class not in apart and not _is_looked_up(group)
    ]


def _reads(
    groups: Iterable[WeightGroup],
    tp_size: int,
    expert_share: float,
    cache_bytes: int,
    cuts: frozenset[Cut],
    wo_a_is_bf16: bool,
) -> StepReads:
    experts = divided = whole = 0.0
    for group in groups:
        num_bytes = 2 * group.num_weights if group.is_wo_a and wo_a_is_bf16 else group.num_bytes
        if group.cut == "expert":
            experts += num_bytes * expert_share / tp_size
        elif group.cut in cuts:
            divided += num_bytes / tp_size
        else:
            whole += num_bytes
    return StepReads(round(experts), round(divided), round(whole), cache_bytes)


def attended_bytes(
    kv: KvShape,
    num_rows: int,
    *,
    num_sparse_layers: int,
    top_k: int,
    entry_bytes: int,
    window_entry_bytes: int,
) -> int:
    """Bytes of cache that every rank reads to attend from `num_rows` rows with a full window and `top_k` entries.

    rows * (layers * window * bytes of a window row + sparse layers * top_k * bytes of an entry). Published: about 15 MB
    a row for records of 584 B. Raises ConfigError.
    """
    at_least(0, num_rows=num_rows, num_sparse_layers=num_sparse_layers, top_k=top_k)
    window_bytes = kv.num_window_layers * kv.window * window_entry_bytes
    return num_rows * (window_bytes + num_sparse_layers * top_k * entry_bytes)


def index_key_bytes(kv: KvShape, num_requests: int, context: int, *, key_bytes: int) -> int:
    """Bytes of index keys that every rank reads in a step for requests of `context` tokens, each source's keys once.

    A lower bound: layers that score a source's keys again for their own choice read some of them a second time. Raises
    ConfigError.
    """
    at_least(0, num_requests=num_requests, context=context, key_bytes=key_bytes)
    return round(num_requests * context * kv.index_keys_per_token * key_bytes)


def weight_flops(inventory: Inventory) -> float:
    """Operations of one token in the model's matrices: two for each weight it meets.

    Published as 31.9 GFLOP for V4.1-Flash, which comes out without routers and hyper-connections; with them it is 32.3.
    Attention over the chosen entries and the indexer come on top and are not counted.
    """
    weights = 0.0
    for group in _backbone(inventory):
        share = inventory.num_chosen_experts / inventory.num_experts if group.cut == "expert" else 1.0
        weights += group.num_weights * share
    return 2 * weights


__all__ = [
    "EVEN_ROUTING",
    "LEAN_CUTS",
    "STOCK_CUTS",
    "TEXT_ROUTING",
    "StepReads",
    "attended_bytes",
    "distinct_experts",
    "draft_reads",
    "index_key_bytes",
    "step_reads",
    "weight_flops",
]
