"""A copy of a checkpoint with something changed: unchanged files are hard links, changed ones are copies.

Owns the files, and that a change never reaches the original. Tensors are changed in place, so what is written is as
valid a checkpoint as the original, whatever it now says. Knows nothing of faults.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deskfleet.errors import ConfigError
from deskfleet.model.checkpoint import CONFIG_NAME, Checkpoint, TensorInfo


class CheckpointCopy:
    """A copy of `source` in the new directory `target`, to be changed tensor by tensor."""

    def __init__(self, source: Path, target: Path) -> None:
        """Raises ConfigError when `target` is there already, CheckpointError when `source` is no checkpoint."""
        original = Checkpoint.open(source)
        try:
            target.mkdir(parents=True)
        except FileExistsError as error:
            raise ConfigError(f"{target} is there already", hint="name a new directory") from error
        for path in sorted(source.iterdir()):
            if path.is_file():
                _link(path, target / path.name)
        self.directory, self.config = target, original.config
        self._tensors: Mapping[str, TensorInfo] = original.tensors
        self._own: set[str] = set()

    @property
    def names(self) -> list[str]:
        """Every tensor's name."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape. Raises KeyError."""
        return self._tensors[name].shape

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor as they are now, uint8 [rows, bytes of a row]. Raises KeyError."""
        info = self._tensors[name]
        data = np.fromfile(self.directory / info.path.name, np.uint8, info.nbytes, offset=info.offset_bytes)
        return data.reshape(info.shape[0], -1)

    def write(self, name: str, data: NDArray[Any]) -> None:
        """Replace the bytes of a tensor. Raises ValueError for another number of bytes."""
        info = self._tensors[name]
        blob = np.ascontiguousarray(data).tobytes()
        if len(blob) != info.nbytes:
            raise ValueError(f"{name} has {info.nbytes} bytes, not {len(blob)}")
        with self._own_file(info.path.name).open("r+b") as file:
            file.seek(info.offset_bytes)
            file.write(blob)

    def floats(self, name: str) -> NDArray[np.float32]:
        """The values of a BF16 or F32 tensor. Raises KeyError."""
        info = self._tensors[name]
        raw = self.raw(name).reshape(-1)
        if info.dtype == "F32":
            return raw.view(np.float32).reshape(info.shape).copy()
        wide = raw.view(np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(info.shape)

    def write_floats(self, name: str, values: NDArray[np.float32]) -> None:
        """Replace the values of a BF16 (cut off after its 16 bits) or F32 tensor."""
        values = np.ascontiguousarray(values, dtype=np.float32)
        if self._tensors[name].dtype == "F32":
            self.write(name, values)
        else:
            self.write(name, (values.view(np.uint32) >> 16).astype(np.uint16))

    def change_config(self, **values: Any) -> None:
        """Set keys of the configuration's text part."""
        path = self._own_file(CONFIG_NAME)
        published = json.loads(path.read_text(encoding="utf-8"))
        unknown = [name for name in values if name not in published["text_config"]]
        if unknown:
            raise KeyError(unknown[0])
        published["text_config"] |= values
        path.write_text(json.dumps(published, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def _own_file(self, file_name: str) -> Path:
        """Return the copy's file, no longer shared with the original."""
        path = self.directory / file_name
        if file_name not in self._own:
            draft = path.with_name(f".{file_name}.new")
            shutil.copyfile(path, draft)
            os.replace(draft, path)
            self._own.add(file_name)
        return path


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(path, target)


__all__ = ["CheckpointCopy"]
