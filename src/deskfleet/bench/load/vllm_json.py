"""Results in the fields of `vllm bench serve --save-result --save-detailed`, so that tools made for those read ours.

Owns the field names and what each is computed from. One object for each row, as one run of that program is one file.
The same names mean the same, with one difference: a first token is the first event with text, not the first event.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np

from deskfleet.bench.load.record import Batch, LoadResult, Setup, Stream
from deskfleet.bench.load.summary import Percentiles

_PERCENTILES = (50, 90, 99)


def vllm_objects(result: LoadResult) -> list[dict[str, Any]]:
    """Return an object for each row that was not refused."""
    return [vllm_object(result, setup) for setup in result.setups() if result.of(setup)]


def vllm_object(result: LoadResult, setup: Setup) -> dict[str, Any]:
    """Return one row. Durations and rates are over the wall time of its batches, one after another."""
    batches = result.of(setup)
    streams = [stream for batch in batches for stream in batch.streams]
    answered = [stream for batch in batches for stream in batch.answered]
    duration_s = sum(batch.wall_s for batch in batches)
    num_input = sum(stream.num_prompt_tokens for stream in answered)
    num_output = sum(stream.num_completion_tokens for stream in answered)
    return {
        "date": datetime.fromisoformat(result.provenance.date).strftime("%Y%m%d-%H%M%S"),
        "label": setup.title,
        "backend": "openai-chat",
        "endpoint_type": "openai-chat",
        "model_id": result.conditions.get("model"),
        "tokenizer_id": None,
        "num_prompts": len(streams),
        "request_rate": "inf" if setup.rate is None else setup.rate,
        "burstiness": 1.0,
        "max_concurrency": setup.concurrency,
        "duration": duration_s,
        "completed": len(answered),
        "failed": len(streams) - len(answered),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(answered) / duration_s,
        "request_goodput": None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_concurrent_requests": max(_most_open(batch) for batch in batches),
        "input_lens": [stream.num_prompt_tokens for stream in streams],
        "output_lens": [stream.num_completion_tokens for stream in streams],
        "ttfts": [stream.ttft_s or 0.0 for stream in streams],
        "itls": [list(stream.gaps_s) for stream in streams],
        "latencies": [stream.latency_s or 0.0 for stream in streams],
        "start_times": [stream.sent_s for stream in streams],
        "errors": [stream.error or "" for stream in streams],
        **_times("ttft", [stream.ttft_s for stream in answered]),
        **_times("tpot", [stream.tpot_s for stream in answered]),
        **_times("itl", [gap for stream in answered for gap in stream.gaps_s]),
        **_times("e2el", [stream.latency_s for stream in answered]),
        **_drafts(batches),
    }


def _times(name: str, values_s: list[float | None] | list[float]) -> dict[str, float]:
    found = Percentiles.of(values_s)
    if found is None:
        return {}
    known = 1000 * np.array([value for value in values_s if value is not None])
    times = {
        f"mean_{name}_ms": found.mean_ms,
        f"median_{name}_ms": found.p50_ms,
        f"std_{name}_ms": found.std_ms,
    }
    return times | {f"p{p}_{name}_ms": float(np.percentile(known, p)) for p in _PERCENTILES}


def _most_open(batch: Batch) -> int:
    def is_open(stream: Stream, at_s: float) -> bool:
        return stream.sent_s <= at_s and (stream.finish_s is None or at_s < stream.finish_s)

    return max(
        (sum(is_open(other, stream.sent_s) for other in batch.streams) for stream in batch.streams), default=0
    )


def _drafts(batches: list[Batch]) -> dict[str, float | int]:
    counts = [batch.server for batch in batches if batch.server.num_drafted]
    drafted = sum(count.num_drafted or 0 for count in counts)
    accepted = sum(count.num_accepted or 0 for count in counts)
    steps = sum(count.num_verify_steps or 0 for count in counts)
    if not drafted or not steps:
        return {}
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_acceptance_length": 1 + accepted / steps,
        "spec_decode_num_drafts": steps,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
    }


__all__ = ["vllm_object", "vllm_objects"]
