"""Engram injection of one layer (spec §7.4, §7.5). Owns row decoding and the gate; ids come with the batch.

Each rank fetches the hash columns it owns from disk; the rows of all columns are gathered over ranks. Rows are asked
for when a step begins, because ids depend on tokens alone, and waited for at the layer. The table is never loaded.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deskfleet.endpoint import EngramStats
from deskfleet.engine import ops
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.model.step import Step
from deskfleet.engine.weights import ShardReader
from deskfleet.errors import EngineError
from deskfleet.model.config import ModelConfig
from deskfleet.model.engram import engram_geometry
from deskfleet.model.layers import LayerPlan
from deskfleet.model.packs import PackedTables
from deskfleet_engram.errors import EngramError
from deskfleet_engram.format import fp8_rows
from deskfleet_engram.manifest import open_source_as, read_manifest
from deskfleet_engram.native import Ticket
from deskfleet_engram.portable import NOT_MINE_SCALE, RowSource
from deskfleet_engram.store import OpenStore, PackedLayer, open_stores, sum_counters

_READ_DEADLINE_S = 30.0  # a disk that hangs longer fails the step; a busy one does not
_SCALE_BLOCK = 32


@dataclass(frozen=True, slots=True)
class RowRequest:
    """Rows under way of a rank's h places: ids int64 [T, h], codes uint8 [T, h, D], scales uint8 [T, h, D/32].

    `ticket` None means that they are read when they are waited for.
    """

    ids: np.ndarray
    codes: np.ndarray
    scales: np.ndarray
    ticket: Ticket | None


class Tables:
    """A rank's open tables by Engram layer, read by one I/O thread; none where it owns no column."""

    def __init__(self, stores: Mapping[int, OpenStore]) -> None:
        self.stores = stores
        self.wait_s = 0.0

    @classmethod
    def open(cls, reader: ShardReader, pack: PackedTables | None) -> Tables:
        """Open this rank's columns: in `pack`, or where the published shards hold them. Raises EngramError."""
        layers = reader.plan.config.engram_layer_ids
        if not layers or not reader.plan.engram_columns(reader.rank):
            return cls({})
        if pack is None:
            stores = open_stores(_row_source(reader, layer) for layer in layers)
        else:
            stores = open_stores(_packed_layers(reader, pack))
        return cls(dict(zip(layers, stores, strict=True)))

    @property
    def report(self) -> str | None:
        """How rows are read, the same for all layers; None where there are none."""
        return next((str(store.report) for store in self.stores.values()), None)

    @property
    def stats(self) -> EngramStats:
        """What was read so far, and how long it was waited for."""
        return EngramStats(**dataclasses.asdict(sum_counters(self.stores.values())), wait_s=self.wait_s)

    def close(self) -> None:
        """Close the files."""
        for store in self.stores.values():
            store.close()


def _row_source(reader: ShardReader, layer: int) -> RowSource:
    prefix = f"layers.{layer}.engram"
    weight = reader.checkpoint.tensors[f"{prefix}.embed.weight"]
    scale = reader.checkpoint.tensors[f"{prefix}.embed.scale"]
    return RowSource(
        path=weight.path,
        weight_offset_bytes=weight.offset_bytes,
        scale_offset_bytes=scale.offset_bytes,
        num_rows=weight.shape[0],
        rows=fp8_rows(reader.plan.config.engram_head_dim),
        table=f"{prefix}.embed",
        layer=layer,
    )


def _packed_layers(reader: ShardReader, pack: PackedTables) -> list[PackedLayer]:
    second = None
    if pack.has_second_source:
        identity = read_manifest(pack.directory).identity
        second = open_source_as(identity, reader.checkpoint.directory)
    return [
        PackedLayer(
            pack.directory,
            layer,
            columns=reader.plan.engram_columns(reader.rank),
            geometry=engram_geometry(reader.plan.config),
            second_source=second,
        )
        for layer in reader.plan.config.engram_layer_ids
    ]


class EngramRows:
    """Asks the disk for one layer's rows and gathers them over the ranks."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerPlan,
        reader: ShardReader,
        comm: Communicator,
        tables: Tables,
    ) -> None:
        self.config = config
        self.layer = layer
        self.comm = comm
        self.position = config.engram_layer_ids.index(layer.index)  # which of the Engram layers this is
        self.rank = reader.rank
        self.ownership = reader.plan.engram_ownership
        self.column_order = torch.from_numpy(self.ownership.gather_order())
        self.tables = tables
        self.store = tables.stores.get(layer.index)

    def request(self, engram_ids: np.ndarray) -> RowRequest:
        """Ask the disk for this rank's columns of ids int64 [T, Engram layers, columns]. Raises EngineError.

        Places without a column, where the columns do not divide evenly, get zero codes and scales of one.
        """
        ids = self.ownership.local_ids(engram_ids[:, self.position], self.rank)
        shape = (*ids.shape, self.config.engram_head_dim)
        codes = np.empty(shape, np.uint8)
        scales = np.empty((*ids.shape, shape[-1] // _SCALE_BLOCK), np.uint8)
        ticket = None
        if self.store is None:  # no place has a column
            codes[...], scales[...] = 0, NOT_MINE_SCALE
        elif self.store.native is not None and ids.size:
            try:
                ticket = self.store.native.submit(ids, codes, scales, deadline_s=_READ_DEADLINE_S)
            except EngramError as error:
                raise self._failure(error) from error
        return RowRequest(ids, codes, scales, ticket)

    def codes(self, request: RowRequest) -> tuple[Tensor, Tensor]:
        """Codes uint8 [T, columns, D] and scales uint8 [T, columns, D/32] as they are stored, of all ranks.

        Raises EngineError (see `wait`).
        """
        self.wait(request)
        codes, scales = (
            torch.cat(self.comm.all_gather(torch.from_numpy(part)), 1)[:, self.column_order]
            for part in (request.codes, request.scales)
        )
        return codes, scales

    def wait(self, request: RowRequest) -> None:
        """Return once the disk has answered.

        Raises EngineError when the disk fails: a row that exists is never replaced by zeros.
        """
        begin = time.monotonic()
        try:
            if request.ticket is not None:
                request.ticket.wait()
            elif self.store is not None and request.ids.size:
                self.store.gather(request.ids, request.codes, request.scales)
        except EngramError as error:
            raise self._failure(error) from error
        self.tables.wait_s += time.monotonic() - begin

    def _failure(self, error: EngramError) -> EngineError:
        return EngineError(f"engram rows of layer {self.layer.index}: {error}")


class Engram(EngramRows):
    """Adds a gated n-gram row lookup to the stream before a block."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerPlan,
        reader: ShardReader,
        comm: Communicator,
        tables: Tables,
    ) -> None:
        super().__init__(config, layer, reader, comm, tables)
        prefix = f"{layer.prefix}.engram"
        self.wkv = reader.fp8(f"{prefix}.wkv")
        q_weight, k_weight = reader.matrix(f"{prefix}.q_weight"), reader.matrix(f"{prefix}.k_weight")
        self.gate_weight = (q_weight.to(torch.float64) * k_weight).to(torch.float32)  # (C, M)

    def rows(self, request: RowRequest) -> Tensor:
        """Rows bf16 [T, columns, D], from the ranks that own them. Raises EngineError (see `wait`)."""
        self.wait(request)
        local = ops.decode_fp8_rows(torch.from_numpy(request.codes), torch.from_numpy(request.scales))
        parts = self.comm.all_gather(local)  # (T, h, D) each
        return torch.cat(parts, 1)[:, self.column_order]

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


__all__ = ["Engram", "EngramRows", "RowRequest", "Tables"]
