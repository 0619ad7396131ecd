"""What ends a server, or makes it hang: rungs over memory, ranks, machines and the boot. Owns their rules."""

from __future__ import annotations

import re

from deskfleet.diagnose.finding import Finding, clear, found, logs_of, unknown, url_of
from deskfleet.diagnose.situation import Rank, Situation
from deskfleet.units import format_bytes

GIB = 2**30
FLOOR_BYTES = 5 * GIB
_RUNNING = ("deskfleet_engine_running", "vllm:num_requests_running", "sglang:num_running_reqs")
_GENERATED = (
    "deskfleet_engine_generated_tokens_total",
    "vllm:generation_tokens_total",
    "sglang:generation_tokens_total",
)
_STEPS = ("deskfleet_engine_steps_total", "vllm:iteration_tokens_total_count")
_OOM = re.compile(
    r"(oom-kill:|Out of memory: Killed process \d+ \([^)]*\)|earlyoom.*(?:SIGTERM|SIGKILL|sending))", re.I
)
_GPU_FAULT = re.compile(r"(NVRM: Xid[^\n]*|GPU has fallen off the bus)")
_LINK_FAULT = re.compile(
    r"(mlx5_core[^\n]*(?:link down|health compromised|timeout|error)[^\n]*|soft lockup[^\n]*)", re.I
)
_ENGINE_OOM = re.compile(
    r"(torch\.(?:cuda\.)?OutOfMemoryError[^\n]*|CUDA out of memory[^\n]*|CUDA error: out of memory)"
)
_ENGINE_DEATH = re.compile(
    r"(EngineDeadError[^\n]*|EngineCore encountered a fatal error[^\n]*|illegal memory access[^\n]*|"
    r"Watchdog caught collective operation timeout[^\n]*|scheduler hit an exception[^\n]*|"
    r"rank \d+ (?:was killed|failed)[^\n]*)",
    re.I,
)
_FABRIC = re.compile(
    r"(NCCL WARN[^\n]*|ibv_\w+ failed[^\n]*|IBV_WC_\w+[^\n]*|Connection refused by peer[^\n]*)"
)


def reach(s: Situation) -> Finding:
    name = "reach"
    if s.reached is None:
        return unknown(name, "no server was named", "deskfleet diagnose http://HOST:8000 --logs FILE")
    if s.reached == "refused":
        return found(
            name,
            f"nobody listens at {s.url}: {s.reach_error}",
            "deskfleet facts LOG...   # how far did the boot come?",
        )
    if s.reached == "silent":
        return found(
            name,
            f"{s.url} takes the connection and says nothing: {s.reach_error}",
            f"curl -m 5 {url_of(s)}/health/live",
        )
    return clear(name, "the server answers")


def killed(s: Situation) -> Finding:
    name = "killed"
    if s.kernel_log is None:
        return unknown(
            name,
            "the kernel's log was not given",
            "dmesg -T > kernel.log && deskfleet diagnose --kernel-log kernel.log",
        )
    hit = _OOM.search(s.kernel_log)
    if hit:
        return found(
            name,
            f"the kernel or earlyoom ended a process for want of memory: {hit[1]}",
            "deskfleet plan CHECKPOINT --nodes N   # what fits, and with which margin",
        )
    return clear(name, "the kernel killed nothing for want of memory")


def hardware(s: Situation) -> Finding:
    name = "hardware"
    if s.kernel_log is None:
        return unknown(
            name,
            "the kernel's log was not given",
            "dmesg -T > kernel.log && deskfleet diagnose --kernel-log kernel.log",
        )
    for pattern, what in ((_GPU_FAULT, "a GPU fault"), (_LINK_FAULT, "a fault of network card or bus")):
        hit = pattern.search(s.kernel_log)
        if hit:
            return found(
                name, f"{what}: {hit[1].strip()}", "nvidia-smi -q -d ERROR,CLOCK && ibstat   # on that node"
            )
    return clear(name, "no fault of GPU, card or bus in the kernel's log")


def memory(s: Situation) -> Finding:
    name = "memory"
    nodes = {
        f"rank {r.rank}": r.host_available_bytes for r in s.health.ranks if r.host_available_bytes is not None
    }
    if s.host.is_server and s.host.available_bytes is not None:
        nodes["this machine"] = s.host.available_bytes
    low = {node: value for node, value in nodes.items() if value < FLOOR_BYTES}
    if low:
        told = ", ".join(f"{node} {format_bytes(value)}" for node, value in low.items())
        return found(
            name,
            f"less than {format_bytes(FLOOR_BYTES)} of memory available: {told}; the next long prompt may end it",
            "deskfleet plan CHECKPOINT --nodes N   # lower the KV pool or the chunk, not the fraction",
        )
    over = [
        r
        for r in s.health.ranks
        if r.memory_bytes and r.planned_bytes and r.memory_bytes > 1.1 * r.planned_bytes
    ]
    if over:
        told = ", ".join(
            f"rank {r.rank} {format_bytes(r.memory_bytes or 0)} of {format_bytes(r.planned_bytes or 0)}"
            for r in over
        )
        return found(
            name, f"more memory than planned: {told}", f"deskfleet bench serve {url_of(s)} --parts prefill"
        )
    if not nodes:
        return unknown(
            name,
            "nobody tells how much memory is available",
            "grep MemAvailable /proc/meminfo   # on every node",
        )
    return clear(name, f"at least {format_bytes(min(nodes.values()))} available on every node that tells")


def engine_memory(s: Situation) -> Finding:
    name = "engine memory"
    hit = _ENGINE_OOM.search(logs_of(s))
    if hit:
        return found(
            name,
            f"the engine ran out: {hit[1].strip()}",
            "deskfleet plan CHECKPOINT --nodes N   # a smaller chunk for long prompts, a smaller pool",
        )
    if not s.logs:
        return unknown(name, "no logs were given", "deskfleet diagnose URL --logs FILE...")
    return clear(name, "no log tells of an allocation that failed")


def dead(s: Situation) -> Finding:
    name = "dead"
    if s.health.state == "dead" or (s.health.reason and "ended" in s.health.reason):
        return found(
            name,
            f"the engine has ended: {s.health.reason}",
            "deskfleet diagnose URL --logs FILE...   # of every rank",
        )
    hit = _ENGINE_DEATH.search(logs_of(s))
    if hit:
        return found(
            name,
            f"a rank or the engine ended: {hit[1].strip()}",
            "deskfleet facts LOG...   # then start the whole group anew",
        )
    return clear(name, "nothing says that the engine has ended")


def frozen_rank(s: Situation) -> Finding:
    name = "frozen rank"
    ranks = s.health.ranks
    if not ranks:
        return unknown(name, "the server does not tell of its ranks", f"curl {url_of(s)}/health/detail")
    silent = [r for r in ranks if (r.heartbeat_age_s or 0) > 5 or r.state == "ended"]
    if silent:
        told = ", ".join(_rank_told(r) for r in silent)
        return found(
            name,
            f"not heard of: {told}; the others wait for it",
            "py-spy dump --pid PID   # of that rank, on its node",
        )
    return clear(name, f"all {len(ranks)} ranks report")


def _rank_told(rank: Rank) -> str:
    age = "" if rank.heartbeat_age_s is None else f" for {rank.heartbeat_age_s:.0f} s"
    return f"rank {rank.rank} ({rank.state or 'state unknown'}{age})"


def stuck(s: Situation) -> Finding:
    name = "stuck"
    running, grown = s.meters.value(*_RUNNING), s.meters.growth(*_GENERATED)
    steps = s.meters.growth(*_STEPS)
    if s.health.state == "stuck":
        return found(
            name,
            f"the server says so: {s.health.reason}",
            "py-spy dump --pid PID   # of every rank, on its node",
        )
    timed_out = s.question is not None and s.question.error is not None and "timed out" in s.question.error
    if running and grown == 0 and not steps:
        return found(
            name,
            f"{running:.0f} requests run, and in {s.meters.over_s:.0f} s no token and no step came of them"
            + ("; a question of ours timed out too" if timed_out else ""),
            "py-spy dump --pid PID   # of every rank, on its node: who is in which collective?",
        )
    if running and grown == 0 and steps:
        return clear(name, "no token came in a while, but steps are run: a long prompt is being read")
    if timed_out:
        return found(
            name,
            f"a question got no answer: {s.question.error if s.question else ''}",
            f"curl {url_of(s)}/health/detail",
        )
    if running is None and s.question is None:
        return unknown(name, "nothing tells of running requests", f"curl {url_of(s)}/metrics")
    return clear(name, "tokens come")


def boot(s: Situation) -> Finding:
    name = "boot"
    if s.sheet is None:
        return unknown(name, "no boot logs were given", "deskfleet facts LOG...")
    hard = [flag for flag in s.sheet.flags if flag.kind not in ("warned", "missing")]
    if hard:
        more = f" and {len(hard) - 1} more" if len(hard) > 1 else ""
        return found(
            name,
            f"{hard[0].kind}: {hard[0].text}{more}",
            "deskfleet facts LOG...   # all of them, rank by rank",
        )
    missing = next((flag for flag in s.sheet.flags if flag.kind == "missing"), None)
    if missing is not None:  # of a model without experts, of another release, of a log that was cut
        return unknown(name, missing.text, "deskfleet facts LOG...   # what they do say")
    return clear(name, "every rank was granted what was asked, and all the same")


def fabric(s: Situation) -> Finding:
    name = "fabric"
    if not s.logs:
        return unknown(
            name, "no logs were given", "NCCL_DEBUG=INFO for one boot, then deskfleet diagnose --logs FILE..."
        )
    hit = _FABRIC.search(logs_of(s))
    if hit:
        return found(
            name,
            f"the network between ranks complains: {hit[1].strip()}",
            "show_gids && ibstat   # on every node: index, state, MTU",
        )
    return clear(name, "no log tells of trouble between ranks")


__all__ = [
    "boot",
    "dead",
    "engine_memory",
    "fabric",
    "frozen_rank",
    "hardware",
    "killed",
    "memory",
    "reach",
    "stuck",
]
