"""A measurement of the GPU step as sections of the docs. Owns the layout, knows nothing of measuring."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from deskfleet.bench.gpu import GpuResult
from deskfleet.errors import ConfigError
from deskfleet.units import format_bytes

STEPS = "rank0of4-"
"""What names of samples of whole steps begin with: decode, verify (of drafts, and drafting), prefill (of a chunk)."""


def is_gpu_result(path: Path) -> bool:
    """Say whether a file of bench/results is one of these, by its name."""
    return "-gpu-" in path.name


def read_gpu_result(path: Path) -> GpuResult:
    """Return the result in a file. Raises ConfigError when it is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=GpuResult)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read the result {path}: {error}") from error


def render_gpu(file_name: str, result: GpuResult) -> str:
    """Return one result's section: circumstances, then a row for each batch size, or for each kernel and tuning."""
    from_, settings = result.provenance, result.settings
    commit = "outside a checkout" if from_.commit is None else f"commit `{from_.commit[:12]}`"
    dirty = " with uncommitted changes" if from_.is_dirty else ""
    machine = result.machine
    head = (
        f"`{from_.command} {' '.join(from_.argv)}` on {from_.date[:10]}, {commit}{dirty}. {machine['device']}, torch "
        f"{machine['torch']}, Triton {machine['triton']}. One rank of four of the published model, "
        f"{settings.get('layers')} layers, {settings.get('weights')} as weights, sums over ranks "
        f"{settings.get('collectives')}."
    )
    if "kernel_ms" in result.samples[0]:
        head += " Times by kind of kernel overlap."
    if "circumstances" in settings:
        head += f" Date, commit and machine: {settings['circumstances']}."
    rows = _step_rows(result) if "kernel_ms" in result.samples[0] else _kernel_rows(result)
    return "\n".join(
        [
            f"## {file_name.removesuffix('.json')}",
            "",
            f"{head} Raw samples: `bench/results/{file_name}`.",
            "",
            *rows,
            "",
        ]
    )


def _step_rows(result: GpuResult) -> list[str]:
    """A step's milliseconds by batch size and by kind of kernel. Kernels beside each other, and one that has begun
    and waits for the one before it, count twice."""
    kinds = sorted({kind for sample in result.samples for kind in sample["kernel_ms"]}, key=_by_time(result))
    lines = [
        f"| step | ms: median [p10-p90] | kernels | memory | {' | '.join(kinds)} |",
        f"|---|---:|---:|---:|{'---:|' * len(kinds)}",
    ]
    for sample in result.samples:
        times = " | ".join(f"{sample['kernel_ms'].get(kind, 0.0):.2f}" for kind in kinds)
        lines.append(
            f"| {_step(sample)} | {sample['median_ms']:.2f} [{sample['p10_ms']:.2f}-{sample['p90_ms']:.2f}] "
            f"| {sample['kernels']} | {format_bytes(sample['allocated_bytes'])} | {times} |"
        )
    return lines


def _step(sample: Mapping[str, Any]) -> str:
    """What was run: `decode, 4 rows, 1,100 positions before`."""
    parts = [sample["name"].removeprefix(STEPS)]
    if "requests" in sample:
        parts.append(_counted(sample["requests"], "request"))
    parts.append(_counted(sample["rows"], "row"))
    if sample.get("replayed"):
        parts.append(f"{sample['replayed']:,} of them in the decoder")
    if "context" in sample:
        parts.append(f"{sample['context']:,} positions before")
    if "tokens_per_s" in sample:
        parts.append(f"{sample['tokens_per_s']:,.0f} tokens/s")
    return ", ".join(parts)


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _by_time(result: GpuResult) -> Any:
    last: Mapping[str, float] = result.samples[-1]["kernel_ms"]
    return lambda kind: (-last.get(kind, 0.0), kind)


def _kernel_rows(result: GpuResult) -> list[str]:
    """The quickest tuning of each kernel and batch size, and how many were tried."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    tried: dict[tuple[str, int], int] = {}
    for sample in result.samples:
        key = (sample["name"].removeprefix("kernel "), sample["rows"])
        tried[key] = tried.get(key, 0) + 1
        if key not in best or sample["median_us"] < best[key]["median_us"]:
            best[key] = sample
    lines = [
        "| kernel | rows | quickest tuning | tried | us a launch | TB/s of weights |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for (name, rows), sample in best.items():
        lines.append(
            f"| {name} | {rows} | {sample['tuning'] or '-'} | {tried[name, rows]} | {sample['median_us']:.1f} "
            f"| {sample['tb_s']:.2f} |"
        )
    return lines


__all__ = ["STEPS", "is_gpu_result", "read_gpu_result", "render_gpu"]
