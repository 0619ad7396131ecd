"""Times of the GPU step at the size that one rank of four has: whole decode steps, and kernel by kernel.

    python -m deskfleet.engine.cuda.bench decode  --rows 1,4,16,32,64
    python -m deskfleet.engine.cuda.bench kernels --rows 1,4,6,16,32,64

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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskfleet.engine.cuda import attention, experts, hyper, linear, routing, synthetic
from deskfleet.engine.cuda.attention import AttendTuning
from deskfleet.engine.cuda.checks import StepCheck
from deskfleet.engine.cuda.packing import Fp8Tiles
from deskfleet.engine.cuda.step import DecodeStep, Pages, make_pages
from deskfleet.engine.cuda.synthetic import LayerWeights, RankShape, make_layer
from deskfleet.errors import EngineError
from deskfleet.model.config import ModelConfig
from deskfleet.model.published import published_config_dict

NAME = "rank0of4-decode"
WARM_UP = 8
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
    "select_kernel": "indexer",
    "upper_kernel": "indexer",
    "lower_kernel": "indexer",
    "count_kernel": "indexer",
    "take_kernel": "indexer",
    "gate_kernel": "engram",
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


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what `run` launches; every kernel must have run before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
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

    def step(self, num_rows: int, context: int, device: torch.device, *, bit_ops: bool) -> DecodeStep:
        """A step of `num_rows` requests that have `context` positions each, every one with its own Engram rows."""
        step = DecodeStep(
            self.shape, self.layers, self.embedding, self.head, self.norm, self.pages,
            num_rows=num_rows, device=device, bit_ops=bit_ops,
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


def make_rank(
    config: ModelConfig,
    tp_size: int,
    num_layers: int,
    *,
    num_slots: int,
    max_model_len: int,
    device: torch.device,
) -> Rank:
    """Random weights of rank 0 of `tp_size`, and full pages."""
    shape = RankShape(config, tp_size)
    layers = [make_layer(shape, plan, 0, device) for plan in config.layers[:num_layers]]
    embedding = synthetic.normal((shape.vocabulary, config.hidden_size), 1.0, 11, device).to(torch.bfloat16)
    head = synthetic.normal((shape.vocabulary, config.hidden_size), 0.02, 12, device).to(torch.bfloat16)
    pages = make_pages(config, num_slots=num_slots, max_model_len=max_model_len, block_size=64, device=device)
    fill_pages(config, pages, device)
    norm = torch.ones(config.hidden_size, device=device)
    return Rank(shape, layers, embedding, linear.pack_bf16(head), norm, pages)


def check_stages(step: DecodeStep, only: Sequence[int]) -> dict[str, float]:
    """Run the step once under the checks. Raises EngineError when a stage is wrong."""
    check = StepCheck(step, frozenset(only))
    step.run(check)
    wrong = {
        name: error
        for name, error in check.errors.items()
        if (
            error > 0
            if name.endswith("wrong")
            else error > (_LOOSE if name.endswith(_LOOSE_STAGES) else _TIGHT)
        )
    }
    if wrong:
        raise EngineError(f"stages differ from the reference: {wrong}", hint="run tests/gpu on this machine")
    return check.errors


def decode(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """A sample for each batch size: times, errors, kernel times by category."""
    config = ModelConfig.from_dict(published_config_dict())
    begin = time.monotonic()
    rank = make_rank(
        config,
        4,
        options.layers,
        num_slots=max(options.rows),
        max_model_len=options.context + 64,
        device=device,
    )
    torch.cuda.synchronize()
    print(
        f"weights and pages: {torch.cuda.memory_allocated() / 2**30:.1f} GiB in {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    for num_rows in options.rows:
        step = rank.step(num_rows, options.context, device, bit_ops=False)
        begin = time.monotonic()
        step.run()  # compiles
        torch.cuda.synchronize()
        compiled_s = time.monotonic() - begin
        only = options.check_layers if num_rows in options.check_rows else ()
        errors = check_stages(step, only)
        step.run()
        eager = step.vocabulary_logits.clone()
        graph = capture(step.run)
        timing = replays(graph, options.steps)
        if not bool(torch.isfinite(step.vocabulary_logits).all()):
            raise EngineError(
                f"{num_rows} rows: logits that are not finite", hint="look at the stages' errors"
            )
        if not torch.equal(step.vocabulary_logits, eager):
            raise EngineError(
                f"{num_rows} rows: the graph's logits differ from the same launches without it",
                hint="a race, or a buffer that a step does not leave as it found it",
            )
        categories, by_kernel = _profile(graph)
        sample = {
            "name": NAME,
            "rows": num_rows,
            "context": options.context,
            "layers": options.layers,
            **timing.sample(),
            "first_run_s": compiled_s,
            "items_last_layer": int(step.experts.num_items),
            "kernels": round(sum(launches for _, launches in by_kernel.values())),
            "kernel_ms": categories,
            "by_kernel": {
                name: {"ms": ms, "launches": launches} for name, (ms, launches) in sorted(by_kernel.items())
            },
            "worst_errors": dict(sorted(errors.items(), key=lambda item: -item[1])[:8]),
            "allocated_bytes": torch.cuda.max_memory_allocated(),
        }
        print(
            f"{NAME} rows {num_rows:3} median {timing.median_ms:.3f} ms"
            f" [{sample['p10_ms']:.3f}-{sample['p90_ms']:.3f}] kernels {sample['kernels']}",
            flush=True,
        )
        for category, time_ms in sorted(categories.items(), key=lambda item: -item[1]):
            print(f"    {category:44} {time_ms:.3f} ms", flush=True)
        if options.trace is not None and num_rows == options.rows[0]:
            _trace(graph, options.trace)
        yield sample
        del graph, step


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
            times[CATEGORIES.get(event.key, "other")] += ms
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
    wanted = [name for name in _MAKERS if not only or name in only]
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
    weights = [
        hyper.split_mix_weight(synthetic.normal((24, 4 * width), 0.01, 90 + n, device)) for n in range(64)
    ]
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
    yield "mix after attention", "", after_attention, size
    yield "mix after experts", "", after_experts, size + outputs.nbytes
    for columns in (None, 256, 512, 1024):

        def finish(number: int, columns: int | None = columns) -> None:
            hyper.finish(
                streams, norm, scale, base, iterations=20, norm_eps=1e-20, eps=1e-6, bit_ops=bit_ops,
                most_columns=columns,
            )  # fmt: skip

        yield "finish", f"{columns or 'default'} columns", finish, 4 * streams.x.nbytes


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


_MAKERS: dict[str, Callable[[Point], Iterator[_Launch]]] = {
    "experts": _expert_launches,
    "projections": _projection_launches,
    "shared": _shared_launches,
    "router": _router_launches,
    "streams": _stream_launches,
    "attention": _attention_launches,
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
    parser.add_argument("what", choices=("decode", "kernels"))
    parser.add_argument("--rows", type=_integers, default=(1, 4, 16, 32, 64))
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
    document["name"] = NAME if options.what == "decode" else "rank0of4-kernels"
    document["machine"] = machine()
    document["settings"] = {
        "context": options.context,
        "layers": options.layers,
        "steps": options.steps,
        "weights": "random bytes",
        "collectives": "left out",
    }
    with torch.inference_mode():
        for sample in (decode if options.what == "decode" else kernels)(options, torch.device("cuda")):
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
    "Point",
    "Timing",
    "capture",
    "check_stages",
    "decode",
    "kernels",
    "launches",
    "machine",
    "main",
    "make_rank",
    "measure",
    "replays",
]
