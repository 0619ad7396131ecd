"""One rank as its supervisor sees it: how it is heard, how it ends, and why it ended.

Owns what is known of a rank, the sentence about its end, and what a way of starting ranks must do (`RankStarter`);
`local_ranks` and `remote_ranks` are the two ways. Knows nothing of requests or of what the group does next. Imports no
torch.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deskfleet.endpoint import RankHealth, RankState
from deskfleet.engine import messages
from deskfleet.engine.spec import RankSpec
from deskfleet.errors import EngineError, RankDied

_LOG_LINES = 40  # of a failed rank's log, how many are passed on before the log is removed
_QUIET_S = 2.5  # more than two heartbeats

_log = logging.getLogger(__name__)


class Process(Protocol):
    """A rank's process, here or elsewhere. `returncode` as of asyncio's processes; None for ever when it is unknown."""

    @property
    def pid(self) -> int:
        """Its id on its own machine."""

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative for a signal."""

    def kill(self) -> None:
        """End it, whatever it does."""

    async def wait(self) -> object:
        """Return once it has ended, or once nothing of it can reach us any more."""


@dataclass(eq=False)
class RankProcess:
    """A started rank. `ready` resolves when it is loaded, `failed` is its own last word.

    `node` is the other machine that it runs on. `lost` is what can be said of the end of such a rank, whose exit code
    nobody here sees.
    """

    number: int
    process: Process
    log: Path | None
    ready: asyncio.Future[messages.Ready]
    writer: asyncio.StreamWriter | None = None
    heard_at_s: float | None = None  # of the event loop's clock, when it last reported
    heartbeat: messages.Heartbeat | None = None  # the latest
    heartbeat_at_s: float | None = None
    receipt: messages.Receipt | None = None
    failed: messages.Failed | None = None
    node: str | None = None
    lost: str | None = None


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a supervisor and ranks on other machines wait for each other, in seconds.

    The supervisor says every `heartbeat_s` that it lives; a rank that has heard nothing for `rank_ends_s` ends itself.
    A link that swallows what is sent is given up after as long, by the kernel. A rank that is silent on a link that is
    not (frozen, or starved) counts as lost after `rank_is_lost_s`, when it could not come back: it has been told of the
    end. All ranks must have come `arrival_s` after the supervisor began to listen, and prove themselves within
    `handshake_s` of their first byte.
    """

    heartbeat_s: float = 2.0
    rank_ends_s: float = 10.0
    rank_is_lost_s: float = 30.0
    arrival_s: float = 300.0
    handshake_s: float = 10.0


Attend = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serve the connection of one rank until it ends. The rank is who it says it is."""


class RankStarter(Protocol):
    """Where ranks come from and how their connections begin. Serves one launch."""

    @property
    def launch_id(self) -> str:
        """What tells this launch from others."""

    @property
    def patience(self) -> Patience | None:
        """None: the kernel tells either side of the other's end, so that silence means nothing."""

    @property
    def ranks_know_paths(self) -> bool:
        """Whether checkpoint and pack are where each rank says, not where the supervisor says."""

    @property
    def rendezvous(self) -> str:
        """Where ranks meet each other, for `Communicator.join`; known once `listen` has returned."""

    async def listen(self, attend: Attend) -> None:
        """Take connections from now on. Raises EngineError."""

    async def start(self, spec: RankSpec) -> RankProcess:
        """Start the rank, or get ready for it to come. Raises EngineError."""

    async def missing(self) -> str | None:
        """Return None once every started rank has come, or when it is too late a sentence about the others."""

    async def close(self) -> None:
        """Take no connections any more and leave no file behind."""


async def receive(reader: asyncio.StreamReader) -> messages.Report | None:
    """The next report of a rank, or None when it has closed its end. Raises OSError when it cannot be reached."""
    try:
        prefix = await reader.readexactly(messages.LENGTH_BYTES)
        return messages.report_decoder.decode(await reader.readexactly(messages.frame_length(prefix)))
    except (asyncio.IncompleteReadError, ConnectionError):  # a killed rank may leave a reset
        return None


def rank_health(rank: RankProcess, now_s: float, planned_bytes: int | None) -> RankHealth:
    """What is known of a rank at `now_s` of the event loop's clock. It loads until it is ready or says otherwise."""
    beat = rank.heartbeat
    state: RankState = "loading" if beat is None else beat.state
    if rank.process.returncode is not None or rank.lost is not None:
        state = "ended"
    elif state == "loading" and rank.ready.done():  # its first heartbeat as a ready rank is still under way
        state = "idle"
    # Any report shows that the process runs, but only a heartbeat says where its main thread is.
    heard_age_s = None if rank.heard_at_s is None else now_s - rank.heard_at_s
    if beat is None or rank.heartbeat_at_s is None:
        return RankHealth(rank.number, state, heartbeat_age_s=heard_age_s, planned_bytes=planned_bytes)
    age_s = now_s - rank.heartbeat_at_s
    return RankHealth(
        rank=rank.number,
        state=state,
        num_steps=beat.num_passes,
        num_moves=beat.num_moves,
        num_tokens=beat.num_tokens,
        last_step_age_s=None if beat.last_pass_age_s is None else beat.last_pass_age_s + age_s,
        heartbeat_age_s=heard_age_s,
        memory_bytes=beat.memory_bytes,
        planned_bytes=planned_bytes,
        host_available_bytes=beat.host_available_bytes,
    )


def find_silent(ranks: list[RankProcess], ended: list[RankProcess], now_s: float) -> list[RankProcess]:
    """Return the ranks that fell silent before others lost them as a peer, marked as lost; usually none.

    A rank whose link to the supervisor is cut ends itself, which its peers see and the supervisor does not.
    """
    if any(rank.failed is None or not rank.failed.is_peer_loss for rank in ended):
        return []
    silent = []
    for rank in ranks:
        if rank not in ended and rank.heard_at_s is not None and now_s - rank.heard_at_s > _QUIET_S:
            rank.lost = f"has been silent for {now_s - rank.heard_at_s:.0f} s"
            silent.append(rank)
    return silent


def cause_of_end(ended: list[RankProcess]) -> EngineError:
    """The most telling end: a signal, a rank's own report, an exit without one, the loss of a peer.

    A signal after a report, be it the group's end or a thread that aborted on the way out, tells nothing new. Among
    equals the first of the list. What that rank wrote goes to our log, since its file will be removed.
    """

    def order(rank: RankProcess) -> int:
        if rank.failed is not None:
            return 3 if rank.failed.is_peer_loss else 1
        return 0 if (rank.process.returncode or 0) < 0 else 2

    rank = min(ended, key=order)
    lines = _last_lines(rank)
    if lines:
        _log.error("rank %d wrote before it ended:\n%s", rank.number, "\n".join(lines))
    error = RankDied(
        rank.number, f"on {rank.node} {_end_of(rank, lines)}" if rank.node else _end_of(rank, lines)
    )
    error.hint = None if rank.failed is None else rank.failed.hint
    return error


def _end_of(rank: RankProcess, lines: list[str]) -> str:
    code = rank.process.returncode
    if rank.failed is not None:
        return f"failed: {rank.failed.error}"
    if code is not None and code < 0:
        return f"was killed by {_signal_name(-code)}"
    if code is None:
        return rank.lost or "closed its connection without a word"
    return f"exited with code {code}" + (f": {lines[-1]}" if lines else "")


def _last_lines(rank: RankProcess) -> list[str]:
    if rank.log is None or not rank.log.exists():
        return []
    return rank.log.read_text(errors="replace").strip().splitlines()[-_LOG_LINES:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


__all__ = [
    "Attend",
    "Patience",
    "Process",
    "RankProcess",
    "RankStarter",
    "cause_of_end",
    "find_silent",
    "rank_health",
    "receive",
]
