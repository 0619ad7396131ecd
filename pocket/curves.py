"""A training's log as pictures: `python -m pocket.curves LOG.jsonl... DIRECTORY`.

Owns what of a log is drawn. Logs of several pieces are read in their order, as one training; a log that does not tell
something yet (the first one says nothing of unquantised losses) leaves its picture empty.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pocket.plot import Axis, plot

_MILLION = 1e6
_NOT_TASKS = ("event", "step", "tokens")
_HELD_OUT, _UNQUANTISED, _ACCEPTED = "held out", "held out, unquantised", "accepted"

Series = dict[str, list[tuple[float, float]]]


@dataclass
class Curves:
    """What a log tells over millions of tokens: one line a name. `stages` are where each stage begins."""

    stages: dict[str, float] = field(default_factory=dict)
    losses: Series = field(default_factory=dict)
    training: Series = field(default_factory=dict)
    rate: Series = field(default_factory=dict)
    quantisation: Series = field(default_factory=dict)
    accepted: Series = field(default_factory=dict)


def read(paths: Sequence[Path]) -> Curves:
    """Read logs, in the order in which they were written."""
    curves = Curves()
    offset = tokens = 0
    stage = ""
    latest: dict[str, float] = {}
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines():
            line: dict[str, Any] = json.loads(text)
            event = line.get("event")
            if event == "begin":
                if line["stage"] != stage:
                    offset, stage = offset + tokens, line["stage"]
                    curves.stages[stage] = offset / _MILLION
                tokens = line["tokens"]
                continue
            tokens = line.get("tokens", tokens)
            at = (offset + tokens) / _MILLION
            if event is None:
                _step(curves, stage, at, line)
            elif event in (_HELD_OUT, _UNQUANTISED, _ACCEPTED):
                values = {name: value for name, value in line.items() if name not in _NOT_TASKS}
                if event == _HELD_OUT:
                    latest = values
                    _add(curves.losses, at, values)
                elif event == _UNQUANTISED:
                    _add(curves.quantisation, at, _differences(latest, values))
                else:
                    _add(curves.accepted, at, values)
    return curves


def _step(curves: Curves, stage: str, at: float, line: Mapping[str, Any]) -> None:
    curves.rate.setdefault("learning rate", []).append((at, line["rate"]))
    name = "drafts to target" if "distance" in line else "text, every task"
    curves.training.setdefault(name, []).append((at, line.get("distance", line.get("text"))))
    if "length" in line:
        curves.accepted.setdefault("training, every task", []).append((at, line["length"]))


def _differences(quantised: Mapping[str, float], plain: Mapping[str, float]) -> dict[str, float]:
    """How much quantisation costs each task, and all on average."""
    each = {task: quantised[task] - loss for task, loss in plain.items() if task in quantised}
    return each | {"mean": statistics.fmean(each.values())} if each else {}


def _add(series: Series, at: float, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        series.setdefault(name, []).append((at, value))


def pictures(curves: Curves) -> dict[str, str]:
    """The pictures by file name."""
    tokens = "million tokens"

    def over(values: Series) -> Axis:
        return Axis.around(tokens, [x for line in values.values() for x, _ in line], low=0.0)

    def along(name: str, values: Series, **how: Any) -> Axis:
        return Axis.around(name, [y for line in values.values() for _, y in line], **how)

    def draw(title: str, name: str, values: Series, **how: Any) -> str:
        x = over(values)
        marks = {stage: at for stage, at in curves.stages.items() if at <= x.high}
        return plot(title, values, x, along(name, values, **how), marks=marks)

    return {
        "pocket-losses.svg": draw(
            "Held-out loss of each task", "nats a weighted token", curves.losses, is_log=True
        ),
        "pocket-training.svg": draw("Training loss", "nats a weighted token", curves.training, is_log=True),
        "pocket-rate.svg": draw("Learning rate", "learning rate", curves.rate, is_log=True),
        "pocket-quantisation.svg": draw(
            "What quantisation costs", "nats more than without", curves.quantisation
        ),
        "pocket-drafts.svg": draw("Drafts accepted of 5", "drafts", curves.accepted, low=0.0),
    }


def main(arguments: Sequence[str]) -> None:
    """Draw."""
    if len(arguments) < 2:
        raise SystemExit("python -m pocket.curves LOG.jsonl... DIRECTORY")
    *logs, directory = map(Path, arguments)
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pictures(read(logs)).items():
        (directory / name).write_text(text, encoding="utf-8")
        print(directory / name)


if __name__ == "__main__":
    main(sys.argv[1:])


__all__ = ["Curves", "main", "pictures", "read"]
