"""One step of one rank, from token ids to logits and tokens, without the host (spec §5.3).

Owns the static buffers of one batch size and the order of launches; every launch has the same shape whatever the data,
so the whole can be captured as one graph. Where ranks add up what each has of a row (embeddings, attention's output,
the experts'), parts become one buffer that a DeviceGroup sums; of a rank alone, whoever reads the parts adds them, and
one without its group stands for the whole, at the cost of its size without communication. Knows nothing of requests;
positions, slots and block tables are tensors that whoever drives the step fills in between (model.py).

Window records and entries are written before anything reads them, so rows of one request may follow each other within
a step, as long as each has a place.

Draft stages are the same launches with other buffers (draft.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda import (
    attention,
    compress,
    engram,
    experts,
    hyper,
    indexer,
    linear,
    routing,
    sums,
    topk,
)
from deskfleet.engine.cuda.collectives import DeviceGroup
from deskfleet.engine.cuda.packing import Fp8Tiles
from deskfleet.engine.cuda.sampling import Sampling
from deskfleet.engine.cuda.synthetic import LayerWeights, MixWeights
from deskfleet.engine.ops.records import ENTRY, INDEX_KEY, WINDOW
from deskfleet.engine.ops.rope import RopeTable
from deskfleet.model.config import ModelConfig
from deskfleet.model.layers import LayerPlan

Watch = Callable[[str], None]

DECODE_LOGITS = 64
"""Rows of the head's product at most; more are taken in turns."""


@triton.jit(do_not_specialize=["num_rows"])
def rope_kernel(
    positions,  # int32 [T]
    local,  # float32 [PAIRS]: frequencies
    yarn,
    tables,  # float32 [3, 2, T, PAIRS] out: local, yarn, yarn of an even position; cos and sin
    num_rows,
    PAIRS: tl.constexpr,
):
    """One program a row (oracle: RopeTable.rows); PAIRS is a power of two."""
    row = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    position = tl.load(positions + row)
    size = num_rows * PAIRS
    out = tables + row * PAIRS + pair
    angle = position.to(tl.float32) * tl.load(local + pair)
    tl.store(out, tl.cos(angle))
    tl.store(out + size, tl.sin(angle))
    frequency = tl.load(yarn + pair)
    angle = position.to(tl.float32) * frequency
    tl.store(out + 2 * size, tl.cos(angle))
    tl.store(out + 3 * size, tl.sin(angle))
    angle = (position - position % 2).to(tl.float32) * frequency
    tl.store(out + 4 * size, tl.cos(angle))
    tl.store(out + 5 * size, tl.sin(angle))


class Shape(Protocol):
    """What a rank holds, as the kernels see it: padding included.

    `group_rank` is the low rank of one output group; `expert_ids` are the routed experts, in ascending order.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def heads(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def group_rank(self) -> int: ...
    @property
    def expert_width(self) -> int: ...
    @property
    def expert_ids(self) -> range: ...
    @property
    def vocabulary(self) -> int: ...


@dataclass(slots=True)
class Pages:
    """What earlier steps left: pages of records and the tables that name their blocks. Block 0 is nobody's."""

    windows: list[Tensor]  # per layer uint8 [rows, bytes of a window record]
    entries: dict[int, Tensor]  # per KV source uint8 [rows, bytes of an entry]
    index_keys: dict[int, Tensor]  # uint8 [rows, bytes of an index key]
    open_rows: dict[int, Tensor]  # float32 [S * num_open, 2 * D]
    window_table: Tensor  # int32 [S, B]
    entry_table: Tensor  # int32 [S, B]
    block_size: int
    num_open: int


class DecodeStep:
    """Buffers and launches for `num_rows` rows. `ids` and `positions` are read at the start of every run.

    With `long`, one request may have any number of rows, and some of them may be there for their window records alone:
    `entry_slots` names a slot without blocks for those, `kept_at` int64 [T] the row of `open_rows` where each row's
    pooled inputs go. Then logits are made of the rows `logit_rows` int64 [DECODE_LOGITS or fewer], otherwise of all.
    """

    group = DeviceGroup()
    sees = False  # images
    total: Tensor | None  # float32 [T, M]: what ranks add up
    nothing: Tensor | None  # a shared expert's output where there is none

    def __init__(
        self,
        shape: Shape,
        layers: list[LayerWeights],
        embedding: Tensor,
        head: Tensor,
        norm: Tensor,
        pages: Pages,
        *,
        num_rows: int,
        device: torch.device | str,
        bit_ops: bool,
        long: bool = False,
        group: DeviceGroup | None = None,
    ) -> None:
        """`group`, which has reserved its memory, adds up over ranks; None: nobody does."""
        c = shape.config
        width = c.hidden_size
        self.group = group or self.group
        self.shape, self.config, self.layers, self.pages = shape, c, layers, pages
        self.embedding, self.head, self.norm = embedding, head, norm
        self.num_rows, self.bit_ops, self.long = num_rows, bit_ops, long
        self.num_logits = min(num_rows, DECODE_LOGITS) if long else num_rows
        self.device = torch.device(device)
        ints, bf16, codes = self._ints, self._bf16, self._codes
        self.ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.positions, self.slots = ints(num_rows), ints(num_rows)
        # Of either kind as many buffers: workspace.py counts them.
        entry_slots = ints(num_rows if long else 0)
        self.entry_slots = entry_slots if long else self.slots
        self.kept_at = torch.zeros(num_rows if long else 0, dtype=torch.int64, device=device)
        self.logit_rows = torch.zeros(self.num_logits if long else 0, dtype=torch.int64, device=device)
        self._make_layer_buffers(c.n_routed_experts, c.num_experts_per_tok)
        attended = attention.AttentionShape(shape.heads, c.head_dim, c.qk_rope_head_dim, c.sliding_window)
        self._make_attention_buffers(attended)
        most_extra = max((layer.num_extra for layer in layers), default=0)
        self.extra = torch.zeros(num_rows * max(most_extra, 1), device=device)
        self.latents, self.keys = (
            bf16(num_rows, c.head_dim),
            torch.zeros(num_rows, c.index_head_dim, device=device),
        )
        self.index_query = bf16(num_rows, c.index_n_heads * c.index_head_dim)
        self.picks = {layer: ints(num_rows, c.index_topk) for layer in c.index_source_layer_ids}
        # Rows of the pages: of the entries that were picked, and of the windows.
        self.entry_records = {layer: ints(num_rows, c.index_topk) for layer in c.index_source_layer_ids}
        self.window_records = ints(num_rows, c.sliding_window)
        self._make_choice_buffers(pages.entry_table.shape[1] * pages.block_size)
        self.taps = bf16(num_rows, max(len(c.dspark_target_layer_ids), 1) * width)
        wanted = bf16(self.num_logits if long else 0, width)
        self.wanted = wanted if long else self.streams.x
        self._make_logits()
        self.sampling = Sampling(self.num_logits, self.vocabulary_logits.shape[1], device)
        self.alive = ints(num_rows).fill_(1)
        # int32 [T], 0 for rows of images, whose embeddings lie in `image_rows` then; decoding has none.
        self.sees = long and c.vision is not None
        self.text = ints(num_rows if self.sees else 0).fill_(1)
        pinned = self.device.type == "cuda"
        scale_bytes = 4 * -(-c.engram_width // 128)  # a whole number of scale words
        self.host_rows = {
            layer: (
                torch.zeros(num_rows, c.engram_width, dtype=torch.uint8, pin_memory=pinned),
                torch.zeros(num_rows, scale_bytes, dtype=torch.uint8, pin_memory=pinned),
            )
            for layer in c.engram_layer_ids
        }
        self.engram_rows = {
            layer: (codes(num_rows, c.engram_width), ints(num_rows, scale_bytes // 4))
            for layer in c.engram_layer_ids
        }
        self.engram_projected = bf16(num_rows, (c.hc_mult + 1) * width)

    def _make_layer_buffers(self, num_experts: int, num_chosen: int) -> None:
        """What every kind of layer needs, draft stages too (draft.py): `num_chosen` of `num_experts` for each row."""
        shape, c, num_rows, device = self.shape, self.config, self.num_rows, self.device
        ints, bf16, codes = self._ints, self._bf16, self._codes
        width = c.hidden_size
        self.frequencies = [
            torch.zeros(len(table.frequencies), device=device).copy_(table.frequencies)
            for table in rope_tables(c)
        ]
        self.rope = torch.zeros(3, 2, num_rows, c.qk_rope_head_dim // 2, device=device)
        self.streams = hyper.StreamBuffers(width, num_rows, device)
        self._make_expert_buffers(
            experts.ExpertShape(width, shape.expert_width, len(shape.expert_ids), num_chosen)
        )
        self.work = linear.SplitBuffers(
            _most_partials(shape, self.layers, num_experts, num_rows, self.num_logits),
            64 * linear.padded_rows(num_rows),
            device,
        )
        self.qkv = bf16(num_rows, c.q_lora_rank + c.head_dim)
        self.low_rank, self.low_rank_scales = (
            codes(num_rows, c.q_lora_rank),
            ints(num_rows, -(-c.q_lora_rank // 128)),
        )
        self.query = bf16(num_rows, shape.heads * c.head_dim)
        grouped = shape.groups * shape.group_rank
        self.grouped, self.grouped_scales = codes(num_rows, grouped), ints(num_rows, -(-grouped // 128))
        self._attended = self._attended_parts = bf16(num_rows, width)
        self.total, self.nothing = None, None
        if not self.group.is_alone:
            self.total = self.group.memory[: num_rows * width].view(num_rows, width)
            self.nothing = bf16(num_rows, width)  # zeros for ever
        self.logits = torch.zeros(num_rows, num_experts, device=device)
        self.chosen = ints(num_rows, num_chosen)
        self.is_sharded = len(shape.expert_ids) < num_experts
        self.route_weights = torch.zeros(num_rows, num_chosen, device=device)
        self._side = torch.cuda.Stream() if device.type == "cuda" else None

    def _make_expert_buffers(self, shape: experts.ExpertShape) -> None:
        self.experts = experts.ExpertBuffers(shape, self.num_rows, self.device)
        self.shared = experts.SharedBuffers(shape.width, shape.expert_width, self.num_rows, self.device)

    def _make_attention_buffers(self, shape: attention.AttentionShape) -> None:
        self.attention = {
            count: attention.AttentionBuffers(shape, self.num_rows, count, self.device)
            for count in (0, self.config.index_topk)
        }

    def _make_choice_buffers(self, most: int) -> None:
        """For up to `most` entries of a row."""
        c = self.config
        self.scores = self._bf16(self.num_rows, most)
        self.choice = topk.TopkBuffers.where_needed(self.num_rows, most, self.device)
        self.candidates = indexer.Candidates(
            self.num_rows, most, c.candidate_block_size, c.candidate_topk_blocks, self.device
        )

    def _make_logits(self) -> None:
        """float32 [R, V], the whole vocabulary where ranks gather their parts; what pads the last of them is cut
        off."""
        rows, held = self.num_logits, self.shape.vocabulary
        self.own_logits = torch.zeros(rows, held, device=self.device)
        self.vocabulary_logits = self.own_logits
        if not self.group.is_alone:
            self.gathered = torch.zeros(self.group.size, rows, held, device=self.device)
            self.joined = torch.zeros(rows, self.group.size, held, device=self.device)
            self.vocabulary_logits = self.joined.flatten(1)[:, : self.config.vocab_size]

    def _ints(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self.device)

    def _bf16(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.bfloat16, device=self.device)

    def _codes(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device).view(torch.float8_e4m3fn)

    @property
    def image_rows(self) -> Tensor:
        """bf16 [T, M]: embeddings of rows of images, until the step has begun; then attention needs the place."""
        return self._attended

    @property
    def attended(self) -> Tensor:
        """bf16 [T, M]: what attention gives to the stream, until the next product."""
        return linear.summed(self._attended_parts)

    def extra_of(self, layer: LayerWeights) -> Tensor:
        """float32 [T, num_extra]: what the bf16 projections of a layer give, while it runs."""
        return self.extra[: self.num_rows * layer.num_extra].view(self.num_rows, -1)

    def run(self, watch: Watch | None = None) -> None:
        """Launch the step. `watch` is told the name of each stage after its launches; it may look at the buffers."""
        seen = watch or (lambda name: None)
        self.run_layers(seen)
        self.run_head()
        seen("head")

    def run_layers(self, seen: Watch = lambda name: None) -> None:
        """All but the logits."""
        self._begin()
        seen("embed")
        pending = self._through(self.layers, seen)
        last = self.layers[-1].ffn
        hyper.mix(
            self.streams,
            last.weight,
            output=pending,
            shared=self.shared.outputs,
            parts=self._pairs,
            bit_ops=self.bit_ops,
        )
        self._finish(MixWeights(last.weight, last.scale, last.base, self.norm))

    def _through(self, layers: Sequence[LayerWeights], seen: Watch) -> Tensor | None:
        """Run layers from the first on. Returns the last one's experts' outputs, which are not yet in the streams."""
        b, bit_ops = self.streams, self.bit_ops
        pending: Tensor | None = None
        for layer in layers:
            plan = layer.plan
            self._into(layer, pending, seen)
            self._finish(layer.attention)
            seen(f"{plan.index}.attention_in")
            self._attention(layer, seen)
            # With `nothing` beside it, a sum over ranks is rounded to bf16 once, as a sum of parts is.
            hyper.mix(b, layer.ffn.weight, output=self._attended_parts, shared=self.nothing, bit_ops=bit_ops)
            self._finish(layer.ffn)
            seen(f"{plan.index}.ffn_in")
            self._experts(layer, seen)
            pending = self._over_ranks(self.experts.outputs, self.experts.shape.num_chosen)
        return pending

    @property
    def _pairs(self) -> int:
        """What the experts leave of a row: its pairs, or their sum over ranks."""
        return self.experts.shape.num_chosen if self.group.is_alone else 1

    def _into(self, layer: LayerWeights, pending: Tensor | None, seen: Watch) -> None:
        """The streams with the last layer's experts in them, and Engram; collapsed for attention."""
        b, plan, bit_ops = self.streams, layer.plan, self.bit_ops
        shared = None if pending is None else self.shared.outputs
        taps = self._taps(plan)
        if plan.has_engram:
            hyper.mix(b, None, output=pending, shared=shared, parts=self._pairs, bit_ops=bit_ops)
            self._engram(layer)
            seen(f"{plan.index}.engram")
            pending = shared = None
        hyper.mix(
            b,
            layer.attention.weight,
            output=pending,
            shared=shared,
            parts=1 if pending is None else self._pairs,
            taps=taps,
            bit_ops=bit_ops,
        )

    def run_head(self) -> None:
        """Logits of the rows `logit_rows`, and the likeliest token of each; what the layers have left of the others
        stays."""
        if self.long:
            torch.index_select(self.streams.x, 0, self.logit_rows, out=self.wanted)
        self._project()
        self.sampling.best_of(self.vocabulary_logits)

    def run_draws(self, num_searches: int) -> None:
        """After the head, tokens in the place of the likeliest for the rows that `sampling.draws` name."""
        self.sampling.draw(self.vocabulary_logits, num_searches=num_searches)

    def _project(self) -> None:
        """Logits of the rows that are wanted."""
        splits = linear.num_splits(len(self.head), self.config.hidden_size // 64, self.num_logits)
        linear.bf16_linear(
            self.wanted, self.head, self.own_logits, self.work, splits=splits, bit_ops=self.bit_ops
        )
        if not self.group.is_alone:
            self.group.all_gather(self.own_logits, self.gathered)
            self.joined.copy_(self.gathered.transpose(0, 1))

    def _load_engram(self) -> None:
        for layer, rows in self.host_rows.items():
            for target, source in zip(self.engram_rows[layer], rows, strict=True):
                target.view(torch.uint8).copy_(source, non_blocking=True)

    def _begin(self) -> None:
        self._load_engram()
        rope_kernel[(self.num_rows,)](
            self.positions, *self.frequencies, self.rope, self.num_rows, PAIRS=self.rope.shape[-1],
            num_warps=1,
        )  # fmt: skip
        where = (self.slots, self.positions, self.pages.window_table)
        attention.locate_window(where, self.window_records, block_size=self.pages.block_size)
        self._enter()

    def _enter(self) -> None:
        """Start the streams: the embeddings of `ids` on every copy, and a pre mix that reads copy 0 alone."""
        rows = self._over_ranks(self.embedding.index_select(0, self.ids)).view(self.num_rows, -1)
        images = (self.text, self.image_rows) if self.sees else None
        hyper.start(self.streams, rows, images=images, bit_ops=self.bit_ops)

    def _taps(self, plan: LayerPlan) -> Tensor | None:
        if not plan.is_tap:
            return None
        number = self.config.dspark_target_layer_ids.index(plan.index)
        width = self.config.hidden_size
        return self.taps[:, number * width : (number + 1) * width]

    def _finish(self, weights: MixWeights) -> None:
        c = self.config
        hyper.finish(
            self.streams, weights.norm, weights.scale, weights.base, iterations=c.hc_sinkhorn_iters,
            norm_eps=c.rms_norm_eps, eps=c.hc_eps, bit_ops=self.bit_ops,
        )  # fmt: skip

    def _rope(self, plan: LayerPlan) -> tuple[Tensor, Tensor]:
        cos, sin = self.rope[1 if plan.uses_yarn else 0]
        return cos, sin

    def _fp8(
        self, x: Tensor, scales: Tensor, weight: Fp8Tiles, out: Tensor, plan: LayerPlan, head: int = 0,
        *, unsummed: bool = False,
    ) -> Tensor:  # fmt: skip
        tiles, blocks = -(-weight.num_rows // 128), -(-weight.num_columns // 128)
        return linear.fp8_linear(
            x, scales, weight, out, self.work, splits=linear.num_splits(tiles, blocks, self.num_rows),
            rope=self._rope(plan), rope_head=head, bit_ops=self.bit_ops, unsummed=unsummed,
        )  # fmt: skip

    def _plain(self, x: Tensor, weight: Tensor, out: Tensor, splits: int | None = None) -> None:
        """x bf16 [T, K] times a bf16 weight -> out float32 [T, N]."""
        if splits is None:
            splits = linear.num_splits(len(weight), weight.shape[1], self.num_rows)
        linear.bf16_linear(x, weight, out, self.work, splits=splits, bit_ops=self.bit_ops)

    def _engram(self, layer: LayerWeights) -> None:
        assert layer.engram_wkv is not None
        assert layer.engram_weight is not None
        codes, scales = self.engram_rows[layer.plan.index]
        self._fp8(codes, scales, layer.engram_wkv, self.engram_projected, layer.plan)
        engram.gate(
            self.streams.stream, self.engram_projected, layer.engram_weight,
            self.text if self.sees else self.alive, eps=self.config.rms_norm_eps, bit_ops=self.bit_ops,
        )  # fmt: skip

    def _attention(self, layer: LayerWeights, seen: Watch) -> None:
        self._attend(layer, self._write(layer, seen), seen)

    def _write(self, layer: LayerWeights, seen: Watch) -> Tensor:
        """What later rows look up: window records, entries, index keys. Returns `extra_of` the layer."""
        c, b, pages, plan = self.config, self.streams, self.pages, layer.plan
        where = (self.slots, self.positions)
        rope, eps, bit_ops = self._rope(plan), c.rms_norm_eps, self.bit_ops
        self._fp8(b.codes, b.scales, layer.qkv, self.qkv, plan)
        seen(f"{plan.index}.qkv")
        attention.write_latents(
            self.qkv, layer.q_norm, layer.kv_norm, rope, self.low_rank, self.low_rank_scales,
            pages.windows[plan.index], (*where, pages.window_table),
            block_size=pages.block_size, eps=eps, bit_ops=bit_ops,
        )  # fmt: skip
        seen(f"{plan.index}.latents")
        extra = self.extra_of(layer)
        if layer.extra is not None:
            self._plain(b.x, layer.extra, extra)
        if plan.is_kv_source:
            self._compress(layer, extra)
            seen(f"{plan.index}.entries")
        return extra

    def _attend(self, layer: LayerWeights, extra: Tensor, seen: Watch) -> None:
        """What rows make of the cache, up to the group's low rank; extra of `_write`."""
        c, plan = self.config, layer.plan
        self._fp8(self.low_rank, self.low_rank_scales, layer.wq_b, self.query, plan, c.head_dim)
        seen(f"{plan.index}.query")
        if plan.is_index_source:
            self._pick(layer, extra[:, layer.num_extra - c.index_n_heads :])
            seen(f"{plan.index}.picks")
        attended = self._core(layer)
        seen(f"{plan.index}.core")
        self._grouped(layer, attended)
        self._attended_parts = self._over_ranks(
            self._fp8(self.grouped, self.grouped_scales, layer.wo_b, self._attended, plan, unsummed=True)
        )
        seen(f"{plan.index}.attention_out")

    def _core(self, layer: LayerWeights) -> Tensor:
        """Queries over windows and picked entries, bf16 [T, H·D]."""
        c, pages, plan = self.config, self.pages, layer.plan
        buffers = self.attention[0 if plan.kv_source is None else c.index_topk]
        entries, picked = None, None
        if plan.kv_source is not None and plan.index_source is not None:
            entries, picked = pages.entries[plan.kv_source], self.entry_records[plan.index_source]
        attention.attend(
            self.query, pages.windows[plan.index], entries, (self._windows(plan), picked), layer.sink, self._rope(plan),
            buffers, bit_ops=self.bit_ops, picks_are_new=plan.is_index_source,
        )  # fmt: skip
        return buffers.out

    def _windows(self, plan: LayerPlan) -> Tensor:
        """Rows of the pages that a layer's windows lie in, int32 [T, window], -1 absent."""
        return self.window_records

    def _grouped(self, layer: LayerWeights, attended: Tensor) -> None:
        """wo_a of bf16 [T, H·D], into `grouped`."""
        columns = layer.wo_a.num_columns // 128
        linear.grouped_linear(
            attended, layer.wo_a, self.grouped, self.grouped_scales, self.work, groups=self.shape.groups,
            splits=linear.num_splits(layer.wo_a.num_rows // 128, columns, self.num_rows), bit_ops=self.bit_ops,
        )  # fmt: skip

    def _compress(self, layer: LayerWeights, extra: Tensor) -> None:
        c, pages, plan = self.config, self.pages, layer.plan
        assert layer.entry_norm is not None
        assert layer.wk is not None
        assert layer.key_norm is not None
        ratio, source = plan.compress_ratio, plan.index
        cos, sin = self.rope[1 if ratio == 1 else 2]
        where = (self.entry_slots, self.positions, pages.entry_table)
        compress.pool(
            extra, pages.open_rows[source] if ratio > 1 else extra, layer.entry_norm, (cos, sin), where,
            pages.entries[source], self.latents, ratio=ratio, num_open=pages.num_open,
            block_size=pages.block_size, eps=c.rms_norm_eps, bit_ops=self.bit_ops, keeps=not self.long,
        )  # fmt: skip
        if self.long and ratio > 1:  # after all have read what earlier steps left there
            pages.open_rows[source].index_copy_(0, self.kept_at, extra[:, : 2 * c.head_dim])
        self._plain(self.latents, layer.wk, self.keys, splits=1)
        compress.write_keys(
            self.keys, layer.key_norm, (cos, sin), where, pages.index_keys[source], ratio=ratio,
            block_size=pages.block_size, eps=c.rms_norm_eps, bit_ops=self.bit_ops,
        )  # fmt: skip

    def _pick(self, layer: LayerWeights, weights: Tensor) -> None:
        c, pages, plan = self.config, self.pages, layer.plan
        assert layer.index_wq_b is not None
        assert plan.kv_source is not None
        where = (self.slots, self.positions, pages.entry_table)
        self._fp8(
            self.low_rank, self.low_rank_scales, layer.index_wq_b, self.index_query, plan, c.index_head_dim
        )
        indexer.score(
            self.index_query, weights, pages.index_keys[plan.kv_source], where, self.scores, num_picks=c.index_topk,
            weight_scale=c.index_head_dim**-0.5 * c.index_n_heads**-0.5, ratio=plan.compress_ratio,
            block_size=pages.block_size, bit_ops=self.bit_ops,
            among=self.candidates if plan.uses_candidates else None,
        )  # fmt: skip
        if plan.is_candidate_source:
            indexer.narrow(
                self.scores, where, self.candidates, ratio=plan.compress_ratio, block_size=pages.block_size
            )
        topk.select(
            self.scores, where, self.picks[plan.index], self.choice, self.entry_records[plan.index],
            ratio=plan.compress_ratio, block_size=pages.block_size,
        )  # fmt: skip

    def _experts(self, layer: LayerWeights, seen: Watch) -> None:
        c, b, e, bit_ops = self.config, self.streams, self.experts, self.bit_ops
        joint = bool(self.shape.expert_ids) and linear.few(b.x, bit_ops=bit_ops)
        if not joint:  # the shared expert has buffers of its own and runs beside the routing
            with self._beside():
                experts.shared_up(
                    b.codes, b.scales, layer.shared_w13, self.shared, c.swiglu_limit, bit_ops=bit_ops
                )
                experts.shared_down(layer.shared_w2, self.shared, bit_ops=bit_ops)
        self._plain(b.x, layer.router, self.logits)
        routing.choose(
            self.logits, layer.bias, self.chosen, self.route_weights, e, scaling=c.routed_scaling_factor,
            first_expert=self.shape.expert_ids.start, of_images=self._of_images(layer),

        )  # fmt: skip
        if self.is_sharded:  # the choices that are another rank's add nothing here
            e.outputs.zero_()
        seen(f"{layer.plan.index}.route")
        if joint:
            experts.all_experts(
                b.codes, b.scales, layer.w13, layer.w2, layer.shared_w13, layer.shared_w2,
                self.route_weights, e, self.shared, c.swiglu_limit,
            )  # fmt: skip
        elif self.shape.expert_ids:
            experts.routed_up(
                b.codes, b.scales, layer.w13, self.route_weights, e, c.swiglu_limit, bit_ops=bit_ops
            )
            experts.routed_down(layer.w2, e, bit_ops=bit_ops)
        if self._side is not None and not joint:
            torch.cuda.current_stream().wait_stream(self._side)
        seen(f"{layer.plan.index}.experts")

    def _of_images(self, layer: LayerWeights) -> tuple[Tensor, Tensor] | None:
        """The router's bias for rows of images, and which these are not."""
        return (layer.bias_vl, self.text) if self.sees and layer.bias_vl is not None else None

    def _over_ranks(self, output: Tensor, parts: int = 1) -> Tensor:
        """The sum over ranks of `output`, which is as hyper.mix takes it, as a part float32 [1, T, M], until the next
        sum; of a rank alone, `output`."""
        if self.total is None:
            return output
        sums.add_up(output, self.total, parts=parts)
        self.group.all_reduce(self.total)
        return self.total[None]

    def _beside(self) -> AbstractContextManager[object]:
        """The side stream, after all that was launched; no other one without a GPU."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)


def rope_tables(config: ModelConfig) -> tuple[RopeTable, RopeTable]:
    """The local and the yarn table (spec §N.7)."""
    scaling = config.rope_scaling
    yarn = RopeTable.yarn(
        config.qk_rope_head_dim,
        config.compress_rope_theta,
        factor=scaling.factor,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        original_max_position=scaling.original_max_position_embeddings,
    )
    return RopeTable.local(config.qk_rope_head_dim, config.rope_theta), yarn


def _most_partials(
    shape: Shape, layers: Sequence[LayerWeights], num_experts: int, num_rows: int, num_logits: int
) -> int:
    """Floats of the largest split sum of the projections of a step. A matrix of fewer rows may be split more, and take
    more of them: every one counts, not the largest."""
    c = shape.config
    grouped = shape.groups * shape.group_rank
    sizes = [
        (c.q_lora_rank + c.head_dim, c.hidden_size, 128, num_rows),
        (shape.heads * c.head_dim, c.q_lora_rank, 128, num_rows),
        (grouped, shape.heads // shape.groups * c.head_dim, 128, num_rows),
        (c.hidden_size, grouped, 128, num_rows),
        (c.index_n_heads * c.index_head_dim, c.q_lora_rank, 128, num_rows),
        ((c.hc_mult + 1) * c.hidden_size, c.engram_width, 128, num_rows),
        *((rows, c.hidden_size, 64, num_rows) for rows in {layer.num_extra for layer in layers}),
        (num_experts, c.hidden_size, 64, num_rows),
        (shape.vocabulary, c.hidden_size, 64, num_logits),
    ]
    most = 0
    for rows, columns, tile, count in sizes:
        tiles = -(-rows // tile)
        splits = linear.num_splits(tiles, -(-columns // tile), count)
        if splits > 1:
            most = max(most, splits * tiles * tile * linear.padded_rows(count))
    return most


def make_pages(
    config: ModelConfig,
    *,
    num_slots: int,
    max_model_len: int,
    block_size: int,
    device: torch.device | str,
    num_drafted: int = 0,
) -> Pages:
    """Pages for `num_slots` requests of up to `max_model_len`, every block at a random place.

    Window pages are shared out by modulo: a request has blocks for its window and one verify window more. Where blocks
    of drafts are made for `num_drafted` requests at a time, draft stages have pages too, and the last rows are theirs.
    """
    blocks = -(-max_model_len // block_size)
    kept = -(-(config.sliding_window + config.dspark_block_size + 1) // block_size) + 1
    generator = torch.Generator().manual_seed(7)
    order = torch.randperm(num_slots * blocks, generator=generator).to(torch.int32) + 1
    window_order = torch.randperm(num_slots * kept, generator=generator).to(torch.int32) + 1
    window_table = window_order.view(num_slots, kept)[:, torch.arange(blocks) % kept]

    def records(rows: int, num_bytes: int) -> Tensor:
        return torch.zeros(rows, num_bytes, dtype=torch.uint8, device=device)

    entries, keys, open_rows = {}, {}, {}
    num_open = 2 + config.dspark_block_size
    for source in config.kv_source_layer_ids:
        ratio = config.compress_ratios[source]
        rows = (num_slots * blocks + 1) * (block_size // ratio)
        entries[source] = records(rows, ENTRY.row_bytes(config.head_dim))
        keys[source] = records(rows, INDEX_KEY.row_bytes(config.index_head_dim))
        if ratio > 1:
            open_rows[source] = torch.zeros(num_slots * num_open, 2 * config.head_dim, device=device)
    window_rows = (num_slots * kept + 1) * block_size + num_drafted * config.dspark_block_size
    num_layers = config.num_hidden_layers + (len(config.draft_layers) if num_drafted else 0)
    windows = [records(window_rows, WINDOW.row_bytes(config.head_dim)) for _ in range(num_layers)]
    return Pages(
        windows,
        entries,
        keys,
        open_rows,
        window_table.contiguous().to(device),
        order.view(num_slots, blocks).to(device),
        block_size,
        num_open,
    )


__all__ = ["DECODE_LOGITS", "DecodeStep", "Pages", "make_pages", "rope_kernel", "rope_tables"]
