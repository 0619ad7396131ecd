"""The words that everything is made of. Lists only; the order is part of what a seed means."""

from __future__ import annotations


def word_list(text: str) -> tuple[str, ...]:
    """Return the words of `text`."""
    return tuple(text.split())


NAMES = word_list(
    "Ada Ben Clara David Elena Felix Greta Hugo Ida Jonas Kira Leo Mira Nils Olga Paul Rosa Simon Tara Uma "
    "Victor Wanda Yara Zeno Anna Boris Celia Dora Emil Flora Gustav Hanna Ivan Julia Karl Lena Marco Nora Oscar "
    "Petra Quinn Robin Sofia Tom Ursula Vera Walter Xenia Yusuf Zoe Alma Bruno Carmen Diego Esther Frida Georg "
    "Helga Iris Jakob"
)

COLOURS = word_list("red blue green yellow black white orange purple brown grey pink silver golden")

ANIMALS = word_list(
    "cat dog horse cow sheep goat pig hen duck goose fox wolf bear deer hare mouse rat owl crow raven eagle hawk "
    "swan frog toad snake fish trout salmon whale seal otter beaver badger squirrel hedgehog donkey camel lion tiger "
    "monkey parrot pigeon sparrow robin bee ant spider beetle butterfly snail turtle rabbit pony"
)

FOODS = word_list(
    "bread butter cheese milk honey jam soup rice pasta salad apple pear plum cherry lemon orange banana grape melon "
    "potato carrot onion tomato pepper garlic bean pea corn egg ham sausage chicken salt sugar flour cake pie biscuit "
    "chocolate coffee tea juice water wine cider yoghurt mushroom walnut almond"
)

OBJECTS = word_list(
    "table chair lamp clock mirror basket bottle bucket ladder hammer needle thread button key lock door window "
    "letter book pencil paper map compass lantern candle blanket pillow coat scarf glove boot hat umbrella suitcase "
    "violin drum flute whistle bell rope chain wheel cart wagon boat sail anchor kite kettle spoon fork knife plate "
    "bowl cup jar box crate barrel shelf drawer carpet curtain brush broom shovel rake spade saw nail screw stone "
    "coin ring purse ticket stamp camera radio engine bicycle"
)

PLACES = word_list(
    "village town city harbour market school library station garden forest meadow field farm mill bridge river lake "
    "island beach valley mountain hill road street square church castle tower museum theatre hospital bakery "
    "workshop factory office kitchen cellar attic barn stable orchard vineyard lighthouse tunnel cave desert"
)

JOBS = word_list(
    "baker teacher doctor nurse farmer sailor fisherman carpenter painter writer singer dancer gardener miller tailor "
    "butcher smith mason pilot driver clerk judge soldier captain shepherd hunter merchant librarian engineer "
    "astronomer chemist weaver potter cook"
)

ADJECTIVES = word_list(
    "old young small large tall short long narrow wide heavy light dark bright cold warm wet dry soft hard clean "
    "dirty quiet loud slow quick kind brave clever careful honest patient proud shy lazy busy happy sad tired hungry "
    "thirsty angry calm strange simple plain pretty rich poor strong weak sharp round flat deep empty full broken "
    "wooden rusty ancient modern foggy sunny rainy windy gentle rough smooth sweet sour bitter fresh rare common "
    "famous secret lonely crowded hollow crooked"
)

WEATHER = word_list("rain snow wind fog sun frost thunder hail drizzle mist")

WEEKDAYS = word_list("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS = word_list("January February March April May June July August September October November December")

SEASONS = word_list("spring summer autumn winter")

CITIES = word_list(
    "Paris Berlin Madrid Rome Vienna London Dublin Lisbon Oslo Stockholm Helsinki Copenhagen Warsaw Prague Budapest "
    "Athens Cairo Nairobi Lima Quito Bogota Havana Ottawa Tokyo Seoul Beijing Delhi Bangkok Hanoi Manila Jakarta "
    "Sydney Boston Chicago Toronto Geneva Zurich Hamburg Munich Milan Naples Porto Seville Lyon Nice Bruges Ghent "
    "Bergen Turin Krakow"
)

FAMILY = word_list(
    "mother father sister brother aunt uncle cousin daughter son grandmother grandfather neighbour friend"
)

HOBBIES = word_list(
    "chess reading painting swimming cycling running hiking sailing singing dancing cooking gardening fishing skating "
    "climbing knitting drawing writing photography pottery"
)

SUBJECTS = word_list("history music physics chemistry biology geography mathematics art grammar geometry")

SPORTS = word_list("football tennis hockey rowing boxing golf cricket judo archery fencing")

MATERIALS = word_list(
    "wood iron glass clay wool silk cotton leather copper tin marble brick straw cork steel"
)

PLANTS = word_list(
    "oak birch pine willow maple rose tulip daisy lily ivy fern moss thistle clover poppy lavender"
)

BODY = word_list("head hand foot arm leg eye ear nose mouth shoulder knee finger heart back")

SHAPES = word_list("circle square triangle")

NUMBER_WORDS = word_list(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)

TENS_WORDS = word_list("twenty thirty forty fifty sixty seventy eighty ninety")


def number_word(number: int) -> str:
    """Return a number of 0 to 100 in words."""
    if number == 100:
        return "one hundred"
    if number < len(NUMBER_WORDS):
        return NUMBER_WORDS[number]
    tens, ones = divmod(number, 10)
    return TENS_WORDS[tens - 2] + (f"-{NUMBER_WORDS[ones]}" if ones else "")


COMMON = tuple(
    sorted(
        {
            word.lower()
            for group in (
                ANIMALS,
                FOODS,
                OBJECTS,
                PLACES,
                JOBS,
                ADJECTIVES,
                WEATHER,
                SEASONS,
                HOBBIES,
                SUBJECTS,
                SPORTS,
                MATERIALS,
                PLANTS,
                BODY,
                SHAPES,
                COLOURS,
                FAMILY,
                NUMBER_WORDS,
                TENS_WORDS,
            )
            for word in group
        }
    )
)
"""Every lower-case word above once, for spelling."""


def article(word: str) -> str:
    """Return `word` with its indefinite article."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def plural(word: str) -> str:
    """Return the plural of a regular noun, and of the few irregular ones above."""
    irregular = {
        "mouse": "mice",
        "goose": "geese",
        "sheep": "sheep",
        "fish": "fish",
        "deer": "deer",
        "wolf": "wolves",
        "knife": "knives",
        "shelf": "shelves",
        "foot": "feet",
        "salmon": "salmon",
        "trout": "trout",
    }
    if word in irregular:
        return irregular[word]
    if word.endswith(("s", "x", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"


def joined(words: list[str]) -> str:
    """Return words as a list in a sentence: `a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
