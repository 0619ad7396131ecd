"""The supervisor's side of the engine: starts the ranks, carries requests, ends everything together.

Owns rank processes, their files and their one socket each; implements `endpoint.TokenEngine`. Imports no
torch, so the process that serves HTTP stays small. If any rank ends or raises, the whole group is stopped, every
request fails with one sentence that names the cause, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
from tokenizers import Tokenizer

from deskfleet.endpoint import EngineStats, GenerateRequest, SamplingParams, TokenChunk
from deskfleet.engine import messages
from deskfleet.engine.images import PreparedImage, prepare_image
from deskfleet.engine.spec import RankSpec
from deskfleet.engine.stopping import StopStrings
from deskfleet.errors import ConfigError, EngineError, PromptTooLong, RankDied, RequestError
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.layout import Layout, ShardPlan

_SETTLE_S = 0.5  # after one rank ends, how long others may still report why
_STOP_S = 5.0  # how long ranks may take to end by themselves when asked


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a checkpoint. None means: derived from the checkpoint or the machine."""

    tp_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    threads_per_rank: int | None = None


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One rank's loading so far."""

    rank: int
    done_bytes: int
    total_bytes: int


@dataclass
class _Rank:
    number: int
    process: asyncio.subprocess.Process
    log: Path
    ready: asyncio.Future[messages.Ready]
    writer: asyncio.StreamWriter | None = None
    failed: messages.Failed | None = None


@dataclass
class _Pending:
    """A request under way: outputs arrive in the queue, None wakes the reader after a group failure."""

    outputs: asyncio.Queue[messages.RequestOutput | None] = field(default_factory=asyncio.Queue)


class EngineClient:
    """A running group of rank processes behind the TokenEngine contract.

    `async with EngineClient(checkpoint, options) as engine: ...`. `on_load` is called with LoadProgress.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: EngineOptions | None = None,
        *,
        on_load: Callable[[LoadProgress], None] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.options = options or EngineOptions()
        self._on_load = on_load
        self._max_model_len = _resolve_max_model_len(checkpoint, self.options.max_model_len)
        ShardPlan(
            checkpoint.config, Layout(self.options.tp_size)
        )  # refuse an impossible layout before starting
        self._tokenizer = Tokenizer.from_file(str(checkpoint.directory / "tokenizer.json"))
        self._ranks: list[_Rank] = []
        self._pending: dict[str, _Pending] = {}
        self._stats = EngineStats()
        self._failure: EngineError | None = None
        self._failed = asyncio.Event()
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._directory: Path | None = None
        self._server: asyncio.Server | None = None

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
        return self._stats

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Yield the tokens of one request as they come (see TokenEngine.generate)."""
        message = await self._prepare(request)
        stopping = StopStrings(self._tokenizer, request.sampling.stop) if request.sampling.stop else None
        num_prompt_tokens = len(message.token_ids)
        async with contextlib.aclosing(self._run(message)) as outputs:
            async for output in outputs:
                reason = output.finish_reason
                if stopping is not None and reason is None and stopping.push(output.token_ids):
                    reason = "stop"
                yield TokenChunk(output.token_ids, output.logprobs, num_prompt_tokens, reason)
                if reason is not None:
                    return

    async def score(self, token_ids: list[int]) -> np.ndarray:
        """Teacher-forced logits float32 [len(token_ids), V]: row i ranks the token after position i."""
        request = GenerateRequest(f"score-{uuid.uuid4().hex}", tuple(token_ids), SamplingParams(max_tokens=1))
        message = msgspec.structs.replace(await self._prepare(request, room=0), score=True)
        rows = []
        async with contextlib.aclosing(self._run(message)) as outputs:
            async for output in outputs:
                assert output.logits is not None
                rows.append(
                    np.frombuffer(output.logits, np.float32).reshape(-1, self.checkpoint.config.vocab_size)
                )
                if output.finish_reason is not None:
                    break
        return np.concatenate(rows)

    async def wait_failed(self) -> EngineError:
        """Return once the group has failed, with the reason."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

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
        self._directory = Path(tempfile.mkdtemp(prefix="deskfleet-"))
        socket_path = str(self._directory / "control.sock")
        self._server = await asyncio.start_unix_server(self._on_connection, socket_path)
        try:
            for spec in self._rank_specs(self._directory, socket_path):
                self._ranks.append(await self._spawn(spec))
            for rank in self._ranks:
                self._spawn_task(self._watch(rank))
            await self._all_ready()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop every rank: asked first, killed after a few seconds. Safe to call twice."""
        self._closing = True
        self._send(messages.Stop())
        alive = [rank.process for rank in self._ranks if rank.process.returncode is None]
        if self._failure is None and all(rank.ready.done() for rank in self._ranks):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await asyncio.gather(*(process.wait() for process in alive))
        await self._kill_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for rank in self._ranks:
            if rank.writer is not None:
                rank.writer.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    # --- ranks ----------------------------------------------------------------------------------------

    def _rank_specs(self, directory: Path, socket_path: str) -> list[RankSpec]:
        options = self.options
        cores = len(os.sched_getaffinity(0))
        return [
            RankSpec(
                launch_id=uuid.uuid4().hex,
                rank=rank,
                tp_size=options.tp_size,
                checkpoint=str(self.checkpoint.directory),
                control_socket=socket_path,
                rendezvous=f"file://{directory}/rendezvous",
                max_model_len=self._max_model_len,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                num_threads=options.threads_per_rank or max(cores // options.tp_size, 1),
                parent_pid=os.getpid(),
            )
            for rank in range(options.tp_size)
        ]

    async def _spawn(self, spec: RankSpec) -> _Rank:
        assert self._directory is not None
        path = self._directory / f"rank-{spec.rank}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(spec)))
        log = self._directory / f"rank-{spec.rank}.log"
        environment = dict(os.environ)
        if spec.rendezvous.startswith("file:"):
            environment["GLOO_SOCKET_IFNAME"] = "lo"  # one machine: do not depend on how its name resolves
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "deskfleet.engine.rank", str(path),
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                env=environment, start_new_session=True,
            )  # fmt: skip
        ready: asyncio.Future[messages.Ready] = asyncio.get_running_loop().create_future()
        return _Rank(spec.rank, process, log, ready)

    async def _all_ready(self) -> None:
        failed = asyncio.ensure_future(self._failed.wait())
        ready = asyncio.gather(*(rank.ready for rank in self._ranks))
        await asyncio.wait((failed, ready), return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        if self._failure is not None:
            ready.cancel()
            raise self._failure

    async def _watch(self, rank: _Rank) -> None:
        """Turn the end of a rank process into the end of the group, with the cause that came first."""
        await rank.process.wait()
        if self._closing or self._failure is not None:
            return
        await asyncio.sleep(_SETTLE_S)  # a rank that only lost a peer may be noticed before the peer itself
        if self._closing or self._failure is not None:
            return
        self._failure = _cause([r for r in self._ranks if r.process.returncode is not None])
        await self._kill_all()
        for pending in self._pending.values():
            pending.outputs.put_nowait(None)
        self._failed.set()

    async def _kill_all(self) -> None:
        for rank in self._ranks:
            if rank.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    rank.process.kill()
        await asyncio.gather(*(rank.process.wait() for rank in self._ranks))

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        try:
            hello = await _receive(reader)
            if not isinstance(hello, messages.Hello) or hello.rank >= self.options.tp_size:
                writer.close()
                return
            # The rank may connect before its process object is stored.
            while len(self._ranks) <= hello.rank:
                await asyncio.sleep(0.01)
            rank = self._ranks[hello.rank]
            rank.writer = writer
            while (report := await _receive(reader)) is not None:
                self._on_report(rank, report)
        except (asyncio.CancelledError, ConnectionError):
            writer.close()

    def _on_report(self, rank: _Rank, report: messages.Report) -> None:
        if isinstance(report, messages.StepOutput):
            self._stats = report.stats
            for output in report.outputs:
                if output.request_id in self._pending:
                    self._pending[output.request_id].outputs.put_nowait(output)
        elif isinstance(report, messages.Loading):
            if self._on_load is not None:
                self._on_load(LoadProgress(report.rank, report.done_bytes, report.total_bytes))
        elif isinstance(report, messages.Ready):
            rank.ready.set_result(report)
        elif isinstance(report, messages.Failed):
            rank.failed = report

    def _spawn_task(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, message: messages.AddRequest | messages.Cancel | messages.Stop) -> None:
        if self._ranks and self._ranks[0].writer is not None and self._failure is None:
            self._ranks[0].writer.write(messages.frame(message))

    # --- requests -------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # raised once per waiting request
        if self._closing:
            raise EngineError("the engine is shutting down")

    async def _prepare(self, request: GenerateRequest, *, room: int = 1) -> messages.AddRequest:
        """Check a request and expand its image spans. `room`: positions needed after the prompt."""
        self._check_alive()
        config = self.checkpoint.config
        _check_ids(request.prompt_token_ids, config.vocab_size)
        images: list[PreparedImage] = []
        if request.images:
            if config.vision is None:
                raise RequestError("this checkpoint cannot see images", param="messages")
            for image in request.images:
                images.append(await asyncio.to_thread(prepare_image, image.data, config.vision))
        token_ids, in_image = expand_spans(request.prompt_token_ids, config.image_token_id, images)
        if len(token_ids) + room > self._max_model_len:
            raise PromptTooLong(len(token_ids), None, self._max_model_len)
        pixels = tuple(
            messages.ImagePixels(i.pixels.tobytes(), *i.pixels.shape[:2], i.token_types) for i in images
        )
        return messages.AddRequest(request.request_id, token_ids, in_image, pixels, request.sampling)

    async def _run(self, message: messages.AddRequest) -> AsyncIterator[messages.RequestOutput]:
        """Send a request and yield its outputs up to the one that ends it; cancels it when left early."""
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
                if output.error is not None:
                    raise EngineError(output.error)
                yield output
        finally:
            del self._pending[message.request_id]
            if not finished:
                self._send(messages.Cancel(message.request_id))


def expand_spans(
    token_ids: tuple[int, ...], image_token_id: int, images: list[PreparedImage]
) -> tuple[tuple[int, ...], bytes]:
    """Replace each image token by its span (spec §9.2): expanded ids and a 0/1 byte per position.

    Raises RequestError when placeholders and images differ in number.
    """
    found = token_ids.count(image_token_id)
    if found != len(images):
        raise RequestError(
            f"prompt has {found} image placeholders but {len(images)} images", param="messages"
        )
    expanded: list[int] = []
    inside = bytearray()
    remaining = iter(images)
    for token_id in token_ids:
        length = len(next(remaining).token_types) if token_id == image_token_id else 1
        expanded += [token_id] * length
        inside += bytes([token_id == image_token_id]) * length
    return tuple(expanded), bytes(inside)


def _check_ids(token_ids: tuple[int, ...], vocab_size: int) -> None:
    if not token_ids:
        raise RequestError("the prompt is empty", param="messages")
    bad = next((i for i in token_ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise RequestError(f"token id {bad} is outside the vocabulary of {vocab_size}", param="messages")


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


def _cause(ended: list[_Rank]) -> EngineError:
    """The most telling end: a signal from outside, then a rank's own report, then whatever is left."""

    def rank_order(rank: _Rank) -> tuple[int, int]:
        code = rank.process.returncode or 0
        if code < 0:
            return (0, rank.number)
        if rank.failed is not None:
            return (2 if rank.failed.is_peer_loss else 1, rank.number)
        return (3, rank.number)

    rank = min(ended, key=rank_order)
    code = rank.process.returncode or 0
    if code < 0:
        return RankDied(rank.number, f"was killed by {signal.Signals(-code).name}")
    if rank.failed is not None:
        return RankDied(rank.number, f"failed: {rank.failed.error}")
    lines = rank.log.read_text(errors="replace").strip().splitlines() if rank.log.exists() else []
    return RankDied(rank.number, f"exited with code {code}" + (f": {lines[-1]}" if lines else ""))


async def _receive(reader: asyncio.StreamReader) -> messages.Report | None:
    """The next report, or None when the rank has closed its end."""
    try:
        prefix = await reader.readexactly(messages.LENGTH_BYTES)
        return messages.report_decoder.decode(await reader.readexactly(messages.frame_length(prefix)))
    except asyncio.IncompleteReadError:
        return None


__all__ = ["EngineClient", "EngineOptions", "LoadProgress", "expand_spans"]
