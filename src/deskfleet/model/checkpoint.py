"""A checkpoint on disk: which tensors it has and where their bytes are.

Owns the index, the agreement between index, files and configuration, and the byte totals. Reads headers
only, never tensor data, so a checkpoint of half a terabyte opens in about a second. Spec §2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from deskfleet.errors import CheckpointError, ConfigError, DeskfleetError
from deskfleet.model.config import ModelConfig
from deskfleet.model.config_keys import nearest
from deskfleet.model.names import DTYPE_BYTES, TensorClass, TensorSpec, expected_tensors
from deskfleet.model.shard_file import ShardEntry, ShardHeader, read_shard_header

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# Looking for the nearest name is slow: neither among very many names, nor for very many of them.
_MAX_HINT_CANDIDATES = 5_000
_MAX_HINTS = 5


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor on disk. `offset_bytes` counts from the file's beginning; `dtype` is safetensors' name."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int
    tensor_class: TensorClass


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files, index and configuration agree to the last byte.

    `tensors` is in the order of the files, then of the names in a file. `total_bytes` counts tensor data,
    `file_bytes` whole files.
    """

    directory: Path
    config: ModelConfig
    tensors: Mapping[str, TensorInfo]
    total_bytes: int
    file_bytes: int
    num_files: int

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Open the checkpoint in `directory`: config.json, and an index with its shards or one file.

        Raises CheckpointError, naming file and tensor, for the first thing missing, corrupt or unexpected;
        ConfigError when config.json is there but wrong.
        """
        survey = _Survey.of(Path(directory))
        if survey.problems:
            raise survey.problems[0]
        return survey.checkpoint()

    @staticmethod
    def problems(directory: str | Path) -> list[str]:
        """Return a sentence for everything wrong with the checkpoint in `directory`; empty when nothing is.

        Follow-up faults are left out: a missing shard is one problem, not one for each of its tensors.
        """
        return list(examine(directory).problems)

    def bytes_by_class(self) -> dict[TensorClass, int]:
        """Return the tensor bytes of each class; every class is present."""
        totals = dict.fromkeys(TensorClass, 0)
        for tensor in self.tensors.values():
            totals[tensor.tensor_class] += tensor.nbytes
        return totals

    def bytes_by_dtype(self) -> dict[str, int]:
        """Return the tensor bytes of each dtype; every dtype the format uses is present."""
        totals = dict.fromkeys(DTYPE_BYTES, 0)
        for tensor in self.tensors.values():
            totals[tensor.dtype] += tensor.nbytes
        return totals


@dataclass(frozen=True, slots=True)
class Examination:
    """What could be learnt of a checkpoint that may be broken.

    `config` is None when config.json cannot be used, `checkpoint` is None when there are `problems`.
    """

    config: ModelConfig | None
    checkpoint: Checkpoint | None
    problems: tuple[str, ...]


def examine(directory: str | Path) -> Examination:
    """Look at the checkpoint in `directory` in one pass over its headers. Raises nothing for a bad one."""
    try:
        survey = _Survey.of(Path(directory))
    except (CheckpointError, ConfigError) as error:
        return Examination(_config_alone(Path(directory)), None, (describe_problem(error),))
    checkpoint = None if survey.problems else survey.checkpoint()
    return Examination(survey.config, checkpoint, tuple(map(describe_problem, survey.problems)))


def describe_problem(error: DeskfleetError) -> str:
    """Return `error` on one line, its hint in parentheses."""
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _config_alone(directory: Path) -> ModelConfig | None:
    try:
        return ModelConfig.from_file(directory / CONFIG_NAME)
    except ConfigError:
        return None


@dataclass(slots=True)
class _Survey:
    """Everything found in a directory, with everything wrong about it. `weight_map` None means one file."""

    directory: Path
    config: ModelConfig
    expected: dict[str, TensorSpec]
    weight_map: dict[str, str] | None
    total_size: int | None
    headers: list[ShardHeader] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)
    problems: list[CheckpointError] = field(default_factory=list)

    @classmethod
    def of(cls, directory: Path) -> _Survey:
        """Look at `directory`. Raises CheckpointError or ConfigError when there is nothing to look at."""
        if not directory.is_dir():
            raise CheckpointError(
                f"no such directory: {directory}", hint="give the directory that holds config.json"
            )
        config_path = directory / CONFIG_NAME
        if not config_path.is_file():
            raise CheckpointError(
                f"no {CONFIG_NAME} in {directory}", hint="give a checkpoint's own directory"
            )
        config = ModelConfig.from_file(config_path)
        weight_map, total_size = _read_index(directory)
        survey = cls(directory, config, expected_tensors(config), weight_map, total_size)
        survey._read_headers()
        survey.problems.extend(survey._index_problems())
        survey.problems.extend(survey._tensor_problems())
        survey.problems.extend(survey._total_problems())
        return survey

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint; only a survey without problems has one."""
        tensors: dict[str, TensorInfo] = {}
        for header in self.headers:
            for entry in header.entries:
                tensors[entry.name] = TensorInfo(
                    name=entry.name,
                    path=header.path,
                    dtype=entry.dtype,
                    shape=entry.shape,
                    offset_bytes=header.data_start_bytes + entry.start_bytes,
                    nbytes=entry.stop_bytes - entry.start_bytes,
                    tensor_class=self.expected[entry.name].tensor_class,
                )
        return Checkpoint(
            directory=self.directory,
            config=self.config,
            tensors=MappingProxyType(tensors),
            total_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            file_bytes=sum(header.file_bytes for header in self.headers),
            num_files=len(self.headers),
        )

    def _read_headers(self) -> None:
        for file in self._files():
            path = self.directory / file
            if not path.exists():
                self.unreadable.add(file)
                self.problems.append(self._missing_shard(file))
                continue
            header, problems = read_shard_header(path)
            self.problems.extend(problems)
            if header is None:
                self.unreadable.add(file)
            else:
                self.headers.append(header)

    def _files(self) -> list[str]:
        """Return the names of the files to read, those the index may not name left out and reported."""
        if self.weight_map is None:
            return [SINGLE_NAME]
        files = []
        first_tensor: dict[str, str] = {}
        for name, file in self.weight_map.items():
            first_tensor.setdefault(file, name)
        for file in sorted(first_tensor):
            if _is_inside(file):
                files.append(file)
                continue
            self.unreadable.add(file)
            self.problems.append(
                CheckpointError(
                    f"{INDEX_NAME} maps tensor {first_tensor[file]} to {file!r}, which is outside "
                    "the directory",
                    hint="do not use a checkpoint from this source before you know why",
                )
            )
        return files

    def _missing_shard(self, file: str) -> CheckpointError:
        assert self.weight_map is not None
        names = [name for name, mapped in self.weight_map.items() if mapped == file]
        return CheckpointError(
            f"shard {file} is missing; the index maps {len(names)} tensors to it, {names[0]} first",
            hint=f"fetch it into {self.directory}",
        )

    def _index_problems(self) -> Iterator[CheckpointError]:
        """Yield where the index and the files disagree."""
        if self.weight_map is None:
            return
        found: set[str] = set()
        for header in self.headers:
            file = header.path.relative_to(self.directory).as_posix()
            for entry in header.entries:
                mapped = self.weight_map.get(entry.name)
                if mapped is None:
                    yield CheckpointError(
                        f"{file} holds tensor {entry.name}, which {INDEX_NAME} does not list"
                    )
                elif mapped != file:
                    yield CheckpointError(
                        f"{file} holds tensor {entry.name}, but {INDEX_NAME} maps it to {mapped}"
                    )
                found.add(entry.name)
        for name, file in self.weight_map.items():
            if name not in found and file not in self.unreadable:
                yield CheckpointError(
                    f"tensor {name} is absent from {file}, where {INDEX_NAME} puts it",
                    hint="index and shards come from different checkpoints; fetch both again",
                )

    def _tensor_problems(self) -> Iterator[CheckpointError]:
        """Yield where the tensors are not those that the configuration calls for."""
        names = {entry.name for header in self.headers for entry in header.entries}
        if self.weight_map is not None:
            names.update(self.weight_map)
        missing = [name for name in self.expected if name not in names]
        hints_left = _MAX_HINTS
        for header in self.headers:
            for entry in header.entries:
                spec = self.expected.get(entry.name)
                if spec is not None:
                    yield from _spec_problems(header.path.name, entry, spec)
                    continue
                yield CheckpointError(
                    f"{header.path.name} holds unexpected tensor {entry.name}: {CONFIG_NAME} does not call "
                    "for it",
                    hint=self._nearest(entry.name, missing) if hints_left > 0 else None,
                )
                hints_left -= 1
        if self.weight_map is None and self.unreadable:
            return
        for name in missing:
            yield CheckpointError(
                f"tensor {name} is missing: {CONFIG_NAME} calls for it, and no file holds it"
            )

    def _nearest(self, name: str, missing: Sequence[str]) -> str | None:
        # A misspelt name leaves its right spelling missing, so that is the place to look first.
        candidates = missing
        if not candidates or len(candidates) > _MAX_HINT_CANDIDATES:
            prefix = ".".join(name.split(".")[:2])
            candidates = [known for known in self.expected if known.startswith(prefix)]
        return nearest(name, candidates[:_MAX_HINT_CANDIDATES])

    def _total_problems(self) -> Iterator[CheckpointError]:
        """Yield when the index's own total is wrong; judged only when every file could be read."""
        if self.total_size is None or self.unreadable:
            return
        total = sum(
            entry.stop_bytes - entry.start_bytes for header in self.headers for entry in header.entries
        )
        if total != self.total_size:
            yield CheckpointError(
                f"{INDEX_NAME} says total_size {self.total_size}, but the files hold {total} tensor bytes"
            )


def _spec_problems(file: str, entry: ShardEntry, spec: TensorSpec) -> Iterator[CheckpointError]:
    if entry.dtype != spec.dtype:
        yield CheckpointError(f"{file}: tensor {entry.name} has dtype {entry.dtype}, expected {spec.dtype}")
    if entry.shape != spec.shape:
        yield CheckpointError(
            f"{file}: tensor {entry.name} has shape {list(entry.shape)}, expected {list(spec.shape)}"
        )


def _read_index(directory: Path) -> tuple[dict[str, str] | None, int | None]:
    """Return the index's map from tensor to file and its total_size; (None, None) for a single file."""
    path = directory / INDEX_NAME
    if not path.exists():
        if (directory / SINGLE_NAME).exists():
            return None, None
        raise CheckpointError(
            f"neither {INDEX_NAME} nor {SINGLE_NAME} in {directory}", hint="fetch the index of the checkpoint"
        )
    try:
        index = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{INDEX_NAME} is not JSON: {error}", hint="fetch it again") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX_NAME} has no weight_map from tensors to files")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{INDEX_NAME} maps tensor {name} to {file!r}, which is not a file name")
    # One spelling for each file, so that `./a` and `a` are not taken for two.
    spelling = {file: os.path.normpath(file) for file in set(weight_map.values())}
    normal = {name: spelling[file] for name, file in weight_map.items()}
    return normal, _total_size(index.get("metadata"))


def _total_size(metadata: Any) -> int | None:
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is None or type(total) is int:
        return total
    # Some writers print a whole float.
    if isinstance(total, float) and total.is_integer():
        return int(total)
    raise CheckpointError(f"{INDEX_NAME} has total_size {total!r}, which is not a number of bytes")


def _is_inside(file: str) -> bool:
    """Is `file`, normally spelled, below the directory? Symbolic links are not looked at: caches use them."""
    first = file.split(os.sep)[0]
    return "\0" not in file and not os.path.isabs(file) and first not in (os.curdir, os.pardir)


__all__ = [
    "CONFIG_NAME",
    "INDEX_NAME",
    "SINGLE_NAME",
    "Checkpoint",
    "Examination",
    "TensorInfo",
    "describe_problem",
    "examine",
]
