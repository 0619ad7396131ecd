"""One machine of the bed: its namespaces, its files seen from here, programs run in it. Knows no sshd, no Docker."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from .image import VENV, host_paths
from .network import MANAGEMENT, Cable, Switch, inside

SHIMS = "/usr/local/lib/bed"
PATH = f"{SHIMS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INIT = Path(__file__).with_name("machine.sh")
_OWN = {
    **dict.fromkeys(("home", "srv", "mnt", "var/lib/docker", "var/lib/containerd", "var/log"), 0o755),
    "root": 0o700,
    "tmp": 0o1777,
    "var/tmp": 0o1777,
}
_CLONE_NEWNET = 0x40000000
_EXIT_S = 20.0
_SERVICES = ("dockerd", "containerd", "sshd", "ps")
_INIT_WAITS = "sleep 3600"  # machine.sh


@dataclass(frozen=True, slots=True)
class Hub:
    """What all machines of a bed hang on: a process whose end is theirs, and the directory with their disks."""

    directory: Path
    pid: int

    @property
    def key(self) -> Path:
        """The private key that nodes accept."""
        return self.directory / "id_ed25519"


class Machine:
    """A machine that is switched on with `power_on`. `tools` puts this checkout's programs on its PATH."""

    def __init__(self, hub: Hub, name: str, number: int, switches: Sequence[Switch], *, tools: bool) -> None:
        self.hub = hub
        self.name = name
        self.cables = {switch.name: Cable(hub.pid, switch, number) for switch in switches}
        self._path = f"{SHIMS}:{VENV}/bin{PATH.removeprefix(SHIMS)}" if tools else PATH
        self._process: subprocess.Popen[str] | None = None
        self._pid = 0
        self._started: list[subprocess.Popen[str]] = []

    @property
    def pid(self) -> int:
        """Its process 1, as numbered here."""
        if self._process is None:
            raise RuntimeError(f"{self.name} is switched off")
        return self._pid

    def address(self, network: str = MANAGEMENT) -> str:
        """Its address on one of the networks."""
        return self.cables[network].address

    def path(self, path: str) -> Path:
        """A file of this machine, to read or write from here. Absolute links on the way lead astray."""
        return Path(f"/proc/{self.pid}/root", path.lstrip("/"))

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Put a file there, with the directories above it."""
        there = self.path(path)
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(text)
        there.chmod(mode)

    def copy_in(self, source: Path, target: str, owner: str = "root") -> None:
        """Copy a file or a directory of this machine to `target` there."""
        self.path(target).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-rT", source, self.path(target)], check=True)
        self.run(["chown", "-R", f"{owner}:", target])

    def run(
        self,
        command: str | Sequence[str],
        *,
        input: str | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program there, or text with bash, in the user's home and a fresh environment; ssh is not involved.

        With `check` a failure raises RuntimeError with what it said. Past `timeout_s` it is killed, and
        subprocess.TimeoutExpired raised.
        """
        argv = self._entered(command, user, env or {}, cwd)
        done = subprocess.run(argv, input=input or "", text=True, capture_output=True, timeout=timeout_s)
        if check and done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise RuntimeError(f"{self.name}: {command!r} ended with {done.returncode}: {said}")
        return done

    def start(
        self,
        command: str | Sequence[str],
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> subprocess.Popen[str]:
        """As `run`, without waiting: stdin and stdout are pipes, stderr goes to stdout. `kill()` ends it there too."""
        process = subprocess.Popen(
            self._entered(command, user, env or {}, cwd),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    @contextmanager
    def network(self) -> Iterator[None]:
        """Within it, sockets that this thread makes and programs that it starts are on this machine's network.

        A socket stays where it was made: a server may listen there, and be served from anywhere in this process.
        """
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        there = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter_network(there)
            yield
        finally:
            _enter_network(before)
            os.close(there)
            os.close(before)

    def processes(self) -> dict[int, str]:
        """What runs there besides the machine's own services, by its number there; also what nobody has waited for."""
        found = {}
        for line in self.run(["ps", "-e", "-o", "pid=,comm=,args="]).stdout.splitlines():
            pid, program, command = line.split(None, 2)
            if pid != "1" and program not in _SERVICES and command != _INIT_WAITS:
                found[int(pid)] = command
        return found

    def signal(self, pattern: str, kind: str) -> None:
        """Send KILL, STOP, CONT, ... to every process there whose command line has the pattern (pkill -f)."""
        self.run(["pkill", f"-{kind}", "-f", "--", pattern])

    def power_on(self) -> None:
        """Start it; files are as it left them."""
        self.boot()
        self.serve()

    def serve(self) -> None:
        """Start what runs there always: nothing, on a plain machine."""

    def boot(self) -> None:
        """Start process 1 and connect the cables. The machine ends with the thread that called this."""
        disk = self.hub.directory / "disks" / self.name
        _prepare(Path(f"/proc/{self.hub.pid}/root{disk}"))
        words = ["unshare", "--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child"]
        self._process = subprocess.Popen(
            [
                *inside(self.hub.pid, "mount", "pid", "net"),
                *(
                    "env",
                    "-i",
                    f"PATH={PATH}",
                    *words,
                    "--",
                    "bash",
                    str(_INIT),
                    self.name,
                    str(disk),
                    *host_paths(),
                ),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            if line == "ready\n":
                break
            said.append(line)
        else:
            self._process.wait(_EXIT_S)
            raise RuntimeError(f"{self.name} did not start: {''.join(said).strip()}")
        unshare = psutil.Process(self._process.pid).children()[0]
        self._pid = unshare.children()[0].pid
        for cable in self.cables.values():
            cable.plug(self._pid)

    def power_off(self) -> None:
        """As when the plug is pulled: every process ends at once, memory is lost, the disk stays.

        When this returns nothing of it runs any more. Its cables are as new at the next start.
        """
        if self._process is None:
            return
        os.kill(self._pid, signal.SIGKILL)
        reaped(self._process)
        self._process = None
        for cable in self.cables.values():
            cable.unplug()
        for process in self._started:
            ended(process)
        self._started.clear()

    def _entered(
        self, command: str | Sequence[str], user: str, env: Mapping[str, str], cwd: str | None
    ) -> list[str]:
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        home = self._home(user)
        settings = {"PATH": self._path, "HOME": home, "USER": user, "LANG": "C.UTF-8", **env}
        # Changing the user undoes the signal at the parent's death, so it is asked for again after that.
        return [
            *inside(self.pid, "mount", "uts", "ipc", "net", "pid"),
            *(
                "env",
                "-i",
                f"--chdir={cwd or home}",
                *(f"{name}={value}" for name, value in settings.items()),
            ),
            *("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--pdeathsig", "KILL", "--"),
            *argv,
        ]

    def _home(self, user: str) -> str:
        for line in self.path("/etc/passwd").read_text().splitlines():
            if line.startswith(f"{user}:"):
                return line.split(":")[5]
        raise RuntimeError(f"{self.name} has no user {user}")


def _prepare(disk: Path) -> None:
    """Make a new machine's disk: places where the machine beneath may hold something of its own are empty on it."""
    if disk.exists():
        return
    for place, mode in _OWN.items():
        empty = disk / "upper" / place
        empty.mkdir(parents=True)
        empty.chmod(mode)
        os.setxattr(empty, "trusted.overlay.opaque", b"y")


def ended(process: subprocess.Popen[str]) -> None:
    """Kill a program, wait for it, and close its pipes."""
    process.kill()
    reaped(process)


def reaped(process: subprocess.Popen[str]) -> None:
    """Wait for a program that is about to end, and close its pipes."""
    process.wait(_EXIT_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _enter_network(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
