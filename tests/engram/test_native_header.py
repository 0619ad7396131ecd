"""The C interface: a C compiler takes the header, and ctypes lays out its structures the same way."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from deskfleet_engram import _native

INCLUDE = Path(__file__).parents[2] / "packages" / "deskfleet-engram" / "native" / "include"
STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "es_error": _native.Error,
    "es_options": _native.Options,
    "es_column": _native.Column,
    "es_table": _native.Table,
    "es_request": _native.Request,
    "es_counters": _native.Counters,
    "es_cache_counters": _native.CacheCounters,
    "es_hash_plan": _native.HashPlan,
}


def test_structures_are_laid_out_as_in_c(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    lines = []
    for name, structure in STRUCTURES.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field in structure._fields_:
            lines.append(f'printf("{name}.{field[0]} %zu\\n", offsetof({name}, {field[0]}));')
    lines.append('printf("version %d\\n", ES_ABI_VERSION); printf("kinds %d\\n", ES_NUM_KINDS);')
    source = tmp_path / "layout.c"
    body = "\n".join(lines)
    source.write_text(
        f"#include <stdio.h>\n#include <deskfleet_engram.h>\nint main(void) {{\n{body}\nreturn 0;\n}}\n"
    )
    flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}"]
    program = tmp_path / "layout"
    built = subprocess.run(
        [compiler, *flags, str(source), "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    text = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    found = dict(line.split() for line in text.splitlines())
    expected = {"version": str(_native.ABI_VERSION), "kinds": str(len(_native.KINDS))}
    for name, structure in STRUCTURES.items():
        expected[name] = str(ctypes.sizeof(structure))
        for field in structure._fields_:
            expected[f"{name}.{field[0]}"] = str(getattr(structure, field[0]).offset)
    assert found == expected
