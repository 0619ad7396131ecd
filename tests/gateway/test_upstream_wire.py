"""What goes to each engine and what comes back, to the letter; and how text becomes ids where there are none.

Events and counters named REAL were written by a vLLM 0.32 server with a tiny Llama.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_scripts import CHAT, EOS, HELLO, MODEL, TOOLS, ask, call_markup, ids, says, settings
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI
from upstream_scripts import ANSWER, HASTY, PROMPT, VOCABULARY, answer, asking, server_of, tokens, upstream

from deskfleet.endpoint import Constraint, ImageInput, SamplingParams
from deskfleet.errors import ConfigError, RequestError
from deskfleet.gateway.upstream.events import EventSplitter
from deskfleet.gateway.upstream.failures import UpstreamFailed, failure_of
from deskfleet.gateway.upstream.retokenise import Retokeniser
from deskfleet.gateway.upstream.router import Router
from deskfleet.gateway.upstream.scrape import marker_from, read_samples
from deskfleet.gateway.upstream.serving import parse_urls
from deskfleet.gateway.upstream.sglang import SglangUpstream
from deskfleet.gateway.upstream.sglang_events import GenerateEvents
from deskfleet.gateway.upstream.vllm import VllmUpstream
from deskfleet.gateway.upstream.vllm_events import GenerateReader
from deskfleet.testing.scripted import running_gateway

THINKING = (*PROMPT, 507)

# --- events ---------------------------------------------------------------------------------------------


@given(
    payloads=st.lists(
        st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), min_size=1), max_size=6
    ),
    end=st.sampled_from(["\n", "\r\n"]),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    comment=st.booleans(),
)
def test_events_come_out_whole_however_they_are_cut(
    payloads: list[str], end: str, cuts: list[int], comment: bool
) -> None:
    text = "".join(
        f"{': ping' + end + end if comment else ''}event: x{end}data: {payload}{end}{end}"
        for payload in payloads
    )
    stream, splitter, found, start, turn = text.encode(), EventSplitter(), [], 0, 0
    while start < len(stream):
        size = cuts[turn % len(cuts)]
        found += splitter.push(stream[start : start + size])
        start, turn = start + size, turn + 1
    assert [payload.decode() for payload in found] == payloads
    assert splitter.is_empty


def test_odd_events() -> None:
    splitter = EventSplitter()
    assert splitter.push(b"data: a\ndata:b\nid: 7\n\ndata:c\n\n:\n\nretry: 5\n\nda") == [b"a\nb", b"c"]
    assert not splitter.is_empty
    assert splitter.push(b"ta: d\n") == []
    assert splitter.push(b"\n") == [b"d"]
    endless = EventSplitter()
    assert [endless.push(b"x" * 2**20) for _ in range(64)] == [[]] * 64
    with pytest.raises(UpstreamFailed, match="longer than 67108864 bytes"):
        endless.push(b"x")


# --- text -----------------------------------------------------------------------------------------------


@given(
    pieces=st.lists(
        st.sampled_from(
            [
                "a",
                "Größe ",
                "東京",
                "🙂",
                "<",
                "</think>",
                "<｜end▁of▁sentence｜>",
                "｜DSML｜",
                "<｜",
                " ▁",
                "\n",
            ]
        ),
        max_size=12,
    ),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
def test_text_in_any_pieces_becomes_ids_of_the_same_text(pieces: list[str], cuts: list[int]) -> None:
    """Control tokens stay single tokens wherever their spelling is cut."""
    text = "".join(pieces)
    retokeniser, found, start, turn = Retokeniser(VOCABULARY), [], 0, 0
    while start < len(text):
        size = cuts[turn % len(cuts)]
        found += retokeniser.push(text[start : start + size])
        start, turn = start + size, turn + 1
    found += retokeniser.finish()
    control = set(VOCABULARY.control.values())
    assert VOCABULARY.decode(found) == text
    assert [token_id for token_id in found if token_id in control] == [
        token_id for token_id in VOCABULARY.encode(text) if token_id in control
    ]
    for spelling in ("</think>", EOS):
        assert found.count(VOCABULARY.control[spelling]) == text.count(spelling)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_an_engine_that_speaks_text_alone_is_understood(engine: str) -> None:
    """The client's answer is the same; that ids are not the engine's own is said, and probabilities are refused."""
    lines = [
        (says("Let me see." + call_markup(("weather", {"city": ("Größe 🙂", True)}))), {"tools": TOOLS}),
        (says("one 🙂 two STOP three"), {"stop": "STOP"}),
        (says("Hm.</think>So."), {"extra_body": {"thinking": {"type": "enabled"}}}),
    ]
    script = {"now": lines[0][0]}
    options: dict[str, Any] = {"way": "text"} if engine == "vllm" else {}
    async with server_of(engine, lambda request: script["now"], **options) as server:
        if engine == "sglang":
            server.sends_ids = False  # type: ignore[attr-defined]
        kind = VllmUpstream if engine == "vllm" else SglangUpstream
        async with (
            Router([kind(server.url, VOCABULARY, HASTY)]) as router,
            running_gateway(router, settings()) as base_url,
            AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as client,
        ):
            assert router.exact_tokens is False
            assert router.replicas[0].exact_tokens is False
            found = []
            for says_now, wish in lines:
                script["now"] = says_now
                reply = await ask(client, **wish)
                found.append((reply.choices[0].finish_reason, reply.choices[0].message))
            call = found[0][1].tool_calls[0].function
            assert (found[0][0], found[0][1].content, call.name) == ("tool_calls", "Let me see.", "weather")
            assert json.loads(call.arguments) == {"city": "Größe 🙂"}
            assert (found[1][0], found[1][1].content) == ("stop", "one 🙂 two ")
            assert (found[2][1].reasoning_content, found[2][1].content) == ("Hm.", "So.")
            with pytest.raises(Exception, match="answers in text, not in tokens"):
                await ask(client, logprobs=True)


# --- vLLM -----------------------------------------------------------------------------------------------

FULL = SamplingParams(
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    seed=2**62,
    max_tokens=9,
    stop_token_ids=(3, 4),
    stop=("x",),
    ignore_eos=True,
    logprobs=3,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    logit_bias=((5, 1.5),),
)
SAMPLING = {
    "max_tokens": 9,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "seed": 2**62,
    "stop": ["x"],
    "stop_token_ids": [3, 4],
    "logit_bias": {"5": 1.5},
}


async def test_what_vllm_is_sent() -> None:
    async with upstream("vllm") as (engine, server):
        await answer(engine, asking(**fields_of(FULL)))
        await answer(engine, asking("i", (*PROMPT, 511), images=(ImageInput(b"\xff\xd8\xff.."),)))
        await answer(engine, asking("c", constraint=Constraint("regex", "a+")))
        full, image, constrained = server.bodies
    assert full == {
        "request_id": "r",
        "model": "scripted",
        "token_ids": list(PROMPT),
        "sampling_params": {**SAMPLING, "logprobs": 3, "detokenize": True},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert image["content_parts"] == [{"type": "image_url", "url": "data:image/jpeg;base64,/9j/Li4="}]
    assert image["return_token_ids"] is True
    assert image["sampling_params"]["detokenize"] is False
    assert constrained["sampling_params"]["structured_outputs"] == {"regex": "a+"}
    assert constrained["reasoning_ended"] is True
    async with upstream("vllm", way="completions") as (engine, server):
        await answer(engine, asking(**fields_of(FULL)))
        assert server.bodies == [
            {
                **SAMPLING,
                "request_id": "r",
                "model": "scripted",
                "prompt": list(PROMPT),
                "add_special_tokens": False,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
                "logprobs": 3,
                "return_tokens_as_token_ids": True,
            }
        ]


def fields_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


@pytest.mark.parametrize("way", ["generate", "completions", "text"])
@pytest.mark.parametrize("has_openapi", [True, False])
async def test_the_best_way_in_is_found(way: str, has_openapi: bool) -> None:
    async with server_of("vllm", way=way) as server:
        server.has_openapi = has_openapi  # type: ignore[attr-defined]
        async with VllmUpstream(server.url, VOCABULARY, HASTY) as engine:
            assert (engine.way, engine.exact_tokens) == (way, way != "text")
            assert tokens(await answer(engine, asking())) == ANSWER.token_ids


REAL_EVENT = (
    b'{"request_id":"generate-tokens-abc","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    b'"finish_reason":null,"stop_reason":null,"token_ids":[7],"routed_experts":null,"sampling_mask":null,'
    b'"weight_versions":null,"logprobs":{"content":[{"token_id":7,"logprob":-6.238324165344238,"rank":155,'
    b'"top_logprobs":[{"token_id":7,"logprob":-6.238324165344238,"rank":155},'
    b'{"token_id":188,"logprob":-6.238323211669922,"rank":1}]}]}}]}'
)
REAL_LAST = (
    b'{"request_id":"generate-tokens-abc","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    b'"finish_reason":"length","stop_reason":null,"token_ids":[7],"routed_experts":null,"sampling_mask":null,'
    b'"weight_versions":[{"version":"default","start":0,"end":4}],"logprobs":null}]}'
)
REAL_USAGE = (
    b'{"request_id":"generate-tokens-abc","usage":{"prompt_tokens":5,"total_tokens":9,"completion_tokens":4,'
    b'"prompt_tokens_details":{"cached_tokens":3}},"output_mode":"tokens","choices":[]}'
)
REAL_ERROR = (
    b'{"error":{"message":"temperature must be in [0, 2], got 9.0. (parameter=temperature, value=9.0)",'
    b'"type":"BadRequestError","param":"temperature","code":400}}'
)
REAL_METRICS = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
# HELP vllm:generation_tokens Number of generation tokens processed.
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="tiny"} 1043.0
vllm:generation_tokens_created{engine="0",model_name="tiny"} 1.7960518590460443e+09
# HELP vllm:iteration_tokens_total Histogram of number of tokens per engine_step.
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="tiny"} 1038.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="tiny"} 1043.0
vllm:iteration_tokens_total_count{engine="0",model_name="tiny"} 1043.0
vllm:iteration_tokens_total_sum{engine="0",model_name="tiny"} 1068.0
# HELP vllm:request_success Count of successfully processed requests.
# TYPE vllm:request_success counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 1.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 4.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 2.0
"""


def test_real_events_of_vllm() -> None:
    """The chosen token comes first whether it is among the likeliest or not; cached tokens come after the end."""
    for num_top, top in ((2, [188, 7]), (1, [188]), (0, [])):
        reader = GenerateReader(asking(logprobs=num_top), "url")
        chunk = reader.push(REAL_EVENT)
        assert chunk is not None
        assert chunk.logprobs is not None
        assert [token_id for token_id, _ in chunk.logprobs[0].top] == top
        assert (chunk.token_ids, chunk.logprobs[0].logprob) == ((7,), -6.238324165344238)
    reader = GenerateReader(asking(), "url")
    last = reader.push(REAL_LAST)
    assert last is not None
    assert reader.push(REAL_USAGE) is None
    whole = reader.finish(last)
    assert (whole.finish_reason, whole.num_cached_tokens, whole.logprobs) == ("length", 3, None)
    refusal = failure_of(400, REAL_ERROR, "url", request=asking())
    assert isinstance(refusal, RequestError)
    assert refusal.param == "temperature"


async def test_real_counters_of_vllm() -> None:
    names = ("vllm:request_success_total", "vllm:iteration_tokens_total_count", "absent")
    samples = read_samples(REAL_METRICS, "url", names, labels=("finished_reason",))
    assert samples["vllm:request_success_total"] == 7
    assert set(samples) - {
        f"{names[0]}{{finished_reason={why}}}" for why in ("stop", "length", "abort")
    } == set(names[:2]), "what nobody asked for is not parsed: streams wait meanwhile"
    assert read_samples(REAL_METRICS + b"other{ 1\n", "url", names, labels=("finished_reason",)) == samples
    assert marker_from(samples, ("vllm:iteration_tokens_total_count", "absent")) == (1043.0,)
    assert marker_from(samples, ("absent",)) is None
    with pytest.raises(UpstreamFailed, match="is not Prometheus text"):
        read_samples(b"<html>", "url", names)
    async with upstream("vllm") as (engine, server):
        server._metric_lines = lambda: REAL_METRICS.decode().splitlines()  # type: ignore[method-assign]
        stats = await engine.stats()
        assert (stats.num_steps, stats.num_running, stats.num_finished, stats.num_cancelled) == (
            1043,
            2,
            5,
            2,
        )


# --- SGLang ---------------------------------------------------------------------------------------------


async def test_what_sglang_is_sent() -> None:
    params = fields_of(FULL) | {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    params |= {"logit_bias": (), "temperature": 1.0}
    async with upstream("sglang") as (engine, server):
        await answer(engine, asking(**params))
        await answer(engine, asking("b", top_k=0, logit_bias=((5, 1.5),), presence_penalty=0.5))
        await answer(engine, asking("i", (*PROMPT, 511), images=(ImageInput(b"RIFF"),)))
        full, other, image = server.bodies
    assert full == {
        "rid": "r",
        "input_ids": list(PROMPT),
        "sampling_params": {
            "max_new_tokens": 9,
            "temperature": 1.0,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "sampling_seed": 2**62,
            "stop": ["x"],
            "stop_token_ids": [3, 4],
        },
        "stream": True,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 3,
    }
    assert other["sampling_params"]["top_k"] == -1
    assert other["sampling_params"]["logit_bias"] == {"5": 1.5}
    assert "return_logprob" not in other
    assert image["image_data"] == ["data:image/webp;base64,UklGRg=="]


SCHEMA = json.dumps({"type": "object", "x-guidance": {"lenient": True}})

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"repetition_penalty": 1.1}, "repetition_penalty", "looks at the answer only"),
    ({"enable_deterministic_inference": False}, {"seed": 1}, "seed", "does not sample repeatably"),
    ({}, {"seed": 2**63}, "seed", "must be a 64-bit integer"),
    (
        {"grammar_backend": "xgrammar"},
        {"constraint": Constraint("grammar", "g", "tools")},
        "tools",
        "xgrammar",
    ),
    ({}, {"logprobs": 1, "temperature": 0.7}, "logprobs", "after temperature"),
    ({}, {"logprobs": 1, "logit_bias": ((5, 1.0),)}, "logprobs", "after logit_bias"),
    ({}, {"logprobs": 1, "presence_penalty": 1.0}, "logprobs", "after presence_penalty"),
    ({}, {"logprobs": 1, "constraint": Constraint("json_object")}, "logprobs", "after response_format"),
]


@pytest.mark.parametrize(("info", "params", "param", "sentence"), REFUSED)
async def test_what_sglang_would_do_otherwise_than_asked_is_refused(
    info: dict[str, Any], params: dict[str, Any], param: str, sentence: str
) -> None:
    async with server_of("sglang") as server:
        server.server_info |= info  # type: ignore[attr-defined]
        server.scales_logprobs = True  # type: ignore[attr-defined]
        async with SglangUpstream(server.url, VOCABULARY, HASTY) as engine:
            with pytest.raises(RequestError, match=sentence) as error:
                await answer(engine, asking(**params))
            assert error.value.param == param
            assert server.requests == []


async def test_what_sglang_can_be_started_for_is_used() -> None:
    """Seeds, grammars, schemas with options, log probabilities at any temperature; a seed means nothing at 0."""
    async with server_of("sglang") as server:
        async with SglangUpstream(server.url, VOCABULARY, HASTY) as engine:
            grammar = Constraint("grammar", "start: /a/")
            for params in ({"seed": 5}, {"constraint": grammar}, {"logprobs": 1, "temperature": 0.7}):
                await answer(engine, asking(**params))
            await answer(engine, asking(constraint=Constraint("json_schema", SCHEMA)))
        sent = [body["sampling_params"] for body in server.bodies]
        assert (sent[0]["sampling_seed"], sent[1]["ebnf"], sent[3]["json_schema"]) == (
            5,
            "start: /a/",
            SCHEMA,
        )
        server.server_info |= {"grammar_backend": "xgrammar", "enable_deterministic_inference": False}  # type: ignore[attr-defined]
        server.bodies.clear()
        async with SglangUpstream(server.url, VOCABULARY, HASTY) as engine:
            await answer(engine, asking(constraint=Constraint("json_schema", SCHEMA)))
            await answer(engine, asking(seed=5, temperature=0.0))
        sent = [body["sampling_params"] for body in server.bodies]
        assert sent[0]["json_schema"] == '{"type": "object"}'
        assert "sampling_seed" not in sent[1]


@pytest.mark.parametrize("is_incremental", [True, False])
@pytest.mark.parametrize("logprobs", [None, 2])
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=12), text=st.text(max_size=5))
def test_no_token_is_lost_or_doubled_however_sglang_counts(
    is_incremental: bool, logprobs: int | None, sizes: list[int], text: str
) -> None:
    """Also with ids of different lengths, empty steps, and text that looks like the fields around it."""
    made = [(number * 37) % 500 for number in range(sum(sizes))]
    reader = GenerateEvents(asking(logprobs=logprobs), "url", VOCABULARY)
    found: list[int] = []
    num_made = 0
    for turn, size in enumerate(sizes):
        fresh = made[num_made : num_made + size]
        num_made += size
        shown = fresh if is_incremental else made[:num_made]
        meta: dict[str, Any] = {
            "finish_reason": {"type": "stop", "matched": 1} if turn == len(sizes) - 1 else None,
            "completion_tokens": num_made,
            "prompt_tokens": 4,
        }
        if logprobs is not None:
            meta["output_token_logprobs"] = [[-float(i), i, None] for i in shown]
            meta["output_top_logprobs"] = [[[-float(i), i, None], [-9.0, 3, None]] for i in shown]
        said = f'{text}","output_ids":[7],"meta_info":{{'
        event = {"text": said, "output_ids": shown, "meta_info": meta}
        chunk = reader.push(json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode())
        if chunk is not None:
            found += chunk.token_ids
            assert [entry.logprob for entry in chunk.logprobs or ()] == (
                [] if logprobs is None else [-float(token_id) for token_id in chunk.token_ids]
            )
    assert found == made


def test_an_event_that_does_not_add_up_is_an_error() -> None:
    reader = GenerateEvents(asking(), "url", VOCABULARY)
    assert reader.push(b'{"output_ids":[5],"meta_info":{"completion_tokens":1}}') is not None
    with pytest.raises(UpstreamFailed, match="lost tokens: 3 were made, 1 and 1 have come"):
        reader.push(b'{"output_ids":[7],"meta_info":{"completion_tokens":3}}')


async def test_counts_of_prompts_caches_and_drafts_are_passed_on() -> None:
    reader = GenerateEvents(asking(), "url", VOCABULARY)
    chunk = reader.push(
        b'{"output_ids":[5],"meta_info":{"completion_tokens":1,"prompt_tokens":90,"cached_tokens":64,'
        b'"spec_num_proposed_drafts":10,"spec_num_correct_drafts":7,"finish_reason":{"type":"stop","matched":5}}}'
    )
    assert chunk is not None
    counts = (chunk.num_prompt_tokens, chunk.num_cached_tokens, chunk.num_drafted, chunk.num_accepted)
    assert counts == (90, 64, 10, 7)
    drafts = (
        b'{"choices":[],"usage":{"prompt_tokens":5},'
        b'"metrics":{"speculative_decoding":{"num_draft_tokens":10,"num_accepted_draft_tokens":7}}}'
    )
    vllm = GenerateReader(asking(), "url")
    last = vllm.push(REAL_LAST)
    assert last is not None
    vllm.push(drafts)
    assert (vllm.finish(last).num_drafted, vllm.finish(last).num_accepted) == (10, 7)
    loop = vllm.push(b'{"choices":[{"token_ids":[5],"finish_reason":"repetition","stop_reason":"x"}]}')
    assert loop is not None
    assert (loop.finish_reason, loop.stop_reason) == ("stop", "repetition")


def test_a_list_of_addresses() -> None:
    assert parse_urls("http://a:1, http://b:2") == ("http://a:1", "http://b:2")
    for text in ("", "http://a,", ",http://a"):
        with pytest.raises(ConfigError, match="holds an empty address"):
            parse_urls(text)


def test_the_samples_of_this_file_are_in_the_checkpoint() -> None:
    """Guards the tests above against another tiny tokenizer."""
    assert ids(EOS) == (1,)
    assert VOCABULARY.thinking == (507, 508)
    assert (MODEL, HELLO, CHAT) != ("", [], {})
    assert THINKING[-1] == 507
