"""The command itself: which verbs there are, how errors leave, what the exit code is.

Importing this costs typer and nothing else of weight: a verb's module is imported when the verb is used, so
`deskfleet --help` answers at once. Exit codes are those of `deskfleet.errors`, plus 0, 130 (Ctrl-C)
and 143 (SIGTERM); `serve` and `demo` end with 0 after either, which is how they are meant to be stopped.

With --json an error is also one JSON object on stdout, `{"error": {"type", "message", "hint", "exit_code"}}`,
so that a program reads one stream; people get the same on stderr either way.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from deskfleet import __version__, env
from deskfleet.cli import terminal
from deskfleet.errors import ConfigError, DeskfleetError

VERBS = {
    "serve": "Serve a checkpoint on an OpenAI-compatible endpoint.",
    "keys": "Make, list and revoke the keys of a server.",
    "gateway": "Serve what vLLM or SGLang servers run already.",
    "rank": "Be one rank of the engine, for a supervisor elsewhere.",
    "chat": "Talk to a checkpoint or to a running server.",
    "inspect": "Say what a checkpoint or a pack holds, and what is wrong.",
    "plan": "Say what fits on which machines, before anything starts.",
    "pack": "Pack a checkpoint's Engram rows into files with checksums.",
    "score": "Write the logits of every position of a token sequence.",
    "selfcheck": "Check that answers do not depend on how they are made.",
    "make-tiny": "Make a small random checkpoint in the published format.",
    "demo": "Serve a small checkpoint, ask one question, and stay up.",
    "eval": "Ask questions with known answers, and say how many are right.",
    "smoke": "Ask the launch gates, in seconds: may traffic open?",
    "verify": "Ask the acceptance gates: is this set-up good?",
    "bench": "Measure, and keep the numbers with their provenance.",
    "profile": "Say where the time of a step went, rank by rank.",
    "diagnose": "Say why a server is garbled, slow, hanging or out of memory.",
    "facts": "Say what an engine was asked for, and what it granted.",
    "fleet": "Run a model across machines, from addresses to one endpoint.",
}
"""Each verb and its line in `deskfleet --help`, the first line of its own help."""

PACKAGES = ("fleet",)
"""Verbs with verbs of their own in modules of their own, of which again only the one that is used is imported."""

CONTEXT = {"max_content_width": 100, "help_option_names": ["--help", "-h"]}

_INTERRUPTED = 130
_TERMINATED = 143


class _Terminated(BaseException):
    """SIGTERM has come. Like KeyboardInterrupt: whatever is open is closed on the way out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (by default the process's own) and return its exit code."""
    if argv is None:
        signal.signal(signal.SIGTERM, _terminate)
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    as_json = "--json" in words
    try:
        terminal.configure_log(env.read_environment(os.environ)[env.LOG_LEVEL.name])
        result = _build(words)(args=words, prog_name="deskfleet", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except DeskfleetError as error:
        terminal.report_error(error, as_json=as_json)
        return error.exit_code
    except typer.Abort:
        return _INTERRUPTED
    except typer.TyperException as error:
        usage = _describe_usage_error(error)
        terminal.report_error(usage, as_json=as_json)
        return usage.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except _Terminated:
        return _TERMINATED
    except (BrokenPipeError, SystemExit):
        # Whoever read our output has seen enough; typer turns that into an exit. Python would complain once more
        # when it flushes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _terminate(number: int, frame: object) -> None:
    raise _Terminated


def _build(words: Sequence[str]) -> typer.Typer:
    """Return the application with the verb that `words` names loaded, and only the lines of the others."""
    app = typer.Typer(
        name="deskfleet",
        help="Serve DeepSeek-V4.1-Flash and DeepSeek-V4-Flash from the machines on your desk.",
        epilog="Results go to stdout, everything else to stderr. Each verb has --help and --json.",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=CONTEXT,
    )
    app.callback()(_global_flags)
    wanted = next((word for word in words if not word.startswith("-")), None)
    for verb, summary in VERBS.items():
        if verb == wanted:
            module = importlib.import_module(f"deskfleet.cli.{verb.replace('-', '_')}")
            if verb in PACKAGES:
                module.register(app, words)
            else:
                module.register(app)
        else:
            app.command(verb, help=summary)(_not_loaded)
    return app


def _not_loaded() -> None:
    raise AssertionError("only the verb on the command line is called, and that one is loaded")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"deskfleet {__version__}")
        raise typer.Exit


def _global_flags(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _describe_usage_error(error: typer.TyperException) -> ConfigError:
    """Turn the parser's error into one of ours: what is wrong, and the nearest name or where names are listed."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "deskfleet"
    nearest = next(iter(getattr(error, "possibilities", None) or ()), None)
    full = str(error) if nearest or not hasattr(error, "format_message") else error.format_message()
    message, _, suggestion = full.partition(" Did you mean ")
    if nearest:
        hint = f"did you mean {nearest}?"
    else:
        hint = f"did you mean {suggestion}" if suggestion else f"see {command} --help"
    return ConfigError(f"{message[:1].lower()}{message[1:]}".rstrip("."), hint=hint)


__all__ = ["CONTEXT", "VERBS", "main"]
