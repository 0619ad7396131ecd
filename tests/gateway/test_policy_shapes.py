"""What policies make of a request before an engine sees it, and the check of its bytes. Takes about three seconds."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from deskfleet.endpoint import GenerateRequest, SamplingParams, TokenChunk
from deskfleet.errors import RequestError
from deskfleet.gateway.policies.completion_cap import CLAMPED, DEFAULTED, CompletionCap, CompletionCapSettings
from deskfleet.gateway.policies.contract import Caller, Draft, Policy, Wishes, with_generate
from deskfleet.gateway.policies.counting import Counters
from deskfleet.gateway.policies.deadlines import Deadlines, DeadlineSettings
from deskfleet.gateway.policies.key_limits import REFUSED, TOKENS, KeyLimits, KeyLimitsSettings, Usage
from deskfleet.gateway.policies.request_limits import RequestLimits, check_body
from deskfleet.gateway.policies.sampling_defaults import (
    NEAR_GREEDY,
    SamplingDefaults,
    SamplingDefaultsSettings,
    SamplingValues,
)
from deskfleet.gateway.policies.thinking_budget import ThinkingBudget, ThinkingBudgetSettings
from deskfleet.gateway.refusals import BodyTooLarge, NotPermitted, TooManyRequests


def draft(
    *, key: str | None = "alice", prompt: int = 1000, sampling: SamplingParams | None = None, **wishes: Any
) -> Draft:
    """A request as a protocol makes it: what it said is in the wishes, and in what is sampled."""
    said = Wishes(**({"thinking": True} | wishes))
    values = {name: value for name, value in wishes.items() if name != "thinking" and value is not None}
    return Draft(
        generate=GenerateRequest("r", (1,), replace(sampling or SamplingParams(max_tokens=2000), **values)),
        wishes=said,
        caller=Caller(key),
        model_id="m",
        num_prompt_tokens=prompt,
        max_model_len=10_000,
    )


# --- how long an answer may be ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "asked", "prompt", "becomes"),
    [
        ({}, None, 1000, 2000),  # the gateway's own default
        ({}, 7, 1000, 7),
        ({}, 10**9, 1000, 10**9),  # refused after this, with both numbers
        ({"default_max_tokens": 500}, None, 1000, 500),
        ({"default_max_tokens": 500}, 7000, 1000, 7000),
        ({"default_max_tokens": 500}, None, 9800, 200),  # the room
        ({"max_tokens": 300}, None, 1000, 300),
        ({"max_tokens": 300}, 299, 1000, 299),
        ({"max_tokens": 300}, 10**9, 1000, 300),
        ({"max_tokens": 300}, 10**9, 9900, 100),
        ({"max_tokens": 300}, 200, 9900, 100),
        ({"max_tokens": 300, "default_max_tokens": 5000}, None, 1000, 300),
        ({"max_tokens": 300, "default_max_tokens": 20}, None, 1000, 20),
        ({"max_tokens": 300, "enabled": False}, 10**9, 1000, 10**9),
        (
            {"max_tokens": 300},
            None,
            10_000,
            1,
        ),  # no room: the protocol refuses a prompt that fills the context
    ],
)
def test_completion_cap(settings: dict[str, Any], asked: int | None, prompt: int, becomes: int) -> None:
    counters = Counters()
    policy = CompletionCap(CompletionCapSettings(**settings), counters)
    assert policy.shape(draft(max_tokens=asked, prompt=prompt)).sampling.max_tokens == becomes
    if settings.get("enabled", True):
        assert counters.total(DEFAULTED) == (asked is None)
        assert counters.total(CLAMPED) == (asked is not None and becomes < asked)
    assert policy.watcher(draft()) is None


@pytest.mark.parametrize(
    ("settings", "asked", "thinking", "becomes"),
    [
        ({}, None, True, None),
        ({}, 100, True, 100),
        ({"default_tokens": 50}, None, True, 50),
        ({"default_tokens": 50}, 100, True, 100),
        ({"default_tokens": 50}, None, False, None),
        ({"max_tokens": 70}, None, True, 70),
        ({"max_tokens": 70}, 100, True, 70),
        ({"max_tokens": 70}, 0, True, 0),
        ({"max_tokens": 70, "default_tokens": 90}, None, True, 70),
        ({"answer_tokens": 500}, None, True, 1500),  # of max_tokens 2,000
        ({"answer_tokens": 500}, 1800, True, 1500),
        ({"answer_tokens": 500}, 100, True, 100),
        ({"answer_tokens": 5000}, None, True, 0),
        ({"max_tokens": 70, "enabled": False}, 100, True, 100),
    ],
)
def test_thinking_budget(
    settings: dict[str, Any], asked: int | None, thinking: bool, becomes: int | None
) -> None:
    policy = ThinkingBudget(ThinkingBudgetSettings(**settings), Counters())
    shaped = policy.shape(draft(thinking=thinking, thinking_budget=asked))
    assert shaped.sampling.thinking_budget == becomes


# --- how it is sampled ------------------------------------------------------------------------------------


def test_the_publishers_values_where_the_client_is_silent() -> None:
    policy = SamplingDefaults(SamplingDefaultsSettings(), Counters())
    silent = SamplingParams(temperature=0.5, top_p=1.0)
    for thinking in (True, False):
        sampling = policy.shape(draft(thinking=thinking, sampling=silent)).sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0.95, 0, 0.0)
        assert sampling.max_tokens == 256


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0.01, 1),
            "top_k": st.integers(0, 50),
            "min_p": st.floats(0, 1),
            "repetition_penalty": st.floats(0.5, 2),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
        },
    )
)
def test_the_clients_values_always_win(wishes: dict[str, Any]) -> None:
    values = SamplingValues(
        temperature=0.7,
        top_p=0.8,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
    )
    policy = SamplingDefaults(SamplingDefaultsSettings(thinking=values), Counters())
    sampling = policy.shape(draft(**wishes)).sampling
    for name in SamplingValues.model_fields:
        assert getattr(sampling, name) == wishes.get(name, getattr(values, name)), name


def test_near_greedy_thinking_is_served_and_counted() -> None:
    counters = Counters()
    policy = SamplingDefaults(SamplingDefaultsSettings(), counters)
    assert policy.shape(draft(temperature=0.2)).sampling.temperature == 0.2
    policy.shape(draft(temperature=0.2, thinking=False))
    policy.shape(draft(temperature=0.9))
    assert counters.total(NEAR_GREEDY) == 1
    off = SamplingDefaults(SamplingDefaultsSettings(enabled=False), counters)
    request = draft()
    assert off.shape(request) is request


def test_deadlines() -> None:
    assert Deadlines(DeadlineSettings()).shape(draft()).generate.timeout_s is None
    policy = Deadlines(DeadlineSettings(timeout_s=30))
    request = draft()
    assert policy.shape(request).generate.timeout_s == 30.0
    for own, becomes in ((10.0, 10.0), (90.0, 30.0)):
        early = with_generate(request, replace(request.generate, timeout_s=own))
        assert policy.shape(early).generate.timeout_s == becomes


# --- what a key may use -------------------------------------------------------------------------------------


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def answer(policy: KeyLimits, request: Draft, num_tokens: int) -> None:
    """Let the policy see one answer, in two chunks."""
    watcher = policy.watcher(request)
    assert watcher is not None
    for size in (num_tokens // 2, num_tokens - num_tokens // 2):
        chunk = TokenChunk((5,) * size, None, request.num_prompt_tokens)
        assert watcher.push(chunk) is chunk


def test_requests_per_minute() -> None:
    clock, counters = Clock(), Counters()
    policy = KeyLimits(KeyLimitsSettings(requests_per_minute=6), Usage(clock), counters)
    for _ in range(6):
        policy.shape(draft())
    with pytest.raises(TooManyRequests, match="'alice' has used up its 6 requests per minute") as raised:
        policy.shape(draft())
    assert raised.value.headers == {"Retry-After": "10"}
    policy.shape(draft(key="bob"))  # has its own
    clock.now_s += 10.0
    policy.shape(draft())
    with pytest.raises(TooManyRequests):
        policy.shape(draft())
    clock.now_s += 3600.0
    for _ in range(6):
        policy.shape(draft())
    with pytest.raises(TooManyRequests):
        policy.shape(draft())
    assert counters.read()[REFUSED] == {("m", "alice", "requests"): 3.0}


def test_whoever_waits_as_told_gets_in() -> None:
    for per_minute in (1, 7, 61, 599):
        clock = Clock()
        policy = KeyLimits(KeyLimitsSettings(requests_per_minute=per_minute), Usage(clock), Counters())
        for _ in range(per_minute):
            policy.shape(draft())
        for _ in range(5):
            with pytest.raises(TooManyRequests) as raised:
                policy.shape(draft())
            clock.now_s += raised.value.retry_after_s
            policy.shape(draft())


def test_tokens_per_minute_count_prompt_and_answer() -> None:
    clock, counters = Clock(), Counters()
    policy = KeyLimits(KeyLimitsSettings(tokens_per_minute=6000), Usage(clock), counters)
    request = policy.shape(draft(prompt=4000))
    answer(policy, request, 5000)  # nobody knew that it would be so long
    with pytest.raises(TooManyRequests, match="6000 tokens per minute") as raised:
        policy.shape(draft())
    assert 30.0 < raised.value.retry_after_s < 30.1, "3,000 too many, at 100 a second"
    clock.now_s += 31.0
    policy.shape(draft())
    assert counters.read()[TOKENS] == {("m", "alice"): 9000.0}


def test_models_of_a_key() -> None:
    policy = KeyLimits(KeyLimitsSettings(models=("other", "third")), Usage(), Counters())
    with pytest.raises(NotPermitted, match="the key 'alice' may not use the model 'm'") as raised:
        policy.shape(draft())
    assert raised.value.hint == "it may use other, third"
    assert KeyLimits(KeyLimitsSettings(models=("m",)), Usage(), Counters()).shape(draft())


def test_what_is_used_up_stays_used_up_with_other_settings() -> None:
    usage = Usage(Clock())
    first = KeyLimits(KeyLimitsSettings(requests_per_minute=2), usage, Counters())
    first.shape(draft())
    first.shape(draft())
    with pytest.raises(TooManyRequests):
        KeyLimits(KeyLimitsSettings(requests_per_minute=100), usage, Counters()).shape(draft())


def test_threads_do_not_lose_counts() -> None:
    counters, usage = Counters(), Usage(Clock())
    policy = KeyLimits(KeyLimitsSettings(requests_per_minute=100_000), usage, counters)

    def use() -> None:
        for _ in range(500):
            answer(policy, policy.shape(draft(prompt=1)), 1)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.total(TOKENS) == 8 * 500 * 2
    assert usage.missing_s("requests", "alice", 100_000) == 0.0


@pytest.mark.parametrize(
    "policy", [Deadlines(DeadlineSettings()), CompletionCap(CompletionCapSettings(), Counters())]
)
def test_policies_have_names(policy: Policy) -> None:
    assert policy.name == policy.name.lower()


# --- bytes --------------------------------------------------------------------------------------------------

LIMITS = RequestLimits(max_body_bytes=10**9, max_depth=8, max_values=1000)


def depth_of(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if children is None else 1 + max(map(depth_of, children), default=0)


def values_of(value: Any) -> int:
    """Commas plus one, as the check counts: an element more for every one that is not the first of its kind."""
    if isinstance(value, dict | list):
        children = list(value.values()) if isinstance(value, dict) else value
        return max(len(children) - 1, 0) + sum(map(values_of, children))
    return 0


AWKWARD = st.text(st.sampled_from('ab"\\[]{},:\n é'), max_size=8)
JSON = st.recursive(
    st.one_of(st.none(), st.integers(), AWKWARD),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(AWKWARD, inner, max_size=4)),
    max_leaves=40,
)


@examples(deadline=None, max_examples=500)
@given(JSON, st.integers(4, 6), st.booleans())
def test_nesting_is_counted_as_parsing_would(value: Any, max_depth: int, compact: bool) -> None:
    body = msgspec.json.encode(value) if compact else json.dumps(value, indent=1).encode()
    limits = RequestLimits(max_depth=max_depth)
    if depth_of(value) > max_depth:
        with pytest.raises(
            RequestError, match=f"nested {depth_of(value)} levels deep, more than {max_depth}"
        ):
            check_body(body, limits)
    else:
        check_body(body, limits)


def test_limits_of_a_body() -> None:
    check_body(b'{"a": "' + b"[" * 5000 + b'"}', LIMITS)  # text
    check_body(b'{"a": "' + b'\\"[' * 5000 + b'"}', LIMITS)
    check_body(b'{"a": "' + b"\\\\" * 5000 + b'", "b": [[[]]]}', LIMITS)
    check_body(b"[" + b"1," * 999 + b"1]", LIMITS)
    for body, said in (
        (b"[" * 100_000, "nested 100000 levels deep"),
        (b'{"a":' * 9 + b"1" + b"}" * 9, "nested 9 levels deep, more than 8"),
        (b"[[]," * 9 + b"1" + b"]" * 9, "nested 10 levels deep"),
        (b"[" + b"1," * 1000 + b"1]", "holds 1001 values, more than 1000"),
        (b'{"a": "' + b"\\\\" * 5000 + b'", "b": ' + b"[" * 9, "nested 10 levels"),
    ):
        with pytest.raises(RequestError, match=said):
            check_body(body, LIMITS)
    with pytest.raises(BodyTooLarge, match="has 1025 bytes, more than 1024"):
        check_body(b" " * 1025, RequestLimits(max_body_bytes=1024, enabled=False))
    check_body(b"[" * 5000, RequestLimits(enabled=False))


def test_the_check_is_fast() -> None:
    """64 MiB of the worst kinds in well under a second of this thread."""
    size = 64 * 2**20
    limits = RequestLimits(max_values=10**9, max_body_bytes=2**30)
    for body in (
        b'{"image": "' + b"iVBORw0KGgo" * (size // 11) + b'"}',
        b"[" + b"[]," * (size // 3) + b"1]",
        b'{"text": "' + b'\\"[\\\\' * (size // 5) + b'"}',
        b'["' + b'","' * (size // 3) + b'"]',
    ):
        start = time.thread_time()
        check_body(body, limits)
        assert time.thread_time() - start < 5.0
    small = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
    start = time.thread_time()
    for _ in range(1000):
        check_body(small, limits)
    assert (time.thread_time() - start) / 1000 < 50e-6
