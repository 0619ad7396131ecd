"""The prefix cache: what a returning session costs, and that its logits are those of a cold start."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from deskfleet.endpoint import TokenLogprob
from deskfleet.engine.core import EngineCore
from deskfleet.engine.messages import AddRequest, ImagePixels
from deskfleet.engine.runner import ModelRunner
from deskfleet.engine.wanted import Outcome
from deskfleet.model.limits import PrefixReplay
from tests.engine.cores import Answer, adding, assert_nothing_held, core_over, load_runner, on_logits, run_all
from tests.engine.engines import IMAGE_TOKEN, greedy, random_ids
from tests.engine.golden import measured

WINDOW = 16  # of the golden checkpoint
ONE_TAIL = {
    "max_num_seqs": 1,
    "num_window_blocks": 6,
}  # what one running request needs, and nothing beside it
WINDOW_REPLAY_LIMIT = 0.10  # relative RMS of the first logits after a window replay; exact replay: equal bits


@dataclass
class Recording:
    """A runner that notes how many rows it ran and the logits of the last row of each prompt."""

    runner: ModelRunner
    num_rows: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def lead(self, *arguments: Any) -> Outcome:
        return on_logits(self.runner.lead, self._record)(*arguments)

    def _record(self, logits: torch.Tensor, segments: Sequence[Any], rows: Sequence[int]) -> torch.Tensor:
        self.num_rows += sum(segment.num_tokens for segment in segments)
        self.logits += list(logits)
        return logits


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    loaded = load_runner(num_slots=8, max_model_len=5120)
    yield loaded
    loaded.close()


def visit(
    core: EngineCore, recording: Recording, ids: Sequence[int], name: str
) -> tuple[Answer, torch.Tensor, int]:
    """Run one turn of a session: its answer, the logits that follow the prompt, rows run up to there."""
    recording.logits.clear()
    recording.num_rows = 0
    (answer,) = run_all(core, [adding(name, ids, greedy(1))]).values()
    return answer, recording.logits[0], recording.num_rows


def cold_logits(recording: Recording, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits that follow each prompt without any cache. Cores over one runner share its pages: one after the other."""
    core = core_over(recording, prefix_cache=False)
    return [visit(core, recording, ids, f"cold {number}")[1] for number, ids in enumerate(prompts)]


def sessions(length: int, count: int) -> list[tuple[int, ...]]:
    """So many sessions, and each of them again with a new turn."""
    first = [random_ids(length, seed=1 + number) for number in range(count)]
    return first + [ids + random_ids(20, seed=11 + number) for number, ids in enumerate(first)]


def alternate(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], replay: PrefixReplay, limits: dict[str, int]
) -> tuple[list[float], list[int], EngineCore]:
    """Visit all prompts in turn: relative RMS to a cold start, and rows run, of each."""
    recording = Recording(runner)
    colds = cold_logits(recording, prompts)
    core = core_over(recording, limits=limits, prefix_replay=replay, max_num_batched_tokens=64)
    differences, rows = [], []
    for ids, cold in zip(prompts, colds, strict=True):
        _, warm, num_rows = visit(core, recording, ids, f"{len(rows)}")
        differences.append(((warm - cold).square().mean().sqrt() / cold.std()).item())
        rows.append(num_rows)
    assert_nothing_held(core)
    return differences, rows, core


NEW = 20 + 8  # 600, and 5000, is whole blocks of 16 and 8 more: those and the new turn are run in any case


@pytest.mark.parametrize("length", [600, pytest.param(5000, marks=pytest.mark.slow)])
def test_two_sessions_over_a_pool_for_one_window(runner: ModelRunner, length: int) -> None:
    """They take turns, and neither reads its past again: chunks' windows make room before a session's last one does."""
    differences, rows, core = alternate(runner, sessions(length, 2), "window", ONE_TAIL)
    assert differences == [0, 0, 0, 0]
    assert rows == [length, length, NEW, NEW]
    assert core.stats.num_replayed_tokens <= WINDOW


def test_a_lost_window_is_replayed_alone(runner: ModelRunner) -> None:
    """More sessions than there is room for: whoever lost its window runs one window again, and not its past."""
    differences, rows, core = alternate(runner, sessions(600, 7), "window", ONE_TAIL)
    assert rows[:7] == [600] * 7
    assert max(rows[7:]) == NEW + WINDOW
    assert core.stats.num_replayed_tokens >= WINDOW
    measured.append(f"prefix cache, window replay: largest relative RMS of logits {max(differences):.4f}")
    assert 0 < max(differences) <= WINDOW_REPLAY_LIMIT
    assert differences[:7] == [0] * 7


def test_an_exact_replay_gives_the_bits_of_a_cold_start(runner: ModelRunner) -> None:
    differences, rows, core = alternate(runner, sessions(600, 7), "exact", ONE_TAIL)
    assert differences == [0] * 14
    reach = (WINDOW - 1) * runner.config.num_hidden_layers
    assert max(rows[7:]) == NEW + reach
    assert core.stats.num_replayed_tokens >= reach


@pytest.mark.parametrize("replay", ["window", "exact"])
def test_with_room_for_their_windows_nothing_is_replayed(runner: ModelRunner, replay: PrefixReplay) -> None:
    differences, rows, core = alternate(runner, sessions(600, 4), replay, {})
    assert differences == [0] * 8
    assert rows == [600] * 4 + [NEW] * 4
    assert core.stats.num_replayed_tokens == 0
    assert core.stats.num_window_hits == core.stats.num_prefix_hits == 4 * 592


@pytest.mark.parametrize("length", [95, 96, 97, 111, 112])
def test_the_same_prompt_again_runs_less_than_a_block(runner: ModelRunner, length: int) -> None:
    """Whatever the length: at a whole number of blocks, too, the window before its last block is there."""
    recording = Recording(runner)
    core = core_over(recording)
    ids = random_ids(length, seed=51)
    _, cold, rows = visit(core, recording, ids, "cold")
    _, warm, again = visit(core, recording, ids, "warm")
    assert (rows, again) == (length, (length - 1) % 16 + 1)
    assert torch.equal(warm, cold)


@pytest.mark.parametrize("length", [500, pytest.param(3000, marks=pytest.mark.slow)])
def test_eight_lanes_replayed_twice(runner: ModelRunner, length: int) -> None:
    """Eight sessions side by side, each three times: from the second round on at least 95 % is found, and the
    distribution of every token is that of the first round, which found nothing."""
    lanes = [random_ids(length, seed=10 + lane) for lane in range(8)]
    asked = greedy(2, logprobs=runner.config.vocab_size)
    core = core_over(runner)
    turns: list[dict[str, list[TokenLogprob]]] = []
    for turn in range(3):
        before = core.stats
        for lane, ids in enumerate(lanes):
            assert core.add(adding(f"{lane}", ids, asked)) is None
        found: defaultdict[str, list[TokenLogprob]] = defaultdict(list)
        while core.has_work:
            for output in core.step():
                found[output.request_id] += output.logprobs or ()
                assert output.num_cached_tokens == (length - 1) // 16 * 16 * (turn > 0)
        turns.append(found)
        queried = core.stats.num_prefix_queried - before.num_prefix_queried
        hits = core.stats.num_window_hits - before.num_window_hits
        assert queried == 8 * length
        if turn:
            assert hits / queried >= 0.95
    assert [len(tokens) for tokens in turns[0].values()] == [2] * 8
    assert turns[0] == turns[1] == turns[2]


def test_a_prefix_of_any_length_is_taken_over_exactly(runner: ModelRunner) -> None:
    """Every cut of a prompt against one cached prompt: whole blocks before the cut are found, and the bits agree."""
    ids, others = random_ids(130, seed=21), random_ids(40, seed=22)
    recording = Recording(runner)
    cuts = (1, 15, 16, 17, 31, 32, 33, 64, 100, 127, 128, 129)
    prompts = [ids[:cut] + others for cut in cuts]
    colds = cold_logits(recording, prompts)
    core = core_over(recording, prefix_replay="exact")
    visit(core, recording, ids, "first")
    for cut, asked, cold in zip(cuts, prompts, colds, strict=True):
        answer, warm, rows = visit(core, recording, asked, f"warm {cut}")
        found = len(asked) - rows
        assert found == answer.num_cached_tokens <= cut // 16 * 16
        assert torch.equal(warm, cold), cut


def test_a_returning_session_is_as_heavy_as_what_is_left_of_it(runner: ModelRunner) -> None:
    """The queue weighs a request before it is admitted: most of this one is known, and nothing is held for it yet."""
    core = core_over(runner)
    ids = random_ids(400, seed=61)
    run_all(core, [adding("first", ids, greedy(1))])
    core.add(adding("again", ids + random_ids(9, seed=62), greedy(1)))
    waiting = core.scheduler.find("again")
    assert waiting is not None
    assert waiting.num_uncomputed_tokens == 9
    assert core.stats.num_free_blocks == core.stats.num_blocks


def picture(seed: int) -> ImagePixels:
    """Noise of one size."""
    pixels = np.random.default_rng(seed).integers(0, 255, (84, 84, 3), np.uint8)
    return ImagePixels(pixels.tobytes(), 84, 84, (2, 1, 1, 3, 1, 1, 3))


def with_picture(name: str, image: ImagePixels, *, before: int, total: int = 400) -> AddRequest:
    """The same token ids of text around the image, wherever it stands."""
    span = len(image.token_types)
    text = random_ids(total - span, seed=5)
    ids = text[:before] + (IMAGE_TOKEN,) * span + text[before:]
    mask = bytes(before) + bytes([1]) * span + bytes(total - before - span)
    return AddRequest(name, ids, mask, (image,), greedy(1))


def test_what_only_looks_alike_is_not_taken_over(runner: ModelRunner) -> None:
    """Equal token ids, other contents: another picture of the same size, and the same one a few tokens later."""
    first = with_picture("first", picture(1), before=200)
    asked = {
        "same": (with_picture("same", picture(1), before=200), 384),
        "other picture": (with_picture("other picture", picture(2), before=200), 192),
        "later": (with_picture("later", picture(1), before=220), 192),
    }
    recording = Recording(runner)

    def logits_of(core: EngineCore, request: AddRequest) -> tuple[int, torch.Tensor]:
        recording.logits.clear()
        (answer,) = run_all(core, [request]).values()
        return answer.num_cached_tokens, recording.logits[0]

    colds = {
        name: logits_of(core_over(recording, prefix_cache=False), one)[1] for name, (one, _) in asked.items()
    }
    assert not torch.equal(colds["same"], colds["other picture"]), "else it would not matter"
    core = core_over(recording)
    logits_of(core, first)
    for name, (request, cached) in asked.items():
        found, logits = logits_of(core, request)
        assert 0 < found <= cached, name  # less by what a lost window costs
        assert torch.equal(logits, colds[name]), name


def test_scores_are_computed_in_full(runner: ModelRunner) -> None:
    """Every position's logits are asked for, so nothing may be skipped."""
    recording = Recording(runner)
    core = core_over(recording)
    ids = random_ids(100, seed=31)
    for name in ("first", "second"):
        recording.num_rows = 0
        core.add(replace_score(adding(name, ids, greedy(1))))
        while core.has_work:
            core.step()
        assert recording.num_rows == 100


def replace_score(request: AddRequest) -> AddRequest:
    return AddRequest(
        request.request_id, request.token_ids, request.image_positions, (), request.sampling, score=True
    )


def test_switched_off_nothing_is_found(runner: ModelRunner) -> None:
    core = core_over(runner, prefix_cache=False)
    ids = random_ids(64, seed=41)
    for name in ("a", "b"):
        run_all(core, [adding(name, ids, greedy(1))])
    assert core.stats.num_prefix_hits == core.stats.num_prefix_queried == 0
    assert core.cache.global_pool.num_remembered == 0
