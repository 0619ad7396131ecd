"""vLLM's tables without vLLM, out of its source file `engram.py`: for proofs where only torch and Triton are.

`load` cuts the lookup kernel out of the file; `load_module` imports all of it, and stands in for what it imports of
vLLM. What is proved with is vLLM's text to the last letter, which digests show. Knows no store.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import logging
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from deskfleet_engram.host import ContractError, check_sources
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


VIEW = "get_accelerator_view_from_cpu_tensor"
"""The one function of the release's digests that another file of vLLM has: `device_view` stands in for it."""


class Linear(torch.nn.Module):
    """Stands in for vLLM's projection of one rank: bf16, random weights, no bias. [T, in] -> [T, out]."""

    def __init__(self, num_in: int, num_out: int, **_: Any) -> None:
        super().__init__()
        weight = torch.randn(num_out, num_in, dtype=torch.bfloat16) / num_in**0.5
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` times the weight."""
        return torch.nn.functional.linear(x, self.weight)


def load_module(path: Path, config: Any) -> ModuleType:
    """Import vLLM's file `engram.py` under its own name, for one rank alone; `config` is what it takes for vLLM's.

    A graph is captured whole, as in vLLM's mode FULL. Raises ContractError where vLLM is imported already, when the
    file cannot be read, or when what it holds is not the release's.
    """
    if "vllm" in sys.modules:
        raise ContractError("vLLM is imported here already, and is not replaced")
    import triton
    import triton.language as tl

    def unused(*_: Any, **__: Any) -> None:
        raise ContractError("the proof has one rank, and called what several ranks need")

    def set_weight_attrs(weight: Any, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(weight, name, value)

    is_cuda = torch.cuda.is_available()
    platform = SimpleNamespace(
        is_cuda=lambda: is_cuda, is_rocm=lambda: False, is_device_capability_family=lambda *_: False
    )
    layers = "vllm.model_executor.layers"
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.33.0+engram.py"},
        "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": lambda function: function},
        "vllm.config": {"VllmConfig": Any, "get_current_vllm_config": lambda: config},
        "vllm.distributed": {
            **dict.fromkeys(
                ("get_dp_group", "get_engram_dp_group", "tensor_model_parallel_all_gather"), unused
            ),
            "get_engram_dp_size": lambda: 1,
            "get_tensor_model_parallel_rank": lambda: 0,
            "get_tensor_model_parallel_world_size": lambda: 1,
        },
        "vllm.distributed.device_communicators.shm_broadcast": {
            "SHM_PATH": "",
            "check_shm_free_space": unused,
        },
        "vllm.distributed.parallel_state": {"GroupCoordinator": Any, "in_the_same_node_as": unused},
        "vllm.forward_context": {
            "get_forward_context": unused,
            "is_forward_context_available": lambda: False,
        },
        "vllm.logger": {"init_logger": logging.getLogger},
        f"{layers}.fusion.quant_activation": {"QuantizedActivation": Any},
        f"{layers}.linear": {"ColumnParallelLinear": Linear},
        f"{layers}.quantization": {"QuantizationConfig": Any},
        f"{layers}.quantization.utils.quant_utils": {"kMxfp8Dynamic": None},
        "vllm.model_executor.utils": {"set_weight_attrs": set_weight_attrs},
        f"{release.MODEL_PACKAGE}.common.ops.query_quant": dict.fromkeys(
            ("can_fuse_query_quant", "mxfp8_scale_bytes", "mxfp8_scale_offset"), unused
        ),
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils.platform_utils": {"is_uva_available": lambda: True},
        "transformers": {"AutoTokenizer": SimpleNamespace(from_pretrained=lambda *_, **__: None)},
        "vllm.utils.torch_utils": {VIEW: lambda host: device_view(host)},
    }
    for name, content in contents.items():
        _stand_in(name, content)
    parent = release.MODULE.rpartition(".")[0]
    _stand_in(parent, {})
    spec = importlib.util.spec_from_file_location(release.MODULE, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ContractError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[release.MODULE] = module
    spec.loader.exec_module(module)
    found = {name: target for name, target in release.sources(module).items() if name != VIEW}
    wanted = {name: digest for name, digest in release.DIGESTS.items() if name != VIEW}
    check_sources(found, wanted, engine=str(path))
    return module


def _stand_in(name: str, content: dict[str, Any]) -> None:
    """Put a module with `content` where `name` is imported from, and packages above it."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        above = ".".join(parts[:count])
        if above not in sys.modules:
            sys.modules[above] = ModuleType(above)
            sys.modules[above].__path__ = []  # a package
    vars(sys.modules[name]).update(content)


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
    """Return a CUDA tensor over pinned memory of bytes (uint8, FP8) or int32, not a copy. Raises ContractError if it
    became one.

    The address is the same on both sides: all memory that torch pins is mapped, in one space of addresses.
    """
    plain = host.view(torch.uint8) if host.element_size() == 1 else host
    view = torch.as_tensor(_Addressed(plain), device="cuda").view(host.dtype)
    if view.data_ptr() != host.data_ptr():
        raise ContractError("torch copied pinned memory instead of viewing it")
    return view


__all__ = ["KERNEL", "VIEW", "Linear", "device_view", "load", "load_module"]
