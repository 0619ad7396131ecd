"""Plain English: stories from a seeded grammar, and documentation from the running interpreter's standard library.

Owns the grammar. Stories are told on request ("Tell me a story about a fox.") and also stand on their own. Every story
keeps its people, place and object from beginning to end, so that there is something to attend to.
"""

from __future__ import annotations

from functools import cache
from random import Random

from pocket.data.example import Example, Message, PlainText, draw_effort, reasoning
from pocket.data.sources import documentation
from pocket.data.words import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    FAMILY,
    FOODS,
    HOBBIES,
    JOBS,
    MATERIALS,
    MONTHS,
    NAMES,
    NUMBER_WORDS,
    OBJECTS,
    PLACES,
    PLANTS,
    SEASONS,
    SUBJECTS,
    WEATHER,
    WEEKDAYS,
    article,
    plural,
    word_list,
)

TASK = "prose"

_OPENINGS = (
    "Once there was {a_job} named {name} who lived near {a_place}.",
    "{name} was {a_mood} {job} in a small {place}.",
    "One {season} morning {name} the {job} walked to the {place}.",
    "On {weekday} {name} woke up early because of the {weather}.",
    "Long ago, in {a_adjective} {place}, lived {a_job} called {name}.",
    "It was a {weather_adjective} day in {month} when {name} left the {place}.",
    "{name} had been {a_job} for {number} years.",
    "Nobody in the {place} knew much about {name}, the {mood} {job}.",
)

_INTRODUCTIONS = (
    "{He} had {a_adjective} {object} that had belonged to {his} {family}.",
    "Near the {place2} {he} met {a_mood2} {animal}.",
)
"""The object and the animal of a story; the other sentences may speak of them."""

_MIDDLES = (
    "Every {weekday} {he} carried the {object} to the {place}.",
    'The {animal} looked at {him} and said, "I am looking for {a_food}."',
    '"Where did you find this {object}?" asked {name2}.',
    '"It was lying in the {place2}," said {name}.',
    "{name2} did not believe it and laughed.",
    "The {object} was made of {material} and painted {colour}.",
    "{He} sat down under the {plant} and ate some {food}.",
    "Then the {weather} came, and everything became {outcome}.",
    "{name2}, {his} {family}, was {mood2} and would not come along.",
    "There were {number} {animals} near the {place2}, and all of them were {mood2}.",
    "{He} waited for {number} hours, but nobody came.",
    "In the evening {he} wrote everything down in {a_colour} book.",
    "The people of the {place} talked about nothing else for {number} days.",
    "{He} liked {hobby} more than {subject}, and {he} said so.",
    "The {animal} ran away with the {food}, and {name} ran after it.",
    "Behind the {place2} stood {a_adjective} {object2}, and nobody knew why.",
    "{He} gave the {animal} a piece of {food}.",
    "It was too {outcome} to sleep, so {he} lit a candle and read about {subject}.",
    "Without the {object} there was no way back to the {place}.",
    '"If you help me," said the {animal}, "I will show you the way."',
    "{name} thought about it for a while and then nodded.",
    "The road went past the {place2} and down to the river.",
    "{He} opened the {object2} and found {number} {colour} {objects} inside.",
    "Somebody had left the {object} out in the {weather}.",
    "{name2} asked for the {object}, but {name} shook {his} head.",
    "They walked for {number} miles and hardly spoke.",
)

_ENDINGS = (
    "From that day on {name} and the {animal} were friends.",
    "The {object} is still in the {place} today.",
    "{name} went home, {mood2} but content.",
    "And that is why nobody in the {place} ever sells {a_object}.",
    "In the end {name2} said sorry, and they shared the {food}.",
    "{He} never saw the {animal} again.",
    'When {he} came home, {his} {family} asked only one thing: "Where is the {object}?"',
    "The next {weekday} everything was as it had always been.",
    "So {name} kept the {object}, and the {animal} kept the secret.",
)

_FEMALE = frozenset(
    word_list(
        "Ada Clara Elena Greta Ida Kira Mira Olga Rosa Tara Uma Wanda Yara Anna Celia Dora Flora Hanna Julia Lena Nora "
        "Petra Robin Sofia Ursula Vera Xenia Zoe Alma Carmen Esther Frida Helga Iris"
    )
)

_MOODS = word_list(
    "old young small tall kind brave clever careful honest patient proud shy lazy busy happy sad tired hungry thirsty "
    "angry calm strange poor rich strong famous lonely gentle quiet"
)

_STATEMENTS = (
    "The {mood} {animal} slept behind the {place}.",
    "{name} bought {number} {objects} at the market.",
    "It is often {weather_adjective} in {month}.",
    "The {job} lost {a_object} near the {place}.",
    "Most {animals} do not like {food}.",
    "The {material} {object} is not very {adjective}.",
    "{name} and {name2} talked about {subject} all day.",
    "The {place} was closed on {weekday}.",
    "There is {a_adjective} {place} behind the {place2}.",
    "{name} learned {hobby} from {a_job}.",
    "In {season} the {plant} near the {place} turns {colour}.",
    "The {object} stood next to the {object2} for {number} years.",
    "Nobody wanted the {colour} {object}.",
    "{name} ate {food} and {food2} for breakfast.",
    "The train to the {place} leaves every {number} minutes.",
    "After the {weather} the road was {outcome}.",
)

_REQUESTS = (
    "Tell me a short story about {subject}.",
    "Write a short story about {subject}.",
    "Tell me a story about {subject}.",
    "Can you tell me a story about {subject}?",
)


def sentence(rng: Random) -> str:
    """Return one sentence that stands on its own."""
    return _fill(rng.choice(_STATEMENTS), _scene(rng))


def story(rng: Random, *, scene: dict[str, str] | None = None, num_middles: int | None = None) -> str:
    """Return a story of one scene: an opening, some sentences in random order, an ending."""
    scene = _scene(rng) if scene is None else scene
    count = rng.randint(2, 8) if num_middles is None else num_middles
    introductions = rng.sample(_INTRODUCTIONS, 2)
    lines = [rng.choice(_OPENINGS), *introductions, *rng.sample(_MIDDLES, count), rng.choice(_ENDINGS)]
    return " ".join(_fill(line, scene) for line in lines)


def generate(rng: Random) -> Example | PlainText:
    """Return a story on request, a story of its own, or a passage of documentation."""
    kind = rng.random()
    if kind < 0.5:
        return _on_request(rng)
    if kind < 0.65:
        text = "\n\n".join(story(rng) for _ in range(rng.randint(1, 2)))
        return PlainText(TASK, text[:60], text)
    return PlainText(TASK, "documentation", _passage(rng), always_train=True)


def _on_request(rng: Random) -> Example:
    scene = _scene(rng)
    about = rng.choice(
        (scene["a_animal"], scene["a_job"], f"{scene['a_job']} and {scene['a_animal']}", scene["a_object"])
    )
    prompt = rng.choice(_REQUESTS).format(subject=about)
    effort = draw_effort(rng) if rng.random() < 0.3 else None
    thought = None
    if effort is not None:
        plan = [f"the story needs {scene[key]}." for key in ("a_job", "a_animal", "a_object", "a_place")]
        thought = reasoning(effort, f"The story is about {about}.", plan)
    text = story(rng, scene=scene)
    return Example(
        task=TASK,
        key=prompt,
        messages=(Message("user", prompt), Message("assistant", text, thought)),
        effort=effort,
        prompt_weight=0.1,
    )


@cache
def _paragraphs() -> tuple[str, ...]:
    return documentation()


def _passage(rng: Random) -> str:
    """Return neighbouring paragraphs of documentation."""
    paragraphs = _paragraphs()
    start, wanted = rng.randrange(len(paragraphs)), rng.randint(200, 2500)
    taken: list[str] = []
    for paragraph in paragraphs[start:]:
        taken.append(paragraph)
        if sum(map(len, taken)) >= wanted:
            break
    return "\n\n".join(taken)


def _scene(rng: Random) -> dict[str, str]:
    name, name2 = rng.sample(NAMES, 2)
    food, food2 = rng.sample(FOODS, 2)
    place, place2 = rng.sample(PLACES, 2)
    object_, object2 = rng.sample(OBJECTS, 2)
    adjective, adjective2 = rng.sample(ADJECTIVES, 2)
    mood, mood2 = rng.sample(_MOODS, 2)
    animal, job, colour = rng.choice(ANIMALS), rng.choice(JOBS), rng.choice(COLOURS)
    he, him, his = ("she", "her", "her") if name in _FEMALE else ("he", "him", "his")
    return {
        "name": name, "name2": name2, "he": he, "He": he.capitalize(), "him": him, "his": his,
        "food": food, "a_food": f"some {food}", "food2": food2, "place": place, "a_place": article(place),
        "place2": place2, "object": object_, "a_object": article(object_), "objects": plural(object_),
        "object2": object2, "adjective": adjective, "a_adjective": article(adjective), "adjective2": adjective2,
        "animal": animal, "a_animal": article(animal), "animals": plural(animal), "job": job, "a_job": article(job),
        "mood": mood, "a_mood": article(mood), "mood2": mood2, "a_mood2": article(mood2),
        "outcome": rng.choice(("wet", "cold", "dark", "white", "quiet", "grey", "loud", "warm")),
        "colour": colour, "a_colour": article(colour), "family": rng.choice(FAMILY), "hobby": rng.choice(HOBBIES),
        "material": rng.choice(MATERIALS), "month": rng.choice(MONTHS), "number": rng.choice(NUMBER_WORDS[2:13]),
        "plant": rng.choice(PLANTS), "season": rng.choice(SEASONS), "subject": rng.choice(SUBJECTS),
        "weather": rng.choice(WEATHER), "weather_adjective": rng.choice(("rainy", "sunny", "cold", "foggy", "windy")),
        "weekday": rng.choice(WEEKDAYS),
    }  # fmt: skip


def _fill(template: str, scene: dict[str, str]) -> str:
    text = template.format_map(scene)
    return text[0].upper() + text[1:]
