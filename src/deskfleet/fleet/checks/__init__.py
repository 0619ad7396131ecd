"""What the doctor asks, group by group: `GROUPS` is the one table. A new check is a function and a line in its module.

Checks are pure: facts in, an outcome out. They know no ssh and no terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from deskfleet.fleet.checks import containers, machine, network, node, versions
from deskfleet.fleet.checks.contract import Check, Finding, Outcome, Subject, Verdict

GROUPS: Mapping[str, tuple[Check, ...]] = MappingProxyType(
    {
        "node": node.CHECKS,
        "containers": containers.CHECKS,
        "machine": machine.CHECKS,
        "versions": versions.CHECKS,
        "network": network.CHECKS,
    }
)

CHECKS: tuple[Check, ...] = tuple(check for group in GROUPS.values() for check in group)

__all__ = ["CHECKS", "GROUPS", "Check", "Finding", "Outcome", "Subject", "Verdict"]
