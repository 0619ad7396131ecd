"""Any number of ranks gives the same tokens and the same logits, to the bit.

Partial sums travel as float64 and are rounded once, so the stated tolerance between tensor-parallel sizes is zero.
Padding must not reach a result: with three ranks the last has two of its three output groups, and its buffers are
filled with NaN before they are written.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from deskfleet.endpoint import SamplingParams
from deskfleet.engine import ops, weights
from deskfleet.engine.core import CoreOptions, EngineCore
from deskfleet.engine.llm import LLM
from deskfleet.engine.messages import AddRequest
from deskfleet.engine.weights import Allocate
from deskfleet.model.layout import Layout, ShardPlan
from tests.engine.engines import MODEL, greedy, random_ids
from tests.engine.golden import checkpoint, measured, plain_limits, token_map
from tests.engine.lockstep import Lockstep, poisoned, tensors_of

# Around every edge: the n-gram size, the window (16), index_topk (8 entries), candidate blocks; the longest select.
LENGTHS = (1, 2, 3, 4, 9, 15, 16, 17, 18, 24, 31, 32, 33, 48, 64, 65, 90, 130, 161, 210)
PROMPTS = [random_ids(length, seed=100 + length) for length in LENGTHS]
SCORED = random_ids(170, seed=1)
ANSWER = greedy(5)


@pytest.fixture(scope="module")
def one_rank(llm: LLM) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Tokens and logits of a single rank."""
    return [c.token_ids for c in llm.generate(PROMPTS, ANSWER)], llm.score(SCORED)


# Every size is another group of processes to start; three ranks need padding, and threads show five ranks below.
@pytest.fixture(scope="module", params=[2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))])
def ranks(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A group of real processes; of five ranks, the last has no output group and no expert."""
    with LLM(MODEL, tp_size=request.param, max_num_seqs=len(PROMPTS), threads_per_rank=1) as running:
        yield running


def test_tokens_and_logits_do_not_depend_on_the_number_of_ranks(
    ranks: LLM, one_rank: tuple[list[tuple[int, ...]], np.ndarray]
) -> None:
    tokens, logits = one_rank
    assert len(tokens) == 20
    found = ranks.score(SCORED)
    difference = float(np.abs(found.astype(np.float64) - logits).max())
    measured.append(f"tp {ranks._client.options.tp_size}: largest logit difference {difference}")
    assert found.tobytes() == logits.tobytes(), f"largest logit difference {difference}"
    assert [c.token_ids for c in ranks.generate(PROMPTS, ANSWER)] == tokens


# --- padding


def group_of(tp_size: int, allocate: Allocate | None = None) -> Lockstep:
    """Ranks in threads; whatever is not finite in their weights and caches is already noted."""
    group = Lockstep(
        checkpoint(),
        tp_size,
        plain_limits(2, 256),
        pad_compressed_id=int(token_map()[checkpoint().config.engram_pad_token_id]),
        allocate=allocate,
    )
    for rank, runner in enumerate(group.runners):
        for path, tensor in tensors_of(runner):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                group.not_finite.append(f"rank {rank}: holds {path}")
    return group


def drive(group: Lockstep) -> tuple[bytes, list[int]]:
    """Score a prompt beside a short one that decodes, in two steps: watching every operator takes its time."""
    core = EngineCore(group.leader, token_map(), CoreOptions(max_num_batched_tokens=128))
    core.add(AddRequest("decode", SCORED[:20], bytes(20), (), greedy(2)))
    core.add(AddRequest("score", SCORED[:100], bytes(100), (), SamplingParams(), score=True))
    logits, tokens = b"", []
    with group:
        while core.has_work:
            for output in core.step():
                assert output.error is None
                logits += output.logits or b""
                tokens += output.token_ids
    return logits, tokens


@pytest.fixture(scope="module", params=["native", "reference"])
def operators(request: pytest.FixtureRequest) -> Iterator[str]:
    """Who computes. The watch sees what torch computes: with the reference operators, every step."""
    ops.select(request.param)
    yield request.param
    ops.select()


@pytest.fixture(scope="module")
def clean(operators: str) -> tuple[bytes, list[int]]:
    """What one rank gives in ordinary memory.

    It also meets every torch operator before several threads do: torch makes the objects that a watch sees at their
    first use, and not safely from two threads at once.
    """
    return drive(group_of(1))


def test_three_ranks_need_padding() -> None:
    plan = ShardPlan(checkpoint().config, Layout(3))
    assert plan.groups_per_rank * 3 > checkpoint().config.o_groups
    assert plan.padding_bytes(2) > 0
    names = ("attn.wq_b.weight", "attn.wq_b.scale", "attn.wo_a.weight", "attn.wo_b.weight", "attn.attn_sink")
    for name in (*(f"layers.3.{name}" for name in names), "embed.weight", "head.weight"):
        assert plan.shard(name, 2).num_padding > 0


@pytest.mark.parametrize("tp_size", [3, 5])
def test_poisoned_padding_reaches_nothing(tp_size: int, clean: tuple[bytes, list[int]]) -> None:
    """No tensor, no operator's result and nothing sent holds a NaN on any rank; of five, one is all padding."""
    group = group_of(tp_size, poisoned)
    logits, tokens = drive(group)
    assert group.not_finite == []
    assert (logits, tokens) == clean


@pytest.mark.usefixtures("clean")
def test_padding_left_unwritten_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch is awake: without the loader's zeros, the rank with padding is reported in every way."""
    monkeypatch.setattr(weights, "_zero_padding", lambda local, shard: None)
    group = group_of(3, poisoned)
    assert {entry.split(":")[0] for entry in group.not_finite} == {"rank 2"}
    core = EngineCore(group.leader, token_map(), CoreOptions(max_num_batched_tokens=64))
    core.add(AddRequest("decode", SCORED[:20], bytes(20), (), greedy(1)))
    with group:
        core.step()
    assert any(entry.startswith("rank 2: sent") for entry in group.not_finite)
    assert any(entry.startswith("rank 2: ") and entry.endswith("made a NaN") for entry in group.not_finite)
