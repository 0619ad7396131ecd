"""ModelConfig: both published layouts, strictness, contradictions, and the plan of the layers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskfleet.errors import ConfigError
from deskfleet.model.config import ModelConfig
from deskfleet.model.published import published_config_dict

TINY = Path(__file__).parents[1] / "golden" / "v41-tiny" / "model"


@pytest.fixture
def tiny() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((TINY / "config.json").read_text())
    return data


@pytest.fixture
def flat() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((TINY / "inference_config.json").read_text())
    return data


def refusal(data: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(data)
    assert caught.value.message.startswith("config.json: ")
    return caught.value


# Reading


def test_nested_and_flat_layouts_are_equal() -> None:
    nested = ModelConfig.from_file(TINY / "config.json")
    assert nested == ModelConfig.from_file(TINY / "inference_config.json")
    assert nested.engram_pad_token_id == 2
    assert nested.rope_scaling.original_max_position_embeddings == 64
    assert nested.max_position_embeddings == 1024  # the flat layout's documented default: 64 * 16
    assert nested.vision is not None
    assert nested.vision.head_dim == 16


def test_published_values_and_derived_sizes() -> None:
    config = ModelConfig.from_dict(published_config_dict())
    assert config.num_hidden_layers == 40
    assert config.rms_norm_eps == 1e-20
    assert isinstance(config.rope_theta, float)
    assert config.compress_ratios == (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    assert (config.heads_per_group, config.qk_nope_head_dim, config.hc_num_mixes) == (8, 448, 24)
    assert (config.engram_num_columns, config.engram_width) == (24, 6144)
    assert ModelConfig.gate_temp == 1.0


@pytest.mark.parametrize("with_vision", [True, False])
def test_round_trip_through_the_published_layout(tiny: dict[str, Any], with_vision: bool) -> None:
    if not with_vision:
        del tiny["vision_config"]
    config = ModelConfig.from_dict(tiny)
    assert (config.vision is not None) is with_vision
    written = json.loads(json.dumps(config.to_published_dict()))
    assert ModelConfig.from_dict(written) == config
    assert written.keys() == tiny.keys()
    assert written["text_config"] == tiny["text_config"]


def test_flat_layout_without_vision_keys_is_text_only(flat: dict[str, Any]) -> None:
    text_only = {key: value for key, value in flat.items() if not key.startswith("vision_")}
    assert ModelConfig.from_dict(text_only).vision is None


def test_ignored_keys_are_ignored(tiny: dict[str, Any], flat: dict[str, Any]) -> None:
    expected = ModelConfig.from_dict(tiny)
    tiny["transformers_version"] = "5.0.0"
    tiny["text_config"]["initializer_range"] = 0.02
    assert ModelConfig.from_dict(tiny) == expected
    flat["max_batch_size"] = 4
    assert ModelConfig.from_dict(flat) == expected


# Refusing what is in the file


@pytest.mark.parametrize(
    ("path", "wrong", "right"),
    [
        (("text_config",), "hiden_size", "hidden_size"),
        (("text_config",), "engram_head_dims", "engram_head_dim"),
        (("vision_config",), "patchsize", "patch_size"),
        (("quantization_config",), "weight_blok_size", "weight_block_size"),
        (("text_config", "rope_scaling"), "beta_fastt", "beta_fast"),
        ((), "image_tokn_id", "image_token_id"),
    ],
)
def test_unknown_key_is_named_with_its_nearest(
    tiny: dict[str, Any], path: tuple[str, ...], wrong: str, right: str
) -> None:
    section = tiny
    for key in path:
        section = section[key]
    section[wrong] = 1
    error = refusal(tiny)
    assert error.message == f"config.json: unknown key {'.'.join((*path, wrong))}"
    assert error.hint == f"did you mean {right}?"


def test_unknown_flat_key_is_named_with_its_nearest(flat: dict[str, Any]) -> None:
    flat["n_layer"] = 10
    error = refusal(flat)
    assert (error.message, error.hint) == ("config.json: unknown key n_layer", "did you mean n_layers?")


def test_far_off_key_has_no_hint(tiny: dict[str, Any]) -> None:
    tiny["zzzz"] = 1
    assert refusal(tiny).hint is None


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("hidden_size", "5120", 'text_config.hidden_size must be an integer, got "5120"'),
        ("hidden_size", 128.0, "text_config.hidden_size must be an integer, got 128.0"),
        ("hidden_size", True, "text_config.hidden_size must be an integer, got true"),
        ("hidden_size", None, "text_config.hidden_size must be an integer, got null"),
        ("swiglu_limit", "10", 'text_config.swiglu_limit must be a finite number, got "10"'),
        ("swiglu_limit", float("inf"), "text_config.swiglu_limit must be a finite number, got Infinity"),
        ("swiglu_limit", True, "text_config.swiglu_limit must be a finite number, got true"),
        ("norm_topk_prob", 1, "text_config.norm_topk_prob must be true or false, got 1"),
        ("topk_method", 3, "text_config.topk_method must be a string, got 3"),
        ("kv_source_layer_ids", 2, "text_config.kv_source_layer_ids must be a list of integers, got 2"),
        (
            "kv_source_layer_ids",
            [2, "4", 6],
            'text_config.kv_source_layer_ids must hold integers only, got "4" in it',
        ),
        ("rope_scaling", 16, "text_config.rope_scaling must be an object, got 16"),
        ("rope_scaling", None, "text_config.rope_scaling is missing"),
    ],
)
def test_wrong_type_is_named_with_its_value(tiny: dict[str, Any], key: str, value: Any, text: str) -> None:
    tiny["text_config"][key] = value
    assert refusal(tiny).message == f"config.json: {text}"


def test_number_beyond_float_is_refused(tiny: dict[str, Any]) -> None:
    tiny["text_config"]["rope_theta"] = 10**400
    assert "text_config.rope_theta must be a finite number" in refusal(tiny).message


def test_wrong_type_in_the_flat_layout_uses_the_flat_name(flat: dict[str, Any]) -> None:
    flat["dim"] = "128"
    assert refusal(flat).message == 'config.json: dim must be an integer, got "128"'
    flat["dim"] = 128
    flat["vision_dim"] = None
    assert refusal(flat).message == "config.json: vision_dim must be an integer, got null"


@pytest.mark.parametrize("block", [32, [32], [32, 64], [32.0, 32.0], None, "32"])
def test_weight_block_size_is_two_equal_integers(tiny: dict[str, Any], block: Any) -> None:
    tiny["quantization_config"]["weight_block_size"] = block
    message = refusal(tiny).message
    assert "quantization_config.weight_block_size must be two equal integers" in message
    assert json.dumps(block) in message


def test_missing_keys_are_named(tiny: dict[str, Any], flat: dict[str, Any]) -> None:
    del tiny["text_config"]["hc_mult"], tiny["text_config"]["o_groups"]
    assert refusal(tiny).message == "config.json: missing text_config.o_groups, text_config.hc_mult"
    del flat["norm_eps"]
    assert refusal(flat).message == "config.json: missing norm_eps"


@pytest.mark.parametrize("section", ["text_config", "quantization_config"])
def test_missing_section_is_named(tiny: dict[str, Any], section: str) -> None:
    del tiny[section]
    assert refusal(tiny).message == f"config.json: {section} is missing"


@pytest.mark.parametrize(
    ("path", "value", "only"),
    [
        (("quantization_config", "quant_method"), "gptq", '"fp8"'),
        (("quantization_config", "expert_dtype"), "fp8", '"fp4"'),
        (("quantization_config", "scale_fmt"), "float32", '"ue8m0"'),
        (("text_config", "hidden_act"), "gelu", '"silu"'),
        (("text_config", "attention_bias"), True, "false"),
        (("text_config", "attention_bias"), 0, "false"),
        (("text_config", "rope_scaling", "rope_type"), "linear", '"yarn"'),
        (("tie_word_embeddings",), True, "false"),
        (("dtype",), "float16", '"bfloat16"'),
    ],
)
def test_value_of_another_architecture_is_refused(
    tiny: dict[str, Any], path: tuple[str, ...], value: Any, only: str
) -> None:
    section = tiny
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    assert (
        refusal(tiny).message
        == f"config.json: {'.'.join(path)} is {json.dumps(value)}, and only {only} is supported"
    )


def test_required_constants_may_not_be_left_out(tiny: dict[str, Any], flat: dict[str, Any]) -> None:
    del tiny["quantization_config"]["expert_dtype"]
    assert refusal(tiny).message == "config.json: quantization_config.expert_dtype is missing"
    flat["dtype"] = "bf16"
    assert refusal(flat).message == 'config.json: dtype is "bf16", and only "fp8" is supported'


def test_other_model_is_called_by_its_type(tiny: dict[str, Any]) -> None:
    other = {"model_type": "deepseek_v4", "hidden_size": 4096, "nonsense": 1}
    message = refusal(other).message
    assert message == 'config.json: model_type is "deepseek_v4", and only deepseek_v41 can be read'
    del tiny["model_type"]
    assert refusal(tiny).message == "config.json: model_type is missing"
    assert "neither the published layout" in refusal({"a": 1}).message


# Refusing what is not a file of the kind


def test_duplicate_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        (TINY / "config.json").read_text().replace('"o_groups": 8', '"o_groups": 8, "o_groups": 4')
    )
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_file(path)
    assert caught.value.message == f"{path}: key 'o_groups' appears twice"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "not JSON"),
        (b"[1, 2]", "must hold a JSON object, got [1, 2]"),
        (b'{"model_type": NaN}', "NaN is not a number a configuration can hold"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe{}", "cannot read"),
    ],
)
def test_unreadable_content(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_file(path)
    assert str(path) in caught.value.message
    assert text in caught.value.message


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        ModelConfig.from_file(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="cannot read"):
        ModelConfig.from_file(tmp_path)


# Refusing contradictions

CONTRADICTIONS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("too few ratios", {"compress_ratios": [0] * 12}, ["compress_ratios has 12", "num_hidden_layers 10"]),
    ("ratio of another architecture", {"compress_ratios": [0, 4, *[0] * 11]}, ["compress_ratios[1] is 4"]),
    (
        "compressed draft",
        {"compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 1, 0]},
        ["compress_ratios[11] is 1", "draft stage 1"],
    ),
    (
        "kv source without compression",
        {"kv_source_layer_ids": [1, 2, 4, 6]},
        ["kv_source_layer_ids holds 1", "compress_ratios[1] is 0"],
    ),
    (
        "consumer before its source",
        {"kv_source_layer_ids": [4, 6], "index_source_layer_ids": [4, 6, 8]},
        ["compress_ratios[2] is 2", "no kv_source_layer_ids at or before layer 2"],
    ),
    (
        "index source before its cache",
        {"kv_source_layer_ids": [2, 4, 7], "index_source_layer_ids": [2, 4, 6, 7, 8]},
        ["index_source_layer_ids holds 6", "no kv_source_layer_ids"],
    ),
    (
        "kv source that never ranks",
        {"index_source_layer_ids": [2, 6, 8]},
        ["kv_source_layer_ids holds 4", "index_source_layer_ids does not"],
    ),
    (
        "candidate source that never ranks",
        {"candidate_source_layer_id": 7},
        ["candidate_source_layer_id is 7", "index_source_layer_ids lacks it"],
    ),
    (
        "candidate source of another ratio",
        {"candidate_source_layer_id": 4},
        ["candidate_source_layer_id is 4", "compress_ratios[4] is 2, not 1"],
    ),
    (
        "candidates of another cache",
        {"kv_source_layer_ids": [2, 4, 6, 8]},
        ["index_source_layer_ids holds 8", "candidate_source_layer_id 6"],
    ),
    ("source outside", {"kv_source_layer_ids": [2, 4, 6, 10]}, ["kv_source_layer_ids holds 10", "is 10"]),
    ("sources out of order", {"index_source_layer_ids": [4, 2, 6, 8]}, ["must ascend", "[4, 2, 6, 8]"]),
    ("tap outside", {"dspark_target_layer_ids": [7, 8, 10]}, ["dspark_target_layer_ids holds 10"]),
    ("tap negative", {"dspark_target_layer_ids": [-1, 8]}, ["dspark_target_layer_ids holds -1"]),
    ("drafts without taps", {"dspark_target_layer_ids": []}, ["dspark_target_layer_ids is empty"]),
    ("engram outside", {"engram_layer_ids": [1, 12]}, ["engram_layer_ids holds 12"]),
    ("tables and layers", {"engram_num_embeddings": [12386]}, ["has 1 entries", "engram_layer_ids has 2"]),
    ("empty table", {"engram_num_embeddings": [12386, 0]}, ["engram_num_embeddings must be positive, got 0"]),
    ("compressed vocabulary", {"engram_compressed_vocab_size": 513}, ["513 exceeds vocab_size 512"]),
    ("groups", {"o_groups": 3}, ["num_attention_heads 16", "o_groups 3"]),
    ("hidden block", {"hidden_size": 136}, ["hidden_size 136", "weight_block_size 32"]),
    ("expert block", {"moe_intermediate_size": 48}, ["moe_intermediate_size 48", "weight_block_size 32"]),
    ("output block", {"o_lora_rank": 2}, ["o_groups * o_lora_rank 16", "weight_block_size 32"]),
    ("engram block", {"engram_head_dim": 48}, ["engram_head_dim 48", "weight_block_size 32"]),
    ("key heads", {"num_key_value_heads": 2}, ["num_key_value_heads is 2", "only 1"]),
    ("shared experts", {"n_shared_experts": 2}, ["n_shared_experts is 2", "only 1"]),
    ("scoring", {"scoring_func": "sigmoid"}, ["scoring_func is 'sigmoid'", "sqrtsoftplus"]),
    ("top-k method", {"topk_method": "greedy"}, ["topk_method is 'greedy'", "noaux_tc"]),
    ("unnormalised", {"norm_topk_prob": False}, ["norm_topk_prob is False"]),
    ("odd rope", {"qk_rope_head_dim": 15}, ["qk_rope_head_dim must be even, got 15"]),
    ("rope over head", {"qk_rope_head_dim": 66}, ["qk_rope_head_dim 66 exceeds head_dim 64"]),
    ("rope over index head", {"qk_rope_head_dim": 34}, ["qk_rope_head_dim 34 exceeds index_head_dim 32"]),
    ("choice", {"num_experts_per_tok": 17}, ["num_experts_per_tok 17 exceeds n_routed_experts 16"]),
    (
        "draft choice",
        {"dspark_num_experts_per_tok": 9},
        ["dspark_num_experts_per_tok 9 exceeds dspark_n_routed_experts 8"],
    ),
    ("noise token", {"dspark_noise_token_id": 512}, ["dspark_noise_token_id 512", "vocab_size 512"]),
    ("pad token", {"engram_pad_token_id": -1}, ["engram_pad_token_id -1", "vocab_size 512"]),
    ("no layers", {"num_hidden_layers": 0}, ["num_hidden_layers must be positive, got 0"]),
    ("negative limit", {"swiglu_limit": -1.0}, ["swiglu_limit must be positive, got -1.0"]),
    ("unigrams", {"engram_max_ngram_size": 1}, ["engram_max_ngram_size must be 2 or more, got 1"]),
    ("negative eps", {"hc_eps": -1e-6}, ["hc_eps must not be negative"]),
]


@pytest.mark.parametrize(
    ("changes", "texts"), [case[1:] for case in CONTRADICTIONS], ids=[case[0] for case in CONTRADICTIONS]
)
def test_contradiction_names_its_operands(
    tiny: dict[str, Any], changes: dict[str, Any], texts: list[str]
) -> None:
    tiny["text_config"] |= changes
    message = refusal(tiny).message
    for text in texts:
        assert text in message


ROPE_AND_VISION: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("rope_scaling", lambda s: s.update(factor=0.5), "rope_scaling.factor must be 1 or more, got 0.5"),
    ("rope_scaling", lambda s: s.update(beta_fast=1), "rope_scaling.beta_slow 1.0"),
    ("rope_scaling", lambda s: s.update(original_max_position_embeddings=0), "must be positive, got 0"),
    ("vision_config", lambda s: s.update(num_attention_heads=5), "vision_config.num_attention_heads 5"),
    ("vision_config", lambda s: s.update(num_attention_heads=32), "must be a multiple of 4"),
    ("vision_config", lambda s: s.update(max_image_tokens=3), "vision_config.max_image_tokens must be 4"),
    ("vision_config", lambda s: s.update(patch_size=0), "vision_config.patch_size must be positive, got 0"),
    ("vision_config", lambda s: s.update(min_pixels=-1), "vision_config.min_pixels must not be negative"),
    ("vision_config", lambda s: s.update(max_wh_ratio=-2), "vision_config.max_wh_ratio must be positive"),
]


@pytest.mark.parametrize(("section", "change", "text"), ROPE_AND_VISION)
def test_contradiction_in_a_nested_section(
    tiny: dict[str, Any], section: str, change: Callable[[dict[str, Any]], Any], text: str
) -> None:
    change(tiny["text_config"][section] if section == "rope_scaling" else tiny[section])
    assert text in refusal(tiny).message


def test_token_ids_and_blocks_of_the_top_level(tiny: dict[str, Any]) -> None:
    tiny["image_token_id"] = 600
    assert "image_token_id 600 is outside vocab_size 512" in refusal(tiny).message
    tiny["image_token_id"] = 511
    tiny["quantization_config"]["weight_block_size"] = [128, 128]
    assert "weight_block_size is 128, and only 32 is supported" in refusal(tiny).message


def test_replace_checks_again(tiny: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(tiny)
    with pytest.raises(ConfigError, match="o_groups 3"):
        dataclasses.replace(config, o_groups=3)
    assert dataclasses.replace(config, n_routed_experts=4).layers[0].num_experts == 4


def _set(section: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value


def _paths(section: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[list[str]]:
    paths = []
    for key, value in section.items():
        paths.append([*prefix, key])
        if isinstance(value, dict):
            paths += _paths(value, (*prefix, key))
    return paths


JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.one_of(st.integers(-2, 14), st.none()), max_size=14),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
NESTED, FLAT = (json.loads((TINY / name).read_text()) for name in ("config.json", "inference_config.json"))


@given(st.data())
def test_any_value_anywhere_is_read_or_refused(data: st.DataObject) -> None:
    """No file makes the reader raise anything but ConfigError."""
    config = copy.deepcopy(data.draw(st.sampled_from([NESTED, FLAT])))
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(_paths(config)))
        _set(config, path, data.draw(JSON_VALUES))
    with contextlib.suppress(ConfigError):
        ModelConfig.from_dict(config)


# The plan of the layers


def test_layer_plan_of_the_tiny_model() -> None:
    config = ModelConfig.from_file(TINY / "config.json")
    roles = [
        (plan.compress_ratio, plan.kv_source, plan.index_source, plan.is_kv_source, plan.is_index_source)
        for plan in config.layers
    ]
    assert roles == [
        (0, None, None, False, False),
        (0, None, None, False, False),
        (2, 2, 2, True, True),
        (2, 2, 2, False, False),
        (2, 4, 4, True, True),
        (2, 4, 4, False, False),
        (1, 6, 6, True, True),
        (1, 6, 6, False, False),
        (1, 6, 8, False, True),
        (1, 6, 8, False, False),
    ]
    assert [plan.index for plan in config.layers if plan.uses_candidates] == [8]
    assert [plan.index for plan in config.layers if plan.is_candidate_source] == [6]
    assert [plan.index for plan in config.layers if plan.has_engram] == [1, 4]
    assert [plan.index for plan in config.layers if plan.is_tap] == [7, 8, 9]
    assert [plan.index for plan in config.layers if plan.uses_yarn] == list(range(2, 10))
    assert {(plan.num_experts, plan.num_chosen) for plan in config.layers} == {(16, 3)}


def test_layer_plan_of_the_published_model() -> None:
    """The table of the specification, row by row."""
    config = ModelConfig.from_dict(published_config_dict())
    expected: dict[range, tuple[int, int | None, int | None]] = {
        range(2): (0, None, None),
        range(2, 8): (2, 2, 2),
        range(8, 14): (2, 8, 8),
        range(14, 20): (2, 14, 14),
        range(20, 24): (1, 20, 20),
        range(24, 28): (1, 20, 24),
        range(28, 32): (1, 20, 28),
        range(32, 36): (1, 20, 32),
        range(36, 40): (1, 20, 36),
    }
    for layers, role in expected.items():
        for layer in layers:
            plan = config.layers[layer]
            assert (plan.index, plan.prefix) == (layer, f"layers.{layer}")
            assert (plan.compress_ratio, plan.kv_source, plan.index_source) == role
    assert [plan.index for plan in config.layers if plan.uses_candidates] == [24, 28, 32, 36]
    assert [plan.index for plan in config.layers if plan.is_candidate_source] == [20]


def test_draft_layers() -> None:
    config = ModelConfig.from_dict(published_config_dict())
    assert [(plan.index, plan.prefix) for plan in config.draft_layers] == [
        (40, "mtp.0"),
        (41, "mtp.1"),
        (42, "mtp.2"),
    ]
    for plan in config.draft_layers:
        assert plan.is_draft
        assert (plan.num_experts, plan.num_chosen) == (128, 3)
        roles = (plan.uses_yarn, plan.is_index_source, plan.is_kv_source, plan.has_engram, plan.is_tap)
        assert not any(roles)


def test_model_without_candidates_or_drafts(tiny: dict[str, Any]) -> None:
    tiny["text_config"] |= {
        "candidate_source_layer_id": None,
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
        "compress_ratios": tiny["text_config"]["compress_ratios"][:10],
    }
    config = ModelConfig.from_dict(tiny)
    assert config.draft_layers == ()
    assert not any(plan.uses_candidates or plan.is_tap for plan in config.layers)
    assert ModelConfig.from_dict(config.to_published_dict()) == config
