"""An engine's Prometheus text as numbers. Owns the reading; which name means what is told by the engine's module."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from deskfleet.endpoint import EngineStats
from deskfleet.gateway.engram_rows import RankRows, read_exposed
from deskfleet.gateway.upstream.failures import UpstreamFailed

Samples = dict[str, float]
"""Sample name -> value, added up over labels; a name with `{label=value}` for the parts of it that are asked for."""


def read_samples(text: bytes, url: str, names: Iterable[str], labels: tuple[str, ...] = ()) -> Samples:
    """Add up the samples of `text` whose name begins with one of `names`, by name, and again by each of `labels`.

    Nothing else is parsed: an engine tells a thousand numbers every second, and streams wait while they are read.
    Raises UpstreamFailed for other text.
    """
    samples: Samples = {}
    wanted = tuple(name.encode() for name in names)
    told = [line for line in text.splitlines() if not line.startswith(b"#")]
    lines = [line for line in told if line.startswith(wanted)] or told[
        :1
    ]  # of other text, enough to see that
    try:
        for family in text_string_to_metric_families(b"\n".join(lines).decode()):
            for sample in family.samples:
                names = [sample.name]
                names += [
                    f"{sample.name}{{{label}={sample.labels[label]}}}"
                    for label in labels
                    if label in sample.labels
                ]
                for name in names:
                    samples[name] = samples.get(name, 0.0) + sample.value
    except (ValueError, KeyError) as error:
        raise UpstreamFailed(f"{url}/metrics is not Prometheus text: {error}") from error
    return samples


def read_rows(text: bytes, url: str) -> tuple[RankRows, ...]:
    """Return what ranks tell of Engram rows in `text`. Raises UpstreamFailed for other text."""
    try:
        return read_exposed(text, url)
    except (ValueError, KeyError) as error:
        raise UpstreamFailed(f"{url}/metrics is not Prometheus text: {error}") from error


def stats_from(samples: Samples, names: Mapping[str, str]) -> EngineStats:
    """Return the stats whose fields `names` finds a sample for: field -> sample name. Others are 0."""
    found = {field: int(samples[name]) for field, name in names.items() if name in samples}
    return replace(EngineStats(), **found)  # type: ignore[arg-type]  # the fields of `names` are numbers


def marker_from(samples: Samples, names: tuple[str, ...]) -> Hashable | None:
    """Return what changes when an engine makes a step: the samples of `names`. None when it has none of them."""
    found = tuple(samples[name] for name in names if name in samples)
    return found or None


__all__ = ["Samples", "marker_from", "read_rows", "read_samples", "stats_from"]
