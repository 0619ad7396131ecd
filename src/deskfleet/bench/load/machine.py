"""The machines meanwhile: the least memory that was available on each, and how busy the load generator's own is.

Owns the sampling. A node other than this one is known only where the endpoint tells of it (GET /health/detail).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import socket
import time
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import psutil

from deskfleet.client import Client
from deskfleet.errors import DeskfleetError

LOCAL = "this machine"
_OWN_S = 0.05
_NODES_S = 1.0


class LowWater:
    """`async with LowWater(client) as low: ...`, then `low.bytes`: node -> least MemAvailable, in bytes.

    Looks at this machine twenty times a second and asks the endpoint once a second.
    """

    def __init__(self, client: Client | None) -> None:
        self.bytes: dict[str, int] = {}
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._watch_own())]
        if self._client is not None:
            self._tasks.append(asyncio.create_task(self._watch_nodes(self._client)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _watch_own(self) -> None:
        while True:
            self._note(LOCAL, psutil.virtual_memory().available)
            await asyncio.sleep(_OWN_S)

    async def _watch_nodes(self, client: Client) -> None:
        while True:
            try:
                nodes = nodes_in(json.loads(await client.get("/health/detail")))
            except (DeskfleetError, ValueError):
                return  # an endpoint that does not tell will not tell later
            for node, available_bytes in nodes.items():
                self._note(node, available_bytes)
            await asyncio.sleep(_NODES_S)

    def _note(self, node: str, available_bytes: int) -> None:
        self.bytes[node] = min(available_bytes, self.bytes.get(node, available_bytes))


def nodes_in(detail: Any) -> dict[str, int]:
    """Return available bytes by rank, wherever in /health/detail a rank tells `host_available_bytes`."""
    found: dict[str, int] = {}
    if isinstance(detail, dict):
        if isinstance(detail.get("rank"), int) and isinstance(detail.get("host_available_bytes"), int):
            found[f"rank {detail['rank']}"] = detail["host_available_bytes"]
        detail = list(detail.values())
    if isinstance(detail, list):
        for part in detail:
            found |= nodes_in(part)
    return found


class OwnCpu:
    """How much of a core this process takes from here on."""

    def __init__(self) -> None:
        self._begin = time.monotonic(), time.process_time()

    def share(self) -> float:
        """Return CPU seconds per second since it was made."""
        wall_s, cpu_s = time.monotonic() - self._begin[0], time.process_time() - self._begin[1]
        return cpu_s / wall_s if wall_s > 0 else 0.0


def busy_share(interval_s: float = 0.25) -> float:
    """Return how busy this machine's cores are, 0 to 1, over an interval in which we do nothing."""
    return psutil.cpu_percent(interval=interval_s) / 100


def is_here(url: str) -> bool:
    """Say whether `url` is an address of this machine."""
    host = urlsplit(url).hostname
    if host is None:
        return False
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {
        str(address.address).partition("%")[0] for card in psutil.net_if_addrs().values() for address in card
    }
    return any(str(address) in own or ipaddress.ip_address(address).is_loopback for address in found)


def num_cores() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0))


__all__ = ["LOCAL", "LowWater", "OwnCpu", "busy_share", "is_here", "nodes_in", "num_cores"]
