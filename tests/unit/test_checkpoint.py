"""Checkpoint: what a whole one says, in one file or many; faults have `test_checkpoint_faults`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from deskfleet.errors import CheckpointError
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.config import ModelConfig
from deskfleet.model.names import TensorClass, expected_tensors
from deskfleet.testing.standin import write_sparse_shard, write_standin

TINY = Path(__file__).parents[1] / "golden" / "v41-tiny" / "model"
INDEX = "model.safetensors.index.json"


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
    for name in (
        "layers.0.attn.attn_sink",
        "layers.9.hc_ffn_fn",
        "mtp.2.ffn.gate.bias",
        "mtp.0.hc_attn_base",
    ):
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


# Damage


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


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fuzzed")
    for path in TINY.iterdir():
        (directory / path.name).symlink_to(path)
    return directory


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 300), content=st.binary(min_size=1, max_size=6))
def test_no_damage_to_a_header_raises_anything_else(fuzzed: Path, position: int, content: bytes) -> None:
    file = "model-00013-of-00018.safetensors"
    damaged = bytearray((TINY / file).read_bytes())
    damaged[position : position + len(content)] = content
    (fuzzed / file).unlink()
    (fuzzed / file).write_bytes(damaged)
    try:
        Checkpoint.open(fuzzed)
    except CheckpointError:
        assert Checkpoint.problems(fuzzed) != []
    else:
        # Damage may spare the meaning: equal bytes, spaces, the metadata, or the tensor data.
        assert Checkpoint.problems(fuzzed) == []
