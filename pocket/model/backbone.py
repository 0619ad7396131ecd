"""The whole trainable model (spec §5): embedding, blocks between hyper-connections, head. Owns the order of things.

Parameter names are the published tensor names, but for experts, which are stacked, and hyper-connections, whose
underscore is a dot: `pocket.export` knows the way back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deskfleet.model.config import LayerPlan, ModelConfig
from deskfleet.model.engram import engram_geometry
from pocket.model.attention import Attention
from pocket.model.engram import Engram, Hashes
from pocket.model.experts import MoE
from pocket.model.hyper import HyperConnection, collapse, enter, expand
from pocket.model.numerics import Numerics, gather_rows, rms_norm, wide_product
from pocket.model.parts import Matrix, Norm, Table, reset_all
from pocket.model.rows import RopeTables, Rows
from pocket.model.vision import Aligner, ImageInputs, VisionTower

_EMBEDDING_SPREAD = 0.5
_HEAD_GAIN = 0.5
_LOGITS_AT_ONCE = 1 << 13  # tokens whose logits exist at a time


class Block(nn.Module):
    """Attention and experts of one layer around the stream, each pre mix delayed by one sub-layer (spec §5.2)."""

    def __init__(self, config: ModelConfig, layer: LayerPlan) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.attn_norm, self.ffn_norm = Norm(config.hidden_size), Norm(config.hidden_size)
        # A mix of this sub-layer is read by the next one.
        self.hc_attn = HyperConnection(config, 2 * layer.index)
        self.hc_ffn = HyperConnection(config, 2 * layer.index + 1)
        self.attn = Attention(config, layer)
        self.ffn = MoE(config, layer)
        self.engram: Engram | None = None
        if layer.has_engram:
            self.engram = Engram(config, config.engram_layer_ids.index(layer.index))

    def attention_input(self, stream: Tensor, pre: Tensor) -> Tensor:
        """What attention sees, bf16 [T, M]."""
        return rms_norm(collapse(stream, pre), self.attn_norm.weight, self.config.rms_norm_eps)

    def after_attention(self, stream: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The stream with attention's output in it, and the experts' input bf16 [T, M]."""
        pre, post, comb = self.hc_attn(stream)
        stream = expand(attended, stream, post, comb)
        collapsed = collapse(stream, pre)
        return stream, rms_norm(collapsed, self.ffn_norm.weight, self.config.rms_norm_eps)

    def forward(self, stream: Tensor, pre: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """stream bf16 [T, C, M] and the previous sub-layer's pre float32 [T, C] -> the same after this block."""
        attended = self.attn(self.attention_input(stream, pre), rows)
        stream, ffn_in = self.after_attention(stream, attended)
        pre, post, comb = self.hc_ffn(stream)
        return expand(self.ffn(ffn_in, rows), stream, post, comb), pre


@dataclass(frozen=True)
class BackboneOutput:
    """hidden bf16 [T, M]: the collapsed stream before the final norm; taps bf16 [T, 3·M]: what the drafts see."""

    hidden: Tensor
    taps: Tensor


class Backbone(nn.Module):
    """The target model."""

    def __init__(self, config: ModelConfig, token_map: Tensor) -> None:
        """`token_map` int64 [V]: the compressed id of each token."""
        super().__init__()
        self.config = config
        self.embed = Table(config.vocab_size, config.hidden_size, _EMBEDDING_SPREAD)
        self.layers = nn.ModuleList(Block(config, layer) for layer in config.layers)
        self.norm = Norm(config.hidden_size)
        self.head = Matrix(config.vocab_size, config.hidden_size, gain=_HEAD_GAIN)
        geometry = engram_geometry(config)
        self.hashes = None if geometry is None else Hashes(geometry, token_map, config.engram_pad_token_id)
        if config.vision is not None:
            self.vision = VisionTower(config.vision)
            self.aligner = Aligner(config, config.vision)
            self.image_start, self.image_newline, self.image_end = (
                nn.Parameter(torch.empty(config.hidden_size)) for _ in range(3)
            )
        self.tables = RopeTables(config)

    @property
    def blocks(self) -> list[Block]:
        """The layers in order."""
        return [block for block in self.layers if isinstance(block, Block)]

    def reset(self, generator: torch.Generator) -> None:
        """Delimiters start like embeddings."""
        if self.config.vision is not None:
            with torch.no_grad():
                for delimiter in (self.image_start, self.image_newline, self.image_end):
                    delimiter.normal_(0, _EMBEDDING_SPREAD, generator=generator)

    def begin(
        self,
        numerics: Numerics,
        doc_ids: Tensor,
        positions: Tensor,
        image_mask: Tensor,
        *,
        sampled: Tensor | None = None,
        attend_all: bool = False,
    ) -> Rows:
        """Open a forward pass over rows [B, L]; L must be a multiple of the window."""
        if positions.shape[1] % self.config.sliding_window:
            raise ValueError(
                f"rows of {positions.shape[1]} tokens are no multiple of the window {self.config.sliding_window}"
            )
        return Rows.begin(
            self.config,
            numerics,
            self.tables,
            doc_ids=doc_ids,
            positions=positions,
            image_mask=image_mask,
            sampled=sampled,
            attend_all=attend_all,
        )

    def forward(self, token_ids: Tensor, rows: Rows, images: ImageInputs | None = None) -> BackboneOutput:
        """token_ids int64 [B, L] -> what every token leaves, and in `rows` what is learnt aside."""
        x = self.embed_tokens(token_ids.flatten())
        if images is not None:
            x = torch.where(rows.image_mask[:, None], self._image_rows(images), x)
        row_ids = None
        if self.hashes is not None:
            row_ids = self.hashes(token_ids, rows.positions, rows.image_mask.view(rows.shape))
        stream, pre = enter(x, self.config.hc_mult)
        taps = []
        for block in self.blocks:
            if block.engram is not None and row_ids is not None:
                stream = block.engram(stream, row_ids, rows)
            if block.layer.is_tap:
                taps.append(stream.float().mean(1).to(torch.bfloat16))
            stream, pre = block(stream, pre, rows)
        hidden = collapse(stream, pre)
        return BackboneOutput(hidden, torch.cat(taps, -1) if taps else hidden[:, :0])

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> bf16 [..., M]."""
        return gather_rows(self.embed.weight.to(torch.bfloat16), token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Collapsed rows bf16 [R, M] -> float32 [R, V]."""
        return wide_product(rms_norm(hidden, self.norm.weight, self.config.rms_norm_eps), self.head.bf16)

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy float32 [T] of int64 [T] targets, a few thousand logits rows at a time."""
        parts = [
            checkpoint(self._losses, some, target, use_reentrant=False)
            for some, target in zip(
                hidden.split(_LOGITS_AT_ONCE), targets.split(_LOGITS_AT_ONCE), strict=True
            )
        ]
        return torch.cat(parts)

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(self.logits(hidden), targets, reduction="none")

    def _image_rows(self, images: ImageInputs) -> Tensor:
        """bf16 [T, M]: the embedding of each image token; anything at text."""
        aligned = self.aligner(self.vision(images), images)
        delimiters = torch.stack((self.image_start, self.image_newline, self.image_end)).to(torch.bfloat16)
        return gather_rows(torch.cat((aligned, delimiters)), images.index.flatten())


def make_backbone(config: ModelConfig, token_map: Tensor, seed: int) -> Backbone:
    """A backbone with its first values."""
    model = Backbone(config, token_map)
    reset_all(model, seed)
    return model


__all__ = ["Backbone", "BackboneOutput", "Block", "make_backbone"]
