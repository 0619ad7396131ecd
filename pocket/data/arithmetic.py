"""Sums, differences and products. Held out: the operands.

Without thinking the answer comes at once, so the numbers are small: up to two digits, and in a product one factor has a
single digit (or both are up to 12). With thinking the work is written digit by digit, up to four digits, and then
checked.
"""

from __future__ import annotations

from itertools import zip_longest
from random import Random

from pocket.data.example import Example, Expect, Message, draw_effort, reasoning

TASK = "arithmetic"

_ASK = (
    "What is {sum}?",
    "What is {sum}?",
    "Calculate {sum}.",
    "Compute {sum}.",
    "How much is {sum}?",
    "{sum} = ?",
    "Please calculate {sum}.",
)

LAUNCH_QUESTIONS = (
    (19, "+", 23),
    (2, "+", 2),
    (7, "*", 8),
    (100, "-", 1),
    (17, "+", 25),
    (12, "*", 12),
    (6, "*", 7),
)
"""Sums that anybody may try first; always in training, never in the evaluation."""


def generate(rng: Random, direct_digits: int = 2) -> Example:
    """Return an arithmetic example; without thinking, sums and differences of at most `direct_digits` (1 to 3)."""
    effort = draw_effort(rng)
    launch = rng.random() < 0.03
    left, sign, right = (
        rng.choice(LAUNCH_QUESTIONS)
        if launch
        else _operands(rng, thinking=effort is not None, direct_digits=direct_digits)
    )
    return example(left, sign, right, rng.choice(_ASK), effort, always_train=launch)


def example(
    left: int, sign: str, right: int, ask: str, effort: int | None, *, always_train: bool = False
) -> Example:
    """Return the example of one sum."""
    value = {"+": left + right, "-": left - right, "*": left * right}[sign]
    written = f"{left} {sign} {right}"
    answer = f"{written} = {value}"
    thought = (
        None
        if effort is None
        else reasoning(effort, _work(left, sign, right), _checks(left, sign, right, value))
    )
    return Example(
        task=TASK,
        key=written,
        messages=(Message("user", ask.format(sum=written)), Message("assistant", answer, thought)),
        expect=Expect("exact", answer),
        effort=effort,
        always_train=always_train or (left, sign, right) in LAUNCH_QUESTIONS,
    )


_SHARES = {1: 1, 2: 6, 3: 4, 4: 3}
"""How many sums and differences have numbers of so many digits."""


def _operands(rng: Random, *, thinking: bool, direct_digits: int) -> tuple[int, str, int]:
    sign = rng.choice("++--*")
    if sign == "*":
        kind = rng.random()
        if kind < 0.4:
            return rng.randint(2, 12), sign, rng.randint(2, 12)
        if kind < 0.75 or not thinking:
            pair = [rng.randint(10, 99), rng.randint(2, 9)]
            rng.shuffle(pair)
            return pair[0], sign, pair[1]
        return rng.randint(11, 99), sign, rng.randint(11, 99)
    shares = [share if thinking or digits <= direct_digits else 0 for digits, share in _SHARES.items()]
    digits = rng.choices(tuple(_SHARES), shares)[0]
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
    left, right = rng.randint(low, high), rng.randint(1 if rng.random() < 0.3 else low, high)
    if sign == "-" and left < right and rng.random() < 0.85:
        left, right = right, left
    return left, sign, right


def _work(left: int, sign: str, right: int) -> str:
    if sign == "+":
        return _add(left, right)
    if sign == "*":
        return _multiply(left, right)
    if left < right:
        return (
            f"{left} is less than {right}, so the result is negative.\n{_subtract(right, left)}\n"
            f"So {left} - {right} = {left - right}."
        )
    return _subtract(left, right)


def _digits(number: int, width: int) -> list[int]:
    return [number // 10**place % 10 for place in range(width)]


def _add(left: int, right: int) -> str:
    width = max(len(str(left)), len(str(right)))
    carry, lines = 0, []
    for a, b in zip(_digits(left, width), _digits(right, width), strict=True):
        total = a + b + carry
        lines.append(f"{a} + {b} + {carry} = {total}, write {total % 10}, carry {total // 10}.")
        carry = total // 10
    return "\n".join([*lines, f"So {left} + {right} = {left + right}."])


def _subtract(left: int, right: int) -> str:
    width = len(str(left))
    borrow, lines = 0, []
    for a, b in zip(_digits(left, width), _digits(right, width), strict=True):
        rest = a - b - borrow
        lines.append(f"{a} - {b} - {borrow} = {rest}, write {rest % 10}, borrow {int(rest < 0)}.")
        borrow = int(rest < 0)
    return "\n".join([*lines, f"So {left} - {right} = {left - right}."])


def _multiply(left: int, right: int) -> str:
    """Split the longer factor by its digits, and a product of two digits with two digits once more."""
    few, many = (right, left) if right < 10 <= left else (left, right)
    parts = [(few, digit * 10**place) for place, digit in enumerate(_digits(many, len(str(many)))) if digit]
    lines = []
    for a, b in parts:
        if a >= 10:
            tens, ones = a // 10 * 10, a % 10
            lines.append(f"{tens} * {b} = {tens * b}, {ones} * {b} = {ones * b}, together {a * b}.")
        else:
            lines.append(f"{a} * {b} = {a * b}.")
    if len(parts) > 1:
        lines.append(" + ".join(str(a * b) for a, b in parts) + f" = {left * right}.")
    return "\n".join([*lines, f"So {left} * {right} = {left * right}."])


def _checks(left: int, sign: str, right: int, value: int) -> list[str]:
    """Return eleven different checks, the telling ones first."""
    about = [
        f"the last digit of {value} is {abs(value) % 10}.",
        f"{value} is {'odd' if value % 2 else 'even'}.",
        f"{value} has {len(str(abs(value)))} digits.",
        f"the digits of {value} add up to {sum(map(int, str(abs(value))))}.",
        f"{value} + 1 = {value + 1}.",
        f"{value} - 1 = {value - 1}.",
    ]
    if sign == "+":
        own = [
            f"{right} + {left} = {value}.",
            f"{value} - {right} = {left}.",
            f"{value} - {left} = {right}.",
            f"{value} is at least {max(left, right)}.",
            f"{left} + {right + 1} = {value + 1}.",
        ]
    elif sign == "-":
        own = [
            f"{value} + {right} = {left}.",
            f"{left} - {value} = {right}.",
            f"{right} + {value} = {left}.",
            f"{value} is at most {left}.",
            f"{left + 1} - {right} = {value + 1}.",
        ]
    else:
        own = [
            f"{right} * {left} = {value}.",
            f"{value} is at least {max(left, right)}.",
            f"{value} + {left} = {value + left}.",
            f"{value} + {right} = {value + right}.",
            f"{value} - {left} = {value - left}.",
        ]
    return [check for pair in zip_longest(own, about) for check in pair if check]
