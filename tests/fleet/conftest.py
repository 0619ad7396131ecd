"""The lane of whole fleets: tests marked `fleet` need root on Linux, and run with `make test-fleet` alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bed import Bed, bed


@pytest.fixture(scope="module")
def pair() -> Iterator[Bed]:
    """Two plain nodes and a desk, shared by a module: a test mends what it broke."""
    with bed(2) as made:
        yield made
