"""Other load generators are called as they want to be, and their results read. With stub programs, about 8 s.

The stubs take the arguments apart as the real programs do and ask the endpoint themselves. The real `vllm bench serve`
0.32 was run with these arguments, and its result file is what the stub writes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench_endpoint import Behaviour, serving

from deskfleet.bench.load.other_programs import PROGRAMS, Scenario, read_aiperf, read_vllm
from deskfleet.errors import ConfigError, EngineError

COMMAND = (sys.executable, "-c", "import sys; from deskfleet.cli import main; sys.exit(main())")

STUB = """#!{python}
import argparse, json, sys, time, urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

parser = argparse.ArgumentParser()
if sys.argv[1] == "bench":
    assert sys.argv[1:3] == ["bench", "serve"]
    argv = sys.argv[3:]
    for name in ("backend", "base-url", "endpoint", "model", "dataset-name", "dataset-path", "percentile-metrics",
                 "result-dir", "result-filename"):
        parser.add_argument("--" + name, required=True)
    for name in ("num-prompts", "max-concurrency"):
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--extra-body", type=json.loads, required=True)
    for name in ("skip-tokenizer-init", "disable-shuffle", "no-oversample", "disable-tqdm", "save-result",
                 "save-detailed"):
        parser.add_argument("--" + name, action="store_true")
else:
    assert sys.argv[1] == "profile"
    argv = sys.argv[2:]
    for name in ("model", "url", "endpoint-type", "input-file", "custom-dataset-type", "artifact-dir", "ui"):
        parser.add_argument("--" + name, required=True)
    for name in ("request-count", "concurrency"):
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--extra-inputs", type=json.loads, required=True)
    for name in ("streaming", "use-server-token-count"):
        parser.add_argument("--" + name, action="store_true")
args = parser.parse_args(argv)
is_vllm = sys.argv[1] == "bench"
base = args.base_url if is_vllm else args.url
path = args.dataset_path if is_vllm else args.input_file
extra = args.extra_body if is_vllm else args.extra_inputs
prompts = [json.loads(line)["prompt" if is_vllm else "text"] for line in Path(path).read_text().splitlines()]

def ask(prompt):
    body = {{"model": args.model, "messages": [{{"role": "user", "content": prompt}}], "stream": True, **extra}}
    began = time.monotonic()
    request = urllib.request.Request(base + "/v1/chat/completions", json.dumps(body).encode())
    first, usage = None, None
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {{"):
                first = first or time.monotonic() - began
                usage = json.loads(line[6:]).get("usage") or usage
    return first, time.monotonic() - began, usage["completion_tokens"] * {factor}

began = time.monotonic()
with ThreadPoolExecutor(args.max_concurrency if is_vllm else args.concurrency) as pool:
    done = list(pool.map(ask, prompts))
wall = time.monotonic() - began
tokens = sum(each[2] for each in done)
if is_vllm:
    result = {{"num_prompts": len(prompts), "completed": len(done), "failed": 0, "total_output_tokens": tokens,
              "output_throughput": tokens / wall, "ttfts": [each[0] for each in done],
              "latencies": [each[1] for each in done], "output_lens": [each[2] for each in done]}}
    Path(args.result_dir, args.result_filename).write_text(json.dumps(result))
else:
    result = {{"request_count": {{"avg": len(done)}}, "output_token_throughput": {{"avg": tokens / wall}},
              "total_output_tokens": {{"avg": tokens}}, "time_to_first_token": {{"unit": "ms", "avg": 1.5}},
              "inter_token_latency": {{"unit": "ms", "avg": 10.1}}}}
    Path(args.artifact_dir, "run-1").mkdir()
    Path(args.artifact_dir, "run-1", "profile_export_aiperf.json").write_text(json.dumps(result))
"""


def stub(path: Path, *, factor: float = 1) -> Path:
    path.write_text(STUB.format(python=sys.executable, factor=factor))
    path.chmod(0o755)
    return path


def run(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    argv = [*COMMAND, "bench", "cross-check", url, "--tokens", "40", "--requests", "8", *flags]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


def test_both_programs_agree_with_ours(tmp_path: Path) -> None:
    vllm, aiperf = stub(tmp_path / "vllm"), stub(tmp_path / "aiperf")
    with serving(Behaviour(step_s=0.01)) as endpoint:
        done = run(endpoint.url, "--with", f"vllm={vllm},aiperf={aiperf}", "--json", "--ignore-eos")
        bodies = [answer.body for answer in endpoint.log]
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["agrees"] is True
    assert [each["figures"]["program"] for each in found["others"]] == ["vllm bench serve", "aiperf"]
    assert all(each["tokens_ratio"] == 1.0 for each in found["others"])
    assert all(each["rate_ratio"] == pytest.approx(1, abs=0.3) for each in found["others"])
    assert found["others"][0]["figures"]["mean_tpot_ms"] == pytest.approx(10, rel=0.3)
    assert len(found["ours"]) == 3  # before, between and after
    # Everybody asks for the same, and no prompt of anybody's begins as another one.
    assert {body.get("max_tokens") or body["max_completion_tokens"] for body in bodies} == {40}
    assert {body["temperature"] for body in bodies} == {0.0}
    assert all(body["ignore_eos"] and body["chat_template_kwargs"] == {"thinking": False} for body in bodies)
    begins = [body["messages"][0]["content"][:12] for body in bodies]
    assert len(begins) == 5 * 8 == len(set(begins))
    tasks = [
        sorted(body["messages"][0]["content"][12:] for body in bodies[at : at + 8]) for at in range(0, 40, 8)
    ]
    assert all(each == tasks[0] for each in tasks)


def test_both_run_at_the_same_time(tmp_path: Path) -> None:
    vllm = stub(tmp_path / "vllm")
    with serving(Behaviour(step_s=0.01)) as endpoint:
        done = run(endpoint.url, "--with", f"vllm={vllm}", "--together", "--json", "--ignore-eos")
        came = [answer.came_s for answer in endpoint.log]
        ours = [number for number, answer in enumerate(endpoint.log) if "max_tokens" in answer.body]
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(found["ours"]) == 1
    assert (len(came), len(ours)) == (16, 8)
    assert ours != list(range(8, 16)), "ours began while theirs went on"
    with serving(Behaviour(step_s=0.01, metrics=None)) as endpoint:
        done = run(endpoint.url, "--with", f"vllm={vllm}", "--together")
    assert done.returncode == 2
    assert "does not tell how many requests run" in done.stderr


def test_usage_with_the_last_piece_of_text_is_not_read_by_vllm(tmp_path: Path) -> None:
    result = {"num_prompts": 2, "completed": 2, "output_lens": [1, 1], "itls": [[0.01, 0.02], [0.01]]}
    (tmp_path / "result.json").write_text(json.dumps(result))
    with pytest.raises(EngineError, match="read no token counts") as error:
        read_vllm(tmp_path)
    assert "--tokenizer" in (error.value.hint or "")
    scenario = Scenario(
        url="http://h", model="m", prompts=("p",), concurrency=1, num_tokens=8, extra={}, tokenizer="dir"
    )
    arguments = PROGRAMS["vllm"].arguments(scenario, tmp_path)
    assert arguments[arguments.index("--tokenizer") + 1] == "dir"
    assert "--skip-tokenizer-init" not in arguments


def test_a_program_that_counts_otherwise_is_told(tmp_path: Path) -> None:
    vllm = stub(tmp_path / "vllm", factor=0.5)
    with serving(Behaviour(step_s=0.005)) as endpoint:
        done = run(endpoint.url, "--with", f"vllm={vllm}")
    assert done.returncode == 1
    assert "apart" in done.stdout


def test_an_absent_program_is_said_and_a_named_one_that_is_none_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert PROGRAMS["vllm"].find() is None
    assert PROGRAMS["aiperf"].find() is None
    with pytest.raises(ConfigError, match="is no program"):
        PROGRAMS["vllm"].find(tmp_path / "nothing")
    with serving(Behaviour(step_s=0)) as endpoint:
        done = run(endpoint.url)
    assert done.returncode == 0, done.stderr
    assert "absent: vllm bench serve is not installed here" in done.stdout
    assert "absent: aiperf is not installed here" in done.stdout


def test_a_program_that_fails_or_leaves_nothing_is_an_error(tmp_path: Path) -> None:
    failing = tmp_path / "vllm"
    failing.write_text("#!/bin/sh\necho 'no such model' >&2\nexit 4\n")
    failing.chmod(0o755)
    with serving(Behaviour(step_s=0)) as endpoint:
        done = run(endpoint.url, "--with", f"vllm={failing}")
    assert done.returncode == 3
    assert "vllm bench serve ended with exit code 4: no such model" in done.stderr
    with pytest.raises(EngineError, match="left no result"):
        read_vllm(tmp_path)
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(EngineError, match="has no 'completed'"):
        read_vllm(tmp_path)
    with pytest.raises(EngineError, match=r"no profile_export_aiperf\.json"):
        read_aiperf(tmp_path)
