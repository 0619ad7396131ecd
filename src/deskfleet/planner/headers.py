"""A checkpoint directory as the planner sees it: `inventory_of`, from config.json and the shards' headers alone.

Owns telling the layouts apart (V4.1 with either kind of Engram rows, V4, EXL3, a copy without Engram shards) and
noticing what is missing. Reads no tensor data, and compares sums with the configuration rather than every shape:
opening a checkpoint to serve it does that.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from deskfleet.errors import CheckpointError, ConfigError
from deskfleet.model.checkpoint import CONFIG_NAME, INDEX_NAME
from deskfleet.model.config import ModelConfig
from deskfleet.model.config_keys import MODEL_TYPE, parse_json_object
from deskfleet.model.embedded import embedded_name
from deskfleet.model.names import expected_tensors
from deskfleet.model.published import published_config_dict
from deskfleet.model.shard_file import ShardHeader, read_shard_header
from deskfleet.planner import v4
from deskfleet.planner.inventory import (
    EngramTables,
    Inventory,
    TensorSize,
    WeightGroup,
    group_tensors,
    is_scale,
    kinds_of,
    numberless,
    rule_of,
)
from deskfleet.planner.v41 import RowFormatName, sizes_of, v41_inventory

_EXL3 = "exl3"
_ROW_FORMATS: Mapping[str, RowFormatName] = {"F8_E4M3": "fp8", "U8": "nvfp4", "I8": "nvfp4"}
_TABLE_PART = ".engram.embed."
_PROJECTION_GROUPS = ("engram projection", "engram gates")


@dataclass(frozen=True, slots=True)
class _Found:
    """What the headers say. `tables` are the tensors of Engram tables, `weights` the kinds of all others."""

    directory: Path
    file_bytes: int
    num_files: int
    weights: tuple[TensorSize, ...]
    tables: tuple[TensorSize, ...]


def inventory_of(directory: str | Path) -> Inventory:
    """Return the inventory of the checkpoint in `directory`; every `*.safetensors` there is its own.

    Sizes are those of the tensors that are there. Without Engram shards the tables' sizes come from config.json, and
    `derived` says so. Raises ConfigError for a config.json of another model or with wrong values, CheckpointError when
    the directory, config.json, a file or a tensor is missing, damaged or unknown.
    """
    directory = Path(directory)
    data = _read_config(directory)
    source = str(directory / CONFIG_NAME)
    model_type = data.get("model_type")
    with _collector_paused():
        if model_type == MODEL_TYPE:
            return _v41(data, source, _read_headers(directory))
        if model_type == v4.MODEL_TYPE:
            return _v4(data, source, _read_headers(directory))
    raise ConfigError(
        f"{source}: model_type is {model_type!r}; {MODEL_TYPE} and {v4.MODEL_TYPE} can be planned",
        hint="give the directory of a DeepSeek-V4.1 or DeepSeek-V4 checkpoint",
    )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A hundred thousand small objects are made and none is part of a cycle: looking for cycles takes a third of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise CheckpointError(
            f"no such directory: {directory}", hint="give the directory that holds config.json"
        )
    path = directory / CONFIG_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"no {CONFIG_NAME} in {directory}", hint="give a checkpoint's own directory"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return parse_json_object(text, source=str(path))


def _read_headers(directory: Path) -> _Found:
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(
            f"no safetensors file in {directory}", hint="a plan needs no download: name a built-in model"
        )
    file_bytes = 0
    tables: list[TensorSize] = []
    weights: list[TensorSize] = []
    for path in paths:
        header = _read_header(path)
        file_bytes += header.file_bytes
        tensors = [
            (entry.name, entry.dtype, entry.shape, entry.stop_bytes - entry.start_bytes, 1)
            for entry in header.entries
        ]
        # File by file: what is kept of a hundred thousand tensors is a few hundred kinds.
        weights.extend(kinds_of(tensor for tensor in tensors if _TABLE_PART not in tensor[0]))
        tables.extend(TensorSize(*tensor) for tensor in tensors if _TABLE_PART in tensor[0])
    return _Found(directory, file_bytes, len(paths), kinds_of(weights), tuple(tables))


def _read_header(path: Path) -> ShardHeader:
    header, problems = read_shard_header(path)
    if problems:
        raise problems[0]
    assert header is not None
    return header


def _v41(data: dict[str, Any], source: str, found: _Found) -> Inventory:
    is_exl3 = _quant_method(data) == _EXL3
    if is_exl3:  # what EXL3 leaves alone is as released
        data = {**data, "quantization_config": published_config_dict()["quantization_config"]}
    config = ModelConfig.from_dict(data, source=source)
    tensors = expected_tensors(config)
    row_format: RowFormatName = _row_format(found.tables) if found.tables else "fp8"
    blueprint = v41_inventory(config, name="", origin="", row_format=row_format, tensors=tensors)
    expected = [tensor for tensor in sizes_of(config, tensors) if _TABLE_PART not in tensor.name]
    derived: tuple[str, ...] = ()
    taken: tuple[WeightGroup, ...] = ()
    if blueprint.engram is not None and not found.tables:
        derived = (f"engram tables: not in the directory; rows from {CONFIG_NAME}, taken as {row_format}",)
        # The projections are published in the same files, and every rank holds them.
        if not any(map(_is_projection, found.weights)):
            derived += (f"engram projection: not in the directory; shapes from {CONFIG_NAME}",)
            expected = [tensor for tensor in expected if not _is_projection(tensor)]
            taken = tuple(group for group in blueprint.groups if group.name in _PROJECTION_GROUPS)
    else:
        _check_tables(blueprint.engram, found.tables)
    _check_complete(expected, found)
    groups = {group.name: group for group in (*group_tensors(found.weights), *taken)}
    if not is_exl3:
        _check_sizes(groups, blueprint.groups)
    in_order = tuple(groups[group.name] for group in blueprint.groups)
    return _measured(blueprint, found, in_order, derived=derived)


def _v4(data: dict[str, Any], source: str, found: _Found) -> Inventory:
    config = v4.V4Config.from_dict(data, source=source)
    if config.num_stages == 0:
        stages = _count_weights(found.weights)["mtp.#.attn_norm.weight"]
        config = replace(config, n_mtp_layers=stages)
    _check_tables(None, found.tables)
    _check_complete(v4.v4_tensors(config), found)
    blueprint = v4.v4_inventory(config, name="", origin="", num_files=0)
    return _measured(blueprint, found, group_tensors(found.weights), derived=())


def _measured(
    blueprint: Inventory, found: _Found, groups: tuple[WeightGroup, ...], *, derived: tuple[str, ...]
) -> Inventory:
    """Return `blueprint` with what was found in place of what its configuration calls for."""
    experts = next(group for group in groups if group.name == "routed experts")
    return replace(
        blueprint,
        name=embedded_name(found.directory) or found.directory.name,
        weight_format=_weight_format(found.weights),
        expert_bits=8 * experts.num_bytes / experts.num_weights,
        origin=f"the headers of {found.num_files} files in {found.directory}",
        derived=derived,
        file_bytes=found.file_bytes,
        num_files=found.num_files,
        groups=groups,
    )


def _quant_method(data: Mapping[str, Any]) -> object:
    quantization = data.get("quantization_config")
    return quantization.get("quant_method") if isinstance(quantization, Mapping) else None


def _weight_format(weights: Iterable[TensorSize]) -> Literal["mxfp4", "fp8", "exl3"]:
    """How the first expert is stored. Raises CheckpointError for a way that is not known."""
    first = next(
        tensor for tensor in weights if ".experts.#.w1." in tensor.name and not is_scale(tensor.name)
    )
    if first.name.endswith(".trellis"):
        return "exl3"
    if first.dtype in ("I8", "U8"):
        return "mxfp4"
    if first.dtype == "F8_E4M3":
        return "fp8"
    raise CheckpointError(f"tensor {first.name} is {first.dtype}; experts are known as FP4, FP8 and EXL3")


def _is_projection(tensor: TensorSize) -> bool:
    rule = rule_of(numberless(tensor.name))
    return rule is not None and rule.name in _PROJECTION_GROUPS


def _check_complete(expected: Iterable[TensorSize], found: _Found) -> None:
    """Raise CheckpointError when weights are missing or there more often than config.json calls for."""
    wanted, there = _count_weights(expected), _count_weights(found.weights)
    name = next((name for name in (*wanted, *there) if wanted[name] != there[name]), None)
    if name is None:
        return
    absent = _absent_files(found.directory)
    raise CheckpointError(
        f"{found.directory} holds {there[name]} tensors {name}, and {CONFIG_NAME} calls for {wanted[name]}",
        hint=f"fetch {len(absent)} missing files, {absent[0]} first" if absent else None,
    )


def _count_weights(tensors: Iterable[TensorSize]) -> Counter[str]:
    """Count by numberless name, however the weights are stored; scales go by other names in other layouts."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[numberless(tensor.name)] += tensor.copies
    plain: Counter[str] = Counter()
    for name, count in counts.items():
        if not is_scale(name):
            stem, dot, suffix = name.rpartition(".")
            plain[f"{stem}{dot}weight" if suffix == "trellis" else name] += count
    return plain


def _absent_files(directory: Path) -> list[str]:
    """Files that the index names and the directory lacks; none when there is no index to be read."""
    try:
        index = msgspec.json.decode((directory / INDEX_NAME).read_bytes())
    except (OSError, ValueError):
        return []
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        return []
    files = {file for file in weight_map.values() if isinstance(file, str)}
    return sorted(file for file in files if not (directory / file).exists())


def _check_sizes(groups: Mapping[str, WeightGroup], expected: Iterable[WeightGroup]) -> None:
    """Raise CheckpointError when tensors have other sizes than config.json gives them."""
    for group in expected:
        num_bytes = groups[group.name].num_bytes
        if num_bytes != group.num_bytes:
            raise CheckpointError(
                f"the {group.name} have {num_bytes} bytes, and {CONFIG_NAME} calls for {group.num_bytes}",
                hint="config.json and shards come from different checkpoints, or a tensor lacks its scales",
            )


def _row_format(tables: Iterable[TensorSize]) -> RowFormatName:
    weights = [tensor for tensor in tables if tensor.name.endswith(".weight")]
    formats = {tensor.dtype: _ROW_FORMATS.get(tensor.dtype) for tensor in weights}
    known = set(formats.values())
    if len(known) != 1 or None in known:
        raise CheckpointError(
            f"Engram tables are stored as {', '.join(sorted(formats)) or 'scales only'}; known are F8_E4M3 (fp8) and "
            "U8 (nvfp4), one for all tables"
        )
    return next(format_name for format_name in formats.values() if format_name is not None)


def _check_tables(expected: EngramTables | None, tables: Sequence[TensorSize]) -> None:
    """Raise CheckpointError unless each layer's codes and scales make up its rows, and no other layer has a table."""
    layers = expected.layers if expected is not None else ()
    prefixes = tuple(f"layers.{layer}{_TABLE_PART}" for layer in layers)
    stray = next((tensor.name for tensor in tables if not tensor.name.startswith(prefixes)), None)
    if stray is not None:
        raise CheckpointError(f"tensor {stray} is there, and {CONFIG_NAME} gives its layer no Engram table")
    if expected is None:
        return
    for prefix, rows in zip(prefixes, expected.rows, strict=True):
        parts = [tensor for tensor in tables if tensor.name.startswith(prefix) and len(tensor.shape) == 2]
        num_bytes = sum(tensor.num_bytes for tensor in parts)
        if num_bytes != rows * expected.row_bytes:
            raise CheckpointError(
                f"{prefix}* has {num_bytes} bytes, and {rows} rows of {expected.row_bytes} bytes "
                f"({expected.format}) have {rows * expected.row_bytes}",
                hint="fetch all shards with Engram tensors, or none",
            )


__all__ = ["inventory_of"]
