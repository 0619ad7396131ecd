"""Where published sources disagree: the side that the planner takes. Owns the wording; numbers of ours are computed."""

from __future__ import annotations

from deskfleet.planner.cluster import GIB
from deskfleet.planner.evidence.layouts import MODEL, plan_of, weights_gib
from deskfleet.planner.evidence.table import Contradiction
from deskfleet.planner.published import published_inventory
from deskfleet.planner.wishes import Wishes


def contradictions() -> tuple[Contradiction, ...]:
    """Every disagreement that touches the plan, sizes first."""
    return (*_sizes(), *_pools(), *_transients(), *_services())


def _sizes() -> list[Contradiction]:
    model = published_inventory(MODEL)
    experts = model.group_bytes("routed experts", "draft routed experts")
    three = weights_gib("sglang", 3)
    return [
        Contradiction(
            "M-06, M-08, M-09",
            "routed experts are 295.7 GB, which leaves 11.85 GB for the rest",
            "the files add up to 510.31 GB",
            f"shapes: experts {experts / 1e9:.3f} GB, drafts' included, "
            f"{(model.weight_bytes - experts) / 1e9:.2f} GB for the rest. The files are that, Engram, 10.7 MB of "
            "headers and 13.8 MB of other files",
            "weights by class",
        ),
        Contradiction(
            "M-12",
            "V4-Flash is 149 and 155 GB",
            "V4-Flash is 149 and 155 GiB",
            "GiB: shapes give 148.6 and 155.4 GiB, which is 159.6 and 166.9 GB",
            "`v4-flash`, `v4-flash-dspark`",
        ),
        Contradiction(
            "M-22, M-25",
            "SGLang holds about 77 GiB on four ranks",
            "its boot log says 70.76 and 2.35, later 72.14",
            f"the log, with its GB read as GiB (M-37): ours is {weights_gib('sglang', 4):.2f}. 77 is rounded, and was "
            "given for other cards as well",
            "cuts of SGLang",
        ),
        Contradiction(
            "G-48",
            "about 305 GiB are resident",
            "without Engram the checkpoint is 286.4 GiB",
            f"both, of different things: {model.weight_bytes / GIB:.1f} GiB are stored, and three ranks hold "
            f"{3 * three:.0f} together, because parts are whole on each rank and others are padded",
            "every line says which part is held, padding is a line",
        ),
        Contradiction(
            "G-40 (M-68)",
            "an all-reduce moves rows of 4,096",
            "an all-reduce of six rows moves 61 KB",
            "rows of 5,120: that is the model's hidden size, and 6 x 5,120 x 2 are 61,440 B. 4,096 is V4-Flash's",
            "messages of a step",
        ),
        Contradiction(
            "G-60 (M-70, M-71)",
            "NCCL pins 4.7 GiB as it comes and 0.14 GiB as set",
            "512 connections of 9.19 MiB; 139 MB",
            "the product, 4.59 GiB; and 139 is MiB, since 139 MB would be 0.13 GiB. Ours are the buffers alone, "
            "112 MiB, a lower bound",
            "line 'collective buffers'",
        ),
    ]


def _pools() -> list[Contradiction]:
    return [
        Contradiction(
            "M-48, G-55",
            "EXL3: 774,400 tokens in 2.5 GiB, 3,466 B each",
            "500,000 tokens take 1.9 GiB, 4,080 B each; a comment has 658k tokens to 1 GiB, 1,631 B",
            "4,080: it is the dearest, and 658k is just what 2.5 GiB hold at 4,080, so the comment likely names the "
            "wrong pool. 1M then takes 4 GiB, as published too",
            "KV price of EXL3; the boot line decides",
        ),
        Contradiction(
            "G-43",
            "8 GiB is the pool that ships",
            "the launch line sets 6 GiB",
            "each with its own setting: 8 GiB without DCP are 1.26 million tokens, 6 GiB with DCP 2 are 1.89 million",
            "vLLM's KV price depends on --dcp; the pool is planned in tokens",
        ),
        Contradiction(
            "G-51 (M-50)",
            "V4-Flash: a pool of 3,225,280 tokens",
            "about two million",
            "neither: utilisation and version differ. A pool is asked for in tokens and priced",
            "--kv-tokens",
        ),
        Contradiction(
            "M-51",
            "V4-Flash: 7,786 B a token",
            "another kit: 7,041 B",
            "7,786, the dearer: a plan that is wrong by it leaves memory over",
            "KV price of V4 by vLLM; --calibrate corrects it",
        ),
        Contradiction(
            "M-52",
            "V4 index keys take 132 B",
            "on Blackwell they may be four-bit, 68 B",
            "132 B for SGLang, the safe side; vLLM's price is that of a boot, whatever its keys",
            "KV price of V4 by SGLang, which no boot has shown",
        ),
        Contradiction(
            "G-46",
            "Engram rows are not reused, a cache is useless",
            "a cache of 4 GiB answers 67 to 76 %",
            "no cache is counted, so read times are upper bounds; how much text repeats is the user's traffic",
            "Engram reads of a step and of a chunk",
        ),
    ]


def _transients() -> list[Contradiction]:
    return [
        Contradiction(
            "G-47 (M-80)",
            "the indexer takes 14 B x chunk x prefix",
            "it takes chunk x context / 4 x 4 B",
            "14 B: two boots measured 14.5 and 12.2. The other is of a model with ratio 4 and counts logits only; "
            "here it gives a 14th",
            "line 'indexer scores'",
        ),
        Contradiction(
            "M-76",
            "chunk x prefix stays below 2.0e8",
            "2,048 x 100k and 1,024 x 208k, 2.05e8 and 2.13e8, ran",
            "the rule: 2.13e8 ran once and 2.62e8 did not, so the limit lies between, and 2.0e8 is the safe side",
            "chunk schedules",
        ),
        Contradiction(
            "M-77",
            "the formula gives chunks in multiples of 256",
            "the table of steps has powers of two",
            "multiples: the same limit, with larger chunks between the steps. The formula's lower clamp is left out, "
            "because it breaks the limit beyond 781,250 tokens",
            "chunk schedules",
        ),
        Contradiction(
            "G-49 (M-82)",
            "expandable segments are kept on",
            "they must be off: answers turn to NaN",
            "by engine: on with vLLM, off with SGLang, which pays for it with a second line as large as the scores",
            "line 'allocator growth' of SGLang",
        ),
    ]


def _services() -> list[Contradiction]:
    context = plan_of("sglang", 3, wishes=Wishes()).largest_context
    return [
        Contradiction(
            "G-45",
            "three nodes: 256k set, 191k and 208k tried",
            "32k is usable, 64k exhausts the head",
            f"none as a promise. For four requests we plan {context:,} tokens; what was tried on a machine is not "
            "the planner's to say",
            "largest context; --margin for unattended use",
        ),
        Contradiction(
            "G-44",
            "three nodes: 51.0 tok/s for one stream of prose",
            "37.9 tok/s",
            "two dates of one recipe. The plan gives a floor of a step and a ceiling, no rate to expect",
            "decode ceiling",
        ),
        Contradiction(
            "G-53",
            "three drafts a step",
            "fewer than five cut drafts silently; others take two or seven",
            "at most the checkpoint's block, by default all of it; more is refused. Fewer is planned as asked, but "
            "that an engine drafts as many is not the plan's to promise",
            "--drafts",
        ),
    ]


__all__ = ["contradictions"]
