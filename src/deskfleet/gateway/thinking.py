"""Whether to think, how hard and how long, in every spelling that people send: one table for all protocols.

Owns `SPELLINGS`, how they add up to one `Thought`, and the header that says what came of them. Knows nothing of
prompts.

How wishes that meet in one request are resolved:

1. Any switch decides. Two switches that disagree are a 400. The effort `none`, or 0.0, is a switch that says off.
2. Without a switch, an effort or a budget above zero asks for thinking; without those the server's default holds.
3. Two efforts that mean different numbers, and two different budgets, are a 400.
4. Off with an effort or a budget is off: clients send both all the time. The header lists what was ignored.
5. An effort that is not in the table is a 400 that lists the known ones.

A checkpoint whose prompt knows tiers only (V4) is given the nearest of 50, 75 and 100, and the header says which.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from deskfleet.errors import RequestError

HEADER = "x-deskfleet-thinking"

EFFORT_TIERS: dict[str, int | None] = {
    "none": None,
    "minimal": 50,
    "low": 50,
    "medium": 75,
    "high": 75,
    "xhigh": 75,
    "ultra": 100,
    "max": 100,
}
"""Effort as clients spell it -> the number that stands in the prompt, from 1 to 100. None switches thinking off."""

DEFAULT_EFFORT = 75
"""What the model takes for granted where nobody says more."""

TIER_NUMBERS = {50: "low", 75: "high", 100: "max"}
"""The numbers for which the publisher's library has a name."""

_EFFORT_NUMBERS = range(1, 101)

TokenBudget = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Effort = str | int | float


class Thinking(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: TokenBudget | None = None


class TemplateFields(Struct, frozen=True, forbid_unknown_fields=True):
    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_budget: TokenBudget | None = None


class Reasoning(Struct, frozen=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: TokenBudget | None = None
    summary: str | None = None
    generate_summary: str | None = None


class EffortConfig(Struct, frozen=True, forbid_unknown_fields=True):
    effort: Effort | None = None


@dataclass(frozen=True, slots=True)
class Spelling:
    """One place in a request's body where clients ask for thinking: which values count, and what they mean."""

    path: str
    kind: Literal["switch", "effort", "budget"]
    values: str
    sent_by: str


_EFFORTS = "a tier, 1 to 100, or 0.0 to 0.99 of 100"

SPELLINGS = (
    Spelling("thinking", "switch", "true, false", "scripts"),
    Spelling("thinking.type", "switch", "enabled, adaptive (on), disabled (off)", "Anthropic, DeepSeek"),
    Spelling("enable_thinking", "switch", "true, false", "Qwen-style clients"),
    Spelling("chat_template_kwargs.thinking", "switch", "true, false", "vLLM, SGLang"),
    Spelling("chat_template_kwargs.enable_thinking", "switch", "true, false", "vLLM, SGLang"),
    Spelling("reasoning", "switch", "true, false", "scripts"),
    Spelling("reasoning.enabled", "switch", "true, false", "OpenRouter"),
    Spelling("reasoning_effort", "effort", _EFFORTS, "OpenAI, SGLang"),
    Spelling("reasoning.effort", "effort", _EFFORTS, "OpenAI Responses, OpenRouter"),
    Spelling("output_config.effort", "effort", _EFFORTS, "Anthropic"),
    Spelling("chat_template_kwargs.reasoning_effort", "effort", _EFFORTS, "vLLM"),
    Spelling("thinking_budget", "budget", "tokens", "Qwen-style clients"),
    Spelling("thinking_token_budget", "budget", "tokens", "vLLM"),
    Spelling("thinking.budget_tokens", "budget", "tokens", "Anthropic"),
    Spelling("reasoning.max_tokens", "budget", "tokens", "OpenRouter"),
    Spelling("chat_template_kwargs.thinking_budget", "budget", "tokens", "Qwen-style clients"),
)
"""Every spelling, understood in every protocol that has a conversation."""

_FIELDS = tuple(dict.fromkeys(spelling.path.partition(".")[0] for spelling in SPELLINGS))
"""What a body must have, one of them, for any spelling to be in it."""

_read_wishes = attrgetter(*_FIELDS)  # all at once: most requests have none of them
_NO_WISHES = (None,) * len(_FIELDS)


class Thought(Struct, frozen=True):
    """What a request's wishes add up to.

    `effort` is the number in the prompt and None without thinking; `budget` is in tokens. `source` is the spelling that
    decided, or `default`; `ignored` are spellings that had no say because a switch says off.
    """

    on: bool
    effort: int | None = None
    budget: int | None = None
    source: str = "default"
    ignored: tuple[str, ...] = ()

    @property
    def tier(self) -> str | None:
        """The publisher's name for the effort, None where it has none."""
        return TIER_NUMBERS.get(self.effort or 0)

    def header(self) -> str:
        """Return the value of the response header, e.g. `on; effort=75; source=reasoning_effort`."""
        parts = ["on" if self.on else "off"]
        if self.effort is not None:
            parts.append(f"effort={self.effort}")
        if self.budget is not None:
            parts.append(f"budget={self.budget}")
        parts.append(f"source={self.source}")
        if self.ignored:
            parts.append(f"ignored={','.join(self.ignored)}")
        return "; ".join(parts)


def resolve_thinking(fields: Struct, *, default: bool, tiers_only: bool = False) -> Thought:
    """Return what the wishes in `fields` add up to; `default` holds where there are none.

    `fields` has every field that `SPELLINGS` starts from, as `fields.ConversationFields` does. Raises RequestError
    naming the spelling: switches, efforts or budgets that contradict each other, an unknown effort.
    """
    switches: dict[str, bool] = {}
    efforts: dict[str, int] = {}
    budgets: dict[str, int] = {}
    if _read_wishes(fields) == _NO_WISHES:
        return _nothing_asked(default, tiers_only)  # as most
    for spelling in SPELLINGS:
        value = _value_at(fields, spelling.path)
        if value is None:
            continue
        match spelling.kind:
            case "switch":
                switches[spelling.path] = value if isinstance(value, bool) else value != "disabled"
            case "budget":
                budgets[spelling.path] = value
            case "effort":
                number = _effort_number(spelling.path, value)
                if number is None:
                    switches[spelling.path] = False
                else:
                    efforts[spelling.path] = number
    for wishes in (switches, efforts, budgets):
        _refuse_contradiction(wishes)
    return _add_up(switches, efforts, budgets, default=default, tiers_only=tiers_only)


def _add_up(
    switches: dict[str, bool],
    efforts: dict[str, int],
    budgets: dict[str, int],
    *,
    default: bool,
    tiers_only: bool,
) -> Thought:
    budget = next(iter(budgets.values()), None)
    asking = [*efforts, *(name for name in budgets if budgets[name] > 0)]
    on = next(iter(switches.values()), True if asking else default)
    source = next(iter(efforts if on else ()), None) or next(iter([*switches, *asking]), "default")
    if not on:
        return Thought(False, source=source, ignored=(*efforts, *budgets) if switches else ())
    effort = next(iter(efforts.values()), DEFAULT_EFFORT)
    if tiers_only:
        effort = min(TIER_NUMBERS, key=lambda number: abs(number - effort))
    return Thought(True, effort, budget, source)


@cache
def _nothing_asked(default: bool, tiers_only: bool) -> Thought:
    return _add_up({}, {}, {}, default=default, tiers_only=tiers_only)


def _value_at(fields: Struct, path: str) -> Any:
    """The value at `path`; None where something else stands at it, as at `thinking` for `thinking: {...}`."""
    value: Any = fields
    for name in path.split("."):
        value = getattr(value, name, None) if isinstance(value, Struct) else None
    return None if isinstance(value, Struct) else value


def _effort_number(path: str, effort: Effort) -> int | None:
    """The number an effort stands for, None for one that means off."""
    if isinstance(effort, str) and effort in EFFORT_TIERS:
        return EFFORT_TIERS[effort]
    if isinstance(effort, float) and 0 <= effort <= 0.99:
        return max(1, round(100 * effort)) if effort else None
    if isinstance(effort, int) and effort in _EFFORT_NUMBERS:
        return effort
    raise RequestError(
        f"{path}: unknown effort {effort!r}",
        param=path,
        hint="use a whole number from 1 to 100, a fraction from 0.0 to 0.99, "
        f"or one of {', '.join(EFFORT_TIERS)}",
    )


def _refuse_contradiction(wishes: dict[str, Any]) -> None:
    (first, wish), *rest = wishes.items() or [("", None)]
    for name, other in rest:
        if other != wish:
            raise RequestError(
                f"{name} contradicts {first}", param=name, hint=f"send only one of {first} and {name}"
            )


__all__ = [
    "DEFAULT_EFFORT",
    "EFFORT_TIERS",
    "HEADER",
    "SPELLINGS",
    "TIER_NUMBERS",
    "Effort",
    "EffortConfig",
    "Reasoning",
    "Spelling",
    "TemplateFields",
    "Thinking",
    "Thought",
    "TokenBudget",
    "resolve_thinking",
]
