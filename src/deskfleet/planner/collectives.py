"""What ranks exchange: NCCL's buffers, the messages of a decode step, and the time they take.

Owns the arithmetic of connections, messages and links. Knows no engine; how a fabric is wired is the caller's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from deskfleet.planner.checks import above_zero, at_least
from deskfleet.planner.cluster import Link

MIB = 1 << 20

BF16_BYTES = 2

COLLECTIVES_BESIDE_ALL_REDUCES = 24
"""A published recipe counts 104 collectives in a step of 40 layers: these besides the 80 all-reduces of its layers."""


@dataclass(frozen=True, slots=True)
class NcclBuffers:
    """Bytes of one connection by protocol. The defaults are the library's own, for 8 steps.

    Simple 4 MiB; LL 8 lines of 16 bytes for each of 512 threads; LL128 120 words of 8 bytes for each of 640 threads. A
    protocol that is switched off still gets its buffer, so recipes set a size for it as well.
    """

    simple_bytes: int = 4 * MIB
    ll_bytes: int = 8 * 512 * 8 * 16
    ll128_bytes: int = 120 * 640 * 8 * 8

    @property
    def connection_bytes(self) -> int:
        """All protocols together; by default 9.1875 MiB, published as 9.19."""
        return self.simple_bytes + self.ll_bytes + self.ll128_bytes


DEFAULT_BUFFERS = NcclBuffers()

SMALL_BUFFERS = NcclBuffers(simple_bytes=MIB, ll128_bytes=MIB // 4)
"""NCCL_BUFFSIZE of 1 MiB and NCCL_LL128_BUFFSIZE of 256 KiB, as published recipes set them: 1.75 MiB a connection."""


def num_connections(num_communicators: int, num_channels: int, num_peers: int) -> int:
    """Connections of one rank: one to send and one to receive, for each communicator, channel and peer it talks to.

    2 communicators, 64 channels and 2 peers make the 512 that a published recipe counted (M-70); it does not say how
    they come about, and this is the division that fits three nodes. Raises ConfigError.
    """
    at_least(0, num_communicators=num_communicators, num_channels=num_channels, num_peers=num_peers)
    return 2 * num_communicators * num_channels * num_peers


def nccl_buffer_bytes(connections: int, buffers: NcclBuffers = DEFAULT_BUFFERS) -> int:
    """Bytes that NCCL pins for `connections`; on unified memory they are the accelerator's as well.

    4,704 MiB for the published 512, which were given as 512 times 9.19 MiB. A lower bound where shared memory was
    measured: 64 connections with small buffers are 112 MiB of the 139 MiB seen, which hold more than buffers (M-71).
    Raises ConfigError.
    """
    at_least(0, connections=connections)
    return connections * buffers.connection_bytes


def collectives_per_step(num_layers: int, *, num_others: int = 0) -> int:
    """Collectives of one decode step: an all-reduce after attention and one after the experts, in each layer (M-69)."""
    at_least(0, num_layers=num_layers, num_others=num_others)
    return 2 * num_layers + num_others


def all_reduce_bytes(num_rows: int, hidden_size: int) -> int:
    """Bytes of one all-reduce: a bf16 vector of `hidden_size` for each row.

    Rows are (drafts + 1) * requests. Published (M-68): 61,440 B for six rows of 5,120. The 48 KB that another recipe
    gives read a hidden size of 4,096, which is not this model's. Raises ConfigError.
    """
    at_least(0, num_rows=num_rows, hidden_size=hidden_size)
    return num_rows * hidden_size * BF16_BYTES


@dataclass(frozen=True, slots=True)
class AllReduce:
    """A way to do an all-reduce. `sends_whole`: every rank sends its whole message to every other, in one exchange;
    otherwise parts are reduced and gathered again, 2 (n - 1) / n messages.

    The factors apply to the link's latency and bandwidth. They are estimates for four H200 on NVLink: 5, 8 and 14 us at
    450, 450 and 350 GB/s.
    """

    name: str
    sends_whole: bool
    latency_factor: float
    bandwidth_factor: float


ONE_SHOT = AllReduce("one-shot", sends_whole=True, latency_factor=1.0, bandwidth_factor=1.0)
TWO_SHOT = AllReduce("two-shot", sends_whole=False, latency_factor=8 / 5, bandwidth_factor=1.0)
RING = AllReduce("ring", sends_whole=False, latency_factor=14 / 5, bandwidth_factor=350 / 450)


def all_reduce_s(message_bytes: int, tp_size: int, link: Link, method: AllReduce) -> float:
    """Seconds of one all-reduce: latency, and the bytes a rank sends over its link's bandwidth. None with one rank.

    Raises ConfigError for less than one rank, negative bytes or a link without bandwidth.
    """
    at_least(1, tp_size=tp_size)
    at_least(0, message_bytes=message_bytes, latency_s=link.latency_s)
    above_zero(bytes_per_s=link.bytes_per_s)
    if tp_size == 1:
        return 0.0
    messages = tp_size - 1 if method.sends_whole else 2 * (tp_size - 1) / tp_size
    transfer_s = messages * message_bytes / (link.bytes_per_s * method.bandwidth_factor)
    return link.latency_s * method.latency_factor + transfer_s


def fastest_all_reduce(message_bytes: int, tp_size: int, link: Link) -> AllReduce:
    """The way that takes least for this message."""
    return min((ONE_SHOT, TWO_SHOT, RING), key=lambda way: all_reduce_s(message_bytes, tp_size, link, way))


__all__ = [
    "COLLECTIVES_BESIDE_ALL_REDUCES",
    "DEFAULT_BUFFERS",
    "ONE_SHOT",
    "RING",
    "SMALL_BUFFERS",
    "TWO_SHOT",
    "AllReduce",
    "NcclBuffers",
    "all_reduce_bytes",
    "all_reduce_s",
    "collectives_per_step",
    "fastest_all_reduce",
    "nccl_buffer_bytes",
    "num_connections",
]
