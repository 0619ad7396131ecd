"""A launch in front of an engine of others, which is scripted here: nothing opens without receipts and right answers.

Containers are not part of it, and neither is a real vLLM.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import pytest
from launch_cases import CASES, Case

from deskfleet import supervisor
from deskfleet.client import Client
from deskfleet.errors import DeskfleetError, EngineError
from deskfleet.fleet.memory import Action, Kind
from deskfleet.fleet.readiness import LogReadiness
from deskfleet.fleet.remote import Remotes
from deskfleet.fleet.spec import read_source
from deskfleet.fleet.state import FleetState
from deskfleet.fleet.up import GateChoice
from deskfleet.gateway import watch
from deskfleet.gateway.gate import Gate
from deskfleet.gateway.intake import Intake
from deskfleet.gateway.symptoms import HealthSettings
from deskfleet.model.embedded import POCKET, locate
from deskfleet.supervisor import (
    Diary,
    GatesFailed,
    Order,
    _Launching,
    gateway_settings,
    open_store,
    unused_settings,
)
from deskfleet.testing.scripted import Script
from deskfleet.testing.upstream_vllm import ScriptedVllm
from deskfleet_engram.host import write_receipt

RECEIPTS = (
    (0, "GPU KV cache size: 2,000,000 tokens"),
    (0, "Using 'FLASHINFER_B12X' NvFp4 MoE backend out of"),
    (1, "Using 'FLASHINFER_B12X' NvFp4 MoE backend out of"),
)
ANSWERS = Script(tuple(range(300, 310)))
FILE = """
name = "desk"
checkpoint = { model = "pocket" }
engine = { name = "vllm", image = "x@sha256:%s" }
[[nodes]]
name = "a"
address = "local"
kind = "local"
paths = { checkpoint = "/c", engram = "/e", cache = "/k" }
""" % ("0" * 64)


@asynccontextmanager
async def launched(
    directory: Path,
    lines: Sequence[tuple[int, str]],
    gates: GateChoice,
    *,
    case: Case = CASES["2-nodes-vllm-v4"],
    answers: Script = ANSWERS,
    health: HealthSettings | None = None,
) -> AsyncIterator[tuple[FleetState, asyncio.Future[None], _Launching, ScriptedVllm]]:
    """The launch of two ranks that have logged `lines`, until it serves or has failed."""
    (directory / "fleet.toml").write_text(FILE)
    state = FleetState("desk", {"XDG_STATE_HOME": str(directory)})
    order = Order(read_source(directory / "fleet.toml"), "one", "digest", {}, gates)
    settled = asyncio.Event()
    checkpoint = locate(POCKET)
    async with ScriptedVllm(answers, checkpoint) as server:
        spec = msgspec.structs.replace(case.render(), endpoint=server.url)
        launching = _Launching(order, Diary(state, order), None, settled.set)
        launching._launch, launching._logs = spec, LogReadiness(spec, 0.0)
        for rank, line in lines:
            launching._read_line(rank, line)
        settings = replace(
            gateway_settings(order.source.spec, checkpoint, None, launching._intake, launching._counters),
            model_id="m",
            port=0,
        )
        if health is not None and settings.observation is not None:
            settings = replace(settings, observation=replace(settings.observation, health=health))
        attended = launching._attend(launching._serve_front(settings, spec), Remotes(()), {})
        work = asyncio.ensure_future(attended)
        waiting = asyncio.ensure_future(settled.wait())
        try:
            await asyncio.wait((work, waiting), timeout=60, return_when=asyncio.FIRST_COMPLETED)
            yield state, work, launching, server
        finally:
            for task in (work, waiting):
                task.cancel()
            await asyncio.gather(work, waiting, return_exceptions=True)


async def test_it_opens_once_receipts_are_there(tmp_path: Path) -> None:
    async with launched(tmp_path, RECEIPTS, GateChoice(none=True)) as (state, _, _, _):
        record = state.record()
        assert record is not None
        assert record.phase == "serving"
        async with Client(record.url or "") as client:
            assert [model.id for model in await client.models()] == ["m"]


@pytest.mark.parametrize(
    ("lines", "gates", "kind", "said"),
    [
        (RECEIPTS[1:], GateChoice(none=True), EngineError, "rank 0 on spark-0 has not shown KV pool"),
        (RECEIPTS, GateChoice(only=("short-answers",)), GatesFailed, "1 did not pass: short-answers: "),
    ],
)
async def test_it_stays_closed(
    tmp_path: Path, lines: Sequence[tuple[int, str]], gates: GateChoice, kind: type[DeskfleetError], said: str
) -> None:
    async with launched(tmp_path, lines, gates) as (state, work, _, _):
        with pytest.raises(kind, match=said):
            await work
        record = state.record()
        assert record is None or record.phase == "asking"


async def test_ranks_whose_adapters_disagree_are_let_nobody_in(tmp_path: Path) -> None:
    """Two of four read rows of another pack; the engine answers all the while."""
    kernels = "Using 'B12X_MXFP4_MXFP8' Mxfp4 MoE backend."
    lines = [(0, "GPU KV cache size: 1,263,118 tokens"), *((rank, kernels) for rank in range(4))]
    said = (
        "engine=vllm-0.33.0 plugin=0.1.0 sources=e6 pack={} store=mapped warnings=0 rank={}/4 columns={}-{}"
    )

    def receipts(packs: str) -> list[tuple[int, str]]:
        return [
            (
                rank,
                f"(Worker pid=7) INFO deskfleet-engram receipt: {said.format(pack, rank, 6 * rank, 6 * rank + 5)}",
            )
            for rank, pack in enumerate(packs)
        ]

    nobody = GateChoice(none=True)
    case = CASES["4-nodes-vllm"]
    async with launched(tmp_path, [*lines, *receipts("aabb")], nobody, case=case) as (state, work, _, _):
        with pytest.raises(
            EngineError, match=r"^not opened: rank 2 on spark-2 has pack=b, and rank 0 .* pack=a"
        ) as no:
            await work
        assert no.value.exit_code == 3
        record = state.record()
        assert record is None or record.phase != "serving"
        told = [each for each in state.launch("one").events()[0] if each["event"] == "receipts"]
        assert told[0]["shown"]["Engram adapter, rank 2"].startswith("engine=vllm-0.33.0 ")
    (tmp_path / "again").mkdir()
    like = [*lines, *receipts("aaaa")]
    async with launched(tmp_path / "again", like, nobody, case=case) as (state, _, launching, server):
        record = state.record()
        assert record is not None
        assert record.phase == "serving"
        # What a rank on another node counts comes as a file, and is in the gateway's metrics.
        counters = {"num_rows": 42, "errors": {}}
        document = {"engine": "vllm", "rank": 3, "counters": counters}
        write_receipt(launching._counters, "vllm-rank3-counters.json", document)
        async with aiohttp.ClientSession() as session, session.get(f"{record.url}/metrics") as answer:
            line = f'deskfleet_engram_rows_total{{rank="3",upstream="{server.url}"}} 42.0'
            assert line in await answer.text()


async def test_the_watchdog_closes_and_opens_the_door_to_engines_of_others(tmp_path: Path) -> None:
    async with launched(tmp_path, RECEIPTS, GateChoice(none=True)) as (state, _, launching, _):
        record = state.record()
        assert record is not None

        async def done(kind: Kind) -> str | None:
            await launching._relieve(Action(kind, "spark-1", 0.0, f"spark-1: {kind}"))
            now = state.record()
            assert now is not None
            assert now.phase == "serving"
            return now.closed

        question = {"model": "m", "prompt": "2 + 3 =", "max_tokens": 2}
        async with Client(record.url or "") as client:
            assert await done("stop_admission") == "spark-1: stop_admission"
            with pytest.raises(DeskfleetError, match="no new requests are taken: spark-1: stop_admission"):
                await client.post("/v1/completions", question)
            assert await done("abort_largest_prefill") == "spark-1: stop_admission"
            assert await done("resume_admission") is None
            async with asyncio.timeout(10):
                while True:
                    try:
                        await client.post("/v1/completions", question)
                        break
                    except DeskfleetError:
                        await asyncio.sleep(0.1)
    told, _ = state.launch("one").events()
    assert [each["action"] for each in told if each["event"] == "memory"] == ["nothing_to_abort"]


async def test_an_engine_that_hangs_in_a_running_container_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is busy for as long is not; the sentence is that of its health."""
    monkeypatch.setattr(watch, "_ASK_S", 0.2)
    given_up_s = 1.5
    quick = HealthSettings(period_s=0.05, canary_retry_s=0.2, canary_deadline_s=0.3, dead_after_s=given_up_s)
    slow = replace(ANSWERS, first_delay_s=2 * given_up_s)
    everything = GateChoice(none=True)
    async with launched(tmp_path, RECEIPTS, everything, answers=slow, health=quick) as (
        state,
        work,
        _,
        server,
    ):
        record = state.record()
        assert record is not None
        question = {"model": "m", "prompt": "2 + 3 =", "max_tokens": 2}
        async with Client(record.url or "") as client:
            assert (await client.post("/v1/completions", question))["choices"]
            assert not work.done()
            server.freeze()
            begin_s = asyncio.get_running_loop().time()
            with pytest.raises(
                EngineError, match="the engine was given up: the engine does not say how it is"
            ):
                await asyncio.wait_for(work, 20)
            assert asyncio.get_running_loop().time() - begin_s > given_up_s
            with pytest.raises(DeskfleetError):
                await client.get("/health")


def test_what_the_gateways_settings_may_say_of_health(tmp_path: Path) -> None:
    """How long it may be stuck, and not when memory is short: two would decide about that. It is said."""
    (tmp_path / "fleet.toml").write_text(FILE + '[gateway]\npolicies = "policies.toml"\n')
    policies = tmp_path / "policies.toml"
    spec = read_source(tmp_path / "fleet.toml").spec

    def seen() -> tuple[float, int | None, tuple[str, ...]]:
        store = open_store(spec)
        settings = gateway_settings(spec, locate(POCKET), store, Intake())
        assert settings.observation is not None
        health = Gate(settings, str).observed(settings.observation).health
        return health.dead_after_s, health.memory_floor_bytes, unused_settings(store)

    policies.write_text("")
    assert seen() == (30.0, 0, ())
    policies.write_text('[health]\ndead_after_s = 60\nmemory_floor_bytes = "4GiB"\n')
    *limits, (warning,) = seen()
    assert limits == [60.0, 0]
    assert warning.startswith("health.memory_floor_bytes of the gateway's settings: not used in a fleet")


async def test_a_start_that_falls_silent_is_told_of_and_then_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_SEE_STALL_S", 0.02)
    monkeypatch.setattr(supervisor, "SILENT_S", 0.1)
    monkeypatch.setattr(supervisor, "STALLED_S", 0.6)
    (tmp_path / "fleet.toml").write_text(FILE)
    state = FleetState("desk", {"XDG_STATE_HOME": str(tmp_path)})
    diary = Diary(state, Order(read_source(tmp_path / "fleet.toml"), "one", "digest", {}))
    launching = _Launching(
        Order(read_source(tmp_path / "fleet.toml"), "one", "digest", {}), diary, None, list
    )
    loop = asyncio.get_running_loop()
    logs = launching._logs = LogReadiness(CASES["2-nodes-vllm-v4"].render(), loop.time())
    diary.enter("loading")
    seeing = asyncio.ensure_future(launching._see_stall())

    def told() -> int:
        return sum(each["event"] == "watch" for each in diary.launch.events()[0])

    async with asyncio.timeout(10):
        while told() < 1:
            await asyncio.sleep(0.01)
        logs.feed(0, "a word", loop.time())
        error = await seeing
    assert told() == 2
    assert re.match(r"no rank has logged anything for \d s while loading", error.message)
