"""Figures of the checkpoint and of what a rank holds of it: M-01 to M-33. Owns which function gives ours; no arithmetic
of its own but units and shares."""

from __future__ import annotations

from itertools import accumulate

from deskfleet.planner.cluster import GIB
from deskfleet.planner.engines import exl3, sglang, vllm
from deskfleet.planner.evidence.layouts import (
    EXL3_MODEL,
    MODEL,
    NVFP4_MODEL,
    USUAL,
    V4_MODEL,
    budget_of,
    plan_of,
    tables_of,
    weights_gib,
)
from deskfleet.planner.evidence.table import Row, answered, exact, measured, ranged, rounded
from deskfleet.planner.inventory import EngramTables
from deskfleet.planner.published import published_inventory
from deskfleet.planner.sharding import engram_bytes, local_heads, padded_vocab, padded_width, share_of
from deskfleet.planner.wishes import EngineName, Wishes
from deskfleet_engram.ownership import ColumnOwnership, RowOwnership

EXPERTS = ("routed experts", "draft routed experts")


def checkpoint_rows() -> list[Row]:
    """What is on disk."""
    fp8 = published_inventory(MODEL)
    tables, small = tables_of(MODEL), tables_of(NVFP4_MODEL)
    all_bytes = fp8.weight_bytes + tables.num_bytes
    expert_bytes = fp8.group_bytes(*EXPERTS)
    files = (
        "our sum of tensors; published are files, with 10.7 MB of headers and 13.8 MB of index and tokenizer"
    )
    headers = 0.0001
    return [
        exact("M-01", "Engram row, FP8", "264", "B", tables.row_bytes, "codes and a scale for each 32"),
        exact(
            "M-02", "Engram row, NVFP4", "144", "B", small.row_bytes, "two codes a byte, a scale for each 16"
        ),
        exact("M-03", "Engram rows", "768,022,850", "rows", sum(tables.rows), "both tables"),
        exact("M-04", "Engram, FP8", "202,758,032,400", "B", tables.num_bytes, "rows x bytes of a row"),
        rounded("M-04 (GiB)", "Engram, FP8", "188.83", "GiB", tables.num_bytes / GIB, "likewise"),
        rounded("M-05", "Engram, NVFP4", "110.60", "GB", small.num_bytes / 1e9, "rows x bytes of a row"),
        rounded(
            "M-05 (saving)",
            "Engram, FP8 less NVFP4",
            "92.2",
            "GB",
            (tables.num_bytes - small.num_bytes) / 1e9,
            "likewise",
        ),
        measured("M-06", "whole checkpoint", "510,310,549,975", "B", all_bytes, files, share=headers),
        measured("M-06 (GiB)", "whole checkpoint", "475.26", "GiB", all_bytes / GIB, files, share=headers),
        measured("M-07", "without Engram", "286.43", "GiB", fp8.weight_bytes / GIB, files, share=headers),
        rounded("M-08", "routed experts, drafts' included", "296", "GB", expert_bytes / 1e9, "shapes"),
        measured(
            "M-08 (finer)", "routed experts", "295.7", "GB", expert_bytes / 1e9, "shapes; see contradictions"
        ),
        measured(
            "M-09",
            "neither Engram nor routed experts",
            "11.85",
            "GB",
            (fp8.weight_bytes - expert_bytes) / 1e9,
            "shapes; published is a difference of rounded figures",
        ),
        *_other_checkpoint_rows(tables),
    ]


def _other_checkpoint_rows(tables: EngramTables) -> list[Row]:
    low, high = published_inventory(EXL3_MODEL), published_inventory("v4.1-flash-exl3-3.5")
    plain, dspark = published_inventory("v4-flash"), published_inventory(V4_MODEL)
    return [
        ranged(
            "M-10",
            "EXL3 2.9",
            "196",
            "197",
            "GiB",
            low.weight_bytes / GIB,
            "its middle is taken",
            is_fitted=True,
        ),
        measured(
            "M-10 (staged)", "EXL3 2.9 and Engram", "387", "GiB", low.file_bytes / GIB, "Engram from shapes"
        ),
        rounded(
            "M-11 (experts)",
            "EXL3 3.5, experts",
            "245.4",
            "GB",
            high.group_bytes(*EXPERTS) / 1e9,
            "taken as published",
            is_fitted=True,
        ),
        measured(
            "M-11", "EXL3 3.5", "460.0", "GB", high.file_bytes / 1e9, "all else from shapes, as released"
        ),
        rounded("M-12", "V4-Flash", "149", "GiB", plain.weight_bytes / GIB, "shapes; published as GB"),
        rounded(
            "M-12 (DSpark)",
            "V4-Flash, draft stages",
            "155",
            "GiB",
            dspark.weight_bytes / GIB,
            "shapes; GB or GiB",
        ),
        measured(
            "M-13",
            "one Engram shard",
            "~95",
            "GiB",
            tables.rows[0] * tables.row_bytes / GIB,
            "layer 1, tensors only",
        ),
    ]


def engram_rows() -> list[Row]:
    """Which part of the tables a rank owns."""
    fp8, nvfp4 = published_inventory(MODEL), published_inventory(NVFP4_MODEL)
    tables = tables_of(MODEL)
    columns = "columns of rank 0"
    rows = [
        rounded(
            f"M-14 ({n} ranks)", "Engram, FP8", text, "GiB", engram_bytes(fp8, "strided", n, 0) / GIB, columns
        )
        for n, text in {2: "94.42", 3: "62.94", 4: "47.21", 8: "23.60"}.items()
    ]
    rows += [
        rounded(
            f"M-15 ({n} ranks)",
            "Engram of layer 1, FP8",
            text,
            "GiB",
            sum(tables.column_rows[0][column] for column in _columns(tables, n, 0)) * tables.row_bytes / GIB,
            columns,
        )
        for n, text in {2: "47.21", 3: "31.47", 4: "23.60", 8: "11.80"}.items()
    ]
    rows += [
        rounded(
            f"M-16 ({n} ranks)",
            "Engram, NVFP4",
            text,
            "GiB",
            engram_bytes(nvfp4, "strided", n, 0) / GIB,
            columns,
        )
        for n, text in {2: "51.5", 3: "34.3", 4: "25.75", 8: "12.9"}.items()
    ]
    rows += [
        exact(f"M-17 ({n} ranks)", "hash columns", text, "columns", len(_columns(tables, n, 0)), "24 / ranks")
        for n, text in {2: "12", 3: "8", 4: "6", 8: "3"}.items()
    ]
    return rows + _row_range_rows(tables)


def _row_range_rows(tables: EngramTables) -> list[Row]:
    """Rows of ranks that own ranges, and of ranks that own contiguous columns of prime sizes."""
    even, odd = (RowOwnership(count, 4).rows(1)[0] for count in tables.rows)
    rows = [
        exact(
            "M-18 (layer 1)", "first row of rank 1 of 4, by ranges", "96,001,542", "", even, "rows / ranks"
        ),
        ranged(
            "M-18 (layer 14)",
            "first row of rank 1 of 4, by ranges",
            "96,004,170",
            "96,004,171",
            "",
            odd,
            "rows / ranks is a half; we round up",
        ),
    ]
    published = {
        ("M-19", 4): (("96,000,564", "192,001,740"), ("96,003,054", "192,007,016")),
        ("M-20", 3): (("128,000,880", "256,002,934"), ("128,004,290", "256,009,984")),
    }
    for (name, num_ranks), layers in published.items():
        for table, (first, last) in enumerate(layers):
            begin, end = _contiguous_rows(tables, table, num_ranks, rank=1)
            label, what = f"{name} (layer {tables.layers[table]}", f"rank 1 of {num_ranks}, by columns"
            rows.append(
                exact(f"{label}, first)", f"first row of {what}", first, "", begin, "sizes of columns")
            )
            rows.append(exact(f"{label}, end)", f"end of {what}", last, "", end, "sizes of columns"))
    return rows


def weight_rows() -> list[Row]:
    """Weights that a rank holds."""
    text = Wishes(max_model_len=USUAL.max_model_len, num_drafts=0)
    target, whole = weights_gib("sglang", 4, wishes=text), weights_gib("sglang", 4)
    rows = [
        measured(
            f"M-21 ({n} ranks)",
            "routed experts",
            published,
            "GiB",
            _expert_gib(n),
            "held part; see M-08",
            share=0.002,
        )
        for n, published in {2: "137.7", 3: "91.80", 4: "68.85", 8: "34.42"}.items()
    ]
    everything = "all lines of weights: drafts, vision, padding, wo_a as bf16"
    return [
        *rows,
        measured("M-22 (2 ranks)", "SGLang, weights", "145", "GiB", weights_gib("sglang", 2), everything),
        measured("M-22 (3 ranks)", "SGLang, weights", "~101", "GiB", weights_gib("sglang", 3), everything),
        measured(
            "M-22 (4 ranks)",
            "SGLang, weights",
            "~77",
            "GiB",
            whole,
            everything,
            deviation_reason="the same publisher's boot log of four Sparks adds up to 73.11 GiB (M-25), and ours is "
            "1.1 % above that",
        ),
        measured("M-24 (4 ranks)", "vLLM, weights", "81.6", "GiB", weights_gib("vllm", 4), everything),
        measured(
            "M-24 (8 ranks)",
            "vLLM, weights",
            "73.16",
            "GiB",
            weights_gib("vllm", 8, wishes=Wishes(max_model_len=USUAL.max_model_len, ep_size=2)),
            everything,
            deviation_reason="the report does not say how eight ranks were used. A cut over four without padding holds "
            "73.2, so two groups of four are likely; cut over eight, a rank holds little more than half of that",
        ),
        measured("M-25", "SGLang, weights and drafts", "73.11", "GiB", whole, "70.76 + 2.35; " + everything),
        measured(
            "M-25 (model)", "SGLang, weights without drafts", "70.76", "GiB", target, "planned without drafts"
        ),
        measured("M-25 (later)", "SGLang, weights", "72.14", "GiB", whole, everything),
        measured(
            "M-25 (drafts)",
            "SGLang, drafts",
            "2.35",
            "GiB",
            whole - target,
            "planned with less planned without drafts",
            deviation_reason="with the drafts' wo_a in FP8 it would be 2.345; another page of the same publisher "
            "has it in bf16, which we count. It is 0.09 GiB, and the total agrees",
        ),
        measured("M-26", "EXL3 2.9, weights", "99.5", "GiB", weights_gib("exl3", 2, EXL3_MODEL), everything),
        ranged("M-27", "EXL3, a node's total", "116", "118", "GiB", _exl3_node_gib(), _EXL3_NODE),
        measured(
            "M-28", "V4-Flash, weights by vLLM", "79.17", "GiB", weights_gib("vllm", 2, V4_MODEL), everything
        ),
    ]


_EXL3_NODE = "weights, 2.5 GiB of KV, runtime, system; published 99.5 + 2.5 + 5 to 7 + 9"


def _exl3_node_gib() -> float:
    rate = plan_of("exl3", 2, EXL3_MODEL).kv_rate
    wishes = Wishes(max_model_len=600_000, kv_tokens=rate.tokens(5 * GIB // 2), max_num_seqs=2)
    return budget_of("exl3", 2, EXL3_MODEL, wishes).held_bytes / GIB


def padding_rows() -> list[Row]:
    """What has to be padded, and which widths have kernels."""
    model, exl3_model = published_inventory(MODEL), published_inventory(EXL3_MODEL)
    plan = plan_of("sglang", 3)
    rules = sglang.RULES.cut_rules(plan.cluster)
    heads = 3 * local_heads(model, rules, 3)
    drafts = next(group for group in model.groups if group.name == "draft routed experts")
    draft_experts = share_of(drafts, model, rules, plan.layout).held // padded_width(
        model, rules, plan.layout
    )
    exl3_rules = exl3.RULES.cut_rules(plan.cluster)
    vllm_plan, exl3_plan = plan_of("vllm", 4), plan_of("exl3", 4, EXL3_MODEL)
    return [
        exact(
            "M-30 (heads)", "heads on 3 ranks, SGLang", "96", "heads", heads, "32 a rank, a size with kernels"
        ),
        exact(
            "M-30 (groups)",
            "output groups on 3 ranks, SGLang",
            "12",
            "groups",
            heads * model.num_groups // model.num_heads,
            "as heads",
        ),
        exact(
            "M-30 (drafts)",
            "draft experts on 3 ranks, SGLang",
            "129",
            "experts",
            draft_experts,
            "a multiple of 3",
        ),
        *_width_rows(),
        exact(
            "M-31 (4 ranks, vLLM)",
            "expert width with padding",
            "640",
            "columns",
            padded_width(model, vllm.RULES.cut_rules(vllm_plan.cluster), vllm_plan.layout),
            "a multiple of 128",
        ),
        exact(
            "M-32",
            "widest slice of an EXL3 expert on 4 ranks",
            "640",
            "columns",
            padded_width(exl3_model, exl3_rules, exl3_plan.layout),
            "of 512, 640, 640, 512: the fullest rank counts",
        ),
        exact(
            "M-33 (heads)",
            "heads on 3 ranks, EXL3",
            "72",
            "heads",
            3 * local_heads(exl3_model, exl3_rules, 3),
            "whole groups of 8",
        ),
        exact(
            "M-33 (vocabulary)",
            "token rows on 3 ranks",
            "129,408",
            "rows",
            padded_vocab(exl3_model, exl3_rules, 3),
            "a multiple of lcm(64, 3)",
        ),
    ]


def _width_rows() -> list[Row]:
    rows = []
    for num_ranks, width, verdict in (
        (2, "1152", "yes"),
        (3, "768", "yes"),
        (4, "576", "yes"),
        (8, "288", "no"),
    ):
        plan = plan_of("sglang", num_ranks, wishes=Wishes(max_model_len=USUAL.max_model_len, ep_size=1))
        ours = plan.layout.expert_width(plan.inventory.expert_width)
        rows.append(
            exact(
                f"M-31 ({num_ranks} ranks)",
                "expert width, cut by width",
                width,
                "columns",
                ours,
                "width / ranks",
            )
        )
        rows.append(
            answered(
                f"M-31 ({num_ranks} ranks, kernel)",
                "a kernel for that width",
                verdict,
                _kernel("sglang", num_ranks, 1),
                "refusals of the plan",
            )
        )
    rows.append(
        answered(
            "M-31 (8 ranks, EP 2)",
            "a kernel for 576 on 8 ranks",
            "yes",
            _kernel("sglang", 8, 2),
            "refusals of the plan",
        )
    )
    return rows


def _kernel(engine: EngineName, tp_size: int, ep_size: int) -> str:
    plan = plan_of(engine, tp_size, wishes=Wishes(max_model_len=USUAL.max_model_len, ep_size=ep_size))
    return "no" if any(refusal.rule == "expert width" for refusal in plan.refusals) else "yes"


def _columns(tables: EngramTables, num_ranks: int, rank: int) -> tuple[int, ...]:
    return ColumnOwnership.split(tables.num_columns, num_ranks).columns(rank)


def _contiguous_rows(tables: EngramTables, table: int, num_ranks: int, *, rank: int) -> tuple[int, int]:
    columns = ColumnOwnership.split(tables.num_columns, num_ranks, "contiguous").columns(rank)
    ends = list(accumulate(tables.column_rows[table]))
    return ends[columns[0] - 1], ends[columns[-1]]


def _expert_gib(num_ranks: int) -> float:
    """Both kinds of routed experts on one rank, without padding."""
    budget = budget_of("sglang", num_ranks)
    return sum(budget.line(name).num_bytes for name in EXPERTS) / GIB


__all__ = ["checkpoint_rows", "engram_rows", "padding_rows", "weight_rows"]
