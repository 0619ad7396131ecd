"""Other load generators, run with the same prompts as ours, so that a number does not rest on one program.

Owns how `vllm bench serve` and `aiperf profile` are called and which field of their results is which. They are programs
on PATH, never imported: installing one is the user's choice. Knows nothing of our own measuring.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deskfleet.errors import ConfigError, EngineError

_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What every program is to do: answer `prompts`, `concurrency` at a time, `num_tokens` each. `extra` goes into
    every request. `tokenizer` is a directory, for a program that must count text itself."""

    url: str
    model: str
    prompts: tuple[str, ...]
    concurrency: int
    num_tokens: int
    extra: Mapping[str, Any]
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a program found. None for what it does not say. Rates are over its whole wall time."""

    program: str
    num_completed: int
    num_failed: int
    num_output_tokens: int | None
    output_tok_s: float
    mean_ttft_ms: float | None
    mean_tpot_ms: float | None


@dataclass(frozen=True, slots=True)
class OtherProgram:
    """One program: the command that runs it, how it is called, and how its result is read."""

    name: str
    command: str
    arguments: Callable[[Scenario, Path], list[str]]
    read: Callable[[Path], Figures]

    def find(self, named: Path | None = None) -> str | None:
        """Return the program to run, None where it is not installed. Raises ConfigError for a named one that is not."""
        found = shutil.which(str(named) if named is not None else self.command)
        if found is None and named is not None:
            raise ConfigError(f"{named} is no program", hint=f"install {self.name}, or leave its path out")
        return found

    def run(self, program: str, scenario: Scenario) -> Figures:
        """Run it to its end. Raises EngineError when it fails or leaves no result."""
        with TemporaryDirectory(prefix="deskfleet-bench-") as directory:
            argv = [program, *self.arguments(scenario, Path(directory))]
            try:
                done = subprocess.run(argv, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
            except (OSError, subprocess.SubprocessError) as error:
                raise EngineError(f"{self.name} could not be run: {error}") from error
            if done.returncode != 0:
                said = (done.stderr or done.stdout).strip().splitlines()[-1:]
                raise EngineError(f"{self.name} ended with exit code {done.returncode}: {' '.join(said)}")
            return self.read(Path(directory))


def vllm_arguments(scenario: Scenario, directory: Path) -> list[str]:
    """Return the arguments of `vllm bench serve` (0.32, 0.33).

    Lengths come from usage, which it reads in an event of its own only. Servers that tell usage with the last piece of
    text, as DeepSeek's do, need a tokenizer: then it counts the text.
    """
    prompts = directory / "prompts.jsonl"
    _write_lines(prompts, [{"prompt": prompt} for prompt in scenario.prompts])
    extra = {**scenario.extra, "max_completion_tokens": scenario.num_tokens, "max_tokens": None}
    kept = {name: value for name, value in extra.items() if value is not None}
    return [
        *("bench", "serve", "--backend", "openai-chat", "--base-url", scenario.url),
        *("--endpoint", "/v1/chat/completions", "--model", scenario.model),
        *(
            ("--skip-tokenizer-init",)
            if scenario.tokenizer is None
            else ("--tokenizer", scenario.tokenizer, "--skip-chat-template")
        ),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--disable-shuffle", "--no-oversample"),
        *("--num-prompts", str(len(scenario.prompts)), "--max-concurrency", str(scenario.concurrency)),
        *("--extra-body", json.dumps(kept), "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--save-detailed"),
        *("--result-dir", str(directory), "--result-filename", "result.json"),
    ]


def read_vllm(directory: Path) -> Figures:
    """Return what is in its result file. Raises EngineError when there is none, or not of its form."""
    found = _read_json(directory / "result.json", "vllm bench serve")
    try:
        if max(found.get("output_lens", ()), default=2) <= 1 and any(map(any, found.get("itls", ()))):
            raise EngineError(
                "vllm bench serve read no token counts: this server tells them with the last piece of text",
                hint="give it the model's tokenizer: --tokenizer DIR",
            )
        return Figures(
            program="vllm bench serve",
            num_completed=found["completed"],
            num_failed=found.get("failed", found["num_prompts"] - found["completed"]),
            num_output_tokens=found["total_output_tokens"],
            output_tok_s=found["output_throughput"],
            mean_ttft_ms=_mean_ms(found["ttfts"]),
            mean_tpot_ms=_mean_ms(
                (latency - first) / (tokens - 1)
                for latency, first, tokens in zip(
                    found["latencies"], found["ttfts"], found["output_lens"], strict=True
                )
                if tokens > 1
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"the result of vllm bench serve has no {error}") from error


def _mean_ms(values_s: Iterable[float]) -> float | None:
    """From the samples: without a tokenizer that program sums up only whole latencies."""
    known = list(values_s)
    return 1000 * statistics.mean(known) if known else None


def aiperf_arguments(scenario: Scenario, directory: Path) -> list[str]:
    """Return the arguments of `aiperf profile` (0.13)."""
    prompts = directory / "prompts.jsonl"
    _write_lines(prompts, [{"text": prompt} for prompt in scenario.prompts])
    extra = {**scenario.extra, "max_tokens": scenario.num_tokens}
    return [
        *(
            "profile",
            "--model",
            scenario.model,
            "--url",
            scenario.url,
            "--endpoint-type",
            "chat",
            "--streaming",
        ),
        *("--input-file", str(prompts), "--custom-dataset-type", "single_turn"),
        *("--request-count", str(len(scenario.prompts)), "--concurrency", str(scenario.concurrency)),
        *("--extra-inputs", json.dumps({name: value for name, value in extra.items() if value is not None})),
        *("--use-server-token-count", "--artifact-dir", str(directory), "--ui", "none"),
    ]


def read_aiperf(directory: Path) -> Figures:
    """Return what is in its summary. Raises EngineError when there is none, or not of its form."""
    paths = sorted(directory.rglob("profile_export_aiperf.json"))
    if not paths:
        raise EngineError("aiperf left no profile_export_aiperf.json")
    found = _read_json(paths[0], "aiperf")

    def average(name: str) -> float | None:
        value = found.get(name)
        return value.get("avg") if isinstance(value, dict) else None

    completed, rate = average("request_count"), average("output_token_throughput")
    if completed is None or rate is None:
        raise EngineError("the result of aiperf has no request_count or no output_token_throughput")
    total = average("total_output_tokens")
    return Figures(
        program="aiperf",
        num_completed=round(completed),
        num_failed=round(average("error_request_count") or 0),
        num_output_tokens=None if total is None else round(total),
        output_tok_s=rate,
        mean_ttft_ms=average("time_to_first_token"),
        mean_tpot_ms=average("inter_token_latency"),
    )


PROGRAMS: dict[str, OtherProgram] = {
    "vllm": OtherProgram("vllm bench serve", "vllm", vllm_arguments, read_vllm),
    "aiperf": OtherProgram("aiperf", "aiperf", aiperf_arguments, read_aiperf),
}


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _read_json(path: Path, program: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{program} left no result that can be read: {error}") from error
    if not isinstance(found, dict):
        raise EngineError(f"the result of {program} is no object")
    return found


__all__ = [
    "PROGRAMS",
    "Figures",
    "OtherProgram",
    "Scenario",
    "aiperf_arguments",
    "read_aiperf",
    "read_vllm",
    "vllm_arguments",
]
