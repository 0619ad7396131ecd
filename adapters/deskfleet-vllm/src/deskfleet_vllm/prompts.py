"""Rows of prompts, asked for before the step that looks them up: vLLM knows a prompt's tokens on the host.

`Prompts` is told of prompts and steps by `state_class`, a child of vLLM's model state, and hashes on the prefetcher's
thread. Hints only: lookups go by row id, so rejected drafts, images and the order of a batch change nothing. Knows
neither vLLM's modules nor torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram import hashing, native_functions
from deskfleet_engram.geometry import EngramGeometry
from deskfleet_engram.host_prefetch import Prefetcher


@dataclass(frozen=True, slots=True, eq=False)
class Hashing:
    """How the engine turns tokens into row ids. `token_map` int64 [vocabulary]; `dead_token` stands for images."""

    geometry: EngramGeometry
    token_map: NDArray[np.int64]
    pad_id: int
    dead_token: int

    def ids(self, tokens: NDArray[np.int32], begin: int, end: int) -> NDArray[np.int64]:
        """Return int64 [end - begin, layers, columns]: row ids of those positions of a sequence."""
        first = max(0, begin - (self.geometry.spec.max_ngram_size - 1))
        stretch = tokens[first:end]
        compressed = np.where(stretch == self.dead_token, hashing.DEAD, self.token_map[stretch])
        hash_ids = native_functions.hash_ids if native_functions.is_available() else hashing.hash_ids
        return hash_ids(self.geometry, compressed, start=begin - first, position=first, pad_id=self.pad_id)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request's part of a step: its slot, and the positions that the step computes."""

    slot: int
    begin: int
    end: int


class Prompts:
    """Tokens of prompts that are not yet computed, by slot of the request."""

    def __init__(self, hashing_of_model: Hashing, prefetcher: Prefetcher, most_tokens: int) -> None:
        """`most_tokens` a step can compute, and so is asked for ahead of it at most."""
        self._hashing = hashing_of_model
        self._prefetcher = prefetcher
        self._most_tokens = most_tokens
        self._tokens: dict[int, NDArray[np.int32]] = {}
        self._asked: dict[int, int] = {}

    def add(self, slot: int, tokens: Iterable[int]) -> None:
        """A request begins, or begins again, in `slot`."""
        self._tokens[slot] = np.fromiter(tokens, np.int32)
        self._asked[slot] = 0

    def step(self, chunks: Iterable[Chunk]) -> None:
        """A step computes these parts of prompts: ask for their rows, and for those of the step that follows."""
        wanted = list(self._wanted(chunks))
        if wanted:
            self._prefetcher.ask(lambda: np.concatenate([self._hashing.ids(*each) for each in wanted]))

    def _wanted(self, chunks: Iterable[Chunk]) -> Iterator[tuple[NDArray[np.int32], int, int]]:
        """Yield tokens and positions that were not asked for yet."""
        ahead = self._most_tokens
        for chunk in chunks:
            tokens = self._tokens.get(chunk.slot)
            if tokens is None:
                continue
            now = min(chunk.end, len(tokens))
            begin, end = max(self._asked[chunk.slot], chunk.begin), min(now + ahead, len(tokens))
            if begin < end:
                ahead -= end - max(begin, now)
                self._asked[chunk.slot] = end
                yield tokens, begin, end
            if chunk.end >= len(tokens):
                del self._tokens[chunk.slot], self._asked[chunk.slot]


@functools.cache
def state_class(stock: type[Any], prompts_of: Callable[[Any], Prompts | None]) -> type[Any]:
    """Return a child of vLLM's model state that tells `prompts_of(model)` of prompts and steps."""

    class PromptState(stock):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
            super().__init__(vllm_config, model, encoder_cache, device)
            self.deskfleet_prompts = prompts_of(model)

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            super().add_request(req_index, new_req_data)
            if self.deskfleet_prompts is not None and new_req_data.prefill_token_ids is not None:
                self.deskfleet_prompts.add(req_index, new_req_data.prefill_token_ids)

        def prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
            inputs = super().prepare_inputs(input_batch, req_states)
            if self.deskfleet_prompts is not None and input_batch.has_prefill:
                self.deskfleet_prompts.step(chunks_of(input_batch))
            return inputs

    return PromptState


def chunks_of(input_batch: Any) -> Iterator[Chunk]:
    """Yield the parts of prompts that a step of vLLM's V2 runner computes."""
    lengths = np.diff(input_batch.query_start_loc_np)
    for index in np.flatnonzero(input_batch.is_prefilling_np).tolist():
        begin = int(input_batch.num_computed_prefill_tokens_np[index])
        yield Chunk(int(input_batch.idx_mapping_np[index]), begin, begin + int(lengths[index]))


__all__ = ["Chunk", "Hashing", "Prompts", "chunks_of", "state_class"]
