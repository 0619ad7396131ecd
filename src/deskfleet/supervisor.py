"""The life of a fleet: its launches, each from the first question to a node to the last container's removal.

    old containers -> doctor -> checkpoint on every node -> containers, workers first -> loaded -> receipts
    -> launch gates -> the port opens -> until it is stopped, or a rank ends -> (waits) -> another launch

Owns this sequence and its end: whatever ends a launch, and wherever it stands, every container that it started is
stopped and removed, and the record says why. A fleet that has served is launched again when `fleet.watch.decide` says
so; one that never has fails at once. Nothing listens on the fleet's port before the gates have passed: they are asked
through the same gateway on a port that only this machine reaches. Knows no terminal; what happens is written down as
events (`fleet.state`), and whoever wants to see follows those.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from deskfleet.engine.client import EngineOptions, LoadProgress
from deskfleet.engine.process import Patience
from deskfleet.engine.remote_ranks import RemoteRanks
from deskfleet.errors import ConfigError, DeskfleetError, DoesNotFit, EngineError, RankDied
from deskfleet.fleet import up
from deskfleet.fleet.doctor import see_doctor
from deskfleet.fleet.down import clear, kill
from deskfleet.fleet.engines.contract import ports_of
from deskfleet.fleet.engram_counters import attend_counters, places_of
from deskfleet.fleet.fabric import Fabric
from deskfleet.fleet.follow import Ended, follow, last_lines
from deskfleet.fleet.launch import LaunchSpec, RankLaunch
from deskfleet.fleet.memory import Action, Floors, MemoryLow, attend_memory, floors_of_nodes
from deskfleet.fleet.memory import Phase as MemoryPhase
from deskfleet.fleet.readiness import SILENT_S, STALLED_S, LoadReadiness, LogReadiness, Progress
from deskfleet.fleet.remote import NodeUnreachable, Remote, Remotes
from deskfleet.fleet.spec import FleetSource, FleetSpec
from deskfleet.fleet.state import Busy, FleetState, Phase, Record, now
from deskfleet.fleet.watch import (
    Decision,
    Event,
    GateFailed,
    HeartbeatLost,
    MemoryStop,
    NodeBack,
    NodeLost,
    Policy,
    RankEnded,
    Serving,
    StartFailed,
    Supervised,
    Tick,
    decide,
)
from deskfleet.gates.contract import Limits
from deskfleet.gates.evidence import write_evidence
from deskfleet.gates.registry import LAUNCH_GATES
from deskfleet.gates.report import GateResult
from deskfleet.gates.run import run_gates, select
from deskfleet.gateway.intake import Intake
from deskfleet.gateway.observation import ObservationSettings
from deskfleet.gateway.policy_file import PolicyStore
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.gateway.symptoms import HealthSettings
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
_SEE_STALL_S = 10.0
_LOAD_S = 6 * 3600.0  # engines of others: progress decides before this does
_ASK_NODES_S = 2.0  # how often, while a restart is due, nodes are asked whether they are there
_ANSWER_S = 15.0
_ASK_LOCK_S = 0.2
_STUCK_S = 30.0  # how long an engine may answer nothing: the supervisor starts it again, so less than a lone server's
# A node that has just booted has sshd before it has Docker.
_IS_THERE = """\
cat /proc/sys/kernel/random/boot_id || exit
docker version >/dev/null 2>&1 || { echo 'its Docker does not answer' >&2; exit 1; }
"""

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class GatesFailed(DeskfleetError):
    """The fleet's answers are not right, so it was not opened.

    `wrong` are the gates that got a wrong answer. Where all others got none, or too late, a machine has failed.
    """

    def __init__(self, message: str, *, hint: str | None = None, wrong: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.wrong = tuple(wrong)
        self.exit_code = 1 if wrong else DeskfleetError.exit_code


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be launched. `launch_id` is of the first launch, `environ` where secrets are looked up."""

    source: FleetSource
    launch_id: str
    digest: str
    environ: Mapping[str, str]
    gates: up.GateChoice = field(default_factory=up.GateChoice)


class Diary:
    """What is known of one launch: the record, and the events. `restart` and `after` are as the record's."""

    def __init__(
        self, state: FleetState, order: Order, *, restart: int = 0, after: str | None = None
    ) -> None:
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
            restart=restart,
            after=after,
        )

    @property
    def phase(self) -> Phase:
        """How far it is."""
        return self._record.phase

    def enter(self, phase: Phase, **values: Any) -> None:
        """The launch has come to another phase; values are fields of the record, and what else is told."""
        known = {name: values[name] for name in values if name in Record.__struct_fields__}
        if phase not in ("asking", "serving"):
            known["closed"] = None
        self._record = msgspec.structs.replace(self._record, phase=phase, changed_at=now(), **known)
        self._state.write_record(self._record)
        self.tell("phase", phase=phase, **values)

    def close(self, reason: str | None) -> None:
        """Nobody is let in, because of `reason`; None: everybody is again."""
        self._record = msgspec.structs.replace(self._record, closed=reason)
        self._state.write_record(self._record)

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
    """Live through launches until `until` is set or they fail for good; return the exit code, 0 when it was stopped.

    `on_settled` is called when the fleet first serves, and when it has ended. `store` are the gateway's settings and
    keys.
    """
    life = _Life(order, state, store, until, on_settled)
    code = 3
    reason: str | None = "the supervisor itself failed; its log has the trace"
    try:
        code, reason = await life.run()
    finally:
        end: Phase = "stopped" if code == 0 else "failed"
        life.diary.enter(end, reason=reason, exit_code=code, url=None, restart_at=None)
        on_settled()
    return code


def refuse(order: Order, state: FleetState, error: DeskfleetError) -> int:
    """Write down why nothing was begun, for whoever follows the launch; return the exit code."""
    diary = Diary(state, order)
    _tell_failure(diary, error)
    diary.enter("failed", reason=error.message, exit_code=error.exit_code)
    return error.exit_code


def _tell_failure(
    diary: Diary,
    error: DeskfleetError,
    *,
    rank: int | None = None,
    ended: Sequence[Ended] = (),
    lines: Sequence[str] = (),
) -> None:
    diary.tell(
        "failure",
        reason=error.message,
        hint=error.hint,
        exit_code=error.exit_code,
        type=type(error).__name__,
        rank=rank,
        containers=[each.sentence for each in ended],
        last_lines=list(lines),
    )


async def _until(work: Awaitable[_T], until: asyncio.Event) -> _T | None:
    """Do `work` and return what comes of it; None when `until` is set before."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(until.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, DeskfleetError):
            await working


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a launch has ended by itself. `reason` says more than the error where its containers did; `event` is what the
    policy is told.
    """

    error: DeskfleetError
    reason: str
    event: Event


class _Life:
    """A fleet under one supervisor: one launch after another, for as long as the policy has it."""

    def __init__(
        self,
        order: Order,
        state: FleetState,
        store: PolicyStore | None,
        until: asyncio.Event,
        on_settled: Callable[[], None],
    ) -> None:
        self._order = order
        self._state = state
        self._store = store
        self._stop = until
        self._on_settled = on_settled
        self._policy = policy_of(order.source.spec)
        self._supervised = Supervised()
        self._has_served = False
        self._acting = contextlib.ExitStack()  # during a restart, the lock of whoever changes the fleet
        self.diary = Diary(state, order)

    async def run(self) -> tuple[int, str | None]:
        """Launch until there is no use in it any more; return the exit code, and the reason unless that is 0."""
        first = self._order.launch_id
        number, after = 0, None
        while True:
            self.diary.enter("checking", **({"restart": number, "after": after} if number else {}))
            launching = _Launching(self._order, self.diary, self._store, self._served)
            with self._acting:
                failure, left = await self._live(launching)
            if failure is None:
                return (3, left) if left else (0, None)
            decision = await self._after(launching, failure, left)
            if decision is None:
                self._acting.close()
                left = await launching.end() if left else None
                return (3, left) if left else (0, None)
            if decision.kind == "give_up":
                return failure.error.exit_code, _joined(decision.reason, left)
            number, after = number + 1, failure.reason
            self._order = replace(self._order, launch_id=up.new_launch_id())
            self.diary = Diary(self._state, self._order, restart=number, after=after)
            self._state.forget_old_launches(keep=first)

    async def _live(self, launching: _Launching) -> tuple[_Failure | None, str | None]:
        """One launch to its end: why it has failed, unless it was stopped; and what may still run."""
        failure = left = None
        try:
            await _until(launching.run(), self._stop)
        except DeskfleetError as error:
            reason = await launching.tell_failure(error)
            # Before the end, in which every container ends, and ours is the doing.
            failure = _Failure(error, reason, launching.event_of(error, reason))
        finally:
            left = await asyncio.shield(launching.end())
        return failure, left

    def _served(self) -> None:
        self._decide(Serving())
        self._acting.close()
        if not self._has_served:
            self._has_served = True
            self._on_settled()

    async def _after(self, launching: _Launching, failure: _Failure, left: str | None) -> Decision | None:
        """Decide what follows a failure, and return that when it is time; None when it was stopped meanwhile.

        A fleet that never served has whoever started it looking on, and what is wrong is mostly what it was told.
        """
        if not self._has_served or not self._policy.backoff_s:
            return Decision("give_up", failure.reason)
        known = {**self._supervised.boot_ids, **launching.boot_ids}
        self._supervised = replace(self._supervised, boot_ids=known)
        decision = self._decide(failure.event)
        if decision.kind == "give_up":
            return decision
        reason = _joined(decision.reason, left)
        self.diary.enter("waiting", reason=reason, restart_at=now(self._due_in_s), url=None)
        waited = await _until(self._wait(), self._stop)
        if waited is not None and waited.kind == "give_up":
            return Decision("give_up", _joined(failure.reason, waited.reason))  # a node stays away
        return waited

    async def _wait(self) -> Decision:
        """Wait until the next start is due, every node is there, and nobody else changes the fleet."""
        async with Remotes(self._order.source.spec.nodes) as remotes:
            while True:
                await self._ask_nodes(remotes)
                decision = self._decide(Tick())
                if decision.kind == "give_up":
                    return decision
                if decision.kind == "start_all":
                    break
                left_s = self._due_in_s
                await asyncio.sleep(left_s if 0 < left_s < _ASK_NODES_S else _ASK_NODES_S)
        said = None
        while True:
            try:
                self._acting.enter_context(self._state.acting("a restart of the fleet"))
                return decision
            except Busy as error:
                if error.message != said:
                    said = error.message
                    self.diary.tell("watch", text=f"the restart waits: {said}")
            await asyncio.sleep(_ASK_LOCK_S)

    async def _ask_nodes(self, remotes: Remotes) -> None:
        """Find out which nodes can start a rank. What has changed is told."""

        async def ask(remote: Remote) -> NodeBack | NodeLost:
            node = remote.node.name
            try:
                ran = await remote.run(_IS_THERE, timeout_s=_ANSWER_S)
            except NodeUnreachable as error:
                return NodeLost(node, error.said)
            return (
                NodeBack(node, ran.stdout.strip()) if ran.returncode == 0 else NodeLost(node, ran.last_line)
            )

        for event in (await remotes.gather(ask)).all().values():
            self._decide(event)

    @property
    def _due_in_s(self) -> float:
        return (self._supervised.due_s or 0.0) - asyncio.get_running_loop().time()

    def _decide(self, event: Event) -> Decision:
        time_s = asyncio.get_running_loop().time()
        self._supervised, decision = decide(self._supervised, event, time_s, self._policy)
        if decision.kind == "note":
            self.diary.tell("watch", text=decision.reason)
        return decision


def policy_of(spec: FleetSpec) -> Policy:
    """When a fleet is started again: as its file says. Our own ranks end with 2 for what they were told wrongly."""
    restart = spec.restart
    final_codes = frozenset({ConfigError.exit_code}) if spec.engine.name == up.NATIVE else frozenset[int]()
    return Policy(restart.backoff_s, restart.steady_s, restart.absent_s, final_codes)


def _joined(*sentences: str | None) -> str:
    return "; ".join(filter(None, sentences))


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
        self._intake = Intake()
        self.boot_ids: dict[str, str] = {}

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
            self.boot_ids = {name: facts.boot_id for name, facts in found.facts.items() if facts.boot_id}
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
            for warning in (*launch.warnings, *unused_settings(self._store)):
                diary.tell("warning", text=warning)
            token = secrets.token_urlsafe(32)
            values = up.secret_values(launch, spec, self._order.environ, token=token)
            counters = None if launch.adapter is None else self._counters
            settings = gateway_settings(spec, checkpoint, self._store, self._intake, counters)
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
            floors = floors_of_nodes(plan.cluster.nodes)
            await self._attend(work, remotes, {rank.node: floors[rank.node] for rank in launch.ranks})

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
                wrong=[each.gate.name for each in bad if each.finding.cause in ("answer", "refusal")],
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
        self, *attendants: Coroutine[Any, Any, DeskfleetError]
    ) -> AsyncIterator[asyncio.Future[DeskfleetError]]:
        """Attendants at work; the future is the first trouble that one of them reports."""
        trouble: asyncio.Future[DeskfleetError] = asyncio.get_running_loop().create_future()

        async def attend(attendant: Coroutine[Any, Any, DeskfleetError]) -> None:
            error = await attendant
            if not trouble.done():
                trouble.set_result(error)

        def end(task: asyncio.Task[None]) -> None:
            """A fault of ours must not leave a fleet without its watchdog."""
            error = None if task.cancelled() else task.exception()
            if error is not None and not trouble.done():
                trouble.set_exception(error)

        tasks = [asyncio.ensure_future(attend(each)) for each in attendants]
        for task in tasks:
            task.add_done_callback(end)
        try:
            yield trouble
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            trouble.cancel()

    async def _attend(
        self, work: Coroutine[Any, Any, None], remotes: Remotes, floors: Mapping[str, Floors]
    ) -> None:
        """Do `work`, which serves, under the eyes of everybody who may end it."""
        attendants = [self._see_stall(), self._see_given_up(), self._see_memory(remotes, floors)]
        if self._launch is not None and self._launch.adapter is not None:
            attendants.append(attend_counters(remotes, places_of(self._launch), self._counters))
        async with self._attended(*attendants) as trouble:
            await self._watched(work, trouble, remotes)

    @property
    def _counters(self) -> Path:
        """Where counters of nodes lie on this machine."""
        return self._diary.launch.directory / "engram"

    async def _see_given_up(self) -> DeskfleetError:
        """Engines of others that hang, or only their network, while containers run: health says it. Ours end then."""
        return EngineError(await self._intake.given_up())

    async def _see_stall(self) -> DeskfleetError:
        """Other engines' logs say nothing any more while they load. Our own ranks have heartbeats."""
        told_of_s: float | None = None
        while True:
            await asyncio.sleep(_SEE_STALL_S)
            logs = self._logs
            if logs is None or self._diary.phase != "loading":
                continue
            silent_s = asyncio.get_running_loop().time() - logs.heard_s
            if silent_s > STALLED_S:
                return EngineError(f"no rank has logged anything for {silent_s:.0f} s while loading")
            if silent_s > SILENT_S and told_of_s != logs.heard_s:
                told_of_s = logs.heard_s
                said = f"no rank has logged anything for {silent_s:.0f} s: they tune kernels, or hang"
                self._diary.tell("watch", text=f"{said}; after {STALLED_S:.0f} s the launch is ended")

    async def _see_memory(self, remotes: Remotes, floors: Mapping[str, Floors]) -> DeskfleetError:
        """The watchdog: caches are dropped from there, the gateway is told from here."""

        def phase() -> MemoryPhase:
            return "serving" if self._diary.phase in ("asking", "serving") else "loading"

        return await attend_memory(remotes, floors, phase, self._relieve, self._diary.tell)

    async def _relieve(self, action: Action) -> None:
        match action.kind:
            case "stop_admission":
                self._intake.close(action.reason)
                self._diary.close(action.reason)
            case "resume_admission":
                self._intake.open()
                self._diary.close(None)
            case "abort_largest_prefill":
                sentence = f"memory ran out: {action.reason}; the request with the longest prompt was ended"
                if not self._intake.end_largest_prefill(sentence):
                    text = f"{action.node}: no request is without its first token, so none was ended"
                    self._diary.tell("memory", action="nothing_to_abort", node=action.node, text=text)

    async def _watched(
        self, work: Awaitable[None], trouble: asyncio.Future[DeskfleetError], remotes: Remotes
    ) -> None:
        """Serve until that ends, a container ends, or an attendant reports trouble."""
        serving = asyncio.ensure_future(work)
        try:
            waited: list[asyncio.Future[Any]] = [serving, trouble, *self._followers]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done() and not trouble.done():
                await asyncio.wait(
                    (serving, trouble), timeout=_OWN_WORDS_S, return_when=asyncio.FIRST_COMPLETED
                )
            if trouble.done():
                error = trouble.result()
                if isinstance(error, MemoryLow):
                    await self._kill_ranks(remotes, error)
                raise error
            if serving.done():
                await serving
            await asyncio.sleep(0)  # the followers' callbacks
            first = self._ended[0]
            raise RankDied(first.rank, f"on {first.node}: {first.sentence}")
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _kill_ranks(self, remotes: Remotes, error: MemoryLow) -> None:
        """Clients are told, and memory comes back at once: answers that run are not waited for."""
        self._intake.close(error.message)
        self._intake.end_all(error.message)
        launch = self._launch
        assert launch is not None
        ids = {
            node.name: [self._containers[rank.rank] for rank in launch.on_node(node.name)]
            for node in self._spec.nodes
        }
        await kill(remotes, ids)

    # --- the end ----------------------------------------------------------------------------------------

    async def tell_failure(self, error: DeskfleetError) -> str:
        """Write down why, with the end of the log of the rank that it was. Returns the sentence."""
        rank = error.rank if isinstance(error, RankDied | up.StartFailed) else None
        if rank is not None and self._followers and not self._ended:
            await asyncio.wait(self._followers, timeout=_SEE_ENDS_S, return_when=asyncio.FIRST_COMPLETED)
        if rank is None and self._ended and not isinstance(error, MemoryLow):  # else it was us who ended them
            rank = self._ended[0].rank
        lines = [] if rank is None else last_lines(self._diary.launch.rank_log(rank), _LAST_LINES)
        _tell_failure(self._diary, error, rank=rank, ended=self._ended, lines=lines)
        known = [
            each.sentence for each in self._ended if each.rank == rank and each.sentence not in error.message
        ]
        return "; ".join([error.message, *known])

    def event_of(self, error: DeskfleetError, said: str) -> Event:
        """What the policy is told of a failure: the container's end where there was one, for others follow from it."""
        rank = error.rank if isinstance(error, RankDied) else None
        ended = next((each for each in self._ended if rank in (None, each.rank)), None)
        if isinstance(error, MemoryLow):
            return MemoryStop(error.node, said)
        if isinstance(error, ConfigError | DoesNotFit):
            return StartFailed(said, is_final=True)
        if ended is not None:
            return RankEnded(ended.rank, ended.node, ended.code, ended.is_out_of_memory, said)
        if rank is not None and self._launch is not None:
            return HeartbeatLost(rank, self._launch.ranks[rank].node, said)
        if isinstance(error, GatesFailed) and error.wrong:
            return GateFailed(", ".join(error.wrong), said)
        return StartFailed(said)

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


def gateway_settings(
    spec: FleetSpec,
    checkpoint: Path,
    store: PolicyStore | None,
    intake: Intake | None = None,
    counters: Path | None = None,
) -> GatewaySettings:
    """The gateway as the fleet's file asks for it; `counters` is where those of the nodes lie. Raises ConfigError.

    It has no floors of memory of its own: the watchdog sees all nodes, and says by `intake` what is to be done. An
    engine that answers nothing is given up sooner than by a server that nobody starts again.
    """
    gateway = spec.gateway
    return GatewaySettings(
        model_id=served_model_id(spec, checkpoint),
        checkpoint=checkpoint,
        host=gateway.host,
        port=gateway.port,
        default_thinking=gateway.thinking,
        policies=store,
        observation=ObservationSettings(
            health=HealthSettings(memory_floor_bytes=0, memory_critical_bytes=0, dead_after_s=_STUCK_S),
            intake=intake,
            counters=counters,
            access_log=gateway.access_log,
            traces=gateway.traces,
        ),
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


def unused_settings(store: PolicyStore | None) -> tuple[str, ...]:
    """Say which settings of the gateway have no effect in a fleet."""
    names = () if store is None else store.snapshot.settings.health.about_memory
    if not names:
        return ()
    said = ", ".join(f"health.{name}" for name in names)
    return (f"{said} of the gateway's settings: not used in a fleet, whose watchdog decides about memory",)


__all__ = [
    "Diary",
    "GatesFailed",
    "Order",
    "gateway_settings",
    "native_options",
    "open_store",
    "policy_of",
    "refuse",
    "served_model_id",
    "supervise",
    "unused_settings",
]
