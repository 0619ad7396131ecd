"""Where the kernels run: on the GPU, or in the emulator."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tensors of the kernels live."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
