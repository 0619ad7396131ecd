"""Engram injection of one layer (spec §7.4, §7.5). Owns row decoding and the gate; ids come with the batch.

Each rank fetches the hash columns it owns from disk; the rows of all columns are gathered over ranks. Rows are asked
for when a step begins, because ids depend on tokens alone, and waited for at the layer. The table is never loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from deskfleet_engram.native import Ticket
from deskfleet_engram.portable import NOT_MINE_SCALE, RowSource
from deskfleet_engram.store import OpenStore, open_stores

_READ_DEADLINE_S = 30.0  # a disk that hangs longer fails the step; a busy one does not
_SCALE_BLOCK = 32


@dataclass(frozen=True, slots=True)
class RowRequest:
    """Rows under way of the columns held: ids int64 [T, h], codes uint8 [T, h, D], scales uint8 [T, h, D/32].

    `ticket` None means that they are read when they are waited for.
    """

    ids: np.ndarray
    codes: np.ndarray
    scales: np.ndarray
    ticket: Ticket | None


def open_tables(config: ModelConfig, reader: ShardReader) -> list[OpenStore]:
    """The tables of all Engram layers, where the published shards hold them, read by one I/O thread."""
    return open_stores([_row_source(config, layer, reader) for layer in config.engram_layer_ids])


def _row_source(config: ModelConfig, layer: int, reader: ShardReader) -> RowSource:
    prefix = f"layers.{layer}.engram"
    weight = reader.checkpoint.tensors[f"{prefix}.embed.weight"]
    scale = reader.checkpoint.tensors[f"{prefix}.embed.scale"]
    return RowSource(
        path=weight.path,
        weight_offset_bytes=weight.offset_bytes,
        scale_offset_bytes=scale.offset_bytes,
        num_rows=weight.shape[0],
        head_dim=config.engram_head_dim,
        table=f"{prefix}.embed",
        layer=layer,
    )


class Engram:
    """Adds a gated n-gram row lookup to the stream before a block."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerPlan,
        reader: ShardReader,
        comm: Communicator,
        stores: Sequence[OpenStore],
    ) -> None:
        prefix = f"{layer.prefix}.engram"
        self.config = config
        self.layer = layer
        self.comm = comm
        self.position = config.engram_layer_ids.index(layer.index)  # which of the Engram layers this is
        self.columns = np.array(reader.plan.engram_columns(reader.rank), dtype=np.int64)
        self.columns_per_rank = reader.plan.engram_columns_per_rank
        self.store = stores[self.position]
        self.wkv = reader.fp8(f"{prefix}.wkv")
        q_weight, k_weight = reader.wide(f"{prefix}.q_weight"), reader.wide(f"{prefix}.k_weight")
        self.gate_weight = (q_weight * k_weight).to(torch.float32).to(torch.float64)  # (C, M)

    def request(self, engram_ids: np.ndarray) -> RowRequest:
        """Ask the disk for this rank's columns of ids int64 [T, Engram layers, columns]. Raises EngineError."""
        ids = np.ascontiguousarray(engram_ids[:, self.position, self.columns])
        shape = (*ids.shape, self.config.engram_head_dim)
        codes = np.empty(shape, np.uint8)
        scales = np.empty((*ids.shape, shape[-1] // _SCALE_BLOCK), np.uint8)
        ticket = None
        if self.store.native is not None and ids.size:
            try:
                ticket = self.store.native.submit(ids, codes, scales, deadline_s=_READ_DEADLINE_S)
            except EngramError as error:
                raise self._failure(error) from error
        return RowRequest(ids, codes, scales, ticket)

    def rows(self, request: RowRequest) -> Tensor:
        """Rows bf16 [T, columns, D], from the ranks that own them, once the disk has answered.

        Raises EngineError when the disk fails: a row that exists is never replaced by zeros.
        """
        try:
            if request.ticket is not None:
                request.ticket.wait()
            elif request.ids.size:
                self.store.gather(request.ids, request.codes, request.scales)
        except EngramError as error:
            raise self._failure(error) from error
        padding = [(0, 0), (0, self.columns_per_rank - len(self.columns)), (0, 0)]
        codes = torch.from_numpy(np.pad(request.codes, padding))
        scales = torch.from_numpy(np.pad(request.scales, padding, constant_values=NOT_MINE_SCALE))
        values = codes.view(torch.float8_e4m3fn).to(torch.float64)
        local = values * e8m0_to_float(scales).repeat_interleave(_SCALE_BLOCK, -1)
        parts = self.comm.all_gather(local.to(torch.bfloat16))
        # Column c lies on rank c % ranks at place c // ranks.
        interleaved = torch.stack(parts, 2).flatten(1, 2)  # (T, columns padded, D)
        return interleaved[:, : self.config.engram_num_columns]

    def _failure(self, error: EngramError) -> EngineError:
        return EngineError(f"engram rows of layer {self.layer.index}: {error}")

    def __call__(self, stream: Tensor, step: Step) -> Tensor:
        """stream bf16 [T, C, M] -> the same with the gated value added to each copy."""
        rows = self.rows(step.engram_requests.pop(self.layer.index))
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


__all__ = ["Engram", "RowRequest", "open_tables"]
