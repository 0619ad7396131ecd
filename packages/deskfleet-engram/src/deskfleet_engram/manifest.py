"""The manifest of a pack: what the rows are (identity), and which files hold them.

Owns canonical JSON, strict parsing, and the comparison of two identities. A manifest that does not parse, or whose
digests do not fit, raises FormatError; one of another checkpoint or major version raises IdentityError. Keys that
a later minor version added are part of the digests and otherwise ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deskfleet_engram.errors import FormatError, GeometryError, IdentityError
from deskfleet_engram.fields import Fields
from deskfleet_engram.format import BLOCK_BYTES, MAJOR, MINOR, ColumnLayout, RowFormat, row_format
from deskfleet_engram.geometry import EngramGeometry, EngramSpec
from deskfleet_engram.source import Source, SourceTable, TensorSpan, open_source, read_rows

MANIFEST_NAME = "engram.json"
SAMPLES_PER_COLUMN = 16

_MAX_BYTES = 64 << 20
_FORMAT_NAME = "EGP1"
_MAX_FILES = 1 << 16
_MAX_LAYER = (1 << 32) - 1


@dataclass(frozen=True, slots=True, eq=False)
class PackIdentity:
    """What the rows of a pack are. `document` is the JSON object whose canonical form `sha256` digests.

    `global_scales` holds each layer's own factor, by layer id; it is empty for FP8 rows.
    """

    document: dict[str, Any]
    sha256: bytes
    rows: RowFormat
    geometry: EngramGeometry
    global_scales: dict[int, np.float32]

    @property
    def layers(self) -> tuple[int, ...]:
        """Ids of the layers that have a table."""
        return self.geometry.spec.layer_ids

    @property
    def pack_id(self) -> int:
        """The number in every block's header and checksums."""
        return int.from_bytes(self.sha256[:8], "little")

    def layout(self, layer: int, column: int) -> ColumnLayout:
        """Return the layout of one column's file. Raises IdentityError when there is no such column."""
        if layer not in self.layers or not 0 <= column < self.geometry.spec.num_columns:
            raise IdentityError(
                f"there is no column {column} of layer {layer}; the layers are "
                f"{', '.join(map(str, self.layers))}, with {self.geometry.spec.num_columns} columns each"
            )
        num_rows = self.geometry.column_rows(self.layers.index(layer))[column]
        return ColumnLayout(self.rows, self.sha256, layer, column, num_rows)

    def first_row(self, layer: int, column: int) -> int:
        """Return the id, in the layer's table, of the column's first row."""
        return int(self.geometry.offsets[self.layers.index(layer), column])


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One complete file. `extents` are the SHA-256 digests of its extents, in hexadecimal."""

    layer: int
    column: int
    extents: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """A pack's description. `files` ascend by layer, then column."""

    identity: PackIdentity
    extent_bytes: int
    files: tuple[PackedFile, ...]
    written_by: str

    def columns(self, layer: int) -> tuple[int, ...]:
        """Return the columns of a layer that the pack holds, ascending."""
        return tuple(file.column for file in self.files if file.layer == layer)

    def num_bytes(self, layer: int) -> int:
        """Return the bytes of a layer's files."""
        columns = self.columns(layer)
        return sum(self.identity.layout(layer, column).file_bytes for column in columns)


def canonical_json(document: Any) -> bytes:
    """Return the one spelling of `document` that digests are taken of (FORMAT.md)."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def identity_of(source: Source) -> PackIdentity:
    """Return the identity of what packing `source` gives; reads some rows of every column.

    Raises SourceError, and GeometryError when the tables differ in row format.
    """
    rows = source.tables[0].rows
    if any(table.rows != rows for table in source.tables):
        raise GeometryError(f"{source.directory}: the layers' tables differ in row format; one pack has one")
    spec = source.geometry.spec
    document = {
        "major": MAJOR,
        "minor": MINOR,
        "row_format": _row_format_document(rows),
        "source": {
            "repo": source.repo,
            "revision": source.revision,
            "tables": [
                _table_document(source.geometry, position, table)
                for position, table in enumerate(source.tables)
            ],
        },
        "engram": {name: _plain(getattr(spec, name)) for name in EngramSpec.__dataclass_fields__},
        "digests": {
            "primes": _sha256_of(source.geometry.primes),
            "multipliers": _sha256_of(source.geometry.multipliers),
            "token_map": source.token_map_sha256,
        },
    }
    return parse_identity(document)


def parse_identity(document: Any) -> PackIdentity:
    """Return the identity that `document` spells. Raises FormatError, or IdentityError for another major version.

    Everything that follows from something else is derived and compared: columns from the configuration, digests
    from the columns, the row format's numbers from its id.
    """
    fields = Fields(document, "identity")
    _check_major(fields)
    named = fields.child("row_format")
    rows = row_format(named.whole("id"), named.whole("head_dim"))
    for key, value in _row_format_document(rows).items():
        if named.value(key) != value:
            raise FormatError(
                f"identity.row_format.{key} is {named.value(key)!r}, but id and head_dim make it {value!r}"
            )
    geometry = _parse_geometry(fields.child("engram"))
    if geometry.spec.head_dim != rows.head_dim:
        raise FormatError(
            f"identity.engram.head_dim is {geometry.spec.head_dim}, identity.row_format.head_dim {rows.head_dim}"
        )
    digests = fields.child("digests")
    for key, array in (("primes", geometry.primes), ("multipliers", geometry.multipliers)):
        if digests.sha256(key) != _sha256_of(array):
            raise FormatError(f"identity.digests.{key} does not fit the configuration in identity.engram")
    digests.optional_sha256("token_map")
    source = fields.child("source")
    source.optional_text("repo")
    source.optional_text("revision")
    scales = dict(_parse_tables(source, geometry, rows))
    factors = {layer: scale for layer, scale in scales.items() if scale is not None}
    return PackIdentity(document, hashlib.sha256(canonical_json(document)).digest(), rows, geometry, factors)


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the content of `engram.json`."""
    document: dict[str, Any] = {
        "format": _FORMAT_NAME,
        "major": MAJOR,
        "minor": MINOR,
        "identity": manifest.identity.document,
        "identity_sha256": manifest.identity.sha256.hex(),
        "extent_bytes": manifest.extent_bytes,
        "files": [_file_document(manifest.identity, file) for file in manifest.files],
        "written_by": manifest.written_by,
    }
    document["manifest_sha256"] = hashlib.sha256(canonical_json(document)).hexdigest()
    return canonical_json(document) + b"\n"


def parse_manifest(content: bytes) -> Manifest:
    """Return the manifest that `content` spells. Raises FormatError or IdentityError, and nothing else."""
    document = _decode(content)
    fields = Fields(document, "manifest")
    if fields.value("format") != _FORMAT_NAME:
        raise FormatError(f"manifest.format is {fields.value('format')!r}, not {_FORMAT_NAME!r}")
    _check_major(fields)
    stored = fields.sha256("manifest_sha256")
    rest = {key: value for key, value in document.items() if key != "manifest_sha256"}
    if hashlib.sha256(canonical_json(rest)).hexdigest() != stored:
        raise FormatError("manifest_sha256 does not fit the rest of the manifest; the file is damaged")
    identity = parse_identity(fields.value("identity"))
    if identity.sha256.hex() != fields.sha256("identity_sha256"):
        raise FormatError("manifest.identity_sha256 does not fit manifest.identity")
    extent_bytes = fields.whole("extent_bytes")
    if extent_bytes < BLOCK_BYTES or extent_bytes % BLOCK_BYTES:
        raise FormatError(f"manifest.extent_bytes is {extent_bytes}, not a multiple of {BLOCK_BYTES}")
    items = fields.items("files", maximum=_MAX_FILES)
    files = tuple(_parse_file(identity, extent_bytes, item) for item in items)
    places = [(file.layer, file.column) for file in files]
    if places != sorted(set(places)):
        raise FormatError("manifest.files do not ascend by layer and column")
    return Manifest(identity, extent_bytes, files, fields.text("written_by"))


def read_manifest(pack_dir: Path) -> Manifest:
    """Return the manifest of the pack in `pack_dir`.

    Raises FormatError when there is none or it is damaged, and IdentityError for another major version; both
    name the file.
    """
    path = pack_dir / MANIFEST_NAME
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise FormatError(f"{path} is missing: no pack, or one that is not finished") from error
    except OSError as error:
        raise FormatError(f"{path}: cannot read: {error.strerror or error}") from error
    try:
        return parse_manifest(content)
    except FormatError as error:
        raise FormatError(f"{path}: {error.message}", hint=error.hint) from error
    except IdentityError as error:
        raise IdentityError(f"{path}: {error.message}", hint=error.hint) from error


def open_source_as(identity: PackIdentity, directory: Path) -> Source:
    """Describe the checkpoint in `directory` under the names of `identity`, to be compared with it.

    A directory does not say what it is called; whether it is what the names stand for, its headers and rows say.
    Raises what `open_source` raises.
    """
    names = identity.document["source"]
    return open_source(directory, repo=names["repo"], revision=names["revision"])


def check_same_identity(
    found: PackIdentity, wanted: PackIdentity, *, found_name: str, wanted_name: str
) -> None:
    """Raise IdentityError unless both are the same, naming the first value that differs on both sides."""
    if found.sha256 == wanted.sha256:
        return
    path, ours, theirs = next(_differences(found.document, wanted.document, ""), ("", "?", "?"))
    raise IdentityError(
        f"{found_name} is of another checkpoint than {wanted_name}: {path} is {_brief(ours)} in the former and "
        f"{_brief(theirs)} in the latter"
    )


def check_model(
    identity: PackIdentity, geometry: EngramGeometry, *, token_map_sha256: str | None = None
) -> None:
    """Raise IdentityError unless the pack's columns and hashing are those of `geometry`.

    For whoever has the model's configuration but no longer its Engram shards. The token map is compared when
    both sides know it.
    """
    for name in EngramSpec.__dataclass_fields__:
        found, wanted = getattr(identity.geometry.spec, name), getattr(geometry.spec, name)
        if found != wanted:
            raise IdentityError(f"the pack was made for engram {name} {found}, but the model has {wanted}")
    packed = identity.document["digests"]["token_map"]
    if None not in (packed, token_map_sha256) and packed != token_map_sha256:
        raise IdentityError(
            f"the pack was made for token map {packed:.16}, but the model has {token_map_sha256:.16}"
        )


def sample_rows(geometry: EngramGeometry, position: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return int64: the rows of a layer's table that its identity's sample covers."""
    counts = geometry.primes[position].reshape(-1, 1)
    steps = np.arange(SAMPLES_PER_COLUMN, dtype=np.int64)
    return np.asarray(
        geometry.offsets[position][:, None] + steps * (counts - 1) // (SAMPLES_PER_COLUMN - 1)
    ).reshape(-1)


def _table_document(geometry: EngramGeometry, position: int, table: SourceTable) -> dict[str, Any]:
    factor = table.global_scale
    return {
        "layer": table.layer,
        "num_rows": table.num_rows,
        "weight": _tensor_document(table.weight),
        "scale": _tensor_document(table.scale),
        "global_scale_bits": None if factor is None else int(factor.view(np.uint32)),
        "sample_sha256": hashlib.sha256(
            read_rows(table, sample_rows(geometry, position)).tobytes()
        ).hexdigest(),
    }


def _tensor_document(span: TensorSpan) -> dict[str, Any]:
    return {
        "name": span.name,
        "dtype": span.dtype,
        "shape": list(span.shape),
        "data_offsets": list(span.data_offsets),
        "header_sha256": span.header_sha256,
    }


def _row_format_document(rows: RowFormat) -> dict[str, Any]:
    return {
        "id": rows.format_id,
        "name": rows.name,
        "head_dim": rows.head_dim,
        "weight_bytes": rows.weight_bytes,
        "scale_bytes": rows.scale_bytes,
        "row_bytes": rows.row_bytes,
        "rows_per_block": rows.rows_per_block,
    }


def _file_document(identity: PackIdentity, file: PackedFile) -> dict[str, Any]:
    layout = identity.layout(file.layer, file.column)
    return {
        "layer": file.layer,
        "column": file.column,
        "rows": layout.num_rows,
        "blocks": layout.num_blocks,
        "size": layout.file_bytes,
        "extents": list(file.extents),
    }


def _parse_file(identity: PackIdentity, extent_bytes: int, fields: Fields) -> PackedFile:
    layer, column = fields.whole("layer"), fields.whole("column")
    try:
        layout = identity.layout(layer, column)
    except IdentityError as error:
        raise FormatError(f"{fields.path}: {error.message}") from error
    for key, wanted in (
        ("rows", layout.num_rows),
        ("blocks", layout.num_blocks),
        ("size", layout.file_bytes),
    ):
        if fields.whole(key) != wanted:
            raise FormatError(
                f"{fields.path}.{key} is {fields.whole(key)}; the configuration makes it {wanted}"
            )
    extents = fields.sha256_list("extents", count=-(-layout.file_bytes // extent_bytes))
    return PackedFile(layer, column, extents)


def _parse_geometry(fields: Fields) -> EngramGeometry:
    spec = EngramSpec(
        layer_ids=fields.whole_list("layer_ids", maximum=1024),
        num_embeddings=fields.whole_list("num_embeddings", maximum=1024),
        max_ngram_size=fields.whole("max_ngram_size", maximum=64),
        vocab_size=fields.whole("vocab_size", maximum=1 << 40),
        n_heads=fields.whole("n_heads", maximum=1024),
        head_dim=fields.whole("head_dim", maximum=1 << 16),
        pad_token_id=fields.whole("pad_token_id"),
        compressed_vocab_size=fields.whole("compressed_vocab_size", maximum=1 << 40),
    )
    # The walk over primes takes time in proportion to the columns; what no model has is not worth waiting for.
    if max(spec.layer_ids, default=0) > _MAX_LAYER:
        raise FormatError(f"{fields.path}.layer_ids has a layer {max(spec.layer_ids)}, above {_MAX_LAYER}")
    if len(spec.layer_ids) * spec.num_columns > 4096 or len(set(spec.layer_ids)) != len(spec.layer_ids):
        raise FormatError(
            f"{fields.path} describes {len(spec.layer_ids)} layers of {spec.num_columns} columns"
        )
    try:
        return EngramGeometry.build(spec)
    except GeometryError as error:
        raise FormatError(f"{fields.path}: {error.message}") from error


def _parse_tables(
    source: Fields, geometry: EngramGeometry, rows: RowFormat
) -> Iterator[tuple[int, np.float32 | None]]:
    spec = geometry.spec
    tables = source.items("tables", maximum=len(spec.layer_ids))
    if tuple(table.whole("layer") for table in tables) != spec.layer_ids:
        raise FormatError(f"{source.path}.tables do not name the layers {list(spec.layer_ids)} in that order")
    for table, num_rows in zip(tables, spec.num_embeddings, strict=True):
        if table.whole("num_rows") != num_rows:
            raise FormatError(
                f"{table.path}.num_rows is {table.whole('num_rows')}; the configuration says {num_rows}"
            )
        table.sha256("sample_sha256")
        for part, width in (("weight", rows.weight_bytes), ("scale", rows.scale_bytes)):
            tensor = table.child(part)
            tensor.text("name")
            tensor.text("dtype")
            tensor.sha256("header_sha256")
            tensor.whole_list("data_offsets", maximum=2)
            if tensor.whole_list("shape", maximum=2) != (num_rows, width):
                raise FormatError(f"{tensor.path}.shape is not {[num_rows, width]}")
        bits = table.optional_whole("global_scale_bits", maximum=0xFFFFFFFF)
        if (bits is None) != (rows.name == "fp8"):
            raise FormatError(f"{table.path}.global_scale_bits is {bits}, which {rows.name} rows cannot have")
        factor = None if bits is None else np.uint32(bits).view(np.float32)
        yield table.whole("layer"), None if factor is None else np.float32(factor)


def _check_major(fields: Fields) -> None:
    major = fields.whole("major")
    fields.whole("minor")
    if major != MAJOR:
        raise IdentityError(
            f"{fields.path}: packed with format version {major}.{fields.whole('minor')}; this reader knows {MAJOR}.x",
            hint="pack again, or use the version of deskfleet-engram that packed it",
        )


def _decode(content: bytes) -> dict[str, Any]:
    if len(content) > _MAX_BYTES:
        raise FormatError(f"the manifest has more than {_MAX_BYTES} bytes")
    try:
        document = json.loads(
            content, object_pairs_hook=_unique, parse_float=_no_float, parse_constant=_no_float
        )
    except (ValueError, RecursionError) as error:  # Unicode errors are ValueErrors
        raise FormatError(f"the manifest is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise FormatError("the manifest is JSON, but no object")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key stands twice")
    return document


def _no_float(text: str) -> Any:
    raise ValueError(f"{text} is no whole number")


def _differences(found: Any, wanted: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield path and both values of every leaf that differs, in the order of the keys."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted(found.keys() | wanted.keys()):
            yield from _differences(found.get(key), wanted.get(key), f"{path}.{key}" if path else key)
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        for index, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            yield from _differences(ours, theirs, f"{path}[{index}]")
    elif found != wanted:
        yield path, found, wanted


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _sha256_of(array: np.ndarray[Any, np.dtype[np.int64]]) -> str:
    return hashlib.sha256(array.astype("<i8").tobytes()).hexdigest()


__all__ = [
    "MANIFEST_NAME",
    "SAMPLES_PER_COLUMN",
    "Manifest",
    "PackIdentity",
    "PackedFile",
    "canonical_json",
    "check_model",
    "check_same_identity",
    "identity_of",
    "manifest_bytes",
    "open_source_as",
    "parse_identity",
    "parse_manifest",
    "read_manifest",
    "sample_rows",
]
