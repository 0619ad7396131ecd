"""Which device computes: what a GPU does not do yet is refused, and a missing one is said, once and with a hint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.errors import ConfigError
from deskfleet.model.device import decode_sizes, draft_sizes, passage_blocks, prefill_sizes
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
