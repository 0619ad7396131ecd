"""One rank's model, cache and lockstep. Owns how a step becomes a forward pass on every rank.

Rank 0 builds segments and broadcasts them; all ranks run the same rows. Knows nothing of requests' ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from deskfleet.engine import messages
from deskfleet.engine.backends import BACKENDS, Backend, CpuBackend, DeviceOptions, Parts
from deskfleet.engine.batch import BatchBuilder, Segment
from deskfleet.engine.cache import PagedCache
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.model.draft import DraftModel, Proposal
from deskfleet.engine.model.v41 import V41Model
from deskfleet.engine.model.vision import VisionTower, normalise_pixels
from deskfleet.engine.progress import Progress
from deskfleet.engine.tables import BlockTables, TableUpdate
from deskfleet.engine.wanted import Choice, Outcome
from deskfleet.engine.weights import Allocate, ShardReader
from deskfleet.errors import EngineError
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.engram import engram_geometry
from deskfleet.model.layout import ShardPlan
from deskfleet.model.limits import RunnerLimits
from deskfleet.model.packs import PackedTables


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
        device: str = "cpu",
        device_options: DeviceOptions | None = None,
    ) -> None:
        """`device` is a name of backends.BACKENDS."""
        config = checkpoint.config
        self.config = config
        self.comm = comm
        self.limits = limits
        self.progress = Progress()
        dcp = comm.split(limits.dcp_size)
        self.tables = BlockTables(
            num_slots=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            dcp_rank=dcp.rank,
            dcp_size=dcp.size,
        )
        self.builder = BatchBuilder(
            config,
            engram_geometry(config),
            self.tables,
            pad_compressed_id=pad_compressed_id,
            decoder_replay=limits.decoder_replay,
        )
        options = {} if allocate is None else {"allocate": allocate}
        with (
            torch.inference_mode(),
            ShardReader(checkpoint, plan, comm.rank, on_read=on_read, **options) as reader,
        ):
            parts = Parts(
                reader,
                comm,
                dcp,
                limits,
                self.tables,
                self.builder,
                pack,
                with_drafts,
                device_options or DeviceOptions(),
            )
            self.backend: Backend = BACKENDS[device](parts)

    @property
    def drafts(self) -> DraftModel | None:
        """The draft stages of a rank on the CPU, where they are served."""
        return self._cpu.drafts

    @property
    def vision(self) -> VisionTower | None:
        """The tower, on the rank that encodes images."""
        return self.backend.vision

    @property
    def model(self) -> V41Model:
        """The backbone of a rank on the CPU."""
        return self._cpu.model

    @property
    def cache(self) -> PagedCache:
        """The pages of a rank on the CPU."""
        return self._cpu.cache

    @property
    def _cpu(self) -> CpuBackend:
        assert isinstance(self.backend, CpuBackend)
        return self.backend

    def lead(
        self,
        segments: Sequence[Segment],
        logit_rows: Sequence[int],
        image_rows: Tensor | None = None,
        updates: Sequence[TableUpdate] = (),
        choices: Sequence[Choice] = (),
    ) -> Outcome:
        """Rank 0: run one step everywhere, after `updates` of the block tables. Logits of `logit_rows`, and `choices`
        of other rows."""
        count = 0 if image_rows is None else len(image_rows)
        wanted = (*logit_rows, *(choice.row for choice in choices))
        self._begin(segments, len(wanted))  # telling the others is a collective, and one may be frozen
        if self.comm.size > 1:
            parts = tuple(_to_message(s) for s in segments)
            message = messages.StepMessage(tuple(updates), parts, wanted, count)
            self.comm.broadcast_bytes(messages.encode(message))
            if image_rows is not None:
                self.comm.broadcast(image_rows.contiguous())
        return self._run(segments, logit_rows, choices, image_rows, updates)

    def propose(self, requests: Sequence[messages.DraftRequest]) -> Proposal:
        """Rank 0: draft a block for each request, on every rank alike."""
        self.progress.begin("draft", len(requests))
        if self.comm.size > 1:
            self.comm.broadcast_bytes(messages.encode(messages.DraftMessage(tuple(requests))))
        return self._propose(requests)

    def follow(self) -> bool:
        """Other ranks: wait for one piece of work of rank 0 and do it. False when the group stops."""
        message = messages.lockstep_decoder.decode(self.comm.broadcast_bytes(None))
        if isinstance(message, messages.StopMessage):
            return False
        if isinstance(message, messages.DraftMessage):
            self._propose(message.requests)
            return True
        image_rows = None
        if message.num_image_rows:
            image_rows = torch.empty(message.num_image_rows, self.config.hidden_size, dtype=torch.bfloat16)
            self.comm.broadcast(image_rows)
        segments = [_from_message(s) for s in message.segments]
        self._run(segments, message.logit_rows, (), image_rows, message.updates)
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
                self.progress.begin("image", len(image.token_types))
                pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height_px, image.width_px, 3)
                patches = normalise_pixels(torch.from_numpy(pixels.copy()), self.vision.config.patch_size)
                patch = self.vision.config.patch_size
                height, width = image.height_px // patch, image.width_px // patch
                spans.append(self.vision.span(patches, height, width, image.token_types))
                self.progress.end()
        return torch.cat(spans)

    def close(self) -> None:
        """Close files and leave the group."""
        self.backend.close()
        self.comm.leave()

    def _begin(self, segments: Sequence[Segment], num_wanted: int) -> None:
        num_tokens = sum(len(segment.token_ids) for segment in segments)
        # Rows of which nothing is wanted are a prompt's: decoding wants every row.
        self.progress.begin("prefill" if num_tokens > num_wanted else "decode", num_tokens)

    @torch.inference_mode()
    def _run(
        self,
        segments: Sequence[Segment],
        logit_rows: Sequence[int],
        choices: Sequence[Choice],
        image_rows: Tensor | None,
        updates: Sequence[TableUpdate],
    ) -> Outcome:
        self._begin(segments, len(logit_rows) + len(choices))
        for update in updates:
            self.tables.apply(update)
        outcome = self.backend.run(segments, logit_rows, choices, image_rows, updates)
        self.progress.end_pass()
        return outcome

    @torch.inference_mode()
    def _propose(self, requests: Sequence[messages.DraftRequest]) -> Proposal:
        self.progress.begin("draft", len(requests))
        proposal = self.backend.propose(requests)
        self.progress.end()
        return proposal


def _to_message(segment: Segment) -> messages.SegmentMessage:
    return messages.SegmentMessage(
        segment.slot,
        segment.start,
        segment.token_ids.astype("<i8").tobytes(),
        segment.compressed_ids.astype("<i8").tobytes(),
        segment.compressed_history.astype("<i8").tobytes(),
        segment.image_mask.astype(np.uint8).tobytes(),
        segment.window_from,
        segment.num_replayed,
        segment.in_full,
    )


def _from_message(message: messages.SegmentMessage) -> Segment:
    return Segment(
        message.slot,
        message.start,
        np.frombuffer(message.token_ids, "<i8").astype(np.int64),
        np.frombuffer(message.compressed_ids, "<i8").astype(np.int64),
        np.frombuffer(message.compressed_history, "<i8").astype(np.int64),
        np.frombuffer(message.image_mask, np.uint8).astype(bool),
        message.window_from,
        message.num_replayed,
        message.in_full,
    )


__all__ = ["ModelRunner"]
