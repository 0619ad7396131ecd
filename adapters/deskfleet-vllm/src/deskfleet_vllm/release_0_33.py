"""vLLM 0.33, as far as this plug-in leans on it: what is replaced, and digests of all source that it relies on.

One such file per release line. `python -m deskfleet_vllm digests`, in an environment with vLLM, prints the digests
anew; read the differences before you change them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from deskfleet_engram.host import ContractError

VERSION = re.compile(r"0\.33\.\d+(\+.*)?")

MODULE = "vllm.models.deepseek_v41.common.engram"
MODEL_PACKAGE = "vllm.models.deepseek_v41"
MODEL_CLASS = "DeepseekV41ForCausalLM"

REPLACED = (
    f"{MODULE}.Engram._create_embedding",
    f"{MODEL_PACKAGE}.{MODEL_CLASS}.is_unused_checkpoint_weight",
)
"""What is replaced in every case. The second does not exist in 0.33 and is added."""

REPLACED_FOR_PROMPTS = f"{MODEL_PACKAGE}.{MODEL_CLASS}.get_model_state_cls"
"""Replaced unless "prefetch" is false."""

IMAGE_MODULE, IMAGE_TOKEN = f"{MODEL_PACKAGE}.common.mm_preprocess", "IMAGE_SENTINEL_BASE_ID"
"""Where the id is that stands at every position of an image."""

STATE_METHODS = ("__init__", "add_request", "prepare_inputs")
"""Of the model state that the model names: what is overridden."""

DIGESTS: Mapping[str, str] = {
    "Engram": "fd92fc5fb7404bc4603b3a5a8b4c04dcb8bc9ab74ded5376b87b906d2ed5026c",
    "EngramLayout": "8702dbd688e9c8a918ea5850ef7de62405dec123da7ee2305438f60241a20f62",
    "NgramHashState": "6a80b6ffd706dfe2ec89e77fa38fb3a795f80d565551c2cbfa1a051dd22bb6b8",
    "ParallelEngramEmbedding": "d9ebbc94d985ef2899009a586b530a476641856e2d9a2a20ed59b2522261949e",
    "_engram_head_shard_weight_loader": "c358e189108975c12c00d071f1f6676360902f6381f4a20464219dfb77e4ff4a",
    "build_compressed_token_map": "44c999d5212c583833f06b4796b22a296af9f857a4d2b360aac5355395a14a24",
    "compute_hash_multipliers": "df16643f91243e3248b4fb2e32e14800f072119e2e4c2e13b27e0e0a18a6ca50",
    "engram_head_shard_rank": "4e6b1114b324afab8091ab0e249c5576071e9645a93766e92257e29c50cdbf19",
    "find_next_prime": "1d4ccdae5ae005a6e36acf07f923f1b08e93873a595d0d1fcf05808ed8edbd17",
    "get_accelerator_view_from_cpu_tensor": "0e7f4e4db89817010da71964c005631b346faaa9a70c15d495ba2a81b4b0d6c3",
    "_engram_lookup_kernel": "fa270479d023e79122ef9a7771803d5b06c38409860d3f83d78c4b26c17fe1e5",
}

STATE_MODULE, STATE_CLASS = f"{MODEL_PACKAGE}.nvidia.model_state", "DeepseekV41ModelState"

STATE_DIGESTS: Mapping[str, str] = {
    "DeepseekV41ModelState.__init__": "a9f9bda7875ec730ec2c3a23602745f1255fbfe9154559ff2e6ce0ff010a5f8d",
    "DeepseekV41ModelState.add_request": "3fd62b27317227f0f6d7fa6a2a5d2bea42c4722480264b76c92b1ff297059576",
    "DeepseekV41ModelState.prepare_inputs": (
        "f02d0e03bbe26c705c4f6678a8eb85ee80db7208407229d64d325c029b53df24"
    ),
}
"""As DIGESTS, of the model state."""


def state_sources(state: type[Any]) -> dict[str, Any]:
    """Return what is overridden of the model state, by name. Raises ContractError when something is missing."""
    missing = [name for name in STATE_METHODS if name not in vars(state)]
    if missing:
        raise ContractError(f"{state.__name__} of vLLM has no {missing[0]} of its own")
    return {f"{state.__name__}.{name}": vars(state)[name] for name in STATE_METHODS}


def sources(engram: ModuleType) -> dict[str, Any]:
    """Return the functions and classes whose source is compared, by name. Raises ContractError when one is missing."""
    names = (
        "Engram",
        "EngramLayout",
        "NgramHashState",
        "ParallelEngramEmbedding",
        "_engram_head_shard_weight_loader",
        "build_compressed_token_map",
        "compute_hash_multipliers",
        "engram_head_shard_rank",
        "find_next_prime",
        "get_accelerator_view_from_cpu_tensor",
    )
    missing = [name for name in (*names, "_engram_lookup_kernel") if not hasattr(engram, name)]
    if missing:
        raise ContractError(f"{MODULE} has no {missing[0]}")
    found = {name: getattr(engram, name) for name in names}
    kernel = engram._engram_lookup_kernel
    found["_engram_lookup_kernel"] = getattr(
        kernel, "fn", kernel
    )  # below Triton's decorator, where there is Triton
    return found


def check_version(version: str, *, allow_untested: bool) -> str | None:
    """Return a warning for another version that is let through. Raises ContractError for one that is not."""
    if VERSION.fullmatch(version):
        return None
    message = f"this plug-in is made for vLLM 0.33, not {version}"
    if allow_untested:
        return message
    raise ContractError(message, hint="install vLLM 0.33, or the plug-in for your version")


__all__ = [
    "DIGESTS",
    "IMAGE_MODULE",
    "IMAGE_TOKEN",
    "MODEL_CLASS",
    "MODEL_PACKAGE",
    "MODULE",
    "REPLACED",
    "REPLACED_FOR_PROMPTS",
    "STATE_CLASS",
    "STATE_DIGESTS",
    "STATE_METHODS",
    "STATE_MODULE",
    "VERSION",
    "check_version",
    "sources",
    "state_sources",
]
