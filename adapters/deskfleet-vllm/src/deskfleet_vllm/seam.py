"""The one place that touches vLLM: `Engram._create_embedding` returns a table that holds nothing.

What comes after, prefetch streams, events, gathers and graphs, stays stock. vLLM is imported by nothing here: the
replacement is made when the engine itself has imported the module, and asks for the configuration only when a model
builds its tables.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.metadata
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from deskfleet_engram.errors import IdentityError
from deskfleet_engram.host import ContractError, HostTable, check_sources, source_sha256
from deskfleet_vllm import release_0_33 as release
from deskfleet_vllm.config import Settings
from deskfleet_vllm.prompts import Hashing, Prompts, state_class
from deskfleet_vllm.rank import Engine, Rank, Share
from deskfleet_vllm.stores import Kernel, Place

_logger = logging.getLogger("vllm.deskfleet_engram")

_TABLE_WEIGHT = re.compile(r"(?:^|\.)engram\.embed\.(?:weight|scale)$")

_open: dict[tuple[Settings, Share], Rank] = {}
"""What this process has open: engines build a model more than once, rows are opened once."""


def install(*, asked: bool, allow_untested: bool) -> None:
    """Replace `Engram._create_embedding` now, or as soon as its module is imported. Does nothing the second time.

    Where this process is `asked` for rows from disk already, raise ContractError at once for a version that the
    plug-in was not made for.
    """
    if asked:
        release.check_version(_vllm_version(), allow_untested=allow_untested)
    module = sys.modules.get(release.MODULE)
    if module is not None:
        replace(module)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport:
    """Finds one module as Python would, and replaces in it once it has run. Steps aside afterwards."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != release.MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_replace(module: ModuleType) -> None:
            run(module)
            replace(module)

        loader.exec_module = run_and_replace
        return spec


def replace(engram: ModuleType) -> None:
    """Wrap `Engram._create_embedding` of vLLM's module; it stays stock for a model whose configuration has no key of
    ours. Does nothing the second time."""
    stock = engram.Engram._create_embedding
    if getattr(stock, "is_deskfleet", False):
        return

    @functools.wraps(stock)
    def create(layer: Any, layout: Any, layer_hash_index: int) -> Any:
        config = engram.get_current_vllm_config()
        settings = Settings.read(config.additional_config)
        if settings is None:
            return stock(layer, layout, layer_hash_index)
        return create_embedding(engram, config, settings, layout, layer_hash_index)

    create.is_deskfleet = True  # type: ignore[attr-defined]
    engram.Engram._create_embedding = create


def create_embedding(
    engram: ModuleType, config: Any, settings: Settings, layout: Any, layer_hash_index: int
) -> Any:
    """Return a stock embedding whose rows come from disk.

    Raises ContractError, IdentityError or MissingRowsError, each with one sentence, and what opening raises.
    """
    engine = check_engine(engram, settings)
    offload = config.engram_config
    if offload is None or not offload.cpu_offload or offload.dp_shared_memory:
        raise ContractError(
            f"rows from disk need cpu_offload on and dp_shared_memory off, but the engine has {offload}",
            hint="give --engram-config '{\"cpu_offload\": true}'",
        )
    embedding = embedding_class(engram)(
        layout.num_embeddings[layer_hash_index],
        layout.head_dim,
        tuple(size for order in layout.primes[layer_hash_index] for size in order),
        cpu_offload=True,
    )
    if embedding.weight.is_meta:
        return embedding
    if embedding.dp_size != 1:
        raise ContractError(
            f"rows from disk are not shared over data-parallel replicas ({embedding.dp_size})"
        )
    rank = _rank(engram, config, settings, engine, embedding)
    table = rank.table(layout.layer_ids[layer_hash_index])
    _check_same_rows(embedding, layout.primes[layer_hash_index], table, rank)
    _skip_tables_at_load()
    if settings.prefetch:
        _tell_of_prompts(engram, config, settings)
    if rank.store_name == "mapped":
        embedding.read_mapping(rank.split(table.layer), rank.device)
    else:
        place = Place(
            embedding.head_start,
            embedding.part_n_hash_cols,
            embedding.n_hash_cols,
            config.scheduler_config.max_num_batched_tokens,
            embedding._num_sms,
        )
        kernel = Kernel(engram._engram_lookup_kernel, engram.get_accelerator_view_from_cpu_tensor)
        embedding.store = rank.store(table.layer, place, kernel)
    return embedding


def check_engine(engram: ModuleType, settings: Settings) -> Engine:
    """Compare version and source with what the plug-in was made for. Raises ContractError."""
    found = _vllm_version()
    warnings = [release.check_version(found, allow_untested=settings.allow_untested)]
    sources = release.sources(engram)
    try:
        digests = check_sources(sources, release.DIGESTS, engine=f"vLLM {found}")
    except ContractError as error:
        if not settings.allow_untested:
            raise
        warnings.append(error.message)
        digests = {name: source_sha256(target) for name, target in sources.items()}
    kept = tuple(warning for warning in warnings if warning is not None)
    for warning in kept:
        _logger.warning("deskfleet-engram: let through by allow_untested: %s", warning)
    replaced = (*release.REPLACED, *([release.REPLACED_FOR_PROMPTS] if settings.prefetch else []))
    return Engine(found, replaced, digests, kept)


class _Placeholder(torch.nn.Parameter):
    """A table's parameter: the shape of the rank's rows over the memory of one. Filling it with dummy values, which
    vLLM does to weights that are not loaded, must not write through that shape."""

    def fill_(self, value: Any) -> _Placeholder:
        return self


@functools.cache
def embedding_class(engram: ModuleType) -> type[Any]:
    """Return the stock embedding's child that has no table."""

    class DiskEngramEmbedding(engram.ParallelEngramEmbedding):  # type: ignore[name-defined,misc]
        _weight_loader = staticmethod(_load_nothing)
        store: Any = None

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if self.weight.is_meta:
                return
            for name in ("weight", "weight_scale_inv"):
                stock = getattr(self, name)
                held = _Placeholder(stock.data, requires_grad=False)
                held.__dict__.update(stock.__dict__)
                setattr(self, name, held)

        def _allocate_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
            if torch.get_default_device().type == "meta":
                return super()._allocate_weights()  # type: ignore[no-any-return]
            num_rows, num_scales = self.part_num_embeddings, self.dim // self.block_size
            return (
                torch.zeros(1, self.dim, dtype=torch.uint8, device="cpu")
                .view(torch.float8_e4m3fn)
                .expand(num_rows, -1),
                torch.zeros(1, num_scales, dtype=torch.uint8, device="cpu").expand(num_rows, -1),
            )

        def _storage(self) -> tuple[torch.Tensor, torch.Tensor]:
            # Stock lookup hands these to its kernel, which follows `peer_ptrs` instead.
            return self.weight.data, self.weight_scale_inv.data

        def read_mapping(self, split: Any, device: torch.device) -> None:
            self._split = split
            pointers = torch.tensor([split.address], dtype=torch.int64, device=device)
            self.register_buffer("peer_ptrs", pointers, persistent=False)
            self.peer_rows = split.num_rows

        def lookup(self, indices: torch.Tensor, out: torch.Tensor, background: bool = False) -> None:
            if self.store is not None:
                self.store.lookup(indices, out, background)
            elif self.peer_rows:
                super().lookup(indices, out, background)
            else:
                raise ContractError("a lookup in a table that was built without rows")

    return DiskEngramEmbedding


def _load_nothing(param: Any, loaded: Any, *rest: Any) -> None:
    """Rows come from disk; the checkpoint's tensor is not touched, so lazily mapped files are not read."""


def _rank(engram: ModuleType, config: Any, settings: Settings, engine: Engine, embedding: Any) -> Rank:
    first = embedding.head_start
    last = min(first + embedding.part_n_hash_cols, embedding.n_hash_cols)
    share = Share(engram.get_tensor_model_parallel_rank(), embedding.tp_size, tuple(range(first, last)))
    key = (settings, share)
    if key not in _open:
        _open[key] = Rank(
            settings,
            share,
            engine,
            checkpoint=settings.checkpoint or _model_dir(config),
            receipts=settings.receipts_dir(),
            device=_device(),
        )
    return _open[key]


def _check_same_rows(embedding: Any, primes: Any, table: HostTable, rank: Rank) -> None:
    """Raise IdentityError unless engine and pack agree on this rank's rows of the layer."""
    geometry = rank.rows.manifest.identity.geometry
    spec = geometry.spec
    position = spec.layer_ids.index(table.layer)
    pairs = (
        ("rows", embedding.num_embeddings, spec.num_embeddings[position]),
        ("values a row", embedding.dim, table.head_dim),
        ("scale blocks", embedding.dim // embedding.block_size, table.num_scales),
        ("first row", embedding.vocab_start_idx, table.first_row),
        ("last row", embedding.vocab_end_idx, table.end_row),
        ("columns", embedding.n_hash_cols, spec.num_columns),
        ("column sizes", [list(order) for order in primes], geometry.primes[position].tolist()),
    )
    for name, engines, packs in pairs:
        if engines != packs:
            raise IdentityError(
                f"layer {table.layer}, rank {rank.share.rank} of {rank.share.world_size}: the engine's {name} is "
                f"{engines}, the pack's {packs}"
            )


def _skip_tables_at_load() -> None:
    """Tell vLLM's loader that the tables are not wanted, so that shards of nothing else are left out."""
    package = sys.modules.get(release.MODEL_PACKAGE)
    model: Any = getattr(package, release.MODEL_CLASS, None)
    if model is None:  # built outside its model, as tests do
        return
    before: Callable[[Any, str], bool] | None = getattr(model, "is_unused_checkpoint_weight", None)
    if getattr(before, "is_deskfleet", False):
        return

    def is_unused(self: Any, name: str) -> bool:
        return bool(_TABLE_WEIGHT.search(name)) or (before is not None and before(self, name))

    is_unused.is_deskfleet = True  # type: ignore[attr-defined]
    model.is_unused_checkpoint_weight = is_unused


def _tell_of_prompts(engram: ModuleType, config: Any, settings: Settings) -> None:
    """Have the model name a child of its state that puts rows of prompts on their way."""
    model: Any = getattr(sys.modules.get(release.MODEL_PACKAGE), release.MODEL_CLASS, None)
    stock = getattr(model, "get_model_state_cls", None)
    if stock is None or getattr(stock, "is_deskfleet", False):
        return

    def prompts_of(built: Any) -> Prompts | None:
        found = [module for module in built.modules() if isinstance(module, engram.NgramHashState)]
        ranks = list(_open.values())
        if not found or not ranks:
            return None
        images = importlib.import_module(release.IMAGE_MODULE)
        how = Hashing(
            ranks[-1].rows.manifest.identity.geometry,
            found[0].token_map.cpu().numpy().astype("int64"),
            found[0].pad_id,
            getattr(images, release.IMAGE_TOKEN),
        )
        return Prompts(how, ranks[-1].prefetcher, config.scheduler_config.max_num_batched_tokens)

    def get_model_state_cls(self: Any) -> type[Any]:
        state = stock(self)
        if not settings.allow_untested:
            check_sources(
                release.state_sources(state), release.STATE_DIGESTS, engine=f"vLLM {_vllm_version()}"
            )
        return state_class(state, prompts_of)

    get_model_state_cls.is_deskfleet = True  # type: ignore[attr-defined]
    model.get_model_state_cls = get_model_state_cls


def _model_dir(config: Any) -> Path:
    path = Path(config.model_config.model)
    if not path.is_dir():
        raise ContractError(
            f"the model {path} is no directory, so the pack cannot be compared with it",
            hint='start the engine with a directory, or give "checkpoint"',
        )
    return path


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _vllm_version() -> str:
    module = sys.modules.get("vllm")
    found = getattr(module, "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError as error:
        raise ContractError("vLLM is not installed") from error


__all__ = ["check_engine", "create_embedding", "embedding_class", "install", "replace"]
