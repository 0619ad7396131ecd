"""What a checkpoint asks of memory, as numbers: `Inventory`. Owns the grouping of tensors by how they are cut.

Made from a directory's headers (`headers`), or from a built-in published one (`published`). Knows no engine and no
machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, NamedTuple

from deskfleet.errors import CheckpointError
from deskfleet.model.names import TensorClass

Cut = Literal["replicated", "group", "expert", "vocab", "shared_expert", "engram_projection", "index_head"]
"""What a tensor may be divided by. Which of these an engine really divides is the engine's rule.

`group`: attention output groups (wq_b, wo_a, wo_b, sinks; `num_groups`). `expert`: routed experts, whole or by width.
`vocab`: token rows (embedding, head, Markov tables). `shared_expert`: by width. `engram_projection`: engram.wkv.
`index_head`: indexer.wq_b and weights_proj. `replicated`: nobody divides it.
"""


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Tensors that are stored and cut alike, of the whole model.

    `num_bytes` in the checkpoint's own dtypes. `num_weights` counts logical values (an FP4 byte is two, scales are not
    counted). `is_wo_a` marks what engines hold as bf16, `is_head` what some hold as float32.
    """

    name: str
    tensor_class: TensorClass
    cut: Cut
    num_bytes: int
    num_weights: int
    is_wo_a: bool = False
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class EngramTables:
    """The n-gram tables. `rows` of each table, `column_rows` of each of its columns, `row_bytes` as stored."""

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    column_rows: tuple[tuple[int, ...], ...]
    row_bytes: int
    row_dim: int
    format: Literal["fp8", "nvfp4"]

    @property
    def num_columns(self) -> int:
        """Rows that one token reads from each table."""
        return len(self.column_rows[0])

    @property
    def num_bytes(self) -> int:
        """All rows of all tables."""
        return sum(self.rows) * self.row_bytes


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a token leaves behind. A source of ratio r keeps one entry for every r tokens.

    `ratios` of the sources with entries, `indexed` says which of them keep index keys as well. `head_dim` and
    `index_head_dim` in elements; `window` tokens are kept raw by each of `num_window_layers`, and by each of
    `num_draft_layers` when drafts are served. `state_bytes` is float32 compressor state of one request.
    """

    ratios: tuple[int, ...]
    indexed: tuple[bool, ...]
    head_dim: int
    rope_dim: int
    index_head_dim: int
    window: int
    num_window_layers: int
    num_draft_layers: int
    state_bytes: int

    @property
    def entries_per_token(self) -> float:
        """Compressed entries that one token adds, over all sources."""
        return sum(1 / ratio for ratio in self.ratios)

    @property
    def index_keys_per_token(self) -> float:
        """Index keys that one token adds, over all sources."""
        return sum(1 / ratio for ratio, indexed in zip(self.ratios, self.indexed, strict=True) if indexed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """A checkpoint as the planner sees it. Bytes are of the whole model; `file_bytes` is what is downloaded and read.

    `weight_format`: how routed experts are stored. `expert_bits` are bits per expert weight with scales. `origin` says
    where the numbers come from, `derived` which of them are estimates (empty: all are exact), each a sentence that
    opens with what it is about: "routed experts: ...". `config` is config.json in the published layout, for engines
    that cut by it; None where only others read the checkpoint.
    """

    name: str
    architecture: Literal["v4.1", "v4"]
    weight_format: Literal["mxfp4", "fp8", "exl3"]
    expert_bits: float
    origin: str
    derived: tuple[str, ...]
    file_bytes: int
    num_files: int

    hidden_size: int
    num_layers: int
    num_heads: int
    num_groups: int
    head_dim: int
    o_lora_rank: int
    q_lora_rank: int
    vocab_size: int
    max_position_embeddings: int
    num_experts: int
    num_chosen_experts: int
    num_draft_experts: int
    num_chosen_draft_experts: int
    expert_width: int
    num_draft_stages: int
    draft_block: int
    index_heads: int
    max_image_tokens: int

    groups: tuple[WeightGroup, ...]
    engram: EngramTables | None
    kv: KvShape
    config: Mapping[str, Any] | None = field(default=None, hash=False)

    @property
    def weight_bytes(self) -> int:
        """Everything but the Engram tables."""
        return sum(group.num_bytes for group in self.groups)

    def bytes_by_class(self) -> Mapping[TensorClass, int]:
        """Bytes of every class; Engram tables included."""
        totals = dict.fromkeys(TensorClass, 0)
        for group in self.groups:
            totals[group.tensor_class] += group.num_bytes
        if self.engram is not None:
            totals[TensorClass.engram] += self.engram.num_bytes
        return totals

    def group_bytes(self, *names: str) -> int:
        """Bytes of the named groups."""
        return sum(group.num_bytes for group in self.groups if group.name in names)


class TensorSize(NamedTuple):
    """One tensor of a checkpoint as far as memory goes, or the first of `copies` alike, `num_bytes` each.

    `dtype` is spelled as in safetensors.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    copies: int = 1


@dataclass(frozen=True, slots=True)
class GroupRule:
    """Which tensors make a group. `pattern` matches whole numberless names (see `numberless`).

    Where it begins with a block, a draft stage's tensors match too and make a group of their own.
    """

    pattern: str
    name: str
    tensor_class: TensorClass
    cut: Cut = "replicated"
    is_wo_a: bool = False
    is_head: bool = False


_BLOCK = r"(?:layers|mtp)\.#\."
_ATTENTION = _BLOCK + r"attn\."
_DENSE, _DRAFT, _OTHER = TensorClass.dense, TensorClass.draft, TensorClass.other

ENGRAM_TABLES = GroupRule(r"layers\.#\.engram\.embed\..+", "engram tables", TensorClass.engram)
"""Not a group of weights: rows may lie elsewhere, so `EngramTables` holds them."""

RULES = (
    GroupRule(_BLOCK + r"ffn\.experts\.#\..+", "routed experts", TensorClass.routed_expert, "expert"),
    GroupRule(_BLOCK + r"ffn\.shared_experts\..+", "shared experts", _DENSE, "shared_expert"),
    GroupRule(_ATTENTION + r"wq_b\..+", "wq_b", _DENSE, "group"),
    GroupRule(_ATTENTION + r"wo_a\..+", "wo_a", _DENSE, "group", is_wo_a=True),
    GroupRule(_ATTENTION + r"wo_b\..+", "wo_b", _DENSE, "group"),
    GroupRule(_ATTENTION + r"attn_sink", "attention sinks", _DENSE, "group"),
    GroupRule(_ATTENTION + r"(?:wq_a|wkv|q_norm|kv_norm)\..+", "attention latents", _DENSE),
    GroupRule(_ATTENTION + r"indexer\.(?:wq_b|weights_proj)\..+", "indexer heads", _DENSE, "index_head"),
    GroupRule(_ATTENTION + r"(?:compressor|indexer)\..+", "compressors", _DENSE),
    GroupRule(_BLOCK + r"ffn\.gate\..+", "router", _DENSE),
    GroupRule(_BLOCK + r"hc_(?:attn|ffn)_.+", "hyper-connections", _DENSE),
    GroupRule(_BLOCK + r"(?:attn|ffn)_norm\..+", "layer norms", _DENSE),
    GroupRule(r"layers\.#\.engram\.wkv\..+", "engram projection", _DENSE, "engram_projection"),
    GroupRule(r"layers\.#\.engram\.[qk]_weight", "engram gates", _DENSE),
    ENGRAM_TABLES,
    GroupRule(r"mtp\.#\.(?:(?:main|[eh])_proj|main_norm|[eh]norm)\..+", "draft input", _DRAFT),
    GroupRule(r"mtp\.#\.(?:norm\..+|hc_head_.+)", "draft output", _DRAFT),
    GroupRule(r"mtp\.#\.markov_head\.(?:embed|markov_w1)\..+", "draft markov tables", _DRAFT, "vocab"),
    GroupRule(
        r"mtp\.#\.markov_head\.(?:head|markov_w2)\..+", "draft markov head", _DRAFT, "vocab", is_head=True
    ),
    GroupRule(r"mtp\.#\.confidence_head\..+", "draft confidence", _DRAFT, is_head=True),
    GroupRule(r"(?:vision|aligner)\..+|image_(?:start|end|newline)", "vision", TensorClass.vision),
    GroupRule(r"embed\..+", "embedding", _OTHER, "vocab"),
    GroupRule(r"head\..+", "head", _OTHER, "vocab", is_head=True),
    GroupRule(r"norm\..+|hc_head_.+", "output norm", _OTHER),
)
"""Every tensor of V4.1, V4 and their quantised forms; the first rule that matches counts. The suffix of a weight says
how it is stored, not what it is, so rules leave it open."""

_NUMBER = re.compile(r"\.\d+(?=\.)")
_SCALE_SUFFIXES = frozenset({"scale", "weight_scale", "suh", "svh", "su", "sv", "mcg", "mul1"})
_INTEGERS = frozenset({"I32", "U32", "I64", "U64", "BOOL"})


def numberless(name: str) -> str:
    """Return a tensor's name with `#` for the numbers of its layer, stage and expert."""
    return _NUMBER.sub(".#", name)


@cache
def rule_of(numberless_name: str) -> GroupRule | None:
    """Return the rule for a numberless name, None when there is none."""
    rule = next((rule for rule in RULES if re.fullmatch(rule.pattern, numberless_name)), None)
    if rule is None or rule.tensor_class is _DRAFT or not numberless_name.startswith("mtp."):
        return rule
    return replace(rule, name=f"draft {rule.name}", tensor_class=_DRAFT)


def is_scale(name: str) -> bool:
    """Whether a tensor only says how another one's codes are to be read."""
    return name.rpartition(".")[2] in _SCALE_SUFFIXES


def kinds_of(tensors: Iterable[tuple[str, str, tuple[int, ...], int, int]]) -> tuple[TensorSize, ...]:
    """Return the kinds of `tensors`, some hundred of nearly a hundred thousand: numberless, with all copies counted.

    Plain tuples with the fields of TensorSize will do: they are made in half the time.
    """
    counts: dict[tuple[str, str, tuple[int, ...], int], int] = {}
    for name, dtype, shape, num_bytes, copies in tensors:
        kind = (_NUMBER.sub(".#", name), dtype, shape, num_bytes)
        counts[kind] = counts.get(kind, 0) + copies
    return tuple(TensorSize(*kind, copies) for kind, copies in counts.items())


def group_tensors(tensors: Iterable[TensorSize]) -> tuple[WeightGroup, ...]:
    """Add `tensors` up by group, the groups in the order of the rules, drafts last; Engram tables are left out.

    Raises CheckpointError for a tensor that no rule knows.
    """
    totals: dict[GroupRule, tuple[int, int]] = {}
    for kind in kinds_of(tensors):
        rule = rule_of(kind.name)
        if rule is None:
            raise CheckpointError(f"tensor {kind.name} is of no kind that is known")
        if rule != ENGRAM_TABLES:
            bytes_before, weights_before = totals.get(rule, (0, 0))
            weights = kind.copies * num_weights(kind.name, kind.dtype, kind.shape)
            totals[rule] = (bytes_before + kind.copies * kind.num_bytes, weights_before + weights)
    order = {rule.pattern: place for place, rule in enumerate(RULES)}
    ordered = sorted(totals, key=lambda rule: (rule.tensor_class is _DRAFT, order[rule.pattern]))
    return tuple(
        WeightGroup(rule.name, rule.tensor_class, rule.cut, *totals[rule], rule.is_wo_a, rule.is_head)
        for rule in ordered
    )


def num_weights(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Return the logical values of a tensor: none for scales and ids, two for a byte of FP4 codes.

    An EXL3 trellis is (rows of tiles, columns of tiles, 16-bit words of a tile), a tile being 16 by 16 weights.
    """
    if dtype == "F8_E8M0" or dtype in _INTEGERS or is_scale(name):
        return 0
    if name.endswith(".trellis"):
        return math.prod(shape[:2]) * 256
    return math.prod(shape) * (2 if dtype in ("I8", "U8") else 1)


__all__ = [
    "ENGRAM_TABLES",
    "RULES",
    "Cut",
    "EngramTables",
    "GroupRule",
    "Inventory",
    "KvShape",
    "TensorSize",
    "WeightGroup",
    "group_tensors",
    "is_scale",
    "kinds_of",
    "num_weights",
    "numberless",
    "rule_of",
]
