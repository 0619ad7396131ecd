"""The engine on a GPU against the engine on the CPU: whole steps through the runner, requests through the core.

On a GPU everything runs there. Without one, the few that are small enough run in Triton's interpreter, with the same
launches; the others say why they do not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("tokenizers", reason="an engine opens checkpoints (tools/triton_env.sh)")
pytest.importorskip("safetensors", reason="the golden data are such files (tools/triton_env.sh)")
pytest.importorskip(
    "deskfleet_engram", reason="an engine reads Engram rows (PYTHONPATH of make test-kernels)"
)

from deskfleet.endpoint import SamplingParams
from deskfleet.engine.backends import CudaBackend, DeviceOptions
from deskfleet.engine.batch import Segment
from deskfleet.engine.core import CoreOptions, EngineCore
from deskfleet.engine.cuda.collectives import HostGroup
from deskfleet.engine.cuda.draft import DraftContext, DraftStep
from deskfleet.engine.cuda.loader import RankShape, load_model
from deskfleet.engine.cuda.model import CudaModel
from deskfleet.engine.cuda.packing import Fp8Tiles
from deskfleet.engine.cuda.prefill import PrefillStep
from deskfleet.engine.cuda.prefill_replay import ReplayStep
from deskfleet.engine.cuda.step import DecodeStep, Pages
from deskfleet.engine.cuda.workspace import measure
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.memory import device_census
from deskfleet.engine.messages import AddRequest
from deskfleet.engine.model.draft import Proposal
from deskfleet.engine.model.v41 import V41Model
from deskfleet.engine.runner import ModelRunner
from deskfleet.engine.speculate import SpeculationOptions
from deskfleet.engine.wanted import Outcome
from deskfleet.engine.weights import ShardReader
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.config import ModelConfig
from deskfleet.model.device import (
    FILLED_ROWS,
    REPLAYED_ROWS,
    decode_sizes,
    draft_sizes,
    passage_blocks,
    prefill_sizes,
)
from deskfleet.model.embedded import POCKET, locate
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.limits import RunnerLimits, resolve_limits
from deskfleet.model.memory import DeviceLine, ProcessMemory, RankMemory
from deskfleet.model.published import published_config_dict
from deskfleet.model.tokenizer import load_tokenizer
from deskfleet.planner.cuda import check_device, cuda_lines
from deskfleet_engram.tokens import compressed_token_map
from tests.engine.cores import Narrowed, on_logits
from tests.engine.golden import checkpoint, golden, relative_rms, token_map
from tests.gpu.conftest import HAS_GPU

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore")]
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="takes hours in Triton's interpreter")

BACKEND = "cuda" if HAS_GPU else "interpreter"
ANSWERS = Path(__file__).with_name("pocket_answers.json")
# Limits of the golden data's README: mean and worst relative RMS of logits against an engine that rounds at the same
# points, as the interpreter does, and against one that rounds otherwise, as tensor cores do.
MEAN_LIMIT, LIMIT = (0.052, 0.16) if HAS_GPU else (0.032, 0.13)
STREAM_LIMIT = 0.0064
"""Relative error of a layer's stream from golden inputs: what one last place in ten outputs makes of it there."""
ATTENTION_LIMIT = 0.02
"""Of what attention adds to it (there: 0.029)."""


def runner_on(
    device: str,
    limits: RunnerLimits,
    *,
    source: Checkpoint | None = None,
    tokens: np.ndarray | None = None,
    max_step_tokens: int = 64,
    graphs: bool = True,
    exact: bool | None = None,
    with_drafts: bool = False,
) -> ModelRunner:
    """A rank in this process."""
    opened = source or checkpoint()
    tokens = token_map() if tokens is None else tokens
    return ModelRunner(
        opened,
        ShardPlan(opened.config, Layout(1)),
        Communicator(),
        limits,
        pad_compressed_id=int(tokens[opened.config.engram_pad_token_id]),
        with_drafts=with_drafts,
        device=device,
        device_options=DeviceOptions(max_step_tokens, graphs, exact=exact),
    )


def scatter_blocks(runner: ModelRunner) -> None:
    """Every slot's blocks at random places, the same for every runner."""
    generator = np.random.default_rng(5)
    for table in (runner.tables.global_blocks, runner.tables.window_blocks):
        table[:] = 1 + generator.permutation(table.size).astype(np.int32).reshape(table.shape)


def segment(ids: np.ndarray, start: int, stop: int, slot: int = 0, **more: Any) -> Segment:
    """Positions start..stop-1 of `ids`."""
    compressed = token_map()[ids]
    history = slice(max(start - 3, 0), start)
    return Segment(
        slot, start, ids[start:stop], compressed[start:stop], compressed[history],
        np.zeros(stop - start, bool), **more,
    )  # fmt: skip


class Pair:
    """A rank on the device beside one on the CPU, driven alike."""

    def __init__(
        self, *, with_drafts: bool = False, decoder_replay: bool = False, block_size: int = 16, **options: Any
    ) -> None:
        blocks = 3 * 192 // block_size
        limits = RunnerLimits(3, 192, block_size, blocks, blocks, decoder_replay=decoder_replay)
        self.cpu = runner_on("cpu", limits, with_drafts=with_drafts)
        self.device = runner_on(BACKEND, limits, with_drafts=with_drafts, **options)
        for runner in (self.cpu, self.device):
            scatter_blocks(runner)
        self.errors: list[Tensor] = []

    def run(self, *segments: Segment, rows: Sequence[int] | None = None) -> None:
        """One step of both; the logits of `rows` are compared, or of every row."""
        if rows is None:
            rows = range(sum(s.num_tokens for s in segments))
        expected, mine = (r.lead(segments, rows).logits.clone() for r in (self.cpu, self.device))
        error = relative_rms(mine, expected)
        assert error.max() <= LIMIT, f"{[(s.slot, s.start, s.num_tokens) for s in segments]}: {error}"
        self.errors.append(error)


def tokens(length: int, seed: int) -> np.ndarray:
    """Ordinary ones."""
    return np.random.default_rng(seed).integers(5, 500, length)


def test_prompts_and_decoding() -> None:
    """Two requests over scattered blocks: a prompt cut at odd positions, so that a group of two crosses the cut, rows
    of both in one step, and a block that only the step itself sees."""
    pair = Pair()
    first, second = tokens(120, 1), tokens(120, 2)
    pair.run(segment(first, 0, 7))
    pair.run(segment(first, 7, 8), segment(second, 0, 3, slot=2))
    pair.run(segment(first, 8, 9), segment(second, 3, 5, slot=2))
    if HAS_GPU:
        pair.cpu.tables.window_blocks[2, 1:3] = pair.device.tables.window_blocks[2, 1:3] = 0
        pair.run(segment(first, 9, 10), segment(second, 5, 100, slot=2))
        for position in range(10, 29):
            pair.run(
                segment(first, position, position + 1), segment(second, position + 90, position + 91, slot=2)
            )
    assert torch.cat(pair.errors).mean() <= MEAN_LIMIT


def test_answers_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of every kind at once, over layers that only look tokens up: the answers are those of a host that is
    told all logits, of which only those who need them get any; drafts that are half right change nothing."""
    runner = runner_on(
        BACKEND, RunnerLimits(4, 64, 16, num_blocks=16, num_window_blocks=16), max_step_tokens=16
    )
    assert isinstance(runner.backend, CudaBackend)
    width, told = runner.config.hidden_size, []
    table = torch.randn(runner.config.vocab_size, width, generator=torch.Generator().manual_seed(3))
    table = table.to(torch.bfloat16).to(runner.backend.model.device)

    def look_up(step: DecodeStep, seen: Any = None) -> None:
        torch.index_select(table, 0, step.ids, out=step.streams.x)

    def lead(*arguments: Any) -> Outcome:
        told.append((len(arguments[1]), len(arguments[4])))
        return runner.lead(*arguments)

    monkeypatch.setattr(DecodeStep, "run_layers", look_up)
    same = {"max_tokens": 4, "ignore_eos": True, "seed": 5}
    sampling = [
        SamplingParams(temperature=0, **same),
        SamplingParams(temperature=0.8, top_k=40, top_p=0.9, **same),
        SamplingParams(temperature=0.8, presence_penalty=0.5, **same),
        SamplingParams(temperature=0.8, min_p=1.0, **same),  # the likeliest's chance is just that: the host's
    ]
    prompts = [tokens_list(length, length) for length in (3, 9, 2, 1)]

    def answers(drafts: int, lead: Any, right: Sequence[Sequence[int]] = ()) -> list[list[int]]:
        def propose(requests: Sequence[Any]) -> Proposal:
            ids = [[*right[0][r.place : r.place + 1], 7, 7][:2] for r in requests]
            return Proposal(torch.tensor(ids), torch.zeros(len(ids), 2, 0), torch.zeros(len(ids), 2))

        narrowed = Narrowed(runner, runner.limits)
        narrowed.lead, narrowed.propose = lead, propose  # type: ignore[attr-defined]
        speculation = SpeculationOptions(num_drafts=drafts, draft="greedy")
        core = EngineCore(narrowed, token_map(), CoreOptions(16, speculation))  # type: ignore[arg-type]
        found = run_all(core, prompts, sampling)
        assert core.stats.num_accepted > 0 or not drafts
        return found

    on_host = on_logits(runner.lead, lambda logits, *_: logits)
    plain = answers(0, lead)
    assert sum(known for known, _ in told) == 4  # of the one with a penalty
    assert sum(chosen for _, chosen in told) == 3 * 4
    assert plain == answers(0, on_host)
    assert len({tuple(answer) for answer in plain}) == 4
    drafted = answers(2, lead, plain)
    assert drafted[0] == plain[0]
    assert drafted == answers(2, on_host, plain)


@torch.inference_mode()
def test_replayed_rows_leave_their_entries_alone() -> None:
    """What others share is not written again by rows that saw less."""
    limits = RunnerLimits(1, 64, 16, num_blocks=4, num_window_blocks=4)
    runner = runner_on(BACKEND, limits, max_step_tokens=16)
    scatter_blocks(runner)
    assert isinstance(runner.backend, CudaBackend)
    pages = runner.backend.model.pages.pages
    for page in (*pages.entries.values(), *pages.index_keys.values()):
        page.fill_(7)
    runner.lead([segment(tokens(20, 3), 10, 17, window_from=10, num_replayed=6)], [6])
    for source, page in pages.entries.items():
        per_block = 16 // runner.config.compress_ratios[source]
        written = (page != 7).any(1).view(-1, per_block)
        block = int(runner.tables.global_blocks[0, 1])
        # Position 16 alone is new: an entry where a token makes one, none where a group stays open.
        assert int(written.sum()) == int(bool(written[block, 0])) == int(per_block == 16)


class Alone(Communicator):
    """One rank of several that hears of no other: sums are its own, and all gather what it has."""

    def _all_reduce(self, tensor: Tensor) -> None:
        pass

    def _all_gather(self, own: Tensor) -> list[Tensor]:
        return [own] * self.size


@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_of_three(rank: int) -> None:
    """Shares that do not divide: groups, experts and vocabulary of a rank, padded, give the CPU rank's parts, through
    the sums of a group that nobody else is in."""
    source, limits = checkpoint(), RunnerLimits(1, 64, 16, num_blocks=4, num_window_blocks=4)
    plan, comm = ShardPlan(source.config, Layout(3)), Alone(rank, 3)
    whole = runner_on("cpu", limits)
    scatter_blocks(whole)
    with torch.inference_mode(), ShardReader(source, plan, rank) as reader:
        cpu = V41Model(reader, comm, Communicator())
        device = torch.device("cuda" if HAS_GPU else "cpu")
        mine = CudaModel(
            reader, comm, limits, device=device, max_step_tokens=16, bit_ops=not HAS_GPU, group=HostGroup(comm, device)
        )  # fmt: skip
        work = [segment(tokens(3, 4), 0, 3)]
        expected = cpu.logits(cpu.forward(whole.builder.build(work), whole.cache).hidden)
        mine.pages.prepare(whole.tables, (), work)
        got = mine.run(whole.builder, whole.tables, work, range(3), ()).logits
    held = len(plan.vocab_range(rank))
    error = relative_rms(got[:, :held], expected[:, :held])
    assert error.max() <= LIMIT, error


def test_what_was_packed_is_what_was_read() -> None:
    """Every padded matrix of a rank, unpacked, is its slice of the checkpoint and zeros."""
    from deskfleet.engine.cuda.packing import ungate, unpack_fp4, unpack_fp8

    source = checkpoint()
    config, plan = source.config, ShardPlan(source.config, Layout(3))
    layer = config.layers[1]
    with ShardReader(source, plan, 2) as reader:
        model = load_model(reader, torch.device("cpu"))
        loaded, shape = model.layers[layer.index], model.shape
        prefix = f"{layer.prefix}.ffn.experts.{shape.expert_ids.start}"
        w1 = torch.from_numpy(reader.raw(f"{prefix}.w1.weight"))
        w3 = torch.from_numpy(reader.raw(f"{prefix}.w3.weight"))
        wo_a = torch.from_numpy(reader.raw(f"{layer.prefix}.attn.wo_a.weight"))
        wo_b = torch.from_numpy(reader.raw(f"{layer.prefix}.attn.wo_b.weight"))
        shared = torch.from_numpy(reader.raw(f"{layer.prefix}.ffn.shared_experts.w1.weight"))
    width, inner = shape.expert_width, config.moe_intermediate_size
    experts = unpack_fp4(loaded.w13, gated=True).codes[0]
    assert torch.equal(experts[:inner], w1)
    assert torch.equal(experts[width : width + inner], w3)
    assert torch.equal(ungate(unpack_fp8(loaded.shared_w13)[0])[:inner], shared)
    low, groups = config.o_lora_rank, shape.groups
    grouped = unpack_fp8(loaded.wo_a)[0].unflatten(0, (groups, -1))
    assert torch.equal(grouped[:, :low].flatten(0, 1), wo_a)
    assert not grouped[:, low:].any()
    columns = unpack_fp8(loaded.wo_b)[0].unflatten(1, (groups, -1))
    assert torch.equal(columns[..., :low].flatten(1), wo_b)
    assert not columns[..., low:].any()
    assert len(model.embedding) == plan.vocab_per_rank + 1
    assert not model.embedding[len(plan.vocab_range(2)) :].any()


@needs_gpu
@pytest.mark.parametrize("exact", [None, False], ids=["exact", "as large models"])
@torch.inference_mode()
def test_golden_layers(exact: bool | None) -> None:
    """Every layer, fed with the golden inputs of a prompt of 40 tokens."""
    data = golden("golden/intermediates_prefill40")
    runner = runner_on(BACKEND, RunnerLimits(1, 64, 16, num_blocks=4, num_window_blocks=4), exact=exact)
    scatter_blocks(runner)
    assert isinstance(runner.backend, CudaBackend)
    model = runner.backend.model
    work = [segment(data["input_ids"].numpy().astype(np.int64), 0, 40)]
    model.pages.prepare(runner.tables, (), work)
    step, _ = model._make_step(40, True, model.device)
    model._fill(step, model._rows(runner.builder, work), 0, 40)
    wrong = {}
    for weights in model.weights.layers:
        prefix, seen = weights.plan.prefix, {}

        def watch(
            name: str, prefix: str = prefix, index: int = weights.plan.index, seen: dict[str, Tensor] = seen
        ) -> None:
            if name == "embed":
                step.streams.stream.copy_(data[f"{prefix}.h_in"])
                step.streams.pre.copy_(data[f"{prefix}.pre_mix_in"])
            elif name == f"{index}.attention_out":
                seen["attn_out"] = step.attended.clone()
            elif name == f"{index}.ffn_in":
                seen["pre_mix_out"] = step.streams.pre.clone()

        step.layers = [replace(weights, plan=replace(weights.plan, has_engram=False))]
        step.run_layers(watch)
        seen["h_out"] = step.streams.stream.clone()
        for name, mine in seen.items():
            expected = data[f"{prefix}.{name}"].to(torch.float64)
            error = (mine.cpu().to(torch.float64) - expected).square().mean().sqrt()
            wrong[f"{prefix}.{name}"] = float(error / expected.square().mean().sqrt())
    assert {name for name in wrong if name.endswith("h_out")} == {
        f"layers.{n}.h_out" for n in range(len(model.weights.layers))
    }
    limits = {name: ATTENTION_LIMIT if name.endswith("attn_out") else STREAM_LIMIT for name in wrong}
    assert not {name: error for name, error in wrong.items() if error > limits[name]}, wrong


@needs_gpu
@pytest.mark.parametrize(
    ("graphs", "exact"),
    [(True, None), (False, None), (True, False)],
    ids=["graphs", "no graphs", "as large models"],
)
def test_golden_runs(graphs: bool, exact: bool | None) -> None:
    """The recorded prompts at once and token by token: no further from the publisher, and from the CPU, than the golden
    data allows an engine that sums in another order."""
    limits = RunnerLimits(1, 192, 16, num_blocks=12, num_window_blocks=12)
    runners = [
        runner_on(BACKEND, limits, max_step_tokens=192, graphs=graphs, exact=exact),
        runner_on("cpu", limits, max_step_tokens=192),
    ]
    decode, prefill = golden("golden/decode"), golden("golden/prefill")
    logits = []
    for runner in runners:
        scatter_blocks(runner)
        for length in (130, 17):  # the rows wanted of a large step are no rows of a small one
            ids = prefill[f"len{length}.input_ids"].numpy().astype(np.int64)
            last = runner.lead(
                [segment(ids, 0, length)], [length - 2, length - 1] if length > 64 else [length - 1]
            ).logits[-1]
            assert int(last.argmax()) == int(prefill[f"len{length}.next_id"])
        ids = decode["input_ids"].numpy().astype(np.int64)
        runner.lead([segment(ids, 0, 40)], [])
        steps = [runner.lead([segment(ids, p, p + 1)], [0]).logits.clone() for p in range(40, 70)]
        logits.append(torch.cat(steps))
    for other in (logits[1], decode["logits"]):
        apart = relative_rms(logits[0], other)
        assert apart.mean() <= MEAN_LIMIT, apart
        assert apart.max() <= LIMIT, apart
        agreed = (logits[0].argmax(-1) == other.argmax(-1)).float().mean()
        assert agreed >= 0.85, agreed


def core_on(
    device: str,
    source: Checkpoint,
    tokens: np.ndarray,
    *,
    max_step_tokens: int,
    speculation: str = "off",
    **options: Any,
) -> EngineCore:
    """A core over a rank of its own, with everything that requests are run with."""
    config = source.config
    drafting = SpeculationOptions.parse(speculation, config.dspark_block_size)
    with_drafts = drafting.num_drafts > 0
    limits = resolve_limits(
        config, max_num_seqs=8, max_model_len=min(config.max_position_embeddings, 8192), block_size=16,
        kv_cache_tokens=None, num_window_tails=8, with_drafts=with_drafts,
    )  # fmt: skip
    runner = runner_on(
        device, limits, source=source, tokens=tokens, max_step_tokens=max_step_tokens, with_drafts=with_drafts,
        **options,
    )  # fmt: skip
    return EngineCore(
        runner, tokens, CoreOptions(max_num_batched_tokens=max_step_tokens, speculation=drafting)
    )


def run_all(
    core: EngineCore, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
) -> list[list[int]]:
    """The answers of all prompts, asked at the same time."""
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for number, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        asked = AddRequest(str(number), tuple(prompt), bytes(len(prompt)), (), params)
        assert core.add(asked) is None
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            answers[output.request_id] += output.token_ids
    return list(answers.values())


def tokens_list(length: int, seed: int) -> list[int]:
    return [int(i) for i in tokens(length, seed)]


@pytest.fixture(scope="module")
def asked() -> list[dict[str, Any]]:
    """Pocket's questions and what the CPU answers (tools/pocket_answers.py)."""
    questions: list[dict[str, Any]] = json.loads(ANSWERS.read_text())
    return questions


def pocket_core(**options: Any) -> tuple[EngineCore, Checkpoint, np.ndarray]:
    """A core over Pocket on the GPU, its checkpoint and its token map."""
    source, tokens = pocket()
    return core_on("cuda", source, tokens, max_step_tokens=256, **options), source, tokens


def pocket() -> tuple[Checkpoint, np.ndarray]:
    """Pocket's checkpoint and its token map."""
    source = Checkpoint.open(locate(POCKET))
    return source, compressed_token_map(load_tokenizer(source.directory)).astype(np.int64)


def answers_of(core: EngineCore, asked: Sequence[dict[str, Any]]) -> list[list[int]]:
    """What the core answers to questions, greedily."""
    sampling = [
        SamplingParams(
            temperature=0, max_tokens=question["max_tokens"], stop_token_ids=tuple(question["stop_token_ids"])
        )
        for question in asked
    ]
    return run_all(core, [question["prompt"] for question in asked], sampling)


@needs_gpu
def test_prefixes_that_are_found_again(asked: list[dict[str, Any]]) -> None:
    """A prompt that was asked before: with its window, and with the window lost, so that rows run again. The answers
    are the CPU's, all three times."""
    core, _, _ = pocket_core()
    long = [question for question in asked if 400 < len(question["prompt"]) < 1600][-1:]
    for _ in range(2):
        assert answers_of(core, long) == [question["answer"] for question in long]
    assert core.cache.stats.num_window_hits > 0
    answers_of(
        core, [question for question in asked if len(question["prompt"]) < 200][:60]
    )  # they take the windows
    before = core.cache.stats.num_replayed
    assert answers_of(core, long) == [question["answer"] for question in long]
    assert core.cache.stats.num_replayed > before


@needs_gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_pocket_answers_as_on_the_cpu(graphs: bool, asked: list[dict[str, Any]]) -> None:
    """Every question of the eval set, eight at a time, greedily."""
    core, source, tokens = pocket_core(graphs=graphs)
    answers = answers_of(core, asked)
    differ = [
        (number, answer, question["answer"])
        for number, (answer, question) in enumerate(zip(answers, asked, strict=True))
        if answer != question["answer"]
    ]
    about = [(number, gap_of(source, tokens, asked[number]["prompt"], *both)) for number, *both in differ[:4]]
    assert not differ, (
        f"{len(differ)} of {len(asked)} answers differ; where and by how much on the CPU: {about}"
    )


def gap_of(
    source: Checkpoint, tokens: np.ndarray, prompt: list[int], mine: list[int], theirs: list[int]
) -> tuple[int, float]:
    """The first place where two answers part, and how much better the CPU finds its own token there, in standard
    deviations of its logits."""
    place = next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), -1)
    if place < 0:
        return min(len(mine), len(theirs)), float("nan")
    runner = runner_on("cpu", RunnerLimits(1, 8192, 16, 512, 512), source=source, tokens=tokens)
    scatter_blocks(runner)
    ids = np.array(prompt + theirs[:place])
    work = Segment(0, 0, ids, tokens[ids], tokens[:0], np.zeros(len(ids), bool))
    logits = runner.lead([work], [len(ids) - 1]).logits[0]
    return place, float((logits[theirs[place]] - logits[mine[place]]) / logits.std())


def apart_from(
    source: Checkpoint, tokens: np.ndarray, answers: Sequence[list[int]], asked: Sequence[dict[str, Any]]
) -> list[tuple[int, int, float]]:
    """Answers that are not the CPU's: question, and place and gap of `gap_of`, which say whether two tokens were nearly
    even there."""
    return [
        (number, *gap_of(source, tokens, question["prompt"], mine, question["answer"]))
        for number, (mine, question) in enumerate(zip(answers, asked, strict=True))
        if mine != question["answer"]
    ]


@needs_gpu
def test_llm(asked: list[dict[str, Any]]) -> None:
    """As users start it: a rank process of its own, which says what computes where."""
    from deskfleet.engine.llm import LLM

    some = asked[1:5]
    with LLM(locate(POCKET), device="cuda", max_num_seqs=4) as llm:
        sampling = [SamplingParams(temperature=0, max_tokens=question["max_tokens"]) for question in some]
        answers = llm.generate([question["prompt"] for question in some], sampling)
        rank, memory = llm._client.ranks[0], llm._client.memory[0].device
    assert [list(answer.token_ids) for answer in answers] == [question["answer"] for question in some]
    assert rank.operators.startswith("triton (layers and head in kernels on ")
    assert rank.operators.endswith("asked for cuda")
    assert memory is not None
    assert memory.allocated_bytes is not None


@needs_gpu
def test_memory_does_not_grow() -> None:
    """Steps of every size have their memory from the start; what comes later is graphs."""
    tokens = token_map()
    core = core_on("cuda", checkpoint(), tokens, max_step_tokens=64, graphs=False)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def some(seed: int) -> None:
        run_all(core, [tokens_list(30 + seed % 50, seed + n) for n in range(8)], [greedy] * 8)

    some(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for seed in range(1, 12):
        some(seed)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize(
    ("name", "with_drafts"), [("golden", False), ("golden", True), (POCKET, False), (POCKET, True)]
)
def test_planned_bytes_are_those_held(name: str, with_drafts: bool) -> None:
    """The planner's lines of a GPU against the tensors there, and against what torch has given out."""
    source = checkpoint() if name == "golden" else Checkpoint.open(locate(POCKET))
    limits = resolve_limits(
        source.config, max_num_seqs=16, max_model_len=1024, block_size=16, kv_cache_tokens=None,
        num_window_tails=8, with_drafts=with_drafts,
    )  # fmt: skip
    if HAS_GPU:
        before = torch.cuda.memory_allocated()
    options: dict[str, Any] = {"max_step_tokens": 512, "with_drafts": with_drafts}
    runner = runner_on(BACKEND, limits, source=source, graphs=False, **options)
    held = device_census(runner)
    assert held is not None
    if HAS_GPU:  # other tests of this process hold some, too
        held = replace(held, allocated_bytes=torch.cuda.memory_allocated() - before)
    process = ProcessMemory(0, 0, 0, 0)
    plan = ShardPlan(source.config, Layout(1))
    check = check_device(
        cuda_lines(plan, limits, 0, **options),
        RankMemory(0, {}, process, process, held),
    )
    assert abs(check.relative_difference) <= 0.02, check
    for line in check.lines:
        if line.name not in (DeviceLine.workspace, "gpu.other"):
            assert line.predicted_bytes == line.measured_bytes, line
    other = [line.measured_bytes for line in check.lines if line.name == "gpu.other"]
    assert sum(other) <= 0.02 * check.measured_bytes


@pytest.mark.parametrize("with_drafts", [False, True])
@pytest.mark.parametrize(
    ("max_model_len", "max_step_tokens", "decoder_replay"),
    [(4096, 512, False), (131072, 2048, True), (131072, 16384, False)],
)
def test_planned_steps_of_the_published_model(
    max_model_len: int, max_step_tokens: int, decoder_replay: bool, with_drafts: bool
) -> None:
    """Buffers of all sizes of steps of one rank of four, asked for but not made, against the planner's line."""
    config = ModelConfig.from_dict(published_config_dict())
    plan = ShardPlan(config, Layout(4))
    limits = resolve_limits(
        config, max_num_seqs=16, max_model_len=max_model_len, block_size=16, kv_cache_tokens=None,
        num_window_tails=8, with_drafts=with_drafts, decoder_replay=decoder_replay,
    )  # fmt: skip
    table = torch.empty(17, -(-max_model_len // 16), device="meta")
    blocks = limits.num_window_blocks + 1 + passage_blocks(max_step_tokens, 16, 16)
    pages = Pages([torch.empty(blocks * 16, 528, device="meta")], {}, {}, {}, table, table, 16, 7)
    most_extra = 2 * config.head_dim + config.index_n_heads
    nothing: Any = torch.empty(0, device="meta")
    width, stages = config.hidden_size, config.draft_layers
    drafts: Any = SimpleNamespace(
        layers=[SimpleNamespace(plan=stage, num_extra=0) for stage in stages],
        norm=nothing,
        main_proj=Fp8Tiles(nothing, nothing, width, len(config.dspark_target_layer_ids) * width),
        main_kv=Fp8Tiles(nothing, nothing, len(stages) * config.head_dim, width),
    )

    group = HostGroup(Alone(0, 4), "meta")
    group.reserve(max(*prefill_sizes(max_step_tokens, max_model_len), 64) * width)

    of_decoder = SimpleNamespace(starts_decoder=True)
    layers: Any = [
        SimpleNamespace(num_extra=extra, plan=of_decoder) for extra in (most_extra, config.index_n_heads, 0)
    ]
    parts = RankShape(plan, 0), layers, nothing, nothing, nothing, pages

    def make(size: int, long: bool, device: torch.device | str) -> tuple[object, ...]:
        kind = PrefillStep if long and size >= FILLED_ROWS else DecodeStep
        step = kind(*parts, num_rows=size, device=device, bit_ops=True, long=long, group=group)
        return step, DraftContext(drafts, step) if with_drafts else None

    def make_replay(device: torch.device | str) -> tuple[object, ...]:
        step = ReplayStep(*parts, num_rows=REPLAYED_ROWS, device=device, bit_ops=True, group=group)
        return step, DraftContext(drafts, step) if with_drafts else None

    def make_block(size: int, device: torch.device | str) -> DraftStep:
        return DraftStep(
            RankShape(plan, 0, of_drafts=True), drafts, nothing, nothing, pages, num_requests=size, first_own=16,
            device=device, bit_ops=True, group=group,
        )  # fmt: skip

    num_drafts = config.dspark_block_size if with_drafts else 0
    makers: list[Any] = [partial(make, n, False) for n in decode_sizes(limits.max_num_seqs, num_drafts)]
    makers += [partial(make, n, True) for n in prefill_sizes(max_step_tokens, max_model_len)]
    if decoder_replay:
        makers.append(make_replay)
    if with_drafts:
        makers += [partial(make_block, n) for n in draft_sizes(limits.max_num_seqs)]
    asked = group.memory.nbytes + sum(size for site, size in measure(makers).items() if not site.pinned)
    options: dict[str, Any] = {"max_step_tokens": max_step_tokens, "with_drafts": with_drafts}
    lines = {line.name: line for line in cuda_lines(plan, limits, 0, **options)}
    planned = lines[DeviceLine.workspace].num_bytes
    assert abs(planned / asked - 1) <= 0.02, f"{planned:,} B planned, {asked:,} B asked for"
