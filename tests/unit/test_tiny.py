"""make_tiny: the published format to the byte, the same bytes for a seed, and all of a directory or none."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from pathlib import Path

import deepseek_recipe
import engram_golden
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from tokenizers import Tokenizer

from deskfleet.errors import ConfigError
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.names import DTYPE_BYTES, expected_shards, expected_tensors
from deskfleet.model.vision import plan_image
from deskfleet.testing import tiny
from deskfleet.testing.tiny import TinyCheckpoint, TinySizes, make_tiny
from deskfleet.testing.tiny_tokenizer import ADDED_TOKENS, BASE_TOKENS, build_tokenizer, text_token_ids
from deskfleet_engram import check_size, compressed_token_map, decode_rows

# Small enough to be made many times.
SMALL = TinySizes(
    vocab_size=300,
    num_hidden_layers=4,
    num_attention_heads=8,
    n_routed_experts=4,
    engram_vocab_size=97,
    num_nextn_predict_layers=1,
    vision_num_hidden_layers=1,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_tiny(tmp_path_factory.mktemp("default") / "tiny", seed=7)


@pytest.fixture(scope="module")
def tokenizer(made: TinyCheckpoint) -> Tokenizer:
    return Tokenizer.from_file(str(made.path / "tokenizer.json"))


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


def array(made: TinyCheckpoint, name: str) -> NDArray[np.generic]:
    """One tensor: bf16 as float32, codes and packed values as uint8."""
    return engram_golden.read_tensor(made.path / _weight_map(made.path)[name], name)


@functools.cache
def _weight_map(directory: Path) -> dict[str, str]:
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_tiny(tmp_path / name, seed=seed, sizes=SMALL)
    first, again, other = (digests(tmp_path / name) for name in "abc")
    assert first == again
    differing = {name for name in first if first[name] != other[name]}
    assert differing == {name for name in first if name.endswith(".safetensors")}


def test_bytes_do_not_depend_on_platform_or_release(tmp_path: Path) -> None:
    """A layer's weights come from raw generator bits and exact arithmetic alone."""
    make_tiny(tmp_path / "tiny", seed=3, sizes=SMALL)
    shards = sorted((tmp_path / "tiny").glob("*.safetensors"))
    assert (
        hashlib.sha256(shards[2].read_bytes()).hexdigest()
        == "7edd54bd3ba9a6a4705eee6d3a983509279b06be04bde8795cf3b1946a24bc73"
    )


def test_files_are_what_the_safetensors_library_reads(made: TinyCheckpoint) -> None:
    index = json.loads((made.path / "model.safetensors.index.json").read_text())
    shards = expected_shards(made.config)
    total = 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with safe_open(made.path / name, "numpy") as file:
            assert set(file.keys()) == set(shard)
            for key in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(key)
                assert (part.get_dtype(), tuple(part.get_shape())) == (shard[key].dtype, shard[key].shape)
                assert index["weight_map"][key] == name
                total += shard[key].nbytes
    assert len(list(made.path.glob("*.safetensors"))) == len(shards)
    assert index["metadata"]["total_size"] == total == made.tensor_bytes
    assert made.num_tensors == len(index["weight_map"]) == len(expected_tensors(made.config))
    assert sum(file.stat().st_size for file in made.path.iterdir()) < 15e6


def test_tensors_are_aligned_to_their_elements(made: TinyCheckpoint) -> None:
    for file in made.path.glob("*.safetensors"):
        entries, data = engram_golden.header(file)
        assert data % 8 == 0
        end = 0
        for entry in entries.values():
            begin, stop = entry["data_offsets"]
            assert begin == end, "no holes"
            assert begin % DTYPE_BYTES[entry["dtype"]] == 0
            end = stop
        assert file.stat().st_size == data + end


def test_configuration_has_the_published_keys(made: TinyCheckpoint) -> None:
    mine = json.loads((made.path / "config.json").read_text())
    golden = json.loads((engram_golden.GOLDEN / "model" / "config.json").read_text())
    assert mine.keys() == golden.keys()
    for section in ("text_config", "vision_config", "quantization_config"):
        assert mine[section].keys() == golden[section].keys()
    assert mine["text_config"]["rope_scaling"].keys() == golden["text_config"]["rope_scaling"].keys()
    for key in ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        assert mine["text_config"][key] == golden["text_config"][key]


def test_every_kind_of_tensor_of_the_reference_checkpoint_is_there(made: TinyCheckpoint) -> None:
    golden = json.loads((engram_golden.GOLDEN / "model" / "model.safetensors.index.json").read_text())

    def kinds(names: list[str]) -> set[str]:
        return {re.sub(r"experts\.\d+", "experts.E", name) for name in names}

    assert kinds(list(expected_tensors(made.config))) == kinds(list(golden["weight_map"]))


def test_checkpoint_opens_and_shards_at_any_tp_size(made: TinyCheckpoint) -> None:
    checkpoint = Checkpoint.open(made.path)
    assert checkpoint.config == made.config
    for tp_size in (1, 2, 3, 4, 8):
        plan = ShardPlan(checkpoint.config, Layout(tp_size))
        for name in checkpoint.tensors:
            for rank in range(tp_size):
                plan.shard(name, rank)


def test_codes_and_scales_are_sound(made: TinyCheckpoint) -> None:
    for name, spec in expected_tensors(made.config).items():
        values = array(made, name)
        if spec.dtype == "F8_E4M3":
            assert not np.isin(values, (0x7F, 0xFF)).any(), name
            assert np.unique(values).size > 100, name
        elif spec.dtype == "F8_E8M0":
            low, high = int(values.min()), int(values.max())
            assert 100 <= low <= high <= 130, name
            assert high - low <= 2, name
        elif spec.dtype == "I8":
            assert np.unique(values & 15).size == 16, name
        else:
            assert np.isfinite(values).all(), name


def test_matrices_have_the_spread_they_were_meant_to(made: TinyCheckpoint) -> None:
    prefix = "layers.3.attn.wq_a"
    codes, scales = array(made, f"{prefix}.weight"), array(made, f"{prefix}.scale")
    assert np.unique(scales).size == 3
    matrix = decode_rows(codes, np.repeat(scales, 32, axis=0))
    assert matrix.std() * np.sqrt(128) == pytest.approx(1, rel=0.25)
    packed = array(made, "layers.3.ffn.experts.5.w1.weight")
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    nibbles = np.stack((packed & 15, packed >> 4), axis=-1).reshape(96, 128)
    factors = 2.0 ** (array(made, "layers.3.ffn.experts.5.w1.scale").astype(int) - 127)
    expert = levels[nibbles] * np.repeat(factors, 32, axis=1)
    assert expert.std() * np.sqrt(128) == pytest.approx(1, rel=0.25)
    assert array(made, "layers.3.ffn_norm.weight").mean() == pytest.approx(1, abs=0.05)
    assert array(made, "embed.weight").std() == pytest.approx(0.5, rel=0.02)


def test_the_head_favours_what_comes_next(made: TinyCheckpoint, tokenizer: Tokenizer) -> None:
    """Without the layers, nearly every text token leads clearly to one other: greedy text varies, and ends."""
    embedding, head = array(made, "embed.weight"), array(made, "head.weight")
    text = text_token_ids(tokenizer)
    x = embedding[text] / np.sqrt((embedding[text] ** 2).mean(axis=1, keepdims=True))
    logits = x @ head.T
    ranked = np.sort(logits, axis=1)
    assert logits.std() > 1
    assert np.median(ranked[:, -1] - ranked[:, -2]) > 3
    assert np.unique(logits.argmax(axis=1)).size > 0.8 * len(text)
    assert {made.config.eos_token_id, tokenizer.token_to_id("</think>")} <= set(logits.argmax(axis=1))


def test_a_picture_takes_a_few_dozen_tokens(made: TinyCheckpoint) -> None:
    assert made.config.vision is not None
    assert plan_image(224, 224, made.config.vision).num_tokens == 44
    assert plan_image(1920, 1080, made.config.vision).num_tokens <= 64


def test_special_tokens_have_their_ids_and_spelling(made: TinyCheckpoint, tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(text) for text in BASE_TOKENS] == [0, 1, 2]
    assert tokenizer.get_vocab_size(with_added_tokens=True) == made.config.vocab_size
    assert made.config.image_token_id == tokenizer.token_to_id("<｜deepseek_image｜>")
    assert made.config.image_token_id != tokenizer.token_to_id("<｜image｜>")
    assert made.config.dspark_noise_token_id == tokenizer.token_to_id("<｜System｜>")
    names = (name for name in dir(deepseek_recipe.SpecialToken) if name[0].isupper())
    spellings = {getattr(deepseek_recipe.SpecialToken, name).default_str() for name in names}
    assert spellings <= {*BASE_TOKENS, *ADDED_TOKENS}
    check_size(compressed_token_map(tokenizer), made.config.engram_compressed_vocab_size)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives_encoding(text: str) -> None:
    tokenizer = _default_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=True).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(token_id >= len(BASE_TOKENS) for token_id in ids), "nothing is added"


@functools.cache
def _default_tokenizer() -> Tokenizer:
    return build_tokenizer(TinySizes().vocab_size)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_conversation_encodes_to_its_rendered_prompt(
    made: TinyCheckpoint, tokenizer: Tokenizer, thinking: bool
) -> None:
    image = deepseek_recipe.BytesImageSource(b"any bytes")
    placeholder = "<｜deepseek_image｜>"
    conversation = deepseek_recipe.Conversation(
        [
            deepseek_recipe.SystemMessage("Answer briefly. 请简短回答。"),
            deepseek_recipe.UserMessage(f"what is this? {placeholder}", [image], image_token=placeholder),
        ],
        thinking_mode=thinking,
        tools=[deepseek_recipe.ToolDefinition("look", "Looks", {"type": "object"})],
    )
    encoding = (
        deepseek_recipe.DeepseekV41Encoding()
        .with_special_tokens(deepseek_recipe.SpecialTokens(image=placeholder))
        .with_tokenizer(deepseek_recipe.Tokenizer.from_file(str(made.path / "tokenizer.json")))
    )
    ids = encoding.encode(conversation)
    assert (
        tokenizer.decode(ids, skip_special_tokens=False) == encoding.render_conversation(conversation).prompt
    )
    assert ids[0] == made.config.bos_token_id
    assert ids.count(made.config.image_token_id) == 1
    assert ids[-1] == tokenizer.token_to_id("<think>" if thinking else "</think>")


def test_sizes_reach_the_configuration(tmp_path: Path) -> None:
    made = make_tiny(tmp_path / "tiny", sizes=dataclasses.replace(SMALL, hidden_size=64, index_topk=8))
    assert made.config.hidden_size == 64
    assert made.config.index_topk == 8
    assert made.config.vocab_size == 300
    assert made.config.compress_ratios == (0, 0, 2, 1, 0)
    assert made.config.kv_source_layer_ids == (2, 3)
    assert made.config.engram_layer_ids == (1, 2)
    assert expected_tensors(made.config)["embed.weight"].shape == (300, 64)
    Checkpoint.open(made.path)


@pytest.mark.parametrize("num_layers", range(4, 15))
def test_layers_get_their_roles_at_any_depth(num_layers: int) -> None:
    sizes = dataclasses.replace(SMALL, num_hidden_layers=num_layers)
    published = tiny.published_config(sizes, build_tokenizer(sizes.vocab_size))
    layers = tiny.ModelConfig.from_dict(published).layers
    assert {layer.compress_ratio for layer in layers} == {0, 1, 2}
    assert sum(layer.is_candidate_source for layer in layers) == 1
    assert sum(layer.has_engram for layer in layers) == 2
    if num_layers >= 6:
        assert any(layer.uses_candidates for layer in layers)
        assert sum(layer.is_kv_source for layer in layers) == 3


def test_parts_can_be_left_out(tmp_path: Path) -> None:
    sizes = dataclasses.replace(SMALL, vision_num_hidden_layers=0, num_nextn_predict_layers=0)
    made = make_tiny(tmp_path / "tiny", sizes=sizes)
    assert made.config.vision is None
    assert not made.config.draft_layers
    Checkpoint.open(made.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 100}, r"tiny sizes: hidden_size 100 is not a multiple of"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok 9 exceeds n_routed_experts 4"),
        ({"vocab_size": 200}, r"vocab_size 200 is too small: .* 283 ids"),
        ({"vocab_size": 5000}, r"vocab_size 5000 is too large: the training text yields \d+ ids"),
        ({"num_hidden_layers": 3}, r"num_hidden_layers 3 leaves no room"),
        ({"compress_ratios": (0, 0, 2)}, r"compress_ratios has 4 entries"),
        ({"engram_n_heads": 0}, r"tiny sizes: engram_n_heads must be positive, got 0"),
    ],
)
def test_contradictory_sizes_are_refused_and_leave_nothing(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tiny(tmp_path / "tiny", sizes=dataclasses.replace(SMALL, **change))
    assert not list(tmp_path.iterdir())


def test_a_negative_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seed -1 is negative"):
        make_tiny(tmp_path / "tiny", seed=-1)


def test_a_target_that_holds_something_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(ConfigError, match=r"is not empty: it holds 'notes\.txt'"):
        make_tiny(tmp_path, sizes=SMALL)
    with pytest.raises(ConfigError, match=r"holds 'notes\.txt', which is no part of a tiny checkpoint"):
        make_tiny(tmp_path, sizes=SMALL, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "keep me"


def test_an_empty_directory_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make_tiny(tmp_path / "empty", sizes=SMALL)
    make_tiny(tmp_path / "not" / "yet" / "there", sizes=SMALL)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "not"], "no draft stays behind"
    assert (tmp_path / "empty").stat().st_mode & 0o055 == 0o055, "readable by others, as any directory"


def test_overwriting_replaces_a_checkpoint_whole(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    make_tiny(target, seed=1, sizes=dataclasses.replace(SMALL, num_hidden_layers=6))
    make_tiny(target, seed=2, sizes=SMALL, overwrite=True)
    make_tiny(tmp_path / "fresh", seed=2, sizes=SMALL)
    assert digests(target) == digests(tmp_path / "fresh")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["fresh", "tiny"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot use .*file: Not a directory"):
        make_tiny(tmp_path / "file", sizes=SMALL)
    with pytest.raises(ConfigError, match=r"cannot use .*: Not a directory"):
        make_tiny(tmp_path / "file" / "below", sizes=SMALL)


@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_half_way_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool
) -> None:
    target = tmp_path / "tiny"
    before: dict[str, str] = {}
    if existing:
        make_tiny(target, seed=1, sizes=SMALL)
        before = digests(target)
    write = tiny.write_shard

    def fail_at_the_fourth(path: Path, *arguments: object) -> int:
        if "-00004-" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, *arguments)

    monkeypatch.setattr(tiny, "write_shard", fail_at_the_fourth)
    with pytest.raises(ConfigError, match=r"cannot write .*tiny: No space left on device"):
        make_tiny(target, seed=2, sizes=SMALL, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == (["tiny"] if existing else [])
    if existing:
        assert digests(target) == before


def test_a_failing_rename_puts_the_old_checkpoint_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "tiny"
    make_tiny(target, seed=1, sizes=SMALL)
    before = digests(target)
    rename = Path.rename

    def fail_for_the_new(self: Path, to: Path) -> Path:
        if self.name == "new":
            raise OSError(5, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail_for_the_new)
    with pytest.raises(ConfigError, match="Input/output error"):
        make_tiny(target, seed=2, sizes=SMALL, overwrite=True)
    assert digests(target) == before
    assert [file.name for file in tmp_path.iterdir()] == ["tiny"]
