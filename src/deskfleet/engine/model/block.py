"""One block: attention and experts between hyper-connections with the delayed pre mix (spec §5).

Owns the residual stream's mixing. Backbone layers and draft stages are the same block around another
attention call.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deskfleet.engine import ops
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.model.attention import Attention
from deskfleet.engine.model.moe import MoE
from deskfleet.engine.model.step import Recorder, Step
from deskfleet.engine.weights import ShardReader
from deskfleet.model.config import ModelConfig
from deskfleet.model.layers import LayerPlan


class HyperConnection:
    """The mixes of one sub-layer: how the stream collapses into it and expands out of it."""

    def __init__(self, config: ModelConfig, name: str, reader: ShardReader) -> None:
        self.config = config
        self.fn = reader.matrix(f"{name}_fn")  # ((2+C)·C, C·M)
        self.base = reader.matrix(f"{name}_base")
        self.scale = reader.matrix(f"{name}_scale")

    def __call__(self, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """stream bf16 [T, C, M] -> pre [T, C], post [T, C], comb [T, C, C], float32."""
        return ops.hc_weights(
            stream,
            self.fn,
            self.scale,
            self.base,
            norm_eps=self.config.rms_norm_eps,
            iterations=self.config.hc_sinkhorn_iters,
            eps=self.config.hc_eps,
        )


class Block:
    """Attention and MoE of one layer around a residual stream of C copies."""

    def __init__(
        self, config: ModelConfig, layer: LayerPlan, reader: ShardReader, comm: Communicator
    ) -> None:
        self.config = config
        self.layer = layer
        self.attn_norm = reader.f32(f"{layer.prefix}.attn_norm.weight")
        self.ffn_norm = reader.f32(f"{layer.prefix}.ffn_norm.weight")
        self.hc_attn = HyperConnection(config, f"{layer.prefix}.hc_attn", reader)
        self.hc_ffn = HyperConnection(config, f"{layer.prefix}.hc_ffn", reader)
        self.attention = Attention(config, layer, reader, comm)
        self.moe = MoE(config, layer, reader, comm)

    def forward(
        self,
        stream: Tensor,
        pre: Tensor,
        attend: Callable[[Tensor], Tensor],
        image_mask: Tensor | None,
        recorder: Recorder | None,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """stream bf16 [T, C, M] and the previous sub-layer's pre [T, C] -> the same after this block.

        With `kept` int64 [T'], `attend` returns those rows alone, and only they go on.
        """
        prefix, eps = self.layer.prefix, self.config.rms_norm_eps
        attn_in = ops.hc_collapse_norm(stream, pre, self.attn_norm, eps)
        if kept is not None:
            stream = stream[kept]
        attn_pre, attn_post, attn_comb = self.hc_attn(stream)
        stream = ops.hc_expand(attend(attn_in), stream, attn_post, attn_comb)
        ffn_pre, ffn_post, ffn_comb = self.hc_ffn(stream)
        # The attention's pre mix, on the stream that attention has updated: pre mixes lag one sub-layer.
        ffn_in = ops.hc_collapse_norm(stream, attn_pre, self.ffn_norm, eps)
        ffn_out = self.moe(ffn_in, image_mask)
        stream = ops.hc_expand(ffn_out, stream, ffn_post, ffn_comb)
        if recorder is not None:
            recorder(f"{prefix}.attn_in", attn_in)
            recorder(f"{prefix}.ffn_in", ffn_in)
            recorder(f"{prefix}.ffn_out", ffn_out)
            recorder(f"{prefix}.h_out", stream)
            recorder(f"{prefix}.pre_mix_out", ffn_pre)
        return stream, ffn_pre

    def __call__(self, stream: Tensor, pre: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Run a backbone layer. The first decoder layer leaves the rows of `step.tail`, when there is one."""
        step.record(f"{self.layer.prefix}.h_in", stream)
        tail = step.tail if self.layer.starts_decoder else None
        batch = (tail or step).batch
        return self.forward(
            stream,
            pre,
            lambda x: self.attention(x, step),
            batch.image_mask if batch.has_images else None,
            step.recorder,
            None if tail is None or step.batch.tail is None else step.batch.tail.rows,
        )


__all__ = ["Block", "HyperConnection"]
