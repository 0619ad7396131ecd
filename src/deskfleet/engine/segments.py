"""Scheduled requests to the rows of a step. Owns which tokens, which logits and which image rows a step needs.

Pure functions over requests; knows nothing of blocks, ranks or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deskfleet.engine.batch import Segment
from deskfleet.engine.scheduler import Scheduled
from deskfleet_engram.hashing import DEAD


def segment_of(work: Scheduled, token_map: np.ndarray, *, num_history: int) -> Segment:
    """The next rows of a request. `token_map` int64 [V] gives compressed ids; `num_history` how many go before."""
    request, start = work.request, work.request.num_computed_tokens
    stop = start + work.num_rows
    history = max(start - num_history, 0)
    token_ids, in_image = request.tokens(history, stop), request.in_image(history, stop)
    compressed = token_map[token_ids]
    compressed[in_image] = DEAD
    assert request.slot is not None
    return Segment(
        slot=request.slot,
        start=start,
        token_ids=token_ids[start - history :],
        compressed_ids=compressed[start - history :],
        compressed_history=compressed[: start - history],
        image_mask=in_image[start - history :],
        window_from=request.window_from,
        num_replayed=min(max(request.num_cached_tokens - start, 0), work.num_rows),
        in_full=request.is_scored,
    )


def scored_positions(work: Scheduled) -> range:
    """Positions of this step whose rows tell how likely the prompt's next token was, and have not told it yet."""
    request = work.request
    if request.sampling.prompt_logprobs is None or request.score:
        return range(0)
    start = request.num_computed_tokens
    return range(
        max(start, request.num_scored_tokens), min(start + work.num_tokens, request.num_prompt_tokens - 1)
    )


def wanted_rows(scheduled: Sequence[Scheduled]) -> tuple[list[int], list[slice]]:
    """Rows whose logits are needed, and which of those belong to each scheduled request.

    All rows of a score; else those that tell of the prompt's tokens, if any do, and then, when every known token will
    be computed, the last of them and those of the drafts.
    """
    rows: list[int] = []
    spans = []
    start = 0
    for work in scheduled:
        stop = start + work.num_rows
        wanted: Sequence[int]
        if work.request.score:
            wanted = range(start, stop)
        else:
            wanted = range(stop - 1 - work.num_draft_tokens, stop) if work.completes else range(0)
            if scored := scored_positions(work):
                first = start - work.request.num_computed_tokens
                wanted = [*(first + position for position in scored), *wanted]
        spans.append(slice(len(rows), len(rows) + len(wanted)))
        rows.extend(wanted)
        start = stop
    return rows, spans


__all__ = ["scored_positions", "segment_of", "wanted_rows"]
