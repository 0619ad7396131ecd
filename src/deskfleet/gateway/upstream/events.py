"""Server-sent events as bytes: what arrives in any pieces becomes whole payloads. Knows nothing of what they say."""

from __future__ import annotations

from deskfleet.gateway.upstream.failures import UpstreamFailed

MAX_EVENT_BYTES = 64 * 2**20
"""A cumulative event of a million tokens with log probabilities stays below."""


_DATA = b"data: "


class EventSplitter:
    """Cuts one stream into the payloads of its events, in order.

    Events are separated by an empty line. Comments and fields other than `data` are dropped; several `data` lines of
    one event are joined by a newline, as the standard says.
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def push(self, data: bytes) -> list[bytes]:
        """Return the payloads that are complete with `data`. Raises UpstreamFailed for an event without end."""
        held = self._held
        if b"\r" in data or held.endswith(b"\r"):
            return self._push_with_returns(data)
        if not held and data.startswith(_DATA) and data.endswith(b"\n\n") and data.count(b"\n") == 2:
            return [data[6:-2]]  # one event and nothing else: nobody is behind
        if not held and data.endswith(b"\n\n"):  # as both engines write: whole events
            return _payloads(data[:-2])
        start = max(len(held) - 1, 0)
        held += data
        end = held.rfind(b"\n\n", start)
        if end < 0:
            if len(held) > MAX_EVENT_BYTES:
                raise UpstreamFailed(f"an event of the engine is longer than {MAX_EVENT_BYTES} bytes")
            return []
        whole = bytes(held[:end])
        del held[: end + 2]
        return _payloads(whole)

    @property
    def is_empty(self) -> bool:
        """Whether the stream stands between two events: nothing has been begun and not ended."""
        return not self._held.strip()

    def _push_with_returns(self, data: bytes) -> list[bytes]:
        """As `push`, for a server that ends lines with CR LF. A CR at the very end waits for what follows."""
        whole = bytes(self._held) + data
        self._held = bytearray()
        kept = b""
        if whole.endswith(b"\r"):
            whole, kept = whole[:-1], b"\r"
        payloads = self.push(whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
        self._held += kept
        return payloads


def _payloads(events: bytes) -> list[bytes]:
    """The payloads of events joined by empty lines."""
    found = []
    for event in events.split(b"\n\n"):
        if event.startswith(_DATA) and b"\n" not in event:
            found.append(event[6:])
        elif payload := _joined(event):
            found.append(payload)
    return found


def _joined(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


__all__ = ["MAX_EVENT_BYTES", "EventSplitter"]
