"""Checks of memory, GPU and ports, and of what else lives on the machine."""

from __future__ import annotations

from deskfleet.fleet.checks.contract import Check, Outcome, Subject, compared, failed, passed, skipped, warned
from deskfleet.fleet.checks.versions import driver_of
from deskfleet.planner.budget import SYSTEM_LINE, RankBudget
from deskfleet.planner.cluster import KINDS
from deskfleet.planner.fleetfile import LOCAL_KIND
from deskfleet.units import format_bytes

PORTS = "ports"
"""The check of ports; the doctor asks it of its own machine too."""

_GUARDS = ("earlyoom", "systemd-oomd", "nohang")
_NEARLY = 0.97
_SLOW_MHZ = 1000

_IDLE = 0x1
_SLOWED = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""NVML's reasons for low clocks that are faults; a power cap (0x4) is not, nor is being idle (0x1)."""


def _memory(subject: Subject) -> Outcome:
    memory = subject.facts.memory
    if memory is None:
        return subject.unknown("meminfo")
    if subject.is_serving:
        return skipped(f"a rank of this fleet holds memory; {format_bytes(memory.available_bytes)} available")
    kind = KINDS.get(subject.node.kind)
    if kind is not None and not kind.is_unified:
        return _device_memory(subject)
    available_bytes = memory.available_bytes
    told = f"{format_bytes(available_bytes)} available of {format_bytes(memory.total_bytes)}"
    if subject.budgets:
        return _against_plan(subject.budgets, available_bytes, told)
    expected_bytes = subject.node.available_bytes or (kind.available_bytes if kind else 0)
    if available_bytes < expected_bytes:
        return warned(
            f"{told}, and plans count on {format_bytes(expected_bytes)}",
            "see who holds it: ps aux --sort -rss | head; or write what is free as the node's available",
        )
    return passed(told)


def _device_memory(subject: Subject) -> Outcome:
    gpus = subject.facts.gpus
    if gpus is None:
        return subject.unknown("gpus")
    free = [gpu.memory_bytes - (gpu.used_bytes or 0) for gpu in gpus if gpu.memory_bytes is not None]
    if not free:
        return skipped("unknown: the driver does not tell the GPU's memory")
    told = f"{format_bytes(min(free))} free on the fullest of {len(free)} GPUs"
    return _against_plan(subject.budgets[:1], min(free), told) if subject.budgets else passed(told)


def _against_plan(budgets: tuple[RankBudget, ...], available_bytes: int, told: str) -> Outcome:
    """Compare with what the plan adds to what the system holds, at rest and at its worst moment, its floor on top."""
    needed_bytes = sum(
        max(each.held_bytes + each.floor.rest_bytes, each.peak_bytes + each.floor.peak_bytes)
        - each.line(SYSTEM_LINE).num_bytes
        for each in budgets
    )
    told = f"{told}, the plan needs {format_bytes(needed_bytes)}"
    if available_bytes < needed_bytes:
        return failed(
            told,
            "stop what else runs there; after a crash wait a minute for memory to come back; or plan with less",
        )
    return passed(told)


def _memory_guards(subject: Subject) -> Outcome:
    units, processes = subject.facts.units, subject.facts.processes
    if units is None and processes is None:
        return subject.unknown("units")
    active = {
        guard
        for guard in _GUARDS
        for unit in units or ()
        if unit.name.startswith(guard) and unit.state == "active"
    }
    lines = [line.split(None, 2)[-1] for line in processes or () if any(guard in line for guard in _GUARDS)]
    if not active and not lines:
        return passed("none is active")
    return warned(
        "; ".join(lines) or f"{', '.join(sorted(active))} is active",
        "it ends the biggest process, a rank, at its own floor; deskfleet watches memory itself: "
        "sudo systemctl disable --now earlyoom, or keep its floor below the plan's",
    )


def _cgroups(subject: Subject) -> Outcome:
    memory = subject.facts.memory
    if memory is None:
        return subject.unknown("meminfo")
    limits = {
        name: limit
        for name, limit in subject.facts.memory_limits.items()
        if name.startswith(("/system.slice", "/docker")) and "docker.service" not in name
    }
    low = {name: limit for name, limit in limits.items() if limit < memory.total_bytes * _NEARLY}
    if low:
        told = ", ".join(f"{name} {format_bytes(limit)}" for name, limit in low.items())
        return warned(told, "containers live below it: lift the limit, or plan with that much")
    return passed("no limit above containers")


def _ports(subject: Subject) -> Outcome:
    if subject.facts.listening is None:
        return subject.unknown("tcp")
    if not subject.ports:
        return skipped("no port is needed here")
    taken = sorted(set(subject.ports) & subject.facts.listening)
    told = ", ".join(map(str, taken or subject.ports))
    if not taken:
        return passed(f"{told} free")
    if subject.is_serving:
        return skipped(f"{told} taken, and a rank of this fleet runs")
    return failed(f"{told} taken", taken_hint(taken[0]))


def taken_hint(port: int) -> str:
    """What to do about a port that somebody has."""
    return f"see who has it: sudo ss -ltnp 'sport = :{port}'; or choose another gateway port, or fleet's name"


def _gpu(subject: Subject) -> Outcome:
    processes = subject.facts.gpu_processes
    if subject.node.kind == LOCAL_KIND:
        return skipped("this kind of node has no GPU")
    if subject.facts.gpus is None or processes is None:
        return failed(
            subject.facts.unknown.get("gpus", "nvidia-smi does not answer"),
            "install the driver, then: nvidia-smi",
        )
    if subject.is_serving:
        return skipped("a rank of this fleet runs")
    names = ", ".join(gpu.name for gpu in subject.facts.gpus)
    if processes:
        told = ", ".join(f"{each.name} (pid {each.pid})" for each in processes)
        return failed(
            f"busy: {told}", "stop them yourself; on unified memory a second context takes what is planned"
        )
    return passed(f"{names}, idle")


def _clocks(subject: Subject) -> Outcome:
    gpus = subject.facts.gpus
    if not gpus:
        return skipped("no GPU told its clocks")
    for gpu in gpus:
        mask = gpu.throttle_mask or 0
        reasons = [name for bit, name in _SLOWED.items() if mask & bit]
        told = f"GPU {gpu.index}: {gpu.clock_mhz} of {gpu.max_clock_mhz} MHz, {gpu.temperature_c} C"
        if reasons:
            return warned(
                f"{told}, held back by {', '.join(reasons)}",
                "look to cooling and power; a box that stays slow: unplug it for a minute",
            )
        is_latched = (
            gpu.throttle_mask is not None and not mask & _IDLE and (gpu.clock_mhz or _SLOW_MHZ) < _SLOW_MHZ
        )
        if is_latched:
            return warned(
                f"{told}, and not because it is idle",
                "a latched clock: unplug the box for a minute, or sudo nvidia-smi -lgc 0,2200, and update firmware",
            )
    others = {
        gpu.max_clock_mhz
        for facts in subject.everyone.values()
        for gpu in facts.gpus or ()
        if gpu.max_clock_mhz
    }
    own = gpus[0].max_clock_mhz
    if own is not None and own < max(others, default=own):
        return warned(
            f"at most {own} MHz, others {max(others)} MHz", "sudo nvidia-smi -rgc lifts a set limit"
        )
    return passed(f"{gpus[0].clock_mhz} of {own} MHz, {gpus[0].temperature_c} C")


def _units(subject: Subject) -> Outcome:
    if subject.facts.units is None:
        return subject.unknown("units")
    active = [
        unit
        for unit in subject.facts.units
        if unit.state in ("active", "activating") and not unit.name.startswith(_GUARDS)
    ]
    if not active:
        return passed("no engine is a service")
    return warned(
        ", ".join(f"{unit.name} ({unit.scope})" for unit in active),
        "a service that restarts brings back a stale rank; disable it yourself: systemctl disable --now NAME",
    )


def _stale_ranks(subject: Subject) -> Outcome:
    if subject.facts.processes is None:
        return subject.unknown("processes")
    if subject.is_serving:
        return skipped("a rank of this fleet runs")
    engines = [line for line in subject.facts.processes if not any(guard in line for guard in _GUARDS)]
    if not engines:
        return passed("none")
    told = "; ".join(" ".join(line.split())[:80] for line in engines[:3])
    more = f" and {len(engines) - 3} more" if len(engines) > 3 else ""
    return warned(f"{told}{more}", "end what is left over yourself: kill PID")


def _driver(subject: Subject) -> Outcome:
    if subject.node.kind == LOCAL_KIND:
        return skipped("this kind of node has no GPU")
    hint = (
        "the slowest driver sets the step (2.4 times, measured by others): install one version on all nodes"
    )
    return compared(subject, driver_of(subject.facts), driver_of(subject.head), "gpus", "fail", hint)


CHECKS = (
    Check("memory", "Is there the memory that the plan needs?", _memory, is_must=True),
    Check("memory-guards", "Does something else kill when memory is short?", _memory_guards),
    Check("cgroups", "Is the memory of containers limited?", _cgroups),
    Check(PORTS, "Are the ports free?", _ports, is_must=True),
    Check("gpu", "Is the GPU there and idle?", _gpu, is_must=True),
    Check("gpu-clocks", "Does the GPU run as fast as it should?", _clocks),
    Check("driver", "Is the driver the head's?", _driver, is_must=True),
    Check("units", "Is an engine a service?", _units),
    Check("stale-ranks", "Do engines run outside of containers?", _stale_ranks),
)

__all__ = ["CHECKS", "PORTS", "taken_hint"]
