"""A launch for other launchers: compose, systemd, Kubernetes, sparkrun. Text out of a LaunchSpec, and nothing else.

Who starts the ranks so has no doctor, no launch gates and no watchdog; each text says so at its top, with what it does
not carry. Values of secrets are in none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from deskfleet.errors import ConfigError
from deskfleet.fleet.export import compose, kubernetes, sparkrun, systemd
from deskfleet.fleet.export.file import Exported
from deskfleet.fleet.launch import LaunchSpec
from deskfleet.fleet.spec import FleetSpec

FORMATS: Mapping[str, Callable[[LaunchSpec, FleetSpec], tuple[Exported, ...]]] = MappingProxyType(
    {
        "compose": compose.export,
        "systemd": systemd.export,
        "k8s": kubernetes.export,
        "sparkrun": sparkrun.export,
    }
)
"""Each format, and what makes its files."""


def export(name: str, launch: LaunchSpec, spec: FleetSpec) -> tuple[Exported, ...]:
    """Return the files of a format. Raises ConfigError for what it cannot express."""
    if launch.engine == "native":
        raise ConfigError(
            "ranks of the native engine are started by deskfleet's supervisor and answer to it",
            hint="start them with deskfleet fleet serve; vllm, sglang and exl3 can be exported",
        )
    return FORMATS[name](launch, spec)


__all__ = ["FORMATS", "Exported", "export"]
