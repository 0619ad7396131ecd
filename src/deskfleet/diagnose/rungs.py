"""The ladder: its rungs in order, each a question of the gathered facts.

Owns the order and which symptoms a rung explains. What ends a server comes before what slows it; what is known for
certain before what is likely. The rules are in `ends`, `answers` and `pace`: pure functions that see a `Situation` and
say found, clear, or that they cannot know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deskfleet.diagnose import answers, ends, pace
from deskfleet.diagnose.finding import Finding, Symptom
from deskfleet.diagnose.situation import Situation


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder. `symptoms` it explains; `question` as a person asks it."""

    name: str
    question: str
    symptoms: tuple[Symptom, ...]
    look: Callable[[Situation], Finding]


ALL: tuple[Symptom, ...] = ("garbled", "slow", "hanging", "memory")

RUNGS: tuple[Rung, ...] = (
    Rung("reach", "does anybody listen?", ALL, ends.reach),
    Rung("killed", "did the kernel end a process?", ("memory", "hanging"), ends.killed),
    Rung("dead", "has the engine ended?", ("hanging", "memory"), ends.dead),
    Rung("engine memory", "did the engine run out of memory?", ("memory", "hanging"), ends.engine_memory),
    Rung("memory", "is there memory left on every node?", ("memory", "slow", "hanging"), ends.memory),
    Rung("hardware", "do GPU, card and bus work?", ("hanging", "slow", "garbled"), ends.hardware),
    Rung("frozen rank", "does every rank report?", ("hanging",), ends.frozen_rank),
    Rung("stuck", "do tokens come?", ("hanging",), ends.stuck),
    Rung("fabric", "do the ranks hear each other?", ("hanging", "slow"), ends.fabric),
    Rung("boot", "was everything granted that was asked?", ALL, ends.boot),
    Rung("not finite", "are logits finite?", ("garbled",), answers.not_finite),
    Rung("Engram rows", "are rows read without fault?", ("garbled", "slow"), answers.rows),
    Rung("wrong alone", "is one question answered right?", ("garbled",), answers.wrong_alone),
    Rung("wrong together", "are several at the same time?", ("garbled",), answers.wrong_together),
    Rung("wrong when long", "is a long one?", ("garbled",), answers.wrong_long),
    Rung("client", "is it the client?", ("garbled",), answers.harness),
    Rung("drafts", "are drafts accepted?", ("slow", "garbled"), answers.drafts),
    Rung("queue", "does anybody wait?", ("slow", "hanging"), pace.queue),
    Rung("compiling", "is something compiled while serving?", ("slow", "hanging"), pace.compiling),
    Rung("graphs", "are graphs used?", ("slow",), pace.eager),
    Rung("host", "is the machine busy with other things?", ("slow",), pace.host_load),
    Rung("speed", "how fast is it?", ("slow",), pace.speed),
)

__all__ = ["ALL", "RUNGS", "Rung"]
