"""A launch in front of an engine of others, which is scripted here: nothing opens without receipts and right answers.

Containers are not part of it, and neither is a real vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from launch_cases import CASES

from deskfleet.client import Client
from deskfleet.errors import DeskfleetError, EngineError
from deskfleet.fleet.readiness import LogReadiness
from deskfleet.fleet.spec import read_source
from deskfleet.fleet.state import FleetState
from deskfleet.fleet.up import GateChoice
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.model.embedded import POCKET, locate
from deskfleet.supervisor import Diary, GatesFailed, Order, _Launching
from deskfleet.testing.scripted import Script
from deskfleet.testing.upstream_vllm import ScriptedVllm

RECEIPTS = (
    (0, "GPU KV cache size: 2,000,000 tokens"),
    (0, "Using 'FLASHINFER_B12X' NvFp4 MoE backend out of"),
    (1, "Using 'FLASHINFER_B12X' NvFp4 MoE backend out of"),
)
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
    directory: Path, lines: Sequence[tuple[int, str]], gates: GateChoice
) -> AsyncIterator[tuple[FleetState, asyncio.Future[None]]]:
    """The launch of two ranks that have logged `lines`, until it serves or has failed."""
    (directory / "fleet.toml").write_text(FILE)
    state = FleetState("desk", {"XDG_STATE_HOME": str(directory)})
    order = Order(read_source(directory / "fleet.toml"), "one", "digest", {}, gates)
    settled = asyncio.Event()
    checkpoint = locate(POCKET)
    async with ScriptedVllm(Script(tuple(range(300, 310))), checkpoint) as server:
        spec = msgspec.structs.replace(CASES["2-nodes-vllm-v4"].render(), endpoint=server.url)
        launching = _Launching(order, Diary(state, order), None, settled.set)
        launching._logs = LogReadiness(spec, 0.0)
        for rank, line in lines:
            launching._read_line(rank, line)
        settings = GatewaySettings(model_id="m", checkpoint=checkpoint, port=0)
        work = asyncio.ensure_future(launching._serve_front(settings, spec))
        waiting = asyncio.ensure_future(settled.wait())
        try:
            await asyncio.wait((work, waiting), timeout=60, return_when=asyncio.FIRST_COMPLETED)
            yield state, work
        finally:
            for task in (work, waiting):
                task.cancel()
            await asyncio.gather(work, waiting, return_exceptions=True)


async def test_it_opens_once_receipts_are_there(tmp_path: Path) -> None:
    async with launched(tmp_path, RECEIPTS, GateChoice(none=True)) as (state, _):
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
    async with launched(tmp_path, lines, gates) as (state, work):
        with pytest.raises(kind, match=said):
            await work
        record = state.record()
        assert record is None or record.phase == "asking"
