"""The header of one safetensors file, read and checked without touching the tensor data.

Owns the container's rules: an eight-byte little-endian length, a JSON header, then the tensors, which tile
the rest of the file without holes or overlaps. Knows nothing of which tensors a model should have.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from deskfleet.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; the largest published header has well under a megabyte."""

_LENGTH_BYTES = 8

# Every dtype of the format with whole-byte elements, also those a checkpoint should not use: a wrong dtype
# is then reported as such rather than as an unreadable file.
_ELEMENT_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}

_FETCH_AGAIN = "fetch the file again"


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _EntryFields(msgspec.Struct, frozen=True, gc=False):
    """One tensor's entry as it stands in the header."""

    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One tensor of a file. `start_bytes` and `stop_bytes` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start_bytes: int
    stop_bytes: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """A file's tensors. `data_start_bytes` is where the header ends, from the beginning of the file."""

    path: Path
    file_bytes: int
    data_start_bytes: int
    entries: tuple[ShardEntry, ...]


def read_shard_header(path: Path) -> tuple[ShardHeader | None, list[CheckpointError]]:
    """Read the header of `path`; return it with everything wrong about the file.

    The header is None when its tensors cannot be told. Messages name the file and, where one is at fault, the
    tensor. Raises nothing for a bad file.
    """
    problems: list[CheckpointError] = []
    try:
        file_bytes, text = _read_header_text(path)
        entries = tuple(_parse_entries(path.name, text, problems))
    except OSError as error:
        return None, [CheckpointError(f"cannot read {path}: {error.strerror or error}")]
    except CheckpointError as error:
        return None, [error]
    if problems:
        return None, problems
    data_start = _LENGTH_BYTES + len(text)
    header = ShardHeader(path, file_bytes, data_start, entries)
    problems.extend(_tiling_problems(header))
    return header, problems


def _read_header_text(path: Path) -> tuple[int, bytes]:
    """Return the file's size and its header. Raises OSError, or CheckpointError when there is no header."""
    # Before opening: a named pipe would keep us waiting for a writer.
    if not path.is_file():
        raise CheckpointError(f"{path.name} is not a regular file")
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if status.st_size < _LENGTH_BYTES:
            raise CheckpointError(
                f"{path.name} has {status.st_size} bytes, too few for a safetensors file", hint=_FETCH_AGAIN
            )
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > status.st_size - _LENGTH_BYTES:
            raise CheckpointError(
                f"{path.name} announces a header of {length} bytes, more than the file's {status.st_size}",
                hint="the file is cut off or not a safetensors file; " + _FETCH_AGAIN,
            )
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path.name} announces a header of {length} bytes; the format allows {MAX_HEADER_BYTES}",
                hint="it is not a safetensors file",
            )
        text = file.read(length)
    if len(text) < length:
        raise CheckpointError(f"{path.name} shrank while its header was read", hint=_FETCH_AGAIN)
    return status.st_size, text


def _parse_entries(file: str, text: bytes, problems: list[CheckpointError]) -> Iterator[ShardEntry]:
    try:
        header = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:  # msgspec's and Unicode's errors are ValueErrors
        raise CheckpointError(f"{file}: header is not JSON: {error}", hint=_FETCH_AGAIN) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: header is JSON but not an object")
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        try:
            entry = _parse_entry(file, name, fields)
        except CheckpointError as error:
            problems.append(error)
        else:
            yield entry


def _parse_entry(file: str, name: str, fields: Any) -> ShardEntry:
    """Return one header entry, checked as far as it can be alone. Raises CheckpointError."""
    try:
        parsed = msgspec.convert(fields, _EntryFields)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{file}: tensor {name} has a broken header entry: {error}") from error
    if parsed.dtype not in _ELEMENT_BYTES:
        raise CheckpointError(f"{file}: tensor {name} has unknown dtype {parsed.dtype}")
    start, stop = parsed.data_offsets
    nbytes = math.prod(parsed.shape) * _ELEMENT_BYTES[parsed.dtype]
    if stop - start != nbytes:
        raise CheckpointError(
            f"{file}: tensor {name} spans {stop - start} bytes (offsets {start} to {stop}), but "
            f"{parsed.dtype} {list(parsed.shape)} takes {nbytes}"
        )
    return ShardEntry(name, parsed.dtype, parsed.shape, start, stop)


def _tiling_problems(header: ShardHeader) -> Iterator[CheckpointError]:
    """Yield where the tensors fail to tile the data, or the data ends early."""
    file = header.path.name
    payload = header.file_bytes - header.data_start_bytes
    entries = sorted(header.entries, key=lambda entry: (entry.start_bytes, entry.stop_bytes))
    ends = [0, *(entry.stop_bytes for entry in entries)]
    # A header in order over too little data is a file cut off; any other disorder is the header's own.
    if payload < ends[-1] and all(
        entry.start_bytes == end for entry, end in zip(entries, ends, strict=False)
    ):
        cut = next(entry for entry in entries if entry.stop_bytes > payload)
        yield CheckpointError(
            f"{file} is short: {header.file_bytes} bytes where its header describes "
            f"{header.data_start_bytes + ends[-1]}; tensor {cut.name} is the first one cut off",
            hint="the download stopped early; " + _FETCH_AGAIN,
        )
        return
    end, previous = 0, "the header"
    for entry in entries:
        start, stop = entry.start_bytes, entry.stop_bytes
        if stop > payload:
            yield CheckpointError(
                f"{file}: tensor {entry.name} is out of range: offsets {start} to {stop} in {payload} bytes "
                "of data"
            )
        if start < end:
            yield CheckpointError(
                f"{file}: tensor {entry.name} overlaps {previous}: it starts at {start}, before {end}"
            )
        elif start > end:
            yield CheckpointError(
                f"{file}: hole of {start - end} bytes before tensor {entry.name}, after {previous}"
            )
        if stop >= end:
            end, previous = stop, entry.name
    if end < payload:
        yield CheckpointError(f"{file}: {payload - end} bytes of data follow the last tensor, {previous}")


__all__ = ["MAX_HEADER_BYTES", "ShardEntry", "ShardHeader", "read_shard_header"]
