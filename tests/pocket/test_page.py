"""What is drawn and written of a training and of measurements: from the files, and up to date."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deskfleet.model.embedded import locate
from pocket.curves import pictures, read
from pocket.kept import fingerprint
from pocket.page import LOG, PAGE, files, filled, latest, parts
from pocket.plot import Axis, plot
from pocket.stages import Phase
from pocket.train import smoke_options, train


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_page_and_its_pictures_are_current() -> None:
    for path, text in files(LOG, PAGE).items():
        assert path.read_text("utf-8") == text, f"{path.name}: python -m pocket.page"


def log(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_stages_and_pieces_of_a_log_follow_each_other(tmp_path: Path) -> None:
    first = log(
        tmp_path / "1.jsonl",
        {"event": "begin", "stage": "base", "step": 0, "tokens": 0},
        {"step": 1, "tokens": 1_000_000, "rate": 0.1, "text": 4.0},
        {"event": "held out", "step": 1, "tokens": 1_000_000, "count": 2.0, "json": 3.0},
        {"event": "held out, unquantised", "step": 1, "tokens": 1_000_000, "count": 1.5, "json": 2.9},
        {"event": "saved", "stage": "base", "step": 1, "tokens": 1_000_000},
    )
    second = log(
        tmp_path / "2.jsonl",
        {"event": "begin", "stage": "base", "step": 1, "tokens": 1_000_000},
        {"step": 2, "tokens": 3_000_000, "rate": 0.2, "text": 3.0},
        {"event": "begin", "stage": "draft", "step": 0, "tokens": 0},
        {"step": 1, "tokens": 500_000, "rate": 0.3, "distance": 0.5, "length": 2.0},
        {"event": "accepted", "step": 1, "tokens": 500_000, "prose": 1.0, "json": 4.0},
    )
    curves = read([first, second])
    assert curves.stages == {"base": 0.0, "draft": 3.0}
    assert curves.rate["learning rate"] == [(1.0, 0.1), (3.0, 0.2), (3.5, 0.3)]
    assert curves.training == {"text, every task": [(1.0, 4.0), (3.0, 3.0)], "drafts to target": [(3.5, 0.5)]}
    assert curves.losses == {"count": [(1.0, 2.0)], "json": [(1.0, 3.0)]}
    assert curves.quantisation["count"] == [(1.0, 0.5)]
    assert curves.quantisation["mean"] == [(1.0, pytest.approx(0.3))]
    assert curves.accepted == {
        "training, every task": [(3.5, 2.0)],
        "prose": [(3.5, 1.0)],
        "json": [(3.5, 4.0)],
    }


@pytest.mark.parametrize("stage", ["base", "draft"])
def test_a_training_writes_what_is_drawn(stage: str, tmp_path: Path) -> None:
    given = smoke_options(tmp_path, 1.0, stage=stage)
    mixture = '{"count": 0.5, "arithmetic": 0.5}'
    plan = replace(given.stage, tokens=1_024, mixture=mixture, phases=(Phase(1.0, 512),))
    train(replace(given, stage=plan, evaluations=2, log_every=1))
    curves = read([tmp_path / "log.jsonl"])
    assert set(curves.losses) == {"count", "arithmetic"}
    assert set(curves.quantisation) == {"count", "arithmetic", "mean"}
    assert max(abs(y) for _, y in curves.quantisation["mean"]) < 0.2
    if stage == "draft":
        assert {"count", "arithmetic"} <= set(curves.accepted)
        assert all(0 <= length <= 5 for line in curves.accepted.values() for _, length in line)
    for text in pictures(curves).values():
        ET.fromstring(text)


def test_lines_lie_where_their_values_are() -> None:
    text = plot("a & b", {"<x>": [(0, 1), (10, 100)]}, Axis("t", 0, 10), Axis("y", 1, 100, is_log=True))
    root = ET.fromstring(text)
    (line,) = [each for each in root if each.tag.endswith("polyline")]
    assert line.get("points") == "80.0,345.0 560.0,30.0"
    labels = [each.text for each in root if each.tag.endswith("text")]
    assert {"a & b", "<x>", "1", "10", "100", "t", "y"} <= set(labels)
    assert Axis.around("y", [0.002, 3.0, 0.0], is_log=True).marks() == pytest.approx(
        [0.001, 0.01, 0.1, 1, 10]
    )
    assert Axis.around("y", [0, 23], low=0.0).marks() == [0, 5, 10, 15, 20]
    assert Axis.around("y", [], is_log=True).marks() == [1, 10]


def test_parts_come_from_the_latest_files_and_marks_must_be_there(tmp_path: Path) -> None:
    assert set(parts(tmp_path).values()) == {"Not measured yet.\n"}
    for day, verdict in (("2026-12-01", "fail"), ("2026-12-02", "pass")):
        line = {"limit": ">= 95 %", "measured": 0.97, "asked": 60, "verdict": verdict}
        cells = [{"num_tokens": 4000, "depth": 0.5, "asked": 1, "right": 1}]
        provenance = {"command": "c", "date": f"{day}T10:00", "commit": "a" * 40, "is_dirty": True}
        lines = {"facts": line, "needle": {**line, "detail": {"cells": cells}}}
        found = {
            "provenance": {**provenance, "cpu": "x", "num_cores": 2},
            "lines": lines,
            "sha256": "ab" * 32,
        }
        (tmp_path / f"{day}-accept.json").write_text(json.dumps(found))
    made = parts(tmp_path)["acceptance"]
    assert "| facts | >= 95 % | 0.97 | 60 | pass |" in made
    assert "| 4,000 | 1 of 1 |" in made
    assert "From `pocket/log/2026-12-02-accept.json`, `c` on 2026-12-02, commit `aaaaaaaaaaaa` with" in made
    page = "a\n<!-- begin acceptance -->\nold\n<!-- end acceptance -->\nb\n"
    assert filled(page, {"acceptance": made}) == page.replace("old\n", made)
    with pytest.raises(ValueError, match="no part 'variants'"):
        filled(page, {"variants": ""})


def test_what_the_page_says_is_said_of_the_checkpoint_that_ships() -> None:
    for kind in ("accept", "variants"):
        path = latest(LOG, kind)
        assert path is not None
        assert json.loads(path.read_text("utf-8"))["sha256"] == fingerprint(locate("pocket"))


def test_every_picture_of_the_page_exists() -> None:
    for name in re.findall(r"\]\((pocket-[a-z]+\.svg)\)", PAGE.read_text("utf-8")):
        ET.fromstring((PAGE.parent / name).read_text("utf-8"))
