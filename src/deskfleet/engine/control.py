"""A rank's end of the connection to its supervisor, over a Unix socket or TCP alike.

Owns the connected socket, the thread that reads it and the thread that reports. The process ends, with the reason as
the last line on stderr, when the supervisor says so, closes the connection, or falls silent. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, TextIO

import msgspec

from deskfleet.engine import messages
from deskfleet.errors import DeskfleetError

_HEARTBEAT_S = 1.0
_READ_BYTES = 1 << 20


class Exit:
    """How a rank's process ends: at once, whatever its threads are at, with the reason as stderr's last line.

    With `as_json`, one object on stdout says the same.
    """

    def __init__(self, rank: int, *, as_json: bool = False) -> None:
        self._rank = rank
        self._as_json = as_json

    def leave(self, reason: str, code: int, *, hint: str | None = None) -> NoReturn:
        """End this process with `code`."""
        if self._as_json:
            error = {"type": "EngineError", "message": reason, "hint": hint, "exit_code": code}
            self._print(
                json.dumps({"error": error} if code else {"event": "stopped", "rank": self._rank}), sys.stdout
            )
        line = f"rank {self._rank}: {reason}" + (f" (hint: {hint})" if hint else "")
        self._print(f"error: {line}" if code else line, sys.stderr)
        os._exit(code)

    def _print(self, line: str, stream: TextIO) -> None:
        with contextlib.suppress(
            OSError, ValueError
        ):  # nobody reads, or the main thread is closing the stream
            print(line, file=stream, flush=True)


class Control:
    """The connection of a rank. `silence_s`: how long its supervisor may say nothing; None is for ever."""

    def __init__(self, connection: socket.socket, ending: Exit, *, silence_s: float | None = None) -> None:
        """Take over a connected socket and read it from now on, so that the process ends with its supervisor."""
        self._socket = connection
        self._exit = ending
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._unreachable: OSError | None = None
        self._commands: queue.SimpleQueue[messages.Command] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="supervisor", daemon=True).start()

    def send(self, message: msgspec.Struct) -> None:
        """Report to the supervisor. Raises OSError when it is gone."""
        with self._lock:
            try:
                self._socket.sendall(messages.frame(message))
            except ConnectionError:
                raise  # it closed the connection, as a read will tell
            except OSError as error:
                self._unreachable = error  # the kernel says it once, and then reads as at a connection's end
                raise

    def send_last(self, message: msgspec.Struct, within_s: float = 1.0) -> None:
        """Report once more on the way out, unless that takes longer or cannot be done."""
        if self._lock.acquire(timeout=within_s):
            with contextlib.suppress(OSError):
                _, writable, _ = select.select([], [self._socket], [], within_s)
                if writable:
                    self._socket.sendall(messages.frame(message))
            self._lock.release()

    def receive(self, *, block: bool) -> list[messages.Command]:
        """Commands that have arrived; waits for one when `block`."""
        commands = [self._commands.get()] if block else []
        with contextlib.suppress(queue.Empty):
            while True:
                commands.append(self._commands.get_nowait())
        return commands

    def beat(self, heartbeat: Callable[[], messages.Heartbeat]) -> None:
        """Report every second that this process lives and where its main thread is, for as long as it does."""

        def report() -> None:
            with contextlib.suppress(OSError):  # the supervisor is gone, and this process is on its way out
                while True:
                    self.send(heartbeat())
                    time.sleep(_HEARTBEAT_S)

        threading.Thread(target=report, name="heartbeat", daemon=True).start()

    def _listen(self) -> None:
        try:
            for command in self._incoming():
                if isinstance(command, messages.End):
                    self._leave(command.reason)
                if not isinstance(command, messages.Alive):
                    self._commands.put(command)
            if self._unreachable is not None:
                raise self._unreachable
        except OSError as error:
            self._leave(f"lost its supervisor: {error.strerror or error}")
        except msgspec.MsgspecError as error:
            self._leave(f"its supervisor said what is no message: {error}")
        self._leave("its supervisor closed the connection")

    def _incoming(self) -> Iterator[messages.Command]:
        """What the supervisor says, until it closes the connection. Raises OSError, TimeoutError for silence too."""
        buffer = bytearray()
        while True:
            ready, _, _ = select.select([self._socket], [], [], self._silence_s)
            if not ready:
                raise TimeoutError(f"it has been silent for {self._silence_s:g} s")
            received = self._socket.recv(_READ_BYTES)
            if not received:
                return
            buffer += received
            while (payload := _take_frame(buffer)) is not None:
                yield messages.command_decoder.decode(payload)

    def _leave(self, reason: str) -> NoReturn:
        self._exit.leave(reason, DeskfleetError.exit_code)


def set_liveness(connection: socket.socket, silence_s: float) -> None:
    """Have the kernel give a TCP connection up when nothing sent has been received for `silence_s`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(round(silence_s / 2), 1))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(round(silence_s / 6), 1))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silence_s * 1000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _take_frame(buffer: bytearray) -> bytes | None:
    """Cut the first frame off `buffer`; None when it is not complete."""
    if len(buffer) < messages.LENGTH_BYTES:
        return None
    stop = messages.LENGTH_BYTES + messages.frame_length(bytes(buffer[: messages.LENGTH_BYTES]))
    if len(buffer) < stop:
        return None
    payload = bytes(buffer[messages.LENGTH_BYTES : stop])
    del buffer[:stop]
    return payload


__all__ = ["Control", "Exit", "set_liveness"]
