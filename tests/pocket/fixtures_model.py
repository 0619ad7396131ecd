"""A small random Pocket, as a training model and as an exported checkpoint with the engine on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from deskfleet.engine.batch import Segment
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.model.v41 import BackboneOutput as EngineOutput
from deskfleet.engine.runner import ModelRunner
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.config import ModelConfig
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.testing.tiny_tokenizer import build_tokenizer
from deskfleet_engram.hashing import DEAD
from deskfleet_engram.tokens import compressed_token_map
from pocket.export import export, named_parameters_of
from pocket.model.backbone import Backbone
from pocket.model.draft import Drafter, make_model
from pocket.sizes import SMOKE, pocket_config
from tests.engine.golden import give_every_slot_its_blocks, plain_limits

SIZES = replace(SMOKE, vocab_size=811)


@cache
def tokenizer() -> Tokenizer:
    return build_tokenizer(SIZES.vocab_size)


@cache
def published() -> dict[str, Any]:
    return pocket_config(tokenizer(), SIZES)


@cache
def config() -> ModelConfig:
    return ModelConfig.from_dict(published())


@cache
def token_map() -> torch.Tensor:
    return torch.from_numpy(compressed_token_map(tokenizer()).astype(np.int64))


def lively_model(seed: int = 0) -> tuple[Backbone, Drafter]:
    """A model whose every parameter matters: norms, sinks, biases and mixes are spread as if they were trained."""
    backbone, drafter = make_model(config(), token_map(), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for module in (backbone, drafter):
            for name, value in module.state_dict().items():
                draw = torch.randn(value.shape, generator=generator)
                if "norm" in name or name.endswith(("q_weight", "k_weight")):
                    value.add_(0.2 * draw)
                elif name.endswith(("attn_sink", ".base")):
                    value.add_(0.6 * draw)
                elif name.endswith(".bias_vl") or (name.endswith(".bias") and "gate" in name):
                    value.add_(0.15 * draw)
                elif name.endswith(".bias"):
                    value.add_(0.05 * draw)
                elif name.endswith((".scale",)):
                    value.fill_(0.7)
    return backbone, drafter


@dataclass
class Exported:
    """The engine on an exported model."""

    runner: ModelRunner
    checkpoint: Checkpoint

    @torch.inference_mode()
    def run(
        self,
        token_ids: torch.Tensor,
        *,
        slot: int = 0,
        image_mask: torch.Tensor | None = None,
        image_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EngineOutput]:
        """Teacher-forced logits float32 [n, V] of ids int64 [n] from position 0 on."""
        inside = np.zeros(len(token_ids), bool) if image_mask is None else image_mask.numpy().astype(bool)
        tokens = token_ids.numpy().astype(np.int64)
        compressed = token_map().numpy()[tokens]
        compressed[inside] = DEAD
        segment = Segment(slot, 0, tokens, compressed, compressed[:0], inside)
        batch = self.runner.builder.build([segment], image_rows)
        output = self.runner.model.forward(batch, self.runner.cache)
        if self.runner.drafts is not None:
            self.runner.drafts.commit(output.taps, batch, self.runner.cache)
        return self.runner.model.logits(output.hidden), output

    @torch.inference_mode()
    def record(self, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What every part of the engine saw and made of ids int64 [n], by the names of its recorder."""
        tokens = token_ids.numpy().astype(np.int64)
        compressed = token_map().numpy()[tokens]
        segment = Segment(0, 0, tokens, compressed, compressed[:0], np.zeros(len(tokens), bool))
        batch = self.runner.builder.build([segment], None)
        seen: dict[str, torch.Tensor] = {}
        self.runner.model.forward(batch, self.runner.cache, seen.__setitem__)
        return seen


def exported(
    backbone: Backbone, drafter: Drafter, directory: Path, *, max_model_len: int = 512, **changes: int
) -> Exported:
    """Export to `directory` and open it; `changes` to the configuration of the engine alone."""
    spelling = directory / "spelling"
    spelling.mkdir(parents=True)
    tokenizer().save(str(spelling / "tokenizer.json"))
    (spelling / "tokenizer_config.json").write_text("{}")
    parameters = named_parameters_of(backbone) | named_parameters_of(drafter)
    export(parameters, published(), spelling, directory / "checkpoint")
    checkpoint = Checkpoint.open(directory / "checkpoint")
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, **changes))
    runner = ModelRunner(
        checkpoint,
        ShardPlan(checkpoint.config, Layout(1)),
        Communicator(),
        plain_limits(4, max_model_len),
        pad_compressed_id=int(token_map()[config().pad_token_id]),
        with_drafts=True,
    )
    give_every_slot_its_blocks(runner)
    return Exported(runner, checkpoint)
