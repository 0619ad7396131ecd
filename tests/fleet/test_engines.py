"""What is refused before anything starts: each with its reason, in words of the file that the user wrote."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from launch_cases import CASES, DIGEST, Case

from deskfleet.errors import ConfigError, DeskfleetError
from deskfleet.fleet.engines import names_sglang, names_vllm
from deskfleet.fleet.engines.arguments import Flag, Forbidden, merge_arguments, read_options
from deskfleet.fleet.render import render_launch

VLLM, SGLANG, EXL3 = CASES["4-nodes-vllm"], CASES["4-nodes-sglang"], CASES["2-nodes-exl3"]
V4 = CASES["2-nodes-vllm-v4"]

RELEASE = f"vllm/vllm-openai@{DIGEST}"


def args(*words: str) -> str:
    """[engine] args."""
    return f"args = [{', '.join(repr(word) for word in words)}]"


def env(**values: str) -> str:
    """[engine] env."""
    return "env = { " + ", ".join(f'{name} = "{value}"' for name, value in values.items()) + " }"


REFUSED: dict[str, tuple[Case, dict[str, Any], str]] = {
    # Accepted by the engine and not implemented for this model.
    "context parallel": (
        VLLM,
        {"wishes": "dcp_size = 2\nmax_model_len = 100000"},
        "dcp_size 2 with tp_size 4",
    ),
    "context parallel by flag": (
        VLLM,
        {"extra": args("-dcp", "2")},
        "nothing of it is implemented for this model, and the engine does not say so",
    ),
    "the same on SGLang": (SGLANG, {"extra": args("--dcp-size", "2")}, "nobody has verified it"),
    "FP4 KV": (
        VLLM,
        {"wishes": 'kv_format = "fp4"\nmax_model_len = 100000'},
        "no kernels for fp4 KV on sm121",
    ),
    "FP4 KV by flag": (
        VLLM,
        {"extra": args("--kv-cache-dtype=nvfp4_ds_mla")},
        "compute capability 10.0 only",
    ),
    "FP4 KV where we give no flag": (EXL3, {"extra": args("--kv-cache-dtype", "nvfp4")}, "10.0 only"),
    "three ranks": (
        CASES["3-nodes-sglang"],
        {"provides": "adapter"},
        "3 ranks need 64 heads padded to 96, which SGLang 0.5.23 does not do",
    ),
    "three ranks of vLLM": (
        CASES["3-nodes-sglang"],
        {"engine": "vllm", "provides": "adapter"},
        "which vLLM 0.33 does not do",
    ),
    "experts half shared": (VLLM, {"wishes": "ep_size = 2\nmax_model_len = 100000"}, "take 1 or 4"),
    "bounded indexer": (SGLANG, {"provides": "adapter"}, "an indexer of bounded memory"),
    # Slow, or full of nonsense.
    "eager": (VLLM, {"extra": args("--enforce-eager")}, "without captured graphs"),
    "eager on SGLang": (SGLANG, {"extra": args("--disable-cuda-graph")}, "without captured graphs"),
    "eager decode": (
        SGLANG,
        {"extra": args("--cuda-graph-backend-decode", "disabled")},
        "without captured graphs",
    ),
    "segments": (
        SGLANG,
        {"extra": env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")},
        "prompts of more than 64 tokens then give NaN",
    ),
    "segments by the new name": (
        SGLANG,
        {"extra": env(PYTORCH_ALLOC_CONF="max_split_size_mb:64, expandable_segments:True")},
        "give NaN on SGLang",
    ),
    "offload": (
        VLLM,
        {"extra": args("--cpu-offload-gb", "20")},
        "the host's memory is the accelerator's here",
    ),
    # Engram.
    "no adapter wanted": (VLLM, {"extra": "adapter = false"}, "Engram rows are planned on disk"),
    "no adapter inside": (VLLM, {"provides": ""}, "does not say that it has deskfleet-vllm"),
    "a release": (VLLM, {"image": RELEASE, "provides": ""}, "deskfleet fleet build"),
    "no packs": (VLLM, {"engram_files": ()}, "spark-0, spark-1, spark-2, spark-3: no pack of rows"),
    "shards without their index": (
        EXL3,
        {"engram_files": ("config.json",)},
        "has not both config.json and model.safetensors.index.json",
    ),
    "a store that cannot be captured": (
        VLLM,
        {"extra": env(DESKFLEET_ENGRAM_STORE="staged")},
        "has DESKFLEET_ENGRAM_STORE=staged, and steps are captured in graphs",
    ),
    # The user's flags against ours.
    "another context": (
        VLLM,
        {"extra": args("--max_model_len", "4096")},
        "[engine] args have --max_model_len 4096, and the launch has --max-model-len 500000 (plan: max_model_len)",
    ),
    "an alias": (VLLM, {"extra": args("-tp=2")}, "and the launch has --tensor-parallel-size 4"),
    "another alias": (
        SGLANG,
        {"extra": args("--tensor-parallel-size", "2")},
        "and the launch has --tp-size 4",
    ),
    "a part of ours": (
        VLLM,
        {"extra": args("--compilation-config.mode", "3")},
        "args have --compilation-config.mode 3, and the launch has --compilation-config",
    ),
    "its opposite": (
        VLLM,
        {"extra": args("--no-enable-scale-out")},
        "the launch has --enable-scale-out (token ids in and out for the gateway",
    ),
    "misspelt": (V4, {"extra": args("--max-num-seq", "4")}, "did you mean --max-num-seqs?"),
    "a parser": (
        VLLM,
        {"extra": args("--tool-call-parser", "deepseek_v41")},
        "by the gateway, never by the engine",
    ),
    "a key in the open": (SGLANG, {"extra": args("--api-key", "x")}, "arguments are seen by everybody"),
    "a file of flags": (VLLM, {"extra": args("--config", "/x.yaml")}, "could say anything"),
    "no flag at all": (VLLM, {"extra": args("deepseek-ai/DeepSeek-V4.1-Flash")}, "which is no flag"),
    # Variables.
    "another network": (
        VLLM,
        {"extra": env(NCCL_IB_GID_INDEX="3")},
        "env has NCCL_IB_GID_INDEX=3, and the launch has 5 (found on this node)",
    ),
    "a fork's variable": (
        V4,
        {"extra": env(VLLM_ENABLE_ROCE_ALLREDUCE="1")},
        "env has VLLM_ENABLE_ROCE_ALLREDUCE: only patched images read it",
    ),
    "an unknown variable": (V4, {"extra": env(VLLM_CACHE_ROOTS="/x")}, "did you mean VLLM_CACHE_ROOT"),
    # Images and places.
    "a tag": (VLLM, {"image": "example.org/desk/engine:latest"}, "is a tag, which may be another image"),
    "a mount over ours": (VLLM, {"extra": 'mounts = ["/tmp/x:/checkpoint/"]'}, "the launch mounts there"),
    "caches on the share": (VLLM, {"cache": "/srv/models/flash/cache"}, "which is shared"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_launch(name: str) -> None:
    case, changes, said = REFUSED[name]
    with pytest.raises(DeskfleetError) as refused:
        replace(case, **changes).render()
    text = str(refused.value)
    assert said in text
    assert "hint:" in text or "; " in text
    case.render()  # without the change it is not refused


def test_every_reason_is_said_at_once() -> None:
    case = replace(VLLM, extra=args("--enforce-eager", "--max-num-seqs", "1"), provides="", engram_files=())
    with pytest.raises(ConfigError, match="for 3 reasons") as refused:
        case.render()
    assert str(refused.value).count("\n  ") == 3


def test_a_network_without_an_index_is_refused_and_without_rdma_goes_over_sockets() -> None:
    plan, spec, fabric, facts = VLLM.inputs()
    broken = fabric | {
        "spark-2": replace(fabric["spark-2"], hca=None, gid_index=None, refusal="no GID index is right")
    }
    with pytest.raises(ConfigError, match="spark-2: no GID index is right"):
        render_launch(plan, spec, broken, facts, launch_id="x")
    plain = {name: replace(each, hca=None, gid_index=None) for name, each in fabric.items()}
    rank = render_launch(plan, spec, plain, facts, launch_id="x").ranks[0]
    assert rank.env["NCCL_IB_DISABLE"] == "1"
    assert not {"NCCL_IB_HCA", "NCCL_IB_GID_INDEX"} & set(rank.env)
    assert rank.box.devices == ()
    with pytest.raises(ConfigError, match="nothing is known of the network of spark-0"):
        render_launch(plan, spec, {}, facts, launch_id="x")


def test_what_the_user_may_say() -> None:
    """The same again is no contradiction, a default may be given anew, and what an image says it has is believed."""
    case = replace(
        VLLM,
        extra=args("--block-size", "128", "--moe-backend", "marlin", "--max-log-len", "80", "-dcp", "1")
        + "\n"
        + env(NCCL_DEBUG="INFO", NCCL_IB_HCA="rocep1", VLLM_ENABLE_ROCE_ALLREDUCE="1", MINE="a $b 'c'"),
        provides="adapter,roce-collectives",
    )
    launch = case.render()
    rank = launch.ranks[0]
    assert rank.argv.count("--block-size") == 1
    assert rank.argv.count("--moe-backend") == 1
    assert rank.argv[-6:] == ("--moe-backend", "marlin", "--max-log-len", "80", "-dcp", "1")
    assert (rank.env["NCCL_DEBUG"], rank.env["VLLM_ENABLE_ROCE_ALLREDUCE"]) == ("INFO", "1")
    assert rank.env["NCCL_IB_HCA"] == "=rocep1s0f1:1"  # what was found with it
    assert rank.env["MINE"] == "a $b 'c'"
    assert not any(receipt.name == "experts' kernels" for receipt in launch.expected)
    forked = replace(VLLM, extra=env(DSV41_NEW_TRICK="1") + "\n" + args("--brand-new")).render()
    assert [warning.partition(":")[0] for warning in forked.warnings[1:]] == [
        "[engine] args have --brand-new, which the release does not know; the image may",
        "[engine] env has DSV41_NEW_TRICK",
    ]


def test_native_takes_no_arguments() -> None:
    from test_launch import NATIVE

    with pytest.raises(ConfigError, match="take none"):
        replace(NATIVE, extra=args("--max-model-len", "9")).render()
    with pytest.raises(ConfigError, match="each launch sets"):
        replace(
            NATIVE,
            extra=env(DESKFLEET_RANK_TOKEN_="x", DESKFLEET_RANK_TOKEN="${secret:t}"),
            tail='[secrets]\nt = "env:T"',
        ).render()


def test_arguments_are_read_as_argparse_reads_them() -> None:
    options = read_options("--size,-s= --fast,--no-fast --limit=")
    flags = [Flag("--size", "4", "plan")]
    forbidden = {"--slow": Forbidden("no", "leave it out")}

    def merged(*words: str) -> tuple[tuple[str, ...], int, int]:
        argv, refusals, warnings = merge_arguments(flags, words, options, forbidden, is_release=True)
        return argv, len(refusals), len(warnings)

    assert merged("--size", "4") == (("--size", "4"), 0, 0)
    assert merged("-s", "5") == (("--size", "4"), 1, 0)
    assert merged("--limit", "-1") == (("--size", "4", "--limit", "-1"), 0, 0)
    assert merged("--limit=a b", "--no-fast") == (("--size", "4", "--limit", "a b", "--no-fast"), 0, 0)
    assert merged("--slow") == (("--size", "4"), 1, 0)
    assert merged("--limits", "1")[1] == 1


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.engine != "exl3"])
def test_every_variable_of_an_engine_is_read_by_it(name: str) -> None:
    known = set(names_vllm.VARIABLES.split()) | set(names_sglang.VARIABLES.split())
    for rank in CASES[name].render().ranks:
        ours = {each for each in rank.env if each.startswith(("VLLM_", "SGLANG_"))}
        assert ours
        assert ours <= known
