"""Engram tables as a published checkpoint holds them: which file, which bytes, which row format.

Reads the configuration, the index and the headers of the shards concerned, and nothing else until rows are asked
for. Weight and scale of a table may lie in different shards. Knows nothing of packs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deskfleet_engram.errors import FormatError, SourceError
from deskfleet_engram.fileio import SequentialReader, hole_within
from deskfleet_engram.format import FP8_FORMAT, RowFormat, fp8_rows, nvfp4_rows
from deskfleet_engram.geometry import EngramGeometry, EngramSpec
from deskfleet_engram.portable import RowSource
from deskfleet_engram.tokens import check_size, compressed_token_map

_MAX_HEADER_BYTES = 100_000_000  # the container's own limit
_ELEMENT_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "F32": 4}
# The publisher's names first, then those that quantisation tools write.
_SCALE_NAMES = ("scale", "weight_scale")
_GLOBAL_SCALE_NAMES = ("scale_2", "weight_scale_2", "global_scale")


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """One tensor of a shard. `data_offsets` are the header's own; `offset_bytes` is absolute in the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    offset_bytes: int
    header_sha256: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.data_offsets[1] - self.data_offsets[0]


@dataclass(frozen=True, slots=True)
class SourceTable:
    """One layer's table. `global_scale` is the table's own factor for NVFP4 rows, None for FP8."""

    layer: int
    rows: RowFormat
    num_rows: int
    weight: TensorSpan
    scale: TensorSpan
    global_scale: np.float32 | None

    def row_source(self) -> RowSource:
        """Return what PortableStore reads."""
        return RowSource(
            path=self.weight.path,
            weight_offset_bytes=self.weight.offset_bytes,
            scale_offset_bytes=self.scale.offset_bytes,
            num_rows=self.num_rows,
            rows=self.rows,
            table=self.weight.name.removesuffix(".weight"),
            layer=self.layer,
            scale_path=self.scale.path,
            global_scale=1.0 if self.global_scale is None else float(self.global_scale),
        )


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint's Engram tables, one per layer in the order of the configuration.

    `repo` and `revision` are what the user calls it, None when not known. `token_map_sha256` is the digest of
    the compressed token map, int32 little-endian; None when the checkpoint came without a tokenizer.
    """

    directory: Path
    geometry: EngramGeometry
    tables: tuple[SourceTable, ...]
    repo: str | None = None
    revision: str | None = None
    token_map_sha256: str | None = None

    def table(self, layer: int) -> SourceTable:
        """Return the table of the layer with that id. Raises SourceError when it has none."""
        for table in self.tables:
            if table.layer == layer:
                return table
        layers = ", ".join(str(table.layer) for table in self.tables)
        raise SourceError(f"{self.directory}: layer {layer} has no Engram table; layers {layers} have")


class TableReader:
    """Reads stretches of one table in ascending order, past the page cache. Not to be shared between threads."""

    def __init__(self, table: SourceTable, max_rows: int) -> None:
        """Open the shards; no stretch will have more than `max_rows` rows. Raises SourceError."""
        self.table = table
        self._spans = (table.weight, table.scale)
        self._widths = (table.rows.weight_bytes, table.rows.scale_bytes)
        self._readers: list[SequentialReader] = []
        for span, width in zip(self._spans, self._widths, strict=True):
            try:
                self._readers.append(SequentialReader(span.path, max_rows * width))
            except OSError as error:
                self.close()
                raise SourceError(f"{span.path}: cannot open: {error.strerror or error}") from error

    def read(self, first_row: int, num_rows: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return uint8 [R, weight_bytes] and uint8 [R, scale_bytes], good until the next read. Raises SourceError."""
        parts = []
        for reader, span, width in zip(self._readers, self._spans, self._widths, strict=True):
            try:
                part = reader.read(span.offset_bytes + first_row * width, num_rows * width)
            except OSError as error:
                raise SourceError(
                    f"{span.path}: reading rows {first_row} to {first_row + num_rows - 1} of {span.name}: "
                    f"{error.strerror or error}"
                ) from error
            parts.append(part.reshape(num_rows, width))
        return parts[0], parts[1]

    def close(self) -> None:
        """Close the shards."""
        for reader in self._readers:
            reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_source(directory: Path, *, repo: str | None = None, revision: str | None = None) -> Source:
    """Describe the Engram tables of the checkpoint in `directory`.

    Raises SourceError naming the file and tensor at fault, and GeometryError when the configuration or the
    tokenizer contradicts itself.
    """
    geometry = EngramGeometry.build(read_spec(directory))
    files = _locate(directory)
    headers: dict[Path, dict[str, TensorSpan]] = {}
    tables = tuple(
        _find_table(directory, layer, num_rows, geometry.spec.head_dim, files, headers)
        for layer, num_rows in zip(geometry.spec.layer_ids, geometry.spec.num_embeddings, strict=True)
    )
    digest = _token_map_digest(directory, geometry.spec.compressed_vocab_size)
    return Source(directory, geometry, tables, repo, revision, digest)


def read_spec(directory: Path) -> EngramSpec:
    """Return what `config.json` says about Engram. Raises SourceError when it says nothing, or not all."""
    path = directory / "config.json"
    config = _read_json_object(path)
    text = config.get("text_config", config)
    try:
        return EngramSpec(
            layer_ids=tuple(_whole(value) for value in text["engram_layer_ids"]),
            num_embeddings=tuple(_whole(value) for value in text["engram_num_embeddings"]),
            max_ngram_size=_whole(text["engram_max_ngram_size"]),
            vocab_size=_whole(text["engram_vocab_size"]),
            n_heads=_whole(text["engram_n_heads"]),
            head_dim=_whole(text["engram_head_dim"]),
            pad_token_id=_whole(text["engram_pad_token_id"]),
            compressed_vocab_size=_whole(text["engram_compressed_vocab_size"]),
        )
    except KeyError as error:
        raise SourceError(
            f"{path}: {error.args[0]} is missing", hint="only V4.1 checkpoints have Engram"
        ) from error
    except (TypeError, ValueError) as error:
        raise SourceError(f"{path}: the engram_* values are not whole numbers: {error}") from error


def read_header(path: Path) -> dict[str, TensorSpan]:
    """Return the tensors of a safetensors file by name.

    Dtypes that no Engram table uses are taken as they come. Raises SourceError naming file and tensor when the
    header is broken, or the file too short for it.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise SourceError(
                    f"{path}: no safetensors file, or cut off: {size} bytes, header of {length}"
                )
            text = file.read(length)
    except OSError as error:
        raise SourceError(f"{path}: cannot read: {error.strerror or error}") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise SourceError(f"{path}: the header is no JSON object")
    header.pop("__metadata__", None)
    digest = hashlib.sha256(prefix + text).hexdigest()
    data = 8 + length
    return {name: _parse_entry(path, name, entry, data, size, digest) for name, entry in header.items()}


def source_hole(table: SourceTable, first_row: int, last_row: int) -> tuple[Path, int] | None:
    """Return file and offset of a hole among rows [first_row, last_row), or None.

    Copies that hold only some rows keep the others as holes, which read as zeros. Raises SourceError.
    """
    for span, width in ((table.weight, table.rows.weight_bytes), (table.scale, table.rows.scale_bytes)):
        try:
            fd = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                begin = span.offset_bytes + first_row * width
                hole = hole_within(fd, begin, span.offset_bytes + last_row * width)
            finally:
                os.close(fd)
        except OSError as error:
            raise SourceError(f"{span.path}: cannot look for holes: {error.strerror or error}") from error
        if hole is not None:
            return span.path, hole
    return None


def read_rows(table: SourceTable, row_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return uint8 [N, row_bytes]: rows of the table as they would be packed, one read each and per tensor.

    For samples and repairs. Raises SourceError naming file and row.
    """
    out = np.empty((len(row_ids), table.rows.row_bytes), dtype=np.uint8)
    split = table.rows.weight_bytes
    for span, part in ((table.weight, out[:, :split]), (table.scale, out[:, split:])):
        width = part.shape[1]
        try:
            fd = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{span.path}: cannot open: {error.strerror or error}") from error
        try:
            for index, row in enumerate(row_ids.tolist()):
                if not 0 <= row < table.num_rows:
                    raise SourceError(f"{span.name}: row {row} is outside 0..{table.num_rows - 1}")
                data = os.pread(fd, width, span.offset_bytes + row * width)
                if len(data) != width:
                    raise SourceError(f"{span.path}: the file ends inside row {row} of {span.name}")
                part[index] = np.frombuffer(data, dtype=np.uint8)
        except OSError as error:
            raise SourceError(
                f"{span.path}: reading rows of {span.name}: {error.strerror or error}"
            ) from error
        finally:
            os.close(fd)
    return out


def _find_table(
    directory: Path,
    layer: int,
    num_rows: int,
    head_dim: int,
    files: dict[str, Path],
    headers: dict[Path, dict[str, TensorSpan]],
) -> SourceTable:
    prefix = f"layers.{layer}.engram.embed."

    def find(*suffixes: str) -> TensorSpan | None:
        for suffix in suffixes:
            path = files.get(prefix + suffix)
            if path is None:
                continue
            if path not in headers:
                headers[path] = read_header(path)
            if prefix + suffix not in headers[path]:
                raise SourceError(f"{path}: {prefix + suffix} is not there, though the index says so")
            return headers[path][prefix + suffix]
        return None

    weight, scale = find("weight"), find(*_SCALE_NAMES)
    if weight is None or scale is None:
        missing = "weight" if weight is None else "scale"
        raise SourceError(f"{directory}: {prefix}{missing} is in no shard")
    rows = _row_format(weight, scale, head_dim)
    for span, width in ((weight, rows.weight_bytes), (scale, rows.scale_bytes)):
        if span.shape != (num_rows, width):
            raise SourceError(
                f"{span.path}: {span.name} has shape {list(span.shape)}; {rows.name} rows and "
                f"engram_num_embeddings ask for {[num_rows, width]}"
            )
    factor = None
    if rows.format_id != FP8_FORMAT:
        global_scale = find(*_GLOBAL_SCALE_NAMES)
        if global_scale is None:
            raise SourceError(
                f"{directory}: {prefix}{_GLOBAL_SCALE_NAMES[0]} is in no shard; nvfp4 rows need it"
            )
        factor = _read_factor(global_scale)
    return SourceTable(layer, rows, num_rows, weight, scale, factor)


def _row_format(weight: TensorSpan, scale: TensorSpan, head_dim: int) -> RowFormat:
    dtypes = (weight.dtype, scale.dtype)
    try:
        if dtypes == ("F8_E4M3", "F8_E8M0"):
            return fp8_rows(head_dim)
        if dtypes == ("U8", "F8_E4M3"):
            return nvfp4_rows(head_dim)
    except FormatError as error:
        raise SourceError(f"{weight.path}: {weight.name}: {error}") from error
    raise SourceError(
        f"{weight.path}: {weight.name} is {dtypes[0]} with scales {dtypes[1]}; known are F8_E4M3 with F8_E8M0 (fp8) "
        "and U8 with F8_E4M3 (nvfp4)"
    )


def _read_factor(span: TensorSpan) -> np.float32:
    if span.dtype != "F32" or math.prod(span.shape) != 1:
        raise SourceError(f"{span.path}: {span.name} must be one F32, not {span.dtype} {list(span.shape)}")
    try:
        with open(span.path, "rb") as file:
            file.seek(span.offset_bytes)
            data = file.read(4)
    except OSError as error:
        raise SourceError(f"{span.path}: cannot read {span.name}: {error.strerror or error}") from error
    value = np.float32(np.frombuffer(data, "<f4")[0]) if len(data) == 4 else np.float32(np.nan)
    if not np.isfinite(value) or value <= 0:
        raise SourceError(f"{span.path}: {span.name} is {value}; a positive number is needed")
    return value


def _locate(directory: Path) -> dict[str, Path]:
    """Return the shard of every tensor: from the index, or from the headers where there is none."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = _read_json_object(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise SourceError(f"{index}: weight_map is not an object of file names")
        return {name: directory / file for name, file in names.items()}
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise SourceError(f"{directory}: neither an index nor a safetensors file is there")
    return {name: path for path in shards for name in read_header(path)}


def _parse_entry(path: Path, name: str, entry: Any, data: int, size: int, digest: str) -> TensorSpan:
    try:
        dtype = entry["dtype"]
        shape = tuple(_whole(value) for value in entry["shape"])
        begin, end = (_whole(value) for value in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{path}: tensor {name} has a broken header entry: {error}") from error
    if not 0 <= begin <= end or min(shape, default=0) < 0:
        raise SourceError(f"{path}: tensor {name} has offsets {begin} to {end} and shape {list(shape)}")
    if dtype in _ELEMENT_BYTES and math.prod(shape) * _ELEMENT_BYTES[dtype] != end - begin:
        raise SourceError(
            f"{path}: tensor {name} spans {end - begin} bytes, but {dtype} {list(shape)} does not"
        )
    if data + end > size:
        raise SourceError(
            f"{path}: tensor {name} ends at byte {data + end}, but the file has {size} bytes",
            hint="the download stopped early; fetch the file again",
        )
    return TensorSpan(path, name, str(dtype), shape, (begin, end), data + begin, digest)


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise SourceError(f"{path}: cannot read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise SourceError(f"{path}: JSON, but no object")
    return content


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r}")
    return value


def _token_map_digest(directory: Path, expected: int) -> str | None:
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot read: {error}") from error
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise SourceError(f"{path}: no tokenizer: {error}", hint="fetch it again") from error
    compressed = compressed_token_map(tokenizer)
    check_size(compressed, expected)
    return hashlib.sha256(compressed.astype("<i4").tobytes()).hexdigest()


__all__ = [
    "Source",
    "SourceTable",
    "TableReader",
    "TensorSpan",
    "open_source",
    "read_header",
    "read_rows",
    "read_spec",
    "source_hole",
]
