"""A fleet.toml with everything in it, a launch, and the facts of a Spark, for tests that change one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from deskfleet.fleet.facts import Address, Gid, Gpu, NetDevice, NodeFacts, RdmaDevice, RdmaPort
from deskfleet.fleet.launch import Container, LaunchSpec, Mount, RankLaunch

DIGEST = "registry.example/vllm@sha256:" + "a1" * 32

FULL = f"""\
name = "desk"
share = "nfs"

[paths]
checkpoint = "/srv/models/v4.1 flash"
cache = "/var/cache/deskfleet"

[[nodes]]
name = "spark-1"
address = "local"
fabric = ["10.0.22.1", "10.0.23.1"]
kind = "spark"
available = "108GiB"

[[nodes]]
name = "spark-2"
address = "spark-2.lan"
user = "me"
port = 2222
identity = "keys/id"
fabric = [
  "10.0.22.2", # the first port
]
kind = "spark"

[nodes.paths]
cache = "/home/me/it's \\"$HOME\\" ü"

[checkpoint]
model = "v4.1-flash"
revision = "fb2764a5cf321eaa5070ca8f9e892818f477c16d"
origin = "https://models.example/deepseek-ai/DeepSeek-V4.1-Flash/"

[engine]
name = "vllm"
image = "{DIGEST}"
args = ["--note", "two words, $PATH and 'quotes'"]
env = {{ NCCL_DEBUG = "INFO", HF_TOKEN = "${{secret:hub}}" }}
mounts = ["/opt/certs:/etc/ssl/certs:ro"]

[wishes]
max_model_len = 131072
margin = "1GiB"

[gateway]
port = 8410
keys = "keys.toml"

[secrets]
hub = "env:HF_TOKEN"
"""


def write(directory: Path, text: str = FULL, name: str = "fleet.toml") -> Path:
    """Put a fleet's file into `directory`."""
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def changed(old: str, new: str, text: str = FULL) -> str:
    """The text with one place changed."""
    assert text.count(old) == 1, old
    return text.replace(old, new)


HARSH = """a "b" 'c' $HOME ${X} $(id) %h %% \\ {y} # ü, : - é 日本 \U0001f600"""


def launch_of(value: str = HARSH, *, engine: str = "vllm") -> LaunchSpec:
    """Two ranks whose arguments, variables and paths hold `value`."""
    ranks = tuple(
        RankLaunch(
            rank=number,
            node=f"spark-{number + 1}",
            container=f"deskfleet-desk-{number}",
            image=DIGEST,
            argv=("vllm", "serve", "/model", "--note", value, "--nnodes", "2", "--node-rank", str(number)),
            env={
                "NOTE": value,
                "HF_TOKEN": "${secret:hub}",
                "URL": "x-${secret:hub}$5",
                "RANK_IP": f"10.0.22.{number}",
            },
            box=Container(
                mounts=(
                    Mount(source=f"/srv/{value}", target="/model"),
                    Mount(source="/c", target="/c", read_only=False),
                ),
                devices=("/dev/infiniband",),
                has_gpus=True,
                memory_bytes=112 << 30,
                labels={"deskfleet.fleet": "desk", "deskfleet.launch": "id"},
            ),
        )
        for number in range(2)
    )
    return LaunchSpec(
        format=1,
        fleet="desk",
        launch_id="id",
        engine=engine,
        model="v4.1-flash",
        revision=None,
        max_model_len=131072,
        endpoint="http://10.0.22.1:8100",
        ranks=ranks,
        milestones=(),
        expected=(),
        secrets=("hub",),
    )


def facts(node: str, **values: Any) -> NodeFacts:
    """Facts of a node of which nothing is known but `values`."""
    blank: dict[str, Any] = {
        field.name: None
        for field in msgspec.structs.fields(NodeFacts)
        if field.required and field.name != "node"
    }
    blank |= {"memory_limits": {}, "image_is_absent": False, "net": (), "rdma": (), "unknown": {}}
    return NodeFacts(**{**blank, "node": node, **values})


def spark(node: str, number: int, home: str) -> NodeFacts:
    """A Spark with two ports: a switch's on 10.0.22.x, and a slow network that all of them share."""

    def device(name: str, address: str, speed: int, state: str = "up") -> NetDevice:
        given = (Address(text=address, is_permanent=True),)
        return NetDevice(
            name=name, mtu=9000, state=state, speed_mbps=speed, addresses=given, pci=None, lanes=None,
            max_lanes=None, lane_speed=None,
        )  # fmt: skip

    gids = (Gid(index=3, value=f"::ffff:10.0.22.{number}", type="RoCE v2", net_device="enp1s0f1np1"),)
    port = RdmaPort(
        number=1, state="ACTIVE", physical_state="LinkUp", link_layer="Ethernet", rate_gbps=200, gids=gids
    )
    gpu = Gpu(
        index=0, name="NVIDIA GB10", driver="580.95", memory_bytes=None, used_bytes=None, compute_capability="12.1",
        clock_mhz=None, max_clock_mhz=None, throttle_mask=None, temperature_c=None, vbios=None,
    )  # fmt: skip
    return facts(
        node,
        arch="aarch64",
        uid=1000,
        home=home,
        gpus=(gpu,),
        net=(
            device("enP7s7", f"192.168.1.{number}/24", 10_000),
            device("enp1s0f1np1", f"10.0.22.{number}/24", 200_000),
            device("enp1s0f0np0", f"10.0.23.{number}/24", 200_000, "down"),
        ),
        rdma=(RdmaDevice(name="rocep1s0f1", pci=None, firmware=None, board=None, ports=(port,)),),
    )
