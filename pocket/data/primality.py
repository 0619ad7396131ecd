"""Is a number prime? With thinking: trial division. Held out: number and wording together.

The numbers are few (2 to 400 with thinking, 2 to 200 without), so what is held out is a question, not a number.
"""

from __future__ import annotations

from random import Random

from pocket.data.example import Example, Expect, Message, draw_effort, reasoning

TASK = "primality"
MAX_THOUGHT, MAX_DIRECT = 400, 200
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)

_ASK = (
    "Is {n} prime?",
    "Is {n} a prime number?",
    "Is the number {n} prime?",
    "Tell me whether {n} is prime.",
    "Tell me whether {n} is a prime number.",
    "Is {n} a prime?",
    "Please check whether {n} is prime.",
)


def smallest_divisor(number: int) -> int | None:
    """Return the smallest prime that divides `number` (at most 400) and is not the number; None for primes."""
    return next((prime for prime in _PRIMES if number % prime == 0 and number != prime), None)


def generate(rng: Random) -> Example:
    """Return a primality example; about half of the numbers are prime."""
    effort = draw_effort(rng)
    largest = MAX_DIRECT if effort is None else MAX_THOUGHT
    want_prime = rng.random() < 0.5
    while True:
        number = rng.randint(2, largest)
        divisor = smallest_divisor(number)
        if (divisor is None) == want_prime:
            break
    prompt = rng.choice(_ASK).format(n=number)
    answer = (
        f"Yes, {number} is prime."
        if divisor is None
        else f"No, {number} is not prime: {number} = {divisor} * {number // divisor}."
    )
    thought = None if effort is None else reasoning(effort, _work(number), _checks(number, divisor))
    return Example(
        task=TASK,
        key=f"{prompt} {effort is None}",
        messages=(Message("user", prompt), Message("assistant", answer, thought)),
        expect=Expect("exact", answer),
        effort=effort,
    )


def _work(number: int) -> str:
    lines = []
    for prime in _PRIMES:
        if prime * prime > number:
            lines.append(f"{prime} * {prime} = {prime * prime} is more than {number}. So {number} is prime.")
            break
        quotient, rest = divmod(number, prime)
        lines.append(f"{number} = {prime} * {quotient} + {rest}.")
        if not rest:
            lines.append(f"So {prime} divides {number}.")
            break
    else:
        lines.append(f"23 * 23 = 529 is more than {number}. So {number} is prime.")
    return "\n".join(lines)


def _checks(number: int, divisor: int | None) -> list[str]:
    last = f"{number} ends in {number % 10}."
    digit_sum = sum(map(int, str(number)))
    digits = f"the digits of {number} add up to {digit_sum}."
    if divisor is None:
        return [last, digits, f"nothing divides {number}."]
    return [f"{divisor} * {number // divisor} = {number}.", last, digits]
