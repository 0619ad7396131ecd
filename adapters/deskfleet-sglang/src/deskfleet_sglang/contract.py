"""What SGLang must be like for the plug-in to work on it, and whether it is.

A release is one file, such as `release_0_5_23`: its version and the digests of every function and class that is
replaced, wrapped or relied on. SGLang swallows what goes wrong with hooks, so whether they are in place is looked at
afterwards, by `check_applied`. Raises ContractError; changes nothing.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deskfleet_engram.host import ContractError, check_sources
from deskfleet_sglang import release_0_5_23

SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
"""Looked at, and hooked, only where it is already imported: in processes that have no scheduler it would cost most of a
start."""

_SWITCHES = (
    ("SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE", True, "set it to 1, or the tables are held in device memory"),
    ("SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT", "per_rank", "set it to per_rank: each rank reads its own rows"),
    ("SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS", False, "leave it out: it holds the tables in device memory"),
)


@dataclass(frozen=True, slots=True)
class Release:
    """A release of SGLang that was tested. `sources`: SHA-256 of the source text, by dotted name."""

    version: str
    sources: Mapping[str, str]


RELEASES: dict[str, Release] = {
    module.VERSION: Release(module.VERSION, module.SOURCES) for module in (release_0_5_23,)
}


def release_of(version: str) -> Release:
    """Return the release. Raises ContractError for one that was not tested."""
    try:
        return RELEASES[version]
    except KeyError:
        raise ContractError(
            f"SGLang is {version}, but deskfleet-sglang was tested with {', '.join(sorted(RELEASES))}",
            hint="take a tested release, or uninstall deskfleet-sglang",
        ) from None


def check_release(release: Release) -> dict[str, str]:
    """Return the digests of what SGLang has under the release's names. Raises ContractError for any difference.

    A function that something else has wrapped already is refused too: its source would be another's.
    """
    names = [name for name in release.sources if is_here(name)]
    found = {name: _resolve(name) for name in names}
    for name, target in found.items():
        is_decorated_by_sglang = name.startswith(SCHEDULER_MODULE)
        if hasattr(target, "__wrapped__") and not is_decorated_by_sglang:
            raise ContractError(
                f"{name} of SGLang {release.version} was already replaced by something else",
                hint="let no other plug-in patch Engram; SGLANG_PLUGINS names those that are loaded",
            )
    wanted = {name: release.sources[name] for name in names}
    return check_sources(found, wanted, engine=f"SGLang {release.version}")


def check_switches() -> None:
    """Raise ContractError unless SGLang's own variables lead to the class that is replaced."""
    envs = importlib.import_module("sglang.srt.environ").envs
    for name, wanted, hint in _SWITCHES:
        value = getattr(envs, name).get()
        if value != wanted:
            raise ContractError(f"{name} is {value!r}, but rows from disk need {wanted!r}", hint=hint)


@dataclass(frozen=True, slots=True)
class Hook:
    """One place of SGLang and what takes it; `kind` is a name of SGLang's HookType."""

    target: str
    function: Callable[..., Any]
    kind: str


def check_applied(hooks: Iterable[Hook]) -> None:
    """Raise ContractError unless every hook is in place."""
    for hook in hooks:
        if not any(found is hook.function for found in _layers(_resolve(hook.target))):
            raise ContractError(
                f"SGLang did not put {hook.kind} at {hook.target}, and would go on without it",
                hint="its log says why, above this line",
            )


def _layers(target: Any) -> Iterator[Any]:
    """Yield `target`, and of a function that SGLang wrapped the hooks around it."""
    while target is not None:
        yield target
        for cell in getattr(target, "__closure__", None) or ():
            yield cell.cell_contents
        target = getattr(target, "__wrapped__", None)


def is_here(name: str) -> bool:
    """Say whether what is called so may be looked at: everything, but the scheduler only where it is."""
    return not name.startswith(SCHEDULER_MODULE + ".") or SCHEDULER_MODULE in sys.modules


def _resolve(name: str) -> Any:
    """Return the function or class of that name; of a class method and of a Triton kernel the plain function."""
    try:
        target = pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ContractError(f"SGLang has no {name}: {error}") from error
    if isinstance(target, type):
        return target
    return getattr(target, "__func__", None) or getattr(target, "fn", None) or target


__all__ = [
    "RELEASES",
    "SCHEDULER_MODULE",
    "Hook",
    "Release",
    "check_applied",
    "check_release",
    "check_switches",
    "is_here",
    "release_of",
]
