"""Proof that tokens are the same: vLLM's own Engram layers generate from tables in pinned memory, and from disk.

Hashing, lookups on the side stream, events and gates are vLLM's module, whole (`standalone.load_module`). Around them
stands the least that makes tokens of them: an embedding, a projection, the largest logit. One step, from tokens to the
next tokens, is one captured graph. It is no V4.1: attention, experts and the runner are not there.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from deskfleet_engram.host import ContractError
from deskfleet_engram.source import read_spec
from deskfleet_vllm import standalone
from deskfleet_vllm.config import KEY, StoreName
from deskfleet_vllm.seam import replace

NUM_REQUESTS = 4
DIM, HC_MULT, VOCAB_SIZE = 512, 4, 4096
"""Of the model around the layers: width of a residual stream, streams, tokens."""

_EPS = 1e-6


def generate(
    source: Path,
    pack_dir: Path,
    checkpoint: Path,
    receipts: Path,
    *,
    store: StoreName,
    num_tokens: int,
    seconds: dict[str, list[float]] | None = None,
) -> Iterator[str]:
    """Generate `num_tokens` for each of NUM_REQUESTS both ways, side by side, and yield lines about it.

    `source` is vLLM's file. After every step rows, logits and tokens of both are compared bit by bit. At the end the
    stock tables are emptied and the same is generated again, to see that tokens depend on rows. What each step took
    is left in `seconds`. Raises ContractError at the first difference, and when there is none at the end.
    """
    config = SimpleNamespace(
        additional_config={},
        engram_config=SimpleNamespace(cpu_offload=True, dp_shared_memory=False, use_thp=False),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=NUM_REQUESTS),
        model_config=SimpleNamespace(
            model=str(checkpoint), tokenizer=str(checkpoint), trust_remote_code=False, revision=None
        ),
        use_v2_model_runner=True,
    )
    engram = standalone.load_module(source, config)
    replace(engram)
    device = _device(store)
    stock = Decoder(engram, config, checkpoint, device)
    stock.load_tables(checkpoint)
    told = {"pack": str(pack_dir), "store": store, "receipts": str(receipts), "allow_untested": True}
    config.additional_config = {KEY: told}  # allow_untested: the view of pinned memory is not vLLM's function
    ours = Decoder(engram, config, checkpoint, device)
    ours.load_state_dict(stock.small_weights(), strict=False)
    runs = {"pinned": _captured(stock, store), store: _captured(ours, store)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    said = []
    for number in range(num_tokens):
        for name, run in runs.items():
            times[name].append(_timed(run, device))
        _compare(stock, ours, f"token {number}, {store}")
        said.append(stock.tokens.tolist())
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    how = "in one captured graph a step" if store == "callback" else "without graphs"
    yield (
        f"{num_tokens} tokens of {NUM_REQUESTS} requests, {how}: rows, logits and tokens by the {store} store equal "
        f"those of stock tables in pinned memory on {where}"
    )
    if seconds is not None:
        seconds |= times
    for name, values in times.items():
        low, median, high = np.percentile(values, [10, 50, 90]) * 1e6
        yield f"a step, {name}: median {median:.0f} us, p10 {low:.0f}, p90 {high:.0f}"
    stock.empty_tables()
    stock.begin()
    without = []
    for _ in range(num_tokens):
        runs["pinned"]()
        without.append(stock.tokens.tolist())
    others = int((np.array(without) != np.array(said)).sum())
    if not others:
        raise ContractError("the same tokens come without any rows, so they prove nothing")
    yield f"with tables of zeros, {others} of {num_tokens * NUM_REQUESTS} tokens are others"


class Decoder(torch.nn.Module):
    """A model of Engram layers alone: `tokens` int64 [B], the latest, and `logits` float32 [B, V], of which they came.

    Built for what `config.additional_config` says at that moment.
    """

    embedding: torch.Tensor
    head: torch.Tensor

    def __init__(self, engram: ModuleType, config: Any, checkpoint: Path, device: torch.device) -> None:
        super().__init__()
        text = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["text_config"]
        model = SimpleNamespace(**{**text, "hidden_size": DIM, "hc_mult": HC_MULT, "rms_norm_eps": _EPS})
        self.layer_ids = read_spec(checkpoint).layer_ids
        torch.manual_seed(0)
        with torch.device(device):
            layout = engram.EngramLayout(model)
            self.hasher: Any = _hasher(engram, config, layout)
            stream = torch.cuda.Stream()  # one for all layers, as in vLLM's model
            self.layers: Any = torch.nn.ModuleList(
                engram.Engram(model, None, layout, index, False, f"layers.{layer}.engram", stream)
                for index, layer in enumerate(layout.layer_ids)
            )
            layer: Any
            for layer in self.layers:
                for weight in (layer.q_weight, layer.k_weight):
                    weight.data.normal_()
            self.register_buffer("embedding", torch.randn(VOCAB_SIZE, DIM, dtype=torch.bfloat16))
            self.register_buffer("head", torch.randn(VOCAB_SIZE, DIM, dtype=torch.bfloat16))
            self.tokens = torch.zeros(NUM_REQUESTS, dtype=torch.int64)
            self.logits = torch.zeros(NUM_REQUESTS, VOCAB_SIZE)
            self._positions = torch.zeros(NUM_REQUESTS, dtype=torch.int64)
            self._starts = torch.arange(NUM_REQUESTS + 1, dtype=torch.int32)
            self._before = torch.zeros(NUM_REQUESTS, self.hasher.lookback_depth, dtype=torch.int32)
            self._dead = torch.zeros(NUM_REQUESTS, dtype=torch.bool)
            self._dead_before = torch.zeros_like(self._before, dtype=torch.bool)
        self.begin()

    def begin(self) -> None:
        """Go back to the prompts: one token a request, each another."""
        self.tokens.copy_(torch.arange(NUM_REQUESTS) * 17 + 5)
        self._positions.zero_()
        self._before.fill_(-1)

    def forward(self) -> None:
        """Make the next tokens of the latest, in place."""
        ids = self.tokens.to(torch.int32)
        hashes = self.hasher(
            ids, self._positions, self._starts, self._dead, self._before, self._dead_before, None, None
        )
        for index, layer in enumerate(self.layers):
            layer.prepare_embeddings(hashes[:, index])
        hidden = self.embedding[self.tokens][:, None, :].expand(-1, HC_MULT, -1).contiguous()
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, hashes[:, index])
        self.logits.copy_(torch.nn.functional.linear(hidden.float().mean(1), self.head.float()))
        self._before.copy_(torch.cat([ids[:, None], self._before[:, :-1]], 1))  # the latest first
        self._positions.add_(1)
        self.tokens.copy_(self.logits.argmax(1))

    def load_tables(self, checkpoint: Path) -> None:
        """Fill stock tables from the checkpoint's shards, by vLLM's own loader."""
        from safetensors import safe_open

        names = json.loads((checkpoint / "model.safetensors.index.json").read_text(encoding="utf-8"))[
            "weight_map"
        ]
        for number, layer in zip(self.layer_ids, self.layers, strict=True):
            table = layer.embed_tokens
            for part, weight in (("weight", table.weight), ("scale", table.weight_scale_inv)):
                name = f"layers.{number}.engram.embed.{part}"
                with safe_open(checkpoint / names[name], framework="pt") as shard:
                    weight.weight_loader(weight, shard.get_tensor(name))

    def empty_tables(self) -> None:
        """Zero the tables that stock lookups read."""
        for layer in self.layers:
            layer.embed_tokens.weight.data.view(torch.uint8).zero_()

    def small_weights(self) -> dict[str, torch.Tensor]:
        """Everything but the tables, by name."""
        return {name: value for name, value in self.state_dict().items() if ".embed_tokens." not in name}


def _hasher(engram: ModuleType, config: Any, layout: Any) -> Any:
    """vLLM's hashing, with a map of tokens that needs no tokenizer."""
    size = layout.compressed_vocab_size
    mapped = np.random.default_rng(0).integers(0, size, VOCAB_SIZE).tolist()
    cache: Any = torch.nn.Module()
    cache.block_size = 128
    names = vars(engram)
    stock = names["build_compressed_token_map"]
    names["build_compressed_token_map"] = lambda tokenizer: (mapped, size)
    try:
        return engram.NgramHashState(config, layout, cache)
    finally:
        names["build_compressed_token_map"] = stock  # its source is compared


def _compare(stock: Decoder, ours: Decoder, what: str) -> None:
    """Raise ContractError unless both have the same rows, logits and tokens, all of them numbers."""
    for number, theirs, mine in zip(stock.layer_ids, stock.layers, ours.layers, strict=True):
        if not torch.equal(theirs.staged_rows.view(torch.int16), mine.staged_rows.view(torch.int16)):
            raise ContractError(f"{what}: the rows of layer {number} are not those of the stock table")
        if not theirs.staged_rows.any():
            raise ContractError(f"{what}: the stock table gave layer {number} zeros")
    if not torch.isfinite(stock.logits).all():
        raise ContractError(f"{what}: the logits of the stock tables are not finite")
    if not torch.equal(stock.logits.view(torch.int32), ours.logits.view(torch.int32)):
        raise ContractError(f"{what}: the logits are not those of the stock tables")
    if not torch.equal(stock.tokens, ours.tokens):
        raise ContractError(f"{what}: the tokens are not those of the stock tables")


def _device(store: StoreName) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if store == "callback":
        raise ContractError("there is no CUDA device here")
    return torch.device("cpu")


def _captured(decoder: Decoder, store: StoreName) -> Callable[[], None]:
    """Return what runs a step of `decoder`, from its beginning on: a graph, where the store can be part of one."""
    if store != "callback":
        return decoder.forward
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        decoder.forward()  # Triton compiles here, which it must not do while a graph is captured
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.forward()
    decoder.begin()
    return functools.partial(_replay, graph)


def _replay(graph: torch.cuda.CUDAGraph) -> None:
    graph.replay()


def _timed(run: Callable[[], None], device: torch.device) -> float:
    begin_s = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin_s


__all__ = ["DIM", "HC_MULT", "NUM_REQUESTS", "VOCAB_SIZE", "Decoder", "generate"]
