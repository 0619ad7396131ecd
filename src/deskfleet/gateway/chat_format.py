"""How one checkpoint spells a conversation: its encoding, its tokenizer and its control tokens.

Owns what is read from tokenizer.json at start. Knows nothing of requests.

config.json decides between the encodings (`token_facts`). They differ in where system messages may stand, in how an
effort is said (a number; three texts), and in the spelling of calls.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
from deepseek_recipe import (
    Conversation,
    DeepseekV4Encoding,
    DeepseekV41Encoding,
    ModelVersion,
    SpecialToken,
    SpecialTokens,
    Tokenizer,
    UserMessage,
)

from deskfleet.errors import CheckpointError
from deskfleet.gateway.answer_form import V4_CALLS, V41_CALLS, CallSpelling, Marker
from deskfleet.gateway.protocols.markup import EXACT_MARKER, EXACT_THOUGHT_END
from deskfleet.gateway.token_facts import Encoding, TokenFacts, read_token_facts
from deskfleet.gateway.token_texts import TokenizerFile, token_texts

_REQUIRED = (
    SpecialToken.Bos,
    SpecialToken.Eos,
    SpecialToken.User,
    SpecialToken.Assistant,
    SpecialToken.ThinkingStart,
    SpecialToken.ThinkingEnd,
    SpecialToken.Dsml,
)
"""Without these no prompt can be written and no answer parsed. V4.1 needs the system's token as well."""

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


_ANSWER_TAG = re.compile(r"<?｜/?(?:ref|box|point|polygon|table|tr|td)>?｜>?")
"""Added tokens that are part of what a model answers."""

_MARKER = SpecialToken.Dsml.default_str()

_EFFORT = re.compile(r"(Reasoning Effort: )\d+(?= )")
"""How the text of a thinking prompt begins (spec §10.5), after the two tokens for the beginning and the system."""
_NUM_LEADING = 2


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The tokenizer, the encoding that uses it, and the ids that must never be shown as text.

    `special_tokens` carries the checkpoint's own spelling of the image placeholder: the library's default is
    `<｜image｜>`, the released tokenizer says `<｜deepseek_image｜>`. `texts` are the bytes of every token, in
    `exact_texts` with a secret in the place of those that markup is made of;
    `control_ids` are all tokens that plain completions do not show, `hidden_token_ids` those that no answer shows.
    """

    config: TokenFacts
    tokenizer: Tokenizer
    special_tokens: SpecialTokens
    encoding: DeepseekV4Encoding | DeepseekV41Encoding
    hidden_token_ids: frozenset[int]
    control_ids: frozenset[int]
    marker: Marker
    texts: tuple[bytes, ...]
    exact_texts: tuple[bytes, ...]
    thought_end_id: int
    name: Encoding = "v4.1"

    @classmethod
    def from_checkpoint(cls, directory: Path, *, encoding: Encoding | None = None) -> ChatFormat:
        """Read `directory`'s config.json and tokenizer.json. `encoding` None lets config.json decide.

        Raises ConfigError for the former, CheckpointError when the tokenizer is missing, unreadable, lacks a
        token that conversations are made of, or disagrees with config.json about an id.
        """
        # Else the library hands every prompt to a thread of its own and waits for it. It makes no prompt of one
        # conversation in less time: measured with 120,000 tokens in one message and in 200.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        config, own = read_token_facts(directory / "config.json")
        name = encoding or own
        path = directory / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            file = msgspec.json.decode(text, type=TokenizerFile)
            tokenizer = Tokenizer.from_str(text)
        except FileNotFoundError as error:
            raise CheckpointError(f"no such file: {path}") from error
        except (OSError, UnicodeDecodeError, msgspec.MsgspecError, RuntimeError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        ids = {token.content: token.id for token in file.added_tokens}
        _check_tokens(ids, config, path, needs_system=name == "v4.1")
        special_tokens = SpecialTokens(image=_image_spelling(ids, config, path))
        hidden = {ids[token.default_str()] for token in _NEVER_TEXT if token.default_str() in ids}
        hidden |= {token for token in (config.pad_token_id, config.image_token_id) if token is not None}
        control = {token.id for token in file.added_tokens if not _ANSWER_TAG.fullmatch(token.content)}
        kind = DeepseekV4Encoding if name == "v4" else DeepseekV41Encoding
        thought_end_id = ids[SpecialToken.ThinkingEnd.default_str()]
        texts = token_texts(file)
        exact = list(texts)
        exact[ids[_MARKER]] = EXACT_MARKER.encode()
        exact[thought_end_id] = EXACT_THOUGHT_END.encode()
        return cls(
            config=config,
            tokenizer=tokenizer,
            special_tokens=special_tokens,
            encoding=kind().with_special_tokens(special_tokens).with_tokenizer(tokenizer),
            hidden_token_ids=frozenset(hidden),
            control_ids=frozenset(hidden | control),
            marker=Marker(ids[_MARKER], _MARKER),
            texts=texts,
            exact_texts=tuple(exact),
            thought_end_id=thought_end_id,
            name=name,
        )

    @property
    def model_version(self) -> ModelVersion:
        """The publisher's name for the encoding."""
        return ModelVersion.DeepseekV4Pro if self.name == "v4" else ModelVersion.DeepseekV41Flash

    @property
    def calls(self) -> CallSpelling:
        """How calls are spelled."""
        return V4_CALLS if self.name == "v4" else V41_CALLS

    @property
    def has_tiers_only(self) -> bool:
        """Whether an effort is one of three texts rather than any number."""
        return self.name == "v4"

    def encode(self, conversation: Conversation, effort: int | None = None) -> list[int]:
        """Return the prompt's ids, with `effort` in place of the number of the conversation's own tier.

        The library renders tiers only. The text from the effort to the next control token is encoded again as a
        whole, because tokens may join what stands around a number. Without thinking there is no effort to replace.
        """
        token_ids = self.encoding.encode(conversation)
        if effort is None or not conversation.thinking_mode or self.has_tiers_only:
            return token_ids
        rendered = self.encoding.render_conversation(conversation)
        (_, start), (end, _) = rendered.special_ranges[_NUM_LEADING - 1 : _NUM_LEADING + 1]
        text = rendered.prompt[start:end]
        replaced = self._encode_text(_EFFORT.sub(rf"\g<1>{effort}", text, count=1))
        rest = token_ids[_NUM_LEADING + len(self._encode_text(text)) :]
        return [*token_ids[:_NUM_LEADING], *replaced, *rest]

    def encode_question(self, text: str) -> list[int]:
        """Return the prompt's ids when a user says only this, to be answered without thinking."""
        return self.encoding.encode(Conversation([UserMessage(text)], thinking_mode=False))

    def _encode_text(self, text: str) -> list[int]:
        """Return the ids of text in which nothing is a control token: the library does that inside a user's turn."""
        return self.encode_question(text)[2:-2]  # <bos> <User> text <Assistant> </think>


def _check_tokens(ids: dict[str, int], config: TokenFacts, path: Path, *, needs_system: bool) -> None:
    required = (*_REQUIRED, SpecialToken.System) if needs_system else _REQUIRED
    if missing := [token.default_str() for token in required if token.default_str() not in ids]:
        raise CheckpointError(
            f"{path} lacks {', '.join(missing)}", hint="use the tokenizer.json that came with the checkpoint"
        )
    for token, expected in ((SpecialToken.Bos, config.bos_token_id), (SpecialToken.Eos, config.eos_token_id)):
        spelling = token.default_str()
        if ids[spelling] != expected:
            raise CheckpointError(f"{spelling} is {ids[spelling]} in {path} but {expected} in config.json")


def _image_spelling(ids: dict[str, int], config: TokenFacts, path: Path) -> str:
    spellings = {token_id: spelling for spelling, token_id in ids.items()}
    if config.image_token_id in spellings:
        return spellings[config.image_token_id]
    if config.vision is not None:
        raise CheckpointError(
            f"{path} has no added token {config.image_token_id}, the image_token_id of config.json"
        )
    return SpecialToken.Image.default_str()


__all__ = ["ChatFormat", "Encoding", "TokenFacts"]
