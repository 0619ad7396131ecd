"""What the tests of gates find beside them: a quiet machine, and the real vLLM of the gateway's tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deskfleet.gates import machine

sys.path.append(str(Path(__file__).parents[1] / "gateway"))


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share the machine with others: whether that excuses a slow server is not theirs to find out."""
    monkeypatch.setattr(machine, "num_runnable", lambda: 1)
