"""The stream of rows: a mixture of tasks, rendered and packed, in this process or in many.

Owns the mixtures, the packing and the worker processes. A row depends on the seed, the worker, the mixture and its
place in the stream, never on time: the same arguments give the same rows.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from random import Random
from types import TracebackType

import numpy as np

from deskfleet.model.config import VisionConfig
from pocket.batch import DOCUMENT_ALIGNMENT, PAD_TOKEN_ID, PADDING_DOC_ID, ImagePlacement, Row
from pocket.data import (
    arithmetic,
    chat,
    code,
    count,
    drill,
    facts,
    json_objects,
    needle,
    primality,
    prose,
    quote,
    spell,
    tools,
    vision,
    world,
)
from pocket.data.example import Generator, Split, draw
from pocket.data.render import Document, Renderer
from pocket.sizes import POCKET
from pocket.tokenizer import load_tokenizer

VISION = VisionConfig(
    num_hidden_layers=POCKET.vision_num_hidden_layers,
    hidden_size=POCKET.vision_hidden_size,
    num_attention_heads=POCKET.vision_num_attention_heads,
    intermediate_size=POCKET.vision_intermediate_size,
    patch_size=POCKET.vision_patch_size,
    rope_theta=10000.0,
    downsample_ratio=POCKET.vision_downsample_ratio,
    max_image_tokens=POCKET.vision_max_image_tokens,
    min_pixels=POCKET.vision_min_pixels,
    max_wh_ratio=None,
)
"""How pictures become spans of tokens."""

GENERATORS: dict[str, Generator] = {
    "count": count.generate,
    "spell": spell.generate,
    "arithmetic": arithmetic.generate,
    "primality": primality.generate,
    "needle": needle.generate,
    "tools": tools.generate,
    "json": json_objects.generate,
    "facts": facts.generate,
    "facts prose": facts.generate_prose,
    "practice facts": facts.generate_practice,
    "practice facts prose": facts.generate_practice_prose,
    "world": world.generate,
    "vision": vision.generate,
    "vision drill": vision.generate_drill,
    "quote": quote.generate,
    "drill": drill.generate,
    "prose": prose.generate,
    "code": code.generate,
    "chat": chat.generate,
}
"""Every task. `facts` are those of the evaluation; `practice facts` teach how to use Engram rows."""

_WITHOUT_BOOK = {
    "count": 0.06,
    "spell": 0.03,
    "arithmetic": 0.1,
    "drill": 0.12,
    "quote": 0.04,
    "primality": 0.04,
    "needle": 0.1,
    "tools": 0.2,
    "json": 0.1,
    "practice facts": 0.03,
    "practice facts prose": 0.02,
    "world": 0.02,
    "vision": 0.05,
    "vision drill": 0.04,
    "prose": 0.05,
    "code": 0.03,
    "chat": 0.03,
}

MIXTURES: dict[str, dict[str, float]] = {
    "practice": _WITHOUT_BOOK,
    "main": _WITHOUT_BOOK | {"facts": 0.03, "facts prose": 0.01, "prose": 0.08, "code": 0.06},
    "book": {task: share / 2 for task, share in _WITHOUT_BOOK.items()} | {"facts": 0.35, "facts prose": 0.12},
}
"""Mixture -> share of tokens of each task; shares are made to add up to one.

practice: everything but the book of facts that the evaluation asks. main: everything. book: for a last phase that
trains Engram tables only: half of it is all the other tasks, or their rows would be overwritten where facts share them.
"""


_GUESSED_LENGTH = 200


class RowStream:
    """An endless iterator of rows of one mixture.

    A task is drawn in proportion to its share of tokens over the mean length of its documents so far, so that the
    shares of tokens approach the mixture's. Documents are packed in the order in which they come; one that does
    not fit waits for the next row, and the gap is filled from the smaller ones that wait.
    """

    _NUM_WAITING = 24

    def __init__(
        self,
        seed: int,
        seq_len: int,
        mixture: Mapping[str, float],
        *,
        worker: int = 0,
        split: Split = "train",
    ) -> None:
        self._rng = Random(f"pocket rows {seed} {worker} {split}")
        self._seq_len = seq_len
        self._split = split
        self._renderer = Renderer(load_tokenizer(), VISION)
        self._generators = dict(GENERATORS)
        self._generators["needle"] = partial(needle.generate, max_tokens=seq_len - 64)
        total = sum(mixture.values())
        self._shares = {task: share / total for task, share in mixture.items()}
        self._num_documents = dict.fromkeys(mixture, 1)
        self._num_tokens = dict.fromkeys(mixture, _GUESSED_LENGTH)
        self._waiting: list[Document] = []

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        documents: list[Document] = []
        used = 0
        while True:
            while len(self._waiting) < self._NUM_WAITING:
                self._waiting.append(self._next_document())
            room = self._seq_len - used
            fitting = next((i for i, document in enumerate(self._waiting) if len(document) <= room), None)
            if fitting is None:
                return pack(documents, self._seq_len)
            document = self._waiting.pop(fitting)
            documents.append(document)
            used += _aligned(len(document))

    def _next_document(self) -> Document:
        """Return a document of one task that fits into a row."""
        weights = [
            share * self._num_documents[name] / self._num_tokens[name] for name, share in self._shares.items()
        ]
        task = self._rng.choices(tuple(self._shares), weights)[0]
        while True:
            document = self._renderer.render(draw(self._generators[task], self._rng, self._split))
            if len(document) <= self._seq_len:
                break
        self._num_documents[task] += 1
        self._num_tokens[task] += _aligned(len(document))
        return document


def rows(
    seed: int,
    seq_len: int,
    mixture: str | Mapping[str, float] = "main",
    *,
    worker: int = 0,
    split: Split = "train",
) -> RowStream:
    """Return an endless stream of rows of `seq_len` tokens. `mixture` is a name of MIXTURES or shares of tasks."""
    shares = MIXTURES[mixture] if isinstance(mixture, str) else mixture
    return RowStream(seed, seq_len, shares, worker=worker, split=split)


def pack(documents: list[Document], seq_len: int) -> Row:
    """Return documents as one row, each at a multiple of DOCUMENT_ALIGNMENT. Raises ValueError when too long."""
    token_ids = np.full(seq_len, PAD_TOKEN_ID, dtype=np.uint16)
    doc_ids = np.full(seq_len, PADDING_DOC_ID, dtype=np.int32)
    positions = np.zeros(seq_len, dtype=np.int32)
    loss_weight = np.zeros(seq_len, dtype=np.float32)
    image_mask = np.zeros(seq_len, dtype=np.bool_)
    images: list[ImagePlacement] = []
    start = 0
    for index, document in enumerate(documents):
        end = start + len(document)
        if end > seq_len:
            raise ValueError(f"documents need more than {seq_len} tokens")
        token_ids[start:end] = document.token_ids
        doc_ids[start:end] = index
        positions[start:end] = np.arange(len(document))
        loss_weight[start : end - 1] = document.target_weight[1:]
        for image in document.images:
            moved = ImagePlacement(start + image.start, image.pixels, image.token_types)
            image_mask[moved.start : moved.end] = True
            images.append(moved)
        start = _aligned(end)
    return Row(token_ids, doc_ids, positions, loss_weight, image_mask, tuple(images))


class RowLoader:
    """Rows from `num_workers` processes, taken from each in turn, so that their order is always the same.

    Use it as a context manager. A training that is resumed takes another seed for every piece (its first step, say),
    because the rows before cannot be skipped without making them.
    """

    def __init__(
        self,
        seed: int,
        seq_len: int,
        mixture: str | Mapping[str, float] = "main",
        *,
        num_workers: int = 14,
        prefetch_rows: int = 8,
    ) -> None:
        shares = dict(MIXTURES[mixture] if isinstance(mixture, str) else mixture)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        self._prefetch_rows = prefetch_rows
        for worker in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, seed, seq_len, shares, worker), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            for _ in range(prefetch_rows):
                pipe.send(True)
        self._turn = 0

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        pipe = self._pipes[self._turn % len(self._pipes)]
        self._turn += 1
        row: Row = pipe.recv()
        pipe.send(True)
        return row

    def take(self, count: int) -> list[Row]:
        """Return the next `count` rows."""
        return [next(self) for _ in range(count)]

    def close(self) -> None:
        """End the workers."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()

    def __enter__(self) -> RowLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _work(pipe: Connection, seed: int, seq_len: int, mixture: Mapping[str, float], worker: int) -> None:
    """Send one row for each message, until the loader closes the pipe."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    stream = rows(seed, seq_len, mixture, worker=worker)
    try:
        while True:
            pipe.recv()
            pipe.send(next(stream))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _aligned(length: int) -> int:
    return -(-length // DOCUMENT_ALIGNMENT) * DOCUMENT_ALIGNMENT


__all__ = ["GENERATORS", "MIXTURES", "VISION", "RowLoader", "RowStream", "pack", "rows"]
