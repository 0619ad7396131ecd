"""Every engine by name. A new engine is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from deskfleet.errors import ConfigError
from deskfleet.planner.engines import exl3, native, sglang, vllm
from deskfleet.planner.engines.contract import EngineRules
from deskfleet.planner.sharding import EngramSplit
from deskfleet.planner.wishes import EngineName

ENGINES: Mapping[EngineName, EngineRules] = MappingProxyType(
    {rules.name: rules for rules in (native.RULES, vllm.RULES, sglang.RULES, exl3.RULES)}
)


def rules_of(engine: EngineName) -> EngineRules:
    """The rules of an engine that `Wishes` knows."""
    return ENGINES[engine]


def pack_split(engine: EngineName) -> EngramSplit:
    """How an engine's ranks share out the columns of a pack. Raises ConfigError for an engine that reads no packs."""
    rules = rules_of(engine)
    if not rules.reads_packs:
        raise ConfigError(
            f"engine {engine} reads the published shards of the tables, not packs",
            hint="put those two shards of the published checkpoint in paths.engram on each node, with its "
            "config.json and model.safetensors.index.json",
        )
    return rules.engram_split


__all__ = ["ENGINES", "pack_split", "rules_of"]
