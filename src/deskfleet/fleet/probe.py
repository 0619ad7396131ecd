"""Asks a node what it is and has: runs scripts/probe.sh there, and measures its clock. Changes nothing on it."""

from __future__ import annotations

import time
from importlib.resources import files

import msgspec

from deskfleet.fleet.facts import NodeFacts, parse_facts
from deskfleet.fleet.remote import Remote, RemoteFailed

_PROBE_S = 30.0


def read_script(name: str) -> str:
    """Return the text of a script of ours, e.g. `probe.sh`."""
    return files("deskfleet.fleet").joinpath("scripts", name).read_text(encoding="utf-8")


async def probe(remote: Remote, *, image: str | None = None, root: str = "") -> NodeFacts:
    """Return what is so on the node now; `image` is looked for among its images.

    `root` is a directory there that holds a recorded machine, for tests. The clock is compared with ours: the time that
    the node told lies between our asking and its answer. Raises NodeUnreachable, RemoteFailed.
    """
    paths = remote.node.paths
    await remote.run("true", timeout_s=_PROBE_S)  # makes the connection, for which the clock must not pay
    ask_ns = time.time_ns()
    told = await remote.run("date +%s%N", timeout_s=_PROBE_S)
    answer_ns = time.time_ns()
    ran = await remote.run(
        read_script("probe.sh"),
        *(root, image or "", paths.checkpoint, paths.engram, paths.cache),
        timeout_s=_PROBE_S,
    )
    if ran.returncode != 0:
        raise RemoteFailed(remote.node.name, "the probe ended badly", ran.last_line)
    facts = parse_facts(ran.stdout, remote.node.name)
    if not told.stdout.strip().isdigit():
        return facts
    middle_ns = (ask_ns + answer_ns) // 2
    return msgspec.structs.replace(
        facts,
        clock_offset_s=(int(told.stdout) - middle_ns) / 1e9,
        clock_error_s=(answer_ns - ask_ns) / 2e9,
    )


__all__ = ["probe", "read_script"]
