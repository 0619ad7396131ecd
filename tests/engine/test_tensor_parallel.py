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
from deskfleet.engine import weights
from deskfleet.engine.core import EngineCore
from deskfleet.engine.llm import LLM
from deskfleet.engine.messages import AddRequest
from deskfleet.engine.runner import RunnerLimits
from deskfleet.engine.weights import Allocate
from deskfleet.model.layout import Layout, ShardPlan
from tests.engine.engines import MODEL, greedy, random_ids
from tests.engine.golden import checkpoint, token_map
from tests.engine.lockstep import Lockstep, has_nan, poisoned, tensors_of

# Around every edge: the n-gram size, the window (16), index_topk (8 entries), candidate blocks; the longest select.
LENGTHS = (1, 2, 3, 4, 9, 15, 16, 17, 18, 24, 31, 32, 33, 48, 64, 65, 90, 130, 161, 210)
PROMPTS = [random_ids(length, seed=100 + length) for length in LENGTHS]
SCORED = random_ids(190, seed=1)
ANSWER = greedy(8)


@pytest.fixture(scope="module")
def one_rank(llm: LLM) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Tokens and logits of a single rank."""
    return [c.token_ids for c in llm.generate(PROMPTS, ANSWER)], llm.score(SCORED)


@pytest.fixture(scope="module", params=[2, 3, 4, 5])
def ranks(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A group of real processes; of five ranks, the last has no output group and no expert."""
    with LLM(MODEL, tp_size=request.param, threads_per_rank=1) as running:
        yield running


def test_tokens_and_logits_do_not_depend_on_the_number_of_ranks(
    ranks: LLM, one_rank: tuple[list[tuple[int, ...]], np.ndarray]
) -> None:
    tokens, logits = one_rank
    assert len(tokens) == 20
    found = ranks.score(SCORED)
    difference = float(np.abs(found.astype(np.float64) - logits).max())
    print(f"tp {ranks._client.options.tp_size}: largest logit difference {difference}")
    assert found.tobytes() == logits.tobytes(), f"largest logit difference {difference}"
    assert [c.token_ids for c in ranks.generate(PROMPTS, ANSWER)] == tokens


# --- padding


def drive(
    tp_size: int, allocate: Allocate | None = None
) -> tuple[np.ndarray, list[tuple[int, ...]], list[str]]:
    """Score a long prompt and decode a short one on ranks in threads: logits, tokens, what was not finite."""
    group = Lockstep(
        checkpoint(),
        tp_size,
        RunnerLimits(max_num_seqs=2, max_model_len=256),
        pad_compressed_id=int(token_map()[checkpoint().config.engram_pad_token_id]),
        allocate=allocate,
    )
    for rank, runner in enumerate(group.runners):
        for path, tensor in tensors_of(runner):
            if tensor.is_floating_point() and (
                has_nan(tensor) or not bool(tensor.abs().to(float).max() < torch.inf)
            ):
                group.not_finite.append(f"rank {rank}: weight {path}")
    with group:
        core = EngineCore(group.leader, token_map(), max_num_batched_tokens=64)
        core.add(AddRequest("score", SCORED, bytes(len(SCORED)), (), SamplingParams(), score=True))
        core.add(AddRequest("decode", SCORED[:20], bytes(20), (), greedy(4)))
        logits, tokens = [], []
        while core.has_work:
            for output in core.step():
                if output.logits is not None:
                    logits.append(np.frombuffer(output.logits, np.float32))
                assert output.error is None
                tokens.append(output.token_ids)
    return np.concatenate(logits), tokens, group.not_finite


@pytest.fixture(scope="module")
def clean() -> tuple[np.ndarray, list[tuple[int, ...]], list[str]]:
    return drive(1)


def test_three_ranks_need_padding() -> None:
    plan = ShardPlan(checkpoint().config, Layout(3))
    assert plan.groups_per_rank * 3 > checkpoint().config.o_groups
    assert plan.padding_bytes(2) > 0
    for name in (
        "attn.wq_b.weight",
        "attn.wq_b.scale",
        "attn.wo_a.weight",
        "attn.wo_b.weight",
        "attn.attn_sink",
    ):
        assert plan.shard(f"layers.3.{name}", 2).num_padding > 0
    assert plan.shard("embed.weight", 2).num_padding > 0


@pytest.mark.parametrize("tp_size", [3, 9])
def test_poisoned_padding_reaches_nothing(
    tp_size: int, clean: tuple[np.ndarray, list[tuple[int, ...]], list[str]]
) -> None:
    """No tensor, no operator's result and nothing sent holds a NaN on any rank; with nine, one rank is all padding."""
    logits, tokens, not_finite = drive(tp_size, poisoned)
    assert not_finite == []
    assert tokens == clean[1]
    difference = float(np.abs(logits.astype(np.float64) - clean[0]).max())
    assert logits.tobytes() == clean[0].tobytes(), f"largest logit difference {difference}"


def test_padding_that_is_not_written_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch is awake: without the loader's zeros the same run reports every rank that has padding."""
    monkeypatch.setattr(weights, "_zero_padding", lambda local, shard: None)
    _, _, not_finite = drive_until_broken()
    assert any(entry.startswith("rank 2: weight") for entry in not_finite)
    assert any(entry.startswith("rank 2: sent") for entry in not_finite)
    assert not any(entry.startswith("rank 0: weight") for entry in not_finite)


def drive_until_broken() -> tuple[np.ndarray, list[tuple[int, ...]], list[str]]:
    """One step with poisoned ranks, whatever comes out of it."""
    group = Lockstep(
        checkpoint(),
        3,
        RunnerLimits(max_num_seqs=1, max_model_len=64),
        pad_compressed_id=int(token_map()[checkpoint().config.engram_pad_token_id]),
        allocate=poisoned,
    )
    for rank, runner in enumerate(group.runners):
        for path, tensor in tensors_of(runner):
            if tensor.is_floating_point() and has_nan(tensor):
                group.not_finite.append(f"rank {rank}: weight {path}")
    with group:
        core = EngineCore(group.leader, token_map(), max_num_batched_tokens=64)
        core.add(AddRequest("decode", SCORED[:20], bytes(20), (), greedy(1)))
        core.step()
    return np.zeros(0), [], group.not_finite
