"""Greedy generation with the training model: the whole text is computed again for every token, many texts at a time.

Owns how texts are put together and left when they end. Slow for each text, and nothing of the engine is in it. Guesses
make it fast and change nothing: of a guessed answer as much is kept as the model would have said, for one computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pocket.batch import Batch, BatchImage
from pocket.data.render import Document
from pocket.data.stream import VISION
from pocket.model.backbone import Backbone
from pocket.model.numerics import Numerics
from pocket.model.vision import ImageInputs, image_inputs
from pocket.tokenizer import EOS, load_tokenizer


@dataclass(frozen=True)
class _Asked:
    """One prompt on its way through the model."""

    number: int
    prompt: Document
    max_tokens: int
    guess: Sequence[int]


def answer_all(
    model: Backbone,
    prompts: Sequence[Document],
    max_tokens: Sequence[int],
    numerics: Numerics,
    *,
    batch_tokens: int,
    guesses: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Greedy continuations of the prompts, each up to its end or its most tokens, in their order.

    `batch_tokens` bounds the tokens of one forward pass, padding included, unless a single prompt is longer. `guesses`
    are what the answers may be, empty where nobody knows.
    """
    guesses = [()] * len(prompts) if guesses is None else guesses
    asked = [_Asked(*each) for each in zip(range(len(prompts)), prompts, max_tokens, guesses, strict=True)]
    said: list[list[int]] = [[] for _ in prompts]
    for group in _groups(asked, model.config.sliding_window, batch_tokens):
        for one, token_ids in zip(group, _generate(model, group, numerics), strict=True):
            said[one.number] = token_ids
    return said


def _groups(asked: Sequence[_Asked], window: int, batch_tokens: int) -> Iterator[list[_Asked]]:
    """Yield prompts of about one length together."""
    group: list[_Asked] = []
    for one in sorted(asked, key=lambda one: (len(one.prompt) + one.max_tokens, one.number)):
        longest = _padded(len(one.prompt) + one.max_tokens, window)
        if group and longest * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


@dataclass(frozen=True)
class _Texts:
    """N prompts with what was said to them so far, on the device.

    token_ids int64 [N, room], image_mask bool [N, room]; lengths and limits int64 [N] of prompts and of answers; used
    int64 [N]: tokens said; number int64 [N]: which of the group they are.
    """

    token_ids: Tensor
    image_mask: Tensor
    images: ImageInputs | None
    lengths: Tensor
    limits: Tensor
    used: Tensor
    number: Tensor

    def of(self, rows: Tensor) -> _Texts:
        """Some of the texts, by a bool [N]. Their images stay what they are."""
        images = None if self.images is None else replace(self.images, index=self.images.index[rows])
        plain = {
            name: getattr(self, name)[rows]
            for name in ("token_ids", "image_mask", "lengths", "limits", "used", "number")
        }
        return _Texts(images=images, **plain)


@torch.inference_mode()
def _generate(model: Backbone, group: Sequence[_Asked], numerics: Numerics) -> list[list[int]]:
    window, eos = model.config.sliding_window, load_tokenizer().special_id(EOS)
    texts = _begin(group, window, eos, model.embed.weight.device)
    alive = torch.ones_like(texts.used, dtype=torch.bool)
    if any(one.guess for one in group):
        texts, alive = _with_guesses(model, numerics, texts, [list(one.guess) for one in group], eos)
    said: list[list[int]] = [[] for _ in group]
    while True:
        # Texts that have ended are computed along until half of them have.
        if 2 * int(alive.sum()) <= len(alive):
            for number, token_ids, start, used in zip(
                texts.number.tolist(),
                texts.token_ids.tolist(),
                texts.lengths.tolist(),
                texts.used.tolist(),
                strict=True,
            ):
                said[number] = token_ids[start : start + used]
            texts, alive = texts.of(alive), alive[alive]
            if not len(alive):
                return said
        row, last = torch.arange(len(alive), device=alive.device), texts.lengths + texts.used - 1
        hidden = _hidden(model, numerics, texts, _padded(int(last.max()) + 1, window))
        # What stands behind a text's end reaches nothing before it.
        chosen = model.logits(hidden[row, last]).argmax(-1)
        texts.token_ids[row[alive], last[alive] + 1] = chosen[alive]
        texts = replace(texts, used=texts.used + alive)
        alive = alive & (chosen != eos) & (texts.used < texts.limits)


def _with_guesses(
    model: Backbone, numerics: Numerics, texts: _Texts, guesses: Sequence[list[int]], eos: int
) -> tuple[_Texts, Tensor]:
    """The texts with what the model says as long as it says what was guessed, and its next token; who goes on."""
    used, starts = texts.used.clone(), texts.lengths.tolist()
    for row, (guess, start, limit) in enumerate(zip(guesses, starts, texts.limits.tolist(), strict=True)):
        del guess[limit:]
        texts.token_ids[row, start : start + len(guess)] = torch.tensor(guess, device=used.device)
    longest = max(start + len(guess) for start, guess in zip(starts, guesses, strict=True))
    hidden = _hidden(model, numerics, texts, _padded(longest, model.config.sliding_window))
    for row, (guess, start, limit) in enumerate(zip(guesses, starts, texts.limits.tolist(), strict=True)):
        places = hidden[row, start - 1 : start + min(len(guess), limit - 1)]
        chosen = model.logits(places).argmax(-1).tolist()
        same = next((i for i, (a, b) in enumerate(zip(chosen, guess, strict=False)) if a != b), len(guess))
        said = chosen[: same + 1]
        texts.token_ids[row, start : start + len(said)] = torch.tensor(said, device=used.device)
        used[row] = said.index(eos) + 1 if eos in said else len(said)
    texts = replace(texts, used=used)
    last = texts.token_ids[torch.arange(len(used), device=used.device), texts.lengths + used - 1]
    return texts, (last != eos) & (used < texts.limits)


def _begin(group: Sequence[_Asked], window: int, eos: int, device: torch.device) -> _Texts:
    lengths = torch.tensor([len(one.prompt) for one in group], device=device)
    limits = torch.tensor([one.max_tokens for one in group], device=device)
    room = _padded(int((lengths + limits).max()), window)
    token_ids = torch.full((len(group), room), eos, device=device)
    image_mask = torch.zeros(len(group), room, dtype=torch.bool, device=device)
    for number, one in enumerate(group):
        prompt = torch.from_numpy(one.prompt.token_ids.astype(np.int64))
        token_ids[number, : len(prompt)] = prompt.to(device)
        for image in one.prompt.images:
            image_mask[number, image.start : image.end] = True
    rows = torch.arange(len(group), device=device)
    images = _images(group, room, device)
    return _Texts(token_ids, image_mask, images, lengths, limits, torch.zeros_like(rows), rows)


def _hidden(model: Backbone, numerics: Numerics, texts: _Texts, length: int) -> Tensor:
    """What every one of the first `length` tokens leaves, bf16 [N, length, M]."""
    token_ids = texts.token_ids[:, :length]
    positions = torch.arange(length, device=token_ids.device).expand(token_ids.shape)
    rows = model.begin(numerics, torch.zeros_like(token_ids), positions, texts.image_mask[:, :length])
    images = texts.images
    if images is not None:
        images = replace(images, index=images.index[:, :length])
    hidden: Tensor = model(token_ids, rows, images).hidden
    return hidden.view(*token_ids.shape, -1)


def _images(group: Sequence[_Asked], room: int, device: torch.device) -> ImageInputs | None:
    placed = tuple(BatchImage(row, image) for row, one in enumerate(group) for image in one.prompt.images)
    if not placed:
        return None
    shape = (len(group), room)
    empty = torch.zeros(shape, dtype=torch.int64)
    batch = Batch(
        empty, empty, empty, torch.zeros(shape), empty.bool(), torch.full(shape, -1, dtype=torch.int8), placed
    )
    inputs = image_inputs(batch, VISION)
    return None if inputs is None else inputs.each(lambda tensor: tensor.to(device))


def _padded(length: int, window: int) -> int:
    return -(-length // window) * window


__all__ = ["answer_all"]
