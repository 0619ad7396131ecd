"""Figures of reading prompts, of loading and of waiting: M-74 to M-83, M-88 to M-97. Owns which function gives ours."""

from __future__ import annotations

from deskfleet.planner.chunks import (
    PAIR_BYTES,
    PUBLISHED_PAIR_LIMIT,
    UPSTREAM_PAIR_BYTES,
    ChunkRule,
    indexer_bytes,
)
from deskfleet.planner.cluster import GIB
from deskfleet.planner.collectives import (
    MIB,
)
from deskfleet.planner.engine_rules import admission_delay
from deskfleet.planner.evidence.layouts import EXL3_MODEL, MODEL, plan_of, weights_gib
from deskfleet.planner.evidence.pools import MILLION
from deskfleet.planner.evidence.table import Row, answered, exact, measured, ranged, rounded
from deskfleet.planner.loading import (
    LOCAL_NVME,
    LOCAL_NVME_THREE_NODES,
    NFS,
    ROW_COPY,
    SECOND_PASS,
    SWITCHED_FLEET,
    load_s,
)
from deskfleet.planner.published import published_inventory
from deskfleet.planner.rates import impossible_rungs, longest_prompt, prompt_s
from deskfleet.planner.sharding import engram_bytes
from deskfleet.planner.wishes import Wishes

ETA_SHARE = 0.10
"""How far a load time may be off that is predicted with another recipe's rate."""


def indexer_rows() -> list[Row]:
    """The indexer's transient, and the chunks that keep it small."""
    capped = indexer_bytes(2048, 97_656, copy_cap_bytes=256 * MIB) / (2048 * 97_656)
    unbounded = Wishes(max_model_len=MILLION, chunk_tokens=4096)
    planned = plan_of("sglang", 4, wishes=unbounded)
    return [
        rounded(
            "M-74 (1024)",
            "indexer, 1,024 tokens over 1,048,576",
            "15.03",
            "GB",
            indexer_bytes(1024, MILLION) / 1e9,
            "14 B a pair",
        ),
        rounded(
            "M-74 (4096)",
            "indexer, 4,096 tokens over 1,048,576",
            "60.13",
            "GB",
            planned.budgets[0].line("indexer scores").num_bytes / 1e9,
            "14 B a pair; the plan's line",
        ),
        answered(
            "M-74 (refusal)",
            "that chunk on 4 Sparks",
            "no",
            "yes" if planned.fits else "no",
            "the plan's verdict",
        ),
        ranged(
            "M-75", "bytes of a pair, measured twice", "12.2", "14.5", "B", PAIR_BYTES, "4 + 4 + 1 and slack"
        ),
        *_chunk_rows(),
        rounded(
            "M-78", "bytes of a pair with 256 MiB for copies", "11", "B", capped, "copies made within the cap"
        ),
        rounded(
            "M-80",
            "the other formula, 2,048 x 262,144 / 4",
            "0.54",
            "GB",
            indexer_bytes(2048, 262_144 // 4, pair_bytes=4) / 1e9,
            "4 B a pair at ratio 4; not used, see contradictions",
        ),
        exact(
            "M-81",
            "upstream's form, 16,384 x 1,048,576",
            "96",
            "GiB",
            indexer_bytes(16_384, MILLION, pair_bytes=UPSTREAM_PAIR_BYTES) / GIB,
            "6 B a pair: logits and masks only",
        ),
        rounded(
            "M-83",
            "vLLM, workspace at 1,048,576",
            "5.2",
            "GiB",
            plan_of("vllm", 4, wishes=Wishes(max_model_len=MILLION))
            .budgets[0]
            .line("prefill workspace")
            .num_bytes
            / GIB,
            "taken as published",
            is_fitted=True,
        ),
    ]


def _chunk_rows() -> list[Row]:
    table = ChunkRule(pair_limit=PUBLISHED_PAIR_LIMIT, steps="doublings")
    ours = ChunkRule(pair_limit=PUBLISHED_PAIR_LIMIT)
    rows = [
        answered(
            f"M-76 ({chunk} x {keys:,})",
            "a chunk that the guard stopped",
            "no",
            "yes" if ours.chunk_for(keys) >= chunk else "no",
            "pairs against 2.0e8",
        )
        for chunk, keys in ((2048, 133_000), (1024, 256_000))
    ]
    rows += [
        exact(
            f"M-77 ({chunk})",
            "last prefix of the published step",
            text,
            "tokens",
            _last_prefix(table, int(chunk)),
            "2e8 / chunk",
        )
        for chunk, text in {"2048": "97,656", "1024": "195,312", "512": "390,625", "256": "781,250"}.items()
    ]
    rows.append(
        exact(
            "M-77 (133k)",
            "chunk in multiples of 256 over 133,000",
            "1,280",
            "tokens",
            ours.chunk_for(133_000),
            "the rule taken",
        )
    )
    rows.append(
        rounded(
            "M-77 (its bytes)",
            "indexer, 1,280 tokens over 133,000",
            "2.38",
            "GB",
            indexer_bytes(1280, 133_000) / 1e9,
            "14 B a pair",
        )
    )
    return rows


def _last_prefix(rule: ChunkRule, chunk: int) -> int:
    """The longest prefix over which the rule still gives `chunk`, by halving."""
    low, high = 1, 2 * PUBLISHED_PAIR_LIMIT // chunk
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if rule.chunk_for(middle) >= chunk else (low, middle - 1)
    return low


def time_rows() -> list[Row]:
    """Loading, prompts, and what a scheduler waits for. Bytes are the planner's, rates the published ones."""
    model, exl3 = published_inventory(MODEL), published_inventory(EXL3_MODEL)
    held = int(weights_gib("vllm", 4) * GIB)
    own = "our bytes at the published rate"
    taken = "the rate was taken from this figure"
    return [
        rounded(
            "M-88 (rate)",
            "NFS, each of three readers",
            "0.239",
            "GiB/s",
            NFS.rate_bytes_per_s(3) / GIB,
            taken,
            is_fitted=True,
        ),
        measured("M-88", "four nodes load over NFS", "341", "s", load_s(held, NFS, 3), own),
        measured("M-88 (again)", "a second pass", "100", "s", load_s(held, SECOND_PASS), own),
        rounded(
            "M-89",
            "copy of a rank's Engram rows",
            "5.6",
            "min",
            load_s(engram_bytes(model, "strided", 4, 0), ROW_COPY) / 60,
            own,
        ),
        measured(
            "M-90",
            "three nodes load 48 files",
            "8",
            "min",
            load_s(model.file_bytes, LOCAL_NVME_THREE_NODES) / 60,
            taken,
            is_fitted=True,
        ),
        measured(
            "M-91 (head)",
            "EXL3 from local NVMe",
            "250",
            "s",
            load_s(exl3.weight_bytes, LOCAL_NVME),
            taken,
            is_fitted=True,
        ),
        measured(
            "M-91 (worker)",
            "EXL3 over NFS",
            "15",
            "min",
            load_s(exl3.weight_bytes, NFS, 1) / 60,
            "our bytes at M-88's rate, of another recipe",
            share=ETA_SHARE,
        ),
        measured(
            "M-92",
            "48 files on a switched fleet",
            "53",
            "s",
            load_s(model.file_bytes // 4, SWITCHED_FLEET),
            taken,
            is_fitted=True,
        ),
        exact(
            "M-93",
            "prompt that a cache answered",
            "562,940",
            "tokens",
            impossible_rungs([(92_617, 151), (200_686, 179), (402_325, 362), (562_940, 314)])[0],
            "quicker than a shorter one: the ladder is refused",
        ),
        rounded(
            "M-94",
            "1,011,084 tokens at 3,118 tok/s",
            "324.3",
            "s",
            prompt_s(1_011_084, 3_118),
            "tokens / rate",
        ),
        rounded(
            "M-95", "714,106 tokens at 75.1 tok/s", "9,509", "s", prompt_s(714_106, 75.1), "tokens / rate"
        ),
        answered(
            "M-96",
            "admission delay with 7, 8, 12, 13, 18, 19 slots",
            "0, 2, 2, 3, 3, 4",
            ", ".join(str(admission_delay(slots)) for slots in (7, 8, 12, 13, 18, 19)),
            "min(4, max(2, (n + 5) // 6)) from 8 on",
        ),
        exact(
            "M-96 (set)",
            "admission delay set to 1",
            "0",
            "",
            admission_delay(16, 1),
            "1 or less turns it off",
        ),
        rounded(
            "M-97", "899,994 tokens at 874.8 tok/s", "1,029", "s", prompt_s(899_994, 874.8), "tokens / rate"
        ),
        rounded(
            "M-97 (timeout)",
            "longest prompt in 900 s",
            "787",
            "k",
            longest_prompt(900, 874.8) / 1000,
            "seconds x rate",
        ),
    ]


__all__ = ["ETA_SHARE", "indexer_rows", "time_rows"]
