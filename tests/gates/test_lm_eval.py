"""lm-evaluation-harness, the real one, asks Pocket with the command that the gate prints; the gate reads what it wrote.

A minute or two, beside installing it once (tools/lm_eval_env.sh). The task is a file of sums: nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gate_runs import deskfleet

from deskfleet.bench.load.server_process import running_server
from deskfleet.client import Client
from deskfleet.model.embedded import locate

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
VENV = ROOT / "var" / "lm-eval"
INSTALL_S, RUN_S = 900, 400
SERVE = (sys.executable, "-c", "import sys; from deskfleet.cli import main; sys.exit(main())", "serve")
SUMS = ((19, 23), (7, 8), (41, 16), (5, 90), (33, 48), (62, 11))
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: generate_until
doc_to_text: "What is {{{{a}}}} + {{{{b}}}}?"
doc_to_target: "{{{{sum}}}}"
generation_kwargs: {{until: [], max_gen_toks: 400}}
filter_list:
  - name: flexible-extract
    filter:
      - {{function: regex, regex_pattern: '(-?\\d+)', group_select: -1}}
      - {{function: take_first}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture(scope="module")
def program() -> Path:
    """The harness, installed where that has not been done."""
    try:
        subprocess.run([ROOT / "tools" / "lm_eval_env.sh", VENV], check=True, timeout=INSTALL_S)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"lm-evaluation-harness cannot be installed here: {error}")
    return VENV / "bin" / "lm_eval"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server((*SERVE, str(locate("pocket")), "--port", "0", "--json")) as server:
        yield server["url"]


def task(directory: Path, sums: list[tuple[int, int, int]]) -> Path:
    """A task in files: what is asked, and what it is said to be right."""
    questions = directory / "sums.jsonl"
    questions.write_text("".join(json.dumps({"a": a, "b": b, "sum": str(c)}) + "\n" for a, b, c in sums))
    (directory / "sums.yaml").write_text(TASK.format(questions=questions))
    return directory


def run(program: Path, command: str, tasks: Path, output: Path) -> Path:
    """Run the printed command with our task in the place of its own; return the file of results."""
    words = shlex.split(command)
    assert words[0] == "lm_eval"
    words[words.index("--tasks") + 1] = "sums"
    words[words.index("--output_path") + 1] = str(output)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(output / "cache")}
    done = subprocess.run(
        [program, *words[1:], "--include_path", tasks],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        env=os.environ | offline,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = output.rglob("results_*.json")
    return results


async def test_the_printed_command_runs_and_its_results_are_read(
    program: Path, url: str, tmp_path: Path
) -> None:
    unasked = await deskfleet("verify", url, "--gate", "lm-eval", "--concurrency", "2", "--json")
    assert unasked.code == 3, "what was not run is no pass"
    reason = json.loads(unasked.out)["gates"][0]["reason"]
    command = reason.partition("--lm-eval-results: ")[2]

    answers = await own_answers(url)
    for kind, error in (("right", 0), ("half", 1)):  # a key that is wrong for half of the sums
        keys = [a + b + number % 2 * error for number, (a, b) in enumerate(SUMS)]
        (tmp_path / kind).mkdir()
        tasks = task(tmp_path / kind, [(a, b, key) for (a, b), key in zip(SUMS, keys, strict=True)])
        results = run(program, command, tasks, tmp_path / kind / "out")
        read = await deskfleet("verify", url, "--gate", "lm-eval", "--lm-eval-results", results, "--json")
        assert read.code == 0, read.err
        (gate,) = json.loads(read.out)["gates"]
        share = sum(map(str.__eq__, answers, map(str, keys))) / len(SUMS)
        assert gate["values"]["scores"] == {"sums": pytest.approx(share)}
        assert gate["measured"] == f"sums {share:.1%} of {len(SUMS)}"
        assert share >= 0.5 if kind == "right" else share <= 0.5


async def own_answers(url: str) -> list[str]:
    """The last number of each answer, asked for without the harness."""
    async with Client(url) as client:
        found = []
        for a, b in SUMS:
            message = {"role": "user", "content": f"What is {a} + {b}?"}
            reply = await client.ask(
                {"model": "pocket", "messages": [message], "max_tokens": 400, "temperature": 0}
            )
            found.append((re.findall(r"-?\d+", reply.content) or [""])[-1])
    return found
