"""`deskfleet smoke` and `deskfleet verify` as users call them, in processes of their own. About 20 s."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from gate_runs import Done, deskfleet, known

from deskfleet.gates.registry import ACCEPTANCE_GATES, LAUNCH_GATES
from deskfleet.testing import saboteurs as bad
from deskfleet.testing.honest import HonestEndpoint


async def test_a_sound_server_passes_and_nothing_is_left_behind(tmp_path: Path) -> None:
    async with HonestEndpoint(known=known()) as server:
        done = await deskfleet(
            "smoke", server.url, "--junit", tmp_path / "j.xml", "--html", tmp_path / "p.html"
        )
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    for gate in LAUNCH_GATES:
        assert any(line.startswith("pass") and gate.name in line for line in lines), gate.name
    assert lines[-1].startswith("verdict: pass (18 passed, 0 failed, 0 skipped) in ")
    assert "questions: general, because the served model is called 'honest'" in done.err
    assert "pass  counting (" in done.err
    assert "evidence" not in done.out
    assert (tmp_path / "j.xml").read_text().count("<testcase") == len(LAUNCH_GATES)
    assert "18 gates passed" in (tmp_path / "p.html").read_text()


async def test_a_fault_is_told_with_what_to_do(tmp_path: Path) -> None:
    async with bad.DroppedLastCall(known=known()) as server:
        how = ("--only", "tool-calls", "--only", "json", "--seed", "5", "--evidence", tmp_path / "kept")
        done = await deskfleet("smoke", server.url, *how)
        assert done.code == 1
        again = f"deskfleet smoke {server.url} --seed 5 --gate tool-calls"
        assert f"again: {again}" in done.out
        assert "fail: tool-calls: " in done.out
        assert "a dropped tool call: 1 of 2 came, without set_timer" in done.out
        # The command that is named fails in the same way.
        repeated = await deskfleet(*again.split()[1:], "--json")
    assert repeated.code == 1
    value = json.loads(repeated.out)
    assert [gate["name"] for gate in value["gates"]] == ["tool-calls"]
    assert "a dropped tool call: 1 of 2 came" in value["gates"][0]["reason"]
    assert value["provenance"]["command"].startswith("deskfleet ")
    assert Path(value["evidence_dir"]).is_dir(), "what failed is kept without being asked"
    assert (tmp_path / "kept" / "report.html").is_file()
    assert list((tmp_path / "kept" / "tool-calls").glob("*-wrong.json"))


async def test_verify_quick_asks_both_kinds_of_gates() -> None:
    async with HonestEndpoint(known=known()) as server:
        skipped = [word for name in ("soak", "long-prompt") for word in ("--skip", name)]
        done = await deskfleet("verify", server.url, "--quick", "--json", *skipped)
    assert done.code == 0, done.err
    value = json.loads(done.out)
    names = [gate["name"] for gate in value["gates"]]
    asked = [*LAUNCH_GATES, *(gate for gate in ACCEPTANCE_GATES if gate.is_quick)]
    assert names == [gate.name for gate in asked if gate.name not in ("soak", "long-prompt")]
    assert value["gates"][-1]["figures"][0]["kind"] == "grid"
    assert "--quick" in value["gates"][0]["command"]


async def test_progress_of_a_long_gate_is_told() -> None:
    async with HonestEndpoint(known=known()) as server:
        done = await deskfleet("verify", server.url, "--only", "soak", "--hours", str(7 / 3600))
    assert done.code == 0, done.err
    progress = [line for line in done.err.splitlines() if line.startswith("      soak: ")]
    assert progress
    assert "of 7 s" in progress[0]
    assert "s left" in progress[0]


async def test_a_recorded_score_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "score.json"
    async with HonestEndpoint(known=known()) as server:
        first = await deskfleet("verify", server.url, "--gate", "scoring", "--record-score", file)
        assert first.code == 3, "nothing to compare with is no pass"
        assert (await deskfleet("verify", server.url, "--gate", "scoring", "--score", file)).code == 0
    async with bad.OtherModel(known=known()) as server:
        other = await deskfleet("verify", server.url, "--gate", "scoring", "--score", file)
    assert other.code == 1
    assert "scores differ" in other.out


async def refused(*arguments: object) -> Done:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens there
        return await deskfleet(
            *arguments[:1], f"http://127.0.0.1:{taken.getsockname()[1]}", *arguments[1:], "--json"
        )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("smoke",), 3, ("no server answers",)),
        (("smoke", "--only", "sing"), 2, ("there is no gate 'sing'", "counting")),
        (("smoke", "--only", "model", "--skip", "model"), 2, ("no gate is left",)),
        (("smoke", "--tp", "2"), 2, ("decided by the server",)),
        (("verify", "--score", "gone.json"), 2, ("gone.json",)),
        (("smoke", "--key-file", "gone"), 2, ("cannot read the key",)),
    ],
    ids=str,
)
async def test_what_cannot_be_asked(arguments: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    done = await refused(*arguments)
    assert done.code == code
    assert all(word in done.err for word in words)
    assert json.loads(done.out)["error"]["exit_code"] == code


async def test_questions_that_do_not_exist() -> None:
    async with HonestEndpoint(known=known()) as server:
        done = await deskfleet("smoke", server.url, "--questions", "big")
        assert done.code == 2
        assert "there are pocket, general" in done.err
        wanted = await deskfleet("smoke", server.url, "--model", "other", "--gate", "model")
    assert wanted.code == 1
    assert "a stale model: the server lists 'honest', wanted is 'other'" in wanted.out
