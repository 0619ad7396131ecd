"""One rank process: `python -m deskfleet.engine.rank rank.json`. Owns its life from start to exit.

A rank reads one file, reports to its supervisor over one socket, and never outlives it: the kernel kills it
with its parent, and a closed socket ends it too. Whatever goes wrong is reported in one sentence before exit.
`serve` is also what a rank does that came from another machine (`guest`).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import logging
import os
import platform
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from deskfleet import __version__
from deskfleet.engine import messages, ops, trace
from deskfleet.engine.backends import DeviceOptions, select
from deskfleet.engine.control import Control, Exit
from deskfleet.engine.core import CoreOptions, EngineCore
from deskfleet.engine.distributed import Communicator, GlooCommunicator, Meeting, PeerLost
from deskfleet.engine.identity import checkpoint_identity, plan_digest, token_map_digest
from deskfleet.engine.memory import (
    census,
    device_census,
    give_back_free_heap,
    host_available_bytes,
    process_memory,
    resident_bytes,
)
from deskfleet.engine.model.engram import Tables
from deskfleet.engine.progress import Progress
from deskfleet.engine.runner import ModelRunner
from deskfleet.engine.spec import LocalRank, RankPaths, RankSpec
from deskfleet.engine.speculate import SpeculationOptions
from deskfleet.errors import CheckpointError, DeskfleetError, EngineError
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.config import ModelConfig
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.memory import RankMemory
from deskfleet.model.names import TensorClass
from deskfleet.model.packs import PackedTables, check_pack
from deskfleet.model.tokenizer import load_tokenizer, thinking_tokens
from deskfleet.units import format_bytes
from deskfleet_engram.errors import EngramError
from deskfleet_engram.manifest import MANIFEST_NAME, read_manifest
from deskfleet_engram.tokens import check_size, compressed_token_map

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from deskfleet.engine.constraints import ConstraintCompiler

_PR_SET_PDEATHSIG = 1
_REPORT_EVERY_BYTES = 1 << 24
_QUEUE_SHOWN = 256
_PEER_LOSS = ("connection closed by peer", "connection reset", "broken pipe", "gloo", "ncclremoteerror")

logger = logging.getLogger(__name__)


def token_map(checkpoint: Checkpoint) -> np.ndarray:
    """Compressed id of every token (spec §7.1), checked against the configuration."""
    compressed = compressed_token_map(load_tokenizer(checkpoint.directory))
    if checkpoint.config.engram_layer_ids:
        check_size(compressed, checkpoint.config.engram_compressed_vocab_size)
    return compressed


def run(spec: RankSpec, paths: RankPaths, control: Control, group_memory: int | None = None) -> None:
    """Load, meet the group, and serve until told to stop. For `group_memory` see LocalRank."""
    begin = time.monotonic()
    pulse = _Pulse(spec.rank)
    control.beat(pulse.heartbeat)
    torch.set_num_threads(spec.num_threads or len(os.sched_getaffinity(0)))
    meeting = choose_meeting(spec.tp_size, group_memory)
    checkpoint = _open_same(spec, paths)
    operators = select(spec.device, spec.operators, checkpoint.config)
    plan = ShardPlan(checkpoint.config, Layout(spec.tp_size))
    compressed = token_map(checkpoint)
    if spec.checks_pack and paths.engram_pack is not None:
        ranks = range(spec.tp_size)
        columns = [plan.engram_columns(rank) if rank == spec.rank else () for rank in ranks]
        check_pack(Path(paths.engram_pack), checkpoint.directory, columns)
    control.send(_receipt(spec, paths, plan, compressed, operators, meeting))
    check_room(spec)
    comm = _meet(meeting, spec, group_memory)
    before = process_memory()
    with_drafts = _speculation(spec, checkpoint).num_drafts > 0
    to_read = _bytes_to_read(plan, spec.rank, with_drafts=with_drafts)
    progress = _Progress(control, spec.rank, to_read)
    runner = ModelRunner(
        checkpoint,
        plan,
        comm,
        spec.limits,
        pad_compressed_id=int(compressed[checkpoint.config.engram_pad_token_id]),
        with_drafts=with_drafts,
        on_read=progress.add,
        pack=_pack(spec, paths),
        device=spec.device,
        device_options=DeviceOptions(spec.max_num_batched_tokens, spec.graphs, spec.rendezvous),
    )
    # Before ready: a tokenizer of full size takes a second, which the first request must not wait for.
    core = _core(spec, checkpoint, runner, compressed) if spec.rank == 0 else None
    trace.start(spec.rank, runner, core)
    give_back_free_heap()
    memory = RankMemory(spec.rank, census(runner), before, process_memory(), device_census(runner))
    load_s = time.monotonic() - begin
    tables, between = runner.backend.engram_tables, runner.backend.device_exchange
    pulse.runner = runner
    control.send(
        messages.Ready(
            spec.rank,
            progress.done_bytes,
            runner.backend.cache_bytes,
            load_s,
            tables.report,
            str(operators),
            memory,
            str(meeting) if between is None else f"{meeting}; GPUs: {between}",
        )
    )
    if core is not None:
        _lead(core, tables, control)
        runner.stop()
    else:
        while runner.follow():
            control.send(messages.EngramReads(spec.rank, tables.stats))
    runner.close()


def check_room(spec: RankSpec) -> None:
    """Raise EngineError when this machine cannot give what the plan has this rank hold."""
    available_bytes = host_available_bytes()
    if spec.planned_bytes is None or available_bytes is None:
        return
    missing_bytes = spec.planned_bytes - resident_bytes() - available_bytes
    if missing_bytes > 0:
        raise EngineError(
            f"its plan is {format_bytes(spec.planned_bytes)}, and its machine has "
            f"{format_bytes(available_bytes)} available, {format_bytes(missing_bytes)} too few",
            hint="end what else runs there, or plan for less: deskfleet plan",
        )


def choose_meeting(tp_size: int, group_memory: int | None) -> Meeting:
    """How this rank meets the others: through the memory that it was given, unless that cannot be used here."""
    if tp_size == 1:
        return Meeting("none", "none", "one rank")
    if group_memory is None:
        return Meeting("gloo", "gloo", "over TCP")
    try:
        importlib.import_module("deskfleet.engine.shared_memory")
    except ImportError as error:  # no distribution deskfleet-ops, or its library cannot be loaded
        return Meeting("shared memory", "gloo", f"several times slower, because {error}")
    return Meeting("shared memory", "shared memory", "ranks of one machine")


def _meet(meeting: Meeting, spec: RankSpec, group_memory: int | None) -> Communicator:
    if meeting.got == "shared memory" and group_memory is not None:
        from deskfleet.engine.shared_memory import SharedMemoryCommunicator

        return SharedMemoryCommunicator.join(spec.rank, spec.tp_size, group_memory)
    if meeting.got == "gloo":
        return GlooCommunicator.join(spec.rank, spec.tp_size, spec.rendezvous)
    return Communicator()


def _open_same(spec: RankSpec, paths: RankPaths) -> Checkpoint:
    """Open the checkpoint. Raises CheckpointError for another one than the supervisor has."""
    checkpoint = Checkpoint.open(Path(paths.checkpoint))
    identity = checkpoint_identity(checkpoint)
    if identity != spec.checkpoint_identity:
        raise CheckpointError(
            f"{paths.checkpoint} is not the checkpoint that the supervisor has: its identity is "
            f"{identity[:16]}, the supervisor's {spec.checkpoint_identity[:16]}",
            hint="copy the checkpoint anew, all files of it",
        )
    return checkpoint


def _receipt(
    spec: RankSpec,
    paths: RankPaths,
    plan: ShardPlan,
    compressed: np.ndarray,
    operators: ops.Selection,
    meeting: Meeting,
) -> messages.Receipt:
    source, rows, manifest = None, None, None
    if plan.config.engram_layer_ids:
        source = messages.PUBLISHED_SHARDS
        if paths.engram_pack is not None:
            source = paths.engram_pack
            rows = read_manifest(Path(source)).identity.sha256.hex()
            manifest = hashlib.sha256((Path(source) / MANIFEST_NAME).read_bytes()).hexdigest()
    return messages.Receipt(
        rank=spec.rank,
        node=socket.gethostname(),
        pid=os.getpid(),
        deskfleet=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        checkpoint=spec.checkpoint_identity,
        shard_plan=plan_digest(plan),
        token_map=token_map_digest(compressed),
        operators_asked=operators.asked,
        operators=operators.got,
        operators_detail=operators.detail,
        engram_source=source,
        engram_rows=rows,
        engram_manifest=manifest,
        collectives_asked=meeting.asked,
        collectives=meeting.got,
        collectives_detail=meeting.detail,
    )


class _Pulse:
    """What a rank's heartbeats say: that it loads, and once there is a `runner`, what that is at."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.runner: ModelRunner | None = None

    def heartbeat(self) -> messages.Heartbeat:
        runner = self.runner
        progress = Progress() if runner is None else runner.progress
        return messages.Heartbeat(
            rank=self._rank,
            num_passes=progress.num_passes,
            num_moves=progress.num_moves + (0 if runner is None else runner.backend.num_layers_run),
            state="loading" if runner is None else progress.state,
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
        constraints=_constraints(tokenizer, config),
        thinking=thinking_tokens(tokenizer),
    )


def _constraints(tokenizer: Tokenizer, config: ModelConfig) -> ConstraintCompiler | None:
    """Without the library of grammars, requests that need one are refused."""
    try:
        from deskfleet.engine.constraints import ConstraintCompiler
    except ImportError as error:
        logger.warning("answers cannot be constrained: %s", error)
        return None
    return ConstraintCompiler(tokenizer, config.vocab_size, config.eos_token_id)


def _speculation(spec: RankSpec, checkpoint: Checkpoint) -> SpeculationOptions:
    return SpeculationOptions.parse(spec.speculation, checkpoint.config.dspark_block_size)


def _pack(spec: RankSpec, paths: RankPaths) -> PackedTables | None:
    if paths.engram_pack is None:
        return None
    return PackedTables(Path(paths.engram_pack), spec.engram_second_source)


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
    """Whether a collective failed because another rank is gone; gloo and NCCL say so only in words."""
    if isinstance(error, PeerLost):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _PEER_LOSS)


def serve(
    spec: RankSpec, paths: RankPaths, control: Control, group_memory: int | None = None
) -> messages.Failed | None:
    """Run the rank to its end. What it failed with has been reported when this returns it."""
    try:
        run(spec, paths, control, group_memory)
    except DeskfleetError as error:
        failed = messages.Failed(spec.rank, error.message, _is_peer_loss(error), hint=error.hint)
    except EngramError as error:
        failed = messages.Failed(spec.rank, str(error), is_peer_loss=False)
    except Exception as error:
        is_peer_loss = _is_peer_loss(error)
        # torch appends a stack to its messages; the sentence is in the first line, and the rest goes to the log.
        failed = messages.Failed(spec.rank, f"{type(error).__name__}: {error}".splitlines()[0], is_peer_loss)
        if not is_peer_loss:
            logger.exception("rank %d raised what nobody foresaw", spec.rank)
    else:
        return None
    control.send_last(failed)
    return failed


def main(path: str) -> int:
    """Run the rank described by the file at `path`; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's; it stops ranks in order
    local = msgspec.json.decode(Path(path).read_bytes(), type=LocalRank)
    _die_with_parent(local.parent_pid)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(local.control_socket)
    control = Control(connection, Exit(local.spec.rank))
    control.send(messages.Hello(local.spec.rank, os.getpid()))
    failed = serve(local.spec, local.paths, control, local.group_memory)
    if failed is not None:
        # Its peers are in the middle of a collective, and torch's threads may abort where the interpreter winds down.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(DeskfleetError.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
