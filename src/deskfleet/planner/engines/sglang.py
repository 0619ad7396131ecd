"""SGLang 0.5: how it cuts, what a token costs, its static-fraction rule. Facts from its source and from boot logs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import ClassVar

from deskfleet.errors import ConfigError
from deskfleet.planner.budget import BudgetLine
from deskfleet.planner.chunks import bounded_indexer_bytes, indexer_bytes
from deskfleet.planner.cluster import GIB, Cluster
from deskfleet.planner.engine_rules import (
    SGLANG_PAGE_TOKENS,
    kv_budget_bytes,
    outside_pool_bytes,
    pool_tokens,
    smallest_fraction,
)
from deskfleet.planner.engines.contract import BootPrediction, KvRate, Refusal
from deskfleet.planner.engines.stock import RECORD_BYTES, Runtime, StockRules
from deskfleet.planner.inventory import Inventory
from deskfleet.planner.sharding import CutRules, EngramSplit
from deskfleet.planner.wishes import EngineName, ServingLayout

INDEXER_BUDGET_BYTES = 2 * GIB
"""What a patched SGLang scores at once."""

LARGEST_FRACTION = 0.999


class SglangRules(StockRules):
    """Latent KV is replicated over ranks; the pool's price is scaled up by one layer for the draft worker."""

    name: EngineName = "sglang"
    version = "0.5.23"
    title = f"SGLang {version}"
    adapter = "deskfleet-sglang"
    # engram.py, shard_range: runs of columns where they divide, else ranges of rows.
    engram_split: ClassVar[EngramSplit] = "runs or rows"
    runtime = Runtime(
        context_bytes=int(0.6 * GIB),
        process_bytes=int(1.5 * GIB),
        graph_bytes=int(0.5 * GIB),
        slack_bytes=int(0.6 * GIB),
        source="split of the 3.2 GiB between published weights and free memory on three and four Sparks",
    )

    def cut_rules(self, cluster: Cluster) -> CutRules:
        """Experts by width or whole; heads as attention kernels are made."""
        return CutRules(
            cuts=frozenset({"group", "expert", "vocab", "shared_expert"}),
            head_rule="power of two",
            width_multiple=64,
            width_pad=64,
            vocab_pad=64,
            pads_draft_experts=True,
            cuts_drafts=False,
            holds_wo_a_as_bf16=True,
        )

    def _placement_refusal(
        self, inventory: Inventory, cluster: Cluster, layout: ServingLayout
    ) -> Refusal | None:
        """Packs hold columns, and where these do not divide SGLang cuts tables through them."""
        tables = inventory.engram
        if tables is not None and layout.engram == "disk" and tables.num_columns % layout.tp_size:
            return Refusal(
                "Engram",
                f"{self.adapter} reads whole columns, and {self.title} cuts through some of the {tables.num_columns} "
                f"for {layout.tp_size} ranks",
                f"take a number of ranks that divides {tables.num_columns}, or hold the tables in memory",
            )
        return super()._placement_refusal(inventory, cluster, layout)

    def kv_rate(self, inventory: Inventory, layout: ServingLayout) -> KvRate:
        """Entries and index keys of all sources, times (layers + 1) / layers when drafts are served."""
        rate = entry_rate(inventory, layout)
        formula = "entries and index keys of all sources"
        if layout.num_drafts:
            rate *= Fraction(inventory.num_layers + 1, inventory.num_layers)
            formula += ", one layer more for drafts"
        return KvRate(rate, formula, "computed")

    def window_line(self, inventory: Inventory, layout: ServingLayout) -> BudgetLine:
        """Published at 4 and at 16 slots; a straight line through both."""
        base, per_slot = 0.23 * GIB, 0.0275 * GIB
        return BudgetLine(
            "window pool",
            "kv",
            int(base + per_slot * layout.max_num_seqs),
            "persistent",
            f"0.23 GiB + {layout.max_num_seqs} slots x 0.0275 GiB",
            "raw rows of the last tokens, every layer",
            "published",
        )

    def prefill_lines(self, inventory: Inventory, layout: ServingLayout) -> list[BudgetLine]:
        """Scores of a chunk against the whole prefix, unless top-k is taken in bounded pieces."""
        line = indexer_line(layout)
        if layout.has_bounded_indexer:
            return [line]
        growth = replace(
            line,
            name="allocator growth",
            formula="as much again",
            reason="freed blocks of shorter prefixes serve no longer ones; three Sparks bear it out: "
            "1,024 x 208,000 ran, 1,024 x 262,144 did not",
        )
        return [line, growth]

    def boot(
        self, inventory: Inventory, cluster: Cluster, layout: ServingLayout, lines: list[BudgetLine]
    ) -> BootPrediction | None:
        """The pool is what the static fraction leaves after weights; a pin beyond that is clamped or ends the boot."""
        before = cluster.nodes[0].available_bytes
        held = sum(line.num_bytes for line in lines if _is_held_when_sizing(line))
        window = sum(line.num_bytes for line in lines if line.name == "window pool")
        rate = self.kv_rate(inventory, layout)
        after = before - held
        try:
            needed = window + rate.pool_bytes(layout.kv_tokens + SGLANG_PAGE_TOKENS)
            fraction = layout.fraction or smallest_fraction(before, after, needed)
        except ConfigError:
            fraction = LARGEST_FRACTION
        budget = kv_budget_bytes(fraction, before, after)
        granted = pool_tokens(budget, window, rate.bytes_per_token)
        refusal = None
        if granted < layout.kv_tokens // SGLANG_PAGE_TOKENS * SGLANG_PAGE_TOKENS:
            refusal = Refusal(
                "static fraction",
                f"mem-fraction-static {fraction:.3f} grants {granted:,} tokens of KV, and {layout.kv_tokens:,} are "
                f"asked for: of {after / GIB:.2f} GiB free after weights, "
                f"{outside_pool_bytes(fraction, before) / GIB:.2f} GiB stay outside the pool",
                "raise the fraction (lowering it frees nothing), or ask for fewer tokens",
            )
        return BootPrediction(
            line=f"full_token={granted}, available {max(0, budget) / GIB:.2f} GB",
            rule=f"mem-fraction-static {fraction:.3f}: free after weights - (1 - fraction) x free before - 0.1 GB",
            granted_tokens=granted,
            refusal=refusal,
        )


def _is_held_when_sizing(line: BudgetLine) -> bool:
    """Whether memory is taken when the pool is sized: drafts and graphs come later, as boot logs of four ranks show."""
    is_later = line.name.startswith("draft ") or line.name in ("graph pools", "allocator slack")
    return line.kind == "persistent" and line.group != "kv" and not is_later


def entry_rate(inventory: Inventory, layout: ServingLayout) -> Fraction:
    """Bytes of entries and index keys that a token adds, over all sources."""
    kv = inventory.kv
    record = RECORD_BYTES[layout.kv_format][0]
    # V4's keys stay FP8 with a float32 scale where there are no kernels for four bits.
    is_v4 = inventory.architecture == "v4"
    index_key = kv.index_head_dim + 4 if is_v4 else kv.index_head_dim // 2 + kv.index_head_dim // 32
    return sum(
        (
            Fraction(record + (index_key if indexed else 0), ratio)
            for ratio, indexed in zip(kv.ratios, kv.indexed, strict=True)
        ),
        Fraction(0),
    )


def indexer_line(layout: ServingLayout) -> BudgetLine:
    """The transient of choosing keys for a chunk at the end of the longest prompt."""
    chunk, prefix = layout.chunk_tokens, layout.max_model_len
    if layout.has_bounded_indexer:
        return BudgetLine(
            "indexer scores",
            "workspace",
            bounded_indexer_bytes(chunk, prefix, INDEXER_BUDGET_BYTES),
            "temporary",
            f"top-k in pieces of rows of {INDEXER_BUDGET_BYTES / GIB:.0f} GiB together",
            "a chunk's scores against the whole prefix",
            "computed",
            "prefill",
        )
    return BudgetLine(
        "indexer scores",
        "workspace",
        indexer_bytes(chunk, prefix),
        "temporary",
        f"14 B x {chunk:,} tokens x {prefix:,} of prefix",
        "a chunk's scores against the whole prefix, unbounded",
        "published",
        "prefill",
    )


RULES = SglangRules()

__all__ = ["RULES", "SglangRules", "entry_rate", "indexer_line"]
