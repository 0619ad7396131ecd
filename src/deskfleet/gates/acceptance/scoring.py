"""Acceptance gate `scoring`: the log probabilities of a fixed text beside those that another configuration gave it.

Owns the text, the file of recorded vectors and what two configurations may differ by. So tensor parallel sizes, cache
formats and Engram formats can be compared over HTTP, where `POST /v1/completions` tells the log probabilities of a
prompt (echo, or vLLM's prompt_logprobs). For directories there is `deskfleet score`, which compares whole logits.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from deskfleet.errors import ConfigError, EngineError, RequestError
from deskfleet.gates.contract import Finding, Gate, Series, failed, passed, skipped
from deskfleet.gates.questions import codes
from deskfleet.gates.ruler import TokenRuler
from deskfleet.gates.subject import Subject

_NUM_TOKENS = 512
_TEXT_SEED = "the text of the scoring gate"
_MEAN, _MAX, _PERPLEXITY = 0.05, 2.0, 0.02
_SHOWN = 256


@dataclass(frozen=True, slots=True)
class Vectors:
    """The tokens of the text as a server spelled them, and the log probability of each but the first."""

    model: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log probability."""
        return math.exp(-statistics.fmean(self.logprobs))


@dataclass(frozen=True, slots=True)
class Difference:
    """Two vectors of the same tokens."""

    mean: float
    most: float
    perplexity: float
    recorded_perplexity: float

    @property
    def perplexity_change(self) -> float:
        """Relative change of the perplexity."""
        return self.perplexity / self.recorded_perplexity - 1


def text() -> str:
    """Return the text that is scored: always the same."""
    puzzle = codes(TokenRuler(), _NUM_TOKENS, Random(_TEXT_SEED), spare_tokens=0)
    content: str = puzzle.fields["messages"][0]["content"]
    return content


def read_vectors(path: str) -> Vectors:
    """Read recorded vectors. Raises ConfigError for a file that holds none."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        return Vectors(value["model"], tuple(value["tokens"]), tuple(map(float, value["logprobs"])))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no recorded vectors: {error}", hint="record some with --record-score"
        ) from error


def write_vectors(vectors: Vectors, path: str) -> None:
    """Write vectors for a later comparison. Raises ConfigError where that cannot be done."""
    try:
        Path(path).write_text(json.dumps(asdict(vectors)) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def compare(found: Vectors, recorded: Vectors) -> Difference | None:
    """Return how far two vectors are apart; None when their tokens differ, so that nothing can be compared."""
    if found.tokens != recorded.tokens:
        return None
    gaps = [abs(a - b) for a, b in zip(found.logprobs, recorded.logprobs, strict=True)]
    return Difference(statistics.fmean(gaps), max(gaps), found.perplexity, recorded.perplexity)


async def _run(subject: Subject) -> Finding:
    found = await _score(subject)
    if isinstance(found, str):
        return skipped(f"no log probabilities of a prompt over HTTP: {found}")
    if any(not math.isfinite(value) for value in found.logprobs):
        return failed("a log probability of the prompt is not finite")
    measured = f"{len(found.logprobs)} tokens, perplexity {found.perplexity:.3f}"
    if subject.limits.score_output is not None:
        write_vectors(found, subject.limits.score_output)
        measured += f", recorded in {subject.limits.score_output}"
    if subject.limits.recorded_score is None:
        return skipped(
            "there is nothing to compare with: record another configuration with --record-score, give it with --score",
            measured=measured,
        )
    recorded = read_vectors(subject.limits.recorded_score)
    difference = compare(found, recorded)
    if difference is None:
        return failed(
            f"the tokens of the text are not those recorded ({len(found.tokens)} and {len(recorded.tokens)}): "
            "another tokenizer, or a prompt that was changed",
            measured=measured,
        )
    return _judge(difference, found, recorded)


def _judge(difference: Difference, found: Vectors, recorded: Vectors) -> Finding:
    measured = (
        f"mean {difference.mean:.4f}, max {difference.most:.3f}, perplexity {difference.perplexity:.3f} "
        f"({difference.perplexity_change:+.2%})"
    )
    figure = Series(
        "Log probability, found minus recorded",
        "token",
        "difference",
        (("difference", _points(found.logprobs, recorded.logprobs)),),
    )
    values = asdict(difference)
    if difference.mean > _MEAN or difference.most > _MAX or abs(difference.perplexity_change) > _PERPLEXITY:
        return failed(
            f"scores differ from those recorded of {recorded.model}: {measured}",
            figure,
            measured=measured,
            **values,
        )
    return passed(measured, figure, **values)


def _points(found: Sequence[float], recorded: Sequence[float]) -> tuple[tuple[float, float], ...]:
    gaps = [round(a - b, 5) for a, b in zip(found, recorded, strict=True)]
    step = -(-len(gaps) // _SHOWN)
    return tuple((float(index), gap) for index, gap in list(enumerate(gaps))[::step])


async def _score(subject: Subject) -> Vectors | str:
    """Return the vectors that the server gives, or why it gives none."""
    model = subject.session.model.id
    body = {"model": model, "prompt": text(), "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    try:
        answer = await subject.client.post("/v1/completions", body)
    except (RequestError, EngineError) as error:
        return error.message
    return _read_echo(model, answer)


def _read_echo(model: str, answer: dict[str, Any]) -> Vectors | str:
    try:
        logprobs = answer["choices"][0]["logprobs"]
        count = int(answer["usage"]["prompt_tokens"])
        tokens, values = logprobs["tokens"][:count], logprobs["token_logprobs"][:count]
    except (KeyError, IndexError, TypeError, ValueError):
        return "the answer holds none of the prompt's"
    if len(values) < 2 or any(not isinstance(value, int | float) for value in values[1:]):
        return "the answer holds none of the prompt's"
    return Vectors(model, tuple(map(str, tokens)), tuple(float(value) for value in values[1:]))


SCORING = Gate(
    name="scoring",
    question="Does this configuration give a text the log probabilities that another one gave it (--score)?",
    protects="from layouts and number formats that change the model without changing a single answer of a gate",
    threshold=f"mean difference {_MEAN}, max {_MAX}, perplexity within {_PERPLEXITY:.0%}",
    when="acceptance",
    run=_run,
)

__all__ = ["SCORING", "Difference", "Vectors", "compare", "read_vectors", "text", "write_vectors"]
