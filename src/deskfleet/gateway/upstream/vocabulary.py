"""What an upstream needs of a checkpoint: the ids of control tokens, and text for engines that speak no ids.

Owns what is taken from config.json and tokenizer.json for this purpose. Knows nothing of conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from deskfleet.gateway.token_facts import read_token_facts
from deskfleet.model.tokenizer import load_tokenizer

TOOL_MARKER = "｜DSML｜"

SAMPLE = (
    "The quick brown fox, 12345 + 67890 = 80235;\n\tdef f(x): return x ** 2  # Größe, ñandú, été\n"
    '东京の天気は晴れ。 서울 Москва 🙂👩‍🚀 Strasse STRASSE ﬁn <html>&amp;</html> {"a": [1, 2.5e-3]}'
)
"""Text of several scripts. Two tokenizers that cut it alike are the same for our purposes."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """One checkpoint's vocabulary. `thinking` are the ids of `<think>` and `</think>`, None where there are none;
    `image_token_id` is None for a model without images.

    `control` maps the spelling of every added token to its id.
    """

    tokenizer: Tokenizer
    size: int
    bos_token_id: int
    eos_token_id: int
    image_token_id: int | None
    thinking: tuple[int, int] | None
    tool_marker_id: int | None
    control: dict[str, int]

    @classmethod
    def from_checkpoint(cls, directory: Path) -> Vocabulary:
        """Read `directory`. Raises ConfigError for its config.json, CheckpointError for its tokenizer.json."""
        facts, _ = read_token_facts(directory / "config.json")
        tokenizer = load_tokenizer(directory)
        control = {
            token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        start, end = control.get("<think>"), control.get("</think>")
        return cls(
            tokenizer=tokenizer,
            size=facts.vocab_size,
            bos_token_id=facts.bos_token_id,
            eos_token_id=facts.eos_token_id,
            image_token_id=facts.image_token_id,
            thinking=None if start is None or end is None else (start, end),
            tool_marker_id=control.get(TOOL_MARKER),
            control=control,
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of text in which the spelling of a control token is that token."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens spelled out."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


__all__ = ["SAMPLE", "TOOL_MARKER", "Vocabulary"]
