"""How a rank from another machine and its supervisor come to trust each other over a fresh TCP connection.

    rank        Dial       who it is, and a nonce
    supervisor  Challenge  a nonce, or Refused
    rank        Answer     HMAC of both nonces, launch and rank under the launch's token
    supervisor  Welcome    its own HMAC and the RankSpec, or Refused

Owns these messages, their proofs and the limits on what is read before anybody is trusted. The token never travels.
What follows is neither encrypted nor signed: both ends are on the cluster's own network. Knows no sockets; no torch.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

import msgspec

from deskfleet.engine.spec import RankSpec
from deskfleet.errors import ConfigError

MAX_STRANGER_BYTES = 4096
"""The longest frame that is read of somebody who has not proved anything."""

MAX_WELCOME_BYTES = 1 << 20
NONCE_BYTES = 32
MIN_TOKEN_CHARACTERS = 16

Role = Literal["rank", "supervisor"]


class Dial(msgspec.Struct, frozen=True, tag=True):
    """A rank's first words. `deskfleet` is its version: the messages that follow are those of one version."""

    deskfleet: str
    launch_id: str
    rank: int
    node: str
    pid: int
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The supervisor has such a launch and such a rank, and wants proof."""

    nonce: bytes


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The rank's proof."""

    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The supervisor's proof, and what the rank is to do. The connection is the engine's from here on."""

    proof: bytes
    spec: RankSpec


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The connection ends, and dialling again would change nothing."""

    reason: str


dial_decoder = msgspec.msgpack.Decoder(Dial)
answer_decoder = msgspec.msgpack.Decoder(Answer)
challenge_decoder = msgspec.msgpack.Decoder(Challenge | Refused)
welcome_decoder = msgspec.msgpack.Decoder(Welcome | Refused)


def make_nonce() -> bytes:
    """Return bytes that no connection had before."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(token: str, role: Role, dial: Dial, challenge: Challenge) -> bytes:
    """Return what only a holder of `token` can say to this connection; the two roles say different things."""
    said = msgspec.msgpack.encode((role, dial.launch_id, dial.rank, dial.nonce, challenge.nonce))
    return hmac.digest(token.encode(), said, hashlib.sha256)


def is_proof(proof: bytes, token: str, role: Role, dial: Dial, challenge: Challenge) -> bool:
    """Whether `proof` is what `prove` returns; takes the same time for every wrong one."""
    return hmac.compare_digest(proof, prove(token, role, dial, challenge))


def check_token(token: str) -> str:
    """Return `token`. Raises ConfigError for one that can be guessed; its value is in no message."""
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ConfigError(
            f"the launch's token has {len(token)} characters, fewer than {MIN_TOKEN_CHARACTERS}",
            hint="the supervisor and its ranks share it through DESKFLEET_RANK_TOKEN",
        )
    return token


__all__ = [
    "MAX_STRANGER_BYTES",
    "MAX_WELCOME_BYTES",
    "NONCE_BYTES",
    "Answer",
    "Challenge",
    "Dial",
    "Refused",
    "Welcome",
    "answer_decoder",
    "challenge_decoder",
    "check_token",
    "dial_decoder",
    "is_proof",
    "make_nonce",
    "prove",
    "welcome_decoder",
]
