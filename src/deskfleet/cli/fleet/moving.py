"""How bytes on their way look, node by node, and what would move them: for `fleet pull`, `share` and `pack`.

A bar for each node on a terminal; elsewhere a line on stderr now and then.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from deskfleet.cli.terminal import print_json, printable, say, talk_console
from deskfleet.units import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LINE_EVERY_S = 10.0


class Moving:
    """Shows progress of several nodes. `with Moving() as moving: ... moving.on_event(node, event)`."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        console = talk_console()
        self._bars: dict[str, TaskID] = {}
        self._said_s: dict[str, float] = {}
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[how_far]}"),
                console=console,
            )

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if error is not None and not isinstance(error, Exception):  # Ctrl-C and SIGTERM
            say("interrupted: what has come stays, and the same command goes on from there")

    def on_event(self, node: str, event: dict[str, Any]) -> None:
        """Show an event of a program on a node: its progress, and notes. Others are nothing to show."""
        if event["event"] == "note":
            self.note(node, str(event["text"]))
        elif event["event"] == "progress":
            files = f"{event['done_files']} of {event['total_files']} files" if "total_files" in event else ""
            self.show(
                node,
                str(event.get("doing", "")),
                event["done_bytes"],
                event["total_bytes"],
                event["rate_bytes_s"],
                event["eta_s"],
                files,
            )

    def note(self, node: str, text: str) -> None:
        """Say something about a node, above the bars."""
        line = printable(f"{node}: {text}")
        if self._progress is not None:
            self._progress.console.print(line)
        else:
            say(line)

    def show(
        self,
        node: str,
        doing: str,
        done_bytes: int,
        total_bytes: int,
        rate_bytes_s: float,
        eta_s: float | None,
        more: str = "",
    ) -> None:
        """Show how far a node is."""
        left = "" if eta_s is None or done_bytes >= total_bytes else f", {duration(eta_s)} left"
        parts = [f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}", *filter(None, [more])]
        how_far = f"{', '.join(parts)}, {format_bytes(int(rate_bytes_s))}/s{left}"
        what = printable(f"{node}: {doing}".rstrip(": "))
        if self._progress is not None:
            if node not in self._bars:
                self._bars[node] = self._progress.add_task(what, total=None, how_far="")
            self._progress.update(
                self._bars[node], description=what, completed=done_bytes, total=total_bytes, how_far=how_far
            )
        elif time.monotonic() - self._said_s.get(node, -_LINE_EVERY_S) >= _LINE_EVERY_S:
            self._said_s[node] = time.monotonic()
            say(f"{what}, {how_far}")


def print_shown(shown: Mapping[str, Any], *, as_json: bool) -> None:
    """Print one thing that --dry-run shows: a program or a script on a node, and for `share` which step it is."""
    from deskfleet.fleet.program import shell_lines

    if as_json:
        print_json(dict(shown))
        return
    heading = ": ".join(str(shown[key]) for key in ("node", "step") if key in shown)
    print(f"# {heading}\n{shell_lines(shown) if 'program' in shown else _script_lines(shown)}")


def _script_lines(shown: Mapping[str, Any]) -> str:
    words = shlex.join(["bash", "-s", "--", *shown["arguments"]])
    return f"{words} <<'EOF'\n{shown['script']}EOF"


def duration(seconds_s: float) -> str:
    """Spell a duration as `2:05` or `1:02:05`."""
    minutes, seconds = divmod(round(seconds_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


__all__ = ["Moving", "duration", "print_shown"]
