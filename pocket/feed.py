"""Batches on the device, made ahead: rows from workers, collated in a thread, copied while the device works.

Owns the order and the hand-over. A given seed, number of workers and sequence length always give the same batches.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from random import Random
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from deskfleet.model.config import VisionConfig
from pocket.batch import Batch, Row, collate
from pocket.data.stream import RowLoader, rows
from pocket.model.vision import ImageInputs, image_inputs

_AHEAD = 3
_POOL_ROWS = 4096


@dataclass(frozen=True)
class DeviceBatch:
    """B rows of L tokens on the device: int64 and float32 [B, L], image_mask bool."""

    token_ids: Tensor
    doc_ids: Tensor
    positions: Tensor
    loss_weight: Tensor
    image_mask: Tensor
    images: ImageInputs | None

    @property
    def num_tokens(self) -> int:
        """B·L."""
        return self.token_ids.numel()

    def each(self, function: Callable[[Tensor], Tensor]) -> DeviceBatch:
        """The same with `function` of every tensor."""
        return DeviceBatch(
            function(self.token_ids),
            function(self.doc_ids),
            function(self.positions),
            function(self.loss_weight),
            function(self.image_mask),
            None if self.images is None else self.images.each(function),
        )


def host_batch(batch: Batch, vision: VisionConfig | None, *, pin: bool) -> DeviceBatch:
    """A batch as the model takes it, still in host memory."""
    images = None if vision is None else image_inputs(batch, vision)
    made = DeviceBatch(
        batch.token_ids, batch.doc_ids, batch.positions, batch.loss_weight, batch.image_mask, images
    )
    return made.each(torch.Tensor.pin_memory) if pin else made


def to_device(batch: DeviceBatch, device: torch.device) -> DeviceBatch:
    """Copy to the device without waiting."""
    return batch.each(lambda tensor: tensor.to(device, non_blocking=True))


def repeated(fresh: Iterator[Row], times: int, seed: int) -> Iterator[Row]:
    """Give every row `times` times, the later ones shuffled among the last `_POOL_ROWS`."""
    rng, pool = Random(seed), list[Row]()
    for row in fresh:
        yield row
        pool += [row] * (times - 1)
        while len(pool) > _POOL_ROWS:
            chosen = rng.randrange(len(pool))
            pool[chosen], pool[-1] = pool[-1], pool[chosen]
            yield pool.pop()


class Feed:
    """An endless iterator of device batches; `num_workers` 0 generates in the thread. Use as a context manager.

    Each row is used `repeat` times: for when the device learns faster than the workers write.
    """

    def __init__(
        self,
        seed: int,
        seq_len: int,
        num_rows: int,
        mixture: str | Mapping[str, float],
        vision: VisionConfig | None,
        device: torch.device,
        *,
        num_workers: int,
        repeat: int = 1,
    ) -> None:
        self._device, self._vision, self._num_rows = device, vision, num_rows
        self._loader: RowLoader | None = None
        if num_workers:
            self._loader = RowLoader(seed, seq_len, mixture, num_workers=num_workers)
        fresh: Iterator[Row] = self._loader or rows(seed, seq_len, mixture)
        self._rows = repeated(fresh, repeat, seed)
        self._queue: queue.Queue[DeviceBatch | BaseException] = queue.Queue(_AHEAD)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._make, name="pocket-feed", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[DeviceBatch]:
        return self

    def __next__(self) -> DeviceBatch:
        made = self._queue.get()
        if isinstance(made, BaseException):
            raise RuntimeError("the data stream failed") from made
        return to_device(made, self._device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        while self._thread.is_alive():  # it may wait for room
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue
        if self._loader is not None:
            self._loader.close()

    def _make(self) -> None:
        try:
            if self._device.type == "cuda" and self._device.index is not None:
                # A new thread is on the first device, and would pin memory with that.
                torch.cuda.set_device(self._device)
            while not self._closing.is_set():
                batch = collate(list(islice(self._rows, self._num_rows)))
                self._queue.put(host_batch(batch, self._vision, pin=self._device.type == "cuda"))
        except BaseException as error:  # noqa: BLE001 - handed to the training thread, which raises it
            self._queue.put(error)


__all__ = ["DeviceBatch", "Feed", "host_batch", "to_device"]
