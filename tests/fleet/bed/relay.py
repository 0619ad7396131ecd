"""A slow cable: hands the frames of two interfaces over to each other, late, not all of them, or not so many a second.

    relay.py ONE OTHER --delay=SECONDS --loss=SHARE --rate=BYTES_PER_S

Says "ready", then runs until it is killed. What a kernel leaves to the network card (checksums, cutting large packets)
travels along in the header that the kernel gives with each frame, so that no interface has to be set up for this.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import select
import socket
import time

_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_ETH_P_ALL = 3
_MOST_BYTES = 1 << 17  # a large packet that is not cut yet, and its header
_BUFFER_BYTES = 1 << 23
_QUEUE_BYTES = 1 << 24  # what a cable holds at most; more is lost, as on a real one


class Direction:
    """Frames on the way from one interface to the other, in the order of their departure."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.target = target
        self.waiting: list[tuple[float, int, bytes]] = []
        self.waiting_bytes = 0
        self._numbers = itertools.count()
        self._free_at = 0.0

    def take(self, delay_s: float, loss: float, bytes_per_s: float) -> None:
        """Read one frame and put it on the way, or lose it."""
        frame = self.source.recv(_MOST_BYTES)
        if random.random() < loss or self.waiting_bytes + len(frame) > _QUEUE_BYTES:
            return
        now = time.monotonic()
        sent_at = now
        if bytes_per_s:
            sent_at = self._free_at = max(now, self._free_at) + len(frame) / bytes_per_s
        heapq.heappush(self.waiting, (sent_at + delay_s, next(self._numbers), frame))
        self.waiting_bytes += len(frame)

    def deliver(self) -> None:
        """Hand over what is due."""
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            _, _, frame = heapq.heappop(self.waiting)
            self.waiting_bytes -= len(frame)
            try:
                self.target.send(frame)
            except OSError:
                continue  # the other end is down: the frame is lost


def _opened(interface: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    opened.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    opened.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    opened.bind((interface, 0))
    return opened


def main() -> None:
    """Run until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("interfaces", nargs=2)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=0.0)
    args = parser.parse_args()
    one, other = (_opened(interface) for interface in args.interfaces)
    ways = {one: Direction(one, other), other: Direction(other, one)}
    print("ready", flush=True)
    while True:
        due = min((way.waiting[0][0] for way in ways.values() if way.waiting), default=None)
        wait_s = None if due is None else max(0.0, due - time.monotonic())
        for source in select.select(list(ways), [], [], wait_s)[0]:
            ways[source].take(args.delay, args.loss, args.rate)
        for way in ways.values():
            way.deliver()


if __name__ == "__main__":
    main()
