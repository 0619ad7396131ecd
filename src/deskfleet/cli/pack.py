"""`deskfleet pack`: progress while packing, what was packed, and how to go on after an interruption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from deskfleet.cli.flags import CheckpointArgument, Json
from deskfleet.cli.terminal import parse_counts, print_json, say, talk_console
from deskfleet.errors import ConfigError
from deskfleet.model.packs import PackJob, as_deskfleet_errors
from deskfleet.planner.wishes import EngineName
from deskfleet.units import format_bytes, parse_bytes
from deskfleet_engram.pack import PackProgress, PackReport, is_unfinished
from deskfleet_engram.verify import Level, VerifyProgress, VerifyReport

if TYPE_CHECKING:
    from rich.progress import Progress

_VERDICT_NO = 1


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("pack")(run)


def run(
    checkpoint: CheckpointArgument,
    pack_dir: Annotated[Path, typer.Argument(metavar="PACK", help="Directory of the pack; made if absent.")],
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="R", help="Only what rank R reads; needs --world-size.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", metavar="N", help="Number of ranks, as in serve --tp N.")
    ] = None,
    engine: Annotated[
        EngineName,
        typer.Option("--engine", help="Whose rank R: each engine shares out columns in a way of its own."),
    ] = "native",
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="ID,ID,...", help="Only these layers. [default: all]")
    ] = None,
    verify: Annotated[
        Level | None,
        typer.Option(
            "--verify",
            help="Check afterwards: random blocks, these and their rows beside the checkpoint's, or everything. "
            "[default: nothing, for packing reads back what it wrote]",
        ),
    ] = None,
    repo: Annotated[
        str | None, typer.Option("--repo", metavar="NAME", help="What the checkpoint is called.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="REV", help="Its revision. Both are part of the pack.")
    ] = None,
    max_rate: Annotated[
        str | None,
        typer.Option("--max-rate", metavar="BYTES", help="Read no more than this a second, e.g. 300MB."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away what an interrupted run left.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing: say what would be packed and whether it fits.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Pack a checkpoint's Engram rows into files with checksums.

    One file per layer and hash column; what is there is kept, so ranks may be added. What a rank reads is --engine's:
    native deals columns out one by one, vllm and sglang in runs. Ctrl-C and SIGTERM leave what is packed: the same
    command goes on from there. Exit code 1 when it does not fit the disk, PACK is of another checkpoint, or --verify
    finds a fault; 3 when a disk or file failed.
    """
    max_bytes_per_s = None if max_rate is None else _parse_rate(max_rate)
    job = _prepare(
        checkpoint,
        pack_dir,
        layers=None if layers is None else parse_counts(layers, "--layers"),
        rank=rank,
        world_size=world_size,
        engine=engine,
        repo=repo,
        revision=revision,
    )
    if dry_run:
        plan = job.plan()
        _print(plan.to_dict(), str(plan), as_json=as_json)
        return
    if job.encoder != "native":
        say("note: blocks go through numpy, which is ten times slower")
    checked = None
    try:
        with _Progress() as progress:
            report = job.run(on_progress=progress.packed, max_bytes_per_s=max_bytes_per_s, restart=restart)
            if verify is not None:
                checked = job.verify(verify, on_progress=progress.verified)
    except BaseException as error:
        is_signal = not isinstance(error, Exception)  # Ctrl-C, and what the command raises for SIGTERM
        if is_signal and is_unfinished(pack_dir):
            say(f"interrupted: what is packed in {pack_dir} stays, and deskfleet pack goes on from there")
        raise
    _report(job, report, checked, as_json=as_json)
    if checked is not None and not checked.is_sound:
        raise typer.Exit(_VERDICT_NO)


def _prepare(
    checkpoint: Path,
    pack_dir: Path,
    *,
    layers: Sequence[int] | None,
    rank: int | None,
    world_size: int | None,
    engine: EngineName,
    repo: str | None,
    revision: str | None,
) -> PackJob:
    from deskfleet.planner.engines.registry import pack_split

    split = pack_split(engine)
    job = PackJob.prepare(
        checkpoint,
        pack_dir,
        layers=layers,
        rank=rank,
        world_size=world_size,
        repo=repo,
        revision=revision,
    )
    if split == "strided" or rank is None or world_size is None:
        return job
    from deskfleet.fleet.pack_here import PackHere, wanted_columns

    here = PackHere(str(checkpoint), str(pack_dir), (rank,), world_size, split)
    with as_deskfleet_errors():
        wanted = wanted_columns(job.source, here)
    return replace(job, columns=tuple(pair for pair in wanted if layers is None or pair[0] in layers))


def _parse_rate(text: str) -> int:
    rate = parse_bytes(text)
    if rate < 1:
        raise ConfigError(
            f"--max-rate is {text!r}, and nothing would ever be packed", hint="write e.g. 300MB"
        )
    return rate


def _report(job: PackJob, report: PackReport, checked: VerifyReport | None, *, as_json: bool) -> None:
    result = {**report.to_dict(), "encoder": job.encoder}
    lines = [str(report)]
    if checked is not None:
        result["verify"] = checked.to_dict()
        lines += [*map(str, checked.faults), f"{job.pack_dir}: {checked}"]
    _print(result, "\n".join(lines), as_json=as_json)


def _print(result: dict[str, Any], text: str, *, as_json: bool) -> None:
    if as_json:
        print_json(result)
    else:
        print(text)


class _Progress:
    """A bar with rate and time left, on a terminal only. `with _Progress() as progress: ...`."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        console = talk_console()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[how_far]}"),
                console=console,
            )
            self._task = self._bar.add_task("starting", total=None, how_far="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def packed(self, progress: PackProgress) -> None:
        """Draw how far packing is. A byte counts when it is packed and again when it is read back."""
        left = "" if progress.eta_s is None else f", {_duration(progress.eta_s)} left"
        self._draw(
            progress.file,
            progress.packed_bytes + progress.checked_bytes,
            2 * progress.total_bytes,
            f"{format_bytes(progress.packed_bytes)} of {format_bytes(progress.total_bytes)}, "
            f"{format_bytes(int(progress.rate_bytes_s))}/s{left}",
        )

    def verified(self, progress: VerifyProgress) -> None:
        """Draw how far verification is."""
        rate_bytes_s = progress.done_bytes / max(progress.elapsed_s, 1e-9)
        left_s = (progress.total_bytes - progress.done_bytes) / max(rate_bytes_s, 1)
        self._draw(
            f"verify {progress.file}",
            progress.done_bytes,
            progress.total_bytes,
            f"{format_bytes(progress.done_bytes)} of {format_bytes(progress.total_bytes)}, "
            f"{format_bytes(int(rate_bytes_s))}/s, {_duration(left_s)} left",
        )

    def _draw(self, what: str, done_bytes: int, total_bytes: int, how_far: str) -> None:
        if self._bar is not None:
            self._bar.update(
                self._task, description=what, completed=done_bytes, total=total_bytes, how_far=how_far
            )


def _duration(seconds_s: float) -> str:
    """Spell a duration as `2:05` or `1:02:05`."""
    minutes, seconds = divmod(round(seconds_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


__all__ = ["register", "run"]
