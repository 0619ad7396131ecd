"""Checkpoint: headers only, at the published size, and one distinct sentence for every way to be broken."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from deskfleet.errors import CheckpointError, ConfigError
from deskfleet.model.checkpoint import Checkpoint, examine
from deskfleet.model.config import ModelConfig
from deskfleet.model.names import TensorClass, expected_tensors
from deskfleet.testing.standin import (
    write_published_standin,
    write_sparse_file,
    write_sparse_shard,
    write_standin,
)

TINY = Path(__file__).parents[1] / "golden" / "v41-tiny" / "model"
INDEX = "model.safetensors.index.json"
NORM = "layers.0.attn_norm.weight"


# A checkpoint that is whole


def test_golden_checkpoint() -> None:
    checkpoint = Checkpoint.open(TINY)
    assert len(checkpoint.tensors) == 1568
    assert checkpoint.total_bytes == 9_577_448
    assert checkpoint.num_files == 18
    assert checkpoint.file_bytes == sum(path.stat().st_size for path in TINY.glob("*.safetensors"))
    assert sum(checkpoint.bytes_by_class().values()) == checkpoint.total_bytes
    assert sum(checkpoint.bytes_by_dtype().values()) == checkpoint.total_bytes
    assert checkpoint.bytes_by_class()[TensorClass.engram] == (12386 + 13322) * 66
    assert checkpoint.config == ModelConfig.from_file(TINY / "config.json")
    assert Checkpoint.problems(TINY) == []


def test_offsets_lead_to_the_data() -> None:
    checkpoint = Checkpoint.open(str(TINY))
    for name in ("layers.0.attn.attn_sink", "layers.9.hc_ffn_fn", "mtp.2.ffn.gate.bias", "mtp.0.hc_attn_base"):
        info = checkpoint.tensors[name]
        with safe_open(info.path, "np") as file:
            expected = file.get_tensor(name)
        raw = np.fromfile(info.path, np.uint8, count=info.nbytes, offset=info.offset_bytes)
        assert raw.tobytes() == expected.tobytes()
        assert (info.name, info.shape) == (name, expected.shape)


def test_tensors_cannot_be_changed() -> None:
    checkpoint = Checkpoint.open(TINY)
    with pytest.raises(TypeError):
        checkpoint.tensors["x"] = checkpoint.tensors["norm.weight"]  # type: ignore[index]


def test_single_file_without_index(tmp_path: Path) -> None:
    write_single(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert (checkpoint.num_files, checkpoint.total_bytes) == (1, 9_577_448)
    assert checkpoint.tensors["norm.weight"].path == tmp_path / "model.safetensors"


def test_text_only_checkpoint(tmp_path: Path) -> None:
    config = json.loads((TINY / "config.json").read_text())
    del config["vision_config"]
    write_standin(tmp_path, config)
    assert Checkpoint.open(tmp_path).bytes_by_class()[TensorClass.vision] == 0


def test_index_may_spell_a_file_with_a_dot(tmp_path: Path) -> None:
    write_standin(tmp_path, json.loads((TINY / "config.json").read_text()))
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["norm.weight"] = "./" + index["weight_map"]["norm.weight"]
    index["metadata"]["total_size"] = float(index["metadata"]["total_size"])
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert Checkpoint.open(tmp_path).num_files == 18


def write_single(directory: Path) -> None:
    shutil.copy(TINY / "config.json", directory)
    config = ModelConfig.from_file(TINY / "config.json")
    write_sparse_shard(directory / "model.safetensors", expected_tensors(config))


# Stand-ins, small and of the published size, broken in one place


@dataclass
class Broken:
    """A directory of links to a stand-in's files; a file becomes its own when it is written.

    `first` and `second` name the shards of layers 0 and 1, `head` that of the final norm and the head,
    `table` that with the first Engram table.
    """

    directory: Path
    first: str
    second: str
    head: str
    table: str

    @classmethod
    def link(cls, standin: Path, directory: Path) -> Broken:
        for path in standin.iterdir():
            (directory / path.name).symlink_to(path)
        files = sorted(path.name for path in standin.glob("*.safetensors"))
        return cls(directory, files[2], files[3], files[-6], files[-2])

    def header(self, file: str) -> dict[str, Any]:
        path = self.directory / file
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
        return header

    def rewrite(self, file: str, change: Callable[[dict[str, Any]], Any], extra_bytes: int = 0) -> None:
        """Change a shard's header; its data stays as long as it was, plus `extra_bytes`."""
        header = self.header(file)
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        change(header)
        (self.directory / file).unlink()
        write_sparse_file(self.directory / file, header, end + extra_bytes)

    def own(self, file: str) -> Path:
        """Replace the link to a shard by a sparse file with the same header."""
        self.rewrite(file, lambda header: None)
        return self.directory / file

    def change_index(self, change: Callable[[dict[str, Any]], Any]) -> None:
        index = json.loads((self.directory / INDEX).read_text())
        change(index)
        self.write(INDEX, json.dumps(index).encode())

    def write(self, file: str, content: bytes) -> None:
        (self.directory / file).unlink(missing_ok=True)
        (self.directory / file).write_bytes(content)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    write_standin(directory, json.loads((TINY / "config.json").read_text()))
    return directory


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published")
    write_published_standin(directory)
    return directory


@pytest.fixture
def broken(small: Path, tmp_path: Path) -> Broken:
    return Broken.link(small, tmp_path)


def drop_last(header: dict[str, Any]) -> str:
    """Remove the tensor at the end of the data; return its name."""
    name = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][1])
    del header[name]
    return name


def missing_directory(broken: Broken) -> None:
    shutil.rmtree(broken.directory)


def missing_config(broken: Broken) -> None:
    (broken.directory / "config.json").unlink()


def missing_index(broken: Broken) -> None:
    (broken.directory / INDEX).unlink()


def index_not_json(broken: Broken) -> None:
    broken.write(INDEX, b'{"weight_map": {')


def index_without_map(broken: Broken) -> None:
    broken.write(INDEX, b'{"metadata": {"total_size": 1}}')


def index_maps_to_number(broken: Broken) -> None:
    broken.change_index(lambda index: index["weight_map"].update({NORM: 3}))


def index_total_is_text(broken: Broken) -> None:
    broken.change_index(lambda index: index["metadata"].update(total_size="510 GB"))


def missing_shard(broken: Broken) -> None:
    (broken.directory / broken.table).unlink()


def dangling_link(broken: Broken) -> None:
    (broken.directory / broken.head).unlink()
    (broken.directory / broken.head).symlink_to(broken.directory / "gone")


def short_file(broken: Broken) -> None:
    path = broken.own(broken.table)
    os.truncate(path, path.stat().st_size - 4_000_000_000)


def nearly_empty_file(broken: Broken) -> None:
    broken.write(broken.first, b"\x10\0\0")


def header_longer_than_file(broken: Broken) -> None:
    broken.write(broken.first, (1 << 40).to_bytes(8, "little") + b"{}" * 50)


def absurd_header(broken: Broken) -> None:
    path = broken.own(broken.table)
    with path.open("r+b") as stream:
        stream.write((5_000_000_000).to_bytes(8, "little"))


def header_not_json(broken: Broken) -> None:
    path = broken.own(broken.first)
    with path.open("r+b") as stream:
        stream.seek(8)
        stream.write(b"\xff\xfe")


def header_not_an_object(broken: Broken) -> None:
    broken.write(broken.first, (8).to_bytes(8, "little") + b"[1, 2]  ")


def entry_without_shape(broken: Broken) -> None:
    broken.rewrite(broken.first, lambda header: header[NORM].pop("shape"))


def entry_with_negative_offset(broken: Broken) -> None:
    broken.rewrite(broken.head, lambda header: header["norm.weight"].update(data_offsets=[-10_240, 0]))


def unknown_dtype(broken: Broken) -> None:
    broken.rewrite(broken.first, lambda header: header[NORM].update(dtype="F8_E5M3"))


def span_against_shape(broken: Broken) -> None:
    broken.rewrite(broken.first, lambda header: header[NORM].update(shape=[5121]))


def overlap(broken: Broken) -> None:
    def change(header: dict[str, Any]) -> None:
        start, stop = header["norm.weight"]["data_offsets"]
        header["norm.weight"]["data_offsets"] = [start - 64, stop - 64]

    broken.rewrite(broken.head, change)


def out_of_range(broken: Broken) -> None:
    def change(header: dict[str, Any]) -> None:
        start, stop = header["norm.weight"]["data_offsets"]
        header["norm.weight"]["data_offsets"] = [start + 10**12, stop + 10**12]

    broken.rewrite(broken.head, change)


def hole(broken: Broken) -> None:
    def change(header: dict[str, Any]) -> None:
        start, stop = header["norm.weight"]["data_offsets"]
        header["norm.weight"]["data_offsets"] = [start + 128, stop + 128]

    broken.rewrite(broken.head, change, extra_bytes=128)


def trailing_bytes(broken: Broken) -> None:
    broken.rewrite(broken.head, lambda header: None, extra_bytes=77)


def absent_from_its_shard(broken: Broken) -> None:
    dropped = 5120 * 2
    broken.rewrite(broken.head, lambda header: header.pop("norm.weight"), extra_bytes=-dropped)


def mapped_elsewhere(broken: Broken) -> None:
    broken.change_index(lambda index: index["weight_map"].update({NORM: broken.second}))


def not_in_the_index(broken: Broken) -> None:
    broken.change_index(lambda index: index["weight_map"].pop(NORM))


def unexpected_tensor(broken: Broken) -> None:
    wrong = "layers.0.attn_nrom.weight"

    def change(table: dict[str, Any]) -> None:
        table[wrong] = table.pop(NORM)

    broken.rewrite(broken.first, change)
    broken.change_index(lambda index: change(index["weight_map"]))


def missing_tensor(broken: Broken) -> None:
    broken.rewrite(broken.head, lambda header: header.pop("norm.weight"), extra_bytes=-10_240)
    broken.change_index(lambda index: index["weight_map"].pop("norm.weight"))


def wrong_shape(broken: Broken) -> None:
    name = "layers.0.attn.wq_a.weight"
    broken.rewrite(broken.first, lambda header: header[name].update(shape=[5120, 1280]))


def wrong_dtype(broken: Broken) -> None:
    broken.rewrite(broken.first, lambda header: header[NORM].update(dtype="F16"))


def wrong_total(broken: Broken) -> None:
    broken.change_index(lambda index: index["metadata"].update(total_size=510_286_023_001))


def path_outside(broken: Broken) -> None:
    broken.change_index(lambda index: index["weight_map"].update({NORM: "../elsewhere.safetensors"}))


def absolute_path(broken: Broken) -> None:
    broken.change_index(lambda index: index["weight_map"].update({NORM: "/etc/passwd"}))


def hidden_path_outside(broken: Broken) -> None:
    broken.change_index(lambda index: index["weight_map"].update({NORM: "a/../../elsewhere"}))


def named_pipe(broken: Broken) -> None:
    (broken.directory / broken.first).unlink()
    os.mkfifo(broken.directory / broken.first)


CORRUPTIONS: list[tuple[Callable[[Broken], None], str]] = [
    (missing_directory, r"no such directory: \S+"),
    (missing_config, r"no config\.json in \S+"),
    (missing_index, rf"neither {INDEX} nor model\.safetensors in \S+"),
    (index_not_json, rf"{INDEX} is not JSON: .+"),
    (index_without_map, rf"{INDEX} has no weight_map from tensors to files"),
    (index_maps_to_number, rf"{INDEX} maps tensor {NORM} to 3, which is not a file name"),
    (index_total_is_text, rf"{INDEX} has total_size '510 GB', which is not a number of bytes"),
    (
        missing_shard,
        rf"shard {table} is missing; the index maps 6 tensors to it, layers\.1\.engram\.\S+ first",
    ),
    (dangling_link, rf"shard {head} is missing; the index maps 2 tensors to it, norm\.weight first"),
    (
        short_file,
        rf"{table} is short: 9753\d+ bytes where its header describes 101535\d+; tensor "
        r"layers\.1\.engram\.embed\.weight is the first one cut off",
    ),
    (nearly_empty_file, rf"{first} has 3 bytes, too few for a safetensors file"),
    (
        header_longer_than_file,
        rf"{first} announces a header of 1099511627776 bytes, more than the file's 108",
    ),
    (absurd_header, rf"{table} announces a header of 5000000000 bytes; the format allows 100000000"),
    (header_not_json, rf"{first}: header is not JSON: .+"),
    (header_not_an_object, rf"{first}: header is JSON but not an object"),
    (entry_without_shape, rf"{first}: tensor {NORM} has no valid dtype, shape and data_offsets"),
    (
        entry_with_negative_offset,
        rf"{head}: tensor norm\.weight has no valid dtype, shape and data_offsets",
    ),
    (unknown_dtype, rf"{first}: tensor {NORM} has unknown dtype F8_E5M3"),
    (
        span_against_shape,
        rf"{first}: tensor {NORM} spans 10240 bytes \(offsets \d+ to \d+\), but BF16 \[5121\] takes 10242",
    ),
    (
        overlap,
        rf"{head}: tensor norm\.weight overlaps head\.weight: it starts at 1323827136, before 1323827200",
    ),
    (
        out_of_range,
        rf"{head}: tensor norm\.weight is out of range: offsets 1001323827200 to 1001323837440 in "
        r"1323837440 bytes of data",
    ),
    (hole, rf"{head}: hole of 128 bytes before tensor norm\.weight, after head\.weight"),
    (trailing_bytes, rf"{head}: 77 bytes of data follow the last tensor, norm\.weight"),
    (absent_from_its_shard, rf"tensor norm\.weight is absent from {head}, where {INDEX} puts it"),
    (mapped_elsewhere, rf"{first} holds tensor {NORM}, but {INDEX} maps it to {second}"),
    (not_in_the_index, rf"{first} holds tensor {NORM}, which {INDEX} does not list"),
    (
        unexpected_tensor,
        rf"{first} holds unexpected tensor layers\.0\.attn_nrom\.weight: config\.json does not call for it",
    ),
    (
        missing_tensor,
        r"tensor norm\.weight is missing: config\.json calls for it, and no file holds it",
    ),
    (
        wrong_shape,
        rf"{first}: tensor layers\.0\.attn\.wq_a\.weight has shape \[5120, 1280\], expected \[1280, 5120\]",
    ),
    (wrong_dtype, rf"{first}: tensor {NORM} has dtype F16, expected BF16"),
    (
        wrong_total,
        rf"{INDEX} says total_size 510286023001, but the files hold 510286023000 tensor bytes",
    ),
    (
        path_outside,
        rf"{INDEX} maps tensor {NORM} to '\.\./elsewhere\.safetensors', which is outside the directory",
    ),
    (absolute_path, rf"{INDEX} maps tensor {NORM} to '/etc/passwd', which is outside the directory"),
    (
        hidden_path_outside,
        rf"{INDEX} maps tensor {NORM} to '\.\./elsewhere', which is outside the directory",
    ),
    (named_pipe, rf"{first} is not a regular file"),
]


@pytest.mark.parametrize(
    ("corrupt", "text"), CORRUPTIONS, ids=[corrupt.__name__ for corrupt, _ in CORRUPTIONS]
)
def test_corruption_has_its_own_error(broken: Broken, corrupt: Callable[[Broken], None], text: str) -> None:
    corrupt(broken)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(broken.directory)
    assert re.fullmatch(text, caught.value.message), caught.value.message
    # No other corruption's description fits this message: each has an error of its own.
    fitting = [pattern for _, pattern in CORRUPTIONS if re.fullmatch(pattern, caught.value.message)]
    assert fitting == [text]
    problems = Checkpoint.problems(broken.directory)
    assert any(problem.startswith(caught.value.message) for problem in problems)
    # A fault is reported with at most its direct consequences, not once for each tensor of a shard.
    assert len(problems) <= 4, problems


def test_misspelt_tensor_gets_the_nearest_name(broken: Broken) -> None:
    unexpected_tensor(broken)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(broken.directory)
    assert caught.value.hint == f"did you mean {NORM}?"
    assert Checkpoint.problems(broken.directory) == [
        f"{caught.value.message} (did you mean {NORM}?)",
        f"tensor {NORM} is missing: config.json calls for it, and no file holds it",
    ]


def test_extra_tensor_gets_the_nearest_name_of_its_layer(broken: Broken) -> None:
    extra = "layers.0.attn_norm.weights"

    def change(header: dict[str, Any]) -> None:
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        header[extra] = {"dtype": "BF16", "shape": [4], "data_offsets": [end, end + 8]}

    broken.rewrite(broken.first, change, extra_bytes=8)
    broken.change_index(lambda index: index["weight_map"].update({extra: broken.first}))
    problems = Checkpoint.problems(broken.directory)
    assert problems[0].endswith(f"(did you mean {NORM}?)")
    assert "total_size" in problems[1]


def test_all_problems_are_listed(broken: Broken) -> None:
    missing_shard(broken)
    wrong_dtype(broken)
    header_not_an = "model-00044-of-00048.safetensors"
    broken.write(header_not_an, b"not a safetensors file")
    problems = Checkpoint.problems(broken.directory)
    assert len(problems) == 3
    assert [file in text for file, text in zip((header_not_an, broken.table, broken.first), problems, strict=True)]
    assert "announces a header" in problems[0]
    assert "is missing" in problems[1]
    assert "has dtype F16" in problems[2]


def test_another_models_tensors_are_listed_quickly(tmp_path: Path) -> None:
    """A wrong config.json makes every tensor wrong; the search for nearest names must not take minutes."""
    data = json.loads((TINY / "config.json").read_text())
    write_standin(tmp_path, data)
    for table in ("weight_map",):
        index = json.loads((tmp_path / INDEX).read_text())
        index[table] = {f"model.{name}": file for name, file in index[table].items()}
        (tmp_path / INDEX).write_text(json.dumps(index))
    broken = Broken(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        broken.rewrite(path.name, prefix_names)
    problems = Checkpoint.problems(tmp_path)
    assert len(problems) == 2 * 1568
    assert sum("did you mean" in problem for problem in problems) <= 5


def prefix_names(header: dict[str, Any]) -> None:
    for name in [name for name in header if name != "__metadata__"]:
        header[f"model.{name}"] = header.pop(name)


def test_bad_config_is_a_config_error(broken: Broken) -> None:
    broken.write("config.json", b'{"model_type": "llama"}')
    with pytest.raises(ConfigError, match='model_type is "llama"'):
        Checkpoint.open(broken.directory)
    examination = examine(broken.directory)
    assert examination.config is None
    assert "model_type" in examination.problems[0]


def test_config_survives_a_missing_index(broken: Broken) -> None:
    missing_index(broken)
    examination = examine(broken.directory)
    assert examination.config is not None
    assert examination.checkpoint is None


def test_single_file_problems(tmp_path: Path) -> None:
    write_single(tmp_path)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as stream:
        stream.write((1 << 50).to_bytes(8, "little"))
    assert len(Checkpoint.problems(tmp_path)) == 1
    config = ModelConfig.from_file(TINY / "config.json")
    tensors = expected_tensors(config)
    del tensors["norm.weight"]
    path.unlink()
    write_sparse_shard(path, tensors)
    with pytest.raises(CheckpointError, match=r"tensor norm\.weight is missing"):
        Checkpoint.open(tmp_path)


def test_hint_is_not_sought_for_many(broken: Broken) -> None:
    """Dropping the last tensor of a layer keeps the file whole, and names exactly that tensor."""
    header = broken.header(broken.first)
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    last = max(spans, key=lambda name: spans[name][1])
    broken.rewrite(broken.first, drop_last, extra_bytes=spans[last][0] - spans[last][1])
    assert Checkpoint.problems(broken.directory)[0] == (
        f"tensor {last} is absent from {first}, where {INDEX} puts it "
        "(index and shards come from different checkpoints; fetch both again)"
    )


@pytest.fixture(scope="module")
def small_shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fuzzed")
    for path in TINY.iterdir():
        (directory / path.name).symlink_to(path)
    return directory


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 300), content=st.binary(min_size=1, max_size=6))
def test_no_damage_to_a_header_raises_anything_else(small_shard: Path, position: int, content: bytes) -> None:
    file = "model-00013-of-00018.safetensors"
    damaged = bytearray((TINY / file).read_bytes())
    damaged[position : position + len(content)] = content
    (small_shard / file).unlink()
    (small_shard / file).write_bytes(damaged)
    try:
        Checkpoint.open(small_shard)
    except CheckpointError:
        assert Checkpoint.problems(small_shard) != []
    else:
        # Damage may spare the meaning: equal bytes, spaces, the metadata, or the tensor data.
        assert Checkpoint.problems(small_shard) == []
