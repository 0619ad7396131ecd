"""From a checkpoint, machines and wishes to a `MemoryPlan`. Owns what is chosen when a wish is left open, and why.

    Inventory + Cluster + Wishes -> ServingLayout -> RankBudget of every rank -> MemoryPlan

Knows engines only through `EngineRules`. Which engine and how many ranks are best is `search`'s business.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from deskfleet.errors import ConfigError
from deskfleet.planner.budget import SYSTEM_LINE, BudgetLine, Floor, RankBudget
from deskfleet.planner.calibration import Calibration, apply_calibration
from deskfleet.planner.chunks import smallest_image_chunk
from deskfleet.planner.cluster import GIB, KINDS, Cluster, Node
from deskfleet.planner.engines.contract import BootPrediction, EngineRules, KvRate, Refusal
from deskfleet.planner.engines.registry import rules_of
from deskfleet.planner.inventory import Inventory
from deskfleet.planner.wishes import EngineName, EngramPlacement, ServingLayout, Wishes

UNIFIED_FLOOR = Floor(
    rest_bytes=5_000_000_000,
    peak_bytes=GIB,
    reason="below it the kernel kills processes or the machine freezes: CPU and accelerator share this memory",
)
DEVICE_FLOOR = Floor(
    rest_bytes=GIB,
    peak_bytes=GIB // 4,
    reason="below it an allocation of the driver or of another process fails",
)


def floor_of(node: Node) -> Floor:
    """What must stay free on `node`: of a small machine never more than a twentieth."""
    floor = UNIFIED_FLOOR if node.kind.is_unified else DEVICE_FLOOR
    most = node.total_bytes // 20
    return Floor(min(floor.rest_bytes, most), min(floor.peak_bytes, most // 2), floor.reason)


_Value = TypeVar("_Value")

CONTEXT_STEP = 1024
"""Contexts are found in steps of this many tokens."""

USUAL_CONTEXT = 32_768
"""What is shown when no context fits and none was asked for."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A value that the wish left open, and why it was taken."""

    name: str
    value: object
    reason: str


@dataclass(frozen=True)
class MemoryPlan:
    """The verdict and everything it rests on. Made by `make_plan`; the same inputs give the same plan.

    `choices` explain what was left open, `needs` what is beyond the engine as released. Lengths and pools in tokens.
    """

    inventory: Inventory
    cluster: Cluster
    wishes: Wishes
    calibrations: tuple[Calibration, ...]
    layout: ServingLayout
    choices: tuple[Choice, ...]
    budgets: tuple[RankBudget, ...]
    kv_rate: KvRate
    boot: BootPrediction | None
    refusals: tuple[Refusal, ...]
    needs: tuple[str, ...]
    largest_context: int
    largest_context_chunk: int
    max_kv_tokens: int

    @property
    def fits(self) -> bool:
        """Whether every node keeps its floor and nothing refuses."""
        return not self.refusals and all(budget.fits for budget in self.budgets)

    @cached_property
    def tightest(self) -> RankBudget:
        """The rank that has least to spare."""
        return min(self.budgets, key=lambda budget: budget.margin_bytes)

    @property
    def unused_calibrations(self) -> tuple[Calibration, ...]:
        """Corrections that were given and belong to another engine, version or kind of node."""
        where = (self.layout.engine, rules_of(self.layout.engine).version, self.cluster.kind.name)
        return tuple(each for each in self.calibrations if not each.is_of(*where))

    @property
    def margin_bytes(self) -> int:
        """What the tightest rank could still hold; negative when it does not fit."""
        return self.tightest.margin_bytes


def make_plan(
    inventory: Inventory,
    cluster: Cluster,
    wishes: Wishes,
    *,
    engine: EngineName,
    tp_size: int,
    calibrations: Sequence[Calibration] = (),
) -> MemoryPlan:
    """Plan `engine` on `tp_size` ranks, filling in what the wishes leave open. Never raises for what does not fit.

    Raises ConfigError for wishes that contradict the checkpoint or the cluster.
    """
    _check(inventory, cluster, wishes, tp_size)
    maker = _Maker(inventory, cluster, wishes, rules_of(engine), tp_size, tuple(calibrations))
    return maker.plan()


def _check(inventory: Inventory, cluster: Cluster, wishes: Wishes, tp_size: int) -> None:
    if tp_size > cluster.num_devices:
        raise ConfigError(
            f"tp_size {tp_size} on {cluster.num_devices} devices", hint="give more nodes, or a smaller --tp"
        )
    longest = inventory.max_position_embeddings
    if wishes.max_model_len is not None and wishes.max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {wishes.max_model_len:,}, and {inventory.name} knows {longest:,} positions",
            hint=f"ask for {longest} or less",
        )


@dataclass(frozen=True)
class _Maker:
    inventory: Inventory
    cluster: Cluster
    wishes: Wishes
    rules: EngineRules
    tp_size: int
    calibrations: tuple[Calibration, ...]

    def plan(self) -> MemoryPlan:
        layout, choices = self._resolve()
        budgets = tuple(self._budget(layout, rank) for rank in range(layout.tp_size))
        lines = list(budgets[0].lines)
        boot = self.rules.boot(self.inventory, self.cluster, layout, lines)
        refusals = self.rules.refusals(self.inventory, self.cluster, layout)
        has_room = all(budget.fits for budget in budgets)
        if boot is not None and boot.refusal is not None and (has_room or layout.fraction is not None):
            refusals.append(boot.refusal)  # without room it would only say the same in the engine's terms
        rate = self.rules.kv_rate(self.inventory, layout)
        largest = self._largest_context(layout)
        return MemoryPlan(
            inventory=self.inventory,
            cluster=self.cluster,
            wishes=self.wishes,
            calibrations=self.calibrations,
            layout=layout,
            choices=tuple(choices),
            budgets=budgets,
            kv_rate=rate,
            boot=boot,
            refusals=tuple(refusals),
            needs=tuple(self.rules.needs(self.inventory, self.cluster, layout)),
            largest_context=largest,
            largest_context_chunk=self._largest_chunk(
                replace(layout, max_model_len=largest, kv_tokens=largest)
            )
            if largest
            else 0,
            max_kv_tokens=self._max_kv_tokens(layout, budgets, rate),
        )

    def _resolve(self) -> tuple[ServingLayout, list[Choice]]:
        """Fill in what is open, in an order in which each choice depends only on those before it."""
        wishes, inventory = self.wishes, self.inventory
        options = self.rules.choices(inventory, self.cluster, self.tp_size)
        choices: list[Choice] = []

        def choose(name: str, wished: _Value | None, value: _Value, reason: str) -> _Value:
            if wished is not None:
                return wished
            choices.append(Choice(name, value, reason))
            return value

        bounded = options.has_bounded_indexer
        base = ServingLayout(
            engine=self.rules.name,
            tp_size=self.tp_size,
            ep_size=choose(
                "ep_size", wishes.ep_size, options.ep_sizes[0], "the first split that has kernels"
            ),
            dcp_size=choose("dcp_size", wishes.dcp_size, options.dcp_sizes[0], "the engine's default"),
            engram=wishes.engram or options.engram[0],
            kv_format=choose(
                "kv_format", wishes.kv_format, options.kv_formats[0], "what this machine has kernels for"
            ),
            max_model_len=wishes.max_model_len or self._usual,
            max_num_seqs=wishes.max_num_seqs,
            kv_tokens=wishes.kv_tokens or wishes.max_model_len or self._usual,
            chunk_tokens=wishes.chunk_tokens or self._smallest_chunk(options.chunks),
            num_drafts=choose(
                "num_drafts", wishes.num_drafts, inventory.draft_block, "the checkpoint's block"
            ),
            has_images=wishes.has_images and inventory.max_image_tokens > 0,
            has_bounded_indexer=choose(
                "has_bounded_indexer", wishes.has_bounded_indexer, bounded, "as the engine is released"
            ),
            fraction=wishes.fraction,
        )
        base, reason = self._place(base, options.engram)
        if wishes.engram is None:
            choices.append(Choice("engram", base.engram, reason))
        if wishes.max_model_len is None:
            context = self._largest_context(base) or self._usual
            choices.append(Choice("max_model_len", context, "the longest that fits, up to the checkpoint's"))
            base = replace(base, max_model_len=context, kv_tokens=wishes.kv_tokens or context)
        if wishes.kv_tokens is None:
            choices.append(Choice("kv_tokens", base.kv_tokens, "one request of full length"))
        if wishes.chunk_tokens is None:
            chunk = self._largest_chunk(base)
            choices.append(Choice("chunk_tokens", chunk, "the largest whose transient fits at this context"))
            base = replace(base, chunk_tokens=chunk)
        return base, choices

    def _place(self, base: ServingLayout, options: Sequence[EngramPlacement]) -> tuple[ServingLayout, str]:
        """The fastest placement that fits; with an open context, that allows the longest. Else the leanest."""
        if self.wishes.engram is not None:
            return base, "as asked"
        order = sorted(options, key=("device", "host", "disk", "none").index)
        if order == ["none"]:
            return replace(base, engram="none"), "this model has no tables"
        layouts = [replace(base, engram=placement) for placement in order]
        if self.wishes.max_model_len is None:
            contexts = [self._largest_context(layout) for layout in layouts]
        else:
            contexts = [int(self._fits(layout)) for layout in layouts]
        if not any(contexts):
            return layouts[-1], "the place that takes least memory"
        return layouts[contexts.index(max(contexts))], "the fastest place with room for this context"

    @property
    def _usual(self) -> int:
        return min(USUAL_CONTEXT, self.inventory.max_position_embeddings)

    def _smallest_chunk(self, chunks: Sequence[int]) -> int:
        images = self.inventory.max_image_tokens if self.wishes.has_images else 0
        needed = smallest_image_chunk(images) if images else 1
        return min((chunk for chunk in chunks if chunk >= needed), default=max(chunks))

    def _largest_chunk(self, layout: ServingLayout) -> int:
        """The largest chunk that fits, or the smallest when none does."""
        if self.wishes.chunk_tokens is not None:
            return self.wishes.chunk_tokens
        chunks = self.rules.choices(self.inventory, self.cluster, self.tp_size).chunks
        smallest = self._smallest_chunk(chunks)
        ascending = sorted(chunk for chunk in chunks if chunk >= smallest)
        # A larger chunk never takes less, so those that fit come first.
        count = bisect_left(
            ascending, True, key=lambda chunk: not self._fits(replace(layout, chunk_tokens=chunk))
        )
        return ascending[max(0, count - 1)]

    def _largest_context(self, layout: ServingLayout) -> int:
        """The longest context, in steps of CONTEXT_STEP, for which one request fits; 0 when none does."""
        chunks = self.rules.choices(self.inventory, self.cluster, self.tp_size).chunks
        chunk = self.wishes.chunk_tokens or self._smallest_chunk(chunks)

        def fits(steps: int) -> bool:
            context = min(steps * CONTEXT_STEP, self.inventory.max_position_embeddings)
            return self._fits(replace(layout, max_model_len=context, kv_tokens=context, chunk_tokens=chunk))

        low, high = 0, -(-self.inventory.max_position_embeddings // CONTEXT_STEP)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return min(low * CONTEXT_STEP, self.inventory.max_position_embeddings)

    def _fits(self, layout: ServingLayout) -> bool:
        # The first rank has the head's processes and the most columns; only what columns hold differs among the rest.
        ranks = range(layout.tp_size) if layout.engram in ("device", "host") else (0,)
        budgets = [self._budget(layout, rank) for rank in ranks]
        if not all(budget.fits for budget in budgets):
            return False
        if self.rules.refusals(self.inventory, self.cluster, layout):
            return False
        boot = self.rules.boot(self.inventory, self.cluster, layout, list(budgets[0].lines))
        return boot is None or boot.refusal is None

    def _budget(self, layout: ServingLayout, rank: int) -> RankBudget:
        node = self.cluster.node_of(rank)
        lines = self.rules.lines(self.inventory, self.cluster, layout, rank)
        lines = apply_calibration(
            lines,
            self.calibrations,
            engine=layout.engine,
            engine_version=self.rules.version,
            node_kind=node.kind.name,
        )
        # Ranks on one machine that share its memory get equal parts of it, and bear equal parts of what it keeps.
        sharers = min(layout.tp_size, node.kind.num_devices) if node.kind.is_unified else 1
        floor = floor_of(node)
        return RankBudget(
            rank,
            node.name,
            node.total_bytes // sharers,
            Floor(floor.rest_bytes // sharers, floor.peak_bytes // sharers, floor.reason),
            (*lines, *self._reserved(node, sharers)),
        )

    def _reserved(self, node: Node, sharers: int) -> Iterator[BudgetLine]:
        free = f"{node.total_bytes / GIB:.2f} GiB in all - {node.available_bytes / GIB:.2f} GiB free before the start"
        yield BudgetLine(
            SYSTEM_LINE,
            "system",
            (node.total_bytes - node.available_bytes) // sharers,
            "reserved",
            free + (f", a part of {sharers}" if sharers > 1 else ""),
            "the operating system and whatever else runs",
            "published"
            if node.kind.name in KINDS and node.available_bytes == node.kind.available_bytes
            else "measured",
        )
        if self.wishes.margin_bytes:
            yield BudgetLine(
                "margin", "system", self.wishes.margin_bytes, "reserved", "as asked", "left free on request"
            )

    def _max_kv_tokens(self, layout: ServingLayout, budgets: Sequence[RankBudget], rate: KvRate) -> int:
        """Tokens of a pool that takes all the room there is; 0 when not even the asked one fits."""
        margin = min(budget.margin_bytes for budget in budgets)
        return max(0, rate.tokens(max(0, rate.pool_bytes(layout.kv_tokens) + margin)))


__all__ = ["CONTEXT_STEP", "DEVICE_FLOOR", "UNIFIED_FLOOR", "Choice", "MemoryPlan", "make_plan"]
