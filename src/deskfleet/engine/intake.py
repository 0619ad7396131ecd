"""What a request must be before a rank sees it: checks and the expansion of image spans.

Owns the sentences that refuse a request. Pure: knows nothing of processes, pixels or torch. Front-ends check their
own fields too, under their own names; these checks hold for whoever calls the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deskfleet.endpoint import SamplingParams
from deskfleet.errors import RequestError

if TYPE_CHECKING:
    from deskfleet.engine.images import PreparedImage

_SEEDS = range(-(2**63), 2**64)  # what the wire carries; the sampler keeps the low 64 bits


def check_prompt(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError for an empty prompt or an id outside 0..vocab_size-1."""
    if not token_ids:
        raise RequestError("the prompt is empty", param="messages")
    bad = next((i for i in token_ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise RequestError(f"token id {bad} is outside the vocabulary of {vocab_size}", param="messages")


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError, with the field as `param`, for a value that means nothing."""
    # Written so that NaN, which compares false with everything, is refused as well.
    for name, value, is_good, wanted in (
        ("temperature", params.temperature, 0 <= params.temperature < math.inf, "a finite number, 0 or more"),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "more than 0 and at most 1"),
        ("top_k", params.top_k, params.top_k >= 0, "0 or more"),
        ("min_p", params.min_p, 0 <= params.min_p <= 1, "0 to 1"),
        ("max_tokens", params.max_tokens, params.max_tokens >= 1, "1 or more"),
        ("seed", params.seed, params.seed is None or params.seed in _SEEDS, "a 64-bit integer"),
        (
            "logprobs",
            params.logprobs,
            params.logprobs is None or 0 <= params.logprobs <= vocab_size,
            f"0 to {vocab_size}",
        ),
        (
            "prompt_logprobs",
            params.prompt_logprobs,
            params.prompt_logprobs is None or 0 <= params.prompt_logprobs <= vocab_size,
            f"0 to {vocab_size}",
        ),
        (
            "repetition_penalty",
            params.repetition_penalty,
            0 < params.repetition_penalty < math.inf,
            "a finite number, more than 0",
        ),
        ("presence_penalty", params.presence_penalty, abs(params.presence_penalty) <= 2, "-2 to 2"),
        ("frequency_penalty", params.frequency_penalty, abs(params.frequency_penalty) <= 2, "-2 to 2"),
        (
            "thinking_budget",
            params.thinking_budget,
            params.thinking_budget is None or params.thinking_budget >= 0,
            "0 or more",
        ),
    ):
        if not is_good:
            raise RequestError(f"{name} is {value}, but must be {wanted}", param=name)
    bad = next((i for i in params.stop_token_ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise RequestError(
            f"stop token id {bad} is outside the vocabulary of {vocab_size}", param="stop_token_ids"
        )
    _check_bias(params.logit_bias, vocab_size)


def _check_bias(logit_bias: Sequence[tuple[int, float]], vocab_size: int) -> None:
    for token_id, bias in logit_bias:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"logit_bias: token id {token_id} is outside the vocabulary of {vocab_size}",
                param="logit_bias",
            )
        if not abs(bias) <= 100:
            raise RequestError(
                f"logit_bias of token id {token_id} is {bias}, but must be -100 to 100", param="logit_bias"
            )
    if len({token_id for token_id, _ in logit_bias}) < len(logit_bias):
        raise RequestError("logit_bias names a token id twice", param="logit_bias")


def check_placeholders(token_ids: Sequence[int], image_token_id: int, num_images: int) -> None:
    """Raise RequestError when placeholders and images differ in number."""
    found = token_ids.count(image_token_id)
    if found != num_images:
        raise RequestError(f"prompt has {found} image placeholders but {num_images} images", param="messages")


def expand_spans(
    token_ids: Sequence[int], image_token_id: int, images: Sequence[PreparedImage]
) -> tuple[tuple[int, ...], bytes]:
    """Replace each image token by its span (spec §9.2): expanded ids and a 0/1 byte per position.

    Raises RequestError when placeholders and images differ in number.
    """
    check_placeholders(token_ids, image_token_id, len(images))
    expanded: list[int] = []
    inside = bytearray()
    remaining = iter(images)
    for token_id in token_ids:
        length = len(next(remaining).token_types) if token_id == image_token_id else 1
        expanded += [token_id] * length
        inside += bytes([token_id == image_token_id]) * length
    return tuple(expanded), bytes(inside)


__all__ = ["check_placeholders", "check_prompt", "check_sampling", "expand_spans"]
