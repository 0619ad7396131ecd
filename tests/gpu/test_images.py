"""Images on a GPU: the tower is the host's, and its rows take the place of embeddings, in text's layers with their own
router bias and without Engram. As on the CPU, within what the golden data allow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers", reason="an engine opens checkpoints (tools/triton_env.sh)")
pytest.importorskip("safetensors", reason="the golden data are such files (tools/triton_env.sh)")
pytest.importorskip(
    "deskfleet_engram", reason="an engine reads Engram rows (PYTHONPATH of make test-kernels)"
)

from deskfleet.engine.batch import Segment
from deskfleet.engine.cuda import routing
from deskfleet.engine.cuda.experts import ExpertBuffers, ExpertShape
from deskfleet.model.limits import RunnerLimits
from deskfleet_engram import DEAD
from tests.engine.golden import golden, golden_span_rows, relative_rms, token_map
from tests.gpu.test_engine import BACKEND, LIMIT, MEAN_LIMIT, runner_on, scatter_blocks

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("rows", [3, 9], ids=["lists in the kernel", "lists after it"])
def test_rows_of_images_are_routed_by_their_own_bias(device: torch.device, rows: int) -> None:
    """Side by side with rows of text."""
    generator = torch.Generator().manual_seed(rows)
    num_experts, num_chosen = 24, 4
    logits = torch.randn(rows, num_experts, generator=generator)
    biases = torch.randn(2, num_experts, generator=generator)
    text = (torch.arange(rows) % 2).to(torch.int32)
    buffers = ExpertBuffers(ExpertShape(128, 64, num_experts, num_chosen), rows, device)
    chosen = torch.zeros(rows, num_chosen, dtype=torch.int32, device=device)
    weights = torch.zeros(rows, num_chosen, device=device)
    routing.choose(
        logits.to(device), biases[1].to(device), chosen, weights, buffers, scaling=1.5,
        of_images=(biases[0].to(device), text.to(device)),
    )  # fmt: skip
    scores = torch.nn.functional.softplus(logits).sqrt()
    best = (scores + biases[text.long()]).topk(num_chosen, 1).indices
    assert torch.equal(chosen.cpu().long(), best)
    expected = scores.gather(1, best)
    expected = expected / expected.sum(1, keepdim=True) * 1.5
    assert torch.allclose(weights.cpu(), expected, atol=1e-6)
    assert not torch.equal(best, (scores + biases[1]).topk(num_chosen, 1).indices)


@torch.inference_mode()
def test_an_image_prompt_is_answered_as_on_the_cpu() -> None:
    """Two images in 34 positions, in pieces that cut the first one; then a token after them."""
    data = golden("golden/image")
    ids, inside = data["input_ids"].numpy().astype("int64"), (data["token_types"] >= 0).numpy()
    compressed = token_map()[ids]
    compressed[inside] = DEAD
    text = np.zeros(1, bool)
    limits = RunnerLimits(1, 64, 16, num_blocks=4, num_window_blocks=4)
    runners = [runner_on("cpu", limits), runner_on(BACKEND, limits, max_step_tokens=16)]
    errors, answers = [], []
    logits: list[Any] = []
    for runner in runners:
        scatter_blocks(runner)
        harness: Any = SimpleNamespace(runner=runner)
        rows = golden_span_rows(harness)
        work = Segment(0, 0, ids, compressed, compressed[:0], inside)
        logits.append(runner.lead([work], range(len(ids)), rows).logits.clone())
        answers.append(int(logits[-1][-1].argmax()))
    errors.append(relative_rms(logits[1], logits[0]))
    token = np.array([answers[0]])
    after = Segment(0, len(ids), token, token_map()[token], compressed[-3:], text)
    found = [runner.lead([after], [0]).logits.clone() for runner in runners]
    errors.append(relative_rms(found[1], found[0]))
    apart = torch.cat(errors)
    unseen = Segment(0, 0, ids, token_map()[ids], ids[:0], inside & False)
    blind = runners[0].lead([unseen], [len(ids) - 1]).logits
    assert answers[0] == answers[1]
    assert apart.max() <= LIMIT, apart
    assert apart.mean() <= MEAN_LIMIT, apart
    assert relative_rms(logits[1][-1:], logits[0][-1:]).max() < relative_rms(blind, logits[0][-1:]).max() / 2
