"""Compiled operators of the DeepSeek-V4.1 forward pass; `library()` gives their C functions."""

from deskfleet_ops.library import (
    ABI_VERSION,
    BF16,
    ENTRY,
    F32,
    F64,
    GROUP_SLOT_BYTES,
    I32,
    INDEX_KEY,
    LIBRARY_NAME,
    LIBRARY_VARIABLE,
    WINDOW,
    OpsError,
    instruction_set,
    library,
    use_instruction_set,
)

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
