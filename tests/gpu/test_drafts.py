"""Drafts on a GPU against the drafts of the CPU: stages, context and chain alone, then whole requests.

As everywhere here, what is small enough runs in Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers", reason="an engine opens checkpoints (tools/triton_env.sh)")
pytest.importorskip("safetensors", reason="the golden data are such files (tools/triton_env.sh)")
pytest.importorskip(
    "deskfleet_engram", reason="an engine reads Engram rows (PYTHONPATH of make test-kernels)"
)

from deskfleet.endpoint import SamplingParams
from deskfleet.engine.core import CoreOptions, EngineCore
from deskfleet.engine.cuda import bench, synthetic
from deskfleet.engine.llm import LLM
from deskfleet.engine.messages import DraftRequest
from deskfleet.engine.runner import ModelRunner
from deskfleet.engine.speculate import Coins, SpeculationOptions, draft_choice
from deskfleet.model.embedded import POCKET, locate
from deskfleet.model.limits import RunnerLimits
from tests.engine.golden import relative_rms, token_map
from tests.gpu.conftest import HAS_GPU
from tests.gpu.test_engine import (
    BACKEND,
    LIMIT,
    Pair,
    answers_of,
    apart_from,
    asked,
    needs_gpu,
    pocket,
    pocket_core,
    run_all,
    runner_on,
    segment,
    tokens,
    tokens_list,
)
from tests.gpu.test_step import small_config

__all__ = ["asked"]  # a fixture

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore")]


def choices(requests: list[DraftRequest], logits: torch.Tensor) -> torch.Tensor:
    """What the CPU drafts from these logits [B, n, V]."""
    return torch.tensor([
        [
            draft_choice(row, r.temperature, coins=Coins(r.seed), place=r.place, index=index)
            for index, row in enumerate(block.cpu().numpy())
        ]
        for r, block in zip(requests, logits, strict=True)
    ])  # fmt: skip


@torch.inference_mode()
def test_every_stage_of_a_block(device: torch.device, bit_ops: bool) -> None:
    """Two blocks and their context, as the benchmark checks them; then the same with a request that samples, over more
    tokens than a program adds up the chances of."""
    config = replace(small_config(), vocab_size=10000, dspark_n_routed_experts=16)
    rank = bench.make_rank(config, 4, 1, num_slots=2, max_model_len=256, device=device, num_drafted=2)
    step, context, block = rank.verify(2, 130, device, bit_ops=bit_ops)
    step.taps.copy_(synthetic.normal(tuple(step.taps.shape), 1.0, 3, device))
    step._begin()
    block.anchors[1, 2] = 100  # of the second request, no window rows before
    errors = bench.check_drafts(context, block)
    assert {name.split(".")[1] for name in errors if name[0] == "5"} >= {
        "attention_in",
        "core",
        "route",
        "experts",
    }
    assert {"head", "drafts.logits", "drafts.confidence", "context.main", "context.2.entry"} <= set(errors)
    greedy = block.tokens.cpu().clone()
    requests = [DraftRequest(0, 0, 0, 0, 0.0, 1, 1), DraftRequest(0, 0, 0, 0, 0.7, 2, 9)]
    block.draws[1, 0] = 0.7
    block.draws[1, 1:] = torch.tensor([Coins(2).uniform("draft", 9, index) for index in range(5)])
    block.run(is_sampled=True)
    assert torch.equal(block.tokens[0].cpu(), greedy[0])
    expected = choices(requests, block.vocabulary_logits.unflatten(0, (2, -1)))
    assert torch.equal(block.tokens[:, 1:].cpu(), expected)
    assert not torch.equal(expected[1], greedy[1, 1:])
    assert not block.work.counters.any()
    assert not block.experts.counters.any()


class DraftPair(Pair):
    """A rank on the device beside one on the CPU, both with drafts."""

    def __init__(self) -> None:
        super().__init__(with_drafts=True, max_step_tokens=16)

    def propose(self, *requests: DraftRequest) -> None:
        """A block after each of some tokens. Logits as far apart as a step's may be, drafts those of the own logits."""
        expected, mine = (r.propose(list(requests)) for r in (self.cpu, self.device))
        assert torch.equal(mine.draft_token_ids, choices(list(requests), mine.logits))
        same = (mine.draft_token_ids == expected.draft_token_ids).cumprod(1)
        # The bias of a place is that of the draft before it: beyond another draft there is nothing to compare.
        known = torch.cat((torch.ones_like(same[:, :1]), same[:, :-1]), 1).bool()
        assert known.sum() > len(requests)
        error = relative_rms(mine.logits[known], expected.logits[known])
        assert error.max() <= LIMIT, error
        assert (mine.confidence - expected.confidence)[known].abs().max() <= 0.3


def test_verification_and_drafts() -> None:
    """Prompts, blocks after them, rows that verify drafts of which some are refused, and blocks after those."""
    pair = DraftPair()
    first, second = tokens(60, 1), tokens(60, 2)
    pair.run(segment(first, 0, 5), segment(second, 0, 6, slot=2))
    sampled = DraftRequest(0, 5, int(first[5]), 0, 1.0, 7, 1)
    pair.propose(sampled, DraftRequest(2, 6, int(second[6]), 0, 0.0, 8, 1))
    pair.run(segment(first, 5, 11), segment(second, 6, 8, slot=2))
    # Of the first request's drafts two are accepted: rows 8 to 10 come again, with other tokens.
    first[8:] = tokens(52, 3)
    pair.propose(DraftRequest(0, 8, int(first[8]), 0, 0.5, 7, 4))
    pair.run(segment(first, 8, 12))
    pair.propose(DraftRequest(0, 12, int(first[12]), 8, 1.0, 7, 8))


@pytest.fixture(scope="module")
def runners() -> Iterator[dict[str, ModelRunner]]:
    """A rank on the device and one on the CPU, with small blocks, so that a short prompt is found again."""
    limits = RunnerLimits(3, 64, 4, num_blocks=48, num_window_blocks=64)
    made = {name: runner_on(name, limits, with_drafts=True, max_step_tokens=16) for name in ("cpu", BACKEND)}
    yield made
    for runner in made.values():
        runner.close()


def core_over(runner: ModelRunner, speculation: str) -> EngineCore:
    options = SpeculationOptions.parse(speculation, runner.config.dspark_block_size)
    return EngineCore(runner, token_map(), CoreOptions(max_num_batched_tokens=16, speculation=options))


@pytest.mark.parametrize("k", [1, 3, 5] if HAS_GPU else [3])
def test_answers_are_those_without_speculation(runners: dict[str, ModelRunner], k: int) -> None:
    """Two requests at once, one of which stops at a token, then the first again, whose prefix is there: the CPU's
    answers without speculation, whatever is drafted."""
    length = 24 if HAS_GPU else 4
    prompts = [tokens_list(6, 41), tokens_list(5, 42)]
    sampling = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for _ in prompts]
    expected = run_all(core_over(runners["cpu"], "off"), prompts, sampling)
    stop = expected[1][length // 2]
    expected[1] = expected[1][: expected[1].index(stop) + 1]
    sampling[1] = replace(sampling[1], stop_token_ids=(stop,))
    core = core_over(runners[BACKEND], f"k={k}")
    assert run_all(core, prompts, sampling) == expected
    assert run_all(core, prompts[:1], [replace(sampling[0], max_tokens=2)]) == [expected[0][:2]]
    assert core.stats.num_drafted > 0
    assert core.cache.stats.num_global_hits > 0


@needs_gpu
@pytest.mark.parametrize("speculation", ["k=1", "k=3", "k=5", "k=5,cap=conf:0.3"])
def test_pocket_answers(asked: list[dict[str, Any]], speculation: str) -> None:
    """A trained checkpoint, whose drafts are accepted: the CPU's answers to its questions, eight at a time."""
    core, source, tokens = pocket_core(speculation=speculation)
    some = asked[1:49]
    apart = apart_from(source, tokens, answers_of(core, some), some)
    assert len(apart) <= 1, apart  # where two tokens are nearly even
    assert core.stats.num_accepted > core.stats.num_drafted // 4


@needs_gpu
def test_sampled_answers(runners: dict[str, ModelRunner]) -> None:
    """Sampled drafts: those of the CPU from the device's logits, at every place of an answer."""
    runner, seen = runners[BACKEND], []
    plain = runner.propose

    def propose(requests: Any) -> Any:
        proposal = plain(requests)
        seen.append(torch.equal(proposal.draft_token_ids, choices(list(requests), proposal.logits)))
        return proposal

    core = core_over(runner, "k=5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "propose", propose)
        sampling = SamplingParams(temperature=0.9, max_tokens=24, seed=5, ignore_eos=True)
        run_all(core, [tokens_list(6, 43), tokens_list(9, 44)], [sampling, sampling])
    assert len(seen) > 5
    assert all(seen)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_draft_alike(asked: list[dict[str, Any]]) -> None:
    """Each rank chooses by itself, from the logits of both: the CPU's answers, and drafts that are accepted."""
    some = asked[1:33]
    sampling = [
        SamplingParams(temperature=0, max_tokens=q["max_tokens"], stop_token_ids=tuple(q["stop_token_ids"]))
        for q in some
    ]
    with LLM(locate(POCKET), device="cuda", tp_size=2, max_num_seqs=8, speculation="k=5") as llm:
        answers = llm.generate([q["prompt"] for q in some], sampling)
        stats = llm._call(llm._client.stats())
    source, tokens = pocket()
    apart = apart_from(source, tokens, [list(a.token_ids) for a in answers], some)
    assert len(apart) <= 1, apart  # where two tokens are nearly even
    assert stats.num_accepted > stats.num_drafted // 4
