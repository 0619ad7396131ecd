"""A server that knows the answers of `deskfleet eval`, or fails in ways that a test wants, in a thread of its own."""

from __future__ import annotations

import asyncio
import base64
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from deskfleet.endpoint import EngineStats, GenerateRequest
from deskfleet.evaluation.questions import TASKS, Question, questions
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.testing.scripted import Script, ScriptedEngine, running_gateway
from pocket.data.ask import as_example
from pocket.data.render import Renderer
from pocket.data.stream import VISION
from pocket.restore import pocket_tokenizer
from pocket.tokenizer import EOS, load_tokenizer
from tests.evaluation.test_evaluate import said

_EFFORT = re.compile(r"Reasoning Effort: (\d+) \(range[^\n]*\n\n")
_SYSTEM_ALONE = re.compile(r"<｜System｜>(?=<｜User｜>)")


class Knowing(ScriptedEngine):
    """Answers by what is asked. `wrong` are tasks answered with nonsense, `thoughts(effort)` lines of reasoning.

    With `tokens_at_once` above one it claims that all but one of them were drafts; `valid_but_wrong` changes values of
    objects and keeps their types.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        wrong: tuple[str, ...] = (),
        thoughts: Callable[[int], int] = lambda effort: effort // 10,
        delay_s: float = 0.0,
        tokens_at_once: int = 1,
        valid_but_wrong: bool = False,
    ) -> None:
        super().__init__(self._script_of, max_model_len=8192)
        self._wrong, self._thoughts, self._delay_s, self._at_once = wrong, thoughts, delay_s, tokens_at_once
        self._valid_but_wrong = valid_but_wrong
        self._num_steps_told = self._num_accepted = 0

    def _script_of(self, request: GenerateRequest) -> Script:
        prompt = pocket_tokenizer().decode(list(request.prompt_token_ids), skip_special_tokens=False)
        effort = _EFFORT.search(prompt)
        question = _known()[_without_effort(prompt), tuple(image.data for image in request.images)]
        text = "nonsense" if question.task in self._wrong else said(self._changed(question))
        if effort is not None:
            text = "I think.\n" * self._thoughts(int(effort[1])) + "</think>" + text
        ids = pocket_tokenizer().encode(text + EOS, add_special_tokens=False).ids
        self._num_steps_told += -(-len(ids) // self._at_once)
        self._num_accepted += (self._at_once - 1) * -(-len(ids) // self._at_once)
        return Script(tuple(ids), chunk_sizes=(self._at_once,), delay_s=self._delay_s)

    def _changed(self, question: Question) -> Question:
        if not self._valid_but_wrong or question.expected.kind != "json":
            return question
        value = {name: _other(each) for name, each in question.expected.value.items()}
        return replace(question, expected=replace(question.expected, value=value))

    async def stats(self) -> EngineStats:
        """Counters, those of drafts included."""
        steps = self._num_steps_told
        drafted = 5 * steps if self._at_once > 1 else 0
        return replace(
            await super().stats(),
            num_verify_steps=steps,
            num_drafted=drafted,
            num_accepted=self._num_accepted,
        )


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else value


def _without_effort(prompt: str) -> str:
    """The prompt as it is without thinking."""
    plain = _SYSTEM_ALONE.sub("", _EFFORT.sub("", prompt))
    return plain.removesuffix("<think>").removesuffix("</think>")


@cache
def _known() -> dict[tuple[str, tuple[bytes, ...]], Question]:
    renderer, found = Renderer(load_tokenizer(), VISION), {}
    for task in TASKS:
        for thinking in (False, True):
            count = 20 if task in ("needle", "needles") else 1000
            for question in questions(task, thinking=thinking, count=count, needle_tokens=(512,)):
                ids = renderer.render_prompt(as_example(question, 50 if thinking else None))
                found[_without_effort(load_tokenizer().decode(ids)), _images(question)] = question
    return found


def _images(question: Question) -> tuple[bytes, ...]:
    contents = [message["content"] for message in question.request["messages"]]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return tuple(base64.b64decode(url.partition(",")[2]) for url in urls)


class ServedThread:
    """A gateway in front of an engine, served from another thread: `with ServedThread(engine, checkpoint) as url`."""

    def __init__(self, engine: ScriptedEngine, checkpoint: Path) -> None:
        self._engine, self._settings = (
            engine,
            GatewaySettings(model_id="pocket", checkpoint=checkpoint, port=0),
        )
        self._ready, self._url = threading.Event(), ""
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> str:
        self._thread.start()
        assert self._ready.wait(20)
        return self._url

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        async with running_gateway(self._engine, self._settings) as url:
            self._url = url
            self._ready.set()
            await self._stop.wait()


__all__ = ["Knowing", "ServedThread"]
