"""The parts of gates, each by itself: garble, checks, the plan of a ladder, scores, the adapter. About 3 s."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random

import pytest
from aiohttp import web
from gate_runs import ask
from hypothesis import given
from hypothesis import strategies as st

from deskfleet.client import Client, Reply
from deskfleet.errors import ConfigError
from deskfleet.gates import machine, reference
from deskfleet.gates.acceptance.harness import lm_eval_command, read_results
from deskfleet.gates.acceptance.ladder import plan_cells
from deskfleet.gates.acceptance.scoring import Vectors, compare
from deskfleet.gates.acceptance.soak import Tally
from deskfleet.gates.contract import Series
from deskfleet.gates.family import choose_family
from deskfleet.gates.garble import fault_in, first_difference
from deskfleet.gates.launch.logprobs import fault_of
from deskfleet.gates.machine import num_runnable as real_num_runnable
from deskfleet.gates.puzzle import Puzzle, counts, json_object, last_number, says
from deskfleet.gates.questions import codes
from deskfleet.gates.ruler import TokenRuler
from deskfleet.gates.subject import Answered
from deskfleet.testing import saboteurs as bad
from deskfleet.testing.honest import Asked, HonestEndpoint
from deskfleet.testing.oracle import Said


def reply(content: str = "", **fields: object) -> Reply:
    known = {"finish_reason": "stop", "num_completion_tokens": 3, "num_reasoning_tokens": 0}
    values = {"content": content, "reasoning": "", "tool_calls": (), "first_token_s": 0.1, "total_s": 0.2}
    return Reply(**{**values, **known, **fields})  # type: ignore[arg-type]


GARBLE = {
    "": "empty",
    "  \n": "empty",
    "!" * 40: "constant token",
    " the" * 30: "constant token",
    "ok ok ok ok ok ok ok ok ok ok ok ok": "constant token",
    "The answer is 山川草木 и это 山川草木 и это": "wrong language",
    "Il était une fois un renard qui courait le matin dans la forêt et cherchait ses amis": "wrong language",
    "Es war einmal ein Fuchs, der jeden Morgen durch den Wald lief und nach seinen Freunden suchte": "wrong language",
    "ok <think>hm": "control markup",
    "<｜DSML｜ calls>": "control markup",
    "a \ufffd b": "broken characters",
    "a \x1b[31m b": "control characters",
}
SOUND = (
    "42",
    "2 + 2 = 4",
    ", ".join(map(str, range(1, 101))),
    "[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]",
    "On Tuesday Jakob woke up early because of the sun. Near the kitchen she met a lonely fox.",
    "Herman Melville wrote it in 1851, and it is about a whale.",
    '{"name": "Zoë", "city": "Kraków"}',
    "red red red",
)


@pytest.mark.parametrize(("text", "words"), GARBLE.items(), ids=repr)
def test_garble_is_named(text: str, words: str) -> None:
    assert words in (fault_in(text) or "")


@pytest.mark.parametrize("text", SOUND)
def test_sound_text_has_no_fault(text: str) -> None:
    assert fault_in(text) is None


@given(st.text())
def test_any_text_is_judged(text: str) -> None:
    fault_in(text)
    assert "part at character" in first_difference(text, text + "x")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (", ".join(map(str, range(1, 101))), None),
        ("\n".join(map(str, range(1, 101))), None),
        (", ".join(map(str, (*range(1, 57), 58))), "after 56 comes 58"),
        (", ".join(map(str, range(1, 60))), "after 59 it ends"),
        (", ".join(map(str, range(1, 103))), "after 100 it goes on"),
        ("2, 3", "begins with 2"),
        ("!" * 50, "constant token"),
        ("one, two", "no numbers"),
    ],
)
def test_counting_says_where_it_goes_wrong(content: str, fault: str | None) -> None:
    found = counts(1, 100)(reply(content))
    assert found is None if fault is None else fault in (found or "")


@pytest.mark.parametrize(
    ("content", "is_right"),
    [("17 + 25 = 42", True), ("**42**.", True), ("1,042", False), ("42 or 43", False), ("forty-two", False)],
)
def test_the_last_number_decides(content: str, is_right: bool) -> None:
    assert (last_number(42)(reply(content)) is None) == is_right


def test_words_are_whole_words() -> None:
    assert says("red")(reply("It is RED.")) is None
    assert says("red")(reply("It is reddish."))
    assert says("51", but_not=("73",))(reply("51, not 73"))
    assert says("51")(reply("151"))


def test_json_may_be_fenced_and_must_be_equal() -> None:
    check = json_object({"a": 1})
    assert check(reply('```json\n{"a": 1}\n```')) is None
    assert "no JSON" in (check(reply("a = 1")) or "")
    assert check(reply('{"a": 2}'))


@pytest.mark.parametrize(
    ("logprobs", "fault"),
    [
        (None, "absent"),
        ([], "absent"),
        ([{"token": "a", "logprob": None}] * 3, "not finite"),
        ([{"token": "a", "logprob": -9999.0}] * 3, "not finite"),
        ([{"token": "a", "logprob": 0.5}] * 3, "not finite"),
        ([{"token": "a", "logprob": -1.0, "top_logprobs": [{"logprob": float("nan")}]}] * 3, "not finite"),
        ([{"token": "a", "logprob": -1.0}] * 7, "7 log probabilities came with 3 tokens"),
        ([{"token": "a", "logprob": -1.0}] * 3, None),
        ([{"token": "a", "logprob": -1.0}] * 2, None),
    ],
)
def test_log_probabilities(logprobs: list[dict[str, object]] | None, fault: str | None) -> None:
    found = fault_of(reply("abc", logprobs=None if logprobs is None else tuple(logprobs)))
    assert found is None if fault is None else fault in (found or "")


def test_a_ladder_reaches_the_longest_prompt_at_every_depth() -> None:
    cells = plan_cells(8000, 5, 3, None)
    assert [cell.num_tokens for cell in cells] == sorted(cell.num_tokens for cell in cells)
    assert {cell.num_tokens for cell in cells} == {512, 1000, 2000, 4000, 8000}
    assert [cell.depth for cell in cells if cell.num_tokens == 8000] == [0.0, 0.5, 1.0]


@given(
    longest=st.integers(64, 1_000_000),
    lengths=st.integers(1, 8),
    depths=st.integers(1, 6),
    most=st.floats(1, 5_000_000),
)
def test_a_limited_ladder_keeps_to_its_limit(longest: int, lengths: int, depths: int, most: float) -> None:
    cells = plan_cells(longest, lengths, depths, most)
    total = sum(cell.num_tokens for cell in cells)
    assert cells
    assert total <= most or len(cells) == 1
    assert max(cell.num_tokens for cell in cells) <= longest


@pytest.mark.parametrize(("offset", "slope"), [(10, 1.0), (40, 0.71), (3, 1.6)])
def test_the_ruler_learns_how_a_server_counts(offset: int, slope: float) -> None:
    ruler = TokenRuler()
    for asked in (160, 640):
        ruler.observe(asked, round(offset + slope * asked))
    assert ruler.expected(ruler.to_ask(7000)) == pytest.approx(7000, rel=0.02)
    assert ruler.expected(5000) == pytest.approx(offset + slope * 5000, rel=0.02)


def test_texts_begin_unlike_each_other_and_hold_one_right_code() -> None:
    rng = Random(1)
    texts = [codes(TokenRuler(), 200, rng, depths=(0.2, 0.8), ask=1, spare_tokens=0) for _ in range(50)]
    beginnings = {puzzle.fields["messages"][0]["content"][:12] for puzzle in texts}
    assert len(beginnings) == 50
    for puzzle in texts:
        text = puzzle.fields["messages"][0]["content"]
        assert puzzle.tag is not None
        assert text.count(puzzle.tag) == 1
        assert puzzle.check(reply(f"It is {puzzle.tag}.")) is None
        assert puzzle.check(reply(text.partition(" is ")[2][:5])), "the first code is a decoy"


def test_the_family_is_chosen_by_name_and_says_so() -> None:
    assert choose_family("pocket").name == "pocket"
    assert choose_family("models/pocket-2").name == "pocket"
    assert choose_family("DeepSeek-V4.1-Flash").name == "general"
    assert choose_family("pickpockets").name == "general"
    assert "'pocket'" in choose_family("pocket").reason
    assert choose_family("pocket", "general").reason == "asked for"
    with pytest.raises(ConfigError, match="there are no questions 'big'"):
        choose_family("x", "big")


def answered(tag: str, began_s: float, ended_s: float, said: str) -> Answered:
    puzzle = Puzzle(f"question {tag}", {}, says(tag), 8, tag=tag)
    right = reply(said, arrivals_s=(0.5,))
    return Answered(puzzle, {}, right, puzzle.check(right), "answer", began_s, ended_s, 1)


def test_a_soak_of_hours_keeps_a_bounded_tally() -> None:
    tally = Tally([0, 0], soak_s=60.0, began_s=0.0)
    for number in range(5000):
        at_s = number * 60 / 5000
        tally.add(number % 2, answered(str(10000 + number), at_s, at_s + 0.01, "nothing"))
    assert (tally.num_answers, tally.num_wrong, tally.counts) == (5000, 5000, [2500, 2500])
    assert len(tally.wrong) <= 200
    assert len(tally.recent) + len(tally.suspects) <= 512
    assert sum(tally.tokens) == pytest.approx(15000)  # three tokens each
    assert tally.rates(3) == pytest.approx([250, 250, 250], rel=0.1)
    assert tally.crossed is None


@pytest.mark.parametrize(("ended_s", "is_crossed"), [(2.0, True), (0.9, False)])
@pytest.mark.parametrize("order", [1, -1])
def test_only_answers_of_the_same_time_can_be_mixed_up(ended_s: float, is_crossed: bool, order: int) -> None:
    wrong = answered("11111", 1.0, 3.0, "It is 22222.")
    other = answered("22222", 0.5, ended_s, "It is 22222.")
    tally = Tally([0, 0], soak_s=60.0, began_s=0.0)
    for each in (other, wrong)[::order]:
        tally.add(0, each)
    assert (tally.crossed is not None) == is_crossed


async def test_scores_are_recorded_and_compared(tmp_path: Path) -> None:
    file = str(tmp_path / "score.json")
    (recorded,) = (await ask(HonestEndpoint, ["scoring"], score_output=file)).results
    assert recorded.verdict == "skip"
    assert file in recorded.finding.measured
    (same,) = (await ask(HonestEndpoint, ["scoring"], recorded_score=file)).results
    assert (same.verdict, same.finding.values["mean"]) == ("pass", 0.0)
    (other,) = (await ask(bad.OtherModel, ["scoring"], recorded_score=file)).results
    assert other.verdict == "fail"
    assert "scores differ from those recorded of honest" in other.finding.reason
    assert other.finding.values["most"] == pytest.approx(0.6)
    assert other.finding.values["mean"] == pytest.approx(0.3, abs=0.01)


def test_differences_by_hand() -> None:
    one = Vectors("a", ("x", "y", "z"), (-1.0, -2.0))
    other = Vectors("b", ("x", "y", "z"), (-1.5, -2.25))
    found = compare(one, other)
    assert found is not None
    assert (found.mean, found.most) == (0.375, 0.5)
    assert found.perplexity == pytest.approx(4.4817, rel=1e-4)  # e to the 1.5
    assert compare(one, Vectors("b", ("x", "y"), (-1.0,))) is None


async def test_recorded_scores_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text('{"model": "a"}')
    (result,) = (await ask(HonestEndpoint, ["scoring"], recorded_score=str(file))).results
    assert result.verdict == "skip"
    assert result.finding.cause == "tool"
    assert "holds no recorded vectors" in result.finding.reason


RESULTS = {
    "results": {
        "gsm8k_cot": {
            "alias": "gsm8k_cot",
            "exact_match,strict-match": 0.91,
            "exact_match,flexible-extract": 0.95,
        },
        "ifeval": {"alias": "ifeval", "prompt_level_strict_acc,none": 0.5},
        "own": {"alias": "own", "acc,none": 0.1},
    },
    "n-samples": {"gsm8k_cot": {"original": 1319, "effective": 200}},
}


async def test_results_of_the_harness_are_judged(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(RESULTS))
    scores = {score.task: score for score in read_results(str(file))}
    assert (scores["gsm8k_cot"].score, scores["gsm8k_cot"].num_samples) == (0.95, 200)
    (result,) = (await ask(HonestEndpoint, ["lm-eval"], lm_eval_results=str(file))).results
    assert result.verdict == "fail"
    assert "ifeval is 50.0%" in result.finding.reason
    RESULTS["results"]["ifeval"]["prompt_level_strict_acc,none"] = 0.8
    file.write_text(json.dumps(RESULTS))
    (result,) = (await ask(HonestEndpoint, ["lm-eval"], lm_eval_results=str(file))).results
    assert result.verdict == "pass"
    assert "gsm8k_cot 95.0% of 200" in result.finding.measured


def test_the_command_of_the_harness() -> None:
    command = lm_eval_command("http://127.0.0.1:8000", "pocket", concurrency=4)
    assert command.startswith("lm_eval run --model local-chat-completions")
    assert "base_url=http://127.0.0.1:8000/v1/chat/completions,model=pocket,num_concurrent=4" in command


class TwoEngines(HonestEndpoint):
    """Tells its metrics as vLLM does with two engines, labels in any order, and something that is no number."""

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text="# HELP vllm:num_requests_running ...\n"
            'vllm:num_requests_running{engine="0",model_name="a b"} 1.0\n'
            'vllm:num_requests_running{model_name="a b",engine="1"} 2.0\n'
            "plain_total 7 1700000000\nbroken x\n"
        )


async def test_counters_are_summed_over_labels() -> None:
    async with TwoEngines() as server, Client(server.url) as client:
        assert await client.counters() == {"vllm:num_requests_running": 3.0, "plain_total": 7.0}


async def test_a_slip_among_few_questions_is_no_verdict_yet() -> None:
    """Where time allows three questions, the others are asked before a suite fails; what is broken stays so."""

    class Slips(HonestEndpoint):
        def said(self, asked: Asked) -> Said:
            self.asked = getattr(self, "asked", 0) + asked.conversation.text.startswith("Text ")
            return Said("I forgot.") if self.asked == 3 else super().said(asked)

    how = {"num_questions": 12, "ladder_s": 0.0}
    (hurried,) = (await ask(HonestEndpoint, ["quality-long-context"], **how)).results
    assert hurried.finding.measured == "4 of 4 right (100%)"  # as many as are asked side by side
    (slipped,) = (await ask(Slips, ["quality-long-context"], **how, family="pocket")).results
    assert (slipped.verdict, slipped.finding.measured) == ("pass", "3 of 4 right (75%)")
    (slipped,) = (await ask(Slips, ["quality-long-context"], **how)).results
    assert (slipped.verdict, slipped.finding.measured) == ("pass", "7 of 8 right (88%)")
    (broken,) = (await ask(bad.LosesTheMiddle, ["quality-long-context"], **how)).results
    assert broken.verdict == "fail"
    assert " of 12 right" in broken.finding.measured


@pytest.mark.parametrize(
    ("threads", "url", "is_excused"),
    [
        ((3, 3, 9), "http://127.0.0.1:1", True),
        ((9, 9, 9), "http://127.0.0.1:1", False),
        ((1, 1, 2), "http://127.0.0.1:1", False),  # two threads on two cores are in nobody's way
        ((3, 3, 9), "http://192.0.2.1:1", False),  # of another machine nothing is known
    ],
    ids=str,
)
async def test_a_machine_that_got_busy_excuses_a_server_on_it(
    threads: tuple[int, ...], url: str, is_excused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter([count for count in threads for _ in range(4)])
    monkeypatch.setattr(machine, "num_runnable", lambda: next(seen, None))
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    monkeypatch.setattr(machine, "_EVERY_S", 0.0)
    async with machine.OtherWork(url) as other:
        await asyncio.sleep(0.05)
    finding = other.finding("slower with time", Series("a", "x", "y", ()), measured="10 tok/s, then 4")
    assert (finding.verdict, finding.cause) == (("skip", "tool") if is_excused else ("fail", "pace"))
    assert ("9.0 threads wanted to run at last, 3.0 at first, on 2 cores" in finding.reason) == is_excused


def test_running_threads_are_counted() -> None:
    count = real_num_runnable()
    assert count is not None
    assert 0 <= count < 10_000


def test_the_page_of_gates_is_current() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "gates.md").read_text(encoding="utf-8")
    assert page.endswith(reference.render_body()), "run: make fix"
