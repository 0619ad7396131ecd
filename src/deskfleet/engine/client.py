"""The supervisor's side of the engine: has the ranks started, carries requests, ends everything together.

Owns the group of ranks, wherever they run, and the requests under way; implements `endpoint.TokenEngine`.
Imports no torch, so the process that serves HTTP stays small. If any rank ends or raises, the whole group is
stopped, every request fails with one sentence that names the cause, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np

from deskfleet.endpoint import (
    EngineHealth,
    EngineStats,
    EngramStats,
    GenerateRequest,
    SamplingParams,
    TokenChunk,
)
from deskfleet.engine import messages
from deskfleet.engine.identity import checkpoint_identity
from deskfleet.engine.intake import check_placeholders, check_prompt, check_sampling, expand_spans
from deskfleet.engine.local_ranks import LocalRanks
from deskfleet.engine.messages import PUBLISHED_SHARDS
from deskfleet.engine.process import (
    Patience,
    RankProcess,
    RankStarter,
    cause_of_end,
    find_silent,
    rank_health,
    receive,
)
from deskfleet.engine.receipts import disagreement
from deskfleet.engine.spec import RankPaths, RankSpec
from deskfleet.engine.speculate import SpeculationOptions
from deskfleet.engine.stopping import StopStrings
from deskfleet.errors import ConfigError, EngineError, PromptTooLong, RequestError
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.device import Device, default_max_num_batched_tokens
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.limits import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_NUM_WINDOW_TAILS,
    OperatorChoice,
    PrefixReplay,
    RunnerLimits,
    resolve_limits,
)
from deskfleet.model.memory import RankMemory
from deskfleet.model.packs import check_pack
from deskfleet.model.tokenizer import load_tokenizer, thinking_tokens

if TYPE_CHECKING:
    from deskfleet.engine.images import PreparedImage

_SETTLE_S = 0.5  # after one rank ends, how long others may still report why
_STOP_S = 5.0  # how long ranks may take to end by themselves when asked


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a checkpoint. None means: derived from the checkpoint, the device or the machine.

    `kv_cache_tokens` is the capacity of the pool of compressed KV; `num_window_tails` the windows kept of requests that
    have ended. Each of `dcp_size` ranks holds a share of the pool. `speculation` is read by SpeculationOptions.parse.

    `device` is where the ranks compute; on a GPU, `graphs` captures the launches of a step.

    `engram_pack` is a pack of the checkpoint's Engram rows to read instead of the published shards; with
    `engram_second_source` the shards answer for rows that it cannot give, and such rows are counted.
    """

    tp_size: int = 1
    dcp_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    threads_per_rank: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    kv_cache_tokens: int | None = None
    num_window_tails: int = DEFAULT_NUM_WINDOW_TAILS
    prefix_cache: bool = True
    prefix_replay: PrefixReplay = "exact"
    speculation: str = "off"
    decoder_replay: bool = False
    engram_pack: Path | None = None
    engram_second_source: bool = False
    operators: OperatorChoice = "auto"
    device: Device = "cpu"
    graphs: bool = True


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One rank's loading so far."""

    rank: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """One rank that is ready. `weight_bytes` were read from the checkpoint, `cache_bytes` are its own.

    `engram` says how it reads Engram rows, None when it reads none; `operators`, who computes, and what was asked for;
    `collectives` likewise, how it exchanges with the others.
    `node` is the machine it runs on, None for the supervisor's own.
    """

    rank: int
    pid: int
    weight_bytes: int
    cache_bytes: int
    load_s: float
    engram: str | None
    operators: str
    collectives: str
    node: str | None = None


@dataclass(frozen=True, slots=True)
class EngramSource:
    """Where the ranks read Engram rows: a pack's directory or PUBLISHED_SHARDS. `second_source` answers for the rest.

    `backend` is what a rank says of its reader.
    """

    source: str
    second_source: str | None
    backend: str


@dataclass
class _Pending:
    """A request under way: outputs arrive in the queue, None wakes the reader when the group has ended."""

    outputs: asyncio.Queue[messages.RequestOutput | None] = field(default_factory=asyncio.Queue)


class EngineClient:
    """A running group of rank processes behind the TokenEngine contract.

    `async with EngineClient(checkpoint, options) as engine: ...`. `on_load` is called with LoadProgress. `starter` is
    where ranks come from, by default processes of this machine. `plan` says which rank holds what, `limits` how much
    at once, `max_num_batched_tokens` how much in one step, `with_drafts` whether drafts are served. `planned_bytes`,
    the resident bytes planned for each rank, may be set before `start`: a rank whose machine cannot give them refuses
    before it loads.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: EngineOptions | None = None,
        *,
        on_load: Callable[[LoadProgress], None] | None = None,
        starter: RankStarter | None = None,
    ) -> None:
        """Check everything that can be checked before a process starts.

        Raises ConfigError, CheckpointError, and for a pack of Engram rows PackError or WrongPack.
        """
        self.checkpoint = checkpoint
        self.options = options or EngineOptions()
        self._on_load = on_load
        _check_options(self.options)
        self._max_model_len = _resolve_max_model_len(checkpoint, self.options.max_model_len)
        self.max_num_batched_tokens = _resolve_max_num_batched_tokens(self.options, self._max_model_len)
        self.with_drafts = _speculation(checkpoint, self.options).num_drafts > 0
        self.limits = _resolve_limits(checkpoint, self.options, self._max_model_len, self.with_drafts)
        self.plan = ShardPlan(checkpoint.config, Layout(self.options.tp_size))  # refuses an impossible layout
        self._starter = starter or _here(checkpoint, self.options)
        if self._starter.ranks_know_paths:
            _check_names_no_pack(self.options)
        else:
            _check_pack(checkpoint, self.plan, self.options)
        self._tokenizer = load_tokenizer(checkpoint.directory)
        self.planned_bytes: Mapping[int, int] = {}  # resident bytes by rank, set by whoever has planned them
        self._ranks: list[RankProcess] = []
        self._ended: list[RankProcess] = []  # in the order in which their ends were noticed
        self._pending: dict[str, _Pending] = {}
        self._stats = EngineStats()
        self._queue: tuple[str, ...] = ()
        self._engram: dict[int, EngramStats] = {}  # by rank
        self._failure: EngineError | None = None
        self._failed = asyncio.Event()
        self._settled = asyncio.Event()  # all ranks are ready, or never will be
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- contract -------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self._max_model_len

    @property
    def failure(self) -> str | None:
        """Why the group ended, or None while it lives."""
        return None if self._failure is None else self._failure.message

    async def stats(self) -> EngineStats:
        """Counters after the latest step. Raises EngineError when the group is dead."""
        self._check_alive()
        return replace(self._stats, engram=sum(self._engram.values(), EngramStats()))

    @property
    def queue(self) -> tuple[str, ...]:
        """Ids of the requests that waited after the latest step, in order of arrival; of long queues the first."""
        return self._queue

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the tokens of one request as they come (see TokenEngine.generate)."""
        message = await self._prepare(request)
        stopping = StopStrings(self._tokenizer, request.sampling.stop) if request.sampling.stop else None
        num_prompt_tokens = len(message.token_ids)
        async with contextlib.aclosing(self._run(message, stopping)) as outputs:
            async for output in outputs:
                yield TokenChunk(
                    output.token_ids,
                    output.logprobs,
                    num_prompt_tokens,
                    output.finish_reason,
                    output.num_cached_tokens,
                    output.num_drafted,
                    output.num_accepted,
                    queued_s=output.queued_s,
                    num_verify_steps=output.num_verify_steps,
                    num_wasted_rows=output.num_wasted_rows,
                    prompt_logprobs=output.prompt_logprobs,
                )

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """Teacher-forced logits float32 [len(token_ids), V]: row i ranks the token after position i."""
        request = GenerateRequest(f"score-{uuid.uuid4().hex}", tuple(token_ids), SamplingParams(max_tokens=1))
        message = msgspec.structs.replace(await self._prepare(request, room=0), score=True)
        async with contextlib.aclosing(self._run(message)) as outputs:
            flat = [np.frombuffer(output.logits or b"", np.float32) async for output in outputs]
        return np.concatenate(flat).reshape(len(message.token_ids), self.checkpoint.config.vocab_size)

    async def wait_failed(self) -> EngineError:
        """Return once the group has failed, with the reason."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    @property
    def ranks(self) -> tuple[LoadedRank, ...]:
        """What each rank reported when it was ready. Raises EngineError while the group is loading."""
        self._check_alive()
        ready = [(rank, rank.ready.result()) for rank in self._ranks]
        return tuple(
            LoadedRank(
                rank=rank.number,
                pid=rank.process.pid,
                weight_bytes=report.weight_bytes,
                cache_bytes=report.cache_bytes,
                load_s=report.load_s,
                engram=report.engram,
                operators=report.operators,
                collectives=report.collectives,
                node=rank.node,
            )
            for rank, report in ready
        )

    @property
    def receipts(self) -> tuple[messages.Receipt, ...]:
        """What each rank is made of; they agree. Raises EngineError while the group is loading."""
        self._check_alive()
        return tuple(rank.receipt for rank in self._ranks if rank.receipt is not None)

    @property
    def memory(self) -> tuple[RankMemory, ...]:
        """What each rank held when it was ready. Raises EngineError while the group is loading."""
        self._check_alive()
        return tuple(rank.ready.result().memory for rank in self._ranks)

    async def health(self) -> EngineHealth:
        """How each started rank is, also while it loads and after its end."""
        now_s = asyncio.get_running_loop().time()
        planned = self.planned_bytes
        return EngineHealth(tuple(rank_health(rank, now_s, planned.get(rank.number)) for rank in self._ranks))

    async def abandon(self, reason: str) -> None:
        """Kill every rank, whatever it does; who waits is told `reason`. Does nothing once the group has ended."""
        if self._closing or self._failure is not None or self._ended:
            return
        self._failure = EngineError(reason)
        await self._finish_group()

    @property
    def engram(self) -> EngramSource | None:
        """Where Engram rows come from; None when there are none. Raises EngineError while the group is loading."""
        backend = next((rank.engram for rank in self.ranks if rank.engram is not None), None)
        if backend is None:
            return None
        return EngramSource(
            source=self.receipts[0].engram_source or PUBLISHED_SHARDS,
            second_source=PUBLISHED_SHARDS if self.options.engram_second_source else None,
            backend=backend,
        )

    # --- life -----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start every rank and wait until all are loaded. Raises EngineError, with nothing left running."""
        try:
            await self._start()
        except BaseException as error:
            was_closing = self._closing
            await self.close()
            if was_closing and isinstance(error, EngineError):  # whatever a rank missed, that is why
                raise _shutting_down() from error
            raise

    async def _start(self) -> None:
        identity = await asyncio.to_thread(checkpoint_identity, self.checkpoint)
        await self._starter.listen(self._attend)
        for number in range(self.options.tp_size):
            self._ranks.append(await self._starter.start(self._rank_spec(number, identity)))
        for rank in self._ranks:
            self._spawn_task(self._watch(rank))
        self._spawn_task(self._watch_arrival())
        if self._starter.patience is not None:
            self._spawn_task(self._keep_in_touch(self._starter.patience))
        await self._settled.wait()
        self._check_alive()

    async def close(self) -> None:
        """Stop every rank: asked first, killed after a few seconds. Safe to call twice."""
        may_ask = self._settled.is_set() and self._failure is None and not self._closing
        self._closing = True
        self._settled.set()
        self._wake_readers()
        try:
            if may_ask:
                self._send(messages.Stop())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STOP_S):
                        await asyncio.gather(*(rank.process.wait() for rank in self._ranks))
        finally:  # also when this is cancelled: whoever gives up waiting still wants the ranks gone
            await self._kill_all()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._starter.close()

    # --- ranks ----------------------------------------------------------------------------------------

    def _rank_spec(self, rank: int, identity: str) -> RankSpec:
        options, patience = self.options, self._starter.patience
        return RankSpec(
            launch_id=self._starter.launch_id,
            rank=rank,
            tp_size=options.tp_size,
            checkpoint_identity=identity,
            engram_second_source=options.engram_second_source,
            checks_pack=self._starter.ranks_know_paths,
            rendezvous=self._starter.rendezvous,
            limits=self.limits,
            max_num_batched_tokens=self.max_num_batched_tokens,
            speculation=options.speculation,
            prefix_cache=options.prefix_cache,
            prefix_replay=options.prefix_replay,
            operators=options.operators,
            device=options.device,
            graphs=options.graphs,
            num_threads=options.threads_per_rank,
            planned_bytes=self.planned_bytes.get(rank),
            silence_s=None if patience is None else patience.rank_ends_s,
        )

    async def _watch(self, rank: RankProcess) -> None:
        await rank.process.wait()
        self._notice_end(rank)

    async def _watch_arrival(self) -> None:
        missing = await self._starter.missing()
        if missing is not None:
            await self.abandon(missing)

    async def _keep_in_touch(self, patience: Patience) -> None:
        """Tell ranks elsewhere that this process lives, and notice those that say nothing any more."""
        alive = messages.frame(messages.Alive())
        while True:
            now_s = asyncio.get_running_loop().time()
            for rank in self._ranks:
                if rank.writer is None or rank.heard_at_s is None:
                    continue
                rank.writer.write(alive)
                if now_s - rank.heard_at_s > patience.rank_is_lost_s:
                    rank.lost = f"has been silent for {now_s - rank.heard_at_s:.0f} s"
                    self._notice_end(rank)
            await asyncio.sleep(patience.heartbeat_s)

    def _notice_end(self, rank: RankProcess) -> None:
        """`rank` ended, by its process, its connection or its own word: the group ends with it."""
        if self._closing or self._failure is not None or rank in self._ended:
            return
        self._ended.append(rank)
        if len(self._ended) == 1:
            self._spawn_task(self._end_group())

    async def _end_group(self) -> None:
        """Stop all ranks and tell everyone who waits, with the cause that came first."""
        await asyncio.sleep(_SETTLE_S)  # a rank that only lost a peer may be noticed before the peer itself
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await asyncio.gather(*(rank.process.wait() for rank in self._ended if rank.lost is None))
        if self._closing:
            return
        now_s = asyncio.get_running_loop().time()
        self._failure = cause_of_end(self._ended + find_silent(self._ranks, self._ended, now_s))
        await self._finish_group()

    async def _finish_group(self) -> None:
        """Leave no rank behind and let everyone know of the failure."""
        assert self._failure is not None
        for rank in self._ranks:  # those elsewhere say it to whoever reads their output
            if rank.writer is not None:
                rank.writer.write(messages.frame(messages.End(self._failure.message)))
        try:
            await self._kill_all()
        finally:
            self._failed.set()
            self._settled.set()
            self._wake_readers()

    def _wake_readers(self) -> None:
        for pending in self._pending.values():
            pending.outputs.put_nowait(None)

    async def _kill_all(self) -> None:
        for rank in self._ranks:
            if rank.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    rank.process.kill()
        await asyncio.gather(*(rank.process.wait() for rank in self._ranks))

    async def _attend(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection of rank `number` (see `process.Attend`)."""
        if not 0 <= number < self.options.tp_size:
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        rank: RankProcess | None = None
        try:
            # The rank may connect before its process object is stored.
            while len(self._ranks) <= number:
                await asyncio.sleep(0.01)
            rank = self._ranks[number]
            rank.writer = writer
            rank.heard_at_s = asyncio.get_running_loop().time()
            while (report := await receive(reader)) is not None:
                self._on_report(rank, report)
        except asyncio.CancelledError:
            pass  # close() cancels
        except OSError as error:
            if rank is not None:
                rank.lost = f"cannot be reached: {error.strerror or error}"
        except msgspec.MsgspecError as error:
            if rank is not None:
                rank.lost = f"said what is no message: {error}"
        finally:
            if rank is not None:
                rank.writer = None
                self._notice_end(rank)

    def _on_report(self, rank: RankProcess, report: messages.Report) -> None:
        rank.heard_at_s = asyncio.get_running_loop().time()
        if isinstance(report, messages.Heartbeat):
            rank.heartbeat, rank.heartbeat_at_s = report, rank.heard_at_s
        elif isinstance(report, messages.StepOutput):
            self._stats, self._queue = report.stats, report.queue
            for output in report.outputs:
                if output.request_id in self._pending:
                    self._pending[output.request_id].outputs.put_nowait(output)
        elif isinstance(report, messages.EngramReads):
            self._engram[report.rank] = report.stats
        elif isinstance(report, messages.Receipt):
            rank.receipt = report
            self._check_agreement()
        elif isinstance(report, messages.Loading):
            if self._on_load is not None:
                self._on_load(LoadProgress(report.rank, report.done_bytes, report.total_bytes))
        elif isinstance(report, messages.Ready):
            rank.ready.set_result(report)
            if len(self._ranks) == self.options.tp_size and all(r.ready.done() for r in self._ranks):
                self._settled.set()
        elif isinstance(report, messages.Failed):
            rank.failed = report
            self._notice_end(rank)  # now, because its process may hang on its way out

    def _check_agreement(self) -> None:
        """Give the group up when ranks that are to compute together are not alike."""
        receipts = {rank.number: rank.receipt for rank in self._ranks if rank.receipt is not None}
        sentence = disagreement(receipts)
        if sentence is not None:
            self._spawn_task(self.abandon(sentence))

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, message: messages.Command) -> None:
        if self._ranks and self._ranks[0].writer is not None and self._failure is None:
            self._ranks[0].writer.write(messages.frame(message))

    # --- requests -------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # raised once per waiting request
        if self._closing:
            raise _shutting_down()
        if not self._settled.is_set():
            raise EngineError("the engine is not loaded yet", hint="wait for start() to return")

    async def _prepare(self, request: GenerateRequest, *, room: int = 1) -> messages.AddRequest:
        """Check a request and expand its image spans. `room`: positions needed after the prompt."""
        self._check_alive()
        config = self.checkpoint.config
        check_prompt(request.prompt_token_ids, config.vocab_size)
        check_sampling(request.sampling, config.vocab_size)
        await self._check_form(request.sampling)
        if request.images and config.vision is None:
            raise RequestError("this checkpoint cannot see images", param="messages")
        check_placeholders(request.prompt_token_ids, config.image_token_id, len(request.images))
        images: list[PreparedImage] = []
        if request.images and config.vision is not None:
            from deskfleet.engine.images import prepare_image

            for image in request.images:
                images.append(await asyncio.to_thread(prepare_image, image.data, config.vision))
        token_ids, in_image = expand_spans(request.prompt_token_ids, config.image_token_id, images)
        if len(token_ids) + room > self._max_model_len:
            raise PromptTooLong(len(token_ids), None, self._max_model_len)
        pixels = tuple(
            messages.ImagePixels(
                image.pixels.tobytes(), image.grid.height_px, image.grid.width_px, image.token_types
            )
            for image in images
        )
        return messages.AddRequest(
            request.request_id, token_ids, in_image, pixels, request.sampling, timeout_s=request.timeout_s
        )

    async def _check_form(self, params: SamplingParams) -> None:
        if params.thinking_budget is not None and thinking_tokens(self._tokenizer) is None:
            raise RequestError(
                "this checkpoint's tokenizer has no <think> and </think>", param="thinking_budget"
            )
        if params.constraint is not None:
            from deskfleet.engine.constraints import check_constraint

            # Here, where it can be refused, and in a thread: a large schema takes tenths of a second.
            await asyncio.to_thread(check_constraint, params.constraint)

    async def _run(
        self, message: messages.AddRequest, stopping: StopStrings | None = None
    ) -> AsyncGenerator[messages.RequestOutput, None]:
        """Send a request and yield its outputs up to the one that ends it; cancels it when left early."""
        self._check_alive()  # again: images may have taken a while
        if message.request_id in self._pending:
            raise RequestError(f"request id {message.request_id!r} is in use")
        pending = self._pending[message.request_id] = _Pending()
        finished = False
        try:
            self._send(message)
            while not finished:
                output = await pending.outputs.get()
                if output is None:
                    finished = True
                    self._check_alive()
                    return
                finished = output.finish_reason is not None or output.error is not None
                if output.error is not None and output.param is not None:
                    raise RequestError(output.error, param=output.param or None)
                if output.error is not None:
                    raise EngineError(output.error)
                if stopping is not None and stopping.push(output.token_ids):
                    if not finished:
                        self._send(messages.Cancel(message.request_id, is_satisfied=True))
                    finished = True
                    output = msgspec.structs.replace(output, finish_reason="stop")
                yield output
        finally:
            del self._pending[message.request_id]
            if not finished:
                self._send(messages.Cancel(message.request_id))


def _here(checkpoint: Checkpoint, options: EngineOptions) -> LocalRanks:
    pack = None if options.engram_pack is None else str(options.engram_pack)
    return LocalRanks(RankPaths(str(checkpoint.directory), pack))


def _check_names_no_pack(options: EngineOptions) -> None:
    if options.engram_pack is not None:
        raise ConfigError(
            f"engram_pack {options.engram_pack} is a place on this machine, and ranks of other machines have their own",
            hint="name it there: deskfleet rank --engram-pack DIR",
        )


def _check_options(options: EngineOptions) -> None:
    for name in ("max_num_seqs", "max_num_batched_tokens", "threads_per_rank"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, less than 1")
    if options.device != "cpu":
        _check_device_options(options)


def _check_device_options(options: EngineOptions) -> None:
    """Refuse what a GPU does not do yet, rather than do something else."""
    for name, is_set, otherwise in (
        ("dcp_size", options.dcp_size > 1, "leave out --dcp"),
        ("prefix_replay", options.prefix_replay != "exact", "--prefix-replay exact"),
        ("operators", options.operators != "auto", "operators are for --device cpu"),
    ):
        if is_set:
            raise ConfigError(
                f"{name} {getattr(options, name)} is not there on device {options.device}",
                hint=f"{otherwise}, or serve with --device cpu",
            )


def _speculation(checkpoint: Checkpoint, options: EngineOptions) -> SpeculationOptions:
    config = checkpoint.config
    block_size = config.dspark_block_size if config.num_nextn_predict_layers else 0
    return SpeculationOptions.parse(options.speculation, block_size)


def _resolve_max_num_batched_tokens(options: EngineOptions, max_model_len: int) -> int:
    if options.max_num_batched_tokens is not None:
        return options.max_num_batched_tokens
    return default_max_num_batched_tokens(
        options.device, max_num_seqs=options.max_num_seqs, max_model_len=max_model_len
    )


def _resolve_limits(
    checkpoint: Checkpoint, options: EngineOptions, max_model_len: int, with_drafts: bool
) -> RunnerLimits:
    return resolve_limits(
        checkpoint.config,
        max_num_seqs=options.max_num_seqs,
        max_model_len=max_model_len,
        block_size=options.block_size,
        kv_cache_tokens=options.kv_cache_tokens,
        num_window_tails=options.num_window_tails,
        with_drafts=with_drafts,
        tp_size=options.tp_size,
        dcp_size=options.dcp_size,
        decoder_replay=options.decoder_replay,
    )


def _check_pack(checkpoint: Checkpoint, plan: ShardPlan, options: EngineOptions) -> None:
    if options.engram_pack is None:
        if options.engram_second_source:
            raise ConfigError(
                "engram_second_source is for a pack, and there is none", hint="name one: --engram-pack DIR"
            )
        return
    if not checkpoint.config.engram_layer_ids:
        raise ConfigError(
            f"{checkpoint.directory} has no Engram layers for which to read {options.engram_pack}"
        )
    columns = [plan.engram_columns(rank) for rank in range(options.tp_size)]
    check_pack(options.engram_pack, checkpoint.directory, columns)


def _resolve_max_model_len(checkpoint: Checkpoint, asked: int | None) -> int:
    limit = checkpoint.config.max_position_embeddings
    if asked is None:
        return limit
    if not 1 < asked <= limit:
        raise ConfigError(
            f"max_model_len {asked} is outside 2..{limit}, what this checkpoint was made for",
            hint=f"choose at most {limit}",
        )
    return asked


def _shutting_down() -> EngineError:
    return EngineError("the engine is shutting down")


__all__ = [
    "PUBLISHED_SHARDS",
    "EngineClient",
    "EngineOptions",
    "EngramSource",
    "LoadProgress",
    "LoadedRank",
]
