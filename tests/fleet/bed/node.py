"""A node of a fleet: a machine with sshd, a user and a Docker Engine of its own, and everything that can go wrong."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .image import VENV, EngineImage, mounts
from .machine import PATH, SHIMS, Hub, Machine, ended
from .network import MANAGEMENT, Switch

_DOCKER_S = 30.0
_DOCKERD = (
    "dockerd --iptables=false --ip6tables=false --bridge=none --storage-driver=vfs"
    # A unit manager of the machine beneath has no say in the groups of a node.
    " --exec-opt=native.cgroupdriver=cgroupfs --cgroup-parent=/{cgroup} --pidfile=/run/docker.pid"
)
_SSHD_CONFIG = f"""\
Port 22
HostKey /etc/ssh/bed_host_key
AuthorizedKeysFile /etc/ssh/bed_keys/%u
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
MaxStartups 100:30:200
PidFile /run/sshd.pid
SetEnv PATH={PATH}
Subsystem sftp internal-sftp
"""
# GNU date shows another moment as well as it shows this one; all else about it stays as it was called.
_DATE = """\
#!/bin/sh
now=$(/usr/bin/date +%s.%N)
exec /usr/bin/date -d "@$(( ${{now%.*}} + {skew_s} )).${{now#*.}}" "$@"
"""
_IMAGE = EngineImage()
ENGINE_FLAGS = ("--network", "host", *(word for mount in mounts() for word in ("--volume", mount)))
"""What `docker run` needs for a container of the engine image."""

_IDLE = "trap exit TERM; sleep 1000000 & wait"
_LISTEN = "import socket,time; s=socket.create_server(({host!r},{port})); print('ready',flush=True); time.sleep(1e6)"


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """What may differ from node to node: who logs in and where that user's home is, images, and where files lie."""

    user: str = "root"
    home: str = ""
    images: tuple[EngineImage, ...] = (EngineImage(),)
    checkpoint: str = "/srv/checkpoint"
    engram: str = "/srv/engram"
    cache: str = "/srv/cache"


class Node(Machine):
    """One node. `number` is its last part of an address; the files of `setup` are not made, only named."""

    def __init__(
        self, hub: Hub, name: str, number: int, switches: Sequence[Switch], setup: NodeSetup
    ) -> None:
        super().__init__(hub, name, number, switches, tools=False)
        self.setup = setup
        self.home = setup.home or ("/root" if setup.user == "root" else f"/home/{setup.user}")
        self._host_key = hub.directory / f"host-{name}"

    # Starting.

    def serve(self) -> None:
        """Start sshd and Docker; a new node is furnished first."""
        if not self.path("/etc/ssh/bed_sshd_config").exists():
            self._install()
        self.start_sshd()
        self.start_docker()
        for image in self.setup.images:
            self.load(image)

    def reboot(self) -> None:
        """Power off, then on again."""
        self.power_off()
        self.power_on()

    def start_sshd(self) -> None:
        """Listen again."""
        self.run(["/usr/sbin/sshd", "-f", "/etc/ssh/bed_sshd_config", "-E", "/var/log/sshd.log"])

    def stop_sshd(self) -> None:
        """Nothing listens on port 22 any more, and sessions that are open end."""
        self.run("pkill -KILL -x sshd; rm -f /run/sshd.pid")

    def start_docker(self) -> None:
        """Start the Docker Engine, and wait until it answers."""
        command = _DOCKERD.format(cgroup=f"{self.hub.directory.name}/{self.name}")
        self.run(f"setsid {command} >>/var/log/dockerd.log 2>&1 </dev/null &")
        deadline = time.monotonic() + _DOCKER_S
        while not _answers(self.path("/run/docker.sock")):
            if time.monotonic() > deadline:
                log = self.path("/var/log/dockerd.log").read_text().splitlines()
                raise RuntimeError(f"{self.name}: Docker did not start: " + "\n".join(log[-5:]))
            time.sleep(0.02)

    def stop_docker(self) -> None:
        """Kill the Docker Engine as a crash would; containers run on, until its next start ends them."""
        self.run("pkill -KILL -x dockerd; pkill -KILL -x containerd; rm -f /run/docker.pid")

    # Docker.

    def docker(
        self, *words: str, input: str | None = None, check: bool = True, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run the docker command there."""
        return self.run(["docker", *words], input=input, check=check, timeout_s=timeout_s)

    def load(self, image: EngineImage) -> None:
        """Give it an image; one of the same name loses the name."""
        place = f"/tmp/{image.id.removeprefix('sha256:')}.tar"
        self.path(place).write_bytes(image.archive())
        self.run(f"docker load --quiet --input {place} && rm {place}")

    def engine(self, *argv: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a program in a container of the engine image, to its end."""
        return self.docker("run", "--rm", *ENGINE_FLAGS, self.setup.images[0].tag, *argv, timeout_s=timeout_s)

    def containers(self) -> dict[str, dict[str, Any]]:
        """Every container, running or not, by name, as docker inspect shows it."""
        ids = self.docker("ps", "--all", "--quiet", "--no-trunc").stdout.split()
        # One may be removed in between: then the others are shown, and an error.
        shown = json.loads(self.docker("inspect", *ids, check=False).stdout) if ids else []
        return {entry["Name"].removeprefix("/"): entry for entry in shown}

    def signal_container(self, name: str, kind: str) -> None:
        """Send KILL, STOP, CONT, ... to every process in a container, without asking Docker to."""
        rows = self.docker("top", name, "-eo", "pid").stdout.split()[1:]
        self.run(["kill", f"-{kind}", *rows])

    def stale_container(
        self, fleet: str, rank: int, image: EngineImage = _IMAGE, launch: str = "older-launch"
    ) -> str:
        """A container of our fleet that an older launch left running; returns its name."""
        name = f"deskfleet-{fleet}-{rank}"
        labels = {"deskfleet.fleet": fleet, "deskfleet.launch": launch, "deskfleet.rank": str(rank)}
        words = [word for key, value in labels.items() for word in ("--label", f"{key}={value}")]
        self.docker("run", "--detach", "--name", name, *words, *ENGINE_FLAGS, image.tag, "sh", "-c", _IDLE)
        return name

    # ssh.

    def ssh_config(self, key: str | Path | None = None) -> str:
        """What reaches it by name or address, with the key as it is called on this machine, or as said."""
        return (
            f"Host {self.name}\n"
            f"    HostName {self.address()}\n"
            f"Host {self.name} {' '.join(self._addresses())}\n"
            f"    User {self.setup.user}\n"
            f"    IdentityFile {ssh_word(key or self.hub.key)}\n"
            f"    IdentitiesOnly yes\n"
        )

    def known_host(self) -> str:
        """Its line of known_hosts."""
        public = self._host_key.with_suffix(".pub").read_text().split()
        return f"{','.join((self.name, *self._addresses()))} {' '.join(public[:2])}\n"

    def refuse_key(self) -> None:
        """From now on nobody may log in."""
        self.path(f"/etc/ssh/bed_keys/{self.setup.user}").unlink()

    def accept_key(self) -> None:
        """The bed's key may log in."""
        self.write(f"/etc/ssh/bed_keys/{self.setup.user}", self.hub.key.with_suffix(".pub").read_text())

    # Faults of cables.

    def cut(self, network: str = MANAGEMENT) -> None:
        """Pull the cable."""
        self.cables[network].cut()

    def slow(
        self, network: str = MANAGEMENT, *, delay_s: float = 0.0, loss: float = 0.0, bytes_per_s: float = 0.0
    ) -> None:
        """A bad cable, in both directions: a delay, a share of packets lost, a rate."""
        self.cables[network].slow(delay_s, loss, bytes_per_s)

    def mend(self, network: str = MANAGEMENT) -> None:
        """A new cable."""
        self.cables[network].mend()

    def set_mtu(self, mtu: int, network: str = MANAGEMENT) -> None:
        """Give its interface another largest packet."""
        self.run(["ip", "link", "set", self.cables[network].switch.interface, "mtu", str(mtu)])

    # Faults of the machine.

    def limit_disk(self, path: str, size_bytes: int) -> None:
        """Put an empty disk of that size at `path`, until the next reboot."""
        self.run(["mkdir", "-p", path])
        self.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=755", "limit", path])
        self.run(["chown", f"{self.setup.user}:", path])

    def fill_disk(self, path: str, free_bytes: int = 0) -> None:
        """Leave so much free on the disk at `path`, in whole pages; the file that fills it is called `filling`."""
        free = int(self.run(["stat", "-f", "-c", "%a", path]).stdout) * int(
            self.run(["stat", "-f", "-c", "%S", path]).stdout
        )
        self.run(["fallocate", "-l", str(max(0, free - free_bytes)), f"{path}/filling"])

    def skew_clock(self, skew_s: int) -> None:
        """Let the `date` command be wrong by that much; 0 sets it right. The kernel's clock is everybody's."""
        if skew_s:
            self.shim("date", _DATE.format(skew_s=skew_s))
        else:
            self.path(f"{SHIMS}/date").unlink(missing_ok=True)

    def show_memory(self, available_bytes: int, free_bytes: int | None = None) -> None:
        """Let /proc/meminfo say so, until `show_true_memory` or a reboot; containers see the kernel's own."""
        shown = self.path("/run/meminfo")
        changed = {"MemAvailable": available_bytes, "MemFree": free_bytes or available_bytes}
        lines = [line.split(":") for line in Path("/proc/meminfo").read_text().splitlines()]
        # Always of one length: whoever reads meanwhile sees the old text or the new.
        text = "".join(
            f"{name}: {changed[name] // 1024:>14} kB\n"
            if name in changed
            else f"{name}: {value.split()[0]:>14} kB\n"
            for name, value in lines
            if value.endswith("kB")
        )
        if shown.exists():
            with shown.open("r+") as file:
                file.write(text)
        else:
            self.write("/run/meminfo", text)
            self.run(["mount", "--bind", "/run/meminfo", "/proc/meminfo"])

    def show_true_memory(self) -> None:
        """Let /proc/meminfo be the kernel's again."""
        self.run("umount /proc/meminfo && rm /run/meminfo")

    def shim(self, name: str, script: str) -> None:
        """Put a program before all others of its name, for sessions over ssh and for `run`."""
        self.write(f"{SHIMS}/{name}", script, 0o755)

    @contextmanager
    def taken_port(self, port: int, host: str = "0.0.0.0") -> Iterator[None]:
        """Somebody else's program listens there."""
        process = self.start([f"{VENV}/bin/python", "-c", _LISTEN.format(host=host, port=port)])
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(
                    f"{self.name}: port {port} cannot be taken: {process.stdout.read().strip()}"
                )
            yield
        finally:
            ended(process)

    # What a new node gets.

    def _install(self) -> None:
        user = self.setup.user
        if user != "root":
            self._add_user(user)
        self.write("/etc/ssh/bed_sshd_config", _SSHD_CONFIG)
        self.write("/etc/ssh/bed_host_key", self._host_key.read_text(), 0o600)
        self.accept_key()

    def _addresses(self) -> list[str]:
        return [cable.address for cable in self.cables.values()]

    def _add_user(self, user: str) -> None:
        uid = 2000
        with self.path("/etc/passwd").open("a") as passwd:
            passwd.write(f"{user}:x:{uid}:{uid}::{self.home}:/bin/bash\n")
        with self.path("/etc/shadow").open("a") as shadow:
            shadow.write(f"{user}:*:20000:0:99999:7:::\n")
        groups = [
            _with_member(line, user) if line.startswith("docker:") else line
            for line in self.path("/etc/group").read_text().splitlines()
        ]
        self.write("/etc/group", "\n".join([*groups, f"{user}:x:{uid}:"]) + "\n")
        places = (self.home, self.setup.cache, self.setup.checkpoint, self.setup.engram)
        self.run(["mkdir", "-p", *places])
        self.run(["chown", f"{user}:", *places])


def ssh_word(path: str | Path) -> str:
    """A path as ssh_config takes it, whatever is in it."""
    return '"' + re.sub(r'([\\"])', r"\\\1", str(path)) + '"'


def _with_member(line: str, user: str) -> str:
    return line + user if line.endswith(":") else f"{line},{user}"


def _answers(path: Path) -> bool:
    """Whether Docker answers; its socket is there a while before."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_DOCKER_S)
        try:
            client.connect(str(path))
            client.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return client.recv(64).startswith(b"HTTP/1.0 200")
        except OSError:
            return False
