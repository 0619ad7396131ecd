"""The settings file of the policies. Owns its layers, how it is checked, and the exchange of old for new while serving.

    keys_file = "keys.toml"              # beside this file

    [completion_cap]                     # for everybody
    max_tokens = 65536

    [models."deepseek-v4.1-flash".completion_cap]
    max_tokens = 32768                   # for requests to this model

    [keys."alice".completion_cap]
    max_tokens = 131072                  # for this key, whatever the model

Later layers lie over earlier ones, value by value: defaults, the file's own sections, the model's, the key's. A file is
taken as a whole or not at all: a name that does not exist, a value of the wrong kind, a model or key that nobody knows
is refused with its place and the nearest name. Reading it again exchanges everything at once for requests that come
later; those that run keep what they began with. A file that is wrong changes nothing, and says so. Keys are read again
by themselves, so that a revoked one is out whatever the settings file looks like.
"""

from __future__ import annotations

import difflib
import logging
import re
import threading
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from deskfleet.errors import ConfigError
from deskfleet.gateway.admission import AdmissionSettings, ShareSettings
from deskfleet.gateway.health_limits import HealthLimits
from deskfleet.gateway.key_file import read_key_file
from deskfleet.gateway.keys import KeyRing
from deskfleet.gateway.policies.completion_cap import CompletionCap, CompletionCapSettings
from deskfleet.gateway.policies.contract import Policy
from deskfleet.gateway.policies.counting import Counters
from deskfleet.gateway.policies.deadlines import Deadlines, DeadlineSettings
from deskfleet.gateway.policies.images import ImageSettings
from deskfleet.gateway.policies.key_limits import KeyLimits, KeyLimitsSettings, Usage
from deskfleet.gateway.policies.line_runs import Decode, LineEnds
from deskfleet.gateway.policies.loop_abort import LoopAbort, LoopAbortSettings
from deskfleet.gateway.policies.request_limits import RequestLimits
from deskfleet.gateway.policies.sampling_defaults import SamplingDefaults, SamplingDefaultsSettings
from deskfleet.gateway.policies.section import Section
from deskfleet.gateway.policies.thinking_budget import ThinkingBudget, ThinkingBudgetSettings
from deskfleet.gateway.redaction import redact

logger = logging.getLogger(__name__)

_MAX_TOLD = 5
_MAX_VALUE_LENGTH = 60


class ModelSections(Section):
    """What may differ from model to model."""

    completion_cap: CompletionCapSettings = CompletionCapSettings()
    thinking_budget: ThinkingBudgetSettings = ThinkingBudgetSettings()
    sampling_defaults: SamplingDefaultsSettings = SamplingDefaultsSettings()
    deadlines: DeadlineSettings = DeadlineSettings()
    loop_abort: LoopAbortSettings = LoopAbortSettings()
    images: ImageSettings = ImageSettings()


class KeySections(ModelSections):
    """What may differ from key to key: all that may from model to model, and what is decided before it is known."""

    key_limits: KeyLimitsSettings = KeyLimitsSettings()
    share: ShareSettings = ShareSettings()
    request_limits: RequestLimits = RequestLimits()


class PolicySettings(KeySections):
    """The whole file."""

    admission: AdmissionSettings = AdmissionSettings()
    health: HealthLimits = HealthLimits()
    keys_file: str | None = Field(default=None, min_length=1)
    models: dict[str, ModelSections] = Field(default_factory=dict)
    keys: dict[str, KeySections] = Field(default_factory=dict)

    def resolved(self, model_id: str | None, key: str | None) -> KeySections:
        """Return what holds for a request: this, under its model's layer, under its key's."""
        layers = (self.models.get(model_id or ""), self.keys.get(key or ""))
        result: dict[str, Any] = {}
        for name in KeySections.model_fields:
            section = getattr(self, name)
            for layer in layers:
                if layer is not None and name in layer.model_fields_set:
                    section = section.under(getattr(layer, name))
            result[name] = section
        return KeySections.model_construct(**result)


def read_policies(
    path: Path, *, model_ids: Sequence[str] = (), key_names: Sequence[str] = ()
) -> PolicySettings:
    """Read a settings file. Raises ConfigError with every mistake in it: its line, its key, its value.

    Layers may be given for `model_ids` and `key_names` only; without `model_ids` for any model.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        settings = PolicySettings.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {redact(str(error))}") from None
    except ValidationError as error:
        raise _describe(error, text, path) from None
    _check_names(settings.models, model_ids or list(settings.models), "models", text, path)
    _check_names(settings.keys, key_names, "keys", text, path)
    return settings


def _check_names(layers: dict[str, Any], known: Sequence[str], table: str, text: str, path: Path) -> None:
    for name in layers:
        if name not in known:
            place = _place(text, (table, name), path)
            one = "model" if table == "models" else "key"
            raise ConfigError(f"{place}: there is no {one} {name!r}", hint=_nearest(name, known))


def _describe(error: ValidationError, text: str, path: Path) -> ConfigError:
    """Turn everything pydantic found into one error."""
    found = error.errors(include_url=False)
    hint = None
    lines = []
    for each in found[:_MAX_TOLD]:
        loc = each["loc"]
        place = _place(text, loc, path)
        if each["type"] == "extra_forbidden":
            lines.append(f"{place}: there is no such setting")
            hint = hint or _nearest(str(loc[-1]), _fields_at(loc[:-1]))
            continue
        reason = each["msg"].removeprefix("Value error, ")
        value = redact(repr(each["input"]))
        shown = value if len(value) <= _MAX_VALUE_LENGTH else f"{value[:_MAX_VALUE_LENGTH]}..."
        lines.append(f"{place} is {shown}: {reason[:1].lower()}{reason[1:]}")
    if len(found) > _MAX_TOLD:
        lines.append(f"and {len(found) - _MAX_TOLD} more")
    return ConfigError("; ".join(lines), hint=hint)


def _nearest(name: str, known: Sequence[str]) -> str:
    if not known:
        return "there are none"
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(sorted(known))}"


def _fields_at(loc: Sequence[int | str]) -> list[str]:
    """Return the names that may stand in the table at `loc`."""
    model: type[BaseModel] = PolicySettings
    parts = list(loc)
    while parts:
        part = str(parts.pop(0))
        if model is PolicySettings and part in ("models", "keys"):
            if parts:
                parts.pop(0)
            model = ModelSections if part == "models" else KeySections
            continue
        field = model.model_fields.get(part)
        if field is None or not (
            isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        ):
            return []
        model = field.annotation
    return list(model.model_fields)


_TABLE = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?$")
_PART = re.compile(r'\s*(?:"([^"]*)"|\'([^\']*)\'|([A-Za-z0-9_-]+))\s*(?:\.|$|(?==))')


def _place(text: str, loc: Sequence[int | str], path: Path) -> str:
    """Return where a setting stands: the file, its line if that can be told, and its key."""
    wanted = [str(part) for part in loc]
    table: list[str] = []
    found = None
    for number, line in enumerate(text.splitlines(), 1):
        header = _TABLE.match(line)
        if header is not None:
            table = _parts(header[1])
            here = table
        else:
            here = [*table, *_parts(line.partition("=")[0])] if "=" in line else []
        # A setting is on its own line or within the value of a longer one; a table where the first in it begins.
        num_common = (
            len(here) if here == wanted[: len(here)] else len(wanted) * (here[: len(wanted)] == wanted)
        )
        if num_common and (found is None or num_common > found[1]):
            found = (number, num_common)
    where = f"{path}:{found[0]}" if found else str(path)
    return f"{where}: {'.'.join(wanted)}"


def _parts(text: str) -> list[str]:
    return [
        next(part for part in match.groups() if part is not None) for match in _PART.finditer(text.strip())
    ]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was on the disk at one moment, and holds until the next. `number` tells one from another."""

    settings: PolicySettings
    ring: KeyRing | None
    number: int


class PolicyStore:
    """The settings and keys that hold now, and the files they came from."""

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        path: Path | None = None,
        keys_path: Path | None = None,
        model_ids: Sequence[str] = (),
    ) -> None:
        """`settings` instead of a file, for programs; the defaults without either.

        Raises ConfigError as `read_policies` and `read_key_file` do.
        """
        self._path = path
        self._own_keys_path = self._keys_path = keys_path
        self._model_ids = tuple(model_ids)
        self._lock = threading.Lock()
        self._base = PolicySettings()
        self._listeners: list[Callable[[PolicySettings], None]] = []
        ring = self._read_keys()
        self._said = self._read_settings(ring) or settings or PolicySettings()
        self._snapshot = Snapshot(self._said, ring, 0)

    @property
    def snapshot(self) -> Snapshot:
        """What holds now."""
        return self._snapshot

    def ring(self) -> KeyRing | None:
        """The keys that are valid now, None where everybody is let in."""
        return self._snapshot.ring

    def put_on(self, base: PolicySettings) -> None:
        """Lay everything that is said here over `base`."""
        self._base = base
        self._exchange(self._said, self._snapshot.ring)

    def on_reload(self, listener: Callable[[PolicySettings], None]) -> None:
        """Call `listener` with the settings whenever they have been read again."""
        self._listeners.append(listener)

    def reload(self) -> tuple[str, ...]:
        """Read both files again. Returns what was wrong, one sentence each; what was wrong has changed nothing.

        Once there are keys, there will be keys: nothing that is missing from a file opens a server.
        """
        with self._lock:
            said, ring = self._said, self._snapshot.ring
            problems = []
            try:
                ring = self._read_keys()
            except ConfigError as error:
                problems.append(f"keys are as they were: {_in_a_line(error)}")
            try:
                said = self._read_settings(ring) or said
            except ConfigError as error:
                problems.append(f"settings are as they were: {_in_a_line(error)}")
            self._exchange(said, ring)
        for listener in self._listeners:
            listener(self._snapshot.settings)
        for problem in problems:
            logger.error("reload: %s", problem)
        if not problems:
            logger.info("reload: settings and keys were read again")
        return tuple(problems)

    def _exchange(self, said: PolicySettings, ring: KeyRing | None) -> None:
        self._said = said
        self._snapshot = Snapshot(self._base.under(said), ring, self._snapshot.number + 1)

    def _read_keys(self) -> KeyRing | None:
        """Return the keys of the file that was named, or else of the one that the settings name, now or before."""
        named = None if self._path is None else _named_keys_file(self._path)
        if self._path is not None and named is not None:
            path = self._path.parent / named
            if self._own_keys_path is not None and path.resolve() != self._own_keys_path.resolve():
                raise ConfigError(
                    f"{self._path}: keys_file is {named!r}, and --keys says {self._own_keys_path}",
                    hint="say it in one place",
                )
            ring = KeyRing(read_key_file(path))
            self._keys_path = path
            return ring
        return None if self._keys_path is None else KeyRing(read_key_file(self._keys_path))

    def _read_settings(self, ring: KeyRing | None) -> PolicySettings | None:
        if self._path is None:
            return None
        names = () if ring is None else ring.names
        return read_policies(self._path, model_ids=self._model_ids, key_names=names)


def _in_a_line(error: ConfigError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _named_keys_file(path: Path) -> str | None:
    """Return the `keys_file` of a settings file, None where it names none or cannot be read."""
    try:
        named = tomllib.loads(path.read_text(encoding="utf-8")).get("keys_file")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return None  # read_policies will say why
    return named if isinstance(named, str) and named else None


class Policies:
    """The policies of one gateway, for whoever asks. Counters and what keys have used outlive every reload."""

    def __init__(self, store: PolicyStore, decode: Decode, *, usage: Usage | None = None) -> None:
        """`decode` is the served model's tokens to text, special tokens included."""
        self.counters = Counters()
        self._store = store
        self._ends = LineEnds(decode)
        self._usage = usage or Usage()
        self._made: tuple[int, dict[tuple[str, str | None], tuple[Policy, ...]]] = (-1, {})
        self._resolved: tuple[int, dict[tuple[str | None, str | None], KeySections]] = (-1, {})

    @property
    def store(self) -> PolicyStore:
        """Where the settings come from."""
        return self._store

    def settings_for(self, model_id: str | None, key: str | None) -> KeySections:
        """Return what holds for requests of `key` to `model_id`, None where it is not known yet."""
        snapshot = self._store.snapshot
        # Another thread may exchange the table; whoever has the old one fills it in vain.
        number, table = self._resolved
        if number != snapshot.number:
            self._resolved = (snapshot.number, table := {})
        settings = table.get((model_id, key))
        if settings is None:
            settings = table[model_id, key] = snapshot.settings.resolved(model_id, key)
        return settings

    def for_caller(self, model_id: str, key: str | None) -> tuple[Policy, ...]:
        """Return the policies for requests of `key` to `model_id`, in their order. Made once, then looked up."""
        number, table = self._made
        current = self._store.snapshot.number
        if number != current:
            self._made = (current, table := {})
        policies = table.get((model_id, key))
        if policies is None:
            policies = table[model_id, key] = self._make(self.settings_for(model_id, key))
        return policies

    def _make(self, settings: KeySections) -> tuple[Policy, ...]:
        return (
            KeyLimits(settings.key_limits, self._usage, self.counters),
            CompletionCap(settings.completion_cap, self.counters),
            ThinkingBudget(settings.thinking_budget, self.counters),
            SamplingDefaults(settings.sampling_defaults, self.counters),
            Deadlines(settings.deadlines),
            LoopAbort(settings.loop_abort, self._ends, self.counters),
        )


__all__ = [
    "KeySections",
    "ModelSections",
    "Policies",
    "PolicySettings",
    "PolicyStore",
    "Snapshot",
    "read_policies",
]
