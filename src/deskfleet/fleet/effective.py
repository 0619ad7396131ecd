"""Every value of a fleet with where it comes from: the file's line, its profile, a flag, a default, another value.

Owns the wording of origins. Values of secrets are not among them; what can be said of one is whether it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from deskfleet.fleet.secrets import state_of
from deskfleet.fleet.spec import LAYOUT_NAMES, FleetSource, NodeSpec
from deskfleet.planner.wishes import Wishes
from deskfleet.tomlfile import Key, TomlFile, spell

DEFAULT = "default"
PLAN = "left to the plan"
SSH = "left to ssh_config"


@dataclass(frozen=True, slots=True)
class Effective:
    """One value. `key` is spelled as --set takes it; `origin` says where it comes from."""

    key: str
    value: object
    origin: str
    is_given: bool
    """Whether somebody wrote it: in the file, in the profile's, or as a flag."""


def effective(source: FleetSource, environ: Mapping[str, str]) -> tuple[Effective, ...]:
    """Every value of the fleet, in the order of the file's reference."""
    return tuple(_all(source, environ))


def _all(source: FleetSource, environ: Mapping[str, str]) -> Iterator[Effective]:
    spec, toml = source.spec, source.file.toml
    yield _given(toml, ("name",), spec.name)
    yield _given(toml, ("profile",), spec.profile)
    yield _given(toml, ("share",), spec.share)
    for index, node in enumerate(spec.nodes):
        yield from _node(source, index, node)
    yield from _table(toml, ("checkpoint",), spec.checkpoint)
    for value in _table(toml, ("engine",), spec.engine):
        if (
            value.key == "engine.name"
            and source.file.table.engine.name is None
            and source.profile is not None
        ):
            yield Effective(value.key, value.value, _place(source.profile.toml, ("profile", "engine")), True)
        else:
            yield value
    yield from _wishes(source)
    yield from _table(toml, ("gateway",), spec.gateway)
    yield from _table(toml, ("restart",), spec.restart)
    for name, reference in spec.secrets.items():
        yield _given(toml, ("secrets", name), state_of(name, reference, environ))


def _node(source: FleetSource, index: int, node: NodeSpec) -> Iterator[Effective]:
    toml, table = source.file.toml, source.file.table.nodes[index]
    key: Key = ("nodes", index)
    yield _given(toml, (*key, "name"), node.name)
    yield _given(toml, (*key, "address"), node.address)
    for name in ("user", "port", "identity"):
        yield _given(toml, (*key, name), getattr(node, name), default=SSH)
    derived = "default: this machine" if table.address == "local" else f"default: {spell((*key, 'address'))}"
    yield _given(toml, (*key, "fabric"), list(node.fabric), default=derived)
    yield _given(toml, (*key, "kind"), node.kind)
    yield _given(toml, (*key, "available"), node.available_bytes, default=f"what a {node.kind} has free")
    for name in ("checkpoint", "engram", "cache"):
        own = (*key, "paths", name)
        value = getattr(node.paths, name)
        if getattr(table.paths, name) is not None:
            yield Effective(spell(own), value, _place(toml, own), True)
        elif getattr(source.file.table.paths, name) is not None:
            yield Effective(spell(own), value, _place(toml, ("paths", name)), True)
        else:
            yield Effective(spell(own), value, f"default: in {spell((*key, 'paths', 'cache'))}", False)


def _wishes(source: FleetSource) -> Iterator[Effective]:
    for field in fields(Wishes):
        if field.name == "engine":
            continue
        name = LAYOUT_NAMES.get(field.name, field.name)
        value = getattr(source.spec.wishes, field.name)
        key: Key = ("wishes", name)
        if getattr(source.file.table.wishes, name) is not None:
            yield Effective(spell(key), value, _place(source.file.toml, key), True)
        elif source.profile is not None and getattr(source.profile.table, name) is not None:
            yield Effective(spell(key), value, _place(source.profile.toml, ("profile", name)), True)
        elif name == "max_num_seqs" and source.spec.profile and source.profile is None:
            yield Effective(spell(key), None, f"{PLAN}, by profile {source.spec.profile}", False)
        else:
            yield Effective(spell(key), value, PLAN if value is None else DEFAULT, False)


def _table(toml: TomlFile, key: Key, part: Any) -> Iterator[Effective]:
    """The values of a part that has the file's names. A table in it is told value by value."""
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Mapping):
            for name, each in value.items():
                yield _given(toml, (*key, field.name, name), each)
        else:
            yield _given(toml, (*key, field.name), list(value) if isinstance(value, tuple) else value)


def _given(toml: TomlFile, key: Key, value: object, *, default: str = DEFAULT) -> Effective:
    if _is_given(toml.values, key):
        return Effective(spell(key), value, _place(toml, key), True)
    return Effective(spell(key), value, default, False)


def _place(toml: TomlFile, key: Key) -> str:
    """`fleet.toml:7`, or `--set`. Keys are not repeated: the value stands beside its own."""
    if toml.is_flag(key):
        return "--set"
    line = toml.line_of(key)
    return toml.path.name if line is None else f"{toml.path.name}:{line}"


def _is_given(values: Any, key: Key) -> bool:
    for part in key:
        if isinstance(values, dict):
            if part not in values:
                return False
        elif not (isinstance(values, list) and isinstance(part, int) and part < len(values)):
            return False
        values = values[part]
    return True


__all__ = ["DEFAULT", "PLAN", "SSH", "Effective", "effective"]
