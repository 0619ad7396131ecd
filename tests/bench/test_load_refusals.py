"""Set-ups that mislead are refused or labelled, each by name, and a refused number is in no table. About 8 s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_endpoint import Behaviour
from load_runs import measure

from deskfleet.bench.load.caveats import Policy
from deskfleet.bench.load.record import LoadResult, kinds_of
from deskfleet.bench.load.suite import read_requests
from deskfleet.bench.load.tables import benchy_table, footnotes, rate_rows
from deskfleet.bench.load.vllm_json import vllm_objects
from deskfleet.errors import ConfigError

COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27"
LADDER: dict[str, Any] = {"parts": ("prefill",), "ladder": (300, 900)}


def kinds(result: LoadResult) -> tuple[set[str], set[str]]:
    """Return the kinds refused, and those labelled in the batches."""
    refused = {caveat.kind for _, caveat in result.refusals()}
    return refused, kinds_of(label for batch in result.batches for label in batch.labels)


@pytest.mark.parametrize(
    ("behaviour", "settings", "kind", "told"),
    [
        (
            Behaviour(tokens_per_event=3, told_tokens=lambda n: -(-n // 3)),
            {},
            "token-mismatch",
            "usage says 16 ",
        ),
        (Behaviour(told_tokens=lambda n: 4 * n), {}, "token-mismatch", "counter 48"),
        (Behaviour(cached=lambda n: n // 2 if n > 400 else 0), LADDER, "cached", " prompt tokens"),
        (
            Behaviour(seen_tokens=lambda n: min(n, 3000)),
            {**LADDER, "ladder": (300, 6000)},
            "truncated",
            "the server counts 3,000",
        ),
        (
            Behaviour(fail=lambda number: number % 2 == 1),
            {"concurrency": (2,)},
            "failed-streams",
            "1 of 2: no such",
        ),
        (
            Behaviour(stall=lambda number: 1.0),
            {"parts": ("mixed",), "rate": 100.0, "mixed_s": 1.0, "most_open": 3, "mixed_context": (0,)},
            "overloaded",
            "3 requests were open",
        ),
        (Behaviour(tokens_per_event=48), {}, "all-at-once", "1 of 1, e.g. 48 tokens"),
    ],
    ids=["chunks-as-tokens", "inflated-usage", "cached", "truncated", "failed", "overloaded", "held-back"],
)
def test_a_number_that_is_not_what_it_is_called_is_in_no_table(
    behaviour: Behaviour, settings: dict[str, Any], kind: str, told: str
) -> None:
    result, _ = measure(behaviour, **settings)
    refused, _ = kinds(result)
    assert kind in refused
    caveat = next(caveat for _, caveat in result.refusals() if caveat.kind == kind)
    assert told in caveat.text
    rows = [row for row in rate_rows(result) if "refused" in row[1]]
    assert rows
    assert all(kind in row[1] and not "".join(row[2:]) for row in rows)
    assert any(line.startswith("refused, ") and told in line for line in footnotes(result))
    believed = {setup.title for setup in result.setups() if result.of(setup)}
    assert {row["label"] for row in vllm_objects(result)} == believed
    assert len([line for line in benchy_table(result).splitlines() if line.startswith("| scripted")]) == len(
        believed
    )


def test_what_is_allowed_is_measured_and_labelled() -> None:
    behaviour = Behaviour(cached=lambda n: n // 2)
    result, _ = measure(behaviour, **LADDER, policy=Policy(frozenset({"cached"})))
    refused, labelled = kinds(result)
    assert not refused
    assert "cached" in labelled
    assert all("[cached]" in row[0] for row in rate_rows(result))
    with pytest.raises(ConfigError, match="nothing called 'everything' to allow"):
        Policy(frozenset({"everything"}))


@pytest.mark.parametrize(
    ("behaviour", "settings", "kind"),
    [
        (Behaviour(drafts=True, answer=lambda generator, index: f"{index + 1} "), {}, "predictable-answer"),
        (Behaviour(drafts=True, answer=lambda generator, index: "same "), {}, "predictable-answer"),
        (Behaviour(most_tokens=20), {}, "short-answers"),
        (Behaviour(metrics=None), {}, "count-unknown"),
        (Behaviour(metrics=None, cached=lambda n: None), LADDER, "cache-unknown"),
        (Behaviour(), {**LADDER, "filler": True}, "filler"),
        (Behaviour(stall=lambda number: 0.3 if number == 3 else 0), LADDER, "not-monotonic"),
    ],
    ids=["counts", "repeats", "short", "no-counter", "no-cache-count", "filler", "not-monotonic"],
)
def test_a_number_under_a_condition_carries_it(
    behaviour: Behaviour, settings: dict[str, Any], kind: str
) -> None:
    result, _ = measure(behaviour, **settings)
    refused, labelled = kinds(result)
    assert not refused
    assert kind in labelled
    assert f"[{kind}]" in benchy_table(result)


def test_ordinary_answers_carry_no_label_of_their_own() -> None:
    result, _ = measure(Behaviour(drafts=True))
    without_drafts, _ = measure(
        Behaviour(answer=lambda generator, index: "same ")
    )  # nothing is faster for it
    for refused, labelled in (kinds(result), kinds(without_drafts)):
        assert not refused
        assert labelled <= {"slow-client"}  # of the machine that tests run on, which may have other work
    assert kinds_of(result.labels) >= {"client-on-server"}


def test_strict_refuses_what_would_be_labelled() -> None:
    with pytest.raises(ConfigError, match="client-on-server"):
        measure(Behaviour(), policy=Policy(strict=True))


def body(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


LONG = (
    "You are a careful clerk. Every letter is read twice before it is answered, names are spelled as they were sent, "
    "sums are checked by hand, and whatever is not understood is asked about rather than guessed at by anyone here. "
)


@pytest.mark.parametrize(
    ("bodies", "kind", "told"),
    [
        ([body("a", max_tokens=4), body("b")], "no-max-tokens", "request 2 of 2"),
        (
            [body(LONG + "one", max_tokens=4), body("b", max_tokens=4), body(LONG + "two", max_tokens=4)],
            "shared-prefix",
            "requests 1 and 3",
        ),
        ([body(f"Continue: {COUNTING}", max_tokens=4)], "repetitive-prompt", "request 1"),
        ([body("hello world " * 40, max_tokens=4)], "repetitive-prompt", "97% of it repeats"),
    ],
)
def test_requests_that_mislead_are_refused_before_anything_is_sent(
    tmp_path: Path, bodies: list[dict[str, Any]], kind: str, told: str
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, bodies)))
    behaviour = Behaviour(drafts=True)
    with pytest.raises(ConfigError, match=kind) as refused:
        measure(behaviour, requests=read_requests(path))
    assert told in refused.value.message
    assert f"--allow {kind}" in (refused.value.hint or "")
    result, endpoint = measure(behaviour, requests=read_requests(path), policy=Policy(frozenset({kind})))
    assert kind in kinds_of(result.labels)
    assert endpoint.log[0].body["messages"] == bodies[0]["messages"]
    assert endpoint.log[0].body["model"] == "scripted"


def test_what_does_not_fit_is_left_out_and_said() -> None:
    result, endpoint = measure(Behaviour(max_model_len=1000), parts=("prefill",), ladder=(300, 5000))
    assert [batch.setup.context for batch in result.batches] == [300]
    assert "left out: prefill, 5,000 tokens of text: 5,004 tokens do not fit the served 1,000" in footnotes(
        result
    )
    assert max(len(answer.body["messages"][0]["content"]) for answer in endpoint.log) < 4000
    with pytest.raises(ConfigError, match="nothing was left to measure"):
        measure(Behaviour(max_model_len=200), parts=("prefill",), ladder=(300,))


def test_others_on_the_server_are_told_from_wrong_usage() -> None:
    """More tokens than ours and more answers than ours: others. More tokens and no more answers: usage is wrong."""
    from deskfleet.bench.load import caveats
    from deskfleet.bench.load.record import Batch, ServerCount, Setup, Stream

    stream = Stream(
        case="prose",
        due_s=0,
        sent_s=0,
        first_s=0.1,
        finish_s=1,
        num_completion_tokens=50,
        max_tokens=50,
        gaps_s=(0.02,),
    )
    batch = Batch(setup=Setup(part="decode", case="prose"), round=1, wall_s=1, streams=(stream,))

    def found(**counts: int) -> set[str]:
        from msgspec.structs import replace

        return kinds_of(caveats.of_batch(replace(batch, server=ServerCount(**counts)), speculates=False))

    assert found(num_generated_tokens=90, num_finished=3) == {"other-traffic"}
    assert found(num_generated_tokens=90, num_finished=1) == {"token-mismatch"}
    assert found(num_generated_tokens=52, num_finished=1) == set()
    assert found(num_generated_tokens=40) == {"token-mismatch"}
