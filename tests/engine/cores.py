"""Cores over one loaded model, each with pools and policies of its own, driven by hand and without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deskfleet.endpoint import SamplingParams
from deskfleet.engine.core import CoreOptions, EngineCore
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.messages import AddRequest, RequestOutput
from deskfleet.engine.runner import ModelRunner
from deskfleet.engine.speculate import SpeculationOptions
from deskfleet.engine.wanted import Outcome, outcome_of
from deskfleet.model.layout import Layout, ShardPlan
from tests.engine.golden import checkpoint, plain_limits, token_map


def load_runner(*, num_slots: int = 16, max_model_len: int = 1024, block_size: int = 16) -> ModelRunner:
    """The golden checkpoint with drafts, in this process, with pages for every slot at full length."""
    return ModelRunner(
        checkpoint(),
        ShardPlan(checkpoint().config, Layout(1)),
        Communicator(),
        plain_limits(num_slots, max_model_len, block_size),
        pad_compressed_id=int(token_map()[checkpoint().config.engram_pad_token_id]),
        with_drafts=True,
    )


@dataclass
class Narrowed:
    """A runner with smaller limits: whatever is not named here is the runner's own."""

    runner: Any
    limits: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


def core_over(
    runner: Any, speculation: str = "off", *, limits: dict[str, int] | None = None, **options: Any
) -> EngineCore:
    """A new core, with nothing cached. `limits` replaces some of the runner's.

    Cores over one runner share its pages: a second one overwrites what the first has cached.
    """
    narrowed = Narrowed(runner, replace(runner.limits, **(limits or {})))
    parsed = SpeculationOptions.parse(speculation, runner.config.dspark_block_size)
    return EngineCore(narrowed, token_map(), CoreOptions(speculation=parsed, **options))  # type: ignore[arg-type]


def on_logits(lead: Callable[..., Outcome], change: Callable[..., Any]) -> Callable[..., Outcome]:
    """`lead` of a runner, whose rows go through `change(logits, segments, rows)` before anything is chosen of them."""

    def changed(
        segments: Any, logit_rows: Any, image_rows: Any = None, updates: Any = (), choices: Any = ()
    ) -> Outcome:
        rows = [*logit_rows, *(choice.row for choice in choices)]
        logits = lead(segments, rows, image_rows, updates).logits.clone()
        return outcome_of(change(logits, segments, rows), choices)

    return changed


def adding(name: str, ids: Sequence[int], sampling: SamplingParams, **more: Any) -> AddRequest:
    return AddRequest(name, tuple(ids), bytes(len(ids)), (), sampling, **more)


@dataclass
class Answer:
    """What a request has got so far."""

    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0


def collect(outputs: Iterable[RequestOutput], answers: dict[str, Answer]) -> None:
    """Add a step's outputs to the answers."""
    for output in outputs:
        answer = answers.setdefault(output.request_id, Answer([]))
        answer.token_ids += output.token_ids
        answer.finish_reason = output.finish_reason or answer.finish_reason
        answer.error = output.error or answer.error
        answer.num_cached_tokens = output.num_cached_tokens or answer.num_cached_tokens


def run_all(
    core: EngineCore, requests: Sequence[AddRequest], *, each_step: Callable[[EngineCore], None] | None = None
) -> dict[str, Answer]:
    """Add all requests at once and step until nothing is left."""
    answers: dict[str, Answer] = {}
    for request in requests:
        assert core.add(request) is None
    while core.has_work:
        collect(core.step(), answers)
        if each_step is not None:
            each_step(core)
    return answers


def run_alone(core: EngineCore, requests: Sequence[AddRequest]) -> dict[str, Answer]:
    """One request after another."""
    answers: dict[str, Answer] = {}
    for request in requests:
        answers |= run_all(core, [request])
    return answers


def assert_nothing_held(core: EngineCore) -> None:
    """Every block and slot is free again."""
    stats = core.stats
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_free_window_blocks == stats.num_window_blocks
