"""Text of kernels and their constants, as either compiler takes them. Owns which headers belong to a kernel."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

from deskfleet.errors import EngineError

HERE = Path(__file__).parent
Constants = tuple[tuple[str, str], ...]
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@functools.cache
def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise EngineError(
            f"no kernel source at {path}: {error.strerror}", hint="reinstall deskfleet"
        ) from error


def sources(file: str | Path) -> tuple[str, dict[str, str]]:
    """The text of a kernel file and of every header it includes by name, directly or not.

    A relative name is one of this package's; headers lie beside the file or in this package. A header that is found in
    neither place is left for the compiler to complain about.
    """
    path = HERE / file
    headers: dict[str, str] = {}
    text = _read(path)
    pending = _INCLUDE.findall(text)
    while pending:
        name = pending.pop()
        found = [folder / name for folder in (path.parent, HERE) if (folder / name).is_file()]
        if name not in headers and found:
            headers[name] = _read(found[0])
            pending += _INCLUDE.findall(headers[name])
    return text, dict(sorted(headers.items()))


def constants(defines: Mapping[str, int | float | str]) -> Constants:
    """Names and spellings of a kernel's constants, by name: floats as float32 literals, booleans as 0 and 1."""
    return tuple((name, _spelt(value)) for name, value in sorted(defines.items()))


def _spelt(value: int | float | str) -> str:
    if isinstance(value, float):
        return f"{value!r}f"
    return str(int(value)) if isinstance(value, bool) else str(value)


def unit(file: str | Path, text: str, constants: Constants) -> str:
    """The file behind its constants. Not -D options: those would rename what the compilers' own headers use, too."""
    defines = "".join(f"#define {name} {value}\n" for name, value in constants)
    return f'{defines}#line 1 "{Path(file).name}"\n{text}\n'


def failed(file: str | Path, entry: str, log: str) -> EngineError:
    """What a compiler said of a kernel, its first lines."""
    lines = [line for line in log.splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line]
    first = "\n".join((wrong or lines)[:8])
    return EngineError(
        f"kernel {entry} of {Path(file).name} does not compile:\n{first}",
        hint="a kernel that deskfleet ships must compile: report this with the versions of torch and of the driver",
    )


__all__ = ["HERE", "Constants", "constants", "failed", "sources", "unit"]
