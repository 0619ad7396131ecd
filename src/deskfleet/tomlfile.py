"""A TOML file that people write: read strictly, and every mistake told with its line, its key, its value and a hint.

Owns where keys stand in a text, what `--set KEY=VALUE` changes, and the wording of what pydantic finds. Knows no key.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from deskfleet.errors import ConfigError

Key = tuple[str | int, ...]
"""Where a value is: names of tables and keys, and places in lists counted from 0."""

MAX_TOLD = 5
"""More mistakes than this are counted only."""

_MAX_VALUE_LENGTH = 80
_Model = TypeVar("_Model", bound=BaseModel)

# Strings first, so that nothing within them counts as a comment, a bracket or a line of its own.
_OPAQUE = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL
)
_HEADER = re.compile(r"\s*(\[\[?)([^\[\]]+)\]\]?\s*$")
_PART = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|\'([^\']*)\'|([A-Za-z0-9_-]+))\s*(\.|=|$)')


@dataclass(frozen=True, slots=True)
class TomlFile:
    """What a file says. `lines` has the line of each key and table; `flags` the keys that --set has given instead."""

    path: Path
    values: dict[str, Any]
    lines: Mapping[Key, int]
    flags: frozenset[Key] = frozenset()

    def line_of(self, key: Key) -> int | None:
        """The line of a key, or of the nearest table or list around it; None when nothing of it is in the file."""
        return next((self.lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.lines), None)

    def is_flag(self, key: Key) -> bool:
        """Whether --set has given this value, or what it is part of."""
        return any(key[:n] in self.flags for n in range(len(key), 0, -1))

    def place(self, key: Key) -> str:
        """Where a value was given: `fleet.toml:7: nodes[1].fabric[0]`, or `--set nodes[1].fabric[0]`."""
        if self.is_flag(key):
            return f"--set {spell(key)}"
        line = self.line_of(key)
        return f"{self.path}: {spell(key)}" if line is None else f"{self.path}:{line}: {spell(key)}"

    def wrong(self, key: Key, reason: str, *, hint: str | None = None) -> ConfigError:
        """The error of a value at `key`. `reason` says the value where it may be shown."""
        return ConfigError(f"{self.place(key)} {reason}", hint=hint)


def read_toml(path: Path, *, hint: str) -> TomlFile:
    """Read `path`. A byte order mark and any line ends are let pass. Raises ConfigError; `hint` is its hint."""
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        return TomlFile(path, tomllib.loads(text), _lines(text))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}", hint=hint) from None
    except tomllib.TOMLDecodeError as error:
        # No cause: a trace would show the text, in which somebody may have left a password.
        raise ConfigError(f"{path} is not TOML: {error}", hint=hint) from None


def overridden(file: TomlFile, overrides: Sequence[str]) -> TomlFile:
    """Return `file` with each `KEY=VALUE` in its place: `wishes.max_model_len=65536`, `nodes[1].address=10.0.0.3`.

    A value is TOML, or text where it is none. Raises ConfigError for what is no key, or for a list that is too short.
    """
    values = deepcopy(file.values)
    keys = []
    for text in overrides:
        name, equals, value = text.partition("=")
        key = _parse_key(name.strip())
        if not equals or key is None:
            raise ConfigError(f"--set {text!r} is no KEY=VALUE", hint="e.g. --set wishes.max_model_len=65536")
        _put(values, key, _parse_value(value), name)
        keys.append(key)
    return replace(file, values=values, flags=file.flags.union(keys))


def validated(file: TomlFile, model: type[_Model], *, hidden: Iterable[Key] = (), hint: str) -> _Model:
    """Return the values as `model`. Raises ConfigError with every mistake; values below `hidden` are not shown."""
    try:
        return model.model_validate(file.values)
    except ValidationError as error:
        raise _describe(error, file, model, tuple(hidden), hint) from None


def spell(key: Key) -> str:
    """Write a key as people do: `nodes[1].fabric[0]`."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if re.fullmatch(r"[\w-]+", part) else repr(part))
    return text


def quoted(text: str) -> str:
    """Write `text` as a string of TOML, whatever is in it."""
    # A string of JSON is one of TOML, but for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint: the nearest of the known names, or all of them."""
    names = sorted(known)
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if found:
        return f"did you mean {found[0]!r}?"
    return f"known: {', '.join(names)}" if names else "there is none"


def _describe(
    error: ValidationError, file: TomlFile, model: type[BaseModel], hidden: tuple[Key, ...], hint: str
) -> ConfigError:
    found = error.errors(include_url=False, include_context=False)
    lines, better = [], None
    for each in found[:MAX_TOLD]:
        key = each["loc"]
        if each["type"] == "extra_forbidden":
            lines.append(f"{file.place(key)}: unknown key")
            better = better or nearest(str(key[-1]), _fields_at(model, key[:-1]))
            continue
        reason = each["msg"].removeprefix("Value error, ")
        reason = f"{reason[:1].lower()}{reason[1:]}"
        reason, _, own_hint = reason.partition("\nhint: ")
        better = better or own_hint or None
        if each["type"] == "missing" or any(key[: len(each_hidden)] == each_hidden for each_hidden in hidden):
            lines.append(f"{file.place(key)}: {reason}")
        else:
            lines.append(f"{file.place(key)} is {_shown(each['input'])}: {reason}")
    if len(found) > MAX_TOLD:
        lines.append(f"and {len(found) - MAX_TOLD} more")
    return ConfigError("; ".join(lines), hint=better or hint)


def _shown(value: object) -> str:
    text = re.sub(r"//[^/@\s]*@", "//...@", repr(value))  # a URL may carry a password
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."


def _fields_at(model: type[BaseModel], key: Key) -> list[str]:
    """The keys that may stand in the table at `key`."""
    here: type[BaseModel] | None = model
    for part in key:
        if isinstance(part, int):
            continue
        field = None if here is None else here.model_fields.get(part)
        here = None if field is None else _model_in(field.annotation)
    return [] if here is None else list(here.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The table that `T`, `T | None` or `list[T]` is of."""
    if isinstance(annotation, type) and not isinstance(annotation, UnionType):
        try:
            return annotation if issubclass(annotation, BaseModel) else None
        except TypeError:  # list[T] calls itself a type and is none
            pass
    return next((found for each in get_args(annotation) if (found := _model_in(each)) is not None), None)


def _lines(text: str) -> dict[Key, int]:
    """The line of every key and table. What is inside a value of several lines, or of one, has its key's line."""
    masked = _OPAQUE.sub(_masked, text)
    lines: dict[Key, int] = {}
    counts: dict[Key, int] = {}
    table: Key = ()
    depth = 0
    for number, line in enumerate(masked.split("\n"), 1):
        bare = _OPAQUE.sub("", line)
        header = _HEADER.match(line) if depth == 0 else None
        if header is not None:
            *outer, last = _parts(header[2])
            table = (*_resolve(outer, counts), last)
            if header[1] == "[[":
                counts[table] = counts.get(table, 0) + 1
                table = (*table, counts[table] - 1)
            lines[table] = number
            continue
        if depth == 0 and "=" in bare:
            key = table
            for part in _parts(line):
                key = (*key, part)
                lines.setdefault(key, number)
        depth += sum(bare.count(c) for c in "[{") - sum(bare.count(c) for c in "]}")
    return lines


def _masked(match: re.Match[str]) -> str:
    """Nothing for a comment and for a string of several lines, but its line ends."""
    found = match[0]
    return "\n" * found.count("\n") if found.startswith(("#", '"""', "'''")) else found


def _parts(text: str) -> list[str]:
    """The parts of a dotted key at the beginning of `text`, up to its end or `=`."""
    parts = []
    for match in _PART.finditer(text):
        quoted, literal, bare, end = match.groups()
        parts.append(_unescaped(quoted) if quoted is not None else literal if literal is not None else bare)
        if end != ".":
            break
    return parts


def _unescaped(text: str) -> str:
    value: str = tomllib.loads(f'x = "{text}"')["x"]
    return value


def _resolve(parts: Iterable[str], counts: Mapping[Key, int]) -> Key:
    """A key of tables with the number of the latest element after each list of tables."""
    key: Key = ()
    for part in parts:
        key = (*key, part)
        if key in counts:
            key = (*key, counts[key] - 1)
    return key


def _parse_key(text: str) -> Key | None:
    key: list[str | int] = []
    for part in text.split("."):
        match = re.fullmatch(r"([A-Za-z0-9_-]+)((?:\[\d+\])*)", part)
        if match is None:
            return None
        key.append(match[1])
        key += [int(number) for number in re.findall(r"\d+", match[2])]
    return tuple(key)


def _parse_value(text: str) -> object:
    try:
        return tomllib.loads(f"x = {text}")["x"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return text


def _put(values: dict[str, Any], key: Key, value: object, name: str) -> None:
    here: Any = values
    for part, following in zip(key, (*key[1:], None), strict=True):
        if isinstance(part, int):
            if not isinstance(here, list) or part >= len(here):
                raise ConfigError(
                    f"--set {name}: there is no [{part}] in the file", hint="lists count from 0"
                )
        elif not isinstance(here, dict):
            raise ConfigError(f"--set {name}: {part!r} is asked of what is no table")
        elif following is not None:
            here.setdefault(part, {})
        if following is None:
            here[part] = value
        else:
            here = here[part]


__all__ = [
    "MAX_TOLD",
    "Key",
    "TomlFile",
    "nearest",
    "overridden",
    "quoted",
    "read_toml",
    "spell",
    "validated",
]
