"""How long weights and Engram rows take to arrive: `LoadPath`, the published rates, and the time they give.

Owns rates as named facts, each with what it was measured on. Knows no checkpoint: bytes are given.
"""

from __future__ import annotations

from dataclasses import dataclass

from deskfleet.planner.checks import above_zero, at_least

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class LoadPath:
    """A way for bytes to reach a node. `bytes_per_s` of one reader; `server_bytes_per_s` of all readers of one server
    together, None when nothing is shared. `source` says in words what was measured."""

    name: str
    bytes_per_s: float
    server_bytes_per_s: float | None
    source: str

    def rate_bytes_per_s(self, num_readers: int = 1) -> float:
        """Bytes per second of each of `num_readers` that read at once. Raises ConfigError."""
        at_least(1, num_readers=num_readers)
        if self.server_bytes_per_s is None:
            return self.bytes_per_s
        return min(self.bytes_per_s, self.server_bytes_per_s / num_readers)


LOCAL_NVME = LoadPath(
    "local NVMe",
    196 * GIB / 250,
    None,
    "the head of a published two-node EXL3 recipe: 196 GiB in about 250 s, 0.78 GiB/s (M-91)",
)
LOCAL_NVME_THREE_NODES = LoadPath(
    "local NVMe, three nodes",
    476 * GIB / (8 * 60),
    None,
    "a published three-node recipe: every node reads all 476 GiB in 8 minutes, 0.99 GiB/s (M-90)",
)
NFS = LoadPath(
    "NFS from the head",
    81.6 * GIB / 341,
    3 * 81.6 * GIB / 341,
    "a published four-node recipe: three readers of one server, 81.6 GiB each in 341 s, 0.24 GiB/s; a single reader of "
    "another recipe was no faster, 196 GiB in 15 minutes, so it is the reader that limits. More than three are assumed "
    "to share what three had (M-88, M-91)",
)
SECOND_PASS = LoadPath(
    "second pass over what was read before",
    81.6 * GIB / 100,
    None,
    "the same four-node recipe: 81.6 GiB in 100 s, 0.82 GiB/s (M-88)",
)
SWITCHED_FLEET = LoadPath(
    "fast loader on a switched fleet",
    510_310_549_975 / 4 / 53,
    None,
    "a user's report for four nodes: all 48 shards in 53 s. Taken here as a quarter of the bytes on each node, 2.2 "
    "GiB/s; the report does not say so (M-92)",
)
ROW_COPY = LoadPath(
    "copy of Engram rows to a node",
    150e6,
    None,
    "a published four-node recipe: 47.2 GiB at 150 MB/s in about 6 minutes (M-89)",
)

LOAD_PATHS = (LOCAL_NVME, LOCAL_NVME_THREE_NODES, NFS, SECOND_PASS, SWITCHED_FLEET, ROW_COPY)


def load_s(num_bytes: int, path: LoadPath, num_readers: int = 1) -> float:
    """Seconds until each of `num_readers` has its `num_bytes`. Raises ConfigError."""
    at_least(0, num_bytes=num_bytes)
    above_zero(bytes_per_s=path.bytes_per_s)
    return num_bytes / path.rate_bytes_per_s(num_readers)


__all__ = [
    "LOAD_PATHS",
    "LOCAL_NVME",
    "LOCAL_NVME_THREE_NODES",
    "NFS",
    "ROW_COPY",
    "SECOND_PASS",
    "SWITCHED_FLEET",
    "LoadPath",
    "load_s",
]
