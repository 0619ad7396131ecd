"""Tokens without an answer: POST /tokenize, /detokenize and /v1/messages/count_tokens.

Owns their fields. The first two have vLLM's shapes. `/tokenize` takes a `prompt`, or `messages` with whatever a chat
may have beside them, and counts what the engine would see: images at their full span in `count`, one placeholder each
in `tokens`. `/detokenize` shows control tokens, because it is asked what tokens are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from deskfleet.errors import RequestError
from deskfleet.gateway.chat_format import ChatFormat
from deskfleet.gateway.failures import UnknownModel
from deskfleet.gateway.fields import Decisions, TokenId, read_fields, read_object
from deskfleet.gateway.protocol import refuse_unknown_ids
from deskfleet.gateway.protocols.chat import ChatProtocol
from deskfleet.gateway.protocols.chat_fields import check_chat
from deskfleet.gateway.protocols.completions import prompt_ids
from deskfleet.gateway.protocols.conversation import Conversations, count_tokens
from deskfleet.gateway.protocols.messages import MessagesProtocol
from deskfleet.gateway.protocols.messages_fields import read_messages
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.gateway.thinking import Thought
from deskfleet.gateway.token_texts import join


class TokenizeFields(Struct, frozen=True, kw_only=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(Struct, frozen=True, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None


TOKENIZE = Decisions(fields=TokenizeFields, refused={}, ignored={})
DETOKENIZE = Decisions(fields=DetokenizeFields, refused={}, ignored={})

_OF_TOKENIZE = ("add_special_tokens", "return_token_strs")
"""What a chat to be tokenized may have beside the fields of a chat."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A prompt's tokens, and what became of the wishes for thinking."""

    num_tokens: int
    thought: Thought


class TokenCounter:
    """Counts for one served checkpoint. Any thread may use it."""

    def __init__(
        self,
        settings: GatewaySettings,
        max_model_len: int,
        chat_format: ChatFormat,
        *,
        chat: ChatProtocol,
        messages: MessagesProtocol,
    ) -> None:
        self._settings = settings
        self._max_model_len = max_model_len
        self._format = chat_format
        self._chat = chat
        self._messages = messages
        self._conversations = Conversations(settings, max_model_len, chat_format)

    def count(self, body: bytes) -> Counted:
        """Return how many tokens a Messages request would have. Raises as its `prepare` does, but for its length."""
        ask = self._messages.ask(read_messages(body))
        return Counted(count_tokens(*self._conversations.prompt(ask)), ask.thought)

    def tokenize(self, body: bytes) -> dict[str, Any]:
        """Return the tokens of a prompt or a chat. Raises RequestError naming the field, UnknownModel."""
        raw = read_object(body)
        if "messages" in raw:
            if "prompt" in raw:
                raise RequestError("prompt: send either prompt or messages", param="prompt")
            return self._tokenize_chat(raw)
        fields = read_fields(raw, TOKENIZE)
        self._check_model(fields.model)
        token_ids = (
            prompt_ids(fields.prompt, self._format, add_special_tokens=fields.add_special_tokens)
            if fields.prompt or fields.add_special_tokens is not False
            else []
        )
        return self._told(token_ids, len(token_ids), with_texts=bool(fields.return_token_strs))

    def detokenize(self, body: bytes) -> dict[str, str]:
        """Return the text of tokens. Raises RequestError naming the field, UnknownModel."""
        fields = read_fields(body, DETOKENIZE)
        self._check_model(fields.model)
        refuse_unknown_ids("tokens", fields.tokens, self._format.config.vocab_size)
        return {"prompt": join(self._format.texts, fields.tokens).decode("utf-8", "replace")}

    def _tokenize_chat(self, raw: dict[str, Any]) -> dict[str, Any]:
        own = {name: raw[name] for name in _OF_TOKENIZE if name in raw}
        for name, value in own.items():
            if not isinstance(value, bool | None):
                raise RequestError(f"{name}: expected `bool | null`", param=name)
        rest = {name: value for name, value in raw.items() if name not in own}
        ask = self._chat.ask(check_chat({"model": self._settings.model_id, **rest}))
        token_ids, images = self._conversations.prompt(ask)
        num_tokens = count_tokens(token_ids, images)
        return self._told(token_ids, num_tokens, with_texts=bool(own.get("return_token_strs")))

    def _told(self, token_ids: list[int], num_tokens: int, *, with_texts: bool) -> dict[str, Any]:
        texts = self._format.texts
        strings = [join(texts, [token_id]).decode("utf-8", "replace") for token_id in token_ids]
        return {
            "count": num_tokens,
            "max_model_len": self._max_model_len,
            "tokens": token_ids,
            "token_strs": strings if with_texts else None,
        }

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._settings.model_id:
            raise UnknownModel(model, self._settings.model_id)


__all__ = ["DETOKENIZE", "TOKENIZE", "Counted", "DetokenizeFields", "TokenCounter", "TokenizeFields"]
