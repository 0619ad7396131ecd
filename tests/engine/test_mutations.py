"""Planted mistakes must turn the golden layer test red. A mistake that it cannot see would be a hole in it.

Each mistake is one patch of the engine, made before the model is built. The kinds follow the golden README §6 and
spec §13.1, plus faults of our own caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deskfleet.engine import batch as batch_module
from deskfleet.engine import ops
from deskfleet.engine.model import attention, draft, indexer, moe, v41
from deskfleet.engine.model.compressor import Compressor
from deskfleet.engine.model.step import Step
from deskfleet.engine.ops import reference
from deskfleet.engine.ops.records import RecordFormat
from deskfleet.engine.ops.rope import RopeTable
from deskfleet.engine.weights import ShardReader
from deskfleet.model.cache_formats import CacheFormats
from tests.engine.golden import Harness, layer_differences

Patch = pytest.MonkeyPatch
MISTAKES: dict[str, Callable[[Patch], None]] = {}


def mistake(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MISTAKES[plant.__name__] = plant
    return plant


class Bf16Records:
    """A record format that keeps rows as they are."""

    def pack(self, x: Tensor) -> Tensor:
        return x.contiguous().view(torch.uint8)

    def unpack(self, records: Tensor) -> Tensor:
        return records.contiguous().view(torch.bfloat16)

    unpack_rows = RecordFormat.unpack_rows
    unpack_joined = RecordFormat.unpack_joined
    pick = RecordFormat.pick


def store_as(patch: Patch, name: str, size: str, records: Bf16Records) -> None:
    """Replace a record format by one of two bytes an element, and widen the pages for it."""
    patch.setattr(ops, name, records)
    patch.setattr(CacheFormats, size, property(lambda formats: 2 * formats.config.head_dim))


def wrap(patch: Patch, owner: object, name: str, change: Callable) -> None:
    """Replace owner.name by change(original)."""
    patch.setattr(owner, name, change(getattr(owner, name)))


@pytest.mark.parametrize("name", MISTAKES_ORDER := (
    "rope_halves_instead_of_pairs", "no_inverse_rope", "inverse_rope_forgotten_sign", "no_yarn", "yarn_everywhere",
    "no_sink", "sink_of_the_neighbour_head", "window_one_short", "window_rows_not_quantised",
    "only_the_unrotated_dims_quantised", "entries_not_quantised", "entries_quantised_32_e8m0",
    "entry_position_of_last_token",
    "entry_visible_one_token_early", "index_key_from_rotated_latent", "stale_picks_of_the_candidate_source",
    "no_candidate_restriction", "consumers_read_the_first_source", "index_keys_of_another_layer_on_open_groups",
    "top_k_drops_the_best", "router_bias_ignored", "bias_in_the_routing_weight", "route_scale_ignored",
    "route_weight_after_w2", "swiglu_limit_ignored", "gate_clamped_below_too", "gate_temperature", "image_bias_ignored",
    "shared_expert_missing", "hc_pre_not_delayed", "hc_comb_transposed", "one_sinkhorn_iteration",
    "norm_eps_that_matters", "engram_off_in_layer_4", "engram_multipliers_shifted", "engram_reaches_across_images",
    "engram_value_on_image_rows", "scale_grid_shifted", "scale_rows_reversed", "fp4_nibbles_swapped",
    "query_normalised_per_head",
    "activations_not_quantised", "output_groups_permuted", "draft_block_causal", "draft_rings_forgotten",
    "draft_taps_from_one_copy", "markov_bias_of_the_first_token", "confidence_of_the_drafted_token",
    "open_group_forgotten", "softmax_scale_of_the_rope_part",
))  # fmt: skip
def test_the_golden_layers_see(name, monkeypatch):
    MISTAKES[name](monkeypatch)
    harness = Harness(num_slots=1, max_model_len=128)
    try:
        first = next(layer_differences(harness), None)
    finally:
        harness.runner.close()
    assert first is not None, f"planted {name} and nothing turned red"
    print(f"{name}: {first}")


def test_every_mistake_is_listed():
    assert set(MISTAKES) == set(MISTAKES_ORDER)
    assert len(MISTAKES) >= 15


# --- rotary ----------------------------------------------------------------------------------------------------------


@mistake
def rope_halves_instead_of_pairs(patch: Patch) -> None:
    def halves(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[-1],)
        cos, sin = cos.view(shape), -sin.view(shape) if inverse else sin.view(shape)
        width = 2 * cos.shape[-1]
        first, second = x[..., -width:].float().chunk(2, -1)
        rotated = torch.cat((first * cos - second * sin, first * sin + second * cos), -1)
        return torch.cat((x[..., :-width], rotated.to(x.dtype)), -1)

    patch.setattr(ops, "apply_rope", halves)


@mistake
def no_inverse_rope(patch: Patch) -> None:
    wrap(
        patch, ops, "apply_rope", lambda real: lambda x, c, s, inverse=False: x if inverse else real(x, c, s)
    )


@mistake
def inverse_rope_forgotten_sign(patch: Patch) -> None:
    wrap(patch, ops, "apply_rope", lambda real: lambda x, c, s, inverse=False: real(x, c, s))


@mistake
def no_yarn(patch: Patch) -> None:
    plain = lambda config: RopeTable.local(config.qk_rope_head_dim, config.compress_rope_theta)  # noqa: E731
    patch.setattr(v41, "yarn_table", plain)


@mistake
def yarn_everywhere(patch: Patch) -> None:
    def begin(real):
        def changed(self, batch, cache, recorder=None) -> Step:
            step = real(self, batch, cache, recorder)
            return replace(step, rope={True: step.rope[True], False: step.rope[True]})

        return changed

    wrap(patch, v41.V41Model, "begin", begin)


# --- attention -------------------------------------------------------------------------------------------------------


def change_attention(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    """Change the sinks handed to the attention core."""
    wrap(
        patch,
        ops,
        "sparse_attention",
        lambda real: lambda q, src, sink, scale: real(q, src, change(sink), scale),
    )


@mistake
def no_sink(patch: Patch) -> None:
    change_attention(patch, lambda sink: torch.full_like(sink, -torch.inf))


@mistake
def sink_of_the_neighbour_head(patch: Patch) -> None:
    change_attention(patch, lambda sink: sink.roll(1))


@mistake
def softmax_scale_of_the_rope_part(patch: Patch) -> None:
    wrap(
        patch,
        ops,
        "sparse_attention",
        lambda real: lambda q, src, sink, scale: real(q, src, sink, scale * 1.02),
    )


@mistake
def window_one_short(patch: Patch) -> None:
    def short(real):
        def changed(segments, starts, tables, size):
            index = real(segments, starts, tables, size)
            oldest = index.index.clone()
            full = (oldest >= 0).all(1)
            oldest[full, 0] = -1
            return replace(index, index=oldest)

        return changed

    wrap(patch, batch_module, "_window_index", short)


@mistake
def window_rows_not_quantised(patch: Patch) -> None:
    """A record that keeps bf16 as it is, two bytes an element."""
    store_as(patch, "WINDOW", "window_record_bytes", Bf16Records())


@mistake
def only_the_unrotated_dims_quantised(patch: Patch) -> None:
    class Partly(Bf16Records):
        def pack(self, x: Tensor) -> Tensor:
            return super().pack(torch.cat((ops.fake_quant_fp8(x)[:, :-16], x[:, -16:]), -1))

    store_as(patch, "WINDOW", "window_record_bytes", Partly())


@mistake
def query_normalised_per_head(patch: Patch) -> None:
    """A feature of V4 that V4.1 does not have."""

    def queries(real):
        def changed(self, x, rope):
            query, low_rank = real(self, x, rope)
            return ops.rms_norm(query, torch.ones(query.shape[-1]), 1e-20), low_rank

        return changed

    wrap(patch, attention.Attention, "queries", queries)


@mistake
def output_groups_permuted(patch: Patch) -> None:
    wrap(patch, ops, "grouped_linear", lambda real: lambda x, w: real(x.roll(1, 1), w))


# --- compressed entries ----------------------------------------------------------------------------------------------


@mistake
def entries_not_quantised(patch: Patch) -> None:
    store_as(patch, "ENTRY", "entry_record_bytes", Bf16Records())


@mistake
def entries_quantised_32_e8m0(patch: Patch) -> None:
    class Coarser(Bf16Records):
        def pack(self, x: Tensor) -> Tensor:
            return super().pack(ops.fake_quant_fp4_e8m0(x))

    store_as(patch, "ENTRY", "entry_record_bytes", Coarser())


@mistake
def entry_position_of_last_token(patch: Patch) -> None:
    def last(real):
        def changed(segments, starts, tables, ratio, num_open_rows):
            index = real(segments, starts, tables, ratio, num_open_rows)
            return replace(index, entry_positions=index.entry_positions + ratio - 1)

        return changed

    wrap(patch, batch_module, "_compression_index", last)


@mistake
def open_group_forgotten(patch: Patch) -> None:
    def forgetful(real):
        def changed(self, x, step):
            for state in (*step.cache.open_values.values(), *step.cache.open_gates.values()):
                state.zero_()
            return real(self, x, step)

        return changed

    wrap(patch, Compressor, "latents", forgetful)


@mistake
def index_key_from_rotated_latent(patch: Patch) -> None:
    wrap(
        patch, Compressor, "index_keys",
        lambda real: lambda self, latent, rope: real(self, ops.apply_rope(latent, *rope), rope),
    )  # fmt: skip


@mistake
def consumers_read_the_first_source(patch: Patch) -> None:
    """Layer 5 reads layer 2's entries instead of layer 4's."""

    def build(real):
        def changed(self, config, layer, reader, comm):
            real(self, config, layer, reader, comm)
            if layer.kv_source == 4 and not layer.is_kv_source:
                self.layer = replace(layer, kv_source=2)

        return changed

    wrap(patch, attention.Attention, "__init__", build)


# --- indexer ---------------------------------------------------------------------------------------------------------


@mistake
def entry_visible_one_token_early(patch: Patch) -> None:
    def early(real):
        def changed(self, segments, image_embeddings=None):
            batch = real(self, segments, image_embeddings)
            seen = {
                r: torch.minimum((batch.positions + 2) // r, v.max()) for r, v in batch.num_visible.items()
            }
            return replace(batch, num_visible=seen)

        return changed

    wrap(patch, batch_module.BatchBuilder, "build", early)


@mistake
def stale_picks_of_the_candidate_source(patch: Patch) -> None:
    """Layer 9 keeps layer 6's picks although layer 8 has re-indexed."""

    def call(real):
        def changed(self, x, step):
            if self.layer.index == 9:
                step.picks[8] = step.picks[6]
            return real(self, x, step)

        return changed

    wrap(patch, attention.Attention, "__call__", call)


@mistake
def no_candidate_restriction(patch: Patch) -> None:
    patch.setattr(
        indexer.Indexer,
        "_candidates",
        lambda self, scores, numbers, visible, step: torch.arange(-(-len(numbers) // 8)).expand(
            len(scores), -1
        ),
    )


@mistake
def index_keys_of_another_layer_on_open_groups(patch: Patch) -> None:
    """The defect of the published decode path (golden README §2)."""

    def call(real):
        def changed(self, x, low_rank, step):
            single = step.batch.num_rows == 1
            own, position = self.source, int(step.batch.positions[-1])
            if single and self.layer.compress_ratio == 2 and position % 2 == 0:
                self.source = 6
            try:
                return real(self, x, low_rank, step)
            finally:
                self.source = own

        return changed

    wrap(patch, indexer.Indexer, "__call__", call)


@mistake
def top_k_drops_the_best(patch: Patch) -> None:
    def off_by_one(scores: Tensor, count: int) -> Tensor:
        count = min(count, scores.shape[1])
        order = torch.sort(scores.float(), dim=1, descending=True, stable=True)
        picks = order.indices[:, 1 : count + 1].masked_fill(
            torch.isneginf(order.values[:, 1 : count + 1]), -1
        )
        return picks.sort(1).values

    patch.setattr(ops, "top_positions", off_by_one)


# --- experts ---------------------------------------------------------------------------------------------------------


def change_route(patch: Patch, **changes: object) -> None:
    wrap(patch, ops, "route", lambda real: lambda x, w, bias, **kw: real(x, w, bias, **{**kw, **changes}))


@mistake
def router_bias_ignored(patch: Patch) -> None:
    wrap(patch, ops, "route", lambda real: lambda x, w, bias, **kw: real(x, w, torch.zeros_like(bias), **kw))


@mistake
def image_bias_ignored(patch: Patch) -> None:
    wrap(patch, moe.MoE, "route", lambda real: lambda self, x, mask: real(self, x, None))


@mistake
def bias_in_the_routing_weight(patch: Patch) -> None:
    def biased(x, weight, bias, *, num_chosen, scaling, temperature=1.0):
        scores = torch.nn.functional.softplus(x.double() @ weight.double().T).sqrt() + bias
        chosen = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :num_chosen]
        picked = scores.gather(1, chosen)
        return chosen, (picked / picked.sum(1, keepdim=True) * scaling).float()

    patch.setattr(ops, "route", biased)


@mistake
def route_scale_ignored(patch: Patch) -> None:
    change_route(patch, scaling=1.0)


@mistake
def gate_temperature(patch: Patch) -> None:
    change_route(patch, temperature=0.9)


def take_experts_apart(patch: Patch) -> None:
    """Run the experts step by step, so that a step can be changed."""
    patch.setattr(ops, "routed_experts", reference.routed_experts)
    patch.setattr(ops, "shared_expert", reference.shared_expert)


@mistake
def route_weight_after_w2(patch: Patch) -> None:
    def after(gate, up, w2, limit, route_weight):
        activated = reference.expert_activation(gate, up, limit, None)
        output = reference.quantized_linear(activated, w2)
        return output if route_weight is None else (output.float() * route_weight[:, None]).bfloat16()

    take_experts_apart(patch)
    patch.setattr(reference, "_down", after)


@mistake
def swiglu_limit_ignored(patch: Patch) -> None:
    for name in ("routed_experts", "shared_expert"):
        wrap(patch, ops, name, lambda real: lambda *args, **kw: real(*args, **{**kw, "limit": 1e9}))


@mistake
def gate_clamped_below_too(patch: Patch) -> None:
    take_experts_apart(patch)
    wrap(
        patch,
        reference,
        "expert_activation",
        lambda real: lambda g, u, limit, w: real(g.clamp_min(-1.0), u, limit, w),
    )


@mistake
def shared_expert_missing(patch: Patch) -> None:
    patch.setattr(moe.MoE, "shared", lambda self, x: torch.zeros_like(x))


# --- hyper-connections and norms -------------------------------------------------------------------------------------


@mistake
def hc_pre_not_delayed(patch: Patch) -> None:
    """Each sub-layer collapses with its own pre mix."""
    latest: list[Tensor] = []

    def split(real):
        def changed(*args, **kw):
            pre, post, comb = real(*args, **kw)
            latest.append(pre)
            return pre, post, comb

        return changed

    wrap(patch, ops, "hc_weights", split)
    wrap(
        patch,
        ops,
        "hc_collapse_norm",
        lambda real: lambda stream, pre, norm, eps: real(stream, latest[-1] if latest else pre, norm, eps),
    )


@mistake
def hc_comb_transposed(patch: Patch) -> None:
    wrap(
        patch, ops, "hc_expand", lambda real: lambda y, x, post, comb: real(y, x, post, comb.transpose(1, 2))
    )


@mistake
def one_sinkhorn_iteration(patch: Patch) -> None:
    wrap(patch, ops, "hc_weights", lambda real: lambda *args, **kw: real(*args, **{**kw, "iterations": 1}))


@mistake
def norm_eps_that_matters(patch: Patch) -> None:
    """1e-6 for 1e-20 would be invisible on ordinary rows, in the reference too."""
    wrap(patch, ops, "hc_collapse_norm", lambda real: lambda x, pre, norm, eps: real(x, pre, norm, 1e-2))


# --- Engram ----------------------------------------------------------------------------------------------------------


@mistake
def engram_off_in_layer_4(patch: Patch) -> None:
    wrap(patch, ops, "engram_gate", lambda real: lambda stream, key, value, w, alive, eps: stream)


@mistake
def engram_multipliers_shifted(patch: Patch) -> None:
    def shifted(real):
        def changed(geometry, *args, **kw):
            return real(replace(geometry, multipliers=geometry.multipliers[:, [1, 2, 3, 0]]), *args, **kw)

        return changed

    wrap(patch, batch_module, "hash_ids", shifted)


@mistake
def engram_reaches_across_images(patch: Patch) -> None:
    def alive(real):
        def changed(geometry, ids, **kw):
            return real(geometry, ids.clip(min=0), **kw)

        return changed

    wrap(patch, batch_module, "hash_ids", alive)


@mistake
def engram_value_on_image_rows(patch: Patch) -> None:
    wrap(
        patch, ops, "engram_gate",
        lambda real: lambda stream, key, value, w, alive, eps: real(stream, key, value, w, torch.ones_like(alive), eps),
    )  # fmt: skip


# --- weights ---------------------------------------------------------------------------------------------------------


@mistake
def scale_grid_shifted(patch: Patch) -> None:
    wrap(
        patch, ops, "dequantize_fp8_weight", lambda real: lambda w, s, block=32: real(w, s.roll(1, 1), block)
    )


@mistake
def scale_rows_reversed(patch: Patch) -> None:
    wrap(patch, ops, "dequantize_fp8_weight", lambda real: lambda w, s, block=32: real(w, s.flip(0), block))


@mistake
def fp4_nibbles_swapped(patch: Patch) -> None:
    def swapped(matrix: ops.Fp4Matrix) -> ops.Fp4Matrix:
        return ops.Fp4Matrix((matrix.codes >> 4) | (matrix.codes << 4), matrix.scales)

    wrap(patch, ShardReader, "experts", lambda real: lambda self, *args: swapped(real(self, *args)))


@mistake
def activations_not_quantised(patch: Patch) -> None:
    patch.setattr(ops, "quantized_linear", ops.linear)


# --- drafts ----------------------------------------------------------------------------------------------------------


@mistake
def draft_block_causal(patch: Patch) -> None:
    def causal(real):
        def changed(self, positions, slots, cache, recorder=None):
            step = real(self, positions, slots, cache, recorder)
            length = step.own_block.shape[1]
            later = torch.triu(torch.ones(length, length, dtype=torch.bool), 1).repeat(len(positions), 1)
            return replace(step, own_block=step.own_block.masked_fill(later, -1))

        return changed

    wrap(patch, draft.DraftModel, "begin", causal)


@mistake
def draft_rings_forgotten(patch: Patch) -> None:
    patch.setattr(draft.DraftModel, "commit", lambda self, taps, batch, cache, recorder=None: recorder and (
        recorder("mtp.main_proj_out", taps[:, :128]), recorder("mtp.main_x", taps[:, :128])))  # fmt: skip


@mistake
def draft_taps_from_one_copy(patch: Patch) -> None:
    wrap(
        patch, draft.DraftModel, "commit",
        lambda real: lambda self, taps, batch, cache, rec=None: real(self, taps.roll(128, -1), batch, cache, rec),
    )  # fmt: skip


@mistake
def markov_bias_of_the_first_token(patch: Patch) -> None:
    """Every position takes the bias of the block's first token."""

    def chain(real):
        def changed(self, x, token_ids, choose):
            embed = self.markov.embed
            self.markov.embed = lambda ids: embed(token_ids)
            try:
                return real(self, x, token_ids, choose)
            finally:
                self.markov.embed = embed

        return changed

    wrap(patch, draft.DraftModel, "_decode_chain", chain)


@mistake
def confidence_of_the_drafted_token(patch: Patch) -> None:
    """The confidence head sees the hidden state of the wrong position."""

    def chain(real):
        def changed(self, x, token_ids, choose):
            proposal = real(self, x, token_ids, choose)
            return replace(proposal, confidence=proposal.confidence.roll(1, 1))

        return changed

    wrap(patch, draft.DraftModel, "_decode_chain", chain)
