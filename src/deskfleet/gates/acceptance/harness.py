"""Acceptance gate `lm-eval`: the adapter to lm-evaluation-harness, a program of its own with tasks of its own.

Owns the command that runs it against this server, and the reading of its result file. It is not run from here: it takes
hours, downloads data sets and wants an environment of its own. Where it has been run, its results are judged.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskfleet.errors import ConfigError
from deskfleet.gates.contract import Finding, Gate, failed, passed, skipped
from deskfleet.gates.subject import Subject

_LEAST = {"gsm8k": 0.8, "gsm8k_cot": 0.8, "ifeval": 0.7, "mmlu_pro": 0.6, "minerva_math500": 0.6}
"""What a sound set-up of a big model reaches. A task that is not here is told and not judged."""

_TASKS = ("gsm8k_cot", "ifeval")
_METRICS = (
    "exact_match,flexible-extract",
    "exact_match,strict-match",
    "prompt_level_strict_acc,none",
    "exact_match,custom-extract",
    "acc,none",
    "exact_match,none",
)


@dataclass(frozen=True, slots=True)
class TaskScore:
    """A task's score as the harness wrote it, and how many questions it asked."""

    task: str
    metric: str
    score: float
    num_samples: int | None


def lm_eval_command(url: str, model: str, *, concurrency: int, output: str = "lm-eval-results") -> str:
    """Return the command, ready for a shell."""
    arguments = f"base_url={url}/v1/chat/completions,model={model},num_concurrent={concurrency},max_retries=1"
    words = ["lm_eval", "run", "--model", "local-chat-completions", "--model_args", arguments]
    words += ["--tasks", ",".join(_TASKS), "--apply_chat_template", "--gen_kwargs", "temperature=0"]
    return shlex.join([*words, "--output_path", output])


def read_results(path: str) -> list[TaskScore]:
    """Return the scores in a result file of the harness. Raises ConfigError for a file that is none."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        samples = value.get("n-samples", {})
        scores = [_score(task, found, samples.get(task)) for task, found in value["results"].items()]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no result file of lm-evaluation-harness: {error}",
            hint="it is results_*.json below --output_path",
        ) from error
    return [score for score in scores if score is not None]


def _score(task: str, found: dict[str, Any], samples: dict[str, Any] | None) -> TaskScore | None:
    metric = next((name for name in _METRICS if isinstance(found.get(name), int | float)), None)
    if metric is None:
        return None
    return TaskScore(task, metric, float(found[metric]), (samples or {}).get("effective"))


async def _run(subject: Subject) -> Finding:
    path = subject.limits.lm_eval_results
    if path is None:
        command = lm_eval_command(
            subject.client.url, subject.session.model.id, concurrency=subject.limits.concurrency
        )
        return skipped(f"run it and give its file with --lm-eval-results: {command}")
    scores = read_results(path)
    if not scores:
        return skipped(f"{path} holds no score that is known here", cause="tool")
    measured = ", ".join(f"{score.task} {score.score:.1%}{_of(score.num_samples)}" for score in scores)
    low = [score for score in scores if score.score < _LEAST.get(score.task, 0.0)]
    if low:
        task, least = low[0], _LEAST[low[0].task]
        reason = f"{task.task} is {task.score:.1%} ({task.metric}), at least {least:.0%} is expected"
        return failed(reason, measured=measured)
    return passed(measured, scores={score.task: score.score for score in scores})


def _of(num_samples: int | None) -> str:
    return "" if num_samples is None else f" of {num_samples}"


LM_EVAL = Gate(
    name="lm-eval",
    question="What does lm-evaluation-harness say (--lm-eval-results)?",
    protects="from a set of questions that only we ask",
    threshold="gsm8k 80%, ifeval 70%, others told",
    when="acceptance",
    run=_run,
    is_quick=False,
)

__all__ = ["LM_EVAL", "TaskScore", "lm_eval_command", "read_results"]
