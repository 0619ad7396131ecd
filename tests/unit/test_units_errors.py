"""units.py and errors.py: quantities read and written as people say them, messages that carry their hint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskfleet.errors import (
    CheckpointError,
    ConfigError,
    DeskfleetError,
    DoesNotFit,
    EngineError,
    PromptTooLong,
    RankDied,
    RequestError,
)
from deskfleet.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512", 512),
        ("0", 0),
        ("1 B", 1),
        ("64 MiB", 64 * 2**20),
        ("64MiB", 64 * 2**20),
        ("2GB", 2 * 10**9),
        ("2GiB", 2 * 2**30),
        ("1.5 gib", 3 * 2**29),
        ("  3 TB ", 3 * 10**12),
        ("1TiB", 2**40),
        ("7kb", 7000),
        ("7KiB", 7168),
    ],
)
def test_parse_bytes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["64G", "64 M", "GiB", "", "-1GiB", "1,5GiB", "12 parsecs", "0x10", "1e9"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)
    assert repr(text) in caught.value.message
    assert caught.value.hint == "write e.g. 64MiB, 2GiB or 2GB"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20, "1.00 MiB"),
        (101_378_000_000, "94.42 GiB"),
        (2**40, "1.00 TiB"),
        (5 * 2**50, "5120.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(min_value=0, max_value=2**50))
def test_format_then_parse_is_close(num_bytes: int) -> None:
    # Two decimals of a value of at least 1 lose at most half a percent.
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= num_bytes * 0.005 + 1


def test_hint_stands_on_its_own_line() -> None:
    error = ConfigError("unknown key a", hint="did you mean b?")
    assert str(error) == "unknown key a\nhint: did you mean b?"
    assert (error.message, error.hint) == ("unknown key a", "did you mean b?")
    assert str(ConfigError("unknown key a")) == "unknown key a"


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (DeskfleetError("x"), 3),
        (ConfigError("x"), 2),
        (CheckpointError("x"), 3),
        (DoesNotFit("x"), 1),
        (RequestError("x"), 2),
        (EngineError("x"), 3),
        (RankDied(1, "exited"), 3),
    ],
)
def test_exit_codes(error: DeskfleetError, exit_code: int) -> None:
    assert isinstance(error, DeskfleetError)
    assert error.exit_code == exit_code


def test_prompt_too_long_names_the_numbers_and_the_field() -> None:
    error = PromptTooLong(900, 200, 1024)
    assert error.message == "prompt of 900 tokens plus max_tokens 200 exceeds the context of 1024 tokens"
    assert error.param == "max_tokens"
    alone = PromptTooLong(2000, None, 1024)
    assert alone.message == "prompt of 2000 tokens exceeds the context of 1024 tokens"
    assert alone.param == "messages"
    # No max_tokens, however small, would make room for this one.
    assert PromptTooLong(1024, 5, 1024).param == "messages"


def test_rank_died_says_which_rank() -> None:
    error = RankDied(2, "was killed by SIGKILL")
    assert error.rank == 2
    assert error.message == "rank 2 was killed by SIGKILL; the group was stopped"
