"""Corrupted variants of a checkpoint, and which questions see them: what a gate that asks can notice, and what not.

    python -m pocket.variants --list
    python -m pocket.variants NAME OUTPUT                # write one as a checkpoint directory
    python -m pocket.variants --table --out FILE.json    # ask all of them, sound one first

Owns what counts as seen, and the table. The variants themselves are `pocket.corruptions`'s.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskfleet.errors import DeskfleetError
from deskfleet.evaluation.report import Outcome, Report, mean_reasoning_tokens, rates
from deskfleet.evaluation.run import EvalSettings
from deskfleet.model.embedded import POCKET, locate
from pocket.corruptions import VARIANTS, Variant
from pocket.exam import Way, examine
from pocket.kept import kept_in, write_kept

_MOST_TOKENS = 128  # of an answer: enough for a call, and for prose to part ways
_DROP = 0.2  # of a rate, against the sound checkpoint's on the same questions


@dataclass(frozen=True)
class Seen:
    """What the questions saw of one variant; `refused` when it was not served at all.

    `same` of `asked` answers are those of the sound checkpoint, word for word. `failed` names the tasks that tell.
    """

    name: str
    what: str
    refused: str | None
    rates: Mapping[str, float]
    reasoning_tokens: Mapping[str, float | None]
    effort_rank_correlation: float | None
    same: int
    asked: int
    failed: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "what": self.what,
            "refused": self.refused,
            "rates": dict(self.rates),
            "reasoning_tokens": dict(self.reasoning_tokens),
            "effort_rank_correlation": self.effort_rank_correlation,
            "same_answers": self.same,
            "asked": self.asked,
            "failed": list(self.failed),
        }


def look(
    checkpoint: Path, names: Sequence[str], *, num_questions: int, say: Callable[[str], None]
) -> Iterable[Seen]:
    """Yield what is seen of the sound checkpoint (`sound`), then of each variant, on the same questions."""
    chosen = [VARIANTS[name] for name in names]
    kinds = {(variant.tasks, variant.efforts) for variant in chosen}
    sound = {kind: examine(checkpoint, _settings(*kind, num_questions)) for kind in sorted(kinds, key=repr)}
    reports = list(sound.values())
    everything = [outcome for report in reports for outcome in report.outcomes]
    yield _seen("sound", "nothing is changed", reports, _Sound(everything))
    for variant in chosen:
        say(f"{variant.name}: {variant.what}")
        own = sound[variant.tasks, variant.efforts]
        try:
            report = _report_of(variant, checkpoint, num_questions)
        except DeskfleetError as error:
            why = re.sub(r"\S*/", "", error.message)  # without the directories of this run
            yield Seen(variant.name, variant.what, why, {}, {}, None, 0, 0, ("refused",))
            continue
        yield _seen(variant.name, variant.what, [report], _Sound(own.outcomes))


def _report_of(variant: Variant, checkpoint: Path, num_questions: int) -> Report:
    settings = _settings(variant.tasks, variant.efforts, num_questions)
    way = Way(tp_size=variant.tp_size, fault=variant.fault)
    if variant.edit is None:
        return examine(checkpoint, settings, way)
    # Beside the checkpoint where that can be written, so that files can be linked.
    with tempfile.TemporaryDirectory(prefix="pocket-variant-") as scratch:
        directory = Path(scratch) / variant.name
        variant.write(checkpoint, directory)
        return examine(directory, settings, way)


def _settings(tasks: tuple[str, ...], efforts: tuple[int, ...], num_questions: int) -> EvalSettings:
    return EvalSettings(
        tasks=tasks,
        efforts=efforts or (None,),
        num_questions=num_questions,
        concurrency=16,
        needle_tokens=(256,),
        max_tokens=None if efforts else _MOST_TOKENS,
    )


class _Sound:
    """The sound checkpoint's answers, to hold others against."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.rates = rates(outcomes)
        self._said = {_key(outcome): _said(outcome) for outcome in outcomes}

    def num_same(self, outcomes: Sequence[Outcome]) -> int:
        """How many answers are the same."""
        return sum(self._said.get(_key(outcome)) == _said(outcome) for outcome in outcomes)


def _key(outcome: Outcome) -> str:
    return f"{outcome.question.task} {outcome.effort} {outcome.question.request!r}"


def _said(outcome: Outcome) -> tuple[str, str, str] | None:
    reply = outcome.reply
    return None if reply is None else (reply.reasoning, reply.content, json.dumps(reply.tool_calls))


def _seen(name: str, what: str, reports: Sequence[Report], sound: _Sound) -> Seen:
    outcomes = [outcome for report in reports for outcome in report.outcomes]
    own = rates(outcomes)
    with_efforts = next((report for report in reports if report.efforts != [None]), None)
    correlation = None if with_efforts is None else with_efforts.effort_rank_correlation()
    lengths: dict[str, float | None] = {}
    if with_efforts is not None:
        lengths = {
            str(effort): mean_reasoning_tokens(with_efforts.at(effort)) for effort in with_efforts.efforts
        }
    same = sound.num_same(outcomes)
    failed = [task for task, rate in own.items() if rate <= sound.rates[task] - _DROP]
    if with_efforts is not None and (correlation is None or correlation <= 0.9):
        failed.append("effort")
    if same < len(outcomes):
        failed.append("wording")
    return Seen(name, what, None, own, lengths, correlation, same, len(outcomes), tuple(failed))


def as_markdown(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The table variant x task of what `--table` wrote."""
    tasks = list(dict.fromkeys(task for each in found.values() for task in each["rates"]))
    lines = [
        f"| variant | what is wrong | {' | '.join(tasks)} | same words | seen by |",
        f"|---|---|{'---:|' * len(tasks)}---:|---|",
    ]
    for name, each in found.items():
        if each["refused"] is not None:
            lines.append(f"| {name} | {each['what']} |{' |' * len(tasks)} | refused before it answers |")
            continue
        cells = [f"{each['rates'][task]:.0%}" if task in each["rates"] else "" for task in tasks]
        same = f"{each['same_answers']} of {each['asked']}"
        lines.append(
            f"| {name} | {each['what']} | {' | '.join(cells)} | {same} | {_told(name, each['failed'])} |"
        )
    return "\n".join(lines) + "\n"


def _told(name: str, failed: Sequence[str]) -> str:
    if name == "sound":
        return ""
    by_answers = [task for task in failed if task != "wording"]
    return ", ".join(by_answers) or ("other words only" if failed else "**nothing**")


def _say(text: str) -> None:
    print(text, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Write a variant, or ask all of them."""
    parser = argparse.ArgumentParser(prog="python -m pocket.variants", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=sorted(VARIANTS), help="the variant to write")
    parser.add_argument("output", nargs="?", type=Path, help="a new directory")
    parser.add_argument("--checkpoint", default=POCKET, help="the sound one")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--table", action="store_true", help="ask every variant")
    parser.add_argument("--only", help="these variants, for --table")
    parser.add_argument("--n", type=int, default=10, help="questions of a task")
    parser.add_argument(
        "--out", type=Path, help="where the table goes as JSON; what is there is gone on with"
    )
    given = parser.parse_args(arguments)
    checkpoint = locate(given.checkpoint)
    if given.list:
        print("\n".join(f"{variant.name:18} {variant.what}" for variant in VARIANTS.values()))
    elif given.table:
        names = list(VARIANTS) if given.only is None else given.only.split(",")
        command = f"python -m pocket.variants --table --checkpoint {given.checkpoint} --n {given.n}"
        kept = kept_in(given.out, checkpoint, command, "variants")
        found = kept["variants"]
        missing = [name for name in names if name not in found]
        for seen in look(checkpoint, missing, num_questions=given.n, say=_say) if missing else ():
            found[seen.name] = seen.to_dict()
            if given.out is not None:
                write_kept(given.out, kept)
        print(as_markdown(found), end="")
    elif given.name and given.output:
        VARIANTS[given.name].write(checkpoint, given.output)
    else:
        parser.error("give a name and a directory, or --table, or --list")


if __name__ == "__main__":
    main()


__all__ = ["Seen", "as_markdown", "look", "main"]
