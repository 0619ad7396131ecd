"""The life of one launch of a fleet, from the first question to a node to the last container's removal.

    old containers -> doctor -> checkpoint on every node -> containers, workers first -> loaded -> receipts
    -> launch gates -> the port opens -> until it is stopped, or a rank ends

Owns this sequence and its end: whatever ends it, and wherever it stands, every container that it started is stopped and
removed, and the record says why. Nothing listens on the fleet's port before the gates have passed: they are asked
through the same gateway on a port that only this machine reaches. Knows no terminal; what happens is written down as
events (`fleet.state`), and whoever wants to see follows those.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from deskfleet.engine.client import EngineOptions, LoadProgress
from deskfleet.engine.process import Patience
from deskfleet.engine.remote_ranks import RemoteRanks
from deskfleet.errors import DeskfleetError, EngineError, RankDied
from deskfleet.fleet import up
from deskfleet.fleet.doctor import see_doctor
from deskfleet.fleet.down import clear
from deskfleet.fleet.engines.contract import ports_of
from deskfleet.fleet.fabric import Fabric
from deskfleet.fleet.follow import Ended, follow, last_lines
from deskfleet.fleet.launch import LaunchSpec, RankLaunch
from deskfleet.fleet.readiness import STALLED_S, LoadReadiness, LogReadiness, Progress
from deskfleet.fleet.remote import Remotes
from deskfleet.fleet.spec import FleetSource, FleetSpec
from deskfleet.fleet.state import FleetState, Phase, Record, now
from deskfleet.gates.contract import Limits
from deskfleet.gates.evidence import write_evidence
from deskfleet.gates.registry import LAUNCH_GATES
from deskfleet.gates.report import GateResult
from deskfleet.gates.run import run_gates, select
from deskfleet.gateway.observation import ObservationSettings
from deskfleet.gateway.policy_file import PolicyStore
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.gateway.upstream.serving import (
    EngineName,
    FrontEvent,
    FrontOptions,
    FrontReady,
    StillWaiting,
    serve_front,
)
from deskfleet.planner.plan import MemoryPlan
from deskfleet.serve import (
    RanksReady,
    Ready,
    ServeEvent,
    ServeOptions,
    check_port,
    default_model_id,
    in_private,
    serve,
)

_PROGRESS_S = 0.5
_OWN_WORDS_S = (
    8.0  # how long the engine's front may take to say itself why it ends: its sentence is the better one
)
_SEE_ENDS_S = 3.0  # after the front's sentence, how long containers may take to have ended
_LAST_LINES = 20
_LOAD_S = 6 * 3600.0  # engines of others: progress decides before this does

_log = logging.getLogger(__name__)


class GatesFailed(DeskfleetError):
    """The fleet runs and its answers are not right, so it was not opened."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Running:
    """What those who attend a launch may look at. `containers` are the ids by rank."""

    spec: FleetSpec
    launch: LaunchSpec
    remotes: Remotes
    containers: Mapping[int, str]
    tell: Callable[..., None]


Attendant = Callable[[Running], Awaitable[DeskfleetError]]
"""Watches a launch from its containers' start on, such as its nodes' memory. What it returns ends the launch."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be launched. `environ` is where secrets are looked up."""

    source: FleetSource
    launch_id: str
    digest: str
    environ: Mapping[str, str]
    gates: up.GateChoice = field(default_factory=up.GateChoice)
    attendants: Sequence[Attendant] = ()


class Diary:
    """What is known of the launch: the record, and the events."""

    def __init__(self, state: FleetState, order: Order) -> None:
        self._state = state
        self.launch = state.launch(order.launch_id)
        self.launch.make()
        at = now()
        self._record = Record(
            launch_id=order.launch_id,
            pid=os.getpid(),
            phase="checking",
            started_at=at,
            changed_at=at,
            fleet_file=str(order.source.spec.path),
            digest=order.digest,
        )

    @property
    def phase(self) -> Phase:
        """How far it is."""
        return self._record.phase

    def enter(self, phase: Phase, **values: Any) -> None:
        """The launch has come to another phase; values are fields of the record, and what else is told."""
        known = {name: values[name] for name in values if name in Record.__struct_fields__}
        self._record = msgspec.structs.replace(self._record, phase=phase, changed_at=now(), **known)
        self._state.write_record(self._record)
        self.tell("phase", phase=phase, **values)

    def tell(self, event: str, **values: Any) -> None:
        """Something has happened."""
        self.launch.append(event, **values)


async def supervise(
    order: Order,
    state: FleetState,
    store: PolicyStore | None,
    *,
    until: asyncio.Event,
    on_settled: Callable[[], None] = lambda: None,
) -> int:
    """Live through one launch, until `until` is set or it fails; return the exit code, 0 when it was stopped.

    `on_settled` is called once, when the fleet serves or has ended. `store` are the gateway's settings and keys.
    """
    diary = Diary(state, order)
    launching = _Launching(order, diary, store, on_settled)
    diary.enter("checking")
    code = 3
    reason: str | None = "the supervisor itself failed; its log has the trace"
    try:
        try:
            await _until(launching.run(), until)
            code, reason = 0, None
        except DeskfleetError as error:
            code, reason = error.exit_code, await launching.tell_failure(error)
        finally:
            left = await asyncio.shield(launching.end())
            if left and code == 0:
                code, reason = 3, left
            elif left:
                reason = f"{reason}; {left}"
    finally:
        diary.enter("stopped" if code == 0 else "failed", reason=reason, exit_code=code)
        on_settled()
    return code


async def _until(work: Awaitable[None], until: asyncio.Event) -> None:
    """Do `work` until it ends or `until` is set."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(until.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        for task in (working, stopping):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, DeskfleetError):
            await working


class _Launching:
    """One launch under way: what has been started, and so has to be ended."""

    def __init__(
        self, order: Order, diary: Diary, store: PolicyStore | None, on_settled: Callable[[], None]
    ) -> None:
        self._order = order
        self._diary = diary
        self._store = store
        self._on_settled = on_settled
        self._spec = order.source.spec
        self._launch: LaunchSpec | None = None
        self._containers: dict[int, str] = {}
        self._followers: set[asyncio.Task[Ended]] = set()
        self._ended: list[Ended] = []
        self._logs: LogReadiness | None = None
        self._told_s = 0.0
        self._has_asked_docker = False

    # --- the sequence -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """From nothing to serving, and on; ends with an error, or is cancelled."""
        spec, diary = self._spec, self._diary
        check_port(spec.gateway.host, spec.gateway.port)
        async with Remotes(spec.nodes) as remotes:
            plan = await asyncio.to_thread(up.plan_launch, self._order.source)
            await self._remove_old(remotes)
            found = await see_doctor(spec, remotes, plan)
            for finding in found.findings:
                if finding.verdict in ("fail", "warn"):
                    diary.tell("finding", **msgspec.to_builtins(finding))
            up.check_obstacles(found)
            await up.check_checkpoint(spec, remotes)
            checkpoint = await up.checkpoint_here(spec, remotes, diary.launch)
            is_native = plan.layout.engine == up.NATIVE
            place = await up.meeting_place(spec, remotes, found.fabric) if is_native else None
            launch = up.render(
                self._order.source,
                plan,
                found.fabric,
                found.facts,
                launch_id=self._order.launch_id,
                place=place,
            )
            self._launch = launch
            diary.launch.write_spec(launch)
            for warning in launch.warnings:
                diary.tell("warning", text=warning)
            token = secrets.token_urlsafe(32)
            values = up.secret_values(launch, spec, self._order.environ, token=token)
            settings = gateway_settings(spec, checkpoint, self._store)
            loop_s = asyncio.get_running_loop().time()
            self._logs = None if is_native else LogReadiness(launch, loop_s)
            diary.enter("starting", ranks=[{"rank": rank.rank, "node": rank.node} for rank in launch.ranks])
            self._has_asked_docker = True
            await up.start_ranks(
                remotes, launch, spec, values, lambda rank, id_: self._follow(remotes, rank, id_)
            )
            diary.enter("loading")
            if place is not None:
                starter = self._starter(launch, place, found.fabric, token)
                work = self._serve_native(settings, plan, starter)
            else:
                work = self._serve_front(settings, launch)
            async with self._attended(remotes, launch) as trouble:
                await self._watched(work, trouble)

    async def _remove_old(self, remotes: Remotes) -> None:
        """Containers of older launches of this fleet are in the way."""
        cleared = await clear(remotes, self._spec.name)
        for node, container in cleared.removed:
            self._diary.tell("removed", node=node, container=container.name, launch=container.launch_id)
        for failure in cleared.failures.values():
            raise failure

    def _starter(self, launch: LaunchSpec, place: tuple[str, int], fabric: Fabric, token: str) -> RemoteRanks:
        head = self._spec.head
        known = fabric.nodes.get(head.name)
        address = known.rendezvous if known is not None and known.rendezvous else head.fabric[0]
        return RemoteRanks(
            host=place[0],
            port=place[1],
            launch_id=launch.launch_id,
            token=token,
            meeting_point=(address, ports_of(self._spec.name).rendezvous),
            nodes=[rank.node for rank in launch.ranks],
            patience=Patience(),
        )

    async def _serve_native(self, settings: GatewaySettings, plan: MemoryPlan, starter: RemoteRanks) -> None:
        readiness = LoadReadiness(plan.layout.tp_size, asyncio.get_running_loop().time())

        def on_event(event: ServeEvent) -> None:
            if isinstance(event, LoadProgress):
                loop_s = asyncio.get_running_loop().time()
                self._tell_progress(readiness.feed(event.rank, event.done_bytes, event.total_bytes, loop_s))
            elif isinstance(event, RanksReady):
                self._diary.tell("receipts", ranks=[msgspec.to_builtins(each) for each in event.receipts])
            elif isinstance(event, Ready):
                self._opened(event.endpoint.url, event.endpoint.model_id, event.endpoint.max_model_len)

        trial = None if self._order.gates.none else self._ask_gates
        options = ServeOptions(settings, native_options(plan), starter=starter, trial=trial)
        await serve(options, on_event=on_event)

    async def _serve_front(self, settings: GatewaySettings, launch: LaunchSpec) -> None:
        """Engines of others: wait for the one on the head, ask gates, then open."""
        kind: EngineName = "sglang" if launch.engine == "sglang" else "vllm"
        tried = asyncio.Event()
        trials: list[asyncio.Task[None]] = []

        async def try_out(url: str) -> None:
            try:
                self._check_receipts()
                if not self._order.gates.none:
                    await self._ask_gates(url)
            finally:
                tried.set()

        def on_private(event: FrontEvent) -> None:
            if isinstance(event, FrontReady):
                trials.append(asyncio.ensure_future(try_out(event.endpoint.url)))

        def on_public(event: FrontEvent) -> None:
            if isinstance(event, FrontReady):
                self._opened(event.endpoint.url, event.endpoint.model_id, event.endpoint.max_model_len)
            elif isinstance(event, StillWaiting):
                self._diary.tell("waiting", text=event.reason)

        private = FrontOptions(in_private(settings), (launch.endpoint,), kind, wait_s=_LOAD_S)
        try:
            await serve_front(private, on_event=on_private, until=tried)
            await asyncio.gather(*trials)
        finally:
            for trial in trials:
                trial.cancel()
        public = FrontOptions(settings, (launch.endpoint,), kind)
        await serve_front(public, check_address=check_port, on_event=on_public)

    def _check_receipts(self) -> None:
        assert self._logs is not None
        self._diary.tell("receipts", shown=dict(self._logs.receipts()))
        lacking = self._logs.lacking()
        if lacking:
            raise EngineError("not opened: " + "; ".join(lacking))

    async def _ask_gates(self, url: str) -> None:
        """Raises GatesFailed unless every launch gate passes."""
        choice = self._order.gates
        gates = select(LAUNCH_GATES, choice.only, choice.skip)
        self._diary.enter("asking", gates=len(gates))

        def on_result(result: GateResult) -> None:
            finding = result.finding
            said = finding.measured if finding.verdict == "pass" else finding.reason
            self._diary.tell("gate", gate=result.gate.name, verdict=finding.verdict, text=said)

        gateway = self._spec.gateway
        public = f"http://{gateway.host}:{gateway.port}"  # where the same can be asked again
        report = await run_gates(url, gates, Limits(), verb="smoke", target=public, on_result=on_result)
        if report.exit_code != 0:
            directory = str(self._diary.launch.directory / "evidence")
            report = await asyncio.to_thread(write_evidence, report, directory)
        self._diary.launch.write_report(report.to_dict())
        if report.exit_code != 0:
            bad = [each for each in report.results if each.verdict != "pass"]
            said = "; ".join(f"{each.gate.name}: {each.finding.reason}" for each in bad[:3])
            raise GatesFailed(
                f"not opened: of {len(report.results)} launch gates {len(bad)} did not pass: {said}",
                hint=f"every exchange is in {report.evidence_dir}",
            )

    def _opened(self, url: str, model_id: str, max_model_len: int) -> None:
        self._diary.enter("serving", url=url, model_id=model_id, max_model_len=max_model_len)
        self._on_settled()

    # --- watching ---------------------------------------------------------------------------------------

    def _follow(self, remotes: Remotes, rank: RankLaunch, container_id: str) -> None:
        self._containers[rank.rank] = container_id
        self._diary.tell(
            "container", rank=rank.rank, node=rank.node, container=rank.container, id=container_id
        )
        log = self._diary.launch.rank_log(rank.rank)
        task = asyncio.ensure_future(follow(remotes[rank.node], rank, container_id, log, self._read_line))
        self._followers.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[Ended]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._ended.append(task.result())

    def _read_line(self, rank: int, line: str) -> None:
        if self._logs is None:
            return
        progress = self._logs.feed(rank, line, asyncio.get_running_loop().time())
        if progress is not None:
            self._tell_progress(progress)

    def _tell_progress(self, progress: Progress) -> None:
        loop_s = asyncio.get_running_loop().time()
        if progress.share < 1 and loop_s - self._told_s < _PROGRESS_S:
            return
        self._told_s = loop_s
        eta_s = None if progress.eta_s is None else round(progress.eta_s, 1)
        self._diary.tell("progress", share=round(progress.share, 4), what=progress.what, eta_s=eta_s)

    @asynccontextmanager
    async def _attended(
        self, remotes: Remotes, launch: LaunchSpec
    ) -> AsyncIterator[asyncio.Future[DeskfleetError]]:
        """Attendants at work; the future is the first trouble that one of them reports."""
        running = Running(self._spec, launch, remotes, dict(self._containers), self._diary.tell)
        trouble: asyncio.Future[DeskfleetError] = asyncio.get_running_loop().create_future()

        async def attend(attendant: Attendant) -> None:
            error = await attendant(running)
            if not trouble.done():
                trouble.set_result(error)

        tasks = [asyncio.ensure_future(attend(each)) for each in (*self._order.attendants, self._see_stall)]
        try:
            yield trouble
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            trouble.cancel()

    async def _see_stall(self, running: Running) -> DeskfleetError:
        """Other engines' logs say nothing any more while they load. Our own ranks have heartbeats."""
        while True:
            await asyncio.sleep(10.0)
            logs = self._logs
            if logs is None or self._diary.phase != "loading":
                continue
            silent_s = asyncio.get_running_loop().time() - logs.heard_s
            if silent_s > STALLED_S:
                return EngineError(f"no rank has logged anything for {silent_s:.0f} s while loading")

    async def _watched(self, work: Awaitable[None], trouble: asyncio.Future[DeskfleetError]) -> None:
        """Serve until that ends, a container ends, or an attendant reports trouble."""
        serving = asyncio.ensure_future(work)
        try:
            waited: list[asyncio.Future[Any]] = [serving, trouble, *self._followers]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done() and not trouble.done():
                await asyncio.wait((serving,), timeout=_OWN_WORDS_S)
            if serving.done():
                await serving
            if trouble.done():
                raise trouble.result()
            await asyncio.sleep(0)  # the followers' callbacks
            first = self._ended[0]
            raise RankDied(first.rank, f"on {first.node}: {first.sentence}")
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    # --- the end ----------------------------------------------------------------------------------------

    async def tell_failure(self, error: DeskfleetError) -> str:
        """Write down why, with the end of the log of the rank that it was. Returns the sentence."""
        rank = error.rank if isinstance(error, RankDied | up.StartFailed) else None
        if rank is not None and self._followers and not self._ended:
            await asyncio.wait(self._followers, timeout=_SEE_ENDS_S, return_when=asyncio.FIRST_COMPLETED)
        if rank is None and self._ended:
            rank = self._ended[0].rank
        lines = [] if rank is None else last_lines(self._diary.launch.rank_log(rank), _LAST_LINES)
        self._diary.tell(
            "failure",
            reason=error.message,
            hint=error.hint,
            exit_code=error.exit_code,
            type=type(error).__name__,
            rank=rank,
            containers=[each.sentence for each in self._ended],
            last_lines=lines,
        )
        known = [
            each.sentence for each in self._ended if each.rank == rank and each.sentence not in error.message
        ]
        return "; ".join([error.message, *known])

    async def end(self) -> str | None:
        """Stop and remove what this launch has started. Returns a sentence about what may still run."""
        if not self._has_asked_docker or self._launch is None:
            return None
        self._diary.enter("stopping")
        launch_id = self._launch.launch_id
        async with Remotes(self._spec.nodes) as remotes:
            cleared = await clear(remotes, self._spec.name, which=lambda each: each.launch_id == launch_id)
        if self._followers:
            await asyncio.wait(self._followers, timeout=_SEE_ENDS_S)
        for task in self._followers:
            task.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        left = {node: self._launch.on_node(node) for node in cleared.failures}
        names = [f"{rank.container} on {node}" for node, ranks in left.items() for rank in ranks]
        if not names:
            return None
        first = next(iter(cleared.failures.values()))
        return f"what may still run: {', '.join(names)} ({first.message})"


def native_options(plan: MemoryPlan) -> EngineOptions:
    """How our own engine runs what was planned."""
    layout = plan.layout
    return EngineOptions(
        tp_size=layout.tp_size,
        dcp_size=layout.dcp_size,
        max_model_len=layout.max_model_len,
        max_num_seqs=layout.max_num_seqs,
        max_num_batched_tokens=layout.chunk_tokens,
        kv_cache_tokens=layout.kv_tokens,
        speculation=f"k={layout.num_drafts}" if layout.num_drafts else "off",
    )


def served_model_id(spec: FleetSpec, checkpoint: Path | None = None) -> str:
    """The name that clients ask for."""
    if spec.gateway.model_id is not None:
        return spec.gateway.model_id
    model = spec.checkpoint.model
    return default_model_id(checkpoint or Path(model)) if Path(model).is_absolute() else model


def gateway_settings(spec: FleetSpec, checkpoint: Path, store: PolicyStore | None) -> GatewaySettings:
    """The gateway as the fleet's file asks for it. Raises ConfigError."""
    gateway = spec.gateway
    return GatewaySettings(
        model_id=served_model_id(spec, checkpoint),
        checkpoint=checkpoint,
        host=gateway.host,
        port=gateway.port,
        default_thinking=gateway.thinking,
        policies=store,
        observation=ObservationSettings(access_log=gateway.access_log, traces=gateway.traces),
        debug_answers=gateway.debug_answers,
    )


def open_store(spec: FleetSpec) -> PolicyStore | None:
    """Settings and keys that the fleet's file names; None where it names none. Raises ConfigError."""
    gateway = spec.gateway
    if gateway.policies is None and gateway.keys is None:
        return None
    return PolicyStore(
        path=None if gateway.policies is None else Path(gateway.policies),
        keys_path=None if gateway.keys is None else Path(gateway.keys),
        model_ids=[served_model_id(spec)],
    )


__all__ = [
    "Attendant",
    "Diary",
    "GatesFailed",
    "Order",
    "Running",
    "gateway_settings",
    "native_options",
    "open_store",
    "served_model_id",
    "supervise",
]
