"""Logits to probabilities. Owns the distribution a request asked for and what it depends on.

Knows nothing of drafts' fate or of random numbers (speculate.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deskfleet.endpoint import SamplingParams, TokenLogprob
from deskfleet.errors import EngineError
from deskfleet.model.tokenizer import ThinkingTokens

if TYPE_CHECKING:
    from deskfleet.engine.constraints import TokenConstraint

_LEAST_TEMPERATURE = 1e-5  # below it, division leaves the range of numbers


@dataclass(frozen=True, slots=True)
class Thought:
    """Whether a thought is open, and how many tokens it holds."""

    is_open: bool = False
    num_tokens: int = 0

    @classmethod
    def of_prompt(cls, token_ids: np.ndarray, marks: ThinkingTokens) -> Thought:
        """Where a prompt, int64 [n], ends: in a thought when `<think>` comes after the last `</think>`."""
        places = np.flatnonzero((token_ids == marks.start) | (token_ids == marks.end))
        if len(places) == 0 or token_ids[places[-1]] == marks.end:
            return cls()
        # Of two openings in a row the first counts, as it does in the output.
        ends = np.flatnonzero(token_ids == marks.end)
        start = places[0] if len(ends) == 0 else places[places > ends[-1]][0]
        return cls(True, len(token_ids) - 1 - int(start))

    def after(self, token_id: int, marks: ThinkingTokens) -> Thought:
        """The same, one token later."""
        if self.is_open:
            return Thought() if token_id == marks.end else Thought(True, self.num_tokens + 1)
        return Thought(True, 0) if token_id == marks.start else self


def is_stateless(params: SamplingParams, thinking: ThinkingTokens | None) -> bool:
    """Whether a row's distribution depends on its logits alone. `thinking` as of SamplingState."""
    is_penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    has_budget = params.thinking_budget is not None and thinking is not None
    return not (is_penalised or has_budget or params.logit_bias or params.constraint is not None)


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """float64 probabilities [V] of finite float32 logits [V], for params without state; 1 at the likeliest token, of
    equals the lowest id, at temperature 0."""
    row = np.empty(logits.shape, np.float64)
    _fill_stateless(row, logits, params)
    return row


class SamplingState:
    """What one request's next distribution depends on besides its logits: counts, the thought, the grammar.

    In order: logit_bias, repetition, frequency and presence penalties, the constraint's mask, the thinking budget;
    then temperature, top_k, top_p and min_p. Without any of the first five there is no state.

    A constraint holds from the first token outside a thought. While the prompt's or the model's thought is open, it
    only keeps out `TokenConstraint.barred_while_thinking`. What the prompt holds of an open thought counts towards the
    budget.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: np.ndarray,
        vocab_size: int,
        *,
        constraint: TokenConstraint | None = None,
        thinking: ThinkingTokens | None = None,
    ) -> None:
        """`prompt_token_ids` int64 [n]. `thinking` None: this vocabulary has no thoughts, and no budget is kept."""
        self._params = params
        self._constraint = constraint
        self._budget = params.thinking_budget
        # The thought is watched only where something depends on it.
        self._marks = None if constraint is None and self._budget is None else thinking
        self._thought = Thought.of_prompt(prompt_token_ids, self._marks) if self._marks else Thought()
        self._bias_ids = np.array([i for i, _ in params.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in params.logit_bias], np.float64)
        self._is_penalised = bool(
            params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        )
        self._counts = np.zeros(vocab_size if self._is_penalised else 0, np.int32)  # of the output
        self._in_prompt = np.zeros(len(self._counts), bool)
        if self._is_penalised:
            self._in_prompt[prompt_token_ids] = True
        self._is_stateless = constraint is None and is_stateless(params, thinking)

    def distributions(self, logits: np.ndarray, draft_token_ids: Sequence[int]) -> np.ndarray:
        """float64 probabilities [r, V] of finite float32 logits [r, V], row i after the first i drafts [r-1].

        Row i is exactly what plain decoding would use had it emitted those drafts; at temperature 0 it is 1 at
        the likeliest token, of equals the lowest id. Rows after a draft that the constraint forbids are
        uniform: its probability is 0, so it is never accepted and they are never reached. Changes nothing.
        Raises RequestError when the constraint's limits are exhausted.
        """
        rows = np.empty(logits.shape, np.float64)
        thought, num_consumed, num_counted = self._thought, 0, 0
        try:
            for index, row in enumerate(rows):
                self._fill(row, logits[index])
                if index == len(draft_token_ids) or self._is_stateless:
                    continue
                is_constrained = self._is_constrained
                if not self._advance(draft_token_ids[index]):
                    rows[index + 1 :] = 1 / logits.shape[1]
                    break
                num_counted += 1
                num_consumed += is_constrained
        finally:
            self._thought = thought
            if self._is_penalised:
                np.subtract.at(self._counts, list(draft_token_ids[:num_counted]), 1)
            if self._constraint is not None and num_consumed:
                self._constraint.roll_back(num_consumed)
        return rows

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that were emitted. Raises EngineError for one that the constraint forbids."""
        if self._is_stateless:
            return
        for token_id in token_ids:
            if not self._advance(token_id):
                raise EngineError(f"token {token_id} was emitted against the request's constraint")

    @property
    def _is_constrained(self) -> bool:
        return self._constraint is not None and not self._thought.is_open

    @property
    def _is_thought_spent(self) -> bool:
        return self._budget is not None and self._thought.is_open and self._thought.num_tokens >= self._budget

    def _advance(self, token_id: int) -> bool:
        """One token further; False, and nothing changed, when the constraint forbids it."""
        if self._constraint is not None and self._is_constrained:
            if not self._constraint.consume(token_id):
                return False
        elif self._marks is not None:
            self._thought = self._thought.after(token_id, self._marks)
        if self._is_penalised:
            self._counts[token_id] += 1
        return True

    def _fill(self, row: np.ndarray, logits: np.ndarray) -> None:
        """Write the distribution of one position, float64 [V], into `row`."""
        if self._marks is not None and self._is_thought_spent:
            _fill_one_hot(row, self._marks.end)
        elif self._is_stateless:
            _fill_stateless(row, logits, self._params)
        else:
            row[:] = logits
            self._adjust(row)
            if self._params.temperature == 0:
                _fill_one_hot(row, int(row.argmax()))
            else:
                _normalise(row, self._params)

    def _adjust(self, row: np.ndarray) -> None:
        """Apply what was asked for, up to the constraint, to float64 logits [V] in place."""
        if len(self._bias):
            row[self._bias_ids] += self._bias
        if self._is_penalised:
            _penalise(row, self._params, self._counts, self._in_prompt)
        if self._constraint is not None:
            if self._thought.is_open:
                row[self._constraint.barred_while_thinking] = -np.inf
            else:
                row[~self._constraint.allowed()] = -np.inf


def logprobs(logits: np.ndarray, token_id: int, count: int) -> TokenLogprob:
    """Natural log probabilities of the unmodified distribution: the chosen token and the `count` likeliest."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    normalised = shifted - np.log(np.exp(shifted).sum())
    best = _likeliest(wide, count)  # by logit: what rounds to equal here is ranked as greedy does
    return TokenLogprob(
        token_id, float(normalised[token_id]), tuple((int(i), float(normalised[i])) for i in best)
    )


def _likeliest(logits: np.ndarray, count: int) -> np.ndarray:
    """The `count` highest of logits [V] in order, of equal ones the lower ids; a vocabulary is not sorted for a few."""
    if count == 0:
        return np.zeros(0, np.int64)
    least = np.partition(logits, -count)[-count] if count < len(logits) else logits.min()
    candidates = np.flatnonzero(logits >= least)
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]


def _fill_stateless(row: np.ndarray, logits: np.ndarray, params: SamplingParams) -> None:
    if params.temperature == 0:
        _fill_one_hot(row, int(logits.argmax()))
    else:
        row[:] = logits
        _normalise(row, params)


def draw_temperature(temperature: float) -> float:
    """By which logits are divided where `temperature` is above 0; 0 stays."""
    return max(temperature, _LEAST_TEMPERATURE) if temperature > 0 else 0.0


def _normalise(row: np.ndarray, params: SamplingParams) -> None:
    """Turn float64 logits [V] into probabilities after temperature, then top_k, top_p and min_p, in that order.

    Each filter works on what the one before it left; of equal probabilities the lower token ids stay. In place: a row
    is 1 MB at full size.
    """
    row /= draw_temperature(params.temperature)
    row -= row.max()
    np.exp(row, out=row)
    if params.top_k > 0 and params.top_k < len(row):
        _keep_top_k(row, params.top_k)
    row /= row.sum()
    if params.top_p < 1:
        _keep_top_p(row, params.top_p)
    if params.min_p > 0:
        row[row < params.min_p * row.max()] = 0.0
    row /= row.sum()


def _keep_top_k(row: np.ndarray, top_k: int) -> None:
    """Zero all but the `top_k` largest of float64 weights [V], in place; of equals the lower ids stay."""
    least = np.partition(row, -top_k)[-top_k]
    ties = np.flatnonzero(row == least)
    num_ties_kept = top_k - int(np.count_nonzero(row > least))
    row[row < least] = 0.0
    row[ties[num_ties_kept:]] = 0.0


def _keep_top_p(row: np.ndarray, top_p: float) -> None:
    """Zero what comes, by falling probability, after a sum of `top_p` is reached; float64 [V], in place."""
    # Sorting all of a full-size vocabulary takes 15 ms. What is below this bound holds less than 1 - top_p together.
    candidates = np.flatnonzero(row >= (1 - top_p) / len(row))
    order = candidates[np.argsort(-row[candidates], kind="stable")]
    sums = np.cumsum(row[order])
    if sums[-1] < top_p:  # only by rounding
        order = np.argsort(-row, kind="stable")
        sums = np.cumsum(row[order])
    kept = order[np.concatenate(([0.0], sums[:-1])) < top_p]  # the token that crosses top_p stays
    probabilities = row[kept]
    row[:] = 0.0
    row[kept] = probabilities


def _penalise(row: np.ndarray, params: SamplingParams, counts: np.ndarray, in_prompt: np.ndarray) -> None:
    """Apply the penalties to float64 logits [V] in place; `counts` int32 [V] of the output, `in_prompt` bool [V]."""
    if params.repetition_penalty != 1:
        seen = np.flatnonzero(in_prompt | (counts > 0))
        logits = row[seen]
        row[seen] = np.where(
            logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
        )
    if params.frequency_penalty:
        row -= params.frequency_penalty * counts
    if params.presence_penalty:
        row -= params.presence_penalty * (counts > 0)


def _fill_one_hot(row: np.ndarray, token_id: int) -> None:
    row[:] = 0.0
    row[token_id] = 1.0


__all__ = ["SamplingState", "Thought", "distribution", "draw_temperature", "is_stateless", "logprobs"]
