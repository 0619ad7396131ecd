"""The supervisor's process, as `deskfleet fleet serve` starts it: no verb, nobody types it.

    python -m deskfleet.cli.fleet.supervise --file FILE --launch ID --lock FD [--set KEY=VALUE ...] [--gate NAME ...]

SIGTERM stops the fleet in order, SIGHUP reads the gateway's settings and keys again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from deskfleet import env
from deskfleet.cli.serving import stop_on_signals
from deskfleet.cli.terminal import configure_log, report_error
from deskfleet.errors import DeskfleetError
from deskfleet.fleet.spec import read_source
from deskfleet.fleet.state import FleetState, say_holder
from deskfleet.fleet.up import GateChoice, digest_of
from deskfleet.gateway.loop import run_server, settle
from deskfleet.supervisor import Order, open_store, refuse, supervise


def main(words: Sequence[str]) -> int:
    """Be the supervisor of one launch; return the exit code."""
    parser = argparse.ArgumentParser(prog="deskfleet.cli.fleet.supervise")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--launch", required=True)
    parser.add_argument("--lock", type=int, required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--gate", action="append", default=[])
    parser.add_argument("--skip", action="append", default=[])
    parser.add_argument("--no-gates", action="store_true")
    asked = parser.parse_args(words)
    configure_log(env.read_environment(os.environ)[env.LOG_LEVEL.name])
    os.set_inheritable(asked.lock, False)
    say_holder(asked.lock, f"launch {asked.launch}")
    try:
        return run_server(_supervise(asked))
    except DeskfleetError as error:
        report_error(error, as_json=False)
        return error.exit_code


async def _supervise(asked: argparse.Namespace) -> int:
    source = read_source(asked.file, tuple(asked.set))
    state = FleetState(source.spec.name, os.environ)
    order = Order(
        source=source,
        launch_id=asked.launch,
        digest=digest_of(source.spec, asked.set),
        environ=dict(os.environ),
        gates=GateChoice(tuple(asked.gate), tuple(asked.skip), asked.no_gates),
    )
    lock = asked.lock

    def on_settled() -> None:
        nonlocal lock
        if lock >= 0:
            with contextlib.suppress(OSError):
                os.close(lock)
            lock = -1
            settle()

    with state.supervising():
        try:
            store = open_store(source.spec)
        except DeskfleetError as error:
            return refuse(order, state, error)
        stop: asyncio.Event = stop_on_signals(store)
        return await supervise(order, state, store, until=stop, on_settled=on_settled)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
