"""How many answers of Pocket change when sums of FP8 products keep fewer bits, or operators compute in float32.

    .venv/bin/python tools/narrow_products.py [--bits 13] [--of experts,projections] [--rows-from 9] [--questions 1:9]
    .venv/bin/python tools/narrow_products.py --float32 attention,streams,norms,linear,rest [--questions 1:9]

Runs on the CPU: the engine answers the questions of tests/gpu/pocket_answers.json greedily, eight at a time. Products
of 32 columns that share a scale are cut off BITS bits below the greatest of them before they are added up in float32:
for experts, for the other FP8 projections of passes of at least so many rows, or for both. With 30 bits nothing is
cut off, and only the sums are float32. --float32 names other operators that compute in float32 what the reference
computes in float64. Prints where answers leave those of the file, and how much better the exact engine finds its own
token there, in standard deviations of its logits.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deskfleet.endpoint import SamplingParams
from deskfleet.engine import ops
from deskfleet.engine.batch import Segment
from deskfleet.engine.core import CoreOptions, EngineCore
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.messages import AddRequest
from deskfleet.engine.ops import reference
from deskfleet.engine.ops.quant import Fp4Matrix, fake_quant_fp8
from deskfleet.engine.rank import token_map
from deskfleet.engine.runner import ModelRunner
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.embedded import POCKET, locate
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.limits import resolve_limits

QUESTIONS = Path(__file__).parents[1] / "tests" / "gpu" / "pocket_answers.json"
GROUP, ROWS = 32, 16  # columns that share a scale; rows whose products are there at a time


def narrow(x: Tensor, weight: Tensor, bits: int) -> Tensor:
    """x [T, K] times weight [N, K] -> float32 [T, N], products of a group cut off `bits` below the greatest's first."""
    wide = weight.to(torch.float32).unflatten(1, (-1, GROUP))
    out = []
    for rows in x.to(torch.float32).split(ROWS):
        products = rows.unflatten(1, (-1, GROUP))[:, None] * wide  # exact: eight bits each
        greatest = products.abs().amax(-1, keepdim=True)
        quantum = torch.ldexp(torch.ones_like(greatest), torch.frexp(greatest)[1] - 1 - bits)
        out.append((torch.trunc(products / quantum) * quantum).sum(-1).sum(-1))
    return torch.cat(out) if out else x.new_zeros(0, len(weight), dtype=torch.float32)


class Narrowed:
    """Operators of the model with narrow sums in the place of some."""

    def __init__(self, bits: int, rows_from: int) -> None:
        self.bits, self.rows_from = bits, rows_from
        self._decoded: dict[int, Tensor] = {}

    def quantized_linear_partial(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = fake_quant_fp8(x).flatten(0, -2)
        if len(rows) < self.rows_from:
            return reference.quantized_linear_partial(x, weight)
        return narrow(rows, weight, self.bits).to(torch.float64).view(*x.shape[:-1], -1)

    def quantized_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.quantized_linear_partial(x, weight).to(torch.bfloat16)

    def normed_linear(self, x: Tensor, weight: Tensor, norm: Tensor, eps: float) -> Tensor:
        return reference.rms_norm(self.quantized_linear(x, weight), norm, eps)

    def routed_experts(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        w13: Fp4Matrix,
        w2: Fp4Matrix,
        *,
        first_expert: int,
        limit: float,
    ) -> Tensor:
        total, codes = torch.zeros(x.shape, dtype=torch.float64), fake_quant_fp8(x)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            gates, down = (self._matrix(stack, expert - first_expert) for stack in (w13, w2))
            output = self._expert(codes[rows], gates, down, limit, weights[rows, places])
            total.index_add_(0, rows, output.to(torch.float64))
        return total

    def shared_expert(self, x: Tensor, w13: Tensor, w2: Tensor, *, limit: float) -> Tensor:
        return self._expert(fake_quant_fp8(x), w13, w2, limit, None)

    def _expert(self, codes: Tensor, w13: Tensor, w2: Tensor, limit: float, weights: Tensor | None) -> Tensor:
        gate, up = narrow(codes, w13, self.bits).to(torch.bfloat16).chunk(2, -1)
        activated = reference.expert_activation(gate, up, limit, weights)
        return narrow(fake_quant_fp8(activated), w2, self.bits).to(torch.bfloat16)

    def _matrix(self, stack: Fp4Matrix, expert: int) -> Tensor:
        one = stack[expert]
        return self._decoded.setdefault(one.codes.data_ptr(), one.decode().to(torch.float32))


OF = {
    "experts": ("routed_experts", "shared_expert"),
    "projections": ("quantized_linear", "quantized_linear_partial", "normed_linear"),
}
FLOAT32 = {
    "attention": ("sparse_attention",),
    "streams": ("hc_mixes", "hc_weights", "hc_split", "hc_collapse", "hc_collapse_norm", "hc_expand"),
    "norms": ("rms_norm",),
    "linear": ("linear_f32", "linear", "linear_partial", "grouped_linear"),
    "rest": ("compress_pairs", "index_scores", "route", "engram_gate", "expert_activation", "add_round"),
}


def float32_operators() -> Any:
    """The reference operators with float32 where they have float64."""
    source = Path(reference.__file__).read_text().replace("torch.float64", "torch.float32")
    module = types.ModuleType("reference_in_float32")
    exec(compile(source, module.__name__, "exec"), vars(module))
    return module


def runner_of(source: Checkpoint, tokens: np.ndarray, num_seqs: int) -> ModelRunner:
    """Pocket on the CPU."""
    config = source.config
    limits = resolve_limits(
        config, max_num_seqs=num_seqs, max_model_len=config.max_position_embeddings, block_size=16,
        kv_cache_tokens=None, num_window_tails=8, with_drafts=False,
    )  # fmt: skip
    return ModelRunner(
        source, ShardPlan(config, Layout(1)), Communicator(), limits,
        pad_compressed_id=int(tokens[config.engram_pad_token_id]),
    )  # fmt: skip


def answers_of(core: EngineCore, asked: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Greedy answers to all questions."""
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(asked))}
    for name, question in zip(answers, asked, strict=True):
        sampling = SamplingParams(
            temperature=0, max_tokens=question["max_tokens"], stop_token_ids=tuple(question["stop_token_ids"])
        )
        prompt = tuple(question["prompt"])
        core.add(AddRequest(name, prompt, bytes(len(prompt)), (), sampling))
    while core.has_work:
        for output in core.step():
            answers[output.request_id] += output.token_ids
    return list(answers.values())


def gap_at(runner: ModelRunner, tokens: np.ndarray, before: list[int], theirs: int, mine: int) -> float:
    """By how many deviations of the logits after `before` the exact engine prefers one token to another."""
    ids = np.array(before)
    for table in (runner.tables.global_blocks, runner.tables.window_blocks):
        table[:] = 1 + np.arange(table.size, dtype=np.int32).reshape(table.shape)
    work = Segment(0, 0, ids, tokens[ids], tokens[:0], np.zeros(len(ids), bool))
    logits = runner.lead([work], [len(ids) - 1]).logits[0]
    return float((logits[theirs] - logits[mine]) / logits.std())


def kinds_of(known: Mapping[str, object]) -> Callable[[str], list[str]]:
    """What reads some of the names of `known`, separated by commas."""

    def kinds(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return text.split(",")

    return kinds


def main() -> int:
    """Answer, and print what differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bits", type=int, default=13)
    parser.add_argument("--of", type=kinds_of(OF), default=list(OF))
    parser.add_argument("--float32", type=kinds_of(FLOAT32), default=[])
    parser.add_argument("--rows-from", type=int, default=9, help="of a pass, for its projections")
    parser.add_argument("--questions", default=":")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first, _, last = options.questions.partition(":")
    asked = json.loads(QUESTIONS.read_text())[int(first or 0) : int(last) if last else None]
    ops.select("auto")
    source = Checkpoint.open(locate(POCKET))
    tokens = token_map(source).astype(np.int64)
    core = EngineCore(runner_of(source, tokens, 8), tokens, CoreOptions(max_num_batched_tokens=256))
    if options.float32:
        what, changed = f"float32 in {' and '.join(options.float32)}", float32_operators()
        names = [name for kind in options.float32 for name in FLOAT32[kind]]
    else:
        what, changed = (
            f"{options.bits} bits of {' and '.join(options.of)}",
            Narrowed(options.bits, options.rows_from),
        )
        names = [name for kind in options.of for name in OF[kind]]
    own = {name: getattr(ops, name) for name in names}
    for name in names:
        setattr(ops, name, getattr(changed, name))
    answers = answers_of(core, asked)
    for name, operator in own.items():
        setattr(ops, name, operator)
    differ = [n for n, answer in enumerate(answers) if answer != asked[n]["answer"]]
    print(f"{what}: {len(differ)} of {len(asked)} answers differ")
    judge = runner_of(source, tokens, 1)
    for number in differ:
        mine, theirs = answers[number], asked[number]["answer"]
        place = next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if place is None:
            print(f"  question {number + int(first or 0)}: one answer is the other's beginning")
            continue
        gap = gap_at(judge, tokens, asked[number]["prompt"] + theirs[:place], theirs[place], mine[place])
        print(f"  question {number + int(first or 0)}: token {place}, {gap:.4f} deviations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
