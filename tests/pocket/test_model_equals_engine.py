"""The training forward is the engine's function: a random model, exported and run by the engine, gives the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deskfleet.engine.model.vision import VisionTower as EngineTower
from deskfleet.engine.model.vision import normalise_pixels
from deskfleet.engine.weights import ShardReader
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.vision import plan_image, span_token_types
from pocket.batch import Batch, BatchImage, ImagePlacement
from pocket.model.backbone import Backbone
from pocket.model.draft import Anchors, Drafter
from pocket.model.numerics import Numerics
from pocket.model.vision import image_inputs
from tests.engine.golden import measured, relative_rms
from tests.pocket.fixtures_model import Exported, config, exported, lively_model

EXACT = Numerics(quantised=True, exact=True)
FAST = Numerics(quantised=True, exact=False)
# One layer, fed with the engine's own input: both sides round at the same places but sum in another order (float32
# against float64), so most rows are the same bits, and in a few a value has rounded the other way.
EQUAL_ROWS, LARGEST_ROW = 0.9, 1e-2
# All layers: one value that rounds the other way changes what the layers above quantise, and random weights let such
# changes grow. Until the first one, logits agree to the last bits.
MEDIAN_LIMIT, AGREEMENT, EQUAL_LIMIT = 0.1, 0.85, 1e-5


@pytest.fixture(scope="module")
def models() -> tuple[Backbone, Drafter]:
    return lively_model()


@pytest.fixture(scope="module")
def engine(models: tuple[Backbone, Drafter], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exported(*models, tmp_path_factory.mktemp("pocket"))


def random_ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 700, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def trained_logits(
    model: Backbone, documents: list[torch.Tensor], length: int, *, attend_all: bool = False
) -> list[torch.Tensor]:
    """Logits of each document, packed into one row of `length` tokens as the data does."""
    ids = torch.full((1, length), 2)
    doc_ids, positions = torch.full((1, length), -1), torch.zeros(1, length, dtype=torch.int64)
    spans, at = [], 0
    for number, document in enumerate(documents):
        span = slice(at, at + len(document))
        ids[0, span], doc_ids[0, span] = document, number
        positions[0, span] = torch.arange(len(document))
        spans.append(span)
        at = -(-span.stop // 16) * 16
    rows = model.begin(
        EXACT, doc_ids, positions, torch.zeros_like(ids, dtype=torch.bool), attend_all=attend_all
    )
    logits = model.logits(model(ids, rows).hidden)
    return [logits[span] for span in spans]


def check(ours: torch.Tensor, theirs: torch.Tensor, what: str, *, equal: int = 4) -> None:
    """Compare logits [n, V]; the first `equal` positions must agree to the last bits."""
    differences = relative_rms(ours, theirs)
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    measured.append(
        f"pocket {what}: relative RMS median {differences.median():.1e}, worst {differences.max():.1e}, "
        f"{(differences < EQUAL_LIMIT).float().mean():.0%} of positions equal, arg-max agrees at {agreement:.0%}"
    )
    assert differences.median() <= MEDIAN_LIMIT, measured[-1]
    assert differences[:equal].le(EQUAL_LIMIT).all(), measured[-1]
    assert agreement >= AGREEMENT, measured[-1]


@torch.inference_mode()
def layer_differences(model: Backbone, engine: Exported, numerics: Numerics) -> dict[str, torch.Tensor]:
    """Relative RMS of each row of each layer's output, every layer fed with what the engine fed its own.

    300 tokens: a window of 32, 16 picks of up to 300 entries, 4 of up to 38 candidate blocks.
    """
    count, length = 300, 320
    document = random_ids(count, 1)
    seen = engine.record(document)
    ids, doc_ids = torch.full((1, length), 2), torch.full((1, length), -1)
    positions, no_image = torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, length, dtype=torch.bool)
    ids[0, :count], doc_ids[0, :count], positions[0, :count] = document, 0, torch.arange(count)
    rows = model.begin(numerics, doc_ids, positions, no_image)
    assert model.hashes is not None
    row_ids = model.hashes(ids, positions, no_image)
    pre = torch.eye(config().hc_mult)[:1].expand(length, -1).contiguous()

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat((tensor, tensor[:1].expand(length - count, *tensor.shape[1:])))

    differences = {}
    for block in model.layers:
        prefix = block.layer.prefix
        if block.engram is not None:
            ours = block.engram(padded(seen[f"{prefix}.engram_in"]), row_ids, rows)[:count]
            differences[f"{prefix}.engram"] = _relative(ours, seen[f"{prefix}.engram_out"])
        ours, _ = block(padded(seen[f"{prefix}.h_in"]), pre, rows)
        differences[prefix] = _relative(ours[:count], seen[f"{prefix}.h_out"])
        pre = padded(seen[f"{prefix}.pre_mix_out"])
    return differences


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    size = theirs.float().square().mean((1, 2)).sqrt()
    return (ours.float() - theirs.float()).square().mean((1, 2)).sqrt() / size


def test_every_layer(models: tuple[Backbone, Drafter], engine: Exported) -> None:
    for name, rows in layer_differences(models[0], engine, EXACT).items():
        equal = (rows == 0).float().mean().item()
        measured.append(f"pocket {name}: {equal:.1%} of rows are the same bits, worst {rows.max():.1e}")
        assert equal >= EQUAL_ROWS, measured[-1]
        assert rows.max() <= LARGEST_ROW, measured[-1]


def test_every_layer_with_scores_in_bf16(models: tuple[Backbone, Drafter], engine: Exported) -> None:
    for name, rows in layer_differences(models[0], engine, FAST).items():
        measured.append(f"pocket {name}, fast: median {rows.median():.1e}, worst {rows.max():.1e}")
        assert rows.median() <= 1e-2, measured[-1]


def test_a_layer_without_quantisation_differs(models: tuple[Backbone, Drafter], engine: Exported) -> None:
    differences = layer_differences(models[0], engine, Numerics(quantised=False, exact=True))
    for name, rows in differences.items():
        assert rows.median() > 1e-3, name


def test_one_document_longer_than_window_and_selection(
    models: tuple[Backbone, Drafter], engine: Exported
) -> None:
    document = random_ids(300, 1)
    ours = trained_logits(models[0], [document], 320)[0]
    check(ours, engine.run(document)[0], "300 tokens")


def test_short_document_sees_everything(models: tuple[Backbone, Drafter], engine: Exported) -> None:
    document = random_ids(15, 2)
    (ours,) = trained_logits(models[0], [document], 32)
    (dense,) = trained_logits(models[0], [document], 32, attend_all=True)
    theirs = engine.run(document, slot=1)[0]
    check(ours, theirs, "15 tokens")
    check(dense, theirs, "15 tokens, all entries attended")


def test_packed_documents_are_alone(models: tuple[Backbone, Drafter]) -> None:
    """Whatever stands beside a document, its logits are the same bits.

    Beside others of the same lengths, because another number of rows may be summed in another order.
    """
    document = random_ids(90, 4)
    first, second = (
        trained_logits(models[0], [random_ids(77, seed), document, random_ids(49, seed + 1)], 256)
        for seed in (3, 13)
    )
    assert torch.equal(first[1], second[1])
    assert relative_rms(first[0], second[0]).min() > 0.1
    assert relative_rms(first[2], second[2]).min() > 0.1


@torch.inference_mode()
def test_images(models: tuple[Backbone, Drafter], engine: Exported) -> None:
    vision = config().vision
    assert vision is not None
    draw = np.random.default_rng(8)
    token_ids, placements, at = random_ids(96, 9), [], 5
    image_mask = torch.zeros(96, dtype=torch.bool)
    token_types = torch.full((96,), -1, dtype=torch.int8)
    for width, height in ((84, 84), (130, 90)):  # two grids, so that one of them is padded
        grid = plan_image(width, height, vision)
        types = np.array(span_token_types(grid), dtype=np.int8)
        pixels = draw.integers(0, 256, (grid.height_px, grid.width_px, 3), dtype=np.uint8)
        placements.append(ImagePlacement(at, pixels, types))
        span = slice(at, at + len(types))
        token_ids[span], image_mask[span] = config().image_token_id, True
        token_types[span] = torch.from_numpy(types)
        at = span.stop + 11
    assert at < 96
    batch = Batch(
        token_ids=token_ids[None],
        doc_ids=torch.zeros(1, 96, dtype=torch.int64),
        positions=torch.arange(96)[None],
        loss_weight=torch.zeros(1, 96),
        image_mask=image_mask[None],
        token_types=token_types[None],
        images=tuple(BatchImage(0, placement) for placement in placements),
    )
    model = models[0]
    rows = model.begin(EXACT, batch.doc_ids, batch.positions, batch.image_mask)
    inputs = image_inputs(batch, vision)
    assert inputs is not None
    ours = model.logits(model(batch.token_ids, rows, inputs).hidden)

    with ShardReader(engine.checkpoint, ShardPlan(config(), Layout(1)), 0) as reader:
        tower = EngineTower(vision, reader)
    spans = []
    for placed in placements:
        height, width = (
            placed.pixels.shape[0] // vision.patch_size,
            placed.pixels.shape[1] // vision.patch_size,
        )
        patches = normalise_pixels(torch.from_numpy(placed.pixels), vision.patch_size)
        spans.append(tower.span(patches, height, width, tuple(placed.token_types.tolist())))
    theirs, _ = engine.run(token_ids, slot=3, image_mask=image_mask, image_rows=torch.cat(spans))
    placed = rows.image_mask
    embedded = model._image_rows(inputs)[placed]
    assert (
        embedded == torch.cat(spans)
    ).float().mean() > 0.9  # the same bits but for values that round otherwise
    check(ours, theirs, "two images")


@torch.inference_mode()
def test_drafts(models: tuple[Backbone, Drafter], engine: Exported) -> None:
    from deskfleet.engine.model.draft import Anchor

    backbone, drafter = models
    document = random_ids(120, 10)
    _, output = engine.run(document[:97], slot=2)
    assert engine.runner.drafts is not None
    proposal = engine.runner.drafts.propose(
        [Anchor(2, 97, int(document[97]))],
        engine.runner.tables,
        engine.runner.cache,
        choose=lambda place, logits: document[98 + place][None],  # teacher-forced, as in training
    )
    doc_ids = torch.zeros(1, 128, dtype=torch.int64)
    doc_ids[0, 120:] = -1
    positions = torch.arange(128)[None] * (doc_ids >= 0)
    ids = torch.full((1, 128), 2)
    ids[0, :120] = document
    rows = backbone.begin(EXACT, doc_ids, positions, torch.zeros_like(ids, dtype=torch.bool))
    taps = backbone(ids, rows).taps
    assert relative_rms(taps[:4].float(), output.taps[:4].float()).max() < 1e-3
    taps[:97] = output.taps  # so that only the drafter is compared
    anchors = Anchors.at(torch.tensor([97, 116]), positions, doc_ids, config())
    assert anchors.alive.tolist() == [[True] * 5, [True] * 4 + [False]]
    drafts = drafter(backbone, ids, taps, anchors, rows)
    check(drafts.logits[0], proposal.logits[0], "drafts", equal=0)
    assert torch.allclose(drafts.confidence[0], proposal.confidence[0], atol=2e-2)
