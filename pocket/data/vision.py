"""Small pictures: coloured shapes on a plain ground, and questions about colour, shape and number.

Owns the drawing. Pictures are 84 to 256 pixels a side, mostly up to 168, so that a
span has 8 to 58 tokens. Held out: the whole layout of a picture.
"""

from __future__ import annotations

from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from pocket.data.example import Example, Expect, Message, draw_effort, reasoning
from pocket.data.words import SHAPES, article, joined, number_word, plural

TASK = "vision"

PALETTE = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 210),
    "yellow": (240, 210, 40),
    "purple": (140, 50, 170),
    "orange": (240, 130, 20),
    "black": (15, 15, 15),
    "pink": (245, 150, 185),
}
_GROUNDS = ((255, 255, 255), (235, 235, 235), (250, 245, 225))
_SIDES = (84, 126, 168, 100, 150, 210, 256)  # multiples of a cell mostly; the others are padded
_SIDE_WEIGHTS = (4, 4, 4, 1, 1, 2, 1)
_CELL_SHARE = 0.32

_ASK_COLOUR = (
    "What colour is the {shape}?",
    "Which colour does the {shape} have?",
    "Name the colour of the {shape}.",
)
_ASK_SHAPE = ("What shape is {colour}?", "Which shape is {colour}?", "Name the {colour} shape.")
_ASK_COUNT = (
    "How many shapes are in the picture?",
    "How many shapes do you see?",
    "Count the shapes in the picture.",
)
_ASK_COUNT_OF = ("How many {shapes} are in the picture?", "How many {shapes} do you see?")
_ASK_ALL = ("What is in the picture?", "Describe the picture.", "What do you see?")


def generate(rng: Random) -> Example:
    """Return a question about one picture. Shapes asked for by colour or kind are unambiguous."""
    kind = rng.choice(("colour", "shape", "count", "count of", "all"))
    count = rng.randint(1, 4) if kind.startswith("count") else rng.randint(1, 3)
    if kind == "count of":
        shapes, colours = (
            rng.choices(rng.sample(SHAPES, 2), (3, 1), k=count),
            rng.choices(tuple(PALETTE), k=count),
        )
    elif kind == "count":
        shapes, colours = rng.choices(SHAPES, k=count), rng.choices(tuple(PALETTE), k=count)
    else:
        shapes, colours = rng.sample(SHAPES, count), rng.sample(tuple(PALETTE), count)
    pixels, layout = draw(rng, shapes, colours)
    prompt, answer = _question(rng, kind, shapes, colours)
    effort = draw_effort(rng)
    thought = None
    if effort is not None:
        checks = [f"I see {article(colour)} {shape}." for colour, shape in zip(colours, shapes, strict=True)]
        thought = reasoning(effort, f"There {_are(count, 'shape')} in the picture.", checks)
    return Example(
        task=TASK,
        key=layout,
        messages=(Message("user", prompt, images=(pixels,)), Message("assistant", answer, thought)),
        expect=Expect("exact", answer),
        effort=effort,
    )


def generate_drill(rng: Random) -> Example:
    """Return a conversation of several questions about one picture, without thinking; held out by its layout too."""
    count = rng.randint(1, 4)
    if rng.random() < 0.5:
        # Different shapes of different colours: everything can be asked.
        count = min(count, len(SHAPES))
        shapes, colours = rng.sample(SHAPES, count), rng.sample(tuple(PALETTE), count)
        kinds = ["colour", "shape", "count", "count of", "all"]
    else:
        shapes = rng.choices(rng.sample(SHAPES, 2), k=count)
        colours = rng.choices(tuple(PALETTE), k=count)
        kinds = ["count", "count of", "count of"]
    pixels, layout = draw(rng, shapes, colours)
    messages: list[Message] = []
    for kind in rng.sample(kinds, rng.randint(2, len(kinds))):
        prompt, answer = _question(rng, kind, shapes, colours)
        messages += [
            Message("user", prompt, images=() if messages else (pixels,)),
            Message("assistant", answer),
        ]
    return Example(task=TASK, key=layout, messages=tuple(messages))


def draw(rng: Random, shapes: list[str], colours: list[str]) -> tuple[NDArray[np.uint8], str]:
    """Return pixels uint8 [H, W, 3] with the shapes in reading order, and a text that names the layout."""
    side = rng.choices(_SIDES, _SIDE_WEIGHTS)[0]
    ground = rng.choice(_GROUNDS)
    image = Image.new("RGB", (side, side), ground)
    canvas = ImageDraw.Draw(image)
    half = side // 2
    cells = sorted(rng.sample(range(4), len(shapes)))
    marks = [f"{side} {ground}"]
    for cell, shape, colour in zip(cells, shapes, colours, strict=True):
        radius = round(half * rng.uniform(_CELL_SHARE, _CELL_SHARE + 0.12))
        slack = half // 2 - radius
        x = (cell % 2) * half + half // 2 + rng.randint(-slack, slack)
        y = (cell // 2) * half + half // 2 + rng.randint(-slack, slack)
        _draw_shape(canvas, shape, x, y, radius, PALETTE[colour])
        marks.append(f"{shape} {colour} {x} {y} {radius}")
    return np.asarray(image), ", ".join(marks)


def _draw_shape(
    canvas: ImageDraw.ImageDraw, shape: str, x: int, y: int, radius: int, colour: tuple[int, int, int]
) -> None:
    if shape == "circle":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif shape == "square":
        inner = round(radius * 0.85)
        canvas.rectangle((x - inner, y - inner, x + inner, y + inner), fill=colour)
    else:
        canvas.polygon(((x, y - radius), (x - radius, y + radius), (x + radius, y + radius)), fill=colour)


def _question(rng: Random, kind: str, shapes: list[str], colours: list[str]) -> tuple[str, str]:
    which = rng.randrange(len(shapes))
    shape, colour = shapes[which], colours[which]
    if kind == "colour":
        return rng.choice(_ASK_COLOUR).format(shape=shape), f"The {shape} is {colour}."
    if kind == "shape":
        return rng.choice(_ASK_SHAPE).format(colour=colour), f"The {colour} shape is a {shape}."
    if kind == "count":
        return rng.choice(_ASK_COUNT), f"There {_are(len(shapes), 'shape')} in the picture."
    if kind == "count of":
        prompt = rng.choice(_ASK_COUNT_OF).format(shapes=plural(shape))
        return prompt, f"There {_are(shapes.count(shape), shape)} in the picture."
    things = joined([f"{article(colour)} {shape}" for colour, shape in zip(colours, shapes, strict=True)])
    return rng.choice(_ASK_ALL), f"I see {things}."


def _are(count: int, noun: str) -> str:
    return f"is one {noun}" if count == 1 else f"are {number_word(count)} {plural(noun)}"
