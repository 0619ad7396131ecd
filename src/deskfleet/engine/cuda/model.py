"""The model of one rank on a GPU: segments in, tokens out. Owns how a step of requests becomes steps of the device.

Decoding runs steps of exactly as many rows as are asked for; prompts run in pieces of a few sizes, filled up with rows
of nobody, which leave nothing. A size's buffers share one memory (workspace.py), and its launches become a graph when
it is first used. Engram rows are asked of the disk when a step begins and lie on the host until a piece takes them.
Tokens are chosen where the logits are (sampling.py); to the host go logits of the rows that want them, and of those few
that are left to it. Drafts are made on the device from the anchor to the last of a block; their logits go to the host
where somebody samples. Knows nothing of requests' ends.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deskfleet.engine.batch import BatchBuilder, Segment
from deskfleet.engine.cuda.collectives import DeviceGroup
from deskfleet.engine.cuda.draft import DraftContext, DraftStep
from deskfleet.engine.cuda.loader import ModelWeights, RankShape, load_drafts, load_model
from deskfleet.engine.cuda.pages import DevicePages
from deskfleet.engine.cuda.prefill import LONE_ROWS, PrefillStep, lay_out, num_places
from deskfleet.engine.cuda.prefill_replay import EncoderStep, PrefillEncoderStep, ReplayStep
from deskfleet.engine.cuda.sampling import NUM_DRAW, draw_of, num_searches
from deskfleet.engine.cuda.step import DECODE_LOGITS, DecodeStep
from deskfleet.engine.cuda.support import check_model
from deskfleet.engine.cuda.synthetic import DraftWeights
from deskfleet.engine.cuda.workspace import Workspace
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.messages import DraftRequest
from deskfleet.engine.model.draft import Proposal
from deskfleet.engine.model.engram import EngramRows, Tables
from deskfleet.engine.sampler import draw_temperature
from deskfleet.engine.speculate import draft_coins
from deskfleet.engine.tables import NULL_BLOCK, BlockTables, TableUpdate
from deskfleet.engine.wanted import Choice, Outcome, choose
from deskfleet.engine.weights import ShardReader
from deskfleet.errors import EngineError
from deskfleet.model.cache_formats import CacheFormats
from deskfleet.model.device import (
    FILLED_ROWS,
    REPLAYED_ROWS,
    decode_sizes,
    draft_sizes,
    prefill_sizes,
    summed_rows,
)
from deskfleet.model.limits import RunnerLimits
from deskfleet.model.packs import PackedTables


@dataclass(frozen=True, slots=True)
class _Rows:
    """T rows of a step, on the host.

    ids int64 [T] of this rank's embedding; positions, slots and entry_slots (nobody's where a row leaves no entry)
    int32 [T]; engram per layer the codes uint8 [T, width] and scales uint8 [T, width/32]; text int32 [T], 0 within
    images, whose rows' embeddings are images bf16 [N, M], in their order.
    """

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    entry_slots: np.ndarray
    engram: dict[int, tuple[Tensor, Tensor]]
    text: np.ndarray
    images: Tensor | None


@dataclass(frozen=True, slots=True)
class _Tail:
    """The rows of a step that go through the decoder, int64 [R] ascending, and from where on each sees window rows
    there, int32 [R]."""

    rows: np.ndarray
    window_from: np.ndarray


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The rows of a step of which something is wanted, int64 [R + C]: `choices` of the last, logits of the others; and
    whether anybody here wants it."""

    rows: np.ndarray
    choices: Sequence[Choice]
    is_read: bool

    @property
    def num_known(self) -> int:
        """Rows whose logits are wanted."""
        return len(self.rows) - len(self.choices)


class CudaModel:
    """One rank's share of the backbone and of the drafts, its pages, and the steps that run them."""

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
        exact: bool | None = None,
        pack: PackedTables | None = None,
        with_drafts: bool = False,
        group: DeviceGroup | None = None,
    ) -> None:
        """Load this rank's share. `max_step_tokens`: of all requests together. `bit_ops`: for Triton's interpreter.
        `exact`: as of load_model. `group`: how the devices of `comm` exchange; without one, nobody adds up what the
        ranks have.

        Raises CheckpointError, and EngineError for a model that the kernels do not take.
        """
        config = reader.plan.config
        check_model(reader.plan, with_drafts=with_drafts)
        self.config = config
        self.device = device
        self.graphs = graphs and device.type == "cuda"
        self.num_layers_run = 0  # and stages, where they are launched one by one: grows while anything moves
        self.weights: ModelWeights = load_model(reader, device, exact=exact)
        self.draft_weights: DraftWeights | None = (
            load_drafts(reader, device, exact=exact) if with_drafts else None
        )
        self._draft_shape = RankShape(reader.plan, reader.rank, of_drafts=True)
        self._vocabulary = reader.plan.vocab_range(reader.rank)
        self.tables = Tables.open(reader, pack)
        self._engrams = {
            layer.index: EngramRows(config, layer, reader, comm, self.tables)
            for layer in config.layers
            if layer.has_engram
        }
        formats = CacheFormats(config, limits.block_size, with_drafts)
        self.pages = DevicePages(formats, limits, max_step_tokens=max_step_tokens, device=device)
        self._bit_ops = bit_ops
        num_drafts = config.dspark_block_size if with_drafts else 0
        sizes = [(n, False) for n in decode_sizes(limits.max_num_seqs, num_drafts)]
        self._prefill_sizes = prefill_sizes(max_step_tokens, limits.max_model_len)
        sizes += [(n, True) for n in self._prefill_sizes]
        self._most_short = max((n for n, long in sizes if not long), default=0)
        self._replays = limits.decoder_replay
        # By rows, whether they are `long`, and whether they end where the decoder begins.
        self._steps: dict[tuple[int, bool, bool], tuple[DecodeStep, DraftContext | None]] = {}
        self._launches: dict[tuple[int, bool, bool], Callable[[], None]] = {}
        self._replay: tuple[ReplayStep, Callable[[], None]] | None = None
        self._draw_launches: dict[tuple[DecodeStep, int], Callable[[], None]] = {}
        self._draft_steps: dict[int, DraftStep] = {}
        self._draft_launches: dict[tuple[int, bool], Callable[[], None]] = {}
        most = max(n for n, _ in sizes)
        self.group = group or DeviceGroup()
        summed = summed_rows(limits.max_num_seqs, most, num_drafts, decoder_replay=limits.decoder_replay)
        self.group.reserve(summed * config.hidden_size)
        self._pool: Any = None  # memory that graphs share
        makers: list[Callable[[str | torch.device], object]]
        makers = [partial(self._make_step, n, long) for n, long in sizes]
        if limits.decoder_replay:
            makers += [partial(self._make_step, n, True, to_decoder=True) for n in self._prefill_sizes]
            makers.append(self._make_replay)
        if with_drafts:
            makers += [partial(self._make_draft_step, n) for n in draft_sizes(limits.max_num_seqs)]
        self.workspace = Workspace(makers, device)
        pinned = device.type == "cuda"
        most = max(most, REPLAYED_ROWS if limits.decoder_replay else 0)
        self._text = torch.zeros(most, dtype=torch.int32, pin_memory=pinned)
        self._ids = torch.zeros(most, dtype=torch.int64, pin_memory=pinned)
        self._kept_at = torch.zeros(most, dtype=torch.int64, pin_memory=pinned)
        self._numbers = torch.zeros(3, most, dtype=torch.int32, pin_memory=pinned)
        self._logit_rows = torch.zeros(most, dtype=torch.int64, pin_memory=pinned)
        self._places = torch.zeros(most, dtype=torch.int32, pin_memory=pinned)
        places = num_places(self.pages.pages.entry_table.shape[1], limits.block_size)
        self._place_blocks = torch.zeros(places, dtype=torch.int32, pin_memory=pinned)
        self._lone = torch.zeros(LONE_ROWS, dtype=torch.int32, pin_memory=pinned)
        most_logits = max(min(most, DECODE_LOGITS), self._most_short)
        self._logits = torch.zeros(most_logits, self._num_logits, pin_memory=pinned)
        self._draws_of_rows = torch.zeros(most_logits, NUM_DRAW, dtype=torch.float64, pin_memory=pinned)
        self._chosen = torch.zeros(most_logits, 2, dtype=torch.int32, pin_memory=pinned)
        self._most_drafted = draft_sizes(limits.max_num_seqs)[-1] if with_drafts else 0
        drafted = self._most_drafted, config.dspark_block_size
        self._draft_tokens = torch.zeros(drafted[0], drafted[1] + 1, dtype=torch.int64, pin_memory=pinned)
        self._anchors = torch.zeros(drafted[0], 3, dtype=torch.int32, pin_memory=pinned)
        self._draws = torch.zeros(drafted[0], 1 + drafted[1], dtype=torch.float64, pin_memory=pinned)
        self._confidence = torch.zeros(drafted, pin_memory=pinned)
        self._draft_logits = torch.zeros(*drafted, self._num_logits, pin_memory=pinned)

    @torch.inference_mode()
    def run(
        self,
        builder: BatchBuilder,
        tables: BlockTables,
        segments: Sequence[Segment],
        logit_rows: Sequence[int],
        updates: Sequence[TableUpdate],
        image_rows: Tensor | None = None,
        *,
        choices: Sequence[Choice] = (),
        is_read: bool = True,
    ) -> Outcome:
        """Run every layer over the rows of `segments`, `image_rows` bf16 [N, M] in the place of those of images. Logits
        [R, V] are [R, V_local] without a group. Unless it `is_read`, the outcome stays on the device.

        `tables` has taken over `updates` already. Raises EngineError when the disk fails.
        """
        rows = self._rows(builder, segments, image_rows)
        self.pages.prepare(tables, updates, segments)
        num_rows = len(rows.ids)
        wanted = _Wanted(np.array([*logit_rows, *(c.row for c in choices)], np.int64), choices, is_read)
        if num_rows <= self._most_short and all(self._is_short(segment) for segment in segments):
            step = self._run_piece(rows, 0, num_rows, num_rows, long=False)
            logits, chosen = self._taken(step, wanted.rows, np.arange(len(wanted.rows)), wanted)
            return Outcome(logits, chosen[:, 0], chosen[:, 1])
        logits = torch.empty(wanted.num_known, self._num_logits)
        chosen = np.zeros((len(choices), 2), np.int64)
        tail = self._tail(builder, segments)
        for start, stop in self._pieces(rows):
            size = self._size_for(stop - start)
            step = self._run_piece(rows, start, stop, size, long=True, to_decoder=tail is not None)
            if tail is None:
                self._run_heads(step, np.arange(start, stop), wanted, logits, chosen)
                continue
            for some in self._replayed(tail, start, stop):
                replay = self._run_replay(step, rows, tail, some, start)
                self._run_heads(replay, tail.rows[some], wanted, logits, chosen)
        return Outcome(logits, chosen[:, 0], chosen[:, 1])

    def _pieces(self, rows: _Rows) -> Iterator[tuple[int, int]]:
        """Rows that are run at a time: as many as the largest step takes, of requests whose entries have room there."""
        most, size, start = self._prefill_sizes[-1], self.pages.pages.block_size, 0
        while start < len(rows.ids):
            stop = min(start + most, len(rows.ids))
            if self._size_for(stop - start) >= FILLED_ROWS:
                part = slice(start, stop)
                laid = lay_out(rows.positions[part], rows.slots[part], size, len(self._place_blocks))
                stop = start + laid.num_rows
            yield start, stop
            start = stop

    def _size_for(self, count: int) -> int:
        """Rows of the step of a prompt that takes `count`."""
        return next(n for n in self._prefill_sizes if n >= count)

    def _tail(self, builder: BatchBuilder, segments: Sequence[Segment]) -> _Tail | None:
        """Of a step with rows that do not go through the decoder."""
        if not self._replays:
            return None
        starts = [builder.tail_start(segment) for segment in segments]
        if all(first == segment.start for first, segment in zip(starts, segments, strict=True)):
            return None
        rows, window_from, row = [], [], 0
        for first, segment in zip(starts, segments, strict=True):
            stop = row + segment.num_tokens
            rows.append(np.arange(row + first - segment.start, stop))
            oldest = max(first, segment.window_from) if first > segment.start else segment.window_from
            window_from.append(np.full(len(rows[-1]), oldest, np.int32))
            row = stop
        return _Tail(np.concatenate(rows), np.concatenate(window_from))

    @staticmethod
    def _replayed(tail: _Tail, start: int, stop: int) -> Iterator[slice]:
        """The rows of a tail within start..stop-1, as many as are run at a time."""
        first, end = np.searchsorted(tail.rows, (start, stop))
        for begin in range(int(first), int(end), REPLAYED_ROWS):
            yield slice(begin, min(begin + REPLAYED_ROWS, int(end)))

    def _run_heads(
        self, step: DecodeStep, rows: np.ndarray, wanted: _Wanted, logits: Tensor, chosen: np.ndarray
    ) -> None:
        """What is wanted of those of `rows` int64 [T] that the step has just run, into `logits` [R, V] and `chosen`
        int64 [C, 2]."""
        inside = np.flatnonzero(np.isin(wanted.rows, rows))
        for first in range(0, len(inside), step.num_logits):
            some = inside[first : first + step.num_logits]
            self._run_head(step, np.searchsorted(rows, wanted.rows[some]))
            known = some < wanted.num_known
            found, tokens = self._taken(step, np.arange(len(some)), some, wanted)
            if wanted.is_read:
                logits[torch.from_numpy(some[known])] = found
                chosen[some[~known] - wanted.num_known] = tokens

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """A block of drafts for each of the requests, whose steps this model has run last. On the host, but logits of
        requests none of which samples: those stay empty, [B, n, 0].

        Raises EngineError without drafts.
        """
        if self.draft_weights is None:
            raise EngineError("this engine was started without drafts")
        is_sampled = any(request.temperature > 0 for request in requests)
        parts = [
            self._propose(requests[first : first + self._most_drafted], is_sampled=is_sampled)
            for first in range(0, len(requests), self._most_drafted)
        ]
        return Proposal(*(torch.cat(values) for values in zip(*parts, strict=True)))

    def close(self) -> None:
        """Close the Engram files, and leave the group: first go the graphs that have its exchanges in them."""
        self.tables.close()
        self._launches.clear()
        self._draw_launches.clear()
        self._draft_launches.clear()
        self._replay = None
        self.group.leave()

    @property
    def _num_logits(self) -> int:
        """Of a row."""
        return self.weights.shape.vocabulary if self.group.is_alone else self.config.vocab_size

    @property
    def graph_sizes(self) -> list[int]:
        """Rows of the steps that have become graphs."""
        return sorted(n for n, _, _ in self._launches) if self.graphs else []

    def _propose(
        self, requests: Sequence[DraftRequest], *, is_sampled: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, logits and confidence of as many requests as are drafted for at a time."""
        count = len(requests)
        step, launch = self._draft_step(count, is_sampled)
        self._fill_drafts(step, requests)
        launch()
        outputs = [(self._draft_tokens[:count], step.tokens), (self._confidence[:count], step.confidence)]
        if is_sampled:
            outputs.append((self._draft_logits[:count], step.vocabulary_logits))
        for host, there in outputs:
            host.copy_(there.view(host.shape), non_blocking=True)
        self._wait()
        self.num_layers_run += len(step.layers)
        logits = self._draft_logits[:count] if is_sampled else self._draft_logits[:count, :, :0]
        return self._draft_tokens[:count, 1:].clone(), logits.clone(), self._confidence[:count].clone()

    def _fill_drafts(self, step: DraftStep, requests: Sequence[DraftRequest]) -> None:
        """Put anchors and coins into a block's inputs; without `requests`, nobody's."""
        count = step.num_requests
        tokens, anchors, draws = (t.numpy() for t in (self._draft_tokens, self._anchors, self._draws))
        tokens[:count, 0] = [r.token_id for r in requests] or 0
        anchors[:count] = [(r.slot, r.position, r.window_from) for r in requests] or (self.pages.nobody, 0, 0)
        for row, request in enumerate(requests):
            draws[row, 0] = draw_temperature(request.temperature)
            if request.temperature > 0:
                draws[row, 1:] = draft_coins(request.seed, request.place, step.length)
        step.tokens.copy_(self._draft_tokens[:count], non_blocking=True)
        step.anchors.copy_(self._anchors[:count], non_blocking=True)
        step.draws.copy_(self._draws[:count], non_blocking=True)

    def _is_short(self, segment: Segment) -> bool:
        """Whether its rows neither overwrite each other's pooled inputs, nor are there for their windows alone, nor are
        of images."""
        is_few = segment.num_tokens < self.pages.pages.num_open and segment.num_replayed == 0
        return is_few and not segment.image_mask.any()

    def _rows(
        self, builder: BatchBuilder, segments: Sequence[Segment], images: Tensor | None = None
    ) -> _Rows:
        engram_ids = builder.engram_ids(segments)
        requests = {layer: engram.request(engram_ids) for layer, engram in self._engrams.items()}
        ids = np.concatenate([segment.token_ids for segment in segments])
        held = self._vocabulary
        if len(held) < self.config.vocab_size:  # of a token of another rank, the row of zeros behind all
            here = (ids >= held.start) & (ids < held.stop)
            ids = np.where(here, ids - held.start, self.weights.shape.vocabulary)
        lengths = np.array([segment.num_tokens for segment in segments])
        first_rows = np.cumsum(lengths) - lengths
        slots = np.repeat(np.array([segment.slot for segment in segments], np.int32), lengths)
        entry_slots = slots.copy()
        for segment, first in zip(segments, first_rows, strict=True):
            if segment.num_replayed:
                entry_slots[first : first + segment.num_replayed] = self.pages.nobody
        before = np.array([segment.start for segment in segments]) - first_rows
        positions = (np.repeat(before, lengths) + np.arange(len(slots))).astype(np.int32)
        engram = {}
        for layer, request in requests.items():
            codes, scales = self._engrams[layer].codes(request)
            engram[layer] = codes.flatten(1), scales.flatten(1)
        text = 1 - np.concatenate([segment.image_mask for segment in segments]).astype(np.int32)
        return _Rows(ids, positions, slots, entry_slots, engram, text, images)

    def _run_piece(
        self, rows: _Rows, start: int, stop: int, size: int, *, long: bool, to_decoder: bool = False
    ) -> DecodeStep:
        """Run rows start..stop-1 in a step of `size` rows; what is missing is nobody's. A `long` one has ended."""
        step, launch = self._step(size, long, to_decoder)
        self._fill(step, rows, start, stop)
        launch()
        if long:
            self._wait()
        self.num_layers_run += self.config.num_hidden_layers
        return step

    def _run_replay(
        self, encoder: DecodeStep, rows: _Rows, tail: _Tail, some: slice, start: int
    ) -> ReplayStep:
        """Run some rows of a tail from where `encoder`, whose first row is row `start`, has left them."""
        step, launch = self._replay_step(encoder)
        self._fill_replay(step, rows, tail, some, start)
        launch()
        self._wait()
        return step

    def _fill_replay(
        self, step: ReplayStep, rows: _Rows | None, tail: _Tail | None, some: slice, start: int
    ) -> None:
        """Put some rows of a tail into the decoder's inputs; without `rows`, nobody's."""
        count, size = some.stop - some.start, step.num_rows
        numbers, places = self._numbers.numpy(), self._ids.numpy()
        places[:size] = 0
        numbers[:, :size] = 0
        numbers[1, :size] = self.pages.nobody
        if rows is not None and tail is not None:
            own = tail.rows[some]
            places[:count] = own - start
            numbers[0, :count], numbers[1, :count] = rows.positions[own], rows.slots[own]
            numbers[2, :count] = tail.window_from[some]
        if step.sees:
            text = None if rows is None or tail is None else rows.text[tail.rows[some]]
            self._fill_text(step, text)
        step.rows.copy_(self._ids[:size], non_blocking=True)
        for target, values in zip((step.positions, step.slots, step.window_from), self._numbers, strict=True):
            target.copy_(values[:size], non_blocking=True)
        self._fill_places(step, count)

    def _run_head(self, step: DecodeStep, rows: np.ndarray) -> None:
        """Logits of the step's `rows` int64 [R], R at most `num_logits`, in the first places."""
        places = self._logit_rows.numpy()
        places[: len(rows)] = rows
        places[len(rows) : step.num_logits] = 0  # what a larger step left there may not be a row of this one
        step.logit_rows.copy_(self._logit_rows[: step.num_logits], non_blocking=True)
        step.run_head()

    def _taken(
        self, step: DecodeStep, places: np.ndarray, numbers: np.ndarray, wanted: _Wanted
    ) -> tuple[Tensor, np.ndarray]:
        """The wanted rows `numbers` int64 [N], which lie in places `places` of the step's head: logits of those that
        want them, in the host's buffer, and of the others int64 [C, 2], token and number of logits that are not finite.
        The step has ended."""
        known = int((numbers < wanted.num_known).sum())
        if not wanted.is_read:
            self._wait()
            return self._logits[:0], np.zeros((0, 2), np.int64)
        choices = [wanted.choices[number - wanted.num_known] for number in numbers[known:]]
        self._draw(step, places[known:], choices)
        self._fetch(step, places[:known], 0)
        if choices:
            self._chosen[: step.num_logits].copy_(step.sampling.chosen, non_blocking=True)
        self._wait()
        chosen = self._chosen.numpy()[places[known:]].astype(np.int64)
        left = np.flatnonzero((chosen[:, 0] < 0) & (chosen[:, 1] == 0))
        if len(left):
            self._fetch(step, places[known + left], known)
            self._wait()
            for row, number in enumerate(left):
                chosen[number, 0] = choose(self._logits[known + row].numpy(), choices[number])
        return self._logits[:known], chosen

    def _fetch(self, step: DecodeStep, places: np.ndarray, first: int) -> None:
        """Begin to copy logits of `places` of the step's head to the host's buffer, from its row `first` on."""
        begin = 0
        for end in range(1, len(places) + 1):  # as many at a time as lie one after another
            if end < len(places) and places[end] == places[end - 1] + 1:
                continue
            there = step.vocabulary_logits[int(places[begin]) : int(places[end - 1]) + 1]
            self._logits[first + begin : first + end].copy_(there, non_blocking=True)
            begin = end

    def _draw(self, step: DecodeStep, places: np.ndarray, choices: Sequence[Choice]) -> None:
        """Begin to draw the tokens of `places` of the step's head that are not the likeliest."""
        drawn = [(int(n), c) for n, c in zip(places, choices, strict=True) if c.sampling.temperature > 0]
        if not drawn:
            return
        draws, searches = self._draws_of_rows[: step.num_logits].numpy(), 0
        draws[:] = 0
        for place, choice in drawn:
            params = choice.sampling
            draws[place] = draw_of(params, choice.coin)
            searches = max(searches, num_searches(params, self._num_logits))
        step.sampling.draws.copy_(self._draws_of_rows[: step.num_logits], non_blocking=True)
        key = step, searches
        if key not in self._draw_launches:
            launch = partial(step.run_draws, searches)
            if self.graphs:
                launch()
            self._draw_launches[key] = self._captured(launch) if self.graphs else launch
        self._draw_launches[key]()

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
        if step.sees:
            self._fill_text(step, None if rows is None else rows.text[start:stop])
            if rows is not None:
                self._fill_images(step, rows, start, stop)
        if isinstance(step, PrefillStep):
            self._fill_places(step, count)

    def _fill_text(self, step: DecodeStep, text: np.ndarray | None) -> None:
        """Which of the step's first rows are text; the others are, too."""
        numbers = self._text.numpy()
        numbers[: step.num_rows] = 1
        if text is not None:
            numbers[: len(text)] = text
        step.text.copy_(self._text[: step.num_rows], non_blocking=True)

    def _fill_images(self, step: DecodeStep, rows: _Rows, start: int, stop: int) -> None:
        """Embeddings of the images among rows start..stop-1."""
        inside = np.flatnonzero(rows.text[start:stop] == 0)
        if not len(inside):
            return
        if rows.images is None:
            raise EngineError(f"a step has {len(inside)} rows of images, and no embeddings for them")
        first = int((rows.text[:start] == 0).sum())
        own = rows.images[first : first + len(inside)].to(self.device)
        step.image_rows.index_copy_(0, torch.from_numpy(inside).to(self.device), own)

    def _fill_places(self, step: PrefillStep, count: int) -> None:
        """Which blocks of entries the requests of the step's first `count` rows have, and where they lie together."""
        buffers = step.attended_rows
        positions, slots = self._numbers.numpy()[:2, :count]
        places, blocks, lone = (t.numpy() for t in (self._places, self._place_blocks, self._lone))
        places[: step.num_rows] = 0  # nobody's, whose block is the first
        blocks[:], lone[:] = -1, -1
        blocks[0] = NULL_BLOCK
        laid = lay_out(positions, slots, self.pages.pages.block_size, len(buffers.blocks))
        for first, end, place, number in laid.requests:
            places[first:end] = place
            blocks[place : place + number] = self.pages.entry_blocks(int(slots[first]))[:number]
        lone[: len(laid.lone)] = laid.lone
        places[laid.lone] = -1 - np.arange(len(laid.lone))
        buffers.places.copy_(self._places[: step.num_rows], non_blocking=True)
        buffers.blocks.copy_(self._place_blocks[: len(buffers.blocks)], non_blocking=True)
        buffers.lone.copy_(self._lone, non_blocking=True)

    def _kept_places(self, positions: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Where each row's pooled inputs go: those of a request's last rows to their place, the others to nobody's."""
        num_open, nobody = self.pages.pages.num_open, self.pages.nobody
        ahead = np.arange(len(positions)) + num_open
        inside = np.minimum(ahead, len(positions) - 1)
        again = (ahead < len(positions)) & (slots[inside] == slots)
        owner = np.where(again, nobody, slots).astype(np.int64)
        places: np.ndarray = owner * num_open + positions % num_open
        return places

    def _step(self, size: int, long: bool, to_decoder: bool = False) -> tuple[DecodeStep, Callable[[], None]]:
        """The step of that size and its launch, made at first use."""
        key = (size, long, to_decoder)
        if key not in self._steps:
            with self.workspace.in_use():
                self._steps[key] = self._make_step(size, long, self.device, to_decoder=to_decoder)
            step, context = self._steps[key]
            run_step = step.run_layers if long else step.run

            def launch() -> None:
                run_step(self._moved)
                if context is not None:
                    context.run()

            self._launches[key] = launch
            if self.graphs:
                self._fill(step, None, 0, 0)
                launch()
                if long and not to_decoder:
                    self._run_head(step, np.zeros(0, np.int64))
                self._launches[key] = self._captured(launch)
        return self._steps[key][0], self._launches[key]

    def _make_step(
        self, size: int, long: bool, device: torch.device | str, *, to_decoder: bool = False
    ) -> tuple[DecodeStep, DraftContext | None]:
        w = self.weights
        kinds = (EncoderStep, PrefillEncoderStep) if to_decoder else (DecodeStep, PrefillStep)
        step = kinds[long and size >= FILLED_ROWS](
            w.shape, w.layers, w.embedding, w.head, w.norm, self.pages.pages, num_rows=size, device=device,
            bit_ops=self._bit_ops, long=long, group=self.group,
        )  # fmt: skip
        if self.draft_weights is None or to_decoder:
            return step, None
        return step, DraftContext(self.draft_weights, step)

    def _replay_step(self, encoder: DecodeStep) -> tuple[ReplayStep, Callable[[], None]]:
        """The decoder's step and its launch, made at first use, over the streams of `encoder` and, as all of them share
        their memory, of any other."""
        if self._replay is None:
            with self.workspace.in_use():
                step, context = self._make_replay(self.device)
            step.source = encoder.streams

            def launch() -> None:
                step.run_layers(self._moved)
                if context is not None:
                    context.run()

            self._replay = step, launch
            if self.graphs:
                self._fill_replay(step, None, None, slice(0, 0), 0)
                launch()
                self._run_head(step, np.zeros(0, np.int64))
                self._replay = step, self._captured(launch)
        return self._replay

    def _make_replay(self, device: torch.device | str) -> tuple[ReplayStep, DraftContext | None]:
        w = self.weights
        step = ReplayStep(
            w.shape, w.layers, w.embedding, w.head, w.norm, self.pages.pages, num_rows=REPLAYED_ROWS, device=device,
            bit_ops=self._bit_ops, group=self.group,
        )  # fmt: skip
        return step, None if self.draft_weights is None else DraftContext(self.draft_weights, step)

    def _draft_step(self, size: int, is_sampled: bool) -> tuple[DraftStep, Callable[[], None]]:
        """The block for so many requests and its launch, made at first use."""
        if size not in self._draft_steps:
            with self.workspace.in_use():
                self._draft_steps[size] = self._make_draft_step(size, self.device)
        step, key = self._draft_steps[size], (size, is_sampled)
        if key not in self._draft_launches:
            launch = partial(step.run, self._moved, is_sampled=is_sampled)
            if self.graphs:
                self._fill_drafts(step, ())
                launch()
            self._draft_launches[key] = self._captured(launch) if self.graphs else launch
        return step, self._draft_launches[key]

    def _make_draft_step(self, size: int, device: torch.device | str) -> DraftStep:
        w, drafts = self.weights, self.draft_weights
        assert drafts is not None
        return DraftStep(
            self._draft_shape, drafts, w.embedding, w.head, self.pages.pages, num_requests=size,
            first_own=self.pages.first_passage_row, first_token=self._vocabulary.start, device=device,
            bit_ops=self._bit_ops, group=self.group,
        )  # fmt: skip

    def _captured(self, launch: Callable[[], None]) -> Callable[[], None]:
        """A graph of `launch`, which has run once, for nobody, so that every kernel is compiled."""
        torch.cuda.synchronize()
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # NCCL has threads of its own, which may ask the device while this one captures.
        mode = "global" if self.group.is_alone else "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
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
