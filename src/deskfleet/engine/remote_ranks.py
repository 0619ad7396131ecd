"""Ranks that were started elsewhere, on other machines, and come by themselves over TCP.

Owns the port, who is let in, and what a rank's process is when only its connection can be seen. Strangers, ranks of
another launch and a second copy of a rank are turned away and logged; they never disturb the launch. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Sequence

import msgspec

from deskfleet import __version__
from deskfleet.engine import handshake, messages
from deskfleet.engine.control import set_liveness
from deskfleet.engine.process import Attend, Patience, RankProcess
from deskfleet.engine.spec import RankSpec
from deskfleet.errors import EngineError

_GRACE_S = 2.0  # how long a rank that was told to end may take to close its connection
_MAX_STRANGERS = 64  # connections that have not proved anything, at the same time

_log = logging.getLogger(__name__)


class RemoteProcess:
    """The process of a rank elsewhere, as far as its connection shows it. It has ended when the connection has."""

    def __init__(self) -> None:
        self.pid = 0  # until it has come
        self.returncode: int | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.has_come = asyncio.Event()
        self._is_over = asyncio.Event()
        self._is_told = False

    def arrive(self, pid: int, writer: asyncio.StreamWriter) -> None:
        """It has proved who it is."""
        self.pid, self.writer = pid, writer
        self.has_come.set()

    @property
    def has_ended(self) -> bool:
        """Its connection is over, or it is not waited for any more."""
        return self._is_over.is_set()

    def end(self) -> None:
        """Its connection is over, and so is the process, or will be before long."""
        self._is_over.set()

    def kill(self) -> None:
        """Tell it to end; one that does not is cut off, and ends when it notices."""
        if self.writer is None:
            self.end()
        elif not self._is_told and not self._is_over.is_set():
            self._is_told = True
            self.writer.write(messages.frame(messages.End("its supervisor ended the launch")))
            asyncio.get_running_loop().call_later(_GRACE_S, self.writer.transport.abort)

    async def wait(self) -> None:
        """Return when its connection is over."""
        await self._is_over.wait()


class RemoteRanks:
    """Waits for the ranks of one launch; see `process.RankStarter`.

    Listens on `host`:`port` (0: any free port, see `address`). Ranks prove that they hold `token`, of 16 characters or
    more, and meet each other at `meeting_point`, an address of rank 0's machine and a free port there. `nodes` names
    each rank's machine; without it, ranks say what they are called.
    """

    ranks_know_paths = True

    def __init__(
        self,
        *,
        host: str,
        port: int,
        launch_id: str,
        token: str,
        meeting_point: tuple[str, int],
        nodes: Sequence[str] = (),
        patience: Patience | None = None,
    ) -> None:
        """Raises ConfigError for a token that can be guessed."""
        self.launch_id = launch_id
        self.patience = patience or Patience()
        self._host, self._port = host, port
        self._token = handshake.check_token(token)
        self._meeting_point = meeting_point
        self._nodes = tuple(nodes)
        self._specs: dict[int, RankSpec] = {}
        self._ranks: dict[int, RankProcess] = {}
        self._processes: dict[int, RemoteProcess] = {}
        self._attend: Attend | None = None
        self._server: asyncio.Server | None = None
        self._greetings: set[asyncio.Task[None]] = set()
        self._writers: weakref.WeakSet[asyncio.StreamWriter] = weakref.WeakSet()
        self._num_strangers = 0

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens. Raises EngineError before `listen`."""
        if self._server is None:
            raise EngineError("nobody listens for ranks yet")
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    @property
    def rendezvous(self) -> str:
        """A port of rank 0's machine."""
        host, port = self._meeting_point
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    async def listen(self, attend: Attend) -> None:
        """Open the port. Raises EngineError when it cannot be had."""
        self._attend = attend
        try:
            self._server = await asyncio.start_server(self._on_connection, self._host, self._port)
        except OSError as error:
            raise EngineError(
                f"cannot listen for ranks on {self._host}:{self._port}: {error.strerror or error}",
                hint="ranks dial an address of this machine that they reach, and a port that nothing else has",
            ) from error

    async def start(self, spec: RankSpec) -> RankProcess:
        """Expect the rank."""
        process = self._processes[spec.rank] = RemoteProcess()
        self._specs[spec.rank] = spec
        rank = RankProcess(spec.rank, process, None, asyncio.get_running_loop().create_future())
        rank.node = self._nodes[spec.rank] if spec.rank < len(self._nodes) else None
        self._ranks[spec.rank] = rank
        return rank

    async def missing(self) -> str | None:
        """Wait for all ranks, for as long as they may take; see `process.RankStarter`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.patience.arrival_s):
                await asyncio.gather(*(process.has_come.wait() for process in self._processes.values()))
        late = [
            number for number, process in sorted(self._processes.items()) if not process.has_come.is_set()
        ]
        if not late:
            return None
        names = ", ".join(self._name(number) for number in late)
        return (
            f"{names} {'has' if len(late) == 1 else 'have'} not come within {self.patience.arrival_s:g} s; "
            "the launch was given up"
        )

    async def close(self) -> None:
        """Close the port and every connection that came through it."""
        if self._server is not None:
            self._server.close()
        for task in self._greetings:
            task.cancel()
        await asyncio.gather(*self._greetings, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # they are closed in the loop's next turn

    def _name(self, number: int) -> str:
        node = self._ranks[number].node
        return f"rank {number}" + (f" on {node}" if node else "")

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._greetings.add(task)
        self._writers.add(writer)
        task.add_done_callback(self._greetings.discard)
        try:
            dial = await self._authenticate(reader, writer)
            if dial is not None:
                await self._host_rank(dial, reader, writer)
        except asyncio.CancelledError:
            pass  # close() cancels
        finally:
            writer.close()

    async def _host_rank(
        self, dial: handshake.Dial, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a rank that has proved itself until its connection ends."""
        rank, process = self._ranks[dial.rank], self._processes[dial.rank]
        assert self._attend is not None
        try:
            await self._attend(dial.rank, reader, writer)
        finally:
            rank.lost = rank.lost or "closed its connection without a word"
            process.end()

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> handshake.Dial | None:
        """The rank at the other end once it has proved itself and been welcomed; None for everyone else."""
        peer = _spell_peer(writer)
        if self._num_strangers >= _MAX_STRANGERS:
            _log.warning("%s was turned away: %d others have not said who they are", peer, _MAX_STRANGERS)
            return None
        self._num_strangers += 1
        try:
            async with asyncio.timeout(self.patience.handshake_s):
                return await self._shake_hands(reader, writer)
        except _TurnedAway as refusal:
            _log.warning("%s was turned away: %s", peer, refusal.reason)
            if refusal.is_told:
                with contextlib.suppress(OSError):
                    writer.write(messages.frame(handshake.Refused(refusal.reason)))
        except (asyncio.IncompleteReadError, msgspec.MsgspecError):
            _log.warning("%s was turned away: it does not speak as a rank does", peer)
        except TimeoutError:
            _log.warning(
                "%s was turned away: it did not prove itself in %g s", peer, self.patience.handshake_s
            )
        except OSError as error:
            _log.warning("%s went away: %s", peer, error.strerror or error)
        finally:
            self._num_strangers -= 1
        return None

    async def _shake_hands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> handshake.Dial:
        dial = handshake.dial_decoder.decode(await _read_frame(reader))
        self._check_dial(dial)
        challenge = handshake.Challenge(handshake.make_nonce())
        writer.write(messages.frame(challenge))
        answer = handshake.answer_decoder.decode(await _read_frame(reader))
        if not handshake.is_proof(answer.proof, self._token, "rank", dial, challenge):
            raise _TurnedAway(f"it has another token than this launch, and calls itself rank {dial.rank}")
        self._check_version(dial)
        process = self._processes[dial.rank]
        if process.has_ended:
            raise _TurnedAway("the launch has ended")
        if process.has_come.is_set():
            raise _TurnedAway(f"rank {dial.rank} is here already, as process {process.pid}")
        rank = self._ranks[dial.rank]
        rank.node = rank.node or dial.node
        process.arrive(dial.pid, writer)
        set_liveness(writer.get_extra_info("socket"), self.patience.rank_ends_s)
        proof = handshake.prove(self._token, "supervisor", dial, challenge)
        writer.write(messages.frame(handshake.Welcome(proof, self._specs[dial.rank])))
        return dial

    def _check_dial(self, dial: handshake.Dial) -> None:
        if len(dial.nonce) != handshake.NONCE_BYTES:
            raise _TurnedAway("it does not speak as a rank does", is_told=False)
        if dial.launch_id != self.launch_id:
            raise _TurnedAway(f"it belongs to launch {dial.launch_id[:64]!r}, not to this one")
        if dial.rank not in self._processes:
            raise _TurnedAway(f"there is no rank {dial.rank}, only 0 to {len(self._processes) - 1}")

    def _check_version(self, dial: handshake.Dial) -> None:
        if dial.deskfleet != __version__:
            raise _TurnedAway(
                f"rank {dial.rank} on {dial.node} runs deskfleet {dial.deskfleet}, its supervisor {__version__}"
            )


class _TurnedAway(Exception):
    """This connection is not, or must not be, a rank of ours. `is_told`: the other end understands why."""

    def __init__(self, reason: str, *, is_told: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_told = is_told


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    """One frame of somebody who has proved nothing yet. Raises IncompleteReadError, and what `_TurnedAway` says."""
    length = messages.frame_length(await reader.readexactly(messages.LENGTH_BYTES))
    if length > handshake.MAX_STRANGER_BYTES:
        raise _TurnedAway("it does not speak as a rank does", is_told=False)
    return await reader.readexactly(length)


def _spell_peer(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if peer else "a connection"


__all__ = ["RemoteProcess", "RemoteRanks"]
