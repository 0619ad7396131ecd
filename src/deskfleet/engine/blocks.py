"""Blocks and who holds them: two pools, the prefix cache, and the block lists of every running request.

Owns slots, reference counts, content hashes and eviction order, on rank 0 alone. Knows nothing of tensors: where a
block lies in memory is the same number on every rank (tables.py). A block is `block_size` consecutive tokens; the
global pool holds what all later tokens may look up (compressed KV, index keys), the window pool what the next
`sliding_window` need.

A finished request's blocks keep their content and their hash until somebody else needs the room, oldest use first. A
prompt that begins with the same tokens takes them over. Global blocks without the window before them would give wrong
text, so the manager either finds the window too or has the request replay the tokens it is made of.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from deskfleet.engine.request import Request
from deskfleet.engine.tables import NULL_BLOCK, TableUpdate
from deskfleet.model.limits import PrefixReplay


class BlockPool:
    """`num_blocks` blocks, numbered from 1, that are held by counted references and remembered by content."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * (num_blocks + 1)
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}
        self._free = OrderedDict.fromkeys(range(1, num_blocks + 1))  # in the order in which they may be taken

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, remembered or not."""
        return len(self._free)

    @property
    def num_remembered(self) -> int:
        """Blocks whose content can be found."""
        return len(self._block_of)

    def find(self, content: bytes) -> int | None:
        """The block of that content; hold it before anything is taken."""
        return self._block_of.get(content)

    def take(self) -> int:
        """The free block that was used longest ago, now held once and forgotten. The pool must not be empty."""
        block, _ = self._free.popitem(last=False)
        self.forget(block)
        self._references[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more reference to a block that `find` gave."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def drop(self, block: int, *, first: bool = False) -> None:
        """One reference less; the last one frees the block, with its memory.

        With `first`, and when nobody can find it, it is the first to be taken.
        """
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            if first or self._hash_of[block] is None:
                self._free.move_to_end(block, last=False)

    def remember(self, block: int, content: bytes) -> None:
        """Make a full block findable, unless its content is known already or it has one."""
        if content not in self._block_of and self._hash_of[block] is None:
            self._block_of[content] = block
            self._hash_of[block] = content

    def forget(self, block: int) -> None:
        """Make a block unfindable; one that is held stays so."""
        content = self._hash_of[block]
        if content is not None:
            del self._block_of[content]
            self._hash_of[block] = None


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Prefix cache counters since start, in tokens of prompts (resumed requests included)."""

    num_queried: int = 0
    num_global_hits: int = 0  # found in the global pool
    num_window_hits: int = 0  # of those, with their window in the window pool
    num_replayed: int = 0  # run again for a lost window


@dataclass(slots=True)
class _Held:
    """What one running request holds. Window block 0 means: passed by, or never made."""

    global_blocks: list[int]
    window_blocks: list[int]
    num_remembered: int  # blocks from the beginning that are dealt with: found, or remembered
    first_window: int  # no window block is held before this one


class CacheManager:
    """Slots and blocks of running requests."""

    def __init__(
        self,
        *,
        num_slots: int,
        block_size: int,
        num_blocks: int,
        num_window_blocks: int,
        sliding_window: int,
        num_layers: int,
        replay: PrefixReplay = "window",
        enabled: bool = True,
    ) -> None:
        """`num_layers` is the depth an exact replay has to fill; without `enabled` nothing is found again."""
        self.block_size = block_size
        self.global_pool = BlockPool(num_blocks)
        self.window_pool = BlockPool(num_window_blocks)
        self.stats = CacheStats()
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._held: dict[str, _Held] = {}
        self._reach = sliding_window - 1  # tokens before its own that a row sees
        self._num_layers = num_layers
        self._replay = replay
        self._enabled = enabled
        self._updates: list[TableUpdate] = []

    def estimate(self, request: Request) -> int:
        """Where a waiting request would go on if it were admitted now; nothing is held for it."""
        return self._find_prefix(request)[1] if self._enabled else 0

    def admit(self, request: Request) -> bool:
        """Give a waiting request a slot and the blocks its prefix shares with earlier ones.

        False, and nothing changed, without a free slot or without room for all the tokens it has.

        Sets `slot`, `num_cached_tokens` (whose entries are there), `num_computed_tokens` (where to go on: less than
        that when a window must be replayed) and `window_from`.
        """
        if not self._free_slots:
            return False
        request.slot = self._free_slots.pop()
        held = _Held([], [], num_remembered=0, first_window=0)
        self._held[request.request_id] = held
        cached, start = self._find_prefix(request) if self._enabled else (0, 0)
        request.num_cached_tokens, request.num_computed_tokens = cached, start
        has_window = start == cached
        count = cached // self.block_size
        first_window = self._first_seen(cached)
        request.window_from = first_window * self.block_size if has_window else start
        for number in range(count):
            block = self._known(self.global_pool, request.block_hashes[number])
            held.global_blocks.append(block)
            self.global_pool.hold(block)
            window = NULL_BLOCK
            if has_window and number >= first_window:
                window = self._known(self.window_pool, request.block_hashes[number])
                self.window_pool.hold(window)
            held.window_blocks.append(window)
        held.num_remembered = count
        if -(-request.num_tokens // self.block_size) - count > self.global_pool.num_free:
            self.release(request)
            request.num_computed_tokens = request.num_cached_tokens = request.window_from = 0
            return False
        if request.num_preemptions == 0:
            request.num_reused_tokens = start
        self._update(request, 0)
        if self._enabled:
            self._count(request, cached, start)
        return True

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Make room for the next `num_tokens` positions. False, and nothing changed, when a pool has too few blocks."""
        held, start = self._held[request.request_id], request.num_computed_tokens
        stop = start + num_tokens
        have, needed = len(held.global_blocks), -(-stop // self.block_size)
        # Rows that a later step sees, also one that begins at the last block before the end: the same prompt again has
        # to run its last token at least.
        first_window = max(start // self.block_size, self._first_seen(stop - 1))
        windows = [n for n in range(first_window, needed) if n >= have or held.window_blocks[n] == NULL_BLOCK]
        if max(needed - have, 0) > self.global_pool.num_free or len(windows) > self.window_pool.num_free:
            return False
        for _ in range(have, needed):
            held.global_blocks.append(self.global_pool.take())
            held.window_blocks.append(NULL_BLOCK)
        for number in windows:
            held.window_blocks[number] = self.window_pool.take()
        if windows or needed > have:
            self._update(request, min([have, *windows]))
        return True

    def commit(self, request: Request) -> None:
        """After a step: remember blocks that are full for good, and let go of windows that nothing will see again."""
        held, done = self._held[request.request_id], request.num_computed_tokens
        if self._enabled:
            self._extend_hashes(request, done // self.block_size)
            # What was replayed lies before `num_remembered`: its windows are made for this request alone.
            for number in range(held.num_remembered, done // self.block_size):
                self.global_pool.remember(held.global_blocks[number], request.block_hashes[number])
                if held.window_blocks[number] != NULL_BLOCK:
                    self.window_pool.remember(held.window_blocks[number], request.block_hashes[number])
            held.num_remembered = max(held.num_remembered, done // self.block_size)
        passed = self._first_seen(done)
        # A prompt comes again, and a session comes back to where it ended; nobody to where one of its chunks did.
        prompt_end = self._first_seen(request.num_prompt_tokens - 1)
        for number in range(held.first_window, passed):
            if held.window_blocks[number] != NULL_BLOCK:
                self.window_pool.drop(held.window_blocks[number], first=number < prompt_end)
                held.window_blocks[number] = NULL_BLOCK
        held.first_window = max(held.first_window, passed)

    def distrust(self, request: Request) -> None:
        """What this request has computed must not be found by others."""
        held = self._held[request.request_id]
        for pool, blocks in ((self.global_pool, held.global_blocks), (self.window_pool, held.window_blocks)):
            for block in blocks[request.num_cached_tokens // self.block_size :]:
                pool.forget(block)

    def release(self, request: Request) -> None:
        """Take slot and blocks back."""
        held = self._held.pop(request.request_id)
        assert request.slot is not None
        self._free_slots.append(request.slot)
        request.slot = None
        # The end of a request first: a later one needs the beginning to have any use for it.
        for pool, blocks in ((self.global_pool, held.global_blocks), (self.window_pool, held.window_blocks)):
            for number in range(len(blocks) - 1, -1, -1):
                if blocks[number] != NULL_BLOCK:
                    pool.drop(blocks[number])

    def take_updates(self) -> tuple[TableUpdate, ...]:
        """Changes of the block tables since the last call, for the step that comes next."""
        updates, self._updates = tuple(self._updates), []
        return updates

    def max_tokens(self) -> int:
        """Longest sequence that fits the global pool when it is alone."""
        return self.global_pool.num_blocks * self.block_size

    # --- prefixes -------------------------------------------------------------------------------------

    def _find_prefix(self, request: Request) -> tuple[int, int]:
        """Tokens found, and where to start so that their window exists: the choice that runs the fewest tokens."""
        if request.is_scored:
            return 0, 0  # every position's logits are asked for
        most = (request.num_tokens - 1) // self.block_size  # something must be left to run
        self._extend_hashes(request, most)
        found = 0
        while found < most and self.global_pool.find(request.block_hashes[found]) is not None:
            found += 1
        if found == 0:
            return 0, 0
        cached = found * self.block_size
        exact = self._replay == "exact" or request.num_preemptions > 0
        start = max(cached - (self._reach * self._num_layers if exact else self._reach + 1), 0)
        for count in range(found, start // self.block_size, -1):
            if self._has_window(request, count):
                return count * self.block_size, count * self.block_size
        return (cached, start) if start > 0 else (0, 0)

    def _first_seen(self, position: int) -> int:
        """The first block that a request sees which goes on at the block of `position`."""
        return max(position // self.block_size * self.block_size - self._reach, 0) // self.block_size

    def _has_window(self, request: Request, count: int) -> bool:
        first = self._first_seen(count * self.block_size)
        return all(self.window_pool.find(request.block_hashes[n]) is not None for n in range(first, count))

    def _extend_hashes(self, request: Request, count: int) -> None:
        for number in range(len(request.block_hashes), count):
            parent = request.block_hashes[-1] if request.block_hashes else b""
            start = number * self.block_size
            content = request.content(start, start + self.block_size)
            request.block_hashes.append(hashlib.blake2b(parent + content, digest_size=16).digest())

    def _known(self, pool: BlockPool, content: bytes) -> int:
        block = pool.find(content)
        assert block is not None
        return block

    def _count(self, request: Request, cached: int, start: int) -> None:
        before = self.stats
        self.stats = replace(
            before,
            num_queried=before.num_queried + request.num_tokens,
            num_global_hits=before.num_global_hits + cached,
            num_window_hits=before.num_window_hits + (cached if start == cached else 0),
            num_replayed=before.num_replayed + cached - start,
        )

    def _update(self, request: Request, first: int) -> None:
        held = self._held[request.request_id]
        assert request.slot is not None
        self._updates.append(
            TableUpdate(
                request.slot, first, _ids(held.global_blocks[first:]), _ids(held.window_blocks[first:])
            )
        )


def _ids(blocks: Iterable[int]) -> bytes:
    return np.fromiter(blocks, "<i4").tobytes()


__all__ = ["BlockPool", "CacheManager", "CacheStats"]
