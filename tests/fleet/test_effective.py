"""Where each value of a fleet comes from, and that a secret's value is not among what is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from deskfleet.errors import ConfigError
from deskfleet.fleet.effective import Effective, effective
from deskfleet.fleet.initial import Draft, fleet_text
from deskfleet.fleet.planning import inventory_for, machines, plan_fleet
from deskfleet.fleet.recipe_env import import_env
from deskfleet.fleet.spec import read_source
from deskfleet.planner.fleetfile import (
    CheckpointTable,
    EngineTable,
    GatewayTable,
    NodeTable,
    RestartTable,
    WishesTable,
)
from tests.fleet.fleet_texts import FULL, changed, write

PROFILES = Path(__file__).parents[2] / "profiles"


def told(path: Path, *flags: str, **environ: str) -> dict[str, Effective]:
    return {value.key: value for value in effective(read_source(path, flags), environ)}


def test_each_value_has_its_origin(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text((PROFILES / "v4.1-flash-4xspark-max-context.toml").read_text())
    path = write(tmp_path, changed('share = "nfs"', 'profile = "long.toml"'))
    values = told(path, "nodes[1].user=you", "gateway.port=1", HF_TOKEN="hunter2")
    assert {key: (values[key].value, values[key].origin) for key in values if key in EXPECTED} == EXPECTED
    assert not any("hunter2" in f"{value.value} {value.origin}" for value in values.values())


EXPECTED: dict[str, tuple[object, str]] = {
    "name": ("desk", "fleet.toml:1"),
    "share": ("local", "default"),
    "nodes[0].user": (None, "left to ssh_config"),
    "nodes[0].fabric": (["10.0.22.1", "10.0.23.1"], "fleet.toml:11"),
    "nodes[0].available": (108 << 30, "fleet.toml:13"),
    "nodes[1].available": (None, "what a spark has free"),
    "nodes[0].paths.cache": ("/var/cache/deskfleet", "fleet.toml:6"),
    "nodes[1].paths.cache": ("""/home/me/it's "$HOME" ü""", "fleet.toml:27"),
    "nodes[0].paths.engram": ("/var/cache/deskfleet/engram", "default: in nodes[0].paths.cache"),
    "nodes[1].user": ("you", "--set"),
    "engine.name": ("vllm", "fleet.toml:35"),
    "engine.env.HF_TOKEN": ("${secret:hub}", "fleet.toml:38"),
    "engine.adapter": (True, "default"),
    "wishes.max_model_len": (131072, "fleet.toml:42"),
    "wishes.kv_tokens": (1048576, "long.toml:11"),
    "wishes.margin": (1 << 30, "fleet.toml:43"),
    "wishes.fraction": (None, "left to the plan"),
    "gateway.port": (1, "--set"),
    "gateway.thinking": (True, "default"),
    "secrets.hub": ("(set, from env:HF_TOKEN)", "fleet.toml:50"),
}


def test_nothing_of_the_file_is_left_out(tmp_path: Path) -> None:
    keys = told(write(tmp_path)).keys()
    expected = {f"nodes[0].{name}" for name in NodeTable.model_fields if name != "paths"}
    for table, model in (
        ("checkpoint", CheckpointTable),
        ("engine", EngineTable),
        ("wishes", WishesTable),
        ("gateway", GatewayTable),
        ("restart", RestartTable),
    ):
        expected |= {f"{table}.{name}" for name in model.model_fields if name != "env"}
    assert expected <= keys


def test_a_secret_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    value = told(write(tmp_path))["secrets.hub"].value
    assert value == "(not usable, from env:HF_TOKEN: the variable HF_TOKEN is not set)"
    (tmp_path / "token").write_text("hunter2")
    path = write(tmp_path, changed("env:HF_TOKEN", "file:token"))
    (tmp_path / "token").chmod(0o644)
    assert f"from file:{tmp_path}/token: " in str(told(path)["secrets.hub"].value)
    assert "has mode 0644" in str(told(path)["secrets.hub"].value)
    (tmp_path / "token").chmod(0o600)
    assert told(path)["secrets.hub"].value == f"(set, from file:{tmp_path}/token)"


def test_a_plan_is_made_from_the_file_alone(tmp_path: Path) -> None:
    source = read_source(write(tmp_path, changed('margin = "1GiB"', 'margin = "1GiB"\ntp_size = 2')))
    best = plan_fleet(source).best
    assert (best.layout.engine, best.layout.tp_size, best.layout.max_model_len) == ("vllm", 2, 131072)
    assert [budget.node for budget in best.budgets] == ["spark-1", "spark-2"]
    with pytest.raises(ConfigError, match=r"checkpoint.model is 'v4.1-flsh', neither") as raised:
        inventory_for(read_source(tmp_path / "fleet.toml", ["checkpoint.model=v4.1-flsh"]).spec)
    assert "did you mean 'v4.1-flash'?" in str(raised.value.hint)


def test_nodes_that_may_be_this_machine_share_its_memory(tmp_path: Path) -> None:
    text = FULL.replace('kind = "spark"', 'kind = "local"').replace('available = "108GiB"\n', "")
    cluster = machines(read_source(write(tmp_path, text)))
    total = sum(node.available_bytes for node in cluster.nodes)
    assert total <= cluster.kind.total_bytes
    assert (cluster.num_devices, cluster.kind.arch) == (2, "cpu")


ENV = """\
# of a recipe
export WORKER_HOSTS="me@spark-2 spark-3:2222"
WORKER_IPS='10.0.22.2,10.0.22.3'
MASTER_ADDR=10.0.22.1
NCCL_IB_HCA=rocep1s0f1
NCCL_IB_GID_INDEX=3
HF_CACHE=/data/hf cache
WORKER_HF_CACHE="/srv/\\$odd"
CONTEXT_LENGTH=262144  # tokens
MAX_RUNNING_REQUESTS=4
TP_SIZE=3
MEM_FRACTION_STATIC=0.8
VLLM_PORT=8888
DSPARK_VLLM_IMAGE=some/image:1
DSPARK_REVISION=9e165c30e2704aec5d9d593cce3eebd58bbef1cb
API_KEY=hunter2
HF_TOKEN=hunter2
WORKER_DIR=$HOME/x
SOMETHING=1
"""


def test_a_recipes_env_becomes_a_fleet_and_every_other_variable_is_named(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_bytes(b"\xef\xbb\xbf" + ENV.replace("\n", "\r\n").encode())
    imported = import_env(path, Draft("desk", ()))
    draft = imported.draft
    assert [(node.address, node.user, node.port, node.fabric) for node in draft.nodes] == [
        ("local", None, None, ("10.0.22.1",)),
        ("spark-2", "me", None, ("10.0.22.2",)),
        ("spark-3", None, 2222, ("10.0.22.3",)),
    ]
    assert (draft.checkpoint, [node.checkpoint for node in draft.nodes]) == (
        "/data/hf cache",
        [None, "/srv/$odd", "/srv/$odd"],
    )
    assert dict(draft.wishes) == {"max_model_len": 262144, "max_num_seqs": 4, "tp_size": 3, "fraction": 0.8}
    assert dict(draft.gateway) == {"port": 8888}
    assert dict(draft.secrets) == {"hf_token": "env:HF_TOKEN"}
    taken = {"WORKER_HOSTS", "WORKER_IPS", "MASTER_ADDR", "HF_CACHE", "WORKER_HF_CACHE", "VLLM_PORT"}
    assert dict(draft.env) == {"NCCL_IB_HCA": "rocep1s0f1"}
    assert (draft.image, draft.revision) == ("some/image:1", "9e165c30e2704aec5d9d593cce3eebd58bbef1cb")
    assert "allow_tag = true" in fleet_text(draft)
    taken |= {
        "NCCL_IB_HCA",
        "DSPARK_VLLM_IMAGE",
        "DSPARK_REVISION",
        "CONTEXT_LENGTH",
        "MAX_RUNNING_REQUESTS",
        "TP_SIZE",
        "MEM_FRACTION_STATIC",
    }
    everything = {line.removeprefix("export ").partition("=")[0] for line in ENV.splitlines() if "=" in line}
    assert {name for name, _ in imported.ignored} == everything - taken
    assert "hunter2" not in str(imported)


def test_recipes_of_two_nodes_and_numbered_workers(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("MASTER_ADDR=10.0.0.1\nWORKER2_IP=10.0.0.3\nWORKER1_IP=10.0.0.2\n")
    nodes = import_env(path, Draft("desk", ())).draft.nodes
    assert [node.address for node in nodes] == ["local", "10.0.0.2", "10.0.0.3"]
    path.write_text("MASTER_ADDR=10.0.0.1\nWORKER_HOST=10.0.0.2\n")
    assert [node.address for node in import_env(path, Draft("desk", ())).draft.nodes] == ["local", "10.0.0.2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "MASTER_ADDR=a\nWORKER_HOSTS='a b'\nWORKER_IPS=10.0.0.2\n",
            "2 workers, a b, and 1 addresses, 10.0.0.2",
        ),
        ("WORKER_HOST=a\n", "does not say the head's address"),
        ("MASTER_ADDR=a\n", "names no worker"),
        ("MASTER_ADDR=$HEAD\nWORKER_HOST=a\n", "does not say the head's address"),
        ("MASTER_ADDR=a\nWORKER_HOST=b\nTP_SIZE=two\n", "TP_SIZE is 'two', no number"),
        ("MASTER_ADDR=a\nWORKER_HOST=b\nVLLM_PORT=x\n", "VLLM_PORT is 'x', no port"),
        ("MASTER_ADDR=a\nWORKER_HOST=b\nCONTEXT_LENGTH=1\nMAX_MODEL_LEN=2\n", "another variable says 1"),
        ("hunter2\n", ":1 is no NAME=VALUE"),
    ],
)
def test_an_env_that_contradicts_itself_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / ".env"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        import_env(path, Draft("desk", ()))
    assert said in raised.value.message
    assert "hunter2" not in str(raised.value)
