"""Engram injection of one layer (spec §7.4, §7.5). Owns row decoding and the gate; ids come with the batch.

Each rank fetches the hash columns it owns from disk; the rows of all columns are gathered over ranks.
Rows are never cached here and the table is never loaded.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deskfleet.engine import ops
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.model.step import Step
from deskfleet.engine.ops.quant import e8m0_to_float
from deskfleet.engine.weights import ShardReader
from deskfleet.errors import EngineError
from deskfleet.model.config import ModelConfig
from deskfleet.model.layers import LayerPlan
from deskfleet_engram.errors import EngramError
from deskfleet_engram.portable import PortableStore, RowSource


class Engram:
    """Adds a gated n-gram row lookup to the stream before a block."""

    def __init__(
        self, config: ModelConfig, layer: LayerPlan, reader: ShardReader, comm: Communicator
    ) -> None:
        prefix = f"{layer.prefix}.engram"
        weight = reader.checkpoint.tensors[f"{prefix}.embed.weight"]
        scale = reader.checkpoint.tensors[f"{prefix}.embed.scale"]
        self.config = config
        self.layer = layer
        self.comm = comm
        self.position = config.engram_layer_ids.index(layer.index)  # which of the Engram layers this is
        self.columns = np.array(reader.plan.engram_columns(reader.rank), dtype=np.int64)
        self.columns_per_rank = reader.plan.engram_columns_per_rank
        self.store = PortableStore(
            RowSource(
                path=weight.path,
                weight_offset_bytes=weight.offset_bytes,
                scale_offset_bytes=scale.offset_bytes,
                num_rows=weight.shape[0],
                head_dim=config.engram_head_dim,
                table=f"{prefix}.embed",
            )
        ).open()
        self.wkv = reader.fp8(f"{prefix}.wkv")
        q_weight, k_weight = reader.wide(f"{prefix}.q_weight"), reader.wide(f"{prefix}.k_weight")
        self.gate_weight = (q_weight * k_weight).to(torch.float32).to(torch.float64)  # (C, M)

    def rows(self, ids: np.ndarray) -> Tensor:
        """Rows bf16 [T, columns, D] for ids int64 [T, columns], from the ranks that own them.

        Raises EngineError when the disk fails: a row that exists is never replaced by zeros.
        """
        num_rows, dim = len(ids), self.config.engram_head_dim
        codes = np.zeros((num_rows, self.columns_per_rank, dim), np.uint8)
        scales = np.full((num_rows, self.columns_per_rank, dim // 32), 127, np.uint8)
        mine = len(self.columns)
        try:
            self.store.gather(np.ascontiguousarray(ids[:, self.columns]), codes[:, :mine], scales[:, :mine])
        except EngramError as error:
            raise EngineError(f"engram rows of layer {self.layer.index}: {error}") from error
        values = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float64)
        local = values * e8m0_to_float(torch.from_numpy(scales)).repeat_interleave(32, -1)
        parts = self.comm.all_gather(local.to(torch.bfloat16))
        # Column c lies on rank c % ranks at place c // ranks.
        interleaved = torch.stack(parts, 2).flatten(1, 2)  # (T, columns padded, D)
        return interleaved[:, : self.config.engram_num_columns]

    def __call__(self, stream: Tensor, step: Step) -> Tensor:
        """stream bf16 [T, C, M] -> the same with the gated value added to each copy."""
        rows = self.rows(step.batch.engram_ids[:, self.position])
        projected = ops.quantized_linear(rows.flatten(1), self.wkv)
        copies, width = stream.shape[1:]
        key, value = (
            projected[:, : copies * width].unflatten(1, (copies, width)),
            projected[:, copies * width :],
        )
        alive = ~step.batch.image_mask
        output = ops.engram_gate(stream, key, value, self.gate_weight, alive, self.config.rms_norm_eps)
        step.record(f"{self.layer.prefix}.engram_in", stream)
        step.record(f"{self.layer.prefix}.engram_rows", rows)
        step.record(f"{self.layer.prefix}.engram_kv", projected)
        step.record(f"{self.layer.prefix}.engram_out", output)
        return output

    def close(self) -> None:
        """Close the table's file."""
        self.store.close()


__all__ = ["Engram"]
