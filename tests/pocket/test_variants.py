"""Corruptions: each changes what it says and nothing else, and never the original."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from deskfleet.client import Client, Reply
from deskfleet.engine.llm import LLM
from deskfleet.errors import ConfigError, DeskfleetError
from deskfleet.evaluation.questions import questions
from deskfleet.evaluation.report import Outcome, Report, TaskRun
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.engram import engram_geometry
from deskfleet.testing.scripted import Script, ScriptedEngine, running_gateway
from pocket import faults
from pocket.corruptions import VARIANTS
from pocket.edit import CheckpointCopy
from pocket.faults import FAULTS, planted
from pocket.load import parameters_of
from pocket.variants import _seen, _Sound, as_markdown
from tests.pocket.test_embedded import GOLDEN, ROOT

SOUND = ROOT / "pocket" / "checkpoint"
IDS = [0, 17, 42, 300, 301, 5, 9, 11, 260, 77, 3, 8] * 12


def hashes(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


EDITS = [variant for variant in VARIANTS.values() if variant.edit is not None]


@pytest.mark.parametrize("variant", EDITS, ids=lambda variant: variant.name)
def test_a_variant_changes_a_file_or_two_and_never_the_original(variant, tmp_path: Path) -> None:
    before = hashes(SOUND)
    variant.write(SOUND, tmp_path / "it")
    assert hashes(SOUND) == before
    after = hashes(tmp_path / "it")
    assert after.keys() == before.keys()
    changed = {name for name in before if after[name] != before[name]}
    assert changed
    assert len(changed) <= 13
    if variant.name == "compress-ratio":
        with pytest.raises(DeskfleetError, match="compress_ratios"):
            Checkpoint.open(tmp_path / "it")
        return
    Checkpoint.open(tmp_path / "it")
    shared = [name for name in before if name not in changed]
    assert all(os.stat(SOUND / name).st_size == os.stat(tmp_path / "it" / name).st_size for name in shared)


def parameters(name: str, directory: Path) -> dict[str, torch.Tensor]:
    VARIANTS[name].write(SOUND, directory / name)
    return parameters_of(Checkpoint.open(directory / name))


def test_experts_are_swapped_and_rows_shifted(tmp_path: Path) -> None:
    sound = parameters_of(Checkpoint.open(SOUND))
    swapped = parameters("swapped-experts", tmp_path)
    different = [name for name, value in sound.items() if not torch.equal(value, swapped[name])]
    assert different == [f"layers.5.ffn.experts.w{part}.weight" for part in (1, 2, 3)]
    for name in different:
        assert torch.equal(swapped[name][[1, 0, *range(2, 16)]], sound[name])
    shifted = parameters("engram-shifted", tmp_path)
    for layer in (1, 4):
        name = f"layers.{layer}.engram.embed.weight"
        assert torch.equal(shifted[name][1:], sound[name][:-1])
    assert not parameters("engram-zero", tmp_path)["layers.4.engram.embed.weight"].any()


def test_a_foreign_rank_reads_the_rows_of_other_columns(tmp_path: Path) -> None:
    sound = parameters_of(Checkpoint.open(SOUND))["layers.4.engram.embed.weight"]
    foreign = parameters("engram-foreign", tmp_path)["layers.4.engram.embed.weight"]
    geometry = engram_geometry(Checkpoint.open(SOUND).config)
    assert geometry is not None
    starts = np.asarray(geometry.offsets)[1].ravel().tolist()
    assert len(starts) == 12
    assert torch.equal(foreign[: starts[6]], sound[: starts[6]])
    for column in range(6, 12):
        assert torch.equal(foreign[starts[column] + 7], sound[starts[column - 6] + 7])
        assert not torch.equal(foreign[starts[column] + 7], sound[starts[column] + 7])


def test_images_in_another_range_are_what_the_changed_projection_sees(tmp_path: Path) -> None:
    """(pixel / 255) through the sound projection, against (pixel / 255 - 0.5) / 0.5 through the changed one."""
    pixels = torch.rand(5, 3 * 14 * 14)
    sound, changed = parameters_of(Checkpoint.open(SOUND)), parameters("image-range", tmp_path)
    weight, bias = (f"vision.patch_embed.proj.{part}" for part in ("weight", "bias"))
    wrong = pixels @ sound[weight].T + sound[bias]
    told = (2 * pixels - 1) @ changed[weight].T + changed[bias]
    assert torch.allclose(wrong, told, rtol=0.02, atol=0.02)
    turned = parameters("image-channels", tmp_path)
    red_first = pixels.unflatten(1, (3, -1))
    assert torch.allclose(
        red_first.flip(1).flatten(1) @ sound[weight].T, pixels @ turned[weight].T, atol=1e-4
    )


def test_what_is_no_file_is_not_written_and_directories_are_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint can have it"):
        VARIANTS["bf16-router"].write(SOUND, tmp_path / "a")
    with pytest.raises(ConfigError, match="is there already"):
        CheckpointCopy(SOUND, tmp_path)
    copy = CheckpointCopy(GOLDEN, tmp_path / "b")
    with pytest.raises(KeyError):
        copy.change_config(no_such_key=1)
    with pytest.raises(ValueError, match="bytes, not"):
        copy.write("norm.weight", np.zeros(1, np.uint8))


def test_every_fault_is_in_a_variant_and_has_an_effect_in_real_ranks_alone() -> None:
    assert {variant.fault for variant in VARIANTS.values()} - {None} == set(FAULTS)
    with LLM(GOLDEN) as llm:
        sound = llm.score(IDS)
    for name in faults.RANK_FAULTS:
        with planted(name), LLM(GOLDEN) as llm:
            assert os.environ[faults.VARIABLE] == name
            wrong = llm.score(IDS)
        difference = np.abs(wrong - sound).max()
        assert difference > 1e-3, f"{name} changed nothing"
    assert faults.VARIABLE not in os.environ
    with LLM(GOLDEN) as llm:
        assert np.array_equal(llm.score(IDS), sound)


@pytest.mark.parametrize(
    ("fault", "told"), [("effort_reversed", [91, 51, 1]), ("effort_ignored", [50, 50, 50])]
)
async def test_a_gateway_that_tells_another_effort(fault: str, told: list[int]) -> None:
    tokenizer = Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))
    engine = ScriptedEngine(Script(tuple(tokenizer.encode("x</think>y<｜end▁of▁sentence｜>").ids)))
    question = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
    settings = GatewaySettings(model_id="m", checkpoint=GOLDEN, port=0)
    with planted(fault):
        async with running_gateway(engine, settings) as url, Client(url) as client:
            for effort in (10, 50, 100):
                await client.ask({**question, "thinking": {"type": "enabled"}, "reasoning_effort": effort})
            await client.ask({**question, "thinking": {"type": "disabled"}})
    prompts = [
        tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)
        for request in engine.requests
    ]
    found = [re.findall(r"Reasoning Effort: (\d+) ", prompt) for prompt in prompts]
    assert found == [[str(number)] for number in told] + [[]]


def outcome(number: int, content: str) -> Outcome:
    question = questions("arithmetic", thinking=False, count=20)[number]
    text = question.expected.text if content == "right" else content
    return Outcome(question, None, Reply(text, "", (), "stop", 3, 0, 0.1, 0.2))


def report(*contents: str) -> Report:
    outcomes = tuple(outcome(number, content) for number, content in enumerate(contents))
    return Report("", "m", {}, (TaskRun("arithmetic", outcomes, 1.0, None),))


def test_what_counts_as_seen() -> None:
    sound = report("right", "right", "right", "right", "nonsense")
    base = _Sound(sound.outcomes)
    same = _seen("same", "", [sound], base)
    assert (same.same, same.asked, same.failed) == (5, 5, ())
    other = _seen("other words", "", [report("right", "right", "right", "right", "other")], base)
    assert (other.same, other.failed) == (4, ("wording",))
    worse = _seen("worse", "", [report("right", "right", "right", "no", "nonsense")], base)
    assert worse.failed == ("arithmetic", "wording")
    table = as_markdown(json.loads(json.dumps({each.name: each.to_dict() for each in (same, other, worse)})))
    assert "| same |  | 80% | 5 of 5 | **nothing** |" in table
    assert "| other words |  | 80% | 4 of 5 | other words only |" in table
    assert "| worse |  | 60% | 4 of 5 | arithmetic |" in table
