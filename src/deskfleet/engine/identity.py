"""Short digests of what every rank must have alike: the checkpoint's files, the cut, the token map.

Owns what goes into each digest. Two copies of one checkpoint have one identity; other weights under the same names have
another one, since a sample of every file's data goes in. It is no check of every byte. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np

from deskfleet.errors import CheckpointError
from deskfleet.model.checkpoint import CONFIG_NAME, Checkpoint
from deskfleet.model.layout import ShardPlan

_SAMPLE_BYTES = 256  # from either end of a file's data


def checkpoint_identity(checkpoint: Checkpoint) -> str:
    """Digest the configuration, every tensor's name, type and place, and a sample of every file, in hexadecimal.

    Raises CheckpointError for a file that cannot be read any more.
    """
    digest = hashlib.sha256()
    try:
        config = msgspec.json.decode((checkpoint.directory / CONFIG_NAME).read_bytes())
        digest.update(msgspec.json.encode(config, order="sorted"))
        for path, tensors in groupby(checkpoint.tensors.values(), key=lambda tensor: tensor.path):
            digest.update(str(path.relative_to(checkpoint.directory)).encode())
            first_bytes, end_bytes = None, 0
            for tensor in tensors:
                place = (tensor.name, tensor.dtype, tensor.shape, tensor.offset_bytes, tensor.nbytes)
                digest.update(repr(place).encode())
                first_bytes = (
                    tensor.offset_bytes if first_bytes is None else min(first_bytes, tensor.offset_bytes)
                )
                end_bytes = max(end_bytes, tensor.offset_bytes + tensor.nbytes)
            for sample in _samples(path, first_bytes or 0, end_bytes):
                digest.update(sample)
    except OSError as error:
        name = error.filename or checkpoint.directory
        raise CheckpointError(f"cannot read {name}: {error.strerror or error}") from error
    return digest.hexdigest()


def plan_digest(plan: ShardPlan) -> str:
    """Digest what each rank of `plan` holds of every tensor; routed experts go by their range."""
    digest = hashlib.sha256()
    shared = [name for name in plan.tensors if ".experts." not in name]
    for rank in range(plan.layout.tp_size):
        ranges = (plan.expert_range(rank), plan.draft_expert_range(rank), plan.engram_columns(rank))
        digest.update(repr((rank, ranges)).encode())
        for name in shared:
            digest.update(repr(plan.shard(name, rank)).encode())
    return digest.hexdigest()


def token_map_digest(compressed: np.ndarray) -> str:
    """Digest the compressed id of every token: another tokenizer would read other Engram rows."""
    return hashlib.sha256(np.ascontiguousarray(compressed, np.int64).tobytes()).hexdigest()


def _samples(path: Path, first_bytes: int, end_bytes: int) -> Iterator[bytes]:
    """The beginning and the end of a file's data. Short where the file is: whoever loads it says so."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield os.pread(file, min(_SAMPLE_BYTES, end_bytes - first_bytes), first_bytes)
        begin_bytes = max(end_bytes - _SAMPLE_BYTES, first_bytes)
        yield os.pread(file, end_bytes - begin_bytes, begin_bytes)
    finally:
        os.close(file)


__all__ = ["checkpoint_identity", "plan_digest", "token_map_digest"]
