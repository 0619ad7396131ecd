"""Requests that come, go, wait and are pushed out, in seeded random order: greedy answers are those of each alone.

Drafts are compared too. Verification hides a wrong draft from the answer, so equal answers alone would not show state
that is kept by batch row instead of by request: such drafts are only refused more often.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deskfleet.engine.core import EngineCore
from deskfleet.engine.messages import AddRequest, Cancel, RequestOutput
from deskfleet.engine.model.draft import Anchor, DraftModel
from deskfleet.engine.runner import ModelRunner
from tests.engine.cores import (
    Answer,
    adding,
    assert_nothing_held,
    collect,
    core_over,
    load_runner,
    on_logits,
    run_all,
    run_alone,
)
from tests.engine.engines import greedy, random_ids
from tests.engine.golden import checkpoint, plain_limits, token_map
from tests.engine.lockstep import Lockstep

Drafts = dict[tuple[str, int], tuple[int, ...]]
"""Draft tokens by request and number of tokens it has got."""

REQUESTS = [adding(f"r{i}", random_ids(3 + 31 * i % 97, seed=i), greedy(10 + 7 * i % 17)) for i in range(16)]
CANCELLED = ("r3", "r11", "r14")


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    loaded = load_runner(max_model_len=256)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> tuple[dict[str, Answer], Drafts]:
    """Each request by itself, without and with speculation."""
    answers = run_alone(core_over(runner, prefix_cache=False), REQUESTS)
    drafts: Drafts = {}
    watch(core := core_over(runner, "5", prefix_cache=False), drafts)
    assert run_alone(core, REQUESTS) == answers
    return answers, drafts


def watch(core: EngineCore, drafts: Drafts) -> None:
    """Note what every step drafts; the same request at the same place must get the same."""
    step = core.step

    def watched() -> list[RequestOutput]:
        outputs = step()
        for request in core.scheduler.running:
            if request.draft_token_ids:
                key = (request.request_id, len(request.output_token_ids))
                drafts[key] = tuple(request.draft_token_ids)
        return outputs

    core.step = watched  # type: ignore[method-assign]


def churn(core: EngineCore, requests: Sequence[AddRequest], seed: int) -> dict[str, Answer]:
    """Add requests in random order a few at a time, cancel some of them in mid-stream, step until nothing is left."""
    random = np.random.default_rng(seed)
    waiting = [requests[i] for i in random.permutation(len(requests))]
    answers: dict[str, Answer] = {}
    while waiting or core.has_work:
        for _ in range(int(random.integers(0, 4))):
            if waiting:
                assert core.add(waiting.pop()) is None
        collect(core.step(), answers)
        for name in CANCELLED:
            if len(answers.get(name, Answer([])).token_ids) >= 2:
                core.cancel(Cancel(name))
    assert_nothing_held(core)
    return answers


def compare(found: dict[str, Answer], alone: dict[str, Answer]) -> None:
    for name, answer in found.items():
        expected = alone[name].token_ids
        assert answer.error is None
        if name in CANCELLED:
            assert answer.token_ids == expected[: len(answer.token_ids)], name
        else:
            assert answer.token_ids == expected, name
    assert len(found) == len(alone)


def compare_drafts(found: Drafts, alone: Drafts) -> int:
    """Equal as far as both go (a cap, the end of a request or a full step cuts a block); returns how many."""
    common = found.keys() & alone.keys()
    for key in common:
        length = min(len(found[key]), len(alone[key]))
        assert found[key][:length] == alone[key][:length], key
    return len(common)


TIGHT = {"num_blocks": 12}  # of 16 tokens, for requests of up to 120: somebody is always pushed out
COST = '{"rows": [[1, 0.01], [24, 0.01], [48, 0.05]], "requests": [[1, 0.001]]}'  # dear beyond 24 rows


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cost table, for settings with `cost:TABLE`."""
    path = tmp_path_factory.mktemp("cost") / "table.json"
    path.write_text(COST)
    return path


@pytest.mark.parametrize(
    "speculation",
    [
        "3",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("1", "2", "4", "k=5,accept=token,cap=conf:0.3", "k=5,draft=greedy,cap=cost:TABLE")
        ),
    ],
)
def test_answers_do_not_depend_on_drafts(runner, alone, table, speculation) -> None:
    """Each request by itself; without drafts and with 5 `alone` has asked it already."""
    core = core_over(runner, speculation.replace("TABLE", str(table)), prefix_cache=False)
    assert run_alone(core, REQUESTS) == alone[0]
    assert core.stats.num_accepted > 0


@pytest.mark.parametrize(
    ("speculation", "limits"),
    [
        ("off", {}),
        ("off", TIGHT),
        ("2", TIGHT),
        ("5", {}),
        ("k=5,draft=greedy,accept=token,cap=conf:0.3", TIGHT),
        *(
            pytest.param(
                *case, marks=pytest.mark.slow
            )  # what the lines above do not reach is more of the same
            for case in (
                ("1", {}),
                ("k=3,accept=token", {}),
                ("4", {}),
                ("5", TIGHT),
                ("k=5,cap=conf:0.1", {}),
                ("k=5,cap=cost:TABLE", TIGHT),
            )
        ),
    ],
)
def test_answers_do_not_depend_on_company(runner, alone, table, speculation, limits) -> None:
    drafts: Drafts = {}
    speculation = speculation.replace("TABLE", str(table))
    core = core_over(runner, speculation, limits=limits, max_num_batched_tokens=96)
    watch(core, drafts)
    compare(churn(core, REQUESTS, seed=len(speculation) + len(limits)), alone[0])
    assert (core.stats.num_preempted > 0) == bool(limits)
    if speculation != "off":
        assert compare_drafts(drafts, alone[1]) > 40
        assert core.stats.num_accepted > 0


def test_what_requests_are_told_of_their_drafts_adds_up(runner) -> None:
    """Of each request: verifications, drafts, accepted ones and rows in vain. Together they are the engine's own."""
    core = core_over(runner, "5", max_num_batched_tokens=96)
    latest: dict[str, RequestOutput] = {}
    num_tokens: Counter[str] = Counter()
    for request in REQUESTS:
        core.add(request)
    while core.has_work:
        for output in core.step():
            latest[output.request_id] = output
            num_tokens[output.request_id] += len(output.token_ids)
    stats = core.stats
    for name in ("num_verify_steps", "num_drafted", "num_accepted", "num_wasted_rows"):
        assert sum(getattr(output, name) for output in latest.values()) == getattr(stats, name) > 0, name
    for request_id, told in latest.items():
        # Nothing stops before its length here, so every accepted draft and one token more a step came out.
        assert told.num_wasted_rows == told.num_drafted - told.num_accepted
        assert told.num_verify_steps + told.num_accepted <= num_tokens[request_id] - 1, (
            "the first needs no draft"
        )


def test_draft_state_kept_by_batch_row_would_be_seen(runner, alone, monkeypatch) -> None:
    begin = DraftModel.begin

    def by_row(self: DraftModel, anchors: Sequence[Anchor], *arguments: Any) -> Any:
        return begin(self, [replace(anchor, slot=row) for row, anchor in enumerate(anchors)], *arguments)

    monkeypatch.setattr(DraftModel, "begin", by_row)
    drafts: Drafts = {}
    core = core_over(runner, "5", max_num_batched_tokens=96)
    watch(core, drafts)
    compare(churn(core, REQUESTS, seed=1), alone[0])  # the answers cannot show it
    with pytest.raises(AssertionError, match=r"\('r\d+', \d+\)"):
        compare_drafts(drafts, alone[1])


# Tensor-parallel ranks, and how many of them share out the cache.
RANKS = [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (4, 4)]


@pytest.mark.parametrize(
    ("tp_size", "dcp_size", "speculation", "count"),
    [
        (2, 2, "5", 7),
        (3, 1, "5", 7),
        *(
            pytest.param(*sizes, speculation, 16, marks=pytest.mark.slow)
            for sizes in RANKS
            for speculation in ("off", "5", "k=3,accept=token,cap=conf:0.3")
        ),
    ],
)
def test_answers_do_not_depend_on_ranks(
    alone, tp_size: int, dcp_size: int, speculation: str, count: int
) -> None:
    """A few requests in the fast lane; in the slow one all of them, over pools in which somebody is pushed out."""
    num_blocks = 24 if count < len(REQUESTS) else 9  # so few that no order of arrival spares everybody
    group = Lockstep(
        checkpoint(),
        tp_size,
        replace(plain_limits(count, 256), num_blocks=num_blocks, dcp_size=dcp_size),
        pad_compressed_id=int(token_map()[checkpoint().config.engram_pad_token_id]),
        with_drafts=True,
    )
    drafts: Drafts = {}
    with group:
        core = core_over(group.leader, speculation, max_num_batched_tokens=96)
        watch(core, drafts)
        found = churn(core, REQUESTS[:count], seed=tp_size)
    compare(found, {request.request_id: alone[0][request.request_id] for request in REQUESTS[:count]})
    assert group.not_finite == []
    if speculation != "off":
        assert compare_drafts(drafts, alone[1]) > 2 * count
    if count == len(REQUESTS):
        assert core.stats.num_preempted > 0
        assert core.stats.num_cancelled > 0


def test_a_planted_nan_fails_its_request_and_no_other(runner, alone) -> None:
    """One of sixteen rows is not a number; the other fifteen are what they were."""
    lead = runner.lead
    core = core_over(runner, "5")
    victim = "r5"

    def poisoned(logits, segments, rows):
        request = core.scheduler.find(victim)
        row = 0
        for segment in segments:
            mine = [i for i, r in enumerate(rows) if row <= r < row + segment.num_tokens]
            if request is not None and segment.slot == request.slot and len(request.output_token_ids) >= 3:
                logits[mine[-1], 7] = torch.nan
            row += segment.num_tokens
        return logits

    core._runner.lead = on_logits(lead, poisoned)  # the narrowed runner of this core alone
    answers: dict[str, Answer] = {}
    for request in REQUESTS[:16]:
        core.add(request)
    while core.has_work:
        collect(core.step(), answers)
    assert answers[victim].error is not None
    assert "1 logits of this request are not finite at position" in answers[victim].error
    assert answers[victim].token_ids == alone[0][victim].token_ids[: len(answers[victim].token_ids)]
    for name, answer in answers.items():
        if name != victim:
            assert answer == alone[0][name], name
    assert core.stats.num_not_finite == 1
    assert_nothing_held(core)
    # Its blocks are not found again: nobody continues from a row that is not a number.
    core.cache.stats = replace(core.cache.stats, num_global_hits=0)
    core.add(replace_id(REQUESTS[5], "again"))
    core.step()
    assert core.stats.num_prefix_hits == 0


def test_a_planted_nan_of_another_rank_is_seen(alone) -> None:
    """One row of the second rank's part of the vocabulary, in one step."""
    requests = REQUESTS[:4]
    group = Lockstep(
        checkpoint(),
        2,
        plain_limits(len(requests), 256),
        pad_compressed_id=int(token_map()[checkpoint().config.engram_pad_token_id]),
        with_drafts=True,
    )
    model, num_calls = group.runners[1].model, itertools.count(1)
    logits = model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        if next(num_calls) == 6:
            hidden = hidden.clone()
            hidden[0] = torch.nan
        return logits(hidden)

    model.logits = poisoned  # type: ignore[method-assign]
    with group:
        answers = run_all(core := core_over(group.leader, "5"), requests)
    (failed,) = [answer for answer in answers.values() if answer.error is not None]
    assert failed.error is not None
    assert "are not finite at position" in failed.error
    assert {name for name, answer in answers.items() if answer != alone[0][name]} == {
        name for name, answer in answers.items() if answer is failed
    }
    assert core.stats.num_not_finite == 1
    assert {each.partition(":")[0] for each in group.not_finite if "sent" in each} == {"rank 1"}


def test_a_score_that_is_pushed_out_gives_every_row_once(runner) -> None:
    """It starts again from the beginning, but the client has the first rows already."""
    ids = random_ids(95, seed=40)
    score = adding("score", ids, greedy(1), score=True)

    def rows_of(core: EngineCore) -> bytes:
        rows = b""
        while core.has_work:
            rows += b"".join(output.logits or b"" for output in core.step())
        return rows

    core = core_over(runner, prefix_cache=False)
    core.add(score)
    expected = rows_of(core)
    assert len(expected) == 95 * runner.config.vocab_size * 4
    core = core_over(runner, prefix_cache=False, limits={"num_blocks": 8}, max_num_batched_tokens=4)
    core.add(adding("stream", random_ids(14, seed=41), greedy(60)))
    core.step()
    core.step()
    core.add(score)
    assert rows_of(core) == expected
    assert core.stats.num_preempted > 0


def replace_id(request: AddRequest, name: str) -> AddRequest:
    return adding(name, request.token_ids, request.sampling)
