"""Which GPU a rank takes, and how GPUs add up; everything of it that needs none. The rest: tests/gpu."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deskfleet.engine.cuda import collectives
from deskfleet.engine.cuda.collectives import HostGroup, Seen, check, place, way, why_not_symmetric
from deskfleet.engine.distributed import Communicator, GlooCommunicator
from deskfleet.errors import EngineError

FOUR = ("a", "b", "c", "d")


def seen(machine: str, devices: tuple[str, ...]) -> Seen:
    """Of one kind."""
    return Seen(machine, devices, ("H200",) * len(devices))


@pytest.mark.parametrize(
    ("ranks", "devices"),
    [
        ([("one", FOUR)] * 3, [0, 1, 2]),
        ([("one", FOUR), ("two", FOUR), ("one", FOUR)], [0, 0, 1]),  # ids of other machines mean nothing here
        ([("one", ("a",)), ("one", ("b",))], [0, 0]),
        ([("one", ("b", "a")), ("one", ("b", "c"))], [0, 1]),
    ],
    ids=["one machine", "two machines", "each its own", "overlapping"],
)
def test_every_rank_has_a_device_of_its_own(
    ranks: Sequence[tuple[str, tuple[str, ...]]], devices: list[int]
) -> None:
    assert place([seen(*rank) for rank in ranks]) == devices


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        ([("one", ("a", "b"))] * 3, "rank 2 has no GPU: its machine shows it 2, which ranks before it have"),
        (
            [("one", ("a",)), ("two", ())],
            "rank 1 has no GPU: its machine shows it 0\n",
        ),
    ],
)
def test_fewer_devices_than_ranks_are_said(
    ranks: Sequence[tuple[str, tuple[str, ...]]], sentence: str
) -> None:
    with pytest.raises(EngineError, match=sentence) as refused:
        place([seen(*rank) for rank in ranks])
    assert refused.value.hint is not None
    assert "--tp" in refused.value.hint


def test_devices_are_of_one_kind() -> None:
    with pytest.raises(EngineError, match="rank 1 has a B200, rank 0 a H200") as refused:
        place([Seen("one", ("a", "b"), ("H200", "B200"))] * 2)
    assert refused.value.hint is not None


def test_memory_is_mapped_within_one_machine_alone() -> None:
    same, other = seen("one", FOUR), seen("two", FOUR)
    assert why_not_symmetric([same, same]) is None
    assert why_not_symmetric([same, other]) == "its ranks are on several machines"
    assert why_not_symmetric([same, seen("one", ("b",))]) == "its ranks see different GPUs"


def test_the_way_of_a_sum_is_a_matter_of_its_size() -> None:
    assert [way(n) for n in (4, 160 << 10, (160 << 10) + 4, 4 << 20, (4 << 20) + 4)] == [
        "one-shot", "one-shot", "two-shot", "two-shot", "NCCL",
    ]  # fmt: skip


class Wrong(Communicator):
    """Two ranks whose sums are this rank's own."""

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        pass


def test_a_wrong_sum_is_seen_at_the_start() -> None:
    check(HostGroup(Communicator()), torch.empty(4))
    with pytest.raises(EngineError, match="2 ranks add up wrongly, 16 bytes by host"):
        check(HostGroup(Wrong(1, 2)), torch.empty(4))


# --- meeting, with devices that only seem to be there


def _meet(rank: int, rendezvous: str, visible: Sequence[str], results: Any) -> None:
    """What a rank does at the start, where gloo stands for NCCL and the host's memory for its GPU's."""
    comm = GlooCommunicator.join(rank, 2, rendezvous)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: len(visible))
        patch.setattr(
            torch.cuda, "get_device_properties", lambda n: SimpleNamespace(uuid=visible[n], name="H200")
        )
        patch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: False)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch, "device", lambda kind, index: f"cpu:{index}")
        patch.setattr(collectives, "join", lambda *given: torch.distributed.group.WORLD)
        try:
            device, group = collectives.meet(comm, None)
        except EngineError as error:
            results.put((rank, error.message))
            return
    group.reserve(8)
    own = group.memory.fill_(rank + 1.0)
    group.all_reduce(own)
    out = torch.zeros(2, 3, 2)
    group.all_gather(torch.full((3, 2), float(rank)), out)
    results.put((rank, str(group), str(device), own.tolist(), out.mean((1, 2)).tolist()))


@pytest.mark.parametrize(
    ("visible", "why"),
    [
        ((("a", "b"), ("a", "b")), "its GPUs do not reach each other's memory"),
        ((("a",), ("b",)), "its ranks see different GPUs"),
        ((("a",), ("a",)), None),
    ],
    ids=["one after the other", "each its own", "too few"],
)
def test_ranks_meet_on_their_devices(
    tmp_path: Path, visible: Sequence[Sequence[str]], why: str | None
) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_meet, args=(rank, f"file://{tmp_path}/meet", visible[rank], results))
        for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    found = sorted(results.get() for _ in ranks)
    for process in ranks:
        process.join()
    if why is None:
        assert {text for _, text in found} == {
            "rank 1 has no GPU: its machine shows it 1, which ranks before it have"
        }
        return
    assert [device for _, _, device, _, _ in found] == [
        "cpu:0",
        "cpu:1" if visible[0] == visible[1] else "cpu:0",
    ]
    for _, group, _, summed, gathered in found:
        assert group.startswith(f"NCCL (asked for symmetric memory, but {why}")
        assert summed == [3.0] * 8
        assert gathered == [0.0, 1.0]
