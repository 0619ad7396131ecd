"""The names, dtypes, shapes and classes a configuration calls for, against the published totals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from safetensors import safe_open

from deskfleet.model.config import ModelConfig
from deskfleet.model.names import TensorClass, TensorSpec, expected_shards, expected_tensors
from deskfleet.model.published import published_config_dict

TINY = Path(__file__).parents[1] / "golden" / "v41-tiny" / "model"


@pytest.fixture(scope="module")
def published() -> dict[str, TensorSpec]:
    return expected_tensors(ModelConfig.from_dict(published_config_dict()))


def test_tiny_names_are_exactly_the_index() -> None:
    index = json.loads((TINY / "model.safetensors.index.json").read_text())["weight_map"]
    config = ModelConfig.from_file(TINY / "config.json")
    expected = expected_tensors(config)
    assert len(expected) == 1568
    assert expected.keys() == index.keys()
    for number, shard in enumerate(expected_shards(config), start=1):
        assert {index[name] for name in shard} == {f"model-{number:05d}-of-00018.safetensors"}


def test_tiny_shapes_and_dtypes_are_those_on_disk() -> None:
    expected = expected_tensors(ModelConfig.from_file(TINY / "config.json"))
    seen = 0
    for path in sorted(TINY.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118  (the handle is not iterable)
                tensor = file.get_slice(name)
                assert (tensor.get_dtype(), tuple(tensor.get_shape())) == (
                    expected[name].dtype,
                    expected[name].shape,
                ), name
                seen += 1
    assert seen == len(expected)


def test_published_totals(published: dict[str, TensorSpec]) -> None:
    assert len(published) == 96_085
    assert sum(spec.nbytes for spec in published.values()) == 510_286_023_000
    by_dtype: Counter[str] = Counter()
    by_class: Counter[TensorClass] = Counter()
    for spec in published.values():
        by_dtype[spec.dtype] += spec.nbytes
        by_class[spec.tensor_class] += spec.nbytes
    assert by_dtype == {
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "I8": 278_585_671_680,
    }
    final_norm = 10_240
    dense = (
        1_416_960_000  # shared experts
        + 4_702_208_000  # wq_b, wo_a, wo_b
        + 367_513_600  # wq_a, wkv, norms, sinks
        + 44_605_440  # indexers
        + 37_229_568  # compressors and index keys
        + 157_409_280  # routers
        + 157_295_040  # hyper-connections
        + 829_440  # layer norms, and the final norm
        + 315_043_840  # Engram projections
    )
    assert by_class == {
        TensorClass.routed_expert: 288_777_830_400,
        TensorClass.dense: dense - final_norm,
        TensorClass.engram: 202_758_032_400,
        TensorClass.draft: 7_932_874_632,
        TensorClass.vision: 970_536_960,
        TensorClass.other: 2_647_654_400 + final_norm,
    }


def test_published_shards() -> None:
    shards = expected_shards(ModelConfig.from_dict(published_config_dict()))
    sizes = [(len(shard), sum(spec.nbytes for spec in shard.values())) for shard in shards]
    plain, source, last_source, re_index = (
        (2334, 7_389_500_888),
        (2342, 7_405_694_680),
        (2341, 7_400_451_800),
        (2337, 7_395_076_568),
    )
    layers = [plain] * 40
    for layer in (2, 8, 14):
        layers[layer] = source
    layers[20] = last_source
    for layer in (24, 28, 32, 36):
        layers[layer] = re_index
    assert sizes == [
        (263, 970_506_240),
        (4, 1_323_857_920),
        *layers,
        (2, 1_323_837_440),
        (801, 2_652_643_800),
        (798, 2_573_913_560),
        (802, 2_706_317_272),
        (6, 101_535_150_272),
        (6, 101_537_925_968),
    ]


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "tensor_class"),
    [
        ("layers.7.ffn.experts.383.w1.weight", "I8", (2304, 2560), TensorClass.routed_expert),
        ("layers.7.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72), TensorClass.routed_expert),
        ("mtp.1.ffn.experts.127.w2.weight", "I8", (5120, 1152), TensorClass.draft),
        ("layers.39.ffn.shared_experts.w2.scale", "F8_E8M0", (160, 72), TensorClass.dense),
        ("layers.0.attn.wo_b.scale", "F8_E8M0", (160, 256), TensorClass.dense),
        ("layers.14.attn.compressor.wgate.weight", "BF16", (512, 5120), TensorClass.dense),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384_016_682, 256), TensorClass.engram),
        ("layers.14.engram.wkv.scale", "F8_E8M0", (800, 192), TensorClass.dense),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376), TensorClass.draft),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480), TensorClass.draft),
        ("image_newline", "BF16", (5120,), TensorClass.vision),
        ("aligner.w1.weight", "BF16", (5120, 9216), TensorClass.vision),
        ("head.weight", "BF16", (129280, 5120), TensorClass.other),
    ],
)
def test_published_tensors(
    published: dict[str, TensorSpec],
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    tensor_class: TensorClass,
) -> None:
    assert published[name] == TensorSpec(dtype, shape, tensor_class)


def test_tensors_that_do_not_exist(published: dict[str, TensorSpec]) -> None:
    for name in (
        "layers.20.attn.compressor.wgate.weight",  # ratio 1 has nothing to weigh
        "layers.24.attn.compressor.wkv.weight",  # re-indexing layers read layer 20's cache
        "layers.24.attn.indexer.wk.weight",
        "layers.3.attn.indexer.wq_b.weight",
        "mtp.0.norm.weight",
        "mtp.1.main_proj.weight",
        "layers.0.engram.embed.weight",
    ):
        assert name not in published


def test_text_only_model_has_no_vision_tensors() -> None:
    data = published_config_dict()
    del data["vision_config"]
    tensors = expected_tensors(ModelConfig.from_dict(data))
    assert len(tensors) == 96_085 - 266
    assert TensorClass.vision not in {spec.tensor_class for spec in tensors.values()}
