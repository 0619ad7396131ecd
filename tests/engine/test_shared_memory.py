"""Collectives through shared memory: against a plain oracle, under stress, and when a rank ends in the middle.

Real processes that share one file without a name, as ranks do. They are forked from a server that has imported torch
and nothing else has happened in.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

import deskfleet_ops
from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.engine.distributed import PeerLost
from deskfleet.engine.local_ranks import LocalRanks
from deskfleet.engine.shared_memory import SharedMemoryCommunicator
from deskfleet.engine.spec import RankPaths, Transport
from deskfleet.errors import EngineError
from tests.engine.engines import MODEL, greedy, random_ids, request, tokens_of
from tests.engine.golden import checkpoint

SLOT_BYTES = deskfleet_ops.GROUP_SLOT_BYTES
Work = Callable[[SharedMemoryCommunicator, multiprocessing.connection.Connection], Any]


class Member:
    """One process of a group."""

    def __init__(self, context: ForkServerContext, file: int, rank: int, size: int, work: Work) -> None:
        self.pipe, theirs = context.Pipe()
        place = f"/proc/{os.getpid()}/fd/{file}"
        self.process: ForkServerProcess = context.Process(
            target=_member, args=(place, rank, size, work, theirs)
        )
        self.process.start()
        theirs.close()

    def answer(self, within_s: float = 60.0) -> Any:
        """What its work returned, or its next word. Fails with its traceback."""
        assert self.pipe.poll(within_s), "it does not answer"
        what, value = self.pipe.recv()
        if what == "raised":
            pytest.fail(value)
        return value


def _member(
    place: str, rank: int, size: int, work: Work, pipe: multiprocessing.connection.Connection
) -> None:
    torch.set_num_threads(1)
    try:
        comm = SharedMemoryCommunicator.join(rank, size, os.open(place, os.O_RDWR))
        pipe.send(("joined", None))
        pipe.send(("done", work(comm, pipe)))
        comm.leave()
    except PeerLost as error:
        pipe.send(("lost", error.message))
        time.sleep(60)  # its own end would be noticed too
    except EngineError as error:
        pipe.send(("error", error.message))
    except (AssertionError, ValueError, TypeError, RuntimeError, OSError):
        pipe.send(("raised", traceback.format_exc()))


@pytest.fixture
def start() -> Iterator[Callable[[int, Work], list[Member]]]:
    """Start a group whose members all do the same, and wait until they have met."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["deskfleet.engine.shared_memory", "tests.engine.test_shared_memory"])
    members: list[Member] = []
    files: list[int] = []

    def begin(size: int, work: Work) -> list[Member]:
        files.append(os.memfd_create("test-ranks"))
        members.extend(Member(context, files[-1], rank, size, work) for rank in range(size))
        for member in members:
            member.answer()
        return members

    yield begin
    for member in members:
        member.process.kill()
        member.process.join()
        member.process.close()
        member.pipe.close()
    for file in files:
        assert inodes_mapped().isdisjoint({os.fstat(file).st_ino}), "a process still maps the memory"
        os.close(file)


def inodes_mapped(pid: int | str = "[0-9]*") -> set[int]:
    """The inodes of memory without a name that a process maps, or any."""
    found: set[int] = set()
    for maps in Path("/proc").glob(f"{pid}/maps"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.update(int(line.split()[4]) for line in maps.read_text().splitlines() if "/memfd:" in line)
    return found


# --- against an oracle

REDUCED = (torch.float64, torch.float32, torch.int32)
CARRIED = (*REDUCED, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn)


def contribution(chance: random.Random, dtype: torch.dtype, shape: tuple[int, ...], rank: int) -> Tensor:
    """Numbers of a rank: of every size, so that another order of addition would give another sum."""
    numbers = np.random.default_rng((chance.getrandbits(32), rank))
    if dtype.is_floating_point:
        values = numbers.normal(size=shape) * 10.0 ** numbers.integers(-9, 9, shape)
    else:
        values = numbers.integers(-(2**31), 2**31, shape)
    return torch.from_numpy(np.asarray(values)).to(dtype)


def a_shape(chance: random.Random, item_bytes: int) -> tuple[int, ...]:
    kind = chance.random()
    if kind < 0.2:  # around the edges of slots
        return (chance.choice((1, 1, 2)) * SLOT_BYTES // item_bytes + chance.randint(-2, 2),)
    if kind < 0.3:
        return (chance.randint(0, 3), 0)
    return tuple(chance.randint(1, 40) for _ in range(chance.randint(0, 3)))


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def random_rounds(
    comm: SharedMemoryCommunicator, pipe: object, *, count: int, part: int | None, seed: int
) -> int:
    """Every rank knows what all contribute, and what must come of it. Half the rounds are those of a division."""
    chance, own = random.Random(seed), random.Random(comm.rank)
    divided = comm if part is None else comm.split(part)
    for number in range(count):
        group, first = (comm, 0) if number % 2 else (divided, comm.rank - divided.rank)
        if own.random() < 0.2:
            time.sleep(own.random() * 0.002)
        name = chance.choice(("all_reduce", "all_gather", "broadcast", "broadcast_bytes"))
        dtype = chance.choice(REDUCED if name == "all_reduce" else CARRIED)
        shape = a_shape(chance, dtype.itemsize)
        state = chance.getrandbits(64)
        given = [contribution(random.Random(state), dtype, shape, first + rank) for rank in range(group.size)]
        what = f"round {number}: {name} of {dtype} {shape} in {group.size}"
        mine = given[group.rank].clone()
        if name == "all_reduce":
            expected = functools.reduce(torch.add, given)
            assert bits(group.all_reduce(mine)) == bits(expected) == bits(mine), what
        elif name == "all_gather":
            found = group.all_gather(mine.T if mine.ndim == 2 else mine)
            wanted = [part.T if part.ndim == 2 else part for part in given]
            assert [(p.shape, p.dtype) for p in found] == [(p.shape, p.dtype) for p in wanted], what
            assert [bits(p) for p in found] == [bits(p) for p in wanted], what
        elif name == "broadcast":
            assert bits(group.broadcast(mine)) == bits(given[0]), what
        else:
            payload = bits(given[0])
            assert group.broadcast_bytes(payload if group.rank == 0 else None) == payload, what
    return count


@pytest.mark.parametrize(("size", "part"), [(2, None), (3, None), (4, 2), (5, None)])
def test_every_collective_gives_what_it_should(
    start: Callable[[int, Work], list[Member]], size: int, part: int | None
) -> None:
    members = start(size, functools.partial(random_rounds, count=80, part=part, seed=size))
    assert [member.answer() for member in members] == [80] * size


def many_rounds(comm: SharedMemoryCommunicator, pipe: object, *, count: int) -> int:
    """Short ones, as decoding has them, with a rank late now and then and rank 0 ahead where it can be."""
    own = random.Random(comm.rank)
    for number in range(count):
        if own.random() < 0.01:
            time.sleep(own.random() * 0.001)
        if number % 5 == 0:
            told = comm.broadcast_bytes(b"%d" % number if comm.rank == 0 else None)
            assert told == b"%d" % number
        else:
            mine = torch.full((256,), float(number + comm.rank), dtype=torch.float64)
            expected = float(sum(number + rank for rank in range(comm.size)))
            assert torch.equal(comm.all_reduce(mine), torch.full((256,), expected, dtype=torch.float64)), (
                number
            )
    return count


def test_ten_thousand_rounds_of_ranks_that_are_late_at_random(
    start: Callable[[int, Work], list[Member]],
) -> None:
    members = start(4, functools.partial(many_rounds, count=10_000))
    assert [member.answer(within_s=120) for member in members] == [10_000] * 4


# --- ranks that end, freeze, or do something else


def for_ever(
    comm: SharedMemoryCommunicator, pipe: multiprocessing.connection.Connection, *, large: bool
) -> None:
    numbers = torch.zeros(SLOT_BYTES if large else 8, dtype=torch.float64)
    while True:
        comm.all_reduce(numbers)


def wait_for_rank_0(comm: SharedMemoryCommunicator, pipe: multiprocessing.connection.Connection) -> None:
    if comm.rank == 0:
        time.sleep(60)
    comm.broadcast_bytes(None)


@pytest.mark.parametrize(
    ("work", "victim"),
    [
        (functools.partial(for_ever, large=False), 2),
        (functools.partial(for_ever, large=True), 0),
        (wait_for_rank_0, 0),
    ],
)
def test_a_killed_rank_is_noticed(
    start: Callable[[int, Work], list[Member]], work: Work, victim: int
) -> None:
    members = start(3, work)
    time.sleep(0.3)
    # Nobody waits for it yet: the process is still in the kernel's list, as dead.
    os.kill(members[victim].process.pid or 0, signal.SIGKILL)
    for rank, member in enumerate(members):
        if rank != victim:
            sentence = member.answer(within_s=10)
            assert sentence == f"rank {victim} ended in the middle of what all do together"


def counted(comm: SharedMemoryCommunicator, pipe: multiprocessing.connection.Connection) -> None:
    """Say each result, so that the test sees where all are."""
    for number in range(10**6):
        mine = torch.full((4,), float(number), dtype=torch.float64)
        pipe.send(("sum", float(comm.all_reduce(mine)[0])))
        time.sleep(0.01)


def test_a_frozen_rank_is_waited_for(start: Callable[[int, Work], list[Member]]) -> None:
    members = start(2, counted)
    frozen = psutil.Process(members[1].process.pid)
    frozen.suspend()
    time.sleep(0.2)
    sums = []
    while members[0].pipe.poll(0):
        sums.append(members[0].answer())
    assert not members[0].pipe.poll(1.0), "who waits for a frozen rank goes on"
    frozen.resume()
    while len(sums) < 50:
        sums.append(members[0].answer(within_s=10))
    assert sums == [2.0 * number for number in range(len(sums))]


def out_of_step(comm: SharedMemoryCommunicator, pipe: multiprocessing.connection.Connection) -> None:
    comm.all_reduce(torch.zeros(8 if comm.rank == 1 else 4, dtype=torch.float64))
    time.sleep(0.5)  # the others have seen it by then


def test_ranks_that_exchange_different_things_are_told(start: Callable[[int, Work], list[Member]]) -> None:
    sentences = [member.answer() for member in start(3, out_of_step)]
    assert sentences[0] == "ranks are out of step: rank 1 and rank 0 exchange different things"
    assert sentences[1] == "ranks are out of step: rank 0 and rank 1 exchange different things"


def divide_twice(comm: SharedMemoryCommunicator, pipe: object) -> None:
    comm.split(2)
    comm.split(2)


def add_what_has_no_sum(comm: SharedMemoryCommunicator, pipe: object) -> None:
    comm.all_reduce(torch.zeros(4, dtype=torch.bfloat16))


def add_what_is_not_dense(comm: SharedMemoryCommunicator, pipe: object) -> None:
    comm.all_reduce(torch.zeros(4, 4, dtype=torch.float64).T[:, :2])


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (divide_twice, "room for one division"),
        (add_what_has_no_sum, "not torch.bfloat16"),
        (add_what_is_not_dense, "dense tensors"),
    ],
)
def test_what_cannot_be_exchanged_is_refused(
    start: Callable[[int, Work], list[Member]], work: Work, words: str
) -> None:
    assert all(words in member.answer() for member in start(4, work))


# --- an engine over it

TWO_RANKS = EngineOptions(tp_size=2, max_num_seqs=2, threads_per_rank=1)
PROMPT = random_ids(60, seed=3)


def engine_over(transport: Transport, **more: Any) -> EngineClient:
    starter = LocalRanks(RankPaths(str(MODEL)), transport)
    return EngineClient(checkpoint(), replace(TWO_RANKS, **more), starter=starter)


async def test_an_engine_says_how_its_ranks_exchange_and_gives_the_same_bits() -> None:
    found = {}
    for transport in ("shared memory", "gloo"):
        async with engine_over(transport, dcp_size=2) as engine:
            assert {(r.collectives_asked, r.collectives) for r in engine.receipts} == {(transport, transport)}
            assert engine.ranks[1].collectives.startswith(f"{transport} (")
            logits = await engine.score(PROMPT)
            found[transport] = logits.tobytes(), await tokens_of(engine, request(PROMPT, greedy(20)))
    assert found["shared memory"] == found["gloo"]


async def test_without_the_library_ranks_meet_over_gloo_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(deskfleet_ops.LIBRARY_VARIABLE, "/nowhere/libdeskfleet_ops.so")
    async with engine_over("shared memory") as engine:
        for receipt in engine.receipts:
            assert (receipt.collectives_asked, receipt.collectives) == ("shared memory", "gloo")
            assert "because /nowhere/libdeskfleet_ops.so: cannot be used" in receipt.collectives_detail
        assert len(await tokens_of(engine, request(PROMPT, greedy(2)))) == 2


async def test_nothing_is_left_of_the_memory_when_everybody_is_killed() -> None:
    """The supervisor's own end closes its descriptor, as `close` does; what ranks map goes with them."""
    async with engine_over("shared memory") as engine:
        held = inodes_mapped(engine.ranks[0].pid)
        assert len(held) == 1
        assert held == inodes_mapped(engine.ranks[1].pid), "the ranks share one memory"
        assert held <= inodes_open()
        for rank in engine.ranks:
            os.kill(rank.pid, signal.SIGKILL)
        await engine.wait_failed()
        assert inodes_mapped().isdisjoint(held)
    assert inodes_open().isdisjoint(held)


def inodes_open() -> set[int]:
    """The inodes of what this process has open."""
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.add(os.fstat(int(name)).st_ino)
    return found
