"""Where the kernels run: on the GPU, or in the interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
# CPU builds of torch bring no Triton: nothing here can be collected then.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tensors of the kernels live."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def bit_ops() -> bool:
    """Whether kernels decode with plain arithmetic: the interpreter has no PTX."""
    return not HAS_GPU
