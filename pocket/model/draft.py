"""The DSpark drafter in training (spec §8): three stages over the taps of a frozen target, Markov bias, confidence.

Owns blocks drafted after many anchors at once, teacher-forced: the Markov bias sees the text's own tokens. The target's
distributions at the same tokens are what drafts imitate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deskfleet.model.config import LayerPlan, ModelConfig
from pocket.model.attention import attend
from pocket.model.backbone import Backbone, Block, make_backbone
from pocket.model.hyper import collapse, enter, expand
from pocket.model.numerics import gather_rows, product, rms_norm, wide_product
from pocket.model.parts import Matrix, Norm, Table, reset_all
from pocket.model.rows import Rows

_MARKOV_SPREAD = 0.5
_MARKOV_GAIN = 0.1
_IMITATION_WEIGHT, _DISTANCE_WEIGHT, _CONFIDENCE_WEIGHT = 0.3, 0.7, 0.3


class Stage(Block):
    """One draft stage; the first owns the way in, the last the way out."""

    def __init__(self, config: ModelConfig, layer: LayerPlan) -> None:
        super().__init__(config, layer)
        hidden = config.hidden_size
        if layer is config.draft_layers[0]:
            self.main_proj = Matrix(hidden, len(config.dspark_target_layer_ids) * hidden)
            self.main_norm = Norm(hidden)
        if layer is config.draft_layers[-1]:
            self.norm = Norm(hidden)
            self.markov_head = MarkovHead(config)
            self.confidence_head = ConfidenceHead(config)


class MarkovHead(nn.Module):
    """What a token adds to the logits of the next draft."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = Table(config.vocab_size, config.dspark_markov_rank, _MARKOV_SPREAD)
        self.head = Matrix(config.vocab_size, config.dspark_markov_rank, gain=_MARKOV_GAIN)


class ConfidenceHead(nn.Module):
    """One logit from a draft's hidden row and the token before it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.proj = Matrix(1, config.hidden_size + config.dspark_markov_rank, gain=_MARKOV_GAIN)


@dataclass(frozen=True)
class Anchors:
    """A tokens of B rows to draft after, as flat indices.

    block int64 [A, n]: the anchor and the tokens after it; alive bool [A, n]: those inside the anchor's document;
    context int64 [A, W]: tokens before it, with seen bool [A, W]; positions int64 [A, n].
    """

    block: Tensor
    alive: Tensor
    context: Tensor
    seen: Tensor
    positions: Tensor

    @classmethod
    def at(cls, anchors: Tensor, positions: Tensor, doc_ids: Tensor, config: ModelConfig) -> Anchors:
        """anchors int64 [A]: flat indices of anchor tokens; positions, doc_ids int64 [B, L]."""
        device, flat = anchors.device, positions.flatten()
        places = torch.arange(config.dspark_block_size, device=device)
        block = anchors[:, None] + places
        same_row = block // positions.shape[1] == (anchors // positions.shape[1])[:, None]
        block = block.clamp_max(flat.numel() - 1)
        documents = doc_ids.flatten()
        alive = (
            same_row & (documents[block] == documents[anchors][:, None]) & (documents[anchors] >= 0)[:, None]
        )
        back = torch.arange(config.sliding_window, 0, -1, device=device)
        seen = back <= flat[anchors][:, None]
        context = (anchors[:, None] - back).clamp_min(0)
        return cls(block, alive, context, seen, flat[anchors][:, None] + places)


@dataclass(frozen=True)
class Drafts:
    """logits float32 [A, n, V] with the Markov bias, confidence float32 [A, n] raw, loads float32 [E] of each stage."""

    logits: Tensor
    confidence: Tensor
    loads: list[Tensor]


class Drafter(nn.Module):
    """The draft stages. Embedding and head are the target's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.mtp = nn.ModuleList(Stage(config, layer) for layer in config.draft_layers)

    @property
    def stages(self) -> list[Stage]:
        """The stages in order."""
        return [stage for stage in self.mtp if isinstance(stage, Stage)]

    def forward(
        self, target: Backbone, token_ids: Tensor, taps: Tensor, anchors: Anchors, rows: Rows
    ) -> Drafts:
        """token_ids int64 [B, L], taps bf16 [T, 3·M] -> drafts after the anchors, given the text's own tokens."""
        config, numerics = self.config, rows.numerics
        first, last = self.stages[0], self.stages[-1]
        main = product(numerics.activation(taps), numerics.fp8_weight(first.main_proj.weight))
        main = numerics.activation(rms_norm(main, first.main_norm.weight, config.rms_norm_eps))
        given = token_ids.flatten()[anchors.block]  # (A, n)
        ids = torch.full_like(given, config.dspark_noise_token_id)
        ids[:, 0] = given[:, 0]
        rope = target.tables.rows(anchors.positions, yarn=False)
        stream, pre = enter(target.embed_tokens(ids.flatten()), config.hc_mult)
        loads = []
        for stage in self.stages:
            context = stage.attn.window_rows(main, rows.rope[False], numerics)  # (T, D)
            seen = numerics.activation(stage.attention_input(stream, pre))
            query, _ = stage.attn.queries(seen, rope, numerics)
            own = stage.attn.window_rows(seen, rope, numerics).unflatten(0, given.shape)
            keys = torch.cat((gather_rows(context, anchors.context), own), 1)
            mask = torch.cat((anchors.seen, torch.ones_like(given, dtype=torch.bool)), 1)
            mask = mask[:, None].expand(-1, given.shape[1], -1)
            weighed = attend(
                query.unflatten(0, given.shape), keys, mask, None, None,
                stage.attn.attn_sink, stage.attn.scale, numerics,
            )  # fmt: skip
            attended = stage.attn.project(weighed.output.flatten(0, 1), rope, numerics)
            stream, ffn_in = stage.after_attention(stream, attended)
            ffn_pre, post, comb = stage.hc_ffn(stream)
            _, chosen, weights = stage.ffn.route(ffn_in)
            loads.append(_load(chosen, anchors.alive, stage.layer.num_experts))
            stream = expand(stage.ffn.mix(ffn_in, chosen, weights, numerics), stream, post, comb)
            pre = ffn_pre
        x = collapse(stream, pre)
        base = wide_product(rms_norm(x, last.norm.weight, config.rms_norm_eps), target.head.bf16)
        markov, confidence = last.markov_head, last.confidence_head
        embedded = gather_rows(markov.embed.weight.to(torch.bfloat16), given.flatten())
        logits = base + wide_product(embedded, markov.head.bf16)
        raw = wide_product(torch.cat((x, embedded), -1), confidence.proj.bf16)
        return Drafts(logits.unflatten(0, given.shape), raw.view(given.shape), loads)


def draft_losses(drafts: Drafts, target_logits: Tensor, alive: Tensor) -> dict[str, Tensor]:
    """How drafts differ from the target's float32 [A, n, V], places weighed by exp(-i/n), dead ones not at all.

    `loss` is what is trained; `distance` is the total variation; `agreement` the share of equal greedy choices given
    the text so far; `length` the mean number of leading places that agree.
    """
    target = torch.softmax(target_logits, -1)
    log_q = torch.log_softmax(drafts.logits, -1)
    places = torch.arange(alive.shape[1], device=alive.device)
    weight = torch.exp(-places / alive.shape[1]) * alive
    total = weight.sum().clamp_min(1e-6)
    imitation = ((-target * log_q).sum(-1) * weight).sum() / total
    distance_each = (target - log_q.exp()).abs().sum(-1) / 2
    distance = (distance_each * weight).sum() / total
    confidence_each = torch.nn.functional.binary_cross_entropy_with_logits(
        drafts.confidence, (1 - distance_each).detach().clamp(0, 1), reduction="none"
    )
    confidence = (confidence_each * weight).sum() / total
    agrees = (target.argmax(-1) == log_q.argmax(-1)) & alive
    lengths, whole = draft_lengths(drafts, target_logits, alive)
    loss = _IMITATION_WEIGHT * imitation + _DISTANCE_WEIGHT * distance + _CONFIDENCE_WEIGHT * confidence
    return {
        "loss": loss,
        "distance": distance.detach(),
        "confidence": confidence.detach(),
        "agreement": agrees.sum() / alive.sum().clamp_min(1),
        "length": (lengths * whole).sum() / whole.sum().clamp_min(1),
    }


def draft_lengths(drafts: Drafts, target_logits: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
    """How many leading places of each block agree with the target's choice, int64 [A], and which blocks are whole."""
    agrees = (target_logits.argmax(-1) == drafts.logits.argmax(-1)) & alive
    return agrees.long().cumprod(-1).sum(-1), alive.all(-1)


def _load(chosen: Tensor, alive: Tensor, num_experts: int) -> Tensor:
    counted = alive.flatten().float()[:, None].expand_as(chosen).flatten()
    return torch.zeros(num_experts, device=chosen.device).scatter_add(0, chosen.flatten(), counted)


def make_model(config: ModelConfig, token_map: Tensor, seed: int) -> tuple[Backbone, Drafter]:
    """A target and its drafter with their first values."""
    drafter = Drafter(config)
    reset_all(drafter, seed + 1)
    return make_backbone(config, token_map, seed), drafter


__all__ = ["Anchors", "Drafter", "Drafts", "Stage", "draft_lengths", "draft_losses", "make_model"]
