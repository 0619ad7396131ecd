"""An HTTP server that holds a checkpoint: which files it has at a revision, and which of them are needed.

Two layouts: a model hub's (HUB/api/models/OWNER/NAME/revision/REV and HUB/OWNER/NAME/resolve/REV/FILE), and a plain
directory with a SHA256SUMS file in it. Knows nothing of where files are put. Standard library only: a node runs this
module from its text (`deskfleet.fleet.program`).
"""

from __future__ import annotations

import hashlib
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage, HTTPResponse
from typing import IO, Any, Literal
from urllib.parse import quote, urljoin, urlsplit

from deskfleet.errors import CheckpointError, ConfigError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SUMS_NAME = "SHA256SUMS"

What = Literal["all", "engram"]
"""What is wanted of a checkpoint: all of it, or the shards with Engram tables and the small files."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ENGRAM_TABLE = re.compile(r"(^|\.)engram\.embed\.")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt")
_MAX_SMALL_BYTES = 256 << 20
_MAX_LISTING_BYTES = 256 << 20
_BACKED_OFF = (408, 425, 429, 500, 502, 503, 504)


class Unsteady(Exception):
    """The connection or the server failed in a way that may pass. `wait_s`: what the server asked to wait, or 0."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class NotThere(CheckpointError):
    """The server has nothing at that URL."""


class RangeRefused(Exception):
    """The server answered 416: it has no such bytes, or does not like ranges."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file. `digest` is "sha256:HEX" or, as hubs give it for files that git holds, "git-sha1:HEX"."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Listing:
    """What an origin has at `revision`, by name."""

    revision: str
    files: Mapping[str, RemoteFile]


@dataclass(frozen=True, slots=True)
class Selection:
    """Files that are wanted, in the order of their names, and the names of those that are left at the origin."""

    files: tuple[RemoteFile, ...]
    left_out: tuple[str, ...]


class Digester:
    """Takes a file's bytes and says whether they are the right ones."""

    def __init__(self, file: RemoteFile) -> None:
        self._kind, _, self._wanted = file.digest.partition(":")
        if self._kind == "git-sha1":
            self._hash = hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)
        else:
            self._hash = hashlib.sha256()

    def update(self, data: bytes | memoryview) -> None:
        """Take more bytes."""
        self._hash.update(data)

    @property
    def found(self) -> str:
        """The digest of what was taken, spelled as `RemoteFile.digest`."""
        return f"{self._kind}:{self._hash.hexdigest()}"

    @property
    def is_right(self) -> bool:
        """Whether the bytes are those of the file."""
        return self._hash.hexdigest() == self._wanted


@dataclass(frozen=True, slots=True)
class Origin:
    """A repository on a server. `url` is the repository's own; `token` goes to its host only, also after redirects."""

    url: str
    token: str | None = None
    timeout_s: float = 30.0

    def open(self, url: str, first_byte: int | None = None, end_byte: int = 0) -> HTTPResponse:
        """Ask for `url`, or its bytes [first_byte, end_byte). The answer is 200 or 206, and closed by the caller.

        Raises Unsteady for what may pass, RangeRefused for 416, CheckpointError for a file that is not there,
        ConfigError when the token is missing or wrong.
        """
        request = urllib.request.Request(url, headers={"User-Agent": "deskfleet"})
        if first_byte is not None:
            request.add_header("Range", f"bytes={first_byte}-{end_byte - 1}")
        return self._send(request)

    def size_of(self, url: str) -> int:
        """The bytes of a file, from its headers alone. Raises as `open`, and CheckpointError for no length."""
        with self._send(
            urllib.request.Request(url, method="HEAD", headers={"User-Agent": "deskfleet"})
        ) as answer:
            length = answer.headers.get("Content-Length")
        if length is None or not length.isdigit():
            raise CheckpointError(f"{url} has no Content-Length", hint="use a server that tells file sizes")
        return int(length)

    def _send(self, request: urllib.request.Request) -> HTTPResponse:
        if self.token is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        opener = urllib.request.build_opener(_SameHost(self.token, self.url))
        try:
            answer: HTTPResponse = opener.open(request, timeout=self.timeout_s)
        except urllib.error.HTTPError as error:
            error.close()
            raise _refusal(request.full_url, error, self.token) from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise CheckpointError(
                    f"{_host(request.full_url)} has a certificate that this machine does not trust: {error.reason}",
                    hint="install its authority's certificate on the machine that downloads",
                ) from error
            raise Unsteady(f"{_host(request.full_url)}: {error.reason}") from error
        except (OSError, HTTPException) as error:
            raise Unsteady(f"{_host(request.full_url)}: {error or type(error).__name__}") from error
        return answer

    def hub_url(self, file: str, revision: str) -> str:
        """Where a hub has a file."""
        return f"{self.url}/resolve/{revision}/{quote(file)}"

    def plain_url(self, file: str) -> str:
        """Where a plain directory has a file."""
        return f"{self.url}/{quote(file)}"

    def listing_url(self, revision: str) -> str | None:
        """Where a hub lists HUB/OWNER/NAME: HUB/api/models/OWNER/NAME. None for a URL of another form."""
        hub, *repository = self.url.rsplit("/", 2)
        if not urlsplit(hub).netloc or not all(repository):
            return None
        return f"{hub}/api/models/{'/'.join(repository)}/revision/{quote(revision, safe='')}?blobs=true"


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows redirects; the token only to the origin itself, and never from https to http."""

    def __init__(self, token: str | None, origin: str) -> None:
        self._token = token
        self._origin = origin

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        target = urljoin(req.full_url, newurl)
        allowed = ("https",) if urlsplit(req.full_url).scheme == "https" else ("https", "http")
        if urlsplit(target).scheme not in allowed:
            raise CheckpointError(
                f"{_host(req.full_url)} redirects to {_host(target)} by {urlsplit(target).scheme}, without https",
                hint="name the origin that the files really come from",
            )
        # 308 is not among those that the standard library of Python 3.10 follows as they are.
        new = urllib.request.Request(target, headers=dict(req.headers), method=req.get_method())
        if self._token is not None and _place(target) == _place(self._origin):
            new.add_unredirected_header("Authorization", f"Bearer {self._token}")
        return new

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302


def read_all(answer: HTTPResponse, max_bytes: int = _MAX_LISTING_BYTES) -> bytes:
    """Read an answer to its end. Raises Unsteady when it breaks off, CheckpointError when it is absurdly long."""
    try:
        with answer:
            content = answer.read(max_bytes + 1)
            length = answer.headers.get("Content-Length")
    except (OSError, HTTPException) as error:
        raise Unsteady(f"the answer broke off: {error or type(error).__name__}") from error
    if len(content) > max_bytes:
        raise CheckpointError(f"{answer.url} has more than {max_bytes} bytes")
    if length is not None and length.isdigit() and int(length) != len(content):
        raise Unsteady(f"the answer broke off after {len(content)} of {length} bytes")
    return content


def parse_hub_listing(content: bytes, asked: str) -> Listing:
    """Understand a hub's answer. Raises CheckpointError for one that is not a listing of the revision asked for."""
    try:
        document = json.loads(content)
        revision = document["sha"]
        files = {}
        for entry in document["siblings"]:
            file = _hub_file(entry)
            files[file.name] = file
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the origin's listing cannot be understood: {type(error).__name__}: {error}",
            hint="the origin must list files with sizes and digests (?blobs=true)",
        ) from error
    if not isinstance(revision, str) or not _COMMIT.fullmatch(revision):
        raise CheckpointError(
            f"the origin's listing has {revision!r} for a revision, not a commit of 40 digits"
        )
    if is_pinned(asked) and revision != asked:
        raise CheckpointError(f"revision {asked} was asked for, and the origin lists {revision}")
    return Listing(revision, files)


def _hub_file(entry: Mapping[str, Any]) -> RemoteFile:
    name = checked_name(entry["rfilename"])
    lfs = entry.get("lfs")
    digest = f"sha256:{lfs['sha256']}" if lfs else f"git-sha1:{entry['blobId']}"
    size = lfs["size"] if lfs else entry["size"]
    if (
        not isinstance(size, int)
        or size < 0
        or not re.fullmatch(r"(sha256:[0-9a-f]{64}|git-sha1:[0-9a-f]{40})", digest)
    ):
        raise ValueError(f"{name} has size {size!r} and digest {digest!r}")
    return RemoteFile(name, size, digest)


def parse_sums(content: bytes) -> dict[str, str]:
    """Return the digest of each file in a SHA256SUMS file. Raises CheckpointError for a line that is none."""
    found = {}
    for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        match = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](.+)", line)
        if match is None:
            raise CheckpointError(f"line {number} of {SUMS_NAME} is no digest and name: {line[:80]!r}")
        found[checked_name(match[2].removeprefix("./"))] = match[1].lower()
    if not found:
        raise CheckpointError(f"{SUMS_NAME} is empty")
    return found


def check_plain_pin(asked: str, content: bytes) -> str:
    """Return the revision of a plain directory: its SHA256SUMS' own digest, or a commit that nobody can check.

    Raises ConfigError for a name such as a branch, which a plain directory cannot resolve, and CheckpointError when
    the directory is not the one that was pinned.
    """
    digest = hashlib.sha256(content).hexdigest()
    if _COMMIT.fullmatch(asked):
        return asked
    if not _SHA256.fullmatch(asked):
        raise ConfigError(
            f"revision {asked!r} is a name, and a plain directory cannot say what it stands for",
            hint=f"pin what is there now: revision = {digest!r}, the SHA-256 of its {SUMS_NAME}",
        )
    if asked != digest:
        raise CheckpointError(
            f"{SUMS_NAME} has SHA-256 {digest}, and the revision pins {asked}",
            hint="the directory has changed since it was pinned",
        )
    return digest


def is_pinned(revision: str) -> bool:
    """Whether a revision can only ever mean one thing: a commit, or a SHA256SUMS file's digest."""
    return bool(_COMMIT.fullmatch(revision) or _SHA256.fullmatch(revision))


def checked_name(name: str) -> str:
    """Return a file's name. Raises CheckpointError for one that leaves the directory or could hide something in it."""
    parts = name.split("/")
    bad = "\0" in name or "\\" in name or "\n" in name or any(part in ("", ".", "..") for part in parts)
    if bad or parts[-1].endswith((".part", ".part.done")) or parts[0].startswith(".deskfleet"):
        raise CheckpointError(
            f"the origin lists a file {name!r}, which is no name of a file of a checkpoint",
            hint="do not use a checkpoint from this source before you know why",
        )
    return name


def select(listing: Mapping[str, RemoteFile], index: bytes | None, what: What) -> Selection:
    """Choose files: the shards that the index names (with "engram" those that hold its tables), and small files.

    Weights that no index names stay at the origin. Raises CheckpointError when a shard is not in the listing, or
    there are no Engram tables.
    """
    shards = _shards(listing, index, what)
    missing = sorted(shards - listing.keys())
    if missing:
        raise CheckpointError(
            f"{INDEX_NAME} names {missing[0]}{f' and {len(missing) - 1} more files' if missing[1:] else ''}, "
            "which the origin does not list",
            hint="the repository is incomplete at this revision: pull another, or tell its owner",
        )
    small = {
        name
        for name, file in listing.items()
        if not name.endswith(_WEIGHT_SUFFIXES) and file.size_bytes <= _MAX_SMALL_BYTES and name != SUMS_NAME
    }
    wanted = sorted(shards | small)
    return Selection(tuple(listing[name] for name in wanted), tuple(sorted(listing.keys() - set(wanted))))


def _shards(listing: Mapping[str, RemoteFile], index: bytes | None, what: What) -> set[str]:
    if index is None:
        if SINGLE_NAME not in listing:
            raise CheckpointError(
                f"the origin lists neither {INDEX_NAME} nor {SINGLE_NAME}",
                hint="is this a checkpoint's repository?",
            )
        return {SINGLE_NAME}
    try:
        weight_map = json.loads(index)["weight_map"]
        pairs = [(str(name), checked_name(file)) for name, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{INDEX_NAME} cannot be understood: {type(error).__name__}: {error}"
        ) from error
    if what == "all":
        return {file for _, file in pairs}
    found = {file for name, file in pairs if _ENGRAM_TABLE.search(name)}
    if not found:
        raise CheckpointError(
            f"{INDEX_NAME} names no Engram table",
            hint="quantised repositories often leave the tables out: pull them from the published checkpoint",
        )
    return found


def _refusal(url: str, error: urllib.error.HTTPError, token: str | None) -> Exception:
    what = f"{_host(url)} answers {error.code} for {urlsplit(url).path}"
    if error.code == 416:
        return RangeRefused(what)
    if error.code in _BACKED_OFF:
        asked = error.headers.get("Retry-After", "")
        return Unsteady(what, wait_s=float(asked) if asked.isdigit() else 0.0)
    if error.code in (401, 403):
        hint = (
            'name a token in fleet.toml: [secrets] with origin_token = "env:HF_TOKEN"'
            if token is None
            else "the secret origin_token is not allowed to read this repository"
        )
        return ConfigError(what, hint=hint)
    kind = NotThere if error.code in (404, 410) else CheckpointError
    return kind(what, hint="are checkpoint.origin and checkpoint.revision right?")


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


def _place(url: str) -> tuple[str, str | None, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


__all__ = [
    "INDEX_NAME",
    "SINGLE_NAME",
    "SUMS_NAME",
    "Digester",
    "Listing",
    "NotThere",
    "Origin",
    "RangeRefused",
    "RemoteFile",
    "Selection",
    "Unsteady",
    "What",
    "check_plain_pin",
    "checked_name",
    "is_pinned",
    "parse_hub_listing",
    "parse_sums",
    "read_all",
    "select",
]
