"""Whatever a model writes, and however it is cut: the same answer in all three chat protocols.

Named cases say what becomes of each kind of markup, well-formed or not. Hypothesis then mixes fragments of them at
random, cuts the bytes anywhere, within characters and tokens too, and holds the outcome against the uncut one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from protocol_parsers import (
    PROTOCOLS,
    Outcome,
    chunks_of,
    cut,
    outcome,
    prepared,
    protocol,
    request_body,
    streamed,
    whole,
)

from deskfleet.endpoint import TokenChunk
from deskfleet.gateway.protocols.arguments import MARKER
from deskfleet.gateway.protocols.calls import CallReader, Mode
from deskfleet.gateway.upstream.retokenise import Retokeniser
from deskfleet.gateway.upstream.vocabulary import Vocabulary
from tests.gateway.chat_scripts import CHECKPOINT

NAMES = tuple(PROTOCOLS)


def parameter(name: str, value: str, kind: str | None = "true") -> str:
    marked = "" if kind is None else f' string="{kind}"'
    return f'<｜DSML｜ parameter name="{name}"{marked}>{value}</｜DSML｜ parameter>\n'


def invoke(*parameters: str, name: str = "weather") -> str:
    return f'<｜DSML｜ invoke name="{name}">\n{"".join(parameters)}</｜DSML｜ invoke>\n'


def block(*invokes: str) -> str:
    return f"\n\n<｜DSML｜ calls>\n{''.join(invokes)}</｜DSML｜ calls>"


def as_v4(text: str) -> str:
    return text.replace("｜DSML｜ calls", "｜DSML｜tool_calls").replace("｜DSML｜ ", "｜DSML｜")


OSLO = invoke(parameter("city", "Oslo"))
CALL = ("weather", {"city": "Oslo"})
SUM = invoke(parameter("a", "1", "false"), parameter("b", "[1, 2]", "false"), name="add")

Calls = list[tuple[str, dict[str, object]]]

CASES: dict[str, tuple[str, str, Calls]] = {
    # what the model was trained to write
    "text": ("if a 2 < b and c <d> </d>, 2 <", "if a 2 < b and c <d> </d>, 2 <", []),
    "one call": ("ok" + block(OSLO), "ok", [CALL]),
    "two calls": (block(OSLO, SUM), "", [CALL, ("add", {"a": 1, "b": [1, 2]})]),
    "no parameters": (block('<｜DSML｜ invoke name="now">\n\n</｜DSML｜ invoke>\n'), "", [("now", {})]),
    "shell": (block(invoke(parameter("city", "ls a 2>&1 "))), "", [("weather", {"city": "ls a 2>&1 "})]),
    "an empty string": (block(invoke(parameter("city", ""))), "", [("weather", {"city": ""})]),
    "newlines": (block(invoke(parameter("city", "\n a\n\tb\n"))), "", [("weather", {"city": "\n a\n\tb\n"})]),
    "unicode": (
        block(invoke(parameter("city", "日本é🙂\u2028"))),
        "",
        [("weather", {"city": "日本é🙂\u2028"})],
    ),
    "quotes": (block(invoke(parameter("city", 'a"b\\n\\'))), "", [("weather", {"city": 'a"b\\n\\'})]),
    # closers and tags inside values
    "html in a value": (
        block(invoke(parameter("city", "<b></parameter></invoke> 1 < 2 </"))),
        "",
        [("weather", {"city": "<b></parameter></invoke> 1 < 2 </"})],
    ),
    "a tag in a value": (
        block(invoke(parameter("city", '<｜DSML｜ parameter name="x" string="true">y'))),
        "",
        [("weather", {"city": '<｜DSML｜ parameter name="x" string="true">y'})],
    ),
    "half a tag in a value": (
        block(invoke(parameter("city", "a<｜DSM b</｜DSML c"))),
        "",
        [("weather", {"city": "a<｜DSM b</｜DSML c"})],
    ),
    # malformed, and clear all the same
    "no wrapper": ("ok" + OSLO, "ok", [CALL]),
    "two blocks": (block(OSLO) + block(SUM), "", [CALL, ("add", {"a": 1, "b": [1, 2]})]),
    "text after calls": (block(OSLO) + "\nThat is all.", "", [CALL]),
    "unknown tool": (block(invoke(parameter("x", "1"), name="nobody")), "", [("nobody", {"x": "1"})]),
    "no end of block": (block(OSLO).removesuffix("</｜DSML｜ calls>"), "", [CALL]),
    "a call ends the value": (
        block(
            '<｜DSML｜ invoke name="weather"><｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ invoke>'
        ),
        "",
        [CALL],
    ),
    "a block ends the call": (
        '<｜DSML｜ calls><｜DSML｜ invoke name="weather">' + parameter("city", "Oslo") + "</｜DSML｜ calls>",
        "",
        [CALL],
    ),
    "a call ends the call": (
        block('<｜DSML｜ invoke name="weather">' + parameter("city", "Oslo") + SUM),
        "",
        [CALL, ("add", {"a": 1, "b": [1, 2]})],
    ),
    "self-closing": (block('<｜DSML｜ invoke name="now"/>'), "", [("now", {})]),
    "no bracket": (block('<｜DSML｜ invoke name="now"\n</｜DSML｜ invoke>'), "", [("now", {})]),
    "broken JSON": (block(invoke(parameter("a", '{"x": ', "false"))), "", [("weather", {"a": '{"x": '})]),
    "not a number": (block(invoke(parameter("a", "NaN", "false"))), "", [("weather", {"a": "NaN"})]),
    "python": (
        block(invoke(parameter("a", "{'x': True}", "false"))),
        "",
        [("weather", {"a": "{'x': True}"})],
    ),
    "beyond numbers": (block(invoke(parameter("a", "1e999", "false"))), "", [("weather", {"a": "1e999"})]),
    "a name beyond": (block(invoke(parameter("a\U000e0001", "1"))), "", [("weather", {"a\U000e0001": "1"})]),
    "a newline in JSON": (
        block(invoke(parameter("a", '{"x": "1\n2"}', "false"))),
        "",
        [("weather", {"a": {"x": "1\n2"}})],
    ),
    "half a pair": (
        block(invoke(parameter("a", r'"\ud83d"', "false"))),
        "",
        [("weather", {"a": r'"\ud83d"'})],
    ),
    "deep JSON": (block(invoke(parameter("a", "[" * 300, "false"))), "", [("weather", {"a": "[" * 300})]),
    "unmarked, of a schema": (
        block(invoke(parameter("city", "12", None))),
        "",
        [("weather", {"city": "12"})],
    ),
    "unmarked JSON": (block(invoke(parameter("x", "[1]", None))), "", [("weather", {"x": [1]})]),
    "unmarked text": (block(invoke(parameter("x", "so", None))), "", [("weather", {"x": "so"})]),
    "twice": (
        block(invoke(parameter("city", "Oslo"), parameter("city", "Rome"))),
        "",
        [CALL],
    ),
    "odd names": (
        block(invoke(parameter("a b", "1"), parameter("c\\d", "2"), parameter("é>", "3"))),
        "",
        [("weather", {"a b": "1", "c\\d": "2", "é>": "3"})],
    ),
    "JSON for parameters": (
        block(invoke('{"city": "Oslo", "n": [1, {"x": null}]}')),
        "",
        [("weather", {"city": "Oslo", "n": [1, {"x": None}]})],
    ),
    "words for parameters": (
        block(invoke('{"city": Oslo}')),
        "",
        [("weather", {"arguments": '{"city": Oslo}'})],
    ),
    "ASCII bars": (("ok" + block(OSLO)).replace("｜", "|"), "ok", [CALL]),
    "double bars": (("ok" + block(OSLO)).replace("｜", "｜｜"), "ok", [CALL]),
    # malformed, and no call
    "empty block": ("So." + block() + "Then two hundred words.", "So.\n\nThen two hundred words.", []),
    "empty block at the end": ("So." + block(), "So.", []),
    "text in a block": ("So." + block("never mind "), "So.\n\nnever mind ", []),
    "lone closers": ("a</｜DSML｜ calls>b</｜DSML｜ parameter>c</｜DSML｜ invoke>d", "abcd", []),
    "a lone parameter": ("a " + parameter("city", "Oslo") + "b", "a Oslo\nb", []),
    "a call without a name": (
        block("<｜DSML｜ invoke>\n" + parameter("city", "Oslo")) + "!",
        "\n\nOslo\n!",
        [],
    ),
    "an unknown tag": ('a <｜DSML｜ think hard="1">b', "a b", []),
    "a marker": ("a <｜DSML｜ and more words", "a  more words", []),
    "broken off": ("Hm.\n\n<｜DSML｜ calls>\n<｜DSML｜ nonsense", "Hm.", []),
    "stray thoughts": ("a</think>b<think>c", "abc", []),
}


def expected(case: str, thought: str = "") -> Outcome:
    _, text, calls = CASES[case]
    told = tuple((name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls)
    return Outcome(thought, text.strip("\n"), told, "calls" if calls else "stop")


def parsed(result: Outcome) -> Outcome:
    """With arguments spelled alike. Leading and final newlines are the publisher's parser's affair."""
    calls = tuple((name, json.dumps(json.loads(text), ensure_ascii=False)) for name, text in result.calls)
    return Outcome(result.thought, result.text.strip("\n"), calls, result.ending)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_what_becomes_of_it(case: str, name: str) -> None:
    for text in (CASES[case][0], as_v4(CASES[case][0])):
        if text != CASES[case][0] and "tag in a value" in case:
            continue  # the other dialect would be another value
        assert parsed(outcome(name, [text.encode()])) == expected(case)
        data = ("Let me think.</think>" + text).encode()
        if "stray" not in case:
            assert parsed(outcome(name, [data], thinking=True)) == expected(case, "Let me think.")
        request = prepared(name, True, False)
        assert parsed(
            whole(name, protocol(name).parser(request), chunks_of([text.encode()], "stop"))
        ) == expected(case)


@pytest.mark.parametrize("case", CASES)
def test_every_cut_says_the_same(case: str) -> None:
    """Every single cut and every byte on its own, where the reading is done; the protocols are behind it."""
    for text in (CASES[case][0], as_v4(CASES[case][0])):
        for starts in (Mode.ANSWER, Mode.THOUGHT):
            for tools in (None, {"weather": {"properties": {"city": {"type": "string"}}}}):
                data = text.encode()
                uncut = read([data], starts, tools)
                for place in range(1, len(data)):
                    assert read(cut(data, [place]), starts, tools) == uncut, place
                assert read(cut(data, range(len(data))), starts, tools) == uncut


def read(pieces: Sequence[bytes], starts: Mode, tools: dict[str, dict[str, object]] | None) -> object:
    reader = CallReader(tools, starts)
    told = [piece for data in pieces for piece in reader.feed(data)]
    rest, is_whole = reader.finish()
    told += rest
    data = b"".join(pieces)
    assert sum(piece.num_bytes for piece in told) == len(data)
    out, at = b"", 0
    for num_bytes, text in told:
        out += data[at : at + num_bytes] if text is None else text.encode()
        at += num_bytes
    return out, is_whole, reader.num_calls


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_of_a_whole_answer_in_every_protocol(name: str) -> None:
    data = f"Why € 🙂.</think>Ok.{block(invoke(parameter('city', 'a<b>é')), SUM)}".encode()
    uncut = outcome(name, [data], thinking=True)
    assert uncut.thought, uncut.text == ("Why € 🙂.", "Ok.")
    assert len(uncut.calls) == 2
    for place in range(1, len(data)):
        assert outcome(name, cut(data, [place]), thinking=True) == uncut, place
    assert outcome(name, cut(data, range(len(data))), thinking=True) == uncut


@pytest.mark.parametrize("name", NAMES)
def test_truncation_is_length_and_never_a_finished_call(name: str) -> None:
    data = f"Ok.{block(invoke(parameter('city', 'Oslo é'), parameter('n', '[1, 2]', 'false')))}".encode()
    call_begins = data.index(b'name="weather">') + len(b'name="weather">')
    call_ends = data.index("</｜DSML｜ invoke>".encode()) + len("</｜DSML｜ invoke>".encode())
    for end in range(1, len(data)):
        for reason in ("length", "stop"):
            result = outcome(name, [data[:end]], reason=reason)  # type: ignore[arg-type]
            in_call = call_begins <= end < call_ends
            if reason == "length" or in_call:
                assert result.ending == "length", (end, reason)
            if in_call:
                for _, arguments in result.calls:
                    with pytest.raises(json.JSONDecodeError):
                        json.loads(arguments)
            assert "DSML" not in result.text
            assert "｜" not in result.text


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_call_is_no_call_in_a_whole_answer(name: str) -> None:
    data = (block(OSLO) + '<｜DSML｜ invoke name="add">\n' + parameter("a", "1", "false")).encode()
    for end in (len(data), len(data) - 60):
        answer = whole(
            name, protocol(name).parser(prepared(name, True, False)), chunks_of([data[:end]], "length")
        )
        assert answer.ending == "length"
        readable = []
        for called, arguments in answer.calls:
            try:
                readable.append((called, json.loads(arguments)))
            except json.JSONDecodeError:
                assert called == "add"
        assert readable == [CALL]


# --- without tools, in thoughts, quoted -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_without_tools_calls_are_dropped_and_their_markup_is_never_shown(name: str) -> None:
    for text, shown in (
        ("Hm." + block(OSLO), "Hm."),
        ("Hm." + block(OSLO) + "So be it.", "Hm.\n\nSo be it."),
        ("Hm." + OSLO + "So be it.", "Hm.So be it."),
        ("Hm." + block(OSLO)[:60], "Hm."),
    ):
        result = outcome(name, [text.encode()], tools=False)
        assert (result.text, result.calls, result.ending) == (shown, (), "stop")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("data", "thought", "text", "calls"),
    [
        ("Hm." + block(OSLO), "Hm.", "", [CALL]),
        ("Hm." + block(OSLO) + "\n Or not.</think>No.", "Hm. Oslo Or not.", "No.", []),
        ("As <｜DSML｜ calls> does.</think>Yes.", "As does.", "Yes.", []),
        ("a</｜DSML｜ calls>b</think>c" + block(OSLO), "ab", "c", [CALL]),
        ("a" + block(OSLO) + "</think>c" + block(SUM), "a Oslo", "c", [("add", {"a": 1, "b": [1, 2]})]),
    ],
)
def test_calls_within_a_thought(name: str, data: str, thought: str, text: str, calls: Calls) -> None:
    told = tuple((called, json.dumps(arguments)) for called, arguments in calls)
    uncut = outcome(name, [data.encode()], thinking=True)
    result = parsed(uncut)
    assert (" ".join(result.thought.split()), result.text, result.calls) == (thought, text, told)
    assert result.ending == ("calls" if calls else "stop")
    for place in range(1, len(data.encode()), 3):
        assert outcome(name, cut(data.encode(), [place]), thinking=True) == uncut


@pytest.mark.parametrize("name", NAMES)
def test_markup_that_a_request_shows_the_model_may_be_quoted(name: str) -> None:
    """The marker's token makes a call, its text does not, once the prompt holds such text."""
    body = request_body(name, tools=True, thinking=True)
    quoting = f"What does {block(OSLO)} or </think> mean?"
    key = "input" if name == "responses" else "messages"
    body[key] = quoting if name == "responses" else [{"role": "user", "content": quoting}]
    request = protocol(name).prepare(json.dumps(body).encode(), "id")
    # Single bytes: nothing of it is a control token.
    quote = [byte.to_bytes() for byte in f"The end is </think>, a call{block(OSLO)}".encode()]
    pieces = [*quote, b"</think>", *quote, block(SUM).encode()]
    result = streamed(name, protocol(name).parser(request), chunks_of(pieces, "stop"))
    said = f"The end is </think>, a call{block(OSLO)}"
    assert (result.thought, result.text) == (said, said)
    assert [name for name, _ in result.calls] == ["add"]


def test_an_engine_that_sends_text_may_cut_it_anywhere() -> None:
    """The cut goes through the marker and through `</think>`, as in text from another server."""
    vocabulary = Vocabulary.from_checkpoint(CHECKPOINT)
    text = f"Why.</think>Ok. {as_v4(block(invoke(parameter('city', 'ls a 2>&1 ')), SUM))}"
    uncut = outcome("chat", [text.encode()], thinking=True)
    for place in range(1, len(text)):
        retokeniser = Retokeniser(vocabulary)
        ids = [*retokeniser.push(text[:place]), *retokeniser.push(text[place:]), *retokeniser.finish()]
        assert vocabulary.decode(ids) == text
        parser = protocol("chat").parser(prepared("chat", True, True))
        assert streamed("chat", parser, [TokenChunk(tuple(ids), None, 3, "stop")]) == uncut


# --- at random --------------------------------------------------------------------------------------------------------

FRAGMENTS = st.sampled_from(
    [
        "text ",
        "2 < 3",
        "\n\n",
        "é€🙂",
        "<",
        "</",
        "<｜",
        "<｜DS",
        "ML｜ calls>",
        "<|",
        "</parameter>",
        "</thin",
        "k>",
        "<｜DSML｜ calls>",
        "<｜DSML｜tool_calls>",
        "</｜DSML｜ calls>",
        "</｜DSML｜tool_calls>",
        '<｜DSML｜ invoke name="weather">',
        '<｜DSML｜invoke name="add">\n',
        "</｜DSML｜ invoke>",
        "</｜DSML｜invoke>\n",
        '<｜DSML｜ parameter name="city" string="true">',
        '<｜DSML｜parameter name="n" string="false">',
        '<｜DSML｜ parameter name="x y">',
        "</｜DSML｜ parameter>",
        "</｜DSML｜parameter>\n",
        '<｜DSML｜ invoke name="now"/>',
        "<|DSML|invoke name='weather'>",
        "<｜DSML｜ nonsense",
        '{"a": [1, "é"]}',
        '{"a": ',
        "[1, 2]",
        "</think>",
        OSLO,
        block(OSLO),
        as_v4(block(SUM)),
        block(),
    ]
)

RANDOM = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@settings(RANDOM, max_examples=3000)
@given(st.lists(FRAGMENTS, max_size=12), st.data(), st.booleans(), st.booleans())
def test_any_fragments_cut_anywhere(
    fragments: list[str], data: st.DataObject, tools: bool, thought: bool
) -> None:
    written = "".join(fragments).encode()
    places = data.draw(st.lists(st.integers(0, len(written)), max_size=8))
    offered: dict[str, dict[str, object]] | None = {"weather": {}} if tools else None
    starts = Mode.THOUGHT if thought else Mode.ANSWER
    assert read(cut(written, places), starts, offered) == read([written], starts, offered)


@settings(RANDOM, max_examples=300)
@given(
    st.lists(FRAGMENTS, max_size=10),
    st.data(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
)
@example(['<｜DSML｜ invoke name="now"/>', "\n\n"], None, True, True, "stop")
def test_any_fragments_in_every_protocol(
    fragments: list[str], data: st.DataObject | None, tools: bool, thought: bool, reason: str
) -> None:
    written = "".join(fragments).encode()
    places = [] if data is None else data.draw(st.lists(st.integers(0, len(written)), max_size=8))
    results = []
    for name in NAMES:
        result = outcome(name, cut(written, places), tools=tools, thinking=thought, reason=reason)  # type: ignore[arg-type]
        uncut = outcome(name, [written], tools=tools, thinking=thought, reason=reason)  # type: ignore[arg-type]
        assert result == uncut
        results.append(result)
    assert results[0] == results[1] == results[2], "the protocols agree"
    result = results[0]
    for shown in (result.thought, result.text, *(arguments for _, arguments in result.calls)):
        assert MARKER not in shown
        assert MARKER.strip("\ufdd0") not in shown
    if reason == "length":
        assert result.ending == "length"
    if result.ending == "calls":
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in result.calls)
    if result.ending == "stop":
        assert not result.calls
    if not tools:
        assert not result.calls


WORDS = st.text("abcdefgh", min_size=1, max_size=4)
SAFE_TAGS = st.sampled_from(
    [
        "</｜DSML｜ calls>",
        "</｜DSML｜invoke>",
        "</｜DSML｜ parameter>",
        block(),
        as_v4(block()),
        "<｜DSML｜ calls>",
        "<｜DSML｜ other>",
        '<｜DSML｜ parameter name="x" string="true">',
    ]
)


@settings(RANDOM, max_examples=500)
@given(st.lists(st.one_of(WORDS, SAFE_TAGS), max_size=14), st.booleans(), st.booleans())
def test_where_there_is_no_call_no_word_is_lost(parts: list[str], tools: bool, thought: bool) -> None:
    result = outcome("chat", ["".join(parts).encode()], tools=tools, thinking=thought)
    words = "".join(part for part in parts if "｜" not in part)
    assert "".join((result.thought + result.text).split()) == words
    assert (result.calls, result.ending) == ((), "stop")
