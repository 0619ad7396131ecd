"""docs/reference/policies.md: every setting with its default and meaning, and every counter. Decides nothing."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from types import ModuleType

from deskfleet.gateway import admission, health_limits, image_fetch, keys, policy_file
from deskfleet.gateway.policies import (
    completion_cap,
    data_repeats,
    deadlines,
    key_limits,
    loop_abort,
    request_limits,
    sampling_defaults,
    thinking_budget,
)
from deskfleet.gateway.policies.counting import CounterSpec
from deskfleet.gateway.policies.section import Section
from deskfleet.gateway.policy_file import KeySections, ModelSections, PolicySettings

_SECTIONS: dict[str, tuple[ModuleType, ...]] = {
    "completion_cap": (completion_cap,),
    "thinking_budget": (thinking_budget,),
    "sampling_defaults": (sampling_defaults,),
    "deadlines": (deadlines,),
    "loop_abort": (loop_abort, data_repeats),
    "images": (image_fetch,),
    "key_limits": (key_limits,),
    "share": (),
    "request_limits": (request_limits,),
    "admission": (admission,),
    "health": (health_limits,),
}
"""Each section and the modules whose docstrings say what it is about, in the order of the page."""


def render_body() -> str:
    """Return the page, without its title."""
    parts = [_said_by(policy_file), "\n## Keys\n", _said_by(keys), ""]
    for name, modules in _SECTIONS.items():
        section = getattr(PolicySettings(), name)
        parts.append(f"## {name}\n")
        parts += [f"{_said_by(module)}\n" for module in modules]
        parts.append(f"{(inspect.getdoc(type(section)) or '').strip()} May differ {_where(name)}.\n")
        parts.append("| setting | default | meaning |\n|---|---|---|")
        parts += list(_rows(section, ""))
        parts.append("")
        counters = [spec for module in modules for spec in getattr(module, "COUNTERS", ())]
        if counters:
            parts.append("| counter | meaning |\n|---|---|")
            parts += [f"| {_counter(spec)} | {spec.help} |" for spec in counters]
            parts.append("")
    return "\n".join(parts)


def _said_by(module: ModuleType) -> str:
    """Return a module's docstring without its first paragraph's remarks on who owns what."""
    first, _, rest = (inspect.getdoc(module) or "").partition("\n\n")
    sentence = first.partition(" Owns ")[0].partition(". ")[0].rstrip(".")
    return f"{sentence}.\n\n{rest}".strip()


def _where(name: str) -> str:
    if name in ModelSections.model_fields:
        return "from model to model and from key to key"
    return "from key to key" if name in KeySections.model_fields else "nowhere: it is the whole server's"


def _rows(section: Section, prefix: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _rows(value, f"{prefix}{name}.")
        else:
            yield f"| `{prefix}{name}` | {_shown(value)} | {field.description or ''} |"


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def _counter(spec: CounterSpec) -> str:
    labels = ", ".join(("model", "key", *spec.labels))
    return f"`deskfleet_policy_{spec.name}_total{{{labels}}}`"


__all__ = ["render_body"]
