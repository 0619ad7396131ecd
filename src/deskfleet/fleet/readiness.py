"""How far a start is, from what ranks say: pure. Progress decides, not the clock: slow disks are no failure.

`LogReadiness` reads the lines of engines of others, `LoadReadiness` is fed with the bytes that our own ranks have read.
Both say the share that is done, 0 to 1, and how long the rest takes at the pace so far.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deskfleet.fleet.engram_receipts import find_receipt, refusal
from deskfleet.fleet.launch import LaunchSpec, Milestone, Receipt

SILENT_S = 900.0
"""A start of which nothing at all is heard for so long is told of: it may have hung."""

STALLED_S = 2700.0
"""And for so long it has: a first boot was seen to tune kernels for 36 minutes."""


@dataclass(frozen=True, slots=True)
class Progress:
    """`share` of the slowest rank, what it does, and about how many seconds are left; None while nobody can tell."""

    share: float
    what: str
    eta_s: float | None


class Pace:
    """The time that is left, from the share that is done and the time it took."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s

    def eta_s(self, share: float, now_s: float) -> float | None:
        """None while too little is done to tell."""
        if share < 0.02:
            return None
        return max(0.0, (now_s - self._began_s) * (1 - share) / share)


class LoadReadiness:
    """Ranks of our own engine, which say how many bytes of how many they have read."""

    def __init__(self, num_ranks: int, began_s: float) -> None:
        self._num_ranks = num_ranks
        self._pace = Pace(began_s)
        self._read: dict[int, tuple[int, int]] = {}

    def feed(self, rank: int, done_bytes: int, total_bytes: int, now_s: float) -> Progress:
        """Return the progress of all ranks together."""
        self._read[rank] = (done_bytes, total_bytes)
        done = sum(min(done / total, 1.0) if total else 1.0 for done, total in self._read.values())
        share = done / self._num_ranks
        return Progress(
            share, f"weights, {len(self._read)} of {self._num_ranks} ranks", self._pace.eta_s(share, now_s)
        )


class LogReadiness:
    """Ranks of other engines, of which there is a log with milestones, and receipts in it."""

    def __init__(self, launch: LaunchSpec, began_s: float) -> None:
        self._launch = launch
        self._pace = Pace(began_s)
        self._at: dict[int, tuple[float, str]] = {rank.rank: (0.0, "starting") for rank in launch.ranks}
        self._receipts: dict[tuple[str, int], str] = {}
        self._adapters: dict[int, str] = {}
        self._patterns = {text: re.compile(text) for text in _patterns(launch)}
        self.heard_s = began_s

    def feed(self, rank: int, line: str, now_s: float) -> Progress | None:
        """Read a line of a rank's log; the progress when it is one that shows any."""
        self.heard_s = now_s
        self._note_receipts(rank, line)
        for number, milestone in enumerate(self._launch.milestones):
            found = self._patterns[milestone.pattern].search(line)
            if found is None or not _concerns(milestone, rank):
                continue
            share = milestone.share + self._within(number, found.groupdict())
            if share > self._at[rank][0]:
                self._at[rank] = (share, milestone.what)
                return self.progress(now_s)
        return None

    def progress(self, now_s: float) -> Progress:
        """That of the slowest rank that shows any. A rank is through with the last milestone that it shows."""
        shown = []
        for rank, (share, what) in self._at.items():
            own = [each.share for each in self._launch.milestones if _concerns(each, rank)]
            if own:
                shown.append((1.0 if share >= max(own) else share, what))
        share, what = min(shown, default=(0.0, "starting"))
        return Progress(min(share, 1.0), what, self._pace.eta_s(share, now_s))

    def lacking(self) -> tuple[str, ...]:
        """What is wrong with the receipts so far, a sentence each: what a rank has not shown, and the first thing in
        which the ranks' adapters are not as they must be. Empty: nothing.
        """
        judged = [
            _judge(receipt, self._receipts.get((receipt.name, rank.rank)), rank.rank, rank.node)
            for receipt in self._launch.expected
            for rank in self._launch.ranks
            if _concerns(receipt, rank.rank)
        ]
        judged.append(refusal(self._launch, self._adapters))
        return tuple(sentence for sentence in judged if sentence)

    def receipts(self) -> Mapping[str, str]:
        """What was shown, by name and rank."""
        shown = self._receipts | {("Engram adapter", rank): said for rank, said in self._adapters.items()}
        return {f"{name}, rank {rank}": value for (name, rank), value in shown.items()}

    def _note_receipts(self, rank: int, line: str) -> None:
        for receipt in self._launch.expected:
            found = self._patterns[receipt.pattern].search(line)
            if found is not None and _concerns(receipt, rank):
                self._receipts[receipt.name, rank] = found.groupdict().get("value") or found[0]
        said = None if self._launch.adapter is None else find_receipt(line)
        if said is not None:
            self._adapters[rank] = said

    def _within(self, number: int, groups: Mapping[str, str | None]) -> float:
        """How far a counting line is on the way to the next milestone."""
        done, total = groups.get("done"), groups.get("total")
        if not (done and total and float(total) > 0):
            return 0.0
        milestones = self._launch.milestones
        following = milestones[number + 1].share if number + 1 < len(milestones) else 1.0
        return (following - milestones[number].share) * min(float(done) / float(total), 1.0)


def _patterns(launch: LaunchSpec) -> Sequence[str]:
    return [*(each.pattern for each in launch.milestones), *(each.pattern for each in launch.expected)]


def _concerns(each: Milestone | Receipt, rank: int) -> bool:
    return not each.ranks or rank in each.ranks


def _judge(receipt: Receipt, shown: str | None, rank: int, node: str) -> str | None:
    where = f"rank {rank} on {node}"
    if shown is None:
        return f"{where} has not shown {receipt.name}: {receipt.reason}"
    if receipt.equals is not None and shown != receipt.equals:
        return f"{where} has {receipt.name} {shown!r}, not {receipt.equals!r}: {receipt.reason}"
    if receipt.at_least is not None:
        digits = shown.replace(",", "")
        if not digits.isdecimal() or int(digits) < receipt.at_least:
            return f"{where} has {receipt.name} {shown}, less than {receipt.at_least:,}: {receipt.reason}"
    return None


__all__ = ["SILENT_S", "STALLED_S", "LoadReadiness", "LogReadiness", "Pace", "Progress"]
