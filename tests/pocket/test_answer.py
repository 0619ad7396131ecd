"""The training model asked like a server: the same prompts, the same reading of answers, the same greedy choice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deskfleet.evaluation.judgement import is_right
from deskfleet.evaluation.questions import TASKS, Question, questions
from deskfleet.evaluation.run import EvalSettings
from deskfleet.gateway.protocols.chat import ChatProtocol
from deskfleet.gateway.settings import GatewaySettings
from pocket.answer import WAYS, Exam, comparison, examine, main, read_reports
from pocket.data.ask import as_example, as_reply
from pocket.data.render import Document, Renderer
from pocket.data.stream import VISION
from pocket.generate import answer_all
from pocket.model.numerics import Numerics
from pocket.restore import models, pocket_tokenizer
from pocket.sizes import SMOKE, pocket_config
from pocket.tokenizer import EOS, load_tokenizer
from tests.evaluation.test_evaluate import said
from tests.pocket.fixtures_model import config, exported, lively_model
from tests.pocket.test_embedded import ROOT

SOUND = ROOT / "pocket" / "checkpoint"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def asked(task: str, thinking: bool) -> list[Question]:
    return questions(task, thinking=thinking, count=8, needle_tokens=(128, 300))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("effort", [None, 37])
def test_prompts_are_those_of_the_gateway(task: str, effort: int | None) -> None:
    protocol = ChatProtocol(GatewaySettings(model_id="m", checkpoint=SOUND), 8192)
    renderer = Renderer(load_tokenizer(), VISION)
    for question in asked(task, effort is not None):
        thinking = {"type": "disabled" if effort is None else "enabled"}
        body = {"model": "m", **question.request, "thinking": thinking}
        if effort is not None:
            body["reasoning_effort"] = effort
        prepared = protocol.prepare(json.dumps(body).encode(), "r")
        example = as_example(question, effort)
        assert renderer.render_prompt(example) == list(prepared.generate.prompt_token_ids)
        assert len(renderer.question(example)) == prepared.num_prompt_tokens


@pytest.mark.parametrize("task", [task for task in TASKS if task not in ("prose", "code")])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_right_answer_is_read_as_one(task: str, thinking: bool) -> None:
    tokenizer = pocket_tokenizer()
    for question in asked(task, thinking):
        text = ("I think.</think>" if thinking else "") + said(question) + EOS
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        reply = as_reply(ids, thinking=thinking, seconds_s=1.0)
        assert is_right(question.expected, reply.content, reply.tool_calls), (question.expected, reply)
        assert reply.finish_reason == ("tool_calls" if question.expected.calls else "stop")
        assert (reply.reasoning, reply.num_completion_tokens) == ("I think." if thinking else "", len(ids))
        cut = as_reply(ids[:-1], thinking=thinking, seconds_s=1.0)
        assert cut.finish_reason == "length"


def test_broken_calls_and_thoughts_without_end_are_wrong() -> None:
    question = questions("tool-calls", thinking=False, count=1)[0]
    text = said(question).replace("</｜DSML｜ calls>", "")
    reply = as_reply(pocket_tokenizer().encode(text + EOS).ids, thinking=False, seconds_s=1.0)
    assert reply.tool_calls == ()
    assert not is_right(question.expected, reply.content, reply.tool_calls)
    endless = as_reply(pocket_tokenizer().encode("I think and think").ids, thinking=True, seconds_s=1.0)
    assert (endless.content, endless.num_reasoning_tokens, endless.finish_reason) == ("", 4, "length")


def test_greedy_choices_are_those_of_the_engine(tmp_path: Path) -> None:
    """Prompts of several lengths in one batch, against the engine on the exported model, one at a time."""
    backbone, drafter = lively_model()
    engine = exported(backbone, drafter, tmp_path)
    generator = np.random.default_rng(3)
    prompts = [generator.integers(3, 700, length).astype(np.uint16) for length in (5, 31, 70)]
    documents = [Document("t", ids, np.zeros(len(ids), np.float32)) for ids in prompts]
    ours = answer_all(backbone, documents, [6, 4, 5], _exact(), batch_tokens=300)
    for slot, (prompt, own) in enumerate(zip(prompts, ours, strict=True)):
        ids = torch.from_numpy(prompt.astype(np.int64))
        for token in own:
            logits, _ = engine.run(ids, slot=slot)
            best = logits[-1].topk(2)
            # Where two tokens are all but even, either model may take either.
            assert token in best.indices.tolist()
            assert token == int(best.indices[0]) or float(best.values[0] - best.values[1]) < 0.05
            ids = torch.cat((ids, torch.tensor([token])))
    assert [len(each) for each in ours] == [6, 4, 5]
    for guesses in (
        ours,  # right to the end
        [ours[0][:3], [*ours[1][:2], ours[1][2] + 1, 7], []],  # too short, wrong in the middle, none
        [[*ours[0], 5, 5], [ours[1][0] + 1], [4]],  # too long, wrong at once
    ):
        assert answer_all(backbone, documents, [6, 4, 5], _exact(), batch_tokens=300, guesses=guesses) == ours
    assert config().sliding_window == 32  # the longest prompt reaches over several windows


def _exact() -> Numerics:
    return replace(WAYS["quantised"], weights_are_rounded=False)


def test_a_report_like_that_of_eval_and_both_beside_each_other(tmp_path: Path) -> None:
    backbone, _ = models(pocket_config(pocket_tokenizer(), SMOKE))
    settings = EvalSettings(tasks=("arithmetic", "vision"), efforts=(None, 50), num_questions=2, max_tokens=3)
    exam = Exam.of(settings, 4096)
    report = examine(backbone, exam, settings, WAYS["unquantised"], batch_tokens=2048, name="smoke").to_dict()
    assert report["counts"] == {
        task: {"asked": 4, "right": 0, "unanswered": 0} for task in ("arithmetic", "vision")
    }
    assert report["efforts"]["off"]["mean_reasoning_tokens"] == 0
    path = tmp_path / "ways.json"
    path.write_text(json.dumps({"ways": {"unquantised": report, "quantised": report}}))
    served = tmp_path / "eval.json"
    served.write_text(json.dumps({"target": "x", **report}))
    table = comparison({**read_reports(path), **read_reports(served)})
    assert "| task | thinking | unquantised | quantised | exported |" in table
    assert "| arithmetic | 50 | 0 of 2 | 0 of 2 | 0 of 2 |" in table


@pytest.mark.slow  # half a minute on a busy machine
def test_the_checkpoint_answers_without_an_engine(tmp_path: Path) -> None:
    out = tmp_path / "ways.json"
    main(
        [
            str(SOUND),
            "--tasks",
            "world",
            "--n",
            "2",
            "--efforts",
            "off",
            "--ways",
            "quantised",
            "--guess",
            str(SOUND),
            "--out",
            str(out),
        ]
    )
    assert json.loads(out.read_text())["ways"]["quantised"]["rates"] == {"world": 1.0}
