"""Rows and batches: what a row may be, and what collating keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pocket.batch import ImagePlacement, Row, collate
from pocket.data.render import Document
from pocket.data.stream import pack

PIXELS = np.zeros((84, 84, 3), dtype=np.uint8)
SPAN = np.array([0, 1, 1, 2, 1, 1, 2, 3], dtype=np.int8)


def row() -> Row:
    """Two documents of 20 and 9 tokens in 64; the second holds an image at its third token."""
    ones = np.ones(20, dtype=np.float32)
    image = ImagePlacement(2, PIXELS, SPAN)
    first = Document("a", np.arange(20, dtype=np.uint16), ones)
    second = Document("b", np.arange(100, 111, dtype=np.uint16), ones[:11], (image,))
    return pack([first, second], 64)


def test_documents_start_at_multiples_of_sixteen_and_restart_their_positions() -> None:
    packed = row()
    packed.check()
    assert packed.starts().tolist() == [0, 32]
    assert packed.positions[:20].tolist() == list(range(20))
    assert packed.positions[32:43].tolist() == list(range(11))
    assert set(packed.doc_ids[20:32]) | set(packed.doc_ids[43:]) == {-1}
    assert packed.token_ids[32:43].tolist() == list(range(100, 111))


def test_weight_belongs_to_the_position_that_predicts() -> None:
    packed = row()
    assert packed.loss_weight[:20].tolist() == [1.0] * 19 + [0.0]
    assert packed.loss_weight[32:43].tolist() == [1.0] * 10 + [0.0]
    assert not packed.loss_weight[20:32].any()


def test_image_spans_move_with_their_document() -> None:
    packed = row()
    assert packed.images[0].start == 34
    assert np.flatnonzero(packed.image_mask).tolist() == list(range(34, 42))


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("positions", 5, 4),
        ("loss_weight", 19, 1.0),
        ("loss_weight", 25, 1.0),
        ("doc_ids", 19, -1),
        ("doc_ids", 21, 1),
        ("image_mask", 0, True),
    ],
)
def test_a_broken_row_is_refused(name: str, index: int, value: float) -> None:
    packed = row()
    changed = getattr(packed, name).copy()
    changed[index] = value
    with pytest.raises(ValueError, match=r"\w"):
        replace(packed, **{name: changed}).check()


def test_collate_keeps_rows_and_images_in_order() -> None:
    batch = collate([row(), row()])
    assert batch.token_ids.shape == batch.loss_weight.shape == (2, 64)
    assert [image.row for image in batch.images] == [0, 1]
    assert batch.token_types[1, 34:42].tolist() == SPAN.tolist()
    assert ((batch.token_types >= 0) == batch.image_mask).all()
    assert batch.token_ids[0, :20].tolist() == list(range(20))


def test_rows_of_two_lengths_do_not_make_a_batch() -> None:
    with pytest.raises(ValueError, match="one length"):
        collate([row(), pack([], 32)])


def test_documents_longer_than_the_row_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 16"):
        pack([Document("a", np.zeros(17, dtype=np.uint16), np.zeros(17, dtype=np.float32))], 16)
