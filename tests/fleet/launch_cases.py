"""The situations of the published recipes, rendered from fleet files as users write them, and their reviewed dry runs.

    .venv/bin/python tests/fleet/launch_cases.py --update

writes tests/fleet/golden anew. Read the difference before you keep it: these texts are what runs on people's machines.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deskfleet.fleet.commands import dry_run_text
from deskfleet.fleet.fabric import NodeFabric
from deskfleet.fleet.facts import Directory, Image, NodeFacts
from deskfleet.fleet.launch import LaunchSpec
from deskfleet.fleet.planning import plan_fleet
from deskfleet.fleet.render import render_launch
from deskfleet.fleet.spec import FleetSpec, NodeSpec, read_source
from deskfleet.planner.plan import MemoryPlan

GOLDEN = Path(__file__).parent / "golden"
DIGEST = "sha256:" + "0123456789abcdef" * 4
REVISION = "fb2764a5cf321eaa5070ca8f9e892818f477c16d"

# Four machines whose devices, interfaces and GID tables are not alike: as they come (G-32).
_DEVICES = (
    ("rocep1s0f1", "enp1s0f1np1", 3),
    ("rocep1s0f0", "enp1s0f0np0", 5),
    ("rocep1s0f1", "enp1s0f1np1", 3),
    ("roceP2p1s0f1", "enP2p1s0f1np1", 4),
)


@dataclass(frozen=True)
class Case:
    """One situation. `wishes` and `engine` are lines of the file, `provides` what the image says of itself."""

    nodes: int
    model: str
    engine: str
    wishes: str
    extra: str = ""
    provides: str = "adapter"
    image: str = f"example.org/desk/engine@{DIGEST}"
    engram_files: tuple[str, ...] = ("engram.json",)
    name: str = "desk"
    kind: str = "spark"
    head: str = "local"
    checkpoint: str = "/srv/models/flash"
    cache: str = "/var/cache/deskfleet"
    available: Mapping[int, str] = field(default_factory=dict)
    tail: str = ""

    @property
    def text(self) -> str:
        """The fleet.toml."""
        tables = [
            f'name = "{self.name}"\n[checkpoint]\nmodel = "{self.model}"\nrevision = "{REVISION}"',
            f'[engine]\nname = "{self.engine}"\nimage = "{self.image}"\n{self.extra}',
            f"[wishes]\n{self.wishes}",
            f'[paths]\ncheckpoint = "{self.checkpoint}"\ncache = "{self.cache}"',
        ]
        for number in range(self.nodes):
            address = self.head if number == 0 else f"192.168.1.{11 + number}"
            tables.append(
                f'[[nodes]]\nname = "spark-{number}"\nkind = "{self.kind}"\naddress = "{address}"\n'
                f'fabric = ["10.0.22.{number + 1}"]'
                + (f'\navailable = "{self.available[number]}"' if number in self.available else "")
            )
        return "\n".join([*tables, self.tail]) + "\n"

    def inputs(self) -> tuple[MemoryPlan, FleetSpec, dict[str, NodeFabric], dict[str, NodeFacts]]:
        """What `render_launch` takes."""
        plan, spec = _planned(self.text)
        fabric = {node.name: fabric_of(node, number) for number, node in enumerate(spec.nodes)}
        return plan, spec, fabric, {node.name: self._facts(node) for node in spec.nodes}

    def render(self) -> LaunchSpec:
        """The launch, or the refusal."""
        return render_launch(*self.inputs(), launch_id="20261130-1", connect="10.0.22.1:7100")

    def _facts(self, node: NodeSpec) -> NodeFacts:
        unknown: dict[str, Any] = dict.fromkeys(NodeFacts.__struct_fields__)
        labels = {"deskfleet.provides": self.provides} if self.provides else {}
        image = Image(id=DIGEST, digests=(), layers=(), arch="arm64", labels=labels, env={})
        files = dict.fromkeys(self.engram_files, 1)
        engram = Directory(
            role="engram",
            kind="directory",
            is_writable=True,
            file_system="ext4",
            free_bytes=1 << 40,
            files=files,
        )
        told = {
            "node": node.name,
            "image": image,
            "directories": (engram,),
            "net": (),
            "rdma": (),
            "unknown": {},
        }
        return NodeFacts(**(unknown | told))


@cache
def _planned(text: str) -> tuple[MemoryPlan, FleetSpec]:
    """The plan of a file, and what the file means."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "fleet.toml"
        path.write_text(text)
        source = read_source(path)
    return plan_fleet(source).best, source.spec


def fabric_of(node: NodeSpec, number: int) -> NodeFabric:
    """What is found of the network of the node of that number."""
    device, interface, index = _DEVICES[number % len(_DEVICES)]
    return NodeFabric(
        node=node.name,
        hca=f"={device}:1",
        gid_index=index,
        socket_interface=interface,
        rendezvous=node.fabric[0],
        ports=(),
        idle=(),
        unusable={},
        refusal=None,
        reasons=(),
    )


CASES: Mapping[str, Case] = {
    # Seed 3: two Sparks, EXL3 2.9 bpw.
    "2-nodes-exl3": Case(
        2,
        "v4.1-flash-exl3-2.9",
        "exl3",
        "max_model_len = 600000\nmax_num_seqs = 2\nchunk_tokens = 1536\nnum_drafts = 3",
        image=f"example.org/desk/exl3@{DIGEST}",
        provides="",
        engram_files=("config.json", "model.safetensors.index.json", "model-00047-of-00048.safetensors"),
    ),
    # Seed 4: two Sparks, V4-Flash with DSpark.
    "2-nodes-vllm-v4": Case(
        2,
        "v4-flash-dspark",
        "vllm",
        "max_model_len = 1048576\nmax_num_seqs = 6\nchunk_tokens = 8192",
        image=f"vllm/vllm-openai@{DIGEST}",
        provides="",
    ),
    # Seed 2: three Sparks, SGLang; its image pads heads.
    "3-nodes-sglang": Case(
        3,
        "v4.1-flash",
        "sglang",
        "max_model_len = 208000\nkv_tokens = 400000\nmax_num_seqs = 4\nchunk_tokens = 768\nhas_images = false",
        provides="adapter,head-padding",
    ),
    # Seed 1: four Sparks, vLLM, without its context parallelism.
    "4-nodes-vllm": Case(
        4,
        "v4.1-flash",
        "vllm",
        "max_model_len = 500000\nkv_tokens = 900000\nmax_num_seqs = 8\nchunk_tokens = 8192",
    ),
    # Seed 2's other profile: four Sparks, SGLang, a million tokens.
    "4-nodes-sglang": Case(
        4,
        "v4.1-flash",
        "sglang",
        "max_model_len = 1048576\nkv_tokens = 8000000\nmax_num_seqs = 16\nchunk_tokens = 4096\n"
        "fraction = 0.8\nhas_bounded_indexer = true",
        provides="adapter, bounded-indexer",
    ),
}


def dry_run(name: str) -> str:
    """The dry run of a case."""
    return dry_run_text(CASES[name].render())


def main() -> None:
    """Write every text, or say how."""
    if sys.argv[1:] != ["--update"]:
        sys.exit(__doc__)
    for name in CASES:
        (GOLDEN / f"{name}.txt").write_text(dry_run(name))


if __name__ == "__main__":
    main()

__all__ = ["CASES", "DIGEST", "GOLDEN", "Case", "dry_run", "fabric_of"]
