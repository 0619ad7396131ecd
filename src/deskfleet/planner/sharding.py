"""What a rank holds of a model in an engine that cuts as the big engines do: weights, padding, Engram tables.

Owns how each kind of cut divides, and what padding costs. Which cuts an engine makes is its `CutRules`. Sizes are those
of the fullest rank; where ranks differ (Engram), of the rank asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from deskfleet.model.names import TensorClass
from deskfleet.planner.budget import BudgetLine
from deskfleet.planner.inventory import Cut, EngramTables, Inventory, WeightGroup
from deskfleet.planner.wishes import ServingLayout
from deskfleet_engram.ownership import ColumnOwnership, RowOwnership

HeadRule = Literal["exact", "power of two", "group"]
"""How many heads a rank gets when they do not divide: refused, the next power of two that attention kernels are made
for, or whole output groups."""

EngramSplit = Literal["strided", "runs", "runs or rows"]
"""How an engine shares a table out: strided columns; equal runs of columns; these where they divide, else equal ranges
of rows. Another rank's rows are fluent nonsense, so packs and budgets go by the engine's own rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRules:
    """How an engine cuts. What is not in `cuts` is held whole by every rank.

    `width_multiple` must divide an expert's width on a rank, else there is no kernel; `width_pad` is what it is padded
    to. `vocab_pad` likewise for token rows. Without `cuts_drafts` only the experts of draft stages are cut. With
    `holds_wo_a_as_bf16` attention's grouped output projection is held wider than it is stored.
    """

    cuts: frozenset[Cut]
    head_rule: HeadRule
    width_multiple: int
    width_pad: int
    vocab_pad: int
    pads_draft_experts: bool
    cuts_drafts: bool
    holds_wo_a_as_bf16: bool


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a group that a rank holds, as a ratio of integers: `held` of `whole`, of which `padding`."""

    held: int
    padding: int
    whole: int


def local_heads(inventory: Inventory, rules: CutRules, tp_size: int) -> int:
    """Heads of one rank, padding included."""
    heads, per_group = inventory.num_heads, inventory.num_heads // inventory.num_groups
    needed = math.ceil(heads / tp_size)
    if heads % tp_size == 0 and needed % per_group == 0:
        return needed
    if rules.head_rule == "power of two":
        return max(per_group, 1 << (needed - 1).bit_length())
    return math.ceil(needed / per_group) * per_group


def padded_vocab(inventory: Inventory, rules: CutRules, tp_size: int) -> int:
    """Token rows of all ranks together: a multiple of the engine's padding that ranks can share out."""
    multiple = math.lcm(rules.vocab_pad, tp_size)
    return math.ceil(inventory.vocab_size / multiple) * multiple


def padded_width(inventory: Inventory, rules: CutRules, layout: ServingLayout) -> int:
    """Width of an expert's slice on one rank, padding included."""
    return math.ceil(layout.expert_width(inventory.expert_width) / rules.width_pad) * rules.width_pad


def share_of(group: WeightGroup, inventory: Inventory, rules: CutRules, layout: ServingLayout) -> Share:
    """What one rank holds of `group`."""
    tp = layout.tp_size
    is_whole_draft = (
        group.tensor_class is TensorClass.draft and group.cut != "expert" and not rules.cuts_drafts
    )
    if group.cut not in rules.cuts or tp == 1 or is_whole_draft:
        return Share(1, 0, 1)
    if group.cut == "group":
        heads = local_heads(inventory, rules, tp)
        return Share(heads, max(0, heads - math.ceil(inventory.num_heads / tp)), inventory.num_heads)
    if group.cut == "vocab":
        rows = padded_vocab(inventory, rules, tp) // tp
        return Share(rows, rows - inventory.vocab_size // tp, inventory.vocab_size)
    if group.cut == "expert":
        return _expert_share(group, inventory, rules, layout)
    if group.cut == "shared_expert":
        width = math.ceil(math.ceil(inventory.expert_width / tp) / rules.width_pad) * rules.width_pad
        return Share(width, width - math.ceil(inventory.expert_width / tp), inventory.expert_width)
    return Share(1, 0, tp)


def _expert_share(group: WeightGroup, inventory: Inventory, rules: CutRules, layout: ServingLayout) -> Share:
    """Experts are shared out over ep_size ranks, and each of them cut over tp_size / ep_size by its width."""
    is_draft = group.tensor_class is TensorClass.draft
    count = inventory.num_draft_experts if is_draft else inventory.num_experts
    made = count
    if is_draft and rules.pads_draft_experts:
        made = math.ceil(count / layout.tp_size) * layout.tp_size
    local = math.ceil(made / layout.ep_size)
    width = padded_width(inventory, rules, layout)
    real = math.ceil(count / layout.ep_size) * layout.expert_width(inventory.expert_width)
    return Share(local * width, max(0, local * width - real), count * inventory.expert_width)


def weight_lines(inventory: Inventory, rules: CutRules, layout: ServingLayout) -> tuple[BudgetLine, ...]:
    """Lines of the weights of one rank: one for each group, one for all padding, one for what is held wider."""
    # Searching for a context or a chunk asks dozens of times, and neither matters here.
    return _weight_lines(inventory, rules, replace(layout, max_model_len=1, kv_tokens=1, chunk_tokens=1))


@lru_cache(maxsize=64)
def _weight_lines(inventory: Inventory, rules: CutRules, layout: ServingLayout) -> tuple[BudgetLine, ...]:
    lines, padding, wider = [], 0, 0
    estimated = {entry.partition(":")[0] for entry in inventory.derived}
    for group in inventory.groups:
        if group.tensor_class is TensorClass.draft and not layout.num_drafts:
            continue
        if group.tensor_class is TensorClass.vision and not layout.has_images:
            continue
        share = share_of(group, inventory, rules, layout)
        held = _part(group.num_bytes, share.held - share.padding, share.whole)
        padding += _part(group.num_bytes, share.padding, share.whole)
        if group.is_wo_a and rules.holds_wo_a_as_bf16:
            wider += _part(2 * group.num_weights - group.num_bytes, share.held, share.whole)
        lines.append(
            BudgetLine(
                name=group.name,
                group="weights",
                num_bytes=held,
                kind="persistent",
                formula=_share_text(group.num_bytes, share),
                reason=_REASONS[group.tensor_class],
                basis="assumed" if group.name.removeprefix("draft ") in estimated else "computed",
            )
        )
    if wider:
        lines.append(
            BudgetLine(
                "wo_a as bf16",
                "weights",
                wider,
                "persistent",
                "2 bytes a weight in place of FP8 with scales",
                "the grouped output projection is multiplied in bf16",
            )
        )
    if padding:
        lines.append(
            BudgetLine(
                "padding",
                "weights",
                padding,
                "persistent",
                _padding_text(inventory, rules, layout),
                "zeros, so that sizes divide and kernels exist for them",
            )
        )
    return tuple(lines)


@dataclass(frozen=True, slots=True)
class EngramShare:
    """What a rank owns of the tables: `num_rows` of all of them together, in `num_columns` columns of each at most."""

    num_rows: int
    num_columns: int
    is_by_row: bool = False


def engram_share(tables: EngramTables, split: EngramSplit, tp_size: int, rank: int) -> EngramShare:
    """Return the rank's share; all of the tables with one rank."""
    if split == "runs or rows" and tables.num_columns % tp_size:
        return _share_by_row(tables, tp_size, rank)
    order: Literal["strided", "contiguous"] = "strided" if split == "strided" else "contiguous"
    columns = ColumnOwnership.split(tables.num_columns, tp_size, order).columns(rank)
    return EngramShare(sum(rows[column] for rows in tables.column_rows for column in columns), len(columns))


def _share_by_row(tables: EngramTables, tp_size: int, rank: int) -> EngramShare:
    num_rows = num_columns = 0
    for rows, column_rows in zip(tables.rows, tables.column_rows, strict=True):
        first, end = RowOwnership(rows, tp_size).rows(rank)
        borders = pairwise(accumulate(column_rows, initial=0))
        num_columns = max(num_columns, sum(begin < end and first < border for begin, border in borders))
        num_rows += end - first
    return EngramShare(num_rows, num_columns, is_by_row=True)


def engram_bytes(inventory: Inventory, split: EngramSplit, tp_size: int, rank: int) -> int:
    """Bytes of what `rank` owns of the tables; 0 for a model without."""
    tables = inventory.engram
    return 0 if tables is None else engram_share(tables, split, tp_size, rank).num_rows * tables.row_bytes


def _part(num_bytes: int, held: int, whole: int) -> int:
    return -(-num_bytes * held // whole)


def _share_text(num_bytes: int, share: Share) -> str:
    if share.held == share.whole:
        return f"{num_bytes:,} B, whole on every rank"
    return f"{num_bytes:,} B x {share.held - share.padding:,} / {share.whole:,}"


def _padding_text(inventory: Inventory, rules: CutRules, layout: ServingLayout) -> str:
    tp = layout.tp_size
    parts = []
    heads = local_heads(inventory, rules, tp) * tp
    if heads != inventory.num_heads:
        parts.append(f"heads {inventory.num_heads} -> {heads}")
    width, padded = layout.expert_width(inventory.expert_width), padded_width(inventory, rules, layout)
    if width != padded:
        parts.append(f"expert width {width} -> {padded}")
    vocab = padded_vocab(inventory, rules, tp)
    if vocab != inventory.vocab_size:
        parts.append(f"vocabulary {inventory.vocab_size:,} -> {vocab:,}")
    return ", ".join(parts) or "draft experts"


_REASONS = {
    TensorClass.routed_expert: "any token may choose any of them",
    TensorClass.dense: "every token runs through them",
    TensorClass.engram: "projections of the n-gram rows",
    TensorClass.draft: "speculation drafts with them",
    TensorClass.vision: "images are encoded here",
    TensorClass.other: "tokens become vectors, and vectors logits",
}

__all__ = [
    "CutRules",
    "EngramShare",
    "EngramSplit",
    "HeadRule",
    "Share",
    "engram_bytes",
    "engram_share",
    "local_heads",
    "padded_vocab",
    "padded_width",
    "share_of",
    "weight_lines",
]
