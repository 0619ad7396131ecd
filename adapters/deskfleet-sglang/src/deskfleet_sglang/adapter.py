"""One process's adapter: the hooks, the rows they read, and the proof that SGLang uses them.

Nothing is opened before SGLang makes its first table. Until the proof, which comes after the model is loaded, every
lookup refuses. What the hooks raise ends the scheduler, and with it the server.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deskfleet_engram.errors import EngramError, IdentityError
from deskfleet_engram.host import ContractError, HostRows, HostTable, log_receipt, write_receipt
from deskfleet_engram.host_metrics import RankCounters
from deskfleet_engram.host_prefetch import Prefetcher
from deskfleet_engram.host_residency import MappedPages, Trimmer
from deskfleet_engram.host_split import SplitFile, open_split
from deskfleet_engram.manifest import read_manifest
from deskfleet_sglang import __version__
from deskfleet_sglang.contract import SCHEDULER_MODULE, Hook, check_applied, is_here
from deskfleet_sglang.lookup import Choice, Lookup, choose, make_lookup
from deskfleet_sglang.prefetch import hashed
from deskfleet_sglang.settings import Settings
from deskfleet_sglang.table import DiskTable

_logger = logging.getLogger(__name__)

_ENGRAM = "sglang.srt.layers.engram"
_MANAGER = "sglang.srt.model_executor.model_runner_components.ngram_embedding_manager.NgramEmbeddingManager"

COMPARED_ROWS = 64
"""Rows of every tensor that the loader brings which are compared with the pack's."""

COUNTERS_INTERVAL_S = 5.0


def columns_of(num_columns: int, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the columns that SGLang gives to a rank. Raises ContractError where it would cut through one."""
    if num_columns % world_size:
        raise ContractError(
            f"{num_columns} Engram columns cannot be shared among {world_size} ranks: SGLang would cut through one",
            hint="take 1, 2, 3, 4, 6 or 8 ranks",
        )
    each = num_columns // world_size
    return tuple(range(rank * each, (rank + 1) * each))


class Adapter:
    """See the module. `release` and `digests` are what the contract found."""

    def __init__(self, settings: Settings, release: str, digests: Mapping[str, str]) -> None:
        self._settings = settings
        self._release = release
        self._digests = dict(digests)
        self._rows: HostRows | None = None
        self._choice: Choice | None = None
        self._lookups: dict[int, Lookup] = {}
        self._prefetcher: Prefetcher | None = None
        self._counters: RankCounters | None = None
        self._pages: dict[int, MappedPages] = {}
        self._is_proven = False
        self._compared: dict[str, int] = {}
        table = type("DiskTable", (DiskTable,), {"opener": self, "__module__": __name__})
        hooks = [
            Hook(f"{_ENGRAM}._HostTable", table, "REPLACE"),
            Hook(f"{_ENGRAM}.EngramEmbedding._init_host_table", self.hide_table, "AFTER"),
            Hook(f"{_ENGRAM}.EngramEmbedding._load_rows", self.load_rows, "AROUND"),
            Hook(f"{_ENGRAM}.EngramEmbedding._owned_rows", self.owned_rows, "AROUND"),
            Hook(f"{_MANAGER}.from_model", self.prove, "AFTER"),
            Hook(f"{_MANAGER}.prepare_for_forward", self.prepare, "AROUND"),
            Hook(f"{SCHEDULER_MODULE}.Scheduler.process_batch_result", self.before_answers, "BEFORE"),
        ]
        self.hooks = tuple(hook for hook in hooks if is_here(hook.target))
        self._table_class: type[DiskTable] = table

    # --- tables -------------------------------------------------------------------------------------------

    def open_table(self, layer: int, rank: int, world_size: int) -> HostTable:
        """Return a layer's rows; the first call opens all layers. Raises EngramError."""
        rows = self._rows
        if rows is None:
            rows = self._open(rank, world_size)
        if (rows.rank, rows.world_size) != (rank, world_size):
            raise ContractError(
                f"rank {rank} of {world_size} asks for rows, but this process opened those of rank {rows.rank} of "
                f"{rows.world_size}"
            )
        if layer not in rows.tables:
            raise ContractError(f"SGLang makes a table for layer {layer}; the pack has {sorted(rows.tables)}")
        return rows.tables[layer]

    def map_table(self, table: HostTable) -> SplitFile | None:
        """Return the split file, if that is the store in use. Raises EngramError."""
        rows, choice = self._opened()
        if choice.store != "mapped":
            return None
        split = open_split(table, rows.manifest.identity.sha256.hex(), self._settings.split_dir)
        if not self._pages:
            Trimmer(lambda: list(self._pages.values())).start()
        self._pages[table.layer] = MappedPages(split, table.head_dim, table.num_scales)
        return split

    def _open(self, rank: int, world_size: int) -> HostRows:
        settings = self._settings
        checkpoint = importlib.import_module(_ENGRAM).get_model().model_path
        num_columns = read_manifest(settings.pack_dir).identity.geometry.spec.num_columns
        rows = HostRows.open(
            settings.pack_dir,
            Path(checkpoint),
            rank=rank,
            world_size=world_size,
            columns=columns_of(num_columns, rank, world_size),
        )
        self._choice = choose(settings, rows)
        self._lookups = {layer: make_lookup(self._choice, table) for layer, table in rows.tables.items()}
        self._prefetcher = Prefetcher(rows, self._pages)
        self._counters = RankCounters(rows, "sglang", settings.receipts_dir)
        self._rows = rows
        return rows

    def _opened(self) -> tuple[HostRows, Choice]:
        if self._rows is None or self._choice is None:
            raise ContractError("SGLang made no table for Engram, so no rows are open")
        return self._rows, self._choice

    # --- hooks --------------------------------------------------------------------------------------------

    def hide_table(self, result: Any, embedding: Any, *others: Any, **named: Any) -> None:
        """Leave the table out of the model's state: whoever fills or compares all of it would touch the rows."""
        embedding.register_state_dict_post_hook(_leave_table_out)

    def load_rows(self, original: Callable[..., Any], embedding: Any, parameter: Any, loaded: Any) -> None:
        """Instead of copying a table: compare some of its rows with the pack's. Raises IdentityError."""
        table = self._table_of(embedding)
        num_rows, width = int(loaded.shape[0]), int(loaded.shape[1])
        if num_rows < table.end_row or width not in (table.head_dim, table.num_scales):
            raise IdentityError(
                f"layer {table.layer}: the checkpoint has a table of {num_rows} rows of {width}, the pack rows to "
                f"{table.end_row} of {table.head_dim} codes and {table.num_scales} scales"
            )
        torch = importlib.import_module("torch")
        ids = np.linspace(table.first_row, table.end_row - 1, COMPARED_ROWS, dtype=np.int64)
        theirs = loaded.view(torch.uint8)[torch.from_numpy(ids)].cpu().numpy()
        rows = table.rows(ids)
        is_codes = width == table.head_dim
        ours = rows[:, : table.head_dim] if is_codes else rows[:, table.head_dim :]
        differs = np.flatnonzero((theirs != ours).any(axis=1))
        if differs.size:
            raise IdentityError(
                f"layer {table.layer}: row {ids[differs[0]]} of the checkpoint is not the pack's; "
                f"{self._settings.pack_dir} is of another checkpoint",
                hint="pack this checkpoint",
            )
        self._compared[f"{table.layer} {'codes' if is_codes else 'scales'}"] = int(ids.size)

    def owned_rows(self, original: Callable[..., Any], embedding: Any, indices: Any) -> Any:
        """Rows of this rank from disk, zeros for other ranks'. Raises RowError, ContractError before the proof."""
        if not self._is_proven:
            raise ContractError("Engram rows are asked for before it was shown that they come from disk")
        return self._lookups[self._table_of(embedding).layer].owned_rows(original, embedding, indices)

    def prove(self, result: Any, owner: Any, *, model: Any, **others: Any) -> None:
        """After loading: show that every table of the model is this adapter's, and write the receipt.

        A model without a hasher, such as a draft, has none. Raises ContractError or IdentityError.
        """
        if result.engram_hasher is None:
            return
        check_applied(self.hooks)
        rows, _ = self._opened()
        embedding_class = importlib.import_module(_ENGRAM).EngramEmbedding
        found = [module for module in model.modules() if isinstance(module, embedding_class)]
        layers = sorted(self._table_of(embedding).layer for embedding in found)
        if layers != sorted(rows.tables):
            raise ContractError(
                f"the model has Engram tables of layers {layers}, the pack of {sorted(rows.tables)}"
            )
        for embedding in found:
            table = self._table_of(embedding)
            theirs = (embedding.row_start, embedding.row_start + embedding.rows)
            if theirs != (table.first_row, table.end_row):
                raise ContractError(
                    f"layer {table.layer}: SGLang has rows {theirs[0]} to {theirs[1] - 1} on this rank, the adapter "
                    f"{table.first_row} to {table.end_row - 1}"
                )
        check_hashing(result.engram_hasher, rows)
        self._write_receipt()
        if not self._is_proven and self._counters is not None:
            _publish_always(self._counters)
        self._is_proven = True
        _logger.info("%s", rows.log_line())

    def prepare(self, original: Callable[..., Any], manager: Any, batch: Any, **others: Any) -> Any:
        """Before a forward pass: raise what failed in silence, then put a prompt's rows on their way."""
        prepared = original(manager, batch, **others)
        if manager.engram_hasher is None or batch is None or self._prefetcher is None:
            return prepared
        self._check_lookups()
        ids = hashed(manager.engram_hasher, batch)
        if ids is not None:
            self._prefetcher.ask(ids)
        return prepared

    def before_answers(self, scheduler: Any, batch: Any, result: Any) -> None:
        """Before a step's tokens are looked at, and sent: wait for the step, as SGLang is about to, and check."""
        done = getattr(result, "copy_done", None)
        if done is not None:
            done.synchronize()
        self._check_lookups()

    def _check_lookups(self) -> None:
        for lookup in self._lookups.values():
            lookup.check()

    def _table_of(self, embedding: Any) -> HostTable:
        table = embedding.host_table
        if not isinstance(table, self._table_class):
            raise ContractError(
                f"an Engram table of SGLang is a {type(table).__name__} and holds its rows in memory"
            )
        return table.rows

    # --- receipts -----------------------------------------------------------------------------------------

    def _write_receipt(self) -> None:
        rows, choice = self._opened()
        document = {
            "engine": "sglang",
            "engine_version": self._release,
            "plugin_version": __version__,
            "replaced": [hook.target for hook in self.hooks],
            "source_sha256": self._digests,
            "warnings": [],
            "store": choice.store,
            "store_reason": choice.reason,
            "layers": sorted(rows.tables),
            "compared_rows": self._compared,
            **rows.receipt(),
            **({"is_checked": False} if choice.store == "mapped" else {}),
        }
        _logger.info("deskfleet-engram: %s store, because %s; %s", choice.store, choice.reason, rows.proof)
        _logger.info("%s", log_receipt(document))
        if self._settings.receipts_dir is not None:
            write_receipt(self._settings.receipts_dir, f"sglang-rank{rows.rank}-receipt.json", document)


def _publish_always(counters: RankCounters) -> threading.Thread:
    """Publish now, and every few seconds by a thread, also while nothing is served: what grows old counts as ended."""

    def publish() -> None:
        try:
            counters.publish()
        except EngramError as error:  # a disk that is full must not end a server
            _logger.warning("deskfleet-engram: %s", error)

    def run() -> None:
        while True:
            time.sleep(COUNTERS_INTERVAL_S)
            publish()

    publish()
    thread = threading.Thread(target=run, name="deskfleet-engram-counters", daemon=True)
    thread.start()
    return thread


def _leave_table_out(embedding: Any, state: Any, prefix: str, metadata: Any) -> None:
    for name in ("weight", "scale"):
        state.pop(prefix + name, None)


def check_hashing(hasher: Any, rows: HostRows) -> None:
    """Raise IdentityError unless SGLang hashes to this pack's rows: primes, offsets, multipliers and token map."""
    identity = rows.manifest.identity
    geometry = identity.geometry
    for name in ("primes", "offsets", "multipliers"):
        theirs = getattr(hasher, name).cpu().numpy()
        ours = np.asarray(getattr(geometry, name))
        if theirs.size != ours.size or not np.array_equal(theirs.reshape(-1), ours.reshape(-1)):
            raise IdentityError(f"SGLang hashes with other {name} than the pack was made for")
    wanted = identity.document["digests"]["token_map"]
    found = hashlib.sha256(hasher.token_map.cpu().numpy().astype("<i4").tobytes()).hexdigest()
    if wanted is not None and found != wanted:
        raise IdentityError(
            f"SGLang's tokenizer makes token map {found[:16]}, the pack was made for {wanted[:16]}",
            hint="serve with the checkpoint's own tokenizer",
        )


__all__ = ["Adapter", "check_hashing", "columns_of"]
