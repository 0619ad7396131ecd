"""Times of the GPU step at the size that one rank of four has: whole decode steps, and kernel by kernel.

    python -m deskfleet.engine.cuda.bench decode  --rows 1,4,16,32,64
    python -m deskfleet.engine.cuda.bench decode  --rows 1 --drafts 1,4
    python -m deskfleet.engine.cuda.bench kernels --rows 1,4,6,16,32,64
    python -m deskfleet.engine.cuda.bench prefill --chunk 2048,4096,16384 --context 0

Owns how things are timed: weights of random bytes made on the device, a captured graph, an event on each side of every
replay, the median and the spread of at least fifty. What is timed is checked in the same run: stages against the
reference on the CPU, the graph's logits against the same launches without a graph, bit by bit. Sums over ranks are left
out. Prints a table, then a JSON document; deskfleet.bench.gpu adds where the numbers come from and writes a file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskfleet.engine.cuda import (
    attention,
    experts,
    hyper,
    linear,
    prefill_experts,
    prefill_linear,
    routing,
    synthetic,
    topk,
)
from deskfleet.engine.cuda.attention import AttendTuning
from deskfleet.engine.cuda.checks import DraftCheck, StepCheck, context_errors
from deskfleet.engine.cuda.collectives import DeviceGroup, NcclGroup, SymmetricGroup, join
from deskfleet.engine.cuda.draft import DraftContext, DraftStep
from deskfleet.engine.cuda.native import streams as many
from deskfleet.engine.cuda.packing import Fp8Tiles, pack_mixes
from deskfleet.engine.cuda.prefill import PrefillStep
from deskfleet.engine.cuda.prefill_attention import RowBuffers, RowsTuning, attend_rows
from deskfleet.engine.cuda.prefill_checks import RowsOf
from deskfleet.engine.cuda.prefill_replay import PrefillEncoderStep, ReplayStep
from deskfleet.engine.cuda.step import DecodeStep, Pages, make_pages
from deskfleet.engine.cuda.synthetic import DraftWeights, LayerWeights, RankShape, make_drafts, make_layer
from deskfleet.errors import EngineError
from deskfleet.model.config import ModelConfig
from deskfleet.model.device import FILLED_ROWS, REPLAYED_ROWS
from deskfleet.model.published import published_config_dict

NAME = "rank0of4-decode"
VERIFY_NAME = "rank0of4-verify"
PREFILL_NAME = "rank0of4-prefill"
WARM_UP = 8
COLLECTIVES = {
    "none": "left out",
    "nccl1": "made, with NCCL in a group of one rank",
    "symmetric1": "made, in memory that a group of one rank maps from itself",
}
_ROTATED_BYTES = 320 << 20  # more than five times what the L2 holds
# A stage is wrong beyond these: FP8 codes chosen by a last place of bf16, and weights of attention, are coarse.
_LOOSE, _TIGHT = 0.03, 3e-3
_LOOSE_STAGES = ("core", "grouped", "entry", "key", "scores", "routed", "shared")
CATEGORIES = {
    "up_kernel": "experts and shared expert, w1 and w3",
    "down_kernel": "experts and shared expert, w2",
    "list_items_kernel": "routing",
    "choose_kernel": "routing",
    "fp8_kernel": "projections",
    "wide_kernel": "projections",
    "bf16_kernel": "router, compressor, head",
    "mix_kernel": "hyper-connections",
    "finish_kernel": "hyper-connections",
    "latent_kernel": "attention",
    "attend_kernel": "attention",
    "merge_kernel": "attention",
    "pool_kernel": "compressor",
    "key_kernel": "compressor",
    "score_kernel": "indexer",
    "score_rows_kernel": "indexer",
    "select_kernel": "indexer",
    "upper_kernel": "indexer",
    "lower_kernel": "indexer",
    "count_kernel": "indexer",
    "take_kernel": "indexer",
    "gate_kernel": "engram",
    **dict.fromkeys(("grouped_up_kernel", "grouped_down_kernel"), "experts of chunks"),
    **dict.fromkeys(("sort_kernel",), "routing"),
    **dict.fromkeys(("rows_kernel", "weights_kernel"), "FP8 as bf16"),
    "swiglu_kernel": "experts and shared expert, w1 and w3",
    **dict.fromkeys(
        ("unpack_windows_kernel", "unpack_entries_kernel", "keys_kernel", "attend_rows_kernel"), "attention"
    ),
    **dict.fromkeys(("turn_kernel", "codes_kernel"), "attention"),
    "plain_kernel": "router, compressor, head",
    **dict.fromkeys(
        ("anchor_kernel", "quantize_kernel", "norm_kernel", "context_kernel"), "context of drafts"
    ),
    **dict.fromkeys(("markov_kernel", "weigh_kernel", "draw_kernel", "confidence_kernel"), "chain of drafts"),
    # of native/
    "up": "experts and shared expert, w1 and w3",
    "down": "experts and shared expert, w2",
    "linear": "projections, router, head",
    **dict.fromkeys(("start_kernel", "mix", "finish", "mix_rows", "finish_rows"), "hyper-connections"),
    **dict.fromkeys(("latents", "attend", "merge"), "attention"),
    "choose": "routing",
    **dict.fromkeys(("pool", "keys"), "compressor"),
    **dict.fromkeys(("score", "pick", "pick_rows"), "indexer"),
    "gate": "engram",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of single replays."""

    values_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.values_ms)

    def sample(self) -> dict[str, Any]:
        """Median, tenth and ninetieth percentile, extremes, how many, and each."""
        ordered = sorted(self.values_ms)
        return {
            "median_ms": self.median_ms,
            "p10_ms": ordered[len(ordered) // 10],
            "p90_ms": ordered[len(ordered) * 9 // 10],
            "least_ms": ordered[0],
            "greatest_ms": ordered[-1],
            "num_steps": len(ordered),
            "values_ms": self.values_ms,
        }


def capture(run: Callable[[], object], mode: str = "global") -> torch.cuda.CUDAGraph:
    """A graph of what `run` launches; every kernel must have run before. `mode` "thread_local": NCCL's threads may ask
    the device meanwhile."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        run()
    return graph


def replays(graph: torch.cuda.CUDAGraph, num_steps: int) -> Timing:
    """Time `num_steps` replays one by one, after WARM_UP more."""
    for _ in range(WARM_UP):
        graph.replay()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_steps)
    ]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return Timing(tuple(begin.elapsed_time(end) for begin, end in events))


def fill_pages(config: ModelConfig, pages: Pages, device: torch.device | str) -> None:
    """Random records that are numbers: codes as earlier rows would have left them."""
    for number, page in enumerate(pages.windows):
        _fill(page, config.head_dim, (118, 122), 1000 + number, device, fp8=True)
    for source, page in pages.entries.items():
        _fill(page, config.head_dim // 2, (0x28, 0x40), 2000 + source, device, fp8=False)
    for source, page in pages.index_keys.items():
        _fill(page, config.index_head_dim // 2, (118, 124), 3000 + source, device, fp8=False)
    for source, state in pages.open_rows.items():
        state.copy_(synthetic.normal(tuple(state.shape), 1.0, 4000 + source, device))


def _fill(
    page: Tensor,
    code_bytes: int,
    scales: tuple[int, int],
    seed: int,
    device: torch.device | str,
    *,
    fp8: bool,
) -> None:
    codes = synthetic.random_bytes((len(page), code_bytes), seed, device)
    if fp8:
        codes -= ((codes & 0x7F) == 0x7F).to(torch.uint8)
    page[:, :code_bytes] = codes
    shape = (len(page), page.shape[1] - code_bytes)
    page[:, code_bytes:] = synthetic.random_scales(shape, scales, seed + 1, device)


@dataclass(slots=True)
class Rank:
    """Weights and pages of one rank."""

    shape: RankShape
    layers: list[LayerWeights]
    embedding: Tensor
    head: Tensor
    norm: Tensor
    pages: Pages
    drafts: DraftWeights | None = None

    def step(
        self, num_rows: int, context: int, device: torch.device, *, bit_ops: bool, group: DeviceGroup | None = None
    ) -> DecodeStep:  # fmt: skip
        """A step of `num_rows` requests that have `context` positions each, every one with its own Engram rows."""
        step = DecodeStep(
            self.shape, self.layers, self.embedding, self.head, self.norm, self.pages,
            num_rows=num_rows, device=device, bit_ops=bit_ops, group=group,
        )  # fmt: skip
        ids = synthetic.random_words(num_rows, 0, num_rows, device) & 0x7FFFFFFF
        step.ids.copy_(ids % len(self.embedding))
        # Odd, so that ratio-2 groups end with this step: the heavier of the two cases.
        step.positions.fill_(context | 1)
        step.slots.copy_(torch.arange(num_rows))
        for layer, (codes, scales) in step.host_rows.items():
            random = synthetic.random_bytes(tuple(codes.shape), layer, "cpu")
            codes.copy_(random - ((random & 0x7F) == 0x7F).to(torch.uint8))
            scales.copy_(synthetic.random_scales(tuple(scales.shape), (114, 118), layer + 1, "cpu"))
            scales[:, self.shape.config.engram_width // 32 :] = 0
        return step

    def verify(
        self, num_requests: int, context: int, device: torch.device, *, bit_ops: bool
    ) -> tuple[DecodeStep, DraftContext, DraftStep]:
        """A step that verifies a whole block of each of `num_requests`, what it leaves to the drafts, and the block
        that they make next, as if all of the last had been accepted."""
        assert self.drafts is not None
        c = self.shape.config
        rows = num_requests * (1 + c.dspark_block_size)
        step = self.step(rows, context, device, bit_ops=bit_ops)
        place = torch.arange(rows, dtype=torch.int32, device=device)
        step.slots.copy_(place // (1 + c.dspark_block_size))
        step.positions.add_(place % (1 + c.dspark_block_size))
        most_drafted = len(self.pages.window_table)
        block = DraftStep(
            replace(self.shape, of_drafts=True), self.drafts, self.embedding, self.head, self.pages,
            num_requests=num_requests, first_own=len(self.pages.windows[0]) - most_drafted * c.dspark_block_size,
            device=device, bit_ops=bit_ops,
        )  # fmt: skip
        last = place.view(num_requests, -1)[:, -1]
        block.tokens[:, 0] = synthetic.random_words(rows, 0, num_requests, device) % len(self.embedding)
        block.anchors[:, 0] = step.slots[last]
        block.anchors[:, 1] = step.positions[last] + 1
        return step, DraftContext(self.drafts, step), block


def group_of_one(collectives: str, most_rows: int, width: int, device: torch.device) -> DeviceGroup | None:
    """What a step exchanges through, by the names of COLLECTIVES. It shows what the launches cost, and no link."""
    if collectives == "none":
        return None
    world = join(0, 1, None)
    group: DeviceGroup
    if collectives == "nccl1":
        group = NcclGroup(world, device, "of one rank")
    else:
        group = SymmetricGroup(world, device)
    group.reserve(most_rows * width)
    return group


def make_rank(
    config: ModelConfig,
    tp_size: int,
    num_layers: int,
    *,
    num_slots: int,
    max_model_len: int,
    device: torch.device,
    num_drafted: int = 0,
    exact: bool = False,
) -> Rank:
    """Random weights of rank 0 of `tp_size`, and full pages; of the draft stages too, where any are drafted for.
    `exact`: how products are summed (packing.Fp4Tiles)."""
    shape = RankShape(config, tp_size, exact=exact)
    layers = [make_layer(shape, plan, 0, device) for plan in config.layers[:num_layers]]
    embedding = synthetic.normal((shape.vocabulary, config.hidden_size), 1.0, 11, device).to(torch.bfloat16)
    head = synthetic.normal((shape.vocabulary, config.hidden_size), 0.02, 12, device).to(torch.bfloat16)
    pages = make_pages(
        config, num_slots=num_slots, max_model_len=max_model_len, block_size=64, device=device,
        num_drafted=num_slots if num_drafted else 0,
    )  # fmt: skip
    fill_pages(config, pages, device)
    norm = torch.ones(config.hidden_size, device=device)
    drafts = make_drafts(replace(shape, of_drafts=True), 0, device) if num_drafted else None
    return Rank(shape, layers, embedding, linear.pack_bf16(head), norm, pages, drafts)


def check_stages(step: DecodeStep, only: Sequence[int]) -> dict[str, float]:
    """Run the step once under the checks. Raises EngineError when a stage is wrong."""
    check = StepCheck(step, frozenset(only))
    step.run(check)
    return _right(check.errors)


def check_drafts(context: DraftContext, block: DraftStep) -> dict[str, float]:
    """The same of what follows a step that has run, and of the block of drafts after it."""
    context.run()
    check = DraftCheck(block)
    block.run(check)
    return _right(context_errors(context) | check.errors)


def _right(errors: dict[str, float]) -> dict[str, float]:
    wrong = {
        name: error
        for name, error in errors.items()
        if (
            error > 0
            if name.endswith("wrong")
            else error > (_LOOSE if name.endswith(_LOOSE_STAGES) else _TIGHT)
        )
    }
    if wrong:
        raise EngineError(f"stages differ from the reference: {wrong}", hint="run tests/gpu on this machine")
    return errors


def decode(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """A sample for each batch size: times, errors, kernel times by category."""
    config = ModelConfig.from_dict(published_config_dict())
    begin = time.monotonic()
    rank = make_rank(
        config,
        4,
        options.layers,
        num_slots=max(*options.rows, *options.drafts, 1),
        max_model_len=options.context + 64,
        device=device,
        num_drafted=max(options.drafts, default=0),
        exact=options.exact,
    )
    torch.cuda.synchronize()
    print(
        f"weights and pages: {torch.cuda.memory_allocated() / 2**30:.1f} GiB in {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    most_rows = max(options.rows, default=0)
    group = group_of_one(options.collectives, most_rows, config.hidden_size, device)
    for num_rows in options.rows:
        step = rank.step(num_rows, options.context, device, bit_ops=False, group=group)
        begin = time.monotonic()
        step.run()  # compiles
        torch.cuda.synchronize()
        compiled_s = time.monotonic() - begin
        only = options.check_layers if num_rows in options.check_rows else ()
        errors = check_stages(step, only)
        # Stage by stage: what a kernel reads before its predecessor has ended would show in the graph's bits.
        step.run(lambda stage: torch.cuda.synchronize())
        eager = step.vocabulary_logits.clone()
        graph = capture(step.run, "global" if group is None else "thread_local")
        sample = _sample(graph, [(step.vocabulary_logits, eager)], NAME, {"rows": num_rows}, options)
        sample |= {
            "first_run_s": compiled_s,
            "items_last_layer": int(step.experts.num_items),
            "worst_errors": dict(sorted(errors.items(), key=lambda item: -item[1])[:8]),
        }
        if options.trace is not None and num_rows == options.rows[0]:
            _trace(graph, options.trace)
        yield sample
        del graph, step
    for num_requests in options.drafts:
        yield _verify(rank, num_requests, options, device)


def prefill(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """A sample for each size of chunk, of one request, after `context` positions, decoder replayed or in full."""
    config = ModelConfig.from_dict(published_config_dict())
    most = options.context + max(options.chunk)
    rank = make_rank(config, 4, options.layers, num_slots=1, max_model_len=most, device=device)
    rank.pages = _pages_of_chunks(config, most, device)
    for num_rows in options.chunk:
        yield _chunk(rank, num_rows, options, device)
        torch.cuda.empty_cache()


def _pages_of_chunks(config: ModelConfig, max_model_len: int, device: torch.device) -> Pages:
    """Pages of one request with a place for every window row, and of nobody."""
    pages = make_pages(config, num_slots=1, max_model_len=max_model_len, block_size=64, device=device)
    blocks = pages.entry_table.shape[1]
    width = pages.windows[0].shape[1]
    pages.windows = [
        torch.zeros((blocks + 1) * 64, width, dtype=torch.uint8, device=device) for _ in pages.windows
    ]
    nobody = torch.zeros(1, blocks, dtype=torch.int32, device=device)
    pages.entry_table = torch.cat((pages.entry_table, nobody))
    pages.window_table = torch.cat((pages.entry_table[:1].flip(1), nobody))
    pages.open_rows = {source: torch.cat((rows, rows)) for source, rows in pages.open_rows.items()}
    fill_pages(config, pages, device)
    return pages


def _chunk(rank: Rank, num_rows: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    parts = (rank.shape, rank.layers, rank.embedding, rank.head, rank.norm, rank.pages)
    make = PrefillStep if options.in_full else PrefillEncoderStep
    step = make(*parts, num_rows=num_rows, device=device, bit_ops=False, long=True)
    last: DecodeStep = step
    stop, num_open = options.context + num_rows, rank.pages.num_open
    positions = torch.arange(options.context, stop, device=device, dtype=torch.int32)
    step.ids.copy_(synthetic.random_words(num_rows, 0, num_rows, device) % len(rank.embedding))
    step.positions.copy_(positions)
    kept = torch.arange(num_rows, device=device) >= num_rows - num_open
    step.kept_at.copy_(torch.where(kept, 0, num_open) + positions % num_open)
    _lay_out(step, rank.pages, num_rows)
    _random_engram(step, rank.shape.config)
    if not options.in_full:
        size, window = rank.pages.block_size, rank.shape.config.sliding_window
        first = max(((stop - 1) // size * size - window + 1) // size * size, options.context)
        tail = stop - first
        last = replay = ReplayStep(*parts, num_rows=REPLAYED_ROWS, device=device, bit_ops=False)
        replay.source = step.streams
        replay.slots.fill_(1)
        replay.slots[:tail] = 0
        replay.positions[:tail] = torch.arange(first, stop, device=device)
        replay.rows[:tail] = torch.arange(first, stop, device=device) - options.context
        replay.window_from[:tail] = first
        _lay_out(replay, rank.pages, tail)
    last.logit_rows.fill_(stop - 1 - (options.context if options.in_full else first))

    def run() -> None:
        if last is not step:
            step.run_layers()
        last.run()

    begin = time.monotonic()
    run()  # compiles
    torch.cuda.synchronize()
    compiled_s = time.monotonic() - begin
    middle = num_rows // 4 * 2
    rows = torch.tensor([0, 1, middle, middle + 1, num_rows - 2, num_rows - 1])
    errors = _check_rows(step, rows, options.check_layers)
    if last is not step:  # whose first layer has its entries from the other; the last rows see a whole window
        behind = [layer for layer in options.check_layers if layer > last.layers[0].plan.index]
        errors |= _check_rows(replay, torch.tensor([tail - 2, tail - 1]), behind)
    run()
    eager = last.vocabulary_logits.clone()
    graph = capture(run)
    where = {"rows": num_rows, "replayed": 0 if options.in_full else tail}
    sample = _sample(graph, [(last.vocabulary_logits, eager)], PREFILL_NAME, where, options)
    sample |= {
        "tokens_per_s": num_rows / sample["median_ms"] * 1000,
        "encoder_ms": replays(capture(step.run_layers), options.steps).median_ms,
        "items_last_layer": int(step.experts.num_items),
        "first_run_s": compiled_s,
        "worst_errors": dict(sorted(errors.items(), key=lambda item: -item[1])[:8]),
    }
    print(
        f"    {sample['tokens_per_s']:,.0f} tokens a second; encoder {sample['encoder_ms']:.1f} ms; "
        f"worst errors {sample['worst_errors']}",
        flush=True,
    )
    return sample


def _check_rows(step: PrefillStep, rows: Tensor, only: Sequence[int]) -> dict[str, float]:
    """The stages of some rows of a chunk."""
    with RowsOf(step, rows) as some:
        check = StepCheck(some, frozenset(only))  # type: ignore[arg-type]
        step.run_layers(check)
    return _right(check.errors)


def _lay_out(step: PrefillStep, pages: Pages, num_rows: int) -> None:
    """Say that the step's first rows are of the request in slot 0."""
    buffers, blocks = step.attended_rows, pages.entry_table[0]
    buffers.places[:num_rows] = 1
    buffers.lone.fill_(-1)
    buffers.blocks.fill_(-1)
    buffers.blocks[: len(blocks) + 1] = torch.cat((torch.zeros_like(blocks[:1]), blocks))


def _random_engram(step: DecodeStep, config: ModelConfig) -> None:
    for layer, (codes, scales) in step.host_rows.items():
        random = synthetic.random_bytes(tuple(codes.shape), layer, step.device).cpu()
        codes.copy_(random - ((random & 0x7F) == 0x7F).to(torch.uint8))
        scales.copy_(synthetic.random_scales(tuple(scales.shape), (114, 118), layer + 1, "cpu"))
        scales[:, config.engram_width // 32 :] = 0


def _verify(
    rank: Rank, num_requests: int, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """A sample of a step that verifies whole blocks, and of the drafts after it."""
    step, context, block = rank.verify(num_requests, options.context, device, bit_ops=False)

    def run() -> None:
        step.run()
        context.run()
        block.run()

    begin = time.monotonic()
    run()  # compiles
    torch.cuda.synchronize()
    compiled_s = time.monotonic() - begin
    errors = check_stages(step, options.check_layers) | check_drafts(context, block)
    run()
    outputs = step.vocabulary_logits, block.vocabulary_logits, block.tokens, block.confidence
    eager = [output.clone() for output in outputs]
    graph = capture(run)
    where = {"rows": step.num_rows, "requests": num_requests}
    sample = _sample(graph, list(zip(outputs, eager, strict=True)), VERIFY_NAME, where, options)
    parts = {"verify_ms": step.run, "context_ms": context.run, "draft_ms": block.run}
    medians = {name: replays(capture(part), options.steps).median_ms for name, part in parts.items()}
    for name, median_ms in medians.items():
        print(f"    {name:44} {median_ms:.3f} ms alone", flush=True)
    return (
        sample
        | medians
        | {
            "first_run_s": compiled_s,
            "worst_errors": dict(sorted(errors.items(), key=lambda item: -item[1])[:8]),
        }
    )


def _sample(
    graph: torch.cuda.CUDAGraph,
    outputs: Sequence[tuple[Tensor, Tensor]],
    name: str,
    where: dict[str, int],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Times of a graph, of all and by kernel, printed too. `outputs`: each with what it was without the graph."""
    timing = replays(graph, options.steps)
    place = ", ".join(f"{count} {what}" for what, count in where.items())
    if not all(bool(torch.isfinite(output).all()) for output, _ in outputs):
        raise EngineError(f"{name}, {place}: outputs that are not finite", hint="look at the stages' errors")
    if not all(torch.equal(output, eager) for output, eager in outputs):
        raise EngineError(
            f"{name}, {place}: the graph's outputs differ from the same launches without it",
            hint="a race, or a buffer that a step does not leave as it found it",
        )
    categories, by_kernel = _profile(graph)
    kernels = round(sum(launches for _, launches in by_kernel.values()))
    sample = {
        "name": name,
        **where,
        "context": options.context,
        "layers": options.layers,
        **timing.sample(),
        "kernels": kernels,
        "kernel_ms": categories,
        "by_kernel": {
            kernel: {"ms": ms, "launches": launches} for kernel, (ms, launches) in sorted(by_kernel.items())
        },
        "allocated_bytes": torch.cuda.max_memory_allocated(),
    }
    print(
        f"{name} {place}: median {timing.median_ms:.3f} ms"
        f" [{sample['p10_ms']:.3f}-{sample['p90_ms']:.3f}] kernels {kernels}",
        flush=True,
    )
    for category, time_ms in sorted(categories.items(), key=lambda item: -item[1]):
        print(f"    {category:44} {time_ms:.3f} ms", flush=True)
    return sample


def _profile(
    graph: torch.cuda.CUDAGraph, num_steps: int = 4
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Milliseconds of kernel time a step by category; milliseconds and launches a step by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(num_steps):
            graph.replay()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    by_kernel = {}
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            ms = event.self_device_time_total / 1000 / num_steps
            of_vendor = any(part in event.key for part in ("gemm", "nvjet", "cutlass"))
            times[CATEGORIES.get(event.key, "products of the vendor" if of_vendor else "other")] += ms
            by_kernel[event.key] = (ms, event.count / num_steps)
    return dict(times), by_kernel


def _trace(graph: torch.cuda.CUDAGraph, path: Path, num_steps: int = 6) -> None:
    """Write torch's trace of whole steps, each a span of its own, for `deskfleet profile`."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for number in range(num_steps):
            with torch.profiler.record_function(f"step[{number}]"):
                graph.replay()
                torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))


def kernels(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """A sample for each kernel, batch size and tuning: microseconds a launch within a graph, and bytes a second."""
    config = ModelConfig.from_dict(published_config_dict())
    shape = RankShape(config, 4)
    for num_rows in options.rows:
        for name, tuning, run, bytes_ in launches(Point(shape, num_rows, device), options.only):
            run(0)
            rounds = max(-(-_ROTATED_BYTES // bytes_), 8)
            graph = capture(lambda run=run, rounds=rounds: [run(number) for number in range(min(rounds, 64))])
            timing = replays(graph, options.steps)
            us = timing.median_ms * 1000 / min(rounds, 64)
            sample = {
                "name": f"kernel {name}",
                "rows": num_rows,
                "tuning": tuning,
                "median_us": us,
                "bytes": bytes_,
                "tb_s": bytes_ / us / 1e6,
                "num_steps": options.steps,
            }
            print(
                f"{name:24} rows {num_rows:3} {tuning:36} {us:8.2f} us {sample['tb_s']:.2f} TB/s", flush=True
            )
            yield sample
            del graph


# Parts of a row's list, whether the last program merges them, keys a block, warps, registers.
_ATTEND_TUNINGS = (
    (20, False, 32, 8, None),
    (10, False, 64, 8, None),
    (5, False, 64, 8, None),
    (5, True, 64, 8, None),
    (4, False, 64, 8, None),
    (4, False, 32, 8, 128),
    (2, False, 64, 8, None),
    (2, True, 64, 8, None),
    (2, True, 32, 8, 128),
    (1, False, 64, 8, None),
    (1, False, 32, 8, 128),
)
# What is changed of the experts' tuning.
_EXPERT_TUNINGS: tuple[dict[str, int], ...] = (
    {"rows": 16, "groups": 1},
    {"up_stages": 3, "up_registers": 168, "tiles": 2},
    {"up_stages": 6, "tiles": 4},
    {"groups": 4, "up_registers": 168, "tiles": 4, "down_registers": 168},
    {"splits": 2, "tiles": 5, "down_stages": 3},
    {"splits": 4, "tiles": 8},
)
# Of the projections: parts of K over those of `num_splits`, scale groups a dot over those of `groups_of`, stages.
_PROJECTION_TUNINGS = ((1, 1, 3), (1, 1, 4), (1, 2, 3), (1, 2, 4), (2, 1, 3))
_UNSUMMED = ("wo_b",)  # what the next kernel adds up
_Launch = tuple[str, str, Callable[[int], object], int]


@dataclass(frozen=True, slots=True)
class Point:
    """Where the kernels are launched: sizes of a rank, rows, device."""

    shape: RankShape
    num_rows: int
    device: torch.device
    bit_ops: bool = False


def launches(point: Point, only: Sequence[str]) -> Iterator[_Launch]:
    """(name, tuning, launch with weights number n, bytes of weights) of every kernel."""
    wanted = [name for name in _MAKERS if (not only and name != "chunks") or name in only]
    for name in wanted:
        yield from _MAKERS[name](point)


def _codes(num_rows: int, width: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """FP8 activations: codes and scale words."""
    codes = synthetic.random_bytes((num_rows, width), seed, device)
    codes -= ((codes & 0x7F) == 0x7F).to(torch.uint8)
    scales = synthetic.random_scales((num_rows, 4 * -(-width // 128)), (116, 122), seed + 1, device)
    return codes.view(torch.float8_e4m3fn), scales.view(torch.int32)


def _expert_launches(point: Point) -> Iterator[_Launch]:
    shape, num_rows, device, bit_ops = point.shape, point.num_rows, point.device, point.bit_ops
    c, f = shape.config, shape.expert_width
    sets = 2
    w13 = [synthetic.fp4_tiles(c.n_routed_experts, 2 * f, c.hidden_size, 20 + n, device) for n in range(sets)]
    w2 = [synthetic.fp4_tiles(c.n_routed_experts, c.hidden_size, f, 30 + n, device) for n in range(sets)]
    x, scales = _codes(num_rows, c.hidden_size, 5, device)
    per_expert13, per_expert2 = w13[0].nbytes // len(w13[0]), w2[0].nbytes // len(w2[0])
    generator = torch.Generator().manual_seed(num_rows)
    choices = 12
    expert_shape = experts.ExpertShape(c.hidden_size, f, c.n_routed_experts, c.num_experts_per_tok)
    default = experts.tuned(expert_shape, num_rows)
    for tuning in dict.fromkeys((default, *(replace(default, **changed) for changed in _EXPERT_TUNINGS))):
        buffers = [experts.ExpertBuffers(expert_shape, num_rows, device, tuning) for _ in range(choices)]
        distinct = 0
        activated, activated_scales = _codes(num_rows * c.num_experts_per_tok, f, 15, device)
        for own in buffers:
            own.activated.view(torch.uint8).copy_(activated.view(torch.uint8))  # w2 must not read zeros
            own.activated_scales.copy_(activated_scales)
            chosen = torch.stack(
                [
                    torch.randperm(c.n_routed_experts, generator=generator)[: c.num_experts_per_tok]
                    for _ in range(num_rows)
                ]
            ).to(device, torch.int32)
            own.num_items.zero_()
            experts.list_items(chosen, own)
            distinct += len(torch.unique(chosen))
        weights = torch.rand(num_rows * c.num_experts_per_tok, device=device)

        def up(
            number: int, buffers: list[experts.ExpertBuffers] = buffers, weights: Tensor = weights
        ) -> None:
            own = buffers[number % choices]
            experts.routed_up(x, scales, w13[number % sets], weights, own, c.swiglu_limit, bit_ops=bit_ops)

        def down(number: int, buffers: list[experts.ExpertBuffers] = buffers) -> None:
            experts.routed_down(w2[number % sets], buffers[number % choices], bit_ops=bit_ops)

        t, end = tuning, ", default" if tuning == default else ""
        label = (
            f"{t.rows} rows {t.groups} groups {t.splits} splits {t.up_stages} stages {t.up_registers} regs"
        )
        yield "experts up", label + end, up, distinct * per_expert13 // choices
        label = (
            f"{t.rows} rows {t.groups} groups {t.tiles} tiles {t.down_stages} stages {t.down_registers} regs"
        )
        yield "experts down", label + end, down, distinct * per_expert2 // choices


def _projection_launches(point: Point) -> Iterator[_Launch]:
    shape, num_rows, device, bit_ops = point.shape, point.num_rows, point.device, point.bit_ops
    c = shape.config
    padded = linear.padded_rows(num_rows)
    cases = (
        ("wq_a + wkv", c.q_lora_rank + c.head_dim, c.hidden_size, 0),
        ("wq_b", shape.heads * c.head_dim, c.q_lora_rank, c.head_dim),
        ("wo_b", c.hidden_size, shape.groups * c.o_lora_rank, 0),
        ("engram wkv", (c.hc_mult + 1) * c.hidden_size, c.engram_width, 0),
    )
    cos = torch.rand(num_rows, 32, device=device)
    for name, rows, columns, head in cases:
        size = rows * columns
        sets = max(min(_ROTATED_BYTES // size, 32), 3)
        weights = [synthetic.fp8_tiles(rows, columns, 40 + n, device) for n in range(sets)]
        x, scales = _codes(num_rows, columns, 6, device)
        out = torch.zeros(num_rows, rows, dtype=torch.bfloat16, device=device)
        tiles, blocks = -(-rows // 128), -(-columns // 128)
        for splits, groups, stages in _projection_tunings(tiles, blocks, num_rows):
            work = linear.SplitBuffers(splits * tiles * padded * 128, tiles * padded, device)

            def run(
                number: int, weights: list[Fp8Tiles] = weights, work: linear.SplitBuffers = work,
                x: Tensor = x, scales: Tensor = scales, out: Tensor = out, splits: int = splits,
                head: int = head, name: str = name,
                groups: int = groups, stages: int = stages,
            ) -> None:  # fmt: skip
                linear.fp8_linear(
                    x, scales, weights[number % len(weights)], out, work, splits=splits, bit_ops=bit_ops,
                    rope=(cos, cos), rope_head=head, groups=groups, stages=stages, unsummed=name in _UNSUMMED,
                )  # fmt: skip

            yield name, f"{splits} splits {groups} groups {stages} stages", run, size
    yield from _grouped_launches(point)


def _grouped_launches(point: Point) -> Iterator[_Launch]:
    shape, num_rows, device, bit_ops = point.shape, point.num_rows, point.device, point.bit_ops
    c = shape.config
    rows, columns = shape.groups * c.o_lora_rank, shape.heads // shape.groups * c.head_dim
    padded = linear.padded_rows(num_rows)
    weights = [synthetic.fp8_tiles(rows, columns, 50 + n, device, paired=True) for n in range(32)]
    x = synthetic.normal((num_rows, shape.groups * columns), 1.0, 7, device).to(torch.bfloat16)
    out = torch.zeros(num_rows, rows, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    out_scales = torch.zeros(num_rows, rows // 128, dtype=torch.int32, device=device)
    tiles = rows // 128
    for splits, dot_groups, stages in _projection_tunings(tiles, columns // 128, num_rows):
        work = linear.SplitBuffers(splits * rows * padded, tiles * padded, device)

        def run(
            number: int, work: linear.SplitBuffers = work, splits: int = splits, dot_groups: int = dot_groups,
            stages: int = stages,
        ) -> None:  # fmt: skip
            linear.grouped_linear(
                x, weights[number % 32], out, out_scales, work, groups=shape.groups, splits=splits, bit_ops=bit_ops,
                dot_groups=dot_groups, stages=stages,
            )  # fmt: skip

        yield "wo_a", f"{splits} splits {dot_groups} groups {stages} stages", run, rows * columns


def _projection_tunings(tiles: int, blocks: int, num_rows: int) -> list[tuple[int, int, int]]:
    """Parts of K, scale groups a dot and stages: the default first."""
    default = linear.num_splits(tiles, blocks, num_rows)
    groups = linear.groups_of(linear.block_rows(num_rows))
    found = [
        (int(default * more), int(groups * wider), stages) for more, wider, stages in _PROJECTION_TUNINGS
    ]
    return [one for one in dict.fromkeys(found) if 0 < one[0] <= blocks and one[1] > 0]


def _router_launches(point: Point) -> Iterator[_Launch]:
    shape, num_rows, device, bit_ops = point.shape, point.num_rows, point.device, point.bit_ops
    c = shape.config
    size = c.n_routed_experts * c.hidden_size * 2
    padded = linear.padded_rows(num_rows)
    weights = [
        linear.pack_bf16(
            synthetic.normal((c.n_routed_experts, c.hidden_size), 0.02, 60 + n, device).to(torch.bfloat16)
        )
        for n in range(64)
    ]
    x = synthetic.normal((num_rows, c.hidden_size), 1.0, 8, device).to(torch.bfloat16)
    logits = torch.zeros(num_rows, c.n_routed_experts, device=device)
    for splits in (8, 16, 32):
        work = linear.SplitBuffers(splits * len(weights[0]) * 64 * padded, 64 * padded, device)

        def run(number: int, work: linear.SplitBuffers = work, splits: int = splits) -> None:
            linear.bf16_linear(x, weights[number % 64], logits, work, splits=splits, bit_ops=bit_ops)

        yield "router", f"{splits} splits", run, size
    bias = torch.zeros(c.n_routed_experts, device=device)
    chosen = torch.zeros(num_rows, c.num_experts_per_tok, dtype=torch.int32, device=device)
    route_weights = torch.zeros(num_rows, c.num_experts_per_tok, device=device)
    expert_shape = experts.ExpertShape(c.hidden_size, 64, c.n_routed_experts, c.num_experts_per_tok)
    buffers = experts.ExpertBuffers(expert_shape, num_rows, device)

    def choose(number: int) -> None:
        routing.choose(logits, bias, chosen, route_weights, buffers, scaling=1.5)

    yield "choose + list", "", choose, logits.nbytes


def _shared_launches(point: Point) -> Iterator[_Launch]:
    shape, num_rows, device, bit_ops = point.shape, point.num_rows, point.device, point.bit_ops
    c, f = shape.config, shape.expert_width
    w13 = [synthetic.fp8_tiles(2 * f, c.hidden_size, 70 + n, device) for n in range(32)]
    w2 = [synthetic.fp8_tiles(c.hidden_size, f, 80 + n, device) for n in range(64)]
    x, scales = _codes(num_rows, c.hidden_size, 9, device)
    buffers = experts.SharedBuffers(c.hidden_size, f, num_rows, device)

    def up(number: int) -> None:
        experts.shared_up(x, scales, w13[number % 32], buffers, c.swiglu_limit, bit_ops=bit_ops)

    def down(number: int) -> None:
        experts.shared_down(w2[number % 64], buffers, bit_ops=bit_ops)

    yield "shared up", f"{buffers.splits} splits", up, w13[0].nbytes
    yield "shared down", "", down, w2[0].nbytes


def _stream_launches(point: Point) -> Iterator[_Launch]:
    shape, num_rows, device, bit_ops = point.shape, point.num_rows, point.device, point.bit_ops
    c = shape.config
    width = c.hidden_size
    weights = [pack_mixes(synthetic.normal((24, 4 * width), 0.01, 90 + n, device)) for n in range(64)]
    streams = hyper.StreamBuffers(width, num_rows, device)
    streams.stream.normal_()
    outputs = synthetic.normal((num_rows * c.num_experts_per_tok, width), 1.0, 91, device).to(torch.bfloat16)
    norm, scale, base = (
        torch.ones(width, device=device),
        torch.ones(3, device=device),
        torch.zeros(24, device=device),
    )

    def after_attention(number: int) -> None:
        hyper.mix(streams, weights[number % 64], output=outputs[:num_rows], bit_ops=bit_ops)

    def after_experts(number: int) -> None:
        hyper.mix(
            streams,
            weights[number % 64],
            output=outputs,
            shared=streams.x,
            parts=c.num_experts_per_tok,
            bit_ops=bit_ops,
        )

    size = weights[0].nbytes + 2 * streams.stream.nbytes
    size += 2 * streams.x.nbytes  # an output, or the shared expert's, and the collapsed rows
    yield "mix after attention", "default", after_attention, size
    yield "mix after experts", "default", after_experts, size + outputs.nbytes

    def finish(number: int) -> None:
        hyper.finish(streams, norm, scale, base, iterations=20, norm_eps=1e-20, eps=1e-6, bit_ops=bit_ops)

    written = 5 * streams.codes.nbytes  # with what is read
    yield "finish", "default", finish, written

    def start(number: int) -> None:
        hyper.start(streams, outputs[:num_rows], bit_ops=bit_ops)

    yield "start", "", start, streams.stream.nbytes + streams.x.nbytes
    if num_rows < FILLED_ROWS:
        return

    def expand(number: int) -> None:
        hyper.mix(
            streams, None, output=outputs, shared=streams.x, parts=c.num_experts_per_tok, bit_ops=bit_ops
        )

    yield "expand after experts", "default", expand, size + outputs.nbytes
    for shares in _SHARES:

        def mix(number: int, shares: int = shares, parts: int = 1) -> None:
            output, shared = outputs[: num_rows * parts], streams.x if parts > 1 else None
            many.mix_rows(streams, weights[number % 64], output, shared, None, parts=parts, shares=shares)

        yield "mix after attention", f"{shares} shares", mix, size
        yield (
            "mix after experts", f"{shares} shares", partial(mix, parts=c.num_experts_per_tok), size + outputs.nbytes
        )  # fmt: skip
        end = partial(
            many.finish_rows,
            streams,
            norm,
            scale,
            base,
            iterations=20,
            norm_eps=1e-20,
            eps=1e-6,
            shares=shares,
        )
        yield "finish", f"{shares} shares", lambda number, end=end: end(), written


def _conversion_launches(point: Point) -> Iterator[_Launch]:
    """What stands around the vendor's products of chunks; bytes are those that are read and written."""
    shape, num_rows, device, bit_ops = point.shape, point.num_rows, point.device, point.bit_ops
    if num_rows < FILLED_ROWS:
        return
    c, f = shape.config, shape.expert_width
    width, low, grouped = c.hidden_size, c.q_lora_rank, shape.groups * shape.group_rank
    products = prefill_linear.ProductBuffers(num_rows, width, grouped, device)
    for columns, units in ((width, 16), (width, 32), (width, 64), (low, 32), (grouped, 32)):
        codes, scales = _codes(num_rows, columns, 9, device)

        def rows(number: int, codes: Tensor = codes, scales: Tensor = scales, units: int = units) -> None:
            prefill_linear.expand_rows(codes, scales, products, units)

        yield "rows as bf16", f"{columns} columns, {units} units", rows, 3 * codes.nbytes
    for name, (out, columns) in {"qkv": (1792, width), "wq_b": (8192, low), "w2": (width, f)}.items():
        weights = [synthetic.fp8_tiles(out, columns, 70 + n, device) for n in range(32)]

        def weight(number: int, weights: list[Fp8Tiles] = weights, tiles: int = out // 128) -> None:
            prefill_linear.expand_weight(weights[number % 32], 0, tiles, products)

        yield "weight as bf16", name, weight, 3 * weights[0].codes.nbytes
    cos = torch.rand(num_rows, c.qk_rope_head_dim // 2, device=device)
    for heads, size in ((shape.heads, c.head_dim), (c.index_n_heads, c.index_head_dim)):
        query = synthetic.normal((num_rows, heads * size), 1.0, 92, device).to(torch.bfloat16)

        def turn(number: int, query: Tensor = query, size: int = size) -> None:
            prefill_linear.turn(query, (cos, cos), size, bit_ops=bit_ops)

        yield "turn", f"{heads} heads of {size}", turn, 4 * num_rows * heads * c.qk_rope_head_dim
    w13 = synthetic.fp8_tiles(2 * f, width, 70, device)
    w2 = synthetic.fp8_tiles(width, f, 71, device)
    x, wide, activated, outputs = (
        synthetic.normal((num_rows, columns), 1.0, 93, device).to(torch.bfloat16)
        for columns in (width, 2 * f, f, width)
    )

    def shared(number: int) -> None:
        prefill_linear.shared_expert(
            x, w13, w2, wide, activated, outputs, products, c.swiglu_limit, bit_ops=bit_ops
        )

    yield "shared expert", "", shared, 2 * (x.nbytes + outputs.nbytes)
    router = linear.pack_bf16(
        synthetic.normal((c.n_routed_experts, width), 0.02, 60, device).to(torch.bfloat16)
    )
    logits = torch.zeros(num_rows, c.n_routed_experts, device=device)
    for tiles in (None, 1, 2):

        def plain(number: int, tiles: int | None = tiles) -> None:
            prefill_linear.plain_product(x, router, logits, bit_ops=bit_ops, tiles_each=tiles)

        yield "router of a chunk", f"{tiles or 'default'} tiles", plain, x.nbytes + logits.nbytes
    yield from _selections(num_rows, c, device)


def _selections(num_rows: int, c: ModelConfig, device: torch.device) -> Iterator[_Launch]:
    """Choices among the entries of a prompt that begins with these rows."""
    ratio = 2
    scores = synthetic.normal((num_rows, num_rows // ratio), 1.0, 94, device).to(torch.bfloat16)
    positions = torch.arange(num_rows, dtype=torch.int32, device=device)
    slots = torch.zeros_like(positions)
    table = torch.arange(num_rows // 64, dtype=torch.int32, device=device)[None]
    picks = torch.zeros(num_rows, c.index_topk, dtype=torch.int32, device=device)

    def select(number: int) -> None:
        topk.select(scores, (slots, positions, table), picks, ratio=ratio, block_size=64)

    yield "select", "", select, scores.nbytes // 2 + picks.nbytes


def _attention_launches(point: Point) -> Iterator[_Launch]:
    shape, num_rows, device, bit_ops = point.shape, point.num_rows, point.device, point.bit_ops
    c = shape.config
    pages = make_pages(c, num_slots=num_rows, max_model_len=2048, block_size=64, device=device)
    fill_pages(c, pages, device)
    query = synthetic.normal((num_rows, shape.heads * c.head_dim), 1.0, 92, device).to(torch.bfloat16)
    slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    positions = torch.full_like(slots, 1101)
    window_records = torch.zeros(num_rows, c.sliding_window, dtype=torch.int32, device=device)
    attention.locate_window((slots, positions, pages.window_table), window_records, block_size=64)
    picks = torch.arange(c.index_topk, device=device) * 2
    entry_records = (pages.entry_table[:, picks // 64] * 64 + picks % 64).to(torch.int32).contiguous()
    sink = torch.zeros(shape.heads, device=device)
    cos = torch.rand(num_rows, 32, device=device)
    entries = pages.entries[c.kv_source_layer_ids[-1]]
    attended = attention.AttentionShape(shape.heads, c.head_dim, c.qk_rope_head_dim, c.sliding_window)
    size = num_rows * (c.sliding_window * pages.windows[0].shape[1] + c.index_topk * entries.shape[1])
    chosen = attention.attend_tuning(attended, num_rows, c.index_topk)
    tunings = [chosen, *(AttendTuning(*values) for values in _ATTEND_TUNINGS if values[0] * num_rows <= 528)]
    for tuning in dict.fromkeys(tunings):
        buffers = attention.AttentionBuffers(attended, num_rows, c.index_topk, device, tuning)

        def run(number: int, buffers: attention.AttentionBuffers = buffers) -> None:
            attention.attend(
                query, pages.windows[number % len(pages.windows)], entries, (window_records, entry_records), sink,
                (cos, cos), buffers, bit_ops=bit_ops,
            )  # fmt: skip

        label = (
            f"{tuning.splits} splits {tuning.keys} keys {tuning.warps} warps {tuning.registers or 255} regs"
        )
        label += ", merged by the last" if tuning.merges else ""
        yield "attend", label + (", default" if tuning == chosen else ""), run, size


_SHARES = (2, 4, 5, 8, 10, 16)  # blocks of the streams of a chunk that share a row
# What is changed of the tuning of chunks' experts, and keys a block, stages and warps of their attention.
_GROUPED_TUNINGS: tuple[dict[str, int], ...] = (
    {"rows": 32},
    {"rows": 64},
    {"rows": 128},
    {"rows": 128, "up_stages": 3, "down_stages": 3, "tiles": 8},
    {"rows": 128, "up_stages": 5, "down_stages": 5, "tiles": 2},
    {"rows": 256, "warps": 8},
    {"rows": 128, "warps": 8},
)
_ROWS_TUNINGS = ((64, 3, 4), (64, 2, 4), (64, 1, 4), (64, 3, 8))


def _chunk_launches(point: Point) -> Iterator[_Launch]:
    """The kernels of chunks that have tunings; bytes are those of weights and of keys."""
    shape, num_rows, device, bit_ops = point.shape, point.num_rows, point.device, point.bit_ops
    c, f = shape.config, shape.expert_width
    w13 = synthetic.fp4_tiles(c.n_routed_experts, 2 * f, c.hidden_size, 20, device)
    w2 = synthetic.fp4_tiles(c.n_routed_experts, c.hidden_size, f, 30, device)
    x = synthetic.normal((num_rows, c.hidden_size), 1.0, 5, device).to(torch.bfloat16)
    chosen = torch.rand(num_rows, c.n_routed_experts, device=device).topk(c.num_experts_per_tok).indices
    weights = torch.rand(num_rows * c.num_experts_per_tok, device=device)
    expert_shape = experts.ExpertShape(c.hidden_size, f, c.n_routed_experts, c.num_experts_per_tok)
    default = prefill_experts.grouped_tuning(expert_shape, num_rows)
    for tuning in dict.fromkeys((default, *(replace(default, **changed) for changed in _GROUPED_TUNINGS))):
        own = prefill_experts.GroupedBuffers(expert_shape, num_rows, device, tuning)
        own.activated.normal_()
        prefill_experts.sort_pairs(chosen.to(torch.int32), own)
        t = tuning
        label = f"{t.rows} rows {t.up_stages}/{t.down_stages} stages {t.tiles} tiles {t.warps} warps"
        label += ", default" if tuning == default else ""

        def up(number: int, own: prefill_experts.GroupedBuffers = own) -> None:
            prefill_experts.grouped_up(x, w13, weights, own, c.swiglu_limit, bit_ops=bit_ops)

        def down(number: int, own: prefill_experts.GroupedBuffers = own) -> None:
            prefill_experts.grouped_down(w2, own, bit_ops=bit_ops)

        yield "chunk experts up", label, up, w13.nbytes
        yield "chunk experts down", label, down, w2.nbytes
    query = synthetic.normal((num_rows, shape.heads * c.head_dim), 1.0, 92, device).to(torch.bfloat16)
    attended = attention.AttentionShape(shape.heads, c.head_dim, c.qk_rope_head_dim, c.sliding_window)
    sink, cos = torch.zeros(shape.heads, device=device), torch.rand(num_rows, 32, device=device)
    for keys, stages, warps in _ROWS_TUNINGS:
        buffers = RowBuffers(
            attended, num_rows, c.index_topk, device, num_windows=num_rows, num_places=num_rows // 64, num_lone=1,
            block_size=64, tuning=RowsTuning(keys, stages, warps),
        )  # fmt: skip
        buffers.rows.normal_()
        row = torch.arange(num_rows, device=device)[:, None]
        window = row + torch.arange(1 - c.sliding_window, 1, device=device)
        picks = torch.randint(num_rows // 2, (num_rows, c.index_topk), device=device).sort().values + num_rows
        buffers.keys.copy_(torch.cat((window.clamp_min(-1), picks), 1))

        def attend(number: int, buffers: RowBuffers = buffers) -> None:
            attend_rows(query, sink, (cos, cos), buffers, with_picks=True, bit_ops=bit_ops)

        read = buffers.keys.numel() * c.head_dim * 2
        yield "chunk attend", f"{keys} keys {stages} stages {warps} warps", attend, read


_MAKERS: dict[str, Callable[[Point], Iterator[_Launch]]] = {
    "experts": _expert_launches,
    "projections": _projection_launches,
    "shared": _shared_launches,
    "router": _router_launches,
    "streams": _stream_launches,
    "conversions": _conversion_launches,
    "attention": _attention_launches,
    "chunks": _chunk_launches,
}


def machine() -> dict[str, Any]:
    """The card and the versions that made the numbers."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def measure(arguments: Sequence[str], document: dict[str, Any]) -> None:
    """Fill `document` with name, machine, settings and samples, one sample after another as they are made.

    Raises EngineError when there is no GPU, or when what was timed was wrong.
    """
    parser = argparse.ArgumentParser(prog="python -m deskfleet.engine.cuda.bench", description=__doc__)
    parser.add_argument("what", choices=("decode", "kernels", "prefill"))
    parser.add_argument(
        "--chunk", type=_integers, default=(2048, 4096, 16384), help="rows of prompts' chunks"
    )
    parser.add_argument(
        "--collectives", choices=tuple(COLLECTIVES), default="none", help="what a step exchanges with itself"
    )
    parser.add_argument("--in-full", action="store_true", help="chunks through all layers, no decoder replay")
    parser.add_argument("--rows", type=_integers, default=(1, 4, 16, 32, 64))
    parser.add_argument(
        "--drafts", type=_integers, default=(), nargs="?", const=(1,),
        help="numbers of requests whose whole blocks of drafts are verified, and drafted again",
    )  # fmt: skip
    parser.add_argument(
        "--exact",
        action="store_true",
        help="products of steps that decode summed in float32, as small models have them",
    )
    parser.add_argument("--steps", type=int, default=60, help="timed replays of each case")
    parser.add_argument("--context", type=int, default=1100, help="positions before the step")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--check-rows", type=_integers, default=(1, 4), help="batch sizes checked by stage")
    parser.add_argument("--check-layers", type=_integers, default=(0, 1, 2, 14, 20, 24))
    parser.add_argument(
        "--trace", type=Path, help="a trace of steps of the first batch size goes here (.json.gz)"
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=(), help="groups of kernels")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise EngineError("no CUDA device", hint="this runs on the machine that is measured")
    names = {"decode": NAME, "kernels": "rank0of4-kernels", "prefill": PREFILL_NAME}
    runs = {"decode": decode, "kernels": kernels, "prefill": prefill}
    document["name"] = names[options.what]
    document["machine"] = machine()
    document["settings"] = {
        "context": options.context,
        "layers": options.layers,
        "steps": options.steps,
        "weights": "random bytes",
        "products": "float32 sums"
        if options.exact
        else "FP8 instructions: experts, and projections of more than 16 rows",
        "collectives": COLLECTIVES[options.collectives],
    }
    with torch.inference_mode():
        for sample in runs[options.what](options, torch.device("cuda")):
            document["samples"].append(sample)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the document last; 0 when everything that was timed was right."""
    document: dict[str, Any] = {"samples": []}
    try:
        measure(sys.argv[1:] if arguments is None else arguments, document)
    finally:
        print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())


__all__ = [
    "CATEGORIES",
    "NAME",
    "PREFILL_NAME",
    "VERIFY_NAME",
    "Point",
    "Timing",
    "capture",
    "check_drafts",
    "check_stages",
    "decode",
    "kernels",
    "launches",
    "machine",
    "main",
    "make_rank",
    "measure",
    "prefill",
    "replays",
]
