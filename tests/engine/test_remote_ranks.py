"""Ranks that were started by themselves and come over TCP: they answer as local ones do, and nothing stays behind.

Every rank is `deskfleet rank` in a process of its own, as a container would run it. A link that is cut is a proxy that
stops forwarding: neither end is told anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from deskfleet.engine import handshake, messages
from deskfleet.engine.client import EngineClient, EngineOptions, LoadProgress
from deskfleet.engine.guest import Guest, dial
from deskfleet.engine.identity import checkpoint_identity
from deskfleet.engine.llm import LLM
from deskfleet.engine.process import Patience
from deskfleet.engine.receipts import disagreement
from deskfleet.engine.remote_ranks import RemoteRanks
from deskfleet.engine.spec import RankPaths
from deskfleet.errors import ConfigError, DeskfleetError, EngineError
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.packs import PackJob
from tests.engine.engines import MODEL, greedy, random_ids, request, stats_when, tokens_of
from tests.engine.golden import checkpoint

TOKEN = "a-token-that-nobody-guesses"
LAUNCH = "launch-1"
PROMPT = random_ids(6, seed=1)
QUICK = Patience(heartbeat_s=0.5, rank_ends_s=4.0, rank_is_lost_s=6.0, arrival_s=60.0, handshake_s=2.0)
COMMAND = "import sys; from deskfleet.cli import main; sys.exit(main(sys.argv[1:]))"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def starter(
    *, port: int = 0, launch: str = LAUNCH, patience: Patience = QUICK, nodes: tuple[str, ...] = ()
) -> RemoteRanks:
    return RemoteRanks(
        host="127.0.0.1",
        port=port,
        launch_id=launch,
        token=TOKEN,
        meeting_point=("127.0.0.1", free_port()),
        nodes=nodes,
        patience=patience,
    )


def options(tp_size: int) -> EngineOptions:
    return EngineOptions(tp_size=tp_size, max_num_seqs=2, threads_per_rank=1)


@dataclass
class Ranks:
    """The ranks that a test starts by hand, with what each of them says on stderr."""

    place: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, port: int, rank: int, *more: str, model: Path = MODEL, token: str = TOKEN, launch: str = LAUNCH
    ) -> subprocess.Popen[bytes]:
        words = [
            "rank",
            str(model),
            "--connect",
            f"127.0.0.1:{port}",
            "--rank",
            str(rank),
            "--launch",
            launch,
        ]
        with self._log(len(self.processes)).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, *words, *more],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "DESKFLEET_RANK_TOKEN": token},
            )
        self.processes.append(process)
        return process

    async def end_of(self, number: int, *, within_s: float = 10) -> tuple[int, str]:
        """Exit code and last line of the rank started as `number`."""
        code = await asyncio.to_thread(self.processes[number].wait, within_s)
        return code, self.said(number)[-1]

    def said(self, number: int) -> list[str]:
        return self._log(number).read_text().splitlines() or [""]

    def _log(self, number: int) -> Path:
        return self.place / f"rank-{number}.txt"


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Whatever a test starts; at its end every rank must have ended by itself."""
    started = Ranks(tmp_path)
    yield started
    left = []
    for number, process in enumerate(started.processes):
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            left.append((number, started.said(number)))
            process.kill()
            process.wait()
    assert not left, "ranks stayed behind"
    assert not any(TOKEN in line for number in range(len(started.processes)) for line in started.said(number))


async def hosted(engine: EngineClient, remote: RemoteRanks) -> asyncio.Task[None]:
    """A start that is under way and listens."""
    starting = asyncio.create_task(engine.start())
    async with asyncio.timeout(10):
        while remote._server is None and not starting.done():
            await asyncio.sleep(0.01)
    return starting


async def failing(work: Awaitable[object], *, within_s: float = 40) -> str:
    """The sentence with which a launch or a request fails."""
    async with asyncio.timeout(within_s):
        with pytest.raises(DeskfleetError) as failure:
            await work
    return failure.value.message


def guest(port: int, rank: int, *, launch: str = LAUNCH, dial_s: float = 5.0) -> Guest:
    return Guest(("127.0.0.1", port), rank, launch, RankPaths(str(MODEL)), dial_s=dial_s)


async def refusal(who: Guest, token: str) -> str:
    """What somebody is told who dials and is not let in."""
    with pytest.raises(EngineError) as failure:
        await asyncio.to_thread(dial, who, token)
    return failure.value.message


# --- who is let in


async def test_ranks_that_came_first_answer_like_local_ones_whatever_strangers_do(
    ranks: Ranks, llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """The ranks dial for seconds before anybody listens; strangers of every kind come meanwhile and afterwards."""
    remote = starter(port=free_port(), nodes=("alpha", "beta"))
    for rank in (1, 0):
        ranks.start(remote._port, rank)
    await asyncio.sleep(3)
    loaded: set[int] = set()

    def on_load(progress: LoadProgress) -> None:
        loaded.add(progress.rank)

    with caplog.at_level(logging.WARNING, "deskfleet.engine"):
        async with EngineClient(checkpoint(), options(2), on_load=on_load, starter=remote) as engine:
            port = remote.address[1]
            running = asyncio.create_task(tokens_of(engine, request(PROMPT, greedy(60))))
            silent = socket.create_connection(("127.0.0.1", port))
            with socket.create_connection(("127.0.0.1", port)) as garbage:
                garbage.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert await asyncio.to_thread(garbage.recv, 100) == b""
            short = messages.LENGTH_BYTES.to_bytes(8, "little") + b"\xc1" * messages.LENGTH_BYTES
            with socket.create_connection(("127.0.0.1", port)) as garbage:
                garbage.sendall(short)
                assert await asyncio.to_thread(garbage.recv, 100) == b""
            assert "another token" in await refusal(guest(port, 1), "another-token-of-16")
            assert "belongs to launch 'old'" in await refusal(guest(port, 1, launch="old"), TOKEN)
            assert "rank 1 is here already" in await refusal(guest(port, 1), TOKEN)
            assert "there is no rank 2, only 0 to 1" in await refusal(guest(port, 2), TOKEN)
            assert await asyncio.to_thread(silent.recv, 100) == b"", "one who says nothing is not waited for"
            silent.close()
            assert await running == llm.generate([PROMPT], greedy(60))[0].token_ids
            assert np.array_equal(await engine.score(PROMPT), llm.score(PROMPT))
            first, second = engine.receipts
            assert [rank.node for rank in engine.ranks] == ["alpha", "beta"]
            assert [rank.pid for rank in engine.ranks] == [process.pid for process in ranks.processes[::-1]]
            async with asyncio.timeout(5):  # the latest heartbeats may be of the last step
                while [rank.state for rank in (await engine.health()).ranks] != ["idle", "idle"]:
                    await asyncio.sleep(0.1)
        assert [(await ranks.end_of(number))[0] for number in (0, 1)] == [0, 0]
    assert loaded == {0, 1}
    assert (first.rank, second.rank) == (0, 1)
    assert (first.pid, first.node) == (ranks.processes[1].pid, socket.gethostname())
    assert msgspec.structs.replace(first, rank=1, pid=second.pid) == second
    assert (len(first.checkpoint), first.engram_source, first.engram_rows) == (64, "published shards", None)
    assert caplog.text.count("was turned away") == 7
    assert TOKEN not in caplog.text


async def test_a_rank_that_does_not_come_is_named() -> None:
    """Rank 1 came, and is let go with the reason."""
    remote = starter(patience=replace(QUICK, arrival_s=2.0), nodes=("alpha", "beta", "gamma"))
    engine = EngineClient(checkpoint(), options(3), starter=remote)
    starting = await hosted(engine, remote)
    port = remote.address[1]
    connection, spec = await asyncio.to_thread(dial, guest(port, 1), TOKEN)
    with connection:
        assert (spec.rank, spec.tp_size, spec.silence_s) == (1, 3, 4.0)
        sentence = await failing(starting)
        assert (
            sentence == "rank 0 on alpha, rank 2 on gamma have not come within 2 s; the launch was given up"
        )
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert messages.frame(messages.End(sentence)) in received, "it was not told why"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


async def test_a_rank_does_not_obey_whoever_answers() -> None:
    """A supervisor without the token cannot make a rank do anything, and one that never answers is not waited for."""

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(messages.LENGTH_BYTES)
        writer.write(messages.frame(handshake.Challenge(bytes(32))))
        await asyncio.sleep(0.2)
        spec = seen[0]
        writer.write(messages.frame(handshake.Welcome(bytes(32), spec)))
        writer.close()

    remote = starter()
    engine = EngineClient(checkpoint(), options(1), starter=remote)
    starting = await hosted(engine, remote)
    connection, spec = await asyncio.to_thread(dial, guest(remote.address[1], 0), TOKEN)
    seen = [spec]
    connection.close()
    assert "rank 0 on " in await failing(starting)
    async with await asyncio.start_server(pretend, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert "does not have this launch's token" in await refusal(guest(port, 0), TOKEN)
    begin = time.monotonic()
    assert "no supervisor answered at 127.0.0.1:1 within 0.5 s" in await refusal(
        guest(1, 0, dial_s=0.5), TOKEN
    )
    assert time.monotonic() - begin < 3


async def test_what_is_wrong_before_dialling_is_said_at_once(ranks: Ranks) -> None:
    ranks.start(1, 0, token="short")
    ranks.start(1, 0, "--interface", "nowhere0")
    ends = [await ranks.end_of(number, within_s=30) for number in range(2)]
    assert [code for code, _ in ends] == [2, 2]
    assert "the launch's token has 5 characters" in " ".join(ranks.said(0))
    assert "no network interface 'nowhere0'" in " ".join(ranks.said(1))
    with pytest.raises(ConfigError, match="has 0 characters"):
        RemoteRanks(host="127.0.0.1", port=0, launch_id="x", token="", meeting_point=("127.0.0.1", 1))
    with pytest.raises(ConfigError, match="ranks of other machines have their own"):
        EngineClient(checkpoint(), EngineOptions(engram_pack=Path("pack")), starter=starter())


# --- what they must have alike


def edit_weights(model: Path) -> None:
    """Other weights under the same names: the headers are the same to the byte."""
    table = Checkpoint.open(model).tensors["norm.weight"].path
    with table.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x01\x02\x03\x04\x05\x06\x07\x08")


def edit_configuration(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_name_or_path": "another"}))


@pytest.mark.slow
@pytest.mark.parametrize("edit", [edit_weights, edit_configuration])
async def test_a_rank_with_another_checkpoint_refuses(
    ranks: Ranks, tmp_path: Path, edit: Callable[[Path], None]
) -> None:
    other = shutil.copytree(MODEL, tmp_path / "model")
    edit(other)
    remote = starter()
    async with asyncio.timeout(60):
        engine = EngineClient(checkpoint(), options(2), starter=remote)
        starting = await hosted(engine, remote)
        ranks.start(remote.address[1], 0)
        ranks.start(remote.address[1], 1, model=other)
        sentence = await failing(starting)
    assert sentence.startswith(
        f"rank 1 on {socket.gethostname()} failed: {other} is not the checkpoint that the supervisor has: its identity"
    )
    assert (await ranks.end_of(0)) == (3, f"error: rank 0: {sentence}"), (
        "the others are told whose fault it was"
    )
    code, line = await ranks.end_of(1)
    assert (code, line[:50]) == (3, f"error: rank 1: {other}"[:50])


def test_identities_tell_checkpoints_apart_and_copies_not(tmp_path: Path) -> None:
    copies = [shutil.copytree(MODEL, tmp_path / name) for name in ("same", "weights", "configuration")]
    edit_weights(copies[1])
    edit_configuration(copies[2])
    identities = [checkpoint_identity(Checkpoint.open(model)) for model in copies]
    assert identities[0] == checkpoint_identity(checkpoint())
    assert len(set(identities)) == 3


def test_the_first_difference_between_ranks_is_named_with_both_values() -> None:
    one = messages.Receipt(
        *(0, "a", 1, "0.1", "2.9", "3.11", "c", "s", "t", "auto", "native", "avx2", "pack", "r", "m0"),
        *("shared memory", "shared memory", "ranks of one machine"),
    )
    two = msgspec.structs.replace(one, rank=1, node="b", pid=2, operators_detail="neon", engram_manifest="m1")
    assert disagreement({0: one, 1: two}) is None, "instruction sets and shares of a pack may differ"
    other = msgspec.structs.replace(two, rank=2, node="c", operators="reference", engram_rows=None)
    assert disagreement({2: other, 0: one, 1: two}) == (
        "the ranks disagree about operators: rank 0 on a has native, rank 2 on c has reference"
    )
    assert disagreement({0: one, 1: msgspec.structs.replace(two, collectives="gloo")}) == (
        "the ranks disagree about collectives: rank 0 on a has shared memory, rank 1 on b has gloo"
    )
    assert disagreement({0: one, 2: msgspec.structs.replace(other, operators="native")}) == (
        "the ranks disagree about engram_rows: rank 0 on a has r, rank 2 on c has none"
    )


@pytest.mark.slow
async def test_a_plan_that_a_machine_cannot_hold_is_refused_there(ranks: Ranks) -> None:
    remote = starter()
    engine = EngineClient(checkpoint(), options(2), starter=remote)
    engine.planned_bytes = {1: 1 << 50}
    starting = await hosted(engine, remote)
    for rank in (0, 1):
        ranks.start(remote.address[1], rank)
    sentence = await failing(starting)
    assert (
        f"rank 1 on {socket.gethostname()} failed: its plan is 1024.00 TiB, and its machine has" in sentence
    )
    assert {(await ranks.end_of(number))[0] for number in (0, 1)} == {3}


def packed(place: Path, *, rank: int | None = None, world_size: int | None = None) -> str:
    """A pack of all rows, or of one rank's share of them."""
    job = PackJob.prepare(MODEL, place, rank=rank, world_size=world_size)
    job.run(on_progress=lambda progress: None)
    return str(place)


@pytest.mark.slow
async def test_each_rank_reads_the_pack_of_its_own_machine(ranks: Ranks, tmp_path: Path, llm: LLM) -> None:
    shares = [packed(tmp_path / f"share-{rank}", rank=rank, world_size=2) for rank in (0, 1)]
    remote = starter()
    engine = EngineClient(checkpoint(), options(2), starter=remote)
    starting = await hosted(engine, remote)
    for rank in (0, 1):
        ranks.start(remote.address[1], rank, "--engram-pack", shares[rank])
    await asyncio.wait_for(starting, 60)
    expected = llm.generate([PROMPT], greedy(20))[0].token_ids
    assert await tokens_of(engine, request(PROMPT, greedy(20))) == expected
    assert engine.engram is not None
    assert [receipt.engram_source for receipt in engine.receipts] == shares
    assert len({receipt.engram_rows for receipt in engine.receipts}) == 1
    assert len({receipt.engram_manifest for receipt in engine.receipts}) == 2
    assert (await engine.stats()).engram.num_fallback_rows == 0
    await engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (None, "the ranks disagree about engram_rows: rank 0 on {node} has "),
        (0, "rank 1 on {node} failed: {pack} lacks what 2 ranks read: rank 1 reads columns "),
    ],
)
async def test_a_rank_without_the_rows_that_others_have_is_refused(
    ranks: Ranks, tmp_path: Path, number: int | None, sentence: str
) -> None:
    """Rank 1 forgot its pack, or has rank 0's."""
    pack = packed(tmp_path / "share", rank=0, world_size=2)
    remote = starter()
    starting = await hosted(EngineClient(checkpoint(), options(2), starter=remote), remote)
    ranks.start(remote.address[1], 0, "--engram-pack", pack)
    ranks.start(remote.address[1], 1, *([] if number is None else ["--engram-pack", pack]))
    assert (await failing(starting)).startswith(sentence.format(node=socket.gethostname(), pack=pack))
    assert [(await ranks.end_of(rank))[0] for rank in (0, 1)] == [3, 3]


# --- whatever dies


@dataclass
class Proxy:
    """Passes bytes between ranks and supervisor until it is told to swallow them."""

    target: int
    port: int = 0
    is_cut: bool = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        tasks: set[asyncio.Task[None]] = set()
        writers: list[asyncio.StreamWriter] = []

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    if not self.is_cut:
                        writer.write(data)
            while self.is_cut:  # an end is not passed on either
                await asyncio.sleep(0.1)
            writer.close()

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
            writers.extend((writer, far_writer))
            for one, other in ((reader, far_writer), (far_reader, writer)):
                tasks.add(asyncio.create_task(pump(one, other)))

        server = await asyncio.start_server(connect, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for writer in writers:
                writer.transport.abort()
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serving_two(
    ranks: Ranks, remote: RemoteRanks, port: int | None = None
) -> AsyncIterator[EngineClient]:
    """Two ranks that serve a request; the second one dials `port`."""
    engine = EngineClient(checkpoint(), options(2), starter=remote)
    starting = await hosted(engine, remote)
    ranks.start(remote.address[1], 0)
    ranks.start(port or remote.address[1], 1)
    try:
        await asyncio.wait_for(starting, 60)
        yield engine
    finally:
        await engine.close()


async def test_a_killed_rank_is_named_with_its_node_and_takes_the_others_along(ranks: Ranks) -> None:
    remote = starter(nodes=("alpha", "beta"))
    async with serving_two(ranks, remote) as engine:
        running = asyncio.create_task(tokens_of(engine, request(PROMPT, greedy(900))))
        await stats_when(engine, lambda stats: stats.num_generated_tokens > 5)
        ranks.processes[1].kill()
        sentence = await failing(running)
        assert sentence == "rank 1 on beta closed its connection without a word; the group was stopped"
        code, line = await ranks.end_of(0)
        assert code == 3
        assert line.startswith("error: rank 0: ")
        assert [rank.state for rank in (await engine.health()).ranks] == ["ended", "ended"]


@pytest.mark.slow
async def test_three_ranks_answer_like_one(ranks: Ranks, llm: LLM) -> None:
    remote = starter()
    engine = EngineClient(checkpoint(), options(3), starter=remote)
    starting = await hosted(engine, remote)
    for rank in range(3):
        ranks.start(remote.address[1], rank)
    await asyncio.wait_for(starting, 60)
    assert (
        await tokens_of(engine, request(PROMPT, greedy(40)))
        == llm.generate([PROMPT], greedy(40))[0].token_ids
    )
    await engine.close()
    assert [await ranks.end_of(number) for number in range(3)] == [
        (0, f"rank {number}: stopped by its supervisor") for number in range(3)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_rank_that_is_told_to_end_says_so(ranks: Ranks, number: signal.Signals) -> None:
    """In the middle of a collective, where no handler of Python would run."""
    remote = starter(nodes=("alpha", "beta"))
    async with serving_two(ranks, remote) as engine:
        running = asyncio.create_task(tokens_of(engine, request(PROMPT, greedy(900))))
        await stats_when(engine, lambda stats: stats.num_generated_tokens > 5)
        ranks.processes[0].send_signal(signal.SIGSTOP)  # rank 1 waits for it
        await asyncio.sleep(0.5)
        ranks.processes[1].send_signal(number)
        assert (await ranks.end_of(1)) == (128 + number, f"error: rank 1: ended by {number.name}")
        ranks.processes[0].send_signal(signal.SIGCONT)
        assert (
            await failing(running) == f"rank 1 on beta failed: ended by {number.name}; the group was stopped"
        )
        assert (await ranks.end_of(0))[0] == 3


@pytest.mark.slow
async def test_a_frozen_rank_may_come_back_and_is_lost_when_it_does_not(ranks: Ranks) -> None:
    remote = starter(nodes=("alpha", "beta"))
    async with serving_two(ranks, remote) as engine:
        running = asyncio.create_task(tokens_of(engine, request(PROMPT, greedy(300))))
        await stats_when(engine, lambda stats: stats.num_generated_tokens > 5)
        ranks.processes[1].send_signal(signal.SIGSTOP)
        await asyncio.sleep(4)
        age_s = (await engine.health()).ranks[1].heartbeat_age_s
        ranks.processes[1].send_signal(signal.SIGCONT)
        assert age_s is not None
        assert age_s > 2.5
        assert len(await asyncio.wait_for(running, 60)) == 300, "what was frozen goes on"
        running = asyncio.create_task(tokens_of(engine, request(PROMPT, greedy(900))))
        await stats_when(engine, lambda stats: stats.num_running == 1)
        begin = time.monotonic()
        ranks.processes[1].send_signal(signal.SIGSTOP)
        sentence = await failing(running)
        assert sentence.startswith("rank 1 on beta has been silent for ")
        assert time.monotonic() - begin < 15
        assert (await ranks.end_of(0)) == (3, f"error: rank 0: {sentence}")
        ranks.processes[1].send_signal(signal.SIGCONT)
        assert (await ranks.end_of(1))[0] == 3, "it ends as soon as it can"


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [False, True])
async def test_a_link_that_swallows_everything_ends_both_sides(ranks: Ranks, is_frozen: bool) -> None:
    """The cut rank ends by itself, although no FIN reaches it, and a frozen one as soon as it runs again."""
    remote = starter(port=free_port(), nodes=("alpha", "beta"))
    proxy = Proxy(remote._port)

    async def ask_for_ever() -> None:
        while True:
            await tokens_of(engine, request(PROMPT, greedy(100)))

    async with proxy.running(), serving_two(ranks, remote, proxy.port) as engine:
        # Busy ranks see the loss of a peer before its supervisor has waited long enough; idle ones see nothing.
        asking = None if is_frozen else asyncio.create_task(ask_for_ever())
        await asyncio.sleep(1)
        begin = time.monotonic()
        proxy.is_cut = True
        if is_frozen:
            ranks.processes[1].send_signal(signal.SIGSTOP)
        sentence = (await asyncio.wait_for(engine.wait_failed(), 30)).message
        assert sentence.startswith("rank 1 on beta has been silent for ")
        assert time.monotonic() - begin < 12
        assert (await ranks.end_of(0))[0] == 3
        ranks.processes[1].send_signal(signal.SIGCONT)
        code, line = await ranks.end_of(1)
        assert code == 3
        if asking is not None:
            assert line == "error: rank 1: lost its supervisor: it has been silent for 4 s"
            assert await failing(asking) == sentence


# --- two machines, as far as the network goes


@dataclass
class Namespaces:
    """Two network namespaces joined by one cable. Addresses are 10.99.7.1 and 10.99.7.2."""

    names: tuple[str, str]

    @classmethod
    @contextlib.contextmanager
    def made(cls) -> Iterator[Namespaces]:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("network namespaces need root and iproute2")
        here = cls((f"df-{os.getpid()}-a", f"df-{os.getpid()}-b"))
        try:
            for name in here.names:
                if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
                    pytest.skip("this machine makes no network namespaces")
            first, second = here.names
            here.ip(
                "-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second
            )
            for number, name in enumerate(here.names, start=1):
                here.ip("-n", name, "addr", "add", f"10.99.7.{number}/24", "dev", "cable")
                here.ip("-n", name, "link", "set", "lo", "up")
                here.ip("-n", name, "link", "set", "cable", "up")
            yield here
        finally:
            for name in here.names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    def start(self, number: int, words: list[str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[number], sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "DESKFLEET_RANK_TOKEN": TOKEN},
            )


FAR_SUPERVISOR = """
import asyncio, sys, time
from deskfleet.endpoint import GenerateRequest, SamplingParams
from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.engine.remote_ranks import RemoteRanks
from deskfleet.model.checkpoint import Checkpoint

async def main():
    starter = RemoteRanks(host="10.99.7.1", port=7100, launch_id=sys.argv[2], token=sys.argv[3],
                          meeting_point=("10.99.7.1", 7101))
    async with EngineClient(Checkpoint.open(sys.argv[1]), EngineOptions(tp_size=2, threads_per_rank=1),
                            starter=starter) as engine:
        asked = GenerateRequest("a", (5, 6), SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
        print([i async for chunk in engine.generate(asked) for i in chunk.token_ids], flush=True)
        print((await engine.wait_failed()).message, flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [False, True])
async def test_a_cable_that_is_pulled_ends_both_sides(tmp_path: Path, is_frozen: bool) -> None:
    """No end of the connection is told; with the patience that a fleet has, not the tests' own."""
    outputs = [tmp_path / name for name in ("supervisor", "rank-0", "rank-1")]
    with Namespaces.made() as machines:
        processes = []
        try:
            words = ["-c", COMMAND, "rank", str(MODEL), "--connect", "10.99.7.1:7100", "--launch", LAUNCH]
            for rank in (0, 1):
                processes.append(machines.start(rank, [*words, "--rank", str(rank)], outputs[1 + rank]))
            processes.insert(
                0, machines.start(0, ["-c", FAR_SUPERVISOR, str(MODEL), LAUNCH, TOKEN], outputs[0])
            )
            async with asyncio.timeout(60):
                while not outputs[0].read_text().endswith("]\n"):
                    assert processes[0].poll() is None, outputs[0].read_text()
                    await asyncio.sleep(0.1)
            machines.ip("-n", machines.names[1], "link", "set", "cable", "down")
            if is_frozen:
                processes[2].send_signal(signal.SIGSTOP)
            begin = time.monotonic()
            codes = [await asyncio.to_thread(process.wait, 30) for process in processes[:2]]
            processes[2].send_signal(signal.SIGCONT)
            codes.append(await asyncio.to_thread(processes[2].wait, 30))
            took_s = time.monotonic() - begin
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert codes == [0, 3, 3]
    assert 8 < took_s < 25
    sentence = outputs[0].read_text().splitlines()[-1]
    assert sentence.startswith(f"rank 1 on {socket.gethostname()} cannot be reached: ")
    assert outputs[1].read_text().splitlines()[-1] == f"error: rank 0: {sentence}"
    assert outputs[2].read_text().splitlines()[-1].startswith("error: rank 1: lost its supervisor: ")


SUPERVISOR = """
import asyncio, sys
from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.engine.process import Patience
from deskfleet.engine.remote_ranks import RemoteRanks
from deskfleet.model.checkpoint import Checkpoint

async def main():
    starter = RemoteRanks(host="127.0.0.1", port=int(sys.argv[2]), launch_id=sys.argv[3], token=sys.argv[4],
                          meeting_point=("127.0.0.1", int(sys.argv[5])), patience=Patience(rank_ends_s=4.0))
    options = EngineOptions(tp_size=2, threads_per_rank=1)
    async with EngineClient(Checkpoint.open(sys.argv[1]), options, starter=starter) as engine:
        print("ready", flush=True)
        await asyncio.sleep(100)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "its supervisor closed the connection"),
        (signal.SIGSTOP, "lost its supervisor: it has been silent for 4 s"),
    ],
)
async def test_ranks_do_not_outlive_their_supervisor(
    ranks: Ranks, number: signal.Signals, reason: str
) -> None:
    port = free_port()
    words = [str(MODEL), str(port), LAUNCH, TOKEN, str(free_port())]
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR, *words], stdout=subprocess.PIPE) as supervisor:
        try:
            for rank in (0, 1):
                ranks.start(port, rank)
            assert supervisor.stdout is not None
            assert await asyncio.to_thread(supervisor.stdout.readline) == b"ready\n"
            supervisor.send_signal(number)
            ends = [await ranks.end_of(rank) for rank in (0, 1)]
        finally:
            supervisor.kill()
    # Whichever notices first ends, which the other one may notice as the loss of a peer.
    assert [code for code, _ in ends] == [3, 3]
    assert f"error: rank 0: {reason}" in {line for _, line in ends} or f"error: rank 1: {reason}" in {
        line for _, line in ends
    }
