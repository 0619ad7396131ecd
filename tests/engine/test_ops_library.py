"""The compiled operators' library by itself: its header against what Python declares, and its own test program."""

from __future__ import annotations

import re
import shutil
import subprocess
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path

import pytest

from deskfleet_ops.library import _FUNCTIONS

NATIVE = Path(__file__).parents[2] / "packages" / "deskfleet-ops" / "native"
C_TYPES = {
    "int64_t": c_int64,
    "int32_t": c_int32,
    "uint32_t": c_uint32,
    "double": c_double,
    "float": c_float,
    "void": None,
    "const char*": c_char_p,
}


def test_every_function_is_declared_as_in_the_header() -> None:
    """A wrong width would be read from the wrong place, without a word."""
    text = re.sub(r"/\*.*?\*/", "", (NATIVE / "include" / "deskfleet_ops.h").read_text(), flags=re.DOTALL)
    declared = {}
    for result, name, parameters in re.findall(r"^(\S.*?) (df_\w+)\(([^)]*)\);", text, re.MULTILINE):
        declared[name] = (C_TYPES[result], tuple(_ctype(p) for p in parameters.split(",") if p != "void"))
    assert declared == _FUNCTIONS


def _ctype(parameter: str) -> object:
    words = parameter.split()
    kind = " ".join(words[:-1])
    if kind.endswith("*") and kind not in C_TYPES:
        return c_void_p
    return C_TYPES[kind]


@pytest.mark.slow  # compiles everything three times over: a minute
def test_all_instruction_sets_give_the_written_bits(tmp_path: Path) -> None:
    """Under address and undefined-behaviour sanitizers; what is written down holds on every processor."""
    if shutil.which("cmake") is None or shutil.which("g++") is None:
        pytest.skip("needs cmake and g++")
    configure = ["cmake", "-S", str(NATIVE), "-B", str(tmp_path), "-DOPS_TESTS=ON"]
    _run([*configure, "-DOPS_SANITIZE=address,undefined"])
    _run(["cmake", "--build", str(tmp_path), "--parallel", "2"])
    lines = _run([str(tmp_path / "ops_test")]).splitlines()
    assert lines
    assert all(re.fullmatch(r"\w+: [0-9a-f]{16}", line) for line in lines)
    assert _run([str(tmp_path / "group_test")]) == "group: well\n"


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-8000:]
    return result.stdout
