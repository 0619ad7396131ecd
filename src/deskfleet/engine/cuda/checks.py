"""Every stage of a running step against the reference, on the inputs that the stage really had.

Owns the comparison, not the step: hand a `StepCheck` to `DecodeStep.run` as its `watch`. Stages are compared one
by one, because errors do not stay apart otherwise: a last place of bf16 decides now and then which of two FP8 codes a
value takes, and random weights make a percent of that within two layers. Copies what it looks at to the CPU: slow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deskfleet.engine.cuda import linear
from deskfleet.engine.cuda.draft import DraftContext, DraftStep
from deskfleet.engine.cuda.packing import Fp4Tiles, Fp8Tiles, ungate, unpack_fp4, unpack_fp8, unpack_mixes
from deskfleet.engine.cuda.step import DecodeStep
from deskfleet.engine.cuda.synthetic import LayerWeights, MixWeights
from deskfleet.engine.ops import quant, reference
from deskfleet.engine.ops.quant import Fp4Matrix
from deskfleet.engine.ops.records import ENTRY, INDEX_KEY, WINDOW


def relative_error(mine: Tensor, theirs: Tensor) -> float:
    """‖mine − theirs‖ / ‖theirs‖; infinite for anything not finite."""
    wide, reference_ = mine.detach().cpu().to(torch.float64), theirs.cpu().to(torch.float64)
    difference = (wide - reference_).norm() / reference_.norm().clamp_min(1e-30)
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")


def matrix(tiles: Fp8Tiles) -> Tensor:
    """float64 [N, K] on the CPU."""
    codes, scales = unpack_fp8(
        Fp8Tiles(tiles.codes.cpu(), tiles.scales.cpu(), tiles.num_rows, tiles.num_columns)
    )
    return quant.dequantize_fp8_weight(codes, scales)


def mix_matrix(weight: Tensor) -> Tensor:
    """float64 [24, 4·M] of a packed mix weight."""
    parts = unpack_mixes(weight.cpu()).to(torch.float64)
    return parts[:24] + parts[24:]


def some_experts(tiles: Fp4Tiles, chosen: Tensor, *, gated: bool) -> Fp4Matrix:
    """The matrices of some experts, on the CPU: all of them would not fit."""
    codes, scales = tiles.codes[chosen].cpu(), tiles.scales[chosen].cpu()
    return unpack_fp4(Fp4Tiles(codes, scales, tiles.num_rows, tiles.num_columns), gated=gated)


@dataclass
class StepCheck:
    """Errors by stage and value. `only` are the layers looked at; None for all."""

    step: DecodeStep
    only: frozenset[int] | None = None
    errors: dict[str, float] = field(default_factory=dict)
    _mixes: tuple[str, tuple[Tensor, ...]] | None = field(default=None, init=False)

    def __call__(self, name: str) -> None:
        """What `DecodeStep.run` calls after the launches of a stage."""
        number, _, stage = name.rpartition(".")
        if not number:
            if stage == "embed":
                self._remember(None)
                self._open = {source: self._cpu(rows) for source, rows in self.step.pages.open_rows.items()}
            return
        index = int(number)
        watched = self.only is None or index in self.only
        layer = next(layer for layer in self.step.layers if layer.plan.index == index)
        method = getattr(self, f"_check_{stage}", None)
        if watched and method is not None:
            method(layer, name)
        if stage == "engram":
            self._remember(None)
        elif stage == "attention_out":
            self._remember(self._cpu(self.step.attended))
        elif stage == "experts":
            outputs = self._cpu(self.step.experts.outputs).to(torch.float64)
            total = outputs.view(self.step.num_rows, layer.plan.num_chosen, -1).sum(1)
            self._remember(reference.add_round(total, self._cpu(self.step.shared.outputs)))

    def worst(self) -> tuple[str, float]:
        """The stage with the greatest error."""
        return max(self.errors.items(), key=lambda item: item[1])

    def _cpu(self, tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().clone()

    def _note(self, name: str, mine: Tensor, theirs: Tensor) -> None:
        self.errors[name] = relative_error(mine, theirs)

    def _remember(self, output: Tensor | None) -> None:
        b = self.step.streams
        if self._mixes is not None:  # by now whichever kernel makes them has
            name, mixes = self._mixes
            for part, mine, theirs in zip(
                ("pre", "post", "comb"), (b.pre, b.post, b.comb), mixes, strict=True
            ):
                self._note(f"{name}.{part}", mine, theirs)
            self._mixes = None
        self._before = tuple(self._cpu(t) for t in (b.stream, b.pre, b.post, b.comb))
        self._output = output

    def _expanded(self) -> Tensor:
        stream, _, post, comb = self._before
        return stream if self._output is None else reference.hc_expand(self._output, stream, post, comb)

    def _check_engram(self, layer: LayerWeights, name: str) -> None:
        step, c = self.step, self.step.config
        assert layer.engram_wkv is not None
        assert layer.engram_weight is not None
        codes, scales = step.host_rows[layer.plan.index]
        rows = reference.decode_fp8_rows(codes, scales[:, : c.engram_width // 32])
        projected = reference.quantized_linear(rows, matrix(layer.engram_wkv))
        self._note(f"{name}.projected", step.engram_projected, projected)
        stream, width = self._expanded(), c.hidden_size
        key, value = projected[:, : 4 * width].unflatten(1, (4, width)), projected[:, 4 * width :]
        alive = torch.ones(len(stream), dtype=torch.bool)
        weight = layer.engram_weight.cpu()
        expected = reference.engram_gate(stream, key, value, weight, alive, c.rms_norm_eps)
        self._note(f"{name}.stream", step.streams.stream, expected)

    def _check_attention_in(self, layer: LayerWeights, name: str) -> None:
        self._check_mix(layer.attention, name)

    def _check_ffn_in(self, layer: LayerWeights, name: str) -> None:
        self._check_mix(layer.ffn, name)

    def _check_mix(self, weights: MixWeights, name: str) -> None:
        b, c = self.step.streams, self.step.config
        self._note(f"{name}.stream", b.stream, self._expanded())
        stream = self._cpu(b.stream)
        x = reference.hc_collapse_norm(stream, self._before[1], weights.norm.cpu(), c.rms_norm_eps)
        self._note(f"{name}.x", b.x, x)
        mixes = reference.hc_weights(
            stream, mix_matrix(weights.weight), weights.scale.cpu(), weights.base.cpu(),
            norm_eps=c.rms_norm_eps, iterations=c.hc_sinkhorn_iters, eps=c.hc_eps,
        )  # fmt: skip
        self._mixes = name, mixes

    def _check_qkv(self, layer: LayerWeights, name: str) -> None:
        x = self._cpu(self.step.streams.x)
        self._note(name, self.step.qkv, reference.quantized_linear(x, matrix(layer.qkv)))

    def _rope(self, layer: LayerWeights) -> tuple[Tensor, Tensor]:
        cos, sin = self.step._rope(layer.plan)
        return cos.cpu(), sin.cpu()

    def _low_rank(self) -> Tensor:
        codes, scales = self.step.low_rank.view(torch.uint8).cpu(), self.step.low_rank_scales.cpu()
        return reference.decode_fp8_rows(codes, scales.view(torch.uint8)[:, : codes.shape[1] // 32])

    def _places(self, table: Tensor, numbers: Tensor, per_block: int) -> Tensor:
        slots = self.step.slots.cpu().long()
        safe = numbers.clamp_min(0)
        rows = table.cpu().long()[slots[:, None], safe // per_block] * per_block + safe % per_block
        return torch.where(numbers < 0, -1, rows)

    def _check_latents(self, layer: LayerWeights, name: str) -> None:
        step, c = self.step, self.step.config
        qkv = self._cpu(step.qkv)
        low_rank = reference.rms_norm(qkv[:, : c.q_lora_rank], layer.q_norm.cpu(), c.rms_norm_eps)
        self._note(f"{name}.low_rank", self._low_rank(), quant.fake_quant_fp8(low_rank))
        latent = reference.rms_norm(qkv[:, c.q_lora_rank :], layer.kv_norm.cpu(), c.rms_norm_eps)
        positions = step.positions.cpu().long()[:, None]
        own = self._places(step.pages.window_table, positions, step.pages.block_size)[:, 0]
        mine = step.pages.windows[layer.plan.index].cpu()[own]
        records = WINDOW.pack(reference.apply_rope(latent, *self._rope(layer)))
        self._note(f"{name}.window", WINDOW.unpack(mine), WINDOW.unpack(records))

    def _check_entries(self, layer: LayerWeights, name: str) -> None:
        """The entries of rows whose group is complete; a group's first member may be one of an earlier step."""
        step, c, pages, plan = self.step, self.step.config, self.step.pages, layer.plan
        assert layer.extra is not None
        assert layer.wk is not None
        assert layer.entry_norm is not None
        assert layer.key_norm is not None
        x = self._cpu(step.streams.x)
        weight = linear.unpack_bf16(layer.extra.cpu())[: layer.num_extra]
        extra = step.extra_of(layer)
        self._note(f"{name}.projected", extra, reference.linear_f32(x, weight))
        ratio, size = plan.compress_ratio, c.head_dim
        positions = step.positions.cpu().long()
        done = torch.nonzero(positions % ratio == ratio - 1)[:, 0]
        if not len(done):
            return
        projected = self._cpu(extra)[done]
        if ratio == 1:
            pooled = projected[:, :size].to(torch.bfloat16)
        else:
            state = self._open[plan.index]  # as earlier steps left it
            slots = step.slots.cpu().long()[done]
            first = state[slots * pages.num_open + (positions[done] - 1) % pages.num_open]
            before = done - 1
            beside = (before >= 0) & (step.slots.cpu().long()[before] == slots)
            beside &= positions[before] == positions[done] - 1
            first = torch.where(beside[:, None], self._cpu(extra)[before, : 2 * size], first)
            both = torch.stack((first, projected[:, : 2 * size]), 1)
            pooled = reference.compress_pairs(both[..., :size], both[..., size:])
        latent = reference.rms_norm(pooled, layer.entry_norm.cpu(), c.rms_norm_eps)
        self._note(f"{name}.latent", step.latents.cpu()[done], latent)
        cos, sin = step.rope[1 if ratio == 1 else 2].cpu()
        rope = (cos[done], sin[done])
        key = reference.linear(latent, linear.unpack_bf16(layer.wk.cpu())[: c.index_head_dim])
        key = reference.rms_norm(key, layer.key_norm.cpu(), c.rms_norm_eps)
        rows = self._places(pages.entry_table, (positions // ratio)[:, None], pages.block_size // ratio)[
            done, 0
        ]
        for part, form, pool, values in (
            ("entry", ENTRY, pages.entries, latent),
            ("key", INDEX_KEY, pages.index_keys, key),
        ):
            expected = form.unpack(form.pack(reference.apply_rope(values, *rope)))
            self._note(f"{name}.{part}", form.unpack(pool[plan.index].cpu()[rows]), expected)

    def _check_query(self, layer: LayerWeights, name: str) -> None:
        query = reference.quantized_linear(self._low_rank(), matrix(layer.wq_b))
        query = reference.apply_rope(query.unflatten(1, (-1, self.step.config.head_dim)), *self._rope(layer))
        self._note(name, self.step.query, query.flatten(1))

    def _check_picks(self, layer: LayerWeights, name: str) -> None:
        step, c, pages, plan = self.step, self.step.config, self.step.pages, layer.plan
        assert layer.index_wq_b is not None
        assert plan.kv_source is not None
        query = reference.quantized_linear(self._low_rank(), matrix(layer.index_wq_b))
        query = reference.apply_rope(query.unflatten(1, (-1, c.index_head_dim)), *self._rope(layer))
        self._note(f"{name}.query", step.index_query, query.flatten(1))
        extra = step.extra_of(layer).cpu()
        weights = extra[:, -c.index_n_heads :].to(torch.bfloat16)
        weights = weights * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        own = quant.fake_quant_fp4_e8m0(self._cpu(step.index_query).unflatten(1, (-1, c.index_head_dim)))
        keys = pages.index_keys[plan.kv_source].cpu()
        visible = (step.positions.cpu().long() + 1) // plan.compress_ratio
        per_block = pages.block_size // plan.compress_ratio
        mine, expected = [], []
        wrong = 0
        for t in range(step.num_rows):
            count = int(visible[t])
            numbers = torch.arange(count)
            rows = self._places(pages.entry_table, numbers.expand(step.num_rows, -1), per_block)[t]
            limit = step.candidates.unit * step.candidates.top_blocks
            blocks = None
            if plan.uses_candidates and count > limit:
                blocks = step.candidates.picks[t : t + 1].cpu().long()
            scores = reference.index_scores(
                own[t : t + 1], weights[t : t + 1], INDEX_KEY.unpack(keys[rows]), numbers, visible[t : t + 1],
                blocks, block=c.candidate_block_size,
            )  # fmt: skip
            if count > c.index_topk:
                mine.append(step.scores[t, :count].cpu())
                expected.append(scores[0])
                wrong += int((torch.isneginf(mine[-1]) != torch.isneginf(scores[0])).sum())
                mine[-1], expected[-1] = (part.clamp_min(-1e30) for part in (mine[-1], expected[-1]))
                scores = step.scores[t : t + 1, :count].cpu()  # the choice is exact given the scores
            if plan.is_candidate_source and count > limit:
                numbers = torch.arange(-(-count // step.candidates.unit))
                ranked = reference.candidate_scores(
                    scores, numbers, visible[t : t + 1], block=step.candidates.unit
                )
                best = reference.top_positions(ranked, step.candidates.top_blocks)[0]
                wrong += int((step.candidates.picks[t].cpu().long() != best).sum())
            picks = step.picks[plan.index][t].cpu().long()
            found = reference.top_positions(scores, c.index_topk)[0]
            wrong += int((picks[: len(found)] != found).sum() + (picks[len(found) :] != -1).sum())
        if mine:
            self._note(f"{name}.scores", torch.cat(mine), torch.cat(expected))
        self.errors[f"{name}.wrong"] = float(wrong)

    def _window_rows(self) -> Tensor:
        """Rows of the window pages that each row sees, int64 [T, W], -1 absent."""
        step, size = self.step, self.step.config.sliding_window
        numbers = step.positions.cpu().long()[:, None] + torch.arange(size) + 1 - size
        return self._places(step.pages.window_table, numbers, step.pages.block_size)

    def _check_core(self, layer: LayerWeights, name: str) -> None:
        step, c, pages, plan = self.step, self.step.config, self.step.pages, layer.plan
        rows = self._window_rows()
        sources = [(WINDOW.unpack(pages.windows[plan.index].cpu()), rows)]
        buffers = step.attention[0]
        if plan.kv_source is not None and plan.index_source is not None:
            picks = step.picks[plan.index_source].cpu().long()
            rows = self._places(pages.entry_table, picks, pages.block_size // plan.compress_ratio)
            used, index = torch.unique(rows, return_inverse=True)
            absent = int((used < 0).sum())
            records = pages.entries[plan.kv_source][used[absent:].to(step.device)].cpu()
            sources.append((ENTRY.unpack(records), index - absent))
            buffers = step.attention[c.index_topk]
        query = self._cpu(step.query).unflatten(1, (-1, c.head_dim))
        attended = reference.sparse_attention(query, sources, layer.sink.cpu(), c.head_dim**-0.5)
        attended = reference.apply_rope(attended, *self._rope(layer), inverse=True)
        self._note(name, buffers.out, attended.flatten(1))

    def _check_attention_out(self, layer: LayerWeights, name: str) -> None:
        step, groups = self.step, self.step.shape.groups
        has_entries = layer.plan.kv_source is not None
        attended = self._cpu(step.attention[step.config.index_topk if has_entries else 0].out)
        weight = matrix(layer.wo_a).unflatten(0, (groups, -1))
        low = reference.grouped_linear(attended.unflatten(1, (groups, -1)), weight).flatten(1)
        codes, scales = step.grouped.view(torch.uint8).cpu(), step.grouped_scales.cpu().view(torch.uint8)
        grouped = reference.decode_fp8_rows(codes, scales[:, : codes.shape[1] // 32])
        self._note(f"{name}.grouped", grouped, quant.fake_quant_fp8(low))
        self._note(name, step.attended, reference.quantized_linear(grouped, matrix(layer.wo_b)))

    def _check_route(self, layer: LayerWeights, name: str) -> None:
        step, c = self.step, self.step.config
        weight = linear.unpack_bf16(layer.router.cpu())[: layer.plan.num_experts]
        chosen, weights = reference.route(
            self._cpu(step.streams.x), weight, layer.bias.cpu(), num_chosen=layer.plan.num_chosen,
            scaling=c.routed_scaling_factor,
        )  # fmt: skip
        self.errors[f"{name}.wrong"] = float((step.chosen.cpu() != chosen).sum())
        self._note(f"{name}.weights", step.route_weights, weights)

    def _check_experts(self, layer: LayerWeights, name: str) -> None:
        step, c = self.step, self.step.config
        x, chosen = self._cpu(step.streams.x), step.chosen.cpu().long()
        ids = step.shape.expert_ids
        used, local = torch.unique(chosen, return_inverse=True)
        held = (used >= ids.start) & (used < ids.stop)  # another rank adds what the others give
        on_device = (used[held] - ids.start).to(step.device)
        first = int((used < ids.start).sum())
        expected = reference.routed_experts(
            x, local, self._cpu(step.route_weights), some_experts(layer.w13, on_device, gated=True),
            some_experts(layer.w2, on_device, gated=False), first_expert=first, limit=c.swiglu_limit,
        )  # fmt: skip
        outputs = step.experts.outputs.cpu().to(torch.float64).unflatten(0, (step.num_rows, -1)).sum(1)
        self._note(f"{name}.routed", outputs, expected)
        shared = reference.shared_expert(
            x, ungate(matrix(layer.shared_w13)), matrix(layer.shared_w2), limit=c.swiglu_limit
        )
        self._note(f"{name}.shared", step.shared.outputs, shared)


@dataclass
class DraftCheck(StepCheck):
    """The same of a block of drafts, with its context as the kernels read it; hand it to `DraftStep.run`. For drafts
    that are greedy."""

    step: DraftStep

    def __call__(self, name: str) -> None:
        super().__call__(name)
        step, drafts = self.step, self.step.drafts
        if name == "head":
            self._base = reference.linear_f32(self._cpu(step.streams.x), self._head())
            self._note("head", step.vocabulary_logits, self._base)
            self._base = self._cpu(step.vocabulary_logits)
        elif name == "drafts":
            tokens = step.tokens.cpu()
            embedded = drafts.markov_embedding.cpu()[tokens[:, :-1]].flatten(0, 1)
            bias = reference.linear_f32(embedded, drafts.markov_head.cpu())
            self._note("drafts.logits", step.vocabulary_logits, self._base + bias)
            best = step.vocabulary_logits.cpu().argmax(-1).view(len(tokens), -1)
            self.errors["drafts.wrong"] = float((tokens[:, 1:] != best).sum())
            joint = torch.cat((self._cpu(step.streams.collapsed), embedded), -1)
            expected = reference.linear_f32(joint, drafts.confidence.cpu()[None])
            self._note("drafts.confidence", step.confidence, expected[:, 0])

    def _head(self) -> Tensor:
        return linear.unpack_bf16(self.step.head.cpu())[: self.step.vocabulary_logits.shape[1]]

    def _window_rows(self) -> Tensor:
        step, length = self.step, self.step.length
        request = torch.arange(step.num_requests).repeat_interleave(length)
        slots, position, begin = step.anchors.cpu().long()[request].T
        size, table = step.config.sliding_window, step.context_table.cpu().long()
        numbers = position[:, None] + torch.arange(-size, 0)
        blocks = numbers.clamp_min(0) // step.context_block_size
        rows = table[slots[:, None], blocks] * step.context_block_size + numbers % step.context_block_size
        context = torch.where(numbers >= begin[:, None].clamp_min(0), rows, -1)
        own = step.first_own + request[:, None] * length + torch.arange(length)
        return torch.cat((context, own), 1)


def context_errors(context: DraftContext) -> dict[str, float]:
    """Errors by stage of what `DraftContext.run` has just left (oracle: DraftModel.commit)."""
    drafts, step, eps = context.drafts, context.step, context.step.config.rms_norm_eps
    found = {}
    main = reference.quantized_linear(step.taps.cpu(), matrix(drafts.main_proj))
    found["context.main"] = relative_error(context.main, main)
    main = reference.rms_norm(context.main.cpu(), drafts.main_norm.cpu(), eps)
    latents = reference.quantized_linear(main, matrix(drafts.main_kv))
    found["context.latents"] = relative_error(context.latents, latents)
    slots, positions, size = step.slots.cpu().long(), step.positions.cpu().long(), step.pages.block_size
    rows = step.pages.window_table.cpu().long()[slots, positions // size] * size + positions % size
    rope = tuple(step.rope[0].cpu())
    for number, layer in enumerate(drafts.layers):
        own = context.latents.cpu().unflatten(1, (len(drafts.layers), -1))[:, number].contiguous()
        latent = reference.apply_rope(reference.rms_norm(own, layer.kv_norm.cpu(), eps), *rope)
        mine = WINDOW.unpack(step.pages.windows[layer.plan.index].cpu()[rows])
        found[f"context.{number}.entry"] = relative_error(mine, WINDOW.unpack(WINDOW.pack(latent)))
    return found


__all__ = [
    "DraftCheck",
    "StepCheck",
    "context_errors",
    "matrix",
    "mix_matrix",
    "relative_error",
    "some_experts",
]
