"""The stream: valid rows, the same for a seed, shares as asked, many workers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pocket.batch import Row, collate
from pocket.data.stream import GENERATORS, MIXTURES, RowLoader, RowStream, rows

QUICK = {"arithmetic": 0.5, "vision": 0.2, "needle": 0.3}


def same(one: Row, other: Row) -> bool:
    names = ("token_ids", "doc_ids", "positions", "loss_weight", "image_mask")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names) and all(
        np.array_equal(a.pixels, b.pixels) for a, b in zip(one.images, other.images, strict=True)
    )


@pytest.mark.parametrize("mixture", MIXTURES)
def test_rows_of_every_mixture_are_valid(mixture: str) -> None:
    stream = rows(1, 2048, mixture)
    made = [next(stream) for _ in range(6)]
    for row in made:
        row.check()
        assert (row.doc_ids >= 0).mean() > 0.8
        assert row.loss_weight.max() == 1.0
    assert collate(made).token_ids.max() < 4096


def test_a_row_depends_on_seed_worker_and_place_only() -> None:
    one, two = rows(1, 512, QUICK), rows(1, 512, QUICK)
    assert all(same(next(one), next(two)) for _ in range(8))
    assert not same(next(rows(1, 512, QUICK)), next(rows(2, 512, QUICK)))
    assert not same(next(rows(1, 512, QUICK)), next(rows(1, 512, QUICK, worker=1)))
    assert not same(next(rows(1, 512, QUICK)), next(rows(1, 512, QUICK, split="eval")))


def test_shares_of_tokens_approach_the_mixture() -> None:
    spent: Counter[str] = Counter()

    class Counted(RowStream):
        def _next_document(self):  # type: ignore[no-untyped-def]
            document = super()._next_document()
            spent[document.task] += len(document)
            return document

    stream = Counted(3, 2048, QUICK)
    for _ in range(60):
        next(stream)
    for task, share in QUICK.items():
        assert abs(spent[task] / spent.total() - share) < 0.06


def test_mixtures_name_tasks_and_keep_the_book_apart() -> None:
    for mixture in MIXTURES.values():
        assert set(mixture) <= set(GENERATORS)
    assert not any(task in MIXTURES["practice"] for task in ("facts", "facts prose"))


def test_workers_give_what_their_streams_give_in_turn() -> None:
    expected = [rows(5, 512, QUICK, worker=worker) for worker in range(2)]
    with RowLoader(5, 512, QUICK, num_workers=2) as loader:
        for index, row in enumerate(loader.take(10)):
            assert same(row, next(expected[index % 2]))
