"""`deskfleet diagnose`: walks the ladder, shows every rung, names the cause and the next command."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Annotated, get_args

import typer

from deskfleet.cli.facts import read_logs
from deskfleet.cli.flags import Json
from deskfleet.cli.terminal import print_json
from deskfleet.diagnose.finding import Symptom
from deskfleet.diagnose.rungs import ALL, RUNGS


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("diagnose")(run)


def run(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="The server. Without one, logs and this machine only.")
    ] = None,
    logs: Annotated[
        list[Path] | None,
        typer.Option("--logs", metavar="FILE", help="An engine's log; give it again for each rank."),
    ] = None,
    kernel_log: Annotated[
        Path | None,
        typer.Option("--kernel-log", metavar="FILE", help="What `dmesg -T` says on the server's machine."),
    ] = None,
    symptom: Annotated[
        str,
        typer.Option("--symptom", metavar="S,S", help=f"Only what explains {', '.join(get_args(Symptom))}."),
    ] = ",".join(ALL),
    key_file: Annotated[
        Path | None, typer.Option("--key-file", metavar="FILE", help="File with the server's API key.")
    ] = None,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", help="How long counters are watched.")
    ] = 3.0,
    patience: Annotated[
        float, typer.Option("--patience", metavar="SECONDS", help="How long a question may take.")
    ] = 30.0,
    as_json: Json = False,
) -> int:
    """Say why a server is garbled, slow, hanging or out of memory.

    Walks an ordered ladder over facts it can gather: the endpoint, a few questions, logs, this machine. Changes
    nothing. Exit code 1 when a cause was found.
    """
    from deskfleet.diagnose.gather import gather
    from deskfleet.diagnose.ladder import walk

    texts = read_logs(logs or [])
    kernel = None if kernel_log is None else read_logs([kernel_log])[str(kernel_log)]
    key = None if key_file is None else read_logs([key_file])[str(key_file)].strip()
    situation = asyncio.run(
        gather(url, logs=texts, kernel_log=kernel, key=key, over_s=wait, answer_s=patience)
    )
    diagnosis = walk(situation, tuple(symptom.split(",")))  # type: ignore[arg-type]  # checked there
    cause = diagnosis.cause
    if as_json:
        print_json(
            {
                "cause": None if cause is None else dataclasses.asdict(cause),
                "next_command": diagnosis.next_command,
                "findings": [dataclasses.asdict(finding) for finding in diagnosis.findings],
            }
        )
        return 0 if cause is None else 1
    questions = {rung.name: rung.question for rung in RUNGS}
    marks = {"found": "!!", "clear": "ok", "unknown": " ?"}
    for finding in diagnosis.findings:
        print(f"{marks[finding.verdict]}  {finding.rung}: {questions[finding.rung]} {finding.text}")
    print()
    print(f"cause: {cause.rung}: {cause.text}" if cause else "no cause was found in what could be gathered")
    if diagnosis.next_command is not None:
        print(f"next: {diagnosis.next_command}")
    return 0 if cause is None else 1


__all__ = ["register", "run"]
