"""The manifest: what it says, what it refuses, and that no input makes it fail in any other way."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_fixtures import TINY, make_checkpoint, rows_of

from deskfleet_engram.errors import EngramError, FormatError, IdentityError
from deskfleet_engram.manifest import (
    MANIFEST_NAME,
    Manifest,
    PackedFile,
    canonical_json,
    check_model,
    check_same_identity,
    identity_of,
    manifest_bytes,
    parse_identity,
    parse_manifest,
    read_manifest,
    sample_rows,
)
from deskfleet_engram.source import Source, open_source


@pytest.fixture(scope="module")
def source() -> Source:
    return open_source(TINY, repo="someone/tiny", revision="0123abcd")


@pytest.fixture(scope="module")
def content(source: Source) -> bytes:
    identity = identity_of(source)
    digest = hashlib.sha256(b"").hexdigest()
    count = -(-identity.layout(1, 0).file_bytes // 32768)
    return manifest_bytes(Manifest(identity, 32768, (PackedFile(1, 0, (digest,) * count),), "test 1"))


def sealed(document: dict[str, Any]) -> bytes:
    """Return a manifest with fitting digests, whatever else is wrong with it."""
    document = copy.deepcopy(document)
    document.pop("manifest_sha256", None)
    document["identity_sha256"] = hashlib.sha256(canonical_json(document.get("identity"))).hexdigest()
    document["manifest_sha256"] = hashlib.sha256(canonical_json(document)).hexdigest()
    return canonical_json(document)


def edited(content: bytes, *path: str | int, value: Any) -> bytes:
    document = json.loads(content)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return sealed(document)


def test_what_the_identity_says(source: Source) -> None:
    identity = identity_of(source)
    document = identity.document
    assert document["source"]["repo"] == "someone/tiny"
    assert document["source"]["revision"] == "0123abcd"
    assert document["row_format"] == {
        "id": 1,
        "name": "fp8",
        "head_dim": 64,
        "weight_bytes": 64,
        "scale_bytes": 2,
        "row_bytes": 66,
        "rows_per_block": 57,
    }
    table = document["source"]["tables"][1]
    assert table["layer"] == 4
    assert table["weight"]["name"] == "layers.4.engram.embed.weight"
    assert table["weight"]["shape"] == [13322, 64]
    shard = source.table(4).weight.path.read_bytes()
    header = 8 + int.from_bytes(shard[:8], "little")
    assert table["weight"]["header_sha256"] == hashlib.sha256(shard[:header]).hexdigest()
    primes = np.array(source.geometry.primes, dtype="<i8").tobytes()
    assert document["digests"]["primes"] == hashlib.sha256(primes).hexdigest()
    assert document["engram"]["compressed_vocab_size"] == 409
    assert identity.sha256 == hashlib.sha256(canonical_json(document)).digest()
    assert identity.pack_id == int.from_bytes(identity.sha256[:8], "little")


def test_the_sample_covers_both_ends_of_every_column(source: Source) -> None:
    for position, layer in enumerate(source.geometry.spec.layer_ids):
        chosen = sample_rows(source.geometry, position)
        rows = rows_of(source, layer)
        offsets = source.geometry.offsets[position]
        counts = source.geometry.column_rows(position)
        assert set(offsets) <= set(chosen)
        assert {int(o) + c - 1 for o, c in zip(offsets, counts, strict=True)} <= set(chosen)
        assert len(chosen) == 16 * len(offsets)
        document = identity_of(source).document["source"]["tables"][position]
        assert document["sample_sha256"] == hashlib.sha256(rows[chosen].tobytes()).hexdigest()


def test_round_trip(content: bytes) -> None:
    manifest = parse_manifest(content)
    assert manifest_bytes(manifest) == content
    assert manifest.columns(1) == (0,)
    assert manifest.columns(4) == ()
    assert content == canonical_json(json.loads(content)) + b"\n"


def test_identity_is_the_same_wherever_the_checkpoint_lies(tmp_path: Path) -> None:
    first = make_checkpoint(tmp_path / "a", seed=5)
    second = make_checkpoint(tmp_path / "b", seed=5)
    assert identity_of(first).sha256 == identity_of(second).sha256
    # Same shapes, other rows: equal headers, so only the sample tells them apart.
    third = make_checkpoint(tmp_path / "c", seed=6)
    with pytest.raises(
        IdentityError, match=r"x is of another checkpoint than y: source\.tables\[0\]\.sample_sha256 is"
    ):
        check_same_identity(identity_of(first), identity_of(third), found_name="x", wanted_name="y")


def test_nvfp4_identity(tmp_path: Path) -> None:
    identity = identity_of(make_checkpoint(tmp_path, row_format="nvfp4"))
    assert identity.rows.row_bytes == 144
    assert identity.global_scales == {1: np.float32(0.0078125), 3: np.float32(0.0234375)}
    again = parse_identity(json.loads(canonical_json(identity.document)))
    assert again.global_scales == identity.global_scales
    assert again.sha256 == identity.sha256


def test_another_major_version_is_refused_and_a_minor_one_is_not(content: bytes) -> None:
    with pytest.raises(IdentityError, match=r"format version 2\.0; this reader knows 1\.x"):
        parse_manifest(edited(content, "major", value=2))
    with pytest.raises(IdentityError, match=r"identity: packed with format version 7\.0"):
        parse_manifest(edited(content, "identity", "major", value=7))
    later = edited(content, "minor", value=9)
    later = edited(later, "something_new", value={"a": [1, None]})
    later = edited(later, "identity", "also_new", value="x")
    manifest = parse_manifest(later)
    # Fields that are not known are part of the identity all the same.
    assert manifest.identity.sha256 != parse_manifest(content).identity.sha256
    assert manifest.identity.document["also_new"] == "x"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "EGP2", "manifest.format is 'EGP2'"),
        (("major",), "1", "manifest.major is '1', no whole number"),
        (("extent_bytes",), 1000, "manifest.extent_bytes is 1000"),
        (("files",), {}, "manifest.files is no list"),
        (("files",), [1], r"manifest.files\[0\] is no JSON object"),
        (("files", 0, "column"), 12, "there is no column 12 of layer 1"),
        (("files", 0, "layer"), 2, "there is no column 0 of layer 2"),
        (("files", 0, "rows"), 5, r"files\[0\].rows is 5; the configuration makes it 997"),
        (("files", 0, "extents"), [], r"files\[0\].extents has 0 entries, not 3"),
        (("files", 0, "extents", 1), "xyz", r"files\[0\].extents\[1\] is 'xyz', no SHA-256"),
        (("identity",), None, "identity is no JSON object"),
        (("identity", "row_format", "id"), 3, "row format 3 is unknown"),
        (
            ("identity", "row_format", "row_bytes"),
            67,
            "row_format.row_bytes is 67, but id and head_dim make it 66",
        ),
        (("identity", "engram", "vocab_size"), 1009, "12 columns have 1.* rows together"),
        (("identity", "engram", "vocab_size"), 1 << 60, "engram.vocab_size is"),
        (("identity", "engram", "layer_ids"), [4, 1], "digests.multipliers does not fit"),
        (("identity", "engram", "head_dim"), 128, "engram.head_dim is 128"),
        (("identity", "digests", "primes"), "0" * 64, "digests.primes does not fit"),
        (("identity", "digests", "token_map"), 7, "digests.token_map is 7"),
        (("identity", "source", "repo"), 7, "source.repo is 7, no string"),
        (("identity", "source", "tables"), [], "do not name the layers"),
        (("identity", "source", "tables", 0, "num_rows"), 1, r"tables\[0\].num_rows is 1"),
        (("identity", "source", "tables", 0, "global_scale_bits"), 1, "which fp8 rows cannot have"),
        (
            ("identity", "source", "tables", 0, "weight", "shape"),
            [1, 64],
            r"weight.shape is not \[12386, 64\]",
        ),
    ],
)
def test_values_that_cannot_be(content: bytes, path: tuple[str | int, ...], value: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_manifest(edited(content, *path, value=value))


def test_every_key_is_needed(content: bytes) -> None:
    def paths(value: Any, path: tuple[str | int, ...]) -> list[tuple[str | int, ...]]:
        found = [path] if path else []
        if isinstance(value, dict):
            for key, item in value.items():
                found += paths(item, (*path, key))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            found += paths(value[0], (*path, 0))[1:]
        return found

    needed = [
        path
        for path in paths(json.loads(content), ())
        if path[-1] not in ("manifest_sha256", "identity_sha256")
    ]
    assert len(needed) > 50
    for path in needed:
        document = json.loads(content)
        place = document
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        with pytest.raises(FormatError):
            parse_manifest(sealed(document))


def test_any_flipped_bit_is_seen(content: bytes) -> None:
    random = np.random.default_rng(0)
    for position in random.integers(0, len(content), 400).tolist():
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(random.integers(8))
        try:
            manifest = parse_manifest(bytes(damaged))
        except EngramError:
            continue
        # White space at the end is all that can change without a meaning.
        assert position == len(content) - 1
        assert manifest_bytes(manifest) == content


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"a": 1, "a": 1}',
        b'{"major": 1.0}',
        b'{"major": NaN}',
        b'{"major": 1e400}',
        b'{"a": ' + b"[" * 100_000,
        b'{"major": ' + b"9" * 5000 + b"}",
        b'{"format": "EGP1", "major": ' + b"9" * 400 + b"}",
    ],
)
def test_text_that_is_no_manifest(text: bytes) -> None:
    with pytest.raises(EngramError):
        parse_manifest(text)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    with pytest.raises(EngramError):
        parse_manifest(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(JSON)
def test_random_json_raises_nothing_else(value: Any) -> None:
    with pytest.raises(EngramError):
        parse_manifest(json.dumps(value).encode())
    with pytest.raises(EngramError):
        parse_identity(value)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_manifest_with_any_value_replaced_parses_or_raises_the_packages_error(
    content: bytes, data: st.DataObject
) -> None:
    document = json.loads(content)
    place, depth = document, 0
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        depth += 1
        if not isinstance(inner, dict | list) or not inner or (depth > 1 and data.draw(st.booleans())):
            break
        place = inner
    large = st.integers(min_value=-(2**70), max_value=2**70)
    place[key] = data.draw(JSON | large | st.just("0" * 64))
    try:
        text = sealed(document)
    except ValueError:  # a float that JSON does not have
        return
    try:
        manifest = parse_manifest(text)
    except EngramError:
        return
    assert isinstance(manifest, Manifest)


def test_files_on_disk(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"engram\.json is missing: no pack, or one that is not finished"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).write_bytes(content[:-40])
    with pytest.raises(FormatError, match=r"engram\.json: the manifest is not JSON"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).write_bytes(edited(content, "major", value=2))
    with pytest.raises(IdentityError, match=r"engram\.json: manifest: packed with format version 2"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    assert read_manifest(tmp_path).written_by == "test 1"


def test_a_pack_is_held_against_the_model(source: Source, tmp_path: Path) -> None:
    identity = identity_of(source)
    check_model(identity, source.geometry)
    check_model(identity, source.geometry, token_map_sha256=source.token_map_sha256)
    with pytest.raises(IdentityError, match=r"made for token map 1ca1dde6.*, but the model has 00000000"):
        check_model(identity, source.geometry, token_map_sha256="0" * 64)
    other = make_checkpoint(tmp_path, layer_ids=(1, 4))
    with pytest.raises(IdentityError, match="made for engram num_embeddings"):
        check_model(identity, other.geometry)
