"""What to measure on an endpoint, and how. Owns every default and what makes a wish impossible."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from deskfleet.bench.load.caveats import Policy
from deskfleet.bench.load.prompts import KINDS
from deskfleet.bench.load.record import Condition, Part
from deskfleet.errors import ConfigError

PARTS: tuple[Part, ...] = get_args(Part)
SAMPLINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.95},
}
"""How tokens are chosen. `sampled` is what the publisher advises for thinking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSuite:
    """One run. Raises ConfigError naming the setting when a value cannot work. Lengths are in tokens.

    Decode: every kind of prompt, after every context, with every number of streams, each way of sampling, `num_tokens`
    each. Prefill: one prompt of each of `ladder`, cold. Mixed: `rate` requests per second for `mixed_s`, kinds and
    `mixed_context` drawn at random, arrivals by a Poisson process. `rounds` count, after one of warm-up.

    `effort` None is thinking off. `extra_body` goes into every request; a null in it takes a field out. `requests` are
    bodies of the user's, measured as the kind `requests` in place of the built-in kinds.
    `conditions` are facts that only the user knows: a comparison needs them equal.
    """

    parts: tuple[Part, ...] = ("decode", "prefill")
    kinds: tuple[str, ...] = KINDS
    concurrency: tuple[int, ...] = (1, 2, 4)
    context: tuple[int, ...] = (0,)
    samplings: tuple[str, ...] = ("greedy",)
    num_tokens: int = 256
    rounds: int = 5
    ladder: tuple[int, ...] = (1024, 4096, 16384)
    rate: float = 1.0
    mixed_s: float = 30.0
    mixed_context: tuple[int, ...] = (0, 1024, 4096)
    most_open: int = 1024
    effort: int | None = None
    ignore_eos: bool = False
    filler: bool = False
    num_cached_allowed: int = 0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    requests: tuple[Mapping[str, Any], ...] = ()
    text: Path | None = None
    salt: str | None = None
    seed: int = 0
    policy: Policy = field(default_factory=Policy)
    conditions: Mapping[str, Condition] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, known in (
            ("parts", PARTS),
            ("samplings", tuple(SAMPLINGS)),
            ("kinds", (*KINDS, "requests")),
        ):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(
                    f"{name} {', '.join(values) or '(none)'} must be different, and at least one"
                )
            if unknown := [value for value in values if value not in known]:
                raise ConfigError(f"{name}: there is no {unknown[0]!r}", hint=f"known are {', '.join(known)}")
        for name, least in (("concurrency", 1), ("context", 0), ("ladder", 1), ("mixed_context", 0)):
            numbers = getattr(self, name)
            if not numbers or min(numbers) < least or len(set(numbers)) < len(numbers):
                raise ConfigError(f"{name} {numbers} must be different numbers of {least} or more")
        for name, least in (("num_tokens", 2), ("rounds", 1), ("most_open", 1), ("num_cached_allowed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} {getattr(self, name)} is less than {least}")
        if not (self.rate > 0 and self.mixed_s > 0):
            raise ConfigError(f"rate {self.rate} and seconds {self.mixed_s} must be more than 0")
        if self.effort is not None and not 1 <= self.effort <= 100:
            raise ConfigError(f"effort {self.effort} is not between 1 and 100")

    def body(self, model: str, prompt: str, *, sampling: str, max_tokens: int) -> dict[str, Any]:
        """Return a Chat Completions request."""
        thinking: dict[str, Any] = {"thinking": self.effort is not None}
        if self.effort is not None:
            thinking["reasoning_effort"] = self.effort
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "chat_template_kwargs": thinking,
            **SAMPLINGS[sampling],
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        return with_extra(body, self.extra_body)

    def as_settings(self) -> dict[str, Condition]:
        """Return what of this belongs into a result file."""
        return {
            "parts": ",".join(self.parts),
            "rounds": self.rounds,
            "seed": self.seed,
            "most_open": self.most_open,
            "mixed_s": self.mixed_s,
            "mixed_context": ",".join(map(str, self.mixed_context)),
            "num_cached_allowed": self.num_cached_allowed,
            "allowed": ",".join(sorted(self.policy.allowed)),
            "strict": self.policy.strict,
        }

    def as_conditions(self) -> dict[str, Condition]:
        """Return what of this a comparison must have equal."""
        return {
            "num_tokens": self.num_tokens,
            "effort": "off" if self.effort is None else self.effort,
            "ignore_eos": self.ignore_eos,
            "extra_body": json.dumps(dict(self.extra_body), sort_keys=True) if self.extra_body else None,
        }


def with_extra(body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return `body` with `extra` in it; what is null there is left out."""
    return {name: value for name, value in {**body, **extra}.items() if value is not None}


def read_requests(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the request bodies in a file, one JSON object a line. Raises ConfigError naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read requests from {path}: {error}") from error
    bodies = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is no JSON: {error}") from error
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise ConfigError(f"{path}, line {number} is no request with messages")
        bodies.append(body)
    if not bodies:
        raise ConfigError(f"{path} holds no requests")
    return tuple(bodies)


__all__ = ["PARTS", "SAMPLINGS", "LoadSuite", "read_requests", "with_extra"]
