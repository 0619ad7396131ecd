"""Faults of an engine and of a gateway that no checkpoint's files can have, planted on purpose.

Owns the patches and how they get into rank processes: a `sitecustomize` module on their path imports this one, and the
name of the fault is in the environment. Nothing is planted unless `planted` is entered.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "POCKET_FAULT"
_EFFORT = re.compile(r"Reasoning Effort: (\d+) ")
_ROOT = Path(__file__).parents[1]
_SITE = f"""
import os, sys
if "deskfleet.engine.rank" in sys.orig_argv:
    sys.path.insert(0, {str(_ROOT)!r})
    from pocket.faults import plant_in_rank
    plant_in_rank(os.environ[{VARIABLE!r}])
"""


def no_inverse_rope() -> None:
    """What was attended keeps the rotation of its own position."""
    from deskfleet.engine import ops

    real = ops.apply_rope

    def forgetful(x: Any, cos: Any, sin: Any, *, inverse: bool = False) -> Any:
        return x if inverse else real(x, cos, sin)

    ops.apply_rope = forgetful


def bf16_router() -> None:
    """The router's scores are rounded to bf16 before experts are chosen."""
    import torch

    from deskfleet.engine import ops

    def rounded(
        x: Any, weight: Any, bias: Any, *, num_chosen: int, scaling: float, temperature: float = 1.0
    ) -> Any:
        low = torch.bfloat16
        logits = (x.to(low) @ weight.to(low).T).to(low) / temperature
        scores = torch.sqrt(torch.nn.functional.softplus(logits)).to(low)
        biased = (scores + bias.to(low)).to(low)
        chosen = torch.sort(biased, dim=1, descending=True, stable=True).indices[:, :num_chosen]
        raw = scores.gather(1, chosen)
        return chosen, (raw / raw.sum(1, keepdim=True) * scaling).to(torch.float32)

    ops.route = rounded


def no_sink() -> None:
    """Attention has no sink to send weight to."""
    import torch

    from deskfleet.engine import ops

    real = ops.sparse_attention

    def sinkless(query: Any, sources: Any, sink: Any, scale: float) -> Any:
        return real(query, sources, torch.full_like(sink, -1e30), scale)

    ops.sparse_attention = sinkless


RANK_FAULTS: Mapping[str, Callable[[], None]] = {
    plant.__name__: plant for plant in (no_inverse_rope, bf16_router, no_sink)
}
"""Faults of a rank, by name."""


def _reversed(effort: int) -> int:
    return 101 - effort


def _ignored(effort: int) -> int:
    return 50


_EFFORT_FAULTS: Mapping[str, Callable[[int], int]] = {
    "effort_reversed": _reversed,
    "effort_ignored": _ignored,
}
FAULTS = (*RANK_FAULTS, *_EFFORT_FAULTS)
"""Every fault that can be planted."""


def plant_in_rank(name: str) -> None:
    """Plant a fault in this process, if it is one of ranks, whenever operators are chosen: that puts sound ones in."""
    from deskfleet.engine import ops

    if name not in RANK_FAULTS:
        return
    choose = ops.select

    def select(*arguments: Any) -> Any:
        selection = choose(*arguments)
        RANK_FAULTS[name]()
        return selection

    ops.select = select  # type: ignore[assignment]


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant a fault in this process's gateway and in every rank started meanwhile; None plants nothing."""
    if name is None:
        yield
    elif name in RANK_FAULTS:
        with _in_ranks(name):
            yield
    else:
        with _in_gateway(_EFFORT_FAULTS[name]):
            yield


@contextmanager
def _in_ranks(name: str) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in (VARIABLE, "PYTHONPATH")}
    with tempfile.TemporaryDirectory(prefix="pocket-fault-") as directory:
        (Path(directory) / "sitecustomize.py").write_text(_SITE)
        os.environ[VARIABLE] = name
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (directory, before["PYTHONPATH"])))
        try:
            yield
        finally:
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value


@contextmanager
def _in_gateway(number: Callable[[int], int]) -> Iterator[None]:
    """Every effort is rendered as another number."""
    from deskfleet.gateway.chat_format import ChatFormat

    real = ChatFormat.encode

    def encode(self: Any, conversation: Any, effort: int | None = None) -> list[int]:
        if not conversation.thinking_mode:
            return real(self, conversation, effort)
        if effort is None:  # one of the library's own tiers
            text = self.encoding.render_conversation(conversation).prompt
            found = _EFFORT.search(text)
            effort = None if found is None else int(found[1])
        return real(self, conversation, None if effort is None else number(effort))

    ChatFormat.encode = encode  # type: ignore[method-assign]
    try:
        yield
    finally:
        ChatFormat.encode = real  # type: ignore[method-assign]


__all__ = ["FAULTS", "RANK_FAULTS", "VARIABLE", "plant_in_rank", "planted"]
