"""A rank that was started by itself, on any machine, and dials its supervisor: `deskfleet rank`.

Owns how such a rank finds its supervisor and its own network interface, and how it ends: exit code 0 when it was
stopped in order, 2 or 3 otherwise, 130 or 143 for a signal, always with the reason as stderr's last line. Imports torch
only in `run_guest`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit

import msgspec
import psutil

from deskfleet import __version__
from deskfleet.engine import handshake, messages
from deskfleet.engine.control import Control, Exit, set_liveness
from deskfleet.engine.spec import RankPaths, RankSpec
from deskfleet.errors import ConfigError, DeskfleetError, EngineError

DIAL_S = 300.0
"""How long a rank goes on dialling when nobody says otherwise."""

_HANDSHAKE_S = 10.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Guest:
    """What a rank from elsewhere is started with.

    It dials `supervisor` for `dial_s`. It meets the other ranks on `interface`, None: the one that leads to rank 0.
    """

    supervisor: tuple[str, int]
    rank: int
    launch_id: str
    paths: RankPaths
    interface: str | None = None
    dial_s: float = DIAL_S


def run_guest(guest: Guest, token: str, *, as_json: bool = False) -> NoReturn:
    """Dial, load, serve, and end this process; see `Exit` for `as_json`.

    Raises ConfigError for what is wrong before anything is tried.
    """
    handshake.check_token(token)
    if guest.interface is not None:
        _check_interface(guest.interface)
    ending = Exit(guest.rank, as_json=as_json)
    signals = _SignalEnding(guest.rank, ending)
    # Read when torch is loaded: threads that spin while they wait take the cores from others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Before dialling: once connected, no import may keep this process from saying that it lives.
    from deskfleet.engine.rank import serve

    try:
        connection, spec = dial(guest, token)
    except EngineError as error:
        ending.leave(error.message, error.exit_code, hint=error.hint)
    control = signals.control = Control(connection, ending, silence_s=spec.silence_s)
    failed: messages.Failed | None
    try:
        if spec.tp_size > 1:
            os.environ["GLOO_SOCKET_IFNAME"] = guest.interface or interface_towards(spec.rendezvous)
    except EngineError as error:
        failed = messages.Failed(guest.rank, error.message, is_peer_loss=False, hint=error.hint)
        control.send_last(failed)
    else:
        failed = serve(spec, guest.paths, control)
    if failed is not None:
        ending.leave(failed.error, DeskfleetError.exit_code, hint=failed.hint)
    ending.leave("stopped by its supervisor", 0)


def dial(guest: Guest, token: str) -> tuple[socket.socket, RankSpec]:
    """Connect to the supervisor, which may not listen yet, and prove each to the other who they are.

    Raises EngineError when it has not answered by the deadline, when it turns this rank away, and when whoever answers
    does not hold the token.
    """
    host, port = guest.supervisor
    deadline_s = time.monotonic() + guest.dial_s
    pause_s = _FIRST_PAUSE_S
    while True:
        left_s = max(deadline_s - time.monotonic(), 0.0)
        try:
            connection = socket.create_connection((host, port), timeout=min(left_s + 0.1, _HANDSHAKE_S))
            with _closed_on_error(connection):
                return connection, _shake_hands(connection, guest, token)
        except OSError as error:
            if time.monotonic() + pause_s > deadline_s:
                raise EngineError(
                    f"no supervisor answered at {host}:{port} within {guest.dial_s:g} s: {error.strerror or error}",
                    hint="is it up, and does this machine reach that address?",
                ) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def interface_towards(rendezvous: str) -> str:
    """Return the name of the network interface through which this machine reaches rank 0.

    Raises EngineError when there is no way there.
    """
    place = urlsplit(rendezvous)
    try:
        family, kind, _, _, address = socket.getaddrinfo(place.hostname, place.port, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: the kernel chooses the way
            own = probe.getsockname()[0]
    except OSError as error:
        raise EngineError(
            f"there is no way to rank 0 at {place.netloc}: {error.strerror or error}",
            hint="--interface names a network interface",
        ) from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in addresses):
            return name
    raise EngineError(f"no network interface has {own}, which leads to rank 0 at {place.netloc}")


def _check_interface(name: str) -> None:
    names = sorted(psutil.net_if_addrs())
    if name not in names:
        raise ConfigError(
            f"this machine has no network interface {name!r}", hint=f"it has {', '.join(names)}"
        )


def _shake_hands(connection: socket.socket, guest: Guest, token: str) -> RankSpec:
    """Follow `handshake`. Raises OSError, also for a connection that is closed in the middle, and EngineError."""
    place = f"{guest.supervisor[0]}:{guest.supervisor[1]}"
    hello = handshake.Dial(
        deskfleet=__version__,
        launch_id=guest.launch_id,
        rank=guest.rank,
        node=socket.gethostname(),
        pid=os.getpid(),
        nonce=handshake.make_nonce(),
    )
    connection.settimeout(_HANDSHAKE_S)
    connection.sendall(messages.frame(hello))
    try:
        challenge = _expect(connection, handshake.challenge_decoder, place)
        proof = handshake.prove(token, "rank", hello, challenge)
        connection.sendall(messages.frame(handshake.Answer(proof)))
        welcome = _expect(connection, handshake.welcome_decoder, place)
    except msgspec.MsgspecError as error:
        raise EngineError(f"what answers at {place} is no supervisor of ranks: {error}") from error
    if not handshake.is_proof(welcome.proof, token, "supervisor", hello, challenge):
        raise EngineError(f"what answers at {place} does not have this launch's token")
    spec = welcome.spec
    if (spec.launch_id, spec.rank) != (guest.launch_id, guest.rank):
        raise EngineError(
            f"the supervisor at {place} has work for rank {spec.rank} of launch {spec.launch_id}"
        )
    connection.settimeout(None)
    if spec.silence_s is not None:
        set_liveness(connection, spec.silence_s)
    return spec


def _expect(
    connection: socket.socket, decoder: msgspec.msgpack.Decoder[M | handshake.Refused], place: str
) -> M:
    """The supervisor's next message. Raises EngineError when it turns this rank away."""
    length = messages.frame_length(_read(connection, messages.LENGTH_BYTES))
    if length > handshake.MAX_WELCOME_BYTES:
        raise EngineError(f"what answers at {place} is no supervisor of ranks")
    message = decoder.decode(_read(connection, length))
    if isinstance(message, handshake.Refused):
        raise EngineError(f"the supervisor at {place} turned it away: {message.reason}")
    return message


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many bytes. Raises ConnectionError when the other end closes before."""
    parts = bytearray()
    while len(parts) < num_bytes:
        part = connection.recv(num_bytes - len(parts))
        if not part:
            raise ConnectionError("the connection was closed before the supervisor said who it is")
        parts += part
    return bytes(parts)


@contextlib.contextmanager
def _closed_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


class _SignalEnding:
    """Ends this process on SIGINT or SIGTERM, also while its main thread is in a library, where Python runs no handler,
    and as a container's first process, on which a signal without a handler has no effect."""

    def __init__(self, rank: int, ending: Exit) -> None:
        self.control: Control | None = None
        self._rank = rank
        self._exit = ending
        self._numbers, numbers = socket.socketpair()
        numbers.setblocking(False)
        # The C half of the handler writes the number there, in whatever thread the signal has come to.
        signal.set_wakeup_fd(numbers.detach())
        for number in _ENDING_SIGNALS:
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._wait, name="signals", daemon=True).start()

    def _wait(self) -> None:
        number = signal.Signals(self._numbers.recv(1)[0])
        reason = f"ended by {number.name}"
        if self.control is not None:
            self.control.send_last(messages.Failed(self._rank, reason, is_peer_loss=False))
        self._exit.leave(reason, 128 + number)


__all__ = ["DIAL_S", "Guest", "dial", "interface_towards", "run_guest"]
