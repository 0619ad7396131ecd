"""Every engine by name. A new engine is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from deskfleet.planner.engines import exl3, native, sglang, vllm
from deskfleet.planner.engines.contract import EngineRules
from deskfleet.planner.wishes import EngineName

ENGINES: Mapping[EngineName, EngineRules] = MappingProxyType(
    {rules.name: rules for rules in (native.RULES, vllm.RULES, sglang.RULES, exl3.RULES)}
)


def rules_of(engine: EngineName) -> EngineRules:
    """The rules of an engine that `Wishes` knows."""
    return ENGINES[engine]


__all__ = ["ENGINES", "rules_of"]
