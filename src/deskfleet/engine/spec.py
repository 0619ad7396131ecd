"""The one file a rank reads. Pure data; imports no torch, since the supervisor writes it."""

from __future__ import annotations

import msgspec

from deskfleet.model.limits import OperatorChoice, PrefixReplay, RunnerLimits


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
    limits: RunnerLimits
    max_num_batched_tokens: int
    speculation: str
    prefix_cache: bool
    prefix_replay: PrefixReplay
    operators: OperatorChoice
    num_threads: int
    parent_pid: int


__all__ = ["RankSpec"]
