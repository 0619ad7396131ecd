"""Checks of a node as a place to be: who we are there, its clock, its directories and their room."""

from __future__ import annotations

from deskfleet.fleet.checks.contract import Check, Outcome, Subject, compared, failed, passed, skipped, warned
from deskfleet.fleet.facts import Directory
from deskfleet.units import format_bytes

_SKEW_FAIL_S = 5.0
_SKEW_WARN_S = 0.5
_ARCHES = {"spark": "aarch64"}
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "fuse.sshfs", "9p", "ceph", "lustre")
_ROOM_WITHOUT_PLAN_BYTES = 10 << 30


def _ssh(subject: Subject) -> Outcome:
    facts = subject.facts
    return passed(
        f"{facts.user or 'somebody'} on {facts.hostname or 'a host'}, {facts.os or 'unknown system'}"
    )


def _clock(subject: Subject) -> Outcome:
    offset_s, error_s = subject.facts.clock_offset_s, subject.facts.clock_error_s
    if offset_s is None or error_s is None:
        return skipped("unknown: the node did not tell its time")
    measured = f"{offset_s:+.3f} s against this machine, within {error_s:.3f} s"
    certain_s = abs(offset_s) - error_s
    hint = "set the clock: sudo timedatectl set-ntp true, then compare with timedatectl"
    if certain_s > _SKEW_FAIL_S:
        return failed(measured, hint)
    return warned(measured, hint) if certain_s > _SKEW_WARN_S else passed(measured)


def _account(subject: Subject) -> Outcome:
    facts, head = subject.facts, subject.head
    if facts.user is None or facts.home is None:
        return subject.unknown("account" if facts.user is None else "home")
    own = f"{facts.user} (uid {facts.uid}), home {facts.home}"
    if (facts.user, facts.uid, facts.home) == (head.user, head.uid, head.home):
        return passed(own)
    return warned(
        f"{own}; on {head.node} {head.user} (uid {head.uid}), home {head.home}",
        "that is allowed: see that this node's paths in fleet.toml are its own, and that files there are its user's",
    )


def _arch(subject: Subject) -> Outcome:
    arch, wanted = subject.facts.arch, _ARCHES.get(subject.node.kind)
    if arch is None:
        return subject.unknown("arch")
    if wanted is not None and arch != wanted:
        return failed(
            f"{arch}, and a {subject.node.kind} is {wanted}",
            "correct the node's kind in fleet.toml, or its address",
        )
    hint = "one image serves one architecture: give all nodes machines of one kind"
    return compared(subject, arch, subject.head.arch, "arch", "fail", hint)


def _paths(subject: Subject) -> Outcome:
    if subject.facts.directories is None:
        return subject.unknown("paths")
    faults = [fault for each in subject.facts.directories if (fault := _path_fault(subject, each))]
    if faults:
        return failed(
            "; ".join(faults), "correct the node's paths in fleet.toml, or make them its user's: chown"
        )
    here = ", ".join(f"{each.role} {each.kind} on {each.file_system}" for each in subject.facts.directories)
    return passed(here)


def _path_fault(subject: Subject, directory: Directory) -> str | None:
    path = getattr(subject.node.paths, directory.role)
    if directory.kind == "file":
        return f"{directory.role} {path} is no directory"
    if directory.role == "checkpoint":
        if directory.kind == "absent" and not directory.is_writable:
            return f"checkpoint {path} is not there and cannot be made by {subject.facts.user}"
        return None
    if not directory.is_writable:
        return f"{directory.role} {path} cannot be written by {subject.facts.user}"
    if directory.file_system in _NETWORK_FILE_SYSTEMS:
        # Two ranks that compile into one cache, or read rows over the network, break or slow each other.
        return f"{directory.role} {path} is on {directory.file_system}, and must be a disk of the node's own"
    return None


def _disk(subject: Subject) -> Outcome:
    if subject.facts.directories is None:
        return subject.unknown("paths")
    faults, told = [], []
    for directory in subject.facts.directories:
        needed_bytes = _needed_bytes(subject, directory)
        told.append(f"{directory.role} {format_bytes(directory.free_bytes)} free")
        if directory.free_bytes < needed_bytes:
            faults.append(
                f"{directory.role} has {format_bytes(directory.free_bytes)} free of {format_bytes(needed_bytes)} needed"
            )
    if faults:
        return failed("; ".join(faults), "make room, or give the node another path in fleet.toml")
    return passed(", ".join(told))


def _needed_bytes(subject: Subject, directory: Directory) -> int:
    """What is still to be written there: the plan's files less those that are there."""
    plan = subject.plan
    if directory.role == "cache":
        return _ROOM_WITHOUT_PLAN_BYTES
    if plan is None:
        return 0
    there_bytes = sum((directory.files or {}).values())
    if directory.role == "engram":
        tables = plan.inventory.engram
        ranks = len(subject.budgets)
        planned = 0 if tables is None else tables.num_bytes * ranks // max(1, len(plan.budgets))
    else:
        reads_here = subject.spec.share == "copy" or subject.node == subject.spec.head
        planned = plan.inventory.file_bytes if reads_here else 0
    return max(0, planned - there_bytes)


CHECKS = (
    Check("ssh", "Can we run something there?", _ssh, is_must=True),
    Check("clock", "Is its clock ours?", _clock, is_must=True),
    Check("account", "Are user and home those of the head?", _account),
    Check("arch", "Is it the kind of machine that fleet.toml says?", _arch, is_must=True),
    Check("paths", "Can its directories be used?", _paths, is_must=True),
    Check("disk", "Is there room for what is planned?", _disk, is_must=True),
)

__all__ = ["CHECKS"]
