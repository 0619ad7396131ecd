"""Ranks as processes of this machine: the supervisor starts them, and the kernel tells it of their end.

Owns the run directory with each rank's rank.json, log and the control socket, and the memory that ranks share, which is
a file without a name: it goes when the last process that has it open has ended. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec

from deskfleet.engine import messages
from deskfleet.engine.process import Attend, RankProcess, receive
from deskfleet.engine.spec import LocalRank, RankPaths, RankSpec, Transport
from deskfleet.errors import EngineError


class LocalRanks:
    """Starts every rank here; see `process.RankStarter`. Ranks read what `paths` names, where the supervisor does, and
    exchange by `transport` if they can, else over gloo."""

    patience = None
    ranks_know_paths = False

    def __init__(self, paths: RankPaths, transport: Transport = "shared memory") -> None:
        self.launch_id = uuid.uuid4().hex
        self._paths = paths
        self._transport = transport
        self._memory: int | None = None
        self._directory: Path | None = None
        self._server: asyncio.Server | None = None

    @property
    def rendezvous(self) -> str:
        """A file in the run directory."""
        return f"file://{self._place}/rendezvous"

    async def listen(self, attend: Attend) -> None:
        """Make the run directory and the control socket in it. Raises EngineError."""

        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                hello = await receive(reader)
                if isinstance(hello, messages.Hello):
                    await attend(hello.rank, reader, writer)
            finally:
                writer.close()

        with self._explained():
            self._directory = Path(tempfile.mkdtemp(prefix="deskfleet-"))
            self._server = await asyncio.start_unix_server(greet, self._socket_path)
            if self._transport == "shared memory":
                self._memory = os.memfd_create("deskfleet-ranks")

    async def start(self, spec: RankSpec) -> RankProcess:
        """Write rank.json and start the process that reads it. Raises EngineError."""
        cores = len(os.sched_getaffinity(0))
        spec = msgspec.structs.replace(spec, num_threads=spec.num_threads or max(cores // spec.tp_size, 1))
        memory = None if spec.tp_size == 1 else self._memory
        local = LocalRank(spec, self._paths, self._socket_path, os.getpid(), memory)
        path, log = self._place / f"rank-{spec.rank}.json", self._place / f"rank-{spec.rank}.log"
        environment = dict(os.environ)
        # Threads that spin while they wait take the cores from the other ranks: 10 times slower on a busy machine.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # one machine: do not depend on how its name resolves
        with self._explained():
            path.write_bytes(msgspec.json.format(msgspec.json.encode(local)))
            with log.open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "deskfleet.engine.rank", str(path),
                    stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                    env=environment, start_new_session=True, pass_fds=() if memory is None else (memory,),
                )  # fmt: skip
        return RankProcess(spec.rank, process, log, asyncio.get_running_loop().create_future())

    async def missing(self) -> str | None:
        """Nobody: a process that does not come ends, and its end is seen."""
        return None

    async def close(self) -> None:
        """Close the socket, give up the memory, and remove the run directory."""
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None
        if self._server is not None:
            self._server.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _place(self) -> Path:
        assert self._directory is not None, "ranks are started after listen()"
        return self._directory

    @property
    def _socket_path(self) -> str:
        return str(self._place / "control.sock")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EngineError(
                f"cannot start the ranks: {error.strerror or error}",
                hint=f"the run directory was {self._directory}; TMPDIR chooses where it is made",
            ) from error


__all__ = ["LocalRanks"]
