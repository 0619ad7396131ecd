"""What verbs that serve have in common: settings and keys from files, and the signals that stop or reload.

SIGINT and SIGTERM stop: requests that run may finish, a second one ends them. SIGHUP reads settings and keys again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deskfleet.cli.terminal import say

if TYPE_CHECKING:  # the gateway is imported when it is started: --help needs none of it
    from deskfleet.gateway.observation import ObservationSettings
    from deskfleet.gateway.policy_file import PolicyStore

PoliciesFile = Annotated[
    Path | None,
    typer.Option(
        "--policies", metavar="FILE", help="Settings of limits and policies, TOML; read again on SIGHUP."
    ),
]
KeysFile = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FILE", help="Keys that are let in, as deskfleet keys makes them."),
]
AccessLogFile = Annotated[
    str | None,
    typer.Option(
        "--access-log", metavar="FILE", help="One JSON object per request; - is stderr. [default: none]"
    ),
]
TracesUrl = Annotated[
    str | None,
    typer.Option("--traces", metavar="URL", help="OpenTelemetry collector (OTLP over HTTP). [default: none]"),
]

DebugAnswers = Annotated[
    int,
    typer.Option(
        "--debug-answers",
        metavar="N",
        min=0,
        max=1000,
        help="Keep the last N answers as the model wrote them, for GET /debug/answers.",
    ),
]


def open_policies(policies: Path | None, keys: Path | None, *, model_id: str) -> PolicyStore | None:
    """Read both files, None where there are none. Raises ConfigError with everything that is wrong in a file."""
    from deskfleet.gateway.policy_file import PolicyStore

    if policies is None and keys is None:
        return None
    return PolicyStore(path=policies, keys_path=keys, model_ids=[model_id])


def warn_if_open(host: str, store: PolicyStore | None) -> None:
    """Say so when a server without keys can be reached from other machines."""
    if (store is None or store.ring() is None) and not is_loopback(host):
        say(f"warning: whoever reaches {host} may use this server; deskfleet keys new NAME makes a key")


def observed(access_log: str | None, traces: str | None) -> ObservationSettings:
    """Return what is watched, logged and shown. The log is opened when serving begins."""
    from deskfleet.gateway.observation import ObservationSettings

    return ObservationSettings(access_log=access_log, traces=traces)


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine only, as far as its spelling tells."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def stop_on_signals(store: PolicyStore | None) -> asyncio.Event:
    """Return what is set when the server shall stop. A second signal cancels the task that calls this."""
    stop = asyncio.Event()
    loop, serving = asyncio.get_running_loop(), asyncio.current_task()

    def on_stop() -> None:
        if stop.is_set() and serving is not None:
            serving.cancel()
        stop.set()

    def on_reload() -> None:
        problems = () if store is None else store.reload()
        for problem in problems:
            say(f"reload: {problem}")
        if store is not None and not problems:
            say("reload: settings and keys were read again")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_stop)
    loop.add_signal_handler(signal.SIGHUP, on_reload)
    return stop


__all__ = [
    "AccessLogFile",
    "DebugAnswers",
    "KeysFile",
    "PoliciesFile",
    "TracesUrl",
    "is_loopback",
    "observed",
    "open_policies",
    "stop_on_signals",
    "warn_if_open",
]
