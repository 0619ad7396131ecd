"""Every rung finds its own situation, a healthy server has none. Scripted situations, then endpoints. About 12 s."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deskfleet.bootfacts.facts import FactSheet, Flag
from deskfleet.diagnose.gather import gather
from deskfleet.diagnose.ladder import Diagnosis, walk
from deskfleet.diagnose.rungs import ALL, RUNGS
from deskfleet.diagnose.situation import Answer, Health, Host, Meters, Rank, Situation
from deskfleet.errors import ConfigError
from deskfleet.testing.honest import HonestEndpoint
from deskfleet.testing.saboteurs import ConstantToken, NanInMiddleLengths, WrongFromThree

COMMAND = (sys.executable, "-c", "import sys; from deskfleet.cli import main; sys.exit(main())")
GIB = 2**30
RIGHT = Answer(text="42", is_right=True, seconds_s=0.2, first_token_s=0.1, tok_s=30.0, is_finite=True)
WRONG = replace(RIGHT, text=" the the the", is_right=False)

HEALTHY = Situation(
    url="http://head:8000",
    reached="yes",
    health=Health(
        status=200,
        state="busy",
        ranks=tuple(Rank(r, "decode", 0.4, 0.1, 20 * GIB, 80 * GIB, 80 * GIB) for r in range(4)),
    ),
    meters=Meters(
        now={
            "deskfleet_engine_running": 2,
            "deskfleet_engine_waiting": 0,
            "deskfleet_engine_drafted_total": 5000,
            "deskfleet_engine_accepted_total": 3000,
            "deskfleet_engine_not_finite_total": 0,
            "deskfleet_engram_errors_total": 0,
            "deskfleet_engram_fallback_rows_total": 0,
        },
        added={
            "deskfleet_engine_generated_tokens_total": 180,
            "deskfleet_engine_steps_total": 60,
            "deskfleet_engine_preempted_total": 0,
        },
        over_s=3.0,
    ),
    question=RIGHT,
    again=RIGHT,
    together=(RIGHT, RIGHT, RIGHT),
    long_question=RIGHT,
    host=Host(120 * GIB, 20 * GIB, 8 * GIB, 0, 0.0, 0.5, 20, is_server=True, earlyoom=False),
    logs=(("rank-0.log", "weights ...\nApplication startup complete.\nserving"),),
    sheet=FactSheet("vLLM", (), ()),
    kernel_log="[1.0] all quiet\n",
)


def meters(**now: float) -> Meters:
    return replace(HEALTHY.meters, now={**HEALTHY.meters.now, **now})


def grown(**added: float) -> Meters:
    return replace(HEALTHY.meters, added={**HEALTHY.meters.added, **added})


def ranks(**changes: Any) -> Health:
    """Rank 2 is not as the others."""
    found = [replace(r, **changes) if r.rank == 2 else r for r in HEALTHY.health.ranks]
    return replace(HEALTHY.health, ranks=tuple(found))


def log(line: str) -> tuple[tuple[str, str], ...]:
    return (("rank-0.log", f"weights ...\nApplication startup complete.\n{line}\n"),)


SITUATIONS: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "reach",
        {"reached": "refused", "reach_error": "connection refused"},
        "nobody listens",
        "deskfleet facts",
    ),
    ("reach", {"reached": "silent", "reach_error": "no answer in 30 s"}, "says nothing", "/health/live"),
    (
        "killed",
        {"kernel_log": "[9.1] Out of memory: Killed process 4242 (VLLM::Worker_TP) total-vm:1kB"},
        "Killed process 4242 (VLLM::Worker_TP)",
        "deskfleet plan",
    ),
    ("killed", {"kernel_log": "earlyoom[77]: sending SIGTERM to process 4242"}, "earlyoom", "deskfleet plan"),
    ("dead", {"health": Health(503, "dead", "rank 1 was killed by SIGKILL")}, "rank 1 was killed", "--logs"),
    ("dead", {"logs": log("EngineCore encountered a fatal error.")}, "fatal error", "whole group"),
    (
        "engine memory",
        {"logs": log("torch.OutOfMemoryError: CUDA out of memory. Tried 2.9 GiB")},
        "2.9 GiB",
        "chunk",
    ),
    ("memory", {"health": ranks(host_available_bytes=2 * GIB)}, "rank 2 2.00 GiB", "KV pool"),
    ("memory", {"health": ranks(memory_bytes=99 * GIB)}, "rank 2 99.00 GiB of 80.00 GiB", "prefill"),
    (
        "hardware",
        {"kernel_log": "NVRM: Xid (PCI:000f:01:00): 79, GPU has fallen off the bus"},
        "Xid",
        "nvidia-smi",
    ),
    (
        "hardware",
        {"kernel_log": "mlx5_core 0000:01:00.0: Port: 1 Link DOWN, link down"},
        "card or bus",
        "ibstat",
    ),
    ("frozen rank", {"health": ranks(heartbeat_age_s=42.0)}, "rank 2 (decode for 42 s)", "py-spy"),
    (
        "stuck",
        {"meters": grown(deskfleet_engine_generated_tokens_total=0, deskfleet_engine_steps_total=0)},
        "2 requests run, and in 3 s no token and no step",
        "py-spy",
    ),
    ("stuck", {"question": Answer(error="timed out after 30 s")}, "no answer", "health/detail"),
    (
        "fabric",
        {"logs": log("NCCL WARN Call to ibv_modify_qp failed with error Connection timed out")},
        "ibv",
        "show_gids",
    ),
    (
        "boot",
        {"sheet": FactSheet("vLLM", (), (Flag("clamped", "num_drafts", "asked 5, granted 3"),))},
        "clamped: asked 5, granted 3",
        "deskfleet facts",
    ),
    ("not finite", {"question": replace(RIGHT, is_finite=False)}, "nonsense", "expandable segments"),
    ("not finite", {"meters": meters(deskfleet_engine_not_finite_total=3)}, "3 requests failed", "facts"),
    ("Engram rows", {"meters": meters(deskfleet_engram_errors_total=2)}, "2 faults", "verify PACK"),
    (
        "Engram rows",
        {"meters": meters(deskfleet_engram_fallback_rows_total=9)},
        "second source",
        "verify PACK",
    ),
    ("wrong alone", {"question": WRONG}, "' the the the'".replace("' ", "'"), "provenance"),
    ("wrong alone", {"again": replace(RIGHT, text="43")}, "twice gives '42' and '43'", "prefix hit"),
    ("wrong together", {"together": (RIGHT, WRONG, WRONG)}, "2 of 3 wrong", "draft state"),
    ("wrong when long", {"long_question": WRONG}, "after a thousand tokens", "chunked prefill"),
    ("wrong when long", {"long_question": Answer(error="broke off")}, "fails: broke off", "allocator"),
    (
        "drafts",
        {"meters": meters(deskfleet_engine_accepted_total=10)},
        "0.2% of 5000 drafts",
        "draft weights",
    ),
    ("queue", {"meters": grown(deskfleet_engine_preempted_total=4)}, "4 requests gave", "larger pool"),
    ("queue", {"meters": meters(deskfleet_engine_waiting=7)}, "7 requests wait", "mixed"),
    ("compiling", {"logs": log("[AutoTuner]: Tuning fp4_gemm: 0%")}, "AutoTuner", "warm"),
    (
        "graphs",
        {"logs": log("WARNING Cuda graph is disabled because of --enforce-eager")},
        "no graphs",
        "facts",
    ),
    ("host", {"host": replace(HEALTHY.host, swap_used_bytes=4 * GIB)}, "4.00 GiB are swapped", "swapoff"),
    ("host", {"host": replace(HEALTHY.host, load=64.0)}, "load 64.0 on 20 cores", "top"),
]


def test_a_healthy_server_has_no_cause() -> None:
    diagnosis = walk(HEALTHY)
    assert [f for f in diagnosis.findings if f.verdict == "found"] == []
    assert {f.rung for f in diagnosis.findings if f.verdict == "unknown"} == {"speed"}
    assert diagnosis.next_command is not None
    assert "deskfleet bench serve http://head:8000 --quick" in diagnosis.next_command


@pytest.mark.parametrize(("rung", "changes", "told", "command"), SITUATIONS)
def test_a_rung_finds_its_own_situation(rung: str, changes: dict[str, Any], told: str, command: str) -> None:
    cause = walk(replace(HEALTHY, **changes)).cause
    assert cause is not None
    assert cause.rung == rung
    assert told in cause.text
    assert cause.next_command is not None
    assert command in cause.next_command


def test_every_rung_that_can_find_something_was_tried() -> None:
    silent = {"client", "speed"}  # the two that only tell where to look
    assert {name for name, *_ in SITUATIONS} == {rung.name for rung in RUNGS} - silent


def test_what_ends_a_server_comes_before_what_slows_it() -> None:
    both = replace(
        HEALTHY,
        kernel_log="oom-kill:constraint=NONE",
        meters=meters(deskfleet_engine_waiting=7),
        question=WRONG,
    )
    found = [f.rung for f in walk(both).findings if f.verdict == "found"]
    assert found == ["killed", "wrong alone", "queue"]


def test_a_long_prompt_that_is_being_read_is_not_stuck() -> None:
    reading = replace(HEALTHY, meters=grown(deskfleet_engine_generated_tokens_total=0))
    stuck = next(f for f in walk(reading).findings if f.rung == "stuck")
    assert (stuck.verdict, stuck.text) == (
        "clear",
        "no token came in a while, but steps are run: a long prompt is being read",
    )


def test_compiling_before_ready_is_no_cause() -> None:
    early = (("rank-0.log", "[AutoTuner]: Tuning\nninja: building\nApplication startup complete.\n"),)
    assert (
        next(f for f in walk(replace(HEALTHY, logs=early)).findings if f.rung == "compiling").verdict
        == "clear"
    )


def test_nothing_known_finds_nothing_and_says_what_to_gather() -> None:
    diagnosis = walk(Situation())
    assert diagnosis.cause is None
    assert all(f.verdict == "unknown" and f.next_command for f in diagnosis.findings if f.verdict != "clear")
    assert diagnosis.next_command == "deskfleet diagnose http://HOST:8000 --logs FILE"


def test_only_rungs_of_the_symptom_are_walked() -> None:
    for symptom in ALL:
        walked = [f.rung for f in walk(HEALTHY, (symptom,)).findings]
        assert walked == [rung.name for rung in RUNGS if symptom in rung.symptoms]
    with pytest.raises(ConfigError, match="no symptom 'ugly'"):
        walk(HEALTHY, ("ugly",))  # type: ignore[arg-type]


async def diagnosed(server: HonestEndpoint, **more: Any) -> Diagnosis:
    async with server:
        situation = await gather(server.url, over_s=0.1, answer_s=10.0, **more)
    # Of the machine of the tests, load and memory are no finding here.
    return walk(replace(situation, host=HEALTHY.host))


@pytest.mark.parametrize(
    ("server", "rung"),
    [
        (HonestEndpoint(), None),
        (ConstantToken(), "wrong alone"),
        (WrongFromThree(event_s=0.01), "wrong together"),
        (NanInMiddleLengths(), "wrong when long"),
    ],
    ids=["honest", "constant", "together", "long"],
)
def test_endpoints_that_are_asked(server: HonestEndpoint, rung: str | None) -> None:
    diagnosis = asyncio.run(diagnosed(server))
    cause = diagnosis.cause
    assert (cause and cause.rung) == rung, [f for f in diagnosis.findings if f.verdict == "found"]
    if rung is None:
        clear = {f.rung for f in diagnosis.findings if f.verdict == "clear"}
        assert clear >= {"reach", "not finite", "wrong alone", "wrong together", "wrong when long", "client"}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [*COMMAND, "diagnose", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_on_a_port_where_nobody_listens_and_one_that_never_answers(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        refused = run(url, "--json")
        taken.listen()
        silent = run(url, "--patience", "1", "--symptom", "hanging")
    assert refused.returncode == 1, refused.stderr
    assert json.loads(refused.stdout)["cause"]["rung"] == "reach"
    assert silent.returncode == 1, silent.stderr
    assert "says nothing" in silent.stdout
    kernel = tmp_path / "kernel.log"
    kernel.write_text("Nov 30 oom-kill:constraint=CONSTRAINT_NONE,task=python\n")
    found = run("--kernel-log", kernel, "--symptom", "memory")
    assert found.returncode == 1
    assert "cause: killed: " in found.stdout
    assert "next: deskfleet plan" in found.stdout
    assert run("--logs", tmp_path / "none").returncode == 2
