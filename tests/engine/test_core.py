"""The core's step without processes: what one request's numbers may do to another, and who is told what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deskfleet.endpoint import SamplingParams
from deskfleet.engine.batch import Segment
from deskfleet.engine.core import CoreOptions, EngineCore
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.messages import AddRequest, Cancel, RequestOutput
from deskfleet.engine.runner import ModelRunner
from deskfleet.engine.tables import TableUpdate
from deskfleet.engine.wanted import Choice, Outcome, outcome_of
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.limits import RunnerLimits
from tests.engine.engines import greedy, random_ids
from tests.engine.golden import checkpoint, plain_limits, token_map
from tests.engine.sampling import sample

VOCAB = 8


def adding(name: str, ids: Sequence[int], sampling: SamplingParams, *, score: bool = False) -> AddRequest:
    return AddRequest(name, tuple(ids), bytes(len(ids)), (), sampling, score)


def run(core: EngineCore) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left; outputs by request."""
    outputs: dict[str, list[RequestOutput]] = {}
    while core.has_work:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


@dataclass
class CountingRunner:
    """Stands in for a model of 8 tokens: the next token is the last one plus one. `broken` tokens give NaN rows."""

    broken: frozenset[int] = frozenset()
    limits: RunnerLimits = field(default_factory=lambda: plain_limits(4, 32))
    config: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            eos_token_id=7, engram_max_ngram_size=4, sliding_window=16, num_hidden_layers=2, vocab_size=VOCAB
        )
    )
    num_rows: list[int] = field(default_factory=list)
    num_chosen: int = 0  # rows of which a token was wanted, not logits

    def lead(
        self,
        segments: Sequence[Segment],
        logit_rows: Sequence[int],
        image_rows: torch.Tensor | None = None,
        updates: Sequence[TableUpdate] = (),
        choices: Sequence[Choice] = (),
    ) -> Outcome:
        wanted = [*logit_rows, *(choice.row for choice in choices)]
        self.num_chosen += len(choices)
        rows = np.concatenate([segment.token_ids for segment in segments])
        self.num_rows.append(len(rows))
        logits = torch.zeros(len(wanted), VOCAB)
        for place, row in enumerate(wanted):
            logits[place, (int(rows[row]) + 1) % VOCAB] = 5.0
            if int(rows[row]) in self.broken:
                logits[place, 2:4] = torch.tensor([float("nan"), float("inf")])
        return outcome_of(logits, choices)


def core_of(runner: CountingRunner, *, max_num_batched_tokens: int = 64) -> EngineCore:
    return EngineCore(runner, np.arange(VOCAB), CoreOptions(max_num_batched_tokens=max_num_batched_tokens))  # type: ignore[arg-type]


def test_a_request_with_bad_logits_fails_alone_and_is_never_sampled() -> None:
    core = core_of(CountingRunner(broken=frozenset({3})))
    core.add(adding("good", [0], greedy(6)))
    core.add(adding("bad", [1, 1, 1], greedy(6)))  # 2, then 3, and there it breaks: at position 4
    core.add(adding("also good", [5], greedy(2)))
    outputs = run(core)
    assert [output.token_ids for output in outputs["bad"]] == [(2,), (3,), ()]
    assert outputs["bad"][-1].error == "2 logits of this request are not finite at position 4"
    assert [i for output in outputs["also good"] for i in output.token_ids] == [6, 7]
    # The other one runs into the same token by itself: it is told of its own position.
    assert outputs["good"][-1].error == "2 logits of this request are not finite at position 3"
    assert core.stats.num_finished == 3
    assert core.stats.num_generated_tokens == 2 + 2 + 3


def test_bad_logits_of_a_scored_prompt_are_refused_too() -> None:
    core = core_of(CountingRunner(broken=frozenset({3})))
    core.add(adding("score", [1, 2, 3, 4], SamplingParams(), score=True))
    (output,) = run(core)["score"]
    assert output.error == "2 logits of this request are not finite at position 3"
    assert output.logits is None


def test_draws_depend_on_the_place_in_the_output_alone() -> None:
    params = SamplingParams(temperature=3.0, seed=5, max_tokens=12, ignore_eos=True)
    core = core_of(CountingRunner(), max_num_batched_tokens=3)
    for number in range(3):  # admitted in different steps, since one prompt fills a step
        core.add(adding(str(number), [0, 0, 0], params))
    outputs = run(core)
    expected: list[int] = []
    for place in range(12):
        logits = np.zeros(VOCAB, np.float32)
        logits[((expected or [0])[-1] + 1) % VOCAB] = 5.0
        expected.append(sample(logits, params, seed=5, place=place))
    assert len(set(expected)) > 3
    for number in range(3):
        assert [i for output in outputs[str(number)] for i in output.token_ids] == expected


@pytest.mark.parametrize(
    ("params", "num_chosen"),
    [
        (SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), 4),
        (SamplingParams(temperature=0.7, top_p=0.9, max_tokens=4, ignore_eos=True), 4),
        (
            SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, thinking_budget=2),
            4,
        ),  # of no thoughts
        (SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1), 4),
        (SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0), 0),
        (SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, presence_penalty=0.1), 0),
        (SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias=((3, 0.1),)), 0),
    ],
)
def test_who_needs_logits_gets_them(params: SamplingParams, num_chosen: int) -> None:
    """Of the others tokens come alone; beside one that needs its logits, with them, and for each the same answer."""
    runner = CountingRunner()
    core = core_of(runner)
    core.add(adding("one", [0, 1], params))
    core.add(adding("other", [2], replace(greedy(3), logprobs=2)))
    outputs = run(core)
    assert runner.num_chosen == num_chosen
    assert [i for output in outputs["one"] for i in output.token_ids] == [2, 3, 4, 5]
    assert [p.token_id for output in outputs["other"] for p in output.logprobs or ()] == [3, 4, 5]


def test_cancelling_takes_effect_before_the_next_step() -> None:
    runner = CountingRunner()
    core = core_of(runner)
    core.add(adding("a", [0], greedy(30)))
    core.add(adding("b", [1], greedy(30)))
    core.step()
    core.cancel(Cancel("a"))
    core.cancel(Cancel("a"))
    core.cancel(Cancel("never heard of"))
    core.step()
    assert runner.num_rows == [2, 1]
    assert (core.stats.num_cancelled, core.stats.num_finished, core.stats.num_running) == (1, 0, 1)
    core.cancel(Cancel("b", is_satisfied=True))
    assert (core.stats.num_cancelled, core.stats.num_finished, core.stats.num_running) == (1, 1, 0)
    assert not core.has_work


def test_every_end_has_its_reason() -> None:
    core = core_of(CountingRunner())
    core.add(adding("eos", [5], SamplingParams(temperature=0, max_tokens=9)))
    core.add(adding("eos ignored", [5], greedy(4)))
    core.add(adding("stop id", [0], SamplingParams(temperature=0, max_tokens=9, stop_token_ids=(2, 3))))
    core.add(adding("context", [0] * 30, greedy(9)))
    outputs = run(core)
    found = {
        name: ([i for output in each for i in output.token_ids], each[-1].finish_reason)
        for name, each in outputs.items()
    }
    assert found == {
        "eos": ([6, 7], "stop"),
        "eos ignored": ([6, 7, 0, 1], "length"),
        "stop id": ([1, 2], "stop"),
        "context": ([1, 2], "length"),  # 30 + 2 = max_model_len
    }


def test_streams_get_a_token_in_every_step_whatever_prompts_arrive() -> None:
    runner = CountingRunner(limits=plain_limits(4, 64))
    core = core_of(runner, max_num_batched_tokens=4)
    core.add(adding("stream", [0], greedy(12)))
    core.step()
    for number, name in enumerate(("x", "y", "z"), 1):
        core.add(adding(name, [number] * 20, greedy(2)))
    for _ in range(11):
        assert "stream" in {output.request_id for output in core.step()}
    assert max(runner.num_rows) <= 4
    assert set(run(core)) >= {"y", "z"}


@pytest.mark.parametrize("budget", [1, 3, 64])
def test_a_small_budget_bounds_rows_and_starves_nobody(budget: int) -> None:
    runner = CountingRunner()
    core = core_of(runner, max_num_batched_tokens=budget)
    for number in range(6):
        core.add(adding(str(number), [number] * (number + 1), greedy(16)))
    tokens: dict[str, list[int]] = {str(number): [] for number in range(6)}
    while core.has_work:
        decoding = {r.request_id for r in core.scheduler.running if r.output_token_ids}
        outputs = core.step()
        assert decoding <= {output.request_id for output in outputs}, "a stream stood still"
        for output in outputs:
            tokens[output.request_id] += output.token_ids
    assert max(runner.num_rows) <= budget
    for number in range(6):
        assert tokens[str(number)] == [(number + 1 + k) % VOCAB for k in range(16)]


# --- the real model


@pytest.fixture
def real_core() -> EngineCore:
    runner = ModelRunner(
        checkpoint(),
        ShardPlan(checkpoint().config, Layout(1)),
        Communicator(),
        plain_limits(3, 64),
        pad_compressed_id=int(token_map()[checkpoint().config.engram_pad_token_id]),
    )
    with torch.inference_mode():
        runner.model.vocabulary.embedding[77] = float("nan")
    return EngineCore(runner, token_map(), CoreOptions(max_num_batched_tokens=64))


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [i for output in outputs for i in output.token_ids]


def test_a_nan_inside_the_model_stays_in_its_request(real_core: EngineCore) -> None:
    """Neither the requests of the same step nor those that take the slot later may see the other's NaN."""
    good, poisonous = random_ids(10, seed=1), (5, 77, 6, 7)
    assert 77 not in good
    real_core.add(adding("before", good, greedy(4)))
    expected = tokens_of(run(real_core)["before"])
    real_core.add(
        adding("poisonous", poisonous, greedy(4))
    )  # takes the first slot: the first rows of every pool
    real_core.add(adding("beside", good, greedy(4)))
    outputs = run(real_core)
    assert outputs["poisonous"][0].error == "512 logits of this request are not finite at position 3"
    assert tokens_of(outputs["beside"]) == expected, outputs["beside"][0].error
    real_core.add(adding("after", good, greedy(4)))
    outputs = run(real_core)
    assert tokens_of(outputs["after"]) == expected, outputs["after"][0].error
