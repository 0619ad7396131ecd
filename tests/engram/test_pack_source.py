"""What a checkpoint must look like to be packed, and what is said of one that does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_fixtures import TINY, make_checkpoint, rows_of, write_safetensors

from deskfleet_engram.errors import EngramError, GeometryError, SourceError
from deskfleet_engram.pack import pack
from deskfleet_engram.portable import PortableStore
from deskfleet_engram.source import TableReader, open_source, read_header, read_rows
from deskfleet_engram.store import open_store
from deskfleet_engram.verify import verify

PREFIX = "layers.1.engram.embed."


def test_the_golden_checkpoint() -> None:
    source = open_source(TINY)
    assert [(table.layer, table.num_rows, table.rows.name) for table in source.tables] == [
        (1, 12386, "fp8"),
        (4, 13322, "fp8"),
    ]
    assert source.token_map_sha256 is not None
    with PortableStore(source.table(4).row_source()) as store:
        codes, scales = np.empty((1, 64), np.uint8), np.empty((1, 2), np.uint8)
        store.gather(np.array([13321]), codes, scales)
    assert np.array_equal(
        np.concatenate([codes, scales], axis=1), read_rows(source.table(4), np.array([13321]))
    )
    with pytest.raises(SourceError, match="layer 2 has no Engram table; layers 1, 4 have"):
        source.table(2)


def test_without_an_index_the_headers_tell(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert open_source(tmp_path).table(3).weight.path.name == "model-00003.safetensors"


@pytest.mark.parametrize(
    "names", [("scale", "scale_2"), ("weight_scale", "weight_scale_2"), ("scale", "global_scale")]
)
def test_weight_and_scale_may_lie_in_two_shards(tmp_path: Path, names: tuple[str, str]) -> None:
    source = make_checkpoint(tmp_path / "a", row_format="nvfp4", layer_ids=(1,))
    rows = rows_of(source, 1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/config.json").write_bytes((tmp_path / "a/config.json").read_bytes())
    parts = {
        "x.safetensors": {PREFIX + "weight": ("U8", np.ascontiguousarray(rows[:, :128]))},
        "y.safetensors": {
            "something.else": ("BF16", np.zeros(5, dtype=np.uint16)),
            PREFIX + names[1]: ("F32", np.array(0.5, dtype="<f4")),
            PREFIX + names[0]: ("F8_E4M3", np.ascontiguousarray(rows[:, 128:])),
        },
    }
    for name, tensors in parts.items():
        write_safetensors(tmp_path / "b" / name, tensors)
    split = open_source(tmp_path / "b")
    assert split.table(1).global_scale == np.float32(0.5)
    pack(split, tmp_path / "pack")
    assert verify(tmp_path / "pack", level="full", source=split).is_sound
    for backend in ("native", "portable"):
        with open_store(split.table(1), backend=backend) as store:  # type: ignore[arg-type]
            codes, scales = np.empty((len(rows), 128), np.uint8), np.empty((len(rows), 16), np.uint8)
            store.gather(np.arange(len(rows)), codes, scales)
        assert np.array_equal(np.concatenate([codes, scales], axis=1), rows)


def edit_config(directory: Path, **values: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    for key, value in values.items():
        if value is None:
            del config["text_config"][key]
        else:
            config["text_config"][key] = value
    (directory / "config.json").write_text(json.dumps(config))


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def edit_index(directory: Path, **values: str | None) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for key, value in values.items():
        index["weight_map"].pop(PREFIX + key)
        if value is not None:
            index["weight_map"][PREFIX + key] = value
    path.write_text(json.dumps(index))


def shard(directory: Path) -> Path:
    return directory / "model-00001.safetensors"


CASES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("no config", lambda d: (d / "config.json").unlink(), r"config\.json: cannot read: No such file"),
    ("config is no JSON", lambda d: (d / "config.json").write_text("{"), r"config\.json: not JSON"),
    ("config is a list", lambda d: (d / "config.json").write_text("[]"), "JSON, but no object"),
    ("no engram", lambda d: edit_config(d, engram_layer_ids=None), "engram_layer_ids is missing"),
    ("text for number", lambda d: edit_config(d, engram_n_heads="1"), "not whole numbers: '1'"),
    (
        "no index, no shard",
        lambda d: [p.unlink() for p in d.glob("model*")],
        "neither an index nor a safetensors",
    ),
    (
        "index without map",
        lambda d: (d / "model.safetensors.index.json").write_text("{}"),
        "weight_map is not",
    ),
    ("no weight", lambda d: edit_index(d, weight=None), "embed.weight is in no shard"),
    ("no scale", lambda d: edit_index(d, scale=None), "embed.scale is in no shard"),
    ("no factor", lambda d: edit_index(d, scale_2=None), "scale_2 is in no shard; nvfp4 rows need it"),
    (
        "index lies",
        lambda d: edit_index(d, scale="model-00003.safetensors"),
        "is not there, though the index says so",
    ),
    ("shard missing", lambda d: shard(d).unlink(), r"model-00001\.safetensors: cannot read: No such file"),
    ("shard empty", lambda d: shard(d).write_bytes(b""), "no safetensors file, or cut off: 0 bytes"),
    (
        "shard is text",
        lambda d: shard(d).write_bytes(b"version https://git-lfs"),
        "no safetensors file, or cut off",
    ),
    ("shard cut off", lambda d: shard(d).write_bytes(shard(d).read_bytes()[:-9]), "but the file has"),
    (
        "header is no JSON",
        lambda d: shard(d).write_bytes((4).to_bytes(8, "little") + b"{]}}" + bytes(99)),
        "the header is not JSON",
    ),
    (
        "header is a list",
        lambda d: shard(d).write_bytes((4).to_bytes(8, "little") + b"[  ]" + bytes(99)),
        "the header is no JSON object",
    ),
    (
        "unknown dtypes",
        lambda d: edit_header(shard(d), lambda h: h[PREFIX + "weight"].update(dtype="I8")),
        "is I8 with scales F8_E4M3; known are",
    ),
    (
        "bytes and shape",
        lambda d: edit_header(shard(d), lambda h: h[PREFIX + "weight"].update(shape=[311, 127])),
        "spans .* bytes, but U8",
    ),
    (
        "entry broken",
        lambda d: edit_header(shard(d), lambda h: h[PREFIX + "weight"].pop("shape")),
        "has a broken header entry",
    ),
    (
        "negative offsets",
        lambda d: edit_header(shard(d), lambda h: h[PREFIX + "weight"].update(data_offsets=[5, 1])),
        "has offsets 5 to 1",
    ),
    (
        "other head_dim",
        lambda d: edit_config(d, engram_head_dim=128),
        r"has shape \[311, 128\]; nvfp4 rows and engram_num_embeddings ask for \[311, 64\]",
    ),
    ("tokenizer broken", lambda d: (d / "tokenizer.json").write_text("{}"), r"tokenizer\.json: no tokenizer"),
    ("tokenizer not text", lambda d: (d / "tokenizer.json").write_bytes(b"\xff"), "cannot read"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_is_said_of_a_checkpoint_that_cannot_be_packed(
    tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    make_checkpoint(tmp_path, row_format="nvfp4")
    change(tmp_path)
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path)


def test_sizes_that_do_not_follow(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_config(tmp_path, engram_num_embeddings=[311, 300])
    with pytest.raises(GeometryError, match="but engram_num_embeddings says 300"):
        open_source(tmp_path)


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_a_factor_that_cannot_be(tmp_path: Path, value: float) -> None:
    with pytest.raises(SourceError, match=r"scale_2 is .*; a positive number is needed"):
        make_checkpoint(tmp_path, row_format="nvfp4", global_scale=value)


def test_stretches_and_single_rows_agree(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    table, rows = source.table(3), rows_of(source, 3)
    with TableReader(table, 40) as reader:
        for first, count in ((0, 1), (0, 40), (17, 40), (len(rows) - 40, 40), (len(rows) - 1, 1)):
            weight, scale = reader.read(first, count)
            assert np.array_equal(np.concatenate([weight, scale], axis=1), rows[first : first + count])
    picked = np.array([5, 0, len(rows) - 1, 5])
    assert np.array_equal(read_rows(table, picked), rows[picked])
    with pytest.raises(SourceError, match="is outside 0"):
        read_rows(table, np.array([len(rows)]))


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300), length=st.none() | st.integers(0, 2**64 - 1))
def test_random_files_raise_the_packages_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, length: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    prefix = (len(data) if length is None else length).to_bytes(8, "little")
    path.write_bytes(prefix + data)
    try:
        read_header(path)
    except EngramError:
        return
    assert json.loads(data[: int.from_bytes(prefix, "little")]) == {}


ENTRY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 2**66)
    | st.sampled_from(["U8", "F32", "dtype"])
    | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(entry=ENTRY)
def test_random_header_entries_raise_the_packages_error(
    tmp_path_factory: pytest.TempPathFactory, entry: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "entry.safetensors"
    text = json.dumps({"x": entry}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    try:
        header = read_header(path)
    except EngramError:
        return
    assert header["x"].data_offsets[1] <= 64
