"""Ranks that share out compressed KV and index keys (DCP): the bits of one rank, and what they exchange for it.

Sizes 1, 2 and 4 under changing company: tests/engine/test_churn.py. Here: logits of every position, and the claims of
docs/decisions/0012.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deskfleet.engine.core import EngineCore
from deskfleet.engine.ops import reference
from deskfleet.model.cache_formats import CacheFormats
from tests.engine.cores import adding, core_over, load_runner, run_all
from tests.engine.engines import greedy, random_ids
from tests.engine.golden import checkpoint, measured, plain_limits, token_map
from tests.engine.lockstep import Lockstep, ThreadCommunicator

IDS = random_ids(150, seed=5)  # more than index_topk entries, and than all candidates


def group_of(tp_size: int, dcp_size: int) -> Lockstep:
    return Lockstep(
        checkpoint(),
        tp_size,
        replace(plain_limits(2, 256), dcp_size=dcp_size),
        pad_compressed_id=int(token_map()[checkpoint().config.engram_pad_token_id]),
        with_drafts=True,
    )


def score(core: EngineCore) -> bytes:
    """Logits float32 [n, V] of the whole prompt."""
    core.add(adding("score", IDS, greedy(1), score=True))
    rows = b""
    while core.has_work:
        for output in core.step():
            assert output.error is None
            rows += output.logits or b""
    return rows


@pytest.fixture(scope="module")
def alone() -> Iterator[bytes]:
    runner = load_runner(num_slots=2, max_model_len=256)
    yield score(core_over(runner, max_num_batched_tokens=len(IDS)))
    runner.close()


@pytest.mark.parametrize(
    ("tp_size", "dcp_size"),
    [(2, 2), (4, 4), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((3, 3), (4, 2)))],
)
def test_logits_are_those_of_one_rank(alone: bytes, tp_size: int, dcp_size: int) -> None:
    with group_of(tp_size, dcp_size) as group:
        found = score(core_over(group.leader, max_num_batched_tokens=40))
        held = [runner.cache.entries for runner in group.runners]
    assert group.not_finite == []
    assert found == alone
    # Each holds its part of the blocks, the null block among them.
    formats, num_blocks = CacheFormats(checkpoint().config, 16, with_drafts=True), 2 * 16 + 1
    for entries in held:
        for source, pages in entries.items():
            ratio = checkpoint().config.compress_ratios[source]
            assert len(pages) == -(-num_blocks // dcp_size) * formats.entries_per_block(ratio)


def test_a_token_moves_each_pick_once_however_many_layers_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per index source `index_topk` records, whatever the number of layers and heads."""
    config = checkpoint().config
    moved: list[tuple[int, ...]] = []  # shapes of what the first rank gives away
    all_reduce = ThreadCommunicator.all_reduce

    def watched(self: ThreadCommunicator, tensor: Tensor) -> Tensor:
        if self.rank == 0 and not tensor.is_floating_point():
            moved.append((len(tensor), tensor[0].nbytes))
        return all_reduce(self, tensor)

    with group_of(2, 2) as group:
        core = core_over(group.leader, prefix_cache=False)
        core.add(adding("stream", IDS, greedy(4)))
        core.step()  # the prompt
        monkeypatch.setattr(ThreadCommunicator, "all_reduce", watched)
        before = core.stats.num_steps
        run_all(core, [])
        num_steps = core.stats.num_steps - before
    assert num_steps == 3
    record_bytes = CacheFormats(config, 16, with_drafts=True).entry_record_bytes
    assert moved == [(config.index_topk, record_bytes)] * len(config.index_source_layer_ids) * num_steps
    users = sum(layer.index_source is not None for layer in config.layers[: config.num_hidden_layers])
    assert users > len(config.index_source_layer_ids), "else nothing was shared"


# --- what ranks do not do: attend to their own parts and combine them by log-sum-exp ------------------------

HEADS, WIDTH, WINDOW, PICKS, SCALE = 64, 512, 128, 512, 512**-0.5  # as published
Partial = tuple[
    Tensor, Tensor, Tensor
]  # maximum [T, H], denominator [T, H], numerator [T, H, D], all float64


def partial_attention(query: Tensor, rows: Tensor) -> Partial:
    """The published online softmax of query bf16 [T, H, D] over rows bf16 [n, D], before the division."""
    maximum = torch.full(query.shape[:2], -1e30, dtype=torch.float64)
    denominator = torch.zeros_like(maximum)
    numerator = torch.zeros(query.shape, dtype=torch.float64)
    for block in rows.double().split(64):
        scores = ((query.double() @ block.T).float() * SCALE).double()
        highest = torch.maximum(maximum, scores.amax(-1))
        weights = torch.exp(scores - highest[..., None]).float()
        rescale = torch.exp(maximum - highest)
        denominator = denominator * rescale + weights.sum(-1, dtype=torch.float64)
        numerator = numerator * rescale[..., None] + weights.bfloat16().double() @ block
        maximum = highest
    return maximum, denominator, numerator


def combine(parts: Sequence[Partial], sink: Tensor) -> Tensor:
    """bf16 [T, H, D]: nothing is lost on the way, everything is float64 up to the division."""
    maximum = torch.stack([part[0] for part in parts]).amax(0)
    shares = [torch.exp(part[0] - maximum) for part in parts]
    denominator = sum(part[1] * share for part, share in zip(parts, shares, strict=True))
    numerator = sum(part[2] * share[..., None] for part, share in zip(parts, shares, strict=True))
    return (numerator / (denominator + torch.exp(sink.double() - maximum))[..., None]).bfloat16()


@pytest.mark.parametrize("dcp_size", [2, 4])
def test_combined_partial_attention_would_not_give_the_same_bits(dcp_size: int) -> None:
    """Probabilities are rounded to bf16 against the maximum so far, and a part has another one."""
    random = torch.Generator().manual_seed(1)
    query = torch.randn(8, HEADS, WIDTH, generator=random).bfloat16()
    rows = torch.randn(WINDOW + PICKS, WIDTH, generator=random).bfloat16()
    sink = torch.randn(HEADS, generator=random)
    index = torch.arange(len(rows)).expand(len(query), -1)
    whole = reference.sparse_attention(query, [(rows, index)], sink, SCALE)
    assert torch.equal(combine([partial_attention(query, rows)], sink), whole), "of one part it is the same"
    owner = torch.arange(len(rows)) // 16 % dcp_size
    owner[:WINDOW] = 0  # every rank has the window; one of them counts it
    parts = [partial_attention(query, rows[owner == rank]) for rank in range(dcp_size)]
    found = combine(parts, sink)
    share = (found != whole).double().mean().item()
    distance = ((found.double() - whole.double()).square().mean().sqrt() / whole.double().std()).item()
    measured.append(
        f"attention combined of {dcp_size}: {share:.0%} of outputs differ, relative RMS {distance:.4f}"
    )
    assert share > 0.25
    assert 0.001 < distance < 0.005
