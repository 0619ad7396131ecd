"""What travels from the data to the model: rows of packed documents, and batches of rows.

Owns the layout of a row and its checks. Knows neither tasks nor the model. Letters: L tokens of a row, B rows.

A row holds several documents. Each begins at a multiple of `DOCUMENT_ALIGNMENT` tokens, where its positions
restart at 0; the gap before the next one is padding. Nothing of the model may reach from one document into
another: not the window, not compressed entries, not the Engram history, not the indexer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

DOCUMENT_ALIGNMENT = 16
PADDING_DOC_ID = -1
PAD_TOKEN_ID = 2
TEXT_TOKEN_TYPE = -1


@dataclass(frozen=True, slots=True)
class ImagePlacement:
    """One image: where its span starts, its pixels and its span's token types (specification §9.1-9.2).

    `start` counts from the beginning of the row (or of the document, before packing). `pixels` are
    uint8 [H, W, 3], already padded to whole patches; `token_types` int8 [N] as `SpanToken` numbers them.
    """

    start: int
    pixels: NDArray[np.uint8] = field(repr=False)
    token_types: NDArray[np.int8] = field(repr=False)

    @property
    def end(self) -> int:
        """The position after the span."""
        return self.start + len(self.token_types)


@dataclass(frozen=True, slots=True)
class Row:
    """`L` tokens of packed documents. Every array is [L]; `loss_weight[i]` weighs predicting token i + 1 at i.

    `doc_ids` count up from 0 in the row and are -1 in padding; `positions` restart at 0 with each document and
    are 0 in padding; `loss_weight` is 0 in padding and at each document's last token.
    """

    token_ids: NDArray[np.uint16]
    doc_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    loss_weight: NDArray[np.float32]
    image_mask: NDArray[np.bool_]
    images: tuple[ImagePlacement, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def check(self) -> None:
        """Raise ValueError unless the row is as this class says."""
        length = len(self)
        for name in ("doc_ids", "positions", "loss_weight", "image_mask"):
            if getattr(self, name).shape != (length,):
                raise ValueError(f"{name} has shape {getattr(self, name).shape}, the row has {length} tokens")
        padding = self.doc_ids == PADDING_DOC_ID
        starts = self.starts()
        if np.any(starts % DOCUMENT_ALIGNMENT):
            raise ValueError(
                f"documents start at {starts.tolist()}, not at multiples of {DOCUMENT_ALIGNMENT}"
            )
        expected_positions = np.arange(length) - _last_start(starts, length)
        if np.any(self.positions != np.where(padding, 0, expected_positions)):
            raise ValueError("positions do not restart at 0 with each document")
        last = np.append(self.doc_ids[1:] != self.doc_ids[:-1], True)
        if np.any(self.loss_weight[padding | last]):
            raise ValueError("loss in padding or at a document's last token")
        mask = np.zeros(length, dtype=np.bool_)
        for image in self.images:
            if np.unique(self.doc_ids[image.start : image.end]).size != 1 or padding[image.start]:
                raise ValueError(f"the image span at {image.start} is not inside one document")
            mask[image.start : image.end] = True
        if np.any(mask != self.image_mask):
            raise ValueError("image_mask does not cover the image spans and only them")

    def starts(self) -> NDArray[np.intp]:
        """Return where documents begin."""
        begins = self.doc_ids[1:] != self.doc_ids[:-1]
        changed = np.concatenate(([True], begins)) if len(self) else np.zeros(0, dtype=np.bool_)
        return np.flatnonzero(changed & (self.doc_ids != PADDING_DOC_ID))


@dataclass(frozen=True, slots=True)
class BatchImage:
    """One image of a batch: the row it belongs to, and its placement there."""

    row: int
    placement: ImagePlacement


@dataclass(frozen=True, slots=True)
class Batch:
    """`B` rows of `L` tokens as tensors [B, L]. Ids, documents and positions are int64, weights float32.

    `token_types` int8 is -1 at text and the span's type at image positions. `images` run in row order, then in
    order of their spans.
    """

    token_ids: torch.Tensor
    doc_ids: torch.Tensor
    positions: torch.Tensor
    loss_weight: torch.Tensor
    image_mask: torch.Tensor
    token_types: torch.Tensor
    images: tuple[BatchImage, ...]


def collate(rows: Sequence[Row]) -> Batch:
    """Return `rows`, all of one length, as one batch. Raises ValueError for none, or for several lengths."""
    lengths = {len(row) for row in rows}
    if len(lengths) != 1:
        raise ValueError(f"rows of one length are needed, not of {sorted(lengths)}")
    images = tuple(BatchImage(index, image) for index, row in enumerate(rows) for image in row.images)
    token_types = np.full((len(rows), *lengths), TEXT_TOKEN_TYPE, dtype=np.int8)
    for image in images:
        token_types[image.row, image.placement.start : image.placement.end] = image.placement.token_types
    return Batch(
        token_ids=torch.from_numpy(np.stack([row.token_ids for row in rows]).astype(np.int64)),
        doc_ids=torch.from_numpy(np.stack([row.doc_ids for row in rows]).astype(np.int64)),
        positions=torch.from_numpy(np.stack([row.positions for row in rows]).astype(np.int64)),
        loss_weight=torch.from_numpy(np.stack([row.loss_weight for row in rows])),
        image_mask=torch.from_numpy(np.stack([row.image_mask for row in rows])),
        token_types=torch.from_numpy(token_types),
        images=images,
    )


def _last_start(starts: NDArray[np.intp], length: int) -> NDArray[np.intp]:
    """Return, for each of `length` positions, the last start at or before it."""
    marks = np.zeros(length, dtype=np.intp)
    marks[starts] = starts
    return np.maximum.accumulate(marks)


__all__ = [
    "DOCUMENT_ALIGNMENT",
    "PADDING_DOC_ID",
    "PAD_TOKEN_ID",
    "TEXT_TOKEN_TYPE",
    "Batch",
    "BatchImage",
    "ImagePlacement",
    "Row",
    "collate",
]
