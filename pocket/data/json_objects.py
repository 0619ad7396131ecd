"""JSON objects from a schema in the prompt, filled from a text. Held out: the values.

Owns the fields an object can have: the name, its schema, how a sentence tells its value. The schema stands in the
user's message, or in the response format as the codec renders it; the target is one object on one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from pocket.data.example import Example, Expect, Json, Message, draw_effort, reasoning
from pocket.data.words import (
    CITIES,
    COLOURS,
    FOODS,
    HOBBIES,
    JOBS,
    MATERIALS,
    MONTHS,
    NAMES,
    OBJECTS,
    WEEKDAYS,
    joined,
)

TASK = "json"


@dataclass(frozen=True, slots=True)
class Field:
    """One property: possible names, its schema, a way to draw a value, and a sentence (`{it}` is the subject)."""

    names: tuple[str, ...]
    schema: Json
    draw: Callable[[Random], Any]
    sentence: str


def _string(*names: str, values: tuple[str, ...], sentence: str) -> Field:
    return Field(names, {"type": "string"}, lambda rng: rng.choice(values), sentence)


def _integer(*names: str, low: int, high: int, sentence: str) -> Field:
    return Field(names, {"type": "integer"}, lambda rng: rng.randint(low, high), sentence)


def _boolean(*names: str, sentence: str) -> Field:
    return Field(names, {"type": "boolean"}, lambda rng: rng.random() < 0.5, sentence)


def _strings(*names: str, values: tuple[str, ...], sentence: str) -> Field:
    schema = {"type": "array", "items": {"type": "string"}}
    return Field(names, schema, lambda rng: rng.sample(values, rng.randint(1, 3)), sentence)


def _choice(*names: str, values: tuple[str, ...], sentence: str) -> Field:
    return Field(names, {"type": "string", "enum": list(values)}, lambda rng: rng.choice(values), sentence)


_PERSON = (
    _string("name", "first_name", values=NAMES, sentence="The name is {v}."),
    _integer("age", "age_years", low=5, high=95, sentence="{it} is {v} years old."),
    _string("city", "home_town", values=CITIES, sentence="{it} lives in {v}."),
    _string("job", "profession", values=JOBS, sentence="{it} works as a {v}."),
    _strings("hobbies", "likes", values=HOBBIES, sentence="{it} likes {v}."),
    _boolean("married", "is_married", sentence="{it} is {not}married."),
    _string("birth_month", values=MONTHS, sentence="{it} was born in {v}."),
    _integer("children", "num_children", low=0, high=9, sentence="{it} has {v} children."),
    _string("favourite_food", values=FOODS, sentence="The favourite food is {v}."),
    _choice("language", values=("English", "French", "German", "Spanish"), sentence="{it} speaks {v}."),
)
_PRODUCT = (
    _string("name", "product", values=OBJECTS, sentence="The product is a {v}."),
    _integer("price", "price_euros", low=1, high=999, sentence="It costs {v} euros."),
    _string("colour", values=COLOURS, sentence="Its colour is {v}."),
    _string("material", values=MATERIALS, sentence="It is made of {v}."),
    _integer("stock", "quantity", low=0, high=500, sentence="There are {v} in stock."),
    _boolean("available", "on_sale", sentence="It is {not}available."),
    _choice("size", values=("small", "medium", "large"), sentence="The size is {v}."),
    Field(("weight_kg",), {"type": "number"}, lambda rng: rng.randint(1, 99) / 10, "It weighs {v} kg."),
    _strings("colours", "variants", values=COLOURS, sentence="It also comes in {v}."),
)
_EVENT = (
    _string("title", "topic", values=HOBBIES, sentence="The topic is {v}."),
    _choice("day", "weekday", values=WEEKDAYS, sentence="It takes place on {v}."),
    _string("city", "location", values=CITIES, sentence="It is in {v}."),
    _integer("hour", "start_hour", low=8, high=22, sentence="It starts at {v}."),
    _integer("guests", "num_guests", low=2, high=200, sentence="{v} guests are coming."),
    _strings("speakers", "people", values=NAMES, sentence="The speakers are {v}."),
    _boolean("free", sentence="It is {not}free."),
    _choice("status", values=("planned", "open", "full"), sentence="The status is {v}."),
)
_SUBJECTS = (("person", _PERSON), ("product", _PRODUCT), ("event", _EVENT))

_ASK = (
    "Extract the {subject} as JSON that follows this schema:\n{schema}\n\n{text}",
    "Read the text and answer with a JSON object of this schema.\nSchema: {schema}\nText: {text}",
    "{text}\n\nReturn the {subject} as a JSON object with this schema:\n{schema}",
    "Write JSON for this schema: {schema}\n\nThe text: {text}",
)
_ASK_FORMAT = (
    "Extract the {subject} from this text as JSON.\n\n{text}",
    "Describe this {subject} as JSON: {text}",
)


def generate(rng: Random) -> Example:
    """Return a JSON example; one in four nests another object, one in four has the schema as response format."""
    subject, fields = rng.choice(_SUBJECTS)
    it = "She" if rng.random() < 0.5 else "He"
    schema, value, sentences = _object(rng, fields, it, rng.randint(1, 5))
    if rng.random() < 0.25:
        name, inner_fields = rng.choice([other for other in _SUBJECTS if other[0] != subject])
        inner_schema, inner, inner_sentences = _object(rng, inner_fields, it, rng.randint(1, 3))
        schema["properties"][name] = inner_schema
        schema["required"].append(name)
        value[name] = inner
        sentences += [f"About the {name}:", *inner_sentences]
    text = " ".join(sentences)
    in_format = rng.random() < 0.25
    template = rng.choice(_ASK_FORMAT if in_format else _ASK)
    prompt = template.format(subject=subject, schema=json.dumps(schema), text=text)
    answer = json.dumps(value)
    effort = draw_effort(rng)
    thought = None
    if effort is not None:
        checks = [f"{name} is {json.dumps(item)}." for name, item in value.items()]
        thought = reasoning(effort, f"The object needs {joined(list(value))}.", checks)
    return Example(
        task=TASK,
        key=answer,
        messages=(Message("user", prompt), Message("assistant", answer, thought)),
        expect=Expect("json", value=value),
        effort=effort,
        response_schema=schema if in_format else None,
    )


def _object(rng: Random, fields: tuple[Field, ...], it: str, count: int) -> tuple[Json, Json, list[str]]:
    """Return a schema, an object of it, and the sentences that tell its values in another order."""
    chosen = rng.sample(fields, count)
    properties: Json = {}
    value: Json = {}
    sentences = []
    for field in chosen:
        name = rng.choice(field.names)
        item = field.draw(rng)
        properties[name] = field.schema
        value[name] = item
        told = joined(item) if isinstance(item, list) else item
        sentences.append(field.sentence.format(it=it, v=told, **{"not": "" if item is True else "not "}))
    rng.shuffle(sentences)
    schema: Json = {"type": "object", "properties": properties, "required": list(properties)}
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    return schema, value, sentences
