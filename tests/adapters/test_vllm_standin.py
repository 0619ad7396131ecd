"""The plug-in for vLLM over a stand-in of the module that it touches: bytes, refusals, failures, receipts.

test_vllm_stock.py does the same over vLLM 0.33 itself, in the slow lane.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deskfleet.fleet.engram_receipts import find_receipt
from deskfleet_engram.errors import EngramError, IdentityError, RowError
from deskfleet_engram.hashing import hash_ids
from deskfleet_engram.host import ContractError, HostRows, MissingRowsError
from deskfleet_engram.ownership import select_columns
from deskfleet_engram.pack import pack
from deskfleet_engram.source import Source
from tests.engram.pack_fixtures import make_checkpoint, rows_of

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "adapters" / "deskfleet-vllm" / "src"
STANDIN = ROOT / "tests" / "adapters" / "vllm_standin"
KEY = "deskfleet_engram"

SPLITS = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (7, 8)]
"""Ranks that differ in columns; the last of five has a padded one."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", n_heads=8)


@pytest.fixture(scope="module")
def packed(checkpoint: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pack") / "pack"
    pack(checkpoint, directory)
    return directory


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, checkpoint: Source, tmp_path: Path) -> Iterator[ModuleType]:
    """The stand-in's module of tables, imported after the plug-in was registered, as vLLM's workers do."""
    monkeypatch.syspath_prepend(PLUGIN)
    monkeypatch.syspath_prepend(STANDIN)
    before = set(sys.modules)
    importlib.import_module("vllm")
    importlib.import_module("vllm.envs")
    plugin = importlib.import_module("deskfleet_vllm")
    plugin.register()
    plugin.register()
    engram = importlib.import_module("vllm.models.deepseek_v41.common.engram")
    release = importlib.import_module("deskfleet_vllm.release_0_33")
    host = importlib.import_module("deskfleet_engram.host")
    state = importlib.import_module(release.STATE_MODULE).DeepseekV41ModelState
    for name, sources in (
        ("DIGESTS", release.sources(engram)),
        ("STATE_DIGESTS", release.state_sources(state)),
    ):
        digests = {each: host.source_sha256(target) for each, target in sources.items()}
        monkeypatch.setattr(release, name, digests)
    engram.CONFIG.__dict__.update(
        additional_config={},
        engram_config=SimpleNamespace(cpu_offload=True, dp_shared_memory=False),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=300),
        model_config=SimpleNamespace(model=str(checkpoint.directory)),
    )
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    yield engram
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("vllm", "deskfleet_vllm"):
            del sys.modules[name]


def layout_of(engine: ModuleType, source: Source) -> Any:
    spec, geometry = source.geometry.spec, source.geometry
    primes = [geometry.primes[index].tolist() for index in range(len(spec.layer_ids))]
    return engine.EngramLayout(spec.layer_ids, spec.num_embeddings, spec.head_dim, primes)


def build(engine: ModuleType, source: Source, told: dict[str, Any] | None, index: int = 0) -> Any:
    """A layer's table, built as the engine builds it, with what additional config says."""
    engine.CONFIG.additional_config = {} if told is None else {KEY: told}
    return engine.Engram(layout_of(engine, source), index).embed_tokens


def stock(engine: ModuleType, source: Source, index: int) -> Any:
    table = build(engine, source, None, index)
    rows = torch.from_numpy(rows_of(source, source.geometry.spec.layer_ids[index]))
    table.weight.weight_loader(table.weight, rows[:, : table.dim].contiguous().view(torch.float8_e4m3fn))
    table.weight_scale_inv.weight_loader(table.weight_scale_inv, rows[:, table.dim :].contiguous())
    return table


def draw(table: Any, tokens: int, random: np.random.Generator) -> torch.Tensor:
    shape = (tokens, table.n_hash_cols)
    ids = random.integers(0, table.num_embeddings, shape)
    ids = np.where(
        random.random(shape) < 0.6, random.integers(table.vocab_start_idx, table.vocab_end_idx, shape), ids
    )
    ids[random.random(shape) < 0.1] = -1
    ids[random.random(shape) < 0.05] = table.num_embeddings + 3
    return torch.from_numpy(ids.astype(np.int32))


def outputs(table: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.full((len(ids), table.part_n_hash_cols, table.dim), 7.0, dtype=torch.bfloat16)
    table.lookup(ids, values, background=True)
    packed = torch.full((*values.shape[:2], table.dim + table.dim // table.block_size), 9, dtype=torch.uint8)
    table.lookup(ids, packed)
    return values.view(torch.int16), packed


@pytest.fixture
def host_nodes(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for a CUDA stream: a host node runs at once, on another thread, without Python's lock."""

    def launch(stream: int, function_address: int, argument: int) -> None:
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function_address)
        thread = threading.Thread(target=function, args=(argument,))
        thread.start()
        thread.join()

    monkeypatch.setattr(sys.modules["deskfleet_vllm.cuda"], "launch_host_function", launch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=1))
    rank = sys.modules["deskfleet_vllm.rank"]
    monkeypatch.setattr(rank, "choose", lambda wanted, facts: (wanted or "staged", "by the test"))


def split(pack_dir: Path, source: Source, to: Path) -> None:
    """The command that people run before a mapped store."""
    command = [sys.executable, "-m", "deskfleet_vllm", "split", str(pack_dir), str(source.directory)]
    done = subprocess.run(
        [*command, "--to", str(to)],
        env={**os.environ, "PYTHONPATH": str(PLUGIN)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("rank", "world_size"), SPLITS)
def test_every_store_gives_the_bytes_of_the_stock_table(
    engine: ModuleType,
    host_nodes: None,
    checkpoint: Source,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    world_size: int,
) -> None:
    """The pack holds what this rank reads, and nothing else."""
    monkeypatch.setattr(engine.GROUP, "rank", rank)
    monkeypatch.setattr(engine.GROUP, "world_size", world_size)
    packed, spec = tmp_path / "pack", checkpoint.geometry.spec
    pack(checkpoint, packed, columns=select_columns(spec, rank=rank, world_size=world_size, split="runs"))
    command = importlib.import_module("deskfleet_vllm.__main__")
    place = ["--rank", str(rank), "--world-size", str(world_size), "--to", str(tmp_path)]
    assert command.main(["split", str(packed), str(checkpoint.directory), *place]) == 0
    random = np.random.default_rng(rank)
    for index in (0, 1):
        wanted = stock(engine, checkpoint, index)
        for store in ("staged", "callback", "mapped"):
            told = {"pack": str(packed), "store": store, "split": str(tmp_path)}
            made = build(engine, checkpoint, told, index)
            held = [made.weight, made.weight_scale_inv]
            assert sum(param.untyped_storage().nbytes() for param in held) < 1024
            assert made.weight.shape == wanted.weight.shape
            for param in held:
                param.weight_loader(param, object())
                param.fill_(1)
            for tokens in (1, 6, 300 if world_size == 8 else 33):
                ids = draw(wanted, tokens, random)
                for found, right in zip(outputs(made, ids), outputs(wanted, ids), strict=True):
                    assert torch.equal(found, right), (store, index, tokens)
            made.lookup(torch.empty((0, made.n_hash_cols), dtype=torch.int32), torch.empty(0))


def test_host_rows_decode_as_torch_does(checkpoint: Source, packed: Path) -> None:
    """All of a rank's rows, whose bytes are any: NaN codes, scales of 2^-127, results that are subnormal."""
    with HostRows.open(packed, checkpoint.directory, rank=3, world_size=4, columns=range(18, 24)) as rows:
        table = rows.tables[3]
        ids = np.arange(table.first_row, table.end_row, dtype=np.int32)
        raw = torch.from_numpy(table.rows(ids))
        found = torch.from_numpy(table.bf16(ids)).view(torch.bfloat16)
        assert not table.bf16(np.array([-1, table.first_row - 1, table.end_row])).any()
        assert table.rows(np.array([-1])).tolist() == [[0] * 256 + [127] * 8]
    scales = raw[:, 256:].contiguous().view(torch.float8_e8m0fnu).float().repeat_interleave(32, dim=1)
    wanted = (raw[:, :256].contiguous().view(torch.float8_e4m3fn).float() * scales).bfloat16()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num().view(torch.int16), wanted.nan_to_num().view(torch.int16))


def test_a_model_without_our_key_is_stock(engine: ModuleType, checkpoint: Source) -> None:
    table = build(engine, checkpoint, None)
    assert type(table) is engine.ParallelEngramEmbedding
    model = sys.modules["vllm.models.deepseek_v41"].DeepseekV41ForCausalLM
    assert not hasattr(model, "is_unused_checkpoint_weight")


def test_the_loader_is_told_to_leave_the_tables_out(
    engine: ModuleType, checkpoint: Source, packed: Path
) -> None:
    build(engine, checkpoint, {"pack": str(packed)})
    model = sys.modules["vllm.models.deepseek_v41"].DeepseekV41ForCausalLM()
    assert model.is_unused_checkpoint_weight("layers.14.engram.embed.weight")
    assert model.is_unused_checkpoint_weight("layers.1.engram.embed.scale")
    assert not model.is_unused_checkpoint_weight("layers.1.engram.wkv.weight")
    assert not model.is_unused_checkpoint_weight("embed.weight")


def other_version(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.34.1")


def other_source(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def engram_head_shard_rank() -> int:
        return engine.GROUP.rank + 1  # type: ignore[no-any-return]

    monkeypatch.setattr(engine, "engram_head_shard_rank", engram_head_shard_rank)


def replicas(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.GROUP, "dp_size", 2)


def tables_on_the_device(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.CONFIG.engram_config, "cpu_offload", False)


def rows_of_another_rank(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["deskfleet_vllm.rank"], "HostRows", Shifted)


def a_model_by_name(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.CONFIG.model_config, "model", "deepseek-ai/DeepSeek-V4.1-Flash")


class Shifted:
    """Opens the columns of the next rank."""

    @staticmethod
    def open(pack_dir: Path, checkpoint: Path, *, rank: int, world_size: int, columns: Any) -> Any:
        from deskfleet_engram.host import HostRows

        shifted = [(column + len(columns)) % 24 for column in columns]
        return HostRows.open(pack_dir, checkpoint, rank=rank, world_size=world_size, columns=shifted)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (other_version, ContractError, r"made for vLLM 0\.33, not 0\.34\.1"),
        (other_source, ContractError, r"the source of engram_head_shard_rank is \w+, but .* made for \w+"),
        (replicas, ContractError, r"not shared over data-parallel replicas \(2\)"),
        (tables_on_the_device, ContractError, r"need cpu_offload on"),
        (rows_of_another_rank, IdentityError, r"rank 0 of 4: the engine's first row is 0, the pack's \d+"),
        (a_model_by_name, ContractError, r"is no directory, so the pack cannot be compared"),
    ],
)
def test_what_it_was_not_made_for_stops_the_engine(
    engine: ModuleType,
    checkpoint: Source,
    packed: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[ModuleType, pytest.MonkeyPatch], None],
    error: type[EngramError],
    says: str,
) -> None:
    monkeypatch.setattr(engine.GROUP, "world_size", 4)
    change(engine, monkeypatch)
    with pytest.raises(error, match=says):
        build(engine, checkpoint, {"pack": str(packed)})


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"store": "staged"}, 'not an object with "pack"'),
        ({"pack": "/engram", "stores": "staged"}, "unknown keys: stores"),
        ({"pack": "/engram", "store": "disk"}, "not auto, mapped, callback, staged"),
        ({"pack": "/engram", "allow_untested": 1}, "not true or false"),
    ],
)
def test_settings_that_are_none_are_refused(
    engine: ModuleType, checkpoint: Source, told: dict[str, Any], says: str
) -> None:
    with pytest.raises(ContractError, match=says):
        build(engine, checkpoint, told)


def test_another_checkpoint_is_refused(
    engine: ModuleType, checkpoint: Source, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_checkpoint(tmp_path / "other", n_heads=8, seed=5)
    monkeypatch.setattr(engine.CONFIG.model_config, "model", str(other.directory))
    with pytest.raises(IdentityError, match="of another checkpoint"):
        build(engine, other, {"pack": str(packed)})


def test_a_checkpoint_without_its_table_shards_is_compared_by_configuration(
    engine: ModuleType, checkpoint: Source, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copy(checkpoint.directory / name, model / name)
    monkeypatch.setattr(engine.CONFIG.model_config, "model", str(model))
    build(engine, checkpoint, {"pack": str(packed), "receipts": str(tmp_path)})
    receipt = json.loads((tmp_path / "vllm-rank0-receipt.json").read_text())
    assert receipt["checkpoint_proof"] == "configuration only: model-00001.safetensors is not there"

    text = json.loads((model / "config.json").read_text())
    text["text_config"]["engram_pad_token_id"] += 1
    (model / "config.json").write_text(json.dumps(text))
    with pytest.raises(IdentityError, match="engram pad_token_id 2, but the model has 3"):
        build(engine, checkpoint, {"pack": str(packed), "receipts": str(tmp_path / "again")})


def test_columns_that_the_pack_lacks_are_named(
    engine: ModuleType, checkpoint: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(checkpoint, tmp_path / "pack", columns=[(1, c) for c in range(12)] + [(3, c) for c in range(11)])
    monkeypatch.setattr(engine.GROUP, "world_size", 2)
    with pytest.raises(MissingRowsError, match="lacks columns 11 of layer 3"):
        build(engine, checkpoint, {"pack": str(tmp_path / "pack")})


def cut_off(pack_dir: Path) -> None:
    """End every file of layer 1 after its superblock, while it is open."""
    for path in (pack_dir / "L01").iterdir():
        os.truncate(path, 4096)


def unread(engine: ModuleType, directory: Path, seed: int) -> Source:
    """A checkpoint, packed, of which no row is in the cache that readers of this process share."""
    source = make_checkpoint(directory / "model", n_heads=8, seed=seed)
    pack(source, directory / "pack")
    engine.CONFIG.model_config.model = str(source.directory)
    return source


def test_a_row_that_the_disk_does_not_give_ends_the_step(engine: ModuleType, tmp_path: Path) -> None:
    source = unread(engine, tmp_path, 11)
    table = build(engine, source, {"pack": str(tmp_path / "pack"), "store": "staged"})
    cut_off(tmp_path / "pack")
    ids = draw(table, 6, np.random.default_rng(0))
    out = torch.full((6, table.part_n_hash_cols, table.dim), 7.0, dtype=torch.bfloat16)
    with pytest.raises(RowError, match=r"L01/c\d\d\.egp"):
        table.lookup(ids, out)
    assert (out == 7).all()


def test_a_host_node_that_fails_ends_the_step_and_the_process(
    engine: ModuleType,
    host_nodes: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = sys.modules["deskfleet_vllm.watch"]
    monkeypatch.setattr(watch, "GRACE_S", 0.0)
    ended: list[int] = []
    is_over = threading.Event()
    monkeypatch.setattr(
        sys.modules["deskfleet_vllm.rank"],
        "watch",
        lambda *given: watch.watch(*given, end=lambda code: (ended.append(code), is_over.set())),
    )
    source = unread(engine, tmp_path, 12)
    table = build(engine, source, {"pack": str(tmp_path / "pack"), "store": "callback"})
    ids = draw(table, 6, np.random.default_rng(0))
    out = torch.empty(6, table.part_n_hash_cols, table.dim, dtype=torch.bfloat16)
    cut_off(tmp_path / "pack")
    with caplog.at_level(logging.CRITICAL), pytest.raises(RuntimeError):
        table.lookup(ids, out)
    assert is_over.wait(20)
    assert ended == [watch.EXIT_CODE]
    assert re.search(r"L01/c\d\d\.egp.*this process ends", caplog.text, re.S)
    window = table.store.window
    is_own = window.own_ids(ids).reshape(-1) >= 0
    assert (
        window.codes[: len(is_own)][is_own] == 0x7F
    ).all()  # NaN, never zeros and never another step's rows


@pytest.mark.parametrize("store", ["staged", "callback"])
def test_a_proof_finds_one_wrong_bit(
    engine: ModuleType,
    host_nodes: None,
    checkpoint: Source,
    packed: Path,
    monkeypatch: pytest.MonkeyPatch,
    store: str,
) -> None:
    proof = importlib.import_module("deskfleet_vllm.prove")
    monkeypatch.setattr(proof, "_device", lambda store: torch.device("cpu"))
    monkeypatch.setattr(proof, "_captured", lambda work: work)
    command = importlib.import_module("deskfleet_vllm.__main__")
    with command.open_rank(packed, checkpoint.directory, 1, 4) as rows:
        lines = list(proof.prove(engine, rows, checkpoint.directory, store=store, num_lookups=3))
        assert lines[0].startswith(
            f"3 steps of 6 x 6 rows of layers 1+3, twice each: all equal by the {store} store"
        )
        read = proof._independent(rows, checkpoint.directory)

        def spoilt(table: Any, own: Any) -> Any:
            codes, scales = read(table, own)
            if table.layer == 3:
                codes[(own >= 0).argmax(), 9] ^= 1
            return codes, scales

        monkeypatch.setattr(proof, "_independent", lambda *given: spoilt)
        with pytest.raises(
            ContractError, match=rf"layer 3, lookup 0, cold: the {store} store gave other values"
        ):
            list(proof.prove(engine, rows, checkpoint.directory, store=store, num_lookups=3))


def test_a_rank_says_what_it_replaced(
    engine: ModuleType,
    checkpoint: Source,
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine.GROUP, "rank", 1)
    monkeypatch.setattr(engine.GROUP, "world_size", 4)
    with caplog.at_level(logging.INFO, "vllm.deskfleet_engram"):
        for index in (0, 1):
            build(engine, checkpoint, {"pack": str(packed)}, index)
    assert re.findall(r"deskfleet-engram: columns (\S+) of 24 from disk", caplog.text) == ["6-11"]
    path = tmp_path / "cache" / "deskfleet-engram" / "vllm-rank1-receipt.json"
    receipt = json.loads(path.read_text())
    assert receipt["replaced"] == [
        "vllm.models.deepseek_v41.common.engram.Engram._create_embedding",
        "vllm.models.deepseek_v41.DeepseekV41ForCausalLM.is_unused_checkpoint_weight",
        "vllm.models.deepseek_v41.DeepseekV41ForCausalLM.get_model_state_cls",
    ]
    found = find_receipt(caplog.text)  # as the launcher reads it
    assert found is not None
    said = dict(pair.split("=") for pair in found.split())
    assert said["pack"] == receipt["pack_sha256"][:16]
    assert (said["engine"], said["store"], said["rank"]) == ("vllm-0.33.0", "staged", "1/4")
    assert receipt["engine_version"] == "0.33.0"
    assert receipt["pid"] == os.getpid()
    assert receipt["columns"] == [6, 7, 8, 9, 10, 11]
    assert receipt["layers"] == [1, 3]
    assert (receipt["store"], receipt["store_reason"]) == ("staged", "no CUDA device")
    assert receipt["is_checked"] is True
    assert "ParallelEngramEmbedding" in receipt["source_sha256"]


IMAGE = 7
"""The stand-in's token of image positions."""


def prompt_state(engine: ModuleType, source: Source, told: dict[str, Any]) -> tuple[Any, dict[int, Any]]:
    """The model's state, as the runner makes it, and the tables by layer."""
    tables = {layer: build(engine, source, told, index) for index, layer in enumerate((1, 3))}
    size = source.geometry.spec.compressed_vocab_size
    hasher = engine.NgramHashState([(token * 5) % size for token in range(600)], pad_id=11)
    model = sys.modules["vllm.models.deepseek_v41"].DeepseekV41ForCausalLM(hasher)
    return model.get_model_state_cls()(None, model, None, "cpu"), tables


def batch_of(chunks: list[tuple[int, int, int]], prompts: dict[int, list[int]]) -> Any:
    """A step of the V2 runner: slot, first position and length of every request, in the batch's order."""
    begins = np.array([begin for _, begin, _ in chunks], np.int32)
    is_prefilling = np.array([begin < len(prompts.get(slot, [])) for slot, begin, _ in chunks])
    return SimpleNamespace(
        query_start_loc_np=np.cumsum([0, *(length for *_, length in chunks)]).astype(np.int32),
        idx_mapping_np=np.array([slot for slot, *_ in chunks]),
        num_computed_prefill_tokens_np=begins,
        is_prefilling_np=is_prefilling,
        has_prefill=bool(is_prefilling.any()),
    )


def ids_of(source: Source, tokens: list[int], begin: int, end: int) -> NDArray[np.int64]:
    """Row ids of those positions, by the reference's arithmetic over the whole sequence."""
    size = source.geometry.spec.compressed_vocab_size
    compressed = np.array([-1 if token == IMAGE else token * 5 % size for token in tokens], np.int64)
    return hash_ids(source.geometry, compressed, start=0, position=0, pad_id=11)[begin:end]


@pytest.mark.parametrize("store", ["staged", "callback"])
def test_rows_of_prompts_are_there_when_the_step_looks_them_up(
    engine: ModuleType, host_nodes: None, tmp_path: Path, store: str
) -> None:
    """Chunks, an image, requests that change places and slots, one that was preempted, rejected drafts: the disk is not
    asked in any step but for what no prompt held, and the rows are those of a model without any of this."""
    source = unread(engine, tmp_path, 21 if store == "staged" else 22)
    engine.CONFIG.scheduler_config.max_num_batched_tokens = 12
    told = {"pack": str(tmp_path / "pack"), "store": store, "receipts": str(tmp_path)}
    state, tables = prompt_state(engine, source, told)
    wanted = {layer: stock(engine, source, index) for index, layer in enumerate((1, 3))}
    rank = next(iter(sys.modules["deskfleet_vllm.seam"]._open.values()))
    random = np.random.default_rng(4)
    first, second, third = (random.integers(8, 600, size).tolist() for size in (30, 9, 20))
    first[10:16] = [IMAGE] * 6

    def step(chunks: list[tuple[int, int, int]], prompts: dict[int, list[int]]) -> int:
        """Run one step, compare its rows, and return the reads that it waited for."""
        assert state.prepare_inputs(batch_of(chunks, prompts), None) == {"lookback_token_ids": None}
        rank.prefetcher.wait()
        before = rank.rows.counters()["num_reads"]
        ids = np.concatenate([ids_of(source, prompts[slot], at, at + length) for slot, at, length in chunks])
        for position, (layer, table) in enumerate(tables.items()):
            layer_ids = torch.from_numpy(ids[:, position].astype(np.int32))
            for found, right in zip(
                outputs(table, layer_ids), outputs(wanted[layer], layer_ids), strict=True
            ):
                assert torch.equal(found, right)
        return int(rank.rows.counters()["num_reads"] - before)

    def begin(slot: int, tokens: list[int]) -> None:
        state.add_request(slot, SimpleNamespace(prefill_token_ids=tokens))

    begin(0, first)
    assert step([(0, 0, 8)], {0: first}) == 0
    begin(3, second)
    assert step([(3, 0, 4), (0, 8, 8)], {0: first, 3: second}) == 0  # over the image, in another order
    assert step([(0, 16, 7), (3, 4, 5)], {0: first, 3: second}) == 0
    begin(0, third)  # the first was preempted; another request has its slot
    assert step([(0, 0, 12)], {0: third}) == 0
    begin(3, first)  # and comes back, in another
    assert step([(0, 12, 8), (3, 0, 4)], {0: third, 3: first}) == 0
    drafts = {0: [*third, 599, 598, 597, 596]}
    assert not batch_of([(0, 20, 4)], {0: third}).has_prefill
    ids = ids_of(source, drafts[0], 20, 24)  # drafts, of which the last three are rejected and drawn again
    again = ids_of(source, [*third, 599, 590, 591, 592], 20, 24)
    for given in (ids, again):
        for position, (layer, table) in enumerate(tables.items()):
            layer_ids = torch.from_numpy(given[:, position].astype(np.int32))
            for found, right in zip(
                outputs(table, layer_ids), outputs(wanted[layer], layer_ids), strict=True
            ):
                assert torch.equal(found, right)
    assert state.seen == [0, 3, 0, 3]


def test_prompts_are_left_alone_when_told_so_or_when_the_state_is_another(
    engine: ModuleType, checkpoint: Source, packed: Path, tmp_path: Path
) -> None:
    stock_class = sys.modules["vllm.models.deepseek_v41.nvidia.model_state"].DeepseekV41ModelState
    told = {"pack": str(packed), "receipts": str(tmp_path)}
    state, _ = prompt_state(engine, checkpoint, {**told, "prefetch": False})
    assert type(state) is stock_class
    receipt = json.loads((tmp_path / "vllm-rank0-receipt.json").read_text())
    assert len(receipt["replaced"]) == 2

    sys.modules["deskfleet_vllm.release_0_33"].STATE_DIGESTS.clear()
    with pytest.raises(
        ContractError, match=r"DeepseekV41ModelState.__init__ is \w+, but .* made for not there"
    ):
        prompt_state(engine, checkpoint, told)


def test_rows_of_the_mapped_store_are_compared_before_use(
    engine: ModuleType, checkpoint: Source, packed: Path, tmp_path: Path
) -> None:
    split(packed, checkpoint, tmp_path)
    told = {"pack": str(packed), "store": "mapped", "split": str(tmp_path)}
    path = tmp_path / "L01-c00-23.rows"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(IdentityError, match="row 0 is not what the pack holds"):
        build(engine, checkpoint, told)
    os.truncate(path, 4096)
    with pytest.raises(EngramError, match=r"has 4096 bytes, not \d+"):
        build(engine, checkpoint, told)
    path.unlink()
    with pytest.raises(EngramError, match="No such file"):
        build(engine, checkpoint, told)


@pytest.mark.parametrize(
    ("wanted", "facts", "store", "reason"),
    [
        (None, (True, True, True, True), "mapped", "the first that works here"),
        (None, (True, True, False, True), "callback", "not mapped, because the split files are not there"),
        (None, (True, False, True, True), "callback", "not mapped, because kernels of this device cannot"),
        (
            None,
            (True, False, True, False),
            "staged",
            "not callback, because the native reader is not at work",
        ),
        (None, (False, False, True, True), "staged", "no CUDA device"),
        ("staged", (True, True, True, True), "staged", "as asked"),
        ("mapped", (True, False, True, True), None, "attribute 100 is 0"),
        ("callback", (True, True, True, False), None, "native reader is not at work"),
    ],
)
def test_the_store_is_chosen_with_a_reason(
    engine: ModuleType, wanted: Any, facts: tuple[bool, ...], store: str | None, reason: str
) -> None:
    choice = sys.modules["deskfleet_vllm.choice"]
    given = choice.Facts(*facts, native_reason="no library")
    if store is None:
        with pytest.raises(ContractError, match=re.escape(reason)):
            choice.choose(wanted, given)
        return
    found, why = choice.choose(wanted, given)
    assert found == store
    assert reason in why


def test_the_command_line_is_checked_before_anything_is_loaded(
    engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.34.0")
    register = sys.modules["deskfleet_vllm"].register
    told = {"pack": "/engram"}
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "--additional-config", json.dumps({KEY: told})])
    with pytest.raises(ContractError, match=r"not 0\.34\.0"):
        register()
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", f"--additional-config.{KEY}.pack", "/engram"])
    with pytest.raises(ContractError, match=r"not 0\.34\.0"):
        register()
    told = {"pack": "/engram", "allow_untested": True}
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", f"--additional-config={json.dumps({KEY: told})}"])
    register()
    monkeypatch.setattr(sys, "argv", ["vllm", "serve"])
    register()
