"""Checks of versions against the head's and against `known_bad.toml`, and of what the kernel complained about."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deskfleet.fleet.checks.contract import Check, Outcome, Subject, compared, failed, passed, skipped, warned
from deskfleet.fleet.facts import NodeFacts

_FILE = Path(__file__).with_name("known_bad.toml")


@dataclass(frozen=True, slots=True)
class KnownBad:
    """A version that others found broken. `what` is kernel, nccl, driver or nic; `version` is how it begins."""

    what: str
    version: str
    problem: str
    fix: str
    source: str


@cache
def known_bad() -> tuple[KnownBad, ...]:
    """Return the versions in the order of the file."""
    return tuple(KnownBad(**entry) for entry in tomllib.loads(_FILE.read_text(encoding="utf-8"))["bad"])


def _kernel(subject: Subject) -> Outcome:
    hint = "boot one kernel on all nodes; hold it: sudo apt-mark hold linux-image-$(uname -r)"
    return compared(subject, subject.facts.kernel, subject.head.kernel, "kernel", "warn", hint)


def _firmware(subject: Subject) -> Outcome:
    own, theirs = _firmware_of(subject.facts), _firmware_of(subject.head)
    if not own:
        return skipped("neither BIOS nor network card told a version")
    hint = "update firmware on all nodes alike: sudo fwupdmgr update; a stale card reaches some 3 GB/s"
    return compared(subject, _told(own), _told(theirs), "bios", "warn", hint)


def _firmware_of(facts: NodeFacts) -> dict[str, str]:
    cards = sorted({device.firmware for device in facts.rdma if device.firmware})
    found = {"network card": ", ".join(cards), "BIOS": facts.bios or ""}
    return {name: version for name, version in found.items() if version}


def _told(versions: dict[str, str]) -> str:
    return "; ".join(f"{name} {version}" for name, version in versions.items())


def nccl_of(facts: NodeFacts) -> str | None:
    """NCCL's version that ranks will load: the image's, as its base image tells it; None where it does not."""
    said = facts.image.env.get("NCCL_VERSION") if facts.image else None
    return said.partition("-")[0] if said else None


def _nccl(subject: Subject) -> Outcome:
    own, theirs = nccl_of(subject.facts), nccl_of(subject.head)
    if own is None:
        installed = ", ".join(subject.facts.nccl or ())
        return skipped(f"the image does not tell; the machine itself has {installed or 'none'}")
    return compared(
        subject, own, theirs, "image", "fail", "use one image on all nodes: deskfleet fleet build"
    )


def driver_of(facts: NodeFacts) -> str | None:
    """The GPU driver's version, None where it is unknown or there is none."""
    return facts.gpus[0].driver if facts.gpus else None


def versions_of(facts: NodeFacts) -> dict[str, str]:
    """What `known_bad.toml` speaks of: kernel, driver, NCCL, firmware of the network card."""
    found = {
        "kernel": facts.kernel,
        "driver": driver_of(facts),
        "nccl": nccl_of(facts),
        "nic": next((device.firmware for device in facts.rdma if device.firmware), None),
    }
    return {name: version for name, version in found.items() if version}


def _known_bad(subject: Subject) -> Outcome:
    versions = versions_of(subject.facts)
    for bad in known_bad():
        if _begins(versions.get(bad.what, ""), bad.version):
            return failed(f"{bad.what} {versions[bad.what]}: {bad.problem}", f"{bad.fix} ({bad.source})")
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    return passed(f"none known of {told}") if told else skipped("no version is known")


def _begins(version: str, bad: str) -> bool:
    """Whether `version` is `bad` or continues it: 7.0.0-1019-nvidia begins with 7.0.0-1019, 7.0.0-10190 does not."""
    return re.match(re.escape(bad) + r"(?![0-9])", version) is not None


_FLAGS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    (
        "GPU error",
        re.compile(r"NVRM: Xid|NVRM:.*(error|failed)", re.IGNORECASE),
        "look the Xid up in NVIDIA's list; an older one may be past",
    ),
    (
        "out of memory",
        re.compile(r"[Oo]ut of memory|oom-kill|Killed process|NV_ERR_NO_MEMORY"),
        "plan with a larger floor; deskfleet plan --explain",
    ),
    (
        "disk error",
        re.compile(r"I/O error|EXT4-fs error|nvme.*(timeout|reset|abort)", re.IGNORECASE),
        "look to the disk: sudo nvme smart-log /dev/nvme0",
    ),
    (
        "hardware error",
        re.compile(r"Hardware Error|AER:.*(Uncorrect|Fatal|Multiple)", re.IGNORECASE),
        "look to the machine: cables, slots, firmware",
    ),
    (
        "hang",
        re.compile(r"blocked for more than|soft lockup|hung_task"),
        "reboot the node before a launch",
    ),
    (
        "network card",
        re.compile(r"mlx5.*(error|fail|timeout|ENOMEM|leak)", re.IGNORECASE),
        "compare firmware and kernel with the other nodes; reboot",
    ),
    (
        "NFS",
        re.compile(r"nfs: server .* not responding"),
        "is the exporting node up? deskfleet fleet share proves each shard",
    ),
    (
        "heat",
        re.compile(r"(thermal|temperature).*(throttl|critical|above)", re.IGNORECASE),
        "look to cooling",
    ),
)


def _kernel_log(subject: Subject) -> Outcome:
    log = subject.facts.kernel_log
    if log is None:
        return subject.unknown("kernel_log")
    found = [(name, line, hint) for line in log for name, pattern, hint in _FLAGS if pattern.search(line)]
    if not found:
        return passed("nothing that matters since boot")
    kinds = sorted({name for name, _, _ in found})
    last = found[-1]
    return warned(f"{len(found)} lines ({', '.join(kinds)}), the last: {last[1][:160]}", last[2])


CHECKS = (
    Check("kernel", "Is the kernel the head's?", _kernel),
    Check("firmware", "Is the firmware the head's?", _firmware),
    Check("nccl", "Is NCCL the head's?", _nccl, is_must=True),
    Check("known-bad", "Is one of its versions known to be broken?", _known_bad, is_must=True),
    Check("kernel-log", "Has the kernel complained since boot?", _kernel_log),
)

__all__ = ["CHECKS", "KnownBad", "driver_of", "known_bad", "nccl_of", "versions_of"]
