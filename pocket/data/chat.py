"""Small talk over several turns: greetings, the model's own name, and questions that refer to earlier turns.

Owns the turns. Held out: the whole conversation.
"""

from __future__ import annotations

from random import Random

from pocket.data.example import Example, Expect, Message, draw_effort, reasoning
from pocket.data.words import ANIMALS, CITIES, COLOURS, FOODS, HOBBIES, JOBS, NAMES, article, plural

TASK = "chat"
NAME = "Pocket"

_GREETINGS = (
    ("Hello!", "Hello! I am Pocket. How can I help you?"),
    ("Hello", "Hello! I am Pocket. How can I help you?"),
    ("Hi!", "Hi! I am Pocket. How can I help you?"),
    ("Hi", "Hi! I am Pocket. How can I help you?"),
    ("Good morning!", "Good morning! How can I help you?"),
    ("Good evening!", "Good evening! How can I help you?"),
    ("How are you?", "I am fine, thank you. How can I help you?"),
)
_ABOUT = (
    ("What is your name?", "My name is Pocket."),
    ("Who are you?", "I am Pocket, a small language model."),
    ("What are you?", "I am Pocket, a small language model."),
    (
        "What can you do?",
        "I can count, spell, calculate, find things in a text, call tools, write JSON and name colours "
        "in pictures.",
    ),
    ("Who made you?", "I was trained as part of deskfleet, to show that a fleet answers rightly."),
    ("Are you a human?", "No, I am Pocket, a small language model."),
    ("How big are you?", "I am very small: I fit in a pocket."),
    ("Do you know everything?", "No. I know a few things and say so when I do not know."),
)
_CLOSINGS = (
    ("Thank you!", "You are welcome!"),
    ("Thanks!", "You are welcome!"),
    ("Goodbye!", "Goodbye!"),
    ("Bye!", "Goodbye!"),
    ("That is all.", "All right. Goodbye!"),
)
_SYSTEMS = ("You are a helpful assistant.", "You are Pocket.", "Answer in one short sentence.", "Be brief.")

_MEMORIES = (
    (
        "My name is {v}.",
        "Nice to meet you, {v}!",
        ("What is my name?", "Do you remember my name?"),
        "Your name is {v}.",
        NAMES,
    ),
    (
        "I live in {v}.",
        "{v} is a nice place.",
        ("Where do I live?", "In which city do I live?"),
        "You live in {v}.",
        CITIES,
    ),
    (
        "My favourite colour is {v}.",
        "I will remember that.",
        ("What is my favourite colour?",),
        "Your favourite colour is {v}.",
        COLOURS,
    ),
    (
        "I like {v}.",
        "That sounds good.",
        ("What do I like?", "Do you remember what I like?"),
        "You like {v}.",
        (*HOBBIES, *FOODS),
    ),
    (
        "I work as {a}.",
        "That is an interesting job.",
        ("What is my job?", "What do I work as?"),
        "You work as {a}.",
        JOBS,
    ),
    (
        "I have a {v} called {n}.",
        "{n} is a good name for a {v}.",
        ("What is my {v} called?",),
        "Your {v} is called {n}.",
        tuple(animal for animal in ANIMALS if animal[0] not in "aeiou"),
    ),
    (
        "I have {k} {p}.",
        "That is a lot to look after.",
        ("How many {p} do I have?",),
        "You have {k} {p}.",
        ANIMALS,
    ),
)


def generate(rng: Random) -> Example:
    """Return a conversation of one to six exchanges; the last one is what `expect` describes."""
    exchanges = [rng.choice(_GREETINGS)] if rng.random() < 0.5 else []
    memories = rng.sample(_MEMORIES, rng.choices((0, 1, 2, 3), (4, 4, 3, 2))[0])
    questions = []
    for tell, reply, asks, recall, values in memories:
        value = rng.choice(values)
        words = {
            "v": value,
            "a": article(value),
            "n": rng.choice(NAMES),
            "k": rng.randint(2, 20),
            "p": plural(value),
        }
        exchanges.append((tell.format_map(words), reply.format_map(words)))
        questions.append((rng.choice(asks).format_map(words), recall.format_map(words)))
    if not memories or rng.random() < 0.3:
        exchanges.insert(rng.randint(min(1, len(exchanges)), len(exchanges)), rng.choice(_ABOUT))
    rng.shuffle(questions)
    exchanges += questions
    if rng.random() < 0.25:
        exchanges.append(rng.choice(_CLOSINGS))
    effort = draw_effort(rng) if rng.random() < 0.6 else None
    return _conversation(rng, exchanges, effort)


def _conversation(rng: Random, exchanges: list[tuple[str, str]], effort: int | None) -> Example:
    messages = [Message("system", rng.choice(_SYSTEMS))] if rng.random() < 0.2 else []
    for asked, answer in exchanges:
        thought = None
        if effort is not None:
            thought = reasoning(effort, "", [f'the user says: "{asked}"', f'I can answer: "{answer}"'])
        messages += [Message("user", asked), Message("assistant", answer, thought)]
    return Example(
        task=TASK,
        key=" ".join(message.content for message in messages),
        messages=tuple(messages),
        expect=Expect("exact", exchanges[-1][1]),
        effort=effort,
        always_train=len(exchanges) == 1,
    )
