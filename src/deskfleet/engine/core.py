"""The engine's step: schedule, run, sample, finish. Owns requests from arrival to end, on rank 0.

Knows nothing of processes or sockets: `rank.py` drives it and carries its outputs.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

import numpy as np
import torch

from deskfleet.endpoint import EngineStats, FinishReason
from deskfleet.engine.batch import Segment
from deskfleet.engine.messages import AddRequest, Cancel, RequestOutput
from deskfleet.engine.request import Request
from deskfleet.engine.runner import ModelRunner
from deskfleet.engine.sampler import sample
from deskfleet.engine.scheduler import Scheduled, Scheduler
from deskfleet_engram.hashing import DEAD


class EngineCore:
    """Runs requests to their end, one `step()` at a time."""

    def __init__(self, runner: ModelRunner, token_map: np.ndarray, *, max_num_batched_tokens: int) -> None:
        self._runner = runner
        self._token_map = token_map.astype(np.int64)
        self._eos = runner.config.eos_token_id
        self.scheduler = Scheduler(
            max_num_seqs=runner.limits.max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self._stats = EngineStats()

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler)

    @property
    def stats(self) -> EngineStats:
        """Counters so far; gauges of this moment."""
        scheduler = self.scheduler
        return replace(self._stats, num_running=len(scheduler.running), num_waiting=len(scheduler.waiting))

    def add(self, message: AddRequest) -> None:
        """Queue a request that the client has checked."""
        seed = message.sampling.seed
        self.scheduler.add(
            Request(
                request_id=message.request_id,
                prompt_token_ids=np.array(message.token_ids, dtype=np.int64),
                image_mask=np.frombuffer(message.image_positions, np.uint8).astype(bool),
                sampling=message.sampling,
                seed=secrets.randbits(63) if seed is None else seed,
                images=message.images,
                score=message.score,
            )
        )
        self._count(num_prompt_tokens=len(message.token_ids))

    def cancel(self, message: Cancel) -> None:
        """Drop a request and free its slot at once; one that is not here any more is ignored."""
        request = self.scheduler.find(message.request_id)
        if request is None:
            return
        if message.is_satisfied:
            self._finish(request)
        else:
            self.scheduler.remove(request)
            self._count(num_cancelled=1)

    def step(self) -> list[RequestOutput]:
        """Run one forward pass and return what each request in it gained."""
        scheduled = self.scheduler.schedule()
        image_rows = self._image_rows(scheduled)
        logit_rows, spans = _wanted_rows(scheduled)
        logits = self._runner.lead([self._segment(s) for s in scheduled], logit_rows, image_rows).numpy()
        self._count(num_steps=1)
        outputs = []
        for work, span in zip(scheduled, spans, strict=True):
            work.request.num_computed_tokens += work.num_tokens
            output = self._advance(work.request, logits[span])
            if output is not None:
                outputs.append(output)
        return outputs

    def _advance(self, request: Request, logits: np.ndarray) -> RequestOutput | None:
        """Turn a request's logit rows [r, V] of this step into its output; ends the request when it is done."""
        if len(logits) == 0:
            return None
        if not np.isfinite(logits).all():
            self._finish(request)
            bad = int(np.count_nonzero(~np.isfinite(logits)))
            error = (
                f"{bad} logits of this request are not finite at position {request.num_computed_tokens - 1}"
            )
            return RequestOutput(request.request_id, error=error)
        if request.score:
            done = request.num_uncomputed_tokens == 0
            if done:
                self._finish(request)
            return RequestOutput(
                request.request_id, logits=logits.tobytes(), finish_reason="length" if done else None
            )
        sampled = sample(logits[-1], request.sampling, seed=request.seed, place=len(request.output_token_ids))
        request.output_token_ids.append(sampled.token_id)
        request.image_embeddings = None  # the prompt is computed; its images are in the cache
        self._count(num_generated_tokens=1)
        reason = self._finish_reason(request, sampled.token_id)
        if reason is not None:
            self._finish(request)
        return RequestOutput(
            request.request_id,
            token_ids=(sampled.token_id,),
            logprobs=None if sampled.logprob is None else (sampled.logprob,),
            finish_reason=reason,
        )

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        params = request.sampling
        if (token_id == self._eos and not params.ignore_eos) or token_id in params.stop_token_ids:
            return "stop"
        if len(request.output_token_ids) >= params.max_tokens:
            return "length"
        # The token just sampled needs a position of its own to be computed at.
        return "length" if request.num_tokens >= self._runner.limits.max_model_len else None

    def _finish(self, request: Request) -> None:
        self.scheduler.remove(request)
        self._count(num_finished=1)

    def _segment(self, work: Scheduled) -> Segment:
        request, start = work.request, work.request.num_computed_tokens
        stop = start + work.num_tokens
        history = max(start - (self._runner.config.engram_max_ngram_size - 1), 0)
        compressed = self._token_map[request.tokens(history, stop)]
        compressed[request.in_image(history, stop)] = DEAD
        assert request.slot is not None
        return Segment(
            slot=request.slot,
            start=start,
            token_ids=request.tokens(start, stop),
            compressed_ids=compressed[start - history :],
            compressed_history=compressed[: start - history],
            image_mask=request.in_image(start, stop),
        )

    def _image_rows(self, scheduled: list[Scheduled]) -> torch.Tensor | None:
        """Embeddings of the image positions in this step, in row order; runs the tower at first need."""
        rows = []
        for work in scheduled:
            request, start = work.request, work.request.num_computed_tokens
            inside = request.in_image(start, start + work.num_tokens)
            if not inside.any():
                continue
            if request.image_embeddings is None:
                request.image_embeddings = self._runner.encode_images(request.images)
            before = int(request.image_mask[:start].sum())
            rows.append(request.image_embeddings[before : before + int(inside.sum())])
        return torch.cat(rows) if rows else None

    def _count(self, **more: int) -> None:
        self._stats = replace(self._stats, **{k: getattr(self._stats, k) + n for k, n in more.items()})


def _wanted_rows(scheduled: list[Scheduled]) -> tuple[list[int], list[slice]]:
    """Rows whose logits are needed, and which of those belong to each scheduled request."""
    rows: list[int] = []
    spans = []
    start = 0
    for work in scheduled:
        stop = start + work.num_tokens
        if work.request.score:
            wanted = range(start, stop)
        else:
            wanted = range(stop - 1, stop) if work.completes else range(0)
        spans.append(slice(len(rows), len(rows) + len(wanted)))
        rows.extend(wanted)
        start = stop
    return rows, spans


__all__ = ["EngineCore"]
