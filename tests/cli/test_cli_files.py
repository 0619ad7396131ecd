"""The verbs that read and write files: make-tiny, inspect, score, bench, demo."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from cli_process import CHECKPOINT, COMMAND, STOP_S, Done, deskfleet, environment, wait_until
from safetensors.numpy import load_file

from deskfleet.errors import EngineError
from deskfleet.score import score_to_file
from deskfleet.testing import tiny_once

ROOT = Path(__file__).parents[2]
SIZES = ("--num-hidden-layers", "6", "--n-routed-experts", "8", "--engram-vocab-size", "499")
IDS = [0, 17, 42, 300, 301, 5, 9, 11, 260, 77, 3, 8]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint from `deskfleet make-tiny`, with sizes of its own."""
    directory = tmp_path_factory.mktemp("made") / "tiny"
    done = deskfleet("make-tiny", directory, "--seed", "3", *SIZES, "--json")
    assert (done.code, done.err) == (0, "")
    assert done.object["path"] == str(directory)
    assert done.object["seed"] == 3
    return directory


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(IDS))
    return path


def test_what_make_tiny_makes_is_sound(call: Callable[..., Done], tiny: Path) -> None:
    done = call("inspect", tiny, "--tp", "3", "--json")
    report = done.object
    assert (done.code, report["problems"]) == (0, [])
    assert report["architecture"]["num_layers"] == 6
    assert report["architecture"]["num_experts"] == 8
    assert report["contents"]["total_bytes"] == sum(report["contents"]["bytes_by_class"].values())
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1, 2]
    assert sum(rank["padding_bytes"] for rank in report["ranks"]) > 0


def test_make_tiny_again(call: Callable[..., Done], tiny: Path, tmp_path: Path) -> None:
    refused = call("make-tiny", tiny, "--seed", "3", *SIZES)
    assert refused.code == 2
    assert "is not empty" in refused.err
    again = call("make-tiny", tmp_path / "again", "--seed", "3", *SIZES)
    assert again.code == 0
    assert again.out.startswith(f"{tmp_path / 'again'}: ")
    for path in tiny.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    assert call("make-tiny", tmp_path / "again", "--seed", "4", *SIZES, "--overwrite").code == 0
    names = {path.name for path in tiny.iterdir()}
    assert names == {path.name for path in (tmp_path / "again").iterdir()}


def test_a_list_of_layers_that_is_none(call: Callable[..., Done], tmp_path: Path) -> None:
    done = call("make-tiny", tmp_path / "x", "--engram-layer-ids", "1,b")
    assert (done.code, done.err.splitlines()[0]) == (
        2,
        "error: --engram-layer-ids is '1,b', not whole numbers with commas",
    )
    assert not (tmp_path / "x").exists()


def test_inspect_in_words(call: Callable[..., Done]) -> None:
    done = call("inspect", CHECKPOINT, "--tp", "8")
    assert (done.code, done.err) == (0, "no problems\n")
    assert "1,568 tensors in 18 files, 9,577,448 bytes (9.13 MiB)" in done.out
    assert "routed_expert" in done.out
    assert "F8_E4M3" in done.out
    assert "rank 7" in done.out
    assert max(map(len, done.out.splitlines()[1:])) <= 80


def test_inspect_of_a_damaged_checkpoint(call: Callable[..., Done], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(CHECKPOINT, damaged)
    (damaged / "model-00007-of-00018.safetensors").unlink()
    short = damaged / "model-00005-of-00018.safetensors"
    short.write_bytes(short.read_bytes()[:-1000])
    in_words, as_json = call("inspect", damaged), call("inspect", damaged, "--json")
    assert (in_words.code, as_json.code) == (3, 3)
    assert in_words.err.startswith("2 problems:\n")
    for problem in as_json.object["problems"]:
        assert problem in in_words.err
    assert any("model-00007-of-00018" in problem for problem in as_json.object["problems"])
    assert any("model-00005-of-00018" in problem for problem in as_json.object["problems"])
    assert as_json.object["contents"] is None


def test_score_is_the_same_for_any_number_of_ranks(tiny: Path, ids: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    in_words = deskfleet("score", tiny, "--ids", ids, "--logits", one)
    as_json = deskfleet("score", tiny, "--ids", ids, "--logits", two, "--tp", "2", "--chunk", "5", "--json")
    assert (in_words.code, as_json.code) == (0, 0)
    logits = load_file(one)["logits"]
    assert (logits.shape, logits.dtype) == ((len(IDS), 811), np.float32)
    assert np.isfinite(logits).all()
    assert np.ptp(logits) > 1
    assert as_json.object["path"] == str(two)
    assert as_json.object["shape"] == [len(IDS), 811]
    assert as_json.object["sha256"] == hashlib.sha256(two.read_bytes()).hexdigest()
    assert in_words.out.startswith(f"{one}: float32 [{len(IDS)}, 811], sha256 {as_json.object['sha256']}, ")
    assert one.read_bytes() == two.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"ids.json", one.name, two.name}


def test_score_leaves_what_was_there_when_it_fails(call: Callable[..., Done], tmp_path: Path) -> None:
    output = tmp_path / "logits.safetensors"
    output.write_bytes(b"from before")
    (tmp_path / "ids.json").write_text("[0, 512]")  # the vocabulary has 512
    done = call("score", CHECKPOINT, "--ids", tmp_path / "ids.json", "--logits", output)
    assert done.code == 2
    assert "512" in done.err
    assert output.read_bytes() == b"from before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.json", output.name]


@pytest.mark.parametrize(
    ("content", "output", "message"),
    [
        ("[]", "out", "holds no token ids"),
        ("[1, 2.5]", "out", "is not a JSON list of token ids"),
        ("{}", "out", "is not a JSON list of token ids"),
        ("[0]", "none/out", "there is no directory"),
        ("[0]", ".", "is a directory"),
    ],
)
def test_score_refuses_early(
    call: Callable[..., Done], tmp_path: Path, content: str, output: str, message: str
) -> None:
    (tmp_path / "ids.json").write_text(content)
    done = call("score", CHECKPOINT, "--ids", tmp_path / "ids.json", "--logits", tmp_path / output)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["ids.json"]


def test_score_that_dies_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine:
        def __init__(self, *arguments: object, **options: object) -> None: ...
        def __enter__(self) -> Engine:
            return self

        def __exit__(self, *error: object) -> None: ...
        def score(self, token_ids: list[int]) -> np.ndarray:
            return np.zeros((len(token_ids), 4), dtype=np.float32)

    def full_disk(descriptor: int) -> None:
        raise EngineError("the disk is full")

    monkeypatch.setattr("deskfleet.score.LLM", Engine)
    assert score_to_file(CHECKPOINT, [0], tmp_path / "good").shape == (1, 4)
    monkeypatch.setattr("deskfleet.score.os.fsync", full_disk)
    with pytest.raises(EngineError, match="the disk is full"):
        score_to_file(CHECKPOINT, [0], tmp_path / "bad")
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_score_interrupted_while_loading(ids: Path, tmp_path: Path, number: int, code: int) -> None:
    arguments = ("score", str(CHECKPOINT), "--ids", str(ids), "--logits", str(tmp_path / "out"), "--tp", "2")
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, env=environment())
    own = psutil.Process(process.pid)
    wait_until(lambda: len(own.children()) == 2)
    processes = [own, *own.children()]
    process.send_signal(number)
    _, err = process.communicate(timeout=STOP_S)
    assert (process.returncode, err) == (code, b"")
    assert psutil.wait_procs(processes, timeout=3)[1] == []
    assert [path.name for path in tmp_path.iterdir()] == ["ids.json"]


def test_demo_is_pocket_and_its_answer_is_right(tmp_path: Path) -> None:
    """What `make serve` does, from any directory: two ranks, drafts, and an answer that is true."""
    before = sorted(path.name for path in (ROOT / "pocket").iterdir())
    done = deskfleet("demo", "--once", "--json", "--port", "0")
    assert done.code == 0, done.err
    assert (done.object["model"], done.object["tp_size"]) == ("pocket", 2)
    assert done.object["question"] == "What is the capital of Portugal?"
    assert done.object["answer"]["content"] == "The capital of Portugal is Lisbon."
    assert done.object["answer"]["finish_reason"] == "stop"
    assert "random" not in done.err
    assert sorted(path.name for path in (ROOT / "pocket").iterdir()) == before  # nothing is left beside it
    makefile = (ROOT / "Makefile").read_text()
    assert "deskfleet demo pocket --tp 2 --port $(PORT)" in makefile


def test_demo_from_nothing_with_its_port_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = deskfleet(
            "demo", tmp_path / "new" / "tiny", "--once", "--json", "--port", str(port), "--max-tokens", "8"
        )
    assert done.code == 0, done.err
    assert done.object["tp_size"] == 2
    assert done.object["question"] == "What is the capital of Portugal?"
    assert 1 <= done.object["answer"]["num_completion_tokens"] <= 8
    assert done.object["url"] != f"http://127.0.0.1:{port}"
    assert f"port {port} of 127.0.0.1 is in use; using a free one instead\n" in done.err
    assert "making a tiny checkpoint with random weights in " in done.err
    assert done.err.endswith("stopped\n")


def test_two_demos_make_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def slow_make(target: Path, *, seed: int) -> None:
        calls.append(seed)
        time.sleep(0.2)
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(tiny_once, "make_tiny", slow_make)
    made: list[bool] = []
    threads = [
        threading.Thread(target=lambda: made.append(tiny_once.ensure_tiny(tmp_path / "tiny"))) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [0]
    assert sorted(made) == [False, True]
