"""`deskfleet verify`: the launch gates and the acceptance gates, quick or for hours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from deskfleet.cli.flags import ENGINE, Json, MaxModelLen, Speculate, default_of
from deskfleet.cli.smoke import (
    CHUNK_TOKENS,
    CONCURRENCY,
    DEFAULT_TARGET,
    PATIENCE_S,
    Asking,
    Chunk,
    Concurrency,
    Evidence,
    Html,
    JUnit,
    KeyFile,
    Model,
    Only,
    Patience,
    Questions,
    Repeat,
    Seed,
    Skip,
    Target,
    Tp,
    ask_gates,
    engine_options,
    given_flags,
)
from deskfleet.gates.contract import Limits

_HOURS: float = default_of(Limits, "soak_s") / 3600
_QUICK = Limits(
    soak_s=45.0, num_churned=24, ladder_lengths=4, ladder_depths=3, ladder_s=120.0, num_questions=12
)


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("verify")(run)


def run(
    target: Target = DEFAULT_TARGET,
    quick: Annotated[
        bool, typer.Option("--quick", help="Minutes: fewer questions, and lengths as far as time allows.")
    ] = False,
    hours: Annotated[float, typer.Option("--hours", metavar="H", help="How long the soak lasts.")] = _HOURS,
    only: Only = None,
    skip: Skip = None,
    questions: Questions = None,
    model: Model = None,
    concurrency: Concurrency = CONCURRENCY,
    patience: Patience = PATIENCE_S,
    chunk: Chunk = CHUNK_TOKENS,
    score: Annotated[
        Path | None,
        typer.Option("--score", metavar="FILE", help="Log probabilities of another configuration."),
    ] = None,
    record_score: Annotated[
        Path | None,
        typer.Option("--record-score", metavar="FILE", help="Keep this one's there, for --score."),
    ] = None,
    lm_eval_results: Annotated[
        Path | None,
        typer.Option("--lm-eval-results", metavar="FILE", help="What lm-evaluation-harness wrote."),
    ] = None,
    seed: Seed = None,
    repeat: Repeat = 1,
    evidence: Evidence = None,
    junit: JUnit = None,
    html: Html = None,
    key_file: KeyFile = None,
    tp: Tp = None,
    max_model_len: MaxModelLen = None,
    speculate: Speculate = ENGINE.speculation,
    as_json: Json = False,
) -> int:
    """Ask the acceptance gates: is this set-up good?

    The launch gates first, then needles at every depth and length, a soak with every answer checked, churn, warm
    caches, quality. Exit code 1 when a gate fails, 3 when nobody answers or nothing could be shown.
    """
    from deskfleet.gates.acceptance.harness import read_results
    from deskfleet.gates.acceptance.scoring import read_vectors
    from deskfleet.gates.registry import ACCEPTANCE_GATES, LAUNCH_GATES

    # A wrong file is to be told now, not after hours.
    if score is not None:
        read_vectors(str(score))
    if lm_eval_results is not None:
        read_results(str(lm_eval_results))
    thorough = _QUICK if quick else Limits(soak_s=hours * 3600)
    limits = replace(
        thorough,
        expected_model=model,
        concurrency=concurrency,
        patience_s=patience,
        chunk_tokens=chunk,
        recorded_score=_text(score),
        score_output=_text(record_score),
        lm_eval_results=_text(lm_eval_results),
        seed=seed,
    )
    gates = [*LAUNCH_GATES, *(gate for gate in ACCEPTANCE_GATES if gate.is_quick or not quick)]
    flags = given_flags(questions=questions, model=model, tp=tp, speculate=speculate, concurrency=concurrency)
    asking = Asking(
        verb="verify",
        target=target,
        only=only or (),
        skip=skip or (),
        family=questions,
        rounds=repeat,
        key_file=key_file,
        engine=engine_options(tp, max_model_len, speculate),
        evidence=evidence,
        junit=junit,
        html=html,
        as_json=as_json,
        flags=(*flags, *(("--quick",) if quick else ("--hours", f"{hours:g}"))),
    )
    return ask_gates(gates, limits, asking)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


__all__ = ["register", "run"]
