"""`deskfleet plan` as a user sees it: one screen of 80 columns, JSON that reproduces, and mistakes that are named."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cli_process import CHECKPOINT, Done, deskfleet

from deskfleet.testing.standin import write_published_standin

GIB = 1 << 30
COLOUR = re.compile(r"\x1b\[[0-9;]*(?:3[0-9]|9[0-7])[0-9;]*m")

Call = Callable[..., Done]


def assert_tidy(text: str) -> list[str]:
    """Lines that fit 80 columns, end where their text ends, and hold nothing that steers a terminal."""
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert [line for line in lines if line != line.rstrip()] == []
    assert "\x1b" not in text
    return lines


def test_what_does_not_fit_gets_the_reason_and_three_ways_out_on_one_screen() -> None:
    done = deskfleet("plan", "--nodes", "2xspark")
    assert (done.code, done.err) == (1, "")
    lines = assert_tidy(done.out)
    assert 24 <= len(lines) <= 40
    assert lines[0].startswith("v4.1-flash on 2xspark, ")
    assert lines[0].endswith(": does not fit")
    # The reason comes next, and its sum is right.
    short = re.fullmatch(r"  ([\d.]+) GiB too little on rank 0 \(spark-0\), at rest:", lines[1])
    terms = re.fullmatch(r"  ([\d.]+) GiB held all the time \+ a floor of ([\d.]+) exceed ([\d.]+)", lines[2])
    assert short is not None
    assert terms is not None
    held, floor, there_is = map(float, terms.groups())
    assert held + floor - there_is == pytest.approx(float(short[1]), abs=0.02)
    assert sum(line.startswith("rank ") for line in lines) == 2
    ways = lines[lines.index("what would fit:") + 1 :]
    assert [line[:5] for line in ways if not line.startswith("     ")] == ["  1. ", "  2. ", "  3. "]
    for number, line in enumerate(ways):
        if not line.startswith("     "):
            assert re.search(r"   --(nodes|model) \S+$", line), line
            assert ways[number + 1].startswith("     "), f"no cost: {line}"


EXL3 = ("--model", "v4.1-flash-exl3-2.9", "--nodes", "2xspark")


@pytest.mark.parametrize(
    "asked",
    [
        ("--nodes", "2xspark"),
        ("--nodes", "2xspark", "--engram", "host", "--context", "32768"),
        ("--nodes", "2xspark", "--tp", "2", "--kv-format", "fp4", "--margin", "2GiB"),
        ("--nodes", "8xspark", "--tp", "8", "--ep", "1", "--context", "131072"),
        ("--nodes", "4xspark", "--engine", "sglang", "--chunk", "4096", "--context", "1048576"),
        ("--nodes", "4xspark", "--engine", "vllm", "--fraction", "0.87", "--available", "102GiB"),
        (*EXL3, "--context", "1048576"),
    ],
    ids=" ".join,
)
def test_every_way_out_fits_when_it_is_taken(call: Call, asked: tuple[str, ...]) -> None:
    refused = call("plan", *asked, "--json")
    assert (refused.code, refused.object["fits"]) == (1, False)
    changes = refused.object["changes"]
    assert len({change["flags"] for change in changes}) == len(changes) == 3
    for change in changes:
        taken = call("plan", *changed(asked, change["flags"]), "--json")
        assert (taken.code, taken.object["margin_bytes"]) == (0, change["margin_bytes"]), change["title"]


def changed(asked: tuple[str, ...], flags: str) -> list[str]:
    """The command with the flags of a way out in place of its own, and without those that are to be left out."""
    given, _, dropped = flags.partition("without ")
    parts = [
        part.split() for part in re.findall(r"--\S+(?: [^-]\S*)?", f"{' '.join(asked)} {given.rstrip(', ')}")
    ]
    last = {part[0]: part for part in parts if part[0] not in dropped.split()}
    return [word for part in last.values() for word in part]


TINY = ("--model", "tiny", "--nodes", "local")

SCREENS: Sequence[tuple[tuple[str, ...], int, str]] = [
    ((), 0, "GiB to spare above the floor on rank 0"),
    (("--nodes", "8xspark"), 0, "ranks 1-7 "),
    ((*EXL3, "--context", "1048576"), 1, "--context 6"),
    ((*EXL3, "--why-not", "1048576"), 1, "KV pool: 1,048,576 tokens x 4,080.00 B"),
    (("--engine", "sglang", "--chunk", "4096", "--context", "1048576"), 1, "GiB held all the time + "),
    (
        ("--engine", "vllm", "--fraction", "0.87", "--available", "102GiB"),
        1,
        "0.87 x 121.69 GiB = 105.87 GiB",
    ),
    (("--nodes", "8xspark", "--tp", "8", "--ep", "1"), 1, "cuts experts 2304 wide into 288"),
    (("--profile", "max-concurrency", "--nodes", "3xspark"), 0, "context 131,072"),
    ((*TINY, "--tp", "3"), 0, "tp 3, ep 3"),
    ((str(CHECKPOINT), "--nodes", "local"), 0, "model on local"),
]


@pytest.mark.parametrize(("arguments", "code", "said"), SCREENS, ids=[" ".join(each[0]) for each in SCREENS])
def test_a_screen_of_80_columns(call: Call, arguments: tuple[str, ...], code: int, said: str) -> None:
    done = call("plan", *arguments)
    assert (done.code, done.err) == (code, "")
    lines = assert_tidy(done.out)
    assert 24 <= len(lines) <= 43
    assert said in done.out
    assert lines[0].endswith(": fits" if code == 0 else ": does not fit")


def test_the_lines_of_why_not_add_up_to_what_the_verdict_says(call: Call) -> None:
    done = call("plan", *EXL3, "--why-not", "1048576")
    sizes = [
        float(line.split(" GiB  ")[0]) for line in done.out.splitlines() if re.match(r" +[\d.]+ GiB  ", line)
    ]
    whole = sizes.pop()
    assert sum(sizes) == pytest.approx(whole, abs=0.06)
    plan = call("plan", *EXL3, "--context", "1048576", "--json").object
    rank = plan["ranks"][plan["tightest_rank"]]
    assert whole == pytest.approx((rank["peak_bytes"] + rank["floor"]["peak_bytes"]) / GIB, abs=0.01)


def test_explain_has_every_line_every_choice_and_the_losers(call: Call) -> None:
    asked = ("plan", "--nodes", "3xspark", "--engine", "vllm")
    plan = call(*asked, "--json").object
    text = call(*asked, "--explain").out
    assert_tidy(text)
    words = " ".join(text.split())
    for line in plan["ranks"][plan["tightest_rank"]]["lines"]:
        assert f" {line['name']}" in words
        assert " ".join(line["formula"].split()) in words
    for choice in plan["choices"]:
        assert f"chosen: {choice['name']} {choice['value']}: " in words
    for loser in plan["losers"]:
        assert loser["verdict"] in words


def test_colours_on_a_terminal_unless_they_are_not_wanted(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = call("plan", *TINY).out
    assert COLOUR.search(coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = call("plan", *TINY).out
    assert not COLOUR.search(plain)
    assert "fits" in plain


def test_json_reproduces_byte_for_byte_in_another_process(tmp_path: Path) -> None:
    kept = tmp_path / "plan.json"
    first = deskfleet("plan", *TINY, "--tp", "2", "--json")
    assert (first.code, first.object["fits"], first.err) == (0, True, "")
    kept.write_text(first.out, encoding="utf-8")
    again = deskfleet("plan", "--from", kept, "--json")
    assert (again.code, again.out) == (0, first.out)


def test_the_full_checkpoint_is_planned_from_headers_in_little_time(tmp_path: Path) -> None:
    write_published_standin(tmp_path / "full")
    times, done = [], Done(-1, "", "")
    for _ in range(2):
        before = os.times()
        done = deskfleet("plan", tmp_path / "full", "--json")
        after = os.times()
        times.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
    # Two seconds on a machine at rest; on a busy one the same work counts for up to twice as many.
    assert min(times) < 4.0, f"CPU seconds of deskfleet plan: {times}"
    # The stand-in is the published checkpoint, so the built-in one must give the same plan.
    built_in = deskfleet("plan", "--json")
    assert done.object["ranks"] == built_in.object["ranks"]
    assert done.object["layout"] == built_in.object["layout"]


FACTS = {
    "engine": "vllm",
    "engine_version": "0.33.0",
    "node_kind": "spark",
    "model": "v4.1-flash",
    "tp_size": 4,
    "rank": 0,
    "lines": {"graph pools": 3 * GIB},
    "source": "the boot of Monday",
}


def facts(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(FACTS | changes), encoding="utf-8")
    return path


def test_a_boot_corrects_the_next_plan(call: Call, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    asked = ("plan", "--engine", "vllm", "--tp", "4", "--context", "131072")
    before = call(*asked, "--json").object
    planned = {line["name"]: line["num_bytes"] for line in before["ranks"][0]["lines"]}["graph pools"]
    done = call(*asked, "--calibrate", facts(tmp_path), "--write-calibration", kept)
    assert (done.code, done.err) == (0, f"wrote {kept}\n")
    assert_tidy(done.out)
    assert re.search(r"graph pools +\S+ GiB +3\.00 GiB +\+", done.out)
    elsewhere = call("plan", "--engine", "sglang", "--tp", "4", "--context", "131072", "--calibration", kept)
    assert "not applied: corrections of vllm 0.33.0 on spark; planned is sglang on spark" in elsewhere.err
    after = call(*asked, "--calibration", kept, "--json").object
    line = next(line for line in after["ranks"][0]["lines"] if line["name"] == "graph pools")
    assert (line["num_bytes"], line["basis"]) == (3 * GIB, "measured")
    held = after["ranks"][0]["held_bytes"] - before["ranks"][0]["held_bytes"]
    assert held == line["correction_bytes"] == 3 * GIB - planned
    assert "calibration: measured on 1 boot of vllm 0.33.0" in call(*asked, "--calibration", kept).out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lines": {"graph pool": 1}}, "the boot of Monday measures 'graph pool', which the plan does not"),
        ({"engine": "sglang"}, "the boot of Monday is of rank 0 of 4 of sglang on spark"),
        ({"tp_size": 3}, "the boot of Monday is of rank 0 of 3 of vllm on spark"),
        ({"node_kind": "h200"}, "the boot of Monday is of rank 0 of 4 of vllm on h200"),
        ({"rank": 4}, "the boot of Monday is of rank 4 of 4"),
        ({"rank": "x"}, "facts.json is no BootFacts"),
    ],
)
def test_facts_that_are_not_of_this_plan(
    call: Call, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    kept = tmp_path / "kept.json"
    asked = ("plan", "--engine", "vllm", "--tp", "4", "--context", "8192")
    done = call(*asked, "--calibrate", facts(tmp_path, **changes), "--write-calibration", kept)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert "hint: " in done.err
    assert not kept.exists()


def test_a_picture_and_a_profile_are_written_whole(call: Call, tmp_path: Path) -> None:
    picture, profile = tmp_path / "plan.svg", tmp_path / "plan.toml"
    done = call("plan", *TINY, "--svg", picture, "--write-profile", profile)
    assert (done.code, done.err) == (0, f"wrote {picture}\nwrote {profile}\n")
    assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert 'engine = "native"' in profile.read_text()
    refused = call("plan", *TINY, "--available", "1MiB", "--write-profile", tmp_path / "no.toml")
    assert (refused.code, refused.err) == (
        1,
        f"{tmp_path / 'no.toml'} is not written: a profile is of a plan that fits\n",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.svg", "plan.toml"]


def test_a_target_that_cannot_be_written_leaves_nothing(call: Call, tmp_path: Path) -> None:
    (tmp_path / "a.svg").mkdir()
    for target in (tmp_path / "a.svg", tmp_path / "none" / "a.svg"):
        done = call("plan", *TINY, "--svg", target)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"error: cannot write {target}: ")
    assert list(tmp_path.rglob("*")) == [tmp_path / "a.svg"]


MISTAKES = [
    (("--model", "v4.1-flsh"), "no built-in model 'v4.1-flsh'", "did you mean v4.1-flash?"),
    (("--nodes", "3xsparc"), "unknown kind of node 'sparc'", "known: spark, h200, local"),
    (("--nodes", "0xspark"), "0 nodes", "give 1 to 64"),
    (("--engine", "vlm"), "engine is 'vlm'", "choose one of native, vllm, sglang, exl3"),
    (("--engine", "native"), "no engine serves v4.1-flash on 4xspark: ", "leave --engine open"),
    (("--profile", "fast"), "there is no profile 'fast'", "choose one of max-context"),
    (("--profile", "max-context", "--max-num-seqs", "2"), "profile max-context says how many", "leave --max"),
    (("x", "--model", "tiny"), "both a checkpoint, x, and --model tiny", "give one of them"),
    (("--nodes", "2xspark", "--fleet", "x"), "both --nodes 2xspark and --fleet x", "give one of them"),
    (("--why-not", "1", "--context", "1"), "both --why-not 1 and --context 1", "give one of them"),
    (("--write-calibration", "x"), "--write-calibration without --calibrate", "give the facts"),
    (("--from", "x", "--nodes", "2xspark"), "--from x says what is planned", "leave them out"),
    (("--from", "/none.json"), "cannot read /none.json: No such file", None),
    (("--available", "5G"), "not a byte quantity: '5G'", "write e.g. 64MiB"),
    (
        ("--nodes", "local", "--available", "900TiB"),
        "989560464998400 bytes available on a local",
        "give what",
    ),
    (("--tp", "9"), "tp_size 9 on 4 devices", "give more nodes, or a smaller --tp"),
    (("--context", "1048577"), "max_model_len is 1,048,577, and v4.1-flash knows", "ask for 1048576"),
    (("--fraction", "1.5"), "fraction is 1.5", "give a number between 0 and 1"),
]


@pytest.mark.parametrize(("arguments", "message", "hint"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_named_with_what_to_do(
    call: Call, arguments: tuple[str, ...], message: str, hint: str | None
) -> None:
    done = call("plan", *arguments)
    said = done.err.splitlines()
    assert (done.code, done.out) == (2, "")
    assert said[0].startswith(f"error: {message}")
    assert len(said) == (1 if hint is None else 2)
    assert hint is None or said[1].startswith(f"hint: {hint}")


@pytest.mark.parametrize(
    ("text", "message"),
    [("nonsense", "is not JSON"), ("[]", "holds no JSON object"), ('{"format": 9}', "plan of format 9")],
)
def test_a_plan_file_of_another_kind(call: Call, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    done = call("plan", "--from", path)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_a_damaged_checkpoint_is_another_code_and_json_says_it_too(call: Call, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((CHECKPOINT / "config.json").read_bytes())
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"\xff" * 64)
    done = call("plan", tmp_path, "--nodes", "local", "--json")
    assert done.code == 3
    assert done.object["error"]["type"] == "CheckpointError"
    assert done.err.startswith("error: model-00001-of-00001.safetensors announces a header of ")
