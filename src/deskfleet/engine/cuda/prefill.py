"""A chunk of a prompt of a thousand rows and more: the order of `DecodeStep` with kernels that fill the tensor cores.

Owns the choice of those kernels and their buffers. What earlier and later steps see is the same as of any other step:
pages, block tables, open groups. Entries are scored for as many rows at a time as a bounded buffer has room for.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from deskfleet.engine.cuda import indexer, prefill_linear, topk
from deskfleet.engine.cuda.attention import AttentionShape
from deskfleet.engine.cuda.experts import ExpertShape
from deskfleet.engine.cuda.packing import Fp8Tiles
from deskfleet.engine.cuda.prefill_attention import (
    RowBuffers,
    attend_rows,
    place_keys,
    unpack_entries,
    unpack_windows,
)
from deskfleet.engine.cuda.prefill_experts import GroupedBuffers, grouped_down, grouped_up, sort_pairs
from deskfleet.engine.cuda.prefill_indexer import score_rows
from deskfleet.engine.cuda.prefill_linear import ProductBuffers
from deskfleet.engine.cuda.routing import choose_kernel, image_arguments
from deskfleet.engine.cuda.step import DecodeStep, Watch
from deskfleet.engine.cuda.synthetic import LayerWeights
from deskfleet.model.device import FILLED_ROWS
from deskfleet.model.layers import LayerPlan

SCORE_BYTES = 1 << 30
"""Of scores that are there at a time."""


LONE_ROWS, FEW_ROWS = 128, 8
"""Rows of a step whose picks alone are unpacked, and how many of them a request may have at most."""

SPARE_POSITIONS = 16384
"""Positions whose entries have room beside those of the longest request."""


@dataclass(slots=True)
class SharedOutputs:
    """What the shared expert leaves: bf16 [T, 2F], [T, F] and [T, M]."""

    wide: Tensor
    activated: Tensor
    outputs: Tensor


class PrefillStep(DecodeStep):
    """Buffers and launches for `num_rows` rows of any requests; a `long` step in all else."""

    attention: dict[int, RowBuffers]  # type: ignore[assignment]
    experts: GroupedBuffers  # type: ignore[assignment]
    shared: SharedOutputs  # type: ignore[assignment]

    def _make_expert_buffers(self, shape: ExpertShape) -> None:
        c, rows, width = self.config, self.num_rows, shape.expert_width
        self.experts = GroupedBuffers(shape, rows, self.device)
        self.shared = SharedOutputs(
            self._bf16(rows, 2 * width), self._bf16(rows, width), self._bf16(rows, shape.width)
        )
        grouped = self.shape.groups * self.shape.group_rank
        widest = max(c.hidden_size, c.engram_width, c.q_lora_rank, grouped)
        self.products = ProductBuffers(rows, widest, grouped, self.device)

    def _make_attention_buffers(self, shape: AttentionShape) -> None:
        pages = self.pages
        self.attended_rows = RowBuffers(
            shape, self.num_rows, self.config.index_topk, self.device, num_windows=len(pages.windows[0]),
            num_places=num_places(pages.entry_table.shape[1], pages.block_size),
            num_lone=LONE_ROWS, block_size=pages.block_size,
        )  # fmt: skip
        self.attention = dict.fromkeys((0, self.config.index_topk), self.attended_rows)

    def _make_choice_buffers(self, most: int) -> None:
        c, rows = self.config, scored_rows(self.num_rows, most)
        self.scores = self._bf16(rows, most)
        self.choice = None  # rows are as many as the processors need programs
        unit = c.candidate_block_size
        self.candidates = indexer.Candidates(rows, most, unit, c.candidate_topk_blocks, self.device)
        # Of every row: layers behind the source look at them.
        self.allowed = torch.zeros(
            self.num_rows, self.candidates.max_blocks, dtype=torch.uint8, device=self.device
        )

    def _fp8(
        self, x: Tensor, scales: Tensor, weight: Fp8Tiles, out: Tensor, plan: LayerPlan, head: int = 0,
        *, unsummed: bool = False,
    ) -> Tensor:  # fmt: skip
        rows = prefill_linear.expand_rows(x, scales, self.products)
        prefill_linear.product(rows, weight, out, self.products)
        if head:
            prefill_linear.turn(out, self._rope(plan), head, bit_ops=self.bit_ops)
        return out

    def _plain(self, x: Tensor, weight: Tensor, out: Tensor, splits: int | None = None) -> None:
        if self.num_rows < FILLED_ROWS:  # too few programs, unless they split K
            super()._plain(x, weight, out, splits)
        else:
            prefill_linear.plain_product(x, weight, out, bit_ops=self.bit_ops)

    def _begin(self) -> None:
        super()._begin()
        self._forget_keys()

    def _load_engram(self) -> None:
        """Hundreds of megabytes from the host, beside the first layers."""
        if any(layer.plan.has_engram for layer in self.layers):
            with self._beside():
                super()._load_engram()

    def _engram(self, layer: LayerWeights) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        super()._engram(layer)

    def _forget_keys(self) -> None:
        """What the keys are of: windows, and the sources whose entries and whose picks are unpacked."""
        self._keyed_windows: Tensor | None = None
        self._keyed = (-1, -1)

    def _core(self, layer: LayerWeights) -> Tensor:
        pages, plan, b, bit_ops = self.pages, layer.plan, self.attended_rows, self.bit_ops
        unpack_windows(pages.windows[plan.index], b, bit_ops=bit_ops)
        windows = self._windows(plan)
        if self._keyed_windows is not windows:
            b.keys[:, : b.shape.window] = windows
            self._keyed_windows = windows
        with_picks = plan.kv_source is not None and plan.index_source is not None
        if with_picks:
            assert plan.kv_source is not None
            assert plan.index_source is not None
            per_block = pages.block_size // plan.compress_ratio
            entries, sources = pages.entries[plan.kv_source], (plan.kv_source, plan.index_source)
            if self._keyed[0] != plan.kv_source:
                unpack_entries(entries, b, per_block, bit_ops=bit_ops)
            if self._keyed != sources:
                picks, where = self.picks[plan.index_source], (self.slots, pages.entry_table)
                place_keys(picks, entries, where, b, per_block, bit_ops=bit_ops)
            self._keyed = sources
        attend_rows(self.query, layer.sink, self._rope(plan), b, with_picks=with_picks, bit_ops=bit_ops)
        return b.out

    def _grouped(self, layer: LayerWeights, attended: Tensor) -> None:
        prefill_linear.grouped_product(
            attended, layer.wo_a, self.grouped, self.grouped_scales, self.products, self.shape.groups,
            bit_ops=self.bit_ops,
        )  # fmt: skip

    def _pick(self, layer: LayerWeights, weights: Tensor) -> None:
        c, plan = self.config, layer.plan
        assert layer.index_wq_b is not None
        self._fp8(
            self.low_rank, self.low_rank_scales, layer.index_wq_b, self.index_query, plan, c.index_head_dim
        )
        for first in range(0, self.num_rows, len(self.scores)):
            self._pick_rows(plan, weights, slice(first, min(first + len(self.scores), self.num_rows)))

    def _pick_rows(self, plan: LayerPlan, weights: Tensor, rows: slice) -> None:
        """The choice of some of the rows."""
        c, pages, bit_ops = self.config, self.pages, self.bit_ops
        assert plan.kv_source is not None
        where = (self.slots[rows], self.positions[rows], pages.entry_table)
        count = rows.stop - rows.start
        scores, candidates = self.scores[:count], copy(self.candidates)
        candidates.best, candidates.picks = candidates.best[:count], candidates.picks[:count]
        candidates.allowed = self.allowed[rows]
        ratio, block_size = plan.compress_ratio, pages.block_size
        score_rows(
            self.index_query[rows], weights[rows], pages.index_keys[plan.kv_source], where, scores,
            num_picks=c.index_topk, weight_scale=c.index_head_dim**-0.5 * c.index_n_heads**-0.5, bit_ops=bit_ops,
            among=candidates if plan.uses_candidates else None, ratio=ratio, block_size=block_size,
        )  # fmt: skip
        if plan.is_candidate_source:
            indexer.narrow(scores, where, candidates, ratio=ratio, block_size=block_size)
        topk.select(
            scores, where, self.picks[plan.index][rows], self.choice, ratio=ratio, block_size=block_size
        )

    def _experts(self, layer: LayerWeights, seen: Watch) -> None:
        c, b, e, bit_ops = self.config, self.streams, self.experts, self.bit_ops
        self._plain(b.x, layer.router, self.logits)
        self._choose(layer)
        if self.is_sharded:  # the choices that are another rank's add nothing here
            e.outputs.zero_()
        seen(f"{layer.plan.index}.route")
        x = prefill_linear.expand_rows(b.codes, b.scales, self.products)
        if self.shape.expert_ids:
            grouped_up(x, layer.w13, self.route_weights, e, c.swiglu_limit, bit_ops=bit_ops)
            grouped_down(layer.w2, e, bit_ops=bit_ops)
        shared = self.shared
        prefill_linear.shared_expert(
            x, layer.shared_w13, layer.shared_w2, shared.wide, shared.activated, shared.outputs, self.products,
            c.swiglu_limit, bit_ops=bit_ops,
        )  # fmt: skip
        seen(f"{layer.plan.index}.experts")

    def _choose(self, layer: LayerWeights) -> None:
        """Experts of every row, and the list of their pairs."""
        e, num_experts, first = self.experts, self.logits.shape[1], self.shape.expert_ids.start
        choose_kernel[(self.num_rows,)](
            self.logits,
            layer.bias,
            self.chosen,
            self.route_weights,
            e.items,
            e.item_pairs,
            e.num_items,
            e.num_listed,
            self.config.routed_scaling_factor,
            first,
            E=num_experts,
            BLOCK=triton.next_power_of_2(num_experts),
            NUM_CHOSEN=self.chosen.shape[1],
            LISTS=False,
            NUM_HELD=e.shape.num_experts,
            BLOCK_PAIRS=16,
            BM=e.tuning.rows,
            **image_arguments(self._of_images(layer)),
            num_warps=1,  # rows are many, and none waits at a barrier
        )
        sort_pairs(self.chosen, e, first_expert=first)


def num_places(table_width: int, block_size: int) -> int:
    """Blocks of entries that the requests of a step may have together: those of the longest, and some more. A step of
    more is cut."""
    return table_width + SPARE_POSITIONS // block_size


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the entries of the first `num_rows` rows of a step are unpacked: as many as there is room for.

    requests (first row, end, place of the first block, blocks) of those that are unpacked whole; lone: the rows of the
    others.
    """

    num_rows: int
    requests: list[tuple[int, int, int, int]]
    lone: list[int]


def lay_out(positions: np.ndarray, slots: np.ndarray, block_size: int, places: int) -> Layout:
    """The layout of rows of requests that follow each other, in `places` blocks, the first of which is nobody's.

    positions and slots int32 [T]; the first request fits in any case.
    """
    stops = np.flatnonzero(np.diff(slots, append=-1)) + 1
    requests: list[tuple[int, int, int, int]] = []
    lone: list[int] = []
    first, free = 0, 1
    for stop in map(int, stops):
        blocks = int(positions[stop - 1]) // block_size + 1
        if stop - first <= FEW_ROWS and len(lone) + stop - first <= LONE_ROWS:
            lone += range(first, stop)
        elif free + blocks <= places:
            requests.append((first, stop, free, blocks))
            free += blocks
        else:
            return Layout(first, requests, lone)
        first = stop
    return Layout(first, requests, lone)


def scored_rows(num_rows: int, most: int) -> int:
    """Rows of a step whose scores of up to `most` entries are there at a time: sixteens, so that parts of what rows
    have are aligned as the whole is."""
    return min(num_rows, max(SCORE_BYTES // (32 * most), 1) * 16)


__all__ = [
    "FEW_ROWS",
    "LONE_ROWS",
    "SCORE_BYTES",
    "SPARE_POSITIONS",
    "Layout",
    "PrefillStep",
    "SharedOutputs",
    "lay_out",
    "num_places",
    "scored_rows",
]
