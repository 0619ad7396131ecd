"""Makes a tiny checkpoint: random weights in exactly the published format and layout.

Owns the directory: all of it, or none. Names, shapes and dtypes come from `deskfleet.model.names`, sizes
from `tiny_config`, numbers from `tiny_weights`, the tokenizer from `tiny_tokenizer`. For trying everything
out on a laptop: its answers mean nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from deskfleet.errors import ConfigError
from deskfleet.model.checkpoint import CONFIG_NAME, INDEX_NAME
from deskfleet.model.config import ModelConfig
from deskfleet.model.names import expected_shards
from deskfleet.testing import tiny_tokenizer
from deskfleet.testing.shard_writer import write_shard
from deskfleet.testing.tiny_config import TinySizes, published_config
from deskfleet.testing.tiny_habits import Habits, SpecialIds, draw_habits
from deskfleet.testing.tiny_weights import random_tensors

_TOKENIZER_NAME = "tokenizer.json"
_TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
_OUR_FILES = frozenset((CONFIG_NAME, INDEX_NAME, _TOKENIZER_NAME, _TOKENIZER_CONFIG_NAME))


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """What was written. `tensor_bytes` is the total_size of the index."""

    path: Path
    config: ModelConfig
    num_tensors: int
    tensor_bytes: int


def make_tiny(
    directory: str | Path, *, seed: int = 0, sizes: TinySizes | None = None, overwrite: bool = False
) -> TinyCheckpoint:
    """Write a random checkpoint to `directory` and say what it holds. `sizes` None means `TinySizes()`.

    config.json, sharded safetensors in the published order with their index, tokenizer.json and
    tokenizer_config.json. The same seed and sizes give the same bytes. The directory appears complete or not
    at all: it is made beside its place and renamed. Some seconds and 12 MB with the default sizes.

    Raises ConfigError when the directory is not empty (unless `overwrite`, and then only a checkpoint is
    replaced), when it cannot be written, or when the sizes contradict each other.
    """
    if seed < 0:
        raise ConfigError(f"seed {seed} is negative", hint="use 0 or more")
    target = Path(directory).absolute()
    _check_target(target, overwrite)
    sizes = TinySizes() if sizes is None else sizes
    tokenizer = tiny_tokenizer.build_tokenizer(sizes.vocab_size)
    published = published_config(sizes, tokenizer)
    config = _config(published)
    try:
        with _placed(target) as draft:
            num_tensors, tensor_bytes = _write_weights(draft, config, _habits(config, tokenizer, seed), seed)
            _write_json(draft / CONFIG_NAME, published)
            _write_json(draft / _TOKENIZER_CONFIG_NAME, _tokenizer_config(config))
            (draft / _TOKENIZER_NAME).write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
    return TinyCheckpoint(path=target, config=config, num_tensors=num_tensors, tensor_bytes=tensor_bytes)


def tiny_config(sizes: TinySizes | None = None) -> ModelConfig:
    """The configuration that `make_tiny` writes. Raises ConfigError when the sizes contradict each other."""
    sizes = TinySizes() if sizes is None else sizes
    return _config(published_config(sizes, tiny_tokenizer.build_tokenizer(sizes.vocab_size)))


def _config(published: Mapping[str, object]) -> ModelConfig:
    return ModelConfig.from_dict(published, source="tiny sizes")


def _habits(config: ModelConfig, tokenizer: Tokenizer, seed: int) -> Habits:
    special = SpecialIds(
        eos=config.eos_token_id,
        think=tiny_tokenizer.token_id(tokenizer, tiny_tokenizer.THINK),
        end_think=tiny_tokenizer.token_id(tokenizer, tiny_tokenizer.END_THINK),
        noise=config.dspark_noise_token_id,
    )
    return draw_habits(tiny_tokenizer.text_token_ids(tokenizer), config.vocab_size, special, seed=seed)


def _write_weights(directory: Path, config: ModelConfig, habits: Habits, seed: int) -> tuple[int, int]:
    """Write every shard and the index; return the number of tensors and their bytes."""
    shards = expected_shards(config)
    specs = {name: spec for shard in shards for name, spec in shard.items()}
    weight_map: dict[str, str] = {}
    tensor_bytes = 0
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensor_bytes += write_shard(
            directory / file_name, shard, random_tensors(shard, specs, seed=seed, habits=habits)
        )
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {"total_size": tensor_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / INDEX_NAME, index)
    return len(weight_map), tensor_bytes


def _tokenizer_config(config: ModelConfig) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": tiny_tokenizer.BOS,
        "eos_token": tiny_tokenizer.EOS,
        "pad_token": tiny_tokenizer.PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_target(target: Path, overwrite: bool) -> None:
    """Refuse a target that holds something. `overwrite` gives up a checkpoint, never anything else."""
    try:
        names = sorted(os.listdir(target))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot use {target}: {error.strerror}", hint="name a new directory") from error
    if names and not overwrite:
        raise ConfigError(
            f"{target} is not empty: it holds {names[0]!r}{' and more' if len(names) > 1 else ''}",
            hint="name a new directory, or ask to overwrite the checkpoint in it",
        )
    for name in names:
        if name not in _OUR_FILES and not name.endswith(".safetensors"):
            raise ConfigError(
                f"{target} holds {name!r}, which is no part of a tiny checkpoint; it was left as it is",
                hint="name a new directory",
            )


@contextmanager
def _placed(target: Path) -> Iterator[Path]:
    """Give an empty directory beside `target`; move it there when the block ends well, else remove it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    draft, replaced = room / "new", room / "replaced"
    try:
        draft.mkdir()
        yield draft
        if target.exists():
            target.rename(replaced)
        try:
            draft.rename(target)
        except OSError:
            if replaced.exists():
                replaced.rename(target)
            raise
    finally:
        if target.exists() or not replaced.exists():  # else it holds the only copy of what was there before
            shutil.rmtree(room, ignore_errors=True)


__all__ = ["TinyCheckpoint", "TinySizes", "make_tiny", "tiny_config"]
