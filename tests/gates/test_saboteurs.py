"""Gates that cannot fail are no gates: each fault is found by a gate that names it, and an endpoint without one passes.

About 25 s on two busy cores, most of it waiting.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from gate_runs import ALL_GATES, ask

from deskfleet.gates.registry import LAUNCH_GATES
from deskfleet.testing import saboteurs as bad
from deskfleet.testing.honest import HonestEndpoint


@dataclass(frozen=True)
class Row:
    """A fault: which gate must fail, which words its reason must have, whose fault it is said to be."""

    endpoint: type[HonestEndpoint]
    gate: str
    words: tuple[str, ...]
    cause: str = "answer"
    limits: dict[str, Any] = field(default_factory=dict)
    family: str | None = None

    def __str__(self) -> str:
        return f"{self.endpoint.__name__}-{self.gate}"


TABLE = (
    Row(
        bad.NanInMiddleLengths,
        "answers-by-length",
        ("wrong in prompts of", "constant token", "right at 21 tokens"),
    ),
    Row(bad.NanInMiddleLengths, "logprobs", ("NaN",), cause="server"),
    Row(bad.WrongFromThree, "answers-at-once", ("with 3 at once", "right alone and wrong beside others")),
    Row(bad.WrongFromThree, "soak", ("right alone and wrong beside others",)),
    Row(bad.ConstantToken, "short-answers", ("constant token",)),
    Row(bad.ConstantToken, "garble", ("constant token", "over and over")),
    Row(bad.WrongLanguage, "garble", ("wrong language",)),
    Row(bad.WrongRows, "facts", ("facts are wrong", "Engram rows")),
    Row(bad.WrongRows, "facts", ("facts are wrong", "Engram rows"), family="pocket"),
    Row(bad.WarmSalad, "prefix-cache", ("warm prefix", "tokens cached", "wrong language")),
    Row(bad.DroppedLastCall, "tool-calls", ("a dropped tool call: 1 of 2 came", "set_timer")),
    Row(bad.DroppedLastCall, "quality-tools", ("a dropped tool call",)),
    Row(bad.LeakedReasoning, "thinking", ("reasoning leaked into content", "markup")),
    Row(bad.LeakedReasoningUnmarked, "thinking", ("reasoning leaked into content", "repeats it")),
    Row(bad.CountsChunks, "usage", ("usage counts chunks", "cut at max_tokens 24")),
    Row(bad.EmptyBody, "short-answers", ("status 200 and an empty body",), cause="server"),
    Row(bad.StaleModel, "model", ("a stale model answers", "'yesterday'")),
    Row(bad.RefusesHalfContext, "context", ("max_model_len is smaller than advertised", "8,192")),
    Row(bad.RefusesHalfContext, "needle-ladder", ("refuses", "4096"), cause="refusal"),
    Row(bad.TruncatesPrompts, "needle", ("a prompt was cut", "smaller than advertised")),
    Row(bad.TruncatesPrompts, "needle-ladder", ("a prompt was cut",)),
    Row(bad.Unrepeatable, "repeats", ("not deterministic",)),
    Row(bad.Blind, "image", ("the image is ignored", "the same answer")),
    Row(bad.DropsImages, "image", ("the image is ignored", "0 tokens more")),
    Row(bad.EffortIgnored, "effort", ("effort is ignored", "1.00 times")),
    Row(bad.EffortIgnored, "effort", ("effort is ignored", "effort 1:"), family="pocket"),
    Row(bad.ThinksAnyway, "thinking", ("switched off and goes on",)),
    Row(bad.CutCallFinished, "finish-reason", ("a truncated tool call is called finished",)),
    Row(bad.SlowerWithTime, "steady-speed", ("slower with time",), cause="pace"),
    Row(bad.FalseCacheHits, "needle-ladder", ("cache hits in a cold ladder", "256 cached tokens")),
    Row(bad.FalseCacheHits, "prefix-cache", ("never sent before",)),
    Row(bad.NoLogprobs, "logprobs", ("absent",)),
    Row(bad.StarvedStream, "fairness", ("one stream starved",), cause="pace"),
    Row(bad.MixedStreams, "soak", ("streams mixed up", "belongs to another")),
    Row(bad.MixedStreams, "answers-at-once", ("with 8 at once", "streams mixed up")),
    Row(bad.LosesTheMiddle, "needle-ladder", ("needle lost at depth 50%",)),
    Row(bad.LosesTheMiddle, "quality-long-context", ("right",)),
    Row(bad.IgnoresSchema, "json", ("no JSON", "response format")),
    Row(bad.DiesOnLongPrompt, "long-prompt", ("killed the server", "rank 1 died"), cause="server"),
    Row(bad.KeepsPlaces, "churn", ("places are not freed", "16 clients left")),
    Row(bad.Sluggish, "short-answers", ("not one token", "--patience"), "time", {"patience_s": 0.3}),
    Row(bad.SlowAtDepth, "speed-at-depth", ("slow at depth",), cause="pace"),
)


@pytest.mark.parametrize("row", TABLE, ids=str)
async def test_a_fault_is_found_and_named(row: Row) -> None:
    report = await ask(row.endpoint, [row.gate], family=row.family, **row.limits)
    (result,) = report.results
    assert result.verdict == "fail", result.finding
    for word in row.words:
        assert word in result.finding.reason
    assert result.finding.cause == row.cause
    assert report.exit_code == 1
    assert any(not answered.is_right for answered in result.evidence) or row.gate in _SEEN_AS_A_WHOLE


_SEEN_AS_A_WHOLE = {
    "repeats",
    "effort",
    "context",
    "steady-speed",
    "speed-at-depth",
    "churn",
    "image",
    "prefix-cache",
}
"""Gates whose reason compares answers of which each may be right."""


def test_every_saboteur_is_in_the_table() -> None:
    assert {row.endpoint for row in TABLE} | {bad.OtherModel} == set(bad.SABOTEURS)
    assert len(bad.SABOTEURS) >= 20


def test_every_gate_fails_somewhere() -> None:
    elsewhere = {"counting", "quality-arithmetic", "quality-instructions", "scoring", "lm-eval"}
    assert {row.gate for row in TABLE} | elsewhere == {gate.name for gate in ALL_GATES}


@pytest.mark.parametrize("gate", ["counting", "quality-arithmetic", "quality-instructions"])
async def test_gates_of_answers_fail_on_garbage(gate: str) -> None:
    (result,) = (await ask(bad.ConstantToken, [gate])).results
    assert result.verdict == "fail"


@pytest.mark.parametrize("family", ["general", "pocket"])
async def test_an_honest_endpoint_passes_every_gate(family: str) -> None:
    report = await ask(HonestEndpoint, ALL_GATES, family=family, endpoint={"event_s": 0.001})
    verdicts = {result.gate.name: result.verdict for result in report.results}
    # Nothing was recorded to compare with, and no other program was run.
    assert {name for name, verdict in verdicts.items() if verdict == "skip"} == {"scoring", "lm-eval"}
    failures = [
        (result.gate.name, result.finding.reason) for result in report.results if result.verdict == "fail"
    ]
    assert failures == []
    assert report.exit_code == 0


NARROW: dict[type[HonestEndpoint], set[str]] = {
    bad.WrongLanguage: {"garble"},
    bad.WrongRows: {"facts"},
    bad.DroppedLastCall: {"tool-calls"},
    bad.LeakedReasoningUnmarked: {"thinking"},
    bad.CountsChunks: {"usage", "logprobs"},  # fewer tokens than log probabilities is the same fault
    bad.StaleModel: {"model"},
    bad.TruncatesPrompts: {"context", "needle"},
    bad.Unrepeatable: {"repeats"},
    bad.Blind: {"image"},
    bad.DropsImages: {"image"},
    bad.EffortIgnored: {"effort"},
    bad.CutCallFinished: {"finish-reason"},
    bad.NoLogprobs: {"logprobs"},
    bad.IgnoresSchema: {"json"},
    bad.StarvedStream: set(),
    bad.FalseCacheHits: set(),
}


async def test_a_narrow_fault_fails_no_other_launch_gate() -> None:
    """A gate that fails on everything names nothing."""

    async def failing(kind: type[HonestEndpoint]) -> set[str]:
        report = await ask(kind, LAUNCH_GATES)
        return {result.gate.name for result in report.results if result.verdict != "pass"}

    kinds = list(NARROW)
    for start in range(0, len(kinds), 4):
        part = kinds[start : start + 4]
        found = await asyncio.gather(*map(failing, part))
        assert dict(zip(part, found, strict=True)) == {kind: NARROW[kind] for kind in part}
