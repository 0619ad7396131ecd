"""How loading looks: a bar per rank on a terminal, a line per rank elsewhere. Talk, so on stderr."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from deskfleet.cli.terminal import say, talk_console
from deskfleet.engine.client import LoadedRank, LoadProgress
from deskfleet.planner.native import RankCheck
from deskfleet.serve import RanksReady, ServeEvent
from deskfleet.units import format_bytes


class _Bytes(ProgressColumn):
    """`3.21 MiB of 4.61 MiB`. A rank may read a little more than it holds, which nobody needs to see."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        total_bytes = int(task.total)
        return Text(f"{format_bytes(min(int(task.completed), total_bytes))} of {format_bytes(total_bytes)}")


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{format_bytes(int(speed))}/s")


class LoadReport:
    """Shows the events of a launch until the ranks are ready. `with LoadReport() as report: report.show(event)`.

    With `shows_memory`, what was planned and what the ranks take stands under the last bar.
    """

    def __init__(self, *, shows_memory: bool = False) -> None:
        console = talk_console()
        self._shows_memory = shows_memory
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                _Bytes(),
                _Rate(),
                TimeRemainingColumn(compact=True),
                console=console,
            )
        self._tasks: dict[int, TaskID] = {}
        self._totals: dict[int, int] = {}
        self._starting: TaskID | None = None  # the row before any rank has read a byte

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
            self._starting = self._progress.add_task("starting", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def show(self, event: ServeEvent) -> None:
        """Draw one event of `deskfleet.serve`."""
        if isinstance(event, LoadProgress):
            self._advance(event)
        elif isinstance(event, RanksReady):
            for rank in event.ranks:
                self._finish(rank)
            self._stop()
            for line in memory_table(event.memory) if self._shows_memory else ():
                say(line)

    def _advance(self, event: LoadProgress) -> None:
        if self._progress is None:
            return
        if self._starting is not None:
            self._progress.remove_task(self._starting)
            self._starting = None
        if event.rank not in self._tasks:
            self._tasks[event.rank] = self._progress.add_task(f"rank {event.rank}", total=event.total_bytes)
            self._totals[event.rank] = event.total_bytes
        self._progress.update(self._tasks[event.rank], completed=event.done_bytes)

    def _finish(self, rank: LoadedRank) -> None:
        if self._progress is None:
            say(
                f"rank {rank.rank}: {format_bytes(rank.weight_bytes)} of weights in {rank.load_s:.1f} s, "
                f"{format_bytes(rank.cache_bytes)} of caches, pid {rank.pid}"
            )
        elif rank.rank in self._tasks:
            self._progress.update(self._tasks[rank.rank], completed=self._totals[rank.rank])

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def memory_table(checks: Sequence[RankCheck]) -> Iterator[str]:
    """Yield a heading and a line for each rank: memory planned and measured, and what it is made of.

    It is the resident memory of the rank's process, or what its GPU holds.
    """
    is_gpu = any(line.name.startswith("gpu.") for check in checks for line in check.lines)
    rest = "steps" if is_gpu else "process"
    yield f"{'rank':6} {'planned':>11} {'measured':>11} {'':7} {'weights':>11} {'caches':>11} {rest:>11}"
    for check in checks:
        groups = (("weights.", "gpu.weights."), ("kv.", "gpu.kv."), ("process", "gpu.buffers.", "gpu.other"))
        parts = [check.group_bytes(*prefixes) for prefixes in groups]
        planned, measured, *parts_of_it = (
            f"{format_bytes(n):>11}" for n in (check.predicted_bytes, check.measured_bytes, *parts)
        )
        difference = f"{check.relative_difference:+7.1%}"
        yield " ".join((f"rank {check.rank}", planned, measured, difference, *parts_of_it))


__all__ = ["LoadReport", "memory_table"]
