"""What gates leave behind: JSON, JUnit, the page, the exchanges as files, exit codes. About 5 s."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from gate_runs import ALL_GATES, SMALL, ask, known

from deskfleet.client import Client
from deskfleet.errors import ConfigError
from deskfleet.gates.contract import Finding, Grid, Limits, Series
from deskfleet.gates.evidence import write_evidence
from deskfleet.gates.figures import to_svg
from deskfleet.gates.junit import to_junit
from deskfleet.gates.page import to_page
from deskfleet.gates.report import Report
from deskfleet.gates.run import run_gates, select
from deskfleet.testing import saboteurs as bad
from deskfleet.testing.honest import Asked, HonestEndpoint
from deskfleet.testing.oracle import Said

SOME = ["model", "garble", "tool-calls", "scoring"]
HOSTILE = "</pre><script>alert(1)</script>\x00\x1b[31m & ]]>"


class Hostile(HonestEndpoint):
    """Answers with text that means harm to whoever shows it."""

    def said(self, asked: Asked) -> Said:
        return Said(HOSTILE * 3)


async def test_the_report_as_json() -> None:
    report = await ask(bad.DroppedLastCall, SOME)
    value = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (value["verdict"], value["exit_code"]) == ("fail", 1)
    assert value["counts"] == {"pass": 2, "fail": 1, "skip": 1}
    gates = {gate["name"]: gate for gate in value["gates"]}
    assert list(gates) == SOME
    assert {"name", "verdict", "measured", "threshold"} <= gates["tool-calls"].keys()
    assert gates["tool-calls"]["verdict"] == "fail"
    assert gates["tool-calls"]["cause"] == "answer"
    assert gates["tool-calls"]["command"] == f"deskfleet verify {value['url']} --seed 7 --gate tool-calls"
    assert gates["scoring"]["reason"].startswith("there is nothing to compare with")
    assert value["questions_reason"] == "the served model is called 'honest', which is not Pocket"


async def test_junit_has_a_case_for_each_gate() -> None:
    report = await ask(Hostile, SOME)
    suite = ElementTree.fromstring(to_junit(report))[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "2", "1")
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert list(cases) == SOME
    failure = cases["tool-calls"].find("failure")
    assert failure is not None
    assert "again: deskfleet verify" in (failure.text or "")
    assert cases["scoring"].find("skipped") is not None


async def test_the_page_stands_alone_and_trusts_no_answer() -> None:
    report = await ask(Hostile, [*SOME, "needle-ladder"])
    page = to_page(report)
    assert "<script" not in page.lower()
    assert "&lt;script&gt;alert(1)" in page, "the answer is shown, as text"
    assert not re.search(r"(src|href)=[\"']?(https?:|//)", page)
    for gate in ("tool-calls", "garble", "scoring"):
        assert gate in page
    assert "half a command" not in page  # of a gate that was not asked
    # Every element that is opened is closed: no answer can break out of its place.
    for tag in ("main", "section", "article", "details", "table", "dl", "svg", "pre"):
        assert len(re.findall(rf"<{tag}[ >]", page)) == page.count(f"</{tag}>"), tag


async def test_evidence_can_be_sent_again(tmp_path: Path) -> None:
    async with bad.DroppedLastCall(known=known()) as server:
        limits = replace(SMALL)
        report = await run_gates(server.url, select(ALL_GATES, ["tool-calls"], ()), limits, verb="smoke")
        told = write_evidence(report, str(tmp_path / "kept"))
        files = told.results[0].files
        wrong = [json.loads((tmp_path / "kept" / name).read_text()) for name in files if "wrong" in name]
        assert wrong
        assert "a dropped tool call" in wrong[0]["wrong"]
        assert len(wrong[0]["reply"]["tool_calls"]) == 1
        async with Client(server.url) as client:
            again = await client.ask(wrong[0]["request"])
        assert [call["function"]["name"] for call in again.tool_calls] == ["get_weather"]
    assert json.loads((tmp_path / "kept" / "report.json").read_text())["evidence_dir"] == str(
        tmp_path / "kept"
    )
    assert (tmp_path / "kept" / "report.html").read_text().startswith("<!doctype html>")
    ElementTree.parse(tmp_path / "kept" / "report.xml")


async def test_evidence_that_cannot_be_written(tmp_path: Path) -> None:
    report = await ask(HonestEndpoint, ["model"])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_evidence(report, str(tmp_path / "file"))


async def test_repeating_finds_what_fails_now_and_then() -> None:
    class Sometimes(HonestEndpoint):
        def said(self, asked: Asked) -> Said:
            return Said("nothing") if asked.number == 4 else super().said(asked)

    assert (await ask(Sometimes, ["image"], rounds=1)).verdict == "pass"
    report = await ask(Sometimes, ["image"], rounds=3)
    (result,) = report.results
    assert result.finding.reason.startswith("failed in 1 of 3 rounds")
    assert result.rounds == 3


async def test_verdicts_and_exit_codes() -> None:
    report = await ask(HonestEndpoint, ["model", "scoring"])
    assert (report.verdict, report.exit_code) == ("pass", 0)
    only_skips = await ask(HonestEndpoint, ["scoring", "lm-eval"])
    assert (only_skips.verdict, only_skips.exit_code) == ("skip", 3)
    # A gate that could not do its work is neither the server's failure nor a pass.
    broken = _with(report, Finding("skip", "", "the gate could not", "tool"))
    assert (broken.verdict, broken.exit_code) == ("pass", 3)


def _with(report: Report, finding: Finding) -> Report:
    first, second = report.results
    return replace(report, results=(first, replace(second, finding=finding)))


async def test_a_server_that_goes_ends_the_run_without_blame_for_later_gates() -> None:
    report = await ask(bad.DiesOnLongPrompt, ["needle", "fairness", "soak"])
    found = {result.gate.name: result for result in report.results}
    assert found["needle"].finding.cause == "server"
    assert "rank 1 died" in found["needle"].finding.reason
    for later in ("fairness", "soak"):
        assert found[later].verdict == "skip"
        assert found[later].num_asked == 0
    assert report.exit_code == 1


async def test_the_same_seed_asks_the_same() -> None:
    async def asked(seed: int) -> list[object]:
        report = await ask(HonestEndpoint, ["answers-at-once"], seed=seed)
        return [answered.body["messages"] for answered in report.results[0].evidence]

    assert await asked(3) == await asked(3) != await asked(4)


async def test_slow_is_not_silent() -> None:
    """Patience is for silence: an answer that keeps coming may take longer."""
    slow = {"event_s": 0.05}
    report = await ask(HonestEndpoint, ["tool-calls"], endpoint=slow, patience_s=0.4)
    (result,) = report.results
    assert result.verdict == "pass", result.finding.reason
    assert max(answered.ended_s - answered.began_s for answered in result.evidence) > 0.4
    endless = await ask(HonestEndpoint, ["counting"], endpoint=slow, patience_s=0.2)
    assert endless.results[0].finding.cause == "time"
    assert "pieces of it came" in endless.results[0].finding.reason


def test_figures_are_sound_xml() -> None:
    grid = Grid("<found> & lost", ("1", "2"), (("0%", (1.0, 0.0)), ("50%", (None, 0.5))))
    series = Series("rate", "seconds", "tok/s", (("a", ((0.0, 1.0), (1.0, 3.0))),))
    for figure in (grid, series, Series("one", "x", "y", (("a", ((1.0, 0.0),)),))):
        ElementTree.fromstring(to_svg(figure))
    drawn = to_svg(grid)
    assert [drawn.count(sign) for sign in (">found<", ">lost<", ">50%<", ">–<")] == [1, 1, 2, 1]
    assert to_svg(Series("none", "x", "y", ())) == ""


def test_limits_are_what_the_commands_say() -> None:
    assert Limits().soak_s == 1800
