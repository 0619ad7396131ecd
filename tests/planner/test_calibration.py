"""Boots against plans: every correction by hand, and facts that belong elsewhere."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from deskfleet.errors import ConfigError
from deskfleet.planner.budget import BudgetLine
from deskfleet.planner.calibration import (
    BootFacts,
    Calibration,
    apply_calibration,
    calibrate,
    compare,
    read_calibration,
    read_facts,
)
from deskfleet.planner.planfile import calibration_to_dict

LINES = [
    BudgetLine("experts", "weights", 1000, "persistent", "f", "r"),
    BudgetLine("head", "weights", 200, "persistent", "f", "r"),
    BudgetLine("pool", "kv", 50, "persistent", "f", "r"),
    BudgetLine("scores", "kv", 7, "temporary", "f", "r", phase="prefill"),
]
BOOT = BootFacts("vllm", "0.33.0", "spark", "v4.1-flash", 4, 0, {}, "a boot")


def boot(source: str = "a boot", **lines: int) -> BootFacts:
    return replace(BOOT, lines={name.replace("_", ":"): size for name, size in lines.items()}, source=source)


def applied(
    lines: list[BudgetLine], found: Calibration, engine: str, kind: str, version: str = "0.33"
) -> list[BudgetLine]:
    return apply_calibration(lines, [found], engine=engine, engine_version=version, node_kind=kind)


def sizes(lines: list[BudgetLine]) -> dict[str, int]:
    return {line.name: line.num_bytes for line in lines}


def test_lines_and_groups_are_compared_and_temporaries_are_no_part_of_a_group() -> None:
    rows = compare(LINES, boot(pool=60, group_weights=1230, group_kv=40, scores=7))
    assert [(row.name, row.planned_bytes, row.measured_bytes) for row in rows] == [
        ("pool", 50, 60),
        ("group:weights", 1200, 1230),
        ("group:kv", 50, 40),
        ("scores", 7, 7),
    ]
    assert [row.difference for row in rows] == [0.2, 0.025, -0.2, 0.0]


def test_of_several_boots_the_largest_need_counts_and_the_next_plan_has_it() -> None:
    boots = [boot("first", pool=60, head=190), boot("second", pool=75, head=180)]
    found = calibrate([(LINES, each) for each in boots])
    assert (found.corrections, found.sample) == ({"pool": 25, "head": -10}, tuple(boots))
    lines = applied(LINES, found, "vllm", "spark")
    assert sizes(lines) == {"experts": 1000, "head": 190, "pool": 75, "scores": 7}
    assert [line.basis for line in lines] == ["computed", "measured", "measured", "computed"]
    assert lines[2].formula == "f; +25 B by 2 boots of vllm 0.33.0"
    # What is compared with the next boot is the arithmetic, not the last boot.
    assert compare(lines, boot(pool=80))[0].planned_bytes == 50


def test_a_group_takes_what_its_own_lines_do_not_explain() -> None:
    found = calibrate([(LINES, boot(group_weights=1300, head=230))])
    lines = applied(LINES, found, "vllm", "spark")
    assert sizes(lines) == {"experts": 1070, "head": 230, "pool": 50, "scores": 7}


def test_a_correction_holds_for_its_engine_and_machine_alone() -> None:
    found = calibrate([(LINES, boot(pool=60))])
    assert applied(LINES, found, "sglang", "spark") == LINES
    assert applied(LINES, found, "vllm", "h200") == LINES
    assert applied(LINES, found, "vllm", "spark", version="0.3") == LINES
    assert applied(LINES[:2], found, "vllm", "spark") == LINES[:2]
    shrunk = replace(found, corrections={"pool": -60})
    assert sizes(applied(LINES, shrunk, "vllm", "spark"))["pool"] == 0


def test_facts_of_what_is_not_planned_and_boots_of_two_versions_are_refused() -> None:
    with pytest.raises(ConfigError, match="a boot measures 'spool', which the plan does not have") as raised:
        compare(LINES, boot(spool=1))
    assert raised.value.hint is not None
    assert "pool" in raised.value.hint
    other = replace(boot("other", pool=1), engine_version="0.34.0")
    with pytest.raises(ConfigError, match=r"other is of vllm 0\.34\.0 on spark, a boot of vllm 0\.33\.0"):
        calibrate([(LINES, boot(pool=1)), (LINES, other)])
    with pytest.raises(ConfigError, match="no boot"):
        calibrate([])


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    facts, kept = tmp_path / "facts.json", tmp_path / "kept.json"
    facts.write_text(json.dumps(asdict(boot(pool=60))))
    assert read_facts(facts) == boot(pool=60)
    found = calibrate([(LINES, read_facts(facts))])
    kept.write_text(json.dumps(calibration_to_dict(found)))
    assert read_calibration(kept) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no BootFacts"),
        ("{}", "missing required field `engine`"),
        (json.dumps(asdict(boot(pool=60)) | {"rank": "0"}), "Expected `int`, got `str`"),
    ],
)
def test_files_that_are_no_facts(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "facts.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_facts(path)
    with pytest.raises(ConfigError, match=f"is no {Calibration.__name__}"):
        read_calibration(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_facts(tmp_path / "none.json")
