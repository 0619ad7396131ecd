"""From checkpoint bytes to a rank's tensors. Owns reading, slicing, padding and decoding; no arithmetic else.

A rank reads only the byte ranges that its ShardPlan names. What it keeps lies in an arena. Padding is written as zeros
explicitly, because a buffer may hold anything: `allocate` is a parameter so that a test can hand out buffers full of
NaN patterns, also for what is not kept, and prove that none of it survives.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from deskfleet.engine import ops
from deskfleet.engine.arena import Allocate, Arena
from deskfleet.errors import CheckpointError
from deskfleet.model.checkpoint import Checkpoint, TensorInfo
from deskfleet.model.layout import Layout, ShardPlan, TensorShard

_NUMPY_DTYPES = {
    "BF16": np.uint16,
    "F32": np.float32,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "I8": np.uint8,
}

_DECODED_AT_ONCE = 1 << 12  # weights as float64


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.empty(shape, dtype)


class ShardReader:
    """Reads one rank's slices. `on_read(num_bytes)` is called as they arrive, with the bytes kept of each.

    Use as a context manager; files stay open between tensors.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: ShardPlan,
        rank: int,
        *,
        allocate: Allocate | None = None,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.plan = plan
        self.rank = rank
        self._allocate = allocate or _empty
        self._keep = allocate or Arena().take  # for what outlives the reader
        self._on_read = on_read
        self._files: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._files.values():
            # Nothing was written; a file system that has gone would hide the read that failed because of it.
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._files.clear()

    def whole(self) -> ShardReader:
        """One that reads tensors as a rank alone has them, for what every rank holds all of."""
        alone = ShardPlan(self.plan.config, Layout(1))
        return ShardReader(self.checkpoint, alone, 0, allocate=self._allocate, on_read=self._on_read)

    def raw(self, name: str) -> np.ndarray:
        """This rank's slice of `name` in its stored dtype (bf16 as uint16, FP8/E8M0/FP4 as uint8), padded."""
        return self._read(name, self._allocate)

    def bf16(self, name: str) -> Tensor:
        """A BF16 tensor."""
        return _as_bf16(self._read(name, self._keep))

    def f32(self, name: str) -> Tensor:
        """A BF16 or F32 tensor as float32."""
        if self.checkpoint.tensors[name].dtype == "BF16":
            stored = _as_bf16(self.raw(name))
            return torch.from_numpy(self._keep(tuple(stored.shape), np.dtype(np.float32))).copy_(stored)
        return torch.from_numpy(self._read(name, self._keep))

    def matrix(self, name: str) -> Tensor:
        """A BF16 or F32 matrix as it is stored, ready for ops.linear."""
        return self.bf16(name) if self.checkpoint.tensors[name].dtype == "BF16" else self.f32(name)

    def fp8(self, *prefixes: str) -> Tensor:
        """`prefix.weight` with `prefix.scale` as bf16 [out, in], which holds every value exactly.

        Of several, the matrices under one another: [Σ out, in].
        """
        parts = [(self.raw(f"{prefix}.weight"), self.raw(f"{prefix}.scale")) for prefix in prefixes]
        shape = sum(len(codes) for codes, _ in parts), parts[0][0].shape[1]
        whole = _as_bf16(self._keep(shape, np.dtype(np.uint16)))
        places = whole.split([len(codes) for codes, _ in parts])
        for prefix, (codes, scales), rows in zip(prefixes, parts, places, strict=True):
            self._decode_fp8(prefix, torch.from_numpy(codes), torch.from_numpy(scales), rows)
        return whole

    def _decode_fp8(self, prefix: str, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        block = self.plan.config.weight_block_size
        # A few rows at a time: as float64, a large matrix takes eight times the room that it has in the file.
        step = max(_DECODED_AT_ONCE // (codes.shape[1] * block), 1)
        for first in range(0, len(scales), step):
            rows = slice(first * block, (first + step) * block)
            wide = ops.dequantize_fp8_weight(codes[rows], scales[first : first + step], block)
            out[rows] = _exact_bf16(wide, prefix)

    def fp4(self, prefix: str) -> ops.Fp4Matrix:
        """A routed expert's MXFP4 matrix [out, in], as it is stored."""
        return ops.Fp4Matrix(
            torch.from_numpy(self.raw(f"{prefix}.weight")), torch.from_numpy(self.raw(f"{prefix}.scale"))
        )

    def experts(self, prefix: str, names: Sequence[str], expert_ids: range) -> ops.Fp4Matrix:
        """Stacked experts [E_local, Σ out, in]: the matrices `names` of each expert under one another."""
        return ops.Fp4Matrix(
            *(
                self._stacked(prefix, [f"{name}.{part}" for name in names], expert_ids)
                for part in ("weight", "scale")
            )
        )

    def _stacked(self, prefix: str, names: Sequence[str], expert_ids: range) -> Tensor:
        """uint8 [E_local, Σ rows, columns] of each expert's tensors `names`."""
        shapes = [
            self.plan.shard(f"{prefix}.{expert_ids.start}.{name}", self.rank).local_shape for name in names
        ]
        shape = len(expert_ids), sum(rows for rows, _ in shapes), shapes[0][1]
        whole = self._keep(shape, np.dtype(np.uint8))
        for stacked, expert in zip(whole, expert_ids, strict=True):
            first = 0
            for name, (rows, _) in zip(names, shapes, strict=True):
                self._fill(f"{prefix}.{expert}.{name}", stacked[first : first + rows])
                first += rows
        return torch.from_numpy(whole)

    def _read(self, name: str, allocate: Allocate) -> np.ndarray:
        dtype = np.dtype(_NUMPY_DTYPES[self.checkpoint.tensors[name].dtype])
        local = allocate(self.plan.shard(name, self.rank).local_shape, dtype)
        self._fill(name, local)
        return local

    def _fill(self, name: str, local: np.ndarray) -> None:
        """Write this rank's slice of `name` and its padding over all of `local`, which must be contiguous."""
        info = self.checkpoint.tensors[name]
        shard = self.plan.shard(name, self.rank)
        if shard.dim is None:
            self._read_into(info, 0, local)
            self._count(local.nbytes)
            return
        _zero_padding(local, shard)
        filled = 0
        for start, stop in shard.ranges:
            part = self._read_range(info, local.dtype, shard, start, stop)
            target = [slice(None)] * local.ndim
            target[shard.dim] = slice(filled, filled + stop - start)
            local[tuple(target)] = part
            filled += stop - start
            self._count(part.nbytes)

    def _read_range(
        self, info: TensorInfo, dtype: np.dtype, shard: TensorShard, start: int, stop: int
    ) -> np.ndarray:
        assert shard.dim is not None
        if shard.dim == 0:
            rows = self._allocate((stop - start, *info.shape[1:]), dtype)
            self._read_into(info, start * rows[:1].nbytes if stop > start else 0, rows)
            return rows
        # A column slice is strided in the file; whole rows are read once and cut here.
        whole = self._allocate(info.shape, dtype)
        self._read_into(info, 0, whole)
        cut = [slice(None)] * len(info.shape)
        cut[shard.dim] = slice(start, stop)
        return whole[tuple(cut)]

    def _read_into(self, info: TensorInfo, skip_bytes: int, target: np.ndarray) -> None:
        if target.nbytes == 0:
            return
        view = target.reshape(-1).view(np.uint8).data
        descriptor = self._open(info)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], info.offset_bytes + skip_bytes + done)
            except OSError as error:
                raise CheckpointError(
                    f"cannot read {info.name} from {info.path}: {error.strerror}"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{info.path} ended {len(view) - done} bytes early while reading {info.name}",
                    hint="the file changed or shrank after it was opened; fetch it again",
                )
            done += count

    def _count(self, num_bytes: int) -> None:
        if self._on_read is not None:
            self._on_read(num_bytes)

    def _open(self, info: TensorInfo) -> int:
        key = str(info.path)
        if key not in self._files:
            try:
                self._files[key] = os.open(info.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"cannot open {info.path}: {error.strerror}") from error
        return self._files[key]


def _as_bf16(bits: np.ndarray) -> Tensor:
    """uint16 -> bf16 of the same memory."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _exact_bf16(wide: Tensor, prefix: str) -> Tensor:
    """float64 -> bf16. A decoded value has at most four significant bits; only its scale can be out of range.

    Raises CheckpointError when a value would change.
    """
    narrow = wide.to(torch.bfloat16)
    if not bool(((narrow.to(torch.float64) == wide) | wide.isnan()).all()):
        raise CheckpointError(
            f"{prefix}.scale holds a scale so large or small that its weights are no bf16 numbers",
            hint="the published scales lie between 2**-124 and 2**119; the file is damaged or of another format",
        )
    return narrow


def _zero_padding(local: np.ndarray, shard: TensorShard) -> None:
    """Write zeros over the padded end of the sharded dim; every other byte is about to be read from disk."""
    assert shard.dim is not None
    held = sum(stop - start for start, stop in shard.ranges)
    padding = [slice(None)] * local.ndim
    padding[shard.dim] = slice(held, None)
    local[tuple(padding)] = 0


__all__ = ["Allocate", "ShardReader"]
