"""Sharing a checkpoint: real copies over real sshd, and the proof that finds every way in which a node can lack it.

NFS itself needs the kernel's server, which test machines do not have: what is run is checked with stand-ins for the
three programs, and what nodes say with recorded lines.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deskfleet.cli import main
from deskfleet.errors import DeskfleetError
from deskfleet.fleet.program import error_of, read_script
from deskfleet.fleet.remote import Remotes
from deskfleet.fleet.share import judge, parse_seen
from deskfleet.fleet.spec import FleetSpec, read_spec
from tests.cli.cli_process import Done
from tests.fleet.real_sshd import SSHD, WHY_NOT, Sshd, ssh_wrapper
from tests.fleet.test_pull import BIG, INDEX, TABLE, checkpoint_files

needs_sshd = pytest.mark.skipif(SSHD is None, reason=WHY_NOT)


def own_address() -> str | None:
    """An address of this machine that is not its loopback's: workers must be told one."""
    for addresses in psutil.net_if_addrs().values():
        for found in addresses:
            if found.family == socket.AF_INET and not found.address.startswith("127."):
                return found.address
    return None


FLEET = """\
name = "desk"
share = "{share}"
[[nodes]]
name = "head"
kind = "local"
address = "local"
fabric = ["{fabric}"]
paths = {{ checkpoint = "{base}/head's", cache = "{base}/cache" }}
{workers}
[checkpoint]
model = "v4.1-flash"
[engine]
name = "native"
"""
WORKER = """\
[[nodes]]
name = "worker-{number}"
kind = "local"
address = "127.0.0.1"
port = {port}
identity = "{identity}"
fabric = ["198.51.100.{number}"]
paths = {{ checkpoint = "{base}/worker {number}", cache = "{base}/cache-{number}" }}
"""


Typed = Callable[..., Done]


@pytest.fixture
def typed(capfd: pytest.CaptureFixture[str]) -> Iterator[Typed]:
    """The command in this process: what a start of Python takes is not what is tested here."""
    handlers = logging.root.handlers[:]

    def run(*words: str | Path) -> Done:
        code = main([str(word) for word in words])
        out, err = capfd.readouterr()
        return Done(code, out, err)

    yield run
    logging.root.handlers[:] = handlers


class Desk:
    """A head that is this machine, two workers behind real sshds, and a checkpoint on the head."""

    def __init__(self, base: Path, servers: list[Sshd], type_here: Typed) -> None:
        self.base = base
        self._servers = servers
        self._type = type_here
        self.files = {
            name: data for name, data in checkpoint_files().items() if not name.startswith("original")
        }
        self.head = base / "head's"
        self.workers = [base / f"worker {number}" for number in (1, 2)]
        self.fill(self.head)

    def fill(self, directory: Path) -> None:
        """Put the checkpoint there."""
        for name, data in self.files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)

    def file(self, share: str) -> Path:
        """A fleet.toml of these nodes."""
        workers = "".join(
            WORKER.format(number=number, port=server.port, identity=server.identity, base=self.base)
            for number, server in enumerate(self._servers, 1)
        )
        fabric = own_address() or "198.51.100.9"
        path = self.base / "fleet.toml"
        path.write_text(FLEET.format(share=share, fabric=fabric, base=self.base, workers=workers))
        return path

    def share(self, share: str, *flags: str) -> Done:
        """Run the verb."""
        return self._type("fleet", "share", "-f", self.file(share), *flags)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sshd]]:
    """Two sshds for the module."""
    made = [Sshd(tmp_path_factory.mktemp(f"sshd{number}")) for number in (1, 2)]
    yield made
    for server in made:
        server.stop()


@pytest.fixture
def desk(tmp_path: Path, servers: list[Sshd], typed: Typed, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """The nodes, with nothing on the workers yet."""
    monkeypatch.setenv("PATH", ssh_wrapper(tmp_path / "bin", *servers))
    return Desk(tmp_path, servers, typed)


@needs_sshd
@pytest.mark.skipif(own_address() is None, reason="this machine has no address but its loopback's")
def test_copies_are_complete_resumed_and_repaired(desk: Desk) -> None:
    half = desk.workers[0] / BIG
    half.parent.mkdir(parents=True)
    half.write_bytes(desk.files[BIG][:-1] + b"\0")
    first = desk.share("copy")
    assert first.code == 0, first.err
    assert first.out.count("has all: 8 of 8 files") == 3, first.out
    assert "fetched again" in first.err
    for worker in desk.workers:
        found = {path.relative_to(worker).as_posix(): path for path in worker.rglob("*") if path.is_file()}
        assert {name for name in found if not name.startswith(".")} == desk.files.keys()
        assert all(found[name].read_bytes() == data for name, data in desk.files.items())

    left = [one for one in psutil.process_iter(["cmdline"]) if str(desk.head) in (one.info["cmdline"] or [])]
    assert not left, "nothing is offered any more"


@needs_sshd
@pytest.mark.slow
@pytest.mark.skipif(own_address() is None, reason="this machine has no address but its loopback's")
def test_copies_are_hashed_again_when_asked(desk: Desk) -> None:
    assert desk.share("copy").code == 0
    # The same size, other bytes, the same time: only a hash of everything finds what lies in the middle.
    victim = desk.workers[1] / BIG
    status = victim.stat()
    data = bytearray(desk.files[BIG])
    data[750_000] ^= 1
    victim.write_bytes(data)
    os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))
    again = desk.share("copy", "--verify", "--json")
    assert again.code == 0, again.err
    assert victim.read_bytes() == desk.files[BIG]


@needs_sshd
def test_proof_finds_what_a_node_lacks(desk: Desk) -> None:
    """Nothing there, a missing shard, a broken link, a file short by a byte, other bytes at either end."""
    desk.fill(desk.workers[0])
    empty = desk.share("local")
    assert empty.code == 1
    assert "worker-1: has all: 8 of 8" in empty.out
    assert "worker-2: LACKS something: 0 of 8" in empty.out
    assert "No such file or directory" in empty.err

    shutil.copytree(desk.head, desk.workers[1])
    assert desk.share("local").code == 0

    worker = desk.workers[1]
    (worker / INDEX).unlink()
    (worker / TABLE).unlink()
    (worker / TABLE).symlink_to("../../blobs/0123")
    (worker / BIG).write_bytes(desk.files[BIG][:-1])
    shard = "model-00001-of-00003.safetensors"
    (worker / shard).write_bytes(desk.files[shard][:-1] + b"\0")
    (worker / "config.json").write_bytes(desk.files["config.json"].replace(b"tiny", b"tony"))
    shutil.rmtree(worker / "encoding")
    (worker / "encoding" / "empty.py").mkdir(parents=True)
    told = desk.share("local", "--json")
    assert told.code == 1
    proof = [line for line in told.out.splitlines() if '"worker-2"' in line]
    problems = {seen["file"]: seen["problem"] for seen in json.loads(proof[0])["files"]}
    assert problems.pop("README.md") is None
    assert problems.pop("json.py") is None
    expected = {
        INDEX: "No such file or directory",
        TABLE: "a link to ../../blobs/0123",
        BIG: "its size is not the head's",
        shard: "its end is not the head's",
        "config.json": "its header is not the head's",
        "encoding/empty.py": "is no file",
    }
    assert problems.keys() == expected.keys()
    for name, words in expected.items():
        assert words in problems[name], name


@needs_sshd
def test_head_without_a_checkpoint(desk: Desk) -> None:
    (desk.head / TABLE).unlink()
    told = desk.share("local")
    assert told.code == 3
    assert TABLE in told.err
    assert "deskfleet fleet pull" in told.err


@needs_sshd
def test_dry_run_shows_every_step_and_reaches_nothing(desk: Desk) -> None:
    nfs = desk.share("nfs", "--dry-run")
    assert nfs.code == 0
    steps = [
        line for line in nfs.out.splitlines() if line.startswith("# ") and ": " in line and " -" not in line
    ]
    assert [step for step in steps if step.split(": ")[1] in ("export", "mount", "prove")] == [
        "# head: export",
        "# worker-1: mount",
        "# worker-2: mount",
        "# head: prove",
        "# worker-1: prove",
        "# worker-2: prove",
    ]
    assert "exportfs" in nfs.out
    copy = desk.share("copy", "--dry-run", "--json")
    assert '"step": "offer"' in copy.out
    assert copy.out.count('"step": "fetch"') == 2
    assert not any(worker.exists() for worker in desk.workers)


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of NFS that only note how they were called; return the notes."""
    notes = tmp_path / "notes"
    notes.touch()
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("exportfs", "mount", "mount.nfs4", "umount", "systemctl", "sudo"):
        program = programs / name
        forward = '[ "$1" = -n ] && shift; [ "$1" = true ] || exec "$@"' if name == "sudo" else ":"
        program.write_text(f'#!/bin/sh\necho "{name} $*" >>"{notes}"\n{forward}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return notes


async def test_nfs_scripts(tmp_path: Path, stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be exported and mounted, with which options; and what is refused before anything is done."""
    spec = one_node(tmp_path)
    directory = Path(spec.head.paths.checkpoint)
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    target = tmp_path / "mount here"
    async with Remotes(spec.nodes) as remotes:

        async def script(*arguments: str) -> tuple[int, str]:
            ran = await remotes["head"].run(read_script("share.sh"), *arguments)
            return ran.returncode, ran.last_line

        assert (await script("export", str(directory), "10.0.0.2", "10.0.0.3"))[0] == 0
        lines = [line for line in stand_ins.read_text().splitlines() if line.startswith("exportfs")]
        assert lines == [
            f"exportfs -o ro,no_subtree_check,crossmnt {client}:{directory}"
            for client in ("10.0.0.2", "10.0.0.3")
        ]
        (directory / "outside").symlink_to("/etc/hostname")
        code, said = await script("export", str(directory), "10.0.0.2")
        assert (code, "lead outside" in said) == (1, True)

        code, said = await script("mount", str(directory), str(target), "127.0.0.1")
        assert code == 1
        assert "answers at port 2049" in said
        target.mkdir()
        (target / "weights").touch()
        code, said = await script("mount", str(directory), str(target), "127.0.0.1")
        assert (code, "which a mount would hide" in said) == (1, True)
        (target / "weights").unlink()
        with nfs_port():
            code, said = await script("mount", str(directory), str(target), "127.0.0.9", "127.0.0.1")
        assert code == 0, said
        mounted = next(line for line in stand_ins.read_text().splitlines() if line.startswith("mount -t"))
        assert mounted.startswith("mount -t nfs4 -o ro,hard,")
        assert mounted.endswith(f"127.0.0.1:{directory} {target}")
        assert (await script("unmount", str(directory), "/proc", "10.0.0.1"))[0] == 1, (
            "a mount that is not ours"
        )


@contextlib.contextmanager
def nfs_port() -> Iterator[None]:
    """Something that answers where NFS does."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", 2049))
        except OSError:
            pytest.skip("port 2049 is taken")
        server.listen()
        yield


def one_node(tmp_path: Path) -> FleetSpec:
    """A fleet of this machine alone."""
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET.format(share="nfs", fabric="10.0.0.1", base=tmp_path, workers=""))
    return read_spec(path)


def test_judgement_of_mounts(tmp_path: Path) -> None:
    """Recorded lines of nodes: not mounted, mounted soft, read in small pieces, a stale handle, caches on the share."""
    path = tmp_path / "fleet.toml"
    workers = "".join(WORKER.format(number=1, port=22, identity="id", base=tmp_path))
    path.write_text(FLEET.format(share="nfs", fabric="10.0.0.1", base=tmp_path, workers=workers))
    spec = read_spec(path)
    worker = spec.nodes[1]
    good = "ro,noatime,vers=4.2,rsize=1048576,wsize=1048576,hard,proto=tcp,nconnect=8"
    file = f"file\tconfig.json\t10\t{'a' * 64}\t{'b' * 64}\n"
    head, _ = parse_seen(f"place\tcheckpoint\text4\t/dev/nvme0n1\trw\n{file}")

    def judged(kind: str, options: str, line: str = file, cache: str = "ext4") -> tuple[list[str], list[str]]:
        text = f"place\tcheckpoint\t{kind}\t10.0.0.1:/m\t{options}\nplace\tcache\t{cache}\tx\trw\n{line}"
        proof = judge(spec, worker, *parse_seen(text), head, ["config.json"])
        problems = [*proof.problems, *(seen.problem for seen in proof.files if seen.problem)]
        assert proof.is_good == (not problems)
        return problems, list(proof.warnings)

    assert judged("nfs4", good) == ([], [])
    assert "not mounted" in judged("ext4", "rw")[0][0]
    assert "mount it hard" in judged("nfs4", good.replace("hard", "soft"))[0][0]
    assert "reads 8192 bytes" in judged("nfs4", good.replace("rsize=1048576", "rsize=8192"))[1][0]
    assert "for writing" in judged("nfs4", good.replace("ro,", "rw,"))[1][0]
    assert "version 3" in judged("nfs", good.replace("vers=4.2", "vers=3"))[1][0]
    assert "umount -l" in judged("nfs4", good, "bad\tconfig.json\tStale file handle\n")[0][0]
    assert "was not looked at" in judged("nfs4", good, "")[0][0]
    assert "overwrite each other's caches" in judged("nfs4", good, cache="nfs4")[0][0]


def test_errors_of_programs_keep_their_kind() -> None:
    assert error_of({"type": "DoesNotFit", "message": "m", "hint": "h"}, "n").exit_code == 1
    odd = error_of({"type": "exit", "message": "m", "hint": None}, "n")
    assert type(odd) is DeskfleetError
    assert odd.message == "n: m"
