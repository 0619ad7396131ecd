"""Ranks that add up what each has: the same tokens as one rank, on GPUs and, with processes of their own, without any.

Without a GPU, ranks are real processes whose kernels run in Triton's interpreter. On one GPU a group of one shows that
every exchange can be captured and changes nothing; what two GPUs do is tested where there are two (decision 0023).
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes
from torch import Tensor

pytest.importorskip("tokenizers", reason="an engine opens checkpoints (tools/triton_env.sh)")
pytest.importorskip("safetensors", reason="the golden data are such files (tools/triton_env.sh)")
pytest.importorskip(
    "deskfleet_engram", reason="an engine reads Engram rows (PYTHONPATH of make test-kernels)"
)

from deskfleet.endpoint import SamplingParams
from deskfleet.engine.cuda import collectives, sums
from deskfleet.engine.cuda.collectives import DeviceGroup, HostGroup
from deskfleet.engine.cuda.loader import ModelWeights, load_model
from deskfleet.engine.cuda.step import DecodeStep, Pages, make_pages
from deskfleet.engine.distributed import Communicator, GlooCommunicator
from deskfleet.engine.llm import LLM
from deskfleet.engine.weights import ShardReader
from deskfleet.errors import RankDied
from deskfleet.model.embedded import POCKET, locate
from deskfleet.model.layout import Layout, ShardPlan
from tests.engine.golden import ROOT, checkpoint
from tests.gpu.conftest import HAS_GPU

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore")]
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="exchanges of devices")
needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs: nothing else shows what two do (decision 0023)"
)
interpreted = pytest.mark.skipif(
    HAS_GPU, reason="ranks of one GPU each: the tests of two GPUs do the same there"
)

MODEL = ROOT / "model"
ANSWERS = Path(__file__).with_name("pocket_answers.json")
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.mark.parametrize("form", ["parts", "pairs", "one"])
def test_what_a_rank_has_is_added_in_order(device: torch.device, form: str) -> None:
    """Split sums, pairs of a row and an expert, and a single part; to the bit, and a width that fills no block."""
    generator = torch.Generator().manual_seed(1)
    rows, width = 5, 1152
    shape = {"parts": (3, rows, width), "pairs": (rows * 4, width), "one": (rows, width)}[form]
    output = torch.randn(shape, generator=generator)
    if form != "parts":
        output = output.to(torch.bfloat16)
    parts = output if form == "parts" else output.float().view(rows, -1, width).transpose(0, 1)
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    out = torch.full((rows, width), torch.nan, device=device)
    sums.add_up(output.to(device), out, parts=4 if form == "pairs" else 1)
    assert torch.equal(out.cpu(), expected)


# --- a group of one, which changes nothing


class Small:
    """A few layers of the golden model with both kinds of sources, over empty pages."""

    def __init__(self, device: torch.device, bit_ops: bool) -> None:
        source = checkpoint()
        with ShardReader(source, ShardPlan(source.config, Layout(1)), 0) as reader:
            self.weights: ModelWeights = load_model(reader, device)
        self.device, self.bit_ops = device, bit_ops

    def step(self, group: DeviceGroup | None) -> DecodeStep:
        w, config = self.weights, self.weights.shape.config
        pages: Pages = make_pages(config, num_slots=2, max_model_len=64, block_size=16, device=self.device)
        step = DecodeStep(
            w.shape, [w.layers[number] for number in (1, 2)], w.embedding, w.head, w.norm, pages, num_rows=3,
            device=self.device, bit_ops=self.bit_ops, group=group,
        )  # fmt: skip
        for codes, scales in step.host_rows.values():
            codes.fill_(0x31)
            scales.zero_()
            scales[:, : config.engram_width // 32] = 120
        step.ids.copy_(torch.tensor([17, 200, 5]))
        step.positions.copy_(torch.tensor([1, 0, 1]))
        step.slots.copy_(torch.tensor([1, 0, 0]))
        return step


@pytest.fixture(scope="module")
def small(device: torch.device, bit_ops: bool) -> Small:
    return Small(device, bit_ops)


@pytest.fixture(scope="module")
def alone(small: Small) -> tuple[Tensor, Tensor]:
    """Logits and stream of a step without a group."""
    step = small.step(None)
    step.run()
    return step.vocabulary_logits.cpu(), step.streams.stream.cpu()


def outcome(small: Small, group: DeviceGroup) -> tuple[Tensor, Tensor]:
    """The same of a step whose group has one rank; on a GPU of a replayed graph."""
    group.reserve(3 * small.weights.shape.config.hidden_size)
    step = small.step(group)
    step.run()
    if HAS_GPU:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step.run()
        step.vocabulary_logits.zero_()
        graph.replay()
        torch.cuda.synchronize()
    return step.vocabulary_logits.cpu(), step.streams.stream.cpu()


def test_a_group_of_one_gives_the_bits_of_none(small: Small, alone: tuple[Tensor, Tensor]) -> None:
    """Sums in one buffer are added and rounded where `mix` adds and rounds the parts itself."""
    found = outcome(small, HostGroup(Communicator(), small.device))
    assert torch.equal(found[1], alone[1])
    assert torch.equal(found[0], alone[0])
    assert bool(torch.isfinite(alone[0]).all())


@needs_gpu
@pytest.mark.parametrize("kind", ["NCCL", "symmetric"])
def test_exchanges_of_devices_are_captured(kind: str, small: Small, alone: tuple[Tensor, Tensor]) -> None:
    """One rank through NCCL, and through memory that it maps from itself, in a graph."""
    assert not torch.distributed.is_initialized()
    world = collectives.join(0, 1, None)
    try:
        group: DeviceGroup
        if kind == "NCCL":
            group = collectives.NcclGroup(world, small.device, "for a test")
        else:
            group = collectives.SymmetricGroup(world, small.device)
        found = outcome(small, group)
        assert torch.equal(found[1], alone[1])
        assert torch.equal(found[0], alone[0])
        for num_bytes in (1 << 10, 160 << 10, 1 << 20, 4 << 20, 8 << 20):
            tensor = torch.randn(num_bytes // 4, device=small.device)
            expected = tensor.clone()
            group.all_reduce(tensor)
            assert torch.equal(tensor, expected)
    finally:
        torch.distributed.destroy_process_group()


# --- two ranks


@contextmanager
def two_ranks(model: Path, device: Any, **options: Any) -> Iterator[LLM]:
    with LLM(model, tp_size=2, device=device, threads_per_rank=1, **options) as llm:
        yield llm


def prompt(length: int, seed: int) -> list[int]:
    """Ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(5, 500, (length,), generator=generator).tolist()
    return ids


# After these, and after their first answer, no two tokens are nearly even: on the CPU the best is half a standard
# deviation of its logits ahead, four times as far as a step of the interpreter may be from that (test_engine.py).
LONG, SHORT = prompt(20, seed=37), prompt(3, seed=12)
AGAIN = [*LONG[:18], 47]


@interpreted
def test_two_interpreted_ranks_answer_as_one() -> None:
    """Processes of their own: requests side by side, a prompt in two pieces, and one whose prefix is found again."""
    options: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64}
    asked = [([LONG, SHORT], GREEDY), ([AGAIN], replace(GREEDY, max_tokens=1))]
    with LLM(MODEL, threads_per_rank=1, **options) as llm:
        expected = [[c.token_ids for c in llm.generate(*some)] for some in asked]
    with two_ranks(MODEL, "interpreter", **options) as llm:
        assert "; GPUs: host" in llm._client.ranks[1].collectives
        found = [[c.token_ids for c in llm.generate(*some)] for some in asked]
        stats = llm._call(llm._client.stats())
    assert found == expected
    assert stats.num_prefix_hits >= 16


@interpreted
def test_two_interpreted_ranks_draft_alike() -> None:
    """A block of drafts is made over both ranks, and verified."""
    options: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 64}
    greedy = replace(GREEDY, max_tokens=4)
    with LLM(MODEL, threads_per_rank=1, speculation="k=2", **options) as llm:
        expected = llm.generate([SHORT], greedy)[0].token_ids
        accepted = llm._call(llm._client.stats()).num_accepted
    with two_ranks(MODEL, "interpreter", speculation="k=2", **options) as llm:
        assert llm.generate([SHORT], greedy)[0].token_ids == expected
        stats = llm._call(llm._client.stats())
    assert stats.num_drafted > 0
    assert stats.num_accepted == accepted


@interpreted
def test_a_dead_rank_ends_interpreted_ones() -> None:
    """In the middle of a step, which hears of no timeout."""
    with two_ranks(MODEL, "interpreter", max_num_seqs=1, max_model_len=64) as llm:
        assert_ends_with_its_rank(llm)


def assert_ends_with_its_rank(llm: LLM) -> None:
    """Stop rank 1, so that its peer waits for it in the middle of a step, and kill it: whoever waits is told, and no
    process is left."""
    pids = [rank.pid for rank in llm._client.ranks]
    os.kill(pids[1], signal.SIGSTOP)
    threading.Timer(2.0, os.kill, (pids[1], signal.SIGKILL)).start()
    with pytest.raises(RankDied, match="rank 1 was killed by SIGKILL"):
        llm.generate([SHORT], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# --- two GPUs


def _on_two(rank: int, rendezvous: str, work: Callable[[DeviceGroup, torch.device], None]) -> None:
    comm = GlooCommunicator.join(rank, 2, rendezvous)
    device, group = collectives.meet(comm, None)
    work(group, device)
    group.leave()
    comm.leave()


def _add_up(group: DeviceGroup, device: torch.device) -> None:
    """Sums of every size, eager and replayed, are those of the terms, and the same bits on both ranks."""
    reaches = torch.cuda.can_device_access_peer(0, 1) and "NCCL_P2P_DISABLE" not in os.environ
    assert str(group).startswith("symmetric memory" if reaches else "NCCL")
    group.reserve(3 << 20)
    for num_bytes in (16, 10_240, 160 << 10, (160 << 10) + 16, 655_360, 4 << 20, (4 << 20) + 16, 12 << 20):
        terms = [
            torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(number)) for number in (0, 1)
        ]
        expected = terms[0] + terms[1]
        place, own = group.memory[: num_bytes // 4], terms[group.rank].to(device)

        def launch(place: Tensor = place, own: Tensor = own) -> None:
            place.copy_(own)
            group.all_reduce(place)

        launch()
        assert torch.equal(place.cpu(), expected), f"{num_bytes} bytes, {group}"
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(3):
                launch()
        for _ in range(5):
            place.zero_()
            graph.replay()
            assert torch.equal(place.cpu(), expected), f"{num_bytes} bytes in a graph, {group}"
        del graph
    out = torch.zeros(2, 3, 500, device=device)
    group.all_gather(torch.full((3, 500), float(group.rank + 1), device=device), out)
    assert out.mean((1, 2)).tolist() == [1.0, 2.0]


@needs_two
@pytest.mark.parametrize("kind", ["symmetric memory", "NCCL"])
def test_two_devices_add_up(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "NCCL":
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    processes.spawn(_on_two, (f"file://{tmp_path}/meet", _add_up), nprocs=2)


@needs_two
@pytest.mark.parametrize("graphs", [True, False])
def test_two_gpus_answer_as_the_cpu(graphs: bool) -> None:
    """Pocket's questions, eight at a time, as users start it."""
    asked = json.loads(ANSWERS.read_text())
    sampling = [
        SamplingParams(temperature=0, max_tokens=q["max_tokens"], stop_token_ids=tuple(q["stop_token_ids"]))
        for q in asked
    ]
    with two_ranks(locate(POCKET), "cuda", max_num_seqs=8, graphs=graphs) as llm:
        assert {rank.collectives.partition("; GPUs: ")[2] for rank in llm._client.ranks} != {""}
        answers = llm.generate([q["prompt"] for q in asked], sampling)
    differ = [
        n for n, (a, q) in enumerate(zip(answers, asked, strict=True)) if list(a.token_ids) != q["answer"]
    ]
    assert not differ, f"{len(differ)} of {len(asked)} answers differ: {differ}"


@needs_two
@pytest.mark.parametrize("graphs", [True, False])
def test_a_dead_rank_ends_those_that_wait_for_it_on_a_gpu(graphs: bool) -> None:
    with two_ranks(locate(POCKET), "cuda", max_num_seqs=1, graphs=graphs) as llm:
        llm.generate([SHORT], GREEDY)  # compiled and captured
        assert_ends_with_its_rank(llm)
