"""`deskfleet eval`: a real server asked in a process of its own, the table, and every wrong way of calling it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_process import CHECKPOINT, Done, deskfleet

from deskfleet.cli import eval as verb
from deskfleet.client import Reply
from deskfleet.evaluation.questions import TASKS, questions
from deskfleet.evaluation.report import Drafts, Outcome, Report, TaskRun


def test_a_checkpoint_is_served_and_asked() -> None:
    how = ("--n", "1", "--efforts", "off,30", "--max-tokens", "8", "--speculate", "2", "--json")
    done = deskfleet("eval", CHECKPOINT, *how, "--tasks", "launch,tool-calls,vision,prose")
    assert done.code == 0, done.err
    result = done.object
    assert result["model"] == CHECKPOINT.name
    assert result["rates"] == {"launch": 0, "tool-calls": 0, "vision": 0}, "random weights know no answer"
    asked = {task: (count["asked"], count["unanswered"]) for task, count in result["counts"].items()}
    assert asked == {"launch": (1, 0), "tool-calls": (2, 2), "vision": (2, 0), "prose": (1, 0)}
    too_long = [failure["error"] for failure in result["failures"] if failure["task"] == "tool-calls"]
    assert len(too_long) == 2
    assert all("exceeds the context of 1024 tokens" in error for error in too_long)
    assert result["efforts"]["off"]["mean_reasoning_tokens"] == 0
    assert result["efforts"]["30"]["mean_reasoning_tokens"] > 0
    assert result["drafts"]["prose"]["num_drafted"] > 0
    assert "6 of 6: prose, effort off: 1 asked (" in done.err


def test_the_table_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    runs = []
    for number, task in enumerate(TASKS):
        outcomes = []
        for effort in (None, 10, 25, 50, 75, 100):
            for question in questions(task, thinking=effort is not None, count=1):
                content = question.expected.text if number % 2 else "no\x1b[31m\nno " * 20
                reply = Reply(content, "", (), "stop", 100, effort or 0, 1.0, 2.0)
                outcomes.append(Outcome(question, effort, reply))
        runs.append(TaskRun(task, tuple(outcomes), 1.0, Drafts(10, 50, 25)))
    verb._print(Report("http://here", "pocket", {}, tuple(runs)))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("\x1b" in line for line in lines)
    spelled = next(line.split() for line in lines if line.startswith("count "))
    assert spelled == ["count", "100%", "100%", "100%", "100%", "100%", "100%", "6", "99.0", "2.50"]
    assert next(line.split() for line in lines if line.startswith("spell ")).count("0%") == 6
    lengths = next(line.split() for line in lines if line.startswith("thought tokens"))
    assert lengths[2:] == ["0", "10", "25", "50", "75", "100"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--tasks", "sing"), 2, ("'sing'", "arithmetic")),
        (("--tasks", "spell,spell"), 2, ("spell",)),
        (("--efforts", "off,101"), 2, ("101", "1 and 100")),
        (("--efforts", "low"), 2, ("'low'", "--efforts")),
        (("--needle-tokens", "many"), 2, ("'many'", "--needle-tokens")),
        (("--n", "0"), 2, ("num_questions 0",)),
        (("--tasks", "launch", "--efforts", "50"), 2, ("launch", "50")),
        (("--tp", "2"), 2, ("decided by the server",)),
        ((), 3, ("no server answers", "deskfleet serve")),
    ],
    ids=str,
)
def test_what_cannot_be_asked(
    call: Callable[..., Done], arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        done = call("eval", url, *arguments, "--json")
    assert done.code == code
    assert all(word in done.err for word in words)
    assert json.loads(done.out)["error"]["exit_code"] == code


def test_a_checkpoint_that_is_not_there(call: Callable[..., Done], tmp_path: Path) -> None:
    done = call("eval", tmp_path / "gone", "--n", "1")
    assert done.code == 3
    assert "gone" in done.err
