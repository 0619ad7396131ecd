"""What one engine process has open: its columns, a store per layer, its receipt. Knows torch, but no vLLM."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from deskfleet_engram.errors import IdentityError
from deskfleet_engram.host import ContractError, HostRows, HostTable, log_receipt, write_receipt
from deskfleet_engram.host_metrics import RankCounters
from deskfleet_engram.host_prefetch import Prefetcher
from deskfleet_engram.host_residency import MappedPages, Trimmer
from deskfleet_engram.host_split import SplitFile, open_split, split_path
from deskfleet_vllm import cuda
from deskfleet_vllm.choice import Facts, choose
from deskfleet_vllm.config import Settings
from deskfleet_vllm.stores import CallbackStore, Kernel, Place, StagedStore, Store, Window
from deskfleet_vllm.watch import watch

_logger = logging.getLogger("vllm.deskfleet_engram")


@dataclass(frozen=True, slots=True)
class Share:
    """Which rank this is, and the columns that the engine gives it."""

    rank: int
    world_size: int
    columns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Engine:
    """What the receipt says of the engine: version, digests of the source that was compared, what was let through."""

    version: str
    replaced: tuple[str, ...]
    digests: Mapping[str, str]
    warnings: tuple[str, ...]


class Rank:
    """One rank's open rows. A process has one, however many models it builds."""

    def __init__(
        self,
        settings: Settings,
        share: Share,
        engine: Engine,
        *,
        checkpoint: Path,
        receipts: Path,
        device: torch.device,
    ) -> None:
        """Compare, open, choose a store and say so. Raises what `HostRows.open` and `choose` raise."""
        self.settings, self.share, self.engine = settings, share, engine
        self.device = device
        self.receipts = receipts
        self.rows = HostRows.open(
            settings.pack,
            checkpoint,
            rank=share.rank,
            world_size=share.world_size,
            columns=share.columns,
        )
        self._split_dir = settings.split or settings.pack / "split"
        self.store_name, self.store_reason = choose(settings.store, self._facts())
        self._stores: dict[int, Store] = {}
        self._splits: dict[int, SplitFile] = {}
        self._pages: dict[int, MappedPages] = {}
        self.prefetcher = Prefetcher(self.rows, self._pages)
        _logger.info("%s", self.rows.log_line())
        _logger.info(
            "deskfleet-engram: store %s (%s); reader %s; pack compared by %s",
            self.store_name,
            self.store_reason,
            next(iter(self.rows.tables.values())).store.report,
            self.rows.proof,
        )
        watch(lambda: list(self._stores.values()), RankCounters(self.rows, "vllm", receipts).publish)

    def table(self, layer: int) -> HostTable:
        """Return a layer's rows. Raises IdentityError when the pack has no such layer."""
        if layer not in self.rows.tables:
            raise IdentityError(
                f"the model has Engram rows in layer {layer}, the pack in {[*self.rows.tables]}"
            )
        return self.rows.tables[layer]

    def store(self, layer: int, place: Place, kernel: Kernel) -> Store:
        """Make the store of a layer. Raises ContractError where the store in use is `mapped`."""
        window = Window(self.table(layer), place, kernel, self.device)
        made: Store
        if self.store_name == "callback":
            made = CallbackStore(window)
        elif self.store_name == "staged":
            made = StagedStore(window)
        else:
            raise ContractError("rows that are mapped are read by the stock lookup")
        self._stores[layer] = made
        self.write_receipt()
        return made

    def split(self, layer: int) -> SplitFile:
        """Map a layer's rows for the stock kernel. Raises what `open_split` raises."""
        table = self.table(layer)
        split = open_split(table, self.rows.manifest.identity.sha256.hex(), self._split_dir)
        if not self._pages:
            Trimmer(lambda: list(self._pages.values())).start()
        self._splits[layer] = split
        self._pages[layer] = MappedPages(split, table.head_dim, table.num_scales)
        self.write_receipt()
        return split

    def write_receipt(self) -> None:
        """Write what was replaced and what answers. Raises ContractError when it cannot be written."""
        layers = sorted({*self._stores, *self._splits})
        document = {
            "engine": "vllm",
            "engine_version": self.engine.version,
            "plugin_version": _own_version(),
            "replaced": list(self.engine.replaced),
            "source_sha256": dict(self.engine.digests),
            "warnings": list(self.engine.warnings),
            "store": self.store_name,
            "store_reason": self.store_reason,
            "layers": layers,
            "table_bytes_in_memory": sum(
                window.codes.nbytes + window.scales.nbytes
                for window in (store.window for store in self._stores.values())
            ),
            **self.rows.receipt(),
            **({"is_checked": False} if self.store_name == "mapped" else {}),
        }
        write_receipt(self.receipts, f"vllm-rank{self.share.rank}-receipt.json", document)
        if layers == sorted(self.rows.tables):
            _logger.info("%s", log_receipt(document))

    def _facts(self) -> Facts:
        report = next(iter(self.rows.tables.values())).store.report
        is_cuda = self.device.type == "cuda"
        return Facts(
            is_cuda=is_cuda,
            uses_host_page_tables=is_cuda and cuda.uses_host_page_tables(self.device.index or 0),
            has_split=all(split_path(self._split_dir, table).exists() for table in self.rows.tables.values()),
            has_native_reader=report.backend == "native",
            native_reason=report.reason,
        )


def _own_version() -> str:
    try:
        return version("deskfleet-vllm")
    except PackageNotFoundError:
        return "uninstalled"


__all__ = ["Engine", "Rank", "Share"]
