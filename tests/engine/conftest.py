"""Engine fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.engine.engines import engine as engine
from tests.engine.engines import llm as llm
from tests.engine.golden import Harness, measured


@pytest.fixture(scope="session", autouse=True)
def single_threaded() -> Iterator[None]:
    """One thread: the tests run in several processes, and results do not depend on it anyway."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def report_measured(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Hand what a test measured to the summary of the whole run."""
    measured.clear()
    yield
    for line in measured:
        record_property("measured", line)


@pytest.fixture(scope="session")
def harness() -> Iterator[Harness]:
    """The golden tiny checkpoint in this process; every test brings its own positions from 0."""
    loaded = Harness()
    yield loaded
    loaded.runner.close()
