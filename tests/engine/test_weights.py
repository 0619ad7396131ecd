"""Loading: each rank gets exactly its slice of every tensor, padded with zeros whatever the memory held before."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from deskfleet.engine.rank import _bytes_to_read
from deskfleet.engine.runner import ModelRunner
from deskfleet.engine.weights import ShardReader
from deskfleet.errors import CheckpointError
from deskfleet.model.checkpoint import Checkpoint, TensorInfo
from deskfleet.model.layout import Layout, ShardPlan, TensorShard
from deskfleet.model.names import TensorClass
from tests.engine.engines import MODEL
from tests.engine.golden import checkpoint, plain_limits
from tests.engine.lockstep import Exchange, ThreadCommunicator, poisoned

WIDTHS = {"BF16": np.uint16, "F32": np.float32, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "I8": np.uint8}


@cache
def whole(name: str) -> np.ndarray:
    """A tensor straight from its file, without any of the code under test."""
    info = checkpoint().tensors[name]
    data = np.fromfile(info.path, np.uint8, info.nbytes, offset=info.offset_bytes)
    return data.view(WIDTHS[info.dtype]).reshape(info.shape)


def expected(shard: TensorShard) -> np.ndarray:
    """The rank's slice cut from the whole tensor, zeros behind it."""
    full = whole(shard.name)
    if shard.dim is None:
        return full
    index = np.concatenate([np.arange(*held) for held in shard.ranges] or [np.zeros(0, int)]).astype(int)
    kept = np.take(full, index, axis=shard.dim)
    return np.concatenate(
        (
            kept,
            np.zeros((*kept.shape[: shard.dim], shard.num_padding, *kept.shape[shard.dim + 1 :]), kept.dtype),
        ),
        axis=shard.dim,
    )


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 5, 8, 9])
def test_every_tensor_of_every_rank_is_its_slice(tp_size: int) -> None:
    plan = ShardPlan(checkpoint().config, Layout(tp_size))
    kinds: set[tuple[object, ...]] = set()
    for rank in range(tp_size):
        with ShardReader(checkpoint(), plan, rank, allocate=poisoned) as reader:
            for name in checkpoint().tensors:
                shard = plan.shard(name, rank)
                found = reader.raw(name)
                assert found.shape == shard.local_shape, name
                assert found.tobytes() == expected(shard).tobytes(), f"{name} of rank {rank} of {tp_size}"
                kinds.add((shard.dim, len(shard.ranges) > 1, shard.num_padding > 0))
    if tp_size in (3, 5):  # the cases of interest were among them
        assert {(None, False, False), (0, False, True), (1, False, True), (0, True, False)} <= kinds


def test_matrices_decode_the_same_in_slices_as_in_one_piece() -> None:
    """Scales are cut with their weights: rows, columns, groups and whole experts."""
    single = ShardPlan(checkpoint().config, Layout(1))
    plan = ShardPlan(checkpoint().config, Layout(3))
    with ShardReader(checkpoint(), single, 0) as reader:
        rows, columns = reader.fp8("layers.3.attn.wq_b"), reader.fp8("layers.3.attn.wo_b")
        experts = reader.experts("layers.3.ffn.experts", ("w1", "w3"), range(16))
        table = reader.bf16("embed.weight")
    row_parts, column_parts, table_parts = [], [], []
    for rank in range(3):
        with ShardReader(checkpoint(), plan, rank, allocate=poisoned) as reader:
            held = plan.expert_range(rank)
            own = reader.experts("layers.3.ffn.experts", ("w1", "w3"), held)
            assert own.codes.equal(experts.codes[held.start : held.stop])
            assert own.scales.equal(experts.scales[held.start : held.stop])
            row_parts.append(reader.fp8("layers.3.attn.wq_b"))
            column_parts.append(reader.fp8("layers.3.attn.wo_b"))
            table_parts.append(reader.bf16("embed.weight"))
    for dim, full, parts in ((0, rows, row_parts), (1, columns, column_parts), (0, table, table_parts)):
        glued = torch.cat(parts, dim)
        size = full.shape[dim]
        assert glued.shape[dim] > size
        assert glued.narrow(dim, 0, size).equal(full)
        assert not glued.narrow(dim, size, glued.shape[dim] - size).any()


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_progress_ends_at_what_was_announced(tp_size: int) -> None:
    plan = ShardPlan(checkpoint().config, Layout(tp_size))
    for rank in range(tp_size):
        counted: list[int] = []
        ModelRunner(
            checkpoint(),
            plan,
            ThreadCommunicator(rank, Exchange(tp_size), lambda rank, tensor: None),
            plain_limits(1, 32),
            pad_compressed_id=2,
            on_read=counted.append,
        ).close()
        assert sum(counted) == _bytes_to_read(plan, rank, with_drafts=False)


def test_files_are_closed_again() -> None:
    before = os.listdir("/proc/self/fd")
    with ShardReader(checkpoint(), ShardPlan(checkpoint().config, Layout(1)), 0) as reader:
        reader.raw("embed.weight")
        reader.raw("head.weight")
        assert len(os.listdir("/proc/self/fd")) == len(before) + 2
    assert len(os.listdir("/proc/self/fd")) == len(before)


# --- files that changed after they were opened


@pytest.fixture
def copied(tmp_path: Path) -> Checkpoint:
    """A checkpoint of our own to spoil."""
    return Checkpoint.open(shutil.copytree(MODEL, tmp_path / "model"))


def reader_of(source: Checkpoint, tp_size: int = 1, rank: int = 0) -> ShardReader:
    return ShardReader(source, ShardPlan(source.config, Layout(tp_size)), rank)


@pytest.mark.parametrize(
    ("name", "tp_size", "rank"),
    [
        ("norm.weight", 1, 0),  # replicated
        ("head.weight", 3, 2),  # the last rows
        ("layers.9.attn.wo_b.weight", 2, 1),  # columns
        ("layers.9.ffn.experts.15.w2.weight", 2, 1),  # an expert
    ],
)
def test_a_file_that_shrank_is_named_with_the_tensor(
    copied: Checkpoint, name: str, tp_size: int, rank: int
) -> None:
    info = copied.tensors[name]
    os.truncate(info.path, info.offset_bytes + info.nbytes - 1)
    with (
        reader_of(copied, tp_size, rank) as reader,
        pytest.raises(
            CheckpointError, match=f"{info.path} ended 1 bytes early while reading {name}"
        ) as failure,
    ):
        reader.raw(name)
    assert failure.value.hint is not None


def test_a_file_that_is_gone_is_named(copied: Checkpoint) -> None:
    info = copied.tensors["norm.weight"]
    info.path.unlink()
    with (
        reader_of(copied) as reader,
        pytest.raises(CheckpointError, match=f"cannot open {info.path}: No such file or directory"),
    ):
        reader.raw("norm.weight")


def test_a_file_that_cannot_be_read_is_named(copied: Checkpoint) -> None:
    directory = replace(copied.tensors["norm.weight"], path=copied.directory)  # reading a directory fails
    spoilt = replace(copied, tensors={**copied.tensors, "norm.weight": directory})
    with (
        reader_of(spoilt) as reader,
        pytest.raises(CheckpointError, match=r"cannot read norm\.weight from .*: Is a directory"),
    ):
        reader.raw("norm.weight")


def test_every_class_of_tensor_was_there() -> None:
    """The checkpoint behind these tests has all there is to slice."""
    classes = {info.tensor_class for info in checkpoint().tensors.values()}
    assert classes == set(TensorClass)
    assert all(isinstance(info, TensorInfo) for info in checkpoint().tensors.values())
