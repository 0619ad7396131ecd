"""One request inside the engine. Owns its tokens and counters; the scheduler decides when it runs."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from deskfleet.endpoint import SamplingParams, TokenLogprob
from deskfleet.engine.messages import ImagePixels
from deskfleet.engine.sampler import SamplingState
from deskfleet.engine.speculate import SpeculationMetrics


@dataclass(eq=False)
class Request:
    """Mutable on purpose: this and the open store are the only things that change after construction.

    Invariant: num_computed_tokens <= num_tokens. `slot` is set while running. `image_embeddings` bf16
    [image positions, M] are filled when the tower has run, and dropped after the prompt. What a request drafted stays
    with it, whatever row of a batch it takes: `draft_token_ids` are to be verified next, `draft_logits` float32 [k, V]
    are what they were drawn from (None when they were not drawn).
    """

    request_id: str
    prompt_token_ids: np.ndarray  # int64 (n,)
    image_mask: np.ndarray  # bool (n,)
    sampling: SamplingParams
    seed: int
    images: tuple[ImagePixels, ...] = ()
    score: bool = False
    num_scored_tokens: int = 0  # whose logits were given out, or have told the next token's log probability
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # so far, of those that were asked for
    arrival_s: float = 0.0
    started_s: float | None = None  # when the first of its rows was run
    deadline_s: float | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the prefix, whose entries were found
    num_reused_tokens: int = 0  # of the prompt, which did not have to be run when the request came
    window_from: int = 0  # no window rows before this position
    num_preemptions: int = 0
    block_hashes: list[bytes] = field(
        default_factory=list
    )  # of its whole blocks, each covering all before it
    slot: int | None = None
    image_embeddings: Tensor | None = None
    sampling_state: SamplingState | None = None  # made when a token is first sampled from logits
    draft_token_ids: list[int] = field(default_factory=list)
    draft_logits: np.ndarray | None = None
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)

    def drop_drafts(self) -> None:
        """Forget what was drafted."""
        self.draft_token_ids, self.draft_logits = [], None

    @property
    def is_scored(self) -> bool:
        """Whether more than the last row of the prompt is wanted, so that all of it has to be run."""
        return self.score or self.sampling.prompt_logprobs is not None

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

    @property
    def is_decoding(self) -> bool:
        """Whether it runs and its newest token was sampled: the next one comes from that, or from drafts after it."""
        return self.slot is not None and bool(self.output_token_ids) and self.num_uncomputed_tokens == 1

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Token ids int64 of positions start..stop-1; the drafts follow the output."""
        n = self.num_prompt_tokens
        output = self.output_token_ids[max(start - n, 0) : max(stop - n, 0)]
        if self.draft_token_ids:
            known = self.num_tokens
            output += self.draft_token_ids[max(start - known, 0) : max(stop - known, 0)]
        after = np.array(output, dtype=np.int64)
        return after if start >= n else np.concatenate((self.prompt_token_ids[start : min(stop, n)], after))

    def in_image(self, start: int, stop: int) -> np.ndarray:
        """Image mask of positions start..stop-1; output tokens are never in an image."""
        if start >= self.num_prompt_tokens:
            return np.zeros(stop - start, dtype=bool)
        prompt = self.image_mask[start : min(stop, self.num_prompt_tokens)]
        return np.concatenate((prompt, np.zeros(stop - start - len(prompt), dtype=bool)))

    @cached_property
    def _image_digests(self) -> list[bytes]:
        sizes = [struct.pack("<qq", image.height_px, image.width_px) for image in self.images]
        return [
            hashlib.blake2b(image.pixels, digest_size=16, key=size).digest()
            for image, size in zip(self.images, sizes, strict=True)
        ]

    def content(self, start: int, stop: int) -> bytes:
        """What decides the cache rows of positions start..stop-1, after those before: tokens, and pixels where one
        lies."""
        parts = [self.tokens(start, stop).astype("<i8").tobytes()]
        if self.images and self.in_image(start, stop).any():
            before = int(self.image_mask[:start].sum())
            inside = range(before, before + int(self.image_mask[start:stop].sum()))
            first = 0
            for image, digest in zip(self.images, self._image_digests, strict=True):
                last = first + len(image.token_types)
                if first < inside.stop and inside.start < last:
                    parts.append(digest + struct.pack("<q", inside.start - first))
                first = last
        return b"".join(parts)


__all__ = ["Request"]
