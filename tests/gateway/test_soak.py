"""The soak, short: what an hour of it checks, in seconds. Takes about a minute."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import Soak, soak
from soak_talks import KINDS, ROUTES


def told(answers: dict[str, int], *words: str) -> int:
    return sum(count for name, count in answers.items() if any(word in name for word in words))


@pytest.mark.slow  # half a minute of load, twice
async def test_nothing_is_wrong_or_grows(tmp_path: Path) -> None:
    done = await soak(24, 24, tmp_path, delay_s=0.05)
    assert not done.wrong
    assert (done.num_unanswered, done.exit_code, done.engine["running"]) == (0, 0, 0)
    assert not done.leaks()
    for each in (*ROUTES, *KINDS, "streamed", "whole", "left in the middle", "refused"):
        assert told(done.answers, each), f"nothing of {each} was asked"
    assert done.engine["cancelled"] >= done.answers["left in the middle"] / 2, "the engine hears of who left"
    assert done.after["objects"] < done.before["objects"] + 60 * 24 + 15_000


@pytest.mark.slow  # a third of a minute of load
async def test_a_leak_is_found(tmp_path: Path) -> None:
    """One that keeps memory, a file and a task of every request, as a forgotten stream would."""
    done: Soak = await soak(16, 16, tmp_path, "leaks", delay_s=0.02)
    kinds = {sentence.partition(":")[0] for sentence in done.leaks()}
    assert {"memory", "fds", "tasks", "fds without clients", "tasks without clients"} <= kinds
    assert done.after["objects"] > done.before["objects"] + 60 * 16 + 15_000
