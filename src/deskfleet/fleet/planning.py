"""What the planner says of a fleet: its machines, its checkpoint's inventory, its wishes and profile, put together.

Owns no arithmetic. The inventory of a model by name is as published; of a directory, what its headers say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deskfleet.errors import ConfigError
from deskfleet.fleet.spec import FleetSource, FleetSpec
from deskfleet.model.embedded import POCKET, locate
from deskfleet.planner.calibration import Calibration
from deskfleet.planner.cluster import Cluster
from deskfleet.planner.fleetfile import cluster_of
from deskfleet.planner.headers import inventory_of
from deskfleet.planner.inventory import Inventory
from deskfleet.planner.planfile import Asked, find
from deskfleet.planner.profiles import PROFILES
from deskfleet.planner.published import PUBLISHED, published_inventory
from deskfleet.planner.search import Search
from deskfleet.tomlfile import nearest


def plan_fleet(source: FleetSource, calibrations: Sequence[Calibration] = ()) -> Search:
    """Search for the best way to serve what the fleet asks for. Raises ConfigError; what does not fit is no error."""
    return find(inventory_for(source.spec), machines(source), asked_of(source.spec), calibrations)


def asked_of(spec: FleetSpec) -> Asked:
    """What the planner is asked: wishes, and the profile where it is one of the planner's own."""
    named = spec.profile
    return Asked(spec.wishes, named if named in PROFILES else None)


def machines(source: FleetSource) -> Cluster:
    """The fleet's nodes as the planner takes them."""
    return cluster_of(source.file)


def inventory_for(spec: FleetSpec) -> Inventory:
    """What the checkpoint holds. Raises ConfigError when the model is neither a name nor a directory here."""
    model = spec.checkpoint.model
    if model == POCKET or Path(model).is_absolute():
        return inventory_of(locate(model))
    if model in PUBLISHED:
        return published_inventory(model)
    raise ConfigError(
        f"{spec.path}: checkpoint.model is {model!r}, neither a model that is known nor a path",
        hint=f"{nearest(model, (*PUBLISHED, POCKET))} A directory begins with / or ./",
    )


__all__ = ["asked_of", "inventory_for", "machines", "plan_fleet"]
