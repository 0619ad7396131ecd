"""A plug-in of stock SGLang 0.5.23: Engram rows of DeepSeek-V4.1 are read from a pack on disk, not held in memory.

`plugin.register` is the entry point; `contract` says what SGLang must be like, `adapter` owns the hooks, `table` and
`lookup` what stands in the place of SGLang's tables. Imports neither torch nor SGLang before it is asked to work.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
