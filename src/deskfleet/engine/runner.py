"""One rank's model, cache and lockstep. Owns how a step becomes a forward pass on every rank.

Rank 0 builds segments and broadcasts them; all ranks run the same rows. Knows nothing of requests' ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deskfleet.engine import messages
from deskfleet.engine.batch import BatchBuilder, Segment
from deskfleet.engine.cache import KVCache
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.model.draft import DraftModel
from deskfleet.engine.model.v41 import V41Model
from deskfleet.engine.model.vision import VisionTower, normalise_pixels
from deskfleet.engine.weights import Allocate, ShardReader
from deskfleet.errors import EngineError
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.engram import engram_geometry
from deskfleet.model.layout import ShardPlan
from deskfleet.model.packs import PackedTables


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes fixed at start."""

    max_num_seqs: int
    max_model_len: int


class ModelRunner:
    """Loads one rank's share and runs steps. Must be driven identically on every rank of the group."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: ShardPlan,
        comm: Communicator,
        limits: RunnerLimits,
        *,
        pad_compressed_id: int,
        with_drafts: bool = False,
        allocate: Allocate | None = None,
        on_read: Callable[[int], None] | None = None,
        pack: PackedTables | None = None,
    ) -> None:
        config = checkpoint.config
        self.config = config
        self.comm = comm
        self.limits = limits
        options = {} if allocate is None else {"allocate": allocate}
        with (
            torch.inference_mode(),
            ShardReader(checkpoint, plan, comm.rank, on_read=on_read, **options) as reader,
        ):
            self.model = V41Model(reader, comm, pack)
            self.drafts = DraftModel(reader, comm, self.model.vocabulary) if with_drafts else None
            # Only rank 0 encodes images: the others receive the rows, so that all continue from the same bits.
            self.vision = VisionTower(config.vision, reader) if config.vision and comm.rank == 0 else None
        self.cache = KVCache(config, num_slots=limits.max_num_seqs, max_model_len=limits.max_model_len)
        self.builder = BatchBuilder(
            config,
            engram_geometry(config),
            pad_compressed_id=pad_compressed_id,
            max_model_len=limits.max_model_len,
        )

    def lead(
        self, segments: Sequence[Segment], logit_rows: Sequence[int], image_rows: Tensor | None = None
    ) -> Tensor:
        """Rank 0: run one step everywhere. Returns logits float32 [R, V] of `logit_rows`."""
        count = 0 if image_rows is None else len(image_rows)
        if self.comm.size > 1:
            message = messages.StepMessage(tuple(_to_message(s) for s in segments), tuple(logit_rows), count)
            self.comm.broadcast_bytes(messages.encode(message))
            if image_rows is not None:
                self.comm.broadcast(image_rows.contiguous())
        return self._run(segments, logit_rows, image_rows)

    def follow(self) -> bool:
        """Other ranks: wait for one step of rank 0 and run it. False when the group stops."""
        message = messages.lockstep_decoder.decode(self.comm.broadcast_bytes(None))
        if isinstance(message, messages.StopMessage):
            return False
        image_rows = None
        if message.num_image_rows:
            image_rows = torch.empty(message.num_image_rows, self.config.hidden_size, dtype=torch.bfloat16)
            self.comm.broadcast(image_rows)
        self._run([_from_message(s) for s in message.segments], message.logit_rows, image_rows)
        return True

    def stop(self) -> None:
        """Rank 0: end the other ranks' loops."""
        if self.comm.size > 1:
            self.comm.broadcast_bytes(messages.encode(messages.StopMessage()))

    def encode_images(self, images: Sequence[messages.ImagePixels]) -> Tensor:
        """Rank 0: embeddings bf16 [image positions, M] of all spans of one prompt, in order."""
        if self.vision is None:
            raise EngineError("this checkpoint has no vision tower")
        spans = []
        with torch.inference_mode():
            for image in images:
                pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height_px, image.width_px, 3)
                patches = normalise_pixels(torch.from_numpy(pixels.copy()), self.vision.config.patch_size)
                patch = self.vision.config.patch_size
                height, width = image.height_px // patch, image.width_px // patch
                spans.append(self.vision.span(patches, height, width, image.token_types))
        return torch.cat(spans)

    def close(self) -> None:
        """Close files and leave the group."""
        self.model.close()
        self.comm.leave()

    @torch.inference_mode()
    def _run(
        self, segments: Sequence[Segment], logit_rows: Sequence[int], image_rows: Tensor | None
    ) -> Tensor:
        batch = self.builder.build(segments, image_rows)
        output = self.model.forward(batch, self.cache)
        if self.drafts is not None:
            self.drafts.commit(output.taps, batch, self.cache)
        if not logit_rows:
            return torch.empty(0, self.config.vocab_size)
        return self.model.logits(output.hidden[list(logit_rows)])


def _to_message(segment: Segment) -> messages.SegmentMessage:
    return messages.SegmentMessage(
        segment.slot,
        segment.start,
        segment.token_ids.astype("<i8").tobytes(),
        segment.compressed_ids.astype("<i8").tobytes(),
        segment.compressed_history.astype("<i8").tobytes(),
        segment.image_mask.astype(np.uint8).tobytes(),
    )


def _from_message(message: messages.SegmentMessage) -> Segment:
    return Segment(
        message.slot,
        message.start,
        np.frombuffer(message.token_ids, "<i8").astype(np.int64),
        np.frombuffer(message.compressed_ids, "<i8").astype(np.int64),
        np.frombuffer(message.compressed_history, "<i8").astype(np.int64),
        np.frombuffer(message.image_mask, np.uint8).astype(bool),
    )


__all__ = ["ModelRunner", "RunnerLimits"]
