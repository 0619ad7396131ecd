"""Who computes a rank's passes, by device: one table. Owns what a pass is made of there; knows nothing of lockstep.

cpu          the model of engine/model over the operators of engine/ops, all of it
cuda         the kernels of engine/cuda; Engram rows, grammars and sampling that has a state stay on the host
interpreter  the same kernels in Triton's interpreter, for tests where there is no GPU; no user can ask for it
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from deskfleet.engine import ops
from deskfleet.engine.batch import BatchBuilder, Segment
from deskfleet.engine.cache import PagedCache
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.messages import DraftRequest
from deskfleet.engine.model.draft import Anchor, DraftModel, Proposal
from deskfleet.engine.model.engram import Tables
from deskfleet.engine.model.v41 import V41Model
from deskfleet.engine.model.vision import VisionTower
from deskfleet.engine.speculate import Coins, draft_choice
from deskfleet.engine.tables import BlockTables, TableUpdate
from deskfleet.engine.wanted import Choice, Outcome, outcome_of
from deskfleet.engine.weights import ShardReader
from deskfleet.errors import EngineError
from deskfleet.model.cache_formats import CacheFormats
from deskfleet.model.config import ModelConfig
from deskfleet.model.device import DEFAULT_MAX_NUM_BATCHED_TOKENS, exact_products
from deskfleet.model.limits import OperatorChoice, RunnerLimits
from deskfleet.model.packs import PackedTables

if TYPE_CHECKING:  # needs Triton, which not every torch brings
    from deskfleet.engine.cuda.collectives import DeviceGroup
    from deskfleet.engine.cuda.model import CudaModel

_LEAST_CAPABILITY = (8, 9)  # FP8 in the tensor cores


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """How a device is used. `max_step_tokens`: of all requests of one step; `graphs`: captured, not launched one by
    one; `rendezvous`: where ranks meet for their devices if they have not met through torch (RankSpec); `exact`: how
    products of steps that decode are summed (packing.Fp4Tiles), None: by the model's size."""

    max_step_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS["cuda"]
    graphs: bool = True
    rendezvous: str | None = None
    exact: bool | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """What a backend is made of. `dcp` are those ranks of `comm` that share out the global cache."""

    reader: ShardReader
    comm: Communicator
    dcp: Communicator
    limits: RunnerLimits
    tables: BlockTables
    builder: BatchBuilder
    pack: PackedTables | None
    with_drafts: bool
    device: DeviceOptions


class Backend(Protocol):
    """A loaded rank on one kind of device."""

    vision: VisionTower | None

    @property
    def device_exchange(self) -> str | None:
        """How the devices of several ranks exchange; None where only the ranks themselves do."""

    @property
    def engram_tables(self) -> Tables: ...

    @property
    def num_layers_run(self) -> int:
        """By all passes so far, and the one under way."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pages."""

    def run(
        self,
        segments: Sequence[Segment],
        logit_rows: Sequence[int],
        choices: Sequence[Choice],
        image_rows: Tensor | None,
        updates: Sequence[TableUpdate],
    ) -> Outcome:
        """One pass, after `updates`, which the tables have taken over. All ranks run the same rows in the same order,
        those of `choices` last; on ranks other than 0 nobody reads the outcome."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """A block of drafts after the last pass of each of the requests, on the host; logits may be empty, [B, n, 0],
        where none of them samples. Raises EngineError where no drafts are served."""

    def close(self) -> None:
        """Close files."""


class CpuBackend:
    """Every operator on the CPU."""

    def __init__(self, parts: Parts) -> None:
        reader, limits = parts.reader, parts.limits
        config = reader.plan.config
        self._parts = parts
        self.model = V41Model(reader, parts.comm, parts.dcp, parts.pack)
        self.drafts: DraftModel | None = None
        if parts.with_drafts:
            self.drafts = DraftModel(reader, parts.comm, self.model.vocabulary)
        # Only rank 0 encodes images: the others receive the rows, so that all continue from the same bits.
        self.vision: VisionTower | None = None
        if config.vision and parts.comm.rank == 0:
            self.vision = VisionTower(config.vision, reader)
        self.cache = PagedCache(
            CacheFormats(config, limits.block_size, with_drafts=parts.with_drafts),
            num_slots=limits.max_num_seqs,
            num_blocks=limits.num_blocks,
            num_window_blocks=limits.num_window_blocks,
            dcp_size=parts.dcp.size,
        )

    @property
    def device_exchange(self) -> str | None:
        return None

    @property
    def engram_tables(self) -> Tables:
        return self.model.tables

    @property
    def num_layers_run(self) -> int:
        return self.model.num_layers_run

    @property
    def cache_bytes(self) -> int:
        return self.cache.nbytes

    def run(
        self,
        segments: Sequence[Segment],
        logit_rows: Sequence[int],
        choices: Sequence[Choice],
        image_rows: Tensor | None,
        updates: Sequence[TableUpdate],
    ) -> Outcome:
        batch = self._parts.builder.build(segments, image_rows)
        output = self.model.forward(batch, self.cache)
        if self.drafts is not None:
            self.drafts.commit(output.taps, output.batch, self.cache)
        wanted = [*logit_rows, *(choice.row for choice in choices)]
        if not wanted:
            return outcome_of(torch.empty(0, self.model.config.vocab_size), ())
        rows = torch.tensor(wanted)
        if batch.tail is not None:
            rows = torch.searchsorted(batch.tail.rows, rows)  # every wanted row is one of them
        return outcome_of(self.model.logits(output.hidden[rows]), choices)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        if self.drafts is None:
            raise EngineError("this engine was started without drafts")
        anchors = [Anchor(r.slot, r.position, r.token_id, r.window_from) for r in requests]
        choose = partial(_choose_drafts, requests)
        return self.drafts.propose(anchors, self._parts.tables, self.cache, choose=choose)

    def close(self) -> None:
        self.model.close()


def _choose_drafts(requests: Sequence[DraftRequest], place: int, logits: Tensor) -> Tensor:
    """Draft token int64 [B] of block place `place` from logits float32 [B, V]."""
    if all(r.temperature == 0 for r in requests):
        return torch.from_numpy(logits.numpy().argmax(-1))
    rows = zip(requests, logits.numpy(), strict=True)
    return torch.tensor(
        [draft_choice(row, r.temperature, coins=Coins(r.seed), place=r.place, index=place) for r, row in rows]
    )


class CudaBackend:
    """The kernels of engine/cuda on `device`; whatever they do not do is refused before (model/device.py)."""

    def __init__(self, parts: Parts, device: torch.device, group: DeviceGroup, *, bit_ops: bool) -> None:
        """`group`: how the devices of the ranks exchange."""
        if parts.dcp.size > 1:
            raise EngineError("GPUs share out no global cache")
        from deskfleet.engine.cuda.model import CudaModel

        self._parts = parts
        self.vision: VisionTower | None = None  # on the host, as of a rank on the CPU
        if parts.reader.plan.config.vision and parts.comm.rank == 0:
            self.vision = VisionTower(parts.reader.plan.config.vision, parts.reader)
        self.model: CudaModel = CudaModel(
            parts.reader,
            parts.comm,
            parts.limits,
            device=device,
            max_step_tokens=parts.device.max_step_tokens,
            graphs=parts.device.graphs,
            bit_ops=bit_ops,
            exact=parts.device.exact,
            pack=parts.pack,
            with_drafts=parts.with_drafts,
            group=group,
        )

    @property
    def device_exchange(self) -> str | None:
        return None if self.model.group.is_alone else str(self.model.group)

    @property
    def engram_tables(self) -> Tables:
        return self.model.tables

    @property
    def num_layers_run(self) -> int:
        return self.model.num_layers_run

    @property
    def cache_bytes(self) -> int:
        return self.model.pages.nbytes

    def run(
        self,
        segments: Sequence[Segment],
        logit_rows: Sequence[int],
        choices: Sequence[Choice],
        image_rows: Tensor | None,
        updates: Sequence[TableUpdate],
    ) -> Outcome:
        return self.model.run(
            self._parts.builder, self._parts.tables, segments, logit_rows, updates, image_rows,
            choices=choices, is_read=self._parts.comm.rank == 0,
        )  # fmt: skip

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        return self.model.propose(requests)

    def close(self) -> None:
        self.model.close()


def _cuda(parts: Parts) -> CudaBackend:
    from deskfleet.engine.cuda import collectives

    open_device()
    device, group = collectives.meet(parts.comm, parts.device.rendezvous)
    open_device()  # which may be another one now
    return CudaBackend(parts, device, group, bit_ops=False)


def _interpreter(parts: Parts) -> CudaBackend:
    from deskfleet.engine.cuda import collectives

    group = collectives.DeviceGroup() if parts.comm.size == 1 else collectives.HostGroup(parts.comm)
    return CudaBackend(parts, torch.device("cpu"), group, bit_ops=True)


BACKENDS: Mapping[str, Callable[[Parts], Backend]] = {
    "cpu": CpuBackend,
    "cuda": _cuda,
    "interpreter": _interpreter,
}


def open_device() -> str:
    """Say which GPU there is and with what it is driven. Raises EngineError where there is none that will do."""
    if not torch.cuda.is_available():
        built = "has no CUDA in it" if torch.version.cuda is None else "finds no GPU"
        raise EngineError(
            f"device cuda: torch {torch.__version__} {built}",
            hint="install a CUDA build of torch on a machine with an NVIDIA GPU, or serve with --device cpu",
        )
    if importlib.util.find_spec("triton") is None:
        raise EngineError(
            "device cuda: Triton is not installed, which the kernels are written in",
            hint="CUDA builds of torch for Linux bring it; pip install triton, or serve with --device cpu",
        )
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if (properties.major, properties.minor) < _LEAST_CAPABILITY:
        raise EngineError(
            f"device cuda: {properties.name} has compute capability {properties.major}.{properties.minor}, "
            f"and the kernels need {_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]}",
            hint="serve with --device cpu",
        )
    import triton

    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"CUDA {torch.version.cuda}, Triton {triton.__version__}"
    )


def select(device: str, operators: OperatorChoice, config: ModelConfig) -> ops.Selection:
    """Choose who computes the model of `config` on `device`, for the whole process. Raises EngineError when it cannot
    be had."""
    if device != "cuda":
        return ops.select(operators)
    is_exact = exact_products(config.n_routed_experts, config.hidden_size, config.moe_intermediate_size)
    sums = (
        "products of steps that decode summed in float32"
        if is_exact
        else "experts of steps that decode summed by FP8 instructions, in some 13 bits"
    )
    detail = f"layers and head in kernels on {open_device()}; Engram rows and grammars on the host; {sums}"
    return ops.Selection("cuda", "triton", detail)


__all__ = [
    "BACKENDS",
    "Backend",
    "CpuBackend",
    "CudaBackend",
    "DeviceOptions",
    "Parts",
    "open_device",
    "select",
]
