"""Whether a checkpoint answers the same on this machine however it is run: in chunks, beside others, over ranks.

Owns the checks, their prompts and what each may differ by. Asks engines through their public contract only: first the
plainest one, then each other one, as many at once as memory and cores allow. Prints nothing.

A check that could not happen on this machine or checkpoint is skipped with the reason. One that could, but whose
situation did not come about (no prefix was found, nobody was preempted), has failed: equality was not shown.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from deskfleet.endpoint import GenerateRequest, SamplingParams, TokenLogprob
from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.errors import ConfigError, EngineError, RequestError
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.config import ModelConfig
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.limits import PrefixReplay
from deskfleet.model.names import TensorClass
from deskfleet.model.tokenizer import load_tokenizer
from deskfleet.units import format_bytes

STEPWISE = "one pass = stepwise"
CHUNKED = "chunked = unchunked"
TP_2 = "TP 2 = TP 1"
TP_3 = "TP 3 = TP 1"
DCP_2 = "DCP 2 = DCP 1"
SPECULATION_BLOCK = "speculation on = off, block acceptance"
SPECULATION_TOKEN = "speculation on = off, token acceptance"
WARM = "warm = cold"
WARM_EXACT = "warm = cold, window lost, exact replay"
WARM_WINDOW = "warm = cold, window lost, window replay"
BATCH = "batch = alone"
PREEMPTED = "preempted = not preempted"
REPEAT = "repeat = repeat"

LIMITS = {
    STEPWISE: 0.0,
    CHUNKED: 0.0,
    TP_2: 0.0,
    TP_3: 0.0,
    DCP_2: 0.0,
    SPECULATION_BLOCK: 0.0,
    SPECULATION_TOKEN: 0.0,
    WARM: 0.0,
    WARM_EXACT: 0.0,
    WARM_WINDOW: 0.5,
    BATCH: 0.0,
    PREEMPTED: 0.0,
    REPEAT: 0.0,
}
"""Every check in the order of the report, and the most it may differ by on the CPU engine: tokens that differ where
speculation is compared, elsewhere the relative RMS of one position's logits (RMS of the difference over the standard
deviation of the logits; 0 means equal bits).

A window replay is near the cold result, not equal: random weights, which have no habit to fall back on, were seen to
differ by up to 0.4. Text that has nothing to do with the prompt differs by 1.4, and that is what this limit tells
apart."""

Verdict = Literal["pass", "fail", "skip"]
Ids = tuple[int, ...]

_SEED = 20261129
_QUICK_TOKENS = 2048  # longest prompt of a quick run
_SCORED_BYTES = 2 << 30  # of one prompt's logits; longer prompts are answered, not scored
_PROCESS_BYTES = 512 << 20  # what one more rank takes beside its weights
_CROWD = 4  # requests that compete for a small pool
_FILLERS = 6  # requests that take the window of an engine without tails, whatever its blocks


@dataclass(frozen=True, slots=True)
class Check:
    """One verdict. `worst` is None when nothing was compared, infinite when a side has no number at all."""

    name: str
    verdict: Verdict
    worst: float | None
    limit: float
    detail: str


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Every check, in the order of LIMITS."""

    checks: tuple[Check, ...]

    @property
    def verdict(self) -> Verdict:
        """`fail` when any check failed; skipped ones do not count."""
        return "fail" if any(check.verdict == "fail" for check in self.checks) else "pass"

    def to_dict(self) -> dict[str, Any]:
        """The report as values that JSON can hold; what is not finite becomes null."""
        checks = [
            {
                "name": check.name,
                "verdict": check.verdict,
                "worst": None if check.worst is None or not math.isfinite(check.worst) else check.worst,
                "limit": check.limit,
                "detail": check.detail,
            }
            for check in self.checks
        ]
        return {"checks": checks, "verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Progress: engine `number` of `total` is about to be started for these checks; some others may still run."""

    number: int
    total: int
    names: tuple[str, ...]
    elapsed_s: float


EngineFactory = Callable[[Checkpoint, EngineOptions], EngineClient]


async def self_check(
    directory: str | Path,
    *,
    quick: bool = False,
    only: Collection[str] | None = None,
    on_run: Callable[[EngineRun], None] = lambda run: None,
    on_check: Callable[[Check], None] = lambda check: None,
    engine: EngineFactory = EngineClient,
) -> SelfCheck:
    """Run the checks on the checkpoint in `directory`, or those of LIMITS that `only` names.

    `on_check` is told each as it is decided (one that several engines share, several times). Raises ConfigError for
    a name that is none, CheckpointError, and EngineError when the plainest engine, which all are compared with, fails.
    An engine that fails later fails its checks.
    """
    wanted = set(LIMITS if only is None else only)
    if unknown := sorted(wanted - set(LIMITS)):
        raise ConfigError(f"there is no check {unknown[0]!r}", hint=f"the checks are {', '.join(LIMITS)}")
    begin = time.monotonic()
    checkpoint = await asyncio.to_thread(Checkpoint.open, Path(directory))
    questions = _questions(checkpoint, quick=quick)
    runs = [run for run in _runs(checkpoint.config, questions, quick=quick) if wanted & set(run.names)]
    checks: list[Check] = []

    def announce(number: int, names: Sequence[str]) -> None:
        asked = tuple(name for name in names if name in wanted)
        on_run(EngineRun(number, len(runs) + 1, asked, time.monotonic() - begin))

    def decide(found: Sequence[Check]) -> None:
        for check in found:
            if check.name in wanted:
                checks.append(check)
                on_check(check)

    announce(1, (BATCH, REPEAT))
    plain = replace(questions.options, prefix_cache=False)
    async with engine(checkpoint, plain) as first:
        reference = await _ask_plain(first, questions)
        if wanted & {BATCH, REPEAT}:
            decide(await _ask_again(first, questions, reference))
    at_once = _at_once(reference.peak_bytes)
    gate = asyncio.Semaphore(at_once)

    async def work(number: int, run: _Run) -> None:
        async with gate:
            announce(number, run.names)
            threads = max(_num_cores() // (at_once * run.options.tp_size), 1)
            shared = replace(run, options=replace(run.options, threads_per_rank=threads))
            decide(await _decide(shared, checkpoint, questions, reference, engine))

    await asyncio.gather(*(work(number, run) for number, run in enumerate(runs, 2)))
    return SelfCheck(_merge(checks))


# --- comparing ----------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    """Two arrays [rows, V] that should be equal."""

    label: str
    found: np.ndarray
    expected: np.ndarray


def _distance(found: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """The largest relative RMS of a row, and which row: 0.0 for equal bits alone."""
    if found.shape != expected.shape:
        return math.inf, 0
    if found.tobytes() == expected.tobytes():
        return 0.0, 0
    gap = found.astype(np.float64) - expected
    with np.errstate(all="ignore"):
        rows = np.sqrt(np.square(gap).mean(-1)) / expected.astype(np.float64).std(-1)
    rows = np.where(np.isfinite(rows), rows, math.inf)
    worst = int(rows.argmax())
    return max(float(rows[worst]), sys.float_info.min), worst


def _compare(name: str, pairs: Sequence[_Pair], detail: str) -> Check:
    worst, where = 0.0, ""
    for pair in pairs:
        amount, row = _distance(pair.found, pair.expected)
        if amount > worst:
            worst, where = amount, f"; largest at row {row} of {pair.label}"
    return _judge(name, worst, detail + where)


def _judge(name: str, worst: float, detail: str) -> Check:
    return Check(name, "pass" if worst <= LIMITS[name] else "fail", worst, LIMITS[name], detail)


def _undecided(name: str, verdict: Verdict, detail: str) -> Check:
    return Check(name, verdict, None, LIMITS[name], detail)


def _merge(checks: Sequence[Check]) -> tuple[Check, ...]:
    """One check of each name: what several engines found, the worst of it first."""
    merged = []
    for name in LIMITS:
        found = sorted(
            (check for check in checks if check.name == name),
            key=lambda check: (
                ("fail", "pass", "skip").index(check.verdict),
                -(math.inf if check.worst is None else check.worst),
            ),
        )
        if found:
            details = dict.fromkeys(check.detail for check in found)
            merged.append(replace(found[0], detail="; ".join(details)))
    return tuple(merged)


# --- questions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Questions:
    """What engines are asked. Every prompt begins unlike every other one.

    `sessions` come back later; each ends one token after a block, so that all but its last token can be found.
    `crowd` are prompts of which two fit the pool of `crowd_tokens`, but not their answers.
    """

    prompts: tuple[Ids, ...]
    sessions: tuple[Ids, ...]
    fillers: tuple[Ids, ...]
    crowd: tuple[Ids, ...]
    crowd_tokens: int
    answer: SamplingParams
    options: EngineOptions
    vocab_size: int
    reached: str
    replayed_tokens: dict[PrefixReplay, int]  # what has to be run again for a lost window

    @property
    def scored(self) -> tuple[Ids, ...]:
        """Prompts whose logits fit memory at every position."""
        most = _SCORED_BYTES // (4 * self.vocab_size)
        return tuple(prompt for prompt in self.prompts if len(prompt) <= most)


def _questions(checkpoint: Checkpoint, *, quick: bool) -> _Questions:
    config, rng = checkpoint.config, np.random.default_rng(_SEED)
    ordinary = _ordinary_ids(checkpoint)
    num_tokens = 8 if quick else 32
    block, window = EngineOptions().block_size, config.sliding_window
    room = config.max_position_embeddings - num_tokens
    if quick:
        room = min(room, _QUICK_TOKENS)
    if room <= 2 * block:
        raise ConfigError(
            f"a context of {config.max_position_embeddings} tokens is too short to check",
            hint=f"it takes {num_tokens + 2 * block + 1}",
        )

    def prompts(lengths: Sequence[int]) -> tuple[Ids, ...]:
        return tuple(_prompt(rng, ordinary, min(length, room)) for length in lengths)

    lengths = _lengths(config, room, quick=quick)
    replayed = (window - 1) * config.num_hidden_layers
    shortest, longest = window + 2 * block, replayed + 2 * block
    spread = np.linspace(shortest, longest, 2 if quick else 6)
    sessions = [min(-(-int(length) // block) * block, (room - 1) // block * block) + 1 for length in spread]
    half = min(-(-(lengths[-1] + 5) // block) * block, (room + num_tokens) // (2 * block) * block)
    asked = {
        "prompts": prompts(lengths),
        "sessions": prompts(sessions),
        "fillers": prompts([window + 2 * block] * _FILLERS * len(sessions)),
        "crowd": prompts([max(half - 5, 1)] * _CROWD),
    }
    most = max(len(prompt) for several in asked.values() for prompt in several)
    return _Questions(
        **asked,
        crowd_tokens=2 * half,
        answer=SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=config.vocab_size
        ),
        options=EngineOptions(
            max_model_len=most + num_tokens, max_num_seqs=len(lengths), max_num_batched_tokens=most
        ),
        vocab_size=config.vocab_size,
        reached=_reached(config, lengths[-1]),
        replayed_tokens={"window": window, "exact": replayed},
    )


def _ordinary_ids(checkpoint: Checkpoint) -> np.ndarray:
    """Ids of tokens that are text: no control tokens, no image."""
    config, tokenizer = checkpoint.config, load_tokenizer(checkpoint.directory)
    special = {
        *tokenizer.get_added_tokens_decoder(),
        config.bos_token_id,
        config.eos_token_id,
        config.pad_token_id,
        config.image_token_id,
        config.dspark_noise_token_id,
    }
    known = min(config.vocab_size, tokenizer.get_vocab_size())
    return np.array([i for i in range(known) if i not in special])


def _prompt(rng: np.random.Generator, ordinary: np.ndarray, length: int) -> Ids:
    """Random tokens; the last quarter says the first one again."""
    ids = rng.choice(ordinary, length)
    again = length // 4
    ids[length - again :] = ids[:again]
    return tuple(int(i) for i in ids)


def _edges(config: ModelConfig) -> dict[str, int]:
    """Tokens that a row must look back on before each of these leaves something out."""
    ratios = {layer.compress_ratio for layer in config.layers} - {0}
    edges = {"window": config.sliding_window}
    edges |= {f"top-k at ratio {ratio}": config.index_topk * ratio for ratio in sorted(ratios)}
    if config.candidate_source_layer_id is not None:
        ratio = config.compress_ratios[config.candidate_source_layer_id]
        edges["candidates"] = config.candidate_topk_blocks * config.candidate_block_size * ratio
    return edges


def _lengths(config: ModelConfig, room: int, *, quick: bool) -> list[int]:
    """Rising prompt lengths, odd ones among them: those leave a group of two open."""
    edges, window = _edges(config).values(), config.sliding_window
    lengths = {max(window // 2, 1) | 1, (max(edges) + window) | 1}
    if not quick:
        lengths |= {edge + step for edge in edges for step in (-1, 0, 1)} | {1, 2 * max(edges) + 1}
    return sorted({min(max(length, 1), room) for length in lengths})


def _reached(config: ModelConfig, longest: int) -> str:
    edges = _edges(config)
    missing = [f"{name} (from {edge + 1} tokens)" for name, edge in edges.items() if edge >= longest]
    at_work = ", ".join(name for name, edge in edges.items() if edge < longest) or "nothing"
    return f"up to {longest} tokens, at work: {at_work}" + (
        f"; not reached: {', '.join(missing)}" if missing else ""
    )


# --- asking -------------------------------------------------------------------------------------------


class _Answer(NamedTuple):
    """Greedy tokens, and log probabilities float64 [n, V] less their mean: the logits, but for what a softmax drops."""

    token_ids: Ids
    logits: np.ndarray


@dataclass(frozen=True, slots=True)
class _Reference:
    """What the plainest engine says: one rank, each prompt alone and at once, nothing cached."""

    scores: tuple[np.ndarray, ...]
    answers: tuple[_Answer, ...]
    crowd: tuple[_Answer, ...]
    peak_bytes: int


async def _answer(engine: EngineClient, prompt: Ids, sampling: SamplingParams) -> _Answer:
    request = GenerateRequest(f"selfcheck-{uuid.uuid4().hex}", prompt, sampling)
    token_ids: list[int] = []
    rows = []
    async for chunk in engine.generate(request):
        token_ids += chunk.token_ids
        rows += [_logits(entry, sampling.logprobs or 0) for entry in chunk.logprobs or ()]
    if sampling.logprobs is not None and len(rows) != sampling.max_tokens:
        raise EngineError(
            f"{sampling.max_tokens} tokens with log probabilities were asked for, {len(rows)} came"
        )
    return _Answer(tuple(token_ids), np.array(rows))


def _logits(entry: TokenLogprob, vocab_size: int) -> np.ndarray:
    """Log probabilities float64 [V] less their mean. Raises EngineError when one is missing."""
    row = np.full(vocab_size, math.nan)
    for token_id, logprob in entry.top:
        row[token_id] = logprob
    if np.isnan(row).any():
        raise EngineError(f"of {vocab_size} log probabilities only {len(entry.top)} came")
    logits: np.ndarray = row - row.mean()
    return logits


async def _answers(engine: EngineClient, prompts: Sequence[Ids], sampling: SamplingParams) -> list[_Answer]:
    """One after another."""
    return [await _answer(engine, prompt, sampling) for prompt in prompts]


async def _together(engine: EngineClient, prompts: Sequence[Ids], sampling: SamplingParams) -> list[_Answer]:
    return list(await asyncio.gather(*(_answer(engine, prompt, sampling) for prompt in prompts)))


def _answer_pairs(
    prompts: Sequence[Ids], found: Sequence[_Answer], expected: Sequence[_Answer]
) -> list[_Pair]:
    return [
        _Pair(f"the answer to {len(prompt)} tokens", mine.logits, other.logits)
        for prompt, mine, other in zip(prompts, found, expected, strict=True)
    ]


async def _score_pairs(engine: EngineClient, questions: _Questions, reference: _Reference) -> list[_Pair]:
    return [
        _Pair(f"the prompt of {len(prompt)} tokens", await engine.score(prompt), expected)
        for prompt, expected in zip(questions.scored, reference.scores, strict=True)
    ]


async def _ask_plain(engine: EngineClient, questions: _Questions) -> _Reference:
    scores = [await engine.score(prompt) for prompt in questions.scored]
    answers = await _answers(engine, questions.prompts, questions.answer)
    crowd = await _answers(engine, questions.crowd, questions.answer)
    return _Reference(tuple(scores), tuple(answers), tuple(crowd), _peak_bytes(engine))


async def _ask_again(engine: EngineClient, questions: _Questions, reference: _Reference) -> list[Check]:
    prompts, answer = questions.prompts, questions.answer
    scores = await _score_pairs(engine, questions, reference)
    again = _answer_pairs(prompts, await _answers(engine, prompts, answer), reference.answers)
    repeated = _compare(REPEAT, scores + again, f"{len(prompts)} prompts twice")
    before = await engine.stats()
    beside = _answer_pairs(prompts, await _together(engine, prompts, answer), reference.answers)
    num_steps = (await engine.stats()).num_steps - before.num_steps
    if num_steps >= len(prompts) * answer.max_tokens:
        return [repeated, _undecided(BATCH, "fail", "the engine answered one prompt after another")]
    return [repeated, _compare(BATCH, beside, f"{len(prompts)} prompts at once, {_lengths_of(prompts)}")]


async def _ask_chunked(
    engine: EngineClient, questions: _Questions, reference: _Reference, *, name: str, chunk: int
) -> list[Check]:
    before = await engine.stats()
    pairs = await _score_pairs(engine, questions, reference)
    num_steps = (await engine.stats()).num_steps - before.num_steps
    if num_steps < sum(-(-len(prompt) // chunk) for prompt in questions.scored):
        return [_undecided(name, "fail", f"{num_steps} steps are too few to be of {chunk} tokens")]
    how = f"steps of {chunk} tokens" if chunk > 1 else f"prompts {questions.reached}"
    return [_compare(name, pairs, how)]


async def _ask_all(
    engine: EngineClient, questions: _Questions, reference: _Reference, *, name: str
) -> list[Check]:
    pairs = await _score_pairs(engine, questions, reference)
    answers = await _answers(engine, questions.prompts, questions.answer)
    pairs += _answer_pairs(questions.prompts, answers, reference.answers)
    return [_compare(name, pairs, f"{len(questions.prompts)} prompts, {_lengths_of(questions.prompts)}")]


async def _ask_speculating(
    engine: EngineClient, questions: _Questions, reference: _Reference, *, name: str
) -> list[Check]:
    found = await _answers(engine, questions.prompts, questions.answer)
    stats = await engine.stats()
    if stats.num_drafted == 0:
        return [_undecided(name, "fail", "the engine verified no draft")]
    different = sum(
        sum(a != b for a, b in zip(mine.token_ids, other.token_ids, strict=False))
        + abs(len(mine.token_ids) - len(other.token_ids))
        for mine, other in zip(found, reference.answers, strict=True)
    )
    total = sum(len(answer.token_ids) for answer in reference.answers)
    drafts = f"{stats.num_accepted} of {stats.num_drafted} drafts accepted"
    return [_judge(name, float(different), f"{different} of {total} tokens differ, {drafts}")]


async def _ask_crowd(engine: EngineClient, questions: _Questions, reference: _Reference) -> list[Check]:
    found = await _together(engine, questions.crowd, questions.answer)
    num_preempted = (await engine.stats()).num_preempted
    if num_preempted == 0:
        return [_undecided(PREEMPTED, "fail", "nobody was preempted, though two answers do not fit the pool")]
    pairs = _answer_pairs(questions.crowd, found, reference.crowd)
    detail = (
        f"{len(found)} requests in a pool of {questions.crowd_tokens} tokens, {num_preempted} preemptions"
    )
    return [_compare(PREEMPTED, pairs, detail)]


async def _ask_returning(
    engine: EngineClient,
    questions: _Questions,
    reference: _Reference,
    *,
    name: str,
    replay: PrefixReplay,
    chunk: int,
) -> list[Check]:
    """Each session cold, again at once, and again after others have taken its window."""
    checks = await _ask_chunked(engine, questions, reference, name=CHUNKED, chunk=chunk)
    depth = questions.replayed_tokens[replay]
    sessions = [prompt for prompt in questions.sessions if len(prompt) - 1 > depth]
    if replay == "exact":
        del sessions[:-1]  # the others were asked of the other engine
    if not sessions:
        reason = f"a replay of {depth} tokens is more than the {len(questions.sessions[-1])} of the longest session"
        return [*checks, _undecided(WARM, "skip", reason), _undecided(name, "skip", reason)]
    visits = [await _visit(engine, questions, number) for number in map(questions.sessions.index, sessions)]
    many = f"{len(sessions)} session{'s' if len(sessions) > 1 else ''}, {_lengths_of(sessions)}"
    rows = slice(None) if replay == "exact" else slice(1)  # after one token, greedy texts may part
    warm = [_Pair(visit.label, visit.warm.logits, visit.cold.logits) for visit in visits]
    lost = [_Pair(visit.label, visit.lost.logits[rows], visit.cold.logits[rows]) for visit in visits]
    checks += [_compare(WARM, warm, many), _compare(name, lost, many)]
    for visit in visits:
        if not visit.was_found:
            checks.append(_undecided(WARM, "fail", f"{visit.label} was not found with its window"))
        if not visit.was_replayed:
            checks.append(_undecided(name, "fail", f"{visit.label} did not replay a lost window"))
    return checks


@dataclass(frozen=True, slots=True)
class _Visit:
    """A session that came three times, and whether the engine did what its answers are to show."""

    label: str
    cold: _Answer
    warm: _Answer
    lost: _Answer
    was_found: bool
    was_replayed: bool


async def _visit(engine: EngineClient, questions: _Questions, number: int) -> _Visit:
    prompt = questions.sessions[number]
    cold = await _answer(engine, prompt, questions.answer)
    before = await engine.stats()
    warm = await _answer(engine, prompt, questions.answer)
    num_found = (await engine.stats()).num_window_hits - before.num_window_hits
    short = replace(questions.answer, max_tokens=1, logprobs=None)
    await _answers(engine, questions.fillers[_FILLERS * number : _FILLERS * (number + 1)], short)
    before = await engine.stats()
    lost = await _answer(engine, prompt, questions.answer)
    num_replayed = (await engine.stats()).num_replayed_tokens - before.num_replayed_tokens
    label = f"the session of {len(prompt)} tokens"
    return _Visit(label, cold, warm, lost, num_found == len(prompt) - 1, num_replayed > 0)


def _lengths_of(prompts: Sequence[Ids]) -> str:
    lengths = sorted({len(prompt) for prompt in prompts})
    return f"{lengths[0]} tokens" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} tokens"


# --- engines ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """One engine and what it is asked. With an `obstacle` it is not started."""

    names: tuple[str, ...]
    options: EngineOptions
    ask: Callable[[EngineClient, _Questions, _Reference], Awaitable[list[Check]]]
    obstacle: str | None = None


def _runs(config: ModelConfig, questions: _Questions, *, quick: bool) -> list[_Run]:
    plain = replace(questions.options, prefix_cache=False)
    rng = np.random.default_rng(_SEED)
    longest = len(questions.prompts[-1])
    chunks = [int(n) for n in rng.integers(longest // 2, longest, 2)]
    small = [] if quick else [2, *(int(n) for n in rng.integers(3, longest // 2 + 3, 3))]
    runs = [
        _Run(
            (STEPWISE,),
            replace(plain, max_num_batched_tokens=1),
            partial(_ask_chunked, name=STEPWISE, chunk=1),
        )
    ]
    for chunk in small:
        ask = partial(_ask_chunked, name=CHUNKED, chunk=chunk)
        runs.append(_Run((CHUNKED,), replace(plain, max_num_batched_tokens=chunk), ask))
    for name, tp_size, dcp_size in ((TP_2, 2, 1), (TP_3, 3, 1), (DCP_2, 2, 2)):
        options = replace(plain, tp_size=tp_size, dcp_size=dcp_size)
        runs.append(_Run((name,), options, partial(_ask_all, name=name)))
    for name, acceptance in ((SPECULATION_BLOCK, "block"), (SPECULATION_TOKEN, "token")):
        text = f"k={config.dspark_block_size},accept={acceptance}"
        obstacle = None if config.num_nextn_predict_layers else "the checkpoint has no drafts"
        ask = partial(_ask_speculating, name=name)
        runs.append(_Run((name,), replace(plain, speculation=text), ask, obstacle))
    runs.append(_returning(WARM_EXACT, questions, "exact", chunks[0]))
    runs.append(_returning(WARM_WINDOW, questions, "window", chunks[1]))
    crowd = replace(
        questions.options,
        max_model_len=questions.crowd_tokens,
        kv_cache_tokens=questions.crowd_tokens,
        num_window_tails=0,
        max_num_seqs=_CROWD,
    )
    grown = len(questions.crowd[0]) + questions.answer.max_tokens
    obstacle = None if grown <= questions.crowd_tokens else "the context is too short for two requests"
    return [*runs, _Run((PREEMPTED,), crowd, _ask_crowd, obstacle)]


def _returning(name: str, questions: _Questions, replay: PrefixReplay, chunk: int) -> _Run:
    """One slot and no window kept for later: a few other requests take the window of the last one."""
    longest = questions.options.max_model_len or 0
    options = replace(
        questions.options,
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
        num_window_tails=0,
        kv_cache_tokens=2 * longest + sum(map(len, questions.fillers)),
        prefix_replay=replay,
    )
    ask = partial(_ask_returning, name=name, replay=replay, chunk=chunk)
    return _Run((CHUNKED, WARM, name), options, ask)


async def _decide(
    run: _Run, checkpoint: Checkpoint, questions: _Questions, reference: _Reference, engine: EngineFactory
) -> list[Check]:
    """Start the engine of a run and ask it; when it cannot be started or fails, say so of every check."""
    obstacle = run.obstacle or _too_small(checkpoint.config, run.options.tp_size, reference.peak_bytes)
    if obstacle is not None:
        return [_undecided(name, "skip", obstacle) for name in run.names]
    try:
        started = engine(checkpoint, run.options)
    except ConfigError as error:
        return [_undecided(name, "skip", error.message) for name in run.names]
    try:
        async with started:
            return await run.ask(started, questions, reference)
    except (EngineError, RequestError) as error:
        return [_undecided(name, "fail", error.message) for name in run.names]


def _at_once(peak_bytes: int) -> int:
    """Engines that may run side by side, with up to three ranks each."""
    room = _kibibytes(Path("/proc/meminfo"), "MemAvailable") // (peak_bytes + 3 * _PROCESS_BYTES)
    return max(min(room, _num_cores()), 1)


def _too_small(config: ModelConfig, tp_size: int, peak_bytes: int) -> str | None:
    """Why this machine should not run so many ranks, or None. `peak_bytes` is what one rank alone has taken."""
    if tp_size > 2 * _num_cores():
        return f"{tp_size} ranks on {_num_cores()} cores would take too long"
    alone, shared = (_loaded_bytes(config, size) for size in (1, tp_size))
    needed = math.ceil(peak_bytes * shared / alone) + (tp_size - 1) * _PROCESS_BYTES
    available = _kibibytes(Path("/proc/meminfo"), "MemAvailable")
    if tp_size > 1 and needed > available:
        return (
            f"{tp_size} ranks take about {format_bytes(needed)} of memory, {format_bytes(available)} are free"
        )
    return None


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _loaded_bytes(config: ModelConfig, tp_size: int) -> int:
    """Checkpoint bytes that all ranks read, some of them several times; Engram tables stay on disk."""
    plan = ShardPlan(config, Layout(tp_size))
    return sum(
        num_bytes
        for rank in range(tp_size)
        for kind, num_bytes in plan.rank_bytes(rank).items()
        if kind is not TensorClass.engram
    )


def _peak_bytes(engine: EngineClient) -> int:
    return sum(_kibibytes(Path(f"/proc/{rank.pid}/status"), "VmHWM") for rank in engine.ranks)


def _kibibytes(path: Path, name: str) -> int:
    """Bytes of the line `name: ... kB` of one of the kernel's files."""
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


__all__ = ["LIMITS", "Check", "EngineRun", "SelfCheck", "Verdict", "self_check"]
