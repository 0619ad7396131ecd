"""One request inside the engine. Owns its tokens and counters; the scheduler decides when it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from torch import Tensor

from deskfleet.endpoint import SamplingParams
from deskfleet.engine.messages import ImagePixels


class RequestStatus(StrEnum):
    """Where a request stands."""

    waiting = "waiting"
    running = "running"
    finished = "finished"


@dataclass
class Request:
    """Mutable on purpose: this and the open store are the only things that change after construction.

    Invariant: num_computed_tokens <= num_tokens. `slot` is set while running. `image_embeddings` bf16
    [image positions, M] are filled when the tower has run, and dropped after the prompt.
    """

    request_id: str
    prompt_token_ids: np.ndarray  # int64 (n,)
    image_mask: np.ndarray  # bool (n,)
    sampling: SamplingParams
    seed: int
    images: tuple[ImagePixels, ...] = ()
    score: bool = False
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    slot: int | None = None
    status: RequestStatus = RequestStatus.waiting
    image_embeddings: Tensor | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt plus output."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens known but not yet run through the model; 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Token ids int64 of positions start..stop-1."""
        n = self.num_prompt_tokens
        prompt = self.prompt_token_ids[start : min(stop, n)]
        output = self.output_token_ids[max(start - n, 0) : max(stop - n, 0)]
        return np.concatenate((prompt, np.array(output, dtype=np.int64)))

    def in_image(self, start: int, stop: int) -> np.ndarray:
        """Image mask of positions start..stop-1; output tokens are never in an image."""
        prompt = self.image_mask[start : min(stop, self.num_prompt_tokens)]
        return np.concatenate((prompt, np.zeros(stop - start - len(prompt), dtype=bool)))


__all__ = ["Request", "RequestStatus"]
