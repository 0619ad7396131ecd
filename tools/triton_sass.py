"""Compiles the GPU kernels for sm_90 without a GPU and reports what the compiler made of them.

    python tools/triton_sass.py [NAME ...]        # in the environment of tools/triton_env.sh
    python tools/triton_sass.py step ROWS         # every launch of a whole step of the published model

For every kernel at the sizes of a rank of four: registers, spilled bytes, shared memory, and, for those that stream
weights, the instructions of the longest loop for each weight, all of them and those of the integer pipe. What an H200
can issue while it reads MXFP4 at full bandwidth is about 4.1 and 2.1 (8.0 and 4.0 for FP8, 16 and 8 for bf16).
Exits 1 when a kernel spills in its loop or exceeds its budget.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from deskfleet.engine.cuda import (
    attention,
    compress,
    draft,
    engram,
    experts,
    hyper,
    indexer,
    linear,
    prefill_linear,
    routing,
    synthetic,
    topk,
)
from deskfleet.engine.cuda.step import DecodeStep, make_pages
from deskfleet.model.config import ModelConfig
from deskfleet.model.published import published_config_dict

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
INTEGER = {
    "LOP3",
    "SHF",
    "PRMT",
    "SEL",
    "IADD3",
    "LEA",
    "ISETP",
    "PLOP3",
    "VIADD",
    "IMNMX",
    "VIMNMX",
    "I2F",
    "BFE",
}


@dataclass(frozen=True)
class Case:
    """A kernel, its argument types by name, its constants, and the weights that one turn of its loop takes."""

    name: str
    kernel: object
    types: dict[str, str]
    constants: dict[str, object]
    weights_per_turn: int = 0
    budget: tuple[float, float] = (0.0, 0.0)
    warps: int = 4
    registers: int | None = None
    not_divisible: tuple[str, ...] = field(default=())


FP4, FP8, BF16 = (4.1, 2.1), (8.0, 4.0), (16.0, 8.0)
_TILES = {"x": "*fp8e4nv", "x_scales": "*i32", "codes": "*u8", "scales": "*i32"}
_ITEMS = {
    "items": "*i32",
    "num_items": "*i32",
    "item_pairs": "*i32",
    "num_rows": "i32",
}
_UP = {
    **_TILES, **_ITEMS, "route_weights": "*fp32", "out": "*fp8e4nv", "out_scales": "*u8", "partials": "*fp32",
    "counters": "*i32", "limit": "fp32",
}  # fmt: skip
_DOWN = {**_TILES, **_ITEMS, "out": "*bf16"}
_FLAGS = {"BM": 8, "GROUPS": 2, "BIT_OPS": False}
_FP8 = {**_FLAGS, "EXACT": False}
_EXACT = {**_FLAGS, "EXACT": True}


def cases() -> list[Case]:
    """Every kernel at the sizes of rank 0 of 4."""
    found = [
        Case(
            "list_items",
            experts.list_items_kernel,
            dict.fromkeys(("chosen", "items", "item_pairs", "num_items"), "*i32")
            | {"num_pairs": "i32", "first_expert": "i32"},
            {"BLOCK_PAIRS": 512, "BM": 8, "BLOCK_ITEMS": 8},
        )
    ]
    found.append(
        Case(
            "experts_up fp4 1152x5120",
            experts.up_kernel,
            _UP,
            {**_FP8, "K": 5120, "F": 576, "NUM_CHOSEN": 6, "FORM": "fp4", "IS_ROUTED": True, "SPLITS": 1,
             "STAGES": 4},
            128 * 128,
            FP4,
            registers=128,
        )
    )  # fmt: skip
    found.append(
        Case(
            "experts_down fp4 5120x576",
            experts.down_kernel,
            _DOWN,
            {**_FP8, "F": 576, "N": 5120, "FORM": "fp4", "IS_ROUTED": True, "TILES": 4, "STAGES": 4},
            128 * 128,
            FP4,
            registers=128,
        )
    )
    fp8 = {"codes": "*fp8e4nv"}
    found.append(
        Case(
            "shared_up fp8 1152x5120",
            experts.up_kernel,
            {**_UP, **fp8},
            {**_FP8, "K": 5120, "F": 576, "NUM_CHOSEN": 1, "FORM": "fp8", "IS_ROUTED": False,
             "SPLITS": 8, "STAGES": 3},
            128 * 128,
            FP8,
        )
    )  # fmt: skip
    found.append(
        Case(
            "shared_down fp8 5120x576",
            experts.down_kernel,
            {**_DOWN, **fp8},
            {**_FP8, "F": 576, "N": 5120, "FORM": "fp8", "IS_ROUTED": False, "TILES": 1, "STAGES": 3},
            128 * 128,
            FP8,
        )
    )
    # Pocket's, whose products are exact: nobody waits for their instructions.
    for rows, groups in ((8, 2), (16, 1)):
        own = {**_EXACT, "BM": rows, "GROUPS": groups, "FORM": "fp4", "IS_ROUTED": True, "STAGES": 4}
        sizes = {"K": 256, "F": 128, "NUM_CHOSEN": 2, "SPLITS": 1}
        found.append(
            Case(f"experts_up exact, {rows} rows", experts.up_kernel, _UP, own | sizes, registers=128)
        )
        sizes = {"F": 128, "N": 256, "TILES": 2}
        found.append(
            Case(f"experts_down exact, {rows} rows", experts.down_kernel, _DOWN, own | sizes, registers=128)
        )
    return (
        found
        + linear_cases()
        + stream_cases()
        + attention_cases()
        + cache_cases()
        + chunk_cases()
        + draft_cases()
    )


_LINEAR = {
    **_TILES, "codes": "*fp8e4nv", "out": "*bf16", "out_scales": "*u8", "cos": "*fp32", "sin": "*fp32",
    "partials": "*fp32", "counters": "*i32", "num_rows": "i32",
}  # fmt: skip


def linear_cases() -> list[Case]:
    """The projections."""
    found = []
    for name, rows, columns, splits, head, output in (
        ("wq_a + wkv", 1792, 5120, 8, 0, "bf16"),
        ("wq_b", 8192, 1280, 4, 512, "bf16"),
        ("wo_b", 5120, 2048, 4, 0, "parts"),
        ("index wq_b", 4096, 1280, 4, 128, "bf16"),
        ("engram wkv", 25600, 6144, 1, 0, "bf16"),
    ):
        constants = {
            "K": columns,
            "N": rows,
            "OUTPUT": output,
            "HEAD": head,
            "ROPE": 64 if head else 0,
            "SPLITS": splits,
            "STAGES": 3,
        }
        found.append(
            Case(
                f"{name} fp8 {rows}x{columns}",
                linear.fp8_kernel,
                _LINEAR,
                {**_FP8, **constants},
                128 * 128,
                FP8,
            )
        )
    wide = {**_LINEAR, "x": "*bf16", "codes": "*i16", "out": "*fp8e4nv"}
    constants = {
        "K": 4096,
        "N": 1024,
        "GROUPS": 2,
        "DOT_GROUPS": 2,
        "OUTPUT": "fp8",
        "SPLITS": 16,
        "STAGES": 3,
    }
    found.append(
        Case("wo_a fp8 x bf16 2x1024x4096", linear.wide_kernel, wide, {**_FLAGS, **constants}, 128 * 128, FP8)
    )
    constants = {
        "BM": 32,
        "GROUPS": 1,
        "K": 5120,
        "N": 1792,
        "OUTPUT": "bf16",
        "HEAD": 0,
        "ROPE": 0,
        "SPLITS": 8,
        "STAGES": 3,
    }
    name = "wq_a + wkv fp8, 32 rows"
    found.append(Case(name, linear.fp8_kernel, _LINEAR, {**_FP8, **constants}, 128 * 128, FP8))
    constants |= {"K": 256, "N": 192, "SPLITS": 1}
    found.append(Case("wq_a + wkv exact, 32 rows", linear.fp8_kernel, _LINEAR, {**_EXACT, **constants}))
    plain = {
        "x": "*bf16",
        "weight": "*bf16",
        "out": "*fp32",
        "partials": "*fp32",
        "counters": "*i32",
        "num_rows": "i32",
    }
    for name, rows, splits in (("router", 384, 32), ("compressor", 1024, 16)):
        constants = {"K": 5120, "N": rows, "SPLITS": splits, "STAGES": 4}
        found.append(
            Case(
                f"{name} bf16 {rows}x5120",
                linear.bf16_kernel,
                plain,
                {"BM": 8, "BIT_OPS": False, **constants},
                64 * 64,
                BF16,
            )
        )
    return found


def stream_cases() -> list[Case]:
    """The kernels between sub-layers."""
    mix = dict.fromkeys(("output", "shared", "stream", "weight", "collapsed", "taps"), "*bf16")
    mix |= dict.fromkeys(("post", "comb", "pre", "collapsed_squares", "stream_squares", "mixes"), "*fp32")
    mix |= {"tap_stride": "i32", "num_rows": "i32"}
    flags = {"BM": 16, "BIT_OPS": False, "M": 5120, "EXPAND": True, "MIX": True, "HAS_TAP": False}
    finish = dict.fromkeys(
        ("collapsed_squares", "stream_squares", "mixes", "norm", "scale", "base", "pre", "post", "comb"),
        "*fp32",
    )
    finish |= {
        "collapsed": "*bf16",
        "x": "*bf16",
        "codes": "*fp8e4nv",
        "code_scales": "*u8",
        "num_rows": "i32",
    }
    finish_flags = {
        "M": 5120, "SLICES": 80, "BLOCK_SLICES": 128, "COLUMNS": 256, "ITERATIONS": 20, "NORM_EPS": 1e-20, "EPS": 1e-6,
        "BIT_OPS": False,
    }  # fmt: skip
    choose = {
        "logits": "*fp32",
        "bias": "*fp32",
        "chosen": "*i32",
        "weights": "*fp32",
        **dict.fromkeys(("items", "item_pairs", "num_items", "counter"), "*i32"),
        "first_expert": "i32",
        "scaling": "fp32",
    }
    return [
        Case(
            "mix after attention",
            hyper.mix_kernel,
            {**mix, "output": "*fp32"},
            {**flags, "PARTS": 1, "SUMS": 4, "HAS_SHARED": False},
        ),
        Case(
            "mix after experts", hyper.mix_kernel, mix, {**flags, "PARTS": 6, "SUMS": 1, "HAS_SHARED": True}
        ),
        Case("finish", hyper.finish_kernel, finish, finish_flags, warps=1),
        Case(
            "choose",
            routing.choose_kernel,
            choose,
            {
                "E": 384,
                "BLOCK": 512,
                "NUM_CHOSEN": 6,
                "LISTS": True,
                "NUM_HELD": 384,
                "BLOCK_PAIRS": 32,
                "BM": 8,
                "image_bias": None,
                "text": None,
                "HAS_IMAGES": False,
            },
        ),
    ]


def attention_cases() -> list[Case]:
    """The attention kernels; 128 window places and 512 picks."""
    where = dict.fromkeys(("slots", "positions", "table"), "*i32")
    where |= dict.fromkeys(("table_width", "block_size"), "i32")
    parts = dict.fromkeys(("sums", "maxima", "denominators", "sink", "cos", "sin"), "*fp32")
    latent = {
        **where,
        **parts,
        "qkv": "*fp32",
        "q_norm": "*fp32",
        "kv_norm": "*fp32",
        "codes": "*fp8e4nv",
        "code_scales": "*u8",
        "pages": "*u8",
    }
    latent_flags = {
        "Q": 1280,
        "BLOCK_Q": 2048,
        "D": 512,
        "ROPE": 64,
        "BYTES": 528,
        "EPS": 1e-20,
        "BIT_OPS": False,
    }
    attend = {
        **where, **parts, "query": "*i32", "window_pages": "*u8", "entry_pages": "*u8", "scale": "fp32", "out": "*bf16",
        **dict.fromkeys(("window_records", "entry_records", "counters", "records"), "*i32"),
    }  # fmt: skip
    sizes = {"HEADS": 16, "D": 512, "ROPE": 64, "BIT_OPS": False}
    core = {**sizes, "WINDOW": 128, "NUM_PICKS": 512, "WINDOW_BYTES": 528, "ENTRY_BYTES": 288}
    merge_flags = {**sizes, "SPLITS": 20, "BLOCK_SPLITS": 32}
    window_flags = {"WINDOW": 128, "BLOCK": 128, "BLOCK_SIZE": 64}
    attends = []
    for splits, merges, keys in ((20, False, 32), (10, False, 64), (2, True, 64), (1, False, 64)):
        chosen = {
            "SPLITS": splits,
            "BLOCK_SPLITS": triton.next_power_of_2(splits),
            "MERGES": merges,
            "KEYS": keys,
        }
        name = f"attend {keys} keys, {splits} splits" + (" merged" if merges else "")
        attends.append(Case(name, attention.attend_kernel, attend, {**core, **chosen}, warps=8))
    return [
        Case("latent", attention.latent_kernel, latent, latent_flags),
        Case("window places", attention.window_kernel, attend, window_flags),
        *attends,
        Case("merge", attention.merge_kernel, {**parts, "out": "*bf16"}, merge_flags),
    ]


def cache_cases() -> list[Case]:
    """Compressor, indexer and Engram gate."""
    types = dict.fromkeys(("slots", "positions", "table", "picks", "records", "query", "alive"), "*i32") | {
        "pages": "*u8"
    }
    types |= dict.fromkeys(
        (
            "table_width",
            "stride",
            "weight_stride",
            "per_block",
            "max_entries",
            "max_blocks",
            "num_picks",
        ),
        "i32",
    )
    types |= dict.fromkeys(("projected", "open_rows", "norm", "cos", "sin", "weights", "weight"), "*fp32")
    types |= {
        "allowed": "*u8",
        "histogram": "*i32",
        "counts": "*i32",
        "records": "*i32",
        "best": "*bf16",
        "latents": "*bf16",
        "scores": "*bf16",
        "weight_scale": "fp32",
        "stream": "*bf16",
    }
    common = {"RATIO": 2, "ROPE": 64, "EPS": 1e-20, "BIT_OPS": False}
    entry = {"D": 512, "BYTES": 288}
    scoring = {
        "HEADS": 32,
        "BLOCK_HEADS": 32,
        "D": 128,
        "BYTES": 68,
        "PER_BLOCK": 64,
        "RATIO": 1,
        "UNIT": 8,
        "TOP_BLOCKS": 2048,
        "RESTRICTS": True,
        "KEYS": 64,
        "BIT_OPS": False,
    }
    many = {"RATIO": 2, "NUM_PICKS": 512, "UNIT": 1, "CHUNK": topk.CHUNK}
    return [
        Case("pool", compress.pool_kernel, types, {**common, **entry, "NUM_OPEN": 7, "KEEPS": True}),
        Case("key", compress.key_kernel, types, {**common, "D": 128, "BYTES": 68}, warps=1),
        Case("score", indexer.score_kernel, types, scoring),
        Case("blocks", indexer.block_kernel, types, {"RATIO": 1, "UNIT": 8, "TOP_BLOCKS": 2048}),
        Case("allow", indexer.allow_kernel, types, {"RATIO": 1, "UNIT": 8, "TOP_BLOCKS": 2048}),
        *(
            Case(kernel.__name__.removesuffix("_kernel"), kernel, types, many, warps=8)
            for kernel in (topk.upper_kernel, topk.lower_kernel, topk.count_kernel)
        ),
        Case(
            "take",
            topk.take_kernel,
            types,
            {**many, "PER_BLOCK": 32, "LOCATES": True, "BLOCK_CHUNKS": 16},
            warps=8,
        ),
        Case(
            "select",
            topk.select_kernel,
            types,
            {"RATIO": 2, "NUM_PICKS": 512, "UNIT": 1, "PER_BLOCK": 32, "LOCATES": True, "BLOCK": 2048},
            warps=8,
        ),
        Case(
            "engram gate",
            engram.gate_kernel,
            {**types, "projected": "*bf16"},
            {"M": 5120, "BLOCK": 1024, "EPS": 1e-20, "BIT_OPS": False},
        ),
    ]


def chunk_cases() -> list[Case]:
    """What stands around the products of many rows."""
    types = {"x": "*bf16", "out": "*bf16", "codes": "*fp8e4nv", "num_rows": "i32", "limit": "fp32"}
    types |= {"num_units": "i32", "first_tile": "i32", "num_heads": "i32", "cos": "*fp32", "sin": "*fp32"}
    words = {**types, "scales": "*i32"}
    plain = {**types, "weight": "*bf16", "out": "*fp32"}
    sizes = {"K": 5120, "N": 384, "BM": 128, "STAGES": 4, "BIT_OPS": False}
    turned = {"HEADS": 16, "D": 512, "ROPE": 64, "N": 32, "BIT_OPS": False}
    gated = {"F": 576, "BM": 32, "BIT_OPS": False}
    return [
        Case("rows", prefill_linear.rows_kernel, {**types, "scales": "*u8"}, {"K": 5120, "UNITS": 32}),
        Case("weights", prefill_linear.weights_kernel, words, {"K": 5120, "IS_PAIRED": False}, warps=8),
        Case(
            "paired weights",
            prefill_linear.weights_kernel,
            {**words, "codes": "*i16"},
            {"K": 4096, "IS_PAIRED": True},
            warps=8,
        ),
        Case("turn", prefill_linear.turn_kernel, types, turned),
        Case("swiglu", prefill_linear.swiglu_kernel, types, gated),
        Case("router of a chunk", prefill_linear.plain_kernel, plain, {**sizes, "BN": 128}, warps=8),
    ]


def draft_cases() -> list[Case]:
    """What draft stages have of their own; the chain over the tokens of one rank of four, and over all."""
    types = dict.fromkeys(("anchors", "table", "positions", "records", "best", "slots"), "*i32")
    types |= dict.fromkeys(("embedding", "weight", "x", "latents"), "*bf16")
    types |= dict.fromkeys(("norm", "cos", "sin", "maxima", "logits", "out"), "*fp32")
    types |= {"tokens": "*i64", "ids": "*i64", "draws": "*fp64", "sums": "*fp64", "codes": "*fp8e4nv"}
    types |= {"scales": "*u8", "pages": "*u8"}
    numbers = (
        "table_width", "first_own", "noise_id", "first_token", "num_held", "place", "num_requests", "block_size",
        "stride",
    )  # fmt: skip
    types |= dict.fromkeys(numbers, "i32")
    rounds = {"EPS": 1e-20, "BIT_OPS": False}
    bias = {"R": 256, "BLOCK_R": 256}
    found = [
        Case(
            "draft anchor",
            draft.anchor_kernel,
            types,
            {"LENGTH": 5, "WINDOW": 128, "BLOCK": 256, "BLOCK_SIZE": 16},
        ),
        Case("draft taps", draft.quantize_kernel, types, {"K": 15360, "COLUMNS": 1024, "BIT_OPS": False}),
        Case("draft norm", draft.norm_kernel, types, {**rounds, "K": 5120, "BLOCK": 8192}, warps=8),
        Case("draft context", draft.context_kernel, types, {**rounds, "D": 512, "ROPE": 64, "BYTES": 528}),
        Case("confidence", draft.confidence_kernel, types, {**bias, "M": 5120, "BLOCK_M": 8192, "LENGTH": 5}),
    ]
    for tokens in (32320, 129280):
        tiles, chunks = -(-tokens // 64), -(-tokens // 1024)
        sizes = {"V": tokens, "STRIDE": tokens, "LENGTH": 5}
        parts = {**sizes, "TILES": tiles, "BLOCK_TILES": triton.next_power_of_2(tiles), "CHUNK": 1024}
        ends = {**parts, "CHUNKS": chunks, "BLOCK_CHUNKS": triton.next_power_of_2(chunks)}
        head = {**sizes, **bias, "TILE": 64, "BM": 16, "BIT_OPS": False}
        found += [
            Case(f"markov {tokens}", draft.markov_kernel, types, head),
            Case(f"weigh {tokens}", draft.weigh_kernel, types, parts),
            Case(f"draw {tokens}", draft.draw_kernel, types, {**ends, "IS_SAMPLED": False}),
            Case(f"draw {tokens} sampled", draft.draw_kernel, types, {**ends, "IS_SAMPLED": True}),
        ]
    return found


def compile_case(case: Case) -> object:
    """Compile for sm_90, pointers aligned to 16 bytes."""
    names = case.kernel.arg_names
    types = {name: case.types.get(name, "constexpr") for name in names}
    missing = [n for n in names if types[n] == "constexpr" and n not in case.constants]
    if missing:
        raise SystemExit(f"{case.name}: no type or value for {missing}")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n].startswith("*")}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(case.kernel, types, constexprs=constants, attrs=aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": case.warps, "maxnreg": case.registers}
    )


def tool(name: str, *arguments: str) -> str:
    """What one of Triton's own binaries prints."""
    done = subprocess.run((str(BIN / name), *arguments), capture_output=True, text=True, check=True)
    return done.stdout


def longest_loop(text: str) -> list[str]:
    """Instructions of the longest loop that holds no other, of a disassembly; [] when there is none."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in text.splitlines():
        label = re.match(r"^(\.L\w+):", line.strip())
        if label:
            labels[label[1]] = len(instructions)
        found = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
        if found:
            instructions.append(found[1].strip())
    loops = []
    for end, instruction in enumerate(instructions):
        target = re.search(r"BRA.*`\((\.L\w+)\)", instruction)
        if target and labels.get(target[1], end + 1) < end:
            loops.append((labels[target[1]], end + 1))
    inner = [a for a in loops if not any(b != a and b[0] >= a[0] and b[1] <= a[1] for b in loops)]
    if not inner:
        return []
    begin, end = max(inner, key=lambda loop: loop[1] - loop[0])
    return instructions[begin:end]


def opcode(instruction: str) -> str:
    """The operation without its predicate and modifiers."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0]


def report(case: Case) -> bool:
    """Print one case; False when it spills or exceeds its budget."""
    compiled = compile_case(case)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "-res-usage", file.name)
        listing = tool("nvdisasm", "-c", file.name)
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    stack = int(re.search(r"STACK:(\d+)", usage)[1])
    everything = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", listing)
    loop = longest_loop(listing)
    spills, spills_in_loop = (
        sum(opcode(one) in {"LDL", "STL"} for one in part) for part in (everything, loop)
    )
    line = (
        f"{case.name:44} regs {registers:3} stack {stack} spills {spills} shared {compiled.metadata.shared:6}"
    )
    # A few outside of the loop buy another program a processor; sine and cosine keep a great argument in an array.
    good = "rope" in case.name or (not spills_in_loop and spills <= 8)
    if case.weights_per_turn:
        counts = Counter(map(opcode, loop))
        per_thread = case.weights_per_turn / (32 * case.warps)
        all_, integer = sum(counts.values()), sum(n for name, n in counts.items() if name in INTEGER)
        line += f"  loop {all_:4}  per weight {all_ / per_thread:.2f} integer {integer / per_thread:.2f}"
        top = ", ".join(f"{name} {n}" for name, n in counts.most_common(12))
        line += f"  [{top}]"
        good = good and all_ / per_thread <= case.budget[0] and integer / per_thread <= case.budget[1]
    print(("   " if good else "!! ") + line, flush=True)
    return good


def step_cases(num_rows: int) -> list[Case]:
    """What a step of all forty layers launches, each kind once, recorded by running it on tensors without memory."""
    launches: list[tuple[object, tuple[object, ...], dict[str, object]]] = []

    def record(kernel: object, grid: object) -> object:
        return lambda *arguments, **options: launches.append((kernel, arguments, options))

    config, device = ModelConfig.from_dict(published_config_dict()), torch.device("meta")
    synthetic.random_bytes = lambda shape, seed, device: torch.empty(shape, dtype=torch.uint8, device=device)
    shape = synthetic.RankShape(config, 4)
    layers = [synthetic.make_layer(shape, plan, 0, device) for plan in config.layers]
    pages = make_pages(config, num_slots=num_rows, max_model_len=1164, block_size=64, device=device)
    embedding = torch.empty(shape.vocabulary, config.hidden_size, dtype=torch.bfloat16, device=device)
    step = DecodeStep(
        shape, layers, embedding, linear.pack_bf16(embedding), embedding[0].float(), pages, num_rows=num_rows,
        device=device, bit_ops=False,
    )  # fmt: skip
    JITFunction.__getitem__ = record
    step.run()
    print(f"{len(launches)} launches of kernels")
    found: dict[str, Case] = {}
    for kernel, arguments, options in launches:
        names = kernel.arg_names
        bound = dict(zip(names, arguments, strict=False)) | {n: v for n, v in options.items() if n in names}
        constants = {p.name: bound[p.name] for p in kernel.params if p.is_constexpr}
        types = {name: _type_of(value) for name, value in bound.items() if name not in constants}
        shown = " ".join(str(v) for n, v in constants.items() if n not in ("BIT_OPS", "EPS", "NORM_EPS"))
        name = f"{kernel.__name__} {shown}"
        found.setdefault(
            name,
            Case(
                name,
                kernel,
                types,
                constants,
                warps=options.get("num_warps", 4),
                registers=options.get("maxnreg"),
            ),
        )
    return list(found.values())


_DTYPES = {
    torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.bfloat16: "bf16", torch.float32: "fp32",
}  # fmt: skip


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_DTYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def main() -> int:
    """Report the cases whose names contain one of the arguments, or all."""
    wanted = sys.argv[1:]
    if wanted[:1] == ["step"]:
        return 0 if all([*map(report, step_cases(int(wanted[1])))]) else 1
    chosen = [case for case in cases() if not wanted or any(name in case.name for name in wanted)]
    reports = list(map(report, chosen))  # every case is reported, also after a bad one
    return 0 if all(reports) else 1


if __name__ == "__main__":
    sys.exit(main())
