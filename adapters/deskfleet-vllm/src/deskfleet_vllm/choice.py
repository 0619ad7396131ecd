"""Which store answers, and why."""

from __future__ import annotations

from dataclasses import dataclass

from deskfleet_engram.host import ContractError
from deskfleet_vllm.config import StoreName


@dataclass(frozen=True, slots=True)
class Facts:
    """What the choice rests on. `has_split`: this rank's rows lie in the form that kernels address."""

    is_cuda: bool
    uses_host_page_tables: bool
    has_split: bool
    has_native_reader: bool
    native_reason: str


def choose(wanted: StoreName | None, facts: Facts) -> tuple[StoreName, str]:
    """Return the store and the reason. Raises ContractError when the one that is wanted cannot work here."""
    if wanted is not None:
        problem = _problem(wanted, facts)
        if problem:
            raise ContractError(
                f"store {wanted} was asked for, but {problem}", hint='"store": "auto" chooses'
            )
        return wanted, "as asked"
    skipped: list[str] = []
    ordered: tuple[StoreName, ...] = ("mapped", "callback")
    for name in ordered:
        if not facts.is_cuda:
            continue
        problem = _problem(name, facts)
        if not problem:
            return name, "; ".join(["the first that works here", *skipped])
        skipped.append(f"not {name}, because {problem}")
    return "staged", "; ".join(skipped) or "no CUDA device"


def _problem(store: StoreName, facts: Facts) -> str:
    """Say why a store cannot work, or nothing."""
    if store == "mapped":
        if facts.is_cuda and not facts.uses_host_page_tables:
            return "kernels of this device cannot read a file mapping (attribute 100 is 0)"
        if not facts.has_split:
            return "the split files are not there (python -m deskfleet_vllm split writes them)"
    if store == "callback":
        if not facts.is_cuda:
            return "there is no CUDA device"
        if not facts.has_native_reader:
            return f"the native reader is not at work: {facts.native_reason}"
    return ""


__all__ = ["Facts", "choose"]
