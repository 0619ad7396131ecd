"""SGLang's gather without SGLang: loaded from its source file, for proofs where only torch and Triton are.

The file imports nothing else, and is SGLang's to the last letter of what is used, which digests show.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from deskfleet_engram.host import ContractError, check_sources
from deskfleet_sglang import release_0_5_23 as release

MODULE = "sglang.kernels.ops.embeddings.engram_gather"

_NAMES = ("engram_gather", "_engram_gather_kernel")


def load(path: Path) -> None:
    """Make the file the module that the callback store asks for. Raises ContractError unless it is the release's."""
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ContractError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    try:
        spec.loader.exec_module(module)
        found = {f"{MODULE}.{name}": getattr(module, name) for name in _NAMES}
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ContractError(f"{path} is not SGLang's gather: {error}") from error
    plain = {name: getattr(target, "fn", target) for name, target in found.items()}
    check_sources(plain, {name: release.SOURCES[name] for name in plain}, engine=f"SGLang's {path.name}")


__all__ = ["MODULE", "load"]
