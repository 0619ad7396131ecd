"""An evaluation of servers whose answers are known: what it says must be exactly what they did."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tokenizers import Tokenizer

from deskfleet.client import ServerGone
from deskfleet.endpoint import EngineStats, GenerateRequest
from deskfleet.errors import ConfigError, EngineError, RequestError
from deskfleet.evaluation.questions import TASKS, Question, questions
from deskfleet.evaluation.report import Report, rank_correlation
from deskfleet.evaluation.run import Batch, EvalSettings, evaluate
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.testing.scripted import Script, ScriptedEngine, running_gateway

CHECKPOINT = Path(__file__).parents[1] / "golden" / "v41-tiny" / "model"
TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
EOS = "<｜end▁of▁sentence｜>"
EFFORTS = (None, 10, 25, 50, 75, 100)


def said(question: Question) -> str:
    """A right answer as a model writes it."""
    expected = question.expected
    if expected.kind == "json":
        return json.dumps(expected.value)
    if expected.kind != "calls":
        return expected.text or "Once upon a time."
    lines = ["\n\n<｜DSML｜ calls>"]
    for call in expected.calls:
        lines.append(f'<｜DSML｜ invoke name="{call.name}">')
        for name, value in call.arguments.items():
            is_text = isinstance(value, str)
            text, kind = (value, "true") if is_text else (json.dumps(value), "false")
            lines.append(f'<｜DSML｜ parameter name="{name}" string="{kind}">{text}</｜DSML｜ parameter>')
        lines.append("</｜DSML｜ invoke>")
    return "\n".join([*lines, "</｜DSML｜ calls>"])


class Examinee(ScriptedEngine):
    """Answers every question rightly, but for those that `wrong` picks by number; thinks `thought` words.

    Questions must come one at a time, in the order in which they are asked. `max_tokens` is obeyed.
    """

    def __init__(
        self,
        settings: EvalSettings,
        *,
        wrong: Callable[[int], bool] = lambda number: False,
        thought: Callable[[int], int] = lambda effort: effort // 10,
        drafts: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        super().__init__(self._answer_script, max_model_len=100_000)
        self._asked = iter(
            question
            for task in settings.tasks
            for effort in settings.efforts
            for question in questions(
                task,
                thinking=effort is not None,
                count=settings.num_questions,
                seed=settings.seed,
                needle_tokens=settings.needle_tokens,
            )
        )
        self._wrong, self._thought, self._drafts = wrong, thought, drafts

    def _answer_script(self, request: GenerateRequest) -> Script:
        prompt = TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False)
        answer = said(next(self._asked))
        if self._wrong(len(self.requests) - 1):
            answer = "nonsense"
        if effort := re.search(r"Reasoning Effort: (\d+)", prompt):
            answer = "a" * self._thought(int(effort[1])) + "</think>" + answer
        token_ids = TOKENIZER.encode(answer + EOS, add_special_tokens=False).ids
        return Script(tuple(token_ids), chunk_sizes=(3,))

    async def stats(self) -> EngineStats:
        steps, drafted, accepted = (len(self.requests) * each for each in self._drafts)
        return replace(
            await super().stats(), num_verify_steps=steps, num_drafted=drafted, num_accepted=accepted
        )


async def examined(settings: EvalSettings, **habits: Any) -> tuple[Report, Examinee]:
    engine = Examinee(settings, **habits)
    async with running_gateway(
        engine, GatewaySettings(model_id="examinee", checkpoint=CHECKPOINT, port=0)
    ) as url:
        return await evaluate(url, settings), engine


def one_by_one(*tasks: str, **fields: Any) -> EvalSettings:
    # The tiny tokenizer spells letter by letter, so a right answer takes more tokens than Pocket's.
    return EvalSettings(**{"tasks": tasks, "concurrency": 1, "max_tokens": 5000, **fields})


@pytest.mark.parametrize("task", TASKS)
async def test_right_answers_are_right_in_every_task(task: str) -> None:
    settings = one_by_one(task, efforts=(None, 37), num_questions=7, needle_tokens=(128, 300))
    report, engine = await examined(settings)
    result = report.to_dict()
    asked = 7 if task in ("launch", "prose", "code") else 14
    assert result["counts"] == {
        task: {"asked": asked, "right": 0 if task in ("prose", "code") else asked, "unanswered": 0}
    }
    assert result["rates"] == ({} if task in ("prose", "code") else {task: 1.0})
    assert result["failures"] == []
    assert all(request.sampling.temperature == 0 for request in engine.requests)


async def test_wrong_answers_are_counted_exactly() -> None:
    settings = one_by_one("arithmetic", "tool-calls", efforts=(None, 37), num_questions=8)
    report, _ = await examined(settings, wrong=lambda number: number % 4 == 0 or 16 <= number < 20)
    result = report.to_dict()
    assert result["rates"] == {"arithmetic": 12 / 16, "tool-calls": 9 / 16}
    assert result["efforts"]["off"]["rates"] == {"arithmetic": 6 / 8, "tool-calls": 3 / 8}
    assert result["efforts"]["37"]["rates"] == {"arithmetic": 6 / 8, "tool-calls": 6 / 8}
    first = result["failures"][0]
    question = questions("arithmetic", thinking=False, count=8)[0]
    assert first == {
        "task": "arithmetic",
        "effort": "off",
        "question": question.text,
        "expected": question.expected.text,
        "answer": "nonsense",
        "finish_reason": "stop",
        "error": None,
    }
    assert [failure["task"] for failure in result["failures"]] == ["arithmetic"] * 3 + ["tool-calls"] * 3


async def test_the_length_of_the_reasoning_is_measured_by_effort() -> None:
    settings = one_by_one("spell", efforts=EFFORTS, num_questions=2)
    report, _ = await examined(settings)
    result = report.to_dict()
    lengths = [each["mean_reasoning_tokens"] for each in result["efforts"].values()]
    assert list(result["efforts"]) == ["off", "10", "25", "50", "75", "100"]
    assert lengths[0] == 0
    assert lengths[1:] == sorted(lengths[1:])
    assert lengths[-1] > 0
    assert result["effort_rank_correlation"] == 1.0
    lazy, _ = await examined(settings, thought=lambda effort: 20 - effort // 10)
    assert lazy.to_dict()["effort_rank_correlation"] < -0.9


async def test_drafts_are_told_by_task_and_not_at_all_without_them() -> None:
    settings = one_by_one("prose", "json", efforts=(None,), num_questions=2)
    drafting, _ = await examined(settings, drafts=(4, 12, 10))
    each = {"num_verify_steps": 8, "num_drafted": 24, "num_accepted": 20, "mean_accepted": 2.5}
    assert drafting.to_dict()["drafts"] == {"prose": each, "json": each}
    plain, _ = await examined(settings)
    assert plain.to_dict()["drafts"] is None
    assert all(speed["tok_s_per_stream"] > 0 for speed in plain.to_dict()["speed"].values())


async def test_needles_are_told_by_length_and_depth() -> None:
    settings = one_by_one("needle", efforts=(None,), num_questions=20, needle_tokens=(100, 200))
    asked = questions("needle", thinking=False, count=20, needle_tokens=(100, 200))
    engine = Examinee(
        settings, wrong=lambda number: asked[number].num_tokens == 200 and asked[number].depth == 1
    )
    gateway = GatewaySettings(model_id="examinee", checkpoint=CHECKPOINT, port=0)
    async with running_gateway(engine, gateway) as url:
        cells = (await evaluate(url, settings)).to_dict()["needle"]
    assert len(cells) == 20
    assert all(cell["asked"] == 1 for cell in cells)
    assert [(cell["num_tokens"], cell["depth"]) for cell in cells if not cell["right"]] == [(200, 1.0)]


async def test_an_answer_that_does_not_fit_is_cut_and_wrong() -> None:
    report, engine = await examined(one_by_one("count", efforts=(None,), num_questions=3, max_tokens=2))
    result = report.to_dict()
    assert result["rates"] == {"count": 0.0}
    assert {failure["finish_reason"] for failure in result["failures"]} == {"length"}
    assert {request.sampling.max_tokens for request in engine.requests} == {2}


async def test_a_seed_chooses_the_questions() -> None:
    texts = [[q.text for q in questions("facts", thinking=False, count=9, seed=seed)] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 9


# --- servers that fail


Handler = Callable[[web.Request], Any]
MODELS = {"object": "list", "data": [{"id": "fake"}]}
USAGE = {"prompt_tokens": 1, "completion_tokens": 3}


@asynccontextmanager
async def fake(answer: Handler) -> AsyncIterator[str]:
    """A server of our own that lists one model, knows no metrics, and answers with `answer`."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response(MODELS)

    app = web.Application(client_max_size=2**26)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def event(delta: dict[str, Any], finish: str | None = None, usage: dict[str, Any] | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], 'usage': usage})}\n\n".encode()


def streaming(*pieces: bytes) -> web.Response:
    return web.Response(body=b"".join(pieces), content_type="text/event-stream")


ONE = EvalSettings(tasks=("launch",), efforts=(None,), num_questions=4, concurrency=1)
RIGHT = [question.expected.text for question in questions("launch", thinking=False, count=4)]


def first_right_then(answer: Handler) -> Handler:
    """Answer the first question rightly, and the others with `answer`."""
    right = iter(RIGHT[:1])

    async def handler(request: web.Request) -> web.StreamResponse:
        for text in right:
            return streaming(event({"content": text}), event({}, "stop", USAGE), b"data: [DONE]\n\n")
        response: web.StreamResponse = await answer(request)
        return response

    return handler


async def refuse(request: web.Request) -> web.Response:
    return web.json_response(
        {"error": {"message": "no such field", "type": "invalid_request_error"}}, status=400
    )


async def garbage(request: web.Request) -> web.Response:
    return streaming(b"data: \xff\xfe{]\n\n")


async def noise(request: web.Request) -> web.Response:
    return web.Response(body=b"<html>\n" * 100, content_type="text/html")


async def end_early(request: web.Request) -> web.Response:
    return streaming(event({"content": RIGHT[0]}))


async def fail_inside(request: web.Request) -> web.Response:
    return streaming(
        event({"content": "19"}), b'data: {"error": {"message": "it broke", "type": "server_error"}}\n\n'
    )


async def crash(request: web.Request) -> web.Response:
    return web.Response(status=500, text="oh")


async def hang_up(request: web.Request) -> web.Response:
    response = web.StreamResponse()
    response.content_length = 10_000
    await response.prepare(request)
    await response.write(event({"content": "19"}))
    assert request.transport is not None
    request.transport.close()
    return response  # type: ignore[return-value]


FAULTS = {
    refuse: "no such field",
    garbage: "no event",
    noise: "ended before its end",
    end_early: "ended before its end",
    fail_inside: "it broke",
    crash: "status 500",
    hang_up: "broke off",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_question_without_an_answer_is_a_wrong_one(fault: Handler) -> None:
    async with fake(first_right_then(fault)) as url:
        result = (await evaluate(url, ONE)).to_dict()
    assert result["counts"] == {"launch": {"asked": 4, "right": 1, "unanswered": 3}}
    assert result["rates"] == {"launch": 1 / 4}
    assert all(FAULTS[fault] in failure["error"] for failure in result["failures"])
    assert {failure["answer"] for failure in result["failures"]} == {None}
    assert result["drafts"] is None


@pytest.mark.parametrize(
    ("fault", "error"), [(refuse, RequestError), (garbage, EngineError), (crash, EngineError)]
)
async def test_where_nothing_was_answered_nothing_was_measured(
    fault: Handler, error: type[Exception]
) -> None:
    async with fake(fault) as url:
        with pytest.raises(error):
            await evaluate(url, ONE)


async def test_a_dead_engine_ends_the_evaluation() -> None:
    async def dead(request: web.Request) -> web.Response:
        failed = {"message": "rank 1 died", "type": "server_error", "code": "engine_failed"}
        return streaming(event({"content": "1"}), f"data: {json.dumps({'error': failed})}\n\n".encode())

    async with fake(first_right_then(dead)) as url:
        with pytest.raises(ServerGone, match="rank 1 died"):
            await evaluate(url, replace(ONE, concurrency=3))


async def test_a_server_that_is_down_or_goes_down() -> None:
    async with fake(refuse) as url:
        pass
    with pytest.raises(ServerGone, match="no server answers"):
        await evaluate(url, ONE)
    with pytest.raises(ServerGone, match="no server answers"):
        await evaluate("http://", ONE)


async def test_tool_calls_are_put_together_from_their_pieces() -> None:
    question = next(
        q for q in questions("parallel-calls", thinking=False, count=60) if len(q.expected.calls) == 2
    )
    settings = EvalSettings(tasks=("parallel-calls",), efforts=(None,), num_questions=60, concurrency=1)

    async def answer(request: web.Request) -> web.Response:
        if (await request.json())["messages"] != question.request["messages"]:
            return streaming(event({"content": "no"}), event({}, "stop", USAGE))
        pieces = []
        for index, call in enumerate(question.expected.calls):
            pieces.append([{"index": index, "id": "c", "type": "function", "function": {"name": call.name}}])
            for letter in json.dumps(call.arguments):
                pieces.append([{"index": index, "function": {"arguments": letter}}])
        deltas = [event({"tool_calls": piece}) for piece in pieces]
        return streaming(b": comment\n\n", *deltas, event({}, "tool_calls", USAGE), b"data: [DONE]\n\n")

    async with fake(answer) as url:
        result = (await evaluate(url, settings)).to_dict()
    assert result["counts"]["parallel-calls"]["right"] == 1


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_no_more_questions_at_once_than_asked_for(concurrency: int) -> None:
    running, most = 0, 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return streaming(event({"content": "42"}), event({}, "stop", USAGE))

    batches: list[Batch] = []
    settings = replace(
        ONE, tasks=("spell", "launch"), efforts=(None, 20), num_questions=8, concurrency=concurrency
    )
    async with fake(answer) as url:
        await evaluate(url, settings, on_batch=batches.append)
    assert most == concurrency
    assert [(b.task, b.effort, b.position, b.total) for b in batches] == [
        ("spell", None, 1, 3),
        ("spell", 20, 2, 3),
        ("launch", None, 3, 3),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"tasks": ("sing",)},
        {"tasks": ()},
        {"tasks": ("spell", "spell")},
        {"efforts": (0,)},
        {"efforts": (101,)},
        {"num_questions": 0},
        {"concurrency": 0},
        {"max_tokens": 0},
        {"needle_tokens": (0,)},
    ],
    ids=str,
)
def test_settings_that_cannot_be_asked(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EvalSettings(**fields)


async def test_nothing_to_ask_is_said_before_anybody_is_asked() -> None:
    with pytest.raises(ConfigError, match="launch is not asked at effort 50"):
        await evaluate("http://127.0.0.1:9", EvalSettings(tasks=("launch",), efforts=(50,)))


def test_rank_correlation_by_hand() -> None:
    assert rank_correlation([(1, 5.0), (2, 7.0), (3, 100.0)]) == 1.0
    assert rank_correlation([(1, 3), (2, 2), (3, 1)]) == -1.0
    assert rank_correlation([(1, 1), (2, 3), (3, 2), (4, 4)]) == 0.8  # 1 - 6 * 2 / (4 * 15)
    assert rank_correlation([(1, 2), (2, 2), (3, 2)]) is None
