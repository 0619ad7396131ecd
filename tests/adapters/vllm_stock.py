"""Compares the plug-in with vLLM 0.33's own lookup. Run by test_vllm_stock.py inside vLLM's environment, on a CPU.

    PYTHON tests/adapters/vllm_stock.py CHECKPOINT PACK WORK

Stock tables are filled by vLLM's own weight loader from the same shards; its kernel runs in Triton's interpreter, which
is slow: about a millisecond a row. The last line that is printed is a JSON object.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from safetensors.torch import load_file, save_file
from vllm.model_executor.model_loader.weight_utils import (
    filter_safetensors_files_by_weight_name,
    initialize_single_dummy_weight,
)
from vllm.plugins import load_general_plugins

from deskfleet_engram.host import ContractError, HostRows
from deskfleet_engram.host_split import write_split
from deskfleet_engram.source import open_source

load_general_plugins()  # before the module is there, as in a worker
OPEN_RANK: Any = importlib.import_module("deskfleet_vllm.__main__").open_rank
E: Any = importlib.import_module("vllm.models.deepseek_v41.common.engram")
PROMPTS: Any = importlib.import_module("deskfleet_vllm.prompts")
STATES: Any = importlib.import_module("vllm.models.deepseek_v41.nvidia.model_state")
MODEL: Any = importlib.import_module("vllm.models.deepseek_v41").DeepseekV41ForCausalLM

TOKENS = (1, 2, 5, 17)
MOST_TOKENS = 300


def patch(rank: int, world_size: int) -> None:
    """What needs a device or a group in vLLM, answered for one rank."""
    E.get_tensor_model_parallel_rank = lambda: rank
    E.get_tensor_model_parallel_world_size = lambda: world_size
    E.get_engram_dp_size = lambda: 1
    E.is_uva_available = lambda: True
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(multi_processor_count=4)


def config_of(checkpoint: Path, additional: dict[str, Any]) -> Any:
    return types.SimpleNamespace(
        additional_config=additional,
        engram_config=types.SimpleNamespace(cpu_offload=True, dp_shared_memory=False, use_thp=False),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=MOST_TOKENS),
        model_config=types.SimpleNamespace(model=str(checkpoint)),
    )


def stock_table(layout: Any, index: int, tensors: dict[str, torch.Tensor]) -> Any:
    """vLLM's own table on the CPU, loaded by its own loader."""
    sizes = tuple(size for order in layout.primes[index] for size in order)
    table = E.ParallelEngramEmbedding(layout.num_embeddings[index], layout.head_dim, sizes)
    prefix = f"layers.{layout.layer_ids[index]}.engram.embed."
    table.weight.weight_loader(table.weight, tensors[prefix + "weight"])
    table.weight_scale_inv.weight_loader(table.weight_scale_inv, tensors[prefix + "scale"])
    return table


def ids_for(table: Any, tokens: int, random: np.random.Generator) -> torch.Tensor:
    """Rows of this rank and of others, ids past the table, and -1."""
    shape = (tokens, table.n_hash_cols)
    ids = random.integers(0, table.num_embeddings, shape)
    own = random.integers(table.vocab_start_idx, table.vocab_end_idx, shape)
    ids = np.where(random.random(shape) < 0.6, own, ids)
    ids[random.random(shape) < 0.05] = -1
    ids[random.random(shape) < 0.05] = table.num_embeddings + 7
    ids[0, :2] = table.vocab_start_idx, table.vocab_end_idx - 1
    return torch.from_numpy(ids.astype(np.int32))


def outputs(table: Any, ids: torch.Tensor) -> tuple[bytes, bytes]:
    """Bytes of bf16 values and of packed rows, over memory that held something else."""
    bf16 = torch.full((len(ids), table.part_n_hash_cols, table.dim), 7.0, dtype=torch.bfloat16)
    table.lookup(ids, bf16, background=True)
    width = table.dim + table.dim // table.block_size
    packed = torch.full((len(ids), table.part_n_hash_cols, width), 9, dtype=torch.uint8)
    table.lookup(ids, packed)
    return bf16.view(torch.int16).numpy().tobytes(), packed.numpy().tobytes()


def portable_rows(rows: HostRows, layer: int, table: Any, ids: torch.Tensor) -> bytes:
    """Packed rows of this rank's columns, by the portable store, and zeros for what is not its own."""
    own = np.full((len(ids), table.part_n_hash_cols), -1, np.int64)
    local = ids.numpy()[:, table.head_start : table.head_start + table.part_n_hash_cols]
    own[:, : local.shape[1]] = rows.tables[layer].own_ids(local)
    found = rows.tables[layer].rows(own)
    found[own == -1] = 0
    return found.tobytes()


def hashes_ahead(checkpoint: Path, layout: Any) -> int:
    """Compare the ids that are hashed on the host before a step with those of vLLM's kernel in it; return how many.

    Two requests in changing order, in chunks, with images in the middle, at the begin and across chunks.
    """
    geometry = open_source(checkpoint).geometry
    size, image = geometry.spec.compressed_vocab_size, PROMPT_IMAGE
    random = np.random.default_rng(7)
    token_map = random.integers(0, size, 600)
    state = E.NgramHashState.__new__(E.NgramHashState)
    torch.nn.Module.__init__(state)
    state.token_map, state.pad_id, state.use_slot_cache = torch.tensor(token_map, dtype=torch.int32), 5, False
    state.primes, state.offsets = torch.tensor(layout.primes), layout.offsets
    state.multipliers = E.compute_hash_multipliers(layout.layer_ids, layout.max_ngram_size, size)
    state.block_size, depth = 64, layout.max_ngram_size - 1
    host = PROMPTS.Hashing(geometry, token_map, 5, image)
    prompts = [random.integers(0, 600, 40).astype(np.int32), random.integers(0, 600, 33).astype(np.int32)]
    for prompt in prompts:
        prompt[prompt == image] += 1
    prompts[0][7:15] = prompts[1][0:2] = prompts[1][31] = image
    compared = 0
    for step in ([(0, 0, 9)], [(1, 0, 10), (0, 9, 12)], [(0, 12, 40), (1, 10, 11)], [(1, 11, 33)]):
        tokens = np.concatenate([prompts[slot][begin:end] for slot, begin, end in step])
        positions = np.concatenate([np.arange(begin, end) for _, begin, end in step])
        window = np.full((len(step), depth), -1, np.int32)
        for row, (slot, begin, _) in enumerate(step):
            before = prompts[slot][max(0, begin - depth) : begin][::-1]
            window[row, : len(before)] = before
        starts = np.cumsum([0, *(end - begin for _, begin, end in step)]).astype(np.int32)
        given = [torch.from_numpy(each) for each in (tokens, positions, starts, tokens == image, window)]
        found = state(*given, torch.from_numpy(window == image), None, None).numpy()
        wanted = np.concatenate([host.ids(prompts[slot], begin, end) for slot, begin, end in step])
        np.testing.assert_array_equal(found, wanted)
        compared += found.size
    return compared


def states_are_told(checkpoint: Path, pack: Path, work: Path, layout: Any) -> list[str]:
    """The model state that vLLM's model names, with the plug-in, as a chain of classes."""
    patch(0, 1)
    told = {"pack": str(pack), "store": "staged", "receipts": str(work / "receipts-state")}
    E.get_current_vllm_config = lambda: config_of(checkpoint, {"deskfleet_engram": told})
    E.Engram._create_embedding(None, layout, 0)
    named = types.SimpleNamespace(get_model_state_cls=lambda: STATES.DeepseekV41ModelState)
    state = MODEL.get_model_state_cls(types.SimpleNamespace(language_model=named))
    return [each.__name__ for each in state.__mro__[:2]]


PROMPT_IMAGE = 77


def main(checkpoint: Path, pack: Path, work: Path) -> None:
    text = json.loads((checkpoint / "config.json").read_text())["text_config"]
    layout = E.EngramLayout(types.SimpleNamespace(**text))
    tensors = {
        name: tensor
        for shard in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
    }
    random = np.random.default_rng(1)
    is_hooked = bool(getattr(E.Engram._create_embedding, "is_deskfleet", False))
    compared, parameter_bytes = 0, set()
    for world_size in (1, 2, 3, 4, 5, 8):
        for rank in range(world_size):
            patch(rank, world_size)
            split = work / f"split-{world_size}-{rank}"
            with OPEN_RANK(pack, checkpoint, rank, world_size) as rows:
                for table in rows.tables.values():
                    write_split(table, rows.manifest.identity.sha256.hex(), split)
            portable = HostRows.open(
                pack,
                checkpoint,
                rank=rank,
                world_size=world_size,
                columns=rows.columns,
                backend="portable",
            )
            for index, layer in enumerate(layout.layer_ids):
                stock = stock_table(layout, index, tensors)
                ours = []
                for store in ("staged", "mapped"):
                    told = {
                        "pack": str(pack),
                        "store": store,
                        "split": str(split),
                        "receipts": str(work / f"receipts-{world_size}-{store}"),
                    }
                    E.get_current_vllm_config = lambda told=told: config_of(
                        checkpoint, {"deskfleet_engram": told}
                    )
                    ours.append(E.Engram._create_embedding(None, layout, index))
                for made in ours:
                    held = (made.weight, made.weight_scale_inv)
                    for param in held:
                        param.weight_loader(param, object())
                        initialize_single_dummy_weight(param)
                    parameter_bytes.add(sum(param.untyped_storage().nbytes() for param in held))
                    assert made.weight.shape == stock.weight.shape, (made.weight.shape, stock.weight.shape)
                most = MOST_TOKENS if (world_size, rank) in ((8, 7), (5, 4)) else 23
                for tokens in (*TOKENS, most):
                    ids = ids_for(stock, tokens, random)
                    wanted = outputs(stock, ids)
                    assert portable_rows(portable, layer, stock, ids) == wanted[1], (world_size, rank, layer)
                    for made in ours:
                        assert outputs(made, ids) == wanted, (world_size, rank, index, tokens, made.peer_rows)
                        compared += 1
    print(
        json.dumps(
            {
                "version": vllm.__version__,
                "is_hooked": is_hooked,
                "compared": compared,
                "parameter_bytes": sorted(parameter_bytes),
                "refused": refused_drift(checkpoint, pack, work, layout),
                "hashes_ahead": hashes_ahead(checkpoint, layout),
                "states": states_are_told(checkpoint, pack, work, layout),
                "opened_at_load": opened_at_load(checkpoint, work),
                "is_stock_without_config": is_stock_without_config(checkpoint, layout),
            }
        )
    )


def refused_drift(checkpoint: Path, pack: Path, work: Path, layout: Any) -> str:
    """What is said when a function that we lean on has other source."""

    def engram_head_shard_rank() -> int:
        return 0

    kept, E.engram_head_shard_rank = E.engram_head_shard_rank, engram_head_shard_rank
    told = {"pack": str(pack), "receipts": str(work / "receipts-drift")}
    E.get_current_vllm_config = lambda: config_of(checkpoint, {"deskfleet_engram": told})
    try:
        E.Engram._create_embedding(None, layout, 0)
    except ContractError as error:
        return error.message
    finally:
        E.engram_head_shard_rank = kept
    return ""


def opened_at_load(checkpoint: Path, work: Path) -> list[str]:
    """The files of which vLLM's loader reads tensors, with one beside the tables."""
    other = work / "other.safetensors"
    save_file({"layers.1.engram.wkv.weight": torch.zeros(2, 2)}, other)
    files = [*map(str, sorted(checkpoint.glob("*.safetensors"))), str(other)]
    kept = filter_safetensors_files_by_weight_name(
        files, lambda name: MODEL.is_unused_checkpoint_weight(None, name)
    )
    return [Path(path).name for path in kept]


def is_stock_without_config(checkpoint: Path, layout: Any) -> bool:
    """Whether a model without our key gets vLLM's own table. Pinned memory is not to be had here."""
    patch(0, 1)
    config = config_of(checkpoint, {})
    config.engram_config.cpu_offload = False
    E.get_current_vllm_config = lambda: config
    return type(E.Engram._create_embedding(None, layout, 0)) is E.ParallelEngramEmbedding


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
