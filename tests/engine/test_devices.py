"""Which device computes: what a GPU does not do yet is refused, and a missing one is said, once and with a hint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deskfleet.engine import backends
from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.engine.local_ranks import LocalRanks
from deskfleet.errors import ConfigError
from deskfleet.model.config import ModelConfig
from deskfleet.model.device import decode_sizes, draft_sizes, passage_blocks, prefill_sizes
from deskfleet.model.memory import DeviceLine, DeviceMemory, ProcessMemory, RankMemory
from deskfleet.model.published import published_config_dict
from deskfleet.planner.cuda import cuda_lines
from deskfleet.serve import check_memory
from tests.engine.engines import MODEL
from tests.engine.golden import checkpoint


@pytest.mark.parametrize(
    "options",
    [
        {"dcp_size": 2, "tp_size": 2},
        {"prefix_replay": "window"},
        {"operators": "native"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_a_gpu_does_not_do_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))) as refused:
        EngineClient(checkpoint(), EngineOptions(device="cuda", **options))
    assert refused.value.hint is not None
    assert "--device cpu" in refused.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_one_sentence_and_exit_code_3(tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[0, 17, 42]")
    command = [Path(sys.executable).with_name("deskfleet"), "score", str(MODEL), "--device", "cuda"]
    done = subprocess.run(
        [*command, "--ids", str(ids), "--logits", str(tmp_path / "logits.safetensors")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "device cuda: torch" in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [ids]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 512),
        ({"device": "cuda"}, 2048),
        ({"device": "cuda", "max_num_seqs": 3, "max_model_len": 250}, 750),
        ({"device": "cuda", "max_num_batched_tokens": 4096}, 4096),
        ({"device": "cuda", "max_num_batched_tokens": 1}, 1),
    ],
    ids=["cpu", "cuda", "as many as there can be", "more was asked for", "less was asked for"],
)
def test_tokens_of_a_step(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: int) -> None:
    """The device decides unless somebody does; ranks are told the same number that their GPU is planned with."""
    monkeypatch.setattr(LocalRanks, "rendezvous", "")  # no rank is started
    engine = EngineClient(checkpoint(), EngineOptions(**options))
    assert engine.max_num_batched_tokens == expected
    assert engine._rank_spec(0, "").max_num_batched_tokens == expected
    process = ProcessMemory(0, 0, 0, 0)
    held = RankMemory(0, {}, process, process, DeviceMemory(dict.fromkeys(DeviceLine, 0), None))
    monkeypatch.setattr(EngineClient, "memory", (held,))
    predicted = {line.name: line.predicted_bytes for line in check_memory(engine)[0].lines}
    planned = cuda_lines(engine.plan, engine.limits, 0, max_step_tokens=expected)
    assert predicted == dict.fromkeys(DeviceLine, 0) | {line.name: line.num_bytes for line in planned}


def test_who_computes_says_how_products_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "open_device", lambda: "some GPU")
    for config, sums in (
        (checkpoint().config, "products of steps that decode summed in float32"),
        (
            ModelConfig.from_dict(published_config_dict()),
            "experts of steps that decode summed by FP8 instructions, in some 13 bits",
        ),
    ):
        assert str(backends.select("cuda", "auto", config)) == (
            "triton (layers and head in kernels on some GPU; Engram rows and grammars on the host; "
            f"{sums}), asked for cuda"
        )


def test_sizes_of_steps() -> None:
    """Decoding has every size up to 64; prompts few, and those that keep scores of all rows no more than allowed."""
    assert list(decode_sizes(3)) == [1, 2, 3]
    assert decode_sizes(500)[-1] == 64
    assert list(decode_sizes(1, 5)) == [1, 2, 3, 4, 5, 6]
    assert decode_sizes(11, 5)[-1] == 64
    assert list(draft_sizes(3)) == [1, 2, 3]
    assert draft_sizes(500)[-1] == 32
    assert prefill_sizes(512, 4096) == (16, 64, 256, 512)
    assert prefill_sizes(100, 4096) == (16, 64, 256)
    assert prefill_sizes(1, 4096) == (16,)
    assert prefill_sizes(8192, 4096) == (16, 64, 256, 512, 1024, 2048, 4096, 8192)
    assert prefill_sizes(50000, 1 << 22) == (16, 64, 256, 1024, 2048, 4096, 8192, 16384)


def test_blocks_for_a_steps_own_rows() -> None:
    """Of a prompt's rows that no later step sees, and of blocks of drafts where those have more."""
    assert passage_blocks(512, 8, 16) == passage_blocks(512, 8, 16, 5) == 40
    assert passage_blocks(1, 8, 2, 5) == 20
