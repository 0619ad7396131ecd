"""Which replica has seen the beginning of a prompt. Owns a bounded memory of blocks of prompts; pure and deterministic.

A prompt is cut into blocks of ids. The key of a block depends on all ids up to its end, so that a block is known only
together with everything before it, as in the engines' own prefix caches. Cost: one pass over the prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

DEFAULT_BLOCK_SIZE = 64
DEFAULT_MAX_BLOCKS = 65_536  # 4 million tokens of prompts, about 10 MB


def block_keys(token_ids: Sequence[int], block_size: int = DEFAULT_BLOCK_SIZE) -> list[int]:
    """Return the key of every full block of `token_ids`."""
    ids = tuple(token_ids)
    keys = []
    key = 0
    for start in range(0, len(ids) - block_size + 1, block_size):
        key = hash((key, ids[start : start + block_size]))  # of numbers, so the same in every process
        keys.append(key)
    return keys


class PrefixMemory:
    """Remembers for the latest `max_blocks` blocks which replicas were sent them; the longest unused goes first."""

    def __init__(self, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._replicas: OrderedDict[int, int] = OrderedDict()  # block key -> replicas, one bit each

    def __len__(self) -> int:
        return len(self._replicas)

    def match(self, keys: Sequence[int], num_replicas: int) -> list[int]:
        """Return for each replica how many blocks of the prompt it has seen, counted from the beginning."""
        counts = [0] * num_replicas
        alive = (1 << num_replicas) - 1
        for depth, key in enumerate(keys):
            seen = alive & self._replicas.get(key, 0)
            for replica in range(num_replicas) if seen != alive else ():
                if alive >> replica & 1 and not seen >> replica & 1:
                    counts[replica] = depth
            alive = seen
            if not alive:
                return counts
        return [len(keys) if alive >> replica & 1 else counts[replica] for replica in range(num_replicas)]

    def add(self, keys: Sequence[int], replica: int) -> None:
        """Remember that `replica` is sent a prompt."""
        bit = 1 << replica
        # From the end: of one prompt the beginning, which others may share, is forgotten last.
        for key in reversed(keys):
            self._replicas[key] = self._replicas.get(key, 0) | bit
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_blocks:
            self._replicas.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Drop what `replica` had seen: it was started again, and its cache is empty."""
        bit = 1 << replica
        for key, seen in list(self._replicas.items()):
            if seen & bit:
                if seen == bit:
                    del self._replicas[key]
                else:
                    self._replicas[key] = seen ^ bit


__all__ = ["DEFAULT_BLOCK_SIZE", "DEFAULT_MAX_BLOCKS", "PrefixMemory", "block_keys"]
