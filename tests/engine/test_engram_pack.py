"""Engram rows from a pack: the same bits as from the published shards, whatever happens to the pack or a refusal.

Where a pack is damaged, it is in every row of two columns, one of each of two ranks: no token can do without them.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deskfleet.endpoint import EngramStats, SamplingParams
from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.engine.core import CoreOptions, EngineCore
from deskfleet.engine.llm import LLM
from deskfleet.engine.messages import AddRequest
from deskfleet.errors import ConfigError, PackError, RankDied, WrongPack
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.packs import PackedTables, PackJob
from tests.engine.engines import MODEL, chunks_of, greedy, random_ids, request, stats_when
from tests.engine.golden import checkpoint, plain_limits, token_map
from tests.engine.lockstep import Lockstep

PROMPTS = [random_ids(length, seed=200 + length) for length in (1, 3, 20, 65)]
SCORED = random_ids(90, seed=5)
LAYERS = (1, 4)
NUM_COLUMNS = 12
BLOCK_BYTES = 4096


def make_pack(directory: Path, model: Path = MODEL, **which: object) -> Path:
    """Pack all columns, or those that PackJob.prepare is asked for."""
    PackJob.prepare(model, directory, **which).run(on_progress=lambda progress: None)  # type: ignore[arg-type]
    return directory


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All columns of the golden checkpoint."""
    return make_pack(tmp_path_factory.mktemp("packed") / "pack")


@pytest.fixture
def copied_pack(pack: Path, tmp_path: Path) -> Path:
    """A pack of our own to spoil."""
    return shutil.copytree(pack, tmp_path / "pack")


@pytest.fixture(scope="module")
def in_place(llm: LLM) -> tuple[list[tuple[int, ...]], bytes]:
    """Tokens and logits of one rank that reads the published shards."""
    return answers(llm)


def answers(llm: LLM) -> tuple[list[tuple[int, ...]], bytes]:
    return [c.token_ids for c in llm.generate(PROMPTS, greedy(6))], llm.score(SCORED).tobytes()


def spoil(pack_dir: Path, layers: tuple[int, ...] = LAYERS) -> None:
    """Flip a bit in every row of columns 3 and 6: in the first byte of each."""
    row_bytes = 64 + 64 // 32
    for path in (pack_dir / f"L{layer:02}/c{column:02}.egp" for layer in layers for column in (3, 6)):
        content = np.frombuffer(path.read_bytes(), np.uint8).copy()
        blocks = content.reshape(-1, BLOCK_BYTES)[1:]
        blocks[:, : 4032 // (row_bytes + 4) * row_bytes : row_bytes] ^= 1
        with path.open("r+b") as file:  # in place: readers have it open
            file.write(content.tobytes())


# --- sound packs


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("second_source", [False, True])
def test_a_pack_gives_the_bits_of_the_published_shards(
    pack: Path, in_place: tuple[list[tuple[int, ...]], bytes], tp_size: int, second_source: bool
) -> None:
    with LLM(
        MODEL, tp_size=tp_size, threads_per_rank=1, engram_pack=pack, engram_second_source=second_source
    ) as packed:
        assert answers(packed) == in_place
        source = packed._client.engram
        ranks = packed._client.ranks
    assert source is not None
    assert (source.source, source.second_source) == (
        str(pack),
        "published shards" if second_source else None,
    )
    assert [rank.engram for rank in ranks] == [source.backend] * tp_size
    assert source.backend.endswith("; rows checked")


def test_in_place_is_said_too(llm: LLM) -> None:
    source = llm._client.engram
    assert source is not None
    assert (source.source, source.second_source) == ("published shards", None)
    assert source.backend.endswith("; rows unchecked")


def test_ranks_without_columns_need_no_files(pack: Path) -> None:
    """Thirteen ranks share twelve columns; the last reads nothing, from wherever."""
    results = []
    for tp_size, packed in ((1, None), (13, None), (13, PackedTables(pack, has_second_source=False))):
        group = Lockstep(
            checkpoint(),
            tp_size,
            plain_limits(1, 128),
            pad_compressed_id=int(token_map()[checkpoint().config.engram_pad_token_id]),
            pack=packed,
        )
        core = EngineCore(group.leader, token_map(), CoreOptions(max_num_batched_tokens=64))
        core.add(AddRequest("score", SCORED[:40], bytes(40), (), SamplingParams(), score=True))
        logits = b""
        with group:
            while core.has_work:
                for output in core.step():
                    assert output.error is None
                    logits += output.logits or b""
            stats = [runner.model.tables.stats for runner in group.runners]
            reports = [runner.model.tables.report for runner in group.runners]
        results.append(logits)
        assert sum(one.num_rows for one in stats) == 40 * len(LAYERS) * NUM_COLUMNS
        if tp_size > NUM_COLUMNS:
            assert (reports[-1], replace(stats[-1], wait_s=0)) == (None, EngramStats())
            assert None not in reports[:-1]
    assert results[0] == results[1] == results[2]


async def test_what_was_read_is_counted_over_ranks(pack: Path) -> None:
    options = EngineOptions(tp_size=2, threads_per_rank=1, engram_pack=pack)
    async with EngineClient(checkpoint(), options) as engine:
        await engine.score(SCORED)
        rows = len(SCORED) * len(LAYERS) * NUM_COLUMNS
        stats = (await stats_when(engine, lambda stats: stats.engram.num_rows == rows)).engram
    assert 0 < stats.num_unique <= rows
    assert stats.num_cache_hits + stats.num_fallback_rows == 0
    assert 0 < stats.num_reads <= stats.num_unique
    assert stats.read_bytes == stats.num_reads * BLOCK_BYTES
    assert stats.wait_s > 0
    assert stats.errors == {}


# --- damaged packs


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_second_source_answers_for_flipped_bits_and_is_counted(
    copied_pack: Path, in_place: tuple[list[tuple[int, ...]], bytes], tp_size: int
) -> None:
    spoil(copied_pack)
    with LLM(
        MODEL, tp_size=tp_size, threads_per_rank=1, engram_pack=copied_pack, engram_second_source=True
    ) as packed:
        assert answers(packed) == in_place
        stats = packed._call(packed._client.stats()).engram
    assert stats.num_fallback_rows > 0
    assert stats.errors["checksum"] > 0


async def test_a_bit_that_flips_while_serving_is_an_error_and_never_a_wrong_token(
    copied_pack: Path, llm: LLM
) -> None:
    seen: list[int] = []
    async with EngineClient(
        checkpoint(), EngineOptions(tp_size=2, threads_per_rank=1, engram_pack=copied_pack)
    ) as engine:

        async def follow() -> None:
            async for chunk in engine.generate(request(PROMPTS[1], greedy(900))):
                seen.extend(chunk.token_ids)

        task = asyncio.create_task(follow())
        await stats_when(engine, lambda stats: stats.num_generated_tokens > 5)
        spoil(copied_pack, layers=(4,))
        async with asyncio.timeout(30):
            with pytest.raises(RankDied) as failure:
                await task
    error = failure.value
    assert "\n" not in error.message
    place = rf"{re.escape(str(copied_pack))}/L04/c(\d\d)\.egp.* block \d+.* row \d+.*checksum"
    assert (found := re.search(rf"rank ([01]) failed: engram rows of layer 4: .*{place}", error.message)), (
        error
    )
    assert int(found[2]) % 2 == int(found[1]), "the rank named does not read that column"
    expected = llm.generate([PROMPTS[1]], greedy(len(seen)))[0].token_ids
    assert len(seen) > 5
    assert tuple(seen) == expected, "a token was made of rows that were not the checkpoint's"


async def test_bits_that_flip_while_serving_are_repaired_by_the_second_source(
    copied_pack: Path, llm: LLM
) -> None:
    options = EngineOptions(threads_per_rank=1, engram_pack=copied_pack, engram_second_source=True)
    async with EngineClient(checkpoint(), options) as engine:
        asked = request(PROMPTS[2], greedy(40))
        task = asyncio.create_task(chunks_of(engine, asked))
        await stats_when(engine, lambda stats: stats.num_generated_tokens > 5)
        spoil(copied_pack)
        tokens = tuple(i for chunk in await task for i in chunk.token_ids)
        stats = (await engine.stats()).engram
    assert tokens == llm.generate([PROMPTS[2]], greedy(40))[0].token_ids
    assert stats.num_fallback_rows > 0
    assert stats.errors["checksum"] > 0


# --- refused before any process starts


def refusal(kind: type[Exception], **options: object) -> Exception:
    with pytest.raises(kind) as caught:
        EngineClient(checkpoint(), EngineOptions(**options))  # type: ignore[arg-type]
    return caught.value


def test_missing_columns_are_named_with_their_rank(tmp_path: Path) -> None:
    share = make_pack(tmp_path / "share", rank=1, world_size=3)
    error = refusal(WrongPack, tp_size=3, engram_pack=share)
    assert isinstance(error, WrongPack)
    zero, two = "0,3,6,9", "2,5,8,11"
    assert error.message == (
        f"{share} lacks what 3 ranks read: "
        f"rank 0 reads columns {zero} of layer 1, columns {zero} of layer 4; "
        f"rank 2 reads columns {two} of layer 1, columns {two} of layer 4"
    )
    assert error.hint == f"add it: deskfleet pack {MODEL} {share}"
    make_pack(share, rank=0, world_size=3)
    assert refusal(WrongPack, tp_size=3, engram_pack=share).hint == (  # type: ignore[attr-defined]
        f"add it: deskfleet pack {MODEL} {share} --rank 2 --world-size 3"
    )
    make_pack(share, rank=2, world_size=3)
    EngineClient(checkpoint(), EngineOptions(tp_size=3, engram_pack=share))


def test_a_layer_that_was_not_packed(tmp_path: Path) -> None:
    share = make_pack(tmp_path / "share", layers=(4,))
    error = refusal(WrongPack, engram_pack=share)
    assert "rank 0 reads columns 0-11 of layer 1" in str(error)
    assert "of layer 4" not in str(error)


def changed_rows(model: Path) -> str:
    """Other rows under equal headers: only their sample tells."""
    table = Checkpoint.open(model).tensors["layers.4.engram.embed.weight"]
    with table.path.open("r+b") as file:
        file.seek(table.offset_bytes)
        file.write(bytes(64))
    return r"source\.tables\[1\]\.sample_sha256"


def changed_header(model: Path) -> str:
    """A shard that was written by another tool."""
    table = Checkpoint.open(model).tensors["layers.1.engram.embed.weight"]
    content = table.path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = {"format": "pt", "tool": "another"}
    text = json.dumps(header).encode()
    table.path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return r"source\.tables\[0\]\.(weight|scale)\.header_sha256"


@pytest.mark.parametrize("change", [changed_rows, changed_header])
def test_a_pack_of_another_checkpoint(pack: Path, tmp_path: Path, change: object) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    where = change(model)  # type: ignore[operator]
    with pytest.raises(WrongPack) as caught:
        EngineClient(Checkpoint.open(model), EngineOptions(engram_pack=pack))
    assert re.fullmatch(
        rf"{re.escape(str(pack))} is of another checkpoint than {re.escape(str(model))}: {where} is .* in the "
        rf"former and .* in the latter",
        caught.value.message,
    )
    assert caught.value.hint == f"pack this one elsewhere: deskfleet pack {model} DIR"


def test_names_in_the_pack_do_not_matter_to_a_directory_without_names(tmp_path: Path) -> None:
    named = make_pack(tmp_path / "named", repo="a/b", revision="c0ffee")
    EngineClient(checkpoint(), EngineOptions(engram_pack=named, engram_second_source=True))


def test_no_pack_and_a_damaged_one(copied_pack: Path, tmp_path: Path) -> None:
    assert "engram.json is missing" in str(refusal(PackError, engram_pack=tmp_path / "nowhere"))
    manifest = copied_pack / "engram.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"EGP1", b"EGP2"))
    assert "manifest.format is 'EGP2'" in str(refusal(PackError, engram_pack=copied_pack))


def test_a_second_source_without_a_pack() -> None:
    error = refusal(ConfigError, engram_second_source=True)
    assert str(error).endswith("hint: name one: --engram-pack DIR")


@pytest.fixture
def short_pack(copied_pack: Path) -> Path:
    path = copied_pack / "L01" / "c03.egp"
    path.write_bytes(path.read_bytes()[:-BLOCK_BYTES])
    return copied_pack


def test_a_packed_file_that_was_cut_off_is_named_when_the_rank_opens_it(short_pack: Path) -> None:
    with pytest.raises(RankDied, match=r"rank 1 failed: .*L01/c03\.egp"):
        LLM(MODEL, tp_size=2, threads_per_rank=1, engram_pack=short_pack)
