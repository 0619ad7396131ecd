"""Exported bytes: the published layout, what the fake quantisation used, and the same bytes every time."""

from __future__ import annotations

from pathlib import Path

import torch

from deskfleet.engine.weights import ShardReader
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.names import expected_tensors
from pocket.export import export, named_parameters_of, parameter_of
from pocket.model.numerics import Numerics
from tests.pocket.fixtures_model import config, lively_model, published, tokenizer


def written(directory: Path) -> Path:
    backbone, drafter = lively_model()
    spelling = directory / "spelling"
    spelling.mkdir(parents=True)
    tokenizer().save(str(spelling / "tokenizer.json"))
    (spelling / "tokenizer_config.json").write_text("{}")
    parameters = named_parameters_of(backbone) | named_parameters_of(drafter)
    export(parameters, published(), spelling, directory / "checkpoint")
    return directory / "checkpoint"


def test_same_parameters_same_bytes(tmp_path: Path) -> None:
    first, second = (written(tmp_path / name) for name in ("a", "b"))
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_every_tensor_is_what_training_computed_with(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(written(tmp_path))
    assert checkpoint.config == config()
    assert set(checkpoint.tensors) == set(expected_tensors(config()))
    backbone, drafter = lively_model()
    parameters = named_parameters_of(backbone) | named_parameters_of(drafter)
    numerics, seen = Numerics(quantised=True), set()
    with ShardReader(checkpoint, ShardPlan(config(), Layout(1)), 0) as reader:
        for name, spec in expected_tensors(config()).items():
            if name.endswith(".scale") or ".engram.embed." in name:
                continue
            value = parameter_of(name, parameters)
            if spec.dtype == "F8_E4M3":
                stored, trained = reader.fp8(name.removesuffix(".weight")), numerics.fp8_weight(value)
            elif spec.dtype == "I8":
                stored, trained = (
                    reader.fp4(name.removesuffix(".weight")).decode(),
                    numerics.fp4_weight(value[None])[0],
                )
            elif spec.dtype == "BF16":
                stored, trained = reader.matrix(name), value.to(torch.bfloat16)
            else:
                stored, trained = reader.matrix(name), value
            assert torch.equal(stored.double(), trained.double()), name
            seen.add(spec.dtype)
    assert seen == {"F8_E4M3", "I8", "BF16", "F32"}


def test_engram_rows_are_what_training_computed_with(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(written(tmp_path))
    backbone, _ = lively_model()
    for number, layer in enumerate(config().engram_layer_ids):
        prefix = f"layers.{layer}.engram.embed"
        info, scales = checkpoint.tensors[f"{prefix}.weight"], checkpoint.tensors[f"{prefix}.scale"]
        data = info.path.read_bytes()
        codes = torch.frombuffer(
            bytearray(data), dtype=torch.uint8, offset=info.offset_bytes, count=info.nbytes
        )
        scale = torch.frombuffer(
            bytearray(data), dtype=torch.uint8, offset=scales.offset_bytes, count=scales.nbytes
        )
        rows = codes.view(torch.float8_e4m3fn).float().view(info.shape[0], -1, 32)
        rows = rows * torch.exp2(scale.float() - 127).view(info.shape[0], -1, 1)
        engram = backbone.layers[layer].engram
        assert engram is not None
        assert engram.number == number
        assert torch.equal(rows.flatten(1), Numerics().engram_rows(engram.embed.weight).float())
