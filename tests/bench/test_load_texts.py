"""Prompts differ from their first letters on, also between runs; text is real and not read twice. About 8 s."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
from bench_endpoint import Behaviour
from load_runs import measure

from deskfleet.bench.load.corpus import Corpus, filler
from deskfleet.bench.load.predictable import predictability
from deskfleet.bench.load.prompts import KINDS, prompt
from deskfleet.errors import ConfigError


def test_no_two_prompts_begin_alike_neither_within_a_run_nor_between_runs() -> None:
    begins: list[str] = []
    for _ in range(2):
        _, endpoint = measure(
            Behaviour(step_s=0),
            parts=("decode", "prefill", "mixed"),
            kinds=KINDS[:2],
            concurrency=(1, 3),
            context=(0, 200),
            samplings=("greedy", "sampled"),
            ladder=(200, 400),
            rate=60.0,
            mixed_s=0.5,
            mixed_context=(0, 200),
            num_tokens=2,
        )
        begins += [answer.body["messages"][0]["content"][:12] for answer in endpoint.log]
    assert len(begins) > 150
    assert len(set(begins)) == len(begins)


def test_requests_say_everything_that_a_server_might_decide() -> None:
    _, endpoint = measure(
        samplings=("greedy", "sampled"), num_tokens=3, extra_body={"top_k": 7, "max_tokens": 5}
    )
    greedy, sampled = endpoint.log[0].body, endpoint.log[1].body
    assert {**greedy, "messages": None} == {
        "model": "scripted",
        "messages": None,
        "max_tokens": 5,
        "temperature": 0.0,
        "top_k": 7,
        "chat_template_kwargs": {"thinking": False},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (sampled["temperature"], sampled["top_p"]) == (1.0, 0.95)
    _, endpoint = measure(effort=75, ignore_eos=True, extra_body={"temperature": None})
    body = endpoint.log[0].body
    assert body["chat_template_kwargs"] == {"thinking": True, "reasoning_effort": 75}
    assert body["ignore_eos"] is True
    assert "temperature" not in body


def test_a_task_is_the_same_in_every_run() -> None:
    for kind in KINDS:
        one, other = (prompt(kind, salt=salt, place=("greedy", 1, 0, 1, 0)) for salt in ("a", "b"))
        assert one[:12] != other[:12]
        assert one[12:] == other[12:]
        assert prompt(kind, salt="a", place=("greedy", 1, 0, 1, 1))[12:] != one[12:]


def test_text_is_real_and_comes_once() -> None:
    corpus = Corpus.of_interpreter()
    taken = [corpus.take(40_000) for _ in range(20)]
    assert all(abs(len(text) - 40_000) < 4 for text in taken)
    pieces = [piece for text in taken for piece in text.split("\n\n") if len(piece) > 400]
    assert len(set(pieces)) > 0.97 * len(pieces)
    assert corpus.num_passes == 0
    # Prose and code press to a third or so; one word over and over, to nothing.
    assert 0.15 < len(zlib.compress("".join(taken).encode())) / 800_000 < 0.5
    assert len(zlib.compress(filler(800_000).encode())) / 800_000 < 0.01
    assert not predictability(taken[0]).is_inflating
    assert predictability(filler(2000)).is_inflating


def test_text_that_runs_out_is_said(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"line {number} says something of its own" for number in range(200)))
    corpus = Corpus.of_file(path)
    corpus.take(9_000)
    assert corpus.num_passes >= 1
    result, _ = measure(parts=("prefill",), ladder=(1000, 4000), text=path)
    assert "text-reused" in {label.kind for label in result.all_labels()}
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="holds no text"):
        Corpus.of_file(tmp_path / "empty.txt")


def test_real_answers_are_not_called_predictable() -> None:
    records = [
        {"id": i, "name": f"n{i * 37 % 101}", "city": "abc"[i % 3], "price": i * i % 97} for i in range(40)
    ]
    table = "\n".join(f"| {i} | river {i * 7} | Austria | {1000 + i * 13} | long |" for i in range(40))
    code = Path(__file__).read_text()
    for text in (json.dumps(records, indent=2), table, code, "Yes.", ""):
        assert not predictability(text).is_inflating, text[:80]
    for text in ("!" * 500, ", ".join(map(str, range(1, 80))), "I think so too. " * 30):
        assert predictability(text).is_inflating, text[:80]
