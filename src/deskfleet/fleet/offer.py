"""Offers one directory's files to other nodes over HTTP, in the plain layout of `deskfleet.fleet.origin`.

For `deskfleet fleet share` with copies: the workers fetch from the head as they would from an origin, resumable and
hashed. Serves only files that were listed, only for reading, only to who has the token. Standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from deskfleet.errors import CheckpointError, DeskfleetError
from deskfleet.fleet.fetch import TOKEN_VARIABLE, Record, error_event
from deskfleet.fleet.origin import (
    INDEX_NAME,
    SUMS_NAME,
    RemoteFile,
    Selection,
    checked_name,
    select,
)
from deskfleet.fleet.transfer import TransferProgress, hash_files

_TELL_EVERY_S = 1.0
_IDLE_S = 900.0  # a worker may be busy hashing; after this nobody is coming back
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Offer:
    """What is offered: files by name, and the revision they are of; the digest of `sums` when nobody knows it."""

    revision: str
    sums: bytes
    sizes: dict[str, int]


def survey(directory: Path) -> Selection:
    """Choose what of a directory is a checkpoint, as a download would. Raises CheckpointError for one without index."""
    found: dict[str, RemoteFile] = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        is_ours = name.startswith(".") or name.endswith((".part", ".part.done")) or name == SUMS_NAME
        if path.is_file() and not is_ours:
            found[checked_name(name)] = RemoteFile(name, path.stat().st_size, "sha256:")
    index = directory / INDEX_NAME
    try:
        return select(found, index.read_bytes() if index.is_file() else None, "all")
    except CheckpointError as error:
        raise CheckpointError(
            f"{directory}: {error.message}", hint="pull it first: deskfleet fleet pull"
        ) from error


def make_offer(directory: Path, say: Callable[[dict[str, Any]], None]) -> Offer:
    """Hash what is not known to be right, and return what can be offered. Raises CheckpointError."""
    record = Record.read(directory)
    files = survey(directory).files
    unknown = [file for file in files if _known_sha256(directory, record, file) is None]
    if unknown:
        text = f"{len(unknown)} files are hashed first: no download has recorded their SHA-256"
        say({"event": "note", "text": text})
    digests = {
        file.name: digest for file in files if (digest := _known_sha256(directory, record, file)) is not None
    }
    for file, digest in hash_files(directory, unknown, lambda progress: say(_hashing(progress))):
        digests[file.name] = digest.removeprefix("sha256:")
    sums = "".join(f"{digests[file.name]}  {file.name}\n" for file in files).encode()
    own = hashlib.sha256(sums).hexdigest()
    return Offer(
        own if record is None else record.revision, sums, {file.name: file.size_bytes for file in files}
    )


def _hashing(progress: TransferProgress) -> dict[str, Any]:
    return {"event": "progress", "doing": "hashing", **asdict(progress)}


def _known_sha256(directory: Path, record: Record | None, file: RemoteFile) -> str | None:
    """The digest that a download computed, if the file has not changed since."""
    if record is None or file.name not in record.listing:
        return None
    listed = record.listing[file.name]
    kind, _, digest = listed.digest.partition(":")
    return digest if kind == "sha256" and record.knows(directory, listed) else None


class _Server(socketserver.ThreadingTCPServer):
    """Answers for one offer. `sent_bytes` and `asked_s` (monotonic) are for whoever watches."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], directory: Path, offer: Offer, token: str) -> None:
        self.directory = directory
        self.offer = offer
        self.token = token
        self.sent_bytes = 0
        self.asked_s = time.monotonic()
        self.lock = threading.Lock()
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A node that goes away in the middle of an answer is nothing to report: it asks again."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    timeout = 60

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, *, has_body: bool) -> None:
        self.server.asked_s = time.monotonic()
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            self._refuse(401)
            return
        name = unquote(urlsplit(self.path).path).removeprefix("/")
        if name == SUMS_NAME:
            self._head(200, len(self.server.offer.sums))
            if has_body:
                self.wfile.write(self.server.offer.sums)
        elif name in self.server.offer.sizes:
            self._give(name, self.server.offer.sizes[name], has_body)
        else:
            self._refuse(404)

    def _give(self, name: str, size: int, has_body: bool) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, end = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        if match and first >= end:
            self._refuse(416)
            return
        try:
            source = (self.server.directory / name).open("rb")
        except OSError:
            self._refuse(500)
            return
        with source:
            self._head(
                206 if match else 200, end - first, f"bytes {first}-{end - 1}/{size}" if match else None
            )
            while has_body and first < end:
                count = self.connection.sendfile(source, first, min(_PIECE_BYTES, end - first))
                if not count:
                    self.close_connection = (
                        True  # the file is shorter than it was: the other side sees it end
                    )
                    return
                os.posix_fadvise(source.fileno(), first, count, os.POSIX_FADV_DONTNEED)
                first += count
                with self.server.lock:
                    self.server.sent_bytes += count
                    self.server.asked_s = time.monotonic()

    def _head(self, status: int, num_bytes: int, content_range: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(num_bytes))
        if content_range is not None:
            self.send_header("Content-Range", content_range)
        self.end_headers()

    def _refuse(self, status: int) -> None:
        self._head(status, 0)


def main(argv: list[str]) -> int:
    """Offer the `directory` in the JSON object `argv[1]` at its `hosts`; end when nobody reads what is printed."""

    def say(event: dict[str, Any]) -> None:
        print(json.dumps(event), flush=True)

    asked = json.loads(argv[1])
    directory = Path(asked["directory"])
    servers: list[_Server] = []
    try:
        offer = make_offer(directory, say)
        for host in asked["hosts"]:
            servers.append(_listening(host, directory, offer, os.environ[TOKEN_VARIABLE]))
    except DeskfleetError as error:
        say(error_event(error))
        return error.exit_code
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    total = sum(offer.sizes.values())
    places = [server.server_address[:2] for server in servers]
    begun = {"event": "offering", "places": places, "revision": offer.revision}
    try:
        say({**begun, "num_files": len(offer.sizes), "total_bytes": total})
        while time.monotonic() - max(server.asked_s for server in servers) < _IDLE_S:
            time.sleep(_TELL_EVERY_S)
            say({"event": "serving", "sent_bytes": sum(server.sent_bytes for server in servers)})
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(0)
    return 0


def _listening(host: str, directory: Path, offer: Offer, token: str) -> _Server:
    try:
        kind = _Server6 if ":" in host else _Server
        return kind((host, 0), directory, offer, token)
    except OSError as error:
        raise DeskfleetError(
            f"cannot listen at {host}: {error.strerror or error}",
            hint="is that one of this node's addresses on the fast network? See fabric in fleet.toml",
        ) from error


__all__ = ["Offer", "main", "make_offer", "survey"]
