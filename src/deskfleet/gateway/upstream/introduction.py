"""What an engine is asked before it is used: which model it serves, how long a context, and how it cuts text.

Both engines answer these look-ups alike. Knows nothing of requests.
"""

from __future__ import annotations

import msgspec

from deskfleet.errors import ConfigError
from deskfleet.gateway.upstream.connection import Connection
from deskfleet.gateway.upstream.failures import UpstreamFailed, failure_of
from deskfleet.gateway.upstream.options import UpstreamOptions
from deskfleet.gateway.upstream.vocabulary import SAMPLE, Vocabulary


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokenised(msgspec.Struct):
    tokens: list[int]


async def ask_model(connection: Connection, options: UpstreamOptions) -> tuple[str, int]:
    """Return the name of the model to ask for, and its context in tokens, from /v1/models.

    Raises ConfigError when `options.model` is not among them, UpstreamFailed when the list cannot be read.
    """
    answer = await connection.get("/v1/models", timeout_s=options.answer_s)
    if answer.status != 200:
        raise failure_of(answer.status, answer.body, connection.url)
    try:
        models = msgspec.json.decode(answer.body, type=_Models).data
    except msgspec.MsgspecError as error:
        raise UpstreamFailed(f"{connection.url}/v1/models cannot be read: {error}") from error
    found = next((model for model in models if options.model in (None, model.id)), None)
    if found is None:
        names = ", ".join(model.id for model in models) or "none"
        raise ConfigError(f"{connection.url} does not serve {options.model!r}", hint=f"it serves {names}")
    # An adapter says nothing of its context; its parent does.
    known = [model.max_model_len for model in models if model.id in (found.id, found.parent)]
    lengths = [length for length in known if length is not None]
    if not lengths:
        raise UpstreamFailed(f"{connection.url}/v1/models does not say max_model_len of {found.id!r}")
    return found.id, lengths[0]


async def check_tokenizer(
    connection: Connection, model: str, vocabulary: Vocabulary, options: UpstreamOptions
) -> None:
    """Compare how the engine cuts a text with how the checkpoint does. An engine without /tokenize is trusted.

    Raises ConfigError when they differ: every answer would be nonsense, at full speed and with status 200.
    """
    body = {"model": model, "prompt": SAMPLE, "add_special_tokens": False}
    answer = await connection.post("/tokenize", msgspec.json.encode(body), timeout_s=options.answer_s)
    if answer.status != 200:
        return
    try:
        theirs = msgspec.json.decode(answer.body, type=_Tokenised).tokens
    except msgspec.MsgspecError:
        return
    ours = vocabulary.encode(SAMPLE)
    if theirs != ours:
        pairs = enumerate(zip(theirs, ours, strict=False))
        where = next((index for index, (their, our) in pairs if their != our), min(len(theirs), len(ours)))
        raise ConfigError(
            f"{connection.url} cuts text into other tokens than the checkpoint does, from token {where} on",
            hint="start the gateway with the checkpoint that the engine serves",
        )


__all__ = ["ask_model", "check_tokenizer"]
