"""Attention of one layer: queries, window rows, the sparse core and the grouped output (spec §4.2, §4.3, §4.7).

Owns one rank's heads. Backbone and draft stages share it; they differ in which rows they attend to.
Knows nothing of how entries are made (compressor.py) or picked (indexer.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deskfleet.engine import ops
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.model.compressor import Compressor
from deskfleet.engine.model.indexer import Indexer
from deskfleet.engine.model.step import Step
from deskfleet.engine.weights import ShardReader
from deskfleet.model.config import ModelConfig
from deskfleet.model.layers import LayerPlan


class Attention:
    """Multi-query attention over one shared latent that is both key and value."""

    def __init__(
        self, config: ModelConfig, layer: LayerPlan, reader: ShardReader, comm: Communicator
    ) -> None:
        prefix = f"{layer.prefix}.attn"
        self.config = config
        self.layer = layer
        self.comm = comm
        self.scale = config.head_dim**-0.5
        self.wq_a = reader.fp8(f"{prefix}.wq_a")
        self.q_norm = reader.f32(f"{prefix}.q_norm.weight")
        self.wq_b = reader.fp8(f"{prefix}.wq_b")  # (H_local * D, Q)
        self.wkv = reader.fp8(f"{prefix}.wkv")
        self.kv_norm = reader.f32(f"{prefix}.kv_norm.weight")
        self.sink = reader.f32(f"{prefix}.attn_sink")  # (H_local,)
        groups = reader.plan.groups_per_rank
        self.wo_a = reader.fp8(f"{prefix}.wo_a").unflatten(0, (groups, config.o_lora_rank))  # (G, R, H/G * D)
        self.wo_b = reader.fp8(f"{prefix}.wo_b")  # (M, G_local * R)
        self.compressor = Compressor(config, layer, reader) if layer.is_kv_source else None
        self.indexer = Indexer(config, layer, reader) if layer.is_index_source else None

    def queries(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x bf16 [T, M] -> rotated queries [T, H_local, D] and the normalised low-rank query [T, Q]."""
        low_rank = ops.normed_linear(x, self.wq_a, self.q_norm, self.config.rms_norm_eps)
        query = ops.quantized_linear(low_rank, self.wq_b).view(len(x), -1, self.config.head_dim)
        return ops.apply_rope(query, *rope), low_rank

    def window_records(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Keys/values of bf16 [T, M] as window records [T, bytes]: normalised, rotated, quantised over all D dims."""
        latent = ops.normed_linear(x, self.wkv, self.kv_norm, self.config.rms_norm_eps)
        return ops.WINDOW.pack(ops.apply_rope(latent, *rope))

    def core(
        self, query: Tensor, sources: Sequence[tuple[Tensor, Tensor]], rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Attend and project out. Returns bf16 [T, M] and, for recorders, the core's output [T, H_local, D]."""
        attended = ops.sparse_attention(query, sources, self.sink, self.scale)
        # K = V was rotated by its own position; undoing the query's rotation leaves the relative one.
        unrotated = ops.apply_rope(attended, *rope, inverse=True)
        grouped = unrotated.view(len(query), self.wo_a.shape[0], -1)  # (T, G, H/G * D)
        low_rank = ops.grouped_linear(grouped, self.wo_a).flatten(1)
        partial = ops.quantized_linear_partial(low_rank, self.wo_b)
        total = self.comm.all_reduce(partial)
        return total.to(torch.bfloat16), attended

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Backbone attention of bf16 [T, M]; fills this layer's caches and picks on the way.

        All rows leave what later tokens look up; in the first decoder layer only those of `step.tail` go on.
        """
        prefix, layer, window = self.layer.prefix, self.layer, step.batch.window
        records = self.window_records(x, step.rope[layer.uses_yarn])
        index, pages = window.index, step.cache.windows[layer.index]
        # This step's last rows may take the pages of rows that its first ones still see: read before writing.
        seen = ops.WINDOW.unpack_joined(pages, window.previous, records)
        ops.write_rows(pages, window.write_pages, records, window.write_rows)
        if self.compressor is not None:
            self.compressor(x, step)
        if layer.starts_decoder and step.tail is not None and step.batch.tail is not None:
            kept = step.batch.tail.rows
            x, index, step = x[kept], index[kept], step.tail
        rope = step.rope[layer.uses_yarn]
        query, low_rank = self.queries(x, rope)
        sources = [(seen, index)]
        if self.indexer is not None:
            step.picks[layer.index] = self.indexer(x, low_rank, step)
        if layer.kv_source is not None and layer.index_source is not None:
            sources.append(step.picked_entries(layer.kv_source, layer.index_source))
        output, attended = self.core(query, sources, rope)
        if step.recorder is not None:
            step.record(f"{prefix}.qr", low_rank)
            step.record(f"{prefix}.q_rot", query)
            step.record(f"{prefix}.window_rows", seen[len(window.previous) :])
            step.record(f"{prefix}.sparse_out", attended)
            step.record(f"{prefix}.attn_out", output)
        return output


__all__ = ["Attention"]
