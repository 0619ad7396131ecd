"""The keys of config.json, and reading and writing them strictly.

Owns both published layouts (nested `config.json`, flat `inference/config.json`): which keys exist, which are
ignored and why, which may hold one value only, and the type of each. Knows nothing of what values mean
together; that is `contradictions`. Spec §1.1-1.5.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deskfleet.errors import ConfigError

if TYPE_CHECKING:
    from deskfleet.model.config import ModelConfig

PublishedValues = dict[str, Any]
"""One JSON object as Python values."""

MODEL_TYPE = "deepseek_v41"

IGNORED: Mapping[str, str] = {
    "_name_or_path": "where a library once loaded the file from",
    "architectures": "a class name of another library; model_type decides",
    "auto_map": "code of another library",
    "initializer_range": "training only",
    "transformers_version": "the library that wrote the file",
    "use_cache": "a run-time choice of another library",
}
"""Keys of the nested layout, at any level, that carry nothing this program needs, each with its reason."""

FLAT_IGNORED: Mapping[str, str] = {
    "max_batch_size": "a run-time limit of the publisher's script",
    "max_seq_len": "a run-time limit of the publisher's script",
    "temperature": "a run-time choice of the publisher's script",
}
"""Keys of the flat layout that carry nothing this program needs, each with its reason."""

# What has one value in this architecture. The forward pass is written for it, so any other is refused.
_TOP_CONSTANTS: Mapping[str, object] = {
    "model_type": MODEL_TYPE,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
_QUANTIZATION_CONSTANTS: Mapping[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_TEXT_CONSTANTS: Mapping[str, object] = {
    "model_type": "deepseek_v41_text",
    "hidden_act": "silu",
    "attention_bias": False,
    "gate_temp": 1.0,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
_VISION_CONSTANTS: Mapping[str, object] = {
    "model_type": "deepseek_v41_vision",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
_ROPE_CONSTANTS: Mapping[str, object] = {"rope_type": "yarn", "type": "yarn"}
_FLAT_CONSTANTS: Mapping[str, object] = {
    "dtype": "fp8",
    "expert_dtype": "fp4",
    "scale_fmt": "ue8m0",
    "gate_temp": 1.0,
}

_QUANTIZATION_REQUIRED = ("quant_method", "scale_fmt", "expert_dtype")
_TEXT_REQUIRED = ("hidden_act",)
_FLAT_REQUIRED = ("dtype", "expert_dtype")

_TOP_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
_SECTIONS = ("text_config", "vision_config", "quantization_config")

# Flat name -> field, where the two differ (spec §1.5).
_FLAT_NAMES: Mapping[str, str] = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_pad_id": "engram_pad_token_id",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
}
_FLAT_ROPE_NAMES: Mapping[str, str] = {
    "rope_factor": "factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_seq_len": "original_max_position_embeddings",
}
_FLAT_VISION_NAMES: Mapping[str, str] = {
    "vision_n_layers": "num_hidden_layers",
    "vision_dim": "hidden_size",
    "vision_n_heads": "num_attention_heads",
    "vision_inter_dim": "intermediate_size",
    "vision_patch_size": "patch_size",
    "vision_rope_theta": "rope_theta",
    "vision_downsample_ratio": "downsample_ratio",
    "vision_max_n_token": "max_image_tokens",
    "vision_min_pixels": "min_pixels",
    "vision_max_wh_ratio": "max_wh_ratio",
}
# Fields the flat layout leaves out. `ModelConfig.from_dict` documents these values.
_FLAT_DEFAULTS: Mapping[str, object] = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "num_key_value_heads": 1,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "weight_block_size": 32,
}


def parse_json_object(text: str, *, source: str) -> PublishedValues:
    """Parse `text` as one JSON object.

    Raises ConfigError for bad JSON, NaN or Infinity, a key given twice, or another JSON type.
    """

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> PublishedValues:
        values: PublishedValues = {}
        for key, value in pairs:
            if key in values:
                raise ConfigError(f"{source}: key {key!r} appears twice", hint="keep one of them")
            values[key] = value
        return values

    def reject_constant(name: str) -> object:
        raise ConfigError(f"{source}: {name} is not a number a configuration can hold")

    try:
        data = json.loads(text, object_pairs_hook=reject_duplicates, parse_constant=reject_constant)
    except (ValueError, RecursionError) as error:  # ValueError: bad JSON, or an integer of absurd length
        raise ConfigError(f"{source}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: must hold a JSON object, got {_describe(data)}")
    return data


def _describe(value: object) -> str:
    """Return `value` as it would stand in a JSON file, shortened to fit a message."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return a `did you mean` hint for a misspelt `name`, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {matches[0]}?" if matches else None


def read_published(
    data: Mapping[str, object], config_class: type[ModelConfig], *, source: str
) -> PublishedValues:
    """Return the constructor arguments of `config_class` from either layout. Raises ConfigError."""
    if "model_type" in data or "text_config" in data:
        return _NestedReader(data, config_class, source).read()
    if "dim" in data or "n_layers" in data:
        return _FlatReader(data, config_class, source).read()
    raise ConfigError(
        f"{source}: neither the published layout (model_type, text_config) nor the flat one (dim, n_layers)",
        hint="give the config.json of a DeepSeek-V4.1 checkpoint",
    )


def write_published(config: ModelConfig) -> PublishedValues:
    """Return `config` in the nested published layout."""
    text: PublishedValues = {"model_type": "deepseek_v41_text"}
    for name in _init_fields(type(config)):
        if name not in (*_TOP_FIELDS, "weight_block_size", "vision"):
            text[name] = _plain(getattr(config, name))
    text["rope_scaling"] = {"rope_type": "yarn", **text["rope_scaling"]}
    text |= {"hidden_act": "silu", "attention_bias": False}
    published: PublishedValues = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": MODEL_TYPE,
        "dtype": "bfloat16",
        **{name: getattr(config, name) for name in _TOP_FIELDS},
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [config.weight_block_size] * 2,
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
    }
    if config.vision is not None:
        published["vision_config"] = {"model_type": "deepseek_v41_vision", **_plain(config.vision)}
    return published


class _NestedReader:
    """Reads config.json (spec §1.1-1.4)."""

    def __init__(self, data: Mapping[str, object], config_class: type[ModelConfig], source: str) -> None:
        self.data = data
        self.config_class = config_class
        self.source = source

    def read(self) -> PublishedValues:
        # Before any key is judged: another model's file would otherwise be called misspelt.
        _check_model_type(self.data.get("model_type"), self.source)
        hints = _hints(self.config_class)
        text_hints = {
            name: hint
            for name, hint in hints.items()
            if name not in (*_TOP_FIELDS, "weight_block_size", "vision")
        }
        top = self._section("", self.data, _TOP_CONSTANTS, (*_TOP_FIELDS, *_SECTIONS), ("model_type",))
        values = _convert_fields({name: hints[name] for name in _TOP_FIELDS}, top, str, self.source)
        text = self._section(
            "text_config", top.get("text_config"), _TEXT_CONSTANTS, text_hints, _TEXT_REQUIRED
        )
        values |= self._fields("text_config", text_hints, text, skip=("rope_scaling",))
        values["rope_scaling"] = self._dataclass(
            "text_config.rope_scaling", hints["rope_scaling"], text.get("rope_scaling"), _ROPE_CONSTANTS
        )
        values["weight_block_size"] = self._block_size(top.get("quantization_config"))
        values["vision"] = None
        if top.get("vision_config") is not None:
            vision_class = _without_none(hints["vision"])
            values["vision"] = self._dataclass(
                "vision_config", vision_class, top["vision_config"], _VISION_CONSTANTS
            )
        return values

    def _section(
        self,
        name: str,
        section: object,
        constants: Mapping[str, object],
        known: Iterable[str],
        required: Sequence[str] = (),
    ) -> Mapping[str, Any]:
        """Return `section` after checking that it is an object whose keys are all known."""
        if section is None:
            raise ConfigError(f"{self.source}: {name} is missing")
        if not isinstance(section, Mapping):
            raise ConfigError(f"{self.source}: {name} must be an object, got {_describe(section)}")
        prefix = f"{name}." if name else ""
        _check_keys(section, (*known, *constants), IGNORED, prefix, self.source)
        _check_constants(section, constants, required, prefix, self.source)
        return section

    def _fields(
        self, name: str, hints: Mapping[str, Any], section: Mapping[str, Any], skip: Sequence[str] = ()
    ) -> PublishedValues:
        wanted = {key: hint for key, hint in hints.items() if key not in skip}
        return _convert_fields(wanted, section, lambda key: f"{name}.{key}", self.source)

    def _dataclass(self, name: str, cls: Any, section: object, constants: Mapping[str, object]) -> Any:
        hints = _hints(cls)
        return cls(**self._fields(name, hints, self._section(name, section, constants, hints)))

    def _block_size(self, section: object) -> int:
        name = "quantization_config"
        values = self._section(
            name, section, _QUANTIZATION_CONSTANTS, ("weight_block_size",), _QUANTIZATION_REQUIRED
        )
        block = values.get("weight_block_size")
        if (
            not isinstance(block, Sequence)
            or len(block) != 2
            or not all(type(side) is int for side in block)
            or block[0] != block[1]
        ):
            raise ConfigError(
                f"{self.source}: {name}.weight_block_size must be two equal integers, got {_describe(block)}"
            )
        return int(block[0])


class _FlatReader:
    """Reads inference/config.json (spec §1.5)."""

    def __init__(self, data: Mapping[str, object], config_class: type[ModelConfig], source: str) -> None:
        self.data = data
        self.hints = _hints(config_class)
        self.source = source

    def read(self) -> PublishedValues:
        apart = {"rope_scaling", "vision"}
        renamed = {field: flat for flat, field in _FLAT_NAMES.items()}
        flat_names = {field: renamed.get(field, field) for field in self.hints if field not in apart}
        known = (*flat_names.values(), *_FLAT_ROPE_NAMES, *_FLAT_VISION_NAMES, *_FLAT_CONSTANTS)
        _check_keys(self.data, known, FLAT_IGNORED, "", self.source)
        _check_constants(self.data, _FLAT_CONSTANTS, _FLAT_REQUIRED, "", self.source)

        rope = self._dataclass(self.hints["rope_scaling"], _FLAT_ROPE_NAMES)
        raw = {field: self.data[flat] for field, flat in flat_names.items() if flat in self.data}
        raw = {**_FLAT_DEFAULTS, **raw}
        stretched = rope.original_max_position_embeddings * rope.factor
        if not 0 < stretched < 2**63:
            raise ConfigError(
                f"{self.source}: original_seq_len {rope.original_max_position_embeddings} times rope_factor "
                f"{rope.factor} is no context length"
            )
        raw.setdefault("max_position_embeddings", int(stretched))
        wanted = {field: hint for field, hint in self.hints.items() if field not in apart}
        values = _convert_fields(wanted, raw, flat_names.__getitem__, self.source)
        values["rope_scaling"] = rope
        values["vision"] = None
        if any(flat in self.data for flat in _FLAT_VISION_NAMES):
            values["vision"] = self._dataclass(_without_none(self.hints["vision"]), _FLAT_VISION_NAMES)
        return values

    def _dataclass(self, cls: Any, names: Mapping[str, str]) -> Any:
        flat_names = {field: flat for flat, field in names.items()}
        raw = {field: self.data[flat] for flat, field in names.items() if flat in self.data}
        return cls(**_convert_fields(_hints(cls), raw, flat_names.__getitem__, self.source))


def _check_model_type(model_type: object, source: str) -> None:
    if model_type == MODEL_TYPE:
        return
    if model_type is None:
        raise ConfigError(f"{source}: model_type is missing", hint=f"it should say {MODEL_TYPE}")
    raise ConfigError(
        f"{source}: model_type is {_describe(model_type)}, and only {MODEL_TYPE} can be read",
        hint="give the directory of a DeepSeek-V4.1 checkpoint",
    )


def _check_keys(
    section: Mapping[str, object],
    known: Iterable[str],
    ignored: Mapping[str, str],
    prefix: str,
    source: str,
) -> None:
    known = set(known)
    for key in section:
        if key not in known and key not in ignored:
            raise ConfigError(f"{source}: unknown key {prefix}{key}", hint=nearest(key, sorted(known)))


def _check_constants(
    section: Mapping[str, object],
    constants: Mapping[str, object],
    required: Sequence[str],
    prefix: str,
    source: str,
) -> None:
    for key, expected in constants.items():
        if key not in section:
            if key in required:
                raise ConfigError(
                    f"{source}: {prefix}{key} is missing",
                    hint=f"it should say {_describe(expected)}",
                )
            continue
        value = section[key]
        # `False == 0` and `1.0 == True`, and neither spelling is meant.
        if value != expected or isinstance(value, bool) != isinstance(expected, bool):
            raise ConfigError(
                f"{source}: {prefix}{key} is {_describe(value)}, and only {_describe(expected)} is supported"
            )


def _convert_fields(
    hints: Mapping[str, Any], section: Mapping[str, Any], label: Callable[[str], str], source: str
) -> PublishedValues:
    """Return a typed value for every field of `hints`. `label` gives the key's spelling in the file."""
    missing = [label(name) for name in hints if name not in section]
    if missing:
        raise ConfigError(
            f"{source}: missing {', '.join(missing[:5])}" + (" ..." if len(missing) > 5 else "")
        )
    return {name: _convert(section[name], hint, label(name), source) for name, hint in hints.items()}


def _convert(value: Any, hint: Any, key: str, source: str) -> Any:
    if value is None and _accepts_none(hint):
        return None
    hint = _without_none(hint)
    if hint is int and type(value) is int:
        return value
    # JSON writers print whole floats either way (`10000`, `10000.0`). The bound also refuses infinity.
    if hint is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if hint in (bool, str) and type(value) is hint:
        return value
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        wrong = [item for item in value if type(item) is not int]
        if not wrong:
            return tuple(value)
        value = wrong[0]
        raise ConfigError(f"{source}: {key} must hold integers only, got {_describe(value)} in it")
    raise ConfigError(f"{source}: {key} must be {_kind(hint)}, got {_describe(value)}")


def _kind(hint: Any) -> str:
    words = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}
    return words.get(hint, "a list of integers")


def _init_fields(cls: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _hints(cls: type[Any]) -> dict[str, Any]:
    """Return the types of the constructor's arguments: the known keys, and what each may hold."""
    hints = typing.get_type_hints(cls)
    return {name: hints[name] for name in _init_fields(cls)}


def _accepts_none(hint: Any) -> bool:
    return types.NoneType in typing.get_args(hint)


def _without_none(hint: Any) -> Any:
    if not _accepts_none(hint):
        return hint
    return next(part for part in typing.get_args(hint) if part is not types.NoneType)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value


__all__ = [
    "FLAT_IGNORED",
    "IGNORED",
    "MODEL_TYPE",
    "PublishedValues",
    "nearest",
    "parse_json_object",
    "read_published",
    "write_published",
]
