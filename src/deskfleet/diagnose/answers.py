"""What makes answers wrong: rungs over logits, rows, a few questions and drafts. Owns their rules."""

from __future__ import annotations

from deskfleet.diagnose.finding import Finding, clear, found, shown, unknown, url_of
from deskfleet.diagnose.situation import Situation

_DRAFTED = ("deskfleet_engine_drafted_total", "vllm:spec_decode_num_draft_tokens_total")
_ACCEPTED = ("deskfleet_engine_accepted_total", "vllm:spec_decode_num_accepted_tokens_total")
_NOT_FINITE = ("deskfleet_engine_not_finite_total", "vllm:corrupted_requests_total")
_ENGRAM_ERRORS = ("deskfleet_engram_errors_total",)
_FALLBACK_ROWS = ("deskfleet_engram_fallback_rows_total",)


def not_finite(s: Situation) -> Finding:
    name = "not finite"
    count = s.meters.value(*_NOT_FINITE)
    if count:
        return found(
            name,
            f"{count:.0f} requests failed for logits that are not finite",
            "deskfleet facts LOG...   # which kernels and allocator?",
        )
    if s.question is not None and s.question.is_finite is False:
        return found(
            name,
            "log probabilities are not finite: the model computes nonsense, whatever the speed",
            "deskfleet facts LOG...   # expandable segments, KV format, kernels",
        )
    if s.question is None or s.question.is_finite is None:
        return unknown(name, "the server gave no log probabilities", f"deskfleet smoke {url_of(s)}")
    return clear(name, "log probabilities are finite")


def rows(s: Situation) -> Finding:
    name = "Engram rows"
    errors, fallback = s.meters.value(*_ENGRAM_ERRORS), s.meters.value(*_FALLBACK_ROWS)
    if errors:
        return found(
            name,
            f"{errors:.0f} faults while reading Engram rows",
            "python -m deskfleet_engram verify PACK   # on every node",
        )
    if fallback:
        return found(
            name,
            f"{fallback:.0f} rows came from the second source: the pack cannot give them",
            "python -m deskfleet_engram verify PACK   # on every node",
        )
    if errors is None:
        return unknown(
            name,
            "the server does not count faults of its rows",
            "deskfleet facts LOG...   # two ranks with the same rows?",
        )
    return clear(name, "no fault while reading Engram rows")


def wrong_alone(s: Situation) -> Finding:
    name = "wrong alone"
    if s.question is None:
        return unknown(name, "no question was asked", "deskfleet diagnose URL")
    if s.question.error is not None:
        return unknown(
            name, f"the question failed: {s.question.error}", "deskfleet diagnose URL --logs FILE..."
        )
    if not s.question.is_right:
        return found(
            name,
            f"asked alone, it answers {shown(s.question.text)}: no client and no concurrency is to blame",
            f"deskfleet verify {url_of(s)}   # then image and engine provenance on every node: digest, commit",
        )
    if s.again is not None and s.again.error is None and s.again.text != s.question.text:
        return found(
            name,
            f"the same greedy question twice gives {shown(s.question.text)} and {shown(s.again.text)}",
            f"deskfleet verify {url_of(s)}   # non-deterministic kernels, or a prefix hit that is wrong",
        )
    return clear(name, "asked directly and alone, it answers right")


_FIRST_ALONE = "a short question, asked alone, is answered wrongly already"


def _is_right_alone(s: Situation) -> bool:
    return s.question is not None and s.question.error is None and s.question.is_right


def wrong_together(s: Situation) -> Finding:
    name = "wrong together"
    asked = [answer for answer in s.together if answer.error is None]
    if not asked:
        return unknown(name, "no questions were asked at the same time", "deskfleet diagnose URL")
    if not _is_right_alone(s):
        return unknown(name, _FIRST_ALONE, f"deskfleet smoke {url_of(s)}")
    wrong = [answer for answer in asked if not answer.is_right]
    if wrong:
        return found(
            name,
            f"right alone, and {len(wrong)} of {len(asked)} wrong at the same time, e.g. {shown(wrong[0].text)}",
            f"deskfleet verify {url_of(s)}   # draft state by request, the proposer's file on all nodes",
        )
    return clear(name, f"{len(asked)} at the same time are answered right")


def wrong_long(s: Situation) -> Finding:
    name = "wrong when long"
    answer = s.long_question
    if answer is None:
        return unknown(name, "no long question was asked", "deskfleet diagnose URL")
    if answer.error is None and not _is_right_alone(s):
        return unknown(name, _FIRST_ALONE, f"deskfleet smoke {url_of(s)}")
    if answer.error is not None:
        return found(
            name,
            f"a short question is answered, and one of a thousand tokens or two fails: {answer.error}",
            f"deskfleet verify {url_of(s)}   # prefill of more than 64 tokens, allocator, attention kernels",
        )
    if not answer.is_right:
        return found(
            name,
            f"right when short, and after a thousand tokens or two {shown(answer.text)}",
            f"deskfleet verify {url_of(s)}   # chunked prefill, top-k of the indexer, prefix cache",
        )
    return clear(name, "a long question is answered right")


def harness(s: Situation) -> Finding:
    """Last of what garbles: all direct checks were right."""
    name = "client"
    direct = [s.question, s.long_question, *s.together]
    if s.question is None or any(a is not None and (a.error is not None or not a.is_right) for a in direct):
        return unknown(
            name, "first the server must answer right when asked directly", "deskfleet diagnose URL"
        )
    return clear(
        name,
        "asked directly it is right; if a client still shows garble, look at what it sends: history, model, sampling",
    )


def drafts(s: Situation) -> Finding:
    name = "drafts"
    drafted, accepted = s.meters.value(*_DRAFTED), s.meters.value(*_ACCEPTED)
    if drafted is None or accepted is None:
        return unknown(name, "the server does not count drafts", f"curl {url_of(s)}/metrics")
    if drafted < 100:
        return clear(name, "too few drafts to say")
    share = accepted / drafted
    if share < 0.05:
        return found(
            name,
            f"{share:.1%} of {drafted:.0f} drafts were accepted: guessing costs time in each step and gains nothing",
            "deskfleet facts LOG...   # draft weights, draft KV, state by request; answers stay right meanwhile",
        )
    return clear(name, f"{share:.0%} of drafts are accepted")


__all__ = ["drafts", "harness", "not_finite", "rows", "wrong_alone", "wrong_long", "wrong_together"]
