"""An engine's command line: our flags, and what the user's `[engine] args` may add to them.

Owns reading arguments as the engine would and telling which contradict ours. Knows no engine: its options, and what it
must not be given, are handed in.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from deskfleet.planner.engines.contract import Refusal


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of ours. `value` None is a switch. `reason` says what decided it; a `is_default` may be given anew."""

    name: str
    value: str | None
    reason: str
    is_default: bool = False

    @property
    def argv(self) -> tuple[str, ...]:
        """As the engine is given it."""
        return (self.name,) if self.value is None else (self.name, self.value)


@dataclass(frozen=True, slots=True)
class Forbidden:
    """A flag that must not be given, and why. `unless` are the values with which it is harmless."""

    reason: str
    hint: str
    unless: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """The options that an engine's release knows. Made by `read_options` from one of the modules of names."""

    usual: Mapping[str, str]
    takes_value: Mapping[str, bool]

    def name_of(self, spelling: str) -> str:
        """The usual spelling of an option, or what was given when it is none: `-tp` is `--tensor-parallel-size`."""
        normal = spelling.replace("_", "-") if spelling.startswith("--") else spelling
        positive = normal.replace("--no-", "--", 1)
        return self.usual.get(normal) or self.usual.get(positive) or normal

    def knows(self, name: str) -> bool:
        """Whether the release has it."""
        return name in self.usual


def read_options(text: str) -> Options:
    """Read options as a module of names has them: spellings joined by commas, `=` at the end for a value."""
    usual, takes_value = {}, {}
    for word in text.split():
        names = word.removesuffix("=").split(",")
        usual.update(dict.fromkeys(names, names[0]))
        takes_value[names[0]] = word.endswith("=")
    return Options(usual, takes_value)


@dataclass(frozen=True, slots=True)
class Given:
    """A flag as the user gave it: `text` is how it was spelt, `name` the usual spelling, `part` what stands after a dot
    (vLLM takes `--compilation-config.mode 3`)."""

    name: str
    values: tuple[str, ...]
    text: str
    part: str = ""

    @property
    def argv(self) -> tuple[str, ...]:
        """As the user wrote it."""
        return (self.text, *self.values)


_FLAG = re.compile(r"--?[A-Za-z]")


def read_arguments(args: Sequence[str], options: Options) -> tuple[list[Given], list[Refusal]]:
    """Split `[engine] args` into flags with their values, as argparse does. What stands before any flag is refused."""
    given: list[Given] = []
    refusals = []
    for word in args:
        if _FLAG.match(word):
            text, equals, value = word.partition("=")
            whole, dot, part = text.partition(".")
            given.append(Given(options.name_of(whole), (value,) if equals else (), text, dot + part))
        elif given:
            last = given[-1]
            given[-1] = Given(last.name, (*last.values, word), last.text, last.part)
        else:
            message = f"[engine] args begin with {word!r}, which is no flag"
            refusals.append(
                Refusal("arguments", message, "the model comes from [checkpoint]; give flags with --")
            )
    return given, refusals


def merge_arguments(
    flags: Sequence[Flag],
    args: Sequence[str],
    options: Options,
    forbidden: Mapping[str, Forbidden],
    *,
    is_release: bool,
    allowed: Callable[[str], bool] = lambda name: False,
) -> tuple[tuple[str, ...], list[Refusal], list[str]]:
    """Our flags and the user's as one command line, with refusals and warnings.

    A flag of the user's that we set as well is refused unless it says the same, or ours is a default. One that the
    release does not know is refused when the image `is_release`, else a warning: an image may know more. `allowed` are
    names that other flags of ours bring.
    """
    given, refusals = read_arguments(args, options)
    ours = {options.name_of(flag.name): flag for flag in flags}
    warnings: list[str] = []
    replaced: set[str] = set()
    extra: list[str] = []
    for one in given:
        rule, flag = forbidden.get(one.name), ours.get(one.name)
        said = " ".join(one.argv)
        if rule is not None and not (one.values and one.values[0] in rule.unless):
            refusals.append(Refusal("arguments", f"[engine] args have {said}: {rule.reason}", rule.hint))
        elif flag is not None and one.argv == flag.argv and not one.part:
            continue
        elif flag is not None and (one.part or not flag.is_default):
            message = f"[engine] args have {said}, and the launch has {' '.join(flag.argv)} ({flag.reason})"
            refusals.append(Refusal("arguments", message, "leave it out, and change what decides it instead"))
        else:
            if flag is not None:
                replaced.add(flag.name)
            if not options.knows(one.name) and not allowed(one.name):
                message = f"[engine] args have {one.text}, which the release does not know"
                if is_release:
                    refusals.append(Refusal("arguments", message, nearest_of(one.name, options.usual)))
                else:
                    warnings.append(f"{message}; the image may")
            extra += one.argv
    argv = [word for flag in flags if flag.name not in replaced for word in flag.argv]
    return (*argv, *extra), refusals, warnings


def nearest_of(name: str, known: Iterable[str]) -> str:
    """A hint with the nearest name there is."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {found[0]}?" if found else "leave it out"


__all__ = [
    "Flag",
    "Forbidden",
    "Given",
    "Options",
    "merge_arguments",
    "nearest_of",
    "read_arguments",
    "read_options",
]
