"""`deskfleet selfcheck`: that a sound engine passes every check, that each check sees what it is there for, and the
verb.

The engine of most tests is the real one without processes, so that a mistake can be planted in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import numpy as np
import psutil
import pytest
import torch
from cli_process import CHECKPOINT, COMMAND, STOP_S, Done, environment, wait_until

from deskfleet import selfcheck
from deskfleet.endpoint import EngineStats, GenerateRequest, SamplingParams, TokenChunk
from deskfleet.engine import core as core_module
from deskfleet.engine.blocks import CacheManager
from deskfleet.engine.client import EngineOptions
from deskfleet.engine.core import CoreOptions, EngineCore
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.messages import AddRequest, RequestOutput
from deskfleet.engine.model import indexer
from deskfleet.engine.rank import token_map
from deskfleet.engine.request import Request
from deskfleet.engine.scheduler import Scheduler
from deskfleet.engine.speculate import SpeculationOptions, Verdict
from deskfleet.errors import ConfigError, EngineError
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.limits import resolve_limits
from deskfleet.selfcheck import (
    BATCH,
    CHUNKED,
    DCP_2,
    LIMITS,
    PREEMPTED,
    REPEAT,
    SPECULATION_BLOCK,
    SPECULATION_TOKEN,
    STEPWISE,
    TP_2,
    TP_3,
    WARM,
    WARM_EXACT,
    WARM_WINDOW,
    Check,
    SelfCheck,
    self_check,
)
from deskfleet.testing.tiny import TinySizes, make_tiny
from tests.engine import lockstep
from tests.engine.cores import on_logits
from tests.engine.golden import measured
from tests.engine.lockstep import Lockstep, ThreadCommunicator

Fault = Callable[["LocalEngine"], None]


class Unwatched(nullcontext[None]):
    """In place of what watches every operator of a group in threads, and takes most of its time."""

    found: tuple[str, ...] = ()


@pytest.fixture(autouse=True)
def small_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As ranks have when others run beside them."""
    monkeypatch.setattr(lockstep, "NaNWatch", Unwatched)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class LocalEngine:
    """An engine of the real parts in this process, ranks in threads. `fault` is called when it is ready."""

    def __init__(
        self, checkpoint: Checkpoint, options: EngineOptions, fault: Fault = lambda engine: None
    ) -> None:
        config = checkpoint.config
        speculation = SpeculationOptions.parse(options.speculation, config.dspark_block_size)
        assert options.max_model_len is not None
        compressed = token_map(checkpoint)
        self.options = options
        self.group = Lockstep(
            checkpoint,
            options.tp_size,
            resolve_limits(
                config,
                max_num_seqs=options.max_num_seqs,
                max_model_len=options.max_model_len,
                block_size=options.block_size,
                kv_cache_tokens=options.kv_cache_tokens,
                num_window_tails=options.num_window_tails,
                with_drafts=speculation.num_drafts > 0,
                tp_size=options.tp_size,
                dcp_size=options.dcp_size,
            ),
            pad_compressed_id=int(compressed[config.engram_pad_token_id]),
            with_drafts=speculation.num_drafts > 0,
        )
        self.core = EngineCore(
            self.group.leader,
            compressed,
            CoreOptions(
                max_num_batched_tokens=options.max_num_batched_tokens,
                speculation=speculation,
                prefix_cache=options.prefix_cache,
                prefix_replay=options.prefix_replay,
            ),
        )
        self.ranks = (SimpleNamespace(pid=os.getpid()),)
        self._outputs: dict[str, list[RequestOutput]] = {}
        self._stack = ExitStack()
        self._fault = fault

    async def __aenter__(self) -> Self:
        self.patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        self._stack.enter_context(self.group)
        self._fault(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    async def stats(self) -> EngineStats:
        return self.core.stats

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        request = GenerateRequest("score", tuple(token_ids), SamplingParams(max_tokens=1))
        flat = [
            np.frombuffer(output.logits or b"", np.float32) async for output in self._run(request, score=True)
        ]
        return np.concatenate(flat).reshape(len(token_ids), -1)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        async for output in self._run(request):
            yield TokenChunk(
                output.token_ids, output.logprobs, len(request.prompt_token_ids), output.finish_reason
            )

    async def _run(
        self, request: GenerateRequest, *, score: bool = False
    ) -> AsyncGenerator[RequestOutput, None]:
        ids = request.prompt_token_ids
        added = AddRequest(request.request_id, ids, bytes(len(ids)), (), request.sampling, score)
        refusal = self.core.add(added)
        assert refusal is None, refusal
        mine = self._outputs[request.request_id] = []
        while True:
            await asyncio.sleep(0)  # all that are asked together are added before the first step
            if not mine:
                for output in self.core.step():
                    self._outputs[output.request_id].append(output)
            while mine:
                output = mine.pop(0)
                if output.error is not None:
                    raise EngineError(output.error)
                yield output
                if output.finish_reason is not None:
                    return


def check_all(
    fault: Fault = lambda engine: None, *, only: Collection[str] | None = None, directory: Path = CHECKPOINT
) -> dict[str, Check]:
    """A quick run over local engines, by name. One engine at a time: a fault patches what all of them share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selfcheck, "_at_once", lambda peak_bytes: 1)
        engine: Any = partial(LocalEngine, fault=fault)
        report = asyncio.run(self_check(directory, quick=True, only=only, engine=engine))
    return {check.name: check for check in report.checks}


def test_a_sound_engine_passes_every_check() -> None:
    found = check_all()
    assert list(found) == list(LIMITS)
    assert {name: check.detail for name, check in found.items() if check.verdict != "pass"} == {}
    lost = found.pop(WARM_WINDOW)
    assert lost.worst is not None
    assert 0 < lost.worst <= lost.limit == 0.5
    measured.append(f"selfcheck, window replay: largest relative RMS of logits {lost.worst:.4f}")
    assert {check.worst for check in found.values()} == {0.0}
    assert "at work: window, top-k at ratio 1, top-k at ratio 2, candidates" in found[STEPWISE].detail


# --- each check sees what it is there for


def forgets_history(engine: LocalEngine) -> None:
    """The n-grams of a chunk look back on other tokens than there were."""
    segment_of = core_module.segment_of

    def without(*work: Any, **options: Any) -> Any:
        segment = segment_of(*work, **options)
        return replace(segment, compressed_history=np.zeros_like(segment.compressed_history))

    engine.patch.setattr(core_module, "segment_of", without)


def rounds_partial_sums(engine: LocalEngine) -> None:
    """Ranks send their part of a sum in lower precision."""
    all_reduce = ThreadCommunicator.all_reduce

    def rounded(self: ThreadCommunicator, tensor: Any) -> Any:
        if tensor.is_floating_point():
            tensor.copy_(tensor.bfloat16())
        return all_reduce(self, tensor)

    engine.patch.setattr(ThreadCommunicator, "all_reduce", rounded)


def merges_one_too_few(engine: LocalEngine) -> None:
    """Ranks that share out the index lose an entry when they put together what each found."""
    best = indexer._best

    def losing(scores: Any, numbers: Any, count: int, dcp: Communicator) -> Any:
        picks = best(scores, numbers, count, dcp)
        if dcp.size > 1:
            picks[:, -1] = -1
        return picks

    engine.patch.setattr(indexer, "_best", losing)


def believes_every_draft(engine: LocalEngine, *, acceptance: str) -> None:
    """Drafts are accepted unseen."""
    verify = core_module.verify

    def believing(target: Any, drafts: Any, *rest: Any, **options: Any) -> Verdict:
        verdict = verify(target, drafts, *rest, **options)
        return Verdict(len(drafts), verdict.next_token_id) if options["acceptance"] == acceptance else verdict

    engine.patch.setattr(core_module, "verify", believing)


def goes_on_without_its_window(engine: LocalEngine) -> None:
    """A prefix is taken over, and what it saw last is neither looked at nor made again."""
    admit = CacheManager.admit

    def hasty(self: CacheManager, request: Request) -> bool:
        admitted = admit(self, request)
        request.num_computed_tokens = request.window_from = request.num_cached_tokens
        return admitted

    engine.patch.setattr(CacheManager, "admit", hasty)


def salad_on_a_hit(engine: LocalEngine) -> None:
    """Whoever continues a known prefix gets logits that have nothing to do with it."""

    def mixed(logits: Any, *_: Any) -> Any:
        is_hit = any(request.num_cached_tokens for request in engine.core.scheduler.running)
        return logits.roll(1, -1) if is_hit else logits

    engine.patch.setattr(engine.core._runner, "lead", on_logits(engine.core._runner.lead, mixed))


def replays_too_little(engine: LocalEngine) -> None:
    """An exact replay forgets that every layer looks a window further back."""
    engine.core.cache._num_layers = 1


def mixes_up_rows(engine: LocalEngine) -> None:
    """Logits of a step are handed to its requests in the wrong order."""
    wanted_rows = core_module.wanted_rows

    def reversed_rows(scheduled: Any) -> tuple[list[int], list[slice]]:
        rows, spans = wanted_rows(scheduled)
        return rows, spans[::-1] if all(s.stop - s.start == 1 for s in spans) else spans

    engine.patch.setattr(core_module, "wanted_rows", reversed_rows)


def resumes_without_output(engine: LocalEngine) -> None:
    """Whoever is pushed out goes on with another newest token."""
    preempt = Scheduler._preempt

    def forgetful(self: Scheduler, entry: Any) -> None:
        preempt(self, entry)
        if entry.request.output_token_ids:
            entry.request.output_token_ids[-1] ^= 1

    engine.patch.setattr(Scheduler, "_preempt", forgetful)


def drifts(engine: LocalEngine) -> None:
    """Logits depend on how long the engine has been up."""

    def drifting(logits: Any, *_: Any) -> Any:
        logits[:, 7] += 1e-3 * engine.core._runner.progress.num_passes
        return logits

    engine.patch.setattr(engine.core._runner, "lead", on_logits(engine.core._runner.lead, drifting))


FAULTS: list[tuple[Fault, set[str], set[str]]] = [
    (forgets_history, {STEPWISE, CHUNKED}, {BATCH, REPEAT}),
    (rounds_partial_sums, {TP_2, TP_3, DCP_2}, {STEPWISE}),
    (merges_one_too_few, {DCP_2}, {TP_2, STEPWISE}),
    (partial(believes_every_draft, acceptance="block"), {SPECULATION_BLOCK}, {SPECULATION_TOKEN}),
    (partial(believes_every_draft, acceptance="token"), {SPECULATION_TOKEN}, {SPECULATION_BLOCK}),
    # On these weights a missing window is no farther from the truth than one that is replayed alone may be.
    (goes_on_without_its_window, {WARM, WARM_EXACT}, {CHUNKED, BATCH}),
    (salad_on_a_hit, {WARM, WARM_EXACT, WARM_WINDOW}, {CHUNKED, BATCH}),
    (replays_too_little, {WARM_EXACT}, {REPEAT}),
    (mixes_up_rows, {BATCH, PREEMPTED}, {REPEAT, STEPWISE}),
    (resumes_without_output, {PREEMPTED}, {BATCH, REPEAT}),
    (drifts, {REPEAT}, set()),
]


def test_every_check_has_a_fault() -> None:
    assert set.union(*(seen for _, seen, _ in FAULTS)) == set(LIMITS)


def lanes() -> list[Any]:
    """The fast lane takes the faults that need the fewest checks to be seen; every check has one in the slow lane."""
    quick = (merges_one_too_few, replays_too_little, resumes_without_output, drifts)
    return [
        pytest.param(
            *each, marks=() if each[0] in quick or isinstance(each[0], partial) else pytest.mark.slow
        )
        for each in FAULTS
    ]


@pytest.mark.parametrize(("fault", "seen_by", "unseen_by"), lanes())
def test_a_planted_fault_fails_the_checks_it_concerns(
    fault: Fault, seen_by: set[str], unseen_by: set[str]
) -> None:
    found = check_all(fault, only=seen_by | unseen_by)
    assert {name for name, check in found.items() if check.verdict == "fail"} == seen_by
    for name in seen_by:
        worst = found[name].worst
        assert worst is not None
        assert worst > LIMITS[name]


def test_what_did_not_happen_has_not_passed() -> None:
    """An engine that ignores its options gives equal answers, and nothing is shown by that."""

    class Stubborn(LocalEngine):
        def __init__(self, checkpoint: Checkpoint, options: EngineOptions) -> None:
            ignored = {
                "prefix_cache": False,
                "speculation": "off",
                "max_num_batched_tokens": 512,
                "max_num_seqs": 1,
            }
            super().__init__(checkpoint, replace(options, kv_cache_tokens=None, **ignored))  # type: ignore[arg-type]

    asked = {STEPWISE, BATCH, SPECULATION_TOKEN, WARM, WARM_EXACT, PREEMPTED}
    report = asyncio.run(self_check(CHECKPOINT, quick=True, only=asked, engine=Stubborn))  # type: ignore[arg-type]
    reasons = {
        STEPWISE: "2 steps are too few to be of 1 tokens",
        BATCH: "one prompt after another",
        SPECULATION_TOKEN: "the engine verified no draft",
        WARM: "was not found with its window",
        WARM_EXACT: "did not replay a lost window",
        PREEMPTED: "nobody was preempted",
    }
    assert {check.name for check in report.checks} == asked
    for check in report.checks:
        assert (check.verdict, check.worst) == ("fail", None), check
        assert reasons[check.name] in check.detail
    assert report.verdict == "fail"


# --- what is skipped, and what fails without an answer


def test_a_checkpoint_without_drafts_skips_speculation(tmp_path: Path) -> None:
    make_tiny(tmp_path / "tiny", sizes=TinySizes(num_nextn_predict_layers=0, num_hidden_layers=4))
    found = check_all(only={SPECULATION_BLOCK, SPECULATION_TOKEN, REPEAT}, directory=tmp_path / "tiny")
    assert found[REPEAT].verdict == "pass"
    for name in (SPECULATION_BLOCK, SPECULATION_TOKEN):
        assert found[name] == Check(name, "skip", None, 0.0, "the checkpoint has no drafts")


def test_a_small_machine_skips_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "_num_cores", lambda: 1)
    kernel = {"VmHWM": 8 << 30, "MemAvailable": 6 << 30}
    monkeypatch.setattr(selfcheck, "_kibibytes", lambda path, name: kernel[name])
    found = check_all(only={TP_2, TP_3, SPECULATION_TOKEN})
    assert found[TP_2].verdict == found[TP_3].verdict == "skip"
    assert found[TP_2].detail.startswith("2 ranks take about ")
    assert found[TP_2].detail.endswith(" of memory, 6.00 GiB are free")
    assert found[TP_3].detail == "3 ranks on 1 cores would take too long"
    assert found[SPECULATION_TOKEN].verdict == "pass"


def test_engines_that_cannot_be_asked() -> None:
    class Broken(LocalEngine):
        def __init__(self, checkpoint: Checkpoint, options: EngineOptions) -> None:
            if options.dcp_size == 2:
                raise ConfigError("this cannot be cut in two")
            super().__init__(checkpoint, options)

        async def __aenter__(self) -> Self:
            if self.options.speculation != "off":
                raise EngineError("rank 0 ended")
            return await super().__aenter__()

    asked = {DCP_2, SPECULATION_BLOCK}
    report = asyncio.run(self_check(CHECKPOINT, quick=True, only=asked, engine=Broken))  # type: ignore[arg-type]
    assert report.checks == (
        Check(DCP_2, "skip", None, 0.0, "this cannot be cut in two"),
        Check(SPECULATION_BLOCK, "fail", None, 0.0, "rank 0 ended"),
    )


def test_without_anything_to_compare_with_there_is_no_report() -> None:
    def fails(engine: LocalEngine) -> None:
        raise EngineError("rank 0 ended")

    with pytest.raises(EngineError, match="rank 0 ended"):
        check_all(fails)


def test_answers_without_their_numbers_are_no_answers() -> None:
    class Mute(LocalEngine):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
            async for chunk in super().generate(request):
                yield replace(chunk, logprobs=None)

    with pytest.raises(EngineError, match="8 tokens with log probabilities were asked for, 0 came"):
        asyncio.run(self_check(CHECKPOINT, quick=True, only={REPEAT}, engine=Mute))  # type: ignore[arg-type]


def test_a_check_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="no check 'TP 9 = TP 1'"):
        check_all(only={"TP 9 = TP 1"})


@pytest.mark.parametrize(
    ("found", "expected", "distance"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0),
        ([[1.0, 3.0], [2.0, 4.0]], [[1.0, 3.0], [1.0, 3.0]], 1.0),
        ([[0.0, 2.0]], [[-0.0, 2.0]], np.finfo(np.float64).tiny),  # equal, but not the same bits
        ([[np.nan, 2.0]], [[1.0, 2.0]], np.inf),
        ([[1.0, 2.0]], [[1.0, 2.0], [1.0, 2.0]], np.inf),
    ],
)
def test_a_distance_is_the_relative_rms_of_the_worst_row(
    found: list[list[float]], expected: list[list[float]], distance: float
) -> None:
    assert selfcheck._distance(np.array(found), np.array(expected))[0] == distance


# --- the verb


def reporting(*checks: Check) -> Callable[..., Any]:
    async def report(directory: Path, *, on_check: Callable[[Check], None], **options: Any) -> SelfCheck:
        assert (directory, options["quick"]) == (CHECKPOINT, True)
        for check in checks:
            on_check(check)
        return SelfCheck(checks)

    return report


PASSED = Check(STEPWISE, "pass", 0.0, 0.0, "prompts up to 33 tokens")
FAILED = Check(WARM_WINDOW, "fail", 0.1234567, 0.5, "2 sessions")
SKIPPED = Check(TP_3, "skip", None, 0.0, "3 ranks on 1 cores would take too long")


def test_the_table(call: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "self_check", reporting(PASSED, SKIPPED, FAILED))
    done = call("selfcheck", CHECKPOINT, "--quick")
    assert done.code == 1
    rows = [line.split() for line in done.out.splitlines()]
    assert [*STEPWISE.split(), "pass", "0", "0"] in rows
    assert [*WARM_WINDOW.split(), "fail", "0.123", "0.5"] in rows
    assert [*TP_3.split(), "skip", "0"] in rows
    assert f"skip: {TP_3}: 3 ranks on 1 cores would take too long\n" in done.out
    assert done.out.endswith("verdict: fail (1 passed, 1 failed, 1 skipped)\n")
    assert max(map(len, done.out.splitlines())) <= 80
    assert f"  pass: {STEPWISE}: prompts up to 33 tokens\n" in done.err


def test_skipped_checks_do_not_fail_it(call: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "self_check", reporting(PASSED, SKIPPED))
    done = call("selfcheck", CHECKPOINT, "--quick")
    assert (done.code, done.out.splitlines()[-1]) == (0, "verdict: pass (1 passed, 0 failed, 1 skipped)")


def test_the_report_as_an_object(call: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    lost = replace(FAILED, worst=np.inf)
    monkeypatch.setattr(selfcheck, "self_check", reporting(PASSED, lost))
    done = call("selfcheck", CHECKPOINT, "--quick", "--json")
    assert done.code == 1
    assert done.object == {
        "checks": [
            {"name": STEPWISE, "verdict": "pass", "worst": 0.0, "limit": 0.0, "detail": PASSED.detail},
            {"name": WARM_WINDOW, "verdict": "fail", "worst": None, "limit": 0.5, "detail": "2 sessions"},
        ],
        "verdict": "fail",
    }


def test_a_checkpoint_that_is_none(call: Callable[..., Done], tmp_path: Path) -> None:
    assert call("selfcheck", tmp_path).code == 3


def test_processes_pass_too() -> None:
    """Real ranks, as far as the time of an ordinary test goes."""
    seen = []
    report = asyncio.run(self_check(CHECKPOINT, quick=True, only={REPEAT, BATCH, TP_2}, on_run=seen.append))
    assert [(check.name, check.verdict, check.worst) for check in report.checks] == [
        (name, "pass", 0.0) for name in (TP_2, BATCH, REPEAT)
    ]
    assert [(run.number, run.total, run.names) for run in seen] == [(1, 2, (BATCH, REPEAT)), (2, 2, (TP_2,))]


def test_ctrl_c_leaves_no_rank() -> None:
    command = [*COMMAND, "selfcheck", str(CHECKPOINT), "--quick"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("engine 3 of 10"):  # on two cores, beside the second one
            break
    own = psutil.Process(process.pid)
    wait_until(lambda: bool(own.children()))
    processes = [own, *own.children()]
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=STOP_S)
    assert (process.returncode, out) == (130, "")
    assert psutil.wait_procs(processes, timeout=3)[1] == []


@pytest.mark.slow
def test_the_command_on_a_real_checkpoint() -> None:
    """Every engine in processes of its own: a minute on two free cores."""
    done = subprocess.run(
        [*COMMAND, "selfcheck", str(CHECKPOINT), "--quick", "--json"],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["verdict"] == "pass"
    assert [check["name"] for check in report["checks"]] == list(LIMITS)
    assert "engine 10 of 10, about " in done.stderr
