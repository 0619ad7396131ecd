"""`deskfleet fleet watch`: the fleet's events as they come, and how it is; Ctrl-C leaves and changes nothing."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import typer

from deskfleet.cli.fleet import FLEET_FILE, FleetFile, Json, Overrides, open_fleet
from deskfleet.cli.terminal import data_console, print_json, printable, say
from deskfleet.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deskfleet.fleet.watch import News, Watcher

_EVERY_S = 0.25
_KEPT = 500
_HEAD_LINES = 4


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("watch")(run)


def run(file: FleetFile = FLEET_FILE, overrides: Overrides = None, as_json: Json = False) -> None:
    """Follow the fleet's events.

    Reads what the supervisor on this machine has written; no node is asked. When there is a new launch, it goes on with
    that. On a terminal the screen shows how the fleet is above its last events; elsewhere each event is a line, with
    --json an object, and another with "event": "watch" when launch, phase or supervisor change. Ctrl-C leaves, and the
    fleet runs on. Exit code 2 when nothing was ever launched from here.
    """
    from deskfleet.fleet.state import FleetState
    from deskfleet.fleet.watch import Watcher

    spec = open_fleet(file, overrides).spec
    state = FleetState(spec.name, os.environ)
    if state.record() is None:
        raise ConfigError(
            f"nothing is known of fleet {spec.name} on this machine",
            hint="deskfleet fleet serve starts it; watch where it was started, as the same user",
        )
    watcher = Watcher(state)
    try:
        if as_json:
            _follow_json(watcher)
        elif data_console().is_terminal:
            _follow_live(watcher, spec.name)
        else:
            _follow_lines(watcher, spec.name)
    except KeyboardInterrupt:
        if not as_json:
            say("left; the fleet is as it was")


def _follow_json(watcher: Watcher) -> None:
    while True:
        news = watcher.look()
        for event in news.events:
            print_json(event)
        if news.is_changed and news.record is not None:
            print_json(
                {
                    "event": "watch",
                    "launch_id": news.record.launch_id,
                    "phase": news.record.phase,
                    "closed": news.record.closed,
                    "supervisor": news.supervisor,
                    "url": news.record.url,
                    "reason": news.record.reason,
                }
            )
        time.sleep(_EVERY_S)


def _follow_lines(watcher: Watcher, fleet: str) -> None:
    while True:
        news = watcher.look()
        for event in news.events:
            print(spell_event(event), flush=True)
        if news.is_changed:
            print("\n".join(status_lines(news, fleet)[:1]), flush=True)
        time.sleep(_EVERY_S)


def _follow_live(watcher: Watcher, fleet: str) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    console = data_console()
    events: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    def shown(news: News) -> RenderableType:
        room = max(console.size.height - _HEAD_LINES - 1, 1)
        lines = [Text(line, overflow="ellipsis", no_wrap=True) for line in status_lines(news, fleet)]
        lines[0].stylize("bold")
        last = list(events)[-room:]
        return Group(*lines, *(Text(spell_event(event), overflow="ellipsis", no_wrap=True) for event in last))

    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            news = watcher.look()
            events.extend(news.events)
            live.update(shown(news), refresh=True)
            time.sleep(_EVERY_S)


def status_lines(news: News, fleet: str) -> list[str]:
    """Return how the fleet is, in `_HEAD_LINES` lines at most, the last empty."""
    from deskfleet.fleet.state import ENDS
    from deskfleet.fleet.watch import spell_due

    record = news.record
    if record is None:
        return [f"{fleet}: nothing was launched", ""]
    if news.supervisor is None and record.phase not in ENDS:
        how = f"its supervisor is gone; it was {record.phase}. See deskfleet fleet status"
    elif record.closed is not None:
        how = f"{record.phase}, and nobody is let in"
    elif record.phase == "waiting":
        how = f"waiting; {spell_due(record)}"
    else:
        how = record.phase
    lines = [f"{fleet}: {how}", f"launch {record.launch_id}, since {record.changed_at}"]
    why = record.closed or record.reason
    if record.url is not None and record.phase == "serving" and why is None:
        lines.append(f"endpoint {record.url}")
    elif why:
        lines.append(printable(why).splitlines()[0])
    return [*lines, ""]


def spell_event(event: dict[str, Any]) -> str:
    """Return an event as one line: when, what, and everything else that it holds."""
    words = [str(event.get("at", ""))[11:19], str(event.get("event", "?"))]
    words += [
        f"{name}={_spell(value)}"
        for name, value in event.items()
        if name not in ("at", "event", "launch_id") and value is not None
    ]
    return printable("  ".join(words)).replace("\n", " ")


def _spell(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"{len(value)}, see --json"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


__all__ = ["register", "run", "spell_event", "status_lines"]
