"""A real sshd on a free port, and an `ssh` on PATH that knows it: what tests of nodes talk to."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from pathlib import Path

import psutil

from deskfleet.fleet.spec import NodePaths, NodeSpec

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
SSH = shutil.which("ssh")  # before any of ours is first on PATH
WHY_NOT = "needs OpenSSH's server: apt-get install openssh-server"


def make_key(path: Path) -> Path:
    """Make a key pair at `path`."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


class Sshd:
    """One server. `directory` holds its keys, its log, and `bin/ssh`, which reads a configuration of our own.

    The user's ssh is used as it is: only where it looks for its configuration is another place.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.host_key = make_key(directory / "host_key")
        self.identity = make_key(directory / "id")
        shutil.copy(directory / "id.pub", directory / "authorized_keys")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        (directory / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.host_key}\n"
            f"AuthorizedKeysFile {directory / 'authorized_keys'}\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPidFile none\nMaxStartups 100\n"
        )
        self.trust()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def trust(self) -> None:
        """Write the server's key of now into the client's known hosts."""
        key = self.host_key.with_suffix(".pub").read_text().split()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {key[0]} {key[1]}\n")

    @property
    def known_hosts(self) -> Path:
        return self.directory / "known_hosts"

    def start(self) -> None:
        """Start, and wait until it listens."""
        assert SSHD is not None
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        with (self.directory / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(self.directory / "sshd_config")],
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError((self.directory / "sshd.log").read_text())

    def stop(self) -> None:
        """End the server with all its connections, at once."""
        if self._process is None:
            return
        for process in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
            with contextlib.suppress(psutil.NoSuchProcess):  # a child may have ended meanwhile
                if isinstance(process, subprocess.Popen) or process.name() == "sshd":
                    process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process = None

    def node(self, name: str, **values: object) -> NodeSpec:
        """The node behind it, as a fleet.toml would name it."""
        paths = NodePaths(*(str(self.directory / part) for part in ("checkpoint", "engram", "cache")))
        given: dict[str, object] = {
            "name": name,
            "address": "127.0.0.1",
            "user": None,
            "port": self.port,
            "identity": str(self.identity),
            "fabric": ("127.0.0.1",),
            "kind": "spark",
            "available_bytes": None,
            "paths": paths,
        }
        return NodeSpec(**{**given, **values})  # type: ignore[arg-type]


def ssh_wrapper(directory: Path, *servers: Sshd, config: str = "") -> str:
    """Make an `ssh` that takes its configuration from `directory`; return the PATH on which it is first.

    `config` comes before the rest, as a user's own entries.
    """
    directory.mkdir(parents=True, exist_ok=True)
    known = " ".join(str(server.known_hosts) for server in servers)
    (directory / "ssh_config").write_text(
        f"{config}\nHost *\n"
        f"  UserKnownHostsFile {known}\n  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n"
    )
    wrapper = directory / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {SSH} -F "{directory / "ssh_config"}" "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    return f"{directory}:{os.environ['PATH']}"
