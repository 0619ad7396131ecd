"""When beds end: their directory, lock and control groups, what is missing to make one, what one has left behind.

All processes of a bed are in control groups named as its directory, and die with the test run: the kernel kills the
first process of the bed when its parent is gone, and with it everything below. What a killed run leaves is a directory
and empty control groups, which the next run sweeps away. A bed is somebody's while its `lock` is held.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "deskfleet-bed-"
_CGROUPS = Path("/sys/fs/cgroup")
_PROGRAMS = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "ping": "iputils-ping",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "pivot_root": "util-linux",
    "pkill": "procps",
    "sshfs": "sshfs",
}
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
_GONE_S = 10.0


def missing() -> tuple[str, ...]:
    """What this machine lacks for a bed, each with how to get it; nothing when one can be made."""
    if sys.platform != "linux":
        return (f"Linux: the bed is made of its namespaces, and this is {sys.platform}",)
    said = (
        []
        if os.geteuid() == 0
        else ["root: namespaces, mounts and Docker need it (try sudo make test-fleet)"]
    )
    path = f"{os.environ.get('PATH', os.defpath)}:{_SBIN}"
    absent = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        packages = " ".join(sorted({_PROGRAMS[name] for name in absent}))
        said.append(f"{', '.join(absent)}: on Debian, apt-get install --no-install-recommends {packages}")
    if not _hierarchies():
        said.append(f"control groups: nothing is mounted at {_CGROUPS}")
    return tuple(said)


@contextmanager
def bed_directory() -> Iterator[Path]:
    """A new bed's directory, held until the end; then its processes, control groups and itself are removed."""
    with _one_at_a_time():
        sweep_unheld()
        directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield directory
    finally:
        _remove(directory.name)
        os.close(lock)


def sweep() -> None:
    """Remove what killed test runs left behind."""
    with _one_at_a_time():
        sweep_unheld()


def sweep_unheld() -> None:
    """Remove each bed whose lock nobody holds."""
    names = {path.name for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*")}
    names |= {path.name for top in _hierarchies() for path in top.glob(f"{PREFIX}*")}
    for name in names:
        if not _is_held(name):
            _remove(name)


def own_cgroup(name: str) -> Path:
    """Make the control group for the bed's first process, whose end is everything's."""
    group = _hierarchies()[0] / name / "machines"  # a leaf: on version 2 only those may hold processes
    group.mkdir(parents=True)
    return group


def leftovers(name: str) -> tuple[str, ...]:
    """What there still is of a bed: processes, control groups, mounts and files; nothing when it is gone."""
    found = [f"process {pid}: {_command(pid)}" for pid in _pids(name)]
    found += [f"control group {group}" for group in _cgroups(name)]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found += [f"mount {line.split()[4]}" for line in mounts if name in line]
    directory = Path(tempfile.gettempdir(), name)
    found += [f"directory {directory}"] if directory.exists() else []
    return tuple(found)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    place = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def _is_held(name: str) -> bool:
    try:
        lock = os.open(Path(tempfile.gettempdir(), name, "lock"), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _remove(name: str) -> None:
    """End a bed's processes and wait until they are gone, then remove its control groups and directory."""
    deadline = time.monotonic() + _GONE_S
    while (pids := _pids(name)) and time.monotonic() < deadline:
        for pid in pids:
            _kill(pid)
        time.sleep(0.02)
    while (groups := _cgroups(name)) and time.monotonic() < deadline:
        for group in groups:
            _rmdir(group)
        time.sleep(0.02 if _cgroups(name) else 0)
    shutil.rmtree(Path(tempfile.gettempdir(), name), ignore_errors=True)
    if left := leftovers(name):
        raise RuntimeError(f"the bed {name} is not gone: {'; '.join(left)}")


def _hierarchies() -> tuple[Path, ...]:
    """The control group trees: one of version 2, or version 1's, of which `pids` comes first."""
    if (_CGROUPS / "cgroup.procs").exists():
        return (_CGROUPS,)
    tops = [path.parent for path in _CGROUPS.glob("*/cgroup.procs")]
    return tuple(sorted(tops, key=lambda top: (top.name != "pids", top.name)))


def _cgroups(name: str) -> list[Path]:
    """The bed's control groups, inner ones first."""
    tops = [top / name for top in _hierarchies() if (top / name).is_dir()]
    found = [Path(place) for top in tops for place, _, _ in os.walk(top)]
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def _pids(name: str) -> set[int]:
    found: set[int] = set()
    for group in _cgroups(name):
        try:
            found |= {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
        except OSError:
            continue  # removed meanwhile
    return found - {0}


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _rmdir(group: Path) -> None:
    try:
        group.rmdir()
    except OSError:
        return  # busy for another moment, or gone; the caller looks again


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"
