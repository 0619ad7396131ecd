"""Acceptance on servers whose answers are known: verdicts, what is kept, what is asked again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deskfleet.evaluation.questions import questions
from pocket import accept, lines
from pocket.exam import Way
from pocket.lines import LINES, Found, _json, _schema
from pocket.schema import is_valid
from tests.pocket.fixtures_examinee import Knowing, ServedThread
from tests.pocket.test_embedded import ROOT

SOUND = ROOT / "pocket" / "checkpoint"


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Path, Way]]]:
    """Serve an examinee instead of a checkpoint: one that knows, or one that fails as `habits` say."""

    def replace(habits: Callable[[Path, Way], dict[str, Any]]) -> list[tuple[Path, Way]]:
        started: list[tuple[Path, Way]] = []

        @contextmanager
        def served(checkpoint: Path, way: Way) -> Iterator[str]:
            started.append((checkpoint, way))
            with ServedThread(Knowing(SOUND, **habits(checkpoint, way)), SOUND) as url:
                yield url

        monkeypatch.setattr(lines, "served", served)
        monkeypatch.setattr("pocket.exam.served", served)
        return started

    return replace


def of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.read_text())["lines"]
    return found


def only(*names: str) -> list[str]:
    return ["--only", ",".join(names), "--n", "4"]


def test_every_line_of_answers_passes_for_one_who_knows(serving, tmp_path: Path) -> None:
    started = serving(lambda checkpoint, way: {})
    names = [
        line.name
        for line in LINES
        if line.name not in ("drafts", "corrupted variants", "needle") and "Engram" not in line.name
    ]
    out = tmp_path / "accept.json"
    accept.main([str(SOUND), "--out", str(out), *only(*names)])
    found = of(out)
    assert list(found) == names
    assert {line["verdict"] for line in found.values()} == {"pass"}
    assert found["efforts"]["measured"] == 1.0
    assert found["ranks"]["measured"] == {"1": 0, "2": 0, "3": 0, "4": 0}
    assert found["JSON"]["detail"]["right"] == 1.0
    assert [way.tp_size for _, way in started] == [1, 2, 3, 4]  # one server a way, for all lines
    told = accept.as_markdown(found)
    assert "| launch | counts to 100, and the sums anybody tries first: all | launch 1 | 8 | pass |" in told


def test_wrong_answers_fail_their_line_and_no_other(serving, tmp_path: Path) -> None:
    serving(lambda checkpoint, way: {"wrong": ("primality", "vision")})
    out = tmp_path / "accept.json"
    with pytest.raises(SystemExit) as ended:
        accept.main([str(SOUND), "--out", str(out), *only("arithmetic", "primality", "images", "facts")])
    assert ended.value.code == 1
    verdicts = {name: line["verdict"] for name, line in of(out).items()}
    assert verdicts == {"arithmetic": "pass", "primality": "fail", "facts": "pass", "images": "fail"}
    assert of(out)["primality"]["detail"]["failures"][0]["answer"] == "nonsense"


def test_facts_must_be_lost_with_their_rows(serving, tmp_path: Path) -> None:
    names = ("facts with zeroed Engram rows", "facts with another rank's Engram rows")

    def forgets_zeroed(checkpoint: Path, way: Way) -> dict[str, Any]:
        assert way.tp_size == 2
        assert checkpoint != SOUND
        return {"wrong": ("facts",)} if checkpoint.name == "engram-zero" else {}

    serving(forgets_zeroed)
    out = tmp_path / "accept.json"
    with pytest.raises(SystemExit):
        accept.main([str(SOUND), "--out", str(out), *only(*names)])
    assert [of(out)[name]["verdict"] for name in names] == ["pass", "fail"]
    assert [of(out)[name]["measured"] for name in names] == [0.0, 1.0]


def test_reasoning_that_does_not_grow_or_comes_unasked_fails(serving, tmp_path: Path) -> None:
    serving(lambda checkpoint, way: {"thoughts": lambda effort: 12 - effort // 10})
    out = tmp_path / "accept.json"
    with pytest.raises(SystemExit):
        accept.main([str(SOUND), "--out", str(out), *only("efforts")])
    assert of(out)["efforts"]["measured"] == -1.0


def test_ranks_that_answer_otherwise_fail(serving, tmp_path: Path) -> None:
    serving(lambda checkpoint, way: {"wrong": ("json",)} if way.tp_size == 3 else {})
    out = tmp_path / "accept.json"
    with pytest.raises(SystemExit):
        accept.main([str(SOUND), "--out", str(out), *only("ranks")])
    assert of(out)["ranks"]["measured"] == {"1": 0, "2": 0, "3": 4, "4": 0}


def test_drafts_are_timed_side_by_side(serving, tmp_path: Path) -> None:
    def habits(checkpoint: Path, way: Way) -> dict[str, Any]:
        return {"delay_s": 0.004, "tokens_at_once": 1} if way.speculation == "off" else {
            "delay_s": 0.004, "tokens_at_once": 3,
        }  # fmt: skip

    started = serving(habits)
    out = tmp_path / "accept.json"
    accept.main([str(SOUND), "--out", str(out), *only("drafts")])
    found = of(out)["drafts"]
    assert found["measured"]["different_answers"] == 0
    assert found["measured"]["speed_ratio"] > 1.8
    assert set(found["detail"]["by_type"]) == set(lines.DRAFTED)
    assert {each["mean_accepted"] for each in found["detail"]["by_type"].values()} == {2.0}
    assert len(started) == 2


def test_a_run_goes_on_and_another_checkpoint_begins_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def line(name: str) -> lines.Line:
        def run(desk: lines.Desk) -> Found:
            asked.append(name)
            if name == "third" and len(asked) == 3:
                raise RuntimeError("interrupted")
            return Found(True, 1.0, 1, {})

        return lines.Line(name, "anything", run)

    monkeypatch.setattr(accept, "LINES", tuple(line(name) for name in ("first", "second", "third")))
    golden = ROOT / "tests" / "golden" / "v41-tiny" / "model"
    out = tmp_path / "accept.json"
    with pytest.raises(RuntimeError):
        accept.main([str(golden), "--out", str(out)])
    assert list(of(out)) == ["first", "second"]
    accept.main([str(golden), "--out", str(out)])
    assert asked == ["first", "second", "third", "third"]
    accept.main([str(golden), "--out", str(out), "--n", "5"])  # as many questions were not asked before
    assert len(asked) == 7
    accept.main([str(SOUND), "--out", str(out), "--n", "5"])
    assert len(asked) == 10
    with pytest.raises(SystemExit):
        accept.main([str(SOUND), "--out", str(out), "--only", "fourth"])


def test_validity_is_by_the_schema_of_the_prompt() -> None:
    for question in questions("json", thinking=False, count=60):
        schema = _schema(question)
        right = question.expected.value
        assert is_valid(json.dumps(right), schema)
        name = next(iter(right))
        assert not is_valid(json.dumps({**right, name: None}), schema)
        assert not is_valid(json.dumps({key: value for key, value in right.items() if key != name}), schema)
        assert not is_valid(json.dumps(right)[:-1], schema)
        assert is_valid(json.dumps({**right, "more": 1}), schema) == ("additionalProperties" not in schema)
    assert not is_valid('{"a": 1, "a": 1}', {"type": "object"})
    assert not is_valid("true", {"type": "integer"})
    with pytest.raises(ValueError, match="pattern"):
        is_valid('"a"', {"type": "string", "pattern": "a"})


def test_json_is_valid_though_not_what_was_told(serving) -> None:
    """The line is about the schema; that the values are right is told beside it."""
    from contextlib import ExitStack

    serving(lambda checkpoint, way: {"valid_but_wrong": True})
    with ExitStack() as stack:
        found = _json(lines.Desk(SOUND, 6, stack))
    assert found.passed
    assert found.measured == 1.0
    assert found.detail["right"] < 0.5
