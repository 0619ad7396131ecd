"""One rank as its supervisor sees it: how it is started, heard, and why it ended.

Owns a rank's process, its two files (rank.json and its log) and the sentence about its end. Knows nothing of
requests or of what the group does next. Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deskfleet.endpoint import RankHealth, RankState
from deskfleet.engine import messages
from deskfleet.engine.spec import RankSpec
from deskfleet.errors import EngineError, RankDied

_LOG_LINES = 40  # of a failed rank's log, how many are passed on before the log is removed

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class RankProcess:
    """A started rank. `ready` resolves when it is loaded, `failed` is its own last word."""

    number: int
    process: asyncio.subprocess.Process
    log: Path
    ready: asyncio.Future[messages.Ready]
    writer: asyncio.StreamWriter | None = None
    heard_at_s: float | None = None  # of the event loop's clock, when it last reported
    heartbeat: messages.Heartbeat | None = None  # the latest
    heartbeat_at_s: float | None = None
    failed: messages.Failed | None = None


async def start_rank(spec: RankSpec, directory: Path) -> RankProcess:
    """Write rank.json to `directory` and start the process that reads it. Raises OSError."""
    path = directory / f"rank-{spec.rank}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(spec)))
    environment = dict(os.environ)
    # Threads that spin while they wait take the cores from the other ranks: 10 times slower on a busy machine.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if spec.rendezvous.startswith("file:"):
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # one machine: do not depend on how its name resolves
    log = directory / f"rank-{spec.rank}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "deskfleet.engine.rank", str(path),
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
            env=environment, start_new_session=True,
        )  # fmt: skip
    return RankProcess(spec.rank, process, log, asyncio.get_running_loop().create_future())


async def receive(reader: asyncio.StreamReader) -> messages.Report | None:
    """The next report of a rank, or None when it has closed its end."""
    try:
        prefix = await reader.readexactly(messages.LENGTH_BYTES)
        return messages.report_decoder.decode(await reader.readexactly(messages.frame_length(prefix)))
    except (asyncio.IncompleteReadError, ConnectionError):  # a killed rank may leave a reset
        return None


def rank_health(rank: RankProcess, now_s: float, planned_bytes: int | None) -> RankHealth:
    """What is known of a rank at `now_s` of the event loop's clock. It loads until it is ready or says otherwise."""
    beat = rank.heartbeat
    state: RankState = "loading"
    if rank.process.returncode is not None:
        state = "ended"
    elif beat is not None:
        state = beat.state
    elif rank.ready.done():  # its first heartbeat is still under way
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


def cause_of_end(ended: list[RankProcess]) -> EngineError:
    """The most telling end: a signal from outside, a rank's own report, an exit without one, the loss of a peer.

    Among equals the first of the list. What that rank wrote goes to our log, since its file will be removed.
    """

    def order(rank: RankProcess) -> int:
        if (rank.process.returncode or 0) < 0:
            return 0
        if rank.failed is None:
            return 2
        return 3 if rank.failed.is_peer_loss else 1

    rank = min(ended, key=order)
    lines = rank.log.read_text(errors="replace").strip().splitlines() if rank.log.exists() else []
    if lines:
        _log.error("rank %d wrote before it ended:\n%s", rank.number, "\n".join(lines[-_LOG_LINES:]))
    code = rank.process.returncode
    if code is not None and code < 0:
        return RankDied(rank.number, f"was killed by {_signal_name(-code)}")
    if rank.failed is not None:
        error = RankDied(rank.number, f"failed: {rank.failed.error}")
        error.hint = rank.failed.hint
        return error
    if code is None:
        return RankDied(rank.number, "closed its connection without a word")
    return RankDied(rank.number, f"exited with code {code}" + (f": {lines[-1]}" if lines else ""))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


__all__ = ["RankProcess", "cause_of_end", "rank_health", "receive", "start_rank"]
