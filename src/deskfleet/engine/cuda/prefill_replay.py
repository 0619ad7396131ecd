"""Decoder replay: the decoder's layers for the last rows of a prompt's chunk alone (spec §3.3).

    EncoderStep, PrefillEncoderStep   all rows through the encoder, and what the first decoder layer writes of them
    ReplayStep                        some of these rows through the decoder, from where the other left them

Owns where the one ends and the other begins, and which window rows there are in between: the first decoder layer has
those of all rows, the others of the replayed ones. Which rows are replayed is batch.py's.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from deskfleet.engine.cuda import attention
from deskfleet.engine.cuda.collectives import DeviceGroup
from deskfleet.engine.cuda.hyper import StreamBuffers
from deskfleet.engine.cuda.prefill import PrefillStep
from deskfleet.engine.cuda.step import DecodeStep, Pages, Shape, Watch, rope_kernel
from deskfleet.engine.cuda.synthetic import LayerWeights
from deskfleet.model.layers import LayerPlan


class EncoderStep(DecodeStep):
    """A step that ends where the decoder begins: `streams` has every row's stream and the pre mix that goes with it."""

    def run_layers(self, seen: Watch = lambda name: None) -> None:
        """The encoder, and window rows, entries and index keys of the first decoder layer."""
        self._begin()
        seen("embed")
        first = first_of_decoder(self.layers)
        layer, streams = self.layers[first], self.streams
        self._into(layer, self._through(self.layers[:first], seen), seen)
        # The mixes of this layer are not those of the streams that are left: they go where nobody looks.
        self.streams = copy(streams)
        self.streams.pre = streams.post
        self._finish(layer.attention)
        self._write(layer, seen)
        self.streams = streams


class PrefillEncoderStep(EncoderStep, PrefillStep):
    """The same of many rows."""


class ReplayStep(PrefillStep):
    """Rows `rows` int64 [T] of `source`, the streams of the encoder's step, through the decoder.

    `window_from` int32 [T] is the first position whose window row a row sees in layers behind the first. Positions and
    slots are the rows' own; a row of nobody may be any.
    """

    source: StreamBuffers

    def __init__(
        self,
        shape: Shape,
        layers: list[LayerWeights],
        embedding: Tensor,
        head: Tensor,
        norm: Tensor,
        pages: Pages,
        *,
        num_rows: int,
        device: torch.device | str,
        bit_ops: bool,
        group: DeviceGroup | None = None,
    ) -> None:
        decoder = layers[first_of_decoder(layers) :]
        super().__init__(
            shape,
            decoder,
            embedding,
            head,
            norm,
            pages,
            num_rows=num_rows,
            device=device,
            bit_ops=bit_ops,
            long=True,
            group=group,
        )
        self.rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.window_from = self._ints(num_rows)
        window = shape.config.sliding_window
        self.replayed_records = self._ints(num_rows, window)
        self.offsets = self._ints(window)

    def _begin(self) -> None:
        rope_kernel[(self.num_rows,)](
            self.positions, *self.frequencies, self.rope, self.num_rows, PAIRS=self.rope.shape[-1], num_warps=1
        )  # fmt: skip
        where = (self.slots, self.positions, self.pages.window_table)
        attention.locate_window(where, self.window_records, block_size=self.pages.block_size)
        window = len(self.offsets)
        torch.arange(1 - window, 1, out=self.offsets)
        exists = self.positions[:, None] + self.offsets >= self.window_from[:, None]
        self.replayed_records.copy_(torch.where(exists, self.window_records, -1))
        torch.index_select(self.source.stream, 0, self.rows, out=self.streams.stream)
        torch.index_select(self.source.pre, 0, self.rows, out=self.streams.pre)
        self._forget_keys()

    def _windows(self, plan: LayerPlan) -> Tensor:
        return self.window_records if plan.starts_decoder else self.replayed_records

    def _compress(self, layer: LayerWeights, extra: Tensor) -> None:
        """The encoder's step has written the entries."""


def first_of_decoder(layers: list[LayerWeights]) -> int:
    """Which of the layers is the decoder's first."""
    return next(number for number, layer in enumerate(layers) if layer.plan.starts_decoder)


__all__ = ["EncoderStep", "PrefillEncoderStep", "ReplayStep", "first_of_decoder"]
