"""Who holds which block: random lives of requests against a plain account of what must be true."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskfleet.endpoint import SamplingParams
from deskfleet.engine.blocks import BlockPool, CacheManager
from deskfleet.engine.request import Request
from deskfleet.engine.tables import NULL_BLOCK, BlockTables
from deskfleet.errors import ConfigError
from deskfleet.model.cache_formats import CacheFormats
from deskfleet.model.config import ModelConfig
from deskfleet.model.limits import resolve_limits
from deskfleet.model.published import published_config_dict
from tests.engine.golden import checkpoint

BLOCK, WINDOW, LAYERS = 4, 8, 3


def manager(num_blocks: int = 24, num_window_blocks: int = 16, **options: object) -> CacheManager:
    return CacheManager(
        num_slots=4,
        block_size=BLOCK,
        num_blocks=num_blocks,
        num_window_blocks=num_window_blocks,
        sliding_window=WINDOW,
        num_layers=LAYERS,
        **options,  # type: ignore[arg-type]
    )


def live(name: str, ids: list[int]) -> Request:
    return Request(name, np.array(ids, np.int64), np.zeros(len(ids), bool), SamplingParams(), seed=0)


def test_a_pool_takes_what_was_used_longest_ago_and_forgets_it() -> None:
    pool = BlockPool(3)
    blocks = [pool.take() for _ in range(3)]
    assert sorted(blocks) == [1, 2, 3]
    assert pool.num_free == 0
    for block, content in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.remember(block, content)
        pool.drop(block)
    pool.hold(blocks[0])
    pool.drop(blocks[0])  # a is now the latest
    assert pool.find(b"b") == blocks[1]
    assert pool.take() == blocks[1]
    assert pool.find(b"b") is None
    assert pool.find(b"a") == blocks[0]
    pool.drop(blocks[1])  # without content: it goes first again
    assert pool.take() == blocks[1]


def test_one_content_has_one_block() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    pool.remember(first, b"a")
    pool.remember(second, b"a")
    pool.drop(second)
    assert pool.find(b"a") == first
    pool.forget(first)
    assert pool.find(b"a") is None
    assert pool.num_remembered == 0


def test_a_window_lies_where_the_tables_say() -> None:
    """The tables of the ranks, built from updates alone, name the blocks that the manager gave."""
    cache, tables = manager(), BlockTables(num_slots=4, max_model_len=64, block_size=BLOCK)
    request = live("r", list(range(30)))
    assert cache.admit(request)
    for count in (13, 9, 7, 1):
        assert cache.allocate(request, count)
        for update in cache.take_updates():
            tables.apply(update)
        assert request.slot is not None
        start, stop = request.num_computed_tokens, request.num_computed_tokens + count
        entries = tables.global_blocks[request.slot, : -(-stop // BLOCK)]
        assert len(set(entries)) == len(entries)
        assert NULL_BLOCK not in entries
        # Whatever the next step can see has a place, or was there before.
        seen = np.arange(max(stop - WINDOW + 1, start), stop)
        assert (tables.window_rows(request.slot, seen) >= BLOCK).all()
        request.num_computed_tokens = stop
        if stop > request.num_tokens:
            request.output_token_ids += [0] * (stop - request.num_tokens)
        cache.commit(request)
    cache.release(request)
    assert cache.global_pool.num_free == 24
    assert cache.window_pool.num_free == 16


def test_rows_without_a_place_are_not_written_to_another_request() -> None:
    """A slot's table still names the blocks of its last request; a chunk must clear what it passes over."""
    cache, tables = manager(), BlockTables(num_slots=4, max_model_len=64, block_size=BLOCK)
    for name, count in (("old", 40), ("new", 40)):
        request = live(name, [len(name) + i for i in range(count)])
        request.prompt_token_ids += 100 * (name == "new")
        assert cache.admit(request)
        assert cache.allocate(request, count)
        for update in cache.take_updates():
            tables.apply(update)
        held = cache._held[name].window_blocks
        assert request.slot is not None
        assert tables.window_blocks[request.slot, : len(held)].tolist() == held
        assert held[:7] == [NULL_BLOCK] * 7
        request.num_computed_tokens = count
        cache.commit(request)
        cache.release(request)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_history_keeps_the_account(data: st.DataObject) -> None:
    """Admit, grow, commit, refuse drafts, preempt and end requests over few distinct prefixes, in any order."""
    cache = manager(
        num_blocks=data.draw(st.sampled_from((10, 24))),
        replay=data.draw(st.sampled_from(("window", "exact"))),
    )
    running: list[Request] = []
    known: dict[bytes, bytes] = {}  # hash -> all tokens up to that block, as whoever made it had them
    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(("admit", "grow", "grow", "grow", "end", "preempt")))
        if action == "admit":
            stem = [data.draw(st.integers(0, 1))] * data.draw(st.integers(1, 20))
            request = live(f"r{number}", stem + data.draw(st.lists(st.integers(2, 3), max_size=6)))
            if cache.admit(request):
                running.append(request)
                check_prefix(cache, request, known)
            else:
                assert request.slot is None
                assert request.num_computed_tokens == request.num_cached_tokens == 0
        elif running:
            request = running[data.draw(st.integers(0, len(running) - 1))]
            if action == "grow":
                count = data.draw(st.integers(1, 9))
                if cache.allocate(request, count):
                    advance(request, count, data.draw(st.integers(0, 2)))
                    cache.commit(request)
                    remember(cache, request, known)
            else:
                cache.release(request)
                running.remove(request)
        check_account(cache, running)
    for request in running:
        cache.release(request)
    check_account(cache, [])


def advance(request: Request, count: int, num_refused: int) -> None:
    """Compute `count` positions, the last `num_refused` of them for nothing."""
    done = request.num_computed_tokens + max(count - num_refused, 1)
    request.output_token_ids += [4] * max(done - request.num_tokens, 0)
    request.num_computed_tokens = done


def remember(cache: CacheManager, request: Request, known: dict[bytes, bytes]) -> None:
    for number, content in enumerate(request.block_hashes):
        tokens = request.tokens(0, (number + 1) * BLOCK).tobytes()
        assert known.setdefault(content, tokens) == tokens, "two prefixes with one hash"


def check_prefix(cache: CacheManager, request: Request, known: dict[bytes, bytes]) -> None:
    """What an admitted request took over is its own prefix, and ends before its last token."""
    cached, start = request.num_cached_tokens, request.num_computed_tokens
    assert cached % BLOCK == 0
    assert 0 <= start <= cached < request.num_tokens
    held = cache._held[request.request_id]
    for number in range(cached // BLOCK):
        assert known[request.block_hashes[number]] == request.tokens(0, (number + 1) * BLOCK).tobytes()
    if start == cached:  # then the whole window before it is there
        first = max(cached - WINDOW + 1, 0) // BLOCK
        assert NULL_BLOCK not in held.window_blocks[first:]
        assert request.window_from <= max(cached - WINDOW + 1, 0)
    else:
        assert cached - start in (WINDOW, (WINDOW - 1) * LAYERS) or start == 0
        assert request.window_from == start


def check_account(cache: CacheManager, running: list[Request]) -> None:
    held = [cache._held[request.request_id] for request in running]
    for pool, lists in (
        (cache.global_pool, [each.global_blocks for each in held]),
        (cache.window_pool, [each.window_blocks for each in held]),
    ):
        blocks = [block for each in lists for block in each if block != NULL_BLOCK]
        assert pool.num_free == pool.num_blocks - len(set(blocks))
        for block in set(blocks):
            assert pool._references[block] == blocks.count(block)
            if blocks.count(block) > 1:  # shared, so it must be full and known
                assert pool._hash_of[block] is not None
        assert len(pool._block_of) == sum(content is not None for content in pool._hash_of)
    assert len({request.slot for request in running}) == len(running)
    for request, each in zip(running, held, strict=True):
        # What the next row sees is held, from where this request's window begins.
        done = request.num_computed_tokens
        first = max(done - WINDOW + 1, request.window_from, 0)
        for number in range(first // BLOCK, -(-done // BLOCK)):
            assert each.window_blocks[number] != NULL_BLOCK


def test_bytes_of_a_token_are_the_published_ones() -> None:
    """Spec §4.9: 890 bytes a token of compressed KV and index keys, 528 bytes a window row."""
    formats = CacheFormats(ModelConfig.from_dict(published_config_dict()), block_size=64, with_drafts=True)
    assert formats.global_block_bytes == 890 * 64
    assert (formats.entry_record_bytes, formats.index_key_record_bytes) == (288, 68)
    assert formats.window_record_bytes == 528
    assert formats.window_block_bytes * 128 // 64 == 2_703_360 + 202_752


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 3}, "block_size is 3"),
        ({"kv_cache_tokens": 100}, "kv_cache_tokens 100 is less than max_model_len 256"),
        ({"num_window_tails": -1}, "num_window_tails is -1"),
        ({"tp_size": 4, "dcp_size": 3}, "dcp_size is 3, which does not divide tp_size 4"),
        ({"tp_size": 2, "dcp_size": 2, "block_size": 2}, "block_size is 2 with dcp_size 2"),
    ],
)
def test_sizes_that_cannot_work_are_refused(change: dict[str, int], message: str) -> None:
    asked = {
        "max_num_seqs": 4,
        "max_model_len": 256,
        "block_size": 16,
        "kv_cache_tokens": None,
        "num_window_tails": 2,
        "with_drafts": False,
    }
    with pytest.raises(ConfigError, match=message):
        resolve_limits(checkpoint().config, **(asked | change))  # type: ignore[arg-type]
    limits = resolve_limits(checkpoint().config, **asked)  # type: ignore[arg-type]
    assert limits.num_blocks == 4 * 16
