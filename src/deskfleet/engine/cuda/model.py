"""The model of one rank on a GPU: segments in, logits out. Owns how a step of requests becomes steps of the device.

Decoding runs steps of exactly as many rows as are asked for; prompts run in pieces of a few sizes, filled up with rows
of nobody, which leave nothing. A size's buffers share one memory (workspace.py), and its launches become a graph when
it is first used. Engram rows are asked of the disk when a step begins and lie on the host until a piece takes them;
logits go back to the host, where the sampler is. Knows nothing of requests' ends.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deskfleet.engine.batch import BatchBuilder, Segment
from deskfleet.engine.cuda.loader import ModelWeights, load_model
from deskfleet.engine.cuda.pages import DevicePages
from deskfleet.engine.cuda.step import DECODE_LOGITS, DecodeStep
from deskfleet.engine.cuda.support import check_model
from deskfleet.engine.cuda.workspace import Workspace
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.model.engram import EngramRows, Tables
from deskfleet.engine.tables import BlockTables, TableUpdate
from deskfleet.engine.weights import ShardReader
from deskfleet.model.cache_formats import CacheFormats
from deskfleet.model.device import decode_sizes, prefill_sizes
from deskfleet.model.limits import RunnerLimits
from deskfleet.model.packs import PackedTables


@dataclass(frozen=True, slots=True)
class _Rows:
    """T rows of a step, on the host.

    ids int64 [T] of this rank's embedding; positions, slots and entry_slots (nobody's where a row leaves no entry)
    int32 [T]; engram per layer the codes uint8 [T, width] and scales uint8 [T, width/32].
    """

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    entry_slots: np.ndarray
    engram: dict[int, tuple[Tensor, Tensor]]


class CudaModel:
    """One rank's share of the backbone, its pages, and the steps that run it."""

    def __init__(
        self,
        reader: ShardReader,
        comm: Communicator,
        limits: RunnerLimits,
        *,
        device: torch.device,
        max_step_tokens: int,
        graphs: bool = True,
        bit_ops: bool = False,
        pack: PackedTables | None = None,
    ) -> None:
        """Load this rank's share. `max_step_tokens`: of all requests together. `bit_ops`: for Triton's interpreter.

        Raises CheckpointError, and EngineError for a model that the kernels do not take.
        """
        config = reader.plan.config
        check_model(reader.plan)
        self.config = config
        self.device = device
        self.graphs = graphs and device.type == "cuda"
        self.num_layers_run = 0  # and stages, where they are launched one by one: grows while anything moves
        self.weights: ModelWeights = load_model(reader, device)
        self._vocabulary = reader.plan.vocab_range(reader.rank)
        self.tables = Tables.open(reader, pack)
        self._engrams = {
            layer.index: EngramRows(config, layer, reader, comm, self.tables)
            for layer in config.layers
            if layer.has_engram
        }
        formats = CacheFormats(config, limits.block_size, with_drafts=False)
        self.pages = DevicePages(formats, limits, max_step_tokens=max_step_tokens, device=device)
        self._bit_ops = bit_ops
        sizes = [(n, False) for n in decode_sizes(limits.max_num_seqs)]
        self._prefill_sizes = prefill_sizes(max_step_tokens, limits.max_model_len)
        sizes += [(n, True) for n in self._prefill_sizes]
        self._most_short = max((n for n, long in sizes if not long), default=0)
        self._steps: dict[tuple[int, bool], DecodeStep] = {}
        self._launches: dict[tuple[int, bool], Callable[[], None]] = {}
        self._pool: Any = None  # memory that graphs share
        makers = [partial(self._make_step, n, long) for n, long in sizes]
        self.workspace = Workspace(makers, device)
        most = max(n for n, _ in sizes)
        pinned = device.type == "cuda"
        self._ids = torch.zeros(most, dtype=torch.int64, pin_memory=pinned)
        self._kept_at = torch.zeros(most, dtype=torch.int64, pin_memory=pinned)
        self._numbers = torch.zeros(3, most, dtype=torch.int32, pin_memory=pinned)
        self._logit_rows = torch.zeros(most, dtype=torch.int64, pin_memory=pinned)
        most_logits = max(min(most, DECODE_LOGITS), self._most_short)
        self._logits = torch.zeros(most_logits, self.weights.shape.vocabulary, pin_memory=pinned)

    @torch.inference_mode()
    def run(
        self,
        builder: BatchBuilder,
        tables: BlockTables,
        segments: Sequence[Segment],
        logit_rows: Sequence[int],
        updates: Sequence[TableUpdate],
    ) -> Tensor:
        """Run every layer over the rows of `segments`. Logits float32 [R, V_local] of `logit_rows`, on the host, for as
        long as nothing else is run.

        `tables` has taken over `updates` already. Raises EngineError when the disk fails.
        """
        rows = self._rows(builder, segments)
        self.pages.prepare(tables, updates, segments)
        num_rows, wanted = len(rows.ids), np.asarray(logit_rows, dtype=np.int64)
        if num_rows <= self._most_short and all(self._is_short(segment) for segment in segments):
            step = self._run_piece(rows, 0, num_rows, num_rows, long=False)
            all_logits = self._fetched(step, num_rows)
            return all_logits if np.array_equal(wanted, np.arange(num_rows)) else all_logits[wanted]
        logits = torch.empty(len(wanted), self.weights.shape.vocabulary)
        most = self._prefill_sizes[-1]
        for start in range(0, num_rows, most):
            stop = min(start + most, num_rows)
            size = next(n for n in self._prefill_sizes if n >= stop - start)
            step = self._run_piece(rows, start, stop, size, long=True)
            inside = np.flatnonzero((wanted >= start) & (wanted < stop))
            for first in range(0, len(inside), step.num_logits):
                some = inside[first : first + step.num_logits]
                self._run_head(step, wanted[some] - start)
                logits[torch.from_numpy(some)] = self._fetched(step, len(some))
        return logits

    def close(self) -> None:
        """Close the Engram files."""
        self.tables.close()

    @property
    def graph_sizes(self) -> list[int]:
        """Rows of the steps that have become graphs."""
        return sorted(n for n, _ in self._launches) if self.graphs else []

    def _is_short(self, segment: Segment) -> bool:
        """Whether its rows neither overwrite each other's pooled inputs nor are there for their windows alone."""
        return segment.num_tokens < self.pages.pages.num_open and segment.num_replayed == 0

    def _rows(self, builder: BatchBuilder, segments: Sequence[Segment]) -> _Rows:
        engram_ids = builder.engram_ids(segments)
        requests = {layer: engram.request(engram_ids) for layer, engram in self._engrams.items()}
        ids = np.concatenate([segment.token_ids for segment in segments])
        held = self._vocabulary
        if len(held) < self.config.vocab_size:  # of a token of another rank, the row of zeros behind all
            here = (ids >= held.start) & (ids < held.stop)
            ids = np.where(here, ids - held.start, self.weights.shape.vocabulary)
        slots = np.concatenate([np.full(s.num_tokens, s.slot, np.int32) for s in segments])
        entry_slots = slots.copy()
        start = 0
        for segment in segments:
            entry_slots[start : start + segment.num_replayed] = self.pages.nobody
            start += segment.num_tokens
        positions = np.concatenate(
            [np.arange(s.start, s.start + s.num_tokens, dtype=np.int32) for s in segments]
        )
        engram = {}
        for layer, request in requests.items():
            codes, scales = self._engrams[layer].codes(request)
            engram[layer] = codes.flatten(1), scales.flatten(1)
        return _Rows(ids, positions, slots, entry_slots, engram)

    def _run_piece(self, rows: _Rows, start: int, stop: int, size: int, *, long: bool) -> DecodeStep:
        """Run rows start..stop-1 in a step of `size` rows; what is missing is nobody's. The step has ended."""
        step, launch = self._step(size, long)
        self._fill(step, rows, start, stop)
        launch()
        self._wait()
        self.num_layers_run += self.config.num_hidden_layers
        return step

    def _run_head(self, step: DecodeStep, rows: np.ndarray) -> None:
        """Logits of the step's `rows` int64 [R], R at most `num_logits`, in the first places."""
        places = self._logit_rows.numpy()
        places[: len(rows)] = rows
        places[len(rows) : step.num_logits] = 0  # what a larger step left there may not be a row of this one
        step.logit_rows.copy_(self._logit_rows[: step.num_logits], non_blocking=True)
        step.run_head()

    def _fetched(self, step: DecodeStep, count: int) -> Tensor:
        """The step's first `count` rows of logits in the host's buffer."""
        self._logits[:count].copy_(step.vocabulary_logits[:count], non_blocking=True)
        self._wait()
        return self._logits[:count]

    def _fill(self, step: DecodeStep, rows: _Rows | None, start: int, stop: int) -> None:
        """Put rows start..stop-1 into the step's inputs; without `rows`, nobody's."""
        count, size = stop - start, step.num_rows
        numbers, nobody = self._numbers.numpy(), self.pages.nobody
        ids, kept_at = self._ids.numpy(), self._kept_at.numpy()
        ids[count:size] = 0
        numbers[0, count:size] = 0
        numbers[1:, count:size] = nobody
        if rows is not None:
            part = slice(start, stop)
            ids[:count] = rows.ids[part]
            for row, values in enumerate((rows.positions, rows.slots, rows.entry_slots)):
                numbers[row, :count] = values[part]
            for layer, (codes, scales) in rows.engram.items():
                host_codes, host_scales = step.host_rows[layer]
                host_codes[:count] = codes[part]
                host_scales[:count, : scales.shape[1]] = scales[part]
        step.ids.copy_(self._ids[:size], non_blocking=True)
        step.positions.copy_(self._numbers[0, :size], non_blocking=True)
        step.slots.copy_(self._numbers[1, :size], non_blocking=True)
        if step.long:
            step.entry_slots.copy_(self._numbers[2, :size], non_blocking=True)
            kept_at[:size] = self._kept_places(numbers[0, :size], numbers[1, :size])
            step.kept_at.copy_(self._kept_at[:size], non_blocking=True)

    def _kept_places(self, positions: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Where each row's pooled inputs go: those of a request's last rows to their place, the others to nobody's."""
        num_open, nobody = self.pages.pages.num_open, self.pages.nobody
        ahead = np.arange(len(positions)) + num_open
        inside = np.minimum(ahead, len(positions) - 1)
        again = (ahead < len(positions)) & (slots[inside] == slots)
        owner = np.where(again, nobody, slots).astype(np.int64)
        places: np.ndarray = owner * num_open + positions % num_open
        return places

    def _step(self, size: int, long: bool) -> tuple[DecodeStep, Callable[[], None]]:
        """The step of that size and its launch, made at first use."""
        key = (size, long)
        if key not in self._steps:
            with self.workspace.in_use():
                self._steps[key] = self._make_step(size, long, self.device)
            step = self._steps[key]
            launch = partial(step.run_layers if long else step.run, self._moved)
            self._launches[key] = self._captured(step, launch) if self.graphs else launch
        return self._steps[key], self._launches[key]

    def _make_step(self, size: int, long: bool, device: torch.device | str) -> DecodeStep:
        w = self.weights
        return DecodeStep(
            w.shape, w.layers, w.embedding, w.head, w.norm, self.pages.pages, num_rows=size, device=device,
            bit_ops=self._bit_ops, long=long,
        )  # fmt: skip

    def _captured(self, step: DecodeStep, launch: Callable[[], None]) -> Callable[[], None]:
        """A graph of `launch`, after a run of nobody's rows that compiles every kernel."""
        self._fill(step, None, 0, 0)
        launch()
        if step.long:
            self._run_head(step, np.zeros(0, np.int64))
        torch.cuda.synchronize()
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            launch()
        return graph.replay

    def _moved(self, stage: str) -> None:
        """A stage is launched; at first use each is compiled for seconds, which must not look like standing still."""
        self.num_layers_run += 1

    def _wait(self) -> None:
        """Return when the device is done: inputs may change again."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


__all__ = ["CudaModel"]
