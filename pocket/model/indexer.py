"""Which compressed entries a token attends to (spec §4.5, §4.6), and how the indexer learns to say so.

Owns index keys, queries, scores, the top-k with its candidate blocks, and the imitation loss: a few tokens of each
row compare the attention that the layers really paid to *all* visible entries with the softmax of index scores. Its
inputs are detached, so the indexer learns from attention and never the other way round.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deskfleet.model.config import LayerPlan, ModelConfig
from pocket.model.numerics import batched_product, pointwise, product, rms_norm, rotate
from pocket.model.parts import Matrix, Norm
from pocket.model.rows import Rows

_MOST_ENTRIES = 1 << 13  # a score and its tie-break share an int32
_NEVER = -(1 << 30)
_SCORES_AT_ONCE = 1 << 28  # products of heads, tokens and entries; bounds the transient


class Indexer(nn.Module):
    """Ranks the visible entries for one index source."""

    def __init__(self, config: ModelConfig, layer: LayerPlan) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads, size = config.index_n_heads, config.index_head_dim
        self.weight_scale = size**-0.5 * heads**-0.5
        self.wq_b = Matrix(heads * size, config.q_lora_rank)
        self.weights_proj = Matrix(heads, config.hidden_size)
        if layer.is_kv_source:
            self.wk = Matrix(size, config.head_dim)
            self.k_norm = Norm(size)

    def publish_keys(self, latent: Tensor, rows: Rows) -> None:
        """Latents bf16 [B·N, D] of this layer's entries: leave their index keys in `rows`."""
        key = product(latent.detach(), self.wk.bf16)
        key = rms_norm(key, self.k_norm.weight, self.config.rms_norm_eps)
        key = rows.numerics.index(rotate(key, *rows.entry_rope[self.layer.compress_ratio]))
        rows.keys[self.layer.index] = key.unflatten(0, (rows.shape[0], -1))

    def forward(self, x: Tensor, low_rank: Tensor, rows: Rows) -> None:
        """x bf16 [T, M], low_rank bf16 [T, Q]: leave picks in `rows`, and scores of its sampled tokens."""
        numerics, layer = rows.numerics, self.layer
        assert layer.kv_source is not None
        query = product(low_rank.detach(), numerics.fp8_weight(self.wq_b.weight))
        query = query.unflatten(-1, (-1, self.config.index_head_dim))
        query = numerics.index(rotate(query, *rows.rope[layer.uses_yarn])).unflatten(0, rows.shape)
        weights = product(x.detach(), self.weights_proj.bf16) * self.weight_scale
        weights = weights.unflatten(0, rows.shape)
        keys = rows.keys[layer.kv_source]
        if not rows.attend_all:
            with torch.no_grad():
                self._pick(query, weights, keys, rows)
        if rows.sampled is not None:
            some_query = query.gather(1, rows.sampled[..., None, None].expand(-1, -1, *query.shape[2:]))
            some_weights = weights.gather(1, rows.sampled[..., None].expand(-1, -1, weights.shape[2]))
            rows.index_scores[layer.index] = _smooth_scores(some_query, some_weights, keys)

    def _pick(self, query: Tensor, weights: Tensor, keys: Tensor, rows: Rows) -> None:
        """Leave picks in `rows`, a few rows at a time, and at the candidate source its blocks."""
        length, count = query.shape[1], keys.shape[1]
        size = max(_SCORES_AT_ONCE // (length * count * query.shape[2]), 1)
        visible_from, visible_to = rows.visible_range(self.layer.compress_ratio)
        number = torch.arange(count, device=query.device)
        picks, candidates = [], []
        for start in range(0, len(query), size):
            part = slice(start, start + size)
            visible = (number >= visible_from[part, :, None]) & (number < visible_to[part, :, None])
            scores = _scores(query[part], weights[part], keys[part])
            if self.layer.is_candidate_source:
                candidates.append(_candidate_blocks(scores, visible, visible_to[part], self.config))
            if self.layer.uses_candidates and rows.candidates is not None:
                block = self.config.candidate_block_size
                allowed = rows.candidates[part].repeat_interleave(block, -1)[..., :count]
                visible = visible & allowed
            picks.append(best(scores, visible, self.config.index_topk))
        rows.picks[self.layer.index] = torch.cat(picks)
        if candidates:
            rows.candidates = torch.cat(candidates)


def _scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Scores bf16 [B, L, N]: dot product, its weighted ReLU and the sum over heads are each rounded, as published."""
    rows, length, heads, size = query.shape
    dots = batched_product(query.reshape(rows, -1, size), keys.transpose(1, 2))
    return _weighted(dots.view(rows, length, heads, -1), weights)


@pointwise
def _weighted(dots: Tensor, weights: Tensor) -> Tensor:
    weighted = torch.relu(dots) * weights[..., None]
    return weighted.sum(2, dtype=torch.float32).to(torch.bfloat16)


def _smooth_scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """The same in float32 [B, S, N], with gradients."""
    rows, length, heads, size = query.shape
    dots = query.float().reshape(rows, -1, size) @ keys.float().transpose(1, 2)
    return (torch.relu(dots).view(rows, length, heads, -1) * weights[..., None].float()).sum(2)


def best(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """The `count` best allowed places of each bf16 [..., N], int64 [..., count], -1 absent; ties to the lower place."""
    length = scores.shape[-1]
    if length > _MOST_ENTRIES:
        raise ValueError(f"{length} entries in a row, and at most {_MOST_ENTRIES} can be ranked")
    rank = _ranks(scores, allowed)
    found = rank.topk(min(count, length), dim=-1, sorted=False)
    return found.indices.masked_fill(found.values == _NEVER, -1)


@pointwise
def _ranks(scores: Tensor, allowed: Tensor) -> Tensor:
    """int32 [..., N]: greater for the better, then for the lower place; _NEVER where not allowed."""
    bits = (scores + 0.0).view(torch.int16).to(torch.int32)  # + 0.0: both zeros rank alike
    ordered = bits ^ ((bits >> 15) & 0x7FFF)  # order of the floats, as integers
    place = torch.arange(scores.shape[-1], device=scores.device, dtype=torch.int32)
    return (ordered * _MOST_ENTRIES + (_MOST_ENTRIES - 1 - place)).masked_fill(~allowed, _NEVER)


def _candidate_blocks(scores: Tensor, visible: Tensor, visible_to: Tensor, config: ModelConfig) -> Tensor:
    """bool [B, L, blocks]: the blocks with the best scores, and always the newest visible one."""
    block = config.candidate_block_size
    padded = torch.nn.functional.pad(
        scores.masked_fill(~visible, -torch.inf), (0, -scores.shape[-1] % block), value=-torch.inf
    )
    top = padded.unflatten(-1, (-1, block)).amax(-1)
    number = torch.arange(top.shape[-1], device=top.device)
    top = top.masked_fill(number == ((visible_to - 1) // block)[..., None], torch.inf)
    chosen = best(top, ~torch.isneginf(top), config.candidate_topk_blocks)
    mask = torch.zeros(*top.shape[:-1], top.shape[-1] + 1, dtype=torch.bool, device=top.device)
    mask.scatter_(-1, torch.where(chosen < 0, top.shape[-1], chosen), True)
    return mask[..., :-1]


@torch.no_grad()
def add_mass(
    layer: LayerPlan, query: Tensor, maximum: Tensor, denominator: Tensor, scale: float, rows: Rows
) -> None:
    """Add the attention that sampled tokens of this layer pay to every visible entry, summed over heads.

    query bf16 [B, L, H, D]; maximum and denominator float32 [B, L, H] as the layer's own softmax had them.
    """
    assert layer.kv_source is not None
    assert layer.index_source is not None
    assert rows.sampled is not None
    tokens = rows.sampled
    some = query.gather(1, tokens[..., None, None].expand(-1, -1, *query.shape[2:]))
    entries = rows.entries[layer.kv_source].float()
    scores = some.float().flatten(1, 2) @ entries.transpose(1, 2)
    scores = scores.view(*some.shape[:3], -1) * scale  # (B, S, H, N)
    per_head = tokens[..., None].expand(-1, -1, query.shape[2])
    # Against the layer's own maximum, which left out entries that were not picked: those may exceed it.
    relative = (scores - maximum.gather(1, per_head)[..., None]).clamp_max(20)
    mass = (torch.exp(relative) / denominator.gather(1, per_head)[..., None]).sum(2)
    mass = mass.masked_fill(~rows.visible(layer.compress_ratio, tokens), 0)
    previous = rows.masses.get(layer.index_source)
    rows.masses[layer.index_source] = mass if previous is None else previous + mass


def imitation_loss(rows: Rows) -> Tensor:
    """Mean over index sources and sampled tokens of KL(attention ‖ softmax of index scores); tokens with entries."""
    config = rows.config
    assert rows.sampled is not None
    counted = rows.valid.view(rows.shape).gather(1, rows.sampled)
    losses = []
    for source, scores in rows.index_scores.items():
        visible = rows.visible(config.compress_ratios[source], rows.sampled)
        target = rows.masses[source]
        target = target / target.sum(-1, keepdim=True).clamp_min(1e-20)
        log_q = torch.log_softmax(scores.masked_fill(~visible, -1e30), -1)
        each = (target * (target.clamp_min(1e-20).log() - log_q)).sum(-1)
        usable = counted & visible.any(-1)
        losses.append((each * usable).sum() / usable.sum().clamp_min(1))
    return torch.stack(losses).mean() if losses else torch.zeros((), device=rows.positions.device)


__all__ = ["Indexer", "add_mass", "best", "imitation_loss"]
