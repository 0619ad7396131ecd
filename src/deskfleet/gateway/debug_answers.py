"""The latest answers as the model wrote them: token ids and their text, control tokens included. Off by default.

    GET /debug/answers

For telling what a model wrote from what was made of it. Owns what is kept and who may read it: with keys, whoever has
one reads the answers that were given to it; without, whoever sits at this machine. Prompts are not kept, and nothing is
written anywhere. Knows nothing of protocols.
"""

from __future__ import annotations

import ipaddress
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from deskfleet.endpoint import TokenChunk
from deskfleet.gateway.policies.contract import Caller
from deskfleet.gateway.recent import RequestRecord
from deskfleet.gateway.refusals import NotPermitted

PATH = "/debug/answers"

_MAX_TOKENS = 65_536
"""Of one answer, from its beginning; of what comes after, the number is known."""


@dataclass(slots=True)
class _Answer:
    record: RequestRecord
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    num_tokens: int = 0

    def watch(self, chunk: TokenChunk) -> TokenChunk:
        self.num_tokens += len(chunk.token_ids)
        if len(self.token_ids) < _MAX_TOKENS:
            self.token_ids.extend(chunk.token_ids)
        return chunk


class DebugAnswers:
    """The last `num_kept` answers. `decode` turns ids into text."""

    def __init__(self, num_kept: int, decode: Callable[[Sequence[int]], str]) -> None:
        self._answers: deque[_Answer] = deque(maxlen=num_kept)
        self._decode = decode

    def begin(self, record: RequestRecord) -> Callable[[TokenChunk], TokenChunk]:
        """Return what has to see every chunk of an answer, the last of the watchers."""
        answer = _Answer(record)
        self._answers.append(answer)
        return answer.watch

    def attach(
        self, app: web.Application, caller_key: web.RequestKey[Caller], *, has_keys: Callable[[], bool]
    ) -> None:
        """Add the route. `has_keys` says whether a key was asked for before a request comes here."""

        async def show(request: web.Request) -> web.Response:
            if not has_keys() and not _is_local(request):
                raise NotPermitted(
                    "raw answers are shown to this machine only while the server has no keys",
                    hint="ask from this machine, or make a key: deskfleet keys new NAME",
                )
            key = request[caller_key].key
            told = [self._describe(answer) for answer in reversed(self._answers) if answer.record.key == key]
            return web.Response(
                body=msgspec.json.encode({"answers": told}),
                content_type="application/json",
                headers={"Cache-Control": "no-store"},
            )

        app.router.add_get(PATH, show)

    def _describe(self, answer: _Answer) -> dict[str, Any]:
        record = answer.record
        return {
            "request_id": record.request_id,
            "protocol": record.protocol,
            "began_at": record.began_at,
            "outcome": record.outcome,
            "finish_reason": record.finish_reason,
            "stop_reason": record.stop_reason,
            "repairs": sorted(record.repairs),
            "num_tokens": answer.num_tokens,
            "token_ids": answer.token_ids.tolist(),
            "text": self._decode(answer.token_ids),
        }


def _is_local(request: web.Request) -> bool:
    """Whether a program on this machine asks, and neither a proxy nor a page that has renamed its server."""
    if "Forwarded" in request.headers or "X-Forwarded-For" in request.headers:
        return False
    host = request.url.host or ""
    return _is_loopback(request.remote or "") and (host == "localhost" or _is_loopback(host))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


__all__ = ["PATH", "DebugAnswers"]
