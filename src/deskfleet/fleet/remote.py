"""One node's shell: scripts, their output, and files put there. Owns how we reach nodes and how that fails.

The system's OpenSSH does the work, so users' own ssh_config, agents and jump hosts count; a node whose address is
`local` is this machine's bash. Nothing is installed on a node: scripts travel on stdin. Knows no docker, no engine.

What is sent to `bash` on stdin: a prologue, NUL, the script, NUL, and the script's own stdin. The command line that a
node's login shell sees is always the same, so no argument is ever quoted for an unknown shell. Our end of stdin stays
open while the script runs, and its closing means that nobody waits any more: the prologue then ends the script's whole
process group. That holds when we are cancelled, when we are killed, and when the connection is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Generic, Literal, Self, TypeVar

from deskfleet.errors import ConfigError, DeskfleetError
from deskfleet.fleet.spec import LOCAL, NodeSpec

_T = TypeVar("_T")

_CONNECT_S = 10
_SSH = (
    "ssh",
    "-T",
    *("-o", "BatchMode=yes"),
    *("-o", f"ConnectTimeout={_CONNECT_S}"),
    # A cut cable is noticed after 15 s, in a command that says nothing as well.
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
    # What a user's ssh_config may ask for on this host, and what would break a script on stdin.
    *("-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes", "-o", "LogLevel=ERROR"),
)
_SSH_FAILED = 255
_COMMAND = """exec bash -c 'IFS= read -r -d "" prologue && eval "$prologue"'"""

# Job control gives the script a process group of its own. What feeds it hands on its stdin, then waits for ours to
# close. When the script is through, whatever it left behind in its group is ended with it. 255 is ssh's own.
_PROLOGUE = """\
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
IFS= read -r -d "" script || exit 254
set -- {args}
feed() {{ trap "" TERM; head -c {size}; exec >&-; cat >/dev/null; kill -TERM 0; sleep 2; kill -KILL 0; }}
set -m
(exec bash -c "$script" deskfleet "$@" < <(feed 2>/dev/null)) &
exec 2>/dev/null
wait $!
code=$?
kill -KILL -- "-$!"
[ "$code" -ne 255 ] || code=254
exit "$code"
"""
_GRACE_S = 4.0  # the prologue's two seconds between TERM and KILL, and the way there
_CHUNK_BYTES = 1 << 16

_PUT = """\
set -eu
umask 077
mkdir -p -- "$(dirname -- "$1")"
beside=$(mktemp -- "$1.XXXXXX")
trap 'rm -f -- "$beside"' EXIT
cat >"$beside"
size=$(wc -c <"$beside")
if [ "$size" -ne "$3" ]; then echo "$size of $3 bytes arrived" >&2; exit 1; fi
chmod -- "$2" "$beside"
mv -fT -- "$beside" "$1"
"""


class NodeUnreachable(DeskfleetError):
    """A node could not be reached, did not answer in time, or was lost in the middle."""

    def __init__(self, node: str, said: str, *, hint: str) -> None:
        super().__init__(f"node {node} cannot be reached: {said}", hint=hint)
        self.node = node
        self.said = said


class RemoteFailed(DeskfleetError):
    """A script of ours ended badly on a node that was reached; `said` is its last line on stderr."""

    def __init__(self, node: str, what: str, said: str, *, hint: str | None = None) -> None:
        super().__init__(f"node {node}: {what}: {said}", hint=hint)
        self.node = node
        self.said = said


@dataclass(frozen=True, slots=True)
class Ran:
    """What a script that ran to its end came to. A script's exit code 255 is shown as 254."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line that it wrote to stderr, else to stdout: mostly the reason."""
        return _last_line(self.stderr) or _last_line(self.stdout) or f"it ended with {self.returncode}"


class Remote:
    """One node. `control_path` is where ssh keeps the socket of its shared connection."""

    def __init__(self, node: NodeSpec, control_path: Path | None = None) -> None:
        self.node = node
        self._control_path = control_path
        self._connecting = asyncio.Lock()

    @property
    def is_local(self) -> bool:
        """Whether this is the machine we run on."""
        return self.node.address == LOCAL

    def command(self) -> tuple[str, ...]:
        """The argv that reaches the node's bash, as `--dry-run` shows it."""
        if self.is_local:
            return "bash", "-c", _COMMAND
        return *self._ssh(), "--", self.node.address, _COMMAND

    async def run(self, script: str, *args: str, stdin: bytes | None = None, timeout_s: float = 60.0) -> Ran:
        """Run a bash script with `args` as $1, $2, ... and return what it said, whatever its exit code.

        Without `stdin` the script reads an empty one. When we are cancelled the script's process group is ended before
        this returns. Raises NodeUnreachable when ssh fails or `timeout_s` is over, ConfigError for an argument with a
        NUL byte.
        """
        try:
            async with asyncio.timeout(timeout_s), self._started(script, args, stdin) as process:
                stdout, stderr = await _talk(process)
                code = await process.wait()
        except TimeoutError as error:
            raise self._too_slow(timeout_s) from error
        said = _text(stderr)
        self._check_reached(code, said)
        return Ran(code, _text(stdout), said)

    async def stream(self, script: str, *args: str) -> AsyncGenerator[str, None]:
        """Yield the lines of a script's stdout as they come, without their ends.

        Closing the iterator ends the script; who may leave the loop early takes it with `contextlib.aclosing`. Raises
        NodeUnreachable when ssh fails, RemoteFailed when the script ends with anything but 0.
        """
        async with self._started(script, args, None) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            stderr = asyncio.create_task(process.stderr.read())
            try:
                rest = b""
                while chunk := await process.stdout.read(_CHUNK_BYTES):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield _text(line)
                if rest:
                    yield _text(rest)
                said, code = _text(await stderr), await process.wait()
            finally:
                stderr.cancel()
        self._check_reached(code, said)
        if code != 0:
            raise RemoteFailed(self.node.name, "a script ended", Ran(code, "", said).last_line)

    async def put(self, data: bytes, path: str, mode: int = 0o600) -> None:
        """Write `data` to `path` on the node: beside it first, then renamed, so that nobody sees half a file.

        Missing directories are made. Raises NodeUnreachable, RemoteFailed with what the node said.
        """
        ran = await self.run(_PUT, path, f"{mode:04o}", str(len(data)), stdin=data, timeout_s=600.0)
        if ran.returncode != 0:
            raise RemoteFailed(self.node.name, f"cannot write {path}", ran.last_line)

    async def hang_up(self) -> None:
        """End the shared connection, if there is one."""
        if self.is_local or self._control_path is None or not self._control_path.exists():
            return
        process = await self._spawn(
            (*self._ssh(), "-O", "exit", "--", self.node.address), stderr=asyncio.subprocess.DEVNULL
        )
        await _end(process)

    def _ssh(self, *, shared: Literal["no", "auto"] = "no") -> tuple[str, ...]:
        """How ssh is called; with `shared` auto it also makes the connection that others then use, if there is none."""
        words = [*_SSH, "-o", f"ControlPath={self._control_path or 'none'}", "-o", f"ControlMaster={shared}"]
        if shared == "auto":
            words += ["-o", "ControlPersist=60"]
        if self.node.identity is not None:
            # An agent with many keys would use up the server's patience before ours is offered.
            words += ["-i", self.node.identity, "-o", "IdentitiesOnly=yes"]
        if self.node.user is not None:
            words += ["-l", self.node.user]
        if self.node.port is not None:
            words += ["-p", str(self.node.port)]
        return tuple(words)

    @contextlib.asynccontextmanager
    async def _started(
        self, script: str, args: Sequence[str], stdin: bytes | None
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """The process that runs the script, with everything sent that it reads; ended, with its script, on the way out.

        Raises NodeUnreachable where there is no ssh or bash here.
        """
        sent = _message(script, args, stdin or b"")
        await self._connect()
        process = await self._spawn(self.command())
        writer = asyncio.create_task(_send(process, sent))
        try:
            yield process
        finally:
            writer.cancel()
            await _end(process)

    async def _connect(self) -> None:
        """Make the shared connection, if there is none yet.

        Scripts that begin at once would each make one of their own, and ssh would complain to all but the first.
        """
        if self.is_local or self._control_path is None or self._control_path.exists():
            return
        async with self._connecting:
            if self._control_path.exists():
                return
            code, said = await self._make_connection(self._control_path.with_suffix(".log"))
        self._check_reached(code, said)

    async def _make_connection(self, log: Path) -> tuple[int, str]:
        """Leave an ssh in the background; return how its start ended, and what it said.

        What it says goes to a file: a jump host's ssh lives as long as it does, and would hold a pipe of ours open.
        """
        with log.open("wb") as stderr:
            process = await self._spawn(
                (*self._ssh(shared="auto"), "--", self.node.address, "true"), stderr=stderr
            )
            try:
                code = await process.wait()
            finally:
                await _end(process)
        return code, log.read_text(encoding="utf-8", errors="replace")

    async def _spawn(
        self, argv: Sequence[str], stderr: int | IO[bytes] = asyncio.subprocess.PIPE
    ) -> asyncio.subprocess.Process:
        """Start ssh or bash here. Raises NodeUnreachable where there is none."""
        try:
            return await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if stderr == asyncio.subprocess.PIPE else stderr,
                stderr=stderr,
                start_new_session=True,  # a terminal's Ctrl-C is for us, not for what runs on nodes
            )
        except OSError as error:
            hint = "install the OpenSSH client and bash on this machine"
            raise NodeUnreachable(self.node.name, f"{argv[0]}: {error.strerror}", hint=hint) from error

    def _check_reached(self, code: int, stderr: str) -> None:
        if not self.is_local and (code == _SSH_FAILED or code < 0):
            said, hint = explain(stderr, self.node)
            raise NodeUnreachable(self.node.name, said, hint=hint)

    def _too_slow(self, timeout_s: float) -> NodeUnreachable:
        return NodeUnreachable(
            self.node.name,
            f"no answer within {timeout_s:g} s",
            hint=f"is it overloaded? Try: {shlex.join([*_by_hand(self.node), 'uptime'])}",
        )


def _message(script: str, args: Sequence[str], stdin: bytes) -> bytes:
    """Everything that goes to the node's bash. Raises ConfigError for a NUL byte, which no argument can hold."""
    for text in (script, *args):
        if "\0" in text:
            raise ConfigError(f"an argument for a node holds a NUL byte: {text[:40]!r}")
    quoted = " ".join(shlex.quote(arg) for arg in args)
    prologue = _PROLOGUE.format(args=quoted, size=len(stdin))
    encoded = f"{prologue}\0{script}\0".encode("utf-8", "surrogateescape")  # file names need not be text
    return encoded + stdin


async def _send(process: asyncio.subprocess.Process, data: bytes) -> None:
    """Write `data` and leave stdin open: its closing is the sign to end."""
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(data)
        await process.stdin.drain()


async def _talk(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr = await asyncio.gather(process.stdout.read(), process.stderr.read())
    return stdout, stderr


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close stdin, which ends the script, and wait; after the grace end what is left here."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_GRACE_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


_REASONS: tuple[tuple[str, str, str], ...] = (
    # what ssh writes, what it means, what to do. The first that is found counts.
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key has changed",
        "if the machine was set up anew: ssh-keygen -R {address}; if not, somebody is between you and it",
    ),
    (
        "Host key verification failed",
        "its host key is not known here",
        "connect once by hand and compare the fingerprint: {by_hand}",
    ),
    (
        "Permission denied",
        "it refused our key",
        "put your public key there: ssh-copy-id {target}, or name the right user and identity in fleet.toml",
    ),
    (
        "Too many authentication failures",
        "it refused our keys",
        "name one key: identity = ... in fleet.toml",
    ),
    ("Could not resolve hostname", "there is no such host", "correct the node's address in fleet.toml"),
    (
        "Connection refused",
        "nothing listens there",
        "start sshd on the node, and compare the port in fleet.toml",
    ),
    ("timed out", "it does not answer", "is it on, and is the address {address} right? Try: ping {address}"),
    (
        "No route to host",
        "there is no way to it",
        "compare cable, address and subnet: ip route get {address}",
    ),
    (
        "Network is unreachable",
        "there is no way to it",
        "compare cable, address and subnet: ip route get {address}",
    ),
    (
        "identity file",
        "the key file cannot be used",
        "compare identity in fleet.toml; the file must be yours, mode 0600",
    ),
    ("Bad configuration option", "ssh does not take its configuration", "correct your ssh_config"),
    (
        "",
        "the connection was lost",
        "see whether it is up and reachable: {by_hand} uptime",
    ),
)


def explain(stderr: str, node: NodeSpec) -> tuple[str, str]:
    """Return what ssh's failure means, with the one line of ssh's that says most, and what to do."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    pattern, meaning, hint = next(reason for reason in _REASONS if reason[0] in stderr)
    line = next((line for line in reversed(lines) if pattern in line), "")
    target = node.address if node.user is None else f"{node.user}@{node.address}"
    hint = hint.format(address=node.address, target=target, by_hand=shlex.join(_by_hand(node)))
    return f"{meaning} ({line.strip('@ ') or 'ssh said nothing'})", hint


def _by_hand(node: NodeSpec) -> list[str]:
    """The shortest ssh command that a person would type for the node."""
    if node.address == LOCAL:
        return []
    words = ["ssh"]
    if node.port is not None:
        words += ["-p", str(node.port)]
    if node.identity is not None:
        words += ["-i", node.identity]
    return [*words, node.address if node.user is None else f"{node.user}@{node.address}"]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


@dataclass(frozen=True, slots=True)
class Gathered(Generic[_T]):
    """What came of the same work on several nodes, by node, in the fleet's order."""

    results: Mapping[str, _T]
    failures: Mapping[str, DeskfleetError]

    def all(self) -> Mapping[str, _T]:
        """Return the results. Raises the first failure when there is one; with several the message names all nodes."""
        if not self.failures:
            return self.results
        first = next(iter(self.failures.values()))
        if len(self.failures) > 1:
            rest = "; ".join(failure.message for failure in self.failures.values())
            raise DeskfleetError(rest, hint=first.hint)
        raise first


_SOCKETS = "deskfleet-ssh-"
_OLD_S = 60.0  # a directory that was made just now may not be locked yet


def _locked(directory: Path) -> int | None:
    """Take a directory's lock, which lasts as long as we live; None when somebody has it."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody has it, or this file system has no locks: then nobody removes anything
        os.close(lock)
        return None
    return lock


async def _remove_left(base: Path) -> None:
    """Remove what users of connections that were killed have left in `base`, and end the connections.

    Without this ssh would end by itself, a minute after its last use; its directory would stay for ever.
    """
    for directory in base.glob(f"{_SOCKETS}*"):
        with contextlib.suppress(OSError):
            seen = directory.lstat()
            is_ours = stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid()
            if not is_ours or time.time() - seen.st_mtime < _OLD_S:
                continue
            lock = _locked(directory)
            if lock is None:
                continue
            try:
                for path in directory.iterdir():
                    if path.is_socket():
                        await _end_connection(path)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


async def _end_connection(path: Path) -> None:
    """Ask the ssh that listens there to end; whose it was does not matter to it."""
    process = await asyncio.create_subprocess_exec(
        *("ssh", "-F", "none", "-o", f"ControlPath={path}", "-O", "exit", "--", "nobody"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    await _end(process)


class Remotes:
    """All nodes of a fleet: `async with Remotes(spec.nodes) as remotes: await remotes.gather(work)`.

    Sockets of shared connections lie in a directory that only we can enter, and are gone at the end; those of one that
    was killed go when the next one begins. Nothing is reached before the first script is run.
    """

    def __init__(self, nodes: Sequence[NodeSpec]) -> None:
        self._nodes = tuple(nodes)
        self._remotes: dict[str, Remote] = {}
        self._directory: Path | None = None
        self._lock: int | None = None

    async def __aenter__(self) -> Self:
        # A socket's path has 108 bytes at most, and ssh appends 17 of its own while it makes one.
        base = tempfile.gettempdir()
        base = base if len(base) < 50 else "/tmp"
        await _remove_left(Path(base))
        self._directory = Path(tempfile.mkdtemp(prefix=_SOCKETS, dir=base))
        self._lock = _locked(self._directory)
        self._remotes = {
            node.name: Remote(node, self._directory / str(index)) for index, node in enumerate(self._nodes)
        }
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await asyncio.gather(*(remote.hang_up() for remote in self))
        finally:
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def __getitem__(self, name: str) -> Remote:
        return self._remotes[name]

    def __iter__(self) -> Iterator[Remote]:
        return iter(self._remotes.values())

    async def gather(self, work: Callable[[Remote], Awaitable[_T]]) -> Gathered[_T]:
        """Do `work` on every node at once. A node's DeskfleetError is kept under its name and stops no other."""
        results: dict[str, _T] = {}
        failures: dict[str, DeskfleetError] = {}

        async def on(remote: Remote) -> _T | DeskfleetError:
            try:
                return await work(remote)
            except DeskfleetError as error:
                return error

        for remote, came in zip(self, await asyncio.gather(*(on(remote) for remote in self)), strict=True):
            if isinstance(came, DeskfleetError):
                failures[remote.node.name] = came
            else:
                results[remote.node.name] = came
        return Gathered(results, failures)


__all__ = [
    "Gathered",
    "NodeUnreachable",
    "Ran",
    "Remote",
    "RemoteFailed",
    "Remotes",
    "explain",
]
