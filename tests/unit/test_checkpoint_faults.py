"""Every way a checkpoint can be broken: one distinct sentence each, naming file and tensor."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deskfleet.errors import CheckpointError, ConfigError
from deskfleet.model.checkpoint import Checkpoint, examine
from deskfleet.testing.standin import write_published_standin, write_sparse_file, write_standin

TINY = Path(__file__).parents[1] / "golden" / "v41-tiny" / "model"
INDEX = "model.safetensors.index.json"
NORM = "layers.0.attn_norm.weight"


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

    def drop_last(self, file: str) -> str:
        """Remove the tensor at the end of a shard, its data too; return its name."""
        header = self.header(file)
        spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        last = max(spans, key=lambda name: spans[name][1])
        self.rewrite(file, lambda header: header.pop(last), extra_bytes=spans[last][0] - spans[last][1])
        return last

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
    os.truncate(path, path.stat().st_size * 9 // 10)


def nearly_empty_file(broken: Broken) -> None:
    broken.write(broken.first, b"\x10\0\0")


def header_longer_than_file(broken: Broken) -> None:
    broken.write(broken.first, (1 << 40).to_bytes(8, "little") + b"{}" * 50)


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
    broken.rewrite(broken.head, lambda header: header["norm.weight"].update(data_offsets=[-512, 0]))


def unknown_dtype(broken: Broken) -> None:
    broken.rewrite(broken.first, lambda header: header[NORM].update(dtype="F8_E5M3"))


def span_against_shape(broken: Broken) -> None:
    broken.rewrite(broken.first, lambda header: header[NORM].update(shape=[77]))


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
    broken.drop_last(broken.head)


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
    dropped = broken.drop_last(broken.head)
    broken.change_index(lambda index: index["weight_map"].pop(dropped))


def wrong_shape(broken: Broken) -> None:
    broken.rewrite(broken.first, lambda header: header["layers.0.attn.wq_a.weight"]["shape"].reverse())


def wrong_dtype(broken: Broken) -> None:
    broken.rewrite(broken.first, lambda header: header[NORM].update(dtype="F16"))


def wrong_total(broken: Broken) -> None:
    broken.change_index(lambda index: index["metadata"].update(total_size=12_345))


def path_outside(broken: Broken) -> None:
    broken.change_index(lambda index: index["weight_map"].update({NORM: "../elsewhere.safetensors"}))


def absolute_path(broken: Broken) -> None:
    broken.change_index(lambda index: index["weight_map"].update({NORM: "/etc/passwd"}))


def hidden_path_outside(broken: Broken) -> None:
    broken.change_index(lambda index: index["weight_map"].update({NORM: "a/../../elsewhere"}))


def named_pipe(broken: Broken) -> None:
    (broken.directory / broken.first).unlink()
    os.mkfifo(broken.directory / broken.first)


# What each says, as a regular expression over the whole message, and whether it is planted at full size too.
CORRUPTIONS: list[tuple[Callable[[Broken], None], str, bool]] = [
    (missing_directory, r"no such directory: \S+", False),
    (missing_config, r"no config\.json in \S+", False),
    (missing_index, r"neither <index> nor model\.safetensors in \S+", False),
    (index_not_json, r"<index> is not JSON: .+", False),
    (index_without_map, r"<index> has no weight_map from tensors to files", False),
    (index_maps_to_number, r"<index> maps tensor <norm> to 3, which is not a file name", False),
    (index_total_is_text, r"<index> has total_size '510 GB', which is not a number of bytes", False),
    (
        missing_shard,
        r"shard <table> is missing; the index maps 6 tensors to it, layers\.1\.engram\.\S+ first",
        True,
    ),
    (dangling_link, r"shard <head> is missing; the index maps 2 tensors to it, norm\.weight first", False),
    (
        short_file,
        r"<table> is short: \d+ bytes where its header describes \d+; tensor layers\.1\.engram\.\S+ is the "
        "first one cut off",
        True,
    ),
    (nearly_empty_file, r"<first> has 3 bytes, too few for a safetensors file", False),
    (
        header_longer_than_file,
        r"<first> announces a header of 1099511627776 bytes, more than the file's 108",
        True,
    ),
    (header_not_json, r"<first>: header is not JSON: .+", True),
    (header_not_an_object, r"<first>: header is JSON but not an object", False),
    (
        entry_without_shape,
        r"<first>: tensor <norm> has a broken header entry: .*missing required field `shape`",
        False,
    ),
    (
        entry_with_negative_offset,
        r"<head>: tensor norm\.weight has a broken header entry: .*>= 0.*data_offsets\[0\].*",
        False,
    ),
    (unknown_dtype, r"<first>: tensor <norm> has unknown dtype F8_E5M3", False),
    (
        span_against_shape,
        r"<first>: tensor <norm> spans \d+ bytes \(offsets \d+ to \d+\), but BF16 \[77\] takes 154",
        True,
    ),
    (overlap, r"<head>: tensor norm\.weight overlaps head\.weight: it starts at \d+, before \d+", True),
    (
        out_of_range,
        r"<head>: tensor norm\.weight is out of range: offsets 1\d{12} to 1\d{12} in \d+ bytes of data",
        True,
    ),
    (hole, r"<head>: hole of 128 bytes before tensor norm\.weight, after head\.weight", True),
    (trailing_bytes, r"<head>: 77 bytes of data follow the last tensor, norm\.weight", True),
    (absent_from_its_shard, r"tensor norm\.weight is absent from <head>, where <index> puts it", True),
    (mapped_elsewhere, r"<first> holds tensor <norm>, but <index> maps it to <second>", True),
    (not_in_the_index, r"<first> holds tensor <norm>, which <index> does not list", True),
    (
        unexpected_tensor,
        r"<first> holds unexpected tensor layers\.0\.attn_nrom\.weight: config\.json does not call for it",
        True,
    ),
    (
        missing_tensor,
        r"tensor norm\.weight is missing: config\.json calls for it, and no file holds it",
        True,
    ),
    (
        wrong_shape,
        r"<first>: tensor layers\.0\.attn\.wq_a\.weight has shape \[(\d+), (\d+)\], expected \[\2, \1\]",
        True,
    ),
    (wrong_dtype, r"<first>: tensor <norm> has dtype F16, expected BF16", True),
    (wrong_total, r"<index> says total_size 12345, but the files hold \d+ tensor bytes", True),
    (
        path_outside,
        r"<index> maps tensor <norm> to '\.\./elsewhere\.safetensors', which is outside the directory",
        True,
    ),
    (absolute_path, r"<index> maps tensor <norm> to '/etc/passwd', which is outside the directory", False),
    (
        hidden_path_outside,
        r"<index> maps tensor <norm> to '\.\./elsewhere', which is outside the directory",
        False,
    ),
    (named_pipe, r"<first> is not a regular file", False),
]


def fits(template: str, message: str, broken: Broken) -> bool:
    """Is `message` what `template` says, with the names of `broken` in place of the marks?"""
    names = {"index": INDEX, "norm": NORM, "first": broken.first, "second": broken.second}
    names |= {"head": broken.head, "table": broken.table}
    pattern = re.sub(r"<(\w+)>", lambda mark: re.escape(names[mark[1]]), template)
    return re.fullmatch(pattern, message) is not None


@pytest.mark.parametrize(
    ("corrupt", "text"),
    [pytest.param(corrupt, text, id=corrupt.__name__) for corrupt, text, _ in CORRUPTIONS],
)
def test_corruption_has_its_own_error(broken: Broken, corrupt: Callable[[Broken], None], text: str) -> None:
    corrupt(broken)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(broken.directory)
    # Exactly one description fits: no other corruption says the same.
    assert [line for _, line, _ in CORRUPTIONS if fits(line, caught.value.message, broken)] == [text], (
        caught.value.message
    )
    problems = Checkpoint.problems(broken.directory)
    assert problems[0].startswith(caught.value.message)
    # A fault is reported with at most its direct consequences, not once for each tensor of a shard.
    assert len(problems) <= 3, problems


def large() -> list[Any]:
    """Reading 96,085 headers takes seconds: the fast lane has every third fault here, and all of them at tiny size."""
    cases = [(corrupt, text) for corrupt, text, is_large in CORRUPTIONS if is_large]
    return [
        pytest.param(*case, id=case[0].__name__, marks=() if index % 3 == 0 else pytest.mark.slow)
        for index, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("corrupt", "text"), large())
def test_corruption_at_the_published_size(
    published: Path, tmp_path: Path, corrupt: Callable[[Broken], None], text: str
) -> None:
    broken = Broken.link(published, tmp_path)
    corrupt(broken)
    examination = examine(broken.directory)
    assert examination.checkpoint is None
    message = examination.problems[0].split(" (did you mean ")[0]
    message = re.sub(r" \((the download|index and|fetch|the file|do not)[^()]*\)$", "", message)
    assert fits(text, message, broken), message
    assert len(examination.problems) <= 3


def test_absurd_header(published: Path, tmp_path: Path) -> None:
    """Only a file larger than the format's limit for headers can announce one above it."""
    broken = Broken.link(published, tmp_path)
    with broken.own(broken.table).open("r+b") as stream:
        stream.write((5_000_000_000).to_bytes(8, "little"))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    assert caught.value.message == (
        f"{broken.table} announces a header of 5000000000 bytes; the format allows 100000000"
    )


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
    broken.write(broken.head, b"not a safetensors file")
    problems = Checkpoint.problems(broken.directory)
    assert len(problems) == 3
    assert problems[0].startswith(f"{broken.head} announces a header")
    assert problems[1].startswith(f"shard {broken.table} is missing")
    assert problems[2].startswith(f"{broken.first}: tensor {NORM} has dtype F16")


def test_another_models_tensors_are_listed_quickly(broken: Broken) -> None:
    """Every name is wrong here; the search for the nearest ones must not take minutes."""

    def rename(table: dict[str, Any]) -> None:
        for name in [name for name in table if name != "__metadata__"]:
            table[f"model.{name}"] = table.pop(name)

    broken.change_index(lambda index: rename(index["weight_map"]))
    for path in broken.directory.glob("*.safetensors"):
        broken.rewrite(path.name, rename)
    problems = Checkpoint.problems(broken.directory)
    assert len(problems) == 2 * 1568
    assert sum("did you mean" in problem for problem in problems) <= 5


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
