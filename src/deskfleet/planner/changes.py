"""What would make a plan fit, and what it costs. Owns the changes that are tried and their order, dearest last.

A change is a whole plan of other wishes, machines or another checkpoint; nothing is offered that was not planned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from deskfleet.errors import ConfigError
from deskfleet.planner.calibration import Calibration
from deskfleet.planner.candidates import engines_for, order, plans_of
from deskfleet.planner.cluster import KINDS, Cluster, make_cluster
from deskfleet.planner.engines.registry import rules_of
from deskfleet.planner.inventory import Inventory
from deskfleet.planner.plan import CONTEXT_STEP, MemoryPlan
from deskfleet.planner.published import PUBLISHED, published_inventory
from deskfleet.planner.sharding import engram_bytes
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
    """Changes that make it fit, what costs the user least first, no two with the same flags."""
    offered: set[str] = set()
    for attempt in _ATTEMPTS:
        for change in attempt(plan, calibrations):
            if change.flags not in offered:
                offered.add(change.flags)
                yield change
    for change in _two_changes(plan, calibrations, frozenset(offered)):
        if change.flags not in offered:
            offered.add(change.flags)
            yield change


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
    share = engram_bytes(plan.inventory, rules_of(plan.layout.engine).engram_split, plan.layout.tp_size, 0)
    cost = (
        f"{format_bytes(share)} of each rank stay on disk; a decode step waits for {traffic.rows_per_step} reads of "
        f"each NVMe, about {1000 * traffic.disk_s_per_step:.1f} ms"
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


def _another_chunk(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    if plan.wishes.chunk_tokens is None:
        return
    found = _try(plan, calibrations, replace(plan.wishes, chunk_tokens=None))
    if found is None:
        return
    chunk = found.layout.chunk_tokens
    cost = f"prompts are read {chunk:,} tokens at a time, not {plan.layout.chunk_tokens:,}"
    if chunk < plan.layout.chunk_tokens:
        cost += ": slower, same answers"
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


def _as_many_drafts_as_the_block(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    block = plan.inventory.draft_block
    if not block or plan.wishes.num_drafts is None or plan.wishes.num_drafts <= block:
        return
    found = _try(plan, calibrations, replace(plan.wishes, num_drafts=block))
    if found is not None:
        yield Change(f"{block} drafts", "no more than the checkpoint makes", f"--drafts {block}", found)


def _another_kv_format(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    if plan.wishes.kv_format is None:
        return
    found = _try(plan, calibrations, replace(plan.wishes, kv_format=None))
    if found is not None:
        name, rate = found.layout.kv_format, float(found.kv_rate.bytes_per_token)
        yield Change(f"{name} KV", f"{rate:,.2f} B a token and rank", f"--kv-format {name}", found)


def _another_number_of_ranks(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    if plan.wishes.tp_size is None:
        return
    found = _try(plan, calibrations, replace(plan.wishes, tp_size=None))
    if found is not None:
        size = found.layout.tp_size
        yield Change(f"{size} ranks, not {plan.layout.tp_size}", _room(found), f"--tp {size}", found)


def _another_division_of_kv(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    if plan.wishes.dcp_size is None:
        return
    found = _try(plan, calibrations, replace(plan.wishes, dcp_size=None))
    if found is not None:
        size, rate = found.layout.dcp_size, float(found.kv_rate.bytes_per_token)
        title = f"KV over {size} ranks" if size > 1 else "KV whole on every rank"
        yield Change(title, f"{rate:,.2f} B a token and rank", f"--dcp {size}", found)


def _another_engine(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    if plan.wishes.engine is None:
        return
    found = _try(plan, calibrations, replace(plan.wishes, engine=None, fraction=None))
    if found is None or found.layout.engine == plan.wishes.engine:
        return
    engine = found.layout.engine
    cost = "; ".join((*(f"needs {need}" for need in found.needs), _room(found)))
    flags = f"--engine {engine}" + _without(plan.wishes, "fraction")
    yield Change(f"served by {rules_of(engine).title}", cost, flags, found)


def _smaller_margin(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    if not plan.wishes.margin_bytes:
        return
    found = _try(plan, calibrations, replace(plan.wishes, margin_bytes=0))
    if found is not None:
        mib = min(found.margin_bytes, plan.wishes.margin_bytes) >> 20
        tried = _try(plan, calibrations, replace(plan.wishes, margin_bytes=mib << 20))
        mib, found = (mib, tried) if tried is not None else (0, found)
        cost = f"{format_bytes(plan.wishes.margin_bytes - (mib << 20))} less are left free for others"
        yield Change(f"a margin of {format_bytes(mib << 20)}", cost, f"--margin {mib}MiB", found)


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


_ROUNDED = "experts rounded: other answers than the published weights give"


def _smaller(inventory: Inventory) -> list[Inventory]:
    """Published checkpoints of the same model whose experts take less, the largest first."""
    family = inventory.name.partition("-exl3-")[0].removesuffix("-nvfp4")
    found = (published_inventory(name) for name in PUBLISHED if name.startswith(f"{family}-exl3-"))
    return sorted(
        (each for each in found if each.expert_bits < inventory.expert_bits),
        key=lambda each: -each.expert_bits,
    )


def _exl3_title(inventory: Inventory) -> str:
    return f"EXL3 checkpoint at {inventory.expert_bits:.1f} bits"


def _of_any_engine(wishes: Wishes) -> Wishes:
    return replace(wishes, engine=None, tp_size=None, ep_size=None, fraction=None)


def _smaller_weights(plan: MemoryPlan, calibrations: Sequence[Calibration]) -> Iterator[Change]:
    for inventory in _smaller(plan.inventory):
        found = _try(plan, calibrations, _of_any_engine(plan.wishes), inventory=inventory)
        if found is not None:
            flags = f"--model {inventory.name}" + _without(plan.wishes, *_OF_AN_ENGINE)
            yield Change(_exl3_title(inventory), f"{_ROUNDED}; {_room(found)}", flags, found)


_OF_AN_ENGINE = ("engine", "tp_size", "ep_size", "fraction")
_FLAGS = {
    "engine": "--engine",
    "tp_size": "--tp",
    "ep_size": "--ep",
    "fraction": "--fraction",
}


def _without(wishes: Wishes, *names: str) -> str:
    """What must be left out of the command besides, as text to append."""
    dropped = [_FLAGS[name] for name in names if getattr(wishes, name)]
    return f", without {' '.join(dropped)}" if dropped else ""


def _also_without(flags: str, flag: str) -> str:
    """`flags`, of which some may be what to leave out, and `flag` left out besides."""
    return f"{flags} {flag}" if "without " in flags else f"{flags}, without {flag}"


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


def _two_changes(
    plan: MemoryPlan, calibrations: Sequence[Calibration], offered: Collection[str]
) -> Iterator[Change]:
    """A wish let go together with more nodes or smaller weights, or both of these. What does alone is left out."""
    for relaxation in _relaxations(plan.wishes):
        if any(flags.startswith(relaxation.flag) for flags in offered):
            continue
        for attempt in (_more_nodes, _smaller_weights):
            for change in attempt(replace(plan, wishes=relaxation.wishes), calibrations):
                if change.flags not in offered:
                    yield from relaxation.joined(change, plan.wishes)
    for inventory in _smaller(plan.inventory):
        smaller = replace(plan, inventory=inventory, wishes=_of_any_engine(plan.wishes))
        for change in _more_nodes(smaller, calibrations):
            yield replace(
                change,
                title=f"{_exl3_title(inventory)}, {change.title}",
                cost=f"{_ROUNDED}; {change.cost}",
                flags=f"--model {inventory.name} {change.flags}" + _without(plan.wishes, *_OF_AN_ENGINE),
            )


@dataclass(frozen=True, slots=True)
class _Relaxation:
    """Wishes without one that was given with `flag`."""

    title: str
    flag: str
    wishes: Wishes

    def joined(self, change: Change, wishes: Wishes) -> Iterator[Change]:
        """`change`, which was made with this relaxation of `wishes`, as both together."""
        if self.flag == "--engram":
            flags = f"--engram disk {change.flags}"
            yield replace(change, title=f"{self.title}, {change.title}", flags=flags)
        elif self.flag != "--context":
            flags = _also_without(change.flags, self.flag)
            yield replace(change, title=f"{self.title}, {change.title}", flags=flags)
        elif (context := change.plan.largest_context) < (wishes.max_model_len or 0):
            flags = f"--context {context} {change.flags}"
            if wishes.kv_tokens is not None:
                flags = _also_without(flags, "--kv-tokens")
            yield replace(change, title=f"{change.title}, context of {context:,}", flags=flags)


def _relaxations(wishes: Wishes) -> Iterator[_Relaxation]:
    if wishes.engram in ("device", "host"):
        yield _Relaxation("Engram rows on disk", "--engram", replace(wishes, engram="disk"))
    if wishes.kv_format is not None:
        yield _Relaxation("KV as the engine has it", "--kv-format", replace(wishes, kv_format=None))
    if wishes.dcp_size is not None:
        yield _Relaxation("KV divided as the plan says", "--dcp", replace(wishes, dcp_size=None))
    if wishes.chunk_tokens is not None:
        yield _Relaxation("chunks as large as fit", "--chunk", replace(wishes, chunk_tokens=None))
    if wishes.num_drafts:
        yield _Relaxation("drafts as the checkpoint has them", "--drafts", replace(wishes, num_drafts=None))
    if wishes.kv_tokens is not None:
        yield _Relaxation("a pool for one request", "--kv-tokens", replace(wishes, kv_tokens=None))
    if wishes.margin_bytes:
        yield _Relaxation("no margin", "--margin", replace(wishes, margin_bytes=0))
    if wishes.max_model_len is not None:
        yield _Relaxation("", "--context", replace(wishes, max_model_len=None, kv_tokens=None))


_ATTEMPTS: tuple[_Attempt, ...] = (
    _free_fraction,
    _another_kv_format,
    _another_division_of_kv,
    _another_split,
    _another_number_of_ranks,
    _as_many_drafts_as_the_block,
    _engram_on_disk,
    _another_chunk,
    _bounded_indexer,
    _smaller_margin,
    _smaller_pool,
    _shorter_context,
    _fewer_requests,
    _without_drafts,
    _four_bit_tables,
    _another_engine,
    _more_nodes,
    _smaller_weights,
)
"""What is tried, what costs the user least first."""

__all__ = ["MOST_ADDED_NODES", "Change", "ways_out"]
