"""Exact acceptance of drafts, and how many of them to verify (dspark spec §6-9).

Owns the acceptance rules, their random numbers, the caps and the counters. Knows nothing of models, batches or
caches: it is numpy on one request's distributions. Letters here: k drafts verified, V vocabulary, G block size.

Whatever is written down here leaves the output distributed as without drafts. Two things make that so:

* A cap may look at the drafts it keeps and at earlier steps, never at the draft it cuts: a confidence depends on
  the drafts before its own, and a cost table's budget comes from earlier steps alone. Room (context, blocks,
  rows) may shorten what a cap chose to what fits; it must not turn a choice that does not fit into none at all.
* Every step draws fresh coins. A draft that was not emitted still shaped the step that dropped it (block
  verification and budgets look at all of them), so a coin kept by its position in the output would come back
  with a bias.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from deskfleet.engine.sampler import draw_temperature
from deskfleet.errors import ConfigError, EngineError
from deskfleet.model.config_keys import parse_json_object

Draft = Literal["greedy", "probabilistic"]
Acceptance = Literal["token", "block"]
Purpose = Literal["further", "accept", "draft"]

_PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
_LEAST_SURVIVAL = 1e-6  # a draft less likely than this is not worth a row at any price


class CostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a step as bias_s + requests(number of requests) + rows(number of rows).

    Each table is (count, seconds) points by rising count, linear between them and flat beyond the ends.
    Raises ConfigError when the points are out of order, or a step would cost nothing.
    """

    rows: tuple[tuple[int, float], ...]
    requests: tuple[tuple[int, float], ...] = ((1, 0.0),)
    bias_s: float = 0.0

    def __post_init__(self) -> None:
        for name, points in (("rows", self.rows), ("requests", self.requests)):
            counts = [count for count, _ in points]
            if not counts or counts[0] < 1 or any(a >= b for a, b in pairwise(counts)):
                raise ConfigError(
                    f"cost table: the counts of {name} are {counts}", hint="give at least one, from 1, rising"
                )
        seconds = [self.bias_s, *(s for _, s in self.requests), *(s for _, s in self.rows)]
        if not all(math.isfinite(s) and s >= 0 for s in seconds):
            raise ConfigError("cost table: a time is negative or not finite", hint="give seconds from 0")
        if self.bias_s + min(s for _, s in self.requests) + min(s for _, s in self.rows) <= 0:
            raise ConfigError("cost table: some step costs 0 s", hint="give measured step times")

    @classmethod
    def load(cls, path: Path) -> CostTable:
        """Read a JSON file with the fields of this class. Raises ConfigError."""
        try:
            data = parse_json_object(path.read_text(encoding="utf-8"), source=str(path))
            return msgspec.convert(data, cls)
        except (OSError, UnicodeDecodeError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"cost table {path}: {error}",
                hint='e.g. {"rows": [[1, 0.020], [8, 0.026]], "requests": [[1, 0.001]], "bias_s": 0.004}',
            ) from error

    def step_s(self, num_requests: int, num_rows: np.ndarray) -> np.ndarray:
        """Seconds float64 of one step, for each of `num_rows`."""
        rows, requests = np.array(self.rows), np.array(self.requests)
        fixed_s = self.bias_s + float(np.interp(num_requests, requests[:, 0], requests[:, 1]))
        seconds: np.ndarray = fixed_s + np.interp(num_rows, rows[:, 0], rows[:, 1])
        return seconds

    def budget(self, survivals: Sequence[np.ndarray]) -> int:
        """Drafts that a batch should verify in all, for the most tokens a second.

        survivals: float [G] of each request, from an earlier step: to choose by the block at hand biases its output.
        """
        gains = np.sort(np.concatenate([np.zeros(0), *survivals]))[::-1]
        gains = gains[gains >= _LEAST_SURVIVAL]
        num_requests = len(survivals)
        expected = num_requests + np.concatenate(([0.0], np.cumsum(gains)))
        rows = num_requests + np.arange(len(expected))
        return int(np.argmax(expected / self.step_s(num_requests, rows)))


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """How the engine speculates. `num_drafts` 0 is off; `draft_temperature` None is the request's own.

    `cap` is None, the least survival of a draft that is verified, or a cost table. Raises ConfigError.
    """

    num_drafts: int = 0
    draft: Draft = "probabilistic"
    draft_temperature: float | None = None
    acceptance: Acceptance = "block"
    cap: float | CostTable | None = None

    def __post_init__(self) -> None:
        if self.num_drafts < 0:
            raise ConfigError(f"speculation: k is {self.num_drafts}", hint="give 0 (off) or more")
        if self.draft_temperature is not None:
            if self.draft == "greedy":
                raise ConfigError(
                    f"speculation: temperature={self.draft_temperature} with draft=greedy",
                    hint="greedy drafts have none: leave one of the two out",
                )
            if not 0 < self.draft_temperature < math.inf:
                raise ConfigError(
                    f"speculation: temperature={self.draft_temperature}", hint="give a finite number above 0"
                )
        if not (self.cap is None or isinstance(self.cap, CostTable) or 0 <= self.cap <= 1):
            raise ConfigError(f"speculation: cap=conf:{self.cap}", hint="give a probability, 0 to 1")

    @classmethod
    def parse(cls, text: str, block_size: int) -> SpeculationOptions:
        """Read `off`, a number of drafts, or settings as in `k=5,accept=token,cap=conf:0.1`. Raises ConfigError.

        Without k, the whole block is verified.
        """
        if text == "off":
            return cls()
        form = (
            f"give off, a number up to {block_size}, or any of k=0..{block_size}, draft=greedy|probabilistic, "
            "temperature=T, accept=token|block, cap=none|conf:T|cost:FILE, with commas"
        )
        values: dict[str, Any] = {"num_drafts": block_size}
        seen: set[str] = set()
        for part in (f"k={text}" if text.isdecimal() else text).split(","):
            key, _, value = part.partition("=")
            if key not in _SETTINGS or key in seen:
                fault = "is given twice" if key in seen else "does not exist"
                raise ConfigError(f"speculation: setting {key!r} {fault}", hint=form)
            seen.add(key)
            name, read = _SETTINGS[key]
            try:
                values[name] = read(value)
            except ValueError as error:
                raise ConfigError(f"speculation: {key} cannot be {value!r}", hint=form) from error
        options = cls(**values)
        if options.num_drafts > block_size:
            raise ConfigError(
                f"speculation: k is {options.num_drafts}, the checkpoint drafts {block_size}", hint=form
            )
        return options

    def temperature(self, requested: float) -> float:
        """Temperature of the drafts of a request sampled at `requested`; 0 means greedy drafts."""
        if self.draft == "greedy" or requested == 0:
            return 0.0
        return requested if self.draft_temperature is None else self.draft_temperature


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return read


def _read_cap(text: str) -> float | CostTable | None:
    kind, _, value = text.partition(":")
    if text == "none":
        return None
    if kind == "conf":
        return float(value)
    if kind == "cost" and value:
        return CostTable.load(Path(value))
    raise ValueError(text)


_SETTINGS: dict[str, tuple[str, Callable[[str], object]]] = {
    "k": ("num_drafts", int),
    "draft": ("draft", _one_of(get_args(Draft))),
    "temperature": ("draft_temperature", float),
    "accept": ("acceptance", _one_of(get_args(Acceptance))),
    "cap": ("cap", _read_cap),
}


def survival(confidence_logits: np.ndarray) -> np.ndarray:
    """Estimated chance float64 [..., G] that each draft and all before it are accepted; 0 from a NaN on."""
    with np.errstate(invalid="ignore"):
        logarithms = -np.logaddexp(0.0, -confidence_logits.astype(np.float64))
    products = np.exp(np.cumsum(logarithms, axis=-1))
    known: np.ndarray = np.nan_to_num(products, nan=0.0)
    return known


def confidence_length(confidence_logits: np.ndarray, threshold: float, most: int) -> int:
    """Number of leading drafts whose survival is at least `threshold`: 1 to `most`, or 0 when that is 0.

    confidence_logits: float [G] of one block.
    """
    # Survival never rises, so those at or above the threshold are the leading ones.
    return min(max(int((survival(confidence_logits) >= threshold).sum()), 1), most)


def allocate(survivals: Sequence[np.ndarray], budget: int) -> list[int]:
    """Drafts of each request when the `budget` likeliest of all are verified.

    Of equals, the earlier position comes first, then the earlier request; so a request's share is a prefix, and
    whether a draft belongs to it depends on no later one of that request.
    """
    ranked = sorted(
        (-s, place, n) for n, block in enumerate(survivals) for place, s in enumerate(block.tolist())
    )
    chosen = [n for _, _, n in ranked[:budget]]
    return [chosen.count(n) for n in range(len(survivals))]


class CostCap:
    """Chooses lengths by a cost table. The budget can only come from earlier steps: it is taken before this
    step is remembered.

    Exact for requests with coins of their own: of two with one seed, each tells of the other's drafts.
    """

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._earlier: dict[str, np.ndarray] = {}

    def lengths(
        self, request_ids: Sequence[str], confidence_logits: Sequence[np.ndarray], most: Sequence[int]
    ) -> list[int]:
        """Drafts to verify of each request, at most `most`; call once a step, with all that decode in it.

        confidence_logits: float [G] of each request's block. A request not in the last step counts as certain.
        """
        earlier = [
            self._earlier.get(request_id, np.ones(m))[:m]
            for request_id, m in zip(request_ids, most, strict=True)
        ]
        budget = self._table.budget(earlier)
        now = [survival(logits) for logits in confidence_logits]
        self._earlier = dict(zip(request_ids, now, strict=True))
        return allocate([block[:m] for block, m in zip(now, most, strict=True)], budget)


class _Tosser(threading.local):
    """One generator that is set to a key and counter for each number: making one takes four times as long."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._numbers = np.random.Generator(self._bits)
        self._state = self._bits.state

    def toss(self, key: tuple[int, int], counter: tuple[int, int, int, int]) -> float:
        """The first number in [0, 1) of Philox (Salmon et al., 2011) by this key from this counter on."""
        self._state["state"]["key"][:] = key
        self._state["state"]["counter"][:] = counter
        self._bits.state = self._state
        return float(self._numbers.random())


_TOSSER = _Tosser()


@dataclass(frozen=True, slots=True)
class Coins:
    """A request's uniform random numbers, decided by its seed (any 64 bits) and what they are for."""

    seed: int

    def uniform(self, purpose: Purpose, place: int, index: int = 0) -> float:
        """A number in [0, 1) of its own for every argument.

        `place` is how many tokens the request has put out when the step begins, so that no two steps share one;
        `index` counts within the step. "further" is the stream of plain sampling at that place.
        """
        return _TOSSER.toss((self.seed & (2**64 - 1), place), (0, index, _PURPOSES.index(purpose), 0))


def draft_coins(seed: int, place: int, count: int) -> list[float]:
    """What `draft_choice` tosses for the first `count` drafts of a block: no coin depends on what fell before."""
    return [Coins(seed).uniform("draft", place, index) for index in range(count)]


def draft_distribution(logits: np.ndarray, temperature: float) -> np.ndarray:
    """float64 probabilities [..., V] that drafts are drawn from; a row with NaN or +inf becomes NaN.

    temperature: above 0.
    """
    scaled = logits.astype(np.float64) / draw_temperature(temperature)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scaled - scaled.max(-1, keepdims=True))
    probabilities: np.ndarray = weights / weights.sum(-1, keepdims=True)
    return probabilities


def draft_choice(logits: np.ndarray, temperature: float, *, coins: Coins, place: int, index: int) -> int:
    """Draft `index` (from 0) of a block, from its float32 logits [V]. `place` as in `Coins.uniform`.

    temperature: 0 for the likeliest (of equals, the lower id). Logits that give no distribution give some token,
    which `verify` rejects.
    """
    if temperature == 0:
        return int(logits.argmax())
    return pick(draft_distribution(logits, temperature), coins.uniform("draft", place, index))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided: the leading drafts to keep, and the token after them."""

    num_accepted: int
    next_token_id: int


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The exact distribution of what a verification may decide, given its drafts.

    chances: float64 [n + 1], of accepting 0..n drafts. shares: float64 [n + 1], for each of them the multiple of the
    target that the draft distribution is taken from when the next draft was rejected. n is k, or less when a
    draft row is no distribution.
    """

    target: np.ndarray  # float64 (k + 1, V)
    draft_token_ids: Sequence[int]
    drafted: np.ndarray | None  # float64 (k, V); None when drafts are certain
    chances: np.ndarray
    shares: np.ndarray

    def further(self, num_accepted: int) -> np.ndarray:
        """Distribution float64 [V], not normalised, of the token after `num_accepted` drafts."""
        target: np.ndarray = self.target[num_accepted]
        if num_accepted == len(self.chances) - 1:
            return target
        residual = self.shares[num_accepted] * target
        if self.drafted is None:
            residual[self.draft_token_ids[num_accepted]] = 0.0
        else:
            residual = np.maximum(residual - self.drafted[num_accepted], 0.0)
        # Nothing left: the two rows are equal but for rounding, and rejection had no more chance than that.
        return residual if residual.sum() > 0 else target


def outcomes(
    target: np.ndarray,
    draft_token_ids: Sequence[int],
    drafted: np.ndarray | None,
    acceptance: Acceptance,
) -> Outcomes:
    """What verifying k drafts may decide. Arguments as of `verify`."""
    ratios = _ratios(target, draft_token_ids, drafted)
    if acceptance == "token":
        chances, shares = _token_chances(ratios)
    else:
        chances, shares = _block_chances(ratios, target, draft_token_ids, drafted)
    return Outcomes(target, draft_token_ids, drafted, chances, shares)


def verify_chosen(chosen: Sequence[int], draft_token_ids: Sequence[int]) -> Verdict:
    """What `verify` decides of a greedy request: `chosen` [k + 1] are the likeliest tokens, row i after draft i."""
    agreed = [token == draft for token, draft in zip(chosen, draft_token_ids, strict=False)]
    num_accepted = [*agreed, False].index(False)
    return Verdict(num_accepted, chosen[num_accepted])


def verify(
    target: np.ndarray,
    draft_token_ids: Sequence[int],
    drafted: np.ndarray | None,
    *,
    acceptance: Acceptance,
    coins: Coins,
    place: int,
) -> Verdict:
    """Decide over k drafts so that what is put out follows the target exactly (§7, rules R1 and R3 of §8.2).

    target: float64 [k + 1, V], row i the request's own distribution after draft i, one-hot for a greedy request;
    rows after a draft it gives no chance are not read. drafted: float64 [k, V] that the drafts were drawn from, or
    None when they were not drawn (greedy). place: as in `Coins.uniform`.
    Raises EngineError when the target's row is no distribution.
    """
    possible = outcomes(target, draft_token_ids, drafted, acceptance)
    num_accepted = draw(possible.chances, lambda: coins.uniform("accept", place))
    further = possible.further(num_accepted)
    if not 0 < (total := float(further.sum())) < math.inf:
        raise EngineError(f"no token can follow {num_accepted} accepted drafts: the row sums to {total}")
    return Verdict(num_accepted, draw(further, lambda: coins.uniform("further", place)))


def draw(probabilities: np.ndarray, uniform: Callable[[], float]) -> int:
    """`pick`, without tossing a coin that cannot matter: every number of a request is its own, so none is used up."""
    possible = np.flatnonzero(probabilities)
    return int(possible[0]) if len(possible) == 1 else pick(probabilities, uniform())


def _ratios(target: np.ndarray, draft_token_ids: Sequence[int], drafted: np.ndarray | None) -> np.ndarray:
    """Target over draft probability of each draft, [n]; 0 after the first that the target excludes.

    Ends before a draft row that is no distribution. Such a row comes of the drafts before it, so to stop there
    is a cap like any other; it does not look at the token it cuts.
    """
    ratios: list[float] = []
    for row, token_id in enumerate(draft_token_ids):
        drawn = 1.0
        if drafted is not None:
            drawn = float(drafted[row, token_id])
            if not 0 < drawn <= 1 or not math.isfinite(drafted[row].sum()):
                break
        ratio = float(target[row, token_id]) / drawn
        if not ratio > 0:
            ratios += [0.0] * (len(draft_token_ids) - row)
            break
        ratios.append(min(ratio, sys.float_info.max))
    return np.array(ratios)


def _token_chances(ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each draft is accepted by its own ratio, as long as all before it were (§7.1)."""
    reached = np.concatenate(([1.0], np.cumprod(np.minimum(ratios, 1.0)), [0.0]))
    return -np.diff(reached), np.ones(len(ratios) + 1)


def _block_chances(
    ratios: np.ndarray, target: np.ndarray, draft_token_ids: Sequence[int], drafted: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The longest prefix whose test succeeds is accepted, whatever became of the shorter ones (§7.2)."""
    shares = np.ones(len(ratios) + 1)
    for n, ratio in enumerate(ratios):
        shares[n + 1] = min(shares[n] * ratio, 1.0)
    chances = np.zeros(len(ratios) + 1)
    none_longer = 1.0
    for n in range(len(ratios), 0, -1):
        success = shares[n]
        if shares[n] > 0 and n < len(ratios):
            excess = _excess(
                shares[n], target[n], draft_token_ids[n], None if drafted is None else drafted[n]
            )
            success = excess / (excess + 1 - shares[n]) if shares[n] < 1 else 1.0
        chances[n] = none_longer * success
        none_longer *= 1 - success
    chances[0] = none_longer
    return chances, shares


def _excess(share: float, target: np.ndarray, draft_token_id: int, drafted: np.ndarray | None) -> float:
    """Mass by which `share` times the target exceeds the draft distribution."""
    if drafted is None:
        return share * (1 - float(target[draft_token_id]))
    return float(np.maximum(share * target - drafted, 0.0).sum())


def pick(probabilities: np.ndarray, uniform: float) -> int:
    """The index that `uniform` in [0, 1) falls on; never one of probability 0. Sums other than 1 are normalised."""
    cumulative = np.cumsum(probabilities)
    chosen = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # A sum that is nearly 0, times a coin that is nearly 1, rounds back to the sum: past the end.
    return chosen if chosen < len(probabilities) else int(np.flatnonzero(probabilities)[-1])


@dataclass(frozen=True, slots=True)
class SpeculationMetrics:
    """Counters of verification steps, of one request or of all; `+` adds them.

    By position in the block: drafts whose predecessors were all accepted (tried), and those accepted as well.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    tried: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @classmethod
    def of_step(cls, num_drafted: int, num_accepted: int, num_emitted: int) -> SpeculationMetrics:
        """One step of one request; `num_emitted` is less than num_accepted + 1 when a stop token cut it."""
        return cls(
            num_steps=1,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            num_emitted=num_emitted,
            tried=(1,) * min(num_accepted + 1, num_drafted),
            accepted=(1,) * num_accepted,
        )

    def __add__(self, other: SpeculationMetrics) -> SpeculationMetrics:
        return SpeculationMetrics(
            self.num_steps + other.num_steps,
            self.num_drafted + other.num_drafted,
            self.num_accepted + other.num_accepted,
            self.num_emitted + other.num_emitted,
            tuple(map(sum, zip_longest(self.tried, other.tried, fillvalue=0))),
            tuple(map(sum, zip_longest(self.accepted, other.accepted, fillvalue=0))),
        )

    @property
    def num_wasted_rows(self) -> int:
        """Rows the target computed (one anchor a step, and the drafts) that no token came of."""
        return self.num_steps + self.num_drafted - self.num_emitted

    @property
    def acceptance_length(self) -> float:
        """Tokens a step before stop tokens cut any: 1 to block size + 1; 0 when there was no step."""
        return (self.num_steps + self.num_accepted) / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted of the verified drafts; 0 when there were none. Not comparable between numbers of drafts."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def position_rates(self) -> tuple[float, ...]:
        """Chance of acceptance at each position given that all before it were."""
        return tuple(a / t for a, t in zip_longest(self.accepted, self.tried, fillvalue=0))


__all__ = [
    "Acceptance",
    "Coins",
    "CostCap",
    "CostTable",
    "Draft",
    "Outcomes",
    "SpeculationMetrics",
    "SpeculationOptions",
    "Verdict",
    "allocate",
    "confidence_length",
    "draft_choice",
    "draft_coins",
    "draft_distribution",
    "draw",
    "outcomes",
    "pick",
    "survival",
    "verify",
    "verify_chosen",
]
