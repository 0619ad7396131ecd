"""How one checkpoint spells a conversation: its tokenizer and its control tokens.

Owns what is read from the checkpoint at start: tokenizer.json and config.json. Knows nothing of requests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
from deepseek_recipe import (
    Conversation,
    DeepseekV41Encoding,
    SpecialToken,
    SpecialTokens,
    Tokenizer,
    UserMessage,
)

from deskfleet.errors import CheckpointError
from deskfleet.gateway.answer_form import Marker
from deskfleet.model.config import ModelConfig


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct, frozen=True):
    added_tokens: list[_AddedToken]


_REQUIRED = (
    SpecialToken.Bos,
    SpecialToken.Eos,
    SpecialToken.System,
    SpecialToken.User,
    SpecialToken.Assistant,
    SpecialToken.ThinkingStart,
    SpecialToken.ThinkingEnd,
    SpecialToken.Dsml,
)
"""Without these no prompt can be written and no answer parsed."""

_NEVER_TEXT = (
    SpecialToken.Bos,
    SpecialToken.Eos,
    SpecialToken.System,
    SpecialToken.User,
    SpecialToken.Assistant,
    SpecialToken.LatestReminder,
    SpecialToken.ThinkingStart,
)
"""Tokens that steer a conversation. Not among them: `</think>` and the tool-call marker, which the parser
needs, and the tags of boxes, points and polygons, which are part of an answer."""


_MARKER = SpecialToken.Dsml.default_str()

_EFFORT = re.compile(r"(Reasoning Effort: )\d+(?= )")
"""How the text of a thinking prompt begins (spec §10.5), after the two tokens for the beginning and the system."""
_NUM_LEADING = 2


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The tokenizer, the encoding that uses it, and the ids that must never be shown as text.

    `special_tokens` carries the checkpoint's own spelling of the image placeholder: the library's default is
    `<｜image｜>`, the released tokenizer says `<｜deepseek_image｜>`.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    special_tokens: SpecialTokens
    encoding: DeepseekV41Encoding
    hidden_token_ids: frozenset[int]
    marker: Marker

    @classmethod
    def from_checkpoint(cls, directory: Path) -> ChatFormat:
        """Read `directory`'s config.json and tokenizer.json.

        Raises ConfigError for the former, CheckpointError when the tokenizer is missing, unreadable, lacks a
        token that V4.1 conversations are made of, or disagrees with config.json about an id.
        """
        config = ModelConfig.from_file(directory / "config.json")
        path = directory / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            added = msgspec.json.decode(text, type=_TokenizerFile).added_tokens
            tokenizer = Tokenizer.from_str(text)
        except FileNotFoundError as error:
            raise CheckpointError(f"no such file: {path}") from error
        except (OSError, UnicodeDecodeError, msgspec.MsgspecError, RuntimeError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        ids = {token.content: token.id for token in added}
        _check_tokens(ids, config, path)
        special_tokens = SpecialTokens(image=_image_spelling(ids, config, path))
        hidden = {ids[token.default_str()] for token in _NEVER_TEXT if token.default_str() in ids}
        return cls(
            config=config,
            tokenizer=tokenizer,
            special_tokens=special_tokens,
            encoding=DeepseekV41Encoding().with_special_tokens(special_tokens).with_tokenizer(tokenizer),
            hidden_token_ids=frozenset(hidden | {config.pad_token_id, config.image_token_id}),
            marker=Marker(ids[_MARKER], _MARKER),
        )

    def encode(self, conversation: Conversation, effort: int | None = None) -> list[int]:
        """Return the prompt's ids, with `effort` in place of the number of the conversation's own tier.

        The library renders tiers only. The text from the effort to the next control token is encoded again as a
        whole, because tokens may join what stands around a number. Without thinking there is no effort to replace.
        """
        token_ids = self.encoding.encode(conversation)
        if effort is None or not conversation.thinking_mode:
            return token_ids
        rendered = self.encoding.render_conversation(conversation)
        (_, start), (end, _) = rendered.special_ranges[_NUM_LEADING - 1 : _NUM_LEADING + 1]
        text = rendered.prompt[start:end]
        replaced = self._encode_text(_EFFORT.sub(rf"\g<1>{effort}", text, count=1))
        rest = token_ids[_NUM_LEADING + len(self._encode_text(text)) :]
        return [*token_ids[:_NUM_LEADING], *replaced, *rest]

    def _encode_text(self, text: str) -> list[int]:
        """Return the ids of text in which nothing is a control token: the library does that inside a user's turn."""
        turn = Conversation([UserMessage(text)], thinking_mode=False)
        # <bos> <User> text <Assistant> </think>
        return self.encoding.encode(turn)[2:-2]


def _check_tokens(ids: dict[str, int], config: ModelConfig, path: Path) -> None:
    if missing := [token.default_str() for token in _REQUIRED if token.default_str() not in ids]:
        raise CheckpointError(
            f"{path} lacks {', '.join(missing)}", hint="use the tokenizer.json that came with the checkpoint"
        )
    for token, expected in ((SpecialToken.Bos, config.bos_token_id), (SpecialToken.Eos, config.eos_token_id)):
        spelling = token.default_str()
        if ids[spelling] != expected:
            raise CheckpointError(f"{spelling} is {ids[spelling]} in {path} but {expected} in config.json")


def _image_spelling(ids: dict[str, int], config: ModelConfig, path: Path) -> str:
    spellings = {token_id: spelling for spelling, token_id in ids.items()}
    if config.image_token_id in spellings:
        return spellings[config.image_token_id]
    if config.vision is not None:
        raise CheckpointError(
            f"{path} has no added token {config.image_token_id}, the image_token_id of config.json"
        )
    return SpecialToken.Image.default_str()


__all__ = ["ChatFormat"]
