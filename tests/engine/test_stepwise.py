"""One pass, single steps and any cutting into chunks give the same bits, for every prompt length up to 600."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from deskfleet.engine.core import EngineCore
from deskfleet.engine.model import indexer
from deskfleet.engine.runner import ModelRunner
from tests.engine.cores import adding, core_over, load_runner
from tests.engine.engines import greedy, random_ids

LENGTH = 600
IDS = random_ids(LENGTH, seed=77)


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    loaded = load_runner(num_slots=8)
    yield loaded
    loaded.close()


def score(core: EngineCore, length: int, name: str = "score") -> np.ndarray:
    """Logits float32 [length, V] of the first tokens."""
    core.add(adding(name, IDS[:length], greedy(1), score=True))
    rows = b""
    while core.has_work:
        for output in core.step():
            assert output.error is None
            rows += output.logits or b""
    return np.frombuffer(rows, np.float32).reshape(length, -1)


@pytest.fixture(scope="module")
def one_pass(runner: ModelRunner) -> np.ndarray:
    return score(core_over(runner, max_num_batched_tokens=LENGTH), LENGTH)


@pytest.mark.parametrize("length", [150, pytest.param(LENGTH, marks=pytest.mark.slow)])
def test_single_steps(runner: ModelRunner, one_pass: np.ndarray, length: int) -> None:
    core = core_over(runner, max_num_batched_tokens=1)
    assert score(core, length).tobytes() == one_pass[:length].tobytes()
    assert core.stats.num_steps == length


# Seeds 0 and 3 cut into chunks of one to three tokens: hundreds of steps.
@pytest.mark.parametrize(
    "seed", [1, 2, 4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 3, 5))]
)
def test_any_cutting_into_chunks(runner: ModelRunner, one_pass: np.ndarray, seed: int) -> None:
    random = np.random.default_rng(seed)
    core = core_over(runner)
    schedule = core.scheduler.schedule

    def cut(now_s: float):
        core.scheduler.max_num_batched_tokens = int(random.integers(1, (4, 40, 300)[seed % 3]))
        return schedule(now_s)

    core.scheduler.schedule = cut  # type: ignore[method-assign]
    assert score(core, LENGTH).tobytes() == one_pass.tobytes()
    assert core.stats.num_steps > 2


@pytest.mark.parametrize("scores", [1, 700, 5000])
def test_index_scores_of_a_few_rows_at_a_time(
    runner: ModelRunner, one_pass: np.ndarray, monkeypatch: pytest.MonkeyPatch, scores: int
) -> None:
    """One pass, its rows ranked one by one, one or two at a time, or in some larger pieces: the same entries."""
    monkeypatch.setattr(indexer, "_SCORES_PER_CHUNK", scores)
    sizes: list[int] = []
    best = indexer._best

    def watched(found: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(found))
        return best(found, *rest)

    monkeypatch.setattr(indexer, "_best", watched)
    length = 300
    found = score(core_over(runner, max_num_batched_tokens=length), length)
    assert found.tobytes() == one_pass[:length].tobytes()
    assert max(sizes) <= max(scores // (length // 2), 1) < length


def check_lengths(runner: ModelRunner, one_pass: np.ndarray, lengths: range) -> None:
    core = core_over(runner, max_num_batched_tokens=LENGTH, prefix_cache=False)
    for length in lengths:
        found = score(core, length, f"n{length}")
        assert found.tobytes() == one_pass[:length].tobytes(), length


def test_prompts_of_many_lengths(runner: ModelRunner, one_pass: np.ndarray) -> None:
    check_lengths(runner, one_pass, range(1, 40))
    check_lengths(runner, one_pass, range(41, LENGTH, 97))


@pytest.mark.slow
def test_prompts_of_every_length(runner: ModelRunner, one_pass: np.ndarray) -> None:
    check_lengths(runner, one_pass, range(1, LENGTH + 1))
