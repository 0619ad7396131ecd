"""The Grafana board, the alerts and the example for Prometheus: every metric and label they name exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_metrics import everything

from deskfleet.gateway.metric_names import CATALOGUE

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = re.compile(r"\b(?:vllm:|deskfleet_)\w+")
USE = re.compile(r"((?:vllm:|deskfleet_)\w+)(?:\{([^}]*)\})?")
BY = re.compile(r"\bby \(([^)]*)\)")
OF_SCRAPE = {"instance", "job", "le"}

SAMPLES = {name: spec for spec in CATALOGUE.values() for name in spec.sample_names}


def queries() -> list[str]:
    board = json.loads((DEPLOY / "grafana" / "deskfleet.json").read_text())
    panels = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    variables = [str(each["definition"]) for each in board["templating"]["list"] if "definition" in each]
    alerts = re.findall(r"expr: (?:>\s*)?(.*)", (DEPLOY / "alerts.yml").read_text())
    return [*panels, *variables, *alerts]


def test_every_metric_of_the_board_and_the_alerts_exists() -> None:
    found = {name for query in queries() for name in NAME.findall(query)}
    assert found <= set(SAMPLES), f"no such metrics: {sorted(found - set(SAMPLES))}"
    assert len(found) > 30
    exposed = everything()
    for name in found:
        assert re.search(rf"^{name}[ {{]", exposed, re.MULTILINE), f"{name} is never exposed"


@pytest.mark.parametrize("query", queries())
def test_a_query_uses_labels_that_its_metrics_have(query: str) -> None:
    names = [name for name, _ in USE.findall(query)]
    assert names, query
    for name, selector in USE.findall(query):
        labels = set(re.findall(r"(\w+)\s*=~?", selector))
        assert labels - OF_SCRAPE <= set(SAMPLES[name].labels), f"{name} has no {labels}"
    for group in BY.findall(query):
        for label in re.split(r",\s*", group):
            assert label in OF_SCRAPE or any(label in SAMPLES[name].labels for name in names), label


def test_rates_are_of_counters_and_quantiles_of_histograms() -> None:
    for query in queries():
        for kind, name in re.findall(r"(rate|increase)\(((?:vllm:|deskfleet_)\w+)", query):
            assert SAMPLES[name].kind in ("counter", "histogram"), f"{kind} of {name}: {query}"
        if "histogram_quantile" in query:
            assert all(name.endswith("_bucket") for name in NAME.findall(query)), query


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    board: dict[str, Any] = json.loads((DEPLOY / "grafana" / "deskfleet.json").read_text())
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own
        assert panel["title"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
