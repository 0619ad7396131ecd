"""Figures of caches and of the rules that size them: M-34 to M-62. Owns which function gives ours."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from deskfleet.planner.cluster import GIB, SPARK
from deskfleet.planner.engine_rules import (
    SGLANG_RESERVE_BYTES,
    admits_utilisation,
    fraction_change_bytes,
    kv_budget_bytes,
    outside_pool_bytes,
    pool_holds,
    sub_pools,
    utilisation_bytes,
    window_pool_tokens,
)
from deskfleet.planner.engines import sglang, vllm
from deskfleet.planner.engines.contract import KvRate
from deskfleet.planner.engines.stock import RECORD_BYTES
from deskfleet.planner.evidence.layouts import EXL3_MODEL, V4_MODEL, plan_of
from deskfleet.planner.evidence.table import Row, answered, exact, measured, ranged, rounded
from deskfleet.planner.wishes import Wishes

MILLION = 1 << 20
"""Positions that the model knows, the "1M" of most publishers."""


def sglang_pool_rows() -> list[Row]:
    """SGLang: what a token costs, and what its fraction leaves for the pool."""
    rate = plan_of("sglang", 4).kv_rate
    gigabytes = {
        "131,072": "0.219",
        "750,000": "1.253",
        "1,000,000": "1.671",
        "1,048,576": "1.752",
        "8,000,000": "13.366",
        "8,388,608": "14.02",
    }
    return [
        exact("M-34", "SGLang, a token of KV", "1670.75", "B", rate.bytes_per_token, rate.formula),
        *(
            rounded(
                f"M-35 ({tokens})",
                "KV of so many tokens",
                text,
                "GB",
                _pool(rate, tokens) / 1e9,
                "tokens x M-34",
            )
            for tokens, text in gigabytes.items()
        ),
        rounded(
            "M-35 (GiB)", "KV of 8,000,000 tokens", "12.45", "GiB", _pool(rate, "8,000,000") / GIB, "likewise"
        ),
        *_window_rows(),
        ranged(
            "M-37",
            "available to a pool of 16,735,744 tokens",
            "26.71",
            "26.72",
            "GiB",
            (_pool(rate, "16,735,744") + _window_bytes(16)) / GIB,
            "pool and windows; the log's GB are GiB, else 7 % are missing",
        ),
        rounded(
            "M-38",
            "a pool of 10,029,056 tokens",
            "15.61",
            "GiB",
            _pool(rate, "10,029,056") / GIB,
            "tokens x M-34",
        ),
        rounded(
            "M-39",
            "pool lost from fraction 0.90 to 0.80",
            "13",
            "GB",
            -fraction_change_bytes(SPARK.total_bytes, 0.90, 0.80) / 1e9,
            "0.10 of what is available before: here all of a node",
        ),
        *_fraction_rows(),
        *_sub_pool_rows(),
    ]


def _pool(rate: KvRate, tokens: str) -> int:
    return rate.pool_bytes(int(tokens.replace(",", "")))


def _window_bytes(num_slots: int) -> int:
    layout = replace(plan_of("sglang", 4).layout, max_num_seqs=num_slots)
    return sglang.RULES.window_line(plan_of("sglang", 4).inventory, layout).num_bytes


def _window_rows() -> list[Row]:
    return [
        rounded(
            f"M-36 ({slots} slots)",
            "SGLang, window pool",
            text,
            "GiB",
            _window_bytes(slots) / GIB,
            "a straight line through both figures",
            is_fitted=True,
        )
        for slots, text in {4: "0.34", 16: "0.67"}.items()
    ]


def _fraction_rows() -> list[Row]:
    """SGLang on three nodes. What is left after loading follows from the published 0.12 GB at 0.945."""
    before, left = SPARK.available_bytes, int(0.12 * GIB)
    after = left + outside_pool_bytes(0.945, before) + SGLANG_RESERVE_BYTES
    zero = 1 - (after - SGLANG_RESERVE_BYTES) / before
    window = _window_bytes(4)
    basis = "after - (1 - fraction) x before - 0.1; after from the published 0.12 at 0.945"
    return [
        rounded("M-40", "fraction that leaves nothing on 3 nodes", "0.944", "", zero, basis),
        answered(
            "M-40 (0.945)",
            "window pool fits at 0.945",
            "no",
            _yes(kv_budget_bytes(0.945, before, after) >= window),
            "budget against M-36",
        ),
        answered(
            "M-40 (0.95)",
            "window pool fits at 0.95",
            "yes",
            _yes(kv_budget_bytes(0.95, before, after) >= window),
            "budget against M-36",
        ),
    ]


def _sub_pool_rows() -> list[Row]:
    pools = sub_pools(8_000_000)
    return [
        exact("M-42 (ratio 4)", "pool of ratio 4", "2,000,000", "entries", pools.c4_entries, "tokens / 4"),
        exact(
            "M-42 (ratio 128)", "pool of ratio 128", "62,500", "entries", pools.c128_entries, "tokens / 128"
        ),
        exact(
            "M-42 (windows)",
            "window pool",
            "45,568",
            "tokens",
            window_pool_tokens(64, 576, 8_704),
            "tails + running",
        ),
    ]


def vllm_pool_rows() -> list[Row]:
    """vLLM and the image with EXL3 kernels: tokens of a pool, and what its boot line says."""
    one, two, four = (_vllm_rate(dcp) for dcp in (1, 2, 4))
    exl3 = plan_of("exl3", 2, EXL3_MODEL).kv_rate
    pool = 5 * GIB // 2
    return [
        rounded(
            "M-43", "vLLM, DCP 2, a token", "3,410.9", "B", two.bytes_per_token, two.formula, is_fitted=True
        ),
        rounded(
            "M-44", "vLLM, DCP 1, a token", "6,800.6", "B", one.bytes_per_token, one.formula, is_fitted=True
        ),
        rounded(
            "M-45", "vLLM, DCP 1, tokens of 10 GiB", "1.58", "M", one.tokens(10 * GIB) / 1e6, "rate of M-44"
        ),
        rounded(
            "M-46",
            "vLLM, DCP 1 over DCP 2",
            "1.994",
            "",
            one.bytes_per_token / two.bytes_per_token,
            "a part of each token is on every rank",
            is_fitted=True,
        ),
        answered(
            "M-46 (DCP 4)",
            "DCP 4 holds four times the tokens",
            "no",
            _yes(four.bytes_per_token * 4 <= one.bytes_per_token),
            "likewise",
        ),
        measured("M-48", "EXL3, a token", "4,080", "B", exl3.bytes_per_token, exl3.formula, is_fitted=True),
        rounded(
            "M-48 (658k)",
            "EXL3, tokens of 2.5 GiB",
            "658",
            "k",
            exl3.tokens(pool) / 1000,
            "see contradictions",
        ),
        rounded(
            "M-49", "EXL3, KV of 1,048,576 tokens", "4", "GiB", exl3.pool_bytes(MILLION) / GIB, "rate of M-48"
        ),
        answered(
            "M-49 (601k)",
            "EXL3, 601,000 tokens in 2.5 GiB",
            "yes",
            _yes(exl3.pool_bytes(601_000) <= pool),
            "likewise",
        ),
        *_boot_rows(),
    ]


def _vllm_rate(dcp_size: int) -> KvRate:
    plan = plan_of("vllm", 4)
    return vllm.RULES.kv_rate(plan.inventory, replace(plan.layout, dcp_size=dcp_size))


def _boot_rows() -> list[Row]:
    """The last words of vLLM's boot line for V4-Flash, and what a token and its record take."""
    published = {
        "3,225,280": "3.08",
        "1,990,142": "1.90",
        "2,044,166": "1.95",
        "1,901,239": "1.81",
        "2,493,464": "2.38",
    }
    rate = plan_of("vllm", 2, V4_MODEL).kv_rate
    return [
        *(
            measured(
                f"M-50 ({tokens})",
                "V4-Flash by vLLM, requests of full length",
                times,
                "x",
                _predicted_concurrency(int(tokens.replace(",", ""))),
                "the predicted boot line; windows of six requests come on top",
                share=0.01,
            )
            for tokens, times in published.items()
        ),
        rounded(
            "M-51",
            "V4-Flash by vLLM, a token",
            "7,786",
            "B",
            rate.bytes_per_token,
            rate.formula,
            is_fitted=True,
        ),
        rounded(
            "M-51 (pool)",
            "V4-Flash, KV of 2,493,464 tokens",
            "18.08",
            "GiB",
            _pool(rate, "2,493,464") / GIB,
            "tokens x the rate",
            is_fitted=True,
        ),
        exact(
            "M-52",
            "V4 KV entry, fp8",
            "584",
            "B",
            RECORD_BYTES["fp8"][0],
            "the record's format",
            is_fitted=True,
        ),
        *_other_pool_rows(),
        measured(
            "M-52 (index key)",
            "V4 index key by SGLang",
            "132",
            "B",
            _v4_index_key_bytes(),
            "what entries leave of a token; no boot line of SGLang with V4 is published",
            share=0.0,
        ),
    ]


def _other_pool_rows() -> list[Row]:
    """Pools whose price is not ours: that their bytes, tokens and price belong together."""
    published = (
        ("M-51 (another kit)", "3,027,217", 7041, "19.85", "GiB"),
        ("M-53 (5,167 B)", "1,070,168", 5167, "5.15", "GiB"),
        ("M-53 (5,188 B)", "1,078,380", 5188, "5.21", "GiB"),
        ("M-53 (5,777 B)", "3,193,029", 5777, "17.18", "GiB"),
        ("M-53 (1,334 B)", "2,023,717", 1334, "2.7", "GB"),
    )
    return [
        rounded(
            name,
            f"KV of {tokens} tokens at {price:,} B",
            text,
            unit,
            _pool(KvRate(Fraction(price), "as published", "published"), tokens)
            / (GIB if unit == "GiB" else 1e9),
            "tokens x the price given; not our price",
        )
        for name, tokens, price, text, unit in published
    ]


def _v4_index_key_bytes() -> float:
    """What SGLang's price of a V4 token counts for a key."""
    plan = plan_of("sglang", 2, V4_MODEL)
    kv = plan.inventory.kv
    entries = RECORD_BYTES["fp8"][0] * kv.entries_per_token
    return (float(sglang.entry_rate(plan.inventory, plan.layout)) - entries) / kv.index_keys_per_token


def _predicted_concurrency(kv_tokens: int) -> float:
    wishes = Wishes(max_model_len=MILLION, kv_tokens=kv_tokens, max_num_seqs=6)
    boot = plan_of("vllm", 2, V4_MODEL, wishes).boot
    if boot is None:
        raise ValueError("vLLM predicts no boot line")
    return float(boot.line.rpartition(" ")[2].removesuffix("x"))


def admission_rows() -> list[Row]:
    """Who fits into a pool together, and who starts at all."""
    live = {
        "6 x 50k": [50_000] * 6,
        "6 x 200k": [200_000] * 6,
        "6 x 500k": [500_000] * 6,
        "3 x 1M": [1_000_000] * 3,
    }
    basis = "sum of live tokens against 3,225,280"
    rows = [
        answered(f"M-55 ({name})", "requests run together", "yes", _yes(pool_holds(tokens, 3_225_280)), basis)
        for name, tokens in live.items()
    ]
    rows.append(
        answered(
            "M-55 (6 x 1M)",
            "requests run together",
            "no",
            _yes(pool_holds([1_000_000] * 6, 3_225_280)),
            basis,
        )
    )
    rows += [
        rounded(
            f"M-62 ({share})",
            "vLLM's claim on a node of 121.69 GiB",
            text,
            "GiB",
            utilisation_bytes(share, SPARK.total_bytes) / GIB,
            "utilisation x total",
        )
        for share, text in {0.84: "102.22", 0.87: "105.87"}.items()
    ]
    starts = admits_utilisation(0.87, SPARK.total_bytes, 102 * GIB)
    rows.append(
        answered("M-62 (refusal)", "0.87 starts with 102 GiB free", "no", _yes(starts), "claim against free")
    )
    return rows


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def outside_rows() -> list[Row]:
    """What SGLang's fraction leaves to all else."""
    outside = outside_pool_bytes(0.80, SPARK.total_bytes) / GIB
    return [
        rounded(
            "M-84",
            "outside the static pool at 0.80",
            "~24",
            "GiB",
            outside,
            "0.20 of available, here all of a node",
        )
    ]


__all__ = ["MILLION", "admission_rows", "outside_rows", "sglang_pool_rows", "vllm_pool_rows"]
