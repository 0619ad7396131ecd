"""A local HTTP server that holds a checkpoint, in a hub's layout or a plain directory's, and fails as told.

Faults are a table by file name, each with how often it happens; one that is used up leaves the file as it is. What was
asked is kept, so that tests can count requests, ranges and who was given a token.
"""

from __future__ import annotations

import hashlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "desk/tiny"

Kind = Literal["reset", "wrong", "missing", "416", "no-range", "slow", "busy", "short", "redirect"]


@dataclass
class Fault:
    """`kind`, `times` more times. `value` is what the kind needs: where to redirect to, bytes a second."""

    kind: Kind
    times: int = 1_000_000
    value: Any = None


@dataclass(frozen=True)
class Asked:
    """One request that arrived."""

    method: str
    path: str
    span: str | None
    token: str | None


@dataclass
class FaultyOrigin:
    """What is served, what is to fail, and what was asked."""

    files: dict[str, bytes]
    revision: str = REVISION
    branches: dict[str, str] = field(default_factory=lambda: {"main": REVISION})
    token: str | None = None
    faults: dict[str, Fault] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    sent_bytes: int = 0
    seed: int = 1
    base: str = ""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """The URL of the repository in a hub's layout."""
        return f"{self.base}/{REPOSITORY}"

    @property
    def plain_url(self) -> str:
        """The URL of the plain directory."""
        return f"{self.base}/plain"

    @property
    def sums(self) -> bytes:
        lines = (f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(self.files.items()))
        return "".join(lines).encode()

    def spans(self, name: str) -> list[str | None]:
        """The ranges that were asked of a file."""
        return [
            asked.span for asked in self.asked if asked.path.endswith("/" + name) and asked.method == "GET"
        ]

    def take(self, name: str, *kinds: Kind) -> Fault | None:
        """Use a fault of a file up by one."""
        with self.lock:
            fault = self.faults.get(name)
            if fault is None or fault.kind not in kinds or fault.times <= 0:
                return None
            fault.times -= 1
            return fault

    def listing(self) -> dict[str, Any]:
        """What a hub says of the revision."""
        siblings = []
        for name, data in sorted(self.files.items()):
            entry: dict[str, Any] = {"rfilename": name, "size": len(data)}
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if name.endswith(".safetensors"):
                entry["lfs"] = {
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "size": len(data),
                    "pointerSize": 134,
                }
            siblings.append(entry)
        return {"sha": self.revision, "siblings": siblings}

    @contextmanager
    def serving(self, host: str = "127.0.0.1") -> Iterator[FaultyOrigin]:
        """Serve on a free port."""
        server = ThreadingHTTPServer((host, 0), _Handler)
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        server.origin = self  # type: ignore[attr-defined]
        self.base = f"http://{host}:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def origin(self) -> FaultyOrigin:
        return self.server.origin  # type: ignore[attr-defined,no-any-return]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        origin = self.origin
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization")
        origin.asked.append(Asked(self.command, path, self.headers.get("Range"), token))
        if origin.token is not None and token != f"Bearer {origin.token}" and not path.startswith("/store/"):
            return self._send(401, b"")
        api = f"/api/models/{REPOSITORY}/revision/"
        if path.startswith(api):
            asked = path.removeprefix(api)
            if origin.branches.get(asked, asked) != origin.revision:
                return self._send(404, b"")
            return self._send(200, json.dumps(origin.listing()).encode())
        if path == "/plain/SHA256SUMS":
            return self._send(200, origin.sums)
        for prefix in (f"/{REPOSITORY}/resolve/{origin.revision}/", "/plain/", "/store/"):
            name = path.removeprefix(prefix)
            if path.startswith(prefix) and name in origin.files:
                return self._give(name)
        return self._send(404, b"")

    def _give(self, name: str) -> None:
        origin = self.origin
        data = origin.files[name]
        if origin.take(name, "missing"):
            return self._send(404, b"")
        if origin.take(name, "busy"):
            return self._send(503, b"", {"Retry-After": "0"})
        if (fault := origin.take(name, "redirect")) and not self.path.startswith("/store/"):
            return self._send(302, b"", {"Location": f"{fault.value}/store/{name}"})
        if self.command == "HEAD":
            return self._send(200, data)
        if origin.take(name, "short"):
            data = data[:-1]
        span = self.headers.get("Range")
        if span is None or origin.take(name, "no-range"):
            return self._send(200, data, name=name)
        if origin.take(name, "416"):
            return self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        first, last = (int(number) for number in span.removeprefix("bytes=").split("-"))
        body = data[first : last + 1]
        place = f"bytes {first}-{first + len(body) - 1}/{len(data)}"
        return self._send(206, body, {"Content-Range": place}, name=name)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, name: str = "") -> None:
        origin = self.origin
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if origin.take(name, "wrong"):
            body = body[:-1] + bytes([body[-1] ^ 1])
        if origin.take(name, "reset"):
            body = body[: origin.random.randrange(len(body) + 1)]
            self._write(name, body)
            # A reset rather than an end: what a broken line looks like.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        self._write(name, body)

    def _write(self, name: str, body: bytes) -> None:
        slow = self.origin.take(name, "slow")
        step = max(1, slow.value // 50) if slow else 1 << 20
        for begin in range(0, len(body), step):
            piece = body[begin : begin + step]
            self.wfile.write(piece)
            with self.origin.lock:
                self.origin.sent_bytes += len(piece)
            if slow:
                time.sleep(0.02)
