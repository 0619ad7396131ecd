"""Python that runs on a node where nothing of ours is installed: some of our modules as one text, there for a moment.

The modules that travel use the standard library and each other, and work from Python 3.10 on. Owns how the text is
put together and how a program's events are read; knows nothing of what programs do.
"""

from __future__ import annotations

import json
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from deskfleet import errors
from deskfleet.errors import DeskfleetError
from deskfleet.fleet.remote import Remote, RemoteFailed

_TRAVELLING = (
    "deskfleet.errors",
    "deskfleet.units",
    "deskfleet.fleet.origin",
    "deskfleet.fleet.transfer",
    "deskfleet.fleet.fetch",
)
_LOADER = """\
import os, signal, sys, types
os.unlink(__file__)
# In a container this is process 1, which the kernel ends by no signal that it does not handle.
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
def load(name, lines):
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile("\\n".join(lines), f"<{name}>", "exec"), module.__dict__)
for package in ("deskfleet", "deskfleet.fleet"):
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = []
"""


@dataclass(frozen=True, slots=True)
class Program:
    """`main` of the module of that name, with `arguments`, working in `directory` (made if absent).

    `image`, with its `mounts`: where there may be a Python when the node has none. `secret` is a name and a value
    that the program finds in its environment; the value is in its text alone, a file of mode 0600 that is gone when
    it runs, and never in argv. `package` is imported, `reads` another directory that is read.
    """

    module: str
    arguments: tuple[str, ...]
    directory: str
    image: str | None
    mounts: tuple[str, ...] = ()
    secret: tuple[str, str] | None = field(default=None, repr=False)
    package: str | None = None
    reads: str | None = None

    def text(self) -> str:
        """Return what is put on the node."""
        parts = [_LOADER]
        if self.secret is not None:
            parts.append(f"os.environ[{self.secret[0]!r}] = {self.secret[1]!r}\n")
        # Only what the program needs: a module may import a package that this node has not.
        for name in dict.fromkeys((*_TRAVELLING, self.module)):
            package, _, module = name.rpartition(".")
            text = (resources.files(package) / f"{module}.py").read_text(encoding="utf-8")
            lines = ",\n".join(map(repr, text.splitlines()))
            parts.append(f"load({name!r}, [\n{lines},\n])\n")
        parts.append(f"sys.exit(sys.modules[{self.module!r}].main(sys.argv))\n")
        return "".join(parts)

    def words(self, *, is_local: bool, path: str) -> tuple[str, ...]:
        """Return the arguments of the script `python.sh`, with the program at `path`."""
        # On this machine there is an interpreter for certain: the one that runs us.
        first = sys.executable if is_local else ""
        return (
            first,
            self.image or "",
            self.directory,
            path,
            self.package or "",
            self.reads or "",
            "\n".join(self.mounts),
            *self.arguments,
        )

    def path(self) -> str:
        """Return a name for the program's file that no other run of it has."""
        return f"{self.directory}/.deskfleet-program-{secrets.token_hex(8)}.py"

    def shown(self, remote: Remote) -> dict[str, Any]:
        """Return what would run on a node. For --dry-run, which gives a placeholder in place of the secret's value."""
        path = f"{self.directory}/.deskfleet-program-XXXXXXXXXXXXXXXX.py"
        return {
            "argv": list(remote.command()),
            "script": read_script("python.sh"),
            "arguments": list(self.words(is_local=remote.is_local, path=path)),
            "program": self.text(),
            "program_path": path,
        }


def read_script(name: str) -> str:
    """Return the text of one of the scripts beside this module."""
    return (resources.files("deskfleet.fleet") / "scripts" / name).read_text(encoding="utf-8")


def shell_lines(shown: Mapping[str, Any]) -> str:
    """Spell what `Program.shown` gives for people: the command line, and what goes to its stdin."""
    program = str(shown["program"])
    what = f"# the program, {len(program.splitlines())} lines, goes to {shown['program_path']} first; --json shows it"
    words = shlex.join(["bash", "-s", "--", *shown["arguments"]])
    return f"{what}\n{words} <<'EOF'\n{shown['script']}EOF"


async def follow(
    remote: Remote, program: Program, on_event: Callable[[str, dict[str, Any]], None]
) -> dict[str, Any]:
    """Run a program on a node, pass on its events, and return its result: what its event "done" holds.

    Raises the error that its event "error" tells, with the node's name before it; RemoteFailed for a program that
    ended without either, with its last words; NodeUnreachable.
    """
    node = remote.node.name
    path = program.path()
    await remote.put(program.text().encode(), path)
    words: list[str] = []
    lines = remote.stream(read_script("python.sh"), *program.words(is_local=remote.is_local, path=path))
    async with aclosing(lines):
        async for line in lines:
            event = parse_event(line)
            if event is None:
                words = [*words[-4:], line.strip()]
            elif event["event"] == "error":
                raise error_of(event, node)
            elif event["event"] == "done":
                return event
            else:
                on_event(node, event)
    raise RemoteFailed(
        node,
        "the program ended before it was done",
        "; ".join(filter(None, words)) or "it said nothing",
        hint="run the same command again: it goes on from where it stopped",
    )


def parse_event(line: str) -> dict[str, Any] | None:
    """Return the event in a line; None for a line of something else."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def error_of(event: Mapping[str, Any], node: str) -> DeskfleetError:
    """Return the error that a program told, as one of ours."""
    kind = getattr(errors, str(event.get("type")), None)
    ours = kind if isinstance(kind, type) and issubclass(kind, DeskfleetError) else DeskfleetError
    return ours(f"{node}: {event.get('message')}", hint=event.get("hint"))


__all__ = ["Program", "error_of", "follow", "parse_event", "read_script", "shell_lines"]
