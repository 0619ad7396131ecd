"""An engine's Prometheus text as numbers. Owns the reading; which name means what is told by the engine's module."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from deskfleet.endpoint import EngineStats
from deskfleet.gateway.upstream.failures import UpstreamFailed

Samples = dict[str, float]
"""Sample name -> value, added up over labels; a name with `{label=value}` for the parts of it that are asked for."""


def read_samples(text: bytes, url: str, labels: tuple[str, ...] = ()) -> Samples:
    """Add up every sample of `text` by name, and again by each of `labels`. Raises UpstreamFailed for other text."""
    samples: Samples = {}
    try:
        for family in text_string_to_metric_families(text.decode()):
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


def stats_from(samples: Samples, names: Mapping[str, str]) -> EngineStats:
    """Return the stats whose fields `names` finds a sample for: field -> sample name. Others are 0."""
    found = {field: int(samples[name]) for field, name in names.items() if name in samples}
    return replace(EngineStats(), **found)  # type: ignore[arg-type]  # the fields of `names` are numbers


def marker_from(samples: Samples, names: tuple[str, ...]) -> Hashable | None:
    """Return what changes when an engine makes a step: the samples of `names`. None when it has none of them."""
    found = tuple(samples[name] for name in names if name in samples)
    return found or None


__all__ = ["Samples", "marker_from", "read_samples", "stats_from"]
