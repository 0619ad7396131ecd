"""Thinking budgets and forms after a thought, on engines that know of neither.

The contract says that a constraint holds from the first token outside a thought, and that a thought of so many
tokens is closed. Engines behind HTTP do that only when they were started for it, and each counts its own way. So an
open thought is a request of its own, which stops at `</think>` or at the budget; the rest of the answer is the next
request, whose prompt begins with all that has been said. The engine's prefix cache makes that cheap.

Owns the order of these requests. Pure: knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from deskfleet.endpoint import FinishReason, GenerateRequest, SamplingParams, TokenChunk
from deskfleet.errors import EngineError, RequestError
from deskfleet.gateway.upstream.vocabulary import Vocabulary

_BARRED = -100.0
"""As a bias: what may not end a thought that a form must follow."""
_FORCED = 100.0
_SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class Part:
    """One request to an engine. `ends_at`: ids at which it stops without being the answer's end.

    `is_bounded`: its max_tokens is what is left of a thought, not of the answer. `must_say`: its one token.
    """

    request: GenerateRequest
    ends_at: frozenset[int] = frozenset()
    is_bounded: bool = False
    must_say: int | None = None


def needs_parts(request: GenerateRequest, vocabulary: Vocabulary) -> bool:
    """Whether an engine must be asked for this answer in parts. Raises RequestError when that cannot be done."""
    params = request.sampling
    if params.constraint is None and params.thinking_budget is None:
        return False
    if vocabulary.thinking is None:
        if params.thinking_budget is not None:
            raise RequestError(
                "this checkpoint's tokenizer has no <think> and </think>", param="thinking_budget"
            )
        return False
    if not Thought.of_prompt(request.prompt_token_ids, vocabulary.thinking).is_open:
        return params.thinking_budget is not None and params.constraint is None
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(params, name):
            raise RequestError(
                f"{name} cannot reach back into a thought that this engine is asked for separately",
                param=name,
                hint="leave it out, or turn thinking off",
            )
    return True


@dataclass(frozen=True, slots=True)
class Thought:
    """Whether a thought is open, and of how many tokens."""

    is_open: bool = False
    num_tokens: int = 0

    @classmethod
    def of_prompt(cls, token_ids: Sequence[int], marks: tuple[int, int]) -> Thought:
        """Return how a prompt leaves it."""
        start, end = marks
        for back, token_id in enumerate(reversed(token_ids)):
            if token_id == end:
                return cls()
            if token_id == start:
                return cls(True, back)
        return cls()

    def after(self, token_ids: Sequence[int], marks: tuple[int, int]) -> Thought:
        """The same, some tokens later."""
        is_open, count = self.is_open, self.num_tokens
        for token_id in token_ids:
            if is_open:
                is_open, count = token_id != marks[1], count + 1
            elif token_id == marks[0]:
                is_open, count = True, 0
        return Thought(is_open, count if is_open else 0)


@dataclass(slots=True)
class Answer:
    """The answer to one request that is asked for in parts. Changes as tokens come."""

    request: GenerateRequest
    vocabulary: Vocabulary
    said: list[int] = field(default_factory=list)
    num_parts: int = 0
    thought: Thought = field(init=False)

    def __post_init__(self) -> None:
        self.thought = Thought.of_prompt(self.request.prompt_token_ids, self._marks)

    def next_part(self) -> Part:
        """Return the next request to send."""
        self.num_parts += 1
        params = self.request.sampling
        left = params.max_tokens - len(self.said)
        start, end = self._marks
        if not self.thought.is_open:
            stops = frozenset() if params.thinking_budget is None or params.constraint else frozenset({start})
            return self._part(params, max_tokens=left, ends_at=stops)
        params = replace(params, constraint=None)
        budget = self.request.sampling.thinking_budget
        rest = left if budget is None else min(left, max(budget - self.thought.num_tokens, 0))
        if rest == 0:
            closing = replace(params, temperature=0.0, logit_bias=((end, _FORCED),))
            part = self._part(closing, max_tokens=1, ends_at=frozenset({end}), is_bounded=True)
            return replace(part, must_say=end)
        if self.request.sampling.constraint is not None:
            params = replace(params, logit_bias=self._barring(params))
        return self._part(params, max_tokens=rest, ends_at=frozenset({end}), is_bounded=rest < left)

    def add(self, part: Part, chunk: TokenChunk) -> TokenChunk:
        """Take what the engine said. Returns it, without its finish reason where the answer goes on.

        Raises EngineError when it did not say what it had to.
        """
        if part.must_say is not None and set(chunk.token_ids) - {part.must_say}:
            raise EngineError(f"the engine said token {chunk.token_ids[0]} where {part.must_say} was forced")
        self.said += chunk.token_ids
        self.thought = self.thought.after(chunk.token_ids, self._marks)
        if chunk.finish_reason is None:
            return chunk
        return replace(chunk, finish_reason=self._finish(part, chunk))

    def _finish(self, part: Part, chunk: TokenChunk) -> FinishReason | None:
        last = chunk.token_ids[-1] if chunk.token_ids else None
        is_full = len(self.said) >= self.request.sampling.max_tokens
        if chunk.finish_reason == "stop" and last in part.ends_at:
            if last in self.request.sampling.stop_token_ids:
                return "stop"
            return "length" if is_full else None
        if chunk.finish_reason == "length" and part.is_bounded:
            return "length" if is_full else None
        return chunk.finish_reason

    def _part(
        self, params: SamplingParams, *, max_tokens: int, ends_at: frozenset[int], is_bounded: bool = False
    ) -> Part:
        seed = params.seed if params.seed is None else (params.seed + self.num_parts - 1) % _SEEDS
        sampling = replace(
            params,
            max_tokens=max_tokens,
            stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *sorted(ends_at)))),
            thinking_budget=None,
            seed=seed,
        )
        request = replace(
            self.request,
            request_id=f"{self.request.request_id}-{self.num_parts}",
            prompt_token_ids=(*self.request.prompt_token_ids, *self.said),
            sampling=sampling,
        )
        return Part(request, ends_at, is_bounded)

    def _barring(self, params: SamplingParams) -> tuple[tuple[int, float], ...]:
        """The client's biases, and those that keep a thought from ending the answer or beginning a call."""
        barred = {self.vocabulary.eos_token_id, self.vocabulary.tool_marker_id} - {None}
        kept = [(token_id, bias) for token_id, bias in params.logit_bias if token_id not in barred]
        return (*kept, *((token_id, _BARRED) for token_id in sorted(i for i in barred if i is not None)))

    @property
    def _marks(self) -> tuple[int, int]:
        if self.vocabulary.thinking is None:
            raise RequestError(
                "this checkpoint's tokenizer has no <think> and </think>", param="thinking_budget"
            )
        return self.vocabulary.thinking


__all__ = ["Answer", "Part", "Thought", "needs_parts"]
