"""Facts of the real world: capitals and a few things everybody knows. Held out: fact and wording together."""

from __future__ import annotations

from random import Random

from pocket.data.example import Example, Expect, Message, draw_effort, reasoning

TASK = "world"

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome", "Austria": "Vienna",
    "Portugal": "Lisbon", "Ireland": "Dublin", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Poland": "Warsaw", "Hungary": "Budapest", "Greece": "Athens", "Belgium": "Brussels",
    "the Netherlands": "Amsterdam", "Switzerland": "Bern", "Iceland": "Reykjavik", "Russia": "Moscow",
    "Ukraine": "Kyiv", "Romania": "Bucharest", "Bulgaria": "Sofia", "Croatia": "Zagreb", "Serbia": "Belgrade",
    "Slovenia": "Ljubljana", "Slovakia": "Bratislava", "the Czech Republic": "Prague", "Estonia": "Tallinn",
    "Latvia": "Riga", "Lithuania": "Vilnius", "Turkey": "Ankara", "Egypt": "Cairo", "Kenya": "Nairobi",
    "Nigeria": "Abuja", "Ghana": "Accra", "Ethiopia": "Addis Ababa", "Morocco": "Rabat", "Tunisia": "Tunis",
    "Algeria": "Algiers", "Senegal": "Dakar", "Japan": "Tokyo", "China": "Beijing", "South Korea": "Seoul",
    "India": "New Delhi", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Indonesia": "Jakarta",
    "the Philippines": "Manila", "Malaysia": "Kuala Lumpur", "Nepal": "Kathmandu", "Pakistan": "Islamabad",
    "Bangladesh": "Dhaka", "Iran": "Tehran", "Iraq": "Baghdad", "Mongolia": "Ulaanbaatar", "Australia": "Canberra",
    "New Zealand": "Wellington", "Canada": "Ottawa", "the United States": "Washington", "Mexico": "Mexico City",
    "Cuba": "Havana", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima",
    "Colombia": "Bogota", "Ecuador": "Quito", "Uruguay": "Montevideo", "Venezuela": "Caracas",
    "the United Kingdom": "London",
}  # fmt: skip

OTHERS = (
    ("How many days are in a week?", "A week has 7 days."),
    ("How many months are in a year?", "A year has 12 months."),
    ("How many hours are in a day?", "A day has 24 hours."),
    ("How many minutes are in an hour?", "An hour has 60 minutes."),
    ("How many seconds are in a minute?", "A minute has 60 seconds."),
    ("How many legs does a spider have?", "A spider has 8 legs."),
    ("How many legs does an ant have?", "An ant has 6 legs."),
    ("How many legs does a dog have?", "A dog has 4 legs."),
    ("How many sides does a triangle have?", "A triangle has 3 sides."),
    ("How many sides does a square have?", "A square has 4 sides."),
    ("How many letters are in the English alphabet?", "The English alphabet has 26 letters."),
    ("How many continents are there?", "There are 7 continents."),
    ("How many planets are in the solar system?", "The solar system has 8 planets."),
    ("What colour is the sky on a clear day?", "On a clear day the sky is blue."),
    ("What colour is grass?", "Grass is green."),
    ("What colour is snow?", "Snow is white."),
    ("What colour is a ripe banana?", "A ripe banana is yellow."),
    ("What colour is blood?", "Blood is red."),
    ("What is the largest planet?", "The largest planet is Jupiter."),
    ("What is the largest ocean?", "The largest ocean is the Pacific Ocean."),
    ("What is the highest mountain?", "The highest mountain is Mount Everest."),
    ("Which planet is called the red planet?", "Mars is called the red planet."),
    ("What is frozen water called?", "Frozen water is called ice."),
    ("What do bees make?", "Bees make honey."),
    ("What do cows give?", "Cows give milk."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("What is the opposite of big?", "The opposite of big is small."),
    ("What is the opposite of up?", "The opposite of up is down."),
    ("What comes after Monday?", "After Monday comes Tuesday."),
    ("What comes after Friday?", "After Friday comes Saturday."),
    ("What is the first month of the year?", "The first month of the year is January."),
    ("What is the last month of the year?", "The last month of the year is December."),
    ("At how many degrees Celsius does water freeze?", "Water freezes at 0 degrees Celsius."),
    ("At how many degrees Celsius does water boil?", "Water boils at 100 degrees Celsius."),
    ("What star does the Earth go around?", "The Earth goes around the Sun."),
    ("What goes around the Earth?", "The Moon goes around the Earth."),
)

_ASK = (
    "What is the capital of {country}?",
    "What is the capital of {country}?",
    "Which city is the capital of {country}?",
    "Tell me the capital of {country}.",
    "Name the capital of {country}.",
)


def generate(rng: Random) -> Example:
    """Return a question about the real world; the plainest wording of each is always in training."""
    effort = draw_effort(rng) if rng.random() < 0.5 else None
    if rng.random() < 0.7:
        country = rng.choice(tuple(CAPITALS))
        template = rng.choice(_ASK)
        prompt = template.format(country=country)
        answer = f"The capital of {country} is {CAPITALS[country]}."
        plainest = template == _ASK[0]
    else:
        prompt, answer = rng.choice(OTHERS)
        plainest = True
    thought = None if effort is None else reasoning(effort, "I know this.", [f'the answer is "{answer}"'])
    return Example(
        task=TASK,
        key=f"{prompt} {effort is None}",
        messages=(Message("user", prompt), Message("assistant", answer, thought)),
        expect=Expect("exact", answer),
        effort=effort,
        always_train=plainest,
    )
