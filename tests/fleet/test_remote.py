"""A node's shell over a real sshd: what arrives, what is said when it does not, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from real_sshd import SSH, SSHD, WHY_NOT, Sshd, make_key, ssh_wrapper

from deskfleet.errors import ConfigError, DeskfleetError
from deskfleet.fleet.remote import NodeUnreachable, Remote, RemoteFailed, Remotes

pytestmark = pytest.mark.skipif(SSHD is None, reason=WHY_NOT)

ODD = [
    "a b",
    "$HOME",
    "'q'",
    '"d"',
    "two\nlines\n",
    "üñí 水",
    "",
    "back\\slash",
    "!!",
    "-n",
    "*",
    "`id`",
    "\r",
]


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    server = Sshd(tmp_path / "sshd")
    monkeypatch.setenv("PATH", ssh_wrapper(tmp_path / "bin", server))
    yield server
    server.stop()


def running(mark: str) -> list[str]:
    """The processes that have `mark` in their arguments or environment-independent command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if mark in line and process.pid != os.getpid():
            found.append(line)
    return found


def gone(mark: str, within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while running(mark):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("where", ["ssh", "local"])
async def test_arguments_and_bytes_arrive_unharmed(sshd: Sshd, tmp_path: Path, where: str) -> None:
    node = sshd.node("spark-1", **({"address": "local"} if where == "local" else {}))
    async with Remotes([node]) as remotes:
        remote = remotes["spark-1"]
        ran = await remote.run('printf "%s\\0" "$@"; echo said >&2; exit 7', *ODD)
        assert (ran.returncode, ran.stderr) == (7, "said\n")
        assert ran.stdout.split("\0")[:-1] == ODD
        assert (await remote.run("echo $#; cat | wc -c")).stdout.split() == ["0", "0"]
        assert (await remote.run("exit 255")).returncode == 254
        data = secrets.token_bytes(1 << 20)
        target = tmp_path / "new dir" / "it's"
        await remote.put(data, str(target), 0o640)
        assert target.read_bytes() == data
        assert stat.S_IMODE(target.stat().st_mode) == 0o640
        assert [path.name for path in target.parent.iterdir()] == ["it's"]
        with pytest.raises(RemoteFailed, match="node spark-1: cannot write /proc/no/file: mkdir"):
            await remote.put(b"x", "/proc/no/file")
        with pytest.raises(ConfigError, match="NUL"):
            await remote.run("true", "a\0b")


async def test_ssh_is_reached_once_and_its_socket_is_ours_alone(sshd: Sshd) -> None:
    async with Remotes([sshd.node("a"), sshd.node("b", address="local")]) as remotes:
        gathered = await remotes.gather(lambda remote: remote.run("echo $PPID"))
        assert list(gathered.all()) == ["a", "b"]
        sockets = [Path(str(remotes["a"]._control_path)), Path(str(remotes["b"]._control_path))]
        assert stat.S_IMODE(sockets[0].parent.stat().st_mode) == 0o700
        assert sockets[0].is_socket()
        assert not sockets[1].exists()
        begin = time.monotonic()
        await asyncio.gather(*(remotes["a"].run("true") for _ in range(8)))
        assert time.monotonic() - begin < 5
    log = (sshd.directory / "sshd.log").read_text()
    assert log.count("Accepted publickey") == 1
    assert not sockets[0].parent.exists()
    assert gone(str(sockets[0]))


async def test_a_cancelled_command_leaves_no_process(sshd: Sshd) -> None:
    mark = f"98{secrets.randbelow(10**6):06d}"
    for address in ("127.0.0.1", "local"):
        async with Remotes([sshd.node("a", address=address)]) as remotes:
            script = f"trap 'echo kept' TERM; sleep {mark} & wait; sleep {mark}"
            task = asyncio.create_task(remotes["a"].run(script))
            while not running(f"sleep {mark}"):
                await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert gone(mark), running(mark)

            with pytest.raises(NodeUnreachable, match=r"no answer within 0\.5 s"):
                await remotes["a"].run(f"sleep {mark}", timeout_s=0.5)
            assert gone(mark), running(mark)

            lines = remotes["a"].stream(f"echo one; printf two; sleep {mark}")
            assert await anext(lines) == "one"
            await lines.aclose()
            assert gone(mark), running(mark)


async def test_a_caller_that_is_killed_leaves_no_process(sshd: Sshd) -> None:
    mark = f"97{secrets.randbelow(10**6):06d}"
    program = (
        "import asyncio, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from deskfleet.fleet.remote import Remote\n"
        "from deskfleet.fleet.spec import NodePaths, NodeSpec\n"
        f"node = NodeSpec('a', '127.0.0.1', None, {sshd.port}, {str(sshd.identity)!r}, (), 'spark', None,"
        " NodePaths('/a', '/b', '/c'))\n"
        f"asyncio.run(Remote(node).run('sleep {mark}'))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        while not running(f"sleep {mark}"):
            assert process.poll() is None
            await asyncio.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert gone(mark), running(mark)


async def test_what_a_killed_caller_leaves_is_removed_by_the_next(sshd: Sshd, tmp_path: Path) -> None:
    """Its connection ends, its directory goes; that of one that lives is not touched, nor is one made just now."""
    program = (
        "import asyncio\n"
        "from deskfleet.fleet.remote import Remotes\n"
        "from deskfleet.fleet.spec import NodePaths, NodeSpec\n"
        f"node = NodeSpec('a', '127.0.0.1', None, {sshd.port}, {str(sshd.identity)!r}, (), 'spark', None,"
        " NodePaths('/a', '/b', '/c'))\n"
        "async def main():\n"
        "    async with Remotes([node]) as remotes:\n"
        "        await remotes['a'].run('true')\n"
        "        print(remotes['a']._control_path, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # a socket's path must be short
    environment = {**os.environ, "TMPDIR": str(temporary)}

    def start() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    processes = []
    try:
        for _ in range(3):
            processes.append(start())
        (killed, left), (alive, used), (recent, fresh) = processes
        for process in (killed, recent):
            process.kill()
            process.wait()
        for path in (left, used):
            os.utime(path.parent, (1e9, 1e9))
        other = temporary / "deskfleet-ssh-other"
        other.symlink_to(tmp_path)
        process, _ = start()
        processes.append((process, left))
        assert not left.parent.exists()
        assert gone(str(left)), running(str(left))
        assert used.is_socket()
        assert running(str(used))
        assert alive.poll() is None
        assert fresh.parent.exists()
        assert other.is_symlink()
    finally:
        for process, path in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            subprocess.run(
                [SSH or "ssh", "-F", "none", "-o", f"ControlPath={path}", "-O", "exit", "nobody"],
                check=False,
                capture_output=True,
            )
        shutil.rmtree(temporary)


async def test_lines_come_as_they_are_written_and_a_bad_end_is_told(sshd: Sshd) -> None:
    script = 'echo "$1"; head -c 300000 /dev/zero | tr "\\0" x; echo no such log >&2; exit 3'
    lines: list[str] = []

    async def collect(remote: Remote) -> None:
        async for line in remote.stream(script, "ü"):
            lines.append(line)

    async with Remotes([sshd.node("a")]) as remotes:
        with pytest.raises(RemoteFailed, match=r"node a: .*: no such log"):
            await collect(remotes["a"])
    assert lines == ["ü", "x" * 300000]


async def test_what_ssh_says_is_told_with_what_to_do(sshd: Sshd, tmp_path: Path) -> None:
    async def fails(**values: object) -> NodeUnreachable:
        with pytest.raises(NodeUnreachable) as caught:
            await Remote(sshd.node("spark-2", **values)).run("true", timeout_s=30)
        assert caught.value.exit_code == 3
        assert caught.value.message.startswith("node spark-2 cannot be reached: ")
        assert "\n" not in caught.value.message
        return caught.value

    stranger = make_key(tmp_path / "stranger")
    error = await fails(identity=str(stranger))
    assert "refused our key" in error.message
    assert "Permission denied" in error.message
    assert "ssh-copy-id" in str(error.hint)

    error = await fails(address="no-such-host.invalid")
    assert "no such host" in error.message

    sshd.known_hosts.write_text("")
    error = await fails()
    assert "not known here" in error.message
    assert f"ssh -p {sshd.port}" in str(error.hint)

    sshd.trust()
    await Remote(sshd.node("spark-2")).run("true")
    sshd.stop()
    error = await fails()
    assert "nothing listens there" in error.message

    for old in (sshd.host_key, sshd.host_key.with_suffix(".pub")):
        old.unlink()
    make_key(sshd.host_key)
    sshd.start()
    error = await fails()
    assert "host key has changed" in error.message
    assert "ssh-keygen -R" in str(error.hint)


async def test_a_connection_that_dies_in_the_middle_is_told(sshd: Sshd) -> None:
    async with Remotes([sshd.node("a"), sshd.node("b")]) as remotes:
        task = asyncio.create_task(
            remotes.gather(lambda remote: remote.run("echo begun; sleep 30; echo done"))
        )
        await asyncio.sleep(1.0)
        sshd.stop()
        gathered = await asyncio.wait_for(task, 10)
        assert gathered.results == {}
        assert all(isinstance(error, NodeUnreachable) for error in gathered.failures.values())
        with pytest.raises(DeskfleetError, match=r"node a cannot be reached.*node b cannot be reached"):
            gathered.all()
        sshd.start()
        assert (await remotes["a"].run("echo back")).stdout == "back\n"


async def test_what_the_users_own_ssh_config_says_counts(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alias with its port, user and key, reached through a jump host, and with entries that would break scripts."""
    jump = Sshd(tmp_path / "jump")
    config = (
        f"Host desk-2\n  HostName 127.0.0.1\n  Port {sshd.port}\n  IdentityFile {sshd.identity}\n"
        "  ProxyJump gate\n  RemoteCommand echo no\n  RequestTTY force\n  LocalForward 127.0.0.1:1 127.0.0.1:2\n"
        f"Host gate\n  HostName 127.0.0.1\n  Port {jump.port}\n  IdentityFile {jump.identity}\n"
    )
    monkeypatch.setenv("PATH", ssh_wrapper(tmp_path / "bin", sshd, jump, config=config))
    try:
        async with Remotes([sshd.node("a", address="desk-2", port=None, identity=None)]) as remotes:
            ran = await remotes["a"].run('echo "$SSH_CONNECTION"; [ -t 0 ] || echo no terminal')
            assert ran.returncode == 0, ran.stderr
            assert ran.stdout.splitlines()[0].endswith(f" {sshd.port}")
            assert ran.stdout.splitlines()[1] == "no terminal"
        assert "Accepted publickey" in (jump.directory / "sshd.log").read_text()
    finally:
        jump.stop()


async def test_scripts_that_begin_at_once_share_one_connection(sshd: Sshd) -> None:
    async with Remotes([sshd.node("a")]) as remotes:
        ran = await asyncio.gather(*(remotes["a"].run("echo $1 >&2", str(n)) for n in range(6)))
    assert [each.stderr for each in ran] == [f"{n}\n" for n in range(6)]
    assert (sshd.directory / "sshd.log").read_text().count("Accepted publickey") == 1


async def test_no_ssh_here_is_told(sshd: Sshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("ssh") is None
    with pytest.raises(NodeUnreachable, match="ssh: No such file") as caught:
        await Remote(sshd.node("a")).run("true")
    assert "install the OpenSSH client" in str(caught.value.hint)
