"""From saved parameters to models. Owns what is made anew when a state lacks it: a drafter that was not trained yet."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from deskfleet.model.config import ModelConfig
from deskfleet_engram.tokens import compressed_token_map
from pocket.model.backbone import Backbone
from pocket.model.draft import Drafter, make_model
from pocket.tokenizer import DIRECTORY


@cache
def pocket_tokenizer() -> Tokenizer:
    """The tokenizer that Pocket is trained with."""
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


@cache
def pocket_token_map() -> Tensor:
    """The compressed id of each of its tokens, int64 [V] (spec §7.1)."""
    return torch.from_numpy(compressed_token_map(pocket_tokenizer()).astype(np.int64))


def models(
    published: Mapping[str, Any], parameters: Mapping[str, Tensor] | None = None, *, seed: int = 0
) -> tuple[Backbone, Drafter]:
    """The target and its drafter of a config.json, with `parameters` in them, the rest as the seed makes it.

    Raises KeyError when a parameter of the target is missing.
    """
    backbone, drafter = make_model(ModelConfig.from_dict(published), pocket_token_map(), seed)
    if parameters is not None:
        backbone.load_state_dict({name: parameters[name] for name in backbone.state_dict()})
        own = drafter.state_dict()
        if own.keys() <= parameters.keys():
            drafter.load_state_dict({name: parameters[name] for name in own})
    return backbone, drafter


__all__ = ["models", "pocket_token_map", "pocket_tokenizer"]
