"""The lane of the engines' own environments."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker: `tools/adapters_env.sh` makes what its tests run in, as their first does by itself."""
    config.addinivalue_line("markers", "adapters: runs inside vLLM's and SGLang's own environments")
