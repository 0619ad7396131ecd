"""What vLLM, SGLang and engines built on them have in common at a launch: `StockLauncher`.

Owns shared refusals, and how flags and variables of ours and of the user's become one process.

An engine's own file says which flags it has and what its log looks like.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar

from deskfleet.fleet.engines.arguments import Flag, Forbidden, Options, merge_arguments
from deskfleet.fleet.engines.contract import (
    CACHE_PATH,
    CHECKPOINT_PATH,
    ENGRAM_PATH,
    PACK_MANIFEST,
    Capability,
    Process,
    Situation,
)
from deskfleet.fleet.engines.environment import (
    NamesOfImages,
    Variable,
    common_variables,
    merge_environment,
)
from deskfleet.fleet.launch import AdapterReceipts, Milestone, Mount, Receipt
from deskfleet.planner.engines.contract import Refusal
from deskfleet.planner.engines.registry import rules_of
from deskfleet.planner.engines.stock import StockRules
from deskfleet.planner.sharding import local_heads
from deskfleet.planner.wishes import EngineName
from deskfleet_engram.ownership import ColumnOwnership

ADAPTER_KEY = "deskfleet_engram"
"""What our adapters are told by: a key of vLLM's additional config."""

ADAPTER_VARIABLE = "DESKFLEET_ENGRAM_PACK"
"""The same for SGLang, which has no channel of its own for it."""

STORE_VARIABLE, STORES = "DESKFLEET_ENGRAM_STORE", ("auto", "mapped", "callback")
"""By this variable of `[engine] env` the user says how an adapter reads rows. The third way waits for the ids in the
middle of a step, which no captured graph can."""

RECEIPTS_VARIABLE = "DESKFLEET_ENGRAM_RECEIPTS"
"""Where an adapter writes each rank's receipt and counters."""

FORK_VARIABLES: Mapping[str, Capability | None] = {
    "VLLM_ENABLE_ROCE_": "roce-collectives",
    "B12X_ROCE_": "roce-collectives",
    "SGLANG_ROCE_": "roce-collectives",
    "DSV41_ENGRAM_": "engram-disk",
    "DSV41_TP_PAD": "head-padding",
    "DSV41_INDEXER_CHUNKED": "bounded-indexer",
    "DSV41_": None,
    "GLM53_": None,
}
"""Beginnings of variables that patched images of published recipes read."""

GATEWAY_PARSES = Forbidden(
    "prompts and answers are rendered and parsed by the gateway, never by the engine", "leave it out"
)
NO_EAGER = Forbidden("without captured graphs a step takes several times as long", "leave it out")
NO_KEYS = Forbidden("arguments are seen by everybody on the machine", "give it in [engine.env] as a secret")
FREES_NOTHING = Forbidden(
    "the host's memory is the accelerator's here: moving there frees nothing", "leave it out"
)

CHOSEN_DEVICES = "NCCL_IB_HCA"
"""By this variable the user chooses among devices; the network is resolved with it, and ranks get the result."""

_SNAPSHOT = re.compile(r"(?P<repo>.*/models--[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})/*")


class StockLauncher(ABC):
    """A launcher of a stock engine, or of one built on it; a subclass fills in the rest."""

    name: EngineName
    options: ClassVar[Options]
    known_variables: ClassVar[Collection[str]]
    prefix: ClassVar[str]
    releases: ClassVar[tuple[str, ...]]
    """Repositories whose images are the release, of which every option and variable is known."""
    forbidden: ClassVar[Mapping[str, Forbidden]]
    program: ClassVar[tuple[str, ...]]
    provides: ClassVar[frozenset[Capability]] = frozenset()
    """What this engine's images always have."""

    @abstractmethod
    def flags(self, at: Situation, rank: int) -> list[Flag]:
        """Every flag of ours, in the order in which a person would read them."""

    @abstractmethod
    def variables(self, at: Situation, rank: int) -> list[Variable]:
        """Variables of this engine's own."""

    @abstractmethod
    def milestones(self, at: Situation) -> tuple[Milestone, ...]:
        """How far a start is."""

    @abstractmethod
    def receipts(self, at: Situation) -> tuple[Receipt, ...]:
        """What must have been logged."""

    def notes(self, at: Situation) -> Iterator[str]:
        """What the user should know."""
        if not at.head_is_local:
            yield (
                f"the engine answers without a key on port {at.ports.engine} of every address of {at.spec.head.name}: "
                "whoever reaches that goes round the gateway"
            )

    def endpoint(self, at: Situation) -> str:
        """Base URL on the head."""
        return at.endpoint

    def process(self, at: Situation, rank: int) -> Process:
        """Our flags and variables, and the user's where they do not contradict."""
        is_release = self.is_release(at)
        argv, bad_args, odd_args = merge_arguments(
            self.flags(at, rank),
            at.spec.engine.args,
            self.options,
            self.forbidden_at(at),
            is_release=is_release,
        )
        names = NamesOfImages(self.prefix, self.known_variables, FORK_VARIABLES)
        env, bad_env, odd_env = merge_environment(
            [*common_variables(at, rank), *self.variables(at, rank)],
            {name: value for name, value in at.spec.engine.env.items() if name != CHOSEN_DEVICES},
            names,
            self.capabilities(at),
            is_release=is_release,
        )
        return Process(
            argv=(*self.program, *argv),
            env=env,
            mounts=tuple(_mounts(at, rank)),
            warnings=(*self.notes(at), *odd_args, *odd_env),
            refusals=(*bad_args, *bad_env),
        )

    def uses_adapter(self, at: Situation) -> bool:
        """Whether rows come from disk through our plug-in."""
        return at.plan.layout.engram == "disk" and self.has_adapter(at)

    def is_release(self, at: Situation) -> bool:
        """Whether the image is the engine as released, so that an unknown name is a mistake and not a patch's."""
        return at.image.partition("@")[0].partition(":")[0].removeprefix("docker.io/") in self.releases

    def capabilities(self, at: Situation) -> frozenset[Capability]:
        """What the image has beyond the release."""
        return self.provides | at.capabilities

    def adapter(self, at: Situation) -> AdapterReceipts | None:
        """Each rank's columns. Both engines share them out in runs: rank r has r * n to (r + 1) * n - 1."""
        if not self.uses_adapter(at):
            return None
        return AdapterReceipts(
            columns=tuple((run[0], run[-1]) for run in column_runs(at)), store=asked_store(at)
        )

    def adapter_variables(self, at: Situation) -> list[Variable]:
        """What every adapter is told. Two fleets on a node must not write the same files."""
        if not self.uses_adapter(at):
            return []
        place = f"{CACHE_PATH}/engram-receipts/{at.spec.name}"
        return [
            Variable(RECEIPTS_VARIABLE, place, "each rank's receipt and counters, on this node's own disk")
        ]

    def forbidden_at(self, at: Situation) -> Mapping[str, Forbidden]:
        """Flags that must not be given in this situation."""
        return self.forbidden

    def refusals(self, at: Situation) -> list[Refusal]:
        """What the engine would accept and not do, or fail at after minutes."""
        found = (
            self._nodes_refusal(at),
            self._heads_refusal(at),
            self._engram_refusal(at),
            self._indexer_refusal(at),
            _revision_refusal(at),
            _cache_refusal(at),
        )
        return [refusal for refusal in found if refusal is not None]

    def _nodes_refusal(self, at: Situation) -> Refusal | None:
        if at.ranks_per_node == 1:
            return None
        return Refusal(
            "nodes",
            f"{at.tp_size} ranks on {len(at.spec.nodes)} nodes: a container of {self.title} has one accelerator",
            "give as many nodes as ranks",
        )

    def _heads_refusal(self, at: Situation) -> Refusal | None:
        inventory, rules = at.plan.inventory, self.rules.cut_rules(at.plan.cluster)
        padded = local_heads(inventory, rules, at.tp_size) * at.tp_size
        if padded == inventory.num_heads or "head-padding" in self.capabilities(at):
            return None
        return Refusal(
            "heads",
            f"{at.tp_size} ranks need {inventory.num_heads} heads padded to {padded}, which {self.title} does not do",
            "use 2 or 4 nodes, or an image that pads them and says so: label deskfleet.provides=head-padding",
        )

    def has_adapter(self, at: Situation) -> bool:
        """Whether our plug-in is asked for, and the image may have it: it says so, or nothing is known of it.

        A release never has it.
        """
        if not at.spec.engine.adapter or "engram-disk" in self.capabilities(at):
            return False
        if "adapter" in self.capabilities(at) or at.spec.engine.build:
            return True
        return not self.is_release(at) and all(facts.image is None for facts in at.facts.values())

    def _engram_refusal(self, at: Situation) -> Refusal | None:
        if at.plan.layout.engram != "disk" or "engram-disk" in self.capabilities(at):
            return None
        if not self.has_adapter(at):
            return Refusal(
                "Engram",
                f"Engram rows are planned on disk, {self.title} as released holds its tables in memory, and "
                f"{at.image} does not say that it has {self.rules.adapter}",
                "run deskfleet fleet build with [engine] adapter = true, or give the image the label "
                "deskfleet.provides=adapter",
            )
        unpacked = [node.name for node in at.nodes if at.rows_lack(node.name, PACK_MANIFEST)]
        if unpacked:
            return Refusal(
                "Engram",
                f"{', '.join(unpacked)}: no pack of rows, and the adapter reads nothing else",
                "run deskfleet fleet pack",
            )
        if not all(column_runs(at)):
            return Refusal(
                "Engram",
                f"{at.tp_size} ranks: some would have no column of the tables, and {self.title} cannot do that",
                "use fewer ranks",
            )
        store = asked_store(at)
        if store not in (None, *STORES):
            return Refusal(
                "Engram",
                f"[engine] env has {STORE_VARIABLE}={store}, and steps are captured in graphs",
                f"give one of {', '.join(STORES)}",
            )
        return None

    def _indexer_refusal(self, at: Situation) -> Refusal | None:
        planned, stock = at.plan.layout.has_bounded_indexer, self.rules.has_bounded_indexer
        if not planned or stock or "bounded-indexer" in self.capabilities(at):
            return None
        return Refusal(
            "indexer",
            f"the plan counts on an indexer of bounded memory for chunks of {at.plan.layout.chunk_tokens:,}, and "
            f"{self.title} has none",
            "plan without it, or use an image that has it and says so: label deskfleet.provides=bounded-indexer",
        )

    @property
    def rules(self) -> StockRules:
        """The planner's rules of this engine."""
        rules = rules_of(self.name)
        if not isinstance(rules, StockRules):
            raise TypeError(f"{self.name} has no rules of a stock engine")
        return rules

    @property
    def title(self) -> str:
        """Name and version, as the planner's messages have them."""
        return self.rules.title


def checkpoint_place(path: str) -> tuple[Mount, str]:
    """The mount of a checkpoint's directory, and where the model then lies.

    Of a snapshot in Hugging Face's cache the whole repository is mounted: its files are links to ../../blobs.
    """
    match = _SNAPSHOT.fullmatch(path)
    if match is None:
        return Mount(source=path, target=CHECKPOINT_PATH), CHECKPOINT_PATH
    return (
        Mount(source=match["repo"], target=CHECKPOINT_PATH),
        f"{CHECKPOINT_PATH}/snapshots/{match['revision']}",
    )


def model_path(at: Situation, rank: int) -> str:
    """Where a rank finds the model."""
    return checkpoint_place(at.node(rank).paths.checkpoint)[1]


def column_runs(at: Situation) -> list[tuple[int, ...]]:
    """Each rank's columns of the tables, as both engines share them out; empty for a rank that has none."""
    tables = at.plan.inventory.engram
    if tables is None:
        return [()] * at.tp_size
    owners = ColumnOwnership.split(tables.num_columns, at.tp_size, "contiguous")
    return [owners.columns(rank) for rank in range(at.tp_size)]


def asked_store(at: Situation) -> str | None:
    """How the adapter is to read rows; None when it chooses."""
    store = at.spec.engine.env.get(STORE_VARIABLE, "auto")
    return None if store == "auto" else store


def _mounts(at: Situation, rank: int) -> Iterator[Mount]:
    paths = at.node(rank).paths
    yield checkpoint_place(paths.checkpoint)[0]
    if at.plan.layout.engram == "disk":
        yield Mount(source=paths.engram, target=ENGRAM_PATH)


def _revision_refusal(at: Situation) -> Refusal | None:
    revision = at.spec.checkpoint.revision
    for node in at.nodes:
        match = _SNAPSHOT.fullmatch(node.paths.checkpoint)
        if match is not None and revision is not None and match["revision"] != revision:
            return Refusal(
                "revision",
                f"{node.name} has the snapshot {match['revision']}, and the fleet is pinned to {revision}",
                "run deskfleet fleet pull, or change [checkpoint] revision",
            )
    return None


def _cache_refusal(at: Situation) -> Refusal | None:
    for node in at.nodes:
        paths = node.paths
        if f"{paths.cache}/".startswith(f"{paths.checkpoint.rstrip('/')}/"):
            return Refusal(
                "cache",
                f"on {node.name} the cache {paths.cache} lies in the checkpoint {paths.checkpoint}, which is shared",
                "give a path on the node's own disk",
            )
    return None


__all__ = [
    "ADAPTER_KEY",
    "ADAPTER_VARIABLE",
    "FREES_NOTHING",
    "GATEWAY_PARSES",
    "NO_EAGER",
    "NO_KEYS",
    "StockLauncher",
    "asked_store",
    "checkpoint_place",
    "column_runs",
    "model_path",
]
