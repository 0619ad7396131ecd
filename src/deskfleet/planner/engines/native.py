"""Our own engine: exact lines from `planner.native`. It holds FP4 as stored and FP8 as bf16.

It cuts by whole experts, reads Engram rows from disk, and keeps KV in the published formats.
"""

from __future__ import annotations

import json
from fractions import Fraction
from functools import cache
from typing import ClassVar

from deskfleet import __version__
from deskfleet.model.config import ModelConfig
from deskfleet.model.device import DEFAULT_MAX_NUM_BATCHED_TOKENS
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.limits import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_NUM_WINDOW_TAILS,
    MAX_TRANSIENT_BYTES,
    RunnerLimits,
    resolve_limits,
)
from deskfleet.planner.budget import BudgetLine
from deskfleet.planner.cluster import Cluster
from deskfleet.planner.engines.contract import BootPrediction, Choices, KvRate, Refusal
from deskfleet.planner.inventory import Inventory
from deskfleet.planner.native import native_lines
from deskfleet.planner.sharding import EngramSplit
from deskfleet.planner.wishes import EngineName, EngramPlacement, ServingLayout

_SUPERVISOR_BYTES = 112 << 20


class NativeRules:
    """The engine of this package."""

    name: ClassVar[EngineName] = "native"
    version: ClassVar[str] = __version__
    title: ClassVar[str] = "deskfleet's own engine (CPU reference)"
    engram_split: ClassVar[EngramSplit] = "strided"  # model.layout
    reads_packs: ClassVar[bool] = True

    def choices(self, inventory: Inventory, cluster: Cluster, tp_size: int) -> Choices:
        """Experts whole; any divisor of the ranks shares out KV; the chunk shrinks by itself as the prefix grows."""
        placements: tuple[EngramPlacement, ...] = ("disk",) if inventory.engram is not None else ("none",)
        return Choices(
            ep_sizes=(tp_size,),
            dcp_sizes=(1,),
            engram=placements,
            kv_formats=("fp4",),
            chunks=(DEFAULT_MAX_NUM_BATCHED_TOKENS["cpu"],),
            has_bounded_indexer=True,
        )

    def unserved(self, inventory: Inventory, cluster: Cluster) -> Refusal | None:
        """It reads V4.1 as published, and today computes on CPUs."""
        if inventory.config is None or inventory.weight_format != "mxfp4":
            message = f"{self.title} reads DeepSeek-V4.1 in its published formats, not {inventory.name}"
            return Refusal("architecture", message, "choose another engine")
        if inventory.engram is not None and inventory.engram.format != "fp8":
            message = f"{self.title} reads FP8 Engram rows, not {inventory.engram.format}"
            return Refusal("Engram", message, "use the FP8 tables")
        if cluster.kind.arch != "cpu":
            message = f"{self.title} has no kernels for {cluster.kind.arch} yet"
            return Refusal("device", message, "plan it with --nodes local, or choose another engine")
        return None

    def refusals(self, inventory: Inventory, cluster: Cluster, layout: ServingLayout) -> list[Refusal]:
        """What this engine does not do."""
        refusals = []
        if layout.engram not in ("disk", "none") or (layout.engram == "none") != (inventory.engram is None):
            refusals.append(
                Refusal("Engram", f"{self.title} reads rows from disk, not {layout.engram}", "use disk")
            )
        if layout.kv_format != "fp4":
            refusals.append(
                Refusal("KV format", f"{self.title} keeps fp4 KV, not {layout.kv_format}", "use fp4")
            )
        if layout.ep_size != layout.tp_size:
            refusals.append(
                Refusal(
                    "expert split",
                    f"{self.title} holds experts whole, not cut {layout.tp_size // layout.ep_size} ways",
                    f"use ep_size {layout.tp_size}",
                )
            )
        if layout.tp_size % layout.dcp_size:
            refusals.append(
                Refusal(
                    "context parallel",
                    f"dcp_size {layout.dcp_size} does not divide tp_size {layout.tp_size}",
                    "choose a divisor",
                )
            )
        return refusals

    def needs(self, inventory: Inventory, cluster: Cluster, layout: ServingLayout) -> list[str]:
        """Nothing: it is what this package brings."""
        return []

    def kv_rate(self, inventory: Inventory, layout: ServingLayout) -> KvRate:
        """Published records of all sources, shared out over DCP ranks."""
        kv = inventory.kv
        entry = kv.head_dim // 2 + kv.head_dim // 16
        key = kv.index_head_dim // 2 + kv.index_head_dim // 32
        rate = sum((Fraction(entry + key, ratio) for ratio in kv.ratios), Fraction(0)) / layout.dcp_size
        return KvRate(rate, "entries and index keys of all sources, published formats", "computed")

    def lines(
        self, inventory: Inventory, cluster: Cluster, layout: ServingLayout, rank: int
    ) -> list[BudgetLine]:
        """What `native_lines` says, and the largest transient of a step."""
        if inventory.config is None:
            raise ValueError(f"{inventory.name} has no configuration to cut by")
        plan = _shard_plan(json.dumps(inventory.config, sort_keys=True), layout.tp_size)
        lines = native_lines(plan, limits_of(plan.config, layout), rank, with_drafts=layout.num_drafts > 0)
        step = BudgetLine(
            "workspace.step",
            "workspace",
            MAX_TRANSIENT_BYTES,
            "temporary",
            "the scheduler's budget for index scores",
            "a chunk's scores against the whole prefix",
            "assumed",
            "prefill",
        )
        head = BudgetLine(
            "head's other processes",
            "runtime",
            _SUPERVISOR_BYTES,
            "persistent",
            "constant",
            "the supervisor with the gateway, beside rank 0; measured when it opens its port",
            "measured",
        )
        return [*lines, step, *([head] if rank == 0 else [])]

    def boot(
        self, inventory: Inventory, cluster: Cluster, layout: ServingLayout, lines: list[BudgetLine]
    ) -> BootPrediction | None:
        """It takes what it was given."""
        return None


def limits_of(config: ModelConfig, layout: ServingLayout) -> RunnerLimits:
    """The sizes that the engine fixes at start for this layout."""
    return resolve_limits(
        config,
        max_num_seqs=layout.max_num_seqs,
        max_model_len=layout.max_model_len,
        block_size=DEFAULT_BLOCK_SIZE,
        kv_cache_tokens=-(-layout.kv_tokens // DEFAULT_BLOCK_SIZE) * DEFAULT_BLOCK_SIZE,
        num_window_tails=DEFAULT_NUM_WINDOW_TAILS,
        with_drafts=layout.num_drafts > 0,
        tp_size=layout.tp_size,
        dcp_size=layout.dcp_size,
    )


@cache
def _shard_plan(config: str, tp_size: int) -> ShardPlan:
    """Keyed by text: a plan is asked for dozens of times while a context is searched."""
    return ShardPlan(ModelConfig.from_dict(json.loads(config), source="inventory"), Layout(tp_size))


RULES = NativeRules()

__all__ = ["RULES", "NativeRules", "limits_of"]
