"""What `deskfleet inspect` reports: what a checkpoint holds, what each rank would hold, what is wrong.

Owns the report as plain data. Knows nothing of how it is printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskfleet.errors import ConfigError
from deskfleet.model.checkpoint import Checkpoint, describe_problem, examine
from deskfleet.model.config import ModelConfig
from deskfleet.model.config_keys import MODEL_TYPE
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.names import TensorClass


@dataclass(frozen=True, slots=True)
class Architecture:
    """The facts of config.json a person asks for first."""

    model_type: str
    num_layers: int
    num_draft_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    num_experts: int
    num_chosen_experts: int
    engram_layer_ids: tuple[int, ...]
    has_vision: bool


@dataclass(frozen=True, slots=True)
class Contents:
    """What the files hold. `total_bytes` counts tensor data, `file_bytes` headers too."""

    num_tensors: int
    num_files: int
    total_bytes: int
    file_bytes: int
    bytes_by_class: Mapping[TensorClass, int]
    bytes_by_dtype: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What one rank would hold, in the checkpoint's own dtypes; `padding_bytes` comes on top."""

    rank: int
    bytes_by_class: Mapping[TensorClass, int]
    padding_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything, padding included."""
        return sum(self.bytes_by_class.values()) + self.padding_bytes


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint's report.

    `architecture` is None when config.json cannot be used, `contents` when the files have `problems`. `ranks`
    is empty when no tp_size was asked for, or when the model cannot be cut that way; `problems` says why.
    """

    directory: Path
    architecture: Architecture | None
    contents: Contents | None
    tp_size: int | None
    ranks: tuple[RankBytes, ...]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        ranks = [
            {
                "rank": rank.rank,
                "bytes_by_class": _by_name(rank.bytes_by_class),
                "padding_bytes": rank.padding_bytes,
                "total_bytes": rank.total_bytes,
            }
            for rank in self.ranks
        ]
        contents = None
        if self.contents is not None:
            contents = {
                **{field.name: getattr(self.contents, field.name) for field in _FIELDS_OF_CONTENTS},
                "bytes_by_class": _by_name(self.contents.bytes_by_class),
                "bytes_by_dtype": dict(self.contents.bytes_by_dtype),
            }
        architecture = None
        if self.architecture is not None:
            architecture = dataclasses.asdict(self.architecture)
            architecture["engram_layer_ids"] = list(self.architecture.engram_layer_ids)
        return {
            "directory": str(self.directory),
            "architecture": architecture,
            "contents": contents,
            "tp_size": self.tp_size,
            "ranks": ranks,
            "problems": list(self.problems),
        }


_FIELDS_OF_CONTENTS = dataclasses.fields(Contents)


def inspect_checkpoint(directory: str | Path, tp_size: int | None = None) -> Inspection:
    """Report on the checkpoint in `directory`, and on each of `tp_size` ranks when given.

    A broken checkpoint is reported, not raised. Raises ConfigError for a `tp_size` below 1.
    """
    layout = Layout(1 if tp_size is None else tp_size)
    examination = examine(directory)
    problems = list(examination.problems)
    ranks: tuple[RankBytes, ...] = ()
    if examination.config is not None:
        try:
            # Made without a tp_size too: it refuses Engram tables whose rows the configuration belies.
            plan = ShardPlan(examination.config, layout)
        except ConfigError as error:
            problems.append(describe_problem(error))
        else:
            ranks = _ranks(plan) if tp_size is not None else ()
    return Inspection(
        directory=Path(directory),
        architecture=_architecture(examination.config) if examination.config else None,
        contents=_contents(examination.checkpoint) if examination.checkpoint else None,
        tp_size=tp_size,
        ranks=ranks,
        problems=tuple(problems),
    )


def _architecture(config: ModelConfig) -> Architecture:
    return Architecture(
        model_type=MODEL_TYPE,
        num_layers=len(config.layers),
        num_draft_layers=len(config.draft_layers),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        num_experts=config.n_routed_experts,
        num_chosen_experts=config.num_experts_per_tok,
        engram_layer_ids=config.engram_layer_ids,
        has_vision=config.vision is not None,
    )


def _contents(checkpoint: Checkpoint) -> Contents:
    return Contents(
        num_tensors=len(checkpoint.tensors),
        num_files=checkpoint.num_files,
        total_bytes=checkpoint.total_bytes,
        file_bytes=checkpoint.file_bytes,
        bytes_by_class=checkpoint.bytes_by_class(),
        bytes_by_dtype=checkpoint.bytes_by_dtype(),
    )


def _ranks(plan: ShardPlan) -> tuple[RankBytes, ...]:
    return tuple(
        RankBytes(rank, plan.rank_bytes(rank), plan.padding_bytes(rank))
        for rank in range(plan.layout.tp_size)
    )


def _by_name(totals: Mapping[TensorClass, int]) -> dict[str, int]:
    return {tensor_class.value: num_bytes for tensor_class, num_bytes in totals.items()}


__all__ = ["Architecture", "Contents", "Inspection", "RankBytes", "inspect_checkpoint"]
