"""What would make a plan fit, and what it costs. Owns the changes that are tried and their order, dearest last.

A change is a whole plan of other wishes, machines or another checkpoint; nothing is offered that was not planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from deskfleet.errors import ConfigError
from deskfleet.planner.calibration import Calibration
from deskfleet.planner.candidates import engines_for, order, plans_of
from deskfleet.planner.cluster import KINDS, Cluster, make_cluster
from deskfleet.planner.engines.registry import rules_of
from deskfleet.planner.inventory import Inventory
from deskfleet.planner.plan import CONTEXT_STEP, MemoryPlan
from deskfleet.planner.published import PUBLISHED, published_inventory
from deskfleet.planner.speed import engram_traffic
from deskfleet.planner.wishes import Wishes
from deskfleet.units import format_bytes

MOST_ADDED_NODES = 6


@dataclass(frozen=True, slots=True)
class Change:
    """A change of wish, machines or checkpoint that fits, and its cost. `flags` are what to change of the command."""

    title: str
    cost: str
    flags: str
    plan: MemoryPlan


def ways_out(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    """Changes that make it fit, what costs the user least first."""
    for attempt in _ATTEMPTS:
        yield from attempt(plan, calibrations)


_Attempt = Callable[[MemoryPlan, Sequence[Calibration]], Iterator[Change]]


def _try(
    plan: MemoryPlan,
    calibrations: Sequence[Calibration],
    wishes: Wishes,
    *,
    inventory: Inventory | None = None,
    cluster: Cluster | None = None,
) -> MemoryPlan | None:
    """The best plan of changed inputs, None when it does not fit either."""
    inventory, cluster = inventory or plan.inventory, cluster or plan.cluster
    try:
        engines, _ = engines_for(inventory, cluster, wishes)
        best = min(plans_of(inventory, cluster, wishes, engines, calibrations), key=order, default=None)
    except ConfigError:
        return None
    return best if best is not None and best.fits else None


def _engram_on_disk(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    if plan.layout.engram not in ("device", "host") or plan.inventory.engram is None:
        return
    found = _try(plan, calibrations, replace(plan.wishes, engram="disk"))
    if found is None:
        return
    traffic = engram_traffic(found.inventory, found.layout, found.cluster.kind)
    if traffic is None:
        return
    freed = format_bytes(plan.budgets[0].group_bytes("engram") - found.budgets[0].group_bytes("engram"))
    cost = (
        f"frees {freed} on each rank; a decode step waits for {traffic.rows_per_step} reads of each NVMe, about "
        f"{1000 * traffic.disk_s_per_step:.1f} ms"
    )
    yield Change("read Engram rows from disk", cost, "--engram disk", found)


def _another_split(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    if plan.wishes.ep_size is None:
        return
    found = _try(plan, calibrations, replace(plan.wishes, ep_size=None))
    if found is None:
        return
    cost = (
        f"a rank holds slices {found.layout.expert_width(found.inventory.expert_width)} wide of its experts"
    )
    yield Change(f"experts over {found.layout.ep_size} ranks", cost, f"--ep {found.layout.ep_size}", found)


def _smaller_chunk(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    if plan.wishes.chunk_tokens is None:
        return
    found = _try(plan, calibrations, replace(plan.wishes, chunk_tokens=None))
    if found is None:
        return
    chunk = found.layout.chunk_tokens
    cost = (
        f"prompts are read {chunk:,} tokens at a time, not {plan.layout.chunk_tokens:,}: slower, same answers"
    )
    yield Change(f"chunks of {chunk:,} tokens", cost, f"--chunk {chunk}", found)


def _bounded_indexer(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    if plan.layout.has_bounded_indexer:
        return
    found = _try(plan, calibrations, replace(plan.wishes, has_bounded_indexer=True))
    if found is None:
        return
    cost = f"{rules_of(found.layout.engine).title} needs a patch that takes top-k in pieces"
    yield Change("a bounded indexer", cost, "--bounded-indexer", found)


def _shorter_context(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    if plan.wishes.max_model_len is None or not 0 < plan.largest_context < plan.wishes.max_model_len:
        return
    context = plan.largest_context
    wishes = replace(plan.wishes, max_model_len=context, kv_tokens=None, engine=plan.layout.engine)
    found = _try(plan, calibrations, wishes)
    if found is None:
        return
    cost = f"prompt and answer together end at {context:,} tokens; longer prompts are refused with 400"
    yield Change(f"context of {context:,}", cost, f"--context {context}", found)


def _smaller_pool(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    if plan.wishes.kv_tokens is None or plan.wishes.kv_tokens <= plan.layout.max_model_len:
        return
    found = _try(plan, calibrations, replace(plan.wishes, kv_tokens=None))
    if found is None:
        return
    tokens = max(found.max_kv_tokens // CONTEXT_STEP * CONTEXT_STEP, found.layout.kv_tokens)
    cost = f"requests whose contexts add up to more than {tokens:,} tokens wait for each other"
    yield Change(f"a KV pool of {tokens:,} tokens", cost, f"--kv-tokens {tokens}", found)


def _fewer_requests(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    if plan.wishes.max_num_seqs == 1:
        return
    found = _try(plan, calibrations, replace(plan.wishes, max_num_seqs=1))
    if found is None:
        return
    yield Change("one request at a time", "others wait until it is done", "--max-num-seqs 1", found)


def _without_drafts(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    if not plan.layout.num_drafts:
        return
    found = _try(plan, calibrations, replace(plan.wishes, num_drafts=0))
    if found is None:
        return
    yield Change(
        "no speculation", "one token a step: decoding is two to four times slower", "--drafts 0", found
    )


def _four_bit_tables(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    tables, name = plan.inventory.engram, f"{plan.inventory.name}-nvfp4"
    if tables is None or tables.format == "nvfp4" or plan.layout.engram == "disk" or name not in PUBLISHED:
        return
    found = _try(plan, calibrations, plan.wishes, inventory=published_inventory(name))
    if found is None:
        return
    saved = format_bytes(
        tables.num_bytes - (found.inventory.engram.num_bytes if found.inventory.engram else 0)
    )
    yield Change("NVFP4 Engram tables", f"{saved} less in all; rows are rounded", f"--model {name}", found)


def _more_nodes(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    kind, count = plan.cluster.kind, len(plan.cluster.nodes)
    if kind.name not in KINDS:
        return
    available_bytes = min(node.available_bytes for node in plan.cluster.nodes)
    for added in range(1, MOST_ADDED_NODES + 1):
        cluster = make_cluster(
            kind, count + added, available_bytes=available_bytes, origin=f"{count + added}x{kind.name}"
        )
        found = _try(plan, calibrations, replace(plan.wishes, tp_size=None), cluster=cluster)
        if found is not None:
            title = "one more node" if added == 1 else f"{added} more nodes"
            machines = f"another {kind.title}" if added == 1 else f"{added} times {kind.title}"
            flags = f"--nodes {cluster.origin}" + _without(plan.wishes, "tp_size")
            yield Change(title, f"{machines}; {_room(found)}", flags, found)
            return


def _smaller_weights(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    wishes = replace(plan.wishes, engine=None, tp_size=None, ep_size=None, fraction=None)
    family = plan.inventory.name.partition("-exl3-")[0].removesuffix("-nvfp4")
    names = [name for name in PUBLISHED if name.startswith(f"{family}-exl3-")]
    for inventory in sorted(map(published_inventory, names), key=lambda each: -each.expert_bits):
        if inventory.expert_bits >= plan.inventory.expert_bits:
            continue
        found = _try(plan, calibrations, wishes, inventory=inventory)
        if found is not None:
            title = f"EXL3 checkpoint at {inventory.expert_bits:.1f} bits"
            cost = f"experts rounded: other answers than the published weights give; {_room(found)}"
            flags = f"--model {inventory.name}" + _without(plan.wishes, *_OF_AN_ENGINE)
            yield Change(title, cost, flags, found)


_OF_AN_ENGINE = ("engine", "tp_size", "ep_size", "fraction")
_FLAGS = {"engine": "--engine", "tp_size": "--tp", "ep_size": "--ep", "fraction": "--fraction"}


def _without(wishes: Wishes, *names: str) -> str:
    """What must be left out of the command besides, as text to append."""
    dropped = [_FLAGS[name] for name in names if getattr(wishes, name) is not None]
    return f", without {' '.join(dropped)}" if dropped else ""


def _room(plan: MemoryPlan) -> str:
    """What a plan leaves, in a few words: the context when that was open, memory otherwise."""
    if plan.wishes.max_model_len is None:
        return f"context up to {plan.largest_context:,}"
    return f"{format_bytes(plan.margin_bytes)} to spare"


def _free_fraction(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    if plan.wishes.fraction is None:
        return
    found = _try(plan, calibrations, replace(plan.wishes, fraction=None))
    if found is None or found.boot is None:
        return
    yield Change("leave the fraction to the plan", f"nothing; {found.boot.rule}", "without --fraction", found)


def _two_changes(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    """A shorter context together with one more node, or with smaller weights."""
    if plan.wishes.max_model_len is None:
        return
    open_wishes = replace(plan.wishes, max_model_len=None, kv_tokens=None)
    relaxed = replace(plan, wishes=open_wishes)
    for attempt in (_more_nodes, _smaller_weights):
        for change in attempt(relaxed, calibrations):
            context = change.plan.largest_context
            if context < plan.wishes.max_model_len:
                yield replace(
                    change,
                    title=f"{change.title}, context of {context:,}",
                    flags=f"{change.flags} --context {context}",
                )


_ATTEMPTS: tuple[_Attempt, ...] = (
    _free_fraction,
    _another_split,
    _engram_on_disk,
    _smaller_chunk,
    _bounded_indexer,
    _smaller_pool,
    _shorter_context,
    _fewer_requests,
    _without_drafts,
    _four_bit_tables,
    _more_nodes,
    _smaller_weights,
    _two_changes,
)
"""What is tried, what costs the user least first."""

__all__ = ["MOST_ADDED_NODES", "Change", "ways_out"]
