"""Some rows of a chunk, for checks.StepCheck: a chunk has too many for the reference. Owns the view, not the checks."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deskfleet.engine.cuda.prefill import PrefillStep
from deskfleet.engine.cuda.synthetic import LayerWeights
from deskfleet.model.layers import LayerPlan

_OBJECTS = ("streams", "shared", "experts")


class RowsOf:
    """What StepCheck reads of a step, of `rows` int64 [R] alone: a context in which the step runs, checked.

    Rows that complete a group must come with the one before them. Scores, which a chunk has of a few rows at a time,
    are kept here as they are made.
    """

    def __init__(self, step: PrefillStep, rows: Tensor) -> None:
        self._step, self._rows = step, rows
        self.num_rows = len(rows)
        most = step.scores.shape[1]
        self.scores = torch.zeros(len(rows), most, dtype=torch.bfloat16)
        c = step.candidates
        picks = torch.zeros(len(rows), c.top_blocks, dtype=torch.int32)
        self.candidates = SimpleNamespace(unit=c.unit, top_blocks=c.top_blocks, picks=picks)

    def __enter__(self) -> RowsOf:
        step, rows, c = self._step, self._rows, self._step.candidates
        inner = step._pick_rows

        def pick_rows(plan: LayerPlan, weights: Tensor, some: slice) -> None:
            inner(plan, weights, some)
            here = (rows >= some.start) & (rows < some.stop)
            places = (rows[here] - some.start).to(step.device)
            self.scores[here] = step.scores[places].cpu()
            if plan.is_candidate_source:
                self.candidates.picks[here] = c.picks[places].cpu()

        step._pick_rows = pick_rows  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: object) -> None:
        del self._step._pick_rows

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._step, name)
        if name in _OBJECTS:
            return _Some(self, value)
        if name == "attention":
            return {count: _Some(self, buffers) for count, buffers in value.items()}
        return value if name == "pages" else self._some(value)

    @property
    def rope(self) -> Tensor:
        """As of the step."""
        return self._step.rope[:, :, self._rows.to(self._step.device)]

    def extra_of(self, layer: LayerWeights) -> Tensor:
        """As of the step."""
        return self._step.extra_of(layer)[self._rows.to(self._step.device)]

    def _rope(self, plan: LayerPlan) -> tuple[Tensor, Tensor]:
        cos, sin = self._step._rope(plan)
        return self._some(cos), self._some(sin)

    def _some(self, value: Any) -> Any:
        """The rows of a tensor that has one, or one for each choice, for every row of the step; anything else as is."""
        if isinstance(value, Mapping):
            return {key: self._some(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple(self._some(part) for part in value)
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        rows, total = self._rows.to(value.device), self._step.num_rows
        if len(value) == total:
            plain = value.view(torch.uint8) if value.element_size() == 1 else value  # FP8 cannot be indexed
            return plain[rows].view(value.dtype)
        chosen = self._step.experts.shape.num_chosen
        if len(value) == total * chosen:
            return value.view(total, chosen, -1)[rows].flatten(0, 1)
        return value


class _Some:
    """An object of buffers."""

    def __init__(self, owner: RowsOf, value: Any) -> None:
        self._owner, self._value = owner, value

    def __getattr__(self, name: str) -> Any:
        return self._owner._some(getattr(self._value, name))


__all__ = ["RowsOf"]
