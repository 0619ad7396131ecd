"""One rank process: `python -m deskfleet.engine.rank rank.json`. Owns its life from start to exit.

A rank reads one file, reports to its supervisor over one socket, and never outlives it: the kernel kills it
with its parent, and a closed socket ends it too. Whatever goes wrong is reported in one sentence before exit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from deskfleet.engine import messages, ops, trace
from deskfleet.engine.constraints import ConstraintCompiler
from deskfleet.engine.core import CoreOptions, EngineCore
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.memory import (
    census,
    give_back_free_heap,
    host_available_bytes,
    process_memory,
    resident_bytes,
)
from deskfleet.engine.model.engram import Tables
from deskfleet.engine.runner import ModelRunner
from deskfleet.engine.spec import RankSpec
from deskfleet.engine.speculate import SpeculationOptions
from deskfleet.errors import DeskfleetError
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.memory import RankMemory
from deskfleet.model.names import TensorClass
from deskfleet.model.packs import PackedTables
from deskfleet.model.tokenizer import load_tokenizer, thinking_tokens
from deskfleet_engram.errors import EngramError
from deskfleet_engram.tokens import check_size, compressed_token_map

_PR_SET_PDEATHSIG = 1
_REPORT_EVERY_BYTES = 1 << 24
_HEARTBEAT_S = 1.0
_QUEUE_SHOWN = 256


class Control:
    """The rank's end of the supervisor's socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._buffer = bytearray()
        self._lock = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Report to the supervisor."""
        with self._lock:
            self._socket.sendall(messages.frame(message))

    def receive(self, *, block: bool) -> list[messages.Command]:
        """Commands that have arrived; waits for one when `block`. Exits the process when the supervisor is gone."""
        commands: list[messages.Command] = []
        while True:
            commands += self._parse()
            if commands and block:
                return commands
            ready, _, _ = select.select([self._socket], [], [], None if block else 0)
            if not ready:
                return commands
            received = self._socket.recv(1 << 20)
            if not received:
                os._exit(DeskfleetError.exit_code)
            self._buffer += received

    def exit_with_supervisor(self) -> None:
        """For ranks that take no commands: end this process as soon as the supervisor closes the socket."""

        def watch() -> None:
            while self._socket.recv(4096):
                pass
            os._exit(DeskfleetError.exit_code)

        threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()

    def beat(self, heartbeat: Callable[[], messages.Heartbeat]) -> None:
        """Report every second that this process lives and where its main thread is, for as long as it does."""

        def report() -> None:
            with contextlib.suppress(OSError):  # the supervisor is gone, and this process is on its way out
                while True:
                    self.send(heartbeat())
                    time.sleep(_HEARTBEAT_S)

        threading.Thread(target=report, name="heartbeat", daemon=True).start()

    def _parse(self) -> list[messages.Command]:
        commands = []
        while len(self._buffer) >= messages.LENGTH_BYTES:
            stop = messages.LENGTH_BYTES + messages.frame_length(bytes(self._buffer[: messages.LENGTH_BYTES]))
            if len(self._buffer) < stop:
                break
            commands.append(
                messages.command_decoder.decode(bytes(self._buffer[messages.LENGTH_BYTES : stop]))
            )
            del self._buffer[:stop]
        return commands


def token_map(checkpoint: Checkpoint) -> np.ndarray:
    """Compressed id of every token (spec §7.1), checked against the configuration."""
    compressed = compressed_token_map(load_tokenizer(checkpoint.directory))
    if checkpoint.config.engram_layer_ids:
        check_size(compressed, checkpoint.config.engram_compressed_vocab_size)
    return compressed


def run(spec: RankSpec, control: Control) -> None:
    """Load, meet the group, and serve until told to stop."""
    begin = time.monotonic()
    torch.set_num_threads(spec.num_threads)
    operators = str(ops.select(spec.operators))
    checkpoint = Checkpoint.open(Path(spec.checkpoint))
    plan = ShardPlan(checkpoint.config, Layout(spec.tp_size))
    compressed = token_map(checkpoint)
    comm = Communicator.join(spec.rank, spec.tp_size, spec.rendezvous)
    before = process_memory()
    with_drafts = _speculation(spec, checkpoint).num_drafts > 0
    progress = _Progress(control, spec.rank, _bytes_to_read(plan, spec.rank, with_drafts=with_drafts))
    runner = ModelRunner(
        checkpoint,
        plan,
        comm,
        spec.limits,
        pad_compressed_id=int(compressed[checkpoint.config.engram_pad_token_id]),
        with_drafts=with_drafts,
        on_read=progress.add,
        pack=_pack(spec),
    )
    control.beat(lambda: _heartbeat(spec.rank, runner))
    # Before ready: a tokenizer of full size takes a second, which the first request must not wait for.
    core = _core(spec, checkpoint, runner, compressed) if spec.rank == 0 else None
    trace.start(spec.rank, runner, core)
    give_back_free_heap()
    memory = RankMemory(spec.rank, census(runner), before, process_memory())
    load_s = time.monotonic() - begin
    tables = runner.model.tables
    control.send(
        messages.Ready(
            spec.rank, progress.done_bytes, runner.cache.nbytes, load_s, tables.report, operators, memory
        )
    )
    if core is not None:
        _lead(core, tables, control)
        runner.stop()
    else:
        control.exit_with_supervisor()
        while runner.follow():
            control.send(messages.EngramReads(spec.rank, tables.stats))
    runner.close()


def _heartbeat(rank: int, runner: ModelRunner) -> messages.Heartbeat:
    progress = runner.progress
    return messages.Heartbeat(
        rank=rank,
        num_passes=progress.num_passes,
        num_moves=progress.num_moves + runner.model.num_layers_run,
        state=progress.state,
        num_tokens=progress.num_tokens,
        last_pass_age_s=progress.last_pass_age_s,
        memory_bytes=resident_bytes(),
        host_available_bytes=host_available_bytes(),
    )


def _core(spec: RankSpec, checkpoint: Checkpoint, runner: ModelRunner, compressed: np.ndarray) -> EngineCore:
    tokenizer = load_tokenizer(checkpoint.directory)
    config = checkpoint.config
    return EngineCore(
        runner,
        compressed,
        CoreOptions(
            max_num_batched_tokens=spec.max_num_batched_tokens,
            speculation=_speculation(spec, checkpoint),
            prefix_cache=spec.prefix_cache,
            prefix_replay=spec.prefix_replay,
        ),
        constraints=ConstraintCompiler(tokenizer, config.vocab_size, config.eos_token_id),
        thinking=thinking_tokens(tokenizer),
    )


def _speculation(spec: RankSpec, checkpoint: Checkpoint) -> SpeculationOptions:
    return SpeculationOptions.parse(spec.speculation, checkpoint.config.dspark_block_size)


def _pack(spec: RankSpec) -> PackedTables | None:
    if spec.engram_pack is None:
        return None
    return PackedTables(Path(spec.engram_pack), spec.engram_second_source)


def _lead(core: EngineCore, tables: Tables, control: Control) -> None:
    while True:
        before, outputs = core.stats, []
        for command in control.receive(block=not core.has_work):
            if isinstance(command, messages.Stop):
                return
            if isinstance(command, messages.AddRequest):
                refusal = core.add(command)
                outputs += [refusal] if refusal is not None else []
            else:
                core.cancel(command)
        if core.has_work:
            outputs += core.step()
            control.send(messages.EngramReads(0, tables.stats))
        if outputs or core.stats != before:
            queue = core.scheduler.queue(_QUEUE_SHOWN)
            control.send(messages.StepOutput(tuple(outputs), core.stats, queue))


def _bytes_to_read(plan: ShardPlan, rank: int, *, with_drafts: bool) -> int:
    """Bytes a rank loads: Engram tables stay on disk, drafts if they are served, and only rank 0 sees images."""
    left_out = {TensorClass.engram} | ({TensorClass.vision} if rank > 0 else set())
    if not with_drafts:
        left_out.add(TensorClass.draft)
    return sum(num_bytes for kind, num_bytes in plan.rank_bytes(rank).items() if kind not in left_out)


class _Progress:
    """Reports bytes read, not more often than is worth drawing."""

    def __init__(self, control: Control, rank: int, total_bytes: int) -> None:
        self._control = control
        self._rank = rank
        self._total_bytes = total_bytes
        self._reported_bytes = 0
        self.done_bytes = 0

    def add(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes
        if self.done_bytes - self._reported_bytes >= min(_REPORT_EVERY_BYTES, self._total_bytes // 50 + 1):
            self._reported_bytes = self.done_bytes
            self._control.send(messages.Loading(self._rank, self.done_bytes, self._total_bytes))


def _die_with_parent(parent_pid: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the request above took hold
        os._exit(DeskfleetError.exit_code)


def _is_peer_loss(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone; gloo says so only in words."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("connection closed by peer", "connection reset", "broken pipe", "gloo")
    )


def main(path: str) -> int:
    """Run the rank described by the file at `path`; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's; it stops ranks in order
    spec = msgspec.json.decode(Path(path).read_bytes(), type=RankSpec)
    _die_with_parent(spec.parent_pid)
    control = Control(spec.control_socket)
    control.send(messages.Hello(spec.rank, os.getpid()))
    try:
        run(spec, control)
    except DeskfleetError as error:
        control.send(messages.Failed(spec.rank, error.message, is_peer_loss=False, hint=error.hint))
        return DeskfleetError.exit_code
    except EngramError as error:
        control.send(messages.Failed(spec.rank, str(error), is_peer_loss=False))
        return DeskfleetError.exit_code
    except Exception as error:
        is_peer_loss = _is_peer_loss(error)
        # torch appends a stack to its messages; the sentence is in the first line, and the rest goes to the log.
        sentence = f"{type(error).__name__}: {error}".splitlines()[0]
        control.send(messages.Failed(spec.rank, sentence, is_peer_loss))
        if not is_peer_loss:
            raise
        return DeskfleetError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
