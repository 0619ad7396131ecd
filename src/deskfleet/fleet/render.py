"""From a plan, a fleet and what its nodes are like now to a `LaunchSpec`, or to every reason why not. Pure.

    MemoryPlan + FleetSpec + Fabric + NodeFacts -> Situation -> EngineLauncher -> LaunchSpec

Owns how a rank is boxed: names, labels, mounts, devices, limits. Which process runs in the box is the engine's file's;
no engine is known here by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deskfleet.errors import ConfigError, DoesNotFit
from deskfleet.fleet.engines.contract import CACHE_PATH, CHECKPOINT_PATH, ENGRAM_PATH, Process, Situation
from deskfleet.fleet.engines.registry import LAUNCHERS
from deskfleet.fleet.fabric import NodeFabric
from deskfleet.fleet.facts import NodeFacts
from deskfleet.fleet.launch import (
    FORMAT,
    Container,
    LaunchSpec,
    Mount,
    RankLaunch,
    secret_names,
)
from deskfleet.fleet.spec import FleetSpec, is_by_digest
from deskfleet.planner.engines.contract import Refusal
from deskfleet.planner.plan import MemoryPlan

FLEET_LABEL, LAUNCH_LABEL, RANK_LABEL = "deskfleet.fleet", "deskfleet.launch", "deskfleet.rank"
"""By these our containers are known. Containers without our fleet's label are never touched."""

INFINIBAND = "/dev/infiniband"

OOM_SCORE_ADJ = 500
"""When memory runs out the kernel kills a rank before the system's own services, and a lost rank is noticed (S1-10)."""


def container_name(fleet: str, rank: int) -> str:
    """The container of a rank."""
    return f"deskfleet-{fleet}-{rank}"


def render_launch(
    plan: MemoryPlan,
    spec: FleetSpec,
    fabric: Mapping[str, NodeFabric],
    facts: Mapping[str, NodeFacts],
    *,
    launch_id: str,
    image: str | None = None,
    connect: str | None = None,
) -> LaunchSpec:
    """Say exactly what will run where. `image` is that of the file unless one was built.

    Raises DoesNotFit when the plan does not, and ConfigError with every reason for which the launch is refused.
    """
    if not plan.fits:
        raise _unfit(plan)
    situation = Situation(plan, spec, fabric, facts, launch_id, image or spec.engine.image or "", connect)
    refusals = launch_refusals(situation)
    if refusals:
        raise _refused(refusals)
    launcher = LAUNCHERS[plan.layout.engine]
    processes = [launcher.process(situation, rank) for rank in range(plan.layout.tp_size)]
    ranks = tuple(_boxed(situation, rank, process) for rank, process in enumerate(processes))
    return LaunchSpec(
        format=FORMAT,
        fleet=spec.name,
        launch_id=launch_id,
        engine=plan.layout.engine,
        model=situation.served_name,
        revision=spec.checkpoint.revision,
        max_model_len=plan.layout.max_model_len,
        endpoint=launcher.endpoint(situation),
        ranks=ranks,
        milestones=launcher.milestones(situation),
        expected=launcher.receipts(situation),
        adapter=launcher.adapter(situation),
        secrets=secret_names(*(value for rank in ranks for value in rank.env.values())),
        warnings=tuple(dict.fromkeys(text for process in processes for text in process.warnings)),
    )


def launch_refusals(at: Situation) -> list[Refusal]:
    """Every reason why this must not be started, each once: the plan's, the fleet's, the engine's, the arguments'."""
    launcher = LAUNCHERS[at.plan.layout.engine]
    found = [*at.plan.refusals, *_fleet_refusals(at), *launcher.refusals(at)]
    if all(node.name in at.fabric for node in at.nodes):
        for rank in range(at.tp_size):
            found += launcher.process(at, rank).refusals
    return list(dict.fromkeys(found))


def _fleet_refusals(at: Situation) -> Iterator[Refusal]:
    spec = at.spec
    if spec.engine.name != at.plan.layout.engine:
        yield Refusal(
            "plan",
            f"the plan is for {at.plan.layout.engine}, and [engine] name is {spec.engine.name}",
            "plan again for this fleet",
        )
    if not at.image:
        yield Refusal(
            "image", "there is no image to run", "give [engine] image by digest, or run deskfleet fleet build"
        )
    elif not (is_by_digest(at.image) or spec.engine.build or spec.engine.allow_tag):
        yield Refusal(
            "image",
            f"{at.image} is a tag, which may be another image on each node and tomorrow",
            "give name@sha256:..., or [engine] allow_tag = true",
        )
    for node in at.nodes:
        known = at.fabric.get(node.name)
        if known is None:
            yield Refusal(
                "fabric", f"nothing is known of the network of {node.name}", "run deskfleet fleet doctor"
            )
        elif known.refusal is not None and at.tp_size > 1:
            yield Refusal("fabric", f"{node.name}: {known.refusal}", "run deskfleet fleet doctor")
    for text in spec.engine.mounts:
        mount = _parse_mount(text)
        if mount is None:
            hint = "write /there:/in/container or /there:/in/container:ro"
            yield Refusal("mounts", f"[engine] mounts have {text!r}", hint)
        elif mount.target.rstrip("/") in (CHECKPOINT_PATH, ENGRAM_PATH, CACHE_PATH):
            yield Refusal(
                "mounts", f"[engine] mounts have {text!r}, and the launch mounts there", "use another place"
            )


def _unfit(plan: MemoryPlan) -> DoesNotFit:
    if plan.refusals:
        first = plan.refusals[0]
        return DoesNotFit(f"{first.rule}: {first.message}", hint=first.hint)
    tightest = plan.tightest
    return DoesNotFit(
        f"rank {tightest.rank} lacks {-tightest.margin_bytes:,} bytes of memory",
        hint="deskfleet plan says what would fit",
    )


def _refused(refusals: list[Refusal]) -> ConfigError:
    if len(refusals) == 1:
        return ConfigError(f"not started: {refusals[0].message}", hint=refusals[0].hint)
    lines = [f"\n  {refusal.message}; {refusal.hint}" for refusal in refusals]
    return ConfigError(f"not started, for {len(refusals)} reasons:{''.join(lines)}")


def _boxed(at: Situation, rank: int, process: Process) -> RankLaunch:
    node = at.node(rank)
    cache = Mount(source=node.paths.cache, target=CACHE_PATH, read_only=False)
    own = [mount for text in at.spec.engine.mounts if (mount := _parse_mount(text)) is not None]
    has_accelerator = at.arch != "cpu"
    planned = at.plan.cluster.node_of(rank)
    return RankLaunch(
        rank=rank,
        node=node.name,
        container=container_name(at.spec.name, rank),
        image=at.image,
        argv=process.argv,
        env=dict(process.env),
        box=Container(
            mounts=(*process.mounts, cache, *own),
            devices=(INFINIBAND,) if at.fabric_of(rank).hca is not None and at.tp_size > 1 else (),
            has_gpus=has_accelerator,
            # What the driver allocates is not counted by it, so it does not replace the watchdog: it stops an engine's
            # own processes from taking the machine with them.
            memory_bytes=planned.available_bytes if has_accelerator and planned.kind.is_unified else None,
            oom_score_adj=OOM_SCORE_ADJ,
            labels={FLEET_LABEL: at.spec.name, LAUNCH_LABEL: at.launch_id, RANK_LABEL: str(rank)},
        ),
    )


def _parse_mount(text: str) -> Mount | None:
    """Read `/there:/in/container[:ro]`; None for anything else."""
    parts = text.split(":")
    read_only = len(parts) == 3 and parts[2] == "ro"
    if len(parts) not in (2, 3) or (len(parts) == 3 and parts[2] not in ("ro", "rw")):
        return None
    if not all(part.startswith("/") for part in parts[:2]):
        return None
    return Mount(source=parts[0], target=parts[1], read_only=read_only)


__all__ = [
    "FLEET_LABEL",
    "LAUNCH_LABEL",
    "RANK_LABEL",
    "container_name",
    "launch_refusals",
    "render_launch",
]
