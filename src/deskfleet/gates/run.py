"""Asks gates of a server: which, in which order, which side by side; and turns what happens into findings.

Owns the run. Gates that need the server to themselves go one after the other, the others side by side; one that fails
beside others is asked again alone, and the report says how that went. Prints nothing; the caller is told of results.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from random import SystemRandom

from deskfleet import __version__
from deskfleet.client import Client, ServerGone
from deskfleet.errors import ConfigError, DeskfleetError
from deskfleet.gates.contract import Decided, Finding, Gate, Limits, failed, skipped
from deskfleet.gates.family import choose_family
from deskfleet.gates.report import GateResult, Report, of_rounds
from deskfleet.gates.subject import Progress, Session, Subject, ignore

_SIDE_BY_SIDE = 6
_BACK_S = 20.0

OnResult = Callable[[GateResult], None]
OnProgress = Callable[[Progress], None]


def _ignore_result(result: GateResult) -> None:
    """Take a result and do nothing."""


async def run_gates(
    url: str,
    gates: Sequence[Gate],
    limits: Limits,
    *,
    verb: str,
    target: str | None = None,
    key: str | None = None,
    family: str | None = None,
    flags: Sequence[str] = (),
    provenance: Mapping[str, str] | None = None,
    rounds: int = 1,
    on_start: Callable[[Session], None] = lambda session: None,
    on_result: OnResult = _ignore_result,
    on_progress: OnProgress = ignore,
) -> Report:
    """Ask `gates` of the server at `url`, each in as many `rounds` as wished, and return the report.

    `verb`, `target`, `flags` and `provenance` go into the report: how the same can be asked again, and from where.
    Raises ServerGone when nobody answers there to begin with, EngineError when what answers serves no model,
    ConfigError for questions that do not exist. Everything later is a finding.
    """
    started_at, began = datetime.now(UTC), time.monotonic()
    async with Client(url, key=key) as client:
        listed = await client.models()
        model = next((each for each in listed if each.id == limits.expected_model), listed[0])
        session = Session(
            client=client,
            model=model,
            questions=choose_family(model.id, family),
            limits=limits,
            seed=SystemRandom().randrange(2**31) if limits.seed is None else limits.seed,
            on_progress=on_progress,
        )
        on_start(session)
        results = await _Run(session, on_result, rounds).all(gates)
    return Report(
        verb=verb,
        url=client.url,
        target=target or client.url,
        model_id=model.id,
        max_model_len=model.max_model_len,
        questions=session.questions.name,
        questions_reason=session.questions.reason,
        started_at=started_at.isoformat(timespec="seconds"),
        seconds_s=time.monotonic() - began,
        results=tuple(results),
        flags=(*flags, "--seed", str(session.seed)),
        limits={**asdict(limits), "seed": session.seed},
        provenance={"deskfleet": __version__, **(provenance or {})},
    )


def select(gates: Sequence[Gate], only: Sequence[str], skip: Sequence[str]) -> tuple[Gate, ...]:
    """Return the gates named by `only` (all, when none is) but those in `skip`. Raises ConfigError for a wrong name."""
    names = [gate.name for gate in gates]
    for name in (*only, *skip):
        if name not in names:
            raise ConfigError(f"there is no gate {name!r} here", hint=f"the gates are {', '.join(names)}")
    chosen = tuple(gate for gate in gates if (not only or gate.name in only) and gate.name not in skip)
    if not chosen:
        raise ConfigError("no gate is left to ask", hint="name other gates with --only and --skip")
    return chosen


class _Run:
    """The gates put to one server."""

    def __init__(self, session: Session, on_result: OnResult, rounds: int) -> None:
        self._session = session
        self._on_result = on_result
        self._rounds = rounds
        self._places = asyncio.Semaphore(_SIDE_BY_SIDE)

    async def all(self, gates: Sequence[Gate]) -> list[GateResult]:
        results: list[GateResult] = []
        for alone, group in itertools.groupby(gates, key=lambda gate: gate.alone):
            together = list(group)
            if alone or len(together) == 1:
                for gate in together:
                    results.append(await self._decide(gate, beside=False))
            else:
                beside = await asyncio.gather(*(self._decide(gate, beside=True) for gate in together))
                results += [await self._again(result) for result in beside]
        return results

    async def _decide(self, gate: Gate, *, beside: bool) -> GateResult:
        """Ask a gate in every round. A failure beside others is not told yet."""
        async with self._places:
            result = of_rounds([await self._once(gate, number) for number in range(self._rounds)])
        if not (beside and result.verdict == "fail"):
            self._on_result(result)
        return result

    async def _again(self, result: GateResult) -> GateResult:
        """Ask a gate that failed beside others once more, alone. It stays failed; the reason says which way."""
        if result.verdict != "fail" or self._session.gone is not None:
            if result.verdict == "fail":
                self._on_result(result)
            return result
        alone = await self._once(result.gate, self._rounds)
        how = "it passes alone" if alone.verdict == "pass" else "it fails alone too"
        finding = replace(result.finding, reason=f"{result.finding.reason} (asked beside other gates; {how})")
        told = replace(
            result,
            finding=finding,
            seconds_s=result.seconds_s + alone.seconds_s,
            num_asked=result.num_asked + alone.num_asked,
            evidence=(*result.evidence, *alone.evidence),
        )
        self._on_result(told)
        return told

    async def _once(self, gate: Gate, number: int) -> GateResult:
        if self._session.gone is not None:
            return GateResult(
                gate, skipped(f"the server is gone: {self._session.gone}", cause="server"), 0.0, 0
            )
        subject = Subject(self._session, gate.name, number)
        began = time.monotonic()
        finding = await self._finding(gate, subject)
        return GateResult(gate, finding, time.monotonic() - began, subject.num_asked, tuple(subject.evidence))

    async def _finding(self, gate: Gate, subject: Subject) -> Finding:
        try:
            found = await gate.run(subject)
        except Decided as decided:
            found = decided.finding
        except ServerGone as error:
            self._session.gone = error.message
            found = failed(f"the server is gone: {error.message}", cause="server")
        except ConfigError as error:  # a file that the gate was given
            found = skipped(error.message, cause="tool")
        except DeskfleetError as error:
            found = failed(error.message, cause="server")
        if self._session.gone is not None and await self._is_back():
            # A single 503, of a server that is full: what it was asked has failed, the others may still be asked.
            self._session.gone = None
        return found

    async def _is_back(self) -> bool:
        """Ask for one token: a list of models is told by servers whose engine is dead."""
        body = {
            "model": self._session.model.id,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 1,
        }
        try:
            async with asyncio.timeout(_BACK_S):
                await self._session.client.ask(body)
        except (DeskfleetError, TimeoutError):
            return False
        return True


__all__ = ["run_gates", "select"]
