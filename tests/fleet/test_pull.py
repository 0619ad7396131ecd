"""Downloads from a real server that fails in every way that servers and networks do.

The program runs as a node runs it: its text in a process of its own, which can be killed. The oracle is the bytes that
the server holds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deskfleet.cli import main
from deskfleet.fleet.fetch import RECORD_NAME, Job
from deskfleet.fleet.pull import fetch_program
from deskfleet.fleet.spec import EngineSpec
from tests.cli.cli_process import COMMAND, Done, environment
from tests.fleet.faulty_origin import REVISION, Fault, FaultyOrigin

CHUNK_BYTES = 64 << 10
BIG = "model-00003-of-00003.safetensors"
TABLE = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def checkpoint_files() -> dict[str, bytes]:
    """Files as a repository has them: shards, an index, small files in a directory too, and weights of another form."""
    noise = random.Random(7)
    weight_map = {
        "embed.weight": "model-00001-of-00003.safetensors",
        "layers.1.engram.embed.weight": TABLE,
        "layers.1.engram.embed.scale": TABLE,
        "layers.1.engram.wkv.weight": "model-00001-of-00003.safetensors",
        "head.weight": BIG,
    }
    return {
        "config.json": b'{"model_type": "tiny"}',
        "README.md": b"# tiny",
        "encoding/empty.py": b"",
        "json.py": b"raise SystemExit('a file of the checkpoint was taken for a module')",
        "original/consolidated.pth": noise.randbytes(1000),
        INDEX: json.dumps({"weight_map": weight_map}).encode(),
        "model-00001-of-00003.safetensors": noise.randbytes(150_000),
        TABLE: noise.randbytes(100_000),
        BIG: noise.randbytes(1_500_000),
    }


ENGINE = EngineSpec("native", None, (), {}, (), adapter=True)
LEFT_OUT = {"original/consolidated.pth"}


@pytest.fixture
def origin() -> Iterator[FaultyOrigin]:
    """A server without faults so far."""
    with FaultyOrigin(checkpoint_files()).serving() as server:
        yield server


def start(
    directory: Path, server: FaultyOrigin, token: str | None = None, **job: Any
) -> subprocess.Popen[str]:
    """Start a download as a node does."""
    values: dict[str, Any] = {"backoff_s": 0.01, "timeout_s": 5.0, "chunk_bytes": CHUNK_BYTES, **job}
    wanted = {"origin": server.url, "revision": REVISION, "directory": str(directory), **values}
    program = fetch_program(Job(**wanted), ENGINE, token)
    path = directory.parent / f"program-{time.monotonic_ns()}.py"
    path.write_text(program.text())
    return subprocess.Popen(
        [sys.executable, "-I", "-u", str(path), *program.arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pull(directory: Path, server: FaultyOrigin, **job: Any) -> tuple[int, list[dict[str, Any]]]:
    """Download to the end; return exit code and events."""
    process = start(directory, server, **job)
    out, err = process.communicate(timeout=60)
    assert err == ""
    return process.returncode, [json.loads(line) for line in out.splitlines()]


def done(directory: Path, server: FaultyOrigin, **job: Any) -> dict[str, Any]:
    """Download, which must work; return the last event."""
    code, events = pull(directory, server, **job)
    assert code == 0, events[-1]
    assert events[-1]["event"] == "done"
    return events[-1]


def error(directory: Path, server: FaultyOrigin, **job: Any) -> dict[str, Any]:
    """Download, which must fail; return the error."""
    code, events = pull(directory, server, **job)
    assert events[-1]["event"] == "error", events[-1]
    return {**events[-1], "code": code}


def check_complete(directory: Path, origin: FaultyOrigin, names: set[str] | None = None) -> None:
    """The directory holds exactly these files with the origin's bytes, and nothing unfinished."""
    found = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    wanted = origin.files.keys() - LEFT_OUT if names is None else names
    assert {name for name in found if not name.startswith(".")} == wanted
    for name in wanted:
        assert (directory / name).read_bytes() == origin.files[name], name


def check_no_half_file(directory: Path, origin: FaultyOrigin) -> None:
    """What has its final name is whole, whatever happened."""
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name in origin.files:
            assert path.read_bytes() == origin.files[name], name


def test_whole_checkpoint_in_parallel_ranges_and_again_without_network(
    origin: FaultyOrigin, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoint"
    first = done(directory, origin)
    check_complete(directory, origin)
    assert first["num_files"] == 8
    assert first["left_out"] == sorted(LEFT_OUT)
    assert first["revision"] == REVISION
    assert len(origin.spans(BIG)) == -(-len(origin.files[BIG]) // CHUNK_BYTES)

    num_asked = len(origin.asked)
    again = done(directory, origin)
    assert (again["num_fetched"], again["num_kept"], again["num_hashed"]) == (0, 8, 0)
    code, events = pull(directory, origin, verify=True)
    hashed = events[-1]
    assert (code, hashed["num_fetched"], hashed["num_hashed"]) == (0, 0, 8)
    checking = [event for event in events if event.get("doing") == "checking"][-1]
    assert (checking["done_bytes"], checking["done_files"]) == (hashed["total_bytes"], 8), (
        "the end is told too"
    )
    assert len(origin.asked) == num_asked, "a complete checkpoint of a pinned revision asks nobody"


def test_engram_only_then_the_rest(origin: FaultyOrigin, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    done(directory, origin, what="engram")
    check_complete(
        directory, origin, {"config.json", "README.md", "json.py", "encoding/empty.py", INDEX, TABLE}
    )
    assert not origin.spans(BIG)
    rest = done(directory, origin)
    assert (rest["num_fetched"], rest["num_kept"]) == (2, 6)
    check_complete(directory, origin)


def test_plain_directory_is_pinned_by_its_sums(origin: FaultyOrigin, tmp_path: Path) -> None:
    pin = hashlib.sha256(origin.sums).hexdigest()
    directory = tmp_path / "checkpoint"
    result = done(directory, origin, origin=origin.plain_url, revision=pin)
    assert result["revision"] == pin
    check_complete(directory, origin)
    branch = error(tmp_path / "other", origin, origin=origin.plain_url, revision="main")
    assert branch["code"] == 2
    assert pin in branch["hint"]
    origin.files["config.json"] += b" "
    moved = error(tmp_path / "third", origin, origin=origin.plain_url, revision=pin)
    assert "pins" in moved["message"]


@pytest.mark.parametrize("kind", ["reset", "no-range", "416", "busy", "wrong"])
def test_faults_that_pass(kind: Any, origin: FaultyOrigin, tmp_path: Path) -> None:
    """Every file fails a few times, and the bytes are right in the end."""
    times = {"wrong": 1, "reset": 4, "busy": 3}.get(kind, 1_000_000)
    names = [BIG] if kind == "wrong" else [BIG, TABLE, "config.json", INDEX]
    origin.faults = {name: Fault(kind, times) for name in names}
    directory = tmp_path / "checkpoint"
    code, events = pull(directory, origin)
    assert code == 0, events[-1]
    check_complete(directory, origin)
    if kind == "wrong":
        assert any("once more" in event.get("text", "") for event in events)
    else:
        assert events[-1]["fetched_bytes"] < 3 * sum(map(len, origin.files.values())), "what came was kept"


@pytest.mark.slow
def test_resets_at_every_offset_with_many_seeds(tmp_path: Path) -> None:
    for seed in range(8):
        with FaultyOrigin(checkpoint_files(), seed=seed).serving() as origin:
            origin.faults = {name: Fault("reset", 10) for name in (BIG, TABLE)}
            directory = tmp_path / str(seed)
            result = done(directory, origin, max_failures=20)
            check_complete(directory, origin)
            assert result["fetched_bytes"] < 1.6 * result["total_bytes"], "ranges go on where they broke off"


def test_faults_that_stay(origin: FaultyOrigin, tmp_path: Path) -> None:
    """Each ends with a sentence that names the file; what is there under its name is whole."""
    cases: list[tuple[str, str, str]] = [
        ("missing", BIG, "404"),
        ("wrong", BIG, "for the second time"),
        ("reset", INDEX, "attempts failed"),
        ("reset", BIG, "attempts in a row brought nothing"),
        ("short", BIG, "1499999"),
        ("wrong", INDEX, "the origin's listing says"),
    ]
    for number, (kind, name, words) in enumerate(cases):
        origin.faults = {name: Fault(kind)}  # type: ignore[arg-type]
        if kind == "reset" and name == BIG:
            origin.random = _Zero()
        directory = tmp_path / str(number)
        told = error(directory, origin, max_failures=3)
        assert words in told["message"], (kind, told)
        assert name in told["message"] or kind == "reset"
        assert told["code"] == 3
        check_no_half_file(directory, origin)
        assert not (directory / name).exists()


class _Zero(random.Random):
    """Breaks every answer off before its first byte."""

    def randrange(self, *_: Any) -> int:
        return 0


def test_index_names_a_shard_that_the_origin_lacks(tmp_path: Path) -> None:
    files = checkpoint_files()
    del files[TABLE]
    with FaultyOrigin(files).serving() as origin:
        told = error(tmp_path / "checkpoint", origin)
    assert TABLE in told["message"]
    assert not (tmp_path / "checkpoint" / BIG).exists(), "nothing is fetched of what can never be complete"


def test_index_that_was_cut_off_at_the_origin(tmp_path: Path) -> None:
    files = checkpoint_files()
    files[INDEX] = files[INDEX][:-20]
    with FaultyOrigin(files).serving() as origin:
        told = error(tmp_path / "checkpoint", origin)
    assert told["message"].startswith(f"{INDEX} cannot be understood")
    assert not (tmp_path / "checkpoint" / BIG).exists()


def test_names_that_leave_the_directory_are_refused(tmp_path: Path) -> None:
    for name in ("../../evil", ".deskfleet-pull.json"):
        with FaultyOrigin({**checkpoint_files(), name: b"evil"}).serving() as origin:
            told = error(tmp_path / "checkpoint", origin)
        assert repr(name) in told["message"]
    assert not (tmp_path / "evil").exists()


def test_revisions(origin: FaultyOrigin, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    code, events = pull(directory, origin, revision="main")
    assert code == 0
    assert any(REVISION in event.get("text", "") for event in events), "what a branch was is said"
    assert json.loads((directory / RECORD_NAME).read_text())["revision"] == REVISION
    origin.revision = origin.branches["main"] = "f" * 40
    moved = error(directory, origin, revision="main")
    assert (moved["type"], moved["code"]) == ("ConfigError", 2)
    assert "main has moved" in moved["message"]
    assert error(tmp_path / "none", origin, revision="9" * 40)["code"] == 3


def test_token_goes_to_its_host_only(origin: FaultyOrigin, tmp_path: Path) -> None:
    origin.token = "hush-hush"
    refused = error(tmp_path / "without", origin)
    assert (refused["code"], refused["type"]) == (2, "ConfigError")
    assert "origin_token" in refused["hint"]
    with FaultyOrigin(origin.files).serving(host="127.0.0.2") as elsewhere:
        origin.faults = {
            BIG: Fault("redirect", value=elsewhere.base),
            TABLE: Fault("redirect", value=origin.base),
        }
        done(tmp_path / "checkpoint", origin, token="hush-hush")
        check_complete(tmp_path / "checkpoint", origin)
        assert elsewhere.spans(BIG)
        assert {asked.token for asked in elsewhere.asked} == {None}
    at_home = [asked.token for asked in origin.asked if asked.path == f"/store/{TABLE}"]
    assert set(at_home) == {"Bearer hush-hush"}
    for path in (tmp_path / "checkpoint").iterdir():
        assert not path.is_file() or b"hush-hush" not in path.read_bytes()


def test_killed_at_any_moment_then_resumed(origin: FaultyOrigin, tmp_path: Path) -> None:
    """SIGKILL a few times; the last run has identical bytes, and fetches little twice."""
    directory = tmp_path / "checkpoint"
    origin.faults = {BIG: Fault("slow", value=CHUNK_BYTES * 4)}
    for _ in range(3):
        enough = len(origin.spans(BIG)) + 5
        process = start(directory, origin, parallel=3)
        _wait(lambda enough=enough: len(origin.spans(BIG)) >= enough)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        check_no_half_file(directory, origin)
    assert not (directory / BIG).exists()
    origin.faults = {}
    before = origin.sent_bytes
    result = done(directory, origin)
    check_complete(directory, origin)
    assert result["resumed_bytes"] > 0
    assert origin.sent_bytes - before < len(origin.files[BIG])


def _wait(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.005)


def test_two_downloads_at_once(origin: FaultyOrigin, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    origin.faults = {BIG: Fault("slow", value=CHUNK_BYTES * 4)}
    first = start(directory, origin)
    _wait(lambda: bool(origin.spans(BIG)))
    told = error(directory, origin)
    assert f"process {first.pid}" in told["message"]
    assert told["code"] == 3
    origin.faults = {}
    assert first.wait(timeout=30) == 0
    first.communicate()
    check_complete(directory, origin)


def test_changed_and_damaged_files_are_fetched_again(origin: FaultyOrigin, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    done(directory, origin)
    (directory / TABLE).write_bytes(origin.files[TABLE][:-1])
    flipped = bytearray(origin.files[BIG])
    flipped[700_000] ^= 1
    (directory / BIG).write_bytes(flipped)
    (directory / "config.json").touch()
    result = done(directory, origin)
    assert result["num_fetched"] == 2
    check_complete(directory, origin)
    # Bytes that rot without a change of time are found when asked for.
    status = (directory / BIG).stat()
    (directory / BIG).write_bytes(flipped)
    os.utime(directory / BIG, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert done(directory, origin)["num_fetched"] == 0
    assert done(directory, origin, verify=True)["num_fetched"] == 1
    check_complete(directory, origin)


def test_disk_that_is_too_small_or_fills_up(origin: FaultyOrigin, tmp_path: Path) -> None:
    """A file that may not grow stands for a full disk: the error says so, and the same command goes on afterwards."""
    directory = tmp_path / "checkpoint"
    process = start(directory, origin)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    out, _ = process.communicate(timeout=60)
    told = json.loads(out.splitlines()[-1])
    assert (process.returncode, told["type"]) == (1, "DoesNotFit"), told
    assert "full" in told["message"]
    assert (directory / TABLE).exists() or (directory / f"{TABLE}.part").exists()
    check_no_half_file(directory, origin)
    done(directory, origin)
    check_complete(directory, origin)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system is mounted, which needs root")
def test_space_is_compared_before_a_byte_is_fetched(origin: FaultyOrigin, tmp_path: Path) -> None:
    directory = tmp_path / "small"
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this machine lets nobody mount a file system")
    try:
        told = error(directory / "checkpoint", origin)
        assert (told["code"], told["type"]) == (1, "DoesNotFit")
        assert "are free" in told["message"]
        assert not origin.spans(BIG)
    finally:
        subprocess.run(["umount", str(directory)], check=True)


FLEET = """\
name = "desk"
[paths]
checkpoint = "{directory}"
cache = "{directory}-cache"
[[nodes]]
name = "head"
kind = "local"
address = "local"
[checkpoint]
model = "v4.1-flash"
origin = "{origin}"
revision = "{revision}"
[engine]
name = "native"
{secrets}
"""


def fleet_file(tmp_path: Path, origin: FaultyOrigin, secrets: str = "", revision: str = REVISION) -> Path:
    """A fleet.toml of this machine alone."""
    path = tmp_path / "fleet.toml"
    directory = tmp_path / "it's a checkpoint"
    path.write_text(FLEET.format(directory=directory, origin=origin.url, revision=revision, secrets=secrets))
    return path


@pytest.fixture
def typed(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Done]]:
    """The command in this process: what a start of Python takes is not what is tested here."""
    handlers = logging.root.handlers[:]

    def run(*words: str | Path) -> Done:
        code = main([str(word) for word in words])
        out, err = capfd.readouterr()
        return Done(code, out, err)

    yield run
    logging.root.handlers[:] = handlers


def test_command(
    origin: FaultyOrigin, tmp_path: Path, typed: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verb as it is typed: dry run, download, Ctrl-C in the middle, and the errors' exit codes."""
    monkeypatch.delenv("ORIGIN_SECRET", raising=False)
    origin.token = "hush-hush"
    file = fleet_file(tmp_path, origin, '[secrets]\norigin_token = "env:ORIGIN_SECRET"')
    directory = tmp_path / "it's a checkpoint"
    shown = typed("fleet", "pull", "-f", file, "--dry-run", "--json").object
    assert shown["node"] == "head"
    assert "${secret:origin_token}" in shown["program"]
    assert "python" in shown["script"]
    assert not directory.exists()
    assert not origin.asked

    missing = typed("fleet", "pull", "-f", file, "--json")
    assert missing.code == 2
    assert "ORIGIN_SECRET is not set" in missing.err

    origin.faults = {BIG: Fault("slow", value=200_000)}
    process = subprocess.Popen(
        [*COMMAND, "fleet", "pull", "-f", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(ORIGIN_SECRET="hush-hush"),
    )
    _wait(lambda: origin.sent_bytes > 300_000)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "goes on from there" in err
    assert "hush" not in err
    assert not list(directory.glob(".deskfleet-program*"))
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in commands if str(directory) in " ".join(words)], "something still downloads"
    check_no_half_file(directory, origin)
    origin.faults = {}

    monkeypatch.setenv("ORIGIN_SECRET", "hush-hush")
    abandoned = directory / ".deskfleet-program-0.py"
    abandoned.touch()
    os.utime(abandoned, (0, 0))
    whole = typed("fleet", "pull", "-f", file, "--json")
    assert whole.code == 0, whole.err
    assert not abandoned.exists(), "what a killed command had put there is removed"
    assert whole.object["revision"] == REVISION
    assert whole.object["num_files"] == 8
    check_complete(directory, origin)
    assert "original/consolidated.pth" in whole.err
    again = typed("fleet", "pull", "-f", file)
    assert "0 fetched, 8 were there, 0 hashed" in again.out
    unknown = typed("fleet", "pull", "-f", file, "--on", "nobody")
    assert unknown.code == 2
    assert "there are head" in unknown.err
