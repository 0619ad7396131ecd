"""Asks the training model what `deskfleet eval` asks a server, with and without its quantisation.

    python -m pocket.answer STATE --guess pocket/checkpoint --out FILE.json
    python -m pocket.answer --compare FILE.json EVAL.json  # beside `deskfleet eval --json` of the exported checkpoint

STATE is a directory of `pocket.train` (the unrounded parameters) or a checkpoint. `--guess` lets the engine answer
first, with a checkpoint like it, so that few texts are computed token by token. Owns which parameters answer, and the
comparison. The questions, the judgement and the shape of the report are those of `deskfleet.evaluation`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskfleet.endpoint import SamplingParams
from deskfleet.evaluation.questions import NEEDLE_TOKENS, TASKS, Question
from deskfleet.evaluation.report import Effort, Outcome, Report, TaskRun, effort_name
from deskfleet.evaluation.run import EvalSettings, as_values, what_is_asked
from deskfleet.model.checkpoint import CONFIG_NAME, Checkpoint
from deskfleet.model.config import ModelConfig
from pocket.data.ask import as_example, as_reply
from pocket.data.render import Document, Renderer
from pocket.data.stream import VISION
from pocket.export import export, named_parameters_of
from pocket.generate import answer_all
from pocket.load import parameters_of
from pocket.model.backbone import Backbone
from pocket.model.numerics import Numerics
from pocket.restore import models
from pocket.state import load_newest
from pocket.tokenizer import DIRECTORY, load_tokenizer

WAYS: Mapping[str, Numerics] = {
    "unquantised": Numerics(quantised=False, exact=True),
    "quantised": Numerics(quantised=True, exact=True, weights_are_rounded=True),
}
"""Ways to run the training model, both with the engine's attention scores."""

SETTINGS = EvalSettings(
    tasks=tuple(task for task in TASKS if task not in ("prose", "code")),
    efforts=(None, 25),
    num_questions=20,
    needle_tokens=NEEDLE_TOKENS,
)
"""What is asked when nobody says otherwise: as much as an H200 should answer in a minute a way."""


@dataclass(frozen=True)
class Exam:
    """What is asked: questions with their efforts, prompts, and how long answers may be."""

    asked: Sequence[tuple[Question, Effort]]
    prompts: Sequence[Document]
    limits: Sequence[int]

    @classmethod
    def of(cls, settings: EvalSettings, max_model_len: int) -> Exam:
        """Raises ConfigError when the settings leave nothing to ask."""
        renderer = Renderer(load_tokenizer(), VISION)
        asked = [
            (question, effort) for (_, effort), batch in what_is_asked(settings).items() for question in batch
        ]
        prompts = [renderer.question(as_example(question, effort)) for question, effort in asked]
        limits = [
            max(1, min(settings.max_tokens or question.max_tokens, max_model_len - len(prompt)))
            for (question, _), prompt in zip(asked, prompts, strict=True)
        ]
        return cls(asked, prompts, limits)

    def guesses(self, checkpoint: Path) -> list[tuple[int, ...]]:
        """What the engine answers with a checkpoint; nothing where a prompt has pictures."""
        from deskfleet.engine.llm import LLM

        plain = [number for number, prompt in enumerate(self.prompts) if not prompt.images]
        sampling = [SamplingParams(temperature=0, max_tokens=self.limits[number]) for number in plain]
        found: list[tuple[int, ...]] = [()] * len(self.prompts)
        with LLM(checkpoint) as llm:
            completions = llm.generate(
                [self.prompts[number].token_ids.tolist() for number in plain], sampling
            )
        for number, completion in zip(plain, completions, strict=True):
            found[number] = completion.token_ids
        return found


def examine(
    model: Backbone,
    exam: Exam,
    settings: EvalSettings,
    numerics: Numerics,
    *,
    batch_tokens: int,
    name: str,
    guesses: Sequence[Sequence[int]] | None = None,
) -> Report:
    """Ask the model and judge its answers."""
    begin = time.monotonic()
    said = answer_all(model, exam.prompts, exam.limits, numerics, batch_tokens=batch_tokens, guesses=guesses)
    seconds_s = time.monotonic() - begin
    outcomes = [
        Outcome(question, effort, as_reply(ids, thinking=effort is not None, seconds_s=seconds_s))
        for (question, effort), ids in zip(exam.asked, said, strict=True)
    ]
    runs = tuple(
        TaskRun(task, tuple(each for each in outcomes if each.question.task == task), seconds_s, None)
        for task in settings.tasks
    )
    return Report("", name, as_values(settings), tuple(run for run in runs if run.outcomes))


@dataclass(frozen=True)
class Loaded:
    """Parameters by name with their config.json, as training has them or as a checkpoint has them."""

    name: str
    published: Mapping[str, Any]
    parameters: Mapping[str, Tensor]

    def backbone(self, way: str, device: torch.device) -> Backbone:
        """The target for one of WAYS: quantised, it is what an export of the parameters holds."""
        parameters = self.parameters
        if WAYS[way].weights_are_rounded:
            with tempfile.TemporaryDirectory() as scratch:
                directory = Path(scratch) / "checkpoint"
                export(parameters, self.published, DIRECTORY, directory)
                parameters = parameters_of(Checkpoint.open(directory))
        return models(self.published, parameters)[0].to(device)


def load(directory: Path) -> Loaded:
    """The newest state of a training, or a checkpoint. Raises CheckpointError when it is neither."""
    state = None if (directory / CONFIG_NAME).exists() else load_newest([directory])
    if state is not None:
        backbone, drafter = models(state.published, state.parameters)
        parameters = named_parameters_of(backbone) | named_parameters_of(drafter)
        return Loaded(f"{state.progress.stage}, {state.progress.step} steps", state.published, parameters)
    checkpoint = Checkpoint.open(directory)
    published = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
    return Loaded(directory.name, published, parameters_of(checkpoint))


def comparison(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Reports of several models as a Markdown table: right of asked, for every task and effort."""
    names = list(reports)
    lines = [f"| task | thinking | {' | '.join(names)} |", f"|---|---|{'---:|' * len(names)}"]
    keys = {
        (task, effort): None
        for report in reports.values()
        for effort, found in report["efforts"].items()
        for task in found["counts"]
    }
    for task, effort in keys:
        cells = [_cell(report, task, effort) for report in reports.values()]
        if not all(cells):
            continue  # nothing to compare: prose and code, which have no right answer, are asked of servers alone
        lines.append(f"| {task} | {effort} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(report: Mapping[str, Any], task: str, effort: str) -> str:
    count = report["efforts"].get(effort, {}).get("counts", {}).get(task)
    return "" if count is None else f"{count['right']} of {count['asked']}"


def read_reports(path: Path) -> dict[str, dict[str, Any]]:
    """The reports in a file: of this module, of `deskfleet eval --json`, or of a result that holds one."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "ways" in found:
        return dict(found["ways"])
    report = found.get("report", found)
    return {"exported": report}


def main(arguments: list[str] | None = None) -> None:
    """Answer, or compare."""
    parser = argparse.ArgumentParser(prog="python -m pocket.answer", description=__doc__.splitlines()[0])
    parser.add_argument("state", type=Path, nargs="?", help="a directory of pocket.train, or a checkpoint")
    parser.add_argument("--out", type=Path, help="where the reports go [default: the screen]")
    parser.add_argument("--tasks", help="these only")
    parser.add_argument("--efforts", default=",".join(map(effort_name, SETTINGS.efforts)))
    parser.add_argument("--n", type=int, default=SETTINGS.num_questions)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument(
        "--guess", type=Path, metavar="CHECKPOINT", help="let the engine answer with it first"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-tokens", type=int, help="of one forward pass")
    parser.add_argument("--compare", type=Path, nargs="+", metavar="FILE", help="files of reports")
    given = parser.parse_args(arguments)
    if given.compare:
        print(
            comparison({name: r for path in given.compare for name, r in read_reports(path).items()}), end=""
        )
        return
    if given.state is None:
        parser.error("name a state or a checkpoint")
    settings = replace(
        SETTINGS,
        tasks=SETTINGS.tasks if given.tasks is None else tuple(given.tasks.split(",")),
        efforts=tuple(_effort(name) for name in given.efforts.split(",")),
        num_questions=given.n,
    )
    torch.set_float32_matmul_precision("high")
    device = torch.device(given.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # threads that wait for a busy core cost more than they bring
    batch_tokens = given.batch_tokens or (131_072 if device.type == "cuda" else 4_096)
    loaded = load(given.state)
    exam = Exam.of(settings, ModelConfig.from_dict(dict(loaded.published)).max_position_embeddings)
    guesses = None if given.guess is None else exam.guesses(given.guess)
    ways: dict[str, Any] = {}
    for way in given.ways.split(","):
        begin = time.monotonic()
        model = loaded.backbone(way, device)
        report = examine(
            model, exam, settings, WAYS[way], batch_tokens=batch_tokens, name=loaded.name, guesses=guesses
        )
        ways[way] = report.to_dict()
        print(f"{way}: {time.monotonic() - begin:.1f} s, {ways[way]['rates']}", flush=True)
    text = json.dumps(
        {"state": str(given.state), "model": loaded.name, "ways": ways}, indent=1, ensure_ascii=False
    )
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text + "\n", encoding="utf-8")


def _effort(name: str) -> Effort:
    return None if name == "off" else int(name)


if __name__ == "__main__":
    main()


__all__ = [
    "SETTINGS",
    "WAYS",
    "Loaded",
    "answer_all",
    "comparison",
    "examine",
    "load",
    "main",
    "read_reports",
]
