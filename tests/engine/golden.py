"""The golden data of tests/golden/v41-tiny and a model to hold against it.

`Harness` drives one in-process rank by hand. `layer_differences` feeds every layer, one at a time, with the golden
inputs of that layer and returns whatever disagrees: end-to-end logits cannot see the smallest mistakes, this can.
The same function judges the planted mistakes of test_mutations.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from deskfleet.engine import ops
from deskfleet.engine.batch import Batch, Segment
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.model.block import Block
from deskfleet.engine.model.draft import Anchor, Proposal
from deskfleet.engine.model.step import Step
from deskfleet.engine.model.v41 import BackboneOutput
from deskfleet.engine.runner import ModelRunner
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.limits import RunnerLimits
from deskfleet_engram.hashing import DEAD
from deskfleet_engram.tokens import compressed_token_map

ROOT = Path(__file__).parents[1] / "golden" / "v41-tiny"
Tensors = dict[str, torch.Tensor]

measured: list[str] = []
"""Lines a test wants shown at the end of the run, whether it passes or not (see tests/conftest.py)."""

# Largest relative RMS of one layer fed with golden inputs. The golden README measured these for an engine with the
# publisher's rounding points and float64 sums; a limit is twice that. The issue of record asks h_out <= 0.0064.
LAYER_LIMITS = {"sparse_out": 2e-4, "attn_out": 1.2e-3, "ffn_out": 1.4e-3, "h_out": 4.2e-4}
PRE_MIX_LIMIT = 2e-4  # absolute


@cache
def golden(name: str) -> Tensors:
    """One file of golden/ or kernels/, by its name without suffix, e.g. "golden/prefill"."""
    return load_file(ROOT / f"{name}.safetensors")


@cache
def token_map() -> np.ndarray:
    return compressed_token_map(Tokenizer.from_file(str(ROOT / "model" / "tokenizer.json"))).astype(np.int64)


@cache
def checkpoint() -> Checkpoint:
    return Checkpoint.open(ROOT / "model")


@dataclass(frozen=True)
class Difference:
    """One disagreement: where, what, how much, and how much was allowed."""

    where: str
    what: str
    amount: float
    limit: float

    def __str__(self) -> str:
        return f"{self.where} {self.what}: {self.amount:.6g} > {self.limit:.6g}"


class Harness:
    """A TP=1 rank in this process, with drafts, driven by hand."""

    def __init__(self, *, num_slots: int = 4, max_model_len: int = 256, **config_changes: int) -> None:
        source = checkpoint()
        self.checkpoint = replace(source, config=replace(source.config, **config_changes))
        self.runner = ModelRunner(
            self.checkpoint,
            ShardPlan(self.checkpoint.config, Layout(1)),
            Communicator(),
            plain_limits(num_slots, max_model_len),
            pad_compressed_id=int(token_map()[2]),
            with_drafts=True,
        )
        give_every_slot_its_blocks(self.runner)
        self.model, self.cache = self.runner.model, self.runner.cache
        assert self.runner.drafts is not None
        self.drafts = self.runner.drafts

    def segment(
        self, ids: torch.Tensor, start: int, stop: int, *, slot: int = 0, image: torch.Tensor | None = None
    ) -> Segment:
        """Positions start..stop-1 of the sequence `ids`."""
        tokens = ids.numpy().astype(np.int64)
        inside = np.zeros(len(tokens), bool) if image is None else image.numpy().astype(bool)
        compressed = token_map()[tokens]
        compressed[inside] = DEAD
        history = slice(max(start - 3, 0), start)
        return Segment(
            slot, start, tokens[start:stop], compressed[start:stop], compressed[history], inside[start:stop]
        )

    @torch.inference_mode()
    def run(
        self, *segments: Segment, image_rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, BackboneOutput]:
        """Forward and commit; logits float32 of every row."""
        batch = self.runner.builder.build(segments, image_rows)
        output = self.model.forward(batch, self.cache)
        self.drafts.commit(output.taps, batch, self.cache)
        return self.model.logits(output.hidden), output

    @torch.inference_mode()
    def propose(self, tokens: torch.Tensor, positions: list[int], slots: list[int]) -> Proposal:
        """Drafts after `tokens`, whose predecessors sit at `positions`."""
        anchors = [
            Anchor(slot, position + 1, int(token))
            for slot, position, token in zip(slots, positions, tokens, strict=True)
        ]
        return self.drafts.propose(anchors, self.runner.tables, self.cache)

    # The publisher keeps a ring: position p in place p mod W. These translate between it and our pages.

    def window_ring(self, layer: int, stop: int, slot: int = 0) -> torch.Tensor:
        """Window rows bf16 [W, D] before `stop` as the publisher's ring; absent ones zero."""
        positions = self._ring_positions(stop)
        pages = self.runner.tables.window_rows(slot, np.maximum(positions, 0))
        ring = ops.WINDOW.unpack(self.cache.windows[layer][pages])
        ring[positions < 0] = 0
        return ring

    def set_window_ring(self, layer: int, stop: int, ring: torch.Tensor, slot: int = 0) -> None:
        """Fill the window before `stop` from the publisher's ring bf16 [W, D]."""
        positions = self._ring_positions(stop)
        there = positions >= 0
        pages = self.runner.tables.window_rows(slot, positions[there])
        self.cache.windows[layer][pages] = _packed(ops.WINDOW, ring[torch.from_numpy(there)])

    def entries(self, source: int, count: int, slot: int = 0) -> torch.Tensor:
        """The first entries bf16 [count, D] of a slot."""
        return ops.ENTRY.unpack(self.cache.entries[source][self._entry_pages(source, count, slot)])

    def set_entries(self, source: int, entries: torch.Tensor, slot: int = 0) -> None:
        pages = self._entry_pages(source, len(entries), slot)
        self.cache.entries[source][pages] = _packed(ops.ENTRY, entries)

    def index_keys(self, source: int, count: int, slot: int = 0) -> torch.Tensor:
        """The first index keys bf16 [count, D] of a slot."""
        return ops.INDEX_KEY.unpack(self.cache.index_keys[source][self._entry_pages(source, count, slot)])

    def set_index_keys(self, source: int, keys: torch.Tensor, slot: int = 0) -> None:
        pages = self._entry_pages(source, len(keys), slot)
        self.cache.index_keys[source][pages] = _packed(ops.INDEX_KEY, keys)

    def _ring_positions(self, stop: int) -> np.ndarray:
        size = self.checkpoint.config.sliding_window
        return stop - 1 - (stop - 1 - np.arange(size)) % size

    def _entry_pages(self, source: int, count: int, slot: int) -> np.ndarray:
        ratio = self.checkpoint.config.compress_ratios[source]
        tables = self.runner.tables
        return tables.owned(tables.entry_addresses(slot, np.arange(count), ratio), ratio)[1]


def _packed(form: ops.RecordFormat, rows: torch.Tensor) -> torch.Tensor:
    """Pack golden rows, which are quantised already; a value that does not survive would spoil the comparison."""
    records = form.pack(rows.to(torch.bfloat16))
    assert torch.equal(form.unpack(records).double(), rows.double()), (
        "golden row is not on the quantised grid"
    )
    return records


def plain_limits(num_slots: int, max_model_len: int, block_size: int = 16) -> RunnerLimits:
    """Room for every slot at full length, in both pools."""
    blocks = num_slots * -(-max_model_len // block_size)
    return RunnerLimits(num_slots, max_model_len, block_size, num_blocks=blocks, num_window_blocks=blocks)


def give_every_slot_its_blocks(runner: ModelRunner) -> None:
    """For tests that drive a runner without a CacheManager: slot s owns the s-th run of blocks."""
    tables = runner.tables
    for table in (tables.global_blocks, tables.window_blocks):
        table[:] = 1 + np.arange(table.size, dtype=np.int32).reshape(table.shape)


def relative_rms(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """RMS of the difference over the standard deviation of the golden logits, per position (golden README §5)."""
    return (ours - theirs).square().mean(-1).sqrt() / theirs.std(-1)


def layer_differences(harness: Harness) -> Iterator[Difference]:
    """Every layer, the decode steps 44 and 45, the drafts made there and the image prompt, from golden inputs."""
    yield from prefill_differences(harness)
    yield from decode_differences(harness)
    yield from draft_differences(harness)
    yield from image_differences(harness)


@torch.inference_mode()
def prefill_differences(harness: Harness) -> Iterator[Difference]:
    """The 40-token prefill, layer by layer."""
    data, state = golden("golden/intermediates_prefill40"), golden("golden/state")
    batch = harness.runner.builder.build([harness.segment(data["input_ids"], 0, 40)])
    yield from _exact(
        "prefill", "engram_hash_ids", torch.from_numpy(batch.engram_ids), data["engram_hash_ids"]
    )
    yield from _exact("prefill", "embed_out", harness.model.embed(batch), data["embed_out"])
    seen: Tensors = {}
    step = harness.model.begin(batch, harness.cache, seen.__setitem__)
    for block in harness.model.blocks:
        layer, prefix = block.layer, block.layer.prefix
        theirs = _of(data, prefix)
        yield from _engram(harness, step, layer.index, prefix, theirs, seen)
        block(theirs["h_in"], theirs["pre_mix_in"], step)
        yield from _block(f"prefill {prefix}", _of(seen, prefix), theirs, block, batch)
        yield from _exact(
            f"prefill {prefix}", "window rows", seen[f"{prefix}.window_rows"], theirs["attn_kv"][:40]
        )
        if layer.is_kv_source:
            entries = theirs["attn_kv"][40:]
            keys = state[f"after_prefill_40.{prefix}.index_k"][0]
            yield from _exact(
                f"prefill {prefix}", "entries", harness.entries(layer.index, len(entries)), entries
            )
            yield from _exact(
                f"prefill {prefix}", "index keys", harness.index_keys(layer.index, len(keys)), keys
            )
        if layer.is_index_source:
            yield from _picks(f"prefill {prefix}", step.picks[layer.index], theirs["index_topk"], offset=40)
        if layer.is_candidate_source:
            assert step.candidates is not None
            wanted = data["candidates"].bool()
            block = harness.checkpoint.config.candidate_block_size
            mask = ops.block_mask(step.candidates[0], wanted.shape[1], block=block)
            yield from _exact("prefill", "candidates", mask, wanted)
        if layer.index_source is not None:
            yield from _picks(
                f"prefill {prefix}", step.picks[layer.index_source], theirs["attn_idxs"][:, 16:], offset=40
            )


@torch.inference_mode()
def decode_differences(harness: Harness) -> Iterator[Difference]:
    """Single-token steps 44 (ratio-2 group left open) and 45 (group completed) with golden caches.

    At step 44 the published reference ranked another layer's index keys; these data are the corrected run.
    """
    data, state = golden("golden/intermediates_decode"), golden("golden/state")
    ids = golden("golden/decode")["input_ids"]
    cache = harness.cache
    for position in (44, 45):
        batch = harness.runner.builder.build([harness.segment(ids, position, position + 1)])
        for block in harness.model.blocks:
            layer, prefix = block.layer, block.layer.prefix
            theirs = _of(data, f"step{position}.{prefix}")
            harness.set_window_ring(layer.index, position, theirs["attn_kv"][0, :16])
            if layer.is_kv_source:
                entries = theirs["attn_kv"][0, 16:]
                harness.set_entries(layer.index, entries)
                keys = state[f"after_decode_70.{prefix}.index_k"][0]
                harness.set_index_keys(layer.index, keys)
        seen: Tensors = {}
        step = harness.model.begin(batch, cache, seen.__setitem__)
        for block in harness.model.blocks:
            layer, prefix = block.layer, block.layer.prefix
            theirs = {k: v.flatten(0, 1) if v.dim() > 2 and v.shape[:2] == (1, 1) else v
                      for k, v in _of(data, f"step{position}.{prefix}").items()}  # fmt: skip
            where = f"step {position} {prefix}"
            yield from _engram(harness, step, layer.index, where, theirs, seen, prefix)
            block(theirs["h_in"], theirs["pre_mix_in"], step)
            yield from _block(where, _of(seen, prefix), theirs, block, batch)
            ring = theirs["attn_kv"][0, position % 16]
            yield from _exact(where, "window row", seen[f"{prefix}.window_rows"][0], ring)
            if layer.is_index_source:
                yield from _picks(where, step.picks[layer.index], theirs["index_topk"], offset=16)


@torch.inference_mode()
def draft_differences(harness: Harness) -> Iterator[Difference]:
    """The draft stages at positions 44 and 45, each from its golden input and ring."""
    data, decode = golden("golden/intermediates_decode"), golden("golden/decode")
    for position in (44, 45):
        taps = decode["main_hidden"][position - 40][None]
        batch = harness.runner.builder.build([harness.segment(decode["input_ids"], position, position + 1)])
        seen: Tensors = {}
        harness.drafts.commit(taps, batch, harness.cache, seen.__setitem__)
        theirs_main = _of(data, f"draft{position}.mtp")
        for name in ("main_proj_out", "main_x"):
            yield from _exact(f"draft {position}", name, seen[f"mtp.{name}"], theirs_main[name][0])
        anchor = Anchor(0, position + 1, 0)
        step = harness.drafts.begin([anchor], harness.runner.tables, harness.cache, seen.__setitem__)
        for block in harness.drafts.blocks:
            prefix = block.layer.prefix
            theirs = {k: v[0] if v.dim() > 2 and v.shape[0] == 1 else v
                      for k, v in _of(data, f"draft{position}.{prefix}").items()}  # fmt: skip
            where = f"draft {position} {prefix}"
            ring = harness.window_ring(block.layer.index, position + 1)
            yield from _exact(where, "ring row", ring[position % 16], theirs["attn_kv"][position % 16])
            harness.set_window_ring(block.layer.index, position + 1, theirs["attn_kv"][:16])
            step.run(block, theirs["h_in"], theirs["pre_mix_in"])
            yield from _block(where, _of(seen, prefix), theirs, block, None)
            yield from _exact(where, "block rows", seen[f"{prefix}.window_rows"], theirs["attn_kv"][16:])
        spec = golden("golden/decode")
        row = position - 40
        proposal = harness.propose(spec["spec.input_ids"][row : row + 1], [position], [0])
        yield from _exact(
            f"draft {position}", "ids", proposal.draft_token_ids[0], spec["spec.output_ids"][row, 1:]
        )
        distance = relative_rms(proposal.logits[0], spec["spec.logits"][row]).max().item()
        yield from _limit(f"draft {position}", "logits", distance, 0.05)
        gap = (proposal.confidence[0] - spec["spec.confidence"][row]).abs().max().item()
        yield from _limit(
            f"draft {position}", "confidence", gap, 0.17
        )  # golden README: up to 0.1562 observed


@torch.inference_mode()
def image_differences(harness: Harness) -> Iterator[Difference]:
    """What an image changes outside the tower: dead n-grams, no Engram value, the other router bias, merged rows."""
    data = golden("golden/image")
    inside = data["token_types"] >= 0
    batch = harness.runner.builder.build([harness.segment(data["input_ids"], 0, 34, image=inside)])
    yield from _exact("image", "engram_hash_ids of text", torch.from_numpy(batch.engram_ids)[~inside],
                      data["engram_hash_ids"][~inside])  # fmt: skip
    logits, _ = harness.run(
        harness.segment(data["input_ids"], 0, 34, image=inside), image_rows=golden_span_rows(harness)
    )
    yield from _limit("image", "logits mean", relative_rms(logits, data["logits"]).mean().item(), 0.02)
    step = harness.model.begin(batch, harness.cache)
    stream = data["layers.1.engram_out"]
    after = harness.model.engrams[1](stream, step)
    yield from _exact("image", "stream of image rows past Engram", after[inside], stream[inside])


def golden_span_rows(harness: Harness) -> torch.Tensor:
    """Embeddings of both golden spans from the golden aligner output and the checkpoint's delimiters."""
    data, tower = golden("golden/image"), harness.runner.vision
    assert tower is not None
    rows = []
    for number in (0, 1):
        types = data[f"image{number}.types"]
        span = torch.empty(len(types), tower.delimiters[0].shape[0], dtype=torch.bfloat16)
        span[types == 1] = data[f"image{number}.aligner_out"]
        for kind, delimiter in tower.delimiters.items():
            span[types == kind] = delimiter
        rows.append(span)
    return torch.cat(rows)


def _engram(
    harness: Harness,
    step: Step,
    index: int,
    where: str,
    theirs: Tensors,
    seen: Tensors,
    prefix: str | None = None,
) -> Iterator[Difference]:
    engram = harness.model.engrams.get(index)
    if engram is None:
        return
    engram(theirs["engram_in"], step)
    ours = _of(seen, prefix or where)
    for name in ("engram_rows", "engram_kv", "engram_out"):
        yield from _exact(where, name, ours[name], theirs[name].reshape(ours[name].shape))


def _block(
    where: str, ours: Tensors, theirs: Tensors, block: Block, batch: Batch | None
) -> Iterator[Difference]:
    """Compare one block's outputs, and its router, shared expert and mixes on their own golden inputs."""
    for name in ("attn_in", "qr", "q_rot", "latent", "index_weights_raw"):
        if name in theirs and name in ours:
            yield from _exact(where, name, ours[name], theirs[name].reshape(ours[name].shape))
    if "index_scores" in theirs:
        yield from _exact(
            where, "index_scores", ours["index_scores"], theirs["index_scores"].view_as(ours["index_scores"])
        )
    for name, limit in LAYER_LIMITS.items():
        mine, golden_value = ours[name].float(), theirs[name].float().reshape(ours[name].shape)
        yield from _limit(where, name, ((mine - golden_value).norm() / golden_value.norm()).item(), limit)
    gap = (ours["pre_mix_out"] - theirs["pre_mix_out"].view_as(ours["pre_mix_out"])).abs().max().item()
    yield from _limit(where, "pre_mix_out", gap, PRE_MIX_LIMIT)
    ffn_in = theirs["ffn_in"].reshape(-1, theirs["ffn_in"].shape[-1])
    chosen, weights = block.moe.route(ffn_in, None if batch is None else batch.image_mask)
    yield from _exact(
        where, "expert set", chosen.sort(1).values, theirs["router_indices"].long().sort(1).values
    )
    gap = (weights.sort(1).values - theirs["router_weights"].sort(1).values).abs().max().item()
    yield from _limit(where, "router_weights", gap, 1e-5)
    yield from _exact(where, "shared_expert_out", block.moe.shared(ffn_in), theirs["shared_expert_out"])
    stream = theirs["h_in"].reshape(-1, *theirs["h_in"].shape[-2:])
    for name, value in zip(("pre", "post", "comb"), block.hc_attn(stream), strict=True):
        reference = theirs[f"hc_attn_{name}"]
        yield from _limit(
            where, f"hc_attn_{name}", (value - reference.view_as(value)).abs().max().item(), 1e-5
        )


def _picks(where: str, ours: torch.Tensor, theirs: torch.Tensor, offset: int) -> Iterator[Difference]:
    theirs = theirs.reshape(len(ours), -1).long()
    wanted = [sorted(int(x) - offset for x in row if x >= 0) for row in theirs]
    found = [[int(x) for x in row if x >= 0] for row in ours]
    changed = sum(a != b for a, b in zip(wanted, found, strict=True))
    yield from _limit(where, "pick sets changed", changed, 0)


def _exact(where: str, what: str, ours: torch.Tensor, theirs: torch.Tensor) -> Iterator[Difference]:
    if ours.shape != theirs.shape:
        yield Difference(where, f"{what} shape {tuple(ours.shape)} against {tuple(theirs.shape)}", 1, 0)
        return
    differing = int((ours.double() != theirs.double()).sum())
    yield from _limit(where, f"{what} elements differing", differing, 0)


def _limit(where: str, what: str, amount: float, limit: float) -> Iterator[Difference]:
    if not amount <= limit:  # a NaN is a difference too
        yield Difference(where, what, amount, limit)


def _of(data: Tensors, prefix: str) -> Tensors:
    return {k[len(prefix) + 1 :]: v for k, v in data.items() if k.startswith(prefix + ".")}
