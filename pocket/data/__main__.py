"""`python -m pocket.data`: look at examples, measure the stream.

`--show TASK --seed N` prints examples of a task as text and as tokens; `--speed` measures one worker; `--stats` says
how long the documents of each task are.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from random import Random

import numpy as np

from pocket.data.example import Example, draw
from pocket.data.render import Renderer
from pocket.data.stream import GENERATORS, MIXTURES, VISION, rows
from pocket.tokenizer import load_tokenizer


def show(task: str, seed: int, count: int, split: str) -> None:
    """Print examples: the rendered text with `[` `]` around what carries full loss, then sizes."""
    renderer, tokenizer, rng = Renderer(load_tokenizer(), VISION), load_tokenizer(), Random(f"show {seed}")
    for index in range(count):
        example = draw(GENERATORS[task], rng, "eval" if split == "eval" else "train")
        document = renderer.render(example)
        print(f"--- {task} {index}: {len(document)} tokens")
        edges = np.flatnonzero(np.diff(document.target_weight >= 1)) + 1
        for piece, weights in zip(
            np.split(document.token_ids, edges), np.split(document.target_weight, edges), strict=True
        ):
            text = tokenizer.decode(piece)
            print(f"\033[1m[{text}]\033[0m" if weights[0] >= 1 else text, end="")
        print()
        if isinstance(example, Example):
            print(f"    expect {example.expect}; effort {example.effort}; images {len(document.images)}")


def stats(seed: int, count: int) -> None:
    """Print, per task, the mean length of documents and the share of tokens with full loss."""
    renderer = Renderer(load_tokenizer(), VISION)
    for task, generate in GENERATORS.items():
        rng = Random(f"stats {seed}")
        begin = time.perf_counter()
        documents = [renderer.render(draw(generate, rng, "train")) for _ in range(count)]
        elapsed_s = time.perf_counter() - begin
        lengths = [len(document) for document in documents]
        loss = sum(float(np.sum(document.target_weight >= 1)) for document in documents) / sum(lengths)
        print(
            f"{task:22} mean {np.mean(lengths):7.1f} max {max(lengths):5} tokens, loss on {loss:4.0%}, "
            f"{sum(lengths) / elapsed_s:9.0f} tok/s"
        )


def speed(seed: int, seq_len: int, mixture: str, seconds_s: float) -> None:
    """Print how many tokens one worker makes in a second, and what the rows consist of."""
    stream = rows(seed, seq_len, mixture)
    next(stream)
    begin, num_rows, padding, loss = time.perf_counter(), 0, 0, 0.0
    documents: defaultdict[str, int] = defaultdict(int)
    while time.perf_counter() - begin < seconds_s:
        row = next(stream)
        num_rows += 1
        padding += int(np.sum(row.doc_ids < 0))
        loss += float(np.sum(row.loss_weight >= 1))
        documents["documents"] += int(row.doc_ids.max()) + 1
    elapsed_s = time.perf_counter() - begin
    total = num_rows * seq_len
    print(
        f"{total / elapsed_s:.0f} tok/s in one process; {padding / total:.1%} padding, {loss / total:.1%} full loss, "
        f"{documents['documents'] / num_rows:.1f} documents a row"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pocket.data", description=__doc__)
    parser.add_argument("--show", choices=sorted(GENERATORS), help="print examples of a task")
    parser.add_argument("--speed", action="store_true", help="measure one worker")
    parser.add_argument("--stats", action="store_true", help="lengths of every task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--split", choices=("train", "eval"), default="train")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--mixture", choices=sorted(MIXTURES), default="main")
    options = parser.parse_args()
    if options.show:
        show(options.show, options.seed, options.count, options.split)
    if options.stats:
        stats(options.seed, max(options.count, 200))
    if options.speed:
        speed(options.seed, options.seq_len, options.mixture, 10.0)


if __name__ == "__main__":
    main()
