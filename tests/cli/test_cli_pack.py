"""`deskfleet pack`, `deskfleet inspect` of packs, and the verbs that read them."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_process import CHECKPOINT, COMMAND, STOP_S, Done, deskfleet, environment, serving, wait_until

from deskfleet_engram.__main__ import main as package_main

IDS = [0, 17, 42, 300, 301, 5, 9, 11, 260, 77, 3, 8]
SLOW = ("--max-rate", "200kB")  # about ten seconds for the golden checkpoint's columns
ALL = list(range(12))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All columns of the golden checkpoint."""
    directory = tmp_path_factory.mktemp("packed") / "pack"
    done = deskfleet("pack", CHECKPOINT, directory, "--repo", "a/b", "--revision", "c0ffee", "--json")
    assert (done.code, done.err) == (0, "")
    assert (done.object["num_packed"], done.object["encoder"]) == (24, "native")
    return directory


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    """A pack of our own to spoil."""
    return shutil.copytree(packed, tmp_path / "pack")


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


def files_of(pack_dir: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(pack_dir)): path.read_bytes() for path in pack_dir.rglob("*") if path.is_file()
    }


# --- pack


def test_ranks_are_added_one_after_another(call: Callable[..., Done], tmp_path: Path) -> None:
    target = tmp_path / "new" / "pack"
    plan = call("pack", CHECKPOINT, target, "--rank", "1", "--world-size", "5", "--dry-run", "--json")
    assert (plan.code, plan.object["num_to_pack"], plan.object["num_complete"]) == (0, 6, 0)
    assert plan.object["needed_bytes"] > plan.object["read_bytes"] > 0
    assert not target.parent.exists(), "a dry run made a directory"
    first = call("pack", CHECKPOINT, target, "--rank", "1", "--world-size", "5", "--verify", "full", "--json")
    assert first.code == 0
    assert (first.object["num_packed"], first.object["num_kept"]) == (6, 0)
    assert first.object["verify"]["is_sound"]
    assert first.object["verify"]["num_compared"] > 6000
    assert sorted(path.name for path in (target / "L04").iterdir()) == ["c01.egp", "c06.egp", "c11.egp"]
    in_words = call("pack", CHECKPOINT, target, "--layers", "4", "--verify", "sample")
    lines = in_words.out.splitlines()
    assert (in_words.code, in_words.err) == (0, "")
    assert re.fullmatch(
        r".*: pack [0-9a-f]{16}, 9 columns packed, 3 kept, 0 adopted, [\d,]+ bytes in .* s", lines[0]
    )
    assert re.fullmatch(r".*: sound \(sample: 12 files, \d+ blocks, [\d,]+ rows compared .*\)", lines[1])
    again = call("pack", CHECKPOINT, target, "--layers", "4", "--dry-run")
    assert "0 columns to pack, 12 there; 0 bytes needed" in again.out


@pytest.mark.parametrize(
    ("engine", "columns"), [("native", (1, 4, 7, 10)), ("vllm", (4, 5, 6, 7)), ("sglang", (4, 5, 6, 7))]
)
def test_a_rank_reads_what_its_engine_says(
    call: Callable[..., Done], tmp_path: Path, engine: str, columns: tuple[int, ...]
) -> None:
    """Another rank's rows give fluent nonsense, so the columns stand here as the engines' sources have them."""
    target = tmp_path / "pack"
    share = ("--rank", "1", "--world-size", "3", "--engine", engine)
    assert call("pack", CHECKPOINT, target, *share, "--layers", "4", "--json").code == 0
    assert sorted(target.glob("L*/*")) == [target / "L04" / f"c{column:02}.egp" for column in columns]
    none = call("pack", CHECKPOINT, tmp_path / "none", "--rank", "4", "--world-size", "5", "--engine", engine)
    assert none.code == (2 if engine == "vllm" else 0), none.err
    shards = call("pack", CHECKPOINT, tmp_path / "shards", "--engine", "exl3")
    assert shards.code == 2
    assert "exl3 reads the published shards" in shards.err


def test_the_package_says_the_same(
    call: Callable[..., Done], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One format and one report, whichever command packed."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    share = ("--rank", "2", "--world-size", "5")
    report = call("pack", CHECKPOINT, ours, *share, "--json").object
    assert package_main(["pack", str(CHECKPOINT), str(theirs), *share, "--json"]) == 0
    other = json.loads(capfd.readouterr().out)
    varying = {"pack_dir", "elapsed_s"}
    assert {k: v for k, v in report.items() if k not in varying} == {
        k: v for k, v in other.items() if k not in varying
    }
    assert files_of(ours) == files_of(theirs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_pack_goes_on(packed: Path, tmp_path: Path, number: signal.Signals) -> None:
    target = tmp_path / "pack"
    command = ("pack", CHECKPOINT, target, "--repo", "a/b", "--revision", "c0ffee")
    process = subprocess.Popen(
        [*COMMAND, *map(str, command), *SLOW],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    wait_until(lambda: (target / "L01" / "c01.egp").exists())
    process.send_signal(number)
    out, err = process.communicate(timeout=STOP_S)
    assert (process.returncode, out) == ({signal.SIGINT: 130, signal.SIGTERM: 143}[number], "")
    assert err == f"interrupted: what is packed in {target} stays, and deskfleet pack goes on from there\n"
    assert (target / "engram.journal").exists()
    looked_at = deskfleet("inspect", target)
    assert looked_at.code == 3
    assert (
        looked_at.err.splitlines()[0] == "packing was interrupted; the same deskfleet pack goes on from there"
    )
    resumed = deskfleet(*command, "--json")
    assert resumed.code == 0
    assert resumed.object["num_kept"] >= 2
    assert 0 < resumed.object["num_packed"] < 24
    assert files_of(target) == files_of(packed)


def test_progress_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "pack", str(CHECKPOINT), str(tmp_path / "pack"), "--layers", "1", "--max-rate", "400kB"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment(TERM="xterm-256color", COLUMNS="120"),
    )
    os.close(theirs)
    seen = b""
    try:
        while data := os.read(ours, 65536):
            seen += data
    except OSError:
        pass  # how a pseudo-terminal says that its other end is closed
    os.close(ours)
    out, _ = process.communicate(timeout=STOP_S)
    assert process.returncode == 0
    assert b"12 columns packed" in out
    assert re.search(r"L01/c\d\d\.egp .* [\d.]+ KiB of 940\.00 KiB, [\d.]+ KiB/s, 0:0\d left", seen.decode())


def test_a_pack_that_does_not_fit(
    call: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deskfleet_engram.pack._free_bytes", lambda path: 1_000_000)
    for dry in ((), ("--dry-run",)):
        done = call("pack", CHECKPOINT, tmp_path / "pack", "--json", *dry)
        assert (done.code, done.object["error"]["type"]) == (1, "DoesNotFit")
        assert "packing 24 columns needs 3,047,424 more bytes, and 1,000,000 are free" in done.err
        assert "hint: pack fewer columns, or onto another disk" in done.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rank", "1"), "rank and world size go together"),
        (("--world-size", "2"), "rank and world size go together"),
        (("--rank", "2", "--world-size", "2"), "rank 2 of 2: ranks count from 0"),
        (("--rank", "12", "--world-size", "13"), "rank 12 of 13 reads none of the 12 columns"),
        (("--layers", "2"), "layers 2: Engram layers are 1,4"),
        (("--layers", "1,x"), "--layers is '1,x', not whole numbers with commas"),
        (("--max-rate", "5X"), "not a byte quantity: '5X'"),
        (("--max-rate", "0"), "--max-rate is '0'"),
        (("--verify", "most"), "invalid value for '--verify'"),
    ],
)
def test_pack_refuses_bad_input(
    call: Callable[..., Done], tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    done = call("pack", CHECKPOINT, tmp_path / "pack", *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {message}")
    assert not (tmp_path / "pack").exists()


def test_exit_codes_of_pack(call: Callable[..., Done], copy: Path, tmp_path: Path) -> None:
    nowhere = call("pack", tmp_path / "nowhere", tmp_path / "x")
    assert nowhere.code == 3
    assert "nowhere/config.json: cannot read: No such file" in nowhere.err
    assert call("pack", CHECKPOINT, copy).code == 0, "the pack's own names hold"
    renamed = call("pack", CHECKPOINT, copy, "--repo", "a/c", "--json")
    assert (renamed.code, renamed.object["error"]["type"]) == (1, "WrongPack")
    assert 'source.repo is "a/b" in the former and "a/c" in the latter' in renamed.err
    flip(copy / "L04" / "c11.egp", 4096 + 5)
    faulty = call("pack", CHECKPOINT, copy, "--verify", "full")
    assert (faulty.code, faulty.err) == (1, "")
    assert "L04/c11.egp, block 0, row 0: checksum" in faulty.out
    assert "faults (full: 24 files" in faulty.out


# --- inspect


def test_inspect_a_pack(call: Callable[..., Done], packed: Path) -> None:
    in_words, as_json = call("inspect", packed), call("inspect", packed, "--json")
    assert (in_words.code, in_words.err, as_json.code) == (0, "no problems\n", 0)
    for part in ("a/b, revision c0ffee", "EGP1.0, fp8 rows", "0-11", "12,386", "1,998,848 bytes"):
        assert part in in_words.out
    report = as_json.object
    assert (report["problems"], report["is_unfinished"], report["total_bytes"]) == ([], False, 1_998_848)
    assert report["identity"]["source"]["revision"] == "c0ffee"
    assert [layer["columns"] for layer in report["layers"]] == [ALL, ALL]
    assert [layer["num_rows"] for layer in report["layers"]] == [12386, 13322]


def test_inspect_a_damaged_pack(call: Callable[..., Done], copy: Path) -> None:
    flip(copy / "L01" / "c00.egp", 4096 + 7)
    (copy / "L04" / "c02.egp").unlink()
    (copy / "L04" / "c03.egp").write_bytes((copy / "L04" / "c03.egp").read_bytes()[:-10])
    in_words, as_json = call("inspect", copy), call("inspect", copy, "--json")
    assert (in_words.code, as_json.code) == (3, 3)
    problems = as_json.object["problems"]
    for problem in ("L01/c00.egp, block 0, row 0: checksum", "L04/c02.egp: missing", "L04/c03.egp: size"):
        assert any(found.startswith(problem) for found in problems), problems
        assert problem in in_words.err
    (copy / "engram.json").write_text("{}")
    broken = call("inspect", copy, "--json")
    assert (broken.code, broken.object["layers"]) == (3, [])
    assert "engram.json: manifest.format is missing" in broken.object["problems"][0]


def test_inspect_a_checkpoint_beside_a_pack(call: Callable[..., Done], packed: Path, tmp_path: Path) -> None:
    beside = call("inspect", CHECKPOINT, "--engram-pack", packed, "--tp", "2", "--json")
    answer = beside.object["engram_pack"]
    assert (beside.code, answer["belongs"], answer["mismatch"]) == (0, True, None)
    assert [rank["is_covered"] for rank in answer["ranks"]] == [True, True]
    assert call("inspect", CHECKPOINT, "--json").object["engram_pack"] is None
    share = tmp_path / "share"
    assert call("pack", CHECKPOINT, share, "--rank", "0", "--world-size", "2").code == 0
    partly = call("inspect", CHECKPOINT, "--engram-pack", share, "--tp", "2")
    assert partly.code == 1
    assert "  rank 0: covered\n" in partly.out
    assert "  rank 1: lacks columns 1,3,5,7,9,11 of layer 1, columns 1,3,5,7,9,11 of layer 4\n" in partly.out
    assert call("inspect", CHECKPOINT, "--engram-pack", share).code == 0, (
        "of this checkpoint, no ranks asked about"
    )


def test_inspect_another_checkpoint_beside_a_pack(
    call: Callable[..., Done], packed: Path, tmp_path: Path
) -> None:
    sizes = ("--engram-vocab-size", "499")
    assert call("make-tiny", tmp_path / "other", "--seed", "3", *sizes).code == 0
    other = call("inspect", tmp_path / "other", "--engram-pack", packed, "--json")
    assert (other.code, other.object["engram_pack"]["belongs"]) == (1, False)
    assert "is of another checkpoint than" in other.object["engram_pack"]["mismatch"]
    none = call("inspect", CHECKPOINT, "--engram-pack", tmp_path)
    assert none.code == 3
    assert "engram.json is missing" in none.err
    confused = call("inspect", packed, "--tp", "2")
    assert confused.code == 2
    assert "is a pack; --tp and --engram-pack go with a checkpoint" in confused.err


# --- reading


def test_score_is_the_same_from_a_pack(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(IDS))
    hashes = {}
    for tp, source in (("1", ()), ("1", ("--engram-pack", packed)), ("2", ("--engram-pack", packed))):
        output = tmp_path / f"{len(hashes)}.safetensors"
        arguments = ("--ids", tmp_path / "ids.json", "--logits", output, "--tp", tp, "--chunk", "5", "--json")
        done = deskfleet("score", CHECKPOINT, *arguments, *source)
        assert done.code == 0, done.err
        hashes[tp, bool(source)] = done.object["sha256"]
    assert len(hashes) == 3
    assert len(set(hashes.values())) == 1


def test_the_ready_object_says_where_rows_come_from(packed: Path) -> None:
    flags = ("--engram-pack", str(packed), "--engram-second-source", "--no-thinking")
    with serving(CHECKPOINT, *flags) as server:
        ready = server.ready
        with_pack = deskfleet("chat", server.url, "--once", "hello", "--max-tokens", "3", "--json")
        refused = deskfleet("chat", server.url, "--once", "hello", "--engram-pack", packed)
    assert with_pack.code == 0
    assert refused.code == 2
    assert "where Engram rows are read is decided by the server" in refused.err
    assert ready["engram"]["source"] == str(packed)
    assert ready["engram"]["second_source"] == "published shards"
    assert ready["engram"]["backend"].endswith("; rows checked")
    assert ready["ranks"][0]["engram"] == ready["engram"]["backend"]


@pytest.mark.parametrize("verb", ["serve", "chat", "score", "demo"])
def test_a_pack_that_lacks_columns_is_refused_before_anything_starts(verb: str, tmp_path: Path) -> None:
    share = tmp_path / "share"
    model = shutil.copytree(CHECKPOINT, tmp_path / "model")  # demo leaves a lock beside it
    assert deskfleet("pack", model, share, "--rank", "0", "--world-size", "2").code == 0
    (tmp_path / "ids.json").write_text("[0]")
    own = {
        "score": ("--ids", tmp_path / "ids.json", "--logits", tmp_path / "out"),
        "chat": ("--once", "hello"),
        "serve": ("--port", "0"),
        "demo": ("--port", "0", "--once"),
    }
    done = deskfleet(verb, model, "--tp", "2", "--engram-pack", share, *own[verb])
    said = [line for line in done.err.splitlines() if "using a free one" not in line]
    assert (done.code, done.out) == (1, "")
    assert said == [
        f"error: {share} lacks what 2 ranks read: rank 1 reads columns 1,3,5,7,9,11 of layer 1, "
        "columns 1,3,5,7,9,11 of layer 4",
        f"hint: add it: deskfleet pack {model} {share} --rank 1 --world-size 2",
    ]
