"""Published rows of which nothing can be computed: what the planner does with them. Owns their wording."""

from __future__ import annotations

from deskfleet.planner.budget import Floor
from deskfleet.planner.cluster import GIB, SPARK
from deskfleet.planner.collectives import SMALL_BUFFERS, nccl_buffer_bytes, num_connections
from deskfleet.planner.evidence.layouts import weights_gib
from deskfleet.planner.evidence.table import Fact
from deskfleet.planner.plan import UNIFIED_FLOOR


def facts() -> tuple[Fact, ...]:
    """Every such row, or part of one, in the order of the published rows."""
    return (*_weight_facts(), *_pool_facts(), *_guard_facts(), *_step_facts())


def _weight_facts() -> list[Fact]:
    two, four = weights_gib("sglang", 2), weights_gib("sglang", 4)
    divided = 4 * (two - four)
    return [
        Fact("M-06", "all 88 files are 510,313,353,565 B", "used for downloads only; memory sees tensors"),
        Fact(
            "M-23",
            "a straight line through M-22: about 264 GiB divided and 13 GiB whole on each rank",
            f"not used. Between two and four ranks shapes give {divided:.1f} GiB divided and "
            f"{two - divided / 2:.1f} whole; the last figure of M-22 is too high (see contradictions)",
        ),
        Fact(
            "M-26",
            "a pruned MXFP4 checkpoint takes about 94 GiB a rank",
            "not built in; plan it from its directory",
        ),
        Fact(
            "M-29",
            "121.7 GiB a node, seen as 119.0 to 121.69; on some kits 101 to 102 usable",
            f"a Spark is taken with {SPARK.total_bytes / GIB:.2f} GiB, {SPARK.available_bytes / GIB:.1f} of them free "
            "before the start; --available and the fleet file replace the latter",
        ),
    ]


def _pool_facts() -> list[Fact]:
    return [
        Fact(
            "M-41",
            "equal boots differ by 0.5 GB; a pool came out between 326k and 593k tokens, and a pin of 400k once failed",
            "pools are asked for in tokens, not left to a fraction; the floor is ten times the difference",
        ),
        Fact(
            "M-47",
            "ranks got 4.1 to 6.7 GiB from one fraction, and the poorest decided",
            "the pool is the same on every rank and is checked against the tightest",
        ),
        Fact(
            "M-49",
            "0.5 GiB more of pool cost 1 GiB of the head's margin; 3 GiB ended near 470k tokens; 601k left 2.1 GiB",
            "the head is planned with its own processes, and prefill's transients against the peak floor",
        ),
        Fact(
            "M-51",
            "another kit: 19.85 GiB for 3,027,217 tokens, 7,041 B each",
            "the dearer price is taken; see contradictions",
        ),
        Fact(
            "M-53",
            "four other vLLM pools of V4.1: 5,167, 5,188, 5,777 and 1,334 B a token",
            "settings are not published with them, so the price of boots whose settings are known is taken (M-44)",
        ),
        Fact(
            "M-54",
            "three nodes, pinned pools: 200k 28.6 and 55.4 tok/s at 1 and 4 streams, 416k 31.9 and 75.6, 593k 12.6 and "
            "33.9",
            "a pool that leaves less than the floor is refused: it thrashes before it fails",
        ),
    ]


def _guard_facts() -> list[Fact]:
    floor = _spell(UNIFIED_FLOOR)
    return [
        Fact(
            "M-56",
            "start gates of 100 and of 111.5 GiB available",
            "no gate of its own: the plan's total decides. 111.5 is what a Spark is taken to have free",
        ),
        Fact("M-57", "at least 5 GB free while serving; about 6 GB seen on three nodes, 40 on four", floor),
        Fact(
            "M-58",
            "earlyoom acts at 2 % of memory, 2.4 GB",
            f"{floor}: not reached at rest, but a plan that uses up its peak does reach it. Switch it off, or plan "
            "with --margin 2GiB",
        ),
        Fact(
            "M-59",
            "a container's cap of 112 GB sees almost nothing of it",
            "budgets are of the node, not of a process",
        ),
        Fact(
            "M-60",
            "guards at 1, 1.5 and 5 GiB, cache flushers at 4 and 8 GiB",
            "for what watches a running node; a plan only has floors",
        ),
        Fact(
            "M-61",
            "12 GiB over what headers say",
            "no lump: runtime, KV, transients and floors are lines of their own; --margin adds to them",
        ),
    ]


def _step_facts() -> list[Fact]:
    ratio = nccl_buffer_bytes(num_connections(2, 64, 2)) / nccl_buffer_bytes(
        num_connections(2, 8, 2), SMALL_BUFFERS
    )
    return [
        Fact(
            "M-67", "unpacked rows cost about 11 ms of waiting a step", "the plan counts reads of packed rows"
        ),
        Fact(
            "M-72",
            "eight nodes: shared memory fell from 11.61 to 0.425 GiB, 1 / 27",
            f"peers and channels are not published; ours falls to 1 / {ratio:.0f} on three nodes, buffers alone",
        ),
        Fact(
            "M-79",
            "top-k of a union is top-k of the union of its parts' top-k",
            "why bounding the indexer changes no answer once ties are settled; its memory is a line",
        ),
        Fact(
            "M-82",
            "the native allocator keeps 8 GiB after 64 growing chunks, 0.6 with expandable segments",
            "SGLang without a bounded indexer gets the line 'allocator growth', as large as the scores",
        ),
        Fact(
            "M-87",
            "448 MiB upstream",
            "not explained, and no line of its own; the engine's allocator slack is larger",
        ),
        Fact("M-92", "the whole boot took 372 s", "the plan times loading only"),
        Fact(
            "M-95",
            "a loop ran for 714,106 tokens, 9,509 s",
            "nothing: limits on output are not the planner's",
        ),
    ]


def _spell(floor: Floor) -> str:
    return f"the floor is {floor.rest_bytes / 1e9:.0f} GB at rest and {floor.peak_bytes / GIB:.0f} GiB at the peak"


__all__ = ["facts"]
