"""Decoder replay (spec §3.3): prompt rows that no later one sees in the decoder's windows skip the decoder.

The oracle runs every row through every layer and only hides, in the decoder after its first layer, the window rows
that a replay does not have. Its kept rows must be the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from deskfleet.engine.model.attention import Attention
from deskfleet.errors import ConfigError
from deskfleet.model.limits import resolve_limits
from tests.engine.cores import adding, core_over, load_runner, run_all
from tests.engine.engines import greedy, random_ids
from tests.engine.golden import Harness, checkpoint

DECODER = 6  # first decoder layer of the golden checkpoint
WINDOW, BLOCK = 16, 16


@pytest.fixture(scope="module")
def replaying() -> Iterator[Harness]:
    harness = Harness(num_slots=2)
    harness.runner.builder._decoder_replay = True
    yield harness
    harness.runner.close()


def hide_before(harness: Harness, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Window rows before position `first` do not exist for layers after the first of the decoder."""
    call = Attention.__call__

    def hidden(self: Attention, x: torch.Tensor, step):
        if self.layer.index <= DECODER:
            return call(self, x, step)
        window = step.batch.window
        positions = step.batch.positions[:, None] - torch.arange(WINDOW - 1, -1, -1)
        full = (window.index >= 0).all(1)
        index = torch.where(full[:, None] & (positions < first), -1, window.index)
        return call(self, x, replace(step, batch=replace(step.batch, window=replace(window, index=index))))

    monkeypatch.setattr(Attention, "__call__", hidden)


@pytest.mark.parametrize("length", [17, 33, 40, 100, 143])
def test_kept_rows_are_those_of_a_full_run_with_hidden_windows(replaying, monkeypatch, length) -> None:
    ids = torch.tensor(random_ids(length, seed=length))
    segment = replaying.segment(ids, 0, length)
    batch = replaying.runner.builder.build([segment])
    first = max(((length - 1) // BLOCK * BLOCK - WINDOW + 1) // BLOCK * BLOCK, 0)
    with torch.inference_mode():
        found = replaying.model.forward(batch, replaying.cache)
        assert len(found.hidden) == length - first
        hide_before(replaying, first, monkeypatch)
        oracle = replaying.model.forward(replace(batch, tail=None), replaying.cache)
    assert torch.equal(found.hidden, oracle.hidden[first:])
    assert torch.equal(found.taps, oracle.taps[first:])
    # Without hiding anything the rows differ, or the comparison above would show nothing.
    monkeypatch.undo()
    with torch.inference_mode():
        full = replaying.model.forward(replace(batch, tail=None), replaying.cache)
    assert torch.equal(full.hidden[-1], oracle.hidden[-1]) == (first == 0)


def test_what_later_tokens_look_up_is_complete(replaying: Harness) -> None:
    """Entries and index keys of every source are those of a full run."""
    ids = torch.tensor(random_ids(120, seed=1))
    plain = Harness(num_slots=2)
    try:
        for harness in (replaying, plain):
            with torch.inference_mode():
                harness.model.forward(
                    harness.runner.builder.build([harness.segment(ids, 0, 120)]), harness.cache
                )
        for source in checkpoint().config.kv_source_layer_ids:
            count = 120 // checkpoint().config.compress_ratios[source]
            assert torch.equal(replaying.entries(source, count), plain.entries(source, count))
            assert torch.equal(replaying.index_keys(source, count), plain.index_keys(source, count))
    finally:
        plain.runner.close()


def test_generation_chunks_and_scores() -> None:
    """Answers come, chunked or beside others alike; a score goes through every layer."""
    runner = load_runner(num_slots=4, max_model_len=256)
    try:
        prompts = [adding(f"r{i}", random_ids(30 + 40 * i, seed=i), greedy(8)) for i in range(4)]
        score = adding("score", random_ids(90, seed=9), greedy(1), score=True)
        logits = {}
        for replay in (False, True):
            runner.builder._decoder_replay = replay
            core = core_over(runner, "5", prefix_cache=False)
            alone = {r.request_id: run_all(core, [r])[r.request_id] for r in prompts}
            together = run_all(core_over(runner, "off", prefix_cache=False), prompts)
            assert together == alone
            core.add(score)
            logits[replay] = b"".join(output.logits or b"" for output in iter_outputs(core))
        assert logits[False] == logits[True]
    finally:
        runner.close()


def iter_outputs(core):
    while core.has_work:
        yield from core.step()


def test_models_whose_decoder_needs_every_token_are_refused() -> None:
    config = replace(checkpoint().config, dspark_target_layer_ids=(2, 8, 9))
    sizes = {
        "max_num_seqs": 1,
        "max_model_len": 64,
        "block_size": 16,
        "kv_cache_tokens": None,
        "num_window_tails": 0,
        "with_drafts": True,
    }
    with pytest.raises(ConfigError, match=r"layers \[2\] need tokens that skip the decoder"):
        resolve_limits(config, decoder_replay=True, **sizes)  # type: ignore[arg-type]
    assert resolve_limits(checkpoint().config, decoder_replay=True, **sizes).decoder_replay  # type: ignore[arg-type]
