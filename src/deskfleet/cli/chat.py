"""`deskfleet chat`: a conversation over HTTP. The answer goes to stdout, reasoning and prompts to stderr."""

from __future__ import annotations

import asyncio
import importlib
import sys
from contextlib import ExitStack, aclosing, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deskfleet.cli.flags import ENGINE, HOST, PORT, EngramPack, EngramSecondSource, Json, MaxModelLen
from deskfleet.cli.serve import serve_beside
from deskfleet.cli.terminal import print_json, printable, report_error, say, talk_console
from deskfleet.engine.client import EngineOptions
from deskfleet.errors import ConfigError, RequestError
from deskfleet.model.embedded import POCKET, locate

if TYPE_CHECKING:
    from deskfleet.client import Client, Reply


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("chat")(run)


def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|URL", help=f"A directory to serve, {POCKET}, or a server's address."
        ),
    ] = f"http://{HOST}:{PORT}",
    once: Annotated[
        str | None, typer.Option("--once", metavar="QUESTION", help="Ask this, print the answer, end.")
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="Ask for reasoning. [default: the server's]"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", help="Longest answer. [default: the server's]")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", metavar="X", help="0 is greedy. [default: the server's]")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Repeatable sampling.")] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="Ranks, when a CHECKPOINT is served. [default: 1]")
    ] = None,
    max_model_len: MaxModelLen = None,
    engram_pack: EngramPack = ENGINE.engram_pack,
    engram_second_source: EngramSecondSource = ENGINE.engram_second_source,
    as_json: Json = False,
) -> None:
    """Talk to a checkpoint or to a running server.

    One line is one turn; /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer. A
    CHECKPOINT is served for as long as the conversation lasts. With piped stdin, prompts are left out.
    """
    fields = _request_fields(thinking=thinking, max_tokens=max_tokens, temperature=temperature, seed=seed)
    with ExitStack() as stack:
        if target.startswith(("http://", "https://")):
            if tp is not None or max_model_len is not None:
                raise ConfigError(f"--tp and --max-model-len are decided by the server at {target}")
            if engram_pack is not None or engram_second_source:
                raise ConfigError(f"where Engram rows are read is decided by the server at {target}")
            url = target
        else:
            engine = EngineOptions(
                tp_size=ENGINE.tp_size if tp is None else tp,
                max_model_len=max_model_len,
                engram_pack=engram_pack,
                engram_second_source=engram_second_source,
            )
            url = serve_beside(stack, locate(target), engine)
        runner = stack.enter_context(asyncio.Runner())
        conversation = _Conversation(runner, url, fields, as_json=as_json)
        stack.callback(conversation.close)
        if once is not None:
            conversation.ask(once)
        else:
            conversation.converse()


def _request_fields(*, thinking: bool | None, **fields: Any) -> dict[str, Any]:
    """Return what goes into every request: only what was asked for, so that the server's defaults hold."""
    given = {name: value for name, value in fields.items() if value is not None}
    if thinking is not None:
        given["thinking"] = {"type": "enabled" if thinking else "disabled"}
    return given


class _Conversation:
    """Turns with one server. A turn that fails is forgotten, as if it had not been asked."""

    def __init__(self, runner: asyncio.Runner, url: str, fields: dict[str, Any], *, as_json: bool) -> None:
        from deskfleet.client import Client

        self._runner = runner
        self._fields = fields
        self._as_json = as_json
        self._messages: list[dict[str, str]] = []
        self._talk = talk_console()
        self._client: Client = runner.run(Client(url).__aenter__())
        self._model = runner.run(self._client.model_id())

    def close(self) -> None:
        """Hang up."""
        self._runner.run(self._client.__aexit__(None, None, None))

    def converse(self) -> None:
        """Take turns until the input ends or says /exit."""
        interactive = sys.stdin.isatty()
        if interactive:
            with suppress(ImportError):
                importlib.import_module("readline")  # gives input() its editing and history
            say(f"{self._model} at {self._client.url}. /reset forgets, /exit ends.")
        while (line := _read_line(interactive=interactive)) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                self._messages.clear()
                say("forgotten")
            elif line.startswith("/"):
                say(f"there is no {line.split()[0]}; there are /reset and /exit")
            elif line:
                self._turn(line, interactive=interactive)

    def _turn(self, question: str, *, interactive: bool) -> None:
        """Ask; a person may go on after a refused or interrupted turn, a pipe may not."""
        try:
            self.ask(question)
        except RequestError as error:
            if not interactive:
                raise
            report_error(error, as_json=False)
        except KeyboardInterrupt:
            if not interactive:
                raise
            say("\nstopped; this turn is forgotten")

    def ask(self, question: str) -> None:
        """Put one question, print the answer as it comes, and remember both."""
        asked = [*self._messages, {"role": "user", "content": question}]
        answer = self._runner.run(self._stream(asked))
        # The publisher's format drops earlier reasoning, so it is not sent back.
        self._messages = [*asked, {"role": "assistant", "content": answer.content}]
        if self._as_json:
            print_json(_as_object(answer))

    async def _stream(self, messages: list[dict[str, str]]) -> Reply:
        from deskfleet.client import Reply

        latest = None
        body = {"model": self._model, "messages": messages, **self._fields}
        async with aclosing(self._client.stream(body)) as stream:
            async for piece in stream:
                if isinstance(piece, Reply):
                    if not self._as_json:
                        self._end(latest)
                    return piece
                if not self._as_json:
                    self._show(piece.kind, piece.text, latest)
                latest = piece.kind
        raise AssertionError("the client raises when an answer does not end")

    def _show(self, kind: str, text: str, latest: str | None) -> None:
        if kind == "reasoning":
            self._talk.print(printable(text), style="dim", end="", soft_wrap=True)
            return
        if latest == "reasoning":
            self._talk.print("\n")
        print(printable(text), end="", flush=True)

    def _end(self, latest: str | None) -> None:
        """Finish the line: of the answer, or of the reasoning when there was no answer."""
        if latest == "reasoning":
            self._talk.print()
        print(flush=True)


def _read_line(*, interactive: bool) -> str | None:
    """Return the next line without its ends, or None when there are no more."""
    if not interactive:
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        if sys.stdout.isatty():
            return input("> ").strip()
        # input() would write its prompt to stdout, where only answers belong.
        print("> ", end="", file=sys.stderr, flush=True)
        return input().strip()
    except EOFError:
        say()
        return None


def _as_object(answer: Reply) -> dict[str, Any]:
    return {
        "content": answer.content,
        "reasoning_content": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_completion_tokens,
        "first_token_s": round(answer.first_token_s, 4),
        "total_s": round(answer.total_s, 4),
    }


__all__ = ["register", "run"]
