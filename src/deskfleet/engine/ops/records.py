"""Cached rows as they lie in memory: codes, then scales, in one run of bytes (spec §4.9).

Owns the three record formats. A record is packed once, when its row is made: packing what was unpacked may choose
another scale. Knows nothing of pages or layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deskfleet.engine.ops.quant import (
    FP4_MAGNITUDES,
    quantize_fp4_e4m3,
    quantize_fp4_e8m0,
    quantize_fp8,
)

# Both values of a byte: even element in the low nibble, the sign in bit 3 of each.
_NIBBLES = torch.tensor(FP4_MAGNITUDES + tuple(-m for m in FP4_MAGNITUDES), dtype=torch.float32)
_PAIRS = torch.stack((_NIBBLES.repeat(16), _NIBBLES.repeat_interleave(16)), -1)  # (256, 2)


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """`codes_per_byte` codes a byte, one scale for `block` of them.

    pack(bf16 [..., D]) -> uint8 [..., row_bytes(D)]; unpack is exact: what comes back is the fake-quantised bf16 row.
    """

    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    codes_per_byte: int
    block: int
    scale_dtype: torch.dtype

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` elements."""
        return width // self.codes_per_byte + width // self.block

    def pack(self, x: Tensor) -> Tensor:
        """bf16 [..., D] -> uint8 [..., row_bytes(D)]."""
        codes, scales = self.quantize(x)
        return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), -1)

    def unpack(self, records: Tensor) -> Tensor:
        """uint8 [..., row_bytes(D)] -> bf16 [..., D]."""
        num_scales = records.shape[-1] * self.codes_per_byte // (self.block + self.codes_per_byte)
        codes, scales = records.split((records.shape[-1] - num_scales, num_scales), -1)
        if self.codes_per_byte == 1:
            values = codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
        else:
            values = _PAIRS[codes.to(torch.int64)].flatten(-2)
        multipliers = scales.contiguous().view(self.scale_dtype).to(torch.float32)
        grouped: Tensor = values.unflatten(-1, (num_scales, self.block)) * multipliers[..., None]
        return grouped.flatten(-2).to(torch.bfloat16)

    def unpack_rows(self, records: Tensor, index: Tensor) -> Tensor:
        """uint8 [R, row_bytes(D)], int64 [N] -> bf16 [N, D]: those rows."""
        return self.unpack(records[index])

    def unpack_joined(self, pages: Tensor, index: Tensor, records: Tensor) -> Tensor:
        """uint8 rows `index` int64 [N] of pages [R, bytes], then records [T, bytes] -> bf16 [N + T, D]."""
        return torch.cat((self.unpack_rows(pages, index), self.unpack(records)))

    def pick(
        self, records: Tensor, picks: Tensor, slots: Tensor, blocks: Tensor, per_block: int
    ) -> tuple[Tensor, Tensor]:
        """Rows bf16 [R, D] that `picks` name, each once, and the index int64 [T, L] into them, -1 absent.

        picks int64 [T, L] are numbers within the slot of each row, slots int64 [T]; number n of slot s is row
        n % per_block of block blocks[s, n // per_block], int32 [S, B].
        """
        numbers = picks.clamp_min(0)
        found = blocks[slots[:, None], numbers // per_block].to(torch.int64)
        rows = torch.where(picks < 0, -1, found * per_block + numbers % per_block)
        used, places = torch.unique(rows, return_inverse=True)
        absent = int((used < 0).sum())  # 1 when any place is empty: -1 sorts first
        return self.unpack(records[used[absent:]]), places - absent


WINDOW = RecordFormat(quantize_fp8, 1, 32, torch.float8_e8m0fnu)
"""Window rows: FP8 E4M3 in groups of 32 with E8M0 scales, 528 bytes for 512 elements."""

ENTRY = RecordFormat(quantize_fp4_e4m3, 2, 16, torch.float8_e4m3fn)
"""Compressed entries: FP4 E2M1 in groups of 16 with E4M3 scales, 288 bytes for 512 elements."""

INDEX_KEY = RecordFormat(quantize_fp4_e8m0, 2, 32, torch.float8_e8m0fnu)
"""Index keys: FP4 E2M1 in groups of 32 with E8M0 scales, 68 bytes for 128 elements."""


__all__ = ["ENTRY", "INDEX_KEY", "WINDOW", "RecordFormat"]
