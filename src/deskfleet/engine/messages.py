"""What travels between the supervisor and its ranks, and between ranks: msgpack structs, length-prefixed.

Owns the wire form. Knows nothing of sockets' life or of what the messages cause.
"""

from __future__ import annotations

import struct

import msgspec

from deskfleet.endpoint import (
    EngineStats,
    EngramStats,
    FinishReason,
    RankState,
    SamplingParams,
    TokenLogprob,
)
from deskfleet.engine.tables import TableUpdate
from deskfleet.model.memory import RankMemory

_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _LENGTH.size

PUBLISHED_SHARDS = "published shards"
"""Where Engram rows come from when no pack is named."""


class ImagePixels(msgspec.Struct, frozen=True):
    """A prepared image: uint8 pixels row-major RGB, and its token types."""

    pixels: bytes
    height_px: int
    width_px: int
    token_types: tuple[int, ...]


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """A new request. `image_positions` marks, per prompt position, whether it lies in an image span (0/1 bytes).

    With `score`, nothing is generated: the logits of every prompt position come back.
    """

    request_id: str
    token_ids: tuple[int, ...]
    image_positions: bytes
    images: tuple[ImagePixels, ...]
    sampling: SamplingParams
    score: bool = False
    timeout_s: float | None = None


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget a request; unknown ids are ignored, since it may have ended meanwhile.

    `is_satisfied`: the client has all it wanted (a stop string), so the request counts as finished.
    """

    request_id: str
    is_satisfied: bool = False


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the group."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The supervisor lives. Sent to ranks whose kernel would not tell them of its end."""


class End(msgspec.Struct, frozen=True, tag=True):
    """The group has failed: end now, whatever the main thread is at."""

    reason: str


Command = AddRequest | Cancel | Stop
"""What rank 0 is asked for."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a rank on the supervisor's machine; one from elsewhere has said who it is (`handshake`)."""

    rank: int
    pid: int


class Receipt(msgspec.Struct, frozen=True, tag=True):
    """What a rank is made of, before it reads a weight. Digests are SHA-256 in hexadecimal.

    `operators` are "native" or "reference", `operators_detail` with which instructions or why not; `collectives` are
    how ranks exchange (`spec.Transport`), `collectives_detail` in which way or why not as asked. `engram_source` is
    the pack's directory or the published shards, None without Engram layers; `engram_rows` says which rows the pack
    holds (its identity), `engram_manifest` also which share of them.
    """

    rank: int
    node: str
    pid: int
    deskfleet: str
    torch: str
    python: str
    checkpoint: str
    shard_plan: str
    token_map: str
    operators_asked: str
    operators: str
    operators_detail: str
    engram_source: str | None
    engram_rows: str | None
    engram_manifest: str | None
    collectives_asked: str
    collectives: str
    collectives_detail: str


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Bytes read so far by one rank, of those it will read."""

    rank: int
    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank is loaded and has met the others.

    `engram` says how it reads Engram rows, None when it reads none; `operators`, who computes, and what was asked for;
    `collectives` likewise, how ranks exchange.
    """

    rank: int
    weight_bytes: int
    cache_bytes: int
    load_s: float
    engram: str | None
    operators: str
    memory: RankMemory
    collectives: str


class RequestOutput(msgspec.Struct, frozen=True):
    """What one step gave one request. `logits` are float32 rows, only for scoring; `error` ends the request.

    With `param`, the request itself is at fault, in that field.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    logits: bytes | None = None
    error: str | None = None
    param: str | None = None
    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_verify_steps: int = 0
    num_wasted_rows: int = 0
    queued_s: float | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """All outputs of one step, with the counters after it and the first of those that wait, in order of arrival."""

    outputs: tuple[RequestOutput, ...]
    stats: EngineStats
    queue: tuple[str, ...] = ()


class EngramReads(msgspec.Struct, frozen=True, tag=True):
    """What one rank's reader of Engram rows did since start."""

    rank: int
    stats: EngramStats


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rank raised and is about to exit. `is_peer_loss`: it only noticed that another rank is gone."""

    rank: int
    error: str
    is_peer_loss: bool
    hint: str | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A rank's process lives, and this is where its main thread is (see endpoint.RankHealth)."""

    rank: int
    num_passes: int
    num_moves: int
    state: RankState
    num_tokens: int
    last_pass_age_s: float | None
    memory_bytes: int
    host_available_bytes: int | None


Report = Hello | Receipt | Loading | Ready | StepOutput | EngramReads | Heartbeat | Failed


class SegmentMessage(msgspec.Struct, frozen=True):
    """One engine.batch.Segment as raw little-endian int64 (ids) and uint8 (mask) bytes."""

    slot: int
    start: int
    token_ids: bytes
    compressed_ids: bytes
    compressed_history: bytes
    image_mask: bytes
    window_from: int
    num_replayed: int
    in_full: bool


class StepMessage(msgspec.Struct, frozen=True, tag=True):
    """What rank 0 tells the other ranks to run: blocks that changed hands, segments, rows whose logits are wanted,
    image rows to receive."""

    updates: tuple[TableUpdate, ...]
    segments: tuple[SegmentMessage, ...]
    logit_rows: tuple[int, ...]
    num_image_rows: int


class DraftRequest(msgspec.Struct, frozen=True):
    """One request to draft for: its anchor (engine.model.draft.Anchor) and how its drafts are drawn.

    `temperature` 0 is greedy. `seed` and `place` (the first draft's place in the output) name the random numbers, so
    that every rank draws the same ones.
    """

    slot: int
    position: int
    token_id: int
    window_from: int
    temperature: float
    seed: int
    place: int


class DraftMessage(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 has the other ranks draft along."""

    requests: tuple[DraftRequest, ...]


class StopMessage(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 ends the lockstep loop."""


_encoder = msgspec.msgpack.Encoder()
command_decoder = msgspec.msgpack.Decoder(Command | Alive | End)
report_decoder = msgspec.msgpack.Decoder(Report)
lockstep_decoder = msgspec.msgpack.Decoder(StepMessage | DraftMessage | StopMessage)


def encode(message: msgspec.Struct) -> bytes:
    """Bare msgpack of one message."""
    return _encoder.encode(message)


def frame(message: msgspec.Struct) -> bytes:
    """msgpack with its length before it, for a byte stream."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def frame_length(prefix: bytes) -> int:
    """Payload length from the LENGTH_BYTES bytes of a frame's start."""
    (length,) = _LENGTH.unpack(prefix)
    return int(length)


__all__ = [
    "LENGTH_BYTES",
    "PUBLISHED_SHARDS",
    "AddRequest",
    "Alive",
    "Cancel",
    "Command",
    "DraftMessage",
    "DraftRequest",
    "End",
    "EngramReads",
    "Failed",
    "Heartbeat",
    "Hello",
    "ImagePixels",
    "Loading",
    "Ready",
    "Receipt",
    "Report",
    "RequestOutput",
    "SegmentMessage",
    "StepMessage",
    "StepOutput",
    "Stop",
    "StopMessage",
    "command_decoder",
    "encode",
    "frame",
    "frame_length",
    "lockstep_decoder",
    "report_decoder",
]
