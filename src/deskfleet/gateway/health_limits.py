"""From when on an engine counts as silent, as stuck or as short of memory. Owns the thresholds as the settings file
spells them, and how they lie over what a server has by itself (`symptoms.HealthSettings`).

What the states mean and what follows from them: docs/guides/health.md. Memory is what a machine could still give to a
program (`MemAvailable`), on the host that has least. A floor that is said by itself moves the critical one below half
of it, and a critical one by itself keeps the floor at least as high. In a fleet none of the three about memory is used:
the supervisor's watchdog decides, for all nodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from pydantic import Field, model_validator

from deskfleet.gateway.policies.section import Bytes, Fraction, Seconds, Section
from deskfleet.gateway.symptoms import HealthSettings

_OWN = HealthSettings()
_MEMORY = frozenset(("memory_floor_bytes", "memory_critical_bytes", "critical_s"))


class HealthLimits(Section):
    """Thresholds of health. Read when the server starts: reading the file again does not change them."""

    period_s: Seconds = Field(default=_OWN.period_s, gt=0, le=4, description="Seconds between two looks.")
    strikes: int = Field(
        default=_OWN.strikes, ge=1, le=100, description="Looks in a row that must say the same."
    )
    silent_s: Seconds = Field(
        default=_OWN.silent_s, gt=0, description="Seconds without a heartbeat after which a rank is silent."
    )
    stall_s: Seconds = Field(
        default=_OWN.stall_s or 0.0,
        gt=0,
        description="Seconds for which nothing may move while work exists. In front of engines that run elsewhere each "
        "stream ends itself, and this holds only if it is said.",
    )
    prompt_token_s: Fraction = Field(
        default=_OWN.prompt_token_s, ge=0, description="Seconds more for each prompt token under way."
    )
    canary: bool = Field(default=True, description="Whether an idle engine is asked for a few tokens.")
    canary_every_s: Seconds = Field(
        default=_OWN.canary_every_s or 0.0, gt=0, description="Seconds without an answer until it is asked."
    )
    canary_retry_s: Seconds = Field(
        default=_OWN.canary_retry_s, gt=0, description="Seconds between two canaries while there is doubt."
    )
    canary_deadline_s: Seconds = Field(
        default=_OWN.canary_deadline_s, gt=0, description="Seconds in which a canary must be answered."
    )
    canary_request_s: Seconds = Field(
        default=_OWN.canary_request_s, ge=0, description="Seconds more for each request before it."
    )
    fault_window_s: Seconds = Field(
        default=_OWN.fault_window_s, gt=0, description="Seconds for which failed answers count."
    )
    dead_after_s: Seconds = Field(
        default=_OWN.dead_after_s,
        gt=0,
        description="Seconds after which a stuck engine is given up. 30 in a fleet, unless it is said.",
    )
    memory_floor_bytes: Bytes | None = Field(
        default=None,
        ge=0,
        description="Available memory below which no request is taken; 0: no such floor. None: 5 GB, but never more "
        "than a twentieth of the machine, where the engine runs here; 0 where it runs elsewhere.",
    )
    memory_critical_bytes: Bytes | None = Field(
        default=None,
        ge=0,
        description="Available memory below which the longest prompts are ended, one by one. None: as the floor, 1 GiB "
        "but never more than half of the floor.",
    )
    critical_s: Seconds = Field(
        default=_OWN.critical_s,
        gt=0,
        description="Seconds below that with nothing left to end, after which the engine is given up.",
    )

    @model_validator(mode="after")
    def _check_floors(self) -> Self:
        floor, critical = self.memory_floor_bytes, self.memory_critical_bytes
        if floor is not None and critical is not None and critical > floor:
            raise ValueError(f"memory_critical_bytes {critical} is more than memory_floor_bytes {floor}")
        return self

    @property
    def about_memory(self) -> tuple[str, ...]:
        """The settings of memory that are said."""
        return tuple(sorted(_MEMORY & self.model_fields_set))

    def without_memory(self) -> Self:
        """Return the same with nothing said of memory: for a server whose memory somebody else looks after."""
        said = self.model_fields_set - _MEMORY
        return self.model_construct(said, **{name: getattr(self, name) for name in said})

    def over(self, own: HealthSettings) -> HealthSettings:
        """Return what holds: what is said here, over what a server has by itself."""
        said: dict[str, Any] = {name: getattr(self, name) for name in self.model_fields_set - {"canary"}}
        said = {name: value for name, value in said.items() if value is not None}
        if not self.canary:
            said["canary_every_s"] = None
        floor, critical = said.get("memory_floor_bytes"), said.get("memory_critical_bytes")
        if floor is not None and critical is None:
            said["memory_critical_bytes"] = min(own.memory_critical_bytes or 0, floor // 2)
        elif critical is not None and floor is None:
            said["memory_floor_bytes"] = max(own.memory_floor_bytes or 0, critical)
        return replace(own, **said)


__all__ = ["HealthLimits"]
