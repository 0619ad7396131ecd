"""`deskfleet demo`: from nothing to an answer. Prints the question, the answer and its numbers."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deskfleet.cli.flags import (
    ENGINE,
    PORT,
    EngramPack,
    EngramSecondSource,
    Json,
    Port,
    Speculate,
    TensorParallel,
)
from deskfleet.cli.serve import how_to_talk, ready_object
from deskfleet.cli.terminal import print_json, printable, say
from deskfleet.engine.client import EngineOptions
from deskfleet.errors import DeskfleetError
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.model.embedded import POCKET, embedded_name, locate

if TYPE_CHECKING:
    from deskfleet.serve import Ready, ServeEvent, ServeOptions
    from deskfleet.testing.first_answer import FirstAnswer


_SPECULATION = "5"


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("demo")(run)


def run(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help=f"{POCKET}, or a directory; a tiny one is made there if absent."
        ),
    ] = Path(POCKET),
    tp: TensorParallel = 2,
    port: Port = PORT,
    question: Annotated[
        str, typer.Option("--question", metavar="TEXT", help="What to ask.")
    ] = "What is the capital of Portugal?",
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="Longest answer.")] = 48,
    once: Annotated[bool, typer.Option("--once", help="Stop after the answer.")] = False,
    speculate: Speculate = _SPECULATION,
    engram_pack: EngramPack = ENGINE.engram_pack,
    engram_second_source: EngramSecondSource = ENGINE.engram_second_source,
    as_json: Json = False,
) -> None:
    """Serve a small checkpoint, ask one question, and stay up.

    Two ranks on this machine's CPU, drafts ahead, one question through the openai client. If the port is taken, a
    free one is used instead. Ctrl-C stops it: exit code 0.
    """
    from deskfleet.cli.loading import LoadReport
    from deskfleet.serve import ServeOptions, check_port, default_model_id
    from deskfleet.testing.tiny_once import ensure_tiny

    directory = locate(checkpoint)
    if embedded_name(directory) is None:
        if not directory.exists():
            say(f"making a tiny checkpoint with random weights in {directory}")
        ensure_tiny(directory)
    settings = GatewaySettings(model_id=default_model_id(directory), checkpoint=directory, port=port)
    try:
        check_port(settings.host, settings.port)
    except DeskfleetError as error:
        say(f"{error.message}; using a free one instead")
        settings = dataclasses.replace(settings, port=0)
    engine = EngineOptions(
        tp_size=tp,
        speculation=speculate,
        engram_pack=engram_pack,
        engram_second_source=engram_second_source,
    )
    options = ServeOptions(gateway=settings, engine=engine)
    with LoadReport(shows_memory=True) as report:
        demo = _Demo(
            report.show,
            question,
            is_tiny=embedded_name(directory) is None,
            max_tokens=max_tokens,
            once=once,
            as_json=as_json,
        )
        asyncio.run(demo.run(options))
    say("stopped")


class _Demo:
    """A server, and one question put to it as soon as it is ready."""

    def __init__(
        self, show: Any, question: str, *, is_tiny: bool, max_tokens: int, once: bool, as_json: bool
    ) -> None:
        self._show = show
        self._is_tiny = is_tiny
        self._question = question
        self._max_tokens = max_tokens
        self._once = once
        self._as_json = as_json
        self._stop = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None

    async def run(self, options: ServeOptions) -> None:
        """Serve until a signal, or until the answer with `once`. Raises what serving or asking raises."""
        from deskfleet.serve import serve

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        try:
            await serve(options, on_event=self._on_event, until=self._stop)
        finally:
            if self._asking is not None:
                self._asking.cancel()
        if self._asking is not None and self._asking.done() and not self._asking.cancelled():
            await self._asking

    def _on_event(self, event: ServeEvent) -> None:
        from deskfleet.serve import Ready

        self._show(event)
        if isinstance(event, Ready):
            self._asking = asyncio.ensure_future(self._ask(event))
            self._asking.add_done_callback(self._on_asked)

    def _on_asked(self, asking: asyncio.Task[None]) -> None:
        if not asking.cancelled() and (self._once or asking.exception() is not None):
            self._stop.set()

    async def _ask(self, ready: Ready) -> None:
        from deskfleet.testing.first_answer import first_answer

        answer = await first_answer(ready.endpoint, self._question, max_tokens=self._max_tokens)
        if self._as_json:
            print_json({**ready_object(ready), "question": self._question, "answer": _as_object(answer)})
        else:
            print(_in_words(self._question, answer), flush=True)
        say()
        if self._is_tiny:
            say("The weights that make-tiny writes are random: the words of such a checkpoint mean nothing.")
        if not self._once:
            say(f"{ready.endpoint.model_id} stays up at {ready.endpoint.url}/v1 until Ctrl-C. Talk to it:")
            say(how_to_talk(ready))


def _as_object(answer: FirstAnswer) -> dict[str, Any]:
    return dataclasses.asdict(answer) | {"tok_s": answer.tok_s}


def _in_words(question: str, answer: FirstAnswer) -> str:
    rate = f", {answer.tok_s:.1f} tok/s" if answer.tok_s is not None else ""
    return (
        f"question: {question}\n"
        f"answer:   {printable(answer.content)}\n"
        f"tokens:   {answer.num_prompt_tokens} in the prompt, {answer.num_completion_tokens} in the answer "
        f"({answer.finish_reason}){rate}"
    )


__all__ = ["register", "run"]
