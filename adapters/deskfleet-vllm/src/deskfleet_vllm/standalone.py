"""vLLM's lookup kernel without vLLM: cut out of its source file, for proofs where only torch and Triton are.

The kernel is vLLM's text to the last letter, which its digest shows; around it stands what the module would have given.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from deskfleet_engram.host import ContractError
from deskfleet_vllm import release_0_33 as release

KERNEL = "_engram_lookup_kernel"

_BEFORE = """import triton
import triton.language as tl

_SORTED_IS_CONSTEXPR = tl.constexpr(False)  # as on CUDA


"""

_kept: list[tempfile.TemporaryDirectory[str]] = []
"""Triton reads a kernel's source for as long as it compiles."""


def load(path: Path) -> Any:
    """Return what stores need of vLLM's module, out of its file `engram.py`.

    Raises ContractError when the file cannot be read or holds another kernel than the release's.
    """
    try:
        text = path.read_text(encoding="utf-8")
        parsed = ast.parse(text)
    except (OSError, SyntaxError, ValueError) as error:
        raise ContractError(f"{path}: cannot read the kernel: {error}") from error
    found = [node for node in parsed.body if isinstance(node, ast.FunctionDef) and node.name == KERNEL]
    if not found:
        raise ContractError(f"{path} has no {KERNEL}")
    first = min(found[0].lineno, *(each.lineno for each in found[0].decorator_list))
    kernel = "".join(text.splitlines(keepends=True)[first - 1 : found[0].end_lineno])
    digest = hashlib.sha256(kernel.encode()).hexdigest()
    if digest != release.DIGESTS[KERNEL]:
        raise ContractError(
            f"{path}: {KERNEL} is {digest[:16]}, not {release.DIGESTS[KERNEL][:16]} of vLLM 0.33"
        )
    _kept.append(tempfile.TemporaryDirectory(prefix="deskfleet-vllm-"))
    copy = Path(_kept[-1].name) / "vllm_lookup_kernel.py"
    copy.write_text(_BEFORE + kernel, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    if spec is None or spec.loader is None:
        raise ContractError(f"{copy} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return SimpleNamespace(
        _engram_lookup_kernel=module._engram_lookup_kernel, get_accelerator_view_from_cpu_tensor=device_view
    )


class _Addressed:
    """Pinned memory as arrays on a device are described; keeps it alive."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": {torch.uint8: "|u1", torch.int32: "<i4"}[host.dtype],
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def device_view(host: torch.Tensor) -> torch.Tensor:
    """Return a CUDA tensor over pinned uint8 or int32 memory, not a copy. Raises ContractError if it became one.

    The address is the same on both sides: all memory that torch pins is mapped, in one space of addresses.
    """
    view = torch.as_tensor(_Addressed(host), device="cuda")
    if view.data_ptr() != host.data_ptr():
        raise ContractError("torch copied pinned memory instead of viewing it")
    return view


__all__ = ["KERNEL", "device_view", "load"]
