"""Python code: small functions on request, and source files of the running interpreter's standard library.

Owns the templates of small functions. Every generated function is valid Python and does what its name says.
"""

from __future__ import annotations

import re
from random import Random

from pocket.data.example import Example, Message, PlainText, draw_effort, reasoning
from pocket.data.sources import source_blocks
from pocket.data.words import FOODS, OBJECTS, plural

TASK = "code"

_FUNCTIONS = '''
def add_K(items):
    """Adds K to every number in a list."""
    return [value + K for value in items]

def times_K(items):
    """Multiplies every number in a list by K."""
    return [value * K for value in items]

def total(items):
    """Returns the sum of a list."""
    return sum(items)

def largest(items):
    """Returns the largest element of a list."""
    best = items[0]
    for value in items:
        if value > best:
            best = value
    return best

def smallest(items):
    """Returns the smallest element of a list."""
    best = items[0]
    for value in items:
        if value < best:
            best = value
    return best

def mean(items):
    """Returns the mean of a list."""
    return sum(items) / len(items)

def reverse(items):
    """Reverses a list."""
    return items[::-1]

def count_above_K(items):
    """Counts the elements greater than K."""
    count = 0
    for value in items:
        if value > K:
            count += 1
    return count

def unique(items):
    """Removes duplicates and keeps the order."""
    seen = set()
    result = []
    for value in items:
        if value not in seen:
            seen.add(value)
            result.append(value)
    return result

def even(items):
    """Returns the even numbers of a list."""
    return [value for value in items if value % 2 == 0]

def odd(items):
    """Returns the odd numbers of a list."""
    return [value for value in items if value % 2 == 1]

def count_each(items):
    """Counts how often each element occurs."""
    counts = {}
    for value in items:
        counts[value] = counts.get(value, 0) + 1
    return counts

def chunks_of_K(items):
    """Splits a list into chunks of K."""
    return [items[i : i + K] for i in range(0, len(items), K)]

def first_K(items):
    """Returns the first K elements."""
    return items[:K]

def last_K(items):
    """Returns the last K elements."""
    return items[-K:]

def sort_down(items):
    """Sorts a list in descending order."""
    return sorted(items, reverse=True)

def join(items):
    """Joins the elements with commas."""
    return ", ".join(str(value) for value in items)

def is_sorted(items):
    """Checks whether a list is sorted."""
    for i in range(len(items) - 1):
        if items[i] > items[i + 1]:
            return False
    return True

def longest(items):
    """Returns the longest string of a list."""
    return max(items, key=len)

def show(items):
    """Prints every element with its index."""
    for index, value in enumerate(items):
        print(index, value)

def find_K(items):
    """Returns the index of the first element equal to K, or -1."""
    for index, value in enumerate(items):
        if value == K:
            return index
    return -1

def running_totals(items):
    """Returns the running totals of a list."""
    total = 0
    result = []
    for value in items:
        total += value
        result.append(total)
    return result

def is_prime(number):
    """Checks whether a number is prime."""
    if number < 2:
        return False
    for divisor in range(2, int(number**0.5) + 1):
        if number % divisor == 0:
            return False
    return True

def factorial(number):
    """Returns the factorial of a number."""
    result = 1
    for factor in range(2, number + 1):
        result *= factor
    return result

def multiples_of_K(number):
    """Returns the multiples of K below a number."""
    return list(range(K, number, K))

def read_lines(path):
    """Returns the lines of a text file."""
    with open(path, encoding="utf-8") as file:
        return file.read().splitlines()
'''
"""Every function that can be asked for; `K` is a number and `items` any plural."""

_REQUESTS = (
    "Write a Python function that {what}.",
    "Write a Python function {name} that {what}.",
    "Please write a function in Python that {what}.",
    "Give me a Python function that {what}.",
)


def function(rng: Random) -> tuple[str, str, str]:
    """Return what a function does, its name and its source."""
    source = rng.choice(_FUNCTIONS.strip().split("\n\n"))
    items = plural(rng.choice((*OBJECTS, *FOODS)))
    source = re.sub(r"K\b", str(rng.randint(2, 20)), re.sub(r"\bitems\b", items, source))
    name, what = re.findall(r'def (\w+)|"""(.*)\."""', source)[:2]
    return what[1][0].lower() + what[1][1:], name[0], source


def generate(rng: Random) -> Example | PlainText:
    """Return a function on request, or a piece of the standard library."""
    if rng.random() < 0.45:
        return _on_request(rng)
    if rng.random() < 0.2:
        text = "\n\n\n".join(function(rng)[2] for _ in range(rng.randint(1, 4)))
        return PlainText(TASK, text[:60], text)
    return PlainText(TASK, "source", _block(rng), always_train=True)


def _on_request(rng: Random) -> Example:
    what, name, source = function(rng)
    prompt = rng.choice(_REQUESTS).format(what=what, name=name)
    effort = draw_effort(rng) if rng.random() < 0.3 else None
    thought = None
    if effort is not None:
        lines = [line.strip() for line in source.splitlines()]
        thought = reasoning(effort, f"The function {what}.", lines[2:])
    return Example(
        task=TASK,
        key=prompt,
        messages=(Message("user", prompt), Message("assistant", f"```python\n{source}\n```", thought)),
        effort=effort,
        prompt_weight=0.1,
    )


def _block(rng: Random) -> str:
    """Return a stretch of one block, from its beginning or from one of its lines."""
    lines = rng.choice(source_blocks()).splitlines()
    start = rng.randrange(len(lines) - 10) if len(lines) > 60 and rng.random() < 0.7 else 0
    return "\n".join(lines[start : start + rng.randint(10, 80)])
