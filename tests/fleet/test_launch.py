"""What runs where, for the recipes' situations: reviewed texts, and what must hold of any of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import msgspec
import pytest
from launch_cases import CASES, DIGEST, GOLDEN, REVISION, Case, dry_run

from deskfleet.errors import ConfigError, DoesNotFit
from deskfleet.fleet.engines.contract import ports_of
from deskfleet.fleet.engines.registry import LAUNCHERS
from deskfleet.fleet.launch import Receipt, launch_from_json, launch_to_json
from deskfleet.fleet.render import render_launch
from deskfleet.model.embedded import POCKET, locate

OWN_VARIABLES = {
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_SOCKET_IFNAME",
    "SGLANG_HOST_IP",
    "VLLM_HOST_IP",
}
"""What may differ from node to node. Anything else that differs makes ranks build other shapes and hang (G-69)."""

NATIVE = Case(
    2,
    str(locate(POCKET)),
    "native",
    "tp_size = 2",
    extra='env = { NOTE = "a b" }',
    image=f"example.org/desk/native@{DIGEST}",
    kind="local",
)


@pytest.mark.parametrize("name", CASES)
def test_dry_run_is_as_reviewed(name: str) -> None:
    """Changed on purpose? tests/fleet/launch_cases.py --update writes it anew; read the difference."""
    assert dry_run(name) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", CASES)
def test_launch_survives_json_and_ranks_differ_only_where_nodes_do(name: str) -> None:
    launch = CASES[name].render()
    assert launch_from_json(launch_to_json(launch)) == launch
    assert [rank.rank for rank in launch.start_order] == [*range(1, len(launch.ranks)), 0]
    shared = [{k: v for k, v in rank.env.items() if k not in OWN_VARIABLES} for rank in launch.ranks]
    assert all(each == shared[0] for each in shared)
    assert len({rank.env["NCCL_IB_HCA"] + rank.env["NCCL_IB_GID_INDEX"] for rank in launch.ranks[:2]}) == 2
    assert all(value for rank in launch.ranks for value in rank.env.values())  # an empty GID index is index 0
    texts = [
        re.sub(r"--node-rank \d+|--headless|--(host|port) \S+", "", " ".join(r.argv)) for r in launch.ranks
    ]
    assert len({" ".join(text.split()) for text in texts}) == 1
    assert sum("--headless" in rank.argv for rank in launch.ranks) in (0, len(launch.ranks) - 1)


def test_json_of_another_kind_is_refused() -> None:
    launch = CASES["2-nodes-exl3"].render()
    for broken, said in (
        (msgspec.structs.replace(launch, format=99), "format 99"),
        (msgspec.structs.replace(launch, ranks=launch.ranks[::-1]), "ranks 1, 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            launch_from_json(launch_to_json(broken))
    with pytest.raises(ConfigError, match="no launch"):
        launch_from_json(b'{"format": 1}')


def test_numbers_are_the_plans() -> None:
    """The pool in bytes is what the planner counted; a larger wish makes it larger; graphs cover what can occur."""
    pools = []
    for tokens in (600_000, 900_000):
        case = replace(
            CASES["4-nodes-vllm"], wishes=f"max_model_len = 500000\nkv_tokens = {tokens}\nmax_num_seqs = 3"
        )
        plan, spec, fabric, facts = case.inputs()
        head = render_launch(plan, spec, fabric, facts, launch_id="x").ranks[0]
        pools.append(int(_value(head.argv, "--kv-cache-memory-bytes")))
        assert pools[-1] == sum(line.num_bytes for line in plan.budgets[0].lines if line.group == "kv")
        assert head.box.memory_bytes == plan.cluster.nodes[0].available_bytes
        graphs = json.loads(_value(head.argv, "--compilation-config"))["cudagraph_capture_sizes"]
        assert graphs == [5, 6, 10, 12, 15, 18]
    rate = plan.kv_rate
    assert pools[1] - pools[0] == rate.pool_bytes(900_000) - rate.pool_bytes(600_000)


def test_a_node_with_less_memory_lowers_what_all_claim() -> None:
    case = CASES["4-nodes-vllm"]
    poor = replace(case, wishes=case.wishes, available={2: "107GiB"})
    rich = _value(case.render().ranks[0].argv, "--gpu-memory-utilization")
    launch = poor.render()
    assert {_value(rank.argv, "--gpu-memory-utilization") for rank in launch.ranks} == {"0.87"} != {rich}
    assert [rank.box.memory_bytes for rank in launch.ranks].index(107 << 30) == 2


def test_a_head_elsewhere_is_reached_by_its_address_and_said_to_be_open() -> None:
    here, there = CASES["4-nodes-vllm"], replace(CASES["4-nodes-vllm"], head="192.168.1.11")
    assert here.render().endpoint == f"http://127.0.0.1:{ports_of('desk').engine}"
    launch = there.render()
    assert launch.endpoint == f"http://192.168.1.11:{ports_of('desk').engine}"
    assert _value(launch.ranks[0].argv, "--host") == "0.0.0.0"
    assert any("without a key" in warning for warning in launch.warnings)


def test_two_fleets_share_no_port_and_no_container() -> None:
    one, other = CASES["3-nodes-sglang"], replace(CASES["3-nodes-sglang"], name="attic")
    words = [
        {rank.container for rank in launch.ranks}
        | {_value(rank.argv, "--port") for rank in launch.ranks}
        | {_value(rank.argv, "--dist-init-addr") for rank in launch.ranks}
        for launch in (one.render(), other.render())
    ]
    assert not words[0] & words[1]
    for name in ("a", "desk", "x" * 63):
        assert 21_000 <= ports_of(name).engine < 22_000 <= ports_of(name).rendezvous <= 29_992


def test_a_snapshot_of_the_hub_is_mounted_whole() -> None:
    """Its files are links to ../../blobs, which the snapshot alone does not hold (G-19)."""
    repo = "/srv/hub/models--deepseek-ai--DeepSeek-V4.1-Flash"
    case = replace(CASES["4-nodes-vllm"], checkpoint=f"{repo}/snapshots/{REVISION}")
    rank = case.render().ranks[0]
    assert rank.argv[2] == f"/checkpoint/snapshots/{REVISION}"
    assert rank.box.mounts[0].source == repo
    with pytest.raises(ConfigError, match="pinned to") as refused:
        replace(case, checkpoint=f"{repo}/snapshots/{'0' * 40}").render()
    assert "fleet pull" in str(refused.value)


def test_secrets_stay_names() -> None:
    case = replace(
        CASES["4-nodes-vllm"],
        extra='env = { VLLM_API_KEY = "${secret:engine}" }',
        tail='[secrets]\nengine = "env:ENGINE_KEY"\n',
    )
    launch = case.render()
    assert launch.secrets == ("engine",)
    assert all(rank.env["VLLM_API_KEY"] == "${secret:engine}" for rank in launch.ranks)


def test_native_ranks_dial_the_supervisor() -> None:
    launch = NATIVE.render()
    first = launch.ranks[1]
    assert first.argv == (
        *("deskfleet", "rank", "/checkpoint", "--connect", "10.0.22.1:7100", "--rank", "1"),
        *("--launch", "20261130-1", "--engram-pack", "/engram", "--interface", "enp1s0f0np0"),
    )
    assert first.env == {"DESKFLEET_RANK_TOKEN": "${secret:rank-token}", "NOTE": "a b"}
    assert (launch.endpoint, launch.secrets) == ("", ("rank-token",))
    assert first.box.memory_bytes is None
    assert not first.box.has_gpus
    unpacked = replace(NATIVE, engram_files=()).render().ranks[0]
    assert "--engram-pack" not in unpacked.argv  # it reads the published shards in place
    assert all(mount.target != "/engram" for mount in unpacked.box.mounts)


def test_what_does_not_fit_is_a_verdict() -> None:
    with pytest.raises(DoesNotFit, match="lacks") as verdict:
        replace(CASES["2-nodes-exl3"], wishes="max_model_len = 1048576\nmax_num_seqs = 8").render()
    assert verdict.value.exit_code == 1


LINES = {
    "4-nodes-vllm": [
        # From vLLM 0.33's source and published boots.
        (
            "KV pool",
            "INFO [kv_cache_utils.py:1147] GPU KV cache size: 1,263,118 tokens, Maximum concurrency",
            True,
        ),
        (
            "KV pool",
            "INFO [kv_cache_utils.py:1147] GPU KV cache size: 499,999 tokens, Maximum concurrency",
            False,
        ),
        ("experts' kernels", "Using 'B12X_MXFP4_MXFP8' Mxfp4 MoE backend.", True),
        ("experts' kernels", "Using 'MARLIN' Mxfp4 MoE backend.", False),
    ],
    "4-nodes-sglang": [
        ("KV pool", "DSV4 memory calculation: swa_fixed=0.67 GB, full_token=8000000", True),
        ("KV pool", "DSV4 memory calculation: swa_fixed=0.67 GB, full_token=7999744", False),
    ],
}


@pytest.mark.parametrize("name", LINES)
def test_receipts_tell_good_boots_from_bad(name: str) -> None:
    launch = CASES[name].render()
    receipts = {receipt.name: receipt for receipt in launch.expected}
    for receipt, line, is_good in LINES[name]:
        assert _holds(receipts[receipt], line) is is_good, line
    assert {rank for receipt in launch.expected for rank in receipt.ranks} <= set(range(4))


def test_milestones_move_forward_on_a_real_boot() -> None:
    boots = {
        "4-nodes-vllm": [
            "rank 2 in world size 4 is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank 2",
            "Loading safetensors checkpoint shards:  10% Completed | 5/48 [00:41<05:41,  8.2s/it]",
            "Model loading took 81.6 GiB memory and 341.000000 seconds",
            "GPU KV cache size: 1,263,118 tokens, Maximum concurrency for 500,000 tokens per request: 2.53x",
            "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  40%|####      | 6/15 [00:12<00:18]",
            "Graph capturing finished in 31 secs, took 0.90 GiB",
            "Starting vLLM server on http://127.0.0.1:21358",
        ],
        "3-nodes-sglang": [
            "Load weight begin. avail mem=111.20 GB",
            "Loading safetensors checkpoint shards:  10% Completed | 5/48 [00:41<05:41,  8.2s/it]",
            "Load weight end. elapsed=480.00 s, type=DeepseekV41ForCausalLM, avail mem=9.20 GB, mem usage=102.00 GB.",
            "DSV4 memory calculation: full_token=399872",
            "Capture target decode CUDA graph begin. backend=full, avail mem=6.00 GB",
            "Capture target decode CUDA graph end. elapsed=20.00 s, mem usage=0.50 GB, avail mem=5.50 GB.",
            "The server is fired up and ready to roll!",
        ],
    }
    for name, lines in boots.items():
        milestones = CASES[name].render().milestones
        seen = [next(i for i, m in enumerate(milestones) if re.search(m.pattern, line)) for line in lines]
        assert seen == list(range(len(milestones))), name
        shares = [milestone.share for milestone in milestones]
        assert shares == sorted(shares)
        counted = [re.search(m.pattern, line) for m, line in zip(milestones, lines, strict=True)]
        assert {match["done"] for match in counted if match and "done" in match.groupdict()} <= {"5", "6"}


def test_every_engine_has_a_launcher() -> None:
    assert set(LAUNCHERS) == {"native", "vllm", "sglang", "exl3"}


def _holds(receipt: Receipt, line: str) -> bool:
    match = re.search(receipt.pattern, line)
    if match is None:
        return False
    if receipt.at_least is not None:
        return int(match["value"].replace(",", "")) >= receipt.at_least
    return receipt.equals is None or match["value"] == receipt.equals


def _value(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]
