"""What was measured on an endpoint, as data and as a file. Owns the schema and the definition of every rate.

Three levels: a `Stream` is one request, a `Batch` the requests that ran together, a `LoadResult` all batches with where
they come from. A batch that must not be believed carries refusals, and no table shows its numbers; a label stays beside
them wherever they are shown.

* TTFT: from when the request was due until the first event with text. In a closed loop it is due when it is sent.
* TPOT: (finish - first token) / (tokens - 1). Tokens are those of `usage`, never a count of events.
* ITL: between two events with text. An event has several tokens when drafts are accepted; then it is not TPOT.
* tok/s per stream: 1 / TPOT. tok/s aggregate: tokens after the first of all streams, over the time from the earliest
  first token to the latest finish. In general it is not the sum of the streams' rates.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from deskfleet.bench.provenance import Provenance
from deskfleet.bench.result import write_new
from deskfleet.errors import ConfigError

NAME = "load"
SCHEMA = 1

Part = Literal["decode", "prefill", "mixed"]
ErrorKind = Literal["refused", "failed"]
Condition = str | int | float | bool | None


class Caveat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a number misleads, or might. `kind` is one of `caveats.KINDS`; `text` says it with the operands."""

    kind: str
    text: str


class Stream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One request. Times are in seconds since the batch began; `gaps_s` are between events that brought text.

    `repeated` and `counted` say how predictable the answer was (`predictable.Predictability`). With `error` there are
    no times: the server refused the question, or its answer failed.
    """

    case: str
    due_s: float
    sent_s: float
    first_s: float | None = None
    finish_s: float | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int | None = None
    max_tokens: int = 0
    finish_reason: str | None = None
    gaps_s: tuple[float, ...] = ()
    repeated: float = 0.0
    counted: float = 0.0
    error: str | None = None
    error_kind: ErrorKind | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def latency_s(self) -> float | None:
        return None if self.finish_s is None else self.finish_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of fewer than two tokens, or that came all at once."""
        if self.first_s is None or self.finish_s is None or self.num_completion_tokens < 2:
            return None
        elapsed_s = self.finish_s - self.first_s
        return elapsed_s / (self.num_completion_tokens - 1) if elapsed_s > 0 else None

    @property
    def tok_s(self) -> float | None:
        return None if self.tpot_s is None else 1 / self.tpot_s


class ServerCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the server itself counted while a batch ran. None for what it does not count."""

    num_generated_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_finished: int | None = None
    num_verify_steps: int | None = None
    num_drafted: int | None = None
    num_accepted: int | None = None

    @property
    def acceptance(self) -> float | None:
        """Share of verified drafts that were accepted; None where no draft was verified."""
        return (
            self.num_accepted / self.num_drafted
            if self.num_drafted and self.num_accepted is not None
            else None
        )

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of a verification: the accepted drafts and one."""
        if not self.num_verify_steps or self.num_accepted is None:
            return None
        return 1 + self.num_accepted / self.num_verify_steps


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What makes batches comparable: a row of the table.

    `case` is a kind of prompt; for prefill `text`, or `filler`. `concurrency` streams run at the same time, None where
    requests come at `rate` per second. `context` are the tokens to read before the task, as asked for.
    """

    part: Part
    case: str
    sampling: str = "greedy"
    concurrency: int | None = 1
    context: int = 0
    rate: float | None = None

    @property
    def title(self) -> str:
        if self.rate is not None:
            return f"{self.part}, {self.rate:g} requests/s"
        context = f" after {self.context:,} tokens" if self.context and self.part == "decode" else ""
        if self.part == "prefill":
            return f"prefill, {self.context:,} tokens of {self.case}"
        streams = "1 stream" if self.concurrency == 1 else f"{self.concurrency} streams"
        return f"{self.part}, {self.case}{context}, {streams}, {self.sampling}"


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Requests that ran together. `low_water_bytes` is the least available memory of each node meanwhile.

    `client_cpu` is how much of a core the load generator took: at 1 it measures itself. `late_s` is the most by which
    it sent a request after it was due.
    """

    setup: Setup
    round: int
    wall_s: float
    streams: tuple[Stream, ...]
    server: ServerCount = ServerCount()
    low_water_bytes: dict[str, int] = {}
    client_cpu: float = 0.0
    refusals: tuple[Caveat, ...] = ()
    labels: tuple[Caveat, ...] = ()

    @property
    def answered(self) -> tuple[Stream, ...]:
        """The streams that came to their end."""
        return tuple(stream for stream in self.streams if stream.error is None)

    @property
    def num_tokens(self) -> int:
        """Generated tokens, by usage."""
        return sum(stream.num_completion_tokens for stream in self.answered)

    @property
    def late_s(self) -> float:
        return max((stream.sent_s - stream.due_s for stream in self.streams), default=0.0)

    @property
    def aggregate_tok_s(self) -> float | None:
        """None where no stream has two tokens."""
        timed = [s for s in self.answered if s.tpot_s is not None]
        firsts = [s.first_s for s in timed if s.first_s is not None]
        finishes = [s.finish_s for s in timed if s.finish_s is not None]
        if not timed or not firsts or not finishes:
            return None
        return sum(s.num_completion_tokens - 1 for s in timed) / (max(finishes) - min(firsts))

    @property
    def prefill_tok_s(self) -> float | None:
        """Prompt tokens that had to be run, over the time to the first token: of one stream alone."""
        if len(self.answered) != 1:
            return None
        (stream,) = self.answered
        elapsed_s = stream.ttft_s or stream.latency_s  # an answer without text has no first event
        if not elapsed_s:
            return None
        return (stream.num_prompt_tokens - (stream.num_cached_tokens or 0)) / elapsed_s


class LoadResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run. `conditions` say what of server and set-up was the same throughout and what a comparison must have
    equal; `settings` how it was measured. `warm_up` is kept, and in no table. `labels` hold for every number."""

    provenance: Provenance
    conditions: dict[str, Condition]
    settings: dict[str, Condition]
    warm_up: tuple[Batch, ...]
    batches: tuple[Batch, ...]
    labels: tuple[Caveat, ...] = ()
    skipped: tuple[str, ...] = ()
    name: str = NAME
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA or self.name != NAME:
            raise ConfigError(f"{self.name!r} of schema {self.schema} is no {NAME!r} of schema {SCHEMA}")
        if not self.batches:
            raise ConfigError("the measurement has no batches")

    def setups(self) -> list[Setup]:
        """Return the rows, in the order in which they were first measured."""
        return list(dict.fromkeys(batch.setup for batch in self.batches))

    def of(self, setup: Setup) -> list[Batch]:
        """Return the batches of a row that may be believed."""
        return [batch for batch in self.batches if batch.setup == setup and not batch.refusals]

    def refusals(self) -> list[tuple[Setup, Caveat]]:
        """Return what was refused, once for each row."""
        return list(
            dict.fromkeys((batch.setup, caveat) for batch in self.batches for caveat in batch.refusals)
        )

    def all_labels(self) -> list[Caveat]:
        """Return every label, once for each kind: those of the run first."""
        found: dict[str, Caveat] = {}
        for caveat in (*self.labels, *(label for batch in self.batches for label in batch.labels)):
            found.setdefault(caveat.kind, caveat)
        return list(found.values())

    def write(self, path: Path) -> None:
        """Write the file at `path`. Raises ConfigError when there is one already, or it cannot be written."""
        write_new(path, self)

    @classmethod
    def read(cls, path: Path) -> LoadResult:
        """Return the result in a file. Raises ConfigError when it is none."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"cannot read the result {path}: {error}") from error


def is_load_result(path: Path) -> bool:
    """Say whether a file of bench/results is one of these, by its name."""
    return path.name[11:].removesuffix(".json").rstrip("0123456789").rstrip("-") == NAME


def kinds_of(caveats: Iterable[Caveat]) -> set[str]:
    """Return their kinds."""
    return {caveat.kind for caveat in caveats}


__all__ = [
    "NAME",
    "SCHEMA",
    "Batch",
    "Caveat",
    "Condition",
    "ErrorKind",
    "LoadResult",
    "Part",
    "ServerCount",
    "Setup",
    "Stream",
    "is_load_result",
    "kinds_of",
]
