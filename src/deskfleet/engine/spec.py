"""What a rank is told before it begins. Pure data; imports no torch, since the supervisor writes it."""

from __future__ import annotations

from typing import Literal

import msgspec

from deskfleet.model.limits import OperatorChoice, PrefixReplay, RunnerLimits

Transport = Literal["shared memory", "gloo", "none"]
"""How ranks exchange; "none" where there is one."""


class RankSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that the supervisor decides for a rank, wherever it runs.

    `checkpoint_identity` is the supervisor's own (`engine.identity`): a rank whose files differ refuses. With
    `checks_pack`, a rank's pack is one that the supervisor has not seen. `num_threads` None is every core of the rank's
    machine. `planned_bytes` are the resident bytes planned for it, None when nobody has planned. A rank that has heard
    nothing of its supervisor for `silence_s` ends; None: the kernel tells. `device` is a name of backends.BACKENDS.
    """

    launch_id: str
    rank: int
    tp_size: int
    checkpoint_identity: str
    engram_second_source: bool
    checks_pack: bool
    rendezvous: str
    limits: RunnerLimits
    max_num_batched_tokens: int
    speculation: str
    prefix_cache: bool
    prefix_replay: PrefixReplay
    operators: OperatorChoice
    num_threads: int | None
    device: str = "cpu"
    graphs: bool = True
    planned_bytes: int | None = None
    silence_s: float | None = None


class RankPaths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank's files are on its own machine. Without a pack, Engram rows come from the checkpoint's shards."""

    checkpoint: str
    engram_pack: str | None = None


class LocalRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one file that a rank of the supervisor's own machine reads; the whole content of its rank.json.

    `group_memory` is a descriptor that it inherits, of an empty file for ranks to exchange through; None: over gloo.
    """

    spec: RankSpec
    paths: RankPaths
    control_socket: str
    parent_pid: int
    group_memory: int | None = None


__all__ = ["LocalRank", "RankPaths", "RankSpec", "Transport"]
