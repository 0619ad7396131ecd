"""Every environment variable deskfleet reads. Owns their names, values and defaults; nothing else reads them.

A variable that starts with DESKFLEET_ and is not listed here is an error, so that a misspelt one is never
silently without effect. `docs/reference/environment.md` is generated from `VARIABLES`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from deskfleet.errors import ConfigError

PREFIX = "DESKFLEET_"


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable: its values (none listed: any text), the one it has when unset, and its meaning in one sentence."""

    name: str
    values: tuple[str, ...]
    default: str
    meaning: str


LOG_LEVEL = Variable(
    name="DESKFLEET_LOG_LEVEL",
    values=("quiet", "error", "warning", "info", "debug"),
    default="quiet",
    meaning="How much the log on stderr says; `quiet` shows only failures that nobody foresaw, with their trace.",
)

ENGRAM_LIBRARY = Variable(
    name="DESKFLEET_ENGRAM_LIBRARY",
    values=(),
    default="",
    meaning="Another file to load as the native row reader, such as one built with sanitizers.",
)

TRACE_DIR = Variable(
    name="DESKFLEET_TRACE_DIR",
    values=(),
    default="",
    meaning="A directory in which every rank leaves a profiler's trace of some of its first steps; empty for none.",
)

OPS_LIBRARY = Variable(
    name="DESKFLEET_OPS_LIBRARY",
    values=(),
    default="",
    meaning="Another file to load as the native operators, such as one built with sanitizers.",
)

RANK_TOKEN = Variable(
    name="DESKFLEET_RANK_TOKEN",
    values=(),
    default="",
    meaning="The secret by which `deskfleet rank` and its supervisor know each other, 16 characters or more.",
)

VARIABLES: tuple[Variable, ...] = (LOG_LEVEL, ENGRAM_LIBRARY, OPS_LIBRARY, RANK_TOKEN, TRACE_DIR)


def read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the value of every variable by name, defaults filled in.

    Raises ConfigError for a DESKFLEET_ variable that does not exist, naming the nearest one, and for a value
    that a variable cannot have.
    """
    known = {variable.name: variable for variable in VARIABLES}
    for name in environ:
        if name.startswith(PREFIX) and name not in known:
            raise ConfigError(f"there is no environment variable {name}", hint=_nearest(name))
    return {name: _value(variable, environ) for name, variable in known.items()}


def _value(variable: Variable, environ: Mapping[str, str]) -> str:
    value = environ.get(variable.name, variable.default)
    if variable.values and value not in variable.values:
        raise ConfigError(
            f"{variable.name} is {value!r}, which it cannot be", hint=f"use {', '.join(variable.values)}"
        )
    return value


def _nearest(name: str) -> str:
    names = [variable.name for variable in VARIABLES]
    found = difflib.get_close_matches(name, names, n=1, cutoff=0)
    return f"did you mean {found[0]}? Unset {name} otherwise"


__all__ = [
    "ENGRAM_LIBRARY",
    "LOG_LEVEL",
    "OPS_LIBRARY",
    "PREFIX",
    "RANK_TOKEN",
    "TRACE_DIR",
    "VARIABLES",
    "Variable",
    "read_environment",
]
