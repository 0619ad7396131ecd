"""Evaluation sets, requests for an endpoint, and the judgement of an answer.

Owns the sets. Knows no HTTP: a request is a Chat Completions body, an answer a text and tool calls, as the `message` of
a response has them. What "right" means is `deskfleet.evaluation.judgement`'s; `pocket.data.questions` writes the
sets down for it.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from PIL import Image

from deskfleet.evaluation.judgement import Expected, ExpectedCall, is_right
from pocket.data import arithmetic, count, facts, needle
from pocket.data.example import DRAWN, Example, Expect, Json, Message, draw, split_of
from pocket.data.stream import GENERATORS

EVAL_TASKS = (
    "count",
    "spell",
    "arithmetic",
    "primality",
    "needle",
    "tools",
    "json",
    "facts",
    "practice facts",
    "world",
    "vision",
    "chat",
)
"""Tasks with a known right answer."""


def eval_set(
    task: str, n: int, seed: int = 0, *, effort: int | None = DRAWN, max_tokens: int = 2048
) -> list[Example]:
    """Return `n` different examples of the evaluation split of `task`, always the same for a seed.

    `effort` fixes the effort (None: thinking off), DRAWN leaves it to chance. `max_tokens` bounds needles. Raises
    ValueError for a task without right answers, or when its split has fewer examples.
    """
    if task not in EVAL_TASKS:
        raise ValueError(f"task {task!r} has no right answers; known are {', '.join(EVAL_TASKS)}")
    return prompt_set(task, n, seed, effort=effort, max_tokens=max_tokens)


def prompt_set(
    task: str,
    n: int,
    seed: int = 0,
    *,
    effort: int | None = DRAWN,
    max_tokens: int = 2048,
    where: Callable[[Example], bool] = lambda example: True,
) -> list[Example]:
    """Return what `eval_set` returns, for tasks without right answers too, of those that `where` takes."""
    generate = partial(needle.generate, max_tokens=max_tokens) if task == "needle" else GENERATORS[task]
    rng = Random(f"pocket eval {task} {seed}")
    chosen: dict[str, Example] = {}
    for _ in range(1000 * n):
        if len(chosen) == n:
            return list(chosen.values())
        example = draw(generate, rng, "eval")
        if isinstance(example, Example) and effort in (DRAWN, example.effort) and where(example):
            chosen.setdefault(example.key, example)
    raise ValueError(f"{task} has only {len(chosen)} evaluation examples, not {n}")


def fact_set(book: facts.Book = "book") -> list[Example]:
    """Return one held-out question about every fact that has one, thinking off."""
    out = []
    for fact in facts.facts(book):
        asked = (facts.question(fact, ask.format(name=fact.name), None) for ask in fact.relation.asks)
        out += [example for example in asked if split_of(example) == "eval"][:1]
    return out


def needle_grid(
    lengths: Sequence[int],
    num_depths: int = 10,
    *,
    per_cell: int = 1,
    seed: int = 0,
    effort: int | None = None,
) -> dict[tuple[int, float], list[Example]]:
    """Return single needles of the evaluation split for every length in tokens and depth from 0 to 1."""
    grid = {}
    for length in lengths:
        for step in range(num_depths):
            depth = step / max(1, num_depths - 1)
            rng = Random(f"pocket needles {length} {step} {seed}")
            generate = partial(needle.example, num_tokens=length, depths=(depth,), effort=effort)
            cell = [draw(generate, rng, "eval") for _ in range(per_cell)]
            grid[length, depth] = [example for example in cell if isinstance(example, Example)]
    return grid


def launch_set() -> list[Example]:
    """Return the questions that a launch gate asks, thinking off. They are in training as they stand."""
    rng = Random("pocket launch")
    hundred = count.to_hundred(rng, prompt="Count to 100.", effort=None)
    sums = [arithmetic.example(*operands, "What is {sum}?", None) for operands in arithmetic.LAUNCH_QUESTIONS]
    return [hundred, *sums]


def chat_request(example: Example, *, whole: bool = False) -> Json:
    """Return the Chat Completions body that asks for the example's last message.

    `whole` keeps that message, for comparing renderings. Model and sampling are the caller's.
    """
    messages = example.messages if whole else example.messages[:-1]
    body: Json = {
        "messages": _chat_messages(messages),
        "thinking": {"type": "disabled" if example.effort is None else "enabled"},
    }
    if example.effort is not None:
        body["reasoning_effort"] = example.effort
    if example.tools:
        body["tools"] = [{"type": "function", "function": tool} for tool in example.tools]
    if example.response_schema is not None:
        schema = {"name": "answer", "schema": example.response_schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def judge(expect: Expect, content: str | None, tool_calls: Sequence[Json] | None = None) -> bool:
    """Return whether an answer is right. `tool_calls` have the protocol's form: arguments are JSON text."""
    return is_right(expected(expect), content, tool_calls)


def expected(expect: Expect) -> Expected:
    """Return an expectation as `deskfleet eval` keeps it."""
    calls = tuple(ExpectedCall(call.name, call.arguments) for call in expect.calls)
    return Expected(expect.kind, expect.text, calls, expect.value)


def _chat_messages(messages: Sequence[Message]) -> list[Json]:
    """Return messages in the protocol's form; a tool message answers the next call that has no answer yet."""
    out: list[Json] = []
    open_calls: list[str] = []
    for index, message in enumerate(messages):
        plain: Json = {"role": message.role, "content": message.content}
        if message.images:
            parts: list[Json] = [
                {"type": "image_url", "image_url": {"url": _data_url(i)}} for i in message.images
            ]
            plain["content"] = [*parts, {"type": "text", "text": message.content}]
        if message.reasoning is not None:
            plain["reasoning_content"] = message.reasoning
        if message.calls:
            open_calls = [f"call_{index}_{number}" for number in range(len(message.calls))]
            plain["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.arguments, ensure_ascii=False),
                    },
                }
                for call_id, call in zip(open_calls, message.calls, strict=True)
            ]
        if message.role == "tool":
            plain["tool_call_id"] = open_calls.pop(0)
        out.append(plain)
    return out


def _data_url(pixels: Any) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


__all__ = [
    "EVAL_TASKS",
    "chat_request",
    "eval_set",
    "expected",
    "fact_set",
    "judge",
    "launch_set",
    "needle_grid",
    "prompt_set",
]
