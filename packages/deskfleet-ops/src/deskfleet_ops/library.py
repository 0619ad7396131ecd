"""The compiled operators as ctypes sees them: where the library is, its functions. Mirrors `deskfleet_ops.h`.

Imports neither torch nor numpy: arguments are addresses and numbers. Loading happens once, at first use; nothing here
looks at what an address points to.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any

ABI_VERSION = 1
LIBRARY_NAME = "libdeskfleet_ops.so"
LIBRARY_VARIABLE = "DESKFLEET_OPS_LIBRARY"
"""Environment variable: another library file to load, such as one built with sanitizers."""

BF16, F32, F64, I32 = 0, 1, 2, 3
WINDOW, ENTRY, INDEX_KEY = 0, 1, 2
GROUP_SLOT_BYTES = 1 << 18


class OpsError(ImportError):
    """The native library cannot be used; the message says why."""


_P, _N, _I = c_void_p, c_int64, c_int32

# Result and arguments of each function.
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "df_abi_version": (c_uint32, ()),
    "df_instruction_set": (c_char_p, ()),
    "df_use_instruction_set": (_I, (c_char_p,)),
    "df_linear": (None, (_P, _N, _N, _N, _P, _I, _N, _I, _P, _I)),
    "df_normed_linear": (None, (_P, _N, _N, _P, _N, _P, c_double, _P)),
    "df_rms_norm": (None, (_P, _P, c_double, _N, _N, _P)),
    "df_rope": (None, (_P, _P, _P, _I, _N, _N, _N, _N, _P)),
    "df_pack": (None, (_I, _P, _N, _N, _P)),
    "df_unpack": (None, (_I, _P, _P, _N, _N, _P)),
    "df_pick_entries": (_N, (_I, _P, _P, _P, _N, _N, _P, _N, _N, _N, _P, _P)),
    "df_decode_fp8": (None, (_P, _P, _N, _P)),
    "df_scatter": (None, (_P, _P, _P, _P, _N, _N)),
    "df_sparse_attention": (None, (_P, _N, _N, _N, _P, _P, _N, _P, _P, _N, _P, c_float, _P)),
    "df_hc_mixes": (None, (_P, _P, c_double, _N, _N, _N, _P)),
    "df_hc_split": (None, (_P, _P, _P, _N, _N, _N, c_double, _P, _P, _P)),
    "df_hc_weights": (None, (_P, _P, c_double, _P, _P, _N, _N, _N, _N, c_double, _P, _P, _P)),
    "df_hc_collapse_norm": (None, (_P, _P, _P, c_double, _N, _N, _N, _P)),
    "df_hc_collapse": (None, (_P, _P, _N, _N, _N, _P)),
    "df_hc_expand": (None, (_P, _P, _P, _P, _N, _N, _N, _P)),
    "df_compress_pairs": (None, (_P, _P, _N, _N, _N, _P)),
    "df_index_scores": (None, (_P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _N, _N, _P)),
    "df_candidate_scores": (None, (_P, _I, _N, _N, _N, _P, _N, _P, _P)),
    "df_top_positions": (None, (_P, _I, _N, _N, _N, _P)),
    "df_route": (None, (_P, _P, _I, _P, _N, _N, _N, _N, _N, c_double, c_double, _P, _P)),
    "df_expert_activation": (None, (_P, _N, _P, _N, c_float, _P, _N, _N, _P)),
    "df_routed_experts": (None, (_P, _P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _N, _N, c_float, _P)),
    "df_shared_expert": (None, (_P, _P, _P, _N, _N, _N, c_float, _P)),
    "df_add_round": (None, (_P, _P, _N, _P)),
    "df_engram_gate": (None, (_P, _P, _N, _P, _N, _P, _P, c_double, _N, _N, _N, _P)),
    "df_group_open": (_N, (_I, _N, _N, _N, _I)),
    "df_group_close": (None, (_N,)),
    "df_group_all_reduce": (_N, (_N, _P, _N, _I)),
    "df_group_all_gather": (_N, (_N, _P, _N, _P)),
    "df_group_broadcast": (_N, (_N, _P, _N)),
    "df_group_receive": (_N, (_N, _P)),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Return the loaded library. Raises OpsError, every time, when there is none that this process can load."""
    path = _find()
    if path is None:
        raise OpsError(f"{LIBRARY_NAME} is not installed beside {__package__}")
    try:
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise OpsError(f"{path}: cannot be used: {error}") from error
    if (found := loaded.df_abi_version()) != ABI_VERSION:
        raise OpsError(f"{path}: speaks version {found} of the interface, not {ABI_VERSION}")
    return loaded


def instruction_set() -> str:
    """What the kernels in use were compiled for. Raises OpsError."""
    return str(library().df_instruction_set().decode())


def use_instruction_set(name: str) -> bool:
    """Use other kernels from now on, of `avx512`, `avx2`, `sse2`, `neon`; False where they cannot run."""
    return bool(library().df_use_instruction_set(name.encode()))


def _find() -> Path | None:
    """Return the library's file. An editable installation keeps it in another directory than the sources."""
    given = os.environ.get(LIBRARY_VARIABLE)
    if given:
        return Path(given)
    import deskfleet_ops

    for directory in deskfleet_ops.__path__:
        path = Path(directory) / LIBRARY_NAME
        if path.exists():
            return path
    return None


__all__ = [
    "ABI_VERSION",
    "BF16",
    "ENTRY",
    "F32",
    "F64",
    "GROUP_SLOT_BYTES",
    "I32",
    "INDEX_KEY",
    "LIBRARY_NAME",
    "LIBRARY_VARIABLE",
    "WINDOW",
    "OpsError",
    "instruction_set",
    "library",
    "use_instruction_set",
]
