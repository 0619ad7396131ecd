"""Three ways to answer SGLang's `EngramEmbedding._owned_rows`; all give the same bits, and zeros for others' rows.

`MappedLookup` lets SGLang's kernel read the file, `StagedLookup` reads and waits; the one that graphs capture is in
`callback`. `choose` says which, and why. Raises RowError when the disk does not give a row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from deskfleet_engram.host import ContractError, HostRows, HostTable
from deskfleet_engram.host_split import split_path
from deskfleet_engram.portable import NOT_MINE
from deskfleet_sglang import cuda
from deskfleet_sglang.callback import CallbackLookup
from deskfleet_sglang.settings import SPLIT_VARIABLE, STORE_VARIABLE, Settings, StoreName

FP8_BLOCK = 32
"""Values to a scale byte."""


class Lookup(Protocol):
    """Answers for one layer of one rank."""

    def owned_rows(self, original: Callable[..., Any], embedding: Any, indices: Any) -> Any:
        """Return bf16 [*indices.shape, dim] on the device of `indices`: rows of this rank, zeros for others'.

        `original` is SGLang's own, for `embedding`.
        """

    def check(self) -> None:
        """Raise RowError if a lookup since the last call has failed and could not say so."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The store in use, and why this one."""

    store: StoreName
    reason: str


def choose(settings: Settings, rows: HostRows) -> Choice:
    """Choose a store for this rank's device. Raises ContractError for one that cannot work here."""
    device = cuda.current_device()
    reads_files = device is not None and cuda.reads_host_page_tables(device)
    has_files = all(split_path(settings.split_dir, table).exists() for table in rows.tables.values())
    is_native = all(table.store.native is not None for table in rows.tables.values())
    if settings.store == "mapped" and not reads_files:
        raise ContractError(
            f"{STORE_VARIABLE} is mapped, but the device does not read memory through the host's page tables",
            hint="use callback, or leave it out",
        )
    if settings.store == "callback" and (device is None or not is_native):
        raise ContractError(
            f"{STORE_VARIABLE} is callback, but there is {'no CUDA device' if device is None else 'no native reader'}",
            hint="leave it out: staged works everywhere",
        )
    if settings.store != "auto":
        return Choice(settings.store, f"{STORE_VARIABLE} says so")
    if reads_files and has_files:
        return Choice("mapped", "the device reads the host's page tables, and split files are there")
    if device is not None and is_native:
        why = (
            f"no split files in {SPLIT_VARIABLE}" if reads_files else "the device does not read mapped files"
        )
        return Choice("callback", why)
    return Choice("staged", "no CUDA device" if device is None else "no native reader")


def make_lookup(choice: Choice, table: HostTable) -> Lookup:
    """Return the lookup of one layer."""
    if choice.store == "mapped":
        return MappedLookup()
    if choice.store == "callback":
        return CallbackLookup(table)
    return StagedLookup(table)


class MappedLookup:
    """The stock kernel over the mapped file. A read error is a fault of the device, which ends the process."""

    def owned_rows(self, original: Callable[..., Any], embedding: Any, indices: Any) -> Any:
        """See Lookup."""
        return original(embedding, indices)

    def check(self) -> None:
        """Nothing fails in silence here."""


class StagedLookup:
    """Reads at once and waits: right everywhere, and slow where the device has to wait for the host."""

    def __init__(self, table: HostTable) -> None:
        self._table = table

    def owned_rows(self, original: Callable[..., Any], embedding: Any, indices: Any) -> Any:
        """See Lookup. Raises ContractError while a graph is captured, which would repeat these rows for ever."""
        torch = importlib.import_module("torch")
        if indices.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ContractError(
                "the staged store cannot be captured in a CUDA graph",
                hint=f"set {STORE_VARIABLE} to callback, or leave it out",
            )
        ids = indices.detach().cpu().numpy()
        table = self._table
        own = table.own_ids(ids)
        codes = np.empty((*ids.shape, table.head_dim), np.uint8)
        scales = np.empty((*ids.shape, table.num_scales), np.uint8)
        table.store.gather(own, codes, scales)
        device = indices.device
        return dequantized(
            torch.from_numpy(codes).to(device),
            torch.from_numpy(scales).to(device),
            torch.from_numpy(own != NOT_MINE).to(device),
        )

    def check(self) -> None:
        """Every lookup raised what went wrong."""


def dequantized(codes: Any, scales: Any, is_own: Any) -> Any:
    """Return bf16 [..., D] of uint8 `codes` [..., D] and `scales` [..., D / 32], zeros where not `is_own` [...].

    The arithmetic is SGLang's: the product in float32, rounded once; scale byte 0 is 2**-127, 255 is NaN.
    """
    torch = importlib.import_module("torch")
    values = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, FP8_BLOCK))
    factors = scales.view(torch.float8_e8m0fnu).float().unsqueeze(-1)
    return (values * factors).flatten(-2).to(torch.bfloat16).masked_fill(~is_own.unsqueeze(-1), 0)


__all__ = ["Choice", "Lookup", "MappedLookup", "StagedLookup", "choose", "dequantized", "make_lookup"]
