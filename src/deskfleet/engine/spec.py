"""The one file a rank reads. Pure data; imports no torch, since the supervisor writes it."""

from __future__ import annotations

import msgspec


class RankSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All a rank needs to know; the whole content of its rank.json."""

    launch_id: str
    rank: int
    tp_size: int
    checkpoint: str
    engram_pack: str | None
    engram_second_source: bool
    control_socket: str
    rendezvous: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    parent_pid: int


__all__ = ["RankSpec"]
