"""The tokenizer: what is committed can be built again, any bytes survive, digits stand alone."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from deskfleet.testing.tiny_tokenizer import ADDED_TOKENS, BASE_TOKENS
from deskfleet_engram import compressed_token_map
from pocket.data.corpus import tokenizer_corpus
from pocket.tokenizer import DIRECTORY, VOCAB_SIZE, build_tokenizer, load_tokenizer, tokenizer_files


@pytest.fixture(scope="module")
def committed() -> Tokenizer:
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


def test_the_committed_files_are_what_the_corpus_gives() -> None:
    for name, text in tokenizer_files(build_tokenizer(tokenizer_corpus())).items():
        assert (DIRECTORY / name).read_text("utf-8") == text, "python -m pocket.tokenizer writes the files"


@pytest.mark.parametrize(
    "text", ["Grüße, 東京 🎈\x00\x7f\t \n", "a" * 300, "".join(map(chr, range(32, 1200)))]
)
def test_any_text_survives(committed: Tokenizer, text: str) -> None:
    assert committed.decode(committed.encode(text, add_special_tokens=False).ids) == text
    assert load_tokenizer().decode(load_tokenizer().encode_text(text)) == text


def test_no_entry_but_ten_holds_a_digit(committed: Tokenizer) -> None:
    with_digits = [token for token in committed.get_vocab() if any(c in "0123456789" for c in token)]
    assert sorted(with_digits) == list("0123456789")
    assert len(committed.encode("1234567 and 89").ids) == 7 + 2 + 2


def test_special_tokens_stand_where_they_are_published(committed: Tokenizer) -> None:
    assert [committed.token_to_id(token) for token in BASE_TOKENS] == [0, 1, 2]
    assert [committed.token_to_id(token) for token in ADDED_TOKENS] == list(
        range(VOCAB_SIZE - len(ADDED_TOKENS), VOCAB_SIZE)
    )
    assert committed.get_vocab_size() == VOCAB_SIZE


def test_letters_that_read_alike_share_a_compressed_id(committed: Tokenizer) -> None:
    mapped = compressed_token_map(committed)
    assert mapped[committed.token_to_id("a")] == mapped[committed.token_to_id("A")]
    assert VOCAB_SIZE / 2 < mapped.max() + 1 < VOCAB_SIZE
