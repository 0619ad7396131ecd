"""What adapters count on each node of a fleet, brought here: the gateway's machine does not see other nodes' files.

Owns which files are fetched and how they lie here. What is in them is `deskfleet_engram.host_metrics`'s; who shows them
is the gateway's.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from deskfleet.fleet.engines.contract import CACHE_PATH
from deskfleet.fleet.engines.stock import RECEIPTS_VARIABLE
from deskfleet.fleet.launch import LaunchSpec
from deskfleet.fleet.remote import Remote, Remotes
from deskfleet_engram.errors import EngramError
from deskfleet_engram.host import write_receipt
from deskfleet_engram.host_metrics import counters_name

LOOK_S = 10.0
"""Adapters write as often."""

_ANSWER_S = 15.0

_log = logging.getLogger(__name__)

# Files of ranks that have ended are told by the clock of the node that wrote them: clocks may differ from node to node.
_FETCH = """\
cd -- "$1" 2>/dev/null || exit 0
for file in *-counters.json; do
  [ -f "$file" ] && [ -n "$(find "$file" -mmin -1)" ] && cat -- "$file"
done
exit 0
"""


def places_of(launch: LaunchSpec) -> dict[str, str]:
    """Where the adapter writes on each node, as the node sees it; empty for a launch without an adapter."""
    if launch.adapter is None:
        return {}
    return {
        rank.node: mount.source + rank.env[RECEIPTS_VARIABLE].removeprefix(CACHE_PATH)
        for rank in launch.ranks
        for mount in rank.box.mounts
        if mount.target == CACHE_PATH
    }


async def attend_counters(remotes: Remotes, places: Mapping[str, str], directory: Path) -> NoReturn:
    """Bring the counters of every node that has a place, a directory there, into `directory`, for ever.

    A node that does not answer has none for so long, and whoever shows them leaves out what has grown old. No trouble
    with counters ends a fleet.
    """

    async def fetch(remote: Remote) -> list[dict[str, Any]]:
        place = places.get(remote.node.name)
        if place is None:
            return []
        ran = await remote.run(_FETCH, place, timeout_s=_ANSWER_S)
        return list(read_documents(ran.stdout))

    while True:
        gathered = await remotes.gather(fetch)
        documents = [each for found in gathered.results.values() for each in found]
        try:
            await asyncio.to_thread(_keep, documents, directory)
        except EngramError as error:
            _log.warning("counters of Engram rows are not shown: %s", error)
        await asyncio.sleep(LOOK_S)


def _keep(documents: Sequence[Mapping[str, Any]], directory: Path) -> None:
    for document in documents:
        # As if written now: it is fresh, and the node's clock need not be ours.
        body = {key: value for key, value in document.items() if key != "written_unix_s"}
        write_receipt(directory, counters_name(document["engine"], document["rank"]), body)


def read_documents(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of `text` that are counters of a rank, one after the other; stop at what is no JSON."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        try:
            document, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        if isinstance(document, dict) and _is_ranks(document):
            yield document
        while at < len(text) and text[at].isspace():
            at += 1


def _is_ranks(document: Mapping[str, Any]) -> bool:
    """Whether it is of a rank: its name becomes that of a file here."""
    return (
        document.get("engine") in ("vllm", "sglang")
        and isinstance(document.get("rank"), int)
        and isinstance(document.get("counters"), dict)
    )


__all__ = ["LOOK_S", "attend_counters", "places_of", "read_documents"]
