"""Runs scenarios inside SGLang, the released one or the stand-in, each in a process of its own. Not a test.

    PYTHON sglang_driver.py < request.json        answers with one line of JSON: outcomes by name of the scenario

A request has `model`, `out`, `wheels` (directory of the unpacked release; null: the stand-in) and `scenarios`. Each
scenario has a name, environment, rank, number of ranks, what is spoilt beforehand, and what is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.machinery
import json
import os
import sys
import time
import traceback
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REQUEST = json.load(sys.stdin)
MODEL, OUT = Path(REQUEST["model"]), Path(REQUEST["out"])


class _Whatever(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Pretended(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Whatever(name, (), {})


def _use_release(wheels: Path) -> None:
    """Make the unpacked wheel importable: what it insists on and this machine lacks is pretended."""
    sys.path[:0] = [str(wheels / "sglang"), str(wheels / "extra")]
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # remembers the truth, before the pretence
    transforms = ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")
    names = ["IPython", "IPython.display", "torchvision", "torchvision.io"]
    for name in [*names, *(f"torchvision.{leaf}" for leaf in transforms)]:
        module = _Pretended(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)


if REQUEST["wheels"] is None:
    sys.path.insert(0, str(Path(__file__).with_name("sglang_standin")))
else:
    _use_release(Path(REQUEST["wheels"]))

import numpy as np  # noqa: E402
import sglang  # noqa: E402
import sglang.srt.managers.scheduler as scheduler_module  # noqa: E402
import torch  # noqa: E402
from sglang.kernels.ops.embeddings import engram_gather as gather_module  # noqa: E402
from sglang.srt import plugins  # noqa: E402
from sglang.srt.layers import engram as E  # noqa: E402
from sglang.srt.layers import engram_staging  # noqa: E402
from sglang.srt.model_executor.model_runner_components.ngram_embedding_manager import (  # noqa: E402
    NgramEmbeddingManager,
)
from sglang.srt.plugins import hook_registry  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from deskfleet_engram.host import source_sha256  # noqa: E402
from deskfleet_engram.source import open_source  # noqa: E402
from deskfleet_sglang import contract, cuda  # noqa: E402

IMAGE = 9
torch.set_num_threads(1)  # children are forked
SOURCE = open_source(MODEL)
CONFIG = json.loads((MODEL / "config.json").read_text())
CONFIG = SimpleNamespace(**CONFIG.get("text_config", CONFIG))
LAYOUT = E.EngramLayout.from_config(CONFIG)


def be_rank(rank: int, tp_size: int) -> None:
    group = SimpleNamespace(rank_in_group=rank, world_size=tp_size)
    parallel = SimpleNamespace(tp_size=tp_size, tp_rank=rank, tp_group=group, attn_dp_size=1, attn_cp_size=1)
    E.get_parallel = lambda: parallel
    engram_staging.get_parallel = lambda: parallel
    E.get_model = lambda: SimpleNamespace(model_path=str(MODEL))
    E._sorted_host_reads = lambda device: False
    torch.cuda.current_device = lambda: 0


def tensor_of(span: Any, dtype: torch.dtype) -> torch.Tensor:
    raw = span.path.read_bytes()[span.offset_bytes : span.offset_bytes + span.num_bytes]
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(*span.shape).view(dtype)


def make_embeddings(spoilt: str | None = None, *, is_dummy: bool = False) -> list[Any]:
    """The tables of both layers, loaded as SGLang loads them, or filled as it fills what is not loaded."""
    made = []
    for position, table in enumerate(SOURCE.tables):
        bounds = tuple(LAYOUT.column_bounds(position))
        embedding = E.EngramEmbedding(table.num_rows, LAYOUT.head_dim, table.layer, column_bounds=bounds)
        if is_dummy:
            made.append(embedding)
            continue
        weight = tensor_of(table.weight, torch.float8_e4m3fn)
        if spoilt == "weights":
            weight.view(torch.uint8)[:] ^= 1
        embedding.weight.weight_loader(embedding.weight, weight)
        embedding.scale.weight_loader(embedding.scale, tensor_of(table.scale, torch.float8_e8m0fnu))
        embedding.finish_load(f"layer {table.layer}")
        made.append(embedding)
    if is_dummy:
        from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

        model = torch.nn.Sequential(*made, torch.nn.Linear(2, 2))
        initialize_dummy_weights(model)
        assert len(model.state_dict()) == 2, list(model.state_dict())
    return made


class FastTokenizer:
    """What SGLang's hasher takes of a tokenizer of transformers."""

    backend_tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()


def make_hasher() -> Any:
    tokenizer = FastTokenizer()
    pad, size = CONFIG.engram_pad_token_id, CONFIG.engram_compressed_vocab_size
    return E.EngramHasher(LAYOUT, tokenizer, pad, size)


def make_manager(embeddings: list[Any], hasher: Any) -> Any:
    model = torch.nn.Module()
    model.embeddings, model.hasher = torch.nn.ModuleList(embeddings), hasher
    return NgramEmbeddingManager.from_model(
        model=model,
        model_config=SimpleNamespace(
            use_ngram_embedding=False, use_engram=True, ngram_embedding_n=0, context_len=64
        ),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(8, 64)),
        max_running_requests=4,
        device="cpu",
    )


def bits(values: torch.Tensor) -> np.ndarray[Any, Any]:
    return values.view(torch.uint16).numpy()


def spoil(what: str | None) -> None:
    """Break one thing before the plug-in is loaded."""
    if what == "version":
        sglang.__version__ = "0.5.24"
    elif what == "source":
        E.shard_range = lambda rows, bounds, rank, size: (rank, rank + 1)
    elif what is not None and what.startswith("swallow "):
        stock = hook_registry.HookRegistry.__dict__["_apply_target"].__func__

        def apply_target(cls: Any, target: str, hooks: Any) -> None:
            if target.endswith(what.removeprefix("swallow ")):
                raise ValueError("as if another plug-in were in the way")
            stock(cls, target, hooks)

        hook_registry.HookRegistry._apply_target = classmethod(apply_target)
    elif what == "mapped files can be read":
        cuda.current_device = lambda: 0
        cuda.reads_host_page_tables = lambda device: True

    elif what is not None and what.startswith("device by hand"):
        be_device()


def be_device() -> None:
    """Play a CUDA device whose streams run everything at once; its memory is the host's."""
    cuda.current_device = lambda: 0
    cuda.reads_host_page_tables = lambda device: False
    cuda.copy = lambda stream, target, source, count: ctypes.memmove(target, source, count)
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    cuda.launch_host_function = lambda stream, function, argument: called(function)(argument)
    torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=0)
    torch.cuda.is_current_stream_capturing = lambda: False
    plain_empty = torch.empty
    torch.empty = lambda *shape, pin_memory=False, **others: plain_empty(*shape, **others)


def interpreted_gather(
    w: int, s: int, ids: Any, out: Any, dim: int, block: int, row_lo: int = 0, row_hi: int = 2**62, **_: Any
) -> Any:
    """SGLang's kernel in Triton's interpreter; its wrapper insists on a CUDA tensor.

    The interpreter widens a comparison of scalars to int64 and then refuses it as a mask: it is narrowed again.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    masked_load = InterpreterBuilder.create_masked_load

    def load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return masked_load(self, pointers, mask, *others)

    InterpreterBuilder.create_masked_load = load
    zero = gather_module._E8M0_ZERO
    gather_module._engram_gather_kernel[(ids.numel(),)](
        w, s, ids, ids, out, row_lo, row_hi, DIM=dim, BLK=block, E8M0_ZERO=zero, HAS_DST=False
    )
    InterpreterBuilder.create_masked_load = masked_load
    return out


def look_up(embeddings: list[Any]) -> dict[str, Any]:
    return {
        f"layer{position}": bits(embedding._owned_rows(torch.from_numpy(IDS[position])))
        for position, embedding in enumerate(embeddings)
    }


def prefetch(embeddings: list[Any], manager: Any, hasher: Any) -> dict[str, Any]:
    """Two prompts, one of them a later chunk: their rows are asked for, then looked up. SGLang's own has an image, at
    whose positions it has numbers past the vocabulary."""
    prompts, starts, lengths = [[5, 17, 99, 3, 250, 7, 7, 8], [11, 12, 13]], [5, 0], [3, 3]
    if hasattr(hasher, "image_token_id"):
        hasher.image_token_id = IMAGE
        prompts[0][4] = prompts[1][1] = E.MM_PAD_SHIFT_VALUE + 17
    mode = SimpleNamespace(is_extend_without_speculative=lambda: True, is_prebuilt=lambda: False)
    batch = SimpleNamespace(
        forward_mode=mode,
        reqs=[SimpleNamespace(full_untruncated_fill_ids=ids) for ids in prompts],
        prefix_lens=starts,
        extend_lens=lengths,
        encoder_swa_reset=None,
    )
    manager.prepare_for_forward(batch, chunked_req=None)
    adapter = E._HostTable.opener
    adapter._prefetcher.wait()
    before = adapter._rows.counters()["num_reads"]
    windows = engram_staging.EngramRowStager._windows(SimpleNamespace(hasher=hasher), batch)
    ids = hasher.hash_windows(*windows)[0]
    rows = {f"rows{k}": bits(e._owned_rows(ids[:, k])) for k, e in enumerate(embeddings)}
    reads = np.array([before, adapter._rows.counters()["num_reads"]])
    return {**rows, "ids": ids.numpy(), "reads": reads, "token_map": hasher.token_map.numpy()}


def idle() -> dict[str, Any]:
    """When a rank's counters were written, and when again, though no batch comes."""
    path = Path(os.environ["DESKFLEET_ENGRAM_RECEIPTS"]) / "sglang-rank0-counters.json"
    written = [json.loads(path.read_text())["written_unix_s"]]
    while len(written) < 2:
        time.sleep(0.05)
        found = json.loads(path.read_text())["written_unix_s"]
        written += [found] if found > written[0] else []
    return {"written": np.array(written)}


def fail_quietly() -> dict[str, Any]:
    """A lookup that could not raise by itself: the step's tokens must not be answered."""

    class Failed:
        def check(self) -> None:
            raise OSError("a row could not be had")

    E._HostTable.opener._lookups = {1: Failed()}
    answer(scheduler_module.Scheduler.__new__(scheduler_module.Scheduler))
    return {}


def answer(scheduler: Any) -> None:
    """A step is over: wait for it, then send its tokens."""
    waited = []
    done = SimpleNamespace(synchronize=lambda: waited.append(True))
    try:
        scheduler.process_batch_result(None, SimpleNamespace(copy_done=done))
    finally:
        assert waited, "nobody waited for the step"


def begin(kind: str) -> dict[str, Any]:
    """A process of the server begins, and ends where it reads its arguments: it gets none that are any good."""
    entry = {
        "engine": lambda: importlib.import_module("sglang.srt.entrypoints.engine").Engine(model_path=None),
        "scheduler": lambda: scheduler_module.run_scheduler_process(None, None, 0, 0, 0, None, None),
        "detokenizer": lambda: importlib.import_module(
            "sglang.srt.managers.detokenizer_manager"
        ).run_detokenizer_process(None, None),
        "controller": lambda: importlib.import_module(
            "sglang.srt.managers.data_parallel_controller"
        ).run_data_parallel_controller_process(None, None, None),
    }[kind]
    before = list(hook_registry.HookRegistry._hooks)
    with contextlib.suppress(Exception):
        entry()
    after = list(hook_registry.HookRegistry._hooks)
    return {
        "before": np.array(before, dtype="U99"),
        "hooked": np.array(after, dtype="U99"),
        "is_ours": E._HostTable is not STOCK[0],
    }


def act(scenario: dict[str, Any]) -> dict[str, Any]:
    do, spoilt = scenario.get("do", "rows"), scenario.get("spoilt")
    if do.startswith("begin "):
        return begin(do.removeprefix("begin "))
    spoil(spoilt)
    plugins.load_plugins()
    plugins._plugins_loaded = plugins._loaded = False
    plugins.load_plugins()  # once more: nothing may happen twice
    if REQUEST["wheels"] is not None:  # only now: the contract would not have it
        E.engram_gather = gather_module.engram_gather = interpreted_gather
    if do == "stock":
        hooked = [name for name in dir(E) if name.startswith("Disk")] + list(
            hook_registry.HookRegistry._hooks
        )
        return {"hooked": np.array(hooked, dtype="U99")}
    be_rank(scenario["rank"], scenario["tp_size"])
    if spoilt == "replaced later":
        E._HostTable = STOCK[0]
        torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0)
    embeddings, hasher = make_embeddings(spoilt, is_dummy=do == "dummy"), make_hasher()
    if spoilt == "hashing":
        hasher.multipliers = hasher.multipliers + 2
    if spoilt == "tokenizer":
        hasher.token_map = hasher.token_map.flip(0)
    if do == "touch":
        return {"byte": np.array(embeddings[0].weight.view(torch.uint8)[0, 0].item())}
    if do == "too early":
        return look_up(embeddings)
    if do == "idle":
        importlib.import_module("deskfleet_sglang.adapter").COUNTERS_INTERVAL_S = 0.1
    manager = make_manager(embeddings, hasher)
    if do == "answer again":
        looked_up = look_up(embeddings)  # buffers are used twice
        assert all((look_up(embeddings)[name] == rows).all() for name, rows in looked_up.items())
    if spoilt is not None and spoilt.endswith("truncated"):
        for path in Path(os.environ["DESKFLEET_ENGRAM_PACK"]).glob("L*/*.egp"):
            os.truncate(path, 4096)
    if do == "prefetch":
        return prefetch(embeddings, manager, hasher)
    if do == "idle":
        return idle()
    if do == "fail quietly":
        return fail_quietly()
    found = look_up(embeddings)
    if spoilt == "device by hand, truncated":
        np.savez(OUT / "unread.npz", **found)
        answer(scheduler_module.Scheduler.__new__(scheduler_module.Scheduler))
    return found


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    """What came of it, in a process of its own."""
    answer = OUT / f"{scenario['name']}.json"
    child = os.fork()
    if child == 0:
        os.environ.update(scenario.get("env", {}))
        try:
            np.savez(OUT / f"{scenario['name']}.npz", **act(scenario))
            outcome = {"done": True}
        except SystemExit as stop:
            outcome = {"exit": str(stop.code)}
        except Exception as error:  # noqa: BLE001 whatever ends a scheduler is an outcome
            outcome = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
        answer.write_text(json.dumps(outcome))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return json.loads(answer.read_text()) if answer.exists() else {"died": status}


be_rank(0, 1)
STOCK = [E._HostTable]  # in a list, or SGLang would replace this name too
if REQUEST["wheels"] is None:  # what the stand-in is, the plug-in is made for here
    names = contract.RELEASES[sglang.__version__].sources
    digests = {name: source_sha256(contract._resolve(name)) for name in names}
    contract.RELEASES[sglang.__version__] = contract.Release(sglang.__version__, digests)
random = np.random.default_rng(1)
IDS = [
    np.concatenate([random.integers(0, table.num_rows, 400), [0, table.num_rows - 1]]).reshape(-1, 3)
    for table in SOURCE.tables
]
np.savez(OUT / "stock.npz", ids0=IDS[0], ids1=IDS[1], **look_up(make_embeddings()))
print("\n" + json.dumps({scenario["name"]: run(scenario) for scenario in REQUEST["scenarios"]}))
