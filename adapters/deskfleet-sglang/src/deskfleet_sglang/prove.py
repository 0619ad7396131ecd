"""Proof that the callback store works on this device: captured once in a CUDA graph, replayed with other ids each time.

Rows are compared with those that the reader gives without a device, bit by bit; `check_failures` looks rows up through
a reader that is made to fail. Run by `python -m deskfleet_sglang prove` where SGLang and a device are.

NOT verified on a device.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from deskfleet_engram.errors import RowError
from deskfleet_engram.host import ContractError, HostRows, HostTable
from deskfleet_sglang.callback import CallbackLookup

NUM_TOKENS = 6
"""A decode step of one request with five drafts."""


def prove(rows: HostRows, num_lookups: int) -> None:
    """Print a line per layer. Raises ContractError where a value differs."""
    if not torch.cuda.is_available():
        raise ContractError("there is no CUDA device here")
    random = np.random.default_rng(0)
    num_columns = rows.manifest.identity.geometry.spec.num_columns
    for table in rows.tables.values():
        lookup = CallbackLookup(table)
        indices = torch.full((NUM_TOKENS, num_columns), -1, dtype=torch.int64, device="cuda")
        graph, found = _captured(lookup, table, indices)
        took_s = []
        for index in range(num_lookups):
            ids = random.integers(table.first_row - 9, table.end_row + 9, tuple(indices.shape))
            indices.copy_(torch.from_numpy(ids))
            torch.cuda.synchronize()
            begin_s = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            took_s.append(time.perf_counter() - begin_s)
            lookup.check()
            if not np.array_equal(found.cpu().view(torch.uint16).numpy(), table.bf16(ids)):
                raise ContractError(f"layer {table.layer}, replay {index}: rows differ from the reader's")
        median_us, p99_us = np.percentile(took_s, [50, 99]) * 1e6
        print(
            f"layer {table.layer}: {num_lookups} replays equal; median {median_us:.0f} us, p99 {p99_us:.0f} us"
        )


def _captured(lookup: CallbackLookup, table: HostTable, indices: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    embedding = SimpleNamespace(
        dim=table.head_dim,
        new_rows=lambda ids: torch.empty(*ids.shape, table.head_dim, dtype=torch.bfloat16, device="cuda"),
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        lookup.owned_rows(_never, embedding, indices)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = lookup.owned_rows(_never, embedding, indices)
    return graph, found


def check_failures(broken: HostRows) -> None:
    """Look rows up through a reader whose every read fails: an error is reported, and nothing else stands in for a row.

    Raises ContractError otherwise. Rows that the process already had in memory may still be answered, rightly.
    """
    random = np.random.default_rng(1)
    for table in broken.tables.values():
        lookup = CallbackLookup(table)
        indices = torch.full((NUM_TOKENS, 1), -1, dtype=torch.int64, device="cuda")
        graph, found = _captured(lookup, table, indices)
        indices.copy_(torch.from_numpy(random.integers(table.first_row, table.end_row, tuple(indices.shape))))
        graph.replay()
        torch.cuda.synchronize()
        try:
            lookup.check()
        except RowError as error:
            if bool(found.isnan().all(dim=-1).any()):
                print(f"layer {table.layer}: a failed read is NaN, and reported: {error.message}")
                continue
        raise ContractError(
            f"layer {table.layer}: rows that could not be read were not reported, or were answered"
        )


def _never(*_: Any) -> Any:
    raise ContractError("SGLang's own lookup was asked")


__all__ = ["NUM_TOKENS", "check_failures", "prove"]
