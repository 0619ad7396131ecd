"""Every engine's launcher by name. A new engine is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from deskfleet.fleet.engines import exl3, native, sglang, vllm
from deskfleet.fleet.engines.contract import EngineLauncher
from deskfleet.planner.wishes import EngineName

LAUNCHERS: Mapping[EngineName, EngineLauncher] = MappingProxyType(
    {each.name: each for each in (native.LAUNCHER, vllm.LAUNCHER, sglang.LAUNCHER, exl3.LAUNCHER)}
)

__all__ = ["LAUNCHERS"]
