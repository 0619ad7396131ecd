"""fio as the yardstick: random direct reads of 4 KiB from the files that the reader reads, and what they took.

Two ways of asking. A batch is what a lookup is: so many reads go out, and the next ones only when all of them are
back; its latency is that of its slowest read, from fio's own log. Streaming keeps the device full all the time, which
no lookup can that waits for its last row: it is the ceiling. Knows nothing of rows.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.bench.programs import output_of
from deskfleet_engram.errors import EngramError

_ENGINES = ("io_uring", "libaio")
_LIMIT_S = 60.0  # longer than any run here; some versions hang

_Settings = dict[str, str | int | None]  # None: a flag without a value


@dataclass(frozen=True, slots=True)
class FioRun:
    """What one job did. `latencies_s` float64 [batches], empty where fio cannot tell; `cpu_s` is user and system."""

    num_reads: int
    elapsed_s: float
    cpu_s: float
    latencies_s: NDArray[np.float64]

    @property
    def reads_per_s(self) -> float:
        """Reads per second, of the time from first to last."""
        return self.num_reads / self.elapsed_s


class Fio:
    """The installed fio on the files of one directory. Raises EngramError when there is none that can read here."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._directory = str(files[0].parent.resolve())  # whole, as fio runs in a directory of its own
        self._names = ":".join(path.name for path in files)
        program = shutil.which("fio")
        if program is None:
            raise EngramError("fio is not installed", hint="on Debian: apt-get install fio")
        if ":" in self._directory:
            raise EngramError(f"fio cannot be told a name with a colon: {self._directory}")
        self._program = program
        self.version = output_of([program, "--version"]).strip()
        known = output_of([program, "--enghelp"]).split()
        engines = [engine for engine in _ENGINES if engine in known]
        if not engines:
            raise EngramError(f"{self.version} has none of {', '.join(_ENGINES)}")
        self.engine = engines[0]

    def batches(self, num_reads: int, depth: int, seconds_s: float) -> FioRun:
        """Read batches of `num_reads` for so long, at most `depth` at the device at once.

        fio waits for all reads of a batch before it thinks, for the shortest time it knows, and goes on.
        """
        thinking: _Settings = {
            "thinktime": 1,
            "thinktime_blocks": num_reads,
            "thinktime_blocks_type": "issue",
        }
        return self._run(_at_once(min(num_reads, depth)) | thinking | _timed(seconds_s), num_reads, depth)

    def stream(self, depth: int, seconds_s: float) -> FioRun:
        """Keep `depth` reads at the device for so long."""
        return self._run(_at_once(depth) | _timed(seconds_s))

    def reads(self, num_reads: int, depth: int) -> FioRun:
        """Read so many blocks once, `depth` at the device at once."""
        return self._run(_at_once(depth) | {"number_ios": num_reads})

    def _run(self, options: _Settings, batch: int = 0, depth: int = 0) -> FioRun:
        has_latencies = (
            0 < batch <= depth
        )  # of a batch that goes out in one piece, as fio counts from each read's start
        settings: _Settings = {
            "name": "reads",
            "directory": self._directory,
            "filename": self._names,
            "readonly": None,
            "rw": "randread",
            "bs": 4096,
            "direct": 1,
            "ioengine": self.engine,
            "norandommap": 1,
            "randrepeat": 0,
            "allow_file_create": 0,
            "file_service_type": "random",
            "clocksource": "clock_gettime",  # its own is set at the start, wrongly where a busy host steals time
            "output-format": "json",
            **({"fixedbufs": 1, "registerfiles": 1} if self.engine == "io_uring" else {}),
            **({"write_lat_log": "reads"} if has_latencies else {}),
            **options,
        }
        arguments = [f"--{key}" if value is None else f"--{key}={value}" for key, value in settings.items()]
        with tempfile.TemporaryDirectory(prefix="engram-fio-") as directory:
            report = json.loads(
                output_of([self._program, *arguments], directory=Path(directory), limit_s=_LIMIT_S)
            )
            latencies_s = _batch_latencies(Path(directory), batch) if has_latencies else np.empty(0)
        job = report["jobs"][0]
        # Percent of the job's run time, which is in milliseconds as all of them are.
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        return FioRun(job["read"]["total_ios"], job["read"]["runtime"] / 1000, cpu_s, latencies_s)


def _at_once(depth: int) -> _Settings:
    """As the reader does it: everything goes out in one call, and answers are taken a few at a time."""
    return {
        "iodepth": depth,
        "iodepth_batch_submit": depth,
        "iodepth_batch_complete_min": max(1, depth // 8),
        "iodepth_batch_complete_max": depth,
    }


def _timed(seconds_s: float) -> _Settings:
    return {"time_based": 1, "runtime": f"{round(seconds_s * 1000)}ms"}


def _batch_latencies(directory: Path, batch: int) -> NDArray[np.float64]:
    """Return seconds [batches]: of each `batch` lines of the log, the longest."""
    log = next(directory.glob("reads_lat.*.log"))
    nanoseconds = np.loadtxt(log, delimiter=",", usecols=(1,), ndmin=1)
    whole = nanoseconds[: len(nanoseconds) // batch * batch].reshape(-1, batch)
    return np.asarray(whole.max(axis=1) / 1e9, dtype=np.float64)


__all__ = ["Fio", "FioRun"]
