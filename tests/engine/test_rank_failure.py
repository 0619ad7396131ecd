"""Ranks that die, in every way we could think of: one sentence with the cause, and nothing left behind.

Real processes throughout. Whether something is left is asked of the operating system: every rank has its launch's run
directory on its command line.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from deskfleet.endpoint import RankHealth
from deskfleet.engine import messages
from deskfleet.engine.client import EngineClient, EngineOptions, LoadProgress
from deskfleet.engine.llm import LLM
from deskfleet.engine.process import RankProcess, cause_of_end
from deskfleet.errors import EngineError, RankDied
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.layout import engram_column_rows_of
from tests.engine.engines import (
    MODEL,
    chunks_of,
    first_chunks,
    greedy,
    idle,
    random_ids,
    request,
    stats_when,
    tokens_of,
)
from tests.engine.golden import checkpoint

TWO_RANKS = EngineOptions(tp_size=2, max_num_seqs=2, threads_per_rank=1)
ONE_RANK = EngineOptions(threads_per_rank=1)
PROMPT = random_ids(6, seed=1)


@pytest.fixture
def run_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's launches keep their files; afterwards neither a file nor a process may be there.

    Not under tmp_path: that is long enough to leave no room for a Unix socket's name. It is asked for all the same,
    so that pytest has made its own directories before the place for temporary ones changes.
    """
    with tempfile.TemporaryDirectory(prefix="runs-") as name:
        place = Path(name)
        monkeypatch.setattr("tempfile.tempdir", str(place))
        yield place
        assert processes_in(place) == []
        assert list(place.iterdir()) == []


@pytest.fixture
def copied(tmp_path: Path) -> Checkpoint:
    """A checkpoint of our own to spoil."""
    return Checkpoint.open(shutil.copytree(MODEL, tmp_path / "model"))


def processes_in(directory: Path) -> list[psutil.Process]:
    """Processes with `directory` on their command line, dead ones that nobody has waited for included."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(directory) in word for word in process.info["cmdline"] or ())
    ]


async def gone(directory: Path, *, within_s: float = 5) -> bool:
    """Whether the last process of `directory` disappears in time."""
    for _ in range(int(within_s / 0.05)):
        if not processes_in(directory):
            return True
        await asyncio.sleep(0.05)
    return False


async def ends_with(work: Awaitable[Any], error: type[Exception], *, within_s: float = 20) -> Exception:
    """The error that `work` ends with; a hang is a failure."""
    async with asyncio.timeout(within_s):
        with pytest.raises(error) as failure:
            await work
    return failure.value


# --- whose end it was

KILLED, OWN_WORD, SILENT, LOST_PEER, HANGING, ABORTED = (
    (-signal.SIGKILL, None),
    (3, ("out of luck", False)),
    (1, None),
    (3, ("RuntimeError: Connection closed by peer", True)),
    (None, ("stuck on the way out", False)),
    (-signal.SIGABRT, ("RuntimeError: Connection closed by peer", True)),
)


@pytest.mark.parametrize(
    ("ends", "sentence"),
    [
        ([LOST_PEER, KILLED], "rank 1 was killed by SIGKILL"),
        ([OWN_WORD, KILLED], "rank 1 was killed by SIGKILL"),
        ([LOST_PEER, OWN_WORD], "rank 1 failed: out of luck"),
        ([SILENT, OWN_WORD], "rank 1 failed: out of luck"),
        ([LOST_PEER, SILENT], "rank 1 exited with code 1: last words"),
        ([OWN_WORD, OWN_WORD], "rank 0 failed: out of luck"),
        ([LOST_PEER, LOST_PEER], "rank 0 failed: RuntimeError: Connection closed by peer"),
        ([LOST_PEER, HANGING], "rank 1 failed: stuck on the way out"),
        ([ABORTED, OWN_WORD], "rank 1 failed: out of luck"),
        ([(-40, None)], "rank 0 was killed by signal 40"),
        ([(None, None)], "rank 0 closed its connection without a word"),
    ],
)
def test_the_cause_is_named_and_not_its_witness(
    tmp_path: Path, ends: list[tuple[int | None, tuple[str, bool] | None]], sentence: str
) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback\nlast words\n")
    ranks = []
    for number, (code, report) in enumerate(ends):
        failed = None if report is None else messages.Failed(number, *report)
        process: Any = SimpleNamespace(returncode=code)
        ranks.append(RankProcess(number, process, log, ready=cast(Any, None), failed=failed))
    assert cause_of_end(ranks).message == f"{sentence}; the group was stopped"


# --- killed while serving


@pytest.mark.parametrize(
    ("victim", "number", "is_busy"),
    [
        (0, signal.SIGKILL, True),
        (1, signal.SIGKILL, True),
        (1, signal.SIGTERM, False),
    ],
)
async def test_a_killed_rank_is_named_to_everyone_who_waits(
    run_directories: Path, victim: int, number: signal.Signals, is_busy: bool
) -> None:
    sentence = f"rank {victim} was killed by {number.name}; the group was stopped"
    async with EngineClient(checkpoint(), TWO_RANKS) as engine:
        watcher = asyncio.create_task(engine.wait_failed())
        waiting = []
        if is_busy:  # two run, the third waits for a slot
            waiting = [asyncio.create_task(chunks_of(engine, request(PROMPT, greedy(900)))) for _ in range(3)]
            await stats_when(engine, lambda stats: stats.num_generated_tokens > 5)
        os.kill(engine.ranks[victim].pid, number)
        for task in waiting:
            error = await ends_with(task, RankDied)
            assert str(error) == sentence
        assert (await asyncio.wait_for(watcher, 10)).message == sentence
        assert processes_in(run_directories) == [], "the error came before the ranks were gone"
        assert engine.failure == sentence
        for late in (engine.stats(), tokens_of(engine, request(PROMPT, greedy(1))), engine.score(PROMPT)):
            error = await ends_with(late, RankDied)
            assert isinstance(error, RankDied)
            assert (error.rank, str(error)) == (victim, sentence)
    await engine.close()
    assert engine.failure == sentence


async def test_a_table_that_shrinks_is_an_error_and_never_zeros(
    run_directories: Path, copied: Checkpoint, llm: LLM
) -> None:
    table = copied.tensors["layers.4.engram.embed.weight"]
    last_column = engram_column_rows_of(copied.config)[1][-1]  # of twelve; the second rank reads it
    async with EngineClient(copied, TWO_RANKS) as engine:
        seen: list[int] = []

        async def follow() -> None:
            async for chunk in engine.generate(request(PROMPT, greedy(900))):
                seen.extend(chunk.token_ids)

        task = asyncio.create_task(follow())
        await stats_when(engine, lambda stats: stats.num_generated_tokens > 5)
        os.truncate(
            table.path, table.offset_bytes + table.nbytes - last_column * copied.config.engram_head_dim
        )
        error = await ends_with(task, RankDied)
    assert "\n" not in str(error)
    assert f"rank 1 failed: engram rows of layer 4: {table.path}: " in str(error)
    assert re.search(r"weights of row \d+ of layer 4: short: the file ends", str(error)), error
    assert str(error).endswith("; the group was stopped")
    expected = llm.generate([PROMPT], greedy(len(seen)))[0].token_ids
    assert tuple(seen) == expected, "a token was made of rows that were not there"


# --- failing to start


def truncate_shard(source: Checkpoint) -> str:
    path = source.tensors["layers.3.attn.wq_a.weight"].path
    os.truncate(path, path.stat().st_size - 10)
    return path.name


def remove_tokenizer(source: Checkpoint) -> str:
    (source.directory / "tokenizer.json").unlink()
    return r"no tokenizer\.json in "


def spoil_tokenizer(source: Checkpoint) -> str:
    """Another tokenizer, whose compressed ids would hash to unrelated rows."""
    path = source.directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][-1]["content"] = "E"
    path.write_text(json.dumps(content))
    return "the tokenizer gives 408 compressed ids, but engram_compressed_vocab_size says 409"


@pytest.mark.parametrize("spoil", [truncate_shard, remove_tokenizer, spoil_tokenizer])
async def test_what_a_rank_cannot_load_is_in_its_sentence(
    run_directories: Path, copied: Checkpoint, spoil: Callable[[Checkpoint], str]
) -> None:
    engine = EngineClient(copied, TWO_RANKS if spoil is truncate_shard else ONE_RANK)
    wanted = spoil(copied)
    error = await ends_with(engine.start(), RankDied)
    assert isinstance(error, RankDied)
    assert re.fullmatch(rf"rank [01] failed: .*{wanted}.*; the group was stopped", error.message)
    assert (error.hint is not None) == (spoil is not spoil_tokenizer), (
        "what the rank knew of a way out was lost"
    )
    assert engine.failure == error.message
    await engine.close()


async def test_a_rank_that_ends_without_a_word_leaves_its_log(
    run_directories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so.9: wrong planet')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = EngineClient(checkpoint(), TWO_RANKS)
    with caplog.at_level(logging.ERROR, "deskfleet.engine"):
        error = await ends_with(engine.start(), RankDied)
    assert "exited with code 1: ImportError: libtorch.so.9: wrong planet; the group was stopped" in str(error)
    assert "Traceback" in caplog.text, "the log was removed unread"


async def test_a_rank_killed_while_loading_is_named(run_directories: Path) -> None:
    killed: list[int] = []

    def kill(progress: LoadProgress) -> None:
        if progress.rank == 1 and not killed:
            killed.extend(p.pid for p in processes_in(run_directories) if "rank-1.json" in p.cmdline()[-1])
            os.kill(killed[0], signal.SIGKILL)

    error = await ends_with(EngineClient(checkpoint(), TWO_RANKS, on_load=kill).start(), RankDied)
    assert str(error) == "rank 1 was killed by SIGKILL; the group was stopped"
    assert len(killed) == 1


async def test_a_start_that_is_given_up_leaves_nothing(run_directories: Path) -> None:
    engine = EngineClient(checkpoint(), TWO_RANKS)
    starting = asyncio.create_task(engine.start())
    while len(processes_in(run_directories)) < 2 and not starting.done():
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert processes_in(run_directories) == []


async def test_closing_ends_a_start_and_every_request(run_directories: Path) -> None:
    engine = EngineClient(checkpoint(), TWO_RANKS)
    starting = asyncio.create_task(engine.start())
    while not processes_in(run_directories) and not starting.done():
        await asyncio.sleep(0.01)
    await engine.close()
    assert "shutting down" in str(await ends_with(starting, EngineError))

    second = EngineClient(checkpoint(), ONE_RANK)
    await second.start()
    tasks = [asyncio.create_task(chunks_of(second, request(PROMPT, greedy(900)))) for _ in range(2)]
    await stats_when(second, lambda stats: stats.num_generated_tokens > 3)
    await second.close()
    for task in tasks:
        assert "shutting down" in str(await ends_with(task, EngineError))
    assert second.failure is None
    await second.close()


async def test_a_run_directory_too_deep_for_a_socket_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    error = await ends_with(EngineClient(checkpoint(), ONE_RANK).start(), EngineError)
    assert "cannot start the ranks: AF_UNIX path too long" in str(error)
    assert "TMPDIR" in str(error)
    assert list(deep.iterdir()) == []


# --- the supervisor's own end

SUPERVISOR = """
import asyncio, os, signal, sys
from deskfleet.endpoint import GenerateRequest, SamplingParams
from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.model.checkpoint import Checkpoint

async def main():
    options = EngineOptions(tp_size=2, threads_per_rank=1)
    async with EngineClient(Checkpoint.open(sys.argv[1]), options) as engine:
        interrupted = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
        print(*(rank.pid for rank in engine.ranks), flush=True)
        await interrupted.wait()
        asked = GenerateRequest("after", (5, 6), SamplingParams(max_tokens=900, ignore_eos=True))
        async for chunk in engine.generate(asked):
            print("token", flush=True)

asyncio.run(main())
"""

INTERRUPTED = """
import sys
from deskfleet.endpoint import SamplingParams
from deskfleet.engine.llm import LLM

with LLM(sys.argv[1], threads_per_rank=1) as llm:
    print("ready", flush=True)
    try:
        llm.generate([(5, 6)], SamplingParams(max_tokens=1000, ignore_eos=True))
    except KeyboardInterrupt:
        llm.generate([(5, 6)], SamplingParams(max_tokens=1, ignore_eos=True))
        print(llm._client._stats.num_cancelled, flush=True)
"""


@pytest.fixture
def supervise(run_directories: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a program in a process group of its own, as a shell does."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", program, str(MODEL)],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(run_directories)},
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    for left in run_directories.iterdir():  # a supervisor that was killed could not clean up
        shutil.rmtree(left)


async def test_ranks_ignore_ctrl_c_and_follow_their_supervisor(
    run_directories: Path, supervise: Callable[[str], subprocess.Popen[str]]
) -> None:
    supervisor = supervise(SUPERVISOR)
    assert supervisor.stdout is not None
    ranks = [int(pid) for pid in (await asyncio.to_thread(supervisor.stdout.readline)).split()]
    assert sorted(ranks) == sorted(p.pid for p in processes_in(run_directories))
    os.killpg(supervisor.pid, signal.SIGINT)
    for pid in ranks:
        os.kill(pid, signal.SIGINT)
    assert await asyncio.to_thread(supervisor.stdout.readline) == "token\n", (
        "the ranks did not survive Ctrl-C"
    )
    supervisor.kill()
    assert await gone(run_directories), "ranks outlived their supervisor"


async def test_ctrl_c_in_generate_cancels_and_leaves_a_working_engine(
    run_directories: Path, supervise: Callable[[str], subprocess.Popen[str]]
) -> None:
    program = supervise(INTERRUPTED)
    assert program.stdout is not None
    assert await asyncio.to_thread(program.stdout.readline) == "ready\n"
    await asyncio.sleep(0.5)
    os.killpg(program.pid, signal.SIGINT)
    assert await asyncio.to_thread(program.stdout.readline) == "1\n"
    assert await asyncio.to_thread(program.wait, 20) == 0
    assert processes_in(run_directories) == []
    assert list(run_directories.iterdir()) == []


# --- leaks


async def test_starting_and_stopping_leaks_nothing(run_directories: Path) -> None:
    counts = []
    for _ in range(5):
        async with EngineClient(checkpoint(), ONE_RANK) as engine:
            assert len(await tokens_of(engine, request(PROMPT, greedy(2)))) == 2
            await first_chunks(engine, request(PROMPT, greedy(50)), 1)
        assert list(run_directories.iterdir()) == []
        del engine
        gc.collect()
        await asyncio.sleep(0.05)
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks())))
    assert counts[-1] == counts[0], f"descriptors, threads and tasks after each launch: {counts}"


# --- heartbeats


async def rank_when(engine: EngineClient, rank: int, wanted: Callable[[RankHealth], bool]) -> RankHealth:
    """What is known of `rank` as soon as it is as wanted."""
    async with asyncio.timeout(20):
        while not wanted(health := (await engine.health()).ranks[rank]):
            await asyncio.sleep(0.02)
    return health


async def test_a_heartbeat_says_where_the_main_thread_is() -> None:
    async with EngineClient(checkpoint(), replace(TWO_RANKS, max_num_batched_tokens=300)) as engine:
        engine.planned_bytes = {1: 12345}
        fresh = (await engine.health()).ranks

        async def read_prompts() -> None:
            """One after the other: a heartbeat a second must meet one."""
            for seed in itertools.count():
                await tokens_of(engine, request(random_ids(600, seed), greedy(1)))

        reading = asyncio.create_task(read_prompts())
        prefilling = await rank_when(engine, 0, lambda rank: rank.state == "prefill")
        reading.cancel()
        running = asyncio.create_task(tokens_of(engine, request(PROMPT, greedy(900))))
        decoding = await rank_when(engine, 1, lambda rank: rank.state == "decode")
        running.cancel()
        await stats_when(engine, idle)
        await asyncio.sleep(1.5)  # a heartbeat of each from after it
        rank_0, resting = (await engine.health()).ranks
    ended = (await engine.health()).ranks
    assert [(rank.rank, rank.state, rank.num_steps) for rank in fresh] == [(0, "idle", 0), (1, "idle", 0)]
    assert [rank.last_step_age_s for rank in fresh] == [None, None]
    assert (prefilling.num_tokens, decoding.num_tokens) == (300, 1)
    assert decoding.num_moves > decoding.num_steps * len(checkpoint().config.layers), "layers count as moves"
    assert (rank_0.state, resting.state, resting.num_tokens) == ("idle", "idle", 0)
    assert rank_0.num_steps == resting.num_steps > decoding.num_steps, "every rank runs every pass"
    assert resting.last_step_age_s is not None
    assert resting.heartbeat_age_s is not None
    assert 0 <= resting.heartbeat_age_s < 5
    assert 1.0 < resting.last_step_age_s < 30
    held = resting.memory_bytes or 0
    assert 100e6 < held < 4e9, f"{held} bytes is not what a process with torch holds"
    assert (resting.host_available_bytes or 0) > 100e6
    assert (resting.planned_bytes, rank_0.planned_bytes) == (12345, None)
    assert [rank.state for rank in ended] == ["ended", "ended"]


async def test_a_frozen_rank_falls_silent_and_its_peer_reports_standing_still() -> None:
    """What no exit code shows: both processes are there and connected, one does nothing, one waits for it."""
    async with EngineClient(checkpoint(), TWO_RANKS) as engine:
        running = asyncio.create_task(tokens_of(engine, request(PROMPT, greedy(300))))
        await rank_when(engine, 0, lambda rank: rank.num_steps > 5)
        frozen = psutil.Process(engine.ranks[1].pid)
        frozen.suspend()
        try:
            await asyncio.sleep(1.5)  # one heartbeat of rank 0 from after the freeze
            first = (await engine.health()).ranks
            await asyncio.sleep(2.5)
            second = (await engine.health()).ranks
        finally:
            frozen.resume()
        assert second[1].heartbeat_age_s is not None
        assert second[0].heartbeat_age_s is not None
        assert second[1].heartbeat_age_s > 3.0 > 2.0 > second[0].heartbeat_age_s
        assert second[0].num_moves == first[0].num_moves
        assert second[0].state == "decode", "a main thread that waits in a collective is not idle"
        assert len(await running) == 300, "what was frozen goes on"


async def test_a_group_given_up_tells_everyone_why(run_directories: Path) -> None:
    async with EngineClient(checkpoint(), TWO_RANKS) as engine:
        task = asyncio.create_task(chunks_of(engine, request(PROMPT, greedy(900))))
        await stats_when(engine, lambda stats: stats.num_generated_tokens > 2)
        frozen = psutil.Process(engine.ranks[1].pid)
        frozen.suspend()
        await asyncio.wait_for(engine.abandon("rank 1 was silent for 120 s"), 5)
        assert str(await ends_with(task, EngineError)) == "rank 1 was silent for 120 s"
        assert (await engine.wait_failed()).message == "rank 1 was silent for 120 s"
        assert processes_in(run_directories) == [], (
            "a stopped process takes a signal that cannot be held back"
        )
        await engine.abandon("something else")
        assert engine.failure == "rank 1 was silent for 120 s"


async def test_heartbeats_of_an_idle_rank_cost_less_than_a_hundredth_of_a_core() -> None:
    async with EngineClient(checkpoint(), TWO_RANKS) as engine:
        await tokens_of(engine, request(PROMPT, greedy(2)))
        ranks = [psutil.Process(rank.pid) for rank in engine.ranks]
        await asyncio.sleep(0.5)

        def spent_s() -> list[float]:
            return [sum(process.cpu_times()[:2]) for process in ranks]

        before = spent_s()
        await asyncio.sleep(4.0)
        used = [round(late - early, 3) for late, early in zip(spent_s(), before, strict=True)]
    assert all(seconds <= 0.04 for seconds in used), f"seconds of CPU in 4 s of nothing to do: {used}"
