"""The engine's step: schedule, run, accept, draft. Owns requests from arrival to end, on rank 0.

Knows nothing of processes or sockets: `rank.py` drives it and carries its outputs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deskfleet.endpoint import EngineStats, FinishReason
from deskfleet.engine.blocks import CacheManager
from deskfleet.engine.messages import AddRequest, Cancel, DraftRequest, RequestOutput
from deskfleet.engine.request import Request
from deskfleet.engine.runner import ModelRunner
from deskfleet.engine.sampler import SamplingState, is_stateless, logprobs
from deskfleet.engine.scheduler import Scheduled, Scheduler, SchedulerPolicy
from deskfleet.engine.segments import scored_positions, segment_of, wanted_rows
from deskfleet.engine.speculate import (
    Coins,
    CostCap,
    CostTable,
    SpeculationMetrics,
    SpeculationOptions,
    Verdict,
    confidence_length,
    draft_distribution,
    verify,
    verify_chosen,
)
from deskfleet.engine.wanted import Choice
from deskfleet.errors import RequestError
from deskfleet.model.device import DEFAULT_MAX_NUM_BATCHED_TOKENS
from deskfleet.model.limits import PrefixReplay
from deskfleet.model.tokenizer import ThinkingTokens

if TYPE_CHECKING:
    from deskfleet.engine.constraints import ConstraintCompiler


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """How a core runs its requests; sizes are the runner's limits."""

    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS["cpu"]
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    prefix_cache: bool = True
    prefix_replay: PrefixReplay = "exact"
    policy: SchedulerPolicy = field(default_factory=SchedulerPolicy)


class EngineCore:
    """Runs requests to their end, one `step()` at a time."""

    def __init__(
        self,
        runner: ModelRunner,
        token_map: np.ndarray,
        options: CoreOptions | None = None,
        *,
        constraints: ConstraintCompiler | None = None,
        thinking: ThinkingTokens | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `constraints`, requests that have one fail."""
        self.options = options or CoreOptions()
        self._constraints = constraints
        self._thinking = thinking
        self._runner = runner
        self._token_map = token_map.astype(np.int64)
        self._clock = clock
        config, limits = runner.config, runner.limits
        self.cache = CacheManager(
            num_slots=limits.max_num_seqs,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            num_window_blocks=limits.num_window_blocks,
            sliding_window=config.sliding_window,
            num_layers=config.num_hidden_layers,
            replay=self.options.prefix_replay,
            enabled=self.options.prefix_cache,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=self.options.max_num_batched_tokens,
            policy=self.options.policy,
        )
        cap = self.options.speculation.cap
        self._cost_cap = CostCap(cap) if isinstance(cap, CostTable) else None
        self._speculation = SpeculationMetrics()
        self._counts: dict[str, Any] = {}  # of EngineStats

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler)

    @property
    def stats(self) -> EngineStats:
        """Counters so far; gauges of this moment."""
        scheduler, cache, drafts = self.scheduler, self.cache, self._speculation
        return EngineStats(
            **self._counts,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            oldest_wait_s=scheduler.waiting_s(self._clock()),
            num_expired=scheduler.num_expired,
            num_preempted=scheduler.num_preemptions,
            num_overtaken=scheduler.num_overtaken,
            num_prefix_queried=cache.stats.num_queried,
            num_prefix_hits=cache.stats.num_global_hits,
            num_window_hits=cache.stats.num_window_hits,
            num_replayed_tokens=cache.stats.num_replayed,
            num_blocks=cache.global_pool.num_blocks,
            num_free_blocks=cache.global_pool.num_free,
            num_window_blocks=cache.window_pool.num_blocks,
            num_free_window_blocks=cache.window_pool.num_free,
            num_verify_steps=drafts.num_steps,
            num_drafted=drafts.num_drafted,
            num_accepted=drafts.num_accepted,
            num_verify_tokens=drafts.num_emitted,
            num_wasted_rows=drafts.num_wasted_rows,
        )

    def add(self, message: AddRequest) -> RequestOutput | None:
        """Queue a request that the client has checked; what is returned is its refusal."""
        seed = message.sampling.seed
        now_s = self._clock()
        room = max(self._runner.limits.max_model_len - len(message.token_ids), 1)
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=np.array(message.token_ids, dtype=np.int64),
            image_mask=np.frombuffer(message.image_positions, np.uint8).astype(bool),
            sampling=replace(message.sampling, max_tokens=min(message.sampling.max_tokens, room)),
            seed=secrets.randbits(63) if seed is None else seed,
            images=message.images,
            score=message.score,
            arrival_s=now_s,
            deadline_s=None if message.timeout_s is None else now_s + message.timeout_s,
        )
        # How heavy it is to the queue: what is left of a long session may be short.
        request.num_computed_tokens = self.cache.estimate(request)
        try:
            if message.sampling.constraint is not None and self._constraints is not None:
                self._constraints.begin(message.sampling.constraint)
            self.scheduler.add(request)
        except RequestError as error:
            return RequestOutput(request.request_id, error=error.message, param=error.param or "")
        self._count(num_prompt_tokens=len(message.token_ids))
        return None

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
        now_s = self._clock()
        outputs = [self._expired(request) for request in self.scheduler.expire(now_s)]
        scheduled = self.scheduler.schedule(now_s)
        if not scheduled:
            return outputs
        logit_rows, choices, shares = self._wanted(scheduled)
        num_history = self._runner.config.engram_max_ngram_size - 1
        segments = [segment_of(work, self._token_map, num_history=num_history) for work in scheduled]
        updates = self.cache.take_updates()
        for work in scheduled:
            if work.request.started_s is None:
                work.request.started_s = now_s
        outcome = self._runner.lead(segments, logit_rows, self._image_rows(scheduled), updates, choices)
        logits = outcome.logits.numpy()
        self._count(num_steps=1)
        for work, (known, own) in zip(scheduled, shares, strict=True):
            bad = int(outcome.num_not_finite[own].sum())
            output = self._advance(work, logits[known], outcome.token_ids[own].tolist(), bad)
            if output is not None:
                outputs.append(output)
        self._draft([work.request for work in scheduled if work.request.is_decoding])
        self.scheduler.observe(self._clock() - now_s)
        return outputs

    # --- one request's share of a step ----------------------------------------------------------------

    def _wanted(
        self, scheduled: Sequence[Scheduled]
    ) -> tuple[list[int], list[Choice], list[tuple[slice, slice]]]:
        """Rows whose logits are wanted, choices of others, and which of both belong to each scheduled request."""
        rows, spans = wanted_rows(scheduled)
        logit_rows: list[int] = []
        choices: list[Choice] = []
        shares = []
        for work, span in zip(scheduled, spans, strict=True):
            own = self._choices(work, rows[span])
            known = rows[span.start : span.stop - len(own)]
            first, begin = len(logit_rows), len(choices)
            shares.append((slice(first, first + len(known)), slice(begin, begin + len(own))))
            logit_rows += known
            choices += own
        return logit_rows, choices, shares

    def _choices(self, work: Scheduled, rows: Sequence[int]) -> list[Choice]:
        """Choices of the last of a request's wanted rows, those that its next tokens come of, which travel in the place
        of their logits; none where these are needed: for a state, for log probabilities, and to verify drafts of a
        request that samples, whose chances depend on two distributions."""
        request, params = work.request, work.request.sampling
        own = rows[len(scored_positions(work)) :]
        if not own or request.score or params.logprobs is not None:
            return []
        if not is_stateless(params, self._thinking):
            return []
        if params.temperature == 0:
            return [Choice(row, params) for row in own]
        if work.num_draft_tokens:
            return []
        coin = Coins(request.seed).uniform("further", len(request.output_token_ids))
        return [Choice(row, params, coin) for row in own]

    def _advance(
        self, work: Scheduled, logits: np.ndarray, chosen: list[int], num_not_finite: int
    ) -> RequestOutput | None:
        """Turn a request's logit rows [r, V] of this step, and the tokens that were `chosen` of others of which so many
        logits are not finite, into its output; ends the request when it is done."""
        request, scored = work.request, scored_positions(work)
        request.num_computed_tokens += work.num_tokens
        if len(logits):
            num_not_finite += int(np.count_nonzero(~np.isfinite(logits)))
        if num_not_finite:
            return self._fail_not_finite(request, num_not_finite)
        if scored:
            self._score_prompt(request, logits[: len(scored)], scored)
            logits = logits[len(scored) :]
        if len(logits) + len(chosen) == 0:
            self.cache.commit(request)
            return None
        if request.score:
            self.cache.commit(request)
            return self._scored(request, logits)
        try:
            verdict = self._verify(request, logits, chosen, work.num_draft_tokens)
        except RequestError as error:
            self._finish(request)
            return RequestOutput(request.request_id, error=error.message, param=error.param or "")
        is_first = not request.output_token_ids
        tokens = [*request.draft_token_ids[: verdict.num_accepted], verdict.next_token_id]
        request.drop_drafts()
        count = request.sampling.logprobs
        reason: FinishReason | None = None
        for place, token_id in enumerate(tokens):
            request.output_token_ids.append(token_id)
            reason = self._finish_reason(request, token_id)
            if reason is not None:
                tokens = tokens[: place + 1]
                break
        if request.sampling_state is not None:
            request.sampling_state.accept(tokens)
        if work.num_draft_tokens:
            step = SpeculationMetrics.of_step(work.num_draft_tokens, verdict.num_accepted, len(tokens))
            request.speculation += step
            self._speculation += step
        # The last token is sampled, not computed; the drafts before it were, by this step.
        request.num_computed_tokens += len(tokens) - 1
        request.image_embeddings = None  # the prompt is computed; its images are in the cache
        self.cache.commit(request)
        self._count(num_generated_tokens=len(tokens))
        if reason is not None:
            self._finish(request)
        return RequestOutput(
            request.request_id,
            token_ids=tuple(tokens),
            logprobs=None
            if count is None
            else tuple(logprobs(row, token, count) for row, token in zip(logits, tokens, strict=False)),
            finish_reason=reason,
            num_cached_tokens=request.num_reused_tokens,
            num_drafted=request.speculation.num_drafted,
            num_accepted=request.speculation.num_accepted,
            num_verify_steps=request.speculation.num_steps,
            num_wasted_rows=request.speculation.num_wasted_rows,
            queued_s=None if request.started_s is None else request.started_s - request.arrival_s,
            prompt_logprobs=tuple(request.prompt_logprobs)
            if is_first and request.sampling.prompt_logprobs is not None
            else None,
        )

    def _score_prompt(self, request: Request, logits: np.ndarray, positions: range) -> None:
        """Keep what the rows of these positions say of the prompt's tokens after them."""
        count = request.sampling.prompt_logprobs or 0
        for row, position in zip(logits, positions, strict=True):
            token_id = int(request.prompt_token_ids[position + 1])
            request.prompt_logprobs.append(logprobs(row, token_id, count))
        request.num_scored_tokens = positions.stop

    def _verify(self, request: Request, logits: np.ndarray, chosen: list[int], num_drafts: int) -> Verdict:
        """Decide over the drafts that were run, by what was `chosen` after each where the logits stayed.

        Raises RequestError when the request's constraint cannot go on.
        """
        if chosen:
            return verify_chosen(chosen, request.draft_token_ids[:num_drafts])
        if request.sampling_state is None:
            request.sampling_state = self._sampling_state(request)
        speculation = self.options.speculation
        drafts = request.draft_token_ids[:num_drafts]
        drafted = None
        if request.draft_logits is not None and num_drafts:
            temperature = speculation.temperature(request.sampling.temperature)
            drafted = draft_distribution(request.draft_logits[:num_drafts], temperature)
        return verify(
            request.sampling_state.distributions(logits, drafts),
            drafts,
            drafted,
            acceptance=speculation.acceptance,
            coins=Coins(request.seed),
            place=len(request.output_token_ids),
        )

    def _sampling_state(self, request: Request) -> SamplingState:
        asked = request.sampling.constraint
        if asked is not None and self._constraints is None:
            raise RequestError("this engine has no tokenizer to constrain answers with", param=asked.param)
        return SamplingState(
            request.sampling,
            request.prompt_token_ids,
            self._runner.config.vocab_size,
            constraint=None
            if asked is None or self._constraints is None
            else self._constraints.compile(asked),
            thinking=self._thinking,
        )

    def _scored(self, request: Request, logits: np.ndarray) -> RequestOutput:
        # One that was pushed out starts again from the beginning; its first rows are known already.
        first = request.num_computed_tokens - len(logits)
        logits = logits[max(request.num_scored_tokens - first, 0) :]
        request.num_scored_tokens = max(request.num_scored_tokens, request.num_computed_tokens)
        done = request.num_uncomputed_tokens == 0
        if done:
            self._finish(request)
        return RequestOutput(
            request.request_id, logits=logits.tobytes(), finish_reason="length" if done else None
        )

    def _fail_not_finite(self, request: Request, bad: int) -> RequestOutput:
        self.cache.distrust(request)
        self._finish(request)
        self._count(num_not_finite=1)
        position = request.num_computed_tokens - 1
        error = f"{bad} logits of this request are not finite at position {position}"
        return RequestOutput(request.request_id, error=error)

    def _expired(self, request: Request) -> RequestOutput:
        waited_s = self._clock() - request.arrival_s
        error = f"the deadline passed after {waited_s:.1f} s, with {len(request.output_token_ids)} tokens generated"
        return RequestOutput(request.request_id, error=error)

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        params = request.sampling
        if (token_id == self._runner.config.eos_token_id and not params.ignore_eos) or (
            token_id in params.stop_token_ids
        ):
            return "stop"
        if len(request.output_token_ids) >= params.max_tokens:
            return "length"
        # The token just sampled needs a position of its own to be computed at.
        return "length" if request.num_tokens >= self._runner.limits.max_model_len else None

    def _finish(self, request: Request) -> None:
        self.scheduler.remove(request)
        self._count(num_finished=1)

    # --- drafts ---------------------------------------------------------------------------------------

    def _draft(self, requests: Sequence[Request]) -> None:
        """Draft for requests that go on, and choose how many of the drafts are verified next."""
        speculation = self.options.speculation
        able = [(request, most) for request in requests if (most := self._most_drafts(request)) > 0]
        if not able:
            return
        proposal = self._runner.propose([self._draft_request(request) for request, _ in able])
        confidence = proposal.confidence.numpy()
        if self._cost_cap is not None:
            ids = [request.request_id for request, _ in able]
            lengths = self._cost_cap.lengths(ids, list(confidence), [most for _, most in able])
        elif speculation.cap is not None:
            lengths = [
                confidence_length(row, float(speculation.cap), most)  # type: ignore[arg-type]
                for row, (_, most) in zip(confidence, able, strict=True)
            ]
        else:
            lengths = [most for _, most in able]
        for place, ((request, _), length) in enumerate(zip(able, lengths, strict=True)):
            request.draft_token_ids = proposal.draft_token_ids[place, :length].tolist()
            if speculation.temperature(request.sampling.temperature) > 0:
                request.draft_logits = proposal.logits[place, :length].numpy().copy()  # not the whole batch's

    def _most_drafts(self, request: Request) -> int:
        """Drafts that may still be accepted: each takes a position, and one more token follows them."""
        room = self._runner.limits.max_model_len - request.num_tokens
        wanted = request.sampling.max_tokens - len(request.output_token_ids) - 1
        return min(self.options.speculation.num_drafts, room, wanted)

    def _draft_request(self, request: Request) -> DraftRequest:
        assert request.slot is not None
        return DraftRequest(
            slot=request.slot,
            position=request.num_tokens - 1,
            token_id=request.output_token_ids[-1],
            window_from=request.window_from,
            temperature=self.options.speculation.temperature(request.sampling.temperature),
            seed=request.seed,
            place=len(request.output_token_ids),
        )

    # --- images ---------------------------------------------------------------------------------------

    def _image_rows(self, scheduled: list[Scheduled]) -> torch.Tensor | None:
        """Embeddings of the image positions in this step, in row order; runs the tower at first need."""
        rows = []
        for work in scheduled:
            request, start = work.request, work.request.num_computed_tokens
            if not request.images:
                continue
            inside = request.in_image(start, start + work.num_rows)
            if not inside.any():
                continue
            if request.image_embeddings is None:
                request.image_embeddings = self._runner.encode_images(request.images)
            before = int(request.image_mask[:start].sum())
            rows.append(request.image_embeddings[before : before + int(inside.sum())])
        return torch.cat(rows) if rows else None

    def _count(self, **more: int) -> None:
        for name, number in more.items():
            self._counts[name] = self._counts.get(name, 0) + number


__all__ = ["CoreOptions", "EngineCore"]
